//! RC on a hostile wire: every message once, in order, with the right bytes and completions.

use crate::common::drive::drive;
use crate::common::program::{Conn, Pool, Shape};
use crate::common::{any_faults, for_seeds, is_clean};
use starverbs_core::qp::{QpAttr, QpAttrMask, RecvSource};
use starverbs_core::qpc::Policy;
use starverbs_core::{ContextCache, Mtu, NicConfig, NicError, QpState, QpType, SendOp, SrqId};
use starverbs_sim::{Faults, Net, RC_OPS, Rng, Setup, SimCq, SimHost, SimRq, SimSq};
use starverbs_star::card::bytes_of;

/// A run takes some thousand steps; one that takes so many turns in a circle.
const STEPS: usize = 300_000;

fn any_shape(rng: &mut Rng) -> Shape {
    let mtus = [Mtu::M256, Mtu::M512, Mtu::M1024, Mtu::M2048, Mtu::M4096];
    let setup = Setup {
        mtu: rng.pick(&mtus),
        timeout: rng.pick(&[0, 18, 18]),
        min_rnr_timer: rng.within(1, 12) as u8,
        rd_atomic: rng.pick(&[1, 2, 4, 16, 128]),
        psn: rng.pick(&[0, 0xff_ffff, 0xff_fff0, rng.clone().bits() as u32 & 0xff_ffff]),
        ..Setup::default()
    };
    let kinds = if rng.chance(0.6) { RC_OPS.to_vec() } else { vec![rng.pick(&RC_OPS), rng.pick(&RC_OPS)] };
    Shape {
        setup,
        sq_slots: 1 << rng.below(7),
        rq_slots: rng.pick(&[1, 2, 3, 8, 64]),
        ops: rng.pick(&[3, 12, 40]),
        kinds,
    }
}

struct Run {
    net: Net,
    rng: Rng,
    conns: Vec<Conn>,
    cqs: [SimCq; 2],
    pools: [Option<Pool>; 2],
}

impl Run {
    fn new(seed: u64, faults: Option<Faults>, srq: bool) -> Self {
        Run::on(seed, faults, srq, NicConfig::default())
    }

    fn on(seed: u64, faults: Option<Faults>, srq: bool, cfg: NicConfig) -> Self {
        let mut rng = Rng::new(seed);
        let faults = faults.unwrap_or_else(|| any_faults(&mut rng));
        let cfg = NicConfig { window: rng.pick(&[4 << 10, 64 << 10, 512 << 10]), ..cfg };
        let mut net = Net::new(2, cfg, faults, seed);
        /* an older card, or one set so, repeats nothing selectively; some say how many
         * receives they have */
        for at in 0..2 {
            let (repeat, credits) = (!rng.chance(0.25), rng.chance(0.4));
            if !repeat || credits {
                net.replace_card(at, NicConfig { repeat, credits, ..cfg });
            }
        }
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
        let shape = any_shape(&mut rng);
        let n = if srq { rng.within(2, 4) } else { rng.within(1, 3) };
        let conns: Vec<Conn> =
            (0..n).map(|_| Conn::new(&mut net, &mut rng, &cqs, srqs.clone(), &shape)).collect();
        let pools = Pool::of(&mut net, &mut rng, &conns, &srqs);
        Run { net, rng, conns, cqs, pools }
    }

    fn poll(&mut self) -> bool {
        let mut any = false;
        for host in 0..2 {
            while let Some((cqe, solicited)) = self.cqs[host].poll() {
                any = true;
                let wr = self.pools[host].as_ref().map_or(&[][..], |p| &p.buffers);
                let net = &self.net;
                let known = self.conns.iter_mut().any(|c| c.complete(net, host, &cqe, solicited, wr));
                assert!(known, "a completion of no QP: {cqe:?}");
            }
        }
        any
    }

