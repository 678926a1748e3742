//! Queue pairs are independent: one whose peer is gone takes nothing from those that share its path.

use crate::common::all_rights;
use starverbs_core::qp::RecvSource;
use starverbs_core::{Nanos, NicConfig, QpState, QpType, Qpn, SendFlags, SendOp, SendWqe, Sge, WcStatus};
use starverbs_sim::{Faults, Net, QpAt, Send, Setup, SimCq, SimRq, SimSq};

const MS: Nanos = 1_000_000;

/// Queue pairs of host 0 towards host 1, whose peers are in ERR.
#[derive(Debug)]
struct Dead {
    qps: usize,
    op: SendOp,
    len: u32,
    /// Requests of each
    backlog: u64,
    timeout: u8,
}

/// One end of an RC connection on host 0, and a region on each side of it.
struct Conn {
    qpn: Qpn,
    peer: Qpn,
    sq: SimSq,
    cq: SimCq,
    sge: Sge,
    remote: (u64, u32),
}

impl Conn {
    fn new(net: &mut Net, setup: &Setup, len: u32) -> Conn {
        let (sq, cq) = (SimSq::new(64), SimCq::new(256));
        let other = SimSq::new(1);
        let own = || RecvSource::Own(SimRq::new(1, 1));
        let qpn = net.hosts[0].qp(QpType::Rc, &sq, own(), [&cq, &cq], true);
        let peer = net.hosts[1].qp(QpType::Rc, &other, own(), [&SimCq::new(4), &SimCq::new(4)], true);
        net.connect(QpType::Rc, QpAt { host: 0, qpn }, QpAt { host: 1, qpn: peer }, setup);
        let (addr, lkey) = net.hosts[0].region(u64::from(len), all_rights());
        let remote = net.hosts[1].region(u64::from(len), all_rights());
        Conn { qpn, peer, sq, cq, sge: Sge { addr, len, lkey }, remote }
    }

    fn post(&self, net: &mut Net, op: SendOp) {
        let (remote_addr, rkey) = self.remote;
        let wqe = SendWqe { op, remote_addr, rkey, flags: SendFlags::SIGNALED, ..SendWqe::default() };
        self.sq.post(Send { wqe, sges: vec![self.sge], inline: None }).expect("there is room");
        net.doorbell(0, self.qpn);
    }
}

/// READs of 4 KiB, one after the other, for `time`: how long each took, the longest last.
fn reads(net: &mut Net, conn: &Conn, time: Nanos) -> Vec<Nanos> {
    let end = net.now() + time;
    let mut took = Vec::new();
    while net.now() < end {
        let began = net.now();
        conn.post(net, SendOp::Read);
        let (cqe, _) = loop {
            if let Some(cqe) = conn.cq.poll() {
                break cqe;
            }
            assert!(net.step() && net.now() - began < 1_000 * MS, "a READ waits for ever");
        };
        assert_eq!(cqe.status, WcStatus::Success);
        took.push(net.now() - began);
        net.run_for(200_000);
    }
    took.sort_unstable();
    took
}

/// Whether a healthy queue pair's READs take their usual time beside `dead`, but for those that wait for the
/// window until the first timeout shows that a peer is silent.
fn look(dead: &Dead, repeat: bool) {
    let faults = Faults { jitter: 2_000, ..Faults::default() };
    let mut net = Net::new(2, NicConfig { repeat, ..NicConfig::default() }, faults, 7);
    let healthy = Conn::new(&mut net, &Setup::default(), 4096);
    let usual = reads(&mut net, &healthy, 20_000_000);
    let setup = Setup { timeout: dead.timeout, ..Setup::default() };
    let conns: Vec<Conn> = (0..dead.qps).map(|_| Conn::new(&mut net, &setup, dead.len)).collect();
    for conn in &conns {
        let now = net.now();
        net.hosts[1].to_state(conn.peer, QpState::Err, now).expect("from every state");
        (0..dead.backlog).for_each(|_| conn.post(&mut net, dead.op));
    }
    let beside = reads(&mut net, &healthy, 1_200_000_000);
    for conn in &conns {
        /* it was given up, or is asked still: of a timeout of 0 for ever */
        let failed = conn.cq.poll().map(|(cqe, _)| cqe.status);
        let late = matches!(dead.timeout, 0 | 18);
        assert_eq!(failed, if late { None } else { Some(WcStatus::RetryExcErr) });
    }
    let (longest, usual) = (*beside.last().expect("one"), *usual.last().expect("one"));
    let late = beside.iter().filter(|took| **took > 2 * usual).count();
    assert!(
        late <= 2 && longest < 5 * MS,
        "{dead:?}: {late} of {} READs late, up to {longest} ns",
        beside.len()
    );
}

