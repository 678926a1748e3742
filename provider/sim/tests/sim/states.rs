//! States of QPs and queues: flushing, RESET, draining, overruns, limits; and frames that mean harm.

use crate::common::pair::Pair;
use crate::common::{all_rights, for_seeds};
use starverbs_core::qp::{QpAttr, QpAttrMask, RecvSource};
use starverbs_core::{
    AsyncEvent, Cqe, FrameMeta, Gid, NicConfig, NicError, QpState, QpType, Qpn, SendOp, SendWqe, Sge,
    WcOpcode, WcStatus,
};
use starverbs_sim::{Faults, Net, QpAt, Recv, Rng, Send, Setup, SimCq, SimRq, SimSq};

/// ibv_modify_qp to ERR: everything posted comes back flushed, sends and receives each in order, and
/// so does what is posted later.
#[test]
fn error_state_flushes_in_order() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let mut p = Pair::of(qp_type, &Setup::default());
        let sge = p.sge(0, 8);
        for wr_id in 0..3 {
            let sges = vec![sge];
            p.sq[0]
                .post(Send { wqe: p.wqe(wr_id, SendOp::Write), sges: sges.clone(), inline: None })
                .expect("room");
            p.rq[0].post(Recv { wr_id: 100 + wr_id, sges }).expect("room");
        }
        let now = p.net.now();
        p.net.hosts[0].to_state(p.qpn[0], QpState::Err, now).expect("any state to ERR");
        let flushed = WcStatus::WrFlushErr;
        let got = p.polled(0);
        let of = |r: std::ops::Range<u64>| {
            got.iter().copied().filter(|(id, _)| r.contains(id)).collect::<Vec<_>>()
        };
        assert_eq!(of(0..100), [(0, flushed), (1, flushed), (2, flushed)]);
        assert_eq!(of(100..200), [(100, flushed), (101, flushed), (102, flushed)]);
        p.post(p.wqe(7, SendOp::Send), &[sge]);
        p.rq[0].post(Recv { wr_id: 107, sges: vec![] }).expect("room");
        p.net.doorbell(0, p.qpn[0]);
        let late = p.polled(0);
        assert_eq!(late.len(), 2);
        assert!(late.contains(&(7, flushed)) && late.contains(&(107, flushed)));
        p.run();
        assert_eq!(p.net.tally.sent, 0, "nothing went out");
    }
}

/// QPs that go while they wait for a window, owe an ACK or have packets to send leave nothing in the card's
/// queues: their places are there for the next ones (debug builds check that no queue outgrows its room).
#[test]
fn who_goes_leaves_the_queues() {
    for_seeds("who_goes_leaves_the_queues", 50, |seed| {
        let faults = Faults { loss: 0.3, ..Faults::default() };
        let cfg = NicConfig { window: 16 << 10, ..NicConfig::default() };
        let mut net = Net::new(2, cfg, faults, seed);
        let mut rng = Rng::new(seed);
        let cqs = [SimCq::new(1 << 16), SimCq::new(1 << 16)];
        let (from, lkey) = net.hosts[0].region(1 << 16, all_rights());
        let (to, rkey) = net.hosts[1].region(1 << 16, all_rights());
        let mut pairs: Vec<[(Qpn, SimSq); 2]> = Vec::new();
        for _ in 0..200 {
            if pairs.len() == 5 {
                let gone = pairs.remove(rng.below(5) as usize);
                let now = net.now();
                for (host, (qpn, _)) in gone.into_iter().enumerate() {
                    let h = &mut net.hosts[host];
                    if rng.chance(0.5) {
                        h.to_state(qpn, QpState::Reset, now).expect("any state to RESET");
                    }
                    h.nic.destroy_qp(&mut h.env, qpn).expect("it exists");
                }
            }
            let pair = [0, 1].map(|host| {
                let (sq, rq) = (SimSq::new(16), RecvSource::Own(SimRq::new(1, 1)));
                (net.hosts[host].qp(QpType::Rc, &sq, rq, [&cqs[host], &cqs[host]], false), sq)
            });
            net.connect(
                QpType::Rc,
                QpAt { host: 0, qpn: pair[0].0 },
                QpAt { host: 1, qpn: pair[1].0 },
                &Setup::default(),
            );
            let wqe = SendWqe { op: SendOp::Write, remote_addr: to, rkey, ..SendWqe::default() };
            for _ in 0..3 {
                let sges = vec![Sge { addr: from, len: rng.below(30_000) as u32, lkey }];
                pair[0].1.post(Send { wqe, sges, inline: None }).expect("there is room");
            }
            net.doorbell(0, pair[0].0);
            pairs.push(pair);
            for _ in 0..rng.below(20) {
                net.step();
            }
        }
        assert!(net.run_until_idle(1_000_000), "it ends");
        for (_, sq) in pairs.iter().map(|[a, _]| a) {
            assert_eq!(sq.outstanding(), 0, "those that stayed are served");
        }
    });
}

