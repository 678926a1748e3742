//! Memory windows on a wire: bound, used and invalidated in the order of the queues, once each.

use crate::common::pair::{PAGE, Pair};
use crate::common::{any_bytes, any_faults, for_seeds, is_clean};
use starverbs_core::mr::WindowType;
use starverbs_core::{
    Access, AsyncEvent, Cqe, NicError, QpState, QpType, SendFlags, SendOp, SendWqe, Sge, WcFlags, WcOpcode,
    WcStatus,
};
use starverbs_sim::{Faults, Recv, Rng, Send, Setup};

const READ: Access = Access::REMOTE_READ;

/// A region on host `at` that windows may be bound to, and a window.
struct Bound {
    addr: u64,
    mr: u32,
    window: u32,
}

fn bound(p: &mut Pair, at: usize, kind: WindowType) -> Bound {
    let host = &mut p.net.hosts[at];
    let (addr, mr) = host.region(PAGE, Access::LOCAL_WRITE | Access::MW_BIND);
    let window = host.nic.alloc_mw(host.pd, kind).expect("a window");
    Bound { addr, mr, window }
}

impl Bound {
    fn wqe(&self, wr_id: u64, rkey: u32, offset: u64, length: u64, access: Access) -> SendWqe {
        SendWqe {
            wr_id,
            op: SendOp::BindMw,
            remote_addr: self.addr + offset,
            compare_add: length,
            rkey,
            imm: self.mr,
            remote_qpn: self.window,
            qkey: access.bits(),
            ..SendWqe::default()
        }
    }

    /// Binds all of the region.
    fn whole(&self, wr_id: u64, access: Access) -> SendWqe {
        self.wqe(wr_id, next(self.window), 0, PAGE, access)
    }
}

fn next(key: u32) -> u32 {
    (key & !0xff) | (key.wrapping_add(1) & 0xff)
}

fn local_inv(wr_id: u64, rkey: u32, flags: SendFlags) -> SendWqe {
    SendWqe { wr_id, op: SendOp::LocalInv, rkey, flags, ..SendWqe::default() }
}

fn post_at(p: &mut Pair, at: usize, wqe: SendWqe, sges: &[Sge]) {
    p.sq[at].post(Send { wqe, sges: sges.to_vec(), inline: None }).expect("there is room");
    p.net.doorbell(at, p.qpn[at]);
}

/// The completions of host `at` until one of a receive; all must be successes, in order of their wr_id.
fn until_received(p: &mut Pair, at: usize, sent: &mut u64) -> Cqe {
    for _ in 0..200_000 {
        while let Some((cqe, _)) = p.cq[at].poll() {
            assert_eq!(cqe.status, WcStatus::Success, "{cqe:?}");
            if matches!(cqe.opcode, WcOpcode::Recv) {
                return cqe;
            }
            assert_eq!(cqe.wr_id, *sent, "completions come in order");
            *sent += 1;
        }
        assert!(p.net.step(), "nothing happens any more");
    }
    panic!("no end");
}

