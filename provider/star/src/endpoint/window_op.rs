//! Window operations: windows that SL's program binds, keys that it or a message of SF invalidates.
//!
//! SF gets them as any WQE, and completes them when all before them is done. Then the host executes them, as
//! it has the keys. What comes behind them waits until SF has the change of rules.

use starverbs_core::env::SendQueue;
use starverbs_core::{AsyncEvent, Cqe, Nanos, SendWqe, WcFlags, WcStatus};

use crate::env::StarEnv;
use crate::message::CqeMsg;
use crate::wire::Queue;

use super::{SlQp, SlState};

/// The window operation of the oldest WQE of a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WindowOpState {
    /// There is none
    None,
    /// The host has not taken it
    Pending,
    /// The host executes it
    Begun,
}

impl<E: StarEnv> SlQp<E> {
    /// Whether the host may have to execute one.
    #[inline]
    pub fn has_window_op(&self) -> bool {
        [self.window_op, self.invalidation].contains(&WindowOpState::Pending)
    }

    /// A bind or an invalidation that is due, given once. Its change of rules goes to [`SlQp::send_rule`],
    /// then comes [`SlQp::window_op_done`].
    pub fn take_window_op(&mut self) -> Option<SendWqe> {
        let waits = self.window_op == WindowOpState::Pending && self.state == SlState::Ready;
        waits.then(|| {
            self.window_op = WindowOpState::Begun;
            self.init.sq.wqe(self.index(self.send.una))
        })
    }

    /// It has been done, or cannot be: then it ends with that status.
    pub fn window_op_done(&mut self, env: &mut E, now: Nanos, status: WcStatus) {
        if self.window_op != WindowOpState::Begun || self.state != SlState::Ready {
            return;
        }
        self.window_op = WindowOpState::None;
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
    }

    /// A key that a message of SF invalidates, given once. Then comes [`SlQp::invalidation_done`].
    pub fn take_invalidation(&mut self, env: &mut E) -> Option<u32> {
        if self.invalidation != WindowOpState::Pending || self.state != SlState::Ready {
            return None;
        }
        self.invalidation = WindowOpState::Begun;
        self.next_completion(env, Queue::Recv).map(|(_, msg)| msg.imm)
    }

    /// It was invalidated; or no message of SF may do that, and the QP goes to ERR.
    pub fn invalidation_done(&mut self, env: &mut E, now: Nanos, done: bool) {
        if self.invalidation != WindowOpState::Begun || self.state != SlState::Ready {
            return;
        }
        self.invalidation = WindowOpState::None;
        if !done {
            env.event(AsyncEvent::QpAccessErr(self.init.qpn));
            return self.enter_error(env, now, WcStatus::WrFlushErr);
        }
        if let Some((seq, msg)) = self.next_completion(env, Queue::Recv) {
            let cqe = self.cqe(Queue::Recv, seq, &msg);
            self.finish(env, now, (Queue::Recv, seq), &cqe, msg.solicited);
        }
        self.complete(env, now, Queue::Recv);
    }

    /// SF has done `seq`. Whether it is a window operation, and waits for the host.
    pub(super) fn waits_for_host(&mut self, queue: Queue, seq: u32, msg: &CqeMsg, now: Nanos) -> bool {
        let (op, waits) = match queue {
            Queue::Send => (self.window_op, self.init.sq.op(self.index(seq)).is_local()),
            Queue::Recv => (self.invalidation, msg.flags.contains(WcFlags::WITH_INV)),
        };
        if op == WindowOpState::None && waits {
            match queue {
                Queue::Send => self.window_op = WindowOpState::Pending,
                Queue::Recv => self.invalidation = WindowOpState::Pending,
            }
            /* unsignaled ones before it are done */
            self.track(queue).complete(seq, now);
        }
        waits
    }

    /// What comes next stands behind one that is not done.
    pub(super) fn behind_window_op(&self) -> bool {
        let last = self.send.next.wrapping_sub(1);
        self.send.una != self.send.next && self.init.sq.op(self.index(last)).is_local()
    }
}
