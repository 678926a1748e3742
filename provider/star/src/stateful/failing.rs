//! Either end's way into error (docs/star.md, "Errors"; IBTA 10.3.1, 10.10.2.3).
//!
//! Whatever ends with an error gives memory back to its program, and SL's card does not know that. So no
//! packet touches SL's memory from then on, and SL gets the error once no packet that left before can be
//! under way.

use starverbs_core::env::{RecvQueue, SendQueue, TakenWqe};
use starverbs_core::{AsyncEvent, Cqe, Nanos, Psn, QpState, SendFlags, SendOp, Sge, WcOpcode, WcStatus};

use super::clock::KEEPALIVE;
use super::window::Of;
use super::{CardCtx, Ended, Stateful};
use crate::env::StarEnv;
use crate::message::CqeMsg;
use crate::wire::Queue;

impl<E: StarEnv> Stateful<E> {
    /// The oldest WQE of our own failed. `recv`: the receive WQE of SL that it took.
    pub(super) fn fail_local(&mut self, card: &mut CardCtx<'_, E>, status: WcStatus, recv: Option<u32>) {
        if status == WcStatus::RetryExcErr {
            card.stats.retry_exceeded.inc();
        }
        self.stop_sending(card);
        self.fail_oldest(card, status);
        let theirs = match status {
            WcStatus::RemInvReqErr => WcStatus::LocLenErr,
            WcStatus::RemOpErr => WcStatus::LocProtErr,
            _ => WcStatus::Success,
        };
        match recv.filter(|_| theirs != WcStatus::Success) {
            Some(seq) => {
                let failed = CqeMsg { status: theirs, opcode: WcOpcode::Recv, ..CqeMsg::default() };
                self.completions[Queue::Recv as usize].push(Psn::new(seq), failed, self.quiet_at);
                self.ended = Ended::Reported;
            }
            /* SL's QP refused a request: it goes to ERR too */
            None if matches!(status, WcStatus::RemAccessErr | WcStatus::RemInvReqErr) => {
                self.refused = Some(status);
            }
            None => {}
        }
        self.enter_error(card);
    }

    /// The oldest WQE of our own completes with an error.
    fn fail_oldest(&mut self, card: &mut CardCtx<'_, E>, status: WcStatus) {
        let index = self.streams[0].una;
        if index == self.local.sq.posted() {
            return;
        }
        let wqe = self.local.sq.wqe(index);
        self.streams[0].end_begun();
        if self.streams[0].under_way() > 0 {
            self.streams[0].retire();
        } else {
            self.streams[0].una = index.wrapping_add(1);
            self.streams[0].next = self.streams[0].una;
        }
        self.local.sq.release(index.wrapping_add(1));
        let (wr_id, opcode, qpn) = (wqe.wr_id, wqe.op.wc_opcode(), self.local.qpn);
        if wqe.flags.contains(SendFlags::CARD) {
            /* an answer of a kernel: no completion says it */
            if status != WcStatus::WrFlushErr {
                card.env.event(AsyncEvent::QpFatal(qpn));
            }
            return card.rpc.reply_done(&wqe);
        }
        self.push_send(card, &Cqe { wr_id, status, opcode, qpn, ..Cqe::default() });
    }

    /// The oldest WQE of SL failed. `recv`: the receive WQE of ours that it took.
    pub(super) fn fail_remote(&mut self, card: &mut CardCtx<'_, E>, status: WcStatus, recv: Option<u32>) {
        self.stop_sending(card);
        self.ended = Ended::Owed(status);
        let qpn = self.local.qpn;
        let (ours, event) = match status {
            WcStatus::RemInvReqErr => (WcStatus::LocLenErr, AsyncEvent::QpReqErr(qpn)),
            WcStatus::RemOpErr => (WcStatus::LocProtErr, AsyncEvent::QpReqErr(qpn)),
            /* the receive of a WRITE with immediate fails so, as RC's */
            WcStatus::RemAccessErr if self.oldest_is(SendOp::WriteImm) => {
                (WcStatus::LocAccessErr, AsyncEvent::QpAccessErr(qpn))
            }
            WcStatus::RemAccessErr => (WcStatus::WrFlushErr, AsyncEvent::QpAccessErr(qpn)),
            /* its own fault: our end learns of it when it asks for something */
            _ => return self.peer_ended(card),
        };
        if let Some(index) = recv {
            let una = self.streams[1].una;
            self.streams[1].op(una).recv = None;
            let cqe = Cqe { status: ours, opcode: WcOpcode::Recv, ..Cqe::default() };
            self.complete_recv(card, index, cqe, true);
        }
        self.enter_error(card);
        card.env.event(event);
    }

