//! What SL does by itself: memory windows bound, keys invalidated, by its program or with a message of SF.
//!
//! SF gets them as any, and says when all before them is done. Then they are done here, by the host, which
//! has the keys; and what comes behind them waits until SF knows what they have changed.

use starverbs_core::env::SendQueue;
use starverbs_core::{AsyncEvent, Cqe, Nanos, SendWqe, WcFlags, WcStatus};

use crate::env::StarEnv;
use crate::message::CqeMsg;
use crate::wire::Queue;

use super::{SlQp, SlState};

/// What the host has to do before the oldest WQE of a queue is complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Chore {
    /// Nothing
    None,
    /// Something that it has not been given
    Waits,
    /// It is at it
    Begun,
}

impl<E: StarEnv> SlQp<E> {
    /// A bind or an invalidation that is to be done now, given once. What it changes is said by
    /// [`SlQp::tell`], then comes [`SlQp::own_done`].
    pub fn take_own(&mut self) -> Option<SendWqe> {
        let waits = self.own == Chore::Waits && self.state == SlState::Ready;
        waits.then(|| {
            self.own = Chore::Begun;
            self.init.sq.wqe(self.index(self.send.una))
        })
    }

    /// It has been done, or cannot be: then it ends with that status.
    pub fn own_done(&mut self, env: &mut E, now: Nanos, status: WcStatus) {
        if self.own != Chore::Begun || self.state != SlState::Ready {
            return;
        }
        self.own = Chore::None;
        let wqe = self.init.sq.wqe(self.index(self.send.una));
        let cqe = Cqe {
            wr_id: wqe.wr_id,
            opcode: wqe.op.wc_opcode(),
            qpn: self.init.qpn,
            status,
            ..Cqe::default()
        };
        self.finish(env, now, (Queue::Send, self.send.una), &cqe, false);
        self.complete(env, now, Queue::Send);
        self.supply(env, now);
    }

    /// A key that a message of SF takes away, given once. The host does that, then comes
    /// [`SlQp::invalidated`].
    pub fn take_invalid(&mut self, env: &mut E) -> Option<u32> {
        if self.invalid != Chore::Waits || self.state != SlState::Ready {
            return None;
        }
        self.invalid = Chore::Begun;
        self.next_completion(env, Queue::Recv).map(|(_, msg)| msg.imm)
    }

    /// It has been done; or it is no key that a message of SF may take away, and nothing more is done for
    /// such a peer.
    pub fn invalidated(&mut self, env: &mut E, now: Nanos, done: bool) {
        if self.invalid != Chore::Begun || self.state != SlState::Ready {
            return;
        }
        self.invalid = Chore::None;
        if !done {
            env.event(AsyncEvent::QpAccessErr(self.init.qpn));
            return self.enter_error(env, now, WcStatus::WrFlushErr);
        }
        if let Some((seq, msg)) = self.next_completion(env, Queue::Recv) {
            let cqe = self.cqe(Queue::Recv, seq, &msg);
            self.finish(env, now, (Queue::Recv, seq), &cqe, msg.solicited);
        }
        self.complete(env, now, Queue::Recv);
        self.supply(env, now);
    }

    /// SF has done `seq`. Whether there is something that the host is to do now: then it waits for that.
    pub(super) fn waits_for_host(&mut self, queue: Queue, seq: u32, msg: &CqeMsg, now: Nanos) -> bool {
        let (chore, waits) = match queue {
            Queue::Send => (self.own, self.init.sq.op(self.index(seq)).is_local()),
            Queue::Recv => (self.invalid, msg.flags.contains(WcFlags::WITH_INV)),
        };
        if chore == Chore::None && waits {
            match queue {
                Queue::Send => self.own = Chore::Waits,
                Queue::Recv => self.invalid = Chore::Waits,
            }
            /* those without completions before it are done */
            self.track(queue).complete(seq, now);
        }
        waits
    }

    /// What comes next stands behind one that is not done.
    pub(super) fn behind_own(&self) -> bool {
        let last = self.send.next.wrapping_sub(1);
        self.send.una != self.send.next && self.init.sq.op(self.index(last)).is_local()
    }
}
