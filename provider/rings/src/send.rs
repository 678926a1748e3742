//! The send ring: WQEs from a program to its card.
//!
//! A slot is a [`SendWqe`] and, behind it, the SGEs or the inline bytes. The program owns
//! the producer index (under the ring's post lock), the card the consumer index.

use core::mem::{offset_of, size_of};

use starverbs_core::env::SendRequest;
use starverbs_core::{AvId, Seg, SendFlags, SendOp, SendQueue, SendWqe, Sge};
use starverbs_queues::BLOCK;
use starverbs_queues::format::blocks;

use crate::PushError;
use crate::prefetch;
use crate::spin::SpinGuard;
use crate::sync::Ordering;
use crate::work::{QueueShape, SendSize, WorkLayout, WorkRings};

const HEADER: usize = BLOCK;
/// Lines before the slots: constants, and the indices of both sides.
const HEAD_LINES: usize = 3;

/// Bytes of a slot: whole cache lines.
pub(crate) fn stride(size: &SendSize) -> usize {
    let body = (usize::from(size.max_sge) * size_of::<Sge>()).max(size.max_inline as usize);
    blocks(body) * BLOCK
}

/// Bytes of a list.
#[inline]
fn length(sges: &[Sge]) -> u32 {
    match sges {
        /* most lists: no loop */
        [one] => one.len,
        all => all.iter().fold(0u32, |sum, sge| sum.saturating_add(sge.len)),
    }
}

/// Copies a list, which is short: member by member, as the compiler makes a call of anything else.
///
/// # Safety
/// `from` can be read for `count`, `to` written, and they do not overlap.
#[inline]
pub(crate) unsafe fn copy_sges(to: *mut Sge, from: *const Sge, count: usize) {
    // SAFETY: the caller's terms.
    let copy = |at| unsafe {
        let (to, from) = (to.add(at), from.add(at));
        (&raw mut (*to).addr).write((*from).addr);
        (&raw mut (*to).len).write((*from).len);
        (&raw mut (*to).lkey).write((*from).lkey);
    };
    /* most lists: no loop */
    if count == 1 { copy(0) } else { (0..count).for_each(copy) }
}

/// Inline bytes that a slot has room for.
#[inline]
pub(crate) fn max_inline(shape: QueueShape) -> u32 {
    u32::from(shape.stride).saturating_sub(HEADER as u32)
}

/// The post lock of a send queue; what was pushed becomes visible to the card when it is dropped.
pub struct SendProducer<'a> {
    ring: &'a WorkRings,
    first: u32,
    tail: u32,
    _post: SpinGuard<'a, ()>,
}

impl<'a> SendProducer<'a> {
    #[inline]
    pub(crate) fn new(ring: &'a WorkRings) -> Self {
        SendProducer::with(ring, ring.head().send_post.lock())
    }

    #[inline]
    fn with(ring: &'a WorkRings, guard: SpinGuard<'a, ()>) -> Self {
        let head = ring.head();
        /* relaxed: this index is written under the lock just taken */
        let tail = head.program.send_posted.load(Ordering::Relaxed);
        SendProducer { ring, first: tail, tail, _post: guard }
    }

    /// Adds a WQE with `sges`; its number of SGEs and its length are filled in.
    ///
    /// # Errors
    /// A full ring, or more SGEs than a slot holds.
    #[inline]
    pub fn push(&mut self, mut wqe: SendWqe, sges: &[Sge]) -> Result<(), PushError> {
        if sges.len() > usize::from(self.ring.max_send_sge()) {
            return Err(PushError::TooManySges);
        }
        wqe.num_sge = sges.len() as u16;
        wqe.length = length(sges);
        let slot = self.slot()?;
        // SAFETY: `slot` is this producer's alone until the index is published; it has room for the
        // header and `max_sge` SGEs and is aligned to 64.
        unsafe {
            slot.cast::<SendWqe>().write(wqe.with_body(size_of_val(sges)));
            copy_sges(slot.add(HEADER).cast(), sges.as_ptr(), sges.len());
        }
        self.tail = self.tail.wrapping_add(1);
        Ok(())
    }

