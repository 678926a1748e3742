//! What the QPs carry: B26. Both ends are the board's, and connected to each other.

use starverbs_core::wire::headers::Feth;
use starverbs_core::{AvId, FlushLevel, Placement};
use starverbs_queues::board::*;
use starverbs_queues::{Cqe, SendOp, SendWqe, WcFlags, WcOpcode, WcStatus};
use zerocopy::IntoBytes;

use crate::bench::{Bench, Pair};
use crate::fault::{Tested, expect};
use crate::qp::{QKEY, RC, RawQp, UC, UD, address, data, request};
use crate::raw::{DATA, QP_BYTES, QPS, RawDriver};

/// Bytes of the GRH before a datagram.
const GRH: usize = 40;
/// Where what arrives lies among the bytes for messages.
const FAR: usize = 0x4_0000;

pub(super) fn operations(bench: &mut Bench) -> Tested {
    let mut pair = bench.pair()?;
    messages(&mut pair, "RC", 100_000)?;
    one_sided(&mut pair)?;
    words(&mut pair)?;
    unreliable(&mut pair)?;
    datagrams(&mut pair)
}

/// Takes two completions: the one of `wr_id`, and the other.
fn two(raw: &mut RawDriver, wr_id: u64) -> Tested<(Cqe, Cqe)> {
    let came = [raw.completion()?, raw.completion()?];
    Ok(if came[0].wr_id == wr_id { (came[0], came[1]) } else { (came[1], came[0]) })
}

/// Bytes that differ from place to place.
fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|n| (n * 31) as u8 ^ (n >> 8) as u8 ^ seed).collect()
}

/// Messages of no bytes, of some, and of more than a packet's; inline; with immediate data.
fn messages(pair: &mut Pair, kind: &str, longest: usize) -> Tested {
    let Pair { raw, key, a, b, .. } = pair;
    for (n, len) in [0, 1, 1024, 1025, longest].into_iter().enumerate() {
        let what = format!("{kind} SEND of {len} bytes");
        let sent = pattern(len, n as u8);
        raw.put(DATA, &sent);
        raw.put(DATA + FAR, &vec![0; len + 1]);
        raw.post_recv(b, 1, data(FAR, 200_000, *key));
        raw.put_send(a, request(SendOp::Send, 2), data(0, len as u32, *key));
        raw.doorbell(a)?;
        let (got, done) = two(raw, 1)?;
        expect(&format!("{what}: status"), [done.status, got.status], [WcStatus::Success; 2])?;
        expect(&format!("{what}: op-code"), [done.opcode, got.opcode], [WcOpcode::Send, WcOpcode::Recv])?;
        expect(&format!("{what}: length and QPs"), (got.byte_len, got.qpn), (len as u32, b.qpn))?;
        same_bytes(raw, &what, &sent)?;
    }
    raw.post_recv(b, 3, data(FAR, 64, *key));
    let imm = SendWqe { imm: 0x0403_0201, ..request(SendOp::SendImm, 4) };
    raw.put_inline(a, imm, b"inline message");
    raw.doorbell(a)?;
    let (got, _) = two(raw, 3)?;
    let what = format!("{kind} SEND with immediate");
    let said = (got.flags.contains(WcFlags::WITH_IMM), got.imm, got.byte_len);
    expect(&format!("{what}: flag, data, length"), said, (true, 0x0403_0201, 14))?;
    same_bytes(raw, &format!("{what}, inline"), b"inline message")
}

fn same_bytes(raw: &RawDriver, what: &str, sent: &[u8]) -> Tested {
    let came = raw.bytes(DATA + FAR, sent.len());
    let wrong = came.iter().zip(sent).position(|(came, sent)| came != sent);
    expect(&format!("{what}: a byte that is another"), wrong, None)
}

