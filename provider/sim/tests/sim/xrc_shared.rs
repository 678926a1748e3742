//! An XRC domain that cards share, on virtual time: messages to one card's SRQs come through another card's
//! QPs.

use std::cell::Cell;
use std::rc::Rc;

use crate::common::shared::{QPS, SENDER, Shared, region};
use crate::common::{all_rights, any_bytes, any_faults, any_size, for_seeds};
use starverbs_core::env::RecvQueue;
use starverbs_core::mr::WindowType;
use starverbs_core::qp::RecvSource;
use starverbs_core::relay::Relay;
use starverbs_core::wire::{HeaderBuf, PKEY_DEFAULT, Packet, code};
use starverbs_core::{
    Access, AsyncEvent, FrameMeta, Mtu, Psn, QPN_BLOCK_SHIFT, QpState, QpType, SendFlags, SendOp, SendWqe,
    Sge, WcFlags, WcOpcode, WcStatus,
};
use starverbs_sim::{Faults, QpAt, Recv, Rng, Send, Setup, SimCq, SimRq, SimSq};

/// SENDs over two QPs to three cards' SRQs, with buffers before or after them; cards sleep now and then.
fn traffic(seed: u64) {
    let mut rng = Rng::new(seed);
    let faults = any_faults(&mut rng);
    let mut x = Shared::new(faults, seed, &Setup { timeout: 20, ..Setup::default() });
    for host in &mut x.net.hosts {
        host.env.link_room = rng.pick(&[1, 5, 64]);
    }
    let mut sent = [(); 2].map(|()| Vec::new());
    let mut written = Vec::new();
    for n in 0..40u32 {
        let (qp, to) = (rng.below(2) as usize, rng.below(3) as usize);
        let len = any_size(&mut rng, 1024);
        let data = any_bytes(&mut rng, len);
        let op = rng.pick(&[SendOp::Send, SendOp::SendImm, SendOp::Write, SendOp::WriteImm]);
        let takes = op != SendOp::Write;
        let late = takes && rng.chance(0.3);
        if takes && !late {
            x.post_recv(to);
        }
        let wqe = SendWqe { wr_id: u64::from(n), imm: n, op, ..SendWqe::default() };
        let there = region(&mut x.net.hosts[x.queues[to].host], x.queues[to].pd, len);
        x.send(qp, to, SendWqe { remote_addr: there.addr, rkey: there.lkey, ..wqe }, &data);
        if matches!(op, SendOp::Write | SendOp::WriteImm) {
            written.push((to, there.addr, data.clone()));
        }
        if takes {
            sent[qp].push((to, op, n, data));
        }
        for _ in 0..rng.below(30) {
            x.net.step();
        }
        if rng.chance(0.05) {
            let host = rng.within(1, 3) as usize;
            x.net.sleep(host, rng.below(3_000_000));
        }
        if late {
            x.post_recv(to);
        }
    }
    x.run();
    let done = x.sent();
    assert!(done.iter().all(|cqe| cqe.status == WcStatus::Success), "{done:?}");
    assert_eq!(done.len(), 40);
    for to in 0..3 {
        for cqe in x.got(to) {
            assert_eq!(cqe.status, WcStatus::Success);
            let qp = usize::from(cqe.qpn == x.recvs[1]);
            assert_eq!((cqe.qpn, cqe.src_qp), (x.recvs[qp], x.sends[qp]));
            let first = sent[qp].iter().position(|(t, ..)| *t == to).expect("it was sent");
            let (_, op, imm, data) = sent[qp].remove(first);
            assert_eq!(cqe.flags.contains(WcFlags::WITH_IMM), op != SendOp::Send);
            assert!(op == SendOp::Send || cqe.imm == imm);
            assert_eq!(cqe.byte_len as usize, data.len());
            let write = op == SendOp::WriteImm;
            assert_eq!(cqe.opcode, if write { WcOpcode::RecvRdmaWithImm } else { WcOpcode::Recv });
            if write {
                continue;
            }
            let (queue, place) = (&x.queues[to], x.queues[to].buffers[cqe.wr_id as usize]);
            assert_eq!(x.net.hosts[queue.host].env.memory.read(place.addr, data.len()), data);
        }
    }
    assert!(sent.iter().all(Vec::is_empty), "all messages arrived, once and in order");
    for (to, addr, data) in written {
        assert_eq!(x.net.hosts[x.queues[to].host].env.memory.read(addr, data.len()), data);
    }
    x.assert_unharmed();
}

