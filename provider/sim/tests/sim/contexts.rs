//! A card with room for few QP contexts, on virtual time: what a miss costs by each policy.

use starverbs_core::qp::RecvSource;
use starverbs_core::qpc::Policy;
use starverbs_core::{
    Access, ContextCache, Nanos, NicConfig, QpState, QpType, Qpn, SendFlags, SendOp, SendWqe, Sge, WcStatus,
};
use starverbs_sim::{Faults, Net, QpAt, Send, Setup, SimCq, SimRq, SimSq};

const ENTRIES: u32 = 8;
const MISS: Nanos = 500;
const FETCH: Nanos = 500;
const POLICIES: [Policy; 3] = [Policy::Fcfs, Policy::NonBlocking, Policy::LatencyHiding];
const STEPS: usize = 1_000_000;

/// QPs from host 0 to host 1, of which one has room for few contexts and the other for all.
struct Fan {
    net: Net,
    /// Number here, send queue, number there
    qps: Vec<(Qpn, SimSq, Qpn)>,
    cq: SimCq,
    from: (u64, u32),
    to: (u64, u32),
}

impl Fan {
    fn new(qps: usize, contexts: Option<ContextCache>, window: u32) -> Self {
        Fan::with_few_at(0, qps, contexts, window)
    }

    fn with_few_at(few: u8, qps: usize, contexts: Option<ContextCache>, window: u32) -> Self {
        let mut net = Net::new(2, NicConfig { window, ..NicConfig::default() }, Faults::default(), 1);
        let config = NicConfig { contexts, window, ..NicConfig::default() };
        net.hosts[usize::from(few)] = starverbs_sim::SimHost::new(few, config, 1);
        let cqs = [SimCq::new(4096), SimCq::new(16)];
        let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let (from, to) = (net.hosts[0].region(4096, all), net.hosts[1].region(4096, all));
        let mut made = Vec::new();
        for _ in 0..qps {
            let [sq, other] = [(); 2].map(|()| SimSq::new(16));
            let [a, b] = [(0, &sq), (1, &other)].map(|(at, sq): (usize, &SimSq)| {
                let rq = RecvSource::Own(SimRq::new(1, 1));
                net.hosts[at].qp(QpType::Rc, sq, rq, [&cqs[at], &cqs[at]], true)
            });
            net.connect(QpType::Rc, QpAt { host: 0, qpn: a }, QpAt { host: 1, qpn: b }, &Setup::default());
            made.push((a, sq, b));
        }
        let [cq, _] = cqs;
        Fan { net, qps: made, cq, from, to }
    }

    fn post(&mut self, qp: usize, wr_id: u64) {
        let sges = vec![Sge { addr: self.from.0, len: 8, lkey: self.from.1 }];
        let wqe = SendWqe {
            wr_id,
            op: SendOp::Write,
            flags: SendFlags::SIGNALED,
            length: 8,
            remote_addr: self.to.0,
            rkey: self.to.1,
            ..SendWqe::default()
        };
        self.qps[qp].1.post(Send { wqe, sges, inline: None }).expect("there is room");
        self.net.doorbell(0, self.qps[qp].0);
    }

    /// Completions so far, which must all be good.
    fn polled(&self) -> Vec<u64> {
        std::iter::from_fn(|| self.cq.poll())
            .map(|(cqe, _)| {
                assert_eq!(cqe.status, WcStatus::Success);
                cqe.wr_id
            })
            .collect()
    }

    /// Time from a doorbell of `qp` to its completion, all being quiet before.
    fn latency(&mut self, qp: usize) -> Nanos {
        let before = self.net.now();
        self.post(qp, 0);
        while self.polled().is_empty() {
            assert!(self.net.step(), "it completes");
        }
        let took = self.net.now() - before;
        assert!(self.net.run_until_idle(STEPS), "it ends");
        took
    }

    /// Time that `each` messages of each QP take, posted in turn, at once.
    fn rate(&mut self, each: u64) -> Nanos {
        let (before, n) = (self.net.now(), self.qps.len());
        for message in 0..each {
            (0..n).for_each(|qp| self.post(qp, qp as u64 * 100 + message));
        }
        let (mut done, mut last) = (vec![0; n], before);
        while done.iter().sum::<u64>() < each * n as u64 {
            assert!(self.net.step(), "all complete");
            for wr_id in self.polled() {
                let qp = wr_id as usize / 100;
                assert_eq!(wr_id % 100, done[qp], "in order");
                done[qp] += 1;
                last = self.net.now();
            }
        }
        last - before
    }
}

fn contexts(policy: Policy) -> Option<ContextCache> {
    Some(ContextCache { entries: ENTRIES, policy, miss: MISS, fetch: FETCH })
}

/// A miss costs its time, once a message, and nothing where the context is fetched while the WQE is.
#[test]
fn a_miss_is_hidden_or_it_is_not() {
    let plain = Fan::new(2, None, 1 << 20).latency(0);
    for policy in POLICIES {
        let mut fan = Fan::new(2 * ENTRIES as usize, contexts(policy), 1 << 20);
        let (miss, hit) = (fan.latency(0), fan.latency(0));
        assert_eq!(hit, plain + FETCH, "{policy:?}: WQEs are fetched");
        let exposed = if policy == Policy::LatencyHiding { 0 } else { MISS };
        assert_eq!(miss, hit + exposed, "{policy:?}");
        (1..2 * ENTRIES as usize).for_each(|qp| assert_eq!(fan.latency(qp), miss, "{policy:?}"));
        assert_eq!(fan.latency(0), miss, "{policy:?}: it was evicted");
        let c = fan.net.hosts[0].nic.counters();
        assert!(c.qpc_evicted.get() > 0 && c.qpc_misses.get() + c.qpc_prefetched.get() > 0);
        assert!(c.qpc_on_chip.get() > 0);
    }
}

