//! XRC between two cards of one process: one receiving QP, two shared receive queues.

use crate::common::*;
use starverbs_core::{QpState, QpType, SendFlags, WcStatus};
use starverbs_verbs::{Cq, Qp, RecvWr, SendWr, Srq, Xrcd};

#[test]
fn a_message_goes_to_the_queue_that_it_names() {
    let (a, b) = Node::pair();
    let domain = Xrcd::open(&b.ctx, None, true, false).unwrap();
    let cqs = [0, 1].map(|_| Cq::create(&b.ctx, 16, None, 0).unwrap());
    let srqs = [0, 1].map(|i| Srq::create_xrc(&b.pd, &domain, &cqs[i], 4, 1, 0).unwrap());
    let recv = domain.create_qp(&b.ctx, 5).unwrap();
    let sender = Qp::create(&a.pd, &a.init(QpType::XrcSend, None)).unwrap();
    assert_eq!((recv.caps().max_recv_wr, sender.caps().max_recv_wr), (0, 0));
    connect_xrc(&a, &sender, &b, &recv);
    assert_eq!(domain.open_qp(&b.ctx, recv.number(), 6).map(|qp| qp.state()).unwrap(), QpState::Rts);

    a.fill(0, &[9; 100]);
    for turn in [0, 1, 1, 0] {
        let at = 1024 * (turn + 1);
        srqs[turn].post(&RecvWr { wr_id: turn as u64, sges: &[b.sge(at, 100)] }).unwrap();
        let sges = [a.sge(0, 100)];
        post(&sender, &SendWr { remote_qpn: srqs[turn].number(), ..send(7, &sges) }).unwrap();
        let got = poll(&cqs[turn], 1)[0];
        assert_eq!(
            (got.wr_id, got.status, got.byte_len, got.qpn),
            (turn as u64, WcStatus::Success, 100, recv.number())
        );
        assert_eq!(b.bytes(at, 100), [9; 100]);
        assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    }
    post(&sender, &SendWr { remote_qpn: 0xff_0000, flags: SendFlags::SIGNALED, ..send(8, &[]) }).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::RemInvReqErr);
    assert_eq!(cqs[0].destroy().unwrap_err().errno(), libc::EBUSY);
    assert_eq!(domain.close().unwrap_err().errno(), libc::EBUSY);
    recv.destroy().unwrap();
    for srq in &srqs {
        srq.destroy().unwrap();
    }
    cqs[0].destroy().unwrap();
    domain.close().unwrap();
    assert_eq!(domain.close().unwrap_err().errno(), libc::EINVAL);
}
