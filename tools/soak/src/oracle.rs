//! The oracle: checks what programs with connected queue pairs get back against the model.

use starverbs_core::{AsyncEvent, Cqe, QpState, SendOp, WcFlags, WcOpcode, WcStatus};
use starverbs_sim::get;

use crate::conn::{Bad, Bound, Cause, ConnEnd, Msg, RecvWr, Source, Wr};
use crate::plan::Transport;
use crate::world::World;

impl World {
    /// A completion of a connected queue pair's send queue.
    pub(crate) fn sent(&mut self, c: usize, e: usize, cqe: &Cqe) {
        let end = &self.conns[c].ends[e];
        let failed = cqe.status != WcStatus::Success;
        let position = |end: &ConnEnd| end.sends.iter().position(|wr| wr.seq == cqe.wr_id);
        let Some(mut at) = position(end) else { panic!("conn {c}.{e}: a completion of no request: {cqe:?}") };
        if failed {
            self.forget_own_writes(c, e, at);
        }
        let end = &self.conns[c].ends[e];
        at = position(end).unwrap_or(at);
        assert!(!end.flushing || (failed && at == 0), "conn {c}.{e}: after a failure, out of order: {cqe:?}");
        for _ in 0..at {
            let wr = self.conns[c].ends[e].sends.pop_front().expect("it was counted");
            assert!(!wr.signaled, "conn {c}.{e}: {cqe:?} before {wr:?}");
            self.succeeded(c, e, &wr);
        }
        let wr = self.conns[c].ends[e].sends.pop_front().expect("it was found");
        if failed {
            return self.failed(c, e, &wr, cqe);
        }
        assert!(wr.signaled, "conn {c}.{e}: {wr:?} wanted no completion");
        assert_eq!(cqe.opcode, wr.op.wc_opcode(), "conn {c}.{e}: {wr:?}");
        if wr.op.brings_data() {
            assert_eq!(cqe.byte_len, wr.len, "conn {c}.{e}: {wr:?}");
        }
        self.succeeded(c, e, &wr);
    }

    /// A request is known to be done: all it was for has happened.
    pub(crate) fn succeeded(&mut self, c: usize, e: usize, wr: &Wr) {
        let reliable = self.conns[c].reliable();
        self.assert_seen(c, e, wr);
        /* a SEND whose key cannot be invalidated fails at its receiver alone (class J) */
        let silent = wr.bad.is_some_and(|bad| !reliable && !bad.is_local() || bad == Bad::Invalidate);
        assert!(wr.bad.is_none() || silent, "conn {c}.{e}: {wr:?} went well");
        /* what a host that is gone held, nobody can say */
        if self.conns[c].ends[1 - e].cause != Some(Cause::Gone) {
            self.check_brought(c, e, wr);
        }
        let conn = &mut self.conns[c];
        conn.ends[e].done = wr.seq + 1;
        let [low, high] = &mut conn.ends;
        let (me, peer) = if e == 0 { (low, high) } else { (high, low) };
        if reliable {
            peer.arena.settle(wr.seq + 1);
            if let Some(w) = &mut peer.window {
                w.arena.settle(wr.seq + 1);
            }
        }
        if let Some(w) = &mut me.window {
            let memory = &mut self.net.hosts[me.host].env.memory;
            match w.bound {
                Bound::Binding(seq) if seq == wr.seq => w.bound = Bound::Yes,
                Bound::Closing(seq) if seq == wr.seq => {
                    w.bound = Bound::No;
                    memory.allow(w.arena.addr, w.arena.len() as u64, 0);
                }
                _ => {}
            }
        }
        self.take_back(c, e, wr);
        if reliable && self.rng.chance(0.2) {
            self.check_memory(c, e, wr.seq + 1);
        }
    }

    /// The program has the buffers of a request back.
    fn take_back(&mut self, c: usize, e: usize, wr: &Wr) {
        let at = self.conns[c].ends[e].host;
        self.sites[at].pool.give(&mut self.net.hosts[at], &wr.pieces);
    }

    /// The peer's memory shows a state that it may be in, if all before `lo` is done.
    pub(crate) fn check_memory(&self, c: usize, e: usize, lo: u64) {
        let conn = &self.conns[c];
        let (me, peer) = (&conn.ends[e], &conn.ends[1 - e]);
        let host = &self.net.hosts[peer.host];
        if peer.cause == Some(Cause::Gone) {
            return;
        }
        let hi = me.failed_at.map_or(me.next, |(_, hi)| hi);
        let loose = self.is_star(c);
        peer.arena.check(host, (lo, hi), loose, &format!("conn {c}.{e}, region"));
        if let Some(w) = &peer.window {
            w.arena.check(host, (lo, hi), loose, &format!("conn {c}.{e}, window"));
        }
    }

