//! The receive ring: where the card finds room for what arrives. Of one QP, or shared (SRQ).
//!
//! A slot is the cookie, the number of SGEs and the SGEs. Programs own the producer index (under the
//! ring's post lock: an SRQ has many posters), the card the consumer index.

use core::mem::size_of;
use std::sync::Arc;

use starverbs_core::{RecvQueue, Sge};

use crate::slots::Slots;
use crate::spin::{SpinGuard, SpinLock};
use crate::sync::{AtomicBool, Ordering, fence};
use crate::{PushError, Side};

/// Fixed part of a receive WQE.
#[repr(C)]
struct RecvHeader {
    wr_id: u64,
    num_sge: u32,
    _pad: u32,
}

const HEADER: usize = size_of::<RecvHeader>();

/// A receive queue's ring.
pub struct RecvRing {
    slots: Slots,
    max_sge: u16,
    post: SpinLock<()>,
    /// The card looked for a WQE and found none. Set by the card, taken by programs after a post:
    /// a QP in error flushes what is posted late, and hears of it by a doorbell only then.
    hungry: AtomicBool,
    /// Index: WQEs posted. Written by programs under the post lock, with release after the slots;
    /// read by the card with acquire.
    program: Side,
    /// Index: WQEs taken. Written by the card with release after it copied the slot; read by
    /// programs with acquire before they write a slot again.
    card: Side,
}

impl RecvRing {
    /// A ring for at least `max_wr` WQEs of at least `max_sge` SGEs; `None` if the memory is out of
    /// reach.
    pub fn new(max_wr: u32, max_sge: u16) -> Option<Arc<RecvRing>> {
        let stride = HEADER + max_sge as usize * size_of::<Sge>();
        let slots = Slots::new(max_wr, stride)?;
        Some(Arc::new(RecvRing {
            slots,
            max_sge,
            post: SpinLock::new(()),
            hungry: AtomicBool::new(false),
            program: Side::new(),
            card: Side::new(),
        }))
    }

    /// Slots in the ring.
    pub fn slots(&self) -> u32 {
        self.slots.count()
    }

    /// Most SGEs of a WQE.
    pub fn max_sge(&self) -> u16 {
        self.max_sge
    }

    /// Takes the post lock.
    #[inline]
    pub fn producer(&self) -> RecvProducer<'_> {
        let guard = self.post.lock();
        /* relaxed: this index is written under the lock just taken */
        let tail = self.program.index.load(Ordering::Relaxed);
        RecvProducer { ring: self, first: tail, tail, _post: guard }
    }

    /// After posting: whether the card looked in vain since the last such question.
    #[inline]
    pub fn was_hungry(&self) -> bool {
        /* our index before the flag here, the flag before the index in `take`: one side sees the other */
        fence(Ordering::SeqCst);
        self.hungry.load(Ordering::Relaxed) && self.hungry.swap(false, Ordering::Relaxed)
    }

    /// The card's half.
    ///
    /// # Safety
    /// At most one thread at a time may use the halves made of one ring.
    pub unsafe fn card_half(self: &Arc<Self>) -> CardRq {
        CardRq(Arc::clone(self))
    }
}

/// The post lock of a [`RecvRing`]; what was pushed becomes visible to the card when it is dropped.
pub struct RecvProducer<'a> {
    ring: &'a RecvRing,
    first: u32,
    tail: u32,
    _post: SpinGuard<'a, ()>,
}

impl RecvProducer<'_> {
    /// Adds a WQE.
    ///
    /// # Errors
    /// A full ring, or more SGEs than a slot holds.
    #[inline]
    pub fn push(&mut self, wr_id: u64, sges: &[Sge]) -> Result<(), PushError> {
        let ring = self.ring;
        if sges.len() > ring.max_sge as usize {
            return Err(PushError::TooManySges);
        }
        if self.tail.wrapping_sub(ring.program.seen.load(Ordering::Relaxed)) >= ring.slots() {
            /* acquire: the card's copying of the slot comes before our writing it */
            let taken = ring.card.index.load(Ordering::Acquire);
            ring.program.seen.store(taken, Ordering::Relaxed);
            if self.tail.wrapping_sub(taken) >= ring.slots() {
                return Err(PushError::Full);
            }
        }
        let slot = ring.slots.write(self.tail);
        // SAFETY: the slot is this producer's alone until the index is published; it has room for
        // the header and `max_sge` SGEs, and strides are multiples of 16.
        unsafe {
            slot.cast::<RecvHeader>().write(RecvHeader { wr_id, num_sge: sges.len() as u32, _pad: 0 });
            slot.add(HEADER).cast::<Sge>().copy_from_nonoverlapping(sges.as_ptr(), sges.len());
        }
        self.tail = self.tail.wrapping_add(1);
        Ok(())
    }
}

impl Drop for RecvProducer<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.tail != self.first {
            /* release: the slots before the index; the post lock opens only after this */
            self.ring.program.index.store(self.tail, Ordering::Release);
        }
    }
}

/// The card's half of a [`RecvRing`].
pub struct CardRq(Arc<RecvRing>);

impl CardRq {
    /// The ring.
    pub fn ring(&self) -> &RecvRing {
        &self.0
    }
}

impl RecvQueue for CardRq {
    #[inline]
    fn take(&self, sges: &mut [Sge]) -> Option<(u64, usize)> {
        let ring = &*self.0;
        /* relaxed: written by this side alone */
        let head = ring.card.index.load(Ordering::Relaxed);
        if ring.card.seen.load(Ordering::Relaxed) == head {
            let mut posted = ring.program.index.load(Ordering::Acquire);
            if posted == head {
                ring.hungry.store(true, Ordering::Relaxed);
                fence(Ordering::SeqCst);
                posted = ring.program.index.load(Ordering::Acquire);
            }
            ring.card.seen.store(posted, Ordering::Relaxed);
            if posted == head {
                return None;
            }
        }
        let slot = ring.slots.read(head);
        // SAFETY: head < posted, so the program wrote a header and its SGEs there and will not touch
        // them before the index below is stored.
        let (wr_id, count) = unsafe {
            let header = &*slot.cast::<RecvHeader>();
            let count = (header.num_sge as usize).min(sges.len());
            sges.as_mut_ptr().copy_from_nonoverlapping(slot.add(HEADER).cast::<Sge>(), count);
            (header.wr_id, count)
        };
        /* release: the copy comes before the program's writing the slot again */
        ring.card.index.store(head.wrapping_add(1), Ordering::Release);
        Some((wr_id, count))
    }

    #[inline]
    fn len(&self) -> u32 {
        let posted = self.0.program.index.load(Ordering::Acquire);
        posted.wrapping_sub(self.0.card.index.load(Ordering::Relaxed))
    }

    #[inline]
    fn max_sge(&self) -> usize {
        self.0.max_sge as usize
    }

    fn reset(&self) {
        let posted = self.0.program.index.load(Ordering::Acquire);
        self.0.card.seen.store(posted, Ordering::Relaxed);
        self.0.card.index.store(posted, Ordering::Release);
    }
}
