//! An [`SlQp`] quiesces, and its QP goes back to the card while its program posts on.

use starverbs_core::env::{HeldWqe, RecvQueue, SendQueue};
use starverbs_core::{Nanos, NicError, Psn};

use crate::env::StarEnv;
use crate::round::QuiescePoint;
use crate::wire::Queue;

use super::window_op::WindowOpState;
use super::{SlQp, SlState};

impl<E: StarEnv> SlQp<E> {
    /// No WQE leaves for the first time from now on. False: the connection is ending.
    pub fn quiesce(&mut self) -> bool {
        self.quiescing = self.is_connected();
        self.quiescing
    }

    /// New WQEs leave again.
    pub fn resume(&mut self) {
        self.quiescing = false;
    }

    /// SF is quiesced at this point. Whether all before it is complete here, too, and no message is left:
    /// then the QP may go back to the card. `None`: that will never be so.
    pub fn has_reached(&mut self, env: &mut E, now: Nanos, point: QuiescePoint) -> Option<bool> {
        if !self.quiescing || !self.is_connected() {
            return None;
        }
        if self.state == SlState::Starting {
            /* no WQE was sent, and the set-up is obsolete */
            return Some(true);
        }
        for queue in [Queue::Send, Queue::Recv] {
            self.complete(env, now, queue);
        }
        let (una, sends) = (self.send.una, point.sends.since(Psn::new(self.send.una)));
        if !self.is_connected() || sends < 0 || sends as u32 > self.send.next.wrapping_sub(una) {
            return None;
        }
        let end = una.wrapping_add(sends as u32);
        let unreported = (0..sends as u32).any(|n| self.is_reported(una.wrapping_add(n)));
        let ops = self.window_op != WindowOpState::None || self.invalidation != WindowOpState::None;
        let is_late = unreported || point.recvs != Psn::new(self.recv.una);
        if ops || is_late || self.is_closed() || self.channel.waiting() > 0 {
            return Some(false);
        }
        /* done, and unsignaled */
        self.send.complete(end, now);
        self.init.sq.release(self.index(end));
        Some(true)
    }

    /// The QP leaves: receives that SF did not use go back to the front of their queue, and no message goes
    /// to SF any more. Gives the index in the send queue of the first request that is not done. `Exhausted`:
    /// no memory, and nothing changes.
    pub fn revert(&mut self) -> Result<u32, NicError> {
        let (una, held) = (self.recv.una, self.recv.next.wrapping_sub(self.recv.una));
        let mut recvs = (0..held).map(|n| self.taken(una.wrapping_add(n)));
        if held > 0 {
            self.init.rq.put_back(&mut recvs)?;
        }
        self.recv.stop();
        (self.detached, self.sf_ended) = (true, true);
        Ok(self.index(self.send.una))
    }

    /// A receive that SF has.
    pub(super) fn taken(&self, seq: u32) -> HeldWqe<'_> {
        let at = (seq & (self.init.setup.rq_depth - 1)) as usize;
        let first = at * self.stride;
        let Some(recv) = self.recvs.get(at) else { return HeldWqe { wr_id: 0, sges: &[] } };
        let sges = self.sges.get(first..first + usize::from(recv.sges)).unwrap_or(&[]);
        HeldWqe { wr_id: recv.wr_id, sges }
    }
}
