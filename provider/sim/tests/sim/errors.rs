//! Faults end as in the verbs man pages and the IBTA: one failed completion with the
//! right status, everything behind it flushed in order, the right event, and the right state.

use crate::common::pair::{PAGE, Pair};
use starverbs_core::mr::MrAttr;
use starverbs_core::qp::{QpAttr, QpAttrMask, RecvSource};
use starverbs_core::{
    Access, AsyncEvent, Mtu, NicError, QpState, QpType, SendFlags, SendOp, SendWqe, Sge, WcStatus,
};
use starverbs_sim::{QpAt, Recv, Send, Setup, SimRq, SimSq};

#[test]
fn remote_access_errors() {
    type Spoil = fn(&mut SendWqe);
    let rkey: Spoil = |w| w.rkey ^= 1;
    let slot: Spoil = |w| w.rkey ^= 0x100;
    let beyond: Spoil = |w| w.remote_addr += PAGE - 7;
    let before: Spoil = |w| w.remote_addr -= 8;
    let wraps: Spoil = |w| w.remote_addr = u64::MAX - 7;
    for op in [SendOp::Write, SendOp::Read, SendOp::CmpSwap, SendOp::FetchAdd] {
        for spoil in [rkey, slot, beyond, before, wraps] {
            let mut p = Pair::rc();
            let mut bad = p.wqe(2, op);
            spoil(&mut bad);
            if op.is_atomic() && !bad.remote_addr.is_multiple_of(8) {
                bad.remote_addr += 7;
            }
            let event = AsyncEvent::QpAccessErr(p.qpn[1]);
            let sge = p.sge(0, 8);
            p.refused_with(bad, &[sge], WcStatus::RemAccessErr, event);
        }
    }
}

/// The receive that a WRITE with immediate takes completes with the missing right (class C); a longer WRITE
/// fails before it takes one.
#[test]
fn a_write_with_immediate_that_is_denied_fails_its_receive() {
    for (len, first) in [(8, WcStatus::LocAccessErr), (0, WcStatus::Success), (3000, WcStatus::WrFlushErr)] {
        let mut p = Pair::rc();
        p.post_recv(100, 64);
        p.post_recv(101, 64);
        let good = p.wqe(2, SendOp::WriteImm);
        p.post(SendWqe { rkey: good.rkey ^ 1, ..good }, &[p.sge(0, len)]);
        p.run();
        let denied = if len == 0 { WcStatus::Success } else { WcStatus::RemAccessErr };
        assert_eq!(p.polled(0), [(2, denied)]);
        if len > 0 {
            assert_eq!(p.polled(1), [(100, first), (101, WcStatus::WrFlushErr)]);
            assert_eq!(p.events(1), [AsyncEvent::QpAccessErr(p.qpn[1])]);
        }
    }
}

/// The right must be given by the MR and by the QP.
#[test]
fn rights_of_mr_and_qp() {
    let rights = [
        (SendOp::Write, Access::REMOTE_WRITE),
        (SendOp::Read, Access::REMOTE_READ),
        (SendOp::FetchAdd, Access::REMOTE_ATOMIC),
        (SendOp::CmpSwap, Access::REMOTE_ATOMIC),
    ];
    for (op, right) in rights {
        let others = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        for of_qp in [false, true] {
            let mut p = Pair::rc();
            let mut bad = p.wqe(2, op);
            if of_qp {
                let attr = QpAttr { access: others - right, ..QpAttr::default() };
                let now = p.net.now();
                p.net.hosts[1].modify(p.qpn[1], &attr, QpAttrMask::ACCESS_FLAGS, now).expect("RTS to RTS");
            } else {
                (bad.remote_addr, bad.rkey) = p.net.hosts[1].region(64, others - right);
            }
            let sge = p.sge(0, 8);
            if of_qp && op == SendOp::Write {
                /* The good WRITE before it fails already. */
                p.post(bad, &[sge]);
                p.run();
                assert_eq!(p.polled(0), [(2, WcStatus::RemAccessErr)]);
                continue;
            }
            let event = AsyncEvent::QpAccessErr(p.qpn[1]);
            p.refused_with(bad, &[sge], WcStatus::RemAccessErr, event);
        }
    }
}