#[test]
fn messages_reach_the_queues_of_other_cards() {
    for_seeds("messages_reach_the_queues_of_other_cards", 600, traffic);
}

/// Any card may be killed at any time: what was acknowledged has arrived, what was not fails, and nobody else
/// is harmed.
fn deaths(seed: u64) {
    let (mut rng, mut x, victim) = Shared::of_mortals(seed);
    let mut data = Vec::new();
    for n in 0..30u32 {
        let (qp, to) = (rng.below(2) as usize, rng.below(3) as usize);
        let len = any_size(&mut rng, 1024);
        let bytes = any_bytes(&mut rng, len);
        x.post_recv(to);
        if x.net.hosts[SENDER].state(x.sends[qp]) == QpState::Rts {
            x.send(
                qp,
                to,
                SendWqe { wr_id: u64::from(n), imm: n, op: SendOp::SendImm, ..SendWqe::default() },
                &bytes,
            );
        }
        data.push((to, bytes));
        for _ in 0..rng.below(20) {
            x.net.step();
        }
        if n == 15 {
            x.net.kill(victim);
        }
    }
    x.run();
    let done = x.sent();
    let mut arrived = [false; 30];
    for to in 0..3 {
        for cqe in x.got(to) {
            if cqe.status == WcStatus::WrFlushErr {
                continue;
            }
            assert_eq!(cqe.status, WcStatus::Success);
            let (at, bytes) = &data[cqe.imm as usize];
            let place = x.queues[to].buffers[cqe.wr_id as usize];
            assert_eq!((*at, cqe.byte_len as usize), (to, bytes.len()));
            assert_eq!(x.net.hosts[x.queues[to].host].env.memory.read(place.addr, bytes.len()), bytes);
            assert!(!std::mem::replace(&mut arrived[cqe.imm as usize], true), "twice");
        }
    }
    for cqe in done.iter().filter(|cqe| cqe.status == WcStatus::Success) {
        assert!(arrived[cqe.wr_id as usize], "message {} was acknowledged and is not there", cqe.wr_id);
    }
    /* a WQE is completed or still posted: none is lost */
    for queue in x.queues.iter().filter(|queue| queue.host != victim && victim == QPS) {
        let nic = &mut x.net.hosts[queue.host].nic;
        nic.destroy_srq(queue.id).expect("nobody uses it");
    }
}

#[test]
fn a_card_that_dies_harms_nobody_else() {
    for_seeds("a_card_that_dies_harms_nobody_else", 600, deaths);
}

/// WQEs that a dead card had come back to the head of the queue, in order; one with half a message is
/// flushed.
#[test]
fn what_the_dead_had_comes_back_in_order() {
    let mut x = Shared::new(Faults::default(), 1, &Setup { mtu: Mtu::M256, ..Setup::default() });
    for _ in 0..40 {
        x.post_recv(1);
    }
    x.send(0, 1, SendWqe::default(), b"first");
    x.run();
    assert_eq!(x.got(1)[0].wr_id, 0);
    assert!(starverbs_core::RecvQueue::len(&x.queues[1].rq) < 39, "some are leased");
    x.send(0, 1, SendWqe::default(), &[1; 100_000]);
    for _ in 0..20 {
        x.net.step();
    }
    x.net.kill(QPS);
    let flushed = x.got(1);
    assert_eq!(flushed.iter().map(|c| (c.status, c.wr_id)).collect::<Vec<_>>(), [(WcStatus::WrFlushErr, 1)]);
    x.send_directly(38);
    assert_eq!(x.got(1).iter().map(|c| c.wr_id).collect::<Vec<_>>(), (2..40).collect::<Vec<u64>>());
}

/// One WQE for two cards: who has it and does not use it gives it back.
#[test]
fn an_unused_lease_is_revoked() {
    let mut x = Shared::new(Faults::default(), 1, &Setup::default());
    for _ in 0..3 {
        x.post_recv(1);
    }
    x.send(0, 1, SendWqe::default(), b"one");
    x.run();
    assert!(starverbs_core::RecvQueue::len(&x.queues[1].rq) < 2, "one is leased beside");
    x.send_directly(2);
    assert_eq!(x.got(1).iter().map(|c| c.wr_id).collect::<Vec<_>>(), [0, 2, 1], "the leased one is last");
}

