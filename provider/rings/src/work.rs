//! The work queues of a QP in one piece of memory, or the receive queue of an SRQ.
//!
//! | line | holds | written by | a device sees it |
//! |------|-------|------------|---|
//! | 0    | constants, the program's locks, what it knows of the card's indices, pointers | this process | |
//! | 1    | the program's indices: [`ProgramIndex`] | program | yes |
//! | 2    | the card's indices: [`CardIndex`], and behind them what the card alone looks at | card | yes |
//! | 3..  | slots of the receive queue, then slots of the send queue | program | yes |
//!
//! Two queues share their lines, because one program posts to both and one card serves both: an idle QP
//! has three lines beside its slots. Owns the memory and its layout; `send` and `recv` have the protocols.
//!
//! A device may write anything into all of line 2, so nothing there is a pointer, and no index from there is
//! used without a mask. It is told of lines 1 and 2 and of the slots alone: line 0 it never writes.
//!
//! [`ProgramIndex`]: starverbs_queues::format::ProgramIndex
//! [`CardIndex`]: starverbs_queues::format::CardIndex

use core::cell::UnsafeCell;
use core::mem::size_of;
use core::ptr::{self, NonNull};
use std::alloc::Layout;
use std::sync::Arc;

use crate::OwnLine;
use crate::memory::{self, Memory, ProgramMemory, Resource};
use crate::recv::{self, CardRq, RecvProducer, Returned};
use crate::send::{self, CardSq, SendProducer};
use crate::spin::SpinLock;
use crate::sync::{AtomicU32, LoomCells, Ordering, fence};

/// Bytes of a cache line.
const LINE: usize = 64;
/// Alignment that malloc gives. For more it leaves holes, larger than the bytes that aligning here costs.
const MALLOC_ALIGN: usize = 16;

/// Size of a send queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SendSize {
    /// WQEs, at least
    pub max_wr: u32,
    /// SGEs of a WQE, at least
    pub max_sge: u16,
    /// Inline bytes of a WQE, at least
    pub max_inline: u32,
}

/// Size of a receive queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecvSize {
    /// WQEs, at least
    pub max_wr: u32,
    /// SGEs of a WQE
    pub max_sge: u16,
}

/// The rings of a QP or SRQ. The halves that are made of them keep the memory.
pub struct WorkRings {
    head: NonNull<QueueHead>,
}

/// Lines 0 to 2.
#[repr(C)]
pub(crate) struct QueueHead {
    users: AtomicU32,
    /// Where the send queue's slots begin, bytes from the head.
    send_at: u32,
    pub(crate) send: QueueShape,
    pub(crate) recv: QueueShape,
    pub(crate) send_post: SpinLock<()>,
    pub(crate) recv_post: SpinLock<()>,
    /// Bytes of the allocation in front of the head.
    lead: u8,
    /// What the program last saw of the card's indices, under the post locks.
    pub(crate) released_seen: AtomicU32,
    pub(crate) taken_seen: AtomicU32,
    /// What of the card's `starved` a poster has answered.
    starved_seen: AtomicU32,
    /// Receive WQEs that were returned, and wait in front of the ring's: changed by the card in software,
    /// and here as a board may write on the card's line what it likes.
    pub(crate) back: AtomicU32,
    /// Those. Only the card's half looks at what they are.
    pub(crate) returned: UnsafeCell<Returned>,
    /// Whose memory this is; boxed, so that the line has room.
    memory: Option<Box<Arc<dyn Memory>>>,
    pub(crate) program: OwnLine<ProgramSide>,
    pub(crate) card: OwnLine<CardSide>,
    send_watch: LoomCells,
    recv_watch: LoomCells,
}

/// WQEs posted. Written by the program under the post lock, with release after the slots; read by the card
/// with acquire.
#[repr(C)]
pub(crate) struct ProgramSide {
    pub(crate) send_posted: AtomicU32,
    pub(crate) recv_posted: AtomicU32,
}

/// The card's indices: written by the card with release when it needs the slots no more; read by the
/// program with acquire before it writes a slot again.
#[repr(C)]
pub(crate) struct CardSide {
    /// Send WQEs done.
    pub(crate) released: AtomicU32,
    /// Receive WQEs taken.
    pub(crate) taken: AtomicU32,
    /// How often the card looked for a receive WQE and found none. Programs look at it after a post: a QP in
    /// error flushes what is posted late, and gets a doorbell for it only then.
    pub(crate) starved: AtomicU32,
    /// From here on it is the card's own. What it last saw of `recv_posted`.
    pub(crate) posted_seen: AtomicU32,
}

