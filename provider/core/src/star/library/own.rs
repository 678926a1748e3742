//! Work requests that SL does by itself: memory windows bound, keys invalidated.
//!
//! SF gets them as any, and says when all before them is done. Then they are done here, by the host, which has the keys; and what comes behind
//! them waits until SF knows what they have changed.

use crate::env::SendQueue;
use crate::star::env::StarEnv;
use crate::star::wire::Queue;
use crate::types::{Cqe, Nanos, SendWqe, WcStatus};

use super::{SlQp, SlState};

impl<E: StarEnv> SlQp<E> {
    /// A bind or an invalidation that is to be done now. What it changes is said by [`SlQp::tell`], then comes [`SlQp::own_done`].
    pub fn own(&self) -> Option<SendWqe> {
        let ready = self.own && self.state == SlState::Ready;
        ready.then(|| *self.init.sq.wqe(self.index(self.send.una)))
    }

    /// It has been done, or cannot be: then it ends with that status.
    pub fn own_done(&mut self, env: &mut E, now: Nanos, status: WcStatus) {
        let Some(wqe) = self.own() else { return };
        self.own = false;
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

    /// SF has done all before `seq`. Whether that is one that the host is to do now: then it waits for that.
    pub(super) fn waits_for_own(&mut self, seq: u32, now: Nanos) -> bool {
        self.own |= self.init.sq.wqe(self.index(seq)).op.is_local();
        if self.own {
            /* those without completions before it are done */
            self.send.complete(seq, now);
        }
        self.own
    }

    /// What comes next stands behind one that is not done.
    pub(super) fn behind_own(&self) -> bool {
        let last = self.send.next.wrapping_sub(1);
        self.send.una != self.send.next && self.init.sq.wqe(self.index(last)).op.is_local()
    }
}
