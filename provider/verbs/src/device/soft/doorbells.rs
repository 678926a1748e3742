//! Doorbells that wait for the card's next turn, so that small messages share a flush.

use starverbs_core::Qpn;

/// What a doorbell is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Posted {
    /// Sends
    Sends,
    /// Receives, where there was none: nobody sends for them alone, but what a program sends next, or the
    /// next poll, takes the news along
    Receives,
}

/// Most doorbells that wait at once.
const MOST: usize = 32;

/// The queue pairs whose doorbell waits.
pub(super) struct Deferred(Vec<Qpn>);

impl Deferred {
    pub(super) fn new() -> Self {
        Deferred(Vec::with_capacity(MOST))
    }

    /// Whether there is no room for more.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.0.len() >= MOST
    }

    /// Whether none waits.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Their queue pairs.
    pub(super) fn qpns(&self) -> impl Iterator<Item = Qpn> + Clone {
        self.0.iter().copied()
    }

    /// The one at a place, in their order.
    #[inline]
    pub(super) fn get(&self, at: usize) -> Option<Qpn> {
        self.0.get(at).copied()
    }

    /// The one that came so many before the last.
    #[inline]
    pub(super) fn last(&self, before: usize) -> Option<Qpn> {
        self.0.len().checked_sub(1 + before).and_then(|at| self.get(at))
    }

    /// Drops all.
    #[inline]
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Drops those that `is_rung` has rung.
    pub(super) fn drop_rung(&mut self, mut is_rung: impl FnMut(Qpn) -> bool) {
        self.0.retain(|qpn| !is_rung(*qpn));
    }

    /// Adds one; false: there is no room.
    #[inline]
    pub(super) fn add(&mut self, qpn: Qpn) -> bool {
        let there = self.0.contains(&qpn);
        if !there && !self.is_full() {
            self.0.push(qpn);
            return true;
        }
        there
    }
}
