//! Reliable and unreliable queue pairs towards one host, whose window they share.

use crate::common::pair::Pair;
use starverbs_core::qp::RecvSource;
use starverbs_core::{QpType, SendOp, WcStatus};
use starverbs_sim::{QpAt, Send, Setup, SimCq, SimRq, SimSq};

/// What UC sent and nobody asked about counts as in flight. A window that is cut below that by losses must
/// not keep RC to the same host waiting for ever: the UC sender may have no more to send, or be gone.
#[test]
fn rc_does_not_wait_for_uc_that_has_ended() {
    for ends in [false, true] {
        let mut uc = Pair::of(QpType::Uc, &Setup::default());
        for id in 0..3 {
            let sge = uc.sge(0, 8192);
            uc.post(uc.wqe(id, SendOp::Write), &[sge]);
        }
        uc.run();
        let cq = SimCq::new(16);
        let sq = [(); 2].map(|()| SimSq::new(16));
        let [a, b] = [0, 1].map(|at| {
            let own = RecvSource::Own(SimRq::new(1, 1));
            uc.net.hosts[at].qp(QpType::Rc, &sq[at], own, [&cq, &cq], true)
        });
        uc.net.connect(
            QpType::Rc,
            QpAt { host: 0, qpn: a },
            QpAt { host: 1, qpn: b },
            &Setup { timeout: 18, ..Setup::default() },
        );
        if ends {
            let host = &mut uc.net.hosts[0];
            host.nic.destroy_qp(&mut host.env, uc.qpn[0]).expect("it exists");
        }
        uc.net.faults.loss = 1.0;
        let send = |id| Send { wqe: uc.wqe(id, SendOp::Write), sges: vec![uc.sge(0, 64)], inline: None };
        sq[0].post(send(7)).expect("there is room");
        uc.net.doorbell(0, a);
        (0..15).for_each(|_| assert!(uc.net.step()));
        uc.net.faults.loss = 0.0;
        uc.run();
        assert_eq!(cq.poll().map(|(c, _)| (c.wr_id, c.status)), Some((7, WcStatus::Success)));
    }
}