#[test]
fn a_dead_queue_pair_takes_nothing_from_others() {
    let cases = [
        Dead { qps: 1, op: SendOp::Read, len: 64 << 10, backlog: 1, timeout: 14 },
        Dead { qps: 1, op: SendOp::Read, len: 64 << 10, backlog: 1, timeout: 18 },
        Dead { qps: 1, op: SendOp::Read, len: 64 << 10, backlog: 32, timeout: 0 },
        Dead { qps: 1, op: SendOp::Write, len: 64 << 10, backlog: 32, timeout: 0 },
        Dead { qps: 8, op: SendOp::Write, len: 64 << 10, backlog: 8, timeout: 14 },
        Dead { qps: 50, op: SendOp::Write, len: 4096, backlog: 8, timeout: 14 },
    ];
    for dead in &cases {
        for repeat in [false, true] {
            look(dead, repeat);
        }
    }
}

/// A SEND was lost, READs behind it are kept, and its peer's program posts no receive: the READs, which have
/// no answer before, hold no room meanwhile.
#[test]
fn who_waits_for_a_receive_takes_nothing_from_others() {
    let cfg = NicConfig { window: 4096, repeat: true, ..NicConfig::default() };
    let mut net = Net::new(2, cfg, Faults::default(), 7);
    let healthy = Conn::new(&mut net, &Setup::default(), 4096);
    let usual = reads(&mut net, &healthy, 20 * MS);
    let waiting = Conn::new(&mut net, &Setup { rnr_retry: 7, min_rnr_timer: 1, ..Setup::default() }, 4096);
    net.cut(0, 1, 1);
    waiting.post(&mut net, SendOp::Send);
    net.run_for(1_000);
    (0..4).for_each(|_| waiting.post(&mut net, SendOp::Read));
    net.run_for(20 * MS);
    let counters = net.hosts[0].nic.counters();
    assert!(counters.rcvd_sack.get() > 0 && counters.rcvd_rnr.get() > 100, "{counters:?}");
    let beside = reads(&mut net, &healthy, 200 * MS);
    let (longest, usual) = (*beside.last().expect("one"), *usual.last().expect("one"));
    assert!(longest < 4 * usual, "READs took {longest} ns, {usual} alone");
    assert!(waiting.cq.poll().is_none(), "it waits");
}

/// Where a card has much to do, each answer takes longer than the timeout that was right before. Packets that
/// were sent again give no round trip, and a queue pair that has one packet under way has no other.
#[test]
fn a_path_that_became_slow_is_not_taken_for_lossy() {
    let mut net = Net::new(2, NicConfig::default(), Faults::default(), 7);
    let conns: Vec<Conn> = (0..64).map(|_| Conn::new(&mut net, &Setup::default(), 8)).collect();
    let round = |net: &mut Net| {
        conns.iter().for_each(|conn| conn.post(net, SendOp::Write));
        for conn in &conns {
            let (cqe, _) = loop {
                if let Some(cqe) = conn.cq.poll() {
                    break cqe;
                }
                assert!(net.step(), "a WRITE waits for ever");
            };
            assert_eq!(cqe.status, WcStatus::Success);
        }
    };
    (0..10).for_each(|_| round(&mut net));
    net.faults.delay = 5 * MS;
    (0..100).for_each(|_| round(&mut net));
    let again = net.hosts[0].nic.counters().retransmitted.get();
    let least = 64;
    assert!((least..20 * least).contains(&again), "{again} of 6400 packets were sent again");
}