fn one_sided(pair: &mut Pair) -> Tested {
    let Pair { raw, key, a, b, .. } = pair;
    const LEN: usize = 20_000;
    let sent = pattern(LEN, 9);
    raw.put(DATA, &sent);
    let to = |op, wr_id| SendWqe { remote_addr: address(FAR), rkey: *key, ..request(op, wr_id) };
    raw.put_send(a, to(SendOp::Write, 1), data(0, LEN as u32, *key));
    raw.put_send(a, to(SendOp::Read, 2), data(0x8_0000, LEN as u32, *key));
    raw.doorbell(a)?;
    let done = [raw.completion()?, raw.completion()?];
    let said = done.map(|cqe| (cqe.wr_id, cqe.status, cqe.opcode));
    let wanted = [(1, WcStatus::Success, WcOpcode::RdmaWrite), (2, WcStatus::Success, WcOpcode::RdmaRead)];
    expect("completions of a WRITE and a READ", said, wanted)?;
    same_bytes(raw, "RDMA WRITE", &sent)?;
    expect("RDMA READ: length", done[1].byte_len, LEN as u32)?;
    expect("RDMA READ: bytes", raw.bytes(DATA + 0x8_0000, LEN) == sent, true)?;
    raw.post_recv(b, 3, data(FAR, 64, *key));
    let imm = SendWqe { imm: 7, ..to(SendOp::WriteImm, 4) };
    raw.put_send(a, imm, data(0, 100, *key));
    raw.doorbell(a)?;
    let (got, done) = two(raw, 3)?;
    let said = (done.status, got.status, got.opcode, got.imm, got.byte_len);
    let wanted = (WcStatus::Success, WcStatus::Success, WcOpcode::RecvRdmaWithImm, 7, 100);
    expect("WRITE with immediate", said, wanted)
}

/// Atomics, ATOMIC WRITE, FLUSH.
fn words(pair: &mut Pair) -> Tested {
    let Pair { raw, key, a, .. } = pair;
    raw.put(DATA + FAR, &40u64.to_le_bytes());
    let at = |op| SendWqe { remote_addr: address(FAR), rkey: *key, ..request(op, 1) };
    let one = |raw: &mut RawDriver, a: &mut RawQp, wqe: SendWqe| -> Tested<(u64, u64)> {
        raw.put_send(a, wqe, data(0, 8, *key));
        raw.doorbell(a)?;
        let cqe = raw.completion()?;
        expect(&format!("{:?}: status", wqe.op), cqe.status, WcStatus::Success)?;
        Ok((raw.get(DATA), raw.get(DATA + FAR)))
    };
    let done = one(raw, a, SendWqe { compare_add: 2, ..at(SendOp::FetchAdd) })?;
    expect("fetch and add: what was there, what is", done, (40, 42))?;
    let done = one(raw, a, SendWqe { compare_add: 42, swap: 7, ..at(SendOp::CmpSwap) })?;
    expect("compare and swap that fits", done, (42, 7))?;
    let done = one(raw, a, SendWqe { compare_add: 42, swap: 9, ..at(SendOp::CmpSwap) })?;
    expect("compare and swap that does not", done, (7, 7))?;
    raw.put(DATA, b"eight ch");
    let (_, there) = one(raw, a, at(SendOp::AtomicWrite))?;
    expect("ATOMIC WRITE", there.to_le_bytes(), *b"eight ch")?;
    let level = Feth::word(Placement::GLOBAL, FlushLevel::Range);
    raw.put_inline(a, SendWqe { imm: level, compare_add: 8, ..at(SendOp::Flush) }, &[]);
    raw.doorbell(a)?;
    expect("FLUSH: status", raw.completion()?.status, WcStatus::Success)
}

/// Two QPs of another type, as numbers 2 and 3 of the driver.
fn qps(pair: &mut Pair, kind: u8) -> Tested<[RawQp; 2]> {
    let mut made = [pair.a, pair.b];
    for (n, qp) in made.iter_mut().enumerate() {
        let create = RawDriver::create_qp(pair.pd, pair.cq, QPS + (n + 2) * QP_BYTES);
        *qp = pair.raw.qp_of(n + 2, &CreateQp { kind, ..create })?;
    }
    pair.raw.connect_as(made[0], made[1].qpn, kind)?;
    pair.raw.connect_as(made[1], made[0].qpn, kind)?;
    Ok(made)
}

