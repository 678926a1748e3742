//! Completions, and the way of a QP into error (IBTA 10.3.1, 10.10.2.3).

use super::{Ctx, MessageInProgress, TimerAction};
use crate::engine::Call;
use crate::env::{CompletionQueue, Env, SendQueue};
use crate::qp::RecvSource;
use crate::types::{AsyncEvent, Cqe, QpState, SendFlags, WcFlags, WcOpcode, WcStatus};

impl<E: Env> Ctx<'_, E> {
    /// UC, UD: the WQE just sent is done.
    pub(super) fn complete_sent(&mut self) {
        self.complete_oldest();
        self.drained();
    }

    /// The oldest WQE succeeded, and so have those behind it that need no packet and were done.
    pub(super) fn complete_oldest(&mut self) {
        self.complete_one();
        self.complete_local();
    }

    /// Completes WQEs that the card did by itself, as far as they are the oldest.
    pub(super) fn complete_local(&mut self) {
        while self.qp.req.una != self.qp.req.fresh
            && self.qp.req.track[self.qp.req.slot(self.qp.req.una)].packets == 0
        {
            /* a rewound cursor may stand here: it need not come by again */
            if self.qp.req.next == self.qp.req.una {
                self.qp.req.next = self.qp.req.next.wrapping_add(1);
            }
            self.complete_one();
        }
    }

    fn complete_one(&mut self) {
        let wqe = self.qp.sq.wqe(self.qp.req.una);
        /* before the completion: who polls it may post at once */
        self.release_oldest();
        if self.qp.req.own {
            return self.own_done(&wqe, WcStatus::Success);
        }
        if self.qp.flags.sig_all || wqe.flags.contains(SendFlags::SIGNALED) {
            if wqe.flags.contains(SendFlags::CARD) {
                return self.reply_done(&wqe);
            }
            let byte_len = if wqe.op.brings_data() { wqe.length } else { 0 };
            let cqe = Cqe {
                wr_id: wqe.wr_id,
                byte_len,
                qpn: self.qp.qpn,
                opcode: wqe.op.wc_opcode(),
                ..Cqe::default()
            };
            self.push_send(&cqe);
        }
    }

    fn release_oldest(&mut self) {
        self.qp.req.una = self.qp.req.una.wrapping_add(1);
        self.qp.sq.release(self.qp.req.una);
    }

    /// The oldest WQE failed: RC goes to ERR, UC and UD to SQE.
    pub(super) fn fail_oldest(&mut self, status: WcStatus) {
        if self.qp.req.una != self.qp.sq.posted() {
            self.fail_one(status);
        }
        let state = if self.qp.qp_type.is_reliable() { QpState::Err } else { QpState::Sqe };
        enter_error(self, state);
    }

    fn fail_one(&mut self, status: WcStatus) {
        let wqe = self.qp.sq.wqe(self.qp.req.una);
        self.release_oldest();
        if self.qp.req.own {
            return self.own_done(&wqe, status);
        }
        if wqe.flags.contains(SendFlags::CARD) {
            /* an answer, or what a kernel sent: no completion says it */
            if status != WcStatus::WrFlushErr {
                self.env.event(AsyncEvent::QpFatal(self.qp.qpn));
            }
            return self.reply_done(&wqe);
        }
        let cqe =
            Cqe { wr_id: wqe.wr_id, status, opcode: wqe.op.wc_opcode(), qpn: self.qp.qpn, ..Cqe::default() };
        self.sh.stats.error_completions.inc();
        self.push_send(&cqe);
    }

    /// If the WQE that cannot be sent is now the oldest, completes it with its fault.
    pub(super) fn raise_fault(&mut self) {
        if let Some((at, status)) = self.qp.req.fault
            && at == self.qp.req.una
        {
            self.qp.req.fault = None;
            self.fail_oldest(status);
        }
    }

    /// SQD: everything begun is done.
    pub(crate) fn drained(&mut self) {
        let qp = &mut *self.qp;
        if qp.state == QpState::Sqd && qp.req.una == qp.req.fresh && !qp.flags.drained {
            qp.flags.drained = true;
            if qp.attr.en_sqd_async_notify {
                self.env.event(AsyncEvent::SqDrained(qp.qpn));
            }
        }
    }

    fn push_send(&mut self, cqe: &Cqe) {
        self.sh.stats.completions.inc();
        if self.qp.send_cq.push(cqe, cqe.status != WcStatus::Success).is_err() {
            self.overrun();
        }
    }

    /// The held receive WQE is done. `solicited`: its sender asked for an event.
    pub(super) fn complete_recv(&mut self, mut cqe: Cqe, solicited: bool) {
        cqe.wr_id = self.qp.resp.recv.wr_id;
        cqe.qpn = self.qp.qpn;
        self.qp.resp.recv.held = false;
        self.sh.stats.completions.inc();
        if cqe.status != WcStatus::Success {
            self.sh.stats.error_completions.inc();
        }
        let solicited = solicited || cqe.status != WcStatus::Success;
        let full = match self.srq_cq() {
            None => self.qp.recv_cq.push(&cqe, solicited).is_err(),
            Some(cq) => cq.push(&cqe, solicited).is_err(),
        };
        if full {
            self.overrun();
        }
    }

    /// A CQ was full (IBTA 10.2.6.2: CQ error; its QPs fail). The step that is under way ends as it would
    /// have; the timer flushes the rest, at once.
    pub(super) fn overrun(&mut self) {
        self.sh.stats.cq_overrun.inc();
        if self.qp.state != QpState::Err {
            self.qp.state = QpState::Err;
            self.env.event(AsyncEvent::QpFatal(self.qp.qpn));
            self.qp.flags.due = TimerAction::Flush;
            self.arm(self.now);
        }
    }

    /// A receive fails for a reason on our side: its completion has the error, the QP goes to ERR.
    pub(super) fn fail_recv(&mut self, status: WcStatus) {
        self.complete_recv(
            Cqe { status, opcode: WcOpcode::Recv, flags: WcFlags::empty(), ..Cqe::default() },
            true,
        );
    }
}