/// An MR of another protection domain, and one that is gone.
/// A card whose own port is full has nothing under way after its first timeout: it blames nobody for that,
/// however long it lasts. With room in the port the peer's silence is one.
#[test]
fn a_full_port_is_no_silence_of_the_peer() {
    for full in [true, false] {
        let mut p = Pair::of(QpType::Rc, &Setup { timeout: 10, retry_cnt: 3, ..Setup::default() });
        p.net.faults.loss = 1.0;
        let sges = [p.sge(0, 8)];
        p.post(p.wqe(1, SendOp::Write), &sges);
        p.net.step();
        if !full {
            p.run();
            assert_eq!(p.polled(0), [(1, WcStatus::RetryExcErr)]);
            continue;
        }
        let host = &mut p.net.hosts[0];
        host.env.port = 0;
        let mut looks = 0;
        while let Some(at) = host.nic.next_deadline().filter(|at| *at < 60_000_000_000) {
            host.nic.handle_timeout(&mut host.env, at);
            host.nic.poll_transmit(&mut host.env, at, true);
            looks += 1;
            assert!(looks < 100_000, "it sleeps between two looks");
        }
        let counters = host.nic.counters();
        assert_eq!((counters.timeouts.get(), counters.retry_exceeded.get()), (1, 0));
        assert!(looks > 1 && p.polled(0).is_empty() && p.states()[0] == QpState::Rts);
    }
}

#[test]
fn keys_of_others_and_of_the_past() {
    let mut p = Pair::rc();
    let host = &mut p.net.hosts[1];
    let other = host.nic.alloc_pd().expect("a PD");
    let addr = host.env.memory.alloc(64);
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let rkey = host
        .nic
        .reg_mr(MrAttr { pd: other, addr, length: 64, iova: addr, access, ..MrAttr::default() })
        .expect("an MR");
    let (sge, event) = (p.sge(0, 8), AsyncEvent::QpAccessErr(p.qpn[1]));
    p.refused_with(
        SendWqe { remote_addr: addr, rkey, ..p.wqe(2, SendOp::Write) },
        &[sge],
        WcStatus::RemAccessErr,
        event,
    );

    let mut p = Pair::rc();
    let (addr, rkey) = p.net.hosts[1].region(64, access);
    p.net.hosts[1].nic.dereg_mr(rkey).expect("it exists");
    assert_eq!(p.net.hosts[1].nic.dereg_mr(rkey), Err(NicError::NotFound));
    let (sge, event) = (p.sge(0, 8), AsyncEvent::QpAccessErr(p.qpn[1]));
    p.refused_with(
        SendWqe { remote_addr: addr, rkey, ..p.wqe(2, SendOp::Write) },
        &[sge],
        WcStatus::RemAccessErr,
        event,
    );
}

/// On-demand paging: the key reaches there, but nothing is mapped when the card comes to it.
#[test]
fn memory_that_went_away() {
    for op in [SendOp::Write, SendOp::Read, SendOp::FetchAdd, SendOp::CmpSwap] {
        let mut p = Pair::rc();
        let mut bad = p.wqe(2, op);
        bad.remote_addr += 1024;
        p.net.hosts[1].env.gone = bad.remote_addr..bad.remote_addr + 8;
        /* READ data is fetched after later requests were taken: what they did stays */
        let sge = p.sge(0, 8);
        p.fails_with(bad, &[sge], WcStatus::RemAccessErr);
        assert_eq!(p.states()[1], QpState::Err);
        assert_eq!(p.events(1), [AsyncEvent::QpAccessErr(p.qpn[1])]);
    }
    for op in [SendOp::Send, SendOp::Write, SendOp::Read, SendOp::FetchAdd] {
        let mut p = Pair::rc();
        let mut sge = p.sge(0, 8);
        sge.addr += 1024;
        p.net.hosts[0].env.gone = sge.addr..sge.addr + 8;
        p.fails_with(p.wqe(2, op), &[sge], WcStatus::LocProtErr);
    }
    let mut p = Pair::rc();
    p.post_recv(100, 64);
    p.net.hosts[1].env.gone = p.page[1].0..p.page[1].0 + PAGE;
    p.post(p.wqe(2, SendOp::Send), &[p.sge(0, 8)]);
    p.run();
    assert_eq!(p.polled(0), [(2, WcStatus::RemOpErr)]);
    assert_eq!(p.polled(1), [(100, WcStatus::LocProtErr)]);
}