/// Who asked for more of an empty queue was not asked for what it has itself; when the queue's own card finds
/// it empty, it is.
#[test]
fn a_lease_of_the_last_requester_is_revoked() {
    let mut x = Shared::new(Faults::default(), 1, &Setup::default());
    for _ in 0..3 {
        x.post_recv(1);
    }
    x.send(0, 1, SendWqe::default(), b"one");
    x.run();
    let ask = Relay::RequestLease { srq: x.queues[1].number, count: 4 };
    for _ in 0..3 {
        assert!(x.net.relay(QPS, 2, &ask.encode().0));
    }
    assert_eq!(x.queues[1].rq.len(), 0, "all are leased");
    x.run();
    x.send_directly(2);
    assert_eq!(x.got(1).iter().map(|c| c.wr_id).collect::<Vec<_>>(), [0, 1, 2]);
}

/// What goes wrong at the SRQ is an error at the requester, of the kind that IBTA has for it.
/// A card that dies in the middle of a message, whenever: the requester learns it from a NAK, which is for a
/// packet that it has sent.
#[test]
fn who_dies_under_a_message_fails_it() {
    const LEN: u32 = 2 << 20;
    let data = vec![7; LEN as usize];
    for op in [SendOp::Send, SendOp::Write] {
        for steps in (1..).step_by(3) {
            let mut x = Shared::new(Faults::default(), 1, &Setup::default());
            let sge = region(&mut x.net.hosts[2], x.queues[1].pd, LEN);
            x.queues[1].rq.post(Recv { wr_id: 5, sges: vec![sge] }).expect("room");
            let wqe = SendWqe { op, remote_addr: sge.addr, rkey: sge.lkey, ..SendWqe::default() };
            x.send(0, 1, wqe, &data);
            for _ in 0..steps {
                x.net.step();
            }
            x.net.kill(2);
            x.run();
            let status = x.sent()[0].status;
            if status == WcStatus::Success {
                assert!(steps > 100, "it was to take longer than {steps} steps");
                break;
            }
            assert_eq!(status, WcStatus::RemInvReqErr, "{op:?}, after {steps} steps");
        }
    }
}

#[test]
fn faults_come_back_as_naks() {
    for case in 0..5 {
        let mut x = Shared::new(Faults::default(), 1, &Setup { rnr_retry: 2, ..Setup::default() });
        let (mut want, mut recv) = (WcStatus::RemInvReqErr, None);
        match case {
            0 => x.queues[1].number += 1,
            1 => x.queues[1].number = 7 << QPN_BLOCK_SHIFT,
            2 => want = WcStatus::RnrRetryExcErr,
            3 => {
                let sge = region(&mut x.net.hosts[2], x.queues[1].pd, 10);
                x.queues[1].rq.post(Recv { wr_id: 5, sges: vec![sge] }).expect("room");
                recv = Some(WcStatus::LocLenErr);
            }
            _ => {
                let sge = region(&mut x.net.hosts[2], x.queues[1].pd, 1000);
                let sge = Sge { lkey: sge.lkey ^ 1, ..sge };
                x.queues[1].rq.post(Recv { wr_id: 5, sges: vec![sge] }).expect("room");
                (want, recv) = (WcStatus::RemOpErr, Some(WcStatus::LocProtErr));
            }
        }
        x.send(0, 1, SendWqe::default(), &[3; 100]);
        x.run();
        assert_eq!(x.sent().iter().map(|c| c.status).collect::<Vec<_>>(), [want], "case {case}");
        assert_eq!(x.got(1).first().map(|c| c.status), recv, "case {case}");
        let failed = case != 2;
        assert_eq!(x.net.hosts[QPS].state(x.recvs[0]) == QpState::Err, failed);
        let events = if failed { vec![AsyncEvent::QpReqErr(x.recvs[0])] } else { vec![] };
        assert_eq!(x.net.hosts[QPS].env.events, events);
    }
}