#[cfg(not(loom))]
const _: () = {
    use core::mem::offset_of;
    use starverbs_queues::format::{CardIndex, ProgramIndex};
    assert!(offset_of!(QueueHead, program) == LINE && offset_of!(QueueHead, card) == 2 * LINE);
    assert!(size_of::<QueueHead>() == 3 * LINE);
    assert!(offset_of!(ProgramSide, send_posted) == offset_of!(ProgramIndex, send_posted));
    assert!(offset_of!(ProgramSide, recv_posted) == offset_of!(ProgramIndex, recv_posted));
    assert!(offset_of!(CardSide, released) == offset_of!(CardIndex, send_released));
    assert!(offset_of!(CardSide, taken) == offset_of!(CardIndex, recv_taken));
    assert!(offset_of!(CardSide, starved) == offset_of!(CardIndex, recv_starved));
    assert!(offset_of!(CardSide, posted_seen) >= offset_of!(CardIndex, own));
    /* a device may write all of its line: what is freed, and what leads there, is not on it */
    assert!(offset_of!(QueueHead, back) < LINE && offset_of!(QueueHead, returned) < LINE);
    assert!(offset_of!(QueueHead, memory) < LINE);
};

/// Slots of one queue.
#[derive(Clone, Copy)]
pub(crate) struct QueueShape {
    /// How many less 1, as they are a power of two; of no slots, all bits
    mask: u32,
    /// Bytes of each
    pub(crate) stride: u16,
    /// Most SGEs of a WQE
    pub(crate) max_sge: u16,
}

impl QueueShape {
    const NONE: QueueShape = QueueShape { mask: u32::MAX, stride: 0, max_sge: 0 };

    fn new(max_wr: u32, stride: usize, max_sge: u16) -> Option<QueueShape> {
        let slots = max_wr.max(1).checked_next_power_of_two()?;
        Some(QueueShape { mask: slots - 1, stride: u16::try_from(stride).ok()?, max_sge })
    }

    /// How many; 0 where there is no such queue.
    #[inline]
    pub(crate) fn slots(self) -> u32 {
        self.mask.wrapping_add(1)
    }

    fn bytes(self) -> usize {
        self.slots() as usize * usize::from(self.stride)
    }

    #[inline]
    fn offset(self, index: u32) -> usize {
        (index & self.mask) as usize * usize::from(self.stride)
    }
}

/// Where the send queue's slots begin, and all of the memory, with room to align the head in it.
fn layout(send: QueueShape, recv: QueueShape) -> Option<(u32, Layout)> {
    let send_at = (size_of::<QueueHead>() + recv.bytes()).next_multiple_of(LINE);
    let bytes = send_at.checked_add(send.bytes())?.checked_add(LINE - MALLOC_ALIGN)?;
    Some((u32::try_from(send_at).ok()?, Layout::from_size_align(bytes, MALLOC_ALIGN).ok()?))
}

/// Whose rings these are: only a queue pair sends.
fn resource(send: QueueShape) -> Resource {
    if send.slots() > 0 { Resource::Qp } else { Resource::Srq }
}

// SAFETY: atomics, constants and plain memory without thread affinity; the rings' protocols order the
// accesses to the slots, and returned WQEs are touched by the card's half alone (promised at `card_rq`).
unsafe impl Send for WorkRings {}
// SAFETY: as above.
unsafe impl Sync for WorkRings {}

/// Where a device finds the rings: addresses in this process, and the sizes of the slots.
#[derive(Clone, Copy, Debug)]
pub struct WorkLayout {
    /// The program's index line
    pub program: u64,
    /// The card's index line
    pub card: u64,
    /// The send slots
    pub send: SlotLayout,
    /// The receive slots
    pub recv: SlotLayout,
}

/// Slots of one queue.
#[derive(Clone, Copy, Debug)]
pub struct SlotLayout {
    /// The first one
    pub at: u64,
    /// How many: a power of two, or 0
    pub slots: u32,
    /// Bytes of each
    pub stride: u16,
    /// Most SGEs of a WQE
    pub max_sge: u16,
}

