//! Event moderation (ibv_modify_cq(3)): completion queues that raise one event for several completions, or
//! after a while.
//!
//! Owns the queues whose event is held back: their deadlines are in a heap like that of the card's own
//! timers, and the card looks at the earliest. It must not know when an event is due without moderation: `cq`
//! does.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use starverbs_core::Nanos;
use starverbs_core::nic::{TimerId, Timers};
use starverbs_rings::SpinLock;

use crate::cq::CqShared;
use crate::error::{Result, VerbsError};

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

/// The moderated completion queues of a card, and when the events that are held back are due.
pub(crate) struct Moderator {
    /// Earliest deadline; `Nanos::MAX`: none. Changes under the lock.
    next: AtomicU64,
    waiting: SpinLock<Waiting>,
}

#[derive(Default)]
struct Waiting {
    timers: Timers,
    /// By the timer's index
    cqs: Vec<Weak<CqShared>>,
}

impl Moderator {
    pub(crate) fn new() -> Self {
        Moderator { next: AtomicU64::new(Nanos::MAX), waiting: SpinLock::new(Waiting::default()) }
    }

    /// Changes who waits, and updates the earliest deadline.
    fn change<R>(&self, change: impl FnOnce(&mut Waiting) -> R) -> R {
        let mut waiting = self.waiting.lock();
        let result = change(&mut waiting);
        self.next.store(waiting.timers.next().unwrap_or(Nanos::MAX), Ordering::Relaxed);
        result
    }

    /// A queue will wait now and then: takes the memory for it, so that waiting never allocates. ENOMEM.
    pub(crate) fn join(&self, cq: &Arc<CqShared>) -> Result<TimerId> {
        self.change(|waiting| {
            let room = waiting.cqs.try_reserve(1);
            room.map_err(|_| VerbsError::NoMemory("moderated completion queues"))?;
            let timer = waiting.timers.join()?;
            let at = timer.index() as usize;
            waiting.cqs.resize(waiting.cqs.len().max(at + 1), Weak::new());
            waiting.cqs[at] = Arc::downgrade(cq);
            Ok(timer)
        })
    }

    /// A queue has ended.
    pub(crate) fn leave(&self, timer: TimerId) {
        /* its memory goes with no lock held */
        let _cq = self.change(|waiting| {
            waiting.timers.leave(timer);
            std::mem::take(&mut waiting.cqs[timer.index() as usize])
        });
    }

    /// Has a queue raise its event at `due`.
    pub(crate) fn wait(&self, timer: TimerId, due: Nanos) {
        self.change(|waiting| waiting.timers.arm(timer, due, timer.index()));
    }

    /// A queue has raised its event, or is about to end.
    pub(crate) fn forget(&self, timer: TimerId) {
        self.change(|waiting| waiting.timers.disarm(timer));
    }

    /// When the next event is due.
    #[inline]
    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        let next = self.next.load(Ordering::Relaxed);
        (next != Nanos::MAX).then_some(next)
    }

    /// Raises the events that are due; says whether there was one. The card's lock is held.
    #[inline]
    pub(crate) fn run(&self, now: Nanos) -> bool {
        let due = self.next.load(Ordering::Relaxed) <= now;
        if due {
            while let Some(cq) = self.take_due(now) {
                if let Some(cq) = cq.upgrade() {
                    cq.notify_moderated();
                }
            }
        }
        due
    }

    /// One whose time is up.
    fn take_due(&self, now: Nanos) -> Option<Weak<CqShared>> {
        self.change(|waiting| {
            let at = waiting.timers.pop_due(now)?;
            waiting.cqs.get(at as usize).cloned()
        })
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
