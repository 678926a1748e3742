//! Doorbells that wait for the card's next turn, so that small messages share a flush.

use starverbs_core::coalesce::{Backlog, When};
use starverbs_core::{Nanos, Qpn};

use super::Shard;

/// Most doorbells that wait at once.
const MOST: usize = 32;

/// The queue pairs whose doorbell waits.
pub(super) struct Deferred(Vec<Qpn>);

impl Deferred {
    pub(super) fn new() -> Self {
        Deferred(Vec::with_capacity(MOST))
    }

    #[inline]
    fn is_full(&self) -> bool {
        self.0.len() >= MOST
    }

    /// Their queue pairs.
    pub(super) fn qpns(&self) -> impl Iterator<Item = Qpn> + Clone {
        self.0.iter().copied()
    }

    /// Drops those that `is_rung` has rung.
    pub(super) fn drop_rung(&mut self, mut is_rung: impl FnMut(Qpn) -> bool) {
        self.0.retain(|qpn| !is_rung(*qpn));
    }

    /// Adds one; false: there is no room.
    #[inline]
    fn add(&mut self, qpn: Qpn) -> bool {
        let there = self.0.contains(&qpn);
        if !there && !self.is_full() {
            self.0.push(qpn);
            return true;
        }
        there
    }
}

impl Shard {
    /// Has the doorbell of `qpn` wait for the card's next turn, if it may and there is room; says which turn
    /// that is.
    #[inline]
    pub(super) fn defer(&mut self, qpn: Qpn, may_sleep: bool) -> When {
        /* of local connections all is fetched when they are rung */
        let of_channels = self.env.channels.backlog();
        let local = of_channels == Backlog::BehindOthers;
        let backlog = if local {
            if self.deferred.is_full() {
                self.local.ring_deferred((&mut self.nic, &mut self.env), &mut self.deferred);
            }
            of_channels
        } else {
            match (self.nic.backlog(qpn), &self.star) {
                (Backlog::Due, Some(star)) => star.endpoints().backlog(qpn),
                (backlog, _) => backlog,
            }
        };
        let when = backlog.when(may_sleep);
        if when == When::Now || !self.deferred.add(qpn) {
            return When::Now;
        }
        if !local {
            self.nic.expect(&self.env, qpn);
        }
        when
    }

    /// Handles the doorbells that were deferred, in their order.
    #[inline]
    pub(super) fn ring_deferred(&mut self, now: Nanos) {
        for qpn in self.deferred.qpns() {
            self.nic.expect_requests(&self.env, qpn);
        }
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
