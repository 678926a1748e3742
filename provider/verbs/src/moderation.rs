//! Event moderation (ibv_modify_cq(3)): completion queues that tell of several completions at once, or after a while.
//!
//! Owns the queues that have completions to tell of and wait: the card looks at their time as it does at its own
//! timers. It must not know when an event is due without moderation: `cq` does.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use starverbs_core::Nanos;
use starverbs_rings::SpinLock;

use crate::cq::CqShared;

/// `struct ibv_moderate_cq`: what an event waits for, whichever comes first. Nothing: it does not wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moderation {
    /// Completions that make an event; 0: any number, if there is a period
    pub count: u16,
    /// Microseconds after the first of them; 0: as long as the count takes
    pub period: u16,
}

impl Moderation {
    /// Whether an event ever waits.
    pub(crate) fn waits(self) -> bool {
        self.count > 1 || (self.count == 0 && self.period > 0)
    }

    /// As one number, 0 where no event waits.
    pub(crate) fn pack(self) -> u32 {
        if self.waits() { u32::from(self.count) << 16 | u32::from(self.period) } else { 0 }
    }

    pub(crate) fn unpack(packed: u32) -> Self {
        Moderation { count: (packed >> 16) as u16, period: packed as u16 }
    }

    /// How long the first completion waits for others at most; `None`: for ever.
    pub(crate) fn patience(self) -> Option<Nanos> {
        (self.period > 0).then_some(Nanos::from(self.period) * 1000)
    }
}

/// The completion queues of a card whose time runs.
pub(crate) struct Moderator {
    /// Earliest deadline; `Nanos::MAX`: none. Changes under the lock.
    next: AtomicU64,
    waiting: SpinLock<Vec<(Nanos, Weak<CqShared>)>>,
}

impl Moderator {
    pub(crate) fn new() -> Self {
        Moderator { next: AtomicU64::new(Nanos::MAX), waiting: SpinLock::new(Vec::new()) }
    }

    /// Room for so many queues: waiting never allocates.
    pub(crate) fn make_room(&self, queues: usize) {
        let mut waiting = self.waiting.lock();
        let more = queues.saturating_sub(waiting.len());
        waiting.reserve(more);
    }

    /// Has a queue tell at `due`.
    pub(crate) fn wait(&self, due: Nanos, cq: &Arc<CqShared>) {
        let mut waiting = self.waiting.lock();
        waiting.push((due, Arc::downgrade(cq)));
        self.next.fetch_min(due, Ordering::Relaxed);
    }

    /// A queue has told, or ends.
    pub(crate) fn forget(&self, cq: *const CqShared) {
        let mut waiting = self.waiting.lock();
        waiting.retain(|(_, other)| !std::ptr::eq(other.as_ptr(), cq));
        self.note_next(&waiting);
    }

    fn note_next(&self, waiting: &[(Nanos, Weak<CqShared>)]) {
        let next = waiting.iter().map(|(due, _)| *due).min();
        self.next.store(next.unwrap_or(Nanos::MAX), Ordering::Relaxed);
    }

    /// When the next queue is to tell.
    #[inline]
    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        let next = self.next.load(Ordering::Relaxed);
        (next != Nanos::MAX).then_some(next)
    }

    /// Has those tell whose time is up; says whether there was one. The card's lock is held.
    #[inline]
    pub(crate) fn run(&self, now: Nanos) -> bool {
        let due = self.next.load(Ordering::Relaxed) <= now;
        if due {
            while let Some(cq) = self.take_due(now) {
                if let Some(cq) = cq.upgrade() {
                    cq.tell_moderated();
                }
            }
        }
        due
    }

    /// One whose time is up.
    fn take_due(&self, now: Nanos) -> Option<Weak<CqShared>> {
        let mut waiting = self.waiting.lock();
        let found = waiting.iter().position(|(due, _)| *due <= now);
        let cq = found.map(|at| waiting.swap_remove(at).1);
        self.note_next(&waiting);
        cq
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_waits_is_moderated() {
        let of = |count, period| Moderation { count, period };
        for never in [of(0, 0), of(1, 0), of(1, 9)] {
            assert!(!never.waits());
            assert_eq!(never.pack(), 0);
        }
        for waits in [of(2, 0), of(2, 9), of(0, 9), of(u16::MAX, u16::MAX)] {
            assert!(waits.waits());
            assert_eq!(Moderation::unpack(waits.pack()), waits);
        }
        assert_eq!((of(2, 0).patience(), of(0, 9).patience()), (None, Some(9000)));
    }
}
