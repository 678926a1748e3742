//! Selective repeat: what is sent again, with whom, and what is forgotten with a connection.

use crate::common::pair::Pair;
use crate::common::{any_bytes, for_seeds};
use starverbs_core::qp::RecvSource;
use starverbs_core::{
    Access, Counters, Mtu, NicConfig, QpState, QpType, SendOp, SendWqe, Sge, WcOpcode, WcStatus,
};
use starverbs_sim::{Faults, Net, QpAt, Recv, Rng, Send, Setup, SimCq, SimHost, SimRq, SimSq};

/// Two QPs with room for long messages.
struct Long {
    net: Net,
    qpn: [u32; 2],
    sq: [SimSq; 2],
    rq: SimRq,
    cq: [SimCq; 2],
    memory: [(u64, u32); 2],
}

const LEN: u32 = 256 << 10;

impl Long {
    fn new(repeat: [bool; 2], faults: Faults, qp_type: QpType) -> Self {
        let mut net = Net::new(2, NicConfig::default(), faults, 3);
        for at in 0..2 {
            let cfg = NicConfig { repeat: repeat[usize::from(at)], ..NicConfig::default() };
            net.hosts[usize::from(at)] = SimHost::new(at, cfg, 5 + u64::from(at));
        }
        let (sq, cq) = ([(); 2].map(|()| SimSq::new(16)), [(); 2].map(|()| SimCq::new(256)));
        let (rq, other) = (SimRq::new(64, 1), SimRq::new(1, 1));
        let all = crate::common::all_rights();
        let memory = [0, 1].map(|at| net.hosts[at].region(u64::from(LEN), all));
        let a = net.hosts[0].qp(qp_type, &sq[0], RecvSource::Own(other), [&cq[0], &cq[0]], true);
        let b = net.hosts[1].qp(qp_type, &sq[1], RecvSource::Own(rq.clone()), [&cq[1], &cq[1]], true);
        let mut long = Long { net, qpn: [a, b], sq, rq, cq, memory };
        long.connect();
        long
    }

    fn connect(&mut self) {
        let setup = Setup { timeout: 16, rd_atomic: 4, psn: 0xff_fff0, ..Setup::default() };
        self.net.connect(
            QpType::Rc,
            QpAt { host: 0, qpn: self.qpn[0] },
            QpAt { host: 1, qpn: self.qpn[1] },
            &setup,
        );
    }

    /// One message of all the memory, whose bytes are `data`.
    fn begin(&mut self, op: SendOp, data: &[u8]) {
        let source = if op == SendOp::Read { 1 } else { 0 };
        self.net.hosts[source].env.memory.write(self.memory[source].0, data);
        let (remote_addr, rkey) = self.memory[1];
        if op.takes_recv() {
            let sge = Sge { addr: remote_addr, len: LEN, lkey: rkey };
            self.rq.post(Recv { wr_id: 0, sges: vec![sge] }).expect("there is room");
        }
        let wqe = SendWqe { op, remote_addr, rkey, ..SendWqe::default() };
        let sge = Sge { addr: self.memory[0].0, len: data.len() as u32, lkey: self.memory[0].1 };
        self.sq[0].post(Send { wqe, sges: vec![sge], inline: None }).expect("there is room");
        self.net.doorbell(0, self.qpn[0]);
    }

    fn message(&mut self, op: SendOp, data: &[u8]) {
        self.begin(op, data);
        assert!(self.net.run_until_idle(200_000), "it ends");
        let done: Vec<_> = std::iter::from_fn(|| self.cq[0].poll()).map(|(c, _)| c.status).collect();
        assert_eq!(done, [WcStatus::Success]);
        for at in 0..2 {
            assert!(self.net.hosts[at].env.memory.read(self.memory[at].0, data.len()) == data, "{op:?}");
        }
        if op.takes_recv() {
            let (cqe, _) = self.cq[1].poll().expect("a completion");
            assert_eq!((cqe.opcode, cqe.byte_len as usize), (WcOpcode::Recv, data.len()));
        }
    }

    fn counters(&self, at: usize) -> &Counters {
        self.net.hosts[at].nic.counters()
    }
}

