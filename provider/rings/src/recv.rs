//! The receive ring: where the card finds room for what arrives. Of one QP, or shared (SRQ).
//!
//! A slot is the cookie, the number of SGEs and the SGEs. Programs own the producer index (under the
//! ring's post lock: an SRQ has many posters), the card the consumer index.

use core::mem::size_of;

use starverbs_core::{HeldWqe, NicError, RecvQueue, Sge, TakenWqe};
use starverbs_queues::format::RecvWqe;

use crate::PushError;
use crate::prefetch;
use crate::send::copy_sges;
use crate::spin::SpinGuard;
use crate::sync::{Ordering, fence};
use crate::work::{RecvSize, WorkLayout, WorkRings};

const HEADER: usize = size_of::<RecvWqe>();

/// Bytes of a slot.
pub(crate) fn stride(size: &RecvSize) -> usize {
    HEADER + usize::from(size.max_sge) * size_of::<Sge>()
}

/// The right to post to a receive queue; what was pushed becomes visible to the card when it is dropped.
pub struct RecvProducer<'a> {
    ring: &'a WorkRings,
    first: u32,
    tail: u32,
    /// None where the rings are borrowed exclusively, which is as good.
    _post: Option<SpinGuard<'a, ()>>,
}

impl<'a> RecvProducer<'a> {
    #[inline]
    pub(crate) fn new(ring: &'a WorkRings) -> Self {
        let guard = ring.head().recv_post.lock();
        Self::begin(ring, Some(guard))
    }

    /// Without taking the post lock: nobody else posts to rings that are borrowed exclusively.
    #[inline]
    pub(crate) fn alone(ring: &'a mut WorkRings) -> Self {
        Self::begin(ring, None)
    }

    #[inline]
    fn begin(ring: &'a WorkRings, post: Option<SpinGuard<'a, ()>>) -> Self {
        /* relaxed: this index is written by one poster at a time, who is here */
        let tail = ring.head().program.recv_posted.load(Ordering::Relaxed);
        RecvProducer { ring, first: tail, tail, _post: post }
    }

    /// Adds a WQE.
    ///
    /// # Errors
    /// A full ring, or more SGEs than a slot holds.
    #[inline]
    pub fn push(&mut self, wr_id: u64, sges: &[Sge]) -> Result<(), PushError> {
        let head = self.ring.head();
        if sges.len() > usize::from(head.recv.max_sge) {
            return Err(PushError::TooManySges);
        }
        if self.tail.wrapping_sub(head.taken_seen.load(Ordering::Relaxed)) >= head.recv.slots() {
            /* acquire: the card's copying of the slot comes before our writing it */
            let taken = head.card.taken.load(Ordering::Acquire);
            head.taken_seen.store(taken, Ordering::Relaxed);
            if self.tail.wrapping_sub(taken) >= head.recv.slots() {
                return Err(PushError::Full);
            }
        }
        let slot = self.ring.recv_slot_mut(self.tail);
        // SAFETY: the slot is this producer's alone until the index is published; it has room for
        // the header and `max_sge` SGEs, and strides are multiples of 16.
        unsafe {
            slot.cast::<RecvWqe>().write(RecvWqe { wr_id, num_sge: sges.len() as u32, reserved: 0 });
            copy_sges(slot.add(HEADER).cast(), sges.as_ptr(), sges.len());
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
            self.ring.head().program.recv_posted.store(self.tail, Ordering::Release);
        }
    }
}

/// The card's half of a receive queue. Clones are the same half, under the promise of [`WorkRings::card_rq`].
pub struct CardRq(pub(crate) WorkRings);

impl CardRq {
    /// WQEs that it has room for: a power of two.
    pub fn slots(&self) -> u32 {
        self.0.recv_slots()
    }

    /// Where its rings lie.
    pub fn layout(&self) -> WorkLayout {
        self.0.layout()
    }

    /// WQEs taken so far.
    pub fn taken(&self) -> u32 {
        self.0.head().card.taken.load(Ordering::Relaxed)
    }

    /// Has the WQE at `index` be the next that is taken, of a card that has written nonsense there.
    pub fn go_to(&self, index: u32) {
        let card = &self.0.head().card;
        card.taken.store(index, Ordering::Release);
        card.posted_seen.store(index, Ordering::Relaxed);
    }

    /// Tells the program that a WQE was looked for and not found, so that it rings when it posts one.
    pub fn note_starved(&self) {
        let starved = &self.0.head().card.starved;
        starved.store(starved.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }
}

impl Clone for CardRq {
    fn clone(&self) -> Self {
        CardRq(self.0.share())
    }
}

/// A receive WQE that was returned.
#[derive(Clone, Copy)]
struct ReturnedRecv {
    wr_id: u64,
    /// Index of its first SGE
    first: u32,
    /// How many SGEs
    count: u32,
}

/// Receive WQEs that were returned to their queue: an end of a connection that had them all leaves them to
/// another that takes one by one.
pub(crate) struct Back {
    /// Oldest first
    recvs: Vec<ReturnedRecv>,
    sges: Vec<Sge>,
    next: usize,
}

/// None nearly always.
pub(crate) type Returned = Option<Box<Back>>;

impl Back {
    /// The oldest, without taking it.
    fn first(&self) -> Option<HeldWqe<'_>> {
        let ReturnedRecv { wr_id, first, count } = *self.recvs.get(self.next)?;
        let sges = self.sges.get(first as usize..)?.get(..count as usize)?;
        Some(HeldWqe { wr_id, sges })
    }

