//! Doorbells that wait for the card's next turn, so that small messages share a flush.

use starverbs_core::Qpn;

/// What a doorbell is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Posted {
    /// Sends
    Sends,
    /// A few, the last of them small, of a queue pair that can send and is reliable
    SmallSends,
    /// Receives, where there was none: nobody sends for them alone, but what a program sends next, or the
    /// next poll, takes the news along
    Receives,
}

/// Most doorbells that wait at once.
const MOST: usize = 32;

/// The queue pairs whose doorbell waits.
pub(super) struct Deferred {
    all: Vec<Qpn>,
    /// Bits of their numbers, and of those that were dropped: whoever has another does not wait
    bits: u64,
}

impl Deferred {
    pub(super) fn new() -> Self {
        Deferred { all: Vec::with_capacity(MOST), bits: 0 }
    }

    /// Whether there is no room for more.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.all.len() >= MOST
    }

    /// Whether none waits.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Their queue pairs.
    pub(super) fn qpns(&self) -> impl Iterator<Item = Qpn> + Clone {
        self.all.iter().copied()
    }

    /// The one at a place, in their order.
    #[inline]
    pub(super) fn get(&self, at: usize) -> Option<Qpn> {
        self.all.get(at).copied()
    }

    /// The one that came so many before the last.
    #[inline]
    pub(super) fn last(&self, before: usize) -> Option<Qpn> {
        self.all.len().checked_sub(1 + before).and_then(|at| self.get(at))
    }

    /// Drops all.
    #[inline]
    pub(super) fn clear(&mut self) {
        self.all.clear();
        self.bits = 0;
    }

    /// Drops those that `is_rung` has rung.
    pub(super) fn drop_rung(&mut self, mut is_rung: impl FnMut(Qpn) -> bool) {
        self.all.retain(|qpn| !is_rung(*qpn));
        if self.all.is_empty() {
            self.bits = 0;
        }
    }

    /// Whether its doorbell waits.
    #[inline]
    pub(super) fn holds(&self, qpn: Qpn) -> bool {
        self.bits & 1 << (qpn % u64::BITS) != 0 && self.all.contains(&qpn)
    }

    /// Adds one; false: there is no room.
    #[inline]
    pub(super) fn add(&mut self, qpn: Qpn) -> bool {
        let bit = 1 << (qpn % u64::BITS);
        let there = self.holds(qpn);
        if !there && !self.is_full() {
            self.all.push(qpn);
            self.bits |= bit;
            return true;
        }
        there
    }
}