/// RESET forgets without completions, and the QP starts anew from there.
#[test]
fn reset_is_silent_and_reusable() {
    let mut p = Pair::rc();
    let sge = p.sge(0, 8);
    p.post_recv(100, 64);
    p.post(p.wqe(1, SendOp::Send), &[sge]);
    p.run();
    assert_eq!(p.polled(0).len() + p.polled(1).len(), 2);
    p.post_recv(101, 64);
    p.net.faults.loss = 1.0;
    p.post(p.wqe(2, SendOp::Send), &[sge]);
    for _ in 0..3 {
        p.net.step();
    }
    let now = p.net.now();
    for at in 0..2 {
        p.net.hosts[at].to_state(p.qpn[at], QpState::Reset, now).expect("any state to RESET");
    }
    assert_eq!((p.polled(0), p.polled(1)), (vec![], vec![]));
    p.net.faults.loss = 0.0;
    p.run();
    let setup = Setup { psn: 77, ..Setup::default() };
    p.net.connect(QpType::Rc, QpAt { host: 0, qpn: p.qpn[0] }, QpAt { host: 1, qpn: p.qpn[1] }, &setup);
    p.post_recv(102, 64);
    p.post(p.wqe(3, SendOp::Send), &[sge]);
    p.run();
    assert_eq!((p.polled(0), p.polled(1)), (vec![(3, WcStatus::Success)], vec![(102, WcStatus::Success)]));
}

/// SQD: what was begun is finished, what was not waits, and the event comes once.
#[test]
fn send_queue_drain() {
    let mut p = Pair::rc();
    let sge = p.sge(0, 4000);
    p.post(p.wqe(1, SendOp::Write), &[sge]);
    p.net.step();
    let now = p.net.now();
    let attr = QpAttr { state: QpState::Sqd, en_sqd_async_notify: true, ..QpAttr::default() };
    let mask = QpAttrMask::STATE | QpAttrMask::EN_SQD_ASYNC_NOTIFY;
    p.net.hosts[0].modify(p.qpn[0], &attr, mask, now).expect("RTS to SQD");
    p.post(p.wqe(2, SendOp::Write), &[sge]);
    p.run();
    assert_eq!(p.polled(0), [(1, WcStatus::Success)]);
    assert_eq!(p.events(0), [AsyncEvent::SqDrained(p.qpn[0])]);
    let now = p.net.now();
    p.net.hosts[0].to_state(p.qpn[0], QpState::Rts, now).expect("SQD to RTS");
    p.run();
    assert_eq!(p.polled(0), [(2, WcStatus::Success)]);
    assert_eq!(p.events(0).len(), 1);
}

/// The event is for the transition that asked for it: not for a change of attributes in SQD, and not for the
/// next transition that does not ask.
#[test]
fn a_drained_queue_raises_an_event_when_asked() {
    let mut p = Pair::rc();
    let modify = |p: &mut Pair, state, min_rnr_timer, notify, mask| {
        let attr = QpAttr { state, min_rnr_timer, en_sqd_async_notify: notify, ..QpAttr::default() };
        let now = p.net.now();
        p.net.hosts[0].modify(p.qpn[0], &attr, QpAttrMask::STATE | mask, now).expect("allowed");
    };
    let notify = QpAttrMask::EN_SQD_ASYNC_NOTIFY;
    let none = QpAttrMask::empty();
    modify(&mut p, QpState::Sqd, 0, true, notify);
    assert_eq!(p.events(0).len(), 1);
    modify(&mut p, QpState::Sqd, 3, false, QpAttrMask::MIN_RNR_TIMER);
    assert_eq!(p.events(0).len(), 1, "a change of attributes");
    modify(&mut p, QpState::Rts, 0, false, none);
    modify(&mut p, QpState::Sqd, 0, false, none);
    assert_eq!(p.events(0).len(), 1, "not asked for");
    modify(&mut p, QpState::Rts, 0, false, none);
    modify(&mut p, QpState::Sqd, 0, true, notify);
    assert_eq!(p.events(0).len(), 2);
}