fn lossy(loss: f64) -> Faults {
    Faults { loss, ..Faults::default() }
}

/// At 2% loss the repetitions are about as many as the losses; go-back-N sends many times that.
#[test]
fn what_is_lost_is_sent_again_and_hardly_more() {
    for op in [SendOp::Write, SendOp::Send, SendOp::Read] {
        let again = [true, false].map(|repeat| {
            let mut long = Long::new([repeat; 2], lossy(0.02), QpType::Rc);
            let mut rng = Rng::new(9);
            (0..40).for_each(|_| long.message(op, &any_bytes(&mut rng, LEN)));
            let lost = long.net.tally.lost;
            let again = long.counters(0).retransmitted.get();
            println!("{op:?} repeat {repeat}: {lost} lost, {again} sent again");
            assert_eq!(long.counters(1).kept_ahead.get() > 0, repeat);
            /* the request of a READ stands for all of its answers */
            let most = if op == SendOp::Read { 4 * lost } else { lost + lost / 4 };
            assert!(!repeat || again <= most, "{op:?}: {lost} lost, {again} sent again");
            again
        });
        assert!(2 * again[0] < again[1], "{op:?}: {again:?}");
    }
}

/// With a card that does not, nothing of it is seen, and all arrives.
#[test]
fn others_are_left_alone() {
    for repeat in [[true, false], [false, true]] {
        for op in [SendOp::Write, SendOp::Send, SendOp::Read] {
            let mut long = Long::new(repeat, lossy(0.05), QpType::Rc);
            let mut rng = Rng::new(4);
            (0..4).for_each(|_| long.message(op, &any_bytes(&mut rng, LEN)));
            for at in 0..2 {
                let c = long.counters(at);
                assert_eq!((c.sent_sack.get(), c.rcvd_sack.get(), c.kept_ahead.get()), (0, 0, 0));
                assert_eq!((c.drop_opcode.get(), c.drop_malformed.get()), (0, 0));
            }
        }
    }
}

/// A connection that ends in the middle leaves nothing that the next one between the same QPs could meet; the
/// peer may have become one that does not repeat selectively.
#[test]
fn a_connection_begins_with_nothing_kept() {
    for_seeds("a_connection_begins_with_nothing_kept", 50, |seed| {
        let mut rng = Rng::new(seed);
        let mut long = Long::new([true, rng.chance(0.7)], lossy(0.1), QpType::Rc);
        for _ in 0..4 {
            let op = rng.pick(&[SendOp::Write, SendOp::Send, SendOp::Read]);
            let data = any_bytes(&mut rng, LEN);
            long.begin(op, &data);
            (0..rng.below(400)).for_each(|_| _ = long.net.step());
            let now = long.net.now();
            for at in 0..2 {
                long.net.hosts[at]
                    .to_state(long.qpn[at], QpState::Reset, now)
                    .expect("any state allows that");
            }
            assert!(long.net.run_until_idle(100_000), "what is on the wire finds nobody");
            while long.cq.iter().any(|cq| cq.poll().is_some()) {}
            long.connect();
            long.message(op, &any_bytes(&mut rng, LEN));
        }
    });
}