    fn failed(&mut self, c: usize, e: usize, wr: &Wr, cqe: &Cqe) {
        let state = self.state(c, e);
        let conn = &self.conns[c];
        let (me, kind) = (&conn.ends[e], conn.plan.kind);
        let allowed = wr.bad.is_some_and(|bad| {
            (conn.reliable() || bad.is_local())
                && bad.status() == cqe.status
                && me.doomed.is_some_and(|(seq, first)| {
                    /* behind a request that fails at its receiver alone the card still finds its own
                     * faults */
                    (seq, first) == (wr.seq, bad) || (first == Bad::Invalidate && bad.is_local())
                })
        });
        let allowed = (allowed && !me.flushing) || self.may_fail_with(c, e, wr, cqe.status);
        assert!(allowed, "conn {c}.{e}: {wr:?} ended as {cqe:?} without a reason");
        let right = match kind {
            Transport::Uc => matches!(state, QpState::Sqe | QpState::Err),
            _ => state == QpState::Err,
        };
        assert!(right, "conn {c}.{e}: {cqe:?} and the state is {state:?}");
        let me = &mut self.conns[c].ends[e];
        if !me.flushing {
            let bad = wr.bad.map(|_| wr.seq).or(me.first_bad().map(|w| w.seq));
            me.failed_at = Some((wr.seq, bad.unwrap_or(me.next)));
            me.flushing = true;
            if cqe.status == WcStatus::WrFlushErr {
                me.unexplained |= me.cause.is_none();
            } else {
                me.cause = me.cause.or(Some(Cause::Send));
            }
        }
        self.take_back(c, e, wr);
        self.doom(c);
    }

    /// Whether a request without a fault of its own may end with this status.
    fn may_fail_with(&self, c: usize, e: usize, wr: &Wr, status: WcStatus) -> bool {
        let conn = &self.conns[c];
        let (me, peer) = (&conn.ends[e], &conn.ends[1 - e]);
        let takes = wr.op.takes_recv();
        match status {
            WcStatus::WrFlushErr => true,
            _ if me.flushing || !conn.reliable() => false,
            _ if self.rpc_may_fail(c, e, wr, status) => true,
            WcStatus::RetryExcErr => {
                /* a stateful end sees what its peer did wrong before that hears of it */
                let fails = peer.doomed.is_some() || conn.plan.setup.rnr_retry < 7;
                let foreseen = fails && self.is_stateless(c, 1 - e);
                foreseen
                    || !conn.patient()
                    || peer.down()
                    || !matches!(self.state(c, 1 - e), QpState::Rts | QpState::Sqd)
            }
            WcStatus::RnrRetryExcErr => conn.plan.setup.rnr_retry < 7 && takes,
            WcStatus::RemOpErr => takes && (self.feeds_badly(c, 1 - e) || self.fed_badly(c, 1 - e)),
            _ => false,
        }
    }

    /// Whether a receive with a bad key may have been taken here.
    fn feeds_badly(&self, c: usize, e: usize) -> bool {
        let end = &self.conns[c].ends[e];
        match end.source {
            Source::Shared => self.sites[end.host].srq.bad,
            Source::Xrc => self.sites[end.host].xrc.iter().any(|s| s.bad),
            _ => end.bad_recv,
        }
    }

    /// Whether that may have been before the host was restarted.
    fn fed_badly(&self, c: usize, e: usize) -> bool {
        let end = &self.conns[c].ends[e];
        match end.source {
            Source::Shared => self.sites[end.host].srq.was_bad,
            Source::Xrc => self.sites[end.host].xrc.iter().any(|s| s.was_bad),
            _ => false,
        }
    }

    /// A completion of a receive that came through a connected queue pair. `srq`: which of the host's XRC
    /// queues.
    pub(crate) fn received(&mut self, c: usize, e: usize, srq: usize, cqe: &Cqe, solicited: bool) {
        let wr = self.find_recv(c, e, srq, cqe);
        let at = self.conns[c].ends[e].host;
        if cqe.status == WcStatus::Success {
            let kind = self.conns[c].plan.kind;
            let late = self.conns[c].ends[e].recv_failed == Some(srq);
            assert!(!late, "conn {c}.{e}: {cqe:?} behind a failed receive");
            match kind {
                Transport::Uc => self.received_maybe(c, e, &wr, cqe, solicited),
                _ => self.received_next(c, e, srq, &wr, cqe, solicited),
            }
        } else {
            self.recv_failed(c, e, srq, &wr, cqe);
        }
        self.sites[at].pool.give(&mut self.net.hosts[at], &wr.pieces);
    }

