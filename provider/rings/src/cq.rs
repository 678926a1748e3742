//! The completion ring: CQEs from the card to a program.
//!
//! The card owns the producer index, the program the consumer index (under the ring's poll lock). A slot is a
//! CQE and, in a ring that was asked to keep them, the time at which the card made it.

use core::cell::UnsafeCell;
use core::mem::size_of;

use starverbs_core::env::CqOverrun;
use starverbs_core::{Cqe, Nanos, Qpn};
use starverbs_queues::format::CqeWords;

use crate::memory::ProgramMemory;
use crate::slots::RawSlots;
use crate::spin::{SpinGuard, SpinLock};
use crate::sync::{AtomicBool, AtomicU32, Ordering};
use crate::{IndexPair, OwnLine};

/// Where a slot's stamp is.
const STAMP_AT: usize = size_of::<Cqe>();

/// A completion queue's ring.
pub struct CqRing {
    /// Replaced by [`CqConsumer::resize`] alone, with both sides stopped.
    slots: UnsafeCell<RawSlots>,
    /// Slots have a stamp behind the CQE.
    stamped: bool,
    /// Takes no more completions. Looked at only where it seems full.
    closed: AtomicBool,
    poll: SpinLock<()>,
    /// Index: CQEs made. Written by the card with release after the slot; read by the program with
    /// acquire.
    card: OwnLine<IndexPair>,
    /// Index: CQEs polled. Written by the program under the poll lock with release after it read
    /// the slots; read by the card with acquire before it writes a slot again.
    program: OwnLine<AtomicU32>,
}

// SAFETY: `slots` changes in `resize` only, whose caller holds the poll lock and vouches that the
// card stands still; otherwise the indices order the accesses to each slot.
unsafe impl Sync for CqRing {}

impl CqRing {
    /// A ring for at least `cqe` completions, with a stamp each if `stamped`, in the program's `memory` if it
    /// has its own; `None` if the memory is out of reach.
    pub fn new(cqe: u32, stamped: bool, memory: ProgramMemory) -> Option<CqRing> {
        let stride = if stamped { STAMP_AT + size_of::<Nanos>() } else { STAMP_AT };
        Some(CqRing {
            slots: UnsafeCell::new(RawSlots::new(cqe, stride, memory)?),
            stamped,
            closed: AtomicBool::new(false),
            poll: SpinLock::new(()),
            card: OwnLine(IndexPair::new()),
            program: OwnLine(AtomicU32::new(0)),
        })
    }

    #[inline]
    pub(crate) fn slots(&self) -> &RawSlots {
        // SAFETY: see the `Sync` implementation: nobody replaces the slots while a side is active.
        unsafe { &*self.slots.get() }
    }

    /// Whether completions carry the time at which they were made.
    #[inline]
    pub fn stamped(&self) -> bool {
        self.stamped
    }

    /// Adds a completion, as the card; `stamp` is kept in a stamped ring.
    ///
    /// # Safety
    /// One thread at a time may be the card, and none while [`CqConsumer::resize`] runs.
    ///
    /// # Errors
    /// The ring is full, or was closed.
    #[inline]
    pub unsafe fn push(&self, cqe: &Cqe, stamp: Nanos) -> Result<(), CqOverrun> {
        let slots = self.slots();
        /* relaxed: written by this side alone */
        let tail = self.card.index.load(Ordering::Relaxed);
        if tail.wrapping_sub(self.card.seen.load(Ordering::Relaxed)) >= slots.count() {
            let polled = self.program.load(Ordering::Acquire);
            if tail.wrapping_sub(polled) >= slots.count() || self.closed.load(Ordering::Relaxed) {
                return Err(CqOverrun);
            }
            self.card.seen.store(polled, Ordering::Relaxed);
        }
        let slot = slots.write(tail);
        // SAFETY: the slot is the card's until the index below is stored, and has room for a CQE.
        unsafe { slot.cast::<Cqe>().write(*cqe) };
        if self.stamped {
            // SAFETY: as above; slots of a stamped ring have room for a stamp there, and strides are
            // multiples of 8.
            unsafe { slot.add(STAMP_AT).cast::<Nanos>().write(stamp) };
        }
        self.card.index.store(tail.wrapping_add(1), Ordering::Release);
        Ok(())
    }