/// A UD or UC send that fails here puts only the send queue into error; receives go on.
#[test]
fn unreliable_send_errors_stop_the_send_queue_only() {
    let mut p = Pair::of(QpType::Uc, &Setup::default());
    let (good, mut bad) = (p.sge(0, 8), p.sge(0, 8));
    bad.lkey ^= 1;
    p.post_recv(100, 64);
    p.post(p.wqe(1, SendOp::Send), &[good]);
    p.post(p.wqe(2, SendOp::Send), &[bad]);
    p.post(p.wqe(3, SendOp::Send), &[good]);
    p.run();
    let want = [(1, WcStatus::Success), (2, WcStatus::LocProtErr), (3, WcStatus::WrFlushErr)];
    assert_eq!(p.polled(0), want);
    assert_eq!(p.states(), [QpState::Sqe, QpState::Rts]);
    assert_eq!(p.polled(1), [(100, WcStatus::Success)]);
    let now = p.net.now();
    p.net.hosts[0].to_state(p.qpn[0], QpState::Rts, now).expect("SQE to RTS");
    p.post_recv(101, 64);
    p.post(p.wqe(4, SendOp::Send), &[good]);
    p.run();
    assert_eq!(p.polled(0), [(4, WcStatus::Success)]);
    assert_eq!(p.polled(1), [(101, WcStatus::Success)]);
}

/// A full CQ loses completions, never the card.
#[test]
fn cq_overrun_is_fatal_for_the_qp() {
    let mut p = Pair::rc();
    let small = SimCq::new(2);
    let (sq, rq) = (SimSq::new(16), SimRq::new(16, 2));
    let host = &mut p.net.hosts[0];
    let qpn = host.qp(QpType::Rc, &sq, RecvSource::Own(rq), [&small, &small], true);
    let peer_sq = SimSq::new(16);
    let peer_rq = SimRq::new(16, 2);
    let peer = p.net.hosts[1].qp(QpType::Rc, &peer_sq, RecvSource::Own(peer_rq), [&p.cq[1], &p.cq[1]], true);
    p.net.connect(QpType::Rc, QpAt { host: 0, qpn }, QpAt { host: 1, qpn: peer }, &Setup::default());
    let sge = p.sge(0, 8);
    for wr_id in 0..8 {
        sq.post(Send { wqe: p.wqe(wr_id, SendOp::Write), sges: vec![sge], inline: None })
            .expect("there is room");
    }
    p.net.doorbell(0, qpn);
    p.run();
    assert_eq!(small.len(), 2);
    assert_eq!(p.net.hosts[0].state(qpn), QpState::Err);
    assert_eq!(p.events(0), [AsyncEvent::QpFatal(qpn)]);
    assert!(p.net.hosts[0].nic.counters().cq_overrun.get() >= 1);
    assert_eq!(sq.outstanding(), 0, "the queue is flushed all the same");
}

