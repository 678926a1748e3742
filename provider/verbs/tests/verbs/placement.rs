//! ATOMIC WRITE and FLUSH between two cards (IBTA annex A19).

use crate::common::*;
use starverbs_core::wire::headers::Feth;
use starverbs_core::{Access, FlushLevel, Placement, QpType, SendFlags, SendOp, SendWqe, WcOpcode, WcStatus};
use starverbs_verbs::{SendWr, send_ops_offered};

const GLOBAL: u32 = Feth::word(Placement::GLOBAL, FlushLevel::Range);
const EOPNOTSUPP: i32 = 95;

fn aligned(node: &Node) -> usize {
    (8 - node.addr(0) as usize % 8) % 8
}

#[test]
fn a_word_arrives_whole_and_is_flushed() {
    let (a, b) = Node::pair();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    let cell = aligned(&b);
    a.fill(0, b"eight ch");
    let from = [a.sge(0, 8)];
    let base = SendWr { remote_addr: b.addr(cell), rkey: b.mr.rkey(), ..send(1, &from) };
    post(&qa, &SendWr { op: SendOp::AtomicWrite, ..base }).unwrap();
    /* FLUSH has no data: what a program gives is not looked at */
    post(&qa, &SendWr { op: SendOp::Flush, imm: GLOBAL, compare_add: 8, ..base }).unwrap();
    let done: Vec<_> = a.completions(2).iter().map(|cqe| (cqe.status, cqe.opcode)).collect();
    assert_eq!(done, [(WcStatus::Success, WcOpcode::AtomicWrite), (WcStatus::Success, WcOpcode::Flush)]);
    assert_eq!(b.bytes(cell, 8), b"eight ch");
    post_inline(&qa, &SendWr { op: SendOp::AtomicWrite, ..base }, b"in line!").unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    assert_eq!(b.bytes(cell, 8), b"in line!");
}

#[test]
fn batches_carry_the_word_with_them() {
    let (a, b) = Node::pair();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    let cell = aligned(&b);
    let to = SendWqe {
        flags: SendFlags::SIGNALED,
        remote_addr: b.addr(cell),
        rkey: b.mr.rkey(),
        ..SendWqe::default()
    };
    let mut batch = qa.start(send_ops_offered(QpType::Rc));
    for n in 1..=3u64 {
        let word = n.to_ne_bytes();
        batch.begin(SendWqe { wr_id: n, op: SendOp::AtomicWrite, ..to });
        // SAFETY: a local array.
        unsafe { batch.set_inline(std::iter::once(&raw const word[..])) };
    }
    batch.begin(SendWqe { wr_id: 4, op: SendOp::Flush, imm: GLOBAL, compare_add: 8, ..to });
    batch.complete().unwrap();
    assert!(a.completions(4).iter().all(|cqe| cqe.status == WcStatus::Success));
    assert_eq!(b.word(cell), 3);
    let mut batch = qa.start(send_ops_offered(QpType::Rc));
    batch.begin(SendWqe { op: SendOp::Flush, imm: GLOBAL, ..to });
    batch.set_sges(&[a.sge(0, 8)]);
    assert!(batch.complete().is_err(), "a FLUSH has no data");
}

/// No memory of a process is known to be persistent: none is registered so, and none is flushed so.
#[test]
fn persistence_is_not_promised() {
    let (a, b) = Node::pair();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    let error = reg(&b.pd, &b.buf[..8], Access::FLUSH_PERSISTENT).map(|_| ()).unwrap_err();
    assert_eq!(error.errno(), EOPNOTSUPP);
    let persistent = Feth::word(Placement::PERSISTENT, FlushLevel::Mr);
    let wr = SendWr { op: SendOp::Flush, imm: persistent, rkey: b.mr.rkey(), ..send(1, &[]) };
    post(&qa, &wr).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::RemAccessErr);
}