/// WRITEs are checked against the SRQ's protection domain, and nothing behind one that fails is executed.
#[test]
fn a_write_that_may_not_ends_the_connection_before_what_follows() {
    for case in 0..4 {
        let mut x = Shared::new(Faults::default(), 1, &Setup { mtu: Mtu::M256, ..Setup::default() });
        x.post_recv(1);
        x.post_recv(1);
        let right = region(&mut x.net.hosts[2], x.queues[1].pd, 2000);
        let usual = x.net.hosts[2].pd;
        let other = region(&mut x.net.hosts[2], usual, 2000);
        let bad = match case {
            0 => Sge { lkey: right.lkey ^ 1, ..right },
            1 => Sge { addr: right.addr + 1, ..right },
            2 => other,
            _ => region(&mut x.net.hosts[3], x.queues[2].pd, 2000),
        };
        let wqe = |sge: Sge, op| SendWqe { op, remote_addr: sge.addr, rkey: sge.lkey, ..SendWqe::default() };
        x.send(0, 1, wqe(bad, SendOp::WriteImm), &[7; 2000]);
        x.send(0, 1, wqe(right, SendOp::Write), &[8; 2000]);
        x.send(0, 1, SendWqe::default(), &[9; 20]);
        x.run();
        let want = [WcStatus::RemAccessErr, WcStatus::WrFlushErr, WcStatus::WrFlushErr];
        assert_eq!(x.sent().iter().map(|c| c.status).collect::<Vec<_>>(), want);
        let untouched =
            *x.net.hosts[2].env.memory.read(right.addr, 2000).first_chunk::<2000>().expect("2000 bytes");
        assert_eq!(untouched, [untouched[0]; 2000]);
        assert!(![7, 8].contains(&untouched[0]));
        assert_eq!(x.net.hosts[QPS].env.events, [AsyncEvent::QpAccessErr(x.recvs[0])]);
        assert!(x.got(1).iter().all(|cqe| cqe.status != WcStatus::Success));
        /* the other QP has the queue to itself */
        x.post_recv(1);
        x.send(1, 1, SendWqe::default(), b"goes on");
        x.run();
        assert_eq!(x.sent()[0].status, WcStatus::Success);
    }
}

/// A card that stands still holds up nobody: its requester gets RNR NAKs, others go on. Without leases the
/// message is not taken; with some it is forwarded, and not confirmed.
#[test]
fn a_card_that_sleeps_costs_rnr_naks_alone() {
    let setup = Setup { timeout: 12, retry_cnt: 2, min_rnr_timer: 12, ..Setup::default() };
    for leased in [0, 1] {
        let mut x = Shared::new(Faults::default(), 1, &setup);
        for to in [1, 2] {
            for _ in 0..9 {
                x.post_recv(to);
            }
        }
        for _ in 0..leased {
            x.send(0, 1, SendWqe::default(), b"before");
            x.run();
            assert_eq!((x.sent()[0].status, x.got(1).len()), (WcStatus::Success, 1));
        }
        let begun = x.net.now();
        x.net.sleep(2, 2_000_000_000);
        x.send(0, 1, SendWqe::default(), b"sleeps");
        for _ in 0..8 {
            x.send(1, 2, SendWqe::default(), b"awake");
        }
        while x.net.now() < begun + 1_000_000_000 && x.net.step() {}
        assert_eq!((x.sent().len(), x.got(2).len()), (8, 8));
        assert!(x.net.hosts[QPS].nic.counters().sent_rnr.get() > 10);
        x.run();
        assert_eq!((x.sent()[0].status, x.got(1).len()), (WcStatus::Success, 1));
    }
}

/// A requester repeats all that is not acknowledged, as RC's may: only the second time is it told that its
/// receiver is not ready, as the card may be about to confirm.
#[test]
fn what_is_repeated_once_costs_no_rnr_nak() {
    let setup = Setup { min_rnr_timer: 20, ..Setup::default() };
    let mut x = Shared::new(Faults::default(), 1, &setup);
    (0..16).for_each(|_| x.post_recv(1));
    x.send(0, 1, SendWqe::default(), b"before");
    x.run();
    assert_eq!(x.sent()[0].status, WcStatus::Success);
    x.net.sleep(2, 2_000_000_000);
    (0..3).for_each(|_| x.send(0, 1, SendWqe::default(), b"wait"));
    let end = x.net.now() + 1_000_000;
    while x.net.now() < end && x.net.step() {}
    let now = x.net.now();
    let meta = FrameMeta { src: x.net.hosts[SENDER].gid, dst: x.net.hosts[QPS].gid, ..FrameMeta::default() };
    let host = &mut x.net.hosts[QPS];
    for (psn, naks) in [(1, 0), (2, 0), (3, 0), (1, 1)] {
        let code = code::XRC | code::RC_SEND_ONLY;
        let bth = HeaderBuf::bth(code, x.recvs[0], Psn::new(psn), true, false, 0, PKEY_DEFAULT);
        let frame = [&bth.xrceth(x.queues[1].number)[..], b"wait"].concat();
        host.nic.handle_frame(&mut host.env, now, &meta, &frame);
        let counters = host.nic.counters();
        assert_eq!(counters.sent_rnr.get(), naks, "{psn}: {}", counters.duplicate_request.get());
    }
    assert_eq!(host.nic.counters().duplicate_request.get(), 4);
    x.run();
    assert_eq!(x.sent().iter().map(|cqe| cqe.status).collect::<Vec<_>>(), [WcStatus::Success; 3]);
}

