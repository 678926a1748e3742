//! The send ring: WQEs from a program to its card.
//!
//! A slot is the fixed [`SendWqe`] and, behind it, the SGEs or the inline bytes. The program owns
//! the producer index (under the ring's post lock), the card the consumer index.

use core::mem::size_of;
use core::slice;
use std::sync::Arc;

use starverbs_core::{Seg, SendFlags, SendQueue, SendWqe, Sge};

use crate::slots::Slots;
use crate::spin::{SpinGuard, SpinLock};
use crate::sync::Ordering;
use crate::{PushError, Side};

const HEADER: usize = size_of::<SendWqe>();

/// A send queue's ring.
pub struct SendRing {
    slots: Slots,
    max_sge: u16,
    max_inline: u32,
    post: SpinLock<()>,
    /// Index: WQEs posted. Written by the program under the post lock, with release after the
    /// slots; read by the card with acquire.
    program: Side,
    /// Index: WQEs done. Written by the card with release when it needs the slots no more; read by
    /// the program with acquire before it writes a slot again.
    card: Side,
}

impl SendRing {
    /// A ring for at least `max_wr` WQEs of at least `max_sge` SGEs or `max_inline` inline bytes;
    /// `None` if the memory is out of reach.
    pub fn new(max_wr: u32, max_sge: u16, max_inline: u32) -> Option<Arc<SendRing>> {
        let body = (max_sge as usize * size_of::<Sge>()).max(max_inline as usize);
        let stride = (HEADER + body).next_multiple_of(64);
        let slots = Slots::new(max_wr, stride)?;
        Some(Arc::new(SendRing {
            slots,
            max_sge,
            max_inline: (stride - HEADER) as u32,
            post: SpinLock::new(()),
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

    /// Most inline bytes of a WQE.
    pub fn max_inline(&self) -> u32 {
        self.max_inline
    }

    /// Takes the post lock.
    #[inline]
    pub fn producer(&self) -> SendProducer<'_> {
        let guard = self.post.lock();
        /* relaxed: this index is written under the lock just taken */
        let tail = self.program.index.load(Ordering::Relaxed);
        SendProducer { ring: self, first: tail, tail, _post: guard }
    }

    /// The card's half.
    ///
    /// # Safety
    /// At most one thread at a time may use the halves made of one ring, and it looks at WQEs in
    /// released..posted only.
    pub unsafe fn card_half(self: &Arc<Self>) -> CardSq {
        CardSq(Arc::clone(self))
    }
}

/// The post lock of a [`SendRing`]; what was pushed becomes visible to the card when it is dropped.
pub struct SendProducer<'a> {
    ring: &'a SendRing,
    first: u32,
    tail: u32,
    _post: SpinGuard<'a, ()>,
}

impl SendProducer<'_> {
    /// Adds a WQE with `sges`; its number of SGEs and its length are filled in.
    ///
    /// # Errors
    /// A full ring, or more SGEs than a slot holds.
    #[inline]
    pub fn push(&mut self, mut wqe: SendWqe, sges: &[Sge]) -> Result<(), PushError> {
        if sges.len() > self.ring.max_sge as usize {
            return Err(PushError::TooManySges);
        }
        wqe.num_sge = sges.len() as u16;
        wqe.length = sges.iter().fold(0u32, |sum, sge| sum.saturating_add(sge.len));
        let slot = self.slot()?;
        // SAFETY: `slot` is this producer's alone until the index is published; it has room for the
        // header and `max_sge` SGEs and is aligned to 64.
        unsafe {
            slot.cast::<SendWqe>().write(wqe);
            slot.add(HEADER).cast::<Sge>().copy_from_nonoverlapping(sges.as_ptr(), sges.len());
        }
        self.tail = self.tail.wrapping_add(1);
        Ok(())
    }

    /// Adds a WQE that carries the bytes of `pieces` itself; its flags and length are filled in.
    ///
    /// # Safety
    /// Each piece with a length other than 0 must be readable memory.
    ///
    /// # Errors
    /// A full ring, or more bytes than a slot holds.
    #[inline]
    pub unsafe fn push_inline(&mut self, mut wqe: SendWqe, pieces: &[Sge]) -> Result<(), PushError> {
        let length = pieces.iter().fold(0u64, |sum, piece| sum + u64::from(piece.len));
        if length > u64::from(self.ring.max_inline) {
            return Err(PushError::InlineTooLong);
        }
        wqe.num_sge = 0;
        wqe.length = length as u32;
        wqe.flags |= SendFlags::INLINE;
        let slot = self.slot()?;
        let mut at = HEADER;
        for piece in pieces.iter().filter(|piece| piece.len > 0) {
            // SAFETY: the caller vouches for the piece; the sum of the lengths was checked against
            // the slot, which is this producer's alone.
            unsafe {
                slot.add(at).copy_from_nonoverlapping(piece.addr as *const u8, piece.len as usize);
            }
            at += piece.len as usize;
        }
        // SAFETY: the slot is this producer's alone and aligned to 64.
        unsafe { slot.cast::<SendWqe>().write(wqe) };
        self.tail = self.tail.wrapping_add(1);
        Ok(())
    }

    /// WQEs pushed with this lock held.
    #[inline]
    pub fn pushed(&self) -> u32 {
        self.tail.wrapping_sub(self.first)
    }

    #[inline]
    fn slot(&self) -> Result<*mut u8, PushError> {
        let ring = self.ring;
        if self.tail.wrapping_sub(ring.program.seen.load(Ordering::Relaxed)) >= ring.slots() {
            /* acquire: the card's last look at the slot comes before our writing it */
            let released = ring.card.index.load(Ordering::Acquire);
            ring.program.seen.store(released, Ordering::Relaxed);
            if self.tail.wrapping_sub(released) >= ring.slots() {
                return Err(PushError::Full);
            }
        }
        Ok(ring.slots.write(self.tail))
    }
}

impl Drop for SendProducer<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.tail != self.first {
            /* release: the slots before the index; the post lock opens only after this */
            self.ring.program.index.store(self.tail, Ordering::Release);
        }
    }
}