    fn act(&mut self, eager: bool) -> bool {
        let mut acted = false;
        for conn in &mut self.conns {
            acted |= conn.act(&mut self.net, &mut self.rng, eager);
        }
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
            let happened = self.net.step();
            let polled = (!happened || self.rng.chance(0.5)) && self.poll();
            if !happened && !polled && !self.act(true) {
                return;
            }
        }
        panic!("no end after {STEPS} steps, at {} ns: {:?}", self.net.now(), self.net.tally);
    }

    /// All of it, and whether it was right.
    fn complete(mut self) -> Self {
        self.go();
        self.finish();
        self
    }

    fn finish(&self) {
        for conn in &self.conns {
            conn.finish(&self.net);
        }
        for host in &self.net.hosts {
            assert_eq!(host.env.events, vec![], "nothing to complain about");
            assert!(host.env.memory.gaps_intact(), "nobody wrote beside the buffers");
            let c = host.nic.counters();
            assert_eq!((c.error_completions.get(), c.cq_overrun.get(), c.drop_malformed.get()), (0, 0, 0));
            /* a card that waits for contexts may answer later than a peer expects */
            let prompt = !self.net.hosts.iter().any(|h| h.nic.is_qpc_limited());
            if is_clean(&self.net.faults) && c.rcvd_rnr.get() == 0 && prompt {
                assert_eq!(
                    (c.retransmitted.get(), c.timeouts.get()),
                    (0, 0),
                    "a clean wire needs no second try"
                );
            }
        }
    }
}

fn one(seed: u64) {
    let mut run = Run::new(seed, None, false);
    run.go();
    run.finish();
}

#[test]
fn rc_is_exactly_once_and_in_order() {
    for_seeds("rc_is_exactly_once_and_in_order", 2000, one);
}

#[test]
fn rc_through_shared_receive_queues() {
    for_seeds("rc_through_shared_receive_queues", 600, |seed| _ = Run::new(seed, None, true).complete());
}

/// A QP that waits for StaR's roles sends nothing. A request of plain RoCEv2 from its peer, or the host's
/// word, makes it one like any other.
#[test]
fn queue_pairs_that_waited_for_star_are_plain() {
    for_seeds("queue_pairs_that_waited_for_star_are_plain", 500, |seed| {
        let mut run = Run::new(seed, None, false);
        let ends: Vec<_> = run.conns.iter().map(|c| [0, 1].map(|at| c.ends[at].qpn)).collect();
        let held = if seed % 2 == 0 { 0..2 } else { 0..1 };
        for (host, qpn) in held.flat_map(|host| ends.iter().map(move |qpns| (host, qpns[host]))) {
            run.net.hosts[host].nic.hold_qp(qpn).expect("a fresh QP");
        }
        let settled = run.rng.below(300) as usize;
        for step in 0..STEPS {
            let ring = |run: &mut Run, eager| {
                let Run { conns, net, rng, .. } = run;
                conns.iter_mut().any(|c| c.post(rng, eager, &mut |host, qpn, _| net.doorbell(host, qpn)))
            };
            ring(&mut run, false);
            if step == settled {
                let now = run.net.now();
                for (host, qpn) in ends.iter().flat_map(|qpns| [(0, qpns[0]), (1, qpns[1])]) {
                    let SimHost { nic, env, .. } = &mut run.net.hosts[host];
                    nic.resume_qp(env, qpn, now);
                    assert!(!nic.is_held(qpn));
                }
            }
            let happened = run.net.step();
            if !happened && !run.poll() && step > settled && !ring(&mut run, true) {
                break;
            }
        }
        run.finish();
    });
}

