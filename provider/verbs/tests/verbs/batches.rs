//! Work requests built in place (`ibv_wr_start` to `ibv_wr_complete`): all are posted together, or none.

use crate::common::*;
use starverbs_core::{AvId, QpType, SendFlags, SendOp, SendWqe, WcFlags, WcOpcode, WcStatus};
use starverbs_verbs::{Ah, Qp, VerbsError, send_ops_offered};

const ALL: u64 = u64::MAX;
const EINVAL: i32 = 22;
const ENOMEM: i32 = 12;
const EOPNOTSUPP: i32 = 95;

fn wqe(wr_id: u64, op: SendOp) -> SendWqe {
    SendWqe { wr_id, op, flags: SendFlags::SIGNALED, ..SendWqe::default() }
}

fn connected() -> (Node, Node, Qp, Qp) {
    let (a, b) = Node::pair();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    (a, b, qa, qb)
}

#[test]
fn a_batch_is_posted_in_order_with_its_data() {
    let (a, b, qa, qb) = connected();
    a.fill(0, b"gathered from two places; written");
    b.post_recv(&qb, 1, 0, 100).unwrap();
    b.post_recv(&qb, 2, 100, 100).unwrap();
    let mut batch = qa.start(ALL);
    batch.begin(wqe(1, SendOp::Send));
    batch.set_sges(&[a.sge(0, 14), a.sge(14, 10)]);
    batch.begin(SendWqe { imm: 7, ..wqe(2, SendOp::SendImm) });
    let said = *b"inline, in pieces";
    // SAFETY: two halves of a local array.
    unsafe { batch.set_inline([&raw const said[..8], &raw const said[8..]].into_iter()) };
    batch.begin(SendWqe { remote_addr: b.addr(300), rkey: b.mr.rkey(), ..wqe(3, SendOp::Write) });
    batch.set_sges(&[a.sge(26, 7)]);
    assert!(a.cq.poll(&mut [Default::default()]).unwrap() == 0, "the card sees nothing before the end");
    batch.complete().unwrap();
    let sent = a.completions(3);
    assert_eq!(sent.iter().map(|cqe| cqe.wr_id).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(sent.iter().all(|cqe| cqe.status == WcStatus::Success));
    assert_eq!(sent[2].opcode, WcOpcode::RdmaWrite);
    let got = b.completions(2);
    assert_eq!((got[0].byte_len, got[1].byte_len, got[1].imm), (24, 17, 7));
    assert!(got[1].flags.contains(WcFlags::WITH_IMM));
    assert_eq!((b.bytes(0, 24), b.bytes(100, 17)), (b"gathered from two places".to_vec(), said.to_vec()));
    assert_eq!(b.bytes(300, 7), b"written");
}

#[test]
fn an_aborted_batch_leaves_no_trace() {
    let (a, b, qa, qb) = connected();
    for _ in 0..3 {
        let mut batch = qa.start(ALL);
        for id in 0..u64::from(qa.caps().max_send_wr) {
            batch.begin(wqe(id, SendOp::Send));
        }
        drop(batch);
    }
    b.post_recv(&qb, 1, 0, 100).unwrap();
    let mut batch = qa.start(ALL);
    batch.begin(wqe(77, SendOp::Send));
    batch.set_sges(&[a.sge(0, 5)]);
    batch.complete().unwrap();
    assert_eq!(a.completions(1)[0].wr_id, 77);
    assert_eq!(b.completions(1)[0].byte_len, 5);
}

/// A batch in which `spoil` goes wrong posts nothing, although what came before it was right.
fn refused(qa: &Qp, ops: u64, spoil: impl FnOnce(&mut starverbs_verbs::SendBatch<'_>)) -> i32 {
    let mut batch = qa.start(ops);
    batch.begin(wqe(1, SendOp::Send));
    spoil(&mut batch);
    batch.begin(wqe(2, SendOp::Send));
    batch.complete().expect_err("the batch was spoilt").errno()
}

#[test]
fn a_failure_is_told_at_the_end_and_nothing_is_posted() {
    let (a, _b, qa, _qb) = connected();
    let room = u64::from(qa.caps().max_send_wr);
    let full = |batch: &mut starverbs_verbs::SendBatch<'_>| {
        (0..room).for_each(|id| batch.begin(wqe(id, SendOp::Send)));
    };
    assert_eq!(refused(&qa, ALL, full), ENOMEM);
    assert_eq!(refused(&qa, ALL, |batch| batch.set_sges(&[a.sge(0, 1); 40])), EINVAL);
    let long = [0u8; 5000];
    // SAFETY: a local array.
    let inline = |batch: &mut starverbs_verbs::SendBatch<'_>| unsafe {
        batch.set_inline(std::iter::once(&raw const long[..]));
    };
    assert_eq!(refused(&qa, ALL, inline), EINVAL);
    // SAFETY: nothing is read: the operation is refused.
    let read = |batch: &mut starverbs_verbs::SendBatch<'_>| unsafe {
        batch.begin(wqe(3, SendOp::Read));
        batch.set_inline(std::iter::once(&raw const long[..8]));
    };
    assert_eq!(refused(&qa, ALL, read), EINVAL);
    assert_eq!(refused(&qa, 1 << 2, |batch| batch.begin(wqe(3, SendOp::Write))), EINVAL);
    assert_eq!(refused(&qa, ALL, |batch| batch.set_ud_addr(AvId(0), 1, 1)), EINVAL);
    assert_eq!(refused(&qa, ALL, |batch| batch.fail(VerbsError::Unsupported("TSO"))), EOPNOTSUPP);
    let mut batch = qa.start(ALL);
    batch.set_sges(&[a.sge(0, 1)]);
    assert_eq!(batch.complete().unwrap_err().errno(), EINVAL, "data for nothing");
    qa.start(ALL).complete().unwrap();
    assert_eq!(a.cq.poll(&mut [Default::default()]).unwrap(), 0);
    let idle = a.qp(QpType::Rc);
    let mut batch = idle.start(ALL);
    batch.begin(wqe(1, SendOp::Send));
    assert_eq!(batch.complete().unwrap_err().errno(), EINVAL, "in RESET");
}