/// The MR goes while its answer is under way: the READ fails, and nothing turns in a circle.
#[test]
fn an_mr_that_goes_before_its_answer() {
    let mut p = Pair::rc();
    let (addr, rkey) = p.net.hosts[1].region(64, Access::REMOTE_READ);
    let sge = p.sge(0, 64);
    let read = |wr_id| SendWqe { wr_id, op: SendOp::Read, remote_addr: addr, rkey, ..SendWqe::default() };
    p.post(read(1), &[sge]);
    p.post(read(2), &[sge]);
    assert!(p.net.step(), "the requests arrive");
    p.net.hosts[1].nic.dereg_mr(rkey).expect("it exists");
    p.run();
    assert_eq!(p.polled(0), [(1, WcStatus::RemAccessErr), (2, WcStatus::WrFlushErr)]);
    assert_eq!(p.states(), [QpState::Err; 2]);
    assert_eq!(p.events(1), [AsyncEvent::QpAccessErr(p.qpn[1])]);
}

#[test]
fn local_errors() {
    for op in [SendOp::Send, SendOp::Write, SendOp::Read, SendOp::FetchAdd] {
        for spoil in
            [|s: &mut Sge| s.lkey ^= 1, |s: &mut Sge| s.addr += PAGE, |s: &mut Sge| s.addr = u64::MAX]
        {
            let mut p = Pair::rc();
            let mut sge = p.sge(0, 8);
            spoil(&mut sge);
            p.fails_with(p.wqe(2, op), &[sge], WcStatus::LocProtErr);
            assert_eq!(p.states()[1], QpState::Rts, "the peer saw nothing");
        }
    }
    /* Results need LOCAL_WRITE. */
    let mut p = Pair::rc();
    let (addr, lkey) = p.net.hosts[0].region(64, Access::empty());
    p.fails_with(p.wqe(2, SendOp::Read), &[Sge { addr, len: 8, lkey }], WcStatus::LocProtErr);
    /* Atomics move eight bytes. */
    let mut p = Pair::rc();
    let sge = p.sge(0, 16);
    p.fails_with(p.wqe(2, SendOp::FetchAdd), &[sge], WcStatus::LocLenErr);
}

#[test]
fn unaligned_atomics_are_invalid_requests() {
    let mut p = Pair::rc();
    let mut bad = p.wqe(2, SendOp::FetchAdd);
    bad.remote_addr += 4;
    let (sge, event) = (p.sge(0, 8), AsyncEvent::QpReqErr(p.qpn[1]));
    p.refused_with(bad, &[sge], WcStatus::RemInvReqErr, event);
}

/// A SEND longer than its receive: length error there, invalid request here (IBTA 9.7.4.1.6, 9.9.3).
#[test]
fn sends_that_do_not_fit() {
    for len in [65, 1024, 3000] {
        let mut p = Pair::rc();
        p.post_recv(100, 64);
        p.post_recv(101, 64);
        let sge = p.sge(0, len);
        p.post(p.wqe(1, SendOp::Send), &[sge]);
        p.post(p.wqe(2, SendOp::Send), &[sge]);
        p.run();
        assert_eq!(p.polled(0), [(1, WcStatus::RemInvReqErr), (2, WcStatus::WrFlushErr)]);
        assert_eq!(p.polled(1), [(100, WcStatus::LocLenErr), (101, WcStatus::WrFlushErr)]);
        assert_eq!(p.states(), [QpState::Err; 2]);
        let page = p.net.hosts[1].env.memory.read(p.page[1].0 + 64, 64);
        assert!(page.iter().all(|b| *b == 0xa5), "nothing behind the buffer was written");
    }
}

