//! Events of completion queues that the program has not read yet: as long as there are any, it comes back,
//! and the device's thread need not be told that it may sleep.
//!
//! Owns the count, and when it says nothing: of programs in which several threads read, as one may sleep
//! while another has something to read; and of events that a program did not come for.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

use super::poller;

/// In place of a thread: there are several.
const SEVERAL: i32 = -1;

/// The events of a device.
#[derive(Default)]
pub(crate) struct UnreadEvents {
    /// How many
    count: AtomicU32,
    /// So many of them are not counted on any more
    left: AtomicU32,
    /// The thread that reads; 0 before the first, or [`SEVERAL`]
    reader: AtomicI32,
    /// The device's thread is to be told once they are read
    untold: AtomicBool,
}

impl UnreadEvents {
    /// One is about to be raised.
    pub(crate) fn raise(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// The calling thread has read one.
    pub(crate) fn read(&self) {
        let (own, before) = (poller::number(), self.reader.load(Ordering::Relaxed));
        if before != own && before != SEVERAL {
            self.reader.store(if before == 0 { own } else { SEVERAL }, Ordering::Relaxed);
        }
        self.take_back(1);
    }

    /// So many will never be read.
    pub(crate) fn take_back(&self, events: u32) {
        let count = self.count.fetch_sub(events, Ordering::Relaxed).wrapping_sub(events);
        if self.left.load(Ordering::Relaxed) > count {
            self.left.store(count, Ordering::Relaxed);
        }
    }

    /// Whether the program comes back for one.
    #[inline]
    pub(crate) fn bring_back(&self) -> bool {
        let (count, left) = (self.count.load(Ordering::Relaxed), self.left.load(Ordering::Relaxed));
        count > left && self.reader.load(Ordering::Relaxed) != SEVERAL
    }

    /// The program asked for an event, and may sleep: whether the device's thread need not be told yet.
    #[inline]
    pub(crate) fn put_off(&self) -> bool {
        let puts_off = self.bring_back();
        self.untold.store(puts_off, Ordering::Relaxed);
        puts_off
    }

    /// Whether the device's thread is to be told now that the program may sleep.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.untold.load(Ordering::Relaxed)
            && !self.bring_back()
            && self.untold.swap(false, Ordering::Relaxed)
    }

    /// The program has not come for a while: it may never read those that there are.
    pub(crate) fn leave(&self) {
        self.left.store(self.count.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_comes_back_for_what_it_has_not_read() {
        let unread = UnreadEvents::default();
        assert!(!unread.bring_back());
        unread.raise();
        unread.raise();
        unread.read();
        assert!(unread.bring_back());
        unread.take_back(1);
        assert!(!unread.bring_back());
    }

    #[test]
    fn one_that_it_does_not_come_for_is_not_counted_on() {
        let unread = UnreadEvents::default();
        unread.raise();
        unread.leave();
        assert!(!unread.bring_back());
        unread.raise();
        assert!(unread.bring_back());
        unread.read();
        assert!(!unread.bring_back());
        /* and nothing is left of it once it was read after all */
        unread.read();
        unread.raise();
        assert!(unread.bring_back());
    }

    #[test]
    fn what_was_put_off_is_due_with_the_last_one() {
        let unread = UnreadEvents::default();
        assert!(!unread.put_off() && !unread.is_due());
        unread.raise();
        unread.raise();
        assert!(unread.put_off() && !unread.is_due());
        unread.read();
        assert!(!unread.is_due());
        unread.read();
        assert!(unread.is_due() && !unread.is_due());
    }

    #[test]
    fn of_several_readers_one_may_sleep() {
        let unread = UnreadEvents::default();
        (0..4).for_each(|_| unread.raise());
        unread.read();
        assert!(unread.bring_back());
        std::thread::scope(|scope| {
            scope.spawn(|| unread.read());
        });
        assert!(!unread.bring_back());
        unread.read();
        assert!(!unread.bring_back());
    }
}
