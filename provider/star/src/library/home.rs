//! An [`SlQp`] comes to rest, and its QP goes back to the card while its program posts on.

use starverbs_core::env::{RecvQueue, SendQueue};
use starverbs_core::{Nanos, NicError, Psn, Sge};

use crate::env::StarEnv;
use crate::homing::Done;
use crate::wire::Queue;

use super::own::Chore;
use super::{SlQp, SlState};

impl<E: StarEnv> SlQp<E> {
    /// SF is sent no WQE from now on but those that it has not stored. False: the connection is ending.
    pub fn rest(&mut self) -> bool {
        self.resting = self.may_rest();
        self.resting
    }

    fn may_rest(&self) -> bool {
        matches!(self.state, SlState::Starting | SlState::Ready) && !self.parted
    }

    /// WQEs are sent again.
    pub fn resume(&mut self, env: &mut E, now: Nanos) {
        self.resting = false;
        self.supply(env, now);
    }

    /// SF has come to rest when so much was done. Whether that is complete here, too, and nothing is left to
    /// be said or done: then the QP may go back to the card. `None`: it will never be so.
    pub fn has_ended_at(&mut self, env: &mut E, now: Nanos, done: Done) -> Option<bool> {
        if !self.resting || !self.may_rest() {
            return None;
        }
        if self.state == SlState::Starting {
            /* no WQE was sent, and what its first word says is for nobody any more */
            return (done == Done::default()).then_some(true);
        }
        for queue in [Queue::Send, Queue::Recv] {
            self.complete(env, now, queue);
        }
        let chores = self.own != Chore::None || self.invalid != Chore::None;
        if !self.may_rest() || chores || self.is_closed() || self.channel.waiting() > 0 {
            return self.may_rest().then_some(false);
        }
        let sends = done.sends.since(Psn::new(self.send.una));
        let under_way = self.send.next.wrapping_sub(self.send.una);
        if sends < 0 || sends as u32 > under_way {
            return None;
        }
        if done.recvs != Psn::new(self.recv.una) {
            return Some(false);
        }
        let end = self.send.una.wrapping_add(sends as u32);
        let untold = (0..sends as u32).map(|n| self.send.una.wrapping_add(n));
        if untold.into_iter().any(|seq| self.is_reported(seq)) {
            return Some(false);
        }
        /* without completions, and done */
        self.send.complete(end, now);
        self.init.sq.release(self.index(end));
        Some(true)
    }

    /// Receives that SF has, and did not use, go back to their queue, in front, and nothing more is said to
    /// SF: the QP leaves. Gives how many, and the index in the send queue of the first request that is not
    /// done. `Exhausted`: no memory, and nothing changes.
    pub fn go_home(&mut self) -> Result<(u32, u32), NicError> {
        let (una, held) = (self.recv.una, self.recv.next.wrapping_sub(self.recv.una));
        let mut recvs = (0..held).map(|n| self.taken(una.wrapping_add(n)));
        if held > 0 {
            self.init.rq.put_back(&mut recvs)?;
        }
        self.recv.stop();
        self.parted = true;
        Ok((held, self.index(self.send.una)))
    }

    /// A receive that SF has.
    pub(super) fn taken(&self, seq: u32) -> (u64, &[Sge]) {
        let at = (seq & (self.init.setup.rq_depth - 1)) as usize;
        let first = at * self.stride;
        let Some(recv) = self.recvs.get(at) else { return (0, &[]) };
        (recv.wr_id, self.sges.get(first..first + usize::from(recv.sges)).unwrap_or(&[]))
    }
}