/// The peer's receive names memory that it may not write.
#[test]
fn receives_into_bad_memory() {
    let mut p = Pair::rc();
    let mut sge = p.sge(1, 64);
    sge.lkey ^= 1;
    p.rq[1].post(Recv { wr_id: 100, sges: vec![sge] }).expect("there is room");
    let sge = p.sge(0, 8);
    p.post(p.wqe(1, SendOp::Send), &[sge]);
    p.run();
    assert_eq!(p.polled(0), [(1, WcStatus::RemOpErr)]);
    assert_eq!(p.polled(1), [(100, WcStatus::LocProtErr)]);
    assert_eq!(p.states(), [QpState::Err; 2]);
}

/// Nobody answers: the card gives up after timeout x (retries + 1), not before.
#[test]
fn silence_ends_in_retry_exceeded() {
    for (timeout, retry_cnt) in [(14, 0), (14, 3), (14, 7), (10, 7), (18, 1)] {
        for op in [SendOp::Send, SendOp::Write, SendOp::Read, SendOp::FetchAdd] {
            let mut p = Pair::of(QpType::Rc, &Setup { timeout, retry_cnt, ..Setup::default() });
            p.net.faults.loss = 1.0;
            let sge = p.sge(0, 8);
            let began = p.net.now();
            p.post(p.wqe(1, op), &[sge]);
            p.post(p.wqe(2, op), &[sge]);
            p.run();
            assert_eq!(p.polled(0), [(1, WcStatus::RetryExcErr), (2, WcStatus::WrFlushErr)]);
            assert_eq!(p.states(), [QpState::Err, QpState::Rts]);
            let (took, unit) = (p.net.now() - began, 4096u64 << timeout);
            let least = unit * (u64::from(retry_cnt) + 1);
            assert!(took >= least, "{op:?}: {took} ns is before {least}");
            assert!(took <= 4 * least + 100_000_000, "{op:?}: {took} ns is long after {least}");
            assert_eq!(p.net.hosts[0].nic.counters().retry_exceeded.get(), 1);
        }
    }
}

/// Both hosts stood still for longer than all retries take, with the request or its answer under way: nobody
/// was silent.
#[test]
fn a_suspended_machine_fails_nothing() {
    for op in [SendOp::Send, SendOp::Write, SendOp::Read, SendOp::FetchAdd] {
        for steps in 0..3 {
            let mut p = Pair::rc();
            p.post_recv(100, 64);
            let sge = p.sge(0, 8);
            p.post(p.wqe(1, op), &[sge]);
            for _ in 0..steps {
                p.net.step();
            }
            p.net.suspend(3_600_000_000_000);
            p.run();
            assert_eq!(p.polled(0), [(1, WcStatus::Success)], "{op:?} after {steps} steps");
            assert_eq!(p.states(), [QpState::Rts; 2]);
        }
    }
}

/// No receive is posted: RNR NAKs, then the end; 7 retries are for ever.
#[test]
fn receiver_not_ready() {
    for rnr_retry in [0, 1, 6] {
        let mut p = Pair::of(QpType::Rc, &Setup { rnr_retry, min_rnr_timer: 12, ..Setup::default() });
        let sge = p.sge(0, 8);
        p.post(p.wqe(1, SendOp::Send), &[sge]);
        p.post(p.wqe(2, SendOp::Write), &[sge]);
        let began = p.net.now();
        p.run();
        assert_eq!(p.polled(0), [(1, WcStatus::RnrRetryExcErr), (2, WcStatus::WrFlushErr)]);
        assert_eq!(p.states(), [QpState::Err, QpState::Rts]);
        let c = p.net.hosts[0].nic.counters();
        assert_eq!(c.rcvd_rnr.get(), u64::from(rnr_retry) + 1);
        assert!(
            p.net.now() - began >= 640_000 * u64::from(rnr_retry),
            "each wait lasts 0.64 ms (timer code 12)"
        );
    }
    let mut p = Pair::of(QpType::Rc, &Setup { rnr_retry: 7, ..Setup::default() });
    let sge = p.sge(0, 8);
    p.post(p.wqe(1, SendOp::Send), &[sge]);
    for _ in 0..1000 {
        assert!(p.net.step(), "it goes on trying");
    }
    assert_eq!(p.polled(0), []);
    p.post_recv(100, 64);
    p.run();
    assert_eq!((p.polled(0), p.polled(1)), (vec![(1, WcStatus::Success)], vec![(100, WcStatus::Success)]));
}

