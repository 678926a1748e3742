//! Connections of plain RoCEv2 that become StaR's while their programs run: every message once, in order,
//! with the right bytes, whatever the wire does to what the ends say of it; and who loses its peer meanwhile
//! finds out as ever.

mod common;
#[path = "common/live.rs"]
mod live;
#[path = "common/rc.rs"]
mod program;

use std::collections::BTreeMap;

use common::{any_faults, for_seeds};
use live::Live;
use program::{Conn, Pool, Shape};
use starverbs_core::{Mtu, NicConfig, SrqId, WcStatus};
use starverbs_sim::{Faults, Net, Rng, STAR_OPS, Setup, SimCq, SimRq};
use starverbs_star::control::Role;
use starverbs_star::negotiate::THRESHOLD;

const STEPS: usize = 500_000;
/// Longer than anybody is waited for of whom something is wanted, ns.
const LONG: u64 = 600_000_000_000;

struct Run {
    live: Live,
    rng: Rng,
    cqs: [SimCq; 2],
    pools: [Option<Pool>; 2],
    /// How often the cards still ask for something
    asks: u32,
    /// Connections of StaR may become plain again
    goes_back: bool,
}

impl Run {
    fn new(seed: u64) -> Self {
        Run::with(seed, false)
    }

    /// `shared`: receives may come from shared queues.
    fn with(seed: u64, shared: bool) -> Self {
        let mut rng = Rng::new(seed);
        let faults = any_faults(&mut rng);
        let mut net = Net::new(2, NicConfig::default(), faults, seed);
        for host in &mut net.hosts {
            host.env.port = rng.pick(&[1, 3, 64]);
        }
        let cqs = [SimCq::new(4096), SimCq::new(4096)];
        let mtu = rng.pick(&[Mtu::M256, Mtu::M1024, Mtu::M4096]);
        let psn = rng.pick(&[0, 0xff_fff0, 5]);
        let shape = Shape {
            setup: Setup { mtu, rd_atomic: rng.pick(&[1, 2, 16]), psn, ..Setup::default() },
            sq_slots: 1 << rng.below(7),
            rq_slots: rng.pick(&[1, 2, 3, 8, 64]),
            ops: rng.pick(&[12, 40, 100]),
            kinds: if rng.chance(0.6) {
                STAR_OPS.to_vec()
            } else {
                vec![rng.pick(STAR_OPS), rng.pick(STAR_OPS)]
            },
        };
        let mut srqs: [Option<(SrqId, SimRq)>; 2] = [None, None];
        for (host, srq) in net.hosts.iter_mut().zip(&mut srqs) {
            if shared && rng.chance(0.7) {
                let rq = SimRq::new(rng.pick(&[1, 2, 16]), 4);
                *srq = Some((host.nic.create_srq(host.pd, rq.clone(), 0, 0).expect("an SRQ"), rq));
            }
        }
        let n = rng.within(1, 3);
        let mut conns: Vec<Conn> =
            (0..n).map(|_| Conn::new(&mut net, &mut rng, &cqs, srqs.clone(), &shape)).collect();
        let pools = Pool::of(&mut net, &mut rng, &conns, &srqs);
        conns.iter_mut().flat_map(|conn| &mut conn.ends).for_each(|end| end.signal_enough());
        let few = rng.below(2 * u64::from(THRESHOLD)) as u32;
        let mut counts = [THRESHOLD + 1 + rng.below(50) as u32, few];
        if rng.chance(0.5) {
            counts.reverse();
        }
        let live = Live::new(net, Rng::new(!seed), conns, cqs.clone(), counts);
        Run { live, rng, cqs, pools, asks: 6, goes_back: false }
    }

    /// One end's card asks that a connection become another.
    fn ask(&mut self, at: usize, host: usize) {
        if self.goes_back && self.live.sides[at][host].role().is_some() {
            self.live.counts = [0; 2];
            return self.live.ask_back(at, host);
        }
        if self.goes_back {
            self.live.counts[host] = THRESHOLD + 1 + self.rng.below(50) as u32;
            self.live.counts[1 - host] = self.rng.below(2 * u64::from(THRESHOLD)) as u32;
        }
        self.live.ask(at, host);
    }