/// The owner binds and sends the key right behind; the peer writes and reads through the window,
/// then invalidates it, or reports that it is done and the owner does.
fn rounds(seed: u64) {
    let mut rng = Rng::new(seed);
    let mut p = Pair::of(QpType::Rc, &Setup { timeout: 18, ..Setup::default() });
    p.net.faults = any_faults(&mut rng);
    let b = bound(&mut p, 1, WindowType::Two);
    let (mut key, mut sent, mut wr) = (b.window, [0, 0], [0, 0]);
    let mut id = |at: usize| {
        wr[at] += 1;
        wr[at] - 1
    };
    for _ in 0..6 {
        key = next(key);
        let len = rng.within(1, 5000);
        let offset = rng.below(PAGE - len);
        let zero = rng.chance(0.3);
        let mut rights = Access::REMOTE_WRITE | READ;
        rights.set(Access::ZERO_BASED, zero);
        let word = Sge { len: 8, ..p.sge(1, 8) };
        p.net.hosts[1].env.memory.set_word(word.addr, u64::from(key));
        let into = Sge { addr: p.page[0].0 + PAGE - 8, ..p.sge(0, 8) };
        p.rq[0].post(Recv { wr_id: 0, sges: vec![into] }).expect("there is room");
        p.rq[1].post(Recv { wr_id: 0, sges: vec![] }).expect("there is room");
        post_at(&mut p, 1, b.wqe(id(1), key, offset, len, rights), &[]);
        post_at(&mut p, 1, SendWqe { wr_id: id(1), ..SendWqe::default() }, &[word]);
        until_received(&mut p, 0, &mut sent[0]);
        let rkey = p.net.hosts[0].env.memory.word(into.addr) as u32;
        assert_eq!(rkey, key);

        let data = any_bytes(&mut rng, len as u32);
        p.net.hosts[0].env.memory.write(p.page[0].0, &data);
        let remote_addr = if zero { 0 } else { b.addr + offset };
        let sge = p.sge(0, len as u32);
        for op in [SendOp::Write, SendOp::Read] {
            post_at(&mut p, 0, SendWqe { wr_id: id(0), op, remote_addr, rkey, ..SendWqe::default() }, &[sge]);
        }
        let remote = rng.chance(0.6);
        let op = if remote { SendOp::SendInv } else { SendOp::Send };
        let flags = SendFlags::FENCE;
        post_at(&mut p, 0, SendWqe { wr_id: id(0), op, flags, imm: rkey, ..SendWqe::default() }, &[]);
        let done = until_received(&mut p, 1, &mut sent[1]);
        assert_eq!(done.flags.contains(WcFlags::WITH_INV), remote);
        assert_eq!(done.imm, if remote { key } else { 0 });
        if !remote {
            post_at(&mut p, 1, local_inv(id(1), key, SendFlags::empty()), &[]);
        }
        assert_eq!(p.net.hosts[1].env.memory.read(b.addr + offset, len as usize), data);
    }
    assert!(p.net.run_until_idle(200_000), "it ends");
    for (at, sent) in sent.into_iter().enumerate() {
        let rest = p.polled(at);
        let want: Vec<_> = (sent..id(at)).map(|i| (i, WcStatus::Success)).collect();
        assert_eq!(rest, want);
        assert_eq!(p.events(at), []);
        if is_clean(&p.net.faults) {
            assert_eq!(p.net.hosts[at].nic.counters().retransmitted.get(), 0);
        }
    }
    /* closed now; a NAK is sent only once, so nothing may lose it */
    p.net.faults = Faults::default();
    let sge = p.sge(0, 1);
    let late = SendWqe { op: SendOp::Read, remote_addr: b.addr, rkey: key, ..SendWqe::default() };
    post_at(&mut p, 0, late, &[sge]);
    assert!(p.net.run_until_idle(200_000), "it ends");
    assert_eq!(p.polled(0), [(0, WcStatus::RemAccessErr)]);
    assert_eq!(p.net.hosts[1].nic.dereg_mr(b.mr), Ok(()), "nothing is bound any more");
}

#[test]
fn windows_open_and_close_in_order() {
    for_seeds("windows_open_and_close_in_order", 600, rounds);
}

#[test]
fn binds_that_fail() {
    let spoils: [fn(&mut SendWqe, &mut Pair); 5] = [
        |w, _| w.imm ^= 1,
        |w, _| w.compare_add += 1,
        |w, _| w.qkey |= Access::LOCAL_WRITE.bits(),
        |w, p| w.imm = p.page[0].1,
        |w, p| {
            let other = p.net.hosts[0].nic.alloc_pd().expect("a PD");
            w.remote_qpn = p.net.hosts[0].nic.alloc_mw(other, WindowType::One).expect("a window");
            w.rkey = w.remote_qpn;
        },
    ];
    for spoil in spoils {
        let mut p = Pair::rc();
        let mut bad = bound(&mut p, 0, WindowType::One).whole(2, READ);
        spoil(&mut bad, &mut p);
        p.fails_with(bad, &[], WcStatus::MwBindErr);
        assert_eq!(p.states()[1], QpState::Rts, "the peer saw nothing");
    }
    /* LOCAL_INV of what is not a window of type 2 with this key. */
    let mut p = Pair::rc();
    let bad = local_inv(2, p.page[0].1, SendFlags::empty());
    p.fails_with(bad, &[], WcStatus::MwBindErr);
}