    /// The receive that completes; an own queue's come in order.
    fn find_recv(&mut self, c: usize, e: usize, srq: usize, cqe: &Cqe) -> RecvWr {
        let end = &mut self.conns[c].ends[e];
        let posted = match end.source {
            Source::Own(_) => {
                let wr = end.recvs.pop_front();
                wr.filter(|wr| wr.id == cqe.wr_id)
            }
            Source::Shared => self.sites[end.host].srq.posted.remove(&cqe.wr_id),
            Source::Xrc => self.sites[end.host].xrc[srq].posted.remove(&cqe.wr_id),
            Source::None => None,
        };
        posted.unwrap_or_else(|| panic!("conn {c}.{e}: a receive that is not the next one: {cqe:?}"))
    }

    fn recv_failed(&mut self, c: usize, e: usize, srq: usize, wr: &RecvWr, cqe: &Cqe) {
        let state = self.state(c, e);
        assert_eq!(state, QpState::Err, "conn {c}.{e}: {cqe:?}");
        let ahead = self.is_star(c) && cqe.status == WcStatus::WrFlushErr;
        let cannot = matches!(self.conns[c].ends[1 - e].doomed, Some((_, Bad::Invalidate)));
        /* a WRITE with immediate that may not go where it wants to has taken one */
        let denied =
            self.conns[c].ends[1 - e].doomed.is_some_and(|(_, bad)| bad.status() == WcStatus::RemAccessErr);
        let end = &mut self.conns[c].ends[e];
        let oversize = end.inbox.iter().find(|m| m.srq == srq).is_some_and(|m| m.bad == Some(Bad::Oversize));
        let allowed = match cqe.status {
            WcStatus::WrFlushErr => true,
            WcStatus::LocProtErr => wr.bad && end.recv_failed.is_none(),
            WcStatus::LocLenErr => oversize && end.recv_failed.is_none(),
            WcStatus::LocAccessErr => denied && end.recv_failed.is_none(),
            WcStatus::RemInvReqErr => cannot && end.recv_failed.is_none(),
            _ => false,
        };
        assert!(allowed, "conn {c}.{e}: {cqe:?} without a reason");
        let once = matches!(end.source, Source::Own(_)) || end.recv_failed.is_none() || ahead;
        assert!(once, "conn {c}.{e}: a second receive of a shared queue failed: {cqe:?}");
        end.recv_failed = Some(srq);
        if cqe.status == WcStatus::WrFlushErr {
            end.unexplained |= end.cause.is_none();
        } else {
            end.cause = end.cause.or(Some(Cause::Recv));
        }
        self.doom(c);
    }

    /// Reliable: the next message, and no other.
    fn received_next(&mut self, c: usize, e: usize, srq: usize, wr: &RecvWr, cqe: &Cqe, solicited: bool) {
        if self.is_answer(c, e, cqe, solicited) {
            return;
        }
        let end = &mut self.conns[c].ends[e];
        let next = end.inbox.iter().position(|m| m.srq == srq);
        let Some(msg) = next.and_then(|at| end.inbox.remove(at)) else {
            panic!("conn {c}.{e}: a message that nobody sent: {cqe:?}")
        };
        let wrong = self.mismatch(c, e, &msg, wr, cqe, solicited);
        assert!(wrong.is_empty(), "conn {c}.{e}: {wrong} of message {}, not as sent: {cqe:?}", msg.seq);
        assert!(msg.bad.is_none(), "conn {c}.{e}: message {} is too long and came", msg.seq);
        if msg.op == SendOp::SendInv {
            let end = &mut self.conns[c].ends[e];
            let w = end.window.as_mut().expect("it was bound");
            assert_eq!(w.bound, Bound::Leaving);
            w.bound = Bound::No;
            self.net.hosts[end.host].env.memory.allow(w.arena.addr, w.arena.len() as u64, 0);
        }
        if self.rng.chance(0.2) {
            let lo = self.conns[c].ends[1 - e].done.max(msg.seq + 1);
            self.check_memory(c, 1 - e, lo);
        }
    }

