//! Queues of the data path: their memory is taken on the control path, and never there.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// Adding to a queue that has room. Whoever made the queue promised it; debug builds, and so the
/// simulator's runs, hold it to that.
pub(crate) trait Room<T> {
    /// Makes room for `entries` in all.
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

/// Adding at the front, under the same promise.
pub(crate) trait RoomInFront<T>: Room<T> {
    /// Adds at the front.
    fn push_front_in_room(&mut self, value: T);
}

impl<T> RoomInFront<T> for VecDeque<T> {
    #[inline]
    fn push_front_in_room(&mut self, value: T) {
        debug_assert!(self.len() < self.capacity(), "{FULL}");
        self.push_front(value);
    }
}