/// As many QPs as the cache has entries: no policy makes a difference. Four times as many: FCFS waits for
/// each miss by itself, the others for many at once.
#[test]
fn only_first_come_first_served_falls() {
    let times = |qps: usize| {
        POLICIES.map(|policy| {
            let mut fan = Fan::new(qps, contexts(policy), 1 << 20);
            /* contexts are there, where there is room */
            (0..qps).for_each(|qp| {
                fan.latency(qp);
            });
            fan.rate(4)
        })
    };
    let [fcfs, non_blocking, hiding] = times(ENTRIES as usize);
    assert!(fcfs == non_blocking && non_blocking == hiding, "{fcfs} {non_blocking} {hiding}");
    let [fcfs, non_blocking, hiding] = times(4 * ENTRIES as usize);
    let misses = 4 * Nanos::from(ENTRIES) * MISS;
    assert!(fcfs > misses, "{fcfs}: at least a miss a QP, one at a time");
    assert!(fcfs > 2 * non_blocking, "{fcfs} {non_blocking}");
    assert!(non_blocking >= hiding, "{non_blocking} {hiding}");
}

/// Many QPs that wait for the window of one path, with one context in the cache: each gets its turn.
#[test]
fn nobody_starves_with_one_context() {
    for policy in POLICIES {
        let cache = ContextCache { entries: 1, policy, miss: MISS, fetch: 0 };
        let mut fan = Fan::new(100, Some(cache), 4 << 10);
        fan.rate(10);
        let c = fan.net.hosts[0].nic.counters();
        assert_eq!((c.timeouts.get(), c.retransmitted.get()), (0, 0), "{policy:?}");
    }
}

/// A QP that is reset while its doorbell, or its turn, waits for its context works on when it is connected
/// anew, and so does another QP in its place.
#[test]
fn what_waits_ends_with_its_qp() {
    for policy in POLICIES {
        for steps in 0..6 {
            let mut fan = Fan::new(3, contexts(policy), 1 << 20);
            fan.post(0, 1);
            fan.post(1, 2);
            (0..steps).for_each(|_| {
                fan.net.step();
            });
            let (qpn, _, b) = fan.qps[0].clone();
            let now = fan.net.now();
            fan.net.hosts[0].to_state(qpn, QpState::Reset, now).expect("any state to RESET");
            fan.polled();
            fan.net.hosts[1].to_state(b, QpState::Reset, now).expect("any state to RESET");
            fan.net.connect(QpType::Rc, QpAt { host: 0, qpn }, QpAt { host: 1, qpn: b }, &Setup::default());
            fan.post(0, 3);
            assert!(fan.net.run_until_idle(STEPS), "it ends");
            assert!(fan.polled().contains(&3), "{policy:?}, after {steps} steps");
            assert_eq!(fan.qps[0].1.outstanding(), 0);
        }
    }
}

/// A request that waits for the context of a queue pair that is reset meanwhile is nothing to the next
/// connection of that queue pair, though that one expects the same PSN.
#[test]
fn a_request_ends_with_the_queue_pair_that_it_waits_for() {
    for policy in POLICIES {
        let cache = ContextCache { entries: ENTRIES, policy, miss: 1_000_000, fetch: 0 };
        let mut fan = Fan::with_few_at(1, 1, Some(cache), 1 << 20);
        fan.net.hosts[0].env.memory.write(fan.from.0, &[7; 8]);
        fan.post(0, 1);
        while fan.net.hosts[1].nic.counters().qpc_misses.get() == 0 {
            assert!(fan.net.step(), "the request comes");
        }
        let ((qpn, _, b), now) = (fan.qps[0].clone(), fan.net.now());
        for (host, qpn) in [(0, qpn), (1, b)] {
            fan.net.hosts[host].to_state(qpn, QpState::Reset, now).expect("any state to RESET");
        }
        fan.net.connect(QpType::Rc, QpAt { host: 0, qpn }, QpAt { host: 1, qpn: b }, &Setup::default());
        assert!(fan.net.run_until_idle(STEPS), "it ends");
        assert_eq!(fan.net.hosts[1].env.memory.read(fan.to.0, 8), [0xa5; 8], "{policy:?}");
        assert_eq!(fan.net.hosts[1].nic.counters().drop_state.get(), 1, "{policy:?}");
        fan.polled();
        fan.latency(0);
        assert_eq!(fan.net.hosts[1].env.memory.read(fan.to.0, 8), [7; 8], "{policy:?}");
    }
}

/// A request that comes before the connection that it would fit waits for no context.
#[test]
fn a_request_to_a_queue_pair_that_takes_none_is_dropped_at_once() {
    for policy in POLICIES {
        let cache = ContextCache { entries: ENTRIES, policy, miss: 1_000_000, fetch: 0 };
        let mut fan = Fan::with_few_at(1, 1, Some(cache), 1 << 20);
        let (_, _, b) = fan.qps[0].clone();
        fan.net.hosts[1].to_state(b, QpState::Reset, 0).expect("any state to RESET");
        fan.post(0, 1);
        while fan.net.hosts[1].nic.counters().rx_packets.get() == 0 {
            assert!(fan.net.step(), "the request comes");
        }
        assert_eq!(fan.net.hosts[1].nic.counters().drop_state.get(), 1, "{policy:?}");
        assert_eq!(fan.net.hosts[1].nic.next_context(), None, "{policy:?}");
    }
}
