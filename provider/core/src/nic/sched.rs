//! Whose turn it is: QPs with something to send, QPs that owe only an ACK, and timers.
//!
//! Timers are lazy: a QP has at most one entry that matters, and moving its deadline back costs
//! nothing. A popped entry whose QP has a later deadline goes in again.

use alloc::collections::{BinaryHeap, VecDeque};
use core::cmp::Reverse;

use super::path::PathId;
use crate::types::{Nanos, Qpn};

/// Queues of QPNs. An entry may be stale (QP gone or idle); whoever pops it looks.
#[derive(Default)]
pub(crate) struct Sched {
    ready: VecDeque<Qpn>,
    acks: VecDeque<Qpn>,
    /// Paths whose waiters should be looked at
    open: VecDeque<PathId>,
    timers: BinaryHeap<Reverse<(Nanos, Qpn)>>,
}

impl Sched {
    pub(crate) fn push_ready(&mut self, qpn: Qpn) {
        self.ready.push_back(qpn);
    }
    pub(crate) fn push_ready_front(&mut self, qpn: Qpn) {
        self.ready.push_front(qpn);
    }
    pub(crate) fn pop_ready(&mut self) -> Option<Qpn> {
        self.ready.pop_front()
    }
    pub(crate) fn push_open(&mut self, path: PathId) {
        self.open.push_back(path);
    }
    pub(crate) fn pop_open(&mut self) -> Option<PathId> {
        self.open.pop_front()
    }
    pub(crate) fn push_ack(&mut self, qpn: Qpn) {
        self.acks.push_back(qpn);
    }
    pub(crate) fn push_ack_front(&mut self, qpn: Qpn) {
        self.acks.push_front(qpn);
    }
    pub(crate) fn pop_ack(&mut self) -> Option<Qpn> {
        self.acks.pop_front()
    }
    pub(crate) fn has_acks(&self) -> bool {
        !self.acks.is_empty()
    }
    pub(crate) fn arm(&mut self, at: Nanos, qpn: Qpn) {
        self.timers.push(Reverse((at, qpn)));
    }
    /// The next QP whose entry is due.
    pub(crate) fn pop_due(&mut self, now: Nanos) -> Option<Qpn> {
        match self.timers.peek() {
            Some(Reverse((at, _))) if *at <= now => self.timers.pop().map(|Reverse((_, qpn))| qpn),
            _ => None,
        }
    }
    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        self.timers.peek().map(|Reverse((at, _))| *at)
    }
}
