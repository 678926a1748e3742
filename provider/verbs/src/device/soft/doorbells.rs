//! Doorbells that wait for the card's next turn, so that small messages share a flush.

use starverbs_core::{Nanos, Qpn};

use super::Shard;

/// Most doorbells that wait at once.
const MOST: usize = 32;

/// What a doorbell waits behind.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Behind {
    /// Packets of its own queue pair, whose ACK or timer has the card run for it
    Own,
    /// Those of others
    Others,
}

/// The queue pairs whose doorbell waits.
pub(super) struct Deferred(Vec<Qpn>);

impl Deferred {
    pub(super) fn new() -> Self {
        Deferred(Vec::with_capacity(MOST))
    }

    /// Adds one; false: there is no room.
    #[inline]
    fn add(&mut self, qpn: Qpn) -> bool {
        let there = self.0.contains(&qpn);
        if !there && self.0.len() < MOST {
            self.0.push(qpn);
            return true;
        }
        there
    }
}

impl Shard {
    /// Has the doorbell of `qpn` wait for the card's next turn, if it may and there is room, behind packets of its own queue pair or, if `company`,
    /// of others; says which.
    #[inline]
    pub(super) fn defer(&mut self, qpn: Qpn, company: bool) -> Option<Behind> {
        let stateless = || self.star.as_ref().is_some_and(|star| star.library().may_wait_if_kept(qpn));
        let behind = if self.nic.may_wait(qpn) {
            Behind::Own
        } else if company && (self.nic.may_wait_if_kept(qpn) || stateless()) {
            Behind::Others
        } else {
            return None;
        };
        self.deferred.add(qpn).then_some(behind)
    }

    /// Handles the doorbells that were deferred, in their order.
    #[inline]
    pub(super) fn ring_deferred(&mut self, now: Nanos) {
        for at in 0..self.deferred.0.len() {
            self.ring(self.deferred.0[at], now);
        }
        self.deferred.0.clear();
    }

    /// Whether doorbells wait.
    #[inline]
    pub(super) fn has_deferred(&self) -> bool {
        !self.deferred.0.is_empty()
    }
}