#[test]
fn a_datagram_needs_its_address() {
    let (a, b) = Node::pair();
    let (qa, qb) = (a.qp(QpType::Ud), b.qp(QpType::Ud));
    ud_ready(&qa);
    ud_ready(&qb);
    let ah = Ah::create(&a.pd, &way_to(&b)).unwrap();
    b.post_recv(&qb, 1, 0, 100).unwrap();
    let mut batch = qa.start(send_ops_offered(QpType::Ud));
    batch.begin(wqe(1, SendOp::Send));
    batch.begin(wqe(2, SendOp::Send));
    assert_eq!(batch.complete().unwrap_err().errno(), EINVAL);
    let mut batch = qa.start(send_ops_offered(QpType::Ud));
    batch.begin(wqe(3, SendOp::Send));
    batch.set_ud_addr(ah.id(), qb.number(), QKEY);
    batch.set_sges(&[a.sge(0, 8)]);
    batch.complete().unwrap();
    assert_eq!(a.completions(1)[0].wr_id, 3);
    assert_eq!(b.completions(1)[0].byte_len, 48);
}

#[test]
fn operations_are_offered_by_transport() {
    let (rc, uc, ud) = (QpType::Rc, QpType::Uc, QpType::Ud);
    /* FLUSH and ATOMIC WRITE */
    let placement = 0b11 << 11;
    for (qp_type, offered) in [(rc, placement), (QpType::XrcSend, placement), (uc, 0), (ud, 0)] {
        assert_eq!(send_ops_offered(qp_type) & placement, offered);
    }
    /* SEND and SEND with immediate; both writes; READ and the atomics */
    let (sends, writes, reads) = (0b1100, 0b11, 0b111_0000);
    assert_eq!(send_ops_offered(ud) & 0x7f, sends);
    assert_eq!(send_ops_offered(uc) & 0x7f, sends | writes);
    assert_eq!(send_ops_offered(rc) & 0x7f, sends | writes | reads);
}