/// The card's half of a [`SendRing`].
pub struct CardSq(Arc<SendRing>);

impl CardSq {
    /// The ring.
    pub fn ring(&self) -> &SendRing {
        &self.0
    }
}

impl SendQueue for CardSq {
    #[inline]
    fn slots(&self) -> u32 {
        self.0.slots()
    }

    #[inline]
    fn posted(&self) -> u32 {
        self.0.program.index.load(Ordering::Acquire)
    }

    #[inline]
    fn wqe(&self, index: u32) -> &SendWqe {
        // SAFETY: released <= index < posted (promised at `card_half`), so the program wrote a
        // whole header there and will not touch it before it is released.
        unsafe { &*self.0.slots.read(index).cast::<SendWqe>() }
    }

    #[inline]
    fn sges(&self, index: u32) -> &[Sge] {
        let count = self.wqe(index).num_sge.min(self.0.max_sge) as usize;
        // SAFETY: as in `wqe`; the program wrote `num_sge` SGEs behind the header.
        unsafe { slice::from_raw_parts(self.0.slots.read(index).add(HEADER).cast::<Sge>(), count) }
    }

    #[inline]
    fn inline(&self, index: u32) -> Seg {
        // SAFETY: the body lies inside the slot.
        let body = unsafe { self.0.slots.read(index).add(HEADER) };
        Seg { addr: body as u64, len: self.wqe(index).length.min(self.0.max_inline) }
    }

    #[inline]
    fn release(&self, index: u32) {
        self.0.card.index.store(index, Ordering::Release);
    }

    fn reset(&self) {
        self.release(self.posted());
    }
}
