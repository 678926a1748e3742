//! A card whose UC or UD message took the last receive of its queue is starved, until its program has
//! changed.

use starverbs_core::qp::RecvSource;
use starverbs_core::{Access, AvId, NicConfig, QpState, QpType, Qpn, SendOp, SendWqe};
use starverbs_sim::{Faults, Net, QpAt, Recv, Send, Setup, SimCq, SimRq, SimSq};

/// A QP at host 0 that sends, and one at host 1 that has receives posted.
struct Way {
    net: Net,
    qpns: [Qpn; 2],
    sq: SimSq,
    rq: SimRq,
    av: AvId,
}

impl Way {
    fn new(qp_type: QpType, receives: u64) -> Way {
        let mut net = Net::new(2, NicConfig::default(), Faults::default(), 1);
        let (sq, rq, setup) = (SimSq::new(16), SimRq::new(16, 1), Setup::default());
        let qpns = [0, 1].map(|at| {
            let (own, cq) = (if at == 0 { sq.clone() } else { SimSq::new(1) }, SimCq::new(64));
            let source = RecvSource::Own(if at == 1 { rq.clone() } else { SimRq::new(1, 1) });
            net.hosts[at].qp(qp_type, &own, source, [&cq, &cq], true)
        });
        if qp_type == QpType::Ud {
            (0..2).for_each(|at| net.hosts[at].to_rts_ud(qpns[at], &setup, 0));
        } else {
            net.connect(qp_type, QpAt { host: 0, qpn: qpns[0] }, QpAt { host: 1, qpn: qpns[1] }, &setup);
        }
        let (to, host) = (net.hosts[1].gid, &mut net.hosts[0]);
        let av = host.nic.create_av(host.pd, host.av(to)).expect("an AV");
        let mut way = Way { net, qpns, sq, rq, av };
        (0..receives).for_each(|_| way.post_recv());
        way
    }

    fn post_recv(&mut self) {
        let (addr, lkey) = self.net.hosts[1].region(64, Access::LOCAL_WRITE);
        let sges = vec![starverbs_core::Sge { addr, len: 64, lkey }];
        self.rq.post(Recv { wr_id: 0, sges }).expect("there is room");
    }

    /// A message arrives. Gives whether the card is starved.
    fn message(&mut self) -> bool {
        let qkey = Setup::default().qkey;
        let wqe =
            SendWqe { op: SendOp::Send, av: self.av, remote_qpn: self.qpns[1], qkey, ..SendWqe::default() };
        self.sq.post(Send { wqe, sges: vec![], inline: None }).expect("there is room");
        self.net.doorbell(0, self.qpns[0]);
        assert!(self.net.run_until_idle(1_000), "it ends");
        self.net.hosts[1].nic.is_starved()
    }

    fn still_starved(&mut self) -> bool {
        let still = self.net.hosts[1].nic.still_starved();
        assert_eq!(self.net.hosts[1].nic.is_starved(), still);
        still
    }

    fn dropped(&self) -> u64 {
        self.net.hosts[1].nic.counters().drop_no_recv.get()
    }
}

#[test]
fn a_queue_is_starved_until_there_is_another_receive() {
    for qp_type in [QpType::Uc, QpType::Ud] {
        let mut way = Way::new(qp_type, 2);
        assert!(!way.message(), "{qp_type:?}: one is left");
        assert!(way.message() && way.still_starved(), "{qp_type:?}: none is left");
        way.post_recv();
        assert!(!way.still_starved(), "{qp_type:?}: one is posted");
        assert!(way.message() && way.still_starved(), "{qp_type:?}: and used up");
        assert_eq!(way.dropped(), 0);
    }
}

#[test]
fn lost_messages_do_not_starve_a_queue_again() {
    let mut way = Way::new(QpType::Ud, 1);
    assert!(way.message() && way.still_starved());
    way.net.hosts[1].nic.end_back_pressure();
    assert!(!way.message() && !way.still_starved());
    assert_eq!(way.dropped(), 1);
    way.post_recv();
    assert!(way.message() && way.still_starved(), "the next that takes the last one starves it again");
}

#[test]
fn a_reliable_qp_is_never_starved() {
    let mut way = Way::new(QpType::Rc, 1);
    assert!(!way.message(), "its peer gets an RNR NAK");
}

/// A QP that is gone, or drops what comes for its state, takes no receive.
#[test]
fn a_qp_that_takes_no_messages_is_not_waited_for() {
    for state in [QpState::Err, QpState::Reset] {
        let mut way = Way::new(QpType::Ud, 1);
        assert!(way.message() && way.still_starved());
        way.net.hosts[1].to_state(way.qpns[1], state, 0).expect("from any state");
        assert!(!way.still_starved(), "{state:?}");
    }
    let mut way = Way::new(QpType::Ud, 1);
    assert!(way.message() && way.still_starved());
    let host = &mut way.net.hosts[1];
    host.nic.destroy_qp(&mut host.env, way.qpns[1]).expect("it is there");
    assert!(!way.still_starved(), "it is gone");
}

/// As long as a reliable QP can have peers that wait.
#[test]
fn reliable_qps_count_once_they_are_connected() {
    let mut way = Way::new(QpType::Rc, 1);
    assert!(way.net.hosts[1].nic.has_reliable());
    way.net.hosts[1].to_state(way.qpns[1], QpState::Reset, 0).expect("from any state");
    assert!(!way.net.hosts[1].nic.has_reliable());
    assert!(!Way::new(QpType::Ud, 1).net.hosts[1].nic.has_reliable());
}
