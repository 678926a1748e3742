//! StaR on a hostile wire, with the programs of RC: every message once, in order, with the right bytes and
//! completions, while one end's card keeps nothing between two packets.

mod common;
#[path = "common/rc.rs"]
mod program;
#[path = "common/star.rs"]
mod world;

use common::{any_faults, for_seeds, is_clean};
use program::{Conn, Pool, Shape};
use starverbs_core::mr::MrAttr;
use starverbs_core::{Access, Counters, Mtu, Nanos, NicConfig, QpState, SendFlags, SrqId, WcStatus};
use starverbs_sim::{Faults, Net, Rng, STAR_OPS, Setup, SimCq, SimRq};
use world::{Forger, SF, SL, Star, World};

const STEPS: usize = 500_000;
/// Longer than anybody waits for who is gone, ns.
const EVER: Nanos = 100_000_000_000;

fn any_shape(rng: &mut Rng) -> (Shape, Star) {
    let mtu = rng.pick(&[Mtu::M256, Mtu::M512, Mtu::M1024, Mtu::M2048, Mtu::M4096]);
    let rd_atomic = rng.pick(&[1, 2, 16]);
    let kinds =
        if rng.chance(0.6) { STAR_OPS.to_vec() } else { vec![rng.pick(STAR_OPS), rng.pick(STAR_OPS)] };
    let shape = Shape {
        setup: Setup { mtu, ..Setup::default() },
        sq_slots: 1 << rng.below(7),
        rq_slots: rng.pick(&[1, 2, 3, 8, 64]),
        ops: rng.pick(&[3, 12, 40]),
        kinds,
    };
    let star = Star {
        mtu,
        rq_depth: 1 << rng.below(6),
        replay_slots: 1 << rng.below(5),
        rd_atomic,
        window: 1 << rng.within(2, 8),
    };
    (shape, star)
}

struct Run {
    world: World,
    rng: Rng,
    cqs: [SimCq; 2],
    pools: [Option<Pool>; 2],
}

impl Run {
    fn new(seed: u64, faults: Option<Faults>, srq: bool) -> Self {
        Run::with(seed, faults, srq, false)
    }

    /// Somebody on the wire forges control messages; `sealed`: the hosts have a key.
    fn forged(seed: u64, sealed: bool) -> Self {
        Run::prepared(seed, None, false, |world| {
            world.nic = seed.is_multiple_of(3);
            world.forger = Some(Forger::default());
            if sealed {
                world.seal();
            }
        })
    }

    /// `nic`: SF's ends are QPs of its card.
    fn with(seed: u64, faults: Option<Faults>, srq: bool, nic: bool) -> Self {
        Run::prepared(seed, faults, srq, |world| world.nic = nic)
    }

    fn prepared(seed: u64, faults: Option<Faults>, srq: bool, prepare: impl FnOnce(&mut World)) -> Self {
        let mut rng = Rng::new(seed);
        let faults = faults.unwrap_or_else(|| any_faults(&mut rng));
        let mut net = Net::new(2, NicConfig::default(), Faults::default(), seed);
        let cqs = [SimCq::new(4096), SimCq::new(4096)];
        let mut srqs: [Option<(SrqId, SimRq)>; 2] = [None, None];
        for (at, host) in net.hosts.iter_mut().enumerate() {
            host.env.port = rng.pick(&[1, 3, 64]);
            if srq {
                let rq = SimRq::new(rng.pick(&[1, 2, 16]), 4);
                let id = host.nic.create_srq(host.pd, rq.clone(), 0, 0).expect("an SRQ");
                srqs[at] = Some((id, rq));
            }
        }
        let (shape, star) = any_shape(&mut rng);
        let n = if srq { rng.within(2, 4) } else { rng.within(1, 3) };
        let conns: Vec<Conn> =
            (0..n).map(|_| Conn::new(&mut net, &mut rng, &cqs, srqs.clone(), &shape)).collect();
        let pools = Pool::of(&mut net, &mut rng, &conns, &srqs);
        let mut world = World::new(net, faults, Rng::new(!seed), srqs.map(|srq| srq.map(|(_, rq)| rq)));
        prepare(&mut world);
        world.learn();
        for conn in conns {
            world.connect(conn, &cqs, &star);
        }
        Run { world, rng, cqs, pools }
    }

