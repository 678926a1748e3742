//! Receive back-pressure of UC and UD: frames behind the last receive wait for the program, and not for ever.

use crate::common::*;
use starverbs_core::{AvId, Cqe, QpType, SendOp, WcStatus};
use starverbs_settings::Settings;
use starverbs_verbs::{Ah, Qp, SendWr};

/// Messages that arrive at once, and receives posted for them.
const MESSAGES: u64 = 16;
const RECEIVES: u64 = 4;

/// Two cards, of which only the program runs the second, and packets between them.
fn by_polls() -> (Node, Node) {
    let settings = wire();
    (Node::new(&settings), Node::new(&Settings { progress_thread: false, ..settings }))
}

/// Sends `MESSAGES` messages, which are on the wire before anybody looks for them.
fn send_many(a: &Node, qa: &Qp, ah: AvId, remote_qpn: u32) {
    let sges = [a.sge(0, 8)];
    for wr_id in 0..MESSAGES {
        let wr = SendWr { ah, remote_qpn, qkey: QKEY, ..send(wr_id, &sges) };
        post(qa, &wr).unwrap();
    }
    assert!(a.completions(MESSAGES as usize).iter().all(|cqe| cqe.status == WcStatus::Success));
}

/// Takes them all with `RECEIVES` receives, each posted again when it has completed.
fn take_many(b: &Node, qb: &Qp) {
    let mut came = 0;
    let mut out = [Cqe::default(); MESSAGES as usize];
    wait_for("one of the messages", || {
        let got = b.cq.poll(&mut out).unwrap();
        out[..got].iter().for_each(|cqe| b.post_recv(qb, cqe.wr_id, 0, 100).unwrap());
        came += got as u64;
        came == MESSAGES
    });
}

#[test]
fn a_poll_leaves_datagrams_for_which_no_receive_is_posted_yet() {
    let (a, b) = by_polls();
    let (qa, qb) = (a.qp(QpType::Ud), b.qp(QpType::Ud));
    ud_ready(&qa);
    ud_ready(&qb);
    (0..RECEIVES).for_each(|id| b.post_recv(&qb, id, 0, 100).unwrap());
    let ah = Ah::create(&a.pd, &way_to(&b)).unwrap();
    send_many(&a, &qa, ah.id(), qb.number());
    take_many(&b, &qb);
    ah.destroy().unwrap();
}

#[test]
fn a_poll_leaves_unreliable_messages_for_which_no_receive_is_posted_yet() {
    let (a, b) = by_polls();
    let (qa, qb) = (a.qp(QpType::Uc), b.qp(QpType::Uc));
    connect_uc(&a, &qa, &b, &qb);
    (0..RECEIVES).for_each(|id| b.post_recv(&qb, id, 0, 100).unwrap());
    send_many(&a, &qa, AvId::default(), 0);
    take_many(&b, &qb);
}

/// Others' frames wait behind them for a moment only.
#[test]
fn datagrams_without_a_receive_hold_nobody_up() {
    let (a, b) = Node::pair();
    let (qa, qb) = (a.qp(QpType::Ud), b.qp(QpType::Ud));
    ud_ready(&qa);
    ud_ready(&qb);
    let (ra, rb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &ra, &b, &rb);
    b.post_recv(&qb, 1, 0, 100).unwrap();
    let ah = Ah::create(&a.pd, &way_to(&b)).unwrap();
    send_many(&a, &qa, ah.id(), qb.number());
    /* the card's thread serves a WRITE while the program looks at nothing, and a poll does */
    let sges = [a.sge(0, 8)];
    let write = SendWr { op: SendOp::Write, remote_addr: b.addr(200), rkey: b.mr.rkey(), ..send(1, &sges) };
    post(&ra, &write).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    assert_eq!(b.completions(1)[0].wr_id, 1);
    post(&ra, &write).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    ah.destroy().unwrap();
}