    /// The ring takes no more completions, whoever polls: none follows those that were lost. To be called
    /// behind a push that found it full, by the same side.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// Completions waiting, as seen by the card.
    #[inline]
    pub fn waiting(&self) -> u32 {
        self.card.index.load(Ordering::Relaxed).wrapping_sub(self.program.load(Ordering::Relaxed))
    }

    /// Room for at least `cqe` completions, to move to; `None` if the memory is out of reach. No lock is held
    /// while the memory is had.
    pub fn room(&self, cqe: u32) -> Option<CqRoom> {
        let (stride, memory) = {
            let _slots_stay = self.consumer();
            (self.slots().stride(), self.slots().memory().clone())
        };
        RawSlots::new(cqe, stride, memory).map(CqRoom)
    }

    /// Takes the poll lock.
    #[inline]
    pub fn consumer(&self) -> CqConsumer<'_> {
        let guard = self.poll.lock();
        /* relaxed: this index is written under the lock just taken */
        let head = self.program.load(Ordering::Relaxed);
        CqConsumer { ring: self, first: head, head, made: head, _poll: guard }
    }
}

/// The poll lock of a [`CqRing`]; what was read is handed back to the card when it is dropped.
pub struct CqConsumer<'a> {
    ring: &'a CqRing,
    first: u32,
    head: u32,
    /// The card's index, when it was last looked at
    made: u32,
    _poll: SpinGuard<'a, ()>,
}

/// Slots that are not in use.
pub struct CqRoom(RawSlots);

impl CqRoom {
    /// Completions that it has room for.
    pub fn capacity(&self) -> u32 {
        self.0.count()
    }
}

impl CqConsumer<'_> {
    /// The oldest completion not read yet, and its stamp, 0 in a ring without.
    #[inline(always)]
    pub fn take(&mut self) -> Option<(Cqe, Nanos)> {
        let ring = self.ring;
        if self.made == self.head {
            self.made = ring.card.index.load(Ordering::Acquire);
            if self.made == self.head {
                return None;
            }
        }
        /* head < made, so the card wrote a CQE there and will not touch it before the index is stored, when
        this consumer is dropped or used again */
        let slot = ring.slots().read(self.head);
        // SAFETY: see above; any bytes are words.
        let cqe = Cqe::decode(unsafe { slot.cast::<CqeWords>().read() });
        // SAFETY: see above; the card wrote the stamp of a stamped ring.
        let stamp = if ring.stamped { unsafe { slot.add(STAMP_AT).cast::<Nanos>().read() } } else { 0 };
        self.head = self.head.wrapping_add(1);
        Some((cqe, stamp))
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
            /* head <= at < made: a CQE that the card wrote and that is ours now */
            let from = slots.read(at);
            // SAFETY: see above.
            if unsafe { (&raw const (*from.cast::<Cqe>()).qpn).read() } != qpn {
                keep = keep.wrapping_sub(1);
                // SAFETY: at <= keep < made, so the slot is ours too, and was moved before unless it is the
                // same.
                unsafe { slots.write(keep).copy_from(from, slots.stride()) };
            }
        }
        (self.head, self.made) = (keep, made);
    }

    /// Moves what is in the ring to `room`, which takes the old slots; gives whether it fitted. On `false`,
    /// of a closed ring, too, nothing has changed.
    ///
    /// # Safety
    /// The card must stand still: nobody may call [`CqRing::push`] meanwhile. `room` comes from this ring.
    pub unsafe fn resize(&mut self, room: &mut CqRoom) -> bool {
        let made = self.ring.card.index.load(Ordering::Acquire);
        let held = made.wrapping_sub(self.head);
        let stride = self.ring.slots().stride();
        let new = &mut room.0;
        if held > new.count() || self.ring.closed.load(Ordering::Relaxed) {
            return false;
        }
        let old = self.ring.slots();
        for step in 0..held {
            let index = self.head.wrapping_add(step);
            // SAFETY: head <= index < made, so the old slot holds a CQE; the new ring is ours alone.
            unsafe { new.write(index).copy_from_nonoverlapping(old.read(index), stride) };
        }
        self.publish();
        self.ring.card.seen.store(self.head, Ordering::Relaxed);
        // SAFETY: the poll lock is ours and the caller stopped the card, so nobody looks at them.
        unsafe { core::ptr::swap(self.ring.slots.get(), new) };
        true
    }

    #[inline]
    fn publish(&mut self) {
        if self.head != self.first {
            /* release: our reading of the slots comes before the card's writing them again */
            self.ring.program.store(self.head, Ordering::Release);
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