    /// Programs post as chance has it, and cards ask.
    fn act(&mut self, eager: bool) -> bool {
        let mut acted = false;
        if self.asks > 0 && self.rng.chance(if self.goes_back { 0.1 } else { 0.02 }) {
            self.asks -= 1;
            let (at, host) = (self.rng.below(self.live.conns.len() as u64) as usize, self.rng.below(2));
            self.ask(at, host as usize);
            acted = true;
        }
        let mut conns = std::mem::take(&mut self.live.conns);
        for (conn, sides) in conns.iter_mut().zip(0..) {
            if self.live.sides[sides].iter().any(|side: &live::Edge| side.gone) {
                continue;
            }
            let live = &mut self.live;
            acted |= conn.post(&mut self.rng, eager, &mut |host, qpn, _| live.doorbell(host, qpn));
        }
        self.live.conns = conns;
        for host in 0..2 {
            if let Some(pool) = &mut self.pools[host]
                && (eager || self.rng.chance(0.3))
                && pool.fill()
            {
                acted = true;
                self.live.ring_srq(host);
            }
        }
        acted
    }

    fn poll(&mut self) -> bool {
        self.live.poll_slots();
        let mut any = false;
        for host in 0..2 {
            while let Some((cqe, solicited)) = self.cqs[host].poll() {
                any = true;
                let Live { net, conns, .. } = &mut self.live;
                let wr = self.pools[host].as_ref().map_or(&[][..], |pool| &pool.buffers);
                let known = conns.iter_mut().any(|c| c.complete(net, host, &cqe, solicited, wr));
                assert!(known, "a completion of no QP: {cqe:?}");
            }
        }
        any
    }

    fn go(&mut self) {
        for _ in 0..STEPS {
            self.act(false);
            let happened = self.live.step();
            let polled = (!happened || self.rng.chance(0.5)) && self.poll();
            if !happened && !polled && !self.act(true) {
                return;
            }
        }
        panic!("no end after {STEPS} steps, at {} ns", self.live.net.now());
    }

    fn finish(&self) {
        for conn in &self.live.conns {
            conn.finish(&self.live.net);
        }
        for (at, sides) in self.live.sides.iter().enumerate() {
            assert!(sides.iter().all(|side| !side.lasts()), "connection {at}: a round lasts for ever");
            let [a, b] = sides.each_ref().map(|side| side.role());
            assert_eq!(a.map(Role::other), b, "connection {at}");
        }
        for (host, c) in self.live.net.hosts.iter().zip(&self.live.stats) {
            assert_eq!(host.env.events, vec![], "nothing to complain about");
            assert!(host.env.memory.gaps_intact(), "nobody wrote beside the buffers");
            assert_eq!((c.error_completions.get(), c.cq_overrun.get(), c.retry_exceeded.get()), (0, 0, 0));
            assert_eq!((c.star_refused.get(), c.star_bad.get()), (0, 0));
            assert_eq!(host.nic.counters().error_completions.get(), 0);
        }
    }

    fn stars(&self) -> usize {
        self.live.sides.iter().filter(|sides| sides[0].role().is_some()).count()
    }
}

#[test]
fn connections_change_while_they_run() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    /* connections that changed, and runs that carried something before and after */
    static STARS: AtomicUsize = AtomicUsize::new(0);
    static BOTH: AtomicUsize = AtomicUsize::new(0);
    for_seeds("connections_change_while_they_run", 600, |seed| {
        let mut run = Run::new(seed);
        run.go();
        run.finish();
        RUNS.fetch_add(1, Ordering::Relaxed);
        STARS.fetch_add(run.stars(), Ordering::Relaxed);
        let of = |at: usize| run.live.net.hosts[at].nic.counters().completions.get() > 0;
        let stars = run.live.stats.iter().any(|stats| stats.completions.get() > 0);
        BOTH.fetch_add(usize::from((of(0) || of(1)) && stars), Ordering::Relaxed);
    });
    let [runs, stars, both] = [&RUNS, &STARS, &BOTH].map(|count| count.load(Ordering::Relaxed));
    assert!(runs < 100 || stars > runs / 3 && both > runs / 4, "{stars} and {both} of {runs}");
}

/// There and back again, as often as it comes, with either end in either role.
#[test]
fn connections_go_to_and_fro_while_they_run() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    static RETURNS: AtomicUsize = AtomicUsize::new(0);
    for_seeds("connections_go_to_and_fro_while_they_run", 600, |seed| {
        let mut run = Run::new(seed);
        (run.goes_back, run.asks) = (true, 60);
        run.go();
        run.finish();
        RUNS.fetch_add(1, Ordering::Relaxed);
        let sides = run.live.sides.iter().flatten();
        RETURNS.fetch_add(sides.map(|side| side.returns as usize).sum(), Ordering::Relaxed);
        for [a, b] in &run.live.sides {
            assert_eq!(a.returns, b.returns, "both know");
        }
    });
    let [runs, returns] = [&RUNS, &RETURNS].map(|count| count.load(Ordering::Relaxed));
    assert!(runs < 100 || returns > runs, "{returns} of {runs}");
}