/// The pool is given back by QPs that fail or end with a gap: many more of them than it holds, one after the
/// other.
#[test]
fn gaps_end_with_their_queue_pairs() {
    let mut net = Net::new(2, NicConfig::default(), Faults::default(), 2);
    let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let memory = [0, 1].map(|at| net.hosts[at].region(1 << 20, all));
    let cq = SimCq::new(4096);
    for n in 0..300u64 {
        let sq = [SimSq::new(4), SimSq::new(4)];
        let qpn = [0, 1].map(|at| {
            let own = RecvSource::Own(SimRq::new(1, 1));
            net.hosts[at].qp(QpType::Rc, &sq[at], own, [&cq, &cq], true)
        });
        net.connect(
            QpType::Rc,
            QpAt { host: 0, qpn: qpn[0] },
            QpAt { host: 1, qpn: qpn[1] },
            &Setup { mtu: Mtu::M256, ..Setup::default() },
        );
        net.faults.loss = 0.5;
        let wqe =
            SendWqe { op: SendOp::Write, remote_addr: memory[1].0, rkey: memory[1].1, ..SendWqe::default() };
        let sge = Sge { addr: memory[0].0, len: 50_000, lkey: memory[0].1 };
        sq[0].post(Send { wqe, sges: vec![sge], inline: None }).expect("there is room");
        net.doorbell(0, qpn[0]);
        (0..n % 7 + 2).for_each(|_| _ = net.step());
        for (at, qpn) in qpn.into_iter().enumerate() {
            let (now, host) = (net.now(), &mut net.hosts[at]);
            if n % 2 == 0 {
                host.to_state(qpn, QpState::Err, now).expect("any state allows that");
            }
            host.nic.destroy_qp(&mut host.env, qpn).expect("it exists");
        }
        net.faults.loss = 0.0;
        assert!(net.run_until_idle(10_000));
    }
    let mut pair = Long::new([true; 2], lossy(0.05), QpType::Rc);
    pair.message(SendOp::Write, &any_bytes(&mut Rng::new(1), LEN));
    let kept = net.hosts[1].nic.counters().kept_ahead.get();
    assert!(kept > 4096, "the pool went round: {kept}");
}

/// A peer that gets no CPU for a while has all that was sent in its socket. Of a window that a timeout
/// declared lost, only the few packets that ask go again, with selective repeat and without.
#[test]
fn a_peer_that_was_asleep_is_not_sent_everything_again() {
    for repeat in [true, false] {
        let faults = Faults { service: 4_000, ..Faults::default() };
        let mut long = Long::new([repeat; 2], faults, QpType::Rc);
        let mut rng = Rng::new(8);
        long.message(SendOp::Write, &any_bytes(&mut rng, LEN));
        let data = any_bytes(&mut rng, LEN);
        long.begin(SendOp::Write, &data);
        long.net.sleep(1, 8_000_000);
        assert!(long.net.run_until_idle(200_000), "it ends");
        assert_eq!(long.cq[0].poll().map(|(c, _)| c.status), Some(WcStatus::Success));
        let c = long.counters(0);
        let (again, timeouts) = (c.retransmitted.get(), c.timeouts.get());
        assert!(timeouts > 0 && again <= 6 * timeouts, "repeat {repeat}: {again} again, {timeouts} timeouts");
    }
}

/// No receive WQE for what was kept: it is refused as if it had just come, and comes again.
#[test]
fn what_was_kept_may_have_to_wait_for_a_receive() {
    for_seeds("what_was_kept_may_have_to_wait_for_a_receive", 50, |seed| {
        let mut pair = Pair::rc();
        let mut rng = Rng::new(seed);
        pair.net.faults = Faults { loss: 0.2, reorder: 0.1, ..Faults::default() };
        for id in 0..12 {
            let sge = pair.sge(0, 64);
            pair.post(pair.wqe(id, SendOp::Send), &[sge]);
        }
        let mut posted = 0;
        let mut done = 0;
        for _ in 0..100_000 {
            if posted < 12 && rng.chance(0.02) {
                pair.post_recv(posted, 64);
                posted += 1;
            }
            let more = pair.net.step();
            done += pair.polled(0).iter().filter(|(_, s)| *s == WcStatus::Success).count();
            if !more && done == 12 {
                break;
            }
        }
        let got: Vec<u64> = pair.polled(1).into_iter().map(|(id, _)| id).collect();
        assert_eq!((done, got), (12, (0..12).collect()));
    });
}

