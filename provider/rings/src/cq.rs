//! The completion ring: CQEs from the card to a program.
//!
//! The card owns the producer index, the program the consumer index (under the ring's poll lock).

use core::cell::UnsafeCell;
use core::mem::size_of;

use starverbs_core::env::CqOverrun;
use starverbs_core::{Cqe, Qpn};

use crate::slots::Slots;
use crate::spin::{SpinGuard, SpinLock};
use crate::sync::Ordering;
use crate::{Line, Side};

/// A completion queue's ring.
pub struct CqRing {
    /// Replaced by [`CqConsumer::resize`] alone, with both sides stopped.
    slots: UnsafeCell<Slots>,
    poll: SpinLock<()>,
    /// Index: CQEs made. Written by the card with release after the slot; read by the program with
    /// acquire.
    card: Line<Side>,
    /// Index: CQEs polled. Written by the program under the poll lock with release after it read
    /// the slots; read by the card with acquire before it writes a slot again.
    program: Line<Side>,
}

// SAFETY: `slots` changes in `resize` only, whose caller holds the poll lock and vouches that the
// card stands still; otherwise the indices order the accesses to each slot.
unsafe impl Sync for CqRing {}

impl CqRing {
    /// A ring for at least `cqe` completions; `None` if the memory is out of reach.
    pub fn new(cqe: u32) -> Option<CqRing> {
        Some(CqRing {
            slots: UnsafeCell::new(Slots::new(cqe, size_of::<Cqe>())?),
            poll: SpinLock::new(()),
            card: Line(Side::new()),
            program: Line(Side::new()),
        })
    }

    #[inline]
    fn slots(&self) -> &Slots {
        // SAFETY: see the `Sync` implementation: nobody replaces the slots while a side is active.
        unsafe { &*self.slots.get() }
    }

    /// Adds a completion, as the card.
    ///
    /// # Safety
    /// One thread at a time may be the card, and none while [`CqConsumer::resize`] runs.
    ///
    /// # Errors
    /// The ring is full.
    #[inline]
    pub unsafe fn push(&self, cqe: &Cqe) -> Result<(), CqOverrun> {
        let slots = self.slots();
        /* relaxed: written by this side alone */
        let tail = self.card.index.load(Ordering::Relaxed);
        if tail.wrapping_sub(self.card.seen.load(Ordering::Relaxed)) >= slots.count() {
            let polled = self.program.index.load(Ordering::Acquire);
            self.card.seen.store(polled, Ordering::Relaxed);
            if tail.wrapping_sub(polled) >= slots.count() {
                return Err(CqOverrun);
            }
        }
        // SAFETY: the slot is the card's until the index below is stored, and has room for a CQE.
        unsafe { slots.write(tail).cast::<Cqe>().write(*cqe) };
        self.card.index.store(tail.wrapping_add(1), Ordering::Release);
        Ok(())
    }

    /// Completions waiting, as seen by the card.
    #[inline]
    pub fn waiting(&self) -> u32 {
        self.card.index.load(Ordering::Relaxed).wrapping_sub(self.program.index.load(Ordering::Relaxed))
    }

    /// Takes the poll lock.
    #[inline]
    pub fn consumer(&self) -> CqConsumer<'_> {
        let guard = self.poll.lock();
        /* relaxed: this index is written under the lock just taken */
        let head = self.program.index.load(Ordering::Relaxed);
        CqConsumer { ring: self, first: head, head, _poll: guard }
    }
}

/// The poll lock of a [`CqRing`]; what was read is handed back to the card when it is dropped.
pub struct CqConsumer<'a> {
    ring: &'a CqRing,
    first: u32,
    head: u32,
    _poll: SpinGuard<'a, ()>,
}

impl CqConsumer<'_> {
    /// The oldest completion not read yet.
    #[inline]
    pub fn take(&mut self) -> Option<&Cqe> {
        let ring = self.ring;
        if ring.program.seen.load(Ordering::Relaxed) == self.head {
            let made = ring.card.index.load(Ordering::Acquire);
            ring.program.seen.store(made, Ordering::Relaxed);
            if made == self.head {
                return None;
            }
        }
        // SAFETY: head < made, so the card wrote a CQE there and will not touch it before the index
        // is stored, when this consumer is dropped or used again.
        let cqe = unsafe { &*ring.slots().read(self.head).cast::<Cqe>() };
        self.head = self.head.wrapping_add(1);
        Some(cqe)
    }

    /// Completions the ring holds.
    pub fn capacity(&self) -> u32 {
        self.ring.slots().count()
    }

    /// Forgets the completions of `qpn`. The consumer owns all slots between its index and the
    /// card's, so it moves what stays towards the newer end; the card may push meanwhile.
    pub fn purge(&mut self, qpn: Qpn) {
        let slots = self.ring.slots();
        let made = self.ring.card.index.load(Ordering::Acquire);
        let mut keep = made;
        let mut at = made;
        while at != self.head {
            at = at.wrapping_sub(1);
            // SAFETY: head <= at < made: a CQE that the card wrote and that is ours now.
            let cqe = unsafe { *slots.read(at).cast::<Cqe>() };
            if cqe.qpn != qpn {
                keep = keep.wrapping_sub(1);
                // SAFETY: at <= keep < made, so the slot is ours too, and its CQE was copied before.
                unsafe { slots.write(keep).cast::<Cqe>().write(cqe) };
            }
        }
        self.head = keep;
        self.ring.program.seen.store(made, Ordering::Relaxed);
    }

    /// Moves what is in the ring to one for at least `cqe` completions; says whether it fitted and
    /// the memory could be had. On `false` nothing has changed.
    ///
    /// # Safety
    /// The card must stand still: nobody may call [`CqRing::push`] meanwhile.
    pub unsafe fn resize(&mut self, cqe: u32) -> bool {
        let made = self.ring.card.index.load(Ordering::Acquire);
        let held = made.wrapping_sub(self.head);
        let Some(new) = Slots::new(cqe, size_of::<Cqe>()) else { return false };
        if held > new.count() {
            return false;
        }
        let old = self.ring.slots();
        for step in 0..held {
            let index = self.head.wrapping_add(step);
            // SAFETY: head <= index < made, so the old slot holds a CQE; the new ring is ours alone.
            unsafe { new.write(index).cast::<Cqe>().write(*old.read(index).cast::<Cqe>()) };
        }
        self.publish();
        self.ring.card.seen.store(self.head, Ordering::Relaxed);
        // SAFETY: the poll lock is ours and the caller stopped the card, so nobody looks at them.
        unsafe { *self.ring.slots.get() = new };
        true
    }

    #[inline]
    fn publish(&mut self) {
        if self.head != self.first {
            /* release: our reading of the slots comes before the card's writing them again */
            self.ring.program.index.store(self.head, Ordering::Release);
            self.first = self.head;
        }
    }
}

impl Drop for CqConsumer<'_> {
    #[inline]
    fn drop(&mut self) {
        self.publish();
    }
}
