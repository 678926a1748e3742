//! How connections begin, fail and begin anew, and how hosts do.

use std::collections::VecDeque;

use starverbs_core::mr::WindowType;
use starverbs_core::qp::{QpAttr, QpAttrMask, RecvSource};
use starverbs_core::{Access, Nanos, QpState, QpType, Qpn, SrqId};
use starverbs_sim::{QpAt, SimRq, SimSq};
use starverbs_star::control::Preference;

use crate::arena::Arena;
use crate::conn::{Bound, Cause, Conn, ConnEnd, Source, Window};
use crate::plan::{ConnPlan, Transport};
use crate::world::{Who, World};

/// Bytes of a window.
const WINDOW: u32 = 512;
/// PSNs from one incarnation to the next, where frames of the one before are still on the wire.
const FAR: u32 = 1 << 22;

pub(crate) fn all_rights() -> Access {
    let remote = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    Access::LOCAL_WRITE | remote | Access::FLUSH_GLOBAL
}

impl World {
    pub(crate) fn make_conns(&mut self) {
        for (c, plan) in self.plan.conns.clone().into_iter().enumerate() {
            let ends = [0, 1].map(|e| self.make_end(c, e, &plan));
            let (reconnects, psn) = (plan.reconnects, plan.setup.psn);
            let conn = Conn {
                plan,
                ends,
                reconnects,
                incarnation: 0,
                silent: 0,
                doom: None,
                abandoned: 0,
                over: false,
                psn,
            };
            self.conns.push(conn);
            [0, 1].iter().for_each(|e| self.speak(c, *e));
            self.connect(c);
        }
    }

    fn connect(&mut self, c: usize) {
        let conn = &self.conns[c];
        let kind = match conn.plan.kind {
            Transport::Rc => QpType::Rc,
            Transport::Uc => QpType::Uc,
            Transport::Xrc => QpType::XrcSend,
        };
        let [a, b] = [0, 1].map(|e| QpAt { host: conn.ends[e].host, qpn: conn.ends[e].qpn });
        let setup = starverbs_sim::Setup { psn: conn.psn, ..conn.plan.setup };
        self.net.connect(kind, a, b, &setup);
        self.summary.count("incarnations of connections", conn.plan.kind);
    }

    fn make_end(&mut self, c: usize, e: usize, plan: &ConnPlan) -> ConnEnd {
        let at = plan.hosts[e];
        let cqs = [self.rng.below(2) as usize, self.rng.below(2) as usize];
        let source = match plan.kind {
            Transport::Xrc if e == 1 => Source::Xrc,
            Transport::Xrc => Source::None,
            _ if plan.shared[e] => Source::Shared,
            _ => Source::Own(SimRq::new(plan.rq[e], 4)),
        };
        let sq = plan.make_sq(e);
        let qpn = self.make_qp(c, e, plan, &sq, &source, cqs);
        let (host, rng) = (&mut self.net.hosts[at], &mut self.rng);
        let arena = Arena::new(host, rng, plan.region, all_rights(), plan.kind == Transport::Uc);
        let window = (plan.kind == Transport::Rc).then(|| self.make_window(at));
        let rpc = self.make_rpc(at, plan, e);
        ConnEnd {
            host: at,
            qpn,
            sq,
            source,
            cqs,
            left: plan.ops[e],
            next: 0,
            done: 0,
            rung: true,
            sends: VecDeque::new(),
            recvs: VecDeque::new(),
            next_recv: 0,
            inbox: VecDeque::new(),
            mail: Vec::new(),
            arena,
            window,
            cause: None,
            unexplained: false,
            flushing: false,
            recv_failed: None,
            doomed: None,
            bad_recv: false,
            failed_at: None,
            last_wqe: 0,
            draining: false,
            rpc,
        }
    }

    fn make_window(&mut self, at: usize) -> Window {
        let (host, rng) = (&mut self.net.hosts[at], &mut self.rng);
        let arena = Arena::new(host, rng, WINDOW, Access::LOCAL_WRITE | Access::MW_BIND, false);
        host.env.memory.allow(arena.addr, u64::from(WINDOW), 0);
        let key = host.nic.alloc_mw(host.pd, WindowType::Two).expect("a window");
        Window { mr: arena.key, arena, key, bound: Bound::No }
    }