    /// Whether the oldest WQE of SL is such.
    fn oldest_is(&self, op: SendOp) -> bool {
        self.sends.get(Psn::new(self.streams[1].una)).is_some_and(|wqe| wqe.op == op)
    }

    /// SL's QP is in ERR, or gone, and ours is not.
    fn peer_ended(&mut self, card: &mut CardCtx<'_, E>) {
        self.streams[1].stopped = true;
        self.report_ended(card.now);
        if self.state == QpState::Rts && self.streams[0].una != self.local.sq.posted() {
            self.fail_local(card, WcStatus::RetryExcErr, None);
        } else {
            self.streams[0].stopped = false;
        }
    }

    /// SL closes the connection; its receives before `recvs` have their completions. Gives when nothing of it
    /// is under way any more, and the Bye may be answered.
    pub(super) fn handle_bye(&mut self, card: &mut CardCtx<'_, E>, recvs: Psn) -> Nanos {
        if self.quiet_at == 0 {
            self.stop_sending(card);
        }
        self.ended = Ended::Reported;
        self.completions.iter_mut().for_each(|completions| completions.forget());
        self.finish_received(card, recvs);
        self.peer_left(card.now);
        self.quiet_at
    }

    /// Whose completions SL has, which carried them, succeed, though no answer comes any more.
    fn finish_received(&mut self, card: &mut CardCtx<'_, E>, recvs: Psn) {
        let (una, count) = (self.streams[0].una, self.streams[0].under_way());
        for n in 0..count {
            let op = self.streams[0].op(una.wrapping_add(n));
            let received = op.recv.is_some_and(|seq| Psn::new(seq).before(recvs));
            if !(received && op.carries && op.all && op.held == 0) {
                break;
            }
            (op.left, op.until) = (0, 0);
        }
        self.finish(card);
    }

    /// SL has ended. Sends that wait for it fail, but not before RC's would: the program may have all that it
    /// needs by then.
    fn peer_left(&mut self, now: Nanos) {
        let patience = self.local.patience.get();
        if self.state != QpState::Rts || self.streams[0].una == self.local.sq.posted() {
            self.streams[0].stopped = false;
        } else if self.left_until == 0 && patience != 0 {
            self.left_until = now + patience;
            self.arm(self.left_until);
        }
    }

    /// Fails what SL left behind, if it is time.
    pub(super) fn fail_left(&mut self, card: &mut CardCtx<'_, E>) {
        if self.left_until == 0 || card.now < self.left_until {
            return;
        }
        self.left_until = 0;
        if self.state == QpState::Rts && self.streams[0].una != self.local.sq.posted() {
            self.fail_local(card, WcStatus::RetryExcErr, None);
        }
    }

    /// SL has not answered for the patience. If it lacks completions of receives, whose messages have
    /// succeeded here, our end fails, as RC's without an ACK would, so that no message is lost without an
    /// error. If SL sends something again, it gets all completions.
    pub(super) fn peer_silent(&mut self, card: &mut CardCtx<'_, E>) {
        let owed = self.ended == Ended::Not && !self.completions[Queue::Recv as usize].is_idle();
        self.channel = self.channel.silenced();
        self.silent = true;
        for completions in &mut self.completions {
            completions.expire(card.now);
        }
        if self.ended == Ended::Not {
            self.stop_sending(card);
            self.ended = Ended::Owed(WcStatus::RetryExcErr);
            self.peer_ended(card);
        }
        if owed && self.state == QpState::Rts {
            self.enter_error(card);
            card.env.event(AsyncEvent::QpFatal(self.local.qpn));
        }
    }

