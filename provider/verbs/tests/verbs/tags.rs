//! Tag matching between two cards: eager messages, rendezvous, and what may not be done.

use crate::common::*;
use starverbs_core::tags::{MAX_TAG_SGE, MAX_TAGS, TaggedBuffer};
use starverbs_core::{QpType, Sge, TagMatch, WcFlags, WcOpcode, WcStatus};
use starverbs_verbs::{Pd, Qp, QpInit, RecvWr, Srq, TagChange, TagOp};

const EINVAL: i32 = 22;
const ENOMEM: i32 = 12;
const EAGER: u8 = 3;
const RENDEZVOUS: u8 = 1;

fn buffer(wr_id: u64, tag: u64, sge: Sge) -> TagChange {
    let mut sges = [Sge::default(); MAX_TAG_SGE];
    sges[0] = sge;
    TagChange::Add(TaggedBuffer { wr_id, tag, mask: u64::MAX, sges, num_sge: 1 })
}

fn change(srq: &Srq, change: TagChange) -> u32 {
    srq.change_tags(&TagOp { wr_id: 77, change, seen: Some(0), signaled: true }).unwrap()
}

/// A tag matching header at the front of a node's buffer.
fn header(node: &Node, op: u8, tag: u64) {
    node.fill(0, &[op, 0, 0, 0, 0, 0, 0, 9]);
    node.fill(8, &tag.to_be_bytes());
}

/// `a` sends, `b` matches.
fn matching() -> (Node, Node, Qp, Qp, Srq) {
    let (a, b) = Node::pair();
    let srq = Srq::create_tagged(&b.pd, &b.cq, 8, 8, 1, 1234).unwrap();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp_with_srq(&srq));
    connect(&a, &qa, &b, &qb);
    (a, b, qa, qb, srq)
}

#[test]
fn an_eager_message_goes_to_its_buffer() {
    let (a, b, qa, _qb, srq) = matching();
    change(&srq, buffer(5, 42, b.sge(100, 3000)));
    let added = b.completions(1)[0];
    assert_eq!((added.opcode, added.wr_id, added.flags), (WcOpcode::TmAdd, 77, WcFlags::empty()));
    header(&a, EAGER, 42);
    a.fill(16, b"right where it belongs");
    post(&qa, &send(1, &[a.sge(0, 16 + 2000)])).unwrap();
    a.completions(1);
    let got = b.completions(1)[0];
    assert_eq!((got.opcode, got.wr_id, got.status), (WcOpcode::TmRecv, 5, WcStatus::Success));
    let matched = Some(TagMatch { tag: 42, app_ctx: 9 });
    assert_eq!((got.tag(), got.flags.contains(WcFlags::TM_MATCH)), (matched, true));
    if !got.flags.contains(WcFlags::TM_DATA_VALID) {
        let data = b.completions(1)[0];
        assert_eq!((data.wr_id, data.flags, data.byte_len), (5, WcFlags::TM_DATA_VALID, 2000));
    }
    assert_eq!(b.bytes(100, 22), b"right where it belongs");
}

#[test]
fn a_rendezvous_is_fetched_and_the_sender_told() {
    let (a, b, qa, qb, srq) = matching();
    change(&srq, buffer(6, 43, b.sge(0, 40_000)));
    b.completions(1);
    a.fill(1000, &[7; 40_000]);
    header(&a, RENDEZVOUS, 43);
    let (va, rkey) = (a.addr(1000), a.mr.rkey());
    a.fill(16, &va.to_be_bytes());
    a.fill(24, &rkey.to_be_bytes());
    a.fill(28, &40_000u32.to_be_bytes());
    a.post_recv(&qa, 8, 50_000, 64).unwrap();
    post(&qa, &send(1, &[a.sge(0, 32)])).unwrap();
    let got = b.completions(2);
    let matched = Some(TagMatch { tag: 43, app_ctx: 9 });
    assert_eq!((got[0].tag(), got[0].flags), (matched, WcFlags::TM_MATCH));
    assert_eq!((got[1].wr_id, got[1].flags, got[1].byte_len), (6, WcFlags::TM_DATA_VALID, 40_000));
    assert_eq!(b.bytes(0, 40_000), [7; 40_000]);
    let done = a.completions(2);
    let fin = done.iter().find(|cqe| cqe.opcode == WcOpcode::Recv).expect("the sender gets a FIN");
    assert_eq!((fin.wr_id, fin.byte_len), (8, 32));
    assert_eq!((a.bytes(50_000, 1), a.bytes(50_004, 28)), (vec![2], a.bytes(4, 28)));
    assert_eq!(post(&qb, &send(1, &[])).unwrap_err().errno(), EINVAL, "its send queue is the card's");
}

#[test]
fn what_nobody_waits_for_goes_to_the_queue() {
    let (a, b, qa, _qb, srq) = matching();
    srq.post(&RecvWr { wr_id: 3, sges: &[b.sge(0, 100)] }).unwrap();
    header(&a, EAGER, 1);
    post(&qa, &send(1, &[a.sge(0, 20)])).unwrap();
    let got = b.completions(1)[0];
    assert_eq!((got.opcode, got.wr_id, got.flags, got.byte_len), (WcOpcode::TmRecv, 3, WcFlags::empty(), 20));
    /* one message is not seen yet: what is added sleeps, and the program gets an event */
    let handle = change(&srq, buffer(4, 1, b.sge(100, 100)));
    assert_eq!(b.completions(1)[0].flags, WcFlags::TM_SYNC_REQ);
    change(&srq, TagChange::Remove(handle));
    assert_eq!(b.completions(1)[0].opcode, WcOpcode::TmDel);
    change(&srq, TagChange::Remove(handle));
    assert_eq!(b.completions(1)[0].status, WcStatus::TmErr);
    srq.change_tags(&TagOp { wr_id: 78, change: TagChange::Sync, seen: Some(1), signaled: true }).unwrap();
    let synced = b.completions(1)[0];
    assert_eq!((synced.opcode, synced.wr_id, synced.flags), (WcOpcode::TmSync, 78, WcFlags::empty()));
}

#[test]
fn limits_and_kinds() {
    let (a, b, _qa, _qb, srq) = matching();
    let quiet = |change| srq.change_tags(&TagOp { wr_id: 0, change, seen: None, signaled: false });
    for wr_id in 0..8 {
        quiet(buffer(wr_id, wr_id, b.sge(0, 8))).unwrap();
    }
    assert_eq!(quiet(buffer(8, 8, b.sge(0, 8))).unwrap_err().errno(), ENOMEM);
    let plain = Srq::create(&b.pd, 8, 1, 0, 1).unwrap();
    let sync = TagOp { wr_id: 0, change: TagChange::Sync, seen: None, signaled: false };
    assert_eq!(plain.change_tags(&sync).unwrap_err().errno(), EINVAL);
    for tags in [0, MAX_TAGS + 1] {
        let made = Srq::create_tagged(&b.pd, &b.cq, tags, 8, 1, 1).map(|_| ());
        assert_eq!(made.unwrap_err().errno(), EINVAL);
    }
    let other = Pd::alloc(&b.ctx).unwrap();
    let init = b.init(QpType::Rc, Some(&srq));
    assert_eq!(Qp::create(&other, &init).map(|_| ()).unwrap_err().errno(), EINVAL);
    let uc = QpInit { qp_type: QpType::Uc, ..init };
    assert_eq!(Qp::create(&b.pd, &uc).map(|_| ()).unwrap_err().errno(), EINVAL);
    assert!(a.cq.poll(&mut [Default::default()]).unwrap() == 0);
}