impl WorkRings {
    /// Rings of these sizes, in the program's `memory` if it has its own; `None` if a WQE would exceed 64
    /// KiB, or the memory is out of reach.
    pub fn new(
        send: Option<SendSize>,
        recv: Option<RecvSize>,
        mut memory: ProgramMemory,
    ) -> Option<WorkRings> {
        let send = match send {
            Some(size) => QueueShape::new(size.max_wr, send::stride(&size), size.max_sge)?,
            None => QueueShape::NONE,
        };
        let recv = match recv {
            Some(size) => QueueShape::new(size.max_wr, recv::stride(&size), size.max_sge)?,
            None => QueueShape::NONE,
        };
        let (send_at, layout) = layout(send, recv)?;
        let resource = resource(send);
        let base = memory::take(&mut memory, layout, resource)?;
        let lead = base.align_offset(LINE);
        // SAFETY: new memory of this size. Touching all of it now spares the data path page faults.
        unsafe { base.write_bytes(0, layout.size()) };
        // SAFETY: the layout has room for aligning what is aligned to `MALLOC_ALIGN`.
        let head = unsafe { base.add(lead) }.cast::<QueueHead>();
        let fresh = QueueHead {
            users: AtomicU32::new(1),
            send_at,
            send,
            recv,
            send_post: SpinLock::new(()),
            recv_post: SpinLock::new(()),
            lead: lead as u8,
            released_seen: AtomicU32::new(0),
            taken_seen: AtomicU32::new(0),
            starved_seen: AtomicU32::new(0),
            back: AtomicU32::new(0),
            returned: UnsafeCell::new(None),
            memory: memory.map(Box::new),
            program: OwnLine(ProgramSide { send_posted: AtomicU32::new(0), recv_posted: AtomicU32::new(0) }),
            card: OwnLine(CardSide {
                released: AtomicU32::new(0),
                taken: AtomicU32::new(0),
                starved: AtomicU32::new(0),
                posted_seen: AtomicU32::new(0),
            }),
            send_watch: LoomCells::new(send.slots()),
            recv_watch: LoomCells::new(recv.slots()),
        };
        // SAFETY: new memory with room for a head, at its alignment.
        unsafe { head.write(fresh) };
        Some(WorkRings { head })
    }

    #[inline]
    pub(crate) fn head(&self) -> &QueueHead {
        // SAFETY: written in `new`, alive as long as a `WorkRings` is, and changed through atomics alone.
        unsafe { self.head.as_ref() }
    }

    /// Where the three lines of 64 bytes lie at which a post looks first, for
    /// [`prefetch`](crate::prefetch()).
    #[inline]
    pub fn post_lines(&self) -> *const u8 {
        self.head.as_ptr().cast_const().cast()
    }

    /// Slots of the send queue.
    pub fn send_slots(&self) -> u32 {
        self.head().send.slots()
    }

    /// Most SGEs of a send WQE.
    pub fn max_send_sge(&self) -> u16 {
        self.head().send.max_sge
    }

    /// Most inline bytes of a send WQE.
    #[inline]
    pub fn max_inline(&self) -> u32 {
        send::max_inline(self.head().send)
    }

    /// Slots of the receive queue; 0 where there is none.
    pub fn recv_slots(&self) -> u32 {
        self.head().recv.slots()
    }

    /// Receive WQEs that the card has not taken.
    pub fn recv_waiting(&self) -> u32 {
        let head = self.head();
        let taken = head.card.taken.load(Ordering::Acquire);
        let posted = head.program.recv_posted.load(Ordering::Acquire).wrapping_sub(taken);
        posted.wrapping_add(head.back.load(Ordering::Relaxed))
    }

    /// Most SGEs of a receive WQE.
    pub fn max_recv_sge(&self) -> u16 {
        self.head().recv.max_sge
    }