/// A pool of 16 frames and two gaps, which a host holds that got no CPU since. Another host finds it empty
/// for a while, and then its own packets are kept; the first sends again what was kept for it, and loses
/// nothing.
#[test]
fn frames_kept_for_silent_peers_go_to_others() {
    for op in [SendOp::Write, SendOp::Read] {
        let cfg = NicConfig { kept: 16, gaps: 2, ..NicConfig::default() };
        let mut net = Net::new(3, cfg, Faults::default(), 2);
        let rights = crate::common::all_rights();
        let memory = [0, 1, 2].map(|at| net.hosts[at].region(8 * u64::from(LEN), rights));
        let cq = [(); 3].map(|()| SimCq::new(64));
        let mut rng = Rng::new(11);
        let mut begun: Vec<(usize, u32, Vec<u8>)> = vec![];
        let mut begin = |net: &mut Net, from: usize, op: SendOp| {
            let sq = [SimSq::new(8), SimSq::new(1)];
            let ends = [(from, 0), (1, 1)].map(|(host, end)| {
                let own = RecvSource::Own(SimRq::new(1, 1));
                let qpn = net.hosts[host].qp(QpType::Rc, &sq[end], own, [&cq[host], &cq[host]], true);
                QpAt { host, qpn }
            });
            net.connect(
                QpType::Rc,
                ends[0],
                ends[1],
                &Setup { rd_atomic: 4, timeout: 18, ..Setup::default() },
            );
            let (at, data) = (begun.len() as u32 * LEN, any_bytes(&mut rng, LEN));
            let source = if op == SendOp::Read { 1 } else { from };
            net.hosts[source].env.memory.write(memory[source].0 + u64::from(at), &data);
            /* in pieces, so that READs are many requests */
            for piece in 0..8 {
                let offset = u64::from(at + piece * (LEN / 8));
                let wqe = SendWqe {
                    op,
                    remote_addr: memory[1].0 + offset,
                    rkey: memory[1].1,
                    ..SendWqe::default()
                };
                let sge = Sge { addr: memory[from].0 + offset, len: LEN / 8, lkey: memory[from].1 };
                sq[0].post(Send { wqe, sges: vec![sge], inline: None }).expect("there is room");
            }
            net.doorbell(from, ends[0].qpn);
            begun.push((from, at, data));
        };
        net.set_link(0, 1, lossy(0.5));
        net.set_link(2, 1, lossy(0.05));
        (0..2).for_each(|_| begin(&mut net, 0, SendOp::Write));
        begin(&mut net, 0, op);
        let kept = |net: &Net| net.hosts[1].nic.counters().kept_ahead.get();
        while kept(&net) < 16 && net.step() {}
        net.sleep(0, 10_000_000_000);
        net.purge(0, 1);
        let before = kept(&net);
        begin(&mut net, 2, SendOp::Write);
        while cq[2].len() < 8 && net.step() {}
        assert_eq!((kept(&net), cq[2].len()), (before, 8), "the pool is empty, and all arrives");
        net.suspend(2_000_000_000);
        begin(&mut net, 2, SendOp::Write);
        while cq[2].len() < 16 && net.step() {}
        assert!(kept(&net) > before, "it is not any more");
        assert!(net.now() < 5_000_000_000, "and the other still sleeps");
        assert!(net.run_until_idle(400_000), "it ends");
        for (at, count) in [(0, 24), (2, 16)] {
            let done: Vec<_> = std::iter::from_fn(|| cq[at].poll()).map(|(c, _)| c.status).collect();
            assert_eq!(done, vec![WcStatus::Success; count], "{op:?}");
        }
        for (from, at, data) in begun {
            for end in [from, 1] {
                let there = memory[end].0 + u64::from(at);
                assert!(net.hosts[end].env.memory.read(there, data.len()) == data, "{op:?} of {from}");
            }
        }
    }
}

/// A repetition that is lost is overtaken by nothing: it is asked for after half a millisecond of silence,
/// not after the first timeout's whole one.
#[test]
fn a_lost_repetition_is_asked_for_early() {
    let mut long = Long::new([true; 2], Faults::default(), QpType::Rc);
    let mut rng = Rng::new(6);
    long.message(SendOp::Write, &any_bytes(&mut rng, LEN));
    long.net.faults.loss = 0.1;
    let (mut spent, messages) = (0, 200);
    for _ in 0..messages {
        let began = long.net.now();
        long.begin(SendOp::Write, &any_bytes(&mut rng, LEN));
        while long.cq[0].is_empty() && long.net.step() {}
        spent += long.net.now() - began;
        assert_eq!(long.cq[0].poll().map(|(c, _)| c.status), Some(WcStatus::Success));
    }
    let each = spent / messages;
    println!("{each} ns each");
    assert!(each < 1_000_000, "{each} ns each");
}