/// What stands in a send queue's memory and is no operation fails where its turn comes, and touches nothing.
#[test]
fn an_operation_that_there_is_none_of() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let mut p = Pair::of(qp_type, &Setup::default());
        let bad = SendWqe { op: SendOp::Malformed, ..p.wqe(1, SendOp::Send) };
        p.post(bad, &[p.sge(0, 8)]);
        p.run();
        assert_eq!(p.polled(0), [(1, WcStatus::LocQpOpErr)]);
        let state = if qp_type == QpType::Rc { QpState::Err } else { QpState::Sqe };
        assert_eq!(p.states()[0], state, "{qp_type:?}");
    }
}

#[test]
fn ops_that_a_transport_lacks() {
    for (qp_type, op) in [(QpType::Uc, SendOp::Read), (QpType::Uc, SendOp::FetchAdd)] {
        let mut p = Pair::of(qp_type, &Setup::default());
        let sge = p.sge(0, 8);
        p.post(p.wqe(1, op), &[sge]);
        p.run();
        assert_eq!(p.polled(0), [(1, WcStatus::LocQpOpErr)]);
    }
}

/// More READs at once than the peer takes wait here; none is refused.
#[test]
fn reads_wait_for_their_turn() {
    let mut p = Pair::of(QpType::Rc, &Setup { rd_atomic: 1, mtu: Mtu::M256, ..Setup::default() });
    let sge = p.sge(0, 2000);
    for wr_id in 0..10 {
        p.post(p.wqe(wr_id, SendOp::Read), &[sge]);
    }
    p.run();
    assert_eq!(p.polled(0), (0..10).map(|i| (i, WcStatus::Success)).collect::<Vec<_>>());
}

/// Zero-length WRITE and READ need no valid key (IBTA 9.4.3, 9.4.4).
#[test]
fn empty_messages_need_no_key() {
    let mut p = Pair::rc();
    for (wr_id, op) in [(1, SendOp::Write), (2, SendOp::Read)] {
        let wqe = SendWqe { rkey: 0x1234, remote_addr: 3, ..p.wqe(wr_id, op) };
        p.post(wqe, &[]);
    }
    p.run();
    assert_eq!(p.polled(0), [(1, WcStatus::Success), (2, WcStatus::Success)]);
}

/// Signals and fences do not change what happens, only what is reported: unsignaled work still fails loudly.
#[test]
fn unsignaled_failures_complete() {
    let mut p = Pair::rc();
    let (sq, rq) = (SimSq::new(16), SimRq::new(16, 2));
    let qpn = p.net.hosts[0].qp(QpType::Rc, &sq, RecvSource::Own(rq), [&p.cq[0], &p.cq[0]], false);
    let peer_sq = SimSq::new(16);
    let own = RecvSource::Own(SimRq::new(16, 2));
    let peer = p.net.hosts[1].qp(QpType::Rc, &peer_sq, own, [&p.cq[1], &p.cq[1]], true);
    p.net.connect(QpType::Rc, QpAt { host: 0, qpn }, QpAt { host: 1, qpn: peer }, &Setup::default());
    let sge = p.sge(0, 8);
    let post = |wqe: SendWqe| sq.post(Send { wqe, sges: vec![sge], inline: None }).expect("there is room");
    let good = p.wqe(0, SendOp::Write);
    post(SendWqe { wr_id: 1, ..good });
    post(SendWqe { wr_id: 2, flags: SendFlags::SIGNALED, ..good });
    post(SendWqe { wr_id: 3, rkey: good.rkey ^ 1, ..good });
    post(SendWqe { wr_id: 4, ..good });
    p.net.doorbell(0, qpn);
    p.run();
    let want = [(2, WcStatus::Success), (3, WcStatus::RemAccessErr), (4, WcStatus::WrFlushErr)];
    assert_eq!(p.polled(0), want);
}