    /// Takes the send queue's post lock.
    #[inline]
    pub fn send_producer(&self) -> SendProducer<'_> {
        SendProducer::new(self)
    }

    /// Takes the receive queue's post lock.
    #[inline]
    pub fn recv_producer(&self) -> RecvProducer<'_> {
        RecvProducer::new(self)
    }

    /// The receive queue's post lock for who has the rings to itself, as behind a lock of its own.
    #[inline]
    pub fn recv_producer_mut(&mut self) -> RecvProducer<'_> {
        RecvProducer::alone(self)
    }

    /// Of an SRQ: whether somebody takes from it by a handle of the card's half beside the card's own.
    #[inline]
    pub fn has_other_takers(&self) -> bool {
        /* These rings and the card's half are two. Relaxed: who has a handle takes when a peer asks, a round
        trip after it was made, and so sees what was posted before. */
        self.head().users.load(Ordering::Relaxed) > 2
    }

    /// After posting receives: whether the card found none since the last such question.
    #[inline]
    pub fn was_starved(&self) -> bool {
        let head = self.head();
        /* our index before the card's count here, its count before our index in `take`: one sees the other */
        fence(Ordering::SeqCst);
        let starved = head.card.starved.load(Ordering::Relaxed);
        let seen = &head.starved_seen;
        seen.load(Ordering::Relaxed) != starved && seen.swap(starved, Ordering::Relaxed) != starved
    }

    /// The card's half of the send queue.
    ///
    /// # Safety
    /// Of the halves made of one queue and their clones, at most one thread at a time may use any, and it
    /// looks at WQEs in released..posted only: whoever is given one keeps to that.
    pub unsafe fn card_sq(&self) -> CardSq {
        CardSq(self.share())
    }

    /// The card's half of the receive queue.
    ///
    /// # Safety
    /// Of the halves made of one queue and their clones, at most one thread at a time may use any: whoever is
    /// given one keeps to that.
    pub unsafe fn card_rq(&self) -> CardRq {
        CardRq(self.share())
    }

    pub(crate) fn share(&self) -> WorkRings {
        /* relaxed: who shares has a reference, so the memory stays */
        self.head().users.fetch_add(1, Ordering::Relaxed);
        WorkRings { head: self.head }
    }

    /// Where it all lies, for a device that is told.
    pub fn layout(&self) -> WorkLayout {
        let head = self.head();
        let slots = |at: usize, shape: QueueShape| SlotLayout {
            at: self.at(at) as u64,
            slots: shape.slots(),
            stride: shape.stride,
            max_sge: shape.max_sge,
        };
        WorkLayout {
            program: (&raw const head.program) as u64,
            card: (&raw const head.card) as u64,
            send: slots(head.send_at as usize, head.send),
            recv: slots(size_of::<QueueHead>(), head.recv),
        }
    }

    /// What the program has posted so far, sends in the low half and receives in the high one: as the
    /// doorbell cell of a device has it.
    #[inline]
    pub fn posted(&self) -> u64 {
        let program = &self.head().program;
        let sends = program.send_posted.load(Ordering::Acquire);
        u64::from(sends) | u64::from(program.recv_posted.load(Ordering::Acquire)) << 32
    }

    /// First byte of the send slots, and their bytes.
    pub(crate) fn send_slots_at(&self) -> (*const u8, usize) {
        let head = self.head();
        (self.at(head.send_at as usize), head.send.bytes())
    }

    /// First byte of the send slot that `index` falls on, to be read.
    #[inline]
    pub(crate) fn send_slot(&self, index: u32) -> *const u8 {
        let head = self.head();
        head.send_watch.read(index & head.send.mask);
        self.send_slot_at(index)
    }

    /// First byte of the send slot that `index` falls on, to be written.
    #[inline]
    pub(crate) fn send_slot_mut(&self, index: u32) -> *mut u8 {
        let head = self.head();
        head.send_watch.write(index & head.send.mask);
        self.send_slot_at(index)
    }

    /// First byte of that slot, neither to be read nor to be written.
    #[inline]
    pub(crate) fn send_slot_at(&self, index: u32) -> *mut u8 {
        let head = self.head();
        self.at(head.send_at as usize + head.send.offset(index))
    }

    /// First byte of the receive slot that `index` falls on, to be read.
    #[inline]
    pub(crate) fn recv_slot(&self, index: u32) -> *const u8 {
        let head = self.head();
        head.recv_watch.read(index & head.recv.mask);
        self.recv_slot_at(index)
    }

    /// First byte of the receive slot that `index` falls on, to be written.
    #[inline]
    pub(crate) fn recv_slot_mut(&self, index: u32) -> *mut u8 {
        let head = self.head();
        head.recv_watch.write(index & head.recv.mask);
        self.recv_slot_at(index)
    }

    /// First byte of the receive slot that `index` falls on.
    #[inline]
    pub(crate) fn recv_slot_at(&self, index: u32) -> *mut u8 {
        self.at(size_of::<QueueHead>() + self.head().recv.offset(index))
    }

    #[inline]
    fn at(&self, offset: usize) -> *mut u8 {
        // SAFETY: a shape's offset lies below its bytes, or is 0 where there are none, so the sum lies inside
        // the allocation, or at its end.
        unsafe { self.head.as_ptr().cast::<u8>().add(offset) }
    }
}

impl Drop for WorkRings {
    fn drop(&mut self) {
        let head = self.head();
        if head.users.fetch_sub(1, Ordering::Release) != 1 {
            return;
        }
        /* what others did with the memory comes before its end */
        fence(Ordering::Acquire);
        let Some((_, layout)) = layout(head.send, head.recv) else { return };
        let (lead, send) = (usize::from(head.lead), head.send);
        // SAFETY: the last user; allocated in `new` with this layout, so many bytes before the head, and
        // freed here only.
        unsafe {
            let memory = (*self.head.as_ptr()).memory.take().map(|memory| *memory);
            let resource = resource(send);
            ptr::drop_in_place(self.head.as_ptr());
            memory::give(&memory, self.head.cast::<u8>().sub(lead), layout, resource);
        }
    }
}