    fn make_qp(
        &mut self,
        c: usize,
        e: usize,
        plan: &ConnPlan,
        sq: &SimSq,
        source: &Source,
        cqs: [usize; 2],
    ) -> Qpn {
        let at = plan.hosts[e];
        let now = self.net.now();
        let (site, host) = (&self.sites[at], &mut self.net.hosts[at]);
        let cqs = [&site.cqs[cqs[0]], &site.cqs[cqs[1]]];
        let recv = || match source {
            Source::Own(rq) => RecvSource::Own(rq.clone()),
            Source::Shared => RecvSource::Shared(site.srq.id),
            Source::Xrc => RecvSource::Xrc(SrqId(u32::MAX)),
            Source::None => RecvSource::Own(SimRq::new(1, 1)),
        };
        let kind = match (plan.kind, e) {
            (Transport::Rc, _) => QpType::Rc,
            (Transport::Uc, _) => QpType::Uc,
            (Transport::Xrc, 0) => QpType::XrcSend,
            (Transport::Xrc, _) => QpType::XrcRecv,
        };
        let usual = host.pd;
        if kind == QpType::XrcRecv {
            host.pd = site.xrcd;
        }
        /* After a restart numbers come again; one that was another connection's has a peer, perhaps, that
         * still sends to it, and nothing in an RC frame says who. A card that is not seeded like the one
         * before has other numbers. */
        let qpn = loop {
            let qpn = host.qp(kind, sq, recv(), cqs, plan.all_signaled);
            if *self.had.entry((at, qpn)).or_insert((c, e)) == (c, e) {
                break qpn;
            }
            host.destroy_qp(qpn, now).expect("it exists");
        };
        host.pd = usual;
        host.preference(qpn, plan.preferences[e]);
        self.who.insert((at, qpn), Who::Conn(c, e));
        qpn
    }

    /// Takes an end to ERR, as its program wants.
    pub(crate) fn kill(&mut self, c: usize, e: usize) {
        let conn = &mut self.conns[c];
        if conn.over || conn.ends[e].cause == Some(Cause::Gone) {
            return;
        }
        let now = self.net.now();
        let end = &mut conn.ends[e];
        let host = &mut self.net.hosts[end.host];
        if host.state(end.qpn) != QpState::Err {
            end.cause = end.cause.or(Some(Cause::Killed));
            host.to_state(end.qpn, QpState::Err, now).expect("from every state");
        }
        self.doom(c);
    }

    /// As [`kill`](Self::kill), and for `time` nobody does anything about it.
    pub(crate) fn abandon(&mut self, c: usize, e: usize, time: Nanos) {
        self.kill(c, e);
        self.leave(c, time);
    }

    /// For `time` nobody does anything about a connection, with which something is wrong.
    fn leave(&mut self, c: usize, time: Nanos) {
        let conn = &mut self.conns[c];
        conn.abandoned = conn.abandoned.max(self.net.now() + time);
    }

    /// A program changes its mind about what its end is to be of StaR.
    pub(crate) fn want(&mut self, c: usize, e: usize, preference: Preference) {
        let (now, end) = (self.net.now(), &self.conns[c].ends[e]);
        self.net.hosts[end.host].change_preference(end.qpn, preference, now);
    }

    /// A program destroys the queue pair of an end with all that is posted to it, and makes another; for
    /// `time` nobody does anything about it.
    pub(crate) fn destroy(&mut self, c: usize, e: usize, time: Nanos) {
        if self.conns[c].over || self.conns[c].ends[e].cause == Some(Cause::Gone) {
            return;
        }
        let (now, at) = (self.net.now(), self.conns[c].ends[e].host);
        self.poll(at);
        self.read_kernels(at);
        self.net.hosts[at].destroy_qp(self.conns[c].ends[e].qpn, now).expect("it exists");
        self.who.remove(&(at, self.conns[c].ends[e].qpn));
        let end = &mut self.conns[c].ends[e];
        let pieces = end.sends.iter().flat_map(|wr| &wr.pieces);
        let pieces: Vec<_> = pieces.chain(end.recvs.iter().flat_map(|wr| &wr.pieces)).copied().collect();
        self.sites[at].pool.give(&mut self.net.hosts[at], &pieces);
        self.forget_answers(c, e);
        self.make_again(c, e);
        self.speak(c, e);
        self.doom(c);
        self.leave(c, time);
    }