#[test]
fn shared_receives_go_to_and_fro_with_their_connections() {
    for_seeds("shared_receives_go_to_and_fro_with_their_connections", 400, |seed| {
        let mut run = Run::with(seed, true);
        (run.goes_back, run.asks) = (true, 60);
        run.go();
        run.finish();
    });
}

/// One end is destroyed, or goes to ERR, anywhere in it.
fn lose(seed: u64, fails: bool, goes_back: bool) {
    let mut run = Run::new(seed);
    (run.goes_back, run.asks) = (goes_back, if goes_back { 30 } else { run.asks });
    for _ in 0..run.rng.below(if goes_back { 1500 } else { 300 }) {
        run.act(false);
        run.live.step();
        run.poll();
    }
    let lost = run.rng.below(2) as usize;
    let left = 1 - lost;
    for at in 0..run.live.conns.len() {
        if run.rng.chance(0.7) {
            let host = run.rng.below(2) as usize;
            run.ask(at, host);
        }
    }
    for _ in 0..run.rng.below(60) {
        run.live.step();
        run.poll();
    }
    for at in 0..run.live.conns.len() {
        if fails {
            run.live.fail(at, lost);
        } else {
            run.live.destroy(at, lost);
        }
        let qpn = run.live.sides[at][left].qpn;
        run.live.doorbell(left, qpn);
    }
    let mut failed = BTreeMap::new();
    for step in 0..=STEPS {
        assert!(step < STEPS, "no end, at {} ns", run.live.net.now());
        let happened = run.live.step();
        run.live.poll_slots();
        for host in 0..2 {
            while let Some((cqe, _)) = run.cqs[host].poll() {
                let key = (host, cqe.qpn);
                match cqe.status {
                    WcStatus::Success => assert!(!failed.contains_key(&key), "a success behind a failure"),
                    WcStatus::RetryExcErr => {
                        assert!(host == left && failed.insert(key, ()).is_none());
                    }
                    status => {
                        assert_eq!(status, WcStatus::WrFlushErr);
                        failed.insert(key, ());
                    }
                }
            }
        }
        /* a stateless end that has nothing to send may ask for ever whether its peer begins */
        if !happened || run.live.net.now() > LONG {
            break;
        }
    }
    for (at, conn) in run.live.conns.iter().enumerate() {
        let waits = conn.ends[left].sq.outstanding();
        let side = &run.live.sides[at][left];
        assert!(
            waits == 0 || !conn.ends[left].wants_completions(),
            "a send waits for nobody: {waits} of {:?}, {:?}",
            side.qpn,
            side.role()
        );
        assert!(waits == 0 || run.live.has_failed(at, left) || !run.live.sides[at][left].lasts());
        if fails {
            assert!(run.live.has_failed(at, lost));
            assert_eq!(conn.ends[lost].sq.outstanding(), 0, "all is flushed");
        }
    }
    assert!(run.live.net.hosts.iter().all(|host| host.env.memory.gaps_intact()));
}

#[test]
fn an_end_that_is_destroyed_meanwhile_is_noticed() {
    for_seeds("an_end_that_is_destroyed_meanwhile_is_noticed", 300, |seed| lose(seed, false, false));
}

#[test]
fn an_end_that_fails_meanwhile_is_flushed() {
    for_seeds("an_end_that_fails_meanwhile_is_flushed", 300, |seed| lose(seed, true, false));
}

#[test]
fn an_end_that_is_destroyed_on_the_way_back_is_noticed() {
    for_seeds("an_end_that_is_destroyed_on_the_way_back_is_noticed", 300, |seed| lose(seed, false, true));
}

#[test]
fn an_end_that_fails_on_the_way_back_is_flushed() {
    for_seeds("an_end_that_fails_on_the_way_back_is_flushed", 300, |seed| lose(seed, true, true));
}

/// Many rounds, each given up or not, on the worst wire.
#[test]
fn the_worst_wire_changes_nothing() {
    for_seeds("the_worst_wire_changes_nothing", 100, |seed| {
        let mut run = Run::new(seed);
        run.live.net.faults =
            Faults { loss: 0.2, duplicate: 0.2, reorder: 0.3, late: 2_000_000, ..run.live.net.faults };
        (run.asks, run.goes_back) = (30, seed % 2 == 1);
        run.go();
        run.finish();
    });
}