    fn poll(&mut self) -> bool {
        self.world.look();
        let mut any = false;
        for host in 0..2 {
            while let Some((cqe, solicited)) = self.cqs[host].poll() {
                any = true;
                let wr = self.pools[host].as_ref().map_or(&[][..], |p| &p.buffers);
                let World { net, conns, .. } = &mut self.world;
                let known = conns.iter_mut().any(|c| c.complete(net, host, &cqe, solicited, wr));
                assert!(known, "a completion of no QP: {cqe:?}");
            }
        }
        any
    }

    fn act(&mut self, eager: bool) -> bool {
        let mut acted = false;
        let mut conns = std::mem::take(&mut self.world.conns);
        for conn in &mut conns {
            let world = &mut self.world;
            acted |= conn.post(&mut self.rng, eager, &mut |host, qpn, _| world.doorbell(host, qpn));
        }
        self.world.conns = conns;
        for pool in self.pools.iter_mut().flatten() {
            if eager || self.rng.chance(0.3) {
                acted |= pool.fill();
            }
        }
        acted
    }

    fn go(&mut self) {
        for _ in 0..STEPS {
            self.act(false);
            let happened = self.world.step();
            let polled = (!happened || self.rng.chance(0.5)) && self.poll();
            if !happened && !polled && !self.act(true) {
                return;
            }
        }
        panic!("no end after {STEPS} steps, at {} ns: {:?}", self.world.now, self.world.timers());
    }

    /// All of it, and whether it was right.
    fn complete(mut self) -> Self {
        self.go();
        self.finish();
        self
    }

    fn finish(&self) {
        for conn in &self.world.conns {
            conn.finish(&self.world.net);
        }
        for (host, c) in self.world.net.hosts.iter().zip(&self.world.stats) {
            assert_eq!(host.env.events, vec![], "nothing to complain about");
            assert!(host.env.memory.gaps_intact(), "nobody wrote beside the buffers");
            assert_eq!((c.error_completions.get(), c.cq_overrun.get(), c.retry_exceeded.get()), (0, 0, 0));
            assert_eq!(
                (c.star_refused.get(), c.star_bad.get()),
                (0, 0),
                "SF asks for nothing that is not its"
            );
        }
    }
}

#[test]
fn star_is_exactly_once_and_in_order() {
    for_seeds("star_is_exactly_once_and_in_order", 700, |seed| _ = Run::new(seed, None, false).complete());
}

#[test]
fn star_through_shared_receive_queues() {
    for_seeds("star_through_shared_receive_queues", 200, |seed| _ = Run::new(seed, None, true).complete());
}

/// 20% loss, 20% repeats, 20% out of order, all at once.
#[test]
fn star_on_the_worst_wire() {
    for_seeds("star_on_the_worst_wire", 120, |seed| {
        let faults = Faults { loss: 0.2, duplicate: 0.2, reorder: 0.2, corrupt: 0.02, ..Faults::default() };
        assert!(!is_clean(&faults));
        _ = Run::new(seed, Some(faults), false).complete();
    });
}

/// Under a key, somebody who reads the wire and sends what he likes changes nothing.
#[test]
fn under_a_key_nobody_else_is_believed() {
    for_seeds("under_a_key_nobody_else_is_believed", 300, |seed| {
        let run = Run::forged(seed, true).complete();
        let made = run.world.forger.as_ref().map_or(0, |forger| forger.made);
        let [foreign, replayed] = [|c: &Counters| c.star_foreign.get(), |c: &Counters| c.star_replayed.get()]
            .map(|of| run.world.stats.iter().map(|stats| of(stats)).sum::<u64>());
        /* some are no packets, and some bring what the wire had lost */
        assert!(made < 20 || (foreign > made / 4 && replayed > 0), "{foreign} and {replayed} of {made}");
    });
}