    /// Nothing that touches memory of SL leaves any more.
    fn stop_sending(&mut self, card: &mut CardCtx<'_, E>) {
        self.window.forget(|_| true);
        self.charge(card);
        card.registry.release(self.conn);
        card.registry.count(card.stats);
        card.rpc.stop();
        for stream in &mut self.streams {
            /* nothing of it waits for a receive any more: no timer for that */
            stream.stopped = true;
            stream.got_recv();
        }
        self.quiet_at = card.now + self.lifetime(card.path);
        self.arm(self.quiet_at);
    }

    /// Our end goes to ERR, by its program or as something failed. Flushes what is posted, in order.
    pub fn enter_error(&mut self, card: &mut CardCtx<'_, E>) {
        if self.state == QpState::Err {
            return;
        }
        self.state = QpState::Err;
        self.resume();
        self.stop_sending(card);
        self.report();
        if self.ended == Ended::Not {
            /* as if it had no answer */
            self.ended = Ended::Owed(WcStatus::RetryExcErr);
        }
        self.report_ended(card.now);
        self.flush_sends(card);
        self.flush_receives(card);
        if self.local.rq.is_none() {
            card.env.event(AsyncEvent::LastWqeReached(self.local.qpn));
        }
    }

    fn flush_sends(&mut self, card: &mut CardCtx<'_, E>) {
        while self.streams[0].una != self.local.sq.posted() {
            self.fail_oldest(card, WcStatus::WrFlushErr);
        }
    }

    /// Those that WQEs of SL have taken come first: they are the older ones.
    fn flush_receives(&mut self, card: &mut CardCtx<'_, E>) {
        let (una, count) = (self.streams[1].una, self.streams[1].under_way());
        for n in 0..count {
            if let Some(index) = self.streams[1].op(una.wrapping_add(n)).recv.take() {
                self.complete_recv(card, index, flushed(), true);
            }
        }
        let mut sges = [Sge::default(); starverbs_core::nic::MAX_SGE];
        while let Some(TakenWqe { wr_id, .. }) = self.local.rq.as_ref().and_then(|rq| rq.take(&mut sges)) {
            self.push_recv(card, &Cqe { wr_id, ..flushed() }, true);
        }
    }

    /// If SL's end has ended, and it has a WQE to complete with the error, makes that CQEP. A READ may have
    /// its completion already: then the next WQE gets one, too.
    pub(super) fn report_ended(&mut self, now: Nanos) {
        while let Ended::Owed(status) = self.ended {
            let stream = &self.streams[Of::Remote as usize];
            let seq = Psn::new(stream.una);
            let Some(wqe) = self.sends.get(seq) else { return };
            let message = CqeMsg { status, opcode: wqe.op.wc_opcode(), ..CqeMsg::default() };
            let may_be_done = stream.oldest().is_some_and(|op| op.carries);
            self.completions[Queue::Send as usize].push(seq, message, self.quiet_at.max(now));
            if may_be_done {
                self.streams[Of::Remote as usize].end_begun();
                self.streams[Of::Remote as usize].retire();
            } else {
                self.ended = Ended::Reported;
            }
            self.arm(self.quiet_at.max(now));
        }
    }

    /// A CQ was full (IBTA 10.2.6.2). The step that is under way ends as it would have; the timer does the
    /// rest, at once.
    pub(super) fn overrun(&mut self, card: &mut CardCtx<'_, E>) {
        card.stats.cq_overrun.inc();
        if !self.overrun {
            self.overrun = true;
            card.env.event(AsyncEvent::QpFatal(self.local.qpn));
            self.arm(card.now);
        }
    }

    /// Whether [`handle_doorbell`](Stateful::handle_doorbell) has something to do.
    #[inline]
    pub fn minds_doorbell(&self) -> bool {
        self.state == QpState::Err || !self.open
    }

    /// Something was posted.
    pub fn handle_doorbell(&mut self, card: &mut CardCtx<'_, E>) {
        if self.state == QpState::Err {
            self.flush_sends(card);
            self.flush_receives(card);
        }
        if !self.open {
            self.arm(card.now + KEEPALIVE);
        }
    }
}

fn flushed() -> Cqe {
    Cqe { status: WcStatus::WrFlushErr, opcode: WcOpcode::Recv, ..Cqe::default() }
}