/// A QP whose messages go to other cards does not know their progress: it keeps nothing behind a
/// gap and never advertises it, to a requester that would.
#[test]
fn a_qp_of_a_shared_domain_never_advertises_selective_repeat() {
    for_seeds("a_qp_of_a_shared_domain_never_advertises_selective_repeat", 20, |seed| {
        let faults = Faults { loss: 0.03, ..Faults::default() };
        let mut x = Shared::new(faults, seed, &Setup { timeout: 12, mtu: Mtu::M1024, ..Setup::default() });
        let advertised = Rc::new(Cell::new([0u32; 2]));
        let seen = advertised.clone();
        x.net.tap = Some(Box::new(move |from, bytes| {
            let repeats = Packet::parse(bytes).is_ok_and(|packet| packet.bth().repeats() != 0);
            let mut of = seen.get();
            if from < of.len() {
                of[from] += u32::from(repeats);
            }
            seen.set(of);
        }));
        let data: Vec<Vec<u8>> = (0..6u8).map(|n| vec![n; 60_000]).collect();
        for (n, data) in data.iter().enumerate() {
            /* its own SRQ, and another's */
            x.post_recv(n % 2);
            x.send(0, n % 2, SendWqe::default(), data);
        }
        x.run();
        assert_eq!(x.sent().iter().map(|c| c.status).collect::<Vec<_>>(), [WcStatus::Success; 6]);
        for to in 0..2 {
            let got = x.got(to);
            assert_eq!(got.len(), 3);
            for (n, cqe) in got.iter().enumerate() {
                let (queue, place) = (&x.queues[to], x.queues[to].buffers[cqe.wr_id as usize]);
                assert_eq!(x.net.hosts[queue.host].env.memory.read(place.addr, 60_000), data[2 * n + to]);
            }
        }
        let counters = x.net.hosts[QPS].nic.counters();
        assert_eq!((counters.kept_ahead.get(), counters.sent_sack.get()), (0, 0));
        let [offered, answered] = advertised.get();
        assert!(offered > 0, "the requester would");
        assert_eq!(answered, 0);
        assert!(x.net.tally.lost > 0);
    });
}

/// A solicited event is the SRQ's, on its card, and only for messages that ask for it.
#[test]
fn a_solicited_event_reaches_the_queue_of_another_card() {
    let mut x = Shared::new(Faults::default(), 1, &Setup { mtu: Mtu::M256, ..Setup::default() });
    let wanted = [true, false, true, false];
    for (n, solicited) in wanted.into_iter().enumerate() {
        let op = [SendOp::Send, SendOp::Send, SendOp::WriteImm, SendOp::WriteImm][n];
        x.post_recv(1);
        let there = region(&mut x.net.hosts[2], x.queues[1].pd, 700);
        let wqe = SendWqe { op, remote_addr: there.addr, rkey: there.lkey, ..SendWqe::default() };
        let flags = if solicited { wqe.flags | SendFlags::SOLICITED } else { wqe.flags };
        x.send(0, 1, SendWqe { flags, ..wqe }, &[1; 700]);
    }
    x.run();
    let got: Vec<bool> =
        std::iter::from_fn(|| x.queues[1].cq.poll()).map(|(_, solicited)| solicited).collect();
    assert_eq!(got, wanted);
}