    /// Has an end finish what it began; it goes on with the event that this is done.
    pub(crate) fn drain(&mut self, c: usize, e: usize) {
        if self.conns[c].over || self.state(c, e) != QpState::Rts {
            return;
        }
        let now = self.net.now();
        let end = &mut self.conns[c].ends[e];
        end.draining = true;
        let attr = QpAttr { state: QpState::Sqd, en_sqd_async_notify: true, ..QpAttr::default() };
        let mask = QpAttrMask::STATE | QpAttrMask::EN_SQD_ASYNC_NOTIFY;
        if self.net.hosts[end.host].modify(end.qpn, &attr, mask, now).is_err() {
            end.draining = false;
            assert!(self.preferences(c, e), "RTS to SQD");
        }
    }

    pub(crate) fn drained(&mut self, c: usize, e: usize) {
        let now = self.net.now();
        let end = &mut self.conns[c].ends[e];
        end.draining = false;
        let host = &mut self.net.hosts[end.host];
        if host.state(end.qpn) == QpState::Sqd {
            host.to_state(end.qpn, QpState::Rts, now).expect("SQD to RTS");
        }
    }

    /// Something is wrong with a connection: before long its programs will do something about it.
    pub(crate) fn doom(&mut self, c: usize) {
        if self.conns[c].doom.is_none() {
            let later = self.step + self.rng.below(200) as usize;
            self.conns[c].doom = Some(later);
        }
    }

    pub(crate) fn dooms(&mut self) {
        for c in 0..self.conns.len() {
            let conn = &self.conns[c];
            if conn.doom.is_some_and(|at| at <= self.step) && conn.abandoned <= self.net.now() {
                self.mend(c);
            }
        }
    }

    pub(crate) fn doom_all(&mut self) -> bool {
        let doomed: Vec<usize> =
            (0..self.conns.len()).filter(|c| self.conns[*c].doom.is_some() && !self.conns[*c].over).collect();
        for c in &doomed {
            self.assert_notified(*c);
            self.mend(*c);
        }
        !doomed.is_empty()
    }

    /// The network is idle: each sender whose peer is gone, and that does not wait for ever, has its error.
    fn assert_notified(&self, c: usize) {
        let conn = &self.conns[c];
        for e in 0..2 {
            let (me, peer) = (&conn.ends[e], &conn.ends[1 - e]);
            let waits = peer.down() && !me.down() && me.rung && self.state(c, e) == QpState::Rts;
            if waits && conn.reliable() && conn.plan.setup.timeout > 0 {
                let waiting = me.sends.iter().find(|wr| wr.signaled);
                assert!(waiting.is_none(), "conn {c}.{e}: {waiting:?} waits for nobody");
            }
        }
    }

    /// A program does something about a connection that failed.
    fn mend(&mut self, c: usize) {
        self.look_at_packets();
        if self.conns[c].over {
            self.conns[c].doom = None;
            return;
        }
        if !self.conns[c].reliable() {
            [0, 1].iter().for_each(|e| self.leave_sqe(c, *e));
            let gone = |end: &ConnEnd| end.cause == Some(Cause::Gone);
            let broken = |e: usize| self.state(c, e) == QpState::Err || gone(&self.conns[c].ends[e]);
            if !broken(0) && !broken(1) {
                self.conns[c].doom = None;
                return;
            }
        }
        self.bury(c);
        if self.conns[c].reconnects == 0 {
            let conn = &mut self.conns[c];
            (conn.over, conn.doom) = (true, None);
            conn.ends.iter_mut().for_each(|end| end.left = 0);
            return;
        }
        self.begin_anew(c);
    }