/// Takes a QP to ERR (or a UC/UD one to SQE) and flushes what is posted, in order.
pub(crate) fn enter_error<E: Env>(cx: &mut Ctx<'_, E>, state: QpState) {
    cx.qp.state = state;
    if cx.run_engine(Call::Fail).is_some() {
        return;
    }
    let req = &mut cx.qp.req;
    (req.deadline, req.rnr_until, req.rtt_since, req.fault) = (0, 0, 0, None);
    req.reads = 0;
    cx.forget_inflight();
    cx.forget_gaps();
    if state == QpState::Err {
        cx.qp.resp.cur = MessageInProgress::Idle;
        cx.qp.resp.ack = false;
        cx.abandon_forwarded();
        cx.stop_kernel();
    }
    flush_posted(cx);
    if state == QpState::Err && matches!(cx.qp.rq, RecvSource::Shared(_)) {
        cx.env.event(AsyncEvent::LastWqeReached(cx.qp.qpn));
    }
}

/// Completes all that is posted with WR_FLUSH_ERR: sends, and in ERR receives.
pub(crate) fn flush_posted<E: Env>(cx: &mut Ctx<'_, E>) {
    while cx.qp.req.una != cx.qp.sq.posted() {
        cx.fail_one(WcStatus::WrFlushErr);
    }
    if cx.qp.req.own {
        cx.flush_waiting();
    }
    let end = cx.qp.req.una;
    cx.qp.req.next = end;
    cx.qp.req.fresh = end;
    cx.qp.req.offset = 0;
    cx.qp.req.una_psn = cx.qp.req.psn;
    cx.qp.req.max_psn = cx.qp.req.psn;
    if cx.qp.state != QpState::Err {
        return;
    }
    if cx.qp.resp.recv.held {
        cx.fail_recv(WcStatus::WrFlushErr);
    }
    while !cx.qp.uses_srq() && cx.take_recv() {
        cx.fail_recv(WcStatus::WrFlushErr);
    }
}
