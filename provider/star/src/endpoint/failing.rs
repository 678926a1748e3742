//! How an [`SlQp`] ends: SF is gone or silent, a WQE fails, or the program wants it.

use starverbs_core::env::{RecvQueue, SendQueue, TakenWqe};
use starverbs_core::{AsyncEvent, Cqe, Nanos, Psn, WcStatus};

use crate::control::Control;
use crate::env::StarEnv;
use crate::wire::Queue;

use super::{Changes, SlQp, SlState};

impl<E: StarEnv> SlQp<E> {
    /// Whether sends are posted that are not complete, signaled or not.
    pub(super) fn sends_wait(&self) -> bool {
        self.send.una != self.posted()
    }

    /// No message goes to SF any more.
    fn silence(&mut self) {
        self.channel = self.channel.silenced();
        (self.gate, self.changes, self.sf_lacks_rules) = (0, Changes::default(), false);
    }

    /// SF is gone. Sends that wait for it fail, but not before RC's would: the program may have all that it
    /// needs by then. Receives stay posted until something is sent.
    pub(super) fn detach(&mut self, now: Nanos) {
        self.detached = true;
        self.silence();
        if self.state == SlState::Starting {
            /* sends from now on fail by silence, as RC's would */
            self.state = SlState::Ready;
        }
        if self.state == SlState::Ready && self.send.una != self.posted() {
            self.left_at.get_or_insert(now);
        }
    }

    /// When sends fail that SF left behind.
    pub(super) fn left_due(&self) -> Option<Nanos> {
        let waits = self.state == SlState::Ready && self.send.una != self.posted();
        let left = self.left_at.filter(|_| waits)?;
        self.init.patience.time.map(|time| left + time)
    }

    /// SF was silent for too long: the oldest send fails, the rest is flushed.
    pub(super) fn fail(&mut self, env: &mut E, now: Nanos) {
        self.silence();
        if self.state != SlState::Error {
            self.init.stats.retry_exceeded.inc();
            self.enter_error(env, now, WcStatus::RetryExcErr);
        }
    }

    /// The QP goes to ERR, by itself or by its program. The oldest send gets `status`.
    pub fn enter_error(&mut self, env: &mut E, now: Nanos, status: WcStatus) {
        let connected = matches!(self.state, SlState::Starting | SlState::Ready);
        let mut recvs = Psn::default();
        if self.state != SlState::Error {
            self.state = SlState::Error;
            self.close_gate(env);
            recvs = self.received(env);
            self.flush(status);
            if self.init.setup.srq {
                env.event(AsyncEvent::LastWqeReached(self.init.qpn));
            }
        }
        if connected && status != WcStatus::RetryExcErr {
            /* whoever has the peer's QPN by the time that this arrives must not begin with it */
            self.channel.end();
            (self.gate, self.changes.given, self.sf_lacks_rules) = (0, 0, false);
            self.push_message(now, Control::Bye { why: 0, recvs });
            self.send_messages(env, now);
        }
    }

    /// Completes everything that was posted, with an error: the oldest send with `first`.
    pub(super) fn flush(&mut self, first: WcStatus) {
        let mut status = first;
        while self.send.una != self.posted() {
            let index = self.index(self.send.una);
            let wqe = self.init.sq.wqe(index);
            self.send.una = self.send.una.wrapping_add(1);
            self.init.sq.release(index.wrapping_add(1));
            self.give(
                Queue::Send,
                Cqe { wr_id: wqe.wr_id, opcode: wqe.op.wc_opcode(), status, ..Cqe::default() },
            );
            status = WcStatus::WrFlushErr;
        }
        self.send.next = self.send.una;
        self.send.stop();
        let status = WcStatus::WrFlushErr;
        while self.recv.una != self.recv.next {
            let wr_id = self.recv_id(self.recv.una);
            self.recv.una = self.recv.una.wrapping_add(1);
            self.give(Queue::Recv, Cqe { wr_id, status, ..Cqe::default() });
        }
        self.recv.stop();
        if self.init.setup.srq {
            return;
        }
        let mut sges = [Default::default(); starverbs_core::nic::MAX_SGE];
        while let Some(TakenWqe { wr_id, .. }) = self.init.rq.take(&mut sges) {
            self.give(Queue::Recv, Cqe { wr_id, status, ..Cqe::default() });
        }
    }

    fn give(&self, queue: Queue, cqe: Cqe) {
        if !self.push(queue, &Cqe { qpn: self.init.qpn, ..cqe }, false) {
            self.init.stats.cq_overrun.inc();
        }
    }
}