    /// UC: a send that failed stops sends alone (IBTA 10.3.1.5).
    fn leave_sqe(&mut self, c: usize, e: usize) {
        if self.conns[c].ends[e].cause == Some(Cause::Gone) || self.state(c, e) != QpState::Sqe {
            return;
        }
        let at = self.conns[c].ends[e].host;
        self.poll(at);
        let now = self.net.now();
        let end = &mut self.conns[c].ends[e];
        /* what was posted and not rung for is flushed, too */
        self.net.doorbell(at, end.qpn);
        self.poll(at);
        if self.state(c, e) == QpState::Err {
            /* a frame that waited for its context was served in that turn, and its receive failed */
            return;
        }
        let end = &mut self.conns[c].ends[e];
        assert!(end.sends.is_empty(), "conn {c}.{e}: in SQE, {:?} has no completion", end.sends.front());
        assert_eq!(end.cause, Some(Cause::Send), "conn {c}.{e}: in SQE without a reason");
        (end.cause, end.doomed, end.flushing, end.failed_at) = (None, None, false, None);
        end.done = end.next;
        self.net.hosts[at].to_state(end.qpn, QpState::Rts, now).expect("SQE to RTS");
        self.summary.add("events", "SQE to RTS", 1);
    }

    /// Both ends go to ERR; what was posted must be flushed, what was acknowledged must have arrived.
    fn bury(&mut self, c: usize) {
        [0, 1].iter().for_each(|e| self.kill(c, *e));
        for e in 0..2 {
            let end = &self.conns[c].ends[e];
            if end.cause != Some(Cause::Gone) {
                self.net.doorbell(end.host, end.qpn);
            }
        }
        let [a, b] = self.conns[c].plan.hosts;
        self.poll(a);
        self.poll(b);
        for e in 0..2 {
            let sends = &self.conns[c].ends[e].sends;
            let quiet = sends.iter().position(|wr| wr.signaled).unwrap_or(sends.len());
            self.forget_own_writes(c, e, if self.conns[c].ends[e].flushing { 0 } else { quiet });
            self.done_in_silence(c, e);
            let conn = &self.conns[c];
            let (me, peer) = (&conn.ends[e], &conn.ends[1 - e]);
            if me.cause != Some(Cause::Gone) {
                assert_eq!(self.state(c, e), QpState::Err, "conn {c}.{e}");
                assert!(me.cause.is_some(), "conn {c}.{e}: flushed without a reason");
                assert!(me.sends.is_empty(), "conn {c}.{e}: {:?} has no completion", me.sends.front());
                assert!(me.recvs.is_empty(), "conn {c}.{e}: a receive has no completion");
                let last = u32::from(matches!(me.source, Source::Shared));
                assert_eq!(me.last_wqe, last, "conn {c}.{e}: last WQE events");
            }
            if conn.reliable() && peer.cause != Some(Cause::Gone) {
                /* a stateful end completes a SEND when the data is there, before its peer knows of it */
                let lost = peer.inbox.iter().find(|m| m.seq < me.done && !self.is_stateless(c, 1 - e));
                assert!(lost.is_none(), "conn {c}.{e}: message {:?} was acknowledged and is lost", lost);
                self.check_memory(c, e, me.done);
            }
        }
    }

    /// What was posted without a completion in view, and was not flushed, is done.
    fn done_in_silence(&mut self, c: usize, e: usize) {
        while !self.conns[c].ends[e].flushing {
            let sends = &mut self.conns[c].ends[e].sends;
            if sends.front().is_none_or(|wr| wr.signaled) {
                return;
            }
            let Some(wr) = sends.pop_front() else { return };
            self.succeeded(c, e, &wr);
        }
    }