    /// Begins a WQE without data: the methods below fill in the one begun last.
    ///
    /// # Errors
    /// A full ring.
    #[inline]
    pub fn begin(&mut self, mut wqe: SendWqe) -> Result<(), PushError> {
        (wqe.num_sge, wqe.length) = (0, 0);
        let slot = self.slot()?;
        // SAFETY: the slot is this producer's alone and aligned to 64.
        unsafe { slot.cast::<SendWqe>().write(wqe.with_body(0)) };
        self.tail = self.tail.wrapping_add(1);
        Ok(())
    }

    /// Sets where the WQE begun last goes: the numbers of an address vector and a QP, and a Q_Key.
    ///
    /// # Errors
    /// No WQE was begun.
    #[inline]
    pub fn set_address(&mut self, av: AvId, remote_qpn: u32, qkey: u32) -> Result<(), PushError> {
        let wqe = self.last()?;
        // SAFETY: as in `last`.
        unsafe {
            (&raw mut (*wqe).av).write(av);
            (&raw mut (*wqe).remote_qpn).write(remote_qpn);
            (&raw mut (*wqe).qkey).write(qkey);
        }
        Ok(())
    }

    /// Sets for which SRQ the WQE begun last is.
    ///
    /// # Errors
    /// No WQE was begun.
    #[inline]
    pub fn set_srqn(&mut self, srqn: u32) -> Result<(), PushError> {
        let wqe = self.last()?;
        // SAFETY: as in `last`.
        unsafe { (&raw mut (*wqe).remote_qpn).write(srqn) };
        Ok(())
    }

    /// The header of the last WQE: it stands in a slot that is this producer's alone until the index is
    /// published. There is no reference to it, as a program may write there all the same.
    #[inline]
    fn last(&self) -> Result<*mut SendWqe, PushError> {
        Ok(self.last_slot().ok_or(PushError::NotBegun)?.cast())
    }

    /// The data of the last WQE is `length` bytes, of so many SGEs or `inline`, for which the slot has `body`
    /// bytes.
    #[inline]
    fn set_body(
        &mut self,
        num_sge: u16,
        inline: SendFlags,
        length: u32,
        body: usize,
    ) -> Result<(), PushError> {
        let wqe = self.last()?;
        // SAFETY: as in `last`; all bits are flags.
        unsafe {
            let flags = &raw mut (*wqe).flags;
            let others = flags.read().difference(SendFlags::INLINE);
            flags.write(others | inline);
            (&raw mut (*wqe).num_sge).write(num_sge);
            (&raw mut (*wqe).length).write(length);
            (&raw mut (*wqe).blocks).write(blocks(body) as u16);
        }
        Ok(())
    }

    /// Gives the last WQE `sges`, in place of any data it had.
    ///
    /// # Errors
    /// No WQE was begun, or it has room for fewer SGEs.
    #[inline]
    pub fn set_sges(&mut self, sges: &[Sge]) -> Result<(), PushError> {
        if sges.len() > usize::from(self.ring.max_send_sge()) {
            return Err(PushError::TooManySges);
        }
        let slot = self.last_slot().ok_or(PushError::NotBegun)?;
        // SAFETY: as in `push`.
        unsafe { copy_sges(slot.add(HEADER).cast(), sges.as_ptr(), sges.len()) };
        self.set_body(sges.len() as u16, SendFlags::empty(), length(sges), size_of_val(sges))
    }

    /// Gives the last WQE the bytes of `pieces`, in place of any data it had.
    ///
    /// # Safety
    /// Each piece with a length other than 0 must be readable memory.
    ///
    /// # Errors
    /// No WQE was begun, or it has room for fewer bytes.
    #[inline]
    pub unsafe fn set_inline(
        &mut self,
        pieces: impl Iterator<Item = *const [u8]> + Clone,
    ) -> Result<(), PushError> {
        let length = pieces.clone().fold(0usize, |sum, piece| sum.saturating_add(piece.len()));
        if length > self.ring.max_inline() as usize {
            return Err(PushError::InlineTooLong);
        }
        let slot = self.last_slot().ok_or(PushError::NotBegun)?;
        let mut at = HEADER;
        for piece in pieces.filter(|piece| !piece.is_empty()) {
            // SAFETY: the caller vouches for the piece; the sum of the lengths was checked against
            // the slot, which is this producer's alone.
            unsafe { slot.add(at).copy_from_nonoverlapping(piece.cast(), piece.len()) };
            at += piece.len();
        }
        self.set_body(0, SendFlags::INLINE, length as u32, length)
    }