    /// `None`: no memory.
    fn add(&mut self, HeldWqe { wr_id, sges }: HeldWqe<'_>) -> Option<()> {
        self.recvs.try_reserve(1).ok()?;
        self.sges.try_reserve(sges.len()).ok()?;
        let (first, count) = (self.sges.len() as u32, sges.len() as u32);
        self.recvs.push(ReturnedRecv { wr_id, first, count });
        self.sges.extend_from_slice(sges);
        Some(())
    }
}

impl CardRq {
    /// The returned ones.
    #[allow(clippy::mut_from_ref)]
    fn returned(&self) -> &mut Returned {
        // SAFETY: the card's halves of a queue are used by one thread at a time (promised at `card_rq`),
        // nobody else reads it, and no caller here keeps the reference.
        unsafe { &mut *self.0.head().returned.get() }
    }

    /// Takes the oldest of those that were returned.
    #[cold]
    fn take_returned(&self, sges: &mut [Sge]) -> Option<TakenWqe> {
        let returned = self.returned();
        let back = returned.as_mut()?;
        let HeldWqe { wr_id, sges: list } = back.first()?;
        let num_sge = list.len().min(sges.len());
        sges.iter_mut().zip(list).for_each(|(to, from)| *to = *from);
        back.next += 1;
        let left = back.recvs.len() - back.next;
        if left == 0 {
            *returned = None;
        }
        self.0.head().back.store(left as u32, Ordering::Relaxed);
        Some(TakenWqe { wr_id, num_sge })
    }
}

impl RecvQueue for CardRq {
    #[inline]
    fn take(&self, sges: &mut [Sge]) -> Option<TakenWqe> {
        let ring = self.0.head();
        if ring.back.load(Ordering::Relaxed) != 0 {
            return self.take_returned(sges);
        }
        let mine = &ring.card;
        /* relaxed: written by this side alone */
        let head = mine.taken.load(Ordering::Relaxed);
        if mine.posted_seen.load(Ordering::Relaxed) == head {
            let mut posted = ring.program.recv_posted.load(Ordering::Acquire);
            if posted == head {
                mine.starved.store(mine.starved.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
                fence(Ordering::SeqCst);
                posted = ring.program.recv_posted.load(Ordering::Acquire);
            }
            mine.posted_seen.store(posted, Ordering::Relaxed);
            if posted == head {
                return None;
            }
        }
        let slot = self.0.recv_slot(head);
        // SAFETY: head < posted, so the program wrote a header and its SGEs there and will not touch
        // them before the index below is stored.
        let taken = unsafe {
            let header = slot.cast::<RecvWqe>().read();
            let num_sge = (header.num_sge as usize).min(sges.len()).min(usize::from(ring.recv.max_sge));
            copy_sges(sges.as_mut_ptr(), slot.add(HEADER).cast(), num_sge);
            TakenWqe { wr_id: header.wr_id, num_sge }
        };
        /* release: the copy comes before the program's writing the slot again */
        mine.taken.store(head.wrapping_add(1), Ordering::Release);
        Some(taken)
    }

    #[inline]
    fn len(&self) -> u32 {
        let ring = self.0.head();
        let posted = ring.program.recv_posted.load(Ordering::Acquire);
        let waiting = posted.wrapping_sub(ring.card.taken.load(Ordering::Relaxed));
        waiting.wrapping_add(ring.back.load(Ordering::Relaxed))
    }

    #[inline]
    fn expect_wqe(&self) {
        prefetch(self.0.recv_slot_at(self.taken()).cast_const());
    }

    #[inline]
    fn max_sge(&self) -> usize {
        usize::from(self.0.max_recv_sge())
    }

    fn put_back(&self, recvs: &mut dyn Iterator<Item = HeldWqe<'_>>) -> Result<(), NicError> {
        let mut back = Back { recvs: Vec::new(), sges: Vec::new(), next: 0 };
        for held in recvs {
            back.add(held).ok_or(NicError::Exhausted)?;
        }
        /* not before: where they come from is not known here */
        let returned = self.returned();
        if let Some(behind) = returned {
            let next = behind.next;
            while let Some(held) = behind.first() {
                if back.add(held).is_none() {
                    behind.next = next;
                    return Err(NicError::Exhausted);
                }
                behind.next += 1;
            }
        }
        let count = back.recvs.len() as u32;
        *returned = (count > 0).then(|| Box::new(back));
        self.0.head().back.store(count, Ordering::Relaxed);
        Ok(())
    }

    fn reset(&self) {
        let ring = self.0.head();
        *self.returned() = None;
        ring.back.store(0, Ordering::Relaxed);
        let posted = ring.program.recv_posted.load(Ordering::Acquire);
        ring.card.posted_seen.store(posted, Ordering::Relaxed);
        ring.card.taken.store(posted, Ordering::Release);
    }
}