    /// The same queue pairs, or new ones, are connected again: with the PSNs of before and an empty wire, or
    /// with frames of the incarnation before still on it.
    fn begin_anew(&mut self, c: usize) {
        self.conns[c].reconnects -= 1;
        self.conns[c].incarnation += 1;
        let anew = self.rng.chance(0.5);
        let now = self.net.now();
        self.look_at_rpcs();
        for e in 0..2 {
            let end = &self.conns[c].ends[e];
            let (at, qpn) = (end.host, end.qpn);
            let host = &mut self.net.hosts[at];
            if end.cause == Some(Cause::Gone) {
                /* it is new already */
            } else if anew {
                host.destroy_qp(qpn, now).expect("it exists");
                self.who.remove(&(at, qpn));
                let (plan, sq) = (self.conns[c].plan.clone(), self.conns[c].plan.make_sq(e));
                let (source, cqs) = (self.conns[c].ends[e].source.clone(), self.conns[c].ends[e].cqs);
                let qpn = self.make_qp(c, e, &plan, &sq, &source, cqs);
                let end = &mut self.conns[c].ends[e];
                (end.qpn, end.sq) = (qpn, sq);
                self.speak(c, e);
            } else {
                host.to_state(qpn, QpState::Reset, now).expect("from every state");
            }
        }
        let [a, b] = self.conns[c].plan.hosts;
        if self.conns[c].incarnation % 2 == 1 || self.rng.chance(0.3) {
            for host in [a, a, b, b] {
                self.net.sleep(host, 0);
            }
            self.net.purge(a, b);
            self.summary.add("begun anew", "with the same PSNs", 1);
        } else {
            let conn = &mut self.conns[c];
            conn.psn = (conn.psn + FAR) & 0xff_ffff;
            self.summary.add("begun anew", "with old frames on the wire", 1);
        }
        for e in 0..2 {
            self.forget_incarnation(c, e);
        }
        let conn = &mut self.conns[c];
        (conn.doom, conn.abandoned, conn.silent) = (None, 0, 0);
        self.connect(c);
    }

    fn forget_incarnation(&mut self, c: usize, e: usize) {
        let conn = &mut self.conns[c];
        let reliable = conn.reliable();
        let end = &mut conn.ends[e];
        let host = &mut self.net.hosts[end.host];
        end.inbox.clear();
        (end.cause, end.doomed, end.failed_at) = (None, None, None);
        (end.unexplained, end.flushing, end.recv_failed) = (false, false, None);
        (end.bad_recv, end.draining, end.last_wqe) = (false, false, 0);
        (end.done, end.rung) = (end.next, true);
        if reliable {
            end.arena.adopt(host);
            end.arena.open(host);
        }
        if let Some(w) = &mut end.window {
            w.bound = Bound::No;
            w.arena.adopt(host);
            host.env.memory.allow(w.arena.addr, w.arena.len() as u64, 0);
        }
        self.forget_rpcs(c, e);
    }

    /// A host ends without a word. Its programs begin again: the same queue pairs in the same order, so that
    /// their numbers and keys are those of before.
    /// For `time` nobody does anything about connections with it.
    pub(crate) fn restart(&mut self, at: usize, time: Nanos) {
        self.look_at_rpcs();
        self.net.restart(at);
        self.who.retain(|(host, _), _| *host != at);
        let site = self.make_site(at);
        let before = std::mem::replace(&mut self.sites[at], site);
        self.sites[at].remember(&before);
        /* also those that nobody needs any more: what lies behind them has its key and its place of before */
        for c in 0..self.conns.len() {
            for e in 0..2 {
                if self.conns[c].plan.hosts[e] == at {
                    self.come_up(c, e);
                }
            }
            let ends = self.conns[c].plan.hosts;
            if ends.contains(&at) && !self.conns[c].over {
                self.doom(c);
                self.leave(c, time);
            }
        }
        self.restart_stations(at);
    }

    fn come_up(&mut self, c: usize, e: usize) {
        self.make_again(c, e);
        let at = self.conns[c].ends[e].host;
        self.conns[c].ends[e].arena.renew(&mut self.net.hosts[at], all_rights());
        let window = (self.conns[c].plan.kind == Transport::Rc).then(|| self.make_window(at));
        self.conns[c].ends[e].window = window;
        self.renew_rpc(c, e);
        self.speak(c, e);
    }

    /// An end has a new queue pair, and nothing of the one before.
    fn make_again(&mut self, c: usize, e: usize) {
        let plan = self.conns[c].plan.clone();
        let sq = plan.make_sq(e);
        let end = &mut self.conns[c].ends[e];
        if let Source::Own(rq) = &mut end.source {
            *rq = SimRq::new(plan.rq[e], 4);
        }
        end.sends.clear();
        end.recvs.clear();
        end.inbox.clear();
        end.cause = Some(Cause::Gone);
        let (source, cqs) = (end.source.clone(), end.cqs);
        let qpn = self.make_qp(c, e, &plan, &sq, &source, cqs);
        let end = &mut self.conns[c].ends[e];
        (end.qpn, end.sq) = (qpn, sq);
    }