/// The limit event of an SRQ comes once, when fewer are left than asked for.
#[test]
fn srq_limit_event_comes_once() {
    let mut p = Pair::rc();
    let rq = SimRq::new(16, 2);
    let host = &mut p.net.hosts[1];
    let srq = host.nic.create_srq(host.pd, rq.clone(), 0, 0).expect("an SRQ");
    let (sq, peer_sq) = (SimSq::new(16), SimSq::new(16));
    let own = RecvSource::Own(SimRq::new(16, 2));
    let qpn = p.net.hosts[0].qp(QpType::Rc, &sq, own, [&p.cq[0], &p.cq[0]], true);
    let peer = p.net.hosts[1].qp(QpType::Rc, &peer_sq, RecvSource::Shared(srq), [&p.cq[1], &p.cq[1]], true);
    p.net.connect(QpType::Rc, QpAt { host: 0, qpn }, QpAt { host: 1, qpn: peer }, &Setup::default());
    for wr_id in 0..6 {
        rq.post(Recv { wr_id, sges: vec![p.sge(1, 64)] }).expect("there is room");
    }
    p.net.hosts[1].nic.modify_srq_limit(srq, 4).expect("a limit");
    assert_eq!(p.net.hosts[1].nic.query_srq_limit(srq), Ok(4));
    let sge = p.sge(0, 8);
    for (sent, events) in [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1)] {
        sq.post(Send { wqe: p.wqe(sent, SendOp::Send), sges: vec![sge], inline: None })
            .expect("there is room");
        p.net.doorbell(0, qpn);
        p.run();
        assert_eq!(p.events(1), vec![AsyncEvent::SrqLimit(srq); events], "after {sent}");
    }
    assert_eq!(p.net.hosts[1].nic.query_srq_limit(srq), Ok(0), "disarmed by its event");
    assert_eq!(p.net.hosts[1].nic.destroy_srq(srq), Err(NicError::Busy));
    let now = p.net.now();
    p.net.hosts[1].to_state(peer, QpState::Err, now).expect("any state to ERR");
    assert_eq!(p.events(1).last(), Some(&AsyncEvent::LastWqeReached(peer)));
    assert_eq!(p.polled(1).len(), 5, "what is left in an SRQ is not flushed");
}

/// Frames of a QP that is gone, of a wrong source, and noise: counted, dropped, harmless.
#[test]
fn noise_is_counted_and_dropped() {
    let mut p = Pair::rc();
    let meta = FrameMeta { src: p.net.hosts[0].gid, dst: p.net.hosts[1].gid, ..Default::default() };
    let now = p.net.now();
    let mut state = 7u64;
    for len in 0..2000usize {
        let mut bytes: Vec<u8> = (0..len % 97)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        /* Half of it goes to the live QP with a known transport. */
        if bytes.len() >= 12 && len % 2 == 0 {
            bytes[0] &= 0x1f;
            bytes[1] &= 0xf0;
            if len % 8 != 0 {
                bytes[2..4].fill(0xff);
            }
            if len % 8 != 2 {
                bytes[5..8].copy_from_slice(&p.qpn[1].to_be_bytes()[1..]);
            }
            bytes.truncate(bytes.len() & !3);
        }
        let unknown = FrameMeta { src: Gid::from_ipv4([9; 4]), ..meta };
        let h = &mut p.net.hosts[1];
        h.nic.handle_frame(&mut h.env, now, &unknown, &bytes);
    }
    let c = p.net.hosts[1].nic.counters();
    let drops = [&c.drop_malformed, &c.drop_opcode, &c.drop_pkey, &c.drop_no_qp, &c.drop_source];
    assert_eq!(drops.iter().map(|d| d.get()).sum::<u64>(), 2000, "each frame has one reason");
    assert!(drops.iter().all(|d| d.get() > 0), "every reason occurred");
    p.post_recv(100, 64);
    let sge = p.sge(0, 8);
    p.post(p.wqe(1, SendOp::Send), &[sge]);
    p.run();
    assert_eq!((p.polled(0), p.polled(1)), (vec![(1, WcStatus::Success)], vec![(100, WcStatus::Success)]));
}

/// Random frames from the connected peer itself: the QP may end in ERR, the card goes on.
#[test]
fn a_hostile_peer_breaks_only_its_own_connection() {
    let mut state = 99u64;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    for _ in 0..2000 {
        let mut p = Pair::rc();
        let meta = FrameMeta { src: p.net.hosts[0].gid, dst: p.net.hosts[1].gid, ..Default::default() };
        p.post_recv(100, 64);
        for _ in 0..20 {
            let mut bytes: Vec<u8> = (0..12 + 4 * (random() % 20)).map(|_| random() as u8).collect();
            bytes[0] = (random() % 0x18) as u8;
            bytes[1] = if random() % 2 == 0 { 0x40 } else { 0x70 };
            bytes[2..4].fill(0xff);
            bytes[4..8].copy_from_slice(&p.qpn[1].to_be_bytes());
            bytes[8..12].copy_from_slice(&((random() % 4) | (1 << 31)).to_be_bytes());
            let now = p.net.now();
            let h = &mut p.net.hosts[1];
            h.nic.handle_frame(&mut h.env, now, &meta, &bytes);
        }
        assert!(p.net.run_until_idle(100_000));
        assert!(matches!(p.states()[1], QpState::Rts | QpState::Err));
        assert!(p.net.hosts[1].env.memory.gaps_intact());
        let ours: Vec<Cqe> = std::iter::from_fn(|| p.cq[1].poll()).map(|(c, _)| c).collect();
        assert!(ours.iter().all(|c| c.qpn == p.qpn[1] && c.opcode != WcOpcode::Send));
        assert!(ours.len() <= 1, "one receive, one completion");
    }
}