/// Without one, he ends connections: the attack is one.
#[test]
fn without_a_key_whoever_reads_the_wire_ends_connections() {
    let mut ended = 0;
    for seed in 0..20 {
        let mut run = Run::forged(seed, false);
        for _ in 0..400 {
            run.act(false);
            run.world.step();
        }
        ended += usize::from(run.world.net.hosts.iter().any(|host| !host.env.events.is_empty()));
    }
    assert!(ended >= 5, "{ended} of 20");
}

/// The stateful ends are queue pairs of a card, with its doorbells, turns and timers.
#[test]
fn queue_pairs_of_a_card_are_stateful_ends() {
    for_seeds("queue_pairs_of_a_card_are_stateful_ends", 200, |seed| {
        _ = Run::with(seed, None, seed % 3 == 0, true).complete();
    });
}

/// The program takes SF's queue pairs to ERR in the middle: what is posted is flushed in order, and SL's
/// sends end as if nobody were there.
#[test]
fn a_stateful_queue_pair_goes_to_error_and_ends() {
    for_seeds("a_stateful_queue_pair_goes_to_error_and_ends", 150, |seed| {
        let mut run = Run::with(seed, None, seed % 3 == 0, true);
        let mut steps = run.rng.below(400);
        while steps > 0 || !run.world.begun() {
            steps = steps.saturating_sub(1);
            run.act(false);
            run.world.step();
            run.poll();
        }
        let now = run.world.now;
        let qpns: Vec<_> = run.world.conns.iter().map(|conn| conn.ends[SF].qpn).collect();
        for qpn in &qpns {
            run.world.net.hosts[SF].to_state(*qpn, QpState::Err, now).expect("from any state");
        }
        let mut failed = std::collections::BTreeSet::new();
        for step in 0..=STEPS {
            assert!(step < STEPS, "no end: {:?}", run.world.timers());
            let happened = run.world.step();
            run.world.look();
            for host in 0..2 {
                while let Some((cqe, _)) = run.cqs[host].poll() {
                    let key = (host, cqe.qpn);
                    match cqe.status {
                        WcStatus::Success => assert!(!failed.contains(&key), "a success behind a failure"),
                        WcStatus::RetryExcErr => assert!(host == SL && failed.insert(key)),
                        status => {
                            assert_eq!(status, WcStatus::WrFlushErr);
                            failed.insert(key);
                        }
                    }
                }
            }
            if !happened {
                break;
            }
        }
        for conn in &run.world.conns {
            assert_eq!(conn.ends[SF].sq.outstanding(), 0, "all is flushed");
        }
        let host = &mut run.world.net.hosts[SF];
        for qpn in qpns {
            host.nic.destroy_qp(&mut host.env, qpn).expect("it ends");
        }
        assert!(host.env.memory.gaps_intact() && host.nic.counters().star_rejects.get() == 0);
    });
}

/// One end's process ends in the middle. The other end's sends fail as RC's would, the oldest for the silence
/// and the rest flushed.
fn lose(seed: u64, lost: usize) -> Run {
    let mut run = Run::new(seed, None, false);
    for _ in 0..run.rng.below(400) {
        run.act(false);
        run.world.step();
        run.poll();
    }
    run.world.gone[lost] = true;
    while run.cqs[lost].poll().is_some() {}
    let memory = |run: &Run| {
        let host = &run.world.net.hosts[lost];
        let read = |(_, attr): &(u32, MrAttr)| host.env.memory.read(attr.addr, attr.length as usize).to_vec();
        host.regions.iter().map(read).collect::<Vec<_>>()
    };
    let before = memory(&run);
    let left = 1 - lost;
    /* what was posted is rung: else nobody knows of it */
    let qpns: Vec<_> = run.world.conns.iter().map(|conn| conn.ends[left].qpn).collect();
    qpns.into_iter().for_each(|qpn| run.world.doorbell(left, qpn));
    let mut failed = std::collections::BTreeMap::new();
    let until = run.world.now + EVER;
    for _ in 0..STEPS {
        let happened = run.world.step() && run.world.now < until;
        run.world.look();
        while let Some((cqe, _)) = run.cqs[left].poll() {
            match cqe.status {
                WcStatus::Success => assert!(!failed.contains_key(&cqe.qpn), "a success behind a failure"),
                /* the oldest send alone tells why; receives are flushed */
                WcStatus::RetryExcErr => assert_eq!(failed.insert(cqe.qpn, ()), None),
                status => {
                    assert_eq!(status, WcStatus::WrFlushErr);
                    failed.insert(cqe.qpn, ());
                }
            }
        }
        /* who has nothing to send waits for ever, as in RC */
        if !happened || run.world.now > AN_HOUR {
            assert!(memory(&run) == before, "somebody wrote to a process of another life");
            return run;
        }
    }
    panic!("no end after {STEPS} steps: {:?}", run.world.timers());
}