    /// Makes what was pushed or begun visible to the card now, and gives how many WQEs those are.
    #[inline]
    pub fn publish(&mut self) -> u32 {
        let pushed = self.pushed();
        if pushed != 0 {
            /* release: the slots before the index; the post lock opens only after this */
            self.ring.head().program.send_posted.store(self.tail, Ordering::Release);
            self.first = self.tail;
        }
        pushed
    }

    /// Where the next WQE will lie, for [`prefetch`](crate::prefetch()).
    #[inline]
    pub fn next_slot(&self) -> *const u8 {
        self.ring.send_slot_at(self.tail)
    }

    /// How long the last WQE is that was pushed or begun and not published, bytes of payload.
    #[inline]
    pub fn last_length(&self) -> Option<u32> {
        // SAFETY: the slot has a header, and is this producer's alone.
        self.last_slot().map(|slot| unsafe { (&raw const (*slot.cast::<SendWqe>()).length).read() })
    }

    /// Forgets what was pushed or begun since the lock was taken or something published.
    #[inline]
    pub fn abort(&mut self) {
        self.tail = self.first;
    }

    #[inline]
    fn last_slot(&self) -> Option<*mut u8> {
        (self.tail != self.first).then(|| self.ring.send_slot_mut(self.tail.wrapping_sub(1)))
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
        if length > u64::from(self.ring.max_inline()) {
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
        unsafe { slot.cast::<SendWqe>().write(wqe.with_body(length as usize)) };
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
        let head = self.ring.head();
        if self.tail.wrapping_sub(head.released_seen.load(Ordering::Relaxed)) >= head.send.slots() {
            /* acquire: the card's last look at the slot comes before our writing it */
            let released = head.card.released.load(Ordering::Acquire);
            head.released_seen.store(released, Ordering::Relaxed);
            if self.tail.wrapping_sub(released) >= head.send.slots() {
                return Err(PushError::Full);
            }
        }
        Ok(self.ring.send_slot_mut(self.tail))
    }
}

impl Drop for SendProducer<'_> {
    #[inline]
    fn drop(&mut self) {
        self.publish();
    }
}

/// Where the slots of a send queue lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SendMemory {
    /// Their first byte
    pub addr: u64,
    /// Their bytes
    pub len: u64,
}

/// The card's half of a send queue. Clones are the same half, under the promise of [`WorkRings::card_sq`].
pub struct CardSq(pub(crate) WorkRings);

impl CardSq {
    /// Where its slots lie. Inline bytes are in there.
    pub fn memory(&self) -> SendMemory {
        let (first, bytes) = self.0.send_slots_at();
        SendMemory { addr: first as u64, len: bytes as u64 }
    }

    /// Where its rings lie.
    pub fn layout(&self) -> WorkLayout {
        self.0.layout()
    }

    /// WQEs whose slots may be written again.
    pub fn released(&self) -> u32 {
        self.0.head().card.released.load(Ordering::Acquire)
    }

    /// Inline bytes that a slot has room for.
    pub fn max_inline(&self) -> u32 {
        self.0.max_inline()
    }

    /// What the WQE at `index` names at the peer.
    #[inline]
    pub fn remote(&self, index: u32) -> SendRemote {
        let slot = self.0.send_slot(index).cast::<SendWqe>();
        // SAFETY: as in `wqe`.
        unsafe {
            SendRemote {
                addr: (&raw const (*slot).remote_addr).read(),
                rkey: (&raw const (*slot).rkey).read(),
                imm: (&raw const (*slot).imm).read(),
            }
        }
    }
}

/// What a WQE names at the peer.
#[derive(Clone, Copy, Debug)]
pub struct SendRemote {
    /// Address there
    pub addr: u64,
    /// Key of the memory there
    pub rkey: u32,
    /// Immediate data, or the key to invalidate, as the WQE has it
    pub imm: u32,
}

impl Clone for CardSq {
    fn clone(&self) -> Self {
        CardSq(self.0.share())
    }
}

impl SendQueue for CardSq {
    #[inline]
    fn slots(&self) -> u32 {
        self.0.send_slots()
    }

