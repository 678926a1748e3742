//! Whose turn it is: QPs with something to send, QPs that owe only an ACK, and timers.
//!
//! Each QP is in a queue at most once, by the flags of the QP, and has one timer; each path is
//! noted at most once. So the queues never outgrow the room that is made when a QP or a path is made.
//!
//! Timers are lazy: moving a deadline back costs nothing. A popped timer whose QP has a later deadline
//! goes in again. Among many of them, one that is not needed any more goes at once.

use alloc::collections::VecDeque;

use super::path::PathId;
use super::timers::{TimerId, Timers};
use crate::error::NicError;
use crate::room::{Room, TwoEnds};
use crate::types::{Nanos, Qpn};

/// Queues of QPNs.
#[derive(Default)]
pub(crate) struct Sched {
    ready: VecDeque<Qpn>,
    acks: VecDeque<Qpn>,
    /// Paths whose waiters should be looked at
    open: VecDeque<PathId>,
    timers: Timers,
    qps: usize,
}

impl Sched {
    /// A QP is made: room for it in each queue. `Exhausted`: no memory, and no QP.
    pub(crate) fn join(&mut self) -> Result<TimerId, NicError> {
        self.ready.make_room(self.qps + 1)?;
        self.acks.make_room(self.qps + 1)?;
        let timer = self.timers.join()?;
        self.qps += 1;
        Ok(timer)
    }
    /// A timer of somebody who is no QP. `Exhausted`: no memory.
    pub(crate) fn join_timer(&mut self) -> Result<TimerId, NicError> {
        self.timers.join()
    }
    /// The QP, which is in no queue, is gone.
    pub(crate) fn leave(&mut self, timer: TimerId) {
        self.qps -= 1;
        self.timers.leave(timer);
    }
    /// There may be `paths` paths.
    pub(crate) fn make_room_for_paths(&mut self, paths: usize) -> Result<(), NicError> {
        self.open.make_room(paths)
    }
    pub(crate) fn push_ready(&mut self, qpn: Qpn) {
        self.ready.push_in_room(qpn);
    }
    /// It was just popped, and is next all the same.
    pub(crate) fn push_ready_front(&mut self, qpn: Qpn) {
        self.ready.push_front_in_room(qpn);
    }
    pub(crate) fn pop_ready(&mut self) -> Option<Qpn> {
        self.ready.pop_front()
    }
    pub(crate) fn forget_ready(&mut self, qpn: Qpn) {
        self.ready.retain(|q| *q != qpn);
    }
    pub(crate) fn push_open(&mut self, path: PathId) {
        self.open.push_in_room(path);
    }
    pub(crate) fn pop_open(&mut self) -> Option<PathId> {
        self.open.pop_front()
    }
    pub(crate) fn push_ack(&mut self, qpn: Qpn) {
        self.acks.push_in_room(qpn);
    }
    /// It was just popped, and is next all the same.
    pub(crate) fn push_ack_front(&mut self, qpn: Qpn) {
        self.acks.push_front_in_room(qpn);
    }
    pub(crate) fn pop_ack(&mut self) -> Option<Qpn> {
        self.acks.pop_front()
    }
    pub(crate) fn forget_ack(&mut self, qpn: Qpn) {
        self.acks.retain(|q| *q != qpn);
    }
    pub(crate) fn has_acks(&self) -> bool {
        !self.acks.is_empty()
    }
    pub(crate) fn arm(&mut self, timer: TimerId, at: Nanos, qpn: Qpn) {
        self.timers.arm(timer, at, qpn);
    }
    /// There is no deadline any more, if one that stays would cost more: it is moved for nothing when it is
    /// needed again, but comes at last, among many when its QP lies no longer in the CPU's caches. Says
    /// whether it is gone.
    #[inline]
    pub(crate) fn disarm_if_crowded(&mut self, timer: TimerId) -> bool {
        let crowded = self.timers.is_crowded();
        if crowded {
            self.timers.disarm(timer);
        }
        crowded
    }
    /// The next QP whose timer is due.
    pub(crate) fn pop_due(&mut self, now: Nanos) -> Option<Qpn> {
        self.timers.pop_due(now)
    }
    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        self.timers.next()
    }
}
