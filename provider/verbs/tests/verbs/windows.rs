//! Memory windows between two cards of one process.

use crate::common::*;
use starverbs_core::mr::WindowType;
use starverbs_core::{Access, QpType, SendFlags, SendOp, WcFlags, WcOpcode, WcStatus};
use starverbs_verbs::{Mw, MwBind, SendWr};

#[test]
fn a_window_is_bound_used_invalidated_and_ended() {
    let (a, b) = Node::pair();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    let mr = b.reg(0, 4096, Access::LOCAL_WRITE | Access::MW_BIND);
    let mw = Mw::alloc(&b.pd, WindowType::Two).unwrap();
    let bind = MwBind { mr: mr.lkey(), addr: b.addr(64), length: 64, access: Access::REMOTE_WRITE };
    let rkey = mw.rkey() ^ 1;
    post(&qb, &mw.bind_wr(1, SendFlags::SIGNALED, rkey, &bind)).unwrap();
    let done = b.completions(1)[0];
    assert_eq!((done.wr_id, done.status, done.opcode), (1, WcStatus::Success, WcOpcode::BindMw));
    assert_eq!(mr.dereg().unwrap_err().errno(), libc::EBUSY);
    assert_eq!(b.pd.dealloc().unwrap_err().errno(), libc::EBUSY);

    a.fill(0, &[7; 64]);
    let sges = [a.sge(0, 64)];
    let write = SendWr { op: SendOp::Write, remote_addr: b.addr(64), rkey, ..send(2, &sges) };
    post(&qa, &write).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    assert_eq!(b.bytes(64, 64), [7; 64]);

    b.post_recv(&qb, 3, 1024, 64).unwrap();
    post(&qa, &SendWr { op: SendOp::SendInv, imm: rkey, ..send(4, &sges) }).unwrap();
    let done = b.completions(1)[0];
    assert_eq!((done.wr_id, done.opcode, done.flags, done.imm), (3, WcOpcode::Recv, WcFlags::WITH_INV, rkey));
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    post(&qa, &write).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::RemAccessErr);
    mr.dereg().unwrap();
    mw.dealloc().unwrap();
    assert_eq!(mw.dealloc().unwrap_err().errno(), libc::EINVAL);
}

#[test]
fn windows_are_not_for_every_transport() {
    let node = Node::new(&settings());
    let ud = node.qp(QpType::Ud);
    ud_ready(&ud);
    let mw = Mw::alloc(&node.pd, WindowType::One).unwrap();
    let bind = MwBind { mr: node.mr.lkey(), addr: node.addr(0), length: 8, access: Access::empty() };
    let wr = mw.bind_wr(1, SendFlags::SIGNALED, mw.rkey(), &bind);
    assert_eq!(post(&ud, &wr).unwrap_err().errno(), libc::EINVAL);
}