    #[inline]
    fn posted(&self) -> u32 {
        self.0.head().program.send_posted.load(Ordering::Acquire)
    }

    #[inline]
    fn wqe(&self, index: u32) -> SendWqe {
        let slot = self.0.send_slot(index).cast::<SendWqe>();
        /* field by field, as it was written: a CPU forwards no store to a load that is wider */
        macro_rules! field {
            ($name:ident) => {
                // SAFETY: the slot lies inside the ring. released <= index < posted (promised at `card_sq`),
                // so the program wrote a whole header there and will not touch it before it is released.
                // Any bytes are a number, or flags.
                unsafe { (&raw const (*slot).$name).read() }
            };
        }
        SendWqe {
            wr_id: field!(wr_id),
            remote_addr: field!(remote_addr),
            compare_add: field!(compare_add),
            swap: field!(swap),
            rkey: field!(rkey),
            imm: field!(imm),
            length: field!(length),
            remote_qpn: field!(remote_qpn),
            qkey: field!(qkey),
            av: field!(av),
            op: self.op(index),
            flags: field!(flags),
            num_sge: field!(num_sge),
            blocks: field!(blocks),
            reserved: field!(reserved),
        }
    }

    #[inline(always)]
    fn op(&self, index: u32) -> SendOp {
        // SAFETY: as in `wqe`.
        SendOp::decode(unsafe { self.0.send_slot(index).add(offset_of!(SendWqe, op)).read() })
    }

    #[inline]
    fn request(&self, index: u32) -> SendRequest {
        let slot = self.0.send_slot(index).cast::<SendWqe>();
        // SAFETY: as in `wqe`.
        unsafe {
            SendRequest {
                op: self.op(index),
                flags: (&raw const (*slot).flags).read(),
                length: (&raw const (*slot).length).read(),
            }
        }
    }

    #[inline]
    fn imm(&self, index: u32) -> u32 {
        let slot = self.0.send_slot(index).cast::<SendWqe>();
        // SAFETY: as in `wqe`.
        unsafe { (&raw const (*slot).imm).read() }
    }

    #[inline]
    fn wr_id(&self, index: u32) -> u64 {
        let slot = self.0.send_slot(index).cast::<SendWqe>();
        // SAFETY: as in `wqe`.
        unsafe { (&raw const (*slot).wr_id).read() }
    }

    #[inline]
    fn sges(&self, index: u32) -> impl Iterator<Item = Sge> + '_ {
        let slot = self.0.send_slot(index);
        // SAFETY: as in `wqe`.
        let num_sge = unsafe { (&raw const (*slot.cast::<SendWqe>()).num_sge).read() };
        let count = usize::from(num_sge.min(self.0.max_send_sge()));
        // SAFETY: the slot has room for so many behind the header, and any bytes there are SGEs.
        (0..count).map(move |at| unsafe { slot.add(HEADER).cast::<Sge>().add(at).read() })
    }

    #[inline]
    fn inline(&self, index: u32) -> Seg {
        let slot = self.0.send_slot(index);
        // SAFETY: as in `wqe`; the body lies inside the slot.
        let (body, length) =
            unsafe { (slot.add(HEADER), (&raw const (*slot.cast::<SendWqe>()).length).read()) };
        Seg { addr: body as u64, len: length.min(self.0.max_inline()) }
    }

    #[inline]
    fn release(&self, index: u32) {
        self.0.head().card.released.store(index, Ordering::Release);
    }

    #[inline]
    fn expect(&self) {
        let first = self.0.post_lines();
        (0..HEAD_LINES).for_each(|line| prefetch(first.wrapping_add(line * BLOCK)));
    }

    #[inline]
    fn expect_wqe(&self, index: u32) {
        prefetch(self.0.send_slot_at(index).cast_const());
    }

    fn reset(&self) {
        self.release(self.posted());
    }

    #[cold]
    fn post_own(&self, wqe: SendWqe, sges: &[Sge]) -> bool {
        /* a program may hold the lock for as long as it likes: between ibv_wr_start and ibv_wr_complete */
        let guard = self.0.head().send_post.try_lock();
        guard.is_some_and(|guard| SendProducer::with(&self.0, guard).push(wqe, sges).is_ok())
    }
}