/// No program here bears silence for so long, ns.
const AN_HOUR: u64 = 3_600_000_000_000;

/// SF's process ends while its peers wait for messages alone: they wait on, as RC's do, and more and more
/// seldom ask for it. Who sends then is told.
#[test]
fn receives_alone_wait_for_ever() {
    for_seeds("receives_alone_wait_for_ever", 60, |seed| {
        let mut run = Run::new(seed, None, false);
        let mut later = Vec::new();
        for conn in &mut run.world.conns {
            later.push(std::mem::take(&mut conn.ends[SL].plan));
        }
        for _ in 0..run.rng.below(100) {
            run.act(false);
            run.world.step();
        }
        run.world.gone[SF] = true;
        run.act(true);
        run.world.net.hosts[SL].region(64, Access::REMOTE_READ);
        run.world.learn();
        let (until, conns) = (run.world.now + EVER, run.world.conns.len());
        let mut steps = 0;
        while run.world.now < until && run.world.step() {
            run.world.look();
            steps += 1;
        }
        assert!(steps < 800 * conns, "{steps} tries of {conns} in vain");
        let statuses: Vec<_> = std::iter::from_fn(|| run.cqs[SL].poll()).map(|(cqe, _)| cqe.status).collect();
        assert!(statuses.iter().all(|status| *status == WcStatus::Success), "{statuses:?}");
        for (conn, plan) in run.world.conns.iter_mut().zip(later) {
            conn.ends[SL].plan = plan;
        }
        run.act(true);
        let until = run.world.now + EVER;
        while run.world.now < until && run.world.step() {
            run.world.look();
        }
        let first = |status| status == WcStatus::RetryExcErr;
        let failed = std::iter::from_fn(|| run.cqs[SL].poll()).filter(|(cqe, _)| first(cqe.status)).count();
        let signaled = |op: &program::Op| op.wqe.flags.contains(SendFlags::SIGNALED);
        let sent = run.world.conns.iter().filter(|conn| conn.ends[SL].plan.iter().any(signaled)).count();
        assert_eq!(failed, sent);
    });
}

#[test]
fn a_stateful_end_that_is_gone_is_noticed() {
    for_seeds("a_stateful_end_that_is_gone_is_noticed", 100, |seed| {
        let run = lose(seed, SF);
        for conn in &run.world.conns {
            let end = &conn.ends[SL];
            let signaled = end.plan.iter().any(|op| op.wqe.flags.contains(SendFlags::SIGNALED));
            assert!(end.sq.outstanding() == 0 || !signaled, "a send waits for nobody");
        }
    });
}

/// A card of another life, in the same memory: what peers of the old one still send changes not a byte.
#[test]
fn a_card_that_was_started_anew_is_not_written_to() {
    for_seeds("a_card_that_was_started_anew_is_not_written_to", 100, |seed| {
        let run = lose(seed, SL);
        for (at, conn) in run.world.conns.iter().enumerate() {
            let begun = run.world.has_begun(at);
            assert!(!begun || conn.ends[SF].sq.outstanding() == 0, "a send waits for nobody");
        }
    });
}