    /// What of a completion is not as the message says; empty: nothing.
    fn mismatch(&self, c: usize, e: usize, msg: &Msg, wr: &RecvWr, cqe: &Cqe, solicited: bool) -> String {
        let end = &self.conns[c].ends[e];
        let host = &self.net.hosts[end.host];
        let write = msg.op == SendOp::WriteImm;
        let opcode = if write { WcOpcode::RecvRdmaWithImm } else { WcOpcode::Recv };
        let inv = msg.op == SendOp::SendInv;
        let mut wrong = String::new();
        let checks = [
            (cqe.opcode == opcode, "op-code "),
            (cqe.byte_len == msg.len, "length "),
            (solicited == msg.solicited, "solicited event "),
            (cqe.flags.contains(WcFlags::WITH_IMM) == msg.op.has_imm(), "immediate "),
            (cqe.flags.contains(WcFlags::WITH_INV) == inv, "invalidation "),
            (!(msg.op.has_imm() || inv) || cqe.imm == msg.imm, "immediate's value "),
        ];
        checks.iter().filter(|(right, _)| !right).for_each(|(_, what)| wrong.push_str(what));
        if !wrong.is_empty() {
            return wrong;
        }
        let reliable = self.conns[c].reliable();
        let right = match write {
            true => reliable || end.arena.shows(host, msg.off, &msg.data),
            false => get(host, &wr.pieces, msg.len as usize) == msg.data,
        };
        if !write && wr.bad && msg.len > 0 {
            wrong.push_str("key ");
        }
        if !right {
            wrong.push_str("bytes ");
        }
        wrong
    }

    /// Unreliable: a message that was sent, whole, and no oftener than the wire may repeat it.
    fn received_maybe(&mut self, c: usize, e: usize, wr: &RecvWr, cqe: &Cqe, solicited: bool) {
        let mail = &self.conns[c].ends[e].mail;
        let found = (0..mail.len()).rev().filter(|m| mail[*m].came < 2);
        let mut found = found.filter(|m| self.mismatch(c, e, &mail[*m], wr, cqe, solicited).is_empty());
        let Some(at) = found.next() else { panic!("conn {c}.{e}: a message that nobody sent: {cqe:?}") };
        self.conns[c].ends[e].mail[at].came += 1;
    }

    /// Something that a program learns beside its completions.
    pub(crate) fn event(&mut self, c: usize, e: usize, event: AsyncEvent) {
        let (badly, of_rpc) = (self.feeds_badly(c, e), self.rpc_may_raise(c, e, event));
        let (star, hasty) = (self.is_star(c), !self.conns[c].patient());
        let peer_down = self.conns[c].ends[1 - e].down() || self.state(c, 1 - e) != QpState::Rts;
        let conn = &mut self.conns[c];
        let asked = conn.ends[1 - e].doomed.map(|(_, bad)| bad).filter(|bad| !bad.is_local());
        let end = &mut conn.ends[e];
        let allowed = match event {
            AsyncEvent::QpReqErr(_) => {
                let refused = |bad: Bad| bad.status() == WcStatus::RemInvReqErr || bad == Bad::NoKernel;
                badly || asked.is_some_and(refused)
            }
            AsyncEvent::QpAccessErr(_) => asked.is_some_and(|bad| bad.status() == WcStatus::RemAccessErr),
            AsyncEvent::LastWqeReached(_) => {
                end.last_wqe += 1;
                matches!(end.source, Source::Shared) && end.last_wqe == 1
            }
            AsyncEvent::SqDrained(_) => end.draining,
            AsyncEvent::CommEst(_) => true,
            /* StaR's ends say so that cannot say it by a request */
            AsyncEvent::QpFatal(_) => star && (hasty || peer_down),
            _ => false,
        };
        let allowed = allowed || of_rpc;
        assert!(allowed, "conn {c}.{e}: {event:?} without a reason (last WQE events: {})", end.last_wqe);
        if let AsyncEvent::QpReqErr(_) | AsyncEvent::QpAccessErr(_) | AsyncEvent::QpFatal(_) = event {
            end.cause = end.cause.or(Some(Cause::Event));
            assert_eq!(self.state(c, e), QpState::Err, "conn {c}.{e}: {event:?}");
            self.doom(c);
        }
        if matches!(event, AsyncEvent::SqDrained(_)) {
            self.drained(c, e);
        }
    }
}
