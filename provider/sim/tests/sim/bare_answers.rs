//! Answers without a record (StRoM): the receive's completion says how long they are, and one that fills
//! packets takes no other for its record.

use crate::common::rpc::{Echo, RpcPair};
use starverbs_core::strom::{Code, MAX_REPLY, RECORD_LEN, ReplyFlags};
use starverbs_core::{WcOpcode, WcStatus};
use starverbs_kernels::Get;
use starverbs_kernels::get::{Bucket, HashEntry, Params};
use zerocopy::IntoBytes;

const OP: u64 = 7;
const GET: u64 = 8;
/// The path MTU of a connection that nothing is said of.
const MTU: usize = 1024;

fn bare() -> ReplyFlags {
    ReplyFlags::IMM | ReplyFlags::BARE
}

/// Calls, and gives the answer's bytes, in front of where a record would be, and how many packets it took.
fn bytes(pair: &mut RpcPair, op: u64, params: &[u8]) -> (Vec<u8>, u32) {
    let sent = |pair: &RpcPair| pair.net.hosts[1].nic.query_qp(pair.qpn[1]).expect("it is there").sq_psn;
    let before = sent(pair);
    pair.post_recv(0, 9);
    let (addr, room) = pair.call_with(1, op, params, 4200, bare());
    pair.run();
    let mut done: Vec<_> = std::iter::from_fn(|| pair.cq[0].poll()).map(|(cqe, _)| cqe).collect();
    done.sort_by_key(|cqe| cqe.wr_id);
    let [asked, came] = done[..] else { panic!("{done:?}") };
    assert_eq!((asked.wr_id, asked.status), (1, WcStatus::Success));
    assert_eq!((came.wr_id, came.status, came.opcode), (9, WcStatus::Success, WcOpcode::RecvRdmaWithImm));
    assert_eq!(pair.answer((addr, room)), None, "no record");
    let end = room as usize - RECORD_LEN;
    let region = pair.net.hosts[0].env.memory.read(addr, room as usize);
    let data = region[end - came.byte_len as usize..end].to_vec();
    (data, sent(pair).get() - before.get())
}

#[test]
fn an_answer_that_fills_packets_takes_no_other() {
    let mut pair = RpcPair::quiet();
    pair.load(OP, Echo);
    pair.load(GET, Get);
    for len in [0, 1, 8, 16, 500] {
        let params = vec![len as u8; len];
        assert_eq!(bytes(&mut pair, OP, &params).0, params);
    }
    /* of a region, which is not copied */
    let (at, key) = pair.page[1];
    for len in [1, MTU, MTU + 1, 4 * MTU] {
        let value = vec![3; len];
        let bucket = Bucket { key: 7.into(), value: (at + 4096).into(), len: (len as u32).into() };
        let entry =
            HashEntry { buckets: [bucket, Bucket::default(), Bucket::default()], ..HashEntry::default() };
        pair.net.hosts[1].env.memory.write(at, entry.as_bytes());
        pair.net.hosts[1].env.memory.write(at + 4096, &value);
        let params = Params {
            table: at.into(),
            key: 7.into(),
            index: 0.into(),
            table_key: key.into(),
            value_key: key.into(),
            hops: 1.into(),
        };
        let (data, packets) = bytes(&mut pair, GET, params.as_bytes());
        assert!(data == value, "{len} bytes");
        assert_eq!(packets, len.div_ceil(MTU) as u32, "{len} bytes");
    }
}

/// What does not end well has a record, as others have; and so has what the requester has no room for.
#[test]
fn an_error_has_a_record() {
    let mut pair = RpcPair::quiet();
    pair.load(OP, Echo);
    for (op, params, room, code) in [
        (OP + 9, 0, 64, Code::NoKernel),
        (OP, 49, 64, Code::Overflow),
        (OP, MAX_REPLY / 8, 16, Code::Overflow),
    ] {
        pair.post_recv(0, 9);
        let at = pair.call_with(1, op, &vec![1; params], room, bare());
        pair.run();
        assert_eq!(pair.polled(0).len(), 2);
        assert_eq!(pair.answer(at).map(|(_, told, ..)| told), Some(code as u32));
    }
    /* alone the flag is none */
    let at = pair.call_with(1, OP, b"", 64, ReplyFlags::BARE);
    pair.run();
    assert_eq!((pair.polled(0), pair.answer(at)), (vec![(1, WcStatus::RemInvReqErr)], None));
}