/// An R_Key that does not name a window of the receiving QP (IBTA 9.7.4.1.8): class J. The SEND is
/// acknowledged, its receive fails, and the responder is in ERR without a NAK and without an event.
#[test]
fn bad_remote_invalidations() {
    for kind in [WindowType::One, WindowType::Two] {
        let mut p = Pair::rc();
        let b = bound(&mut p, 1, kind);
        let rkey = b.whole(0, READ).rkey;
        /* type 1: bound, but not to be invalidated; type 2: not bound */
        if kind == WindowType::One {
            post_at(&mut p, 1, b.whole(0, READ), &[]);
            p.run();
            assert_eq!(p.polled(1), [(0, WcStatus::Success)]);
        }
        let bad = SendWqe { op: SendOp::SendInv, imm: rkey, ..p.wqe(7, SendOp::SendInv) };
        p.post_recv(100, 64);
        p.post_recv(101, 64);
        let sge = Sge { len: 60, ..p.sge(0, 3000) };
        p.post(bad, &[sge]);
        p.run();
        assert_eq!(p.polled(0), [(7, WcStatus::Success)]);
        assert_eq!(p.polled(1), [(100, WcStatus::RemInvReqErr), (101, WcStatus::WrFlushErr)]);
        assert_eq!(p.states(), [QpState::Rts, QpState::Err]);
        assert!(p.events(1).iter().all(|event| !matches!(event, AsyncEvent::QpAccessErr(_))));
        /* what comes behind it is answered by nobody */
        p.post(p.wqe(8, SendOp::Write), &[sge]);
        p.run();
        assert_eq!(p.polled(0), [(8, WcStatus::RetryExcErr)]);
    }
}

/// Work that needs no packet completes in order with work that does, and frees its slots.
#[test]
fn local_work_completes_in_order() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let mut p = Pair::of(qp_type, &Setup::default());
        let b = bound(&mut p, 0, WindowType::Two);
        let (sge, key) = (p.sge(0, 3000), next(b.window));
        let (mut wr_id, mut want) = (0, Vec::new());
        for turn in 0..36 {
            let ops = if turn % 3 == 0 { vec![b.whole(0, READ)] } else { vec![] };
            for wqe in ops
                .into_iter()
                .chain([p.wqe(0, SendOp::Write)])
                .chain((turn % 3 == 2).then(|| local_inv(0, key, SendFlags::FENCE)))
            {
                let sges = if wqe.op == SendOp::Write { &[sge][..] } else { &[] };
                post_at(&mut p, 0, SendWqe { wr_id, ..wqe }, sges);
                want.push((wr_id, WcStatus::Success));
                wr_id += 1;
            }
            if turn % 4 == 3 {
                p.run();
            }
        }
        p.run();
        assert_eq!(p.polled(0), want);
        assert_eq!(p.sq[0].outstanding(), 0);
    }
}

/// What was done but is not complete when a QP fails is flushed like the rest.
#[test]
fn local_work_behind_a_failure_is_flushed() {
    let mut p = Pair::of(QpType::Rc, &Setup { timeout: 10, retry_cnt: 0, ..Setup::default() });
    p.net.faults.loss = 1.0;
    let b = bound(&mut p, 0, WindowType::Two);
    let sge = p.sge(0, 8);
    let write = p.wqe(1, SendOp::Write);
    post_at(&mut p, 0, write, &[sge]);
    post_at(&mut p, 0, b.whole(2, READ), &[]);
    post_at(&mut p, 0, local_inv(3, b.mr, SendFlags::empty()), &[]);
    p.run();
    let flushed = WcStatus::WrFlushErr;
    assert_eq!(p.polled(0), [(1, WcStatus::RetryExcErr), (2, flushed), (3, flushed)]);
}

/// Windows of type 2 belong to the connection that they were bound on: they are not bound any more when that
/// ends, and may be bound anew.
#[test]
fn an_ended_connection_leaves_no_window_bound() {
    for destroyed in [true, false] {
        let mut p = Pair::rc();
        let (one, two) = (bound(&mut p, 0, WindowType::One), bound(&mut p, 0, WindowType::Two));
        post_at(&mut p, 0, one.whole(1, READ), &[]);
        post_at(&mut p, 0, two.whole(2, READ), &[]);
        p.run();
        let (now, qpn, host) = (p.net.now(), p.qpn[0], &mut p.net.hosts[0]);
        assert_eq!(host.nic.dereg_mr(two.mr), Err(NicError::Busy));
        if destroyed {
            host.nic.destroy_qp(&mut host.env, qpn).expect("it exists");
        } else {
            host.to_state(qpn, QpState::Reset, now).expect("any state to RESET");
        }
        assert_eq!(host.nic.dereg_mr(two.mr), Ok(()));
        assert_eq!(host.nic.dereg_mr(one.mr), Err(NicError::Busy), "type 1 belongs to no QP");
        host.nic.dealloc_mw(one.window).expect("it exists");
        assert_eq!(host.nic.dereg_mr(one.mr), Ok(()));
        host.nic.dealloc_mw(two.window).expect("it exists");
    }
}