/// A QP whose completion queue overran is flushed, and leaves the window towards its peer to others. Nothing
/// ever times out here.
#[test]
fn an_overrun_leaves_the_window_to_others() {
    let cfg = NicConfig { window: 64 << 10, ..NicConfig::default() };
    let mut net = Net::new(2, cfg, Faults::default(), 1);
    let (small, large) = (SimCq::new(1), SimCq::new(1 << 12));
    let (from, lkey) = net.hosts[0].region(1 << 16, all_rights());
    let (to, rkey) = net.hosts[1].region(1 << 16, all_rights());
    let qp = |net: &mut Net, cq: &SimCq| {
        let sq = SimSq::new(64);
        let own = || RecvSource::Own(SimRq::new(1, 1));
        let qpn = net.hosts[0].qp(QpType::Rc, &sq, own(), [cq, cq], true);
        let peer = net.hosts[1].qp(QpType::Rc, &SimSq::new(1), own(), [&large, &large], true);
        net.connect(
            QpType::Rc,
            QpAt { host: 0, qpn },
            QpAt { host: 1, qpn: peer },
            &Setup { timeout: 0, ..Setup::default() },
        );
        (qpn, sq)
    };
    let post = |net: &mut Net, (qpn, sq): &(Qpn, SimSq)| {
        let wqe = SendWqe { op: SendOp::Write, remote_addr: to, rkey, ..SendWqe::default() };
        for _ in 0..32 {
            let sges = vec![Sge { addr: from, len: 8000, lkey }];
            sq.post(Send { wqe, sges, inline: None }).expect("there is room");
        }
        net.doorbell(0, *qpn);
    };
    let overrun: Vec<_> = (0..16).map(|_| qp(&mut net, &small)).collect();
    for qp in &overrun {
        post(&mut net, qp);
    }
    assert!(net.run_until_idle(1_000_000), "it ends");
    for (qpn, sq) in &overrun {
        assert_eq!((net.hosts[0].nic.qp_state(*qpn), sq.outstanding()), (Some(QpState::Err), 0));
    }
    let other = qp(&mut net, &large);
    post(&mut net, &other);
    assert!(net.run_until_idle(1_000_000), "it ends");
    assert_eq!((large.len(), other.1.outstanding()), (32, 0));
}

/// A requester that repeats finds no QP, and rdma_rxe goes on for ever. So where the way to
/// the peer was seen to lose or repeat packets, on whatever QP, the last ACK goes out more than once.
#[test]
fn the_last_ack_is_repeated_where_any_qp_saw_packets_lost() {
    for hurt in [false, true] {
        let mut p = Pair::rc();
        let cq = SimCq::new(4);
        let [client, server] = [0, 1].map(|at| {
            let rq = RecvSource::Own(SimRq::new(1, 1));
            p.net.hosts[at].qp(QpType::Rc, &p.sq[at], rq, [&cq, &cq], true)
        });
        p.net.connect(
            QpType::Rc,
            QpAt { host: 0, qpn: client },
            QpAt { host: 1, qpn: server },
            &Setup::default(),
        );
        let duplicate = if hurt { 1.0 } else { 0.0 };
        p.net.set_link(0, 1, Faults { duplicate, ..Faults::default() });
        let sge = p.sge(0, 8);
        p.post(p.wqe(1, SendOp::Write), &[sge]);
        p.run();

        let acks = |p: &Pair| p.net.hosts[1].nic.counters().sent_ack.get();
        let before = acks(&p);
        let host = &mut p.net.hosts[1];
        host.nic.destroy_qp(&mut host.env, server).expect("it exists");
        assert_eq!(acks(&p) - before, if hurt { 2 } else { 0 });
    }
}
