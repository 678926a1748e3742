//! What the program does in the library, for whoever runs the device to see. Words of atomics, exact enough
//! for a guess.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use starverbs_core::Nanos;

use super::poller::Poller;
use super::unread::UnreadEvents;
use crate::clock;

/// Of the polls that leave the device alone, one in so many looks at the clock.
const UNTIMED: u32 = 4;

/// In each such time one poll says which thread it is of.
const SAME_POLLER: Nanos = 1 << 18;

/// The program's calls.
#[repr(align(64))]
#[derive(Default)]
pub(crate) struct Activity {
    /// Changes with every poll or post
    calls: AtomicU32,
    /// Changes with every look for completions
    looks: AtomicU32,
    /// When the program last ran the device by a poll
    at: AtomicU64,
    /// Who does so
    pub(crate) poller: Poller,
    /// For how many nanoseconds from then on polls leave the device alone
    back_off: AtomicU32,
    /// Polls that did so
    backed_off: AtomicU32,
    /// Nobody called during the last yield of an idle poll
    nobody_called: AtomicBool,
    /// Polls in a row that found the device busy
    misses: AtomicU32,
    /// Completion queues that the program waits for an event of
    awaited: AtomicU32,
    /// Those that came, and that it has not read
    pub(crate) unread: UnreadEvents,
}

impl Activity {
    /// A call of the program.
    #[inline]
    pub(crate) fn note_call(&self) {
        self.calls.store(self.calls().wrapping_add(1), Ordering::Relaxed);
    }

    /// A call of the program that looks for completions.
    #[inline]
    pub(crate) fn note_look(&self) {
        self.looks.store(self.looks().wrapping_add(1), Ordering::Relaxed);
        self.note_call();
    }

    /// Changes with every look for completions.
    #[inline]
    pub(crate) fn looks(&self) -> u32 {
        self.looks.load(Ordering::Relaxed)
    }

    /// Changes with every call.
    #[inline]
    pub(crate) fn calls(&self) -> u32 {
        self.calls.load(Ordering::Relaxed)
    }

    /// When the program last ran the device by a poll.
    #[inline]
    pub(crate) fn polled_at(&self) -> Nanos {
        self.at.load(Ordering::Relaxed)
    }

    /// The program runs the device by a poll at `now`; gives when it did so before. Which thread that is, is
    /// asked now and then.
    #[inline]
    pub(crate) fn note_poll(&self, now: Nanos) -> Nanos {
        let before = self.polled_at();
        if now / SAME_POLLER != before / SAME_POLLER {
            self.poller.note();
        }
        self.at.store(now, Ordering::Relaxed);
        before
    }

    /// Polls leave the device alone for `time` nanoseconds from now on.
    #[inline]
    pub(crate) fn back_off_for(&self, time: u32) {
        self.back_off.store(time, Ordering::Relaxed);
    }

    /// Whether this poll leaves the device alone. Not every one looks at the clock, which takes more than all
    /// else of such a poll.
    #[inline]
    pub(crate) fn backs_off(&self) -> bool {
        let back_off = self.back_off.load(Ordering::Relaxed);
        back_off != 0 && self.still_backs_off(back_off)
    }

    #[inline(never)]
    fn still_backs_off(&self, back_off: u32) -> bool {
        let backed_off = self.backed_off.load(Ordering::Relaxed).wrapping_add(1);
        self.backed_off.store(backed_off, Ordering::Relaxed);
        !backed_off.is_multiple_of(UNTIMED) || clock::now().saturating_sub(self.polled_at()) < back_off.into()
    }

    /// Yields the CPU, and records whether another thread has called meanwhile.
    pub(crate) fn yield_now(&self) {
        let calls = self.calls();
        std::thread::yield_now();
        self.nobody_called.store(self.calls() == calls, Ordering::Relaxed);
    }

    /// Nobody called during the last yield.
    pub(crate) fn nobody_called(&self) -> &AtomicBool {
        &self.nobody_called
    }

    /// A poll found the device busy: lets who runs it have the CPU if that goes on.
    #[cold]
    pub(crate) fn missed(&self) {
        let misses = self.misses.load(Ordering::Relaxed).wrapping_add(1);
        self.misses.store(misses, Ordering::Relaxed);
        if misses.is_multiple_of(256) { std::thread::yield_now() } else { std::hint::spin_loop() }
    }

    /// The program asked a completion queue for an event.
    pub(crate) fn awaits_event(&self) {
        self.awaited.fetch_add(1, Ordering::Relaxed);
    }

    /// Such an event came, or never will.
    pub(crate) fn awaits_no_more(&self) {
        self.awaited.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether it may sleep until an event comes.
    #[inline]
    pub(crate) fn may_sleep(&self) -> bool {
        self.awaited.load(Ordering::Relaxed) != 0 && !self.unread.bring_back()
    }
}