/// A window answers to the QP that it was bound on. QPs that receive bind nothing, so SEND with Invalidate
/// finds none through them, on whatever card: its receive fails as it does at an SRQ of the QP's own card
/// (class J), and the window of another QP stays bound.
#[test]
fn an_invalidation_does_not_reach_the_windows_of_others() {
    for to in [0, 1] {
        let mut x = Shared::new(Faults::default(), 1, &Setup { mtu: Mtu::M256, ..Setup::default() });
        x.post_recv(to);
        let (at, pd) = (x.queues[to].host, x.queues[to].pd);
        let rights = all_rights() | Access::MW_BIND;
        let usual = std::mem::replace(&mut x.net.hosts[at].pd, pd);
        let page = x.net.hosts[at].region(4096, rights);
        let cq = SimCq::new(16);
        let (near, far) = (SimSq::new(16), SimSq::new(16));
        let rq = || RecvSource::Own(SimRq::new(1, 1));
        let owner = x.net.hosts[at].qp(QpType::Rc, &near, rq(), [&cq, &cq], true);
        x.net.hosts[at].pd = usual;
        let peer = x.net.hosts[SENDER].qp(QpType::Rc, &far, rq(), [&cq, &cq], true);
        x.net.connect(
            QpType::Rc,
            QpAt { host: at, qpn: owner },
            QpAt { host: SENDER, qpn: peer },
            &Setup::default(),
        );
        let window = x.net.hosts[at].nic.alloc_mw(pd, WindowType::Two).expect("a window");
        let key = window & !0xff | window.wrapping_add(1) & 0xff;
        let bind = SendWqe {
            op: SendOp::BindMw,
            remote_addr: page.0,
            compare_add: 4096,
            rkey: key,
            imm: page.1,
            remote_qpn: window,
            qkey: Access::REMOTE_WRITE.bits(),
            ..SendWqe::default()
        };
        near.post(Send { wqe: bind, sges: vec![], inline: None }).expect("there is room");
        x.net.doorbell(at, owner);
        x.run();
        x.send(0, to, SendWqe { op: SendOp::SendInv, imm: key, ..SendWqe::default() }, &[1; 700]);
        x.run();
        let (sent, got) = (x.sent(), x.got(to));
        assert_eq!(sent.iter().map(|c| c.status).collect::<Vec<_>>(), [WcStatus::Success], "it has arrived");
        assert_eq!(got.iter().map(|c| c.status).collect::<Vec<_>>(), [WcStatus::RemInvReqErr]);
        assert_eq!(x.net.hosts[QPS].state(x.recvs[0]), QpState::Err);
        assert_eq!(x.net.hosts[QPS].env.events, []);
        let pd = x.net.hosts[SENDER].pd;
        let from = region(&mut x.net.hosts[SENDER], pd, 8);
        let write = SendWqe { op: SendOp::Write, remote_addr: page.0, rkey: key, ..SendWqe::default() };
        far.post(Send { wqe: write, sges: vec![from], inline: None }).expect("there is room");
        x.net.doorbell(SENDER, peer);
        x.run();
        let done: Vec<_> = std::iter::from_fn(|| cq.poll()).map(|(cqe, _)| cqe.status).collect();
        assert_eq!(done, [WcStatus::Success; 2], "bound, and still so");
    }
}

/// A number is given again: what a domain's links brought does not reach the private domain that has its
/// number now.
#[test]
fn messages_reach_no_private_domain() {
    let mut x = Shared::new(Faults::default(), 1, &Setup::default());
    let host = &mut x.net.hosts[2];
    let private = host.nic.alloc_pd().expect("a PD");
    let (rq, pd) = (SimRq::new(4, 2), host.pd);
    let id = host.nic.create_xrc_srq(pd, private, rq.clone(), SimCq::new(4), 0).expect("an SRQ");
    let sge = region(host, pd, 100);
    rq.post(Recv { wr_id: 1, sges: vec![sge] }).expect("there is room");
    let shared = x.net.hosts[2].env.domain.replace(private);
    let block = x.queues[1].number >> QPN_BLOCK_SHIFT;
    let ask = Relay::RequestLease { srq: block << QPN_BLOCK_SHIFT | id.0, count: 1 };
    assert!(x.net.relay(QPS, 2, &ask.encode().0));
    x.net.hosts[2].env.domain = shared;
    assert_eq!(rq.len(), 1, "it is not leased");
}