    /// Nothing happens any more: all must have.
    pub(crate) fn finish(&mut self) {
        for c in 0..self.conns.len() {
            for e in 0..2 {
                if !self.conns[c].over {
                    self.finish_end(c, e);
                }
            }
            self.assert_agreed(c);
        }
        self.finish_stations();
        self.finish_matching();
        for at in 0..self.plan.hosts {
            self.finish_host(at);
        }
        self.settle_final_acks();
        let tally = self.net.tally;
        self.summary.wire(&tally);
    }

    fn finish_end(&mut self, c: usize, e: usize) {
        assert_eq!(self.state(c, e), QpState::Rts, "conn {c}.{e} at the end");
        let end = &self.conns[c].ends[e];
        assert_eq!(end.left, 0, "conn {c}.{e}: all is posted");
        let waiting = end.sends.iter().find(|wr| wr.signaled);
        assert!(waiting.is_none(), "conn {c}.{e}: {waiting:?} never completed");
        /* who keeps nothing is told of those alone whose completions are wanted */
        let left = end.sq.outstanding() > 0 && !self.is_stateless(c, e);
        assert!(!left, "conn {c}.{e}: {:?} never ended", end.sends.front());
        self.done_in_silence(c, e);
        self.finish_rpcs(c, e);
        let (end, next) = (&self.conns[c].ends[e], self.conns[c].ends[1 - e].next);
        if self.conns[c].reliable() {
            assert!(end.inbox.is_empty(), "conn {c}.{e}: {:?} never came", end.inbox.front());
            self.check_memory(c, 1 - e, next);
        } else {
            end.arena.check_unreliable(&self.net.hosts[end.host]);
        }
    }

    /// What was taken from a shared receive queue has completed; only UC may hold one for the next message.
    fn finish_shared(&self, at: usize) {
        let site = &self.sites[at];
        let uc = |c: &Conn, e: usize| {
            !c.over && c.plan.kind == Transport::Uc && c.plan.shared[e] && c.plan.hosts[e] == at
        };
        let ahead: usize = (0..self.conns.len()).map(|c| self.held_ahead(c, at)).sum();
        let held: usize = self.conns.iter().map(|c| usize::from(uc(c, 0)) + usize::from(uc(c, 1))).sum();
        for (srq, most) in [(&site.srq, held + ahead), (&site.xrc[0], 0), (&site.xrc[1], 0)] {
            let waiting = starverbs_core::RecvQueue::len(&srq.rq) as usize;
            let taken = srq.posted.len() - waiting;
            assert!(taken <= most, "host {at}: {taken} receives of a shared queue have no completion");
        }
    }

    fn finish_host(&mut self, at: usize) {
        let lost_dialect = self.lost_dialect(at);
        let host = &mut self.net.hosts[at];
        assert!(host.env.memory.gaps_intact(), "host {at}: somebody wrote beside the buffers");
        let counters = host.nic.counters();
        assert_eq!(counters.cq_overrun.get(), 0, "host {at}");
        let malformed = counters.drop_malformed.get();
        assert!(malformed == 0 || lost_dialect, "host {at}: {malformed} malformed");
        let names = starverbs_core::Counters::NAMES.iter().zip(counters.values());
        for (name, n) in names.filter(|(name, _)| !matches!(**name, "qps" | "mrs")) {
            self.summary.add("cards", name, n);
        }
        self.finish_shared(at);
        self.finish_sends(at);
        let now = self.net.now();
        let host = &mut self.net.hosts[at];
        for qpn in host.qpns() {
            host.nic.detach_from_all(qpn, |_| {});
            host.destroy_qp(qpn, now).expect("it exists");
        }
        self.finish_kernels(at);
        let (site, host) = (&self.sites[at], &mut self.net.hosts[at]);
        for srq in [&site.srq, &site.xrc[0], &site.xrc[1]] {
            host.nic.destroy_srq(srq.id).expect("nobody uses it");
        }
        host.nic.dealloc_pd(site.xrcd).expect("nothing is left in it");
        assert!(host.env.star.events.is_empty(), "host {at}: the library was not told all");
        assert_eq!(host.nic.qp_count(), 0);
        assert!(host.nic.next_deadline().is_none(), "host {at}: a timer of nobody");
        let left = host.qpns();
        assert!(left.is_empty(), "host {at}: {left:?} are left");
    }
}
