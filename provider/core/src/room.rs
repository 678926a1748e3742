//! Queues of the data path: their memory is taken on the control path, and never there.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// Adding to a queue that has room. Whoever made the queue promised it; debug builds, and so the
/// simulator's runs, hold it to that.
pub(crate) trait Room<T> {
    /// Makes room for `entries` in all, and more, so that to grow by one again and again costs little.
    fn make_room(&mut self, entries: usize);
    /// Adds at the end.
    fn push_in_room(&mut self, value: T);
}

/// What a full queue says, where anybody looks.
const FULL: &str = "no room: this would allocate on the data path";

impl<T> Room<T> for VecDeque<T> {
    fn make_room(&mut self, entries: usize) {
        self.reserve(entries.saturating_sub(self.len()));
    }

    #[inline]
    fn push_in_room(&mut self, value: T) {
        debug_assert!(self.len() < self.capacity(), "{FULL}");
        self.push_back(value);
    }
}

impl<T> Room<T> for Vec<T> {
    fn make_room(&mut self, entries: usize) {
        self.reserve(entries.saturating_sub(self.len()));
    }

    #[inline]
    fn push_in_room(&mut self, value: T) {
        debug_assert!(self.len() < self.capacity(), "{FULL}");
        self.push(value);
    }
}

/// What queues with two ends can do beside.
pub(crate) trait TwoEnds<T>: Room<T> {
    /// Makes room for `entries` in all and no more: of these there is one for each QP.
    fn make_exact_room(&mut self, entries: usize);
    /// Adds at the front.
    fn push_front_in_room(&mut self, value: T);
}

impl<T> TwoEnds<T> for VecDeque<T> {
    fn make_exact_room(&mut self, entries: usize) {
        self.reserve_exact(entries.saturating_sub(self.len()));
    }

    #[inline]
    fn push_front_in_room(&mut self, value: T) {
        debug_assert!(self.len() < self.capacity(), "{FULL}");
        self.push_front(value);
    }
}