fn unreliable(pair: &mut Pair) -> Tested {
    let [a, b] = qps(pair, UC)?;
    let reliable = (std::mem::replace(&mut pair.a, a), std::mem::replace(&mut pair.b, b));
    /* no more than any receive buffer on the way holds: what is lost is lost */
    messages(pair, "UC", 10_000)?;
    let Pair { raw, key, a, b, .. } = pair;
    raw.put(DATA, &pattern(3000, 4));
    raw.put(DATA + FAR, &[0; 3000]);
    let write = SendWqe { remote_addr: address(FAR), rkey: *key, ..request(SendOp::Write, 1) };
    raw.put_send(a, write, data(0, 3000, *key));
    raw.doorbell(a)?;
    expect("UC WRITE: status", raw.completion()?.status, WcStatus::Success)?;
    raw.wait("UC WRITE: the last byte", |raw| {
        Ok((raw.bytes(DATA + FAR + 2999, 1) == pattern(3000, 4)[2999..]).then_some(()))
    })?;
    same_bytes(raw, "UC WRITE", &pattern(3000, 4))?;
    for qpn in [a.qpn, b.qpn] {
        raw.done(OP_DESTROY_QP, qpn)?;
    }
    (pair.a, pair.b) = reliable;
    expect("RC is served beside UC", pair.raw.state(pair.a)?, crate::qp::state::RTS)
}

fn datagrams(pair: &mut Pair) -> Tested {
    let [mut a, mut b] = qps(pair, UD)?;
    let Pair { raw, pd, key, .. } = pair;
    let gid = raw.gid()?;
    let address = Address { dgid: gid, sgid: gid, hop_limit: 64, ..Address::default() };
    let ah = raw.number(OP_CREATE_AH, AddressHandle { pd: *pd, address }.as_bytes())?.number;
    raw.put(DATA, b"hello datagram");
    raw.post_recv(&mut b, 1, data(FAR, 2000, *key));
    let to = SendWqe { av: AvId(ah), remote_qpn: b.qpn, qkey: QKEY, ..request(SendOp::Send, 2) };
    raw.put_send(&mut a, to, data(0, 14, *key));
    raw.doorbell(&a)?;
    let (got, done) = two(raw, 1)?;
    expect("UD: status", [got.status, done.status], [WcStatus::Success; 2])?;
    let said = (got.byte_len, got.src_qp, got.flags.contains(WcFlags::GRH));
    expect("UD: length, source and GRH", said, (GRH as u32 + 14, a.qpn, true))?;
    expect("UD: bytes", raw.bytes(DATA + FAR + GRH, 14), b"hello datagram".to_vec())?;
    /* another Q_Key: nothing arrives; the next one does */
    raw.post_recv(&mut b, 3, data(FAR, 2000, *key));
    raw.put_send(&mut a, SendWqe { wr_id: 4, qkey: QKEY + 1, ..to }, data(0, 14, *key));
    raw.put_send(&mut a, SendWqe { wr_id: 5, ..to }, data(0, 9, *key));
    raw.doorbell(&a)?;
    let mut came = [raw.completion()?, raw.completion()?, raw.completion()?];
    came.sort_by_key(|cqe| cqe.wr_id);
    let said = came.map(|cqe| (cqe.wr_id, cqe.status, if cqe.wr_id == 3 { cqe.byte_len } else { 0 }));
    let done = |wr_id| (wr_id, WcStatus::Success, 0);
    let wanted = [(3, WcStatus::Success, GRH as u32 + 9), done(4), done(5)];
    expect("UD with a Q_Key that is not the receiver's, then one with its", said, wanted)?;
    const { assert!(RC != UD) };
    Ok(())
}