/// A connection whose roles are settled anew, and stay what they are: what a QP owes for requests of before
/// is sent when it goes on, and not when the peer asks again.
#[test]
fn a_queue_pair_that_was_held_answers_what_came_before() {
    for_seeds("a_queue_pair_that_was_held_answers_what_came_before", 300, |seed| {
        let mut rng = Rng::new(seed);
        let mut net = Net::new(2, NicConfig::default(), Faults::default(), seed);
        let shape = Shape {
            setup: Setup { timeout: 14, retry_cnt: 2, ..Setup::default() },
            sq_slots: 16,
            rq_slots: 16,
            ops: 40,
            kinds: vec![SendOp::Send, SendOp::Read, SendOp::Write, SendOp::FetchAdd],
        };
        drive(&mut net, &mut rng, &shape, STEPS, |net, rng| {
            let (host, now) = (rng.below(2) as usize, net.now());
            let nic = &mut net.hosts[host].nic;
            let chosen: Vec<_> = nic.qpns().filter(|_| rng.chance(0.3)).collect();
            let quiesced: Vec<_> = chosen.into_iter().filter(|qpn| nic.quiesce_qp(*qpn)).collect();
            for qpn in &quiesced {
                nic.hold_quiesced(*qpn);
            }
            net.transmit();
            let SimHost { nic, env, .. } = &mut net.hosts[host];
            for qpn in quiesced {
                nic.resume_qp(env, qpn, now);
            }
        });
        let retries: u64 = net.hosts.iter().map(|host| host.nic.counters().timeouts.get()).sum();
        assert_eq!(retries, 0, "seed {seed}");
    });
}

/// A QP that leaves the card as the stateless end of a StaR connection is unknown there, and still in nobody
/// else's way: its number, domain and SRQ stay in use until it comes back or ends.
#[test]
fn a_queue_pair_leaves_the_card_and_comes_back() {
    let mut run = Run::new(7, None, true);
    let qpn = run.conns[0].ends[0].qpn;
    let SimHost { nic, env, pd, .. } = &mut run.net.hosts[0];
    let (free, count, srq) =
        (nic.free_qpns(), nic.qp_count(), nic.handover(qpn).expect("a QP").srq.map(|s| s.id));
    let srq = srq.expect("it takes from an SRQ");
    assert_eq!(nic.release_qp(env, qpn).err(), Some(NicError::Invalid), "it does not wait");
    nic.hold_qp(qpn).expect("a fresh QP");
    let before = nic.query_qp(qpn).expect("a QP");
    let connections = nic.connection_count();
    assert_eq!(connections as usize, nic.qpns().count(), "all are RC, and in RTS");
    let released = nic.release_qp(env, qpn).expect("it waits, in RTS");
    assert_eq!((released.attr, released.qpn, released.srq()), (before, qpn, Some(srq)));
    assert_eq!((nic.qp_state(qpn), bytes_of(nic, qpn)), (None, 0));
    assert_eq!((nic.free_qpns(), nic.qp_count()), (free, count), "the number is not free");
    assert_eq!(nic.connection_count(), connections - 1, "its peer keeps the connection");
    assert!(!nic.qpns().any(|other| other == qpn));
    nic.handle_doorbell(env, qpn, 0);
    assert_eq!(nic.destroy_qp(env, qpn), Err(NicError::NotFound));
    let places = nic.prepare_return(&released).expect("memory");
    nic.readmit(released, places);
    assert_eq!(nic.qp_state(qpn), Some(QpState::Reset));
    assert!(bytes_of(nic, qpn) > 0);
    let to = |state| QpAttr { state, ..QpAttr::default() };
    nic.modify_qp(env, qpn, &to(QpState::Err), QpAttrMask::STATE, 0).expect("any state");
    assert_eq!(nic.connection_count(), connections - 1, "it is in ERR, and has no peer");
    let (other, now) = (nic.qpns().find(|other| *other != qpn).expect("more than one"), 0);
    nic.modify_qp(env, other, &to(QpState::Err), QpAttrMask::STATE, now).expect("any state");
    assert_eq!(nic.connection_count(), connections - 1, "one in ERR is kept");
    nic.destroy_qp(env, qpn).expect("it ends");
    assert_eq!((nic.free_qpns(), nic.qp_count()), (free + 1, count - 1));

    nic.destroy_qp(env, other).expect("it ends");
    assert_eq!(nic.connection_count(), connections - 2);

    let others: Vec<_> = nic.qpns().collect();
    for other in others {
        assert_eq!(nic.destroy_srq(srq), Err(NicError::Busy));
        nic.hold_qp(other).expect("a fresh QP");
        let released = nic.release_qp(env, other).expect("it waits, in RTS");
        nic.end_released(&released);
    }
    assert_eq!((nic.qp_count(), nic.connection_count()), (0, 0));
    nic.destroy_srq(srq).expect("nobody uses it");
    assert_eq!(nic.dealloc_pd(*pd), Err(NicError::Busy), "regions are left");
}

/// Those that are to come back have memory, whoever is made or ends meanwhile.
#[test]
fn queue_pairs_come_back_to_a_card_that_has_filled_up() {
    let mut run = Run::new(7, None, false);
    let host = &mut run.net.hosts[0];
    let away: Vec<_> = host.nic.qpns().take(2).collect();
    let mut prepared = Vec::new();
    for qpn in &away {
        host.nic.hold_qp(*qpn).expect("a fresh QP");
        let released = host.nic.release_qp(&mut host.env, *qpn).expect("it waits, in RTS");
        let places = host.nic.prepare_return(&released).expect("memory");
        prepared.push((released, places));
    }
    let cq = SimCq::new(1);
    let make = |host: &mut SimHost| {
        host.qp(QpType::Rc, &SimSq::new(1), RecvSource::Own(SimRq::new(1, 1)), [&cq, &cq], false)
    };
    /* to the end of a piece of the card's memory for them */
    let wanted = 128 - host.nic.qpns().count();
    let mut made: Vec<_> = (0..wanted).map(|_| make(host)).collect();
    for (released, places) in prepared {
        host.nic.readmit(released, places);
    }
    made.extend(away);
    for qpn in &made {
        assert_eq!(host.nic.qp_state(*qpn), Some(QpState::Reset));
    }
}

/// A card with room for few QP contexts is slower, and no other: the same results in the same order, by each
/// policy.
#[test]
fn rc_with_few_contexts() {
    for_seeds("rc_with_few_contexts", 1200, |seed| {
        let mut rng = Rng::new(!seed);
        let contexts = ContextCache {
            entries: rng.within(1, 3) as u32,
            policy: rng.pick(&[Policy::Fcfs, Policy::NonBlocking, Policy::LatencyHiding]),
            miss: rng.pick(&[0, 1, 500, 3_000]),
            fetch: rng.pick(&[0, 500]),
        };
        let cfg = NicConfig { contexts: Some(contexts), ..NicConfig::default() };
        let run = Run::on(seed, None, rng.chance(0.3), cfg).complete();
        for host in &run.net.hosts {
            let c = host.nic.counters();
            let asked = c.qpc_hits.get() + c.qpc_misses.get() + c.qpc_prefetched.get();
            assert!(asked > 0 || c.rx_packets.get() == 0, "contexts are asked for");
        }
    });
}

/// The same seed is the same run.
#[test]
fn runs_repeat() {
    for_seeds("runs_repeat", 20, |seed| {
        let tally = || {
            let mut run = Run::new(seed, None, false);
            run.go();
            (
                run.net.tally,
                run.net.now(),
                run.net.hosts.iter().map(|h| h.nic.counters().values()).collect::<Vec<_>>(),
            )
        };
        assert_eq!(tally(), tally());
    });
}

/// 20% loss, 20% repeats, 20% out of order, all at once, with long messages.
#[test]
fn rc_on_the_worst_wire() {
    for_seeds("rc_on_the_worst_wire", 300, |seed| {
        let faults = Faults { loss: 0.2, duplicate: 0.2, reorder: 0.2, jitter: 5_000, ..Faults::default() };
        let run = Run::new(seed, Some(faults), false).complete();
        let lost: u64 = run.net.tally.lost;
        assert!(lost > 0 || run.net.tally.sent < 150, "the wire lost frames");
    });
}
