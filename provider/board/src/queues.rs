//! The card's halves of work queues that lie in a client's memory.
//!
//! A send WQE is fetched once, as a board does: it is copied here, and what it says is checked on the copy,
//! so that a client that writes it anew changes nothing. Indices of the client are checked before they are
//! believed.

mod fetch;
mod own;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::mem::{offset_of, size_of};
use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};

use starverbs_core::{HeldWqe, NicError, RecvQueue, Seg, SendQueue, SendWqe, Sge, TakenWqe};
use starverbs_queues::BLOCK;
use starverbs_queues::board::{COUNTER_MALFORMED, COUNTER_RECV_FETCHES, Queues};
use starverbs_queues::format::{CardIndex, ProgramIndex, RecvWqe, SendBlock};

use crate::broken;
use crate::commands::MAX_SGE;
use crate::counters::BoardCounters;
use crate::dma::{Errno, Maps, QueueRoom};
use own::{OwnWqes, WqeOwner};

const SGE_BYTES: usize = size_of::<Sge>();
/// Words of a receive WQE at most.
const RECV_WORDS: usize = (size_of::<RecvWqe>() + MAX_SGE * SGE_BYTES) / 8;
/// log2 of the slots of a queue at most.
pub(crate) const MAX_LOG: u8 = 16;

/// Bytes of a send slot at most: of one with the most inline bytes.
const MAX_STRIDE: usize = BLOCK + 4096;
/// What the board keeps of each send slot beside its copy, about.
const SLOT_BYTES: usize = 32;
/// Bytes that the board keeps of the send queues of a function at most.
const MAX_KEPT: usize = 256 << 20;

/// What the board keeps of a function's send queues, in bytes: a client cannot have it take all there is.
#[derive(Clone, Default)]
pub(crate) struct QueueQuota(Rc<Cell<usize>>);

/// A part of it, which goes back when this is dropped.
pub(crate) struct QuotaShare(QueueQuota, usize);

impl QueueQuota {
    /// ENOMEM: it would be more than a function may have.
    pub(crate) fn take(&self, bytes: usize) -> Result<QuotaShare, Errno> {
        let kept = self.0.get().saturating_add(bytes);
        if kept > MAX_KEPT {
            return Err(libc::ENOMEM);
        }
        self.0.set(kept);
        Ok(QuotaShare(self.clone(), bytes))
    }
}

impl QuotaShare {
    /// It is of so many bytes from now on. False: it would be more than a function may have.
    fn resize(&mut self, bytes: usize) -> bool {
        let QuotaShare(quota, mine) = self;
        let kept = quota.0.get().saturating_sub(*mine).saturating_add(bytes);
        let fits = bytes <= *mine || kept <= MAX_KEPT;
        if fits {
            quota.0.set(kept);
            *mine = bytes;
        }
        fits
    }
}

impl Drop for QuotaShare {
    fn drop(&mut self) {
        let kept = &self.0.0;
        kept.set(kept.get().saturating_sub(self.1));
    }
}

/// The index lines of work queues.
struct Lines {
    program: QueueRoom,
    card: QueueRoom,
}

impl Lines {
    fn open(queues: &Queues, maps: &Maps) -> Result<Lines, Errno> {
        Ok(Lines {
            program: maps.room(queues.program, BLOCK, BLOCK)?,
            card: maps.room(queues.card, BLOCK, BLOCK)?,
        })
    }
}

/// A send queue. Clones are the same.
#[derive(Clone)]
pub(crate) struct BoardSq(Rc<Sq>);

struct Sq {
    lines: Lines,
    slots: QueueRoom,
    mask: u32,
    /// Blocks of a slot
    stride: usize,
    max_sge: usize,
    /// What was fetched: slots as in the client's memory
    copies: Box<[Cell<SendBlock>]>,
    /// The client's index of what was posted, as of all three
    posted: Cell<u32>,
    fetched: Cell<u32>,
    released: Cell<u32>,
    own: OwnWqes,
    counters: Rc<BoardCounters>,
    _share: QuotaShare,
    /// What a stateful end of it keeps of its peer's WQEs
    of_peer: RefCell<QuotaShare>,
}

impl BoardSq {
    /// One in which `own` WQEs of the board's own may stand at a time. EINVAL: sizes that no queue has;
    /// EFAULT: memory that is not mapped here; ENOMEM: too many, or too large ones.
    pub(crate) fn open(
        queues: &Queues,
        maps: &Maps,
        kept: &QueueQuota,
        counters: &Rc<BoardCounters>,
        own: usize,
    ) -> Result<BoardSq, Errno> {
        let (stride, sges) = (usize::from(queues.send_stride), usize::from(queues.send_sge));
        let room = BLOCK + (sges * SGE_BYTES).next_multiple_of(BLOCK);
        let whole = stride.is_multiple_of(BLOCK) && (room..=MAX_STRIDE).contains(&stride);
        if queues.send_log > MAX_LOG || !whole && !broken::rule(19) || sges > MAX_SGE {
            return Err(libc::EINVAL);
        }
        let slots = 1usize << queues.send_log;
        let blocks = slots * (stride / BLOCK);
        let share = kept.take(slots * (stride + SLOT_BYTES))?;
        let mut copies = Vec::new();
        copies.try_reserve_exact(blocks).map_err(|_| libc::ENOMEM)?;
        copies.resize_with(blocks, Cell::default);
        Ok(BoardSq(Rc::new(Sq {
            lines: Lines::open(queues, maps)?,
            slots: maps.room(queues.send, slots * stride, BLOCK)?,
            mask: slots as u32 - 1,
            stride: stride / BLOCK,
            max_sge: sges,
            copies: copies.into_boxed_slice(),
            posted: Cell::new(0),
            fetched: Cell::new(0),
            released: Cell::new(0),
            own: OwnWqes::new(own)?,
            counters: Rc::clone(counters),
            _share: share,
            of_peer: RefCell::new(kept.take(0)?),
        })))
    }

    /// A stateful end of it keeps so many bytes from now on. False: the function may not have more.
    pub(crate) fn keep_for_peer(&self, bytes: usize) -> bool {
        self.0.of_peer.borrow_mut().resize(bytes)
    }

    /// Inline bytes of a WQE at most.
    pub(crate) fn max_inline(&self) -> usize {
        (self.0.stride - 1) * BLOCK
    }

    /// The client says by its cell that so many WQEs are posted. False: no queue of this size can have so
    /// many, and nothing changes.
    pub(crate) fn ring(&self, posted: u32) -> bool {
        let sq = &self.0;
        let held = posted.wrapping_sub(sq.released.get());
        let before = sq.posted.get().wrapping_sub(sq.released.get());
        let sound = held <= sq.mask + 1 && held >= before;
        if sound {
            sq.posted.set(if broken::rule(15) { sq.posted.get().wrapping_add(1) } else { posted });
        }
        sound || broken::rule(17)
    }

    /// The client says by a message that `count` WQEs more are posted, the first of them at `offset`. False:
    /// the queue does not end there, or has no room for so many, and nothing changes.
    pub(crate) fn ring_at(&self, offset: u16, count: u16) -> bool {
        let posted = self.0.posted.get();
        let follows = offset == posted as u16 || broken::rule(59);
        follows && self.ring(posted.wrapping_add(count.into()))
    }

    fn sge(&self, index: u32, at: usize) -> Sge {
        let first = (index & self.0.mask) as usize * self.0.stride + 1;
        let per_block = BLOCK / SGE_BYTES;
        let words = self.0.copies[first + at / per_block].get();
        let [addr, rest] = [words[at % per_block * 2], words[at % per_block * 2 + 1]];
        Sge { addr, len: rest as u32, lkey: (rest >> 32) as u32 }
    }

    fn copy(&self, index: u32) -> SendWqe {
        self.fetch_to(index);
        if broken::rule(20) {
            self.fetch(index, 1);
        }
        self.head(index & self.0.mask)
    }
}

impl SendQueue for BoardSq {
    fn slots(&self) -> u32 {
        (self.0.mask + 1 + self.0.own.most()).next_power_of_two()
    }

    fn posted(&self) -> u32 {
        self.0.posted.get().wrapping_add(self.0.own.posted())
    }

    fn wqe(&self, index: u32) -> SendWqe {
        match self.0.own.owner(index) {
            WqeOwner::Client(index) => self.copy(index),
            WqeOwner::Board(own) => own.wqe,
        }
    }

    fn sges(&self, index: u32) -> impl Iterator<Item = Sge> + '_ {
        let owner = self.0.own.owner(index);
        let sges = match owner {
            WqeOwner::Client(index) => usize::from(self.copy(index).num_sge).min(self.0.max_sge),
            WqeOwner::Board(own) => usize::from(own.wqe.num_sge),
        };
        (0..sges).map(move |at| match owner {
            WqeOwner::Client(index) => self.sge(index, at),
            WqeOwner::Board(own) => own.sges[at],
        })
    }

    fn inline(&self, index: u32) -> Seg {
        let WqeOwner::Client(index) = self.0.own.owner(index) else { return Seg { addr: 0, len: 0 } };
        let wqe = self.copy(index);
        let first = (index & self.0.mask) as usize * self.0.stride;
        let body = self.0.copies.get(first + 1).map_or(0, |block| block.as_ptr() as u64);
        Seg { addr: body, len: if body == 0 { 0 } else { wqe.length } }
    }

    fn release(&self, index: u32) {
        let index = self.0.own.release(index);
        self.0.released.set(index);
        if broken::rule(22) {
            return;
        }
        self.0.lines.card.store_half(offset_of!(CardIndex, send_released), index, Ordering::Release);
    }

    fn reset(&self) {
        self.0.fetched.set(self.0.posted.get());
        self.release(self.posted());
    }

    fn post_own(&self, wqe: SendWqe, sges: &[Sge]) -> bool {
        !broken::rule(66) && self.0.own.post(self.posted(), wqe, sges)
    }
}

/// A receive queue. Clones are the same.
#[derive(Clone)]
pub(crate) struct BoardRq(Rc<Rq>);

struct Rq {
    lines: Lines,
    /// `None`: it never receives
    slots: Option<QueueRoom>,
    mask: u32,
    stride: usize,
    max_sge: usize,
    taken: Cell<u32>,
    starved: Cell<u32>,
    /// As it was when [`BoardRq::was_starved`] was asked last
    seen_starved: Cell<u32>,
    /// Receives that were taken and came back, the oldest first: `wr_id` and SGEs
    returned: RefCell<VecDeque<(u64, Box<[Sge]>)>>,
    counters: Rc<BoardCounters>,
}

impl BoardRq {
    /// EINVAL: sizes that no queue has; EFAULT: memory that is not mapped here.
    pub(crate) fn open(
        queues: &Queues,
        maps: &Maps,
        counters: &Rc<BoardCounters>,
        max_sge: usize,
    ) -> Result<BoardRq, Errno> {
        let (stride, sges) = (usize::from(queues.recv_stride), usize::from(queues.recv_sge));
        let room = size_of::<RecvWqe>() + sges * SGE_BYTES;
        if queues.recv_log > MAX_LOG || !stride.is_multiple_of(8) || stride < room || sges > max_sge {
            return Err(libc::EINVAL);
        }
        let slots = 1usize << queues.recv_log;
        let room = maps.room(queues.recv, slots * stride, 8)?;
        let rq = BoardRq::of(Lines::open(queues, maps)?, Some(room), counters);
        Ok(BoardRq(Rc::new(Rq { mask: slots as u32 - 1, stride, max_sge: sges, ..rq })))
    }

    /// That of a queue pair which sends for XRC: it never receives. EFAULT: memory that is not mapped here.
    pub(crate) fn none(queues: &Queues, maps: &Maps, counters: &Rc<BoardCounters>) -> Result<BoardRq, Errno> {
        Ok(BoardRq(Rc::new(BoardRq::of(Lines::open(queues, maps)?, None, counters))))
    }

    fn of(lines: Lines, slots: Option<QueueRoom>, counters: &Rc<BoardCounters>) -> Rq {
        let (taken, starved, seen_starved) = (Cell::new(0), Cell::new(0), Cell::new(0));
        let counters = Rc::clone(counters);
        let returned = RefCell::default();
        Rq { lines, slots, mask: 0, stride: 0, max_sge: 0, taken, starved, seen_starved, returned, counters }
    }

    /// Slots.
    pub(crate) fn slots(&self) -> u32 {
        self.0.mask + 1
    }

    /// SGEs of a receive at most.
    pub(crate) fn sges(&self) -> usize {
        self.0.max_sge
    }

    /// Whether it was found empty since this was asked last.
    pub(crate) fn was_starved(&self) -> bool {
        let now = self.0.starved.get();
        self.0.seen_starved.replace(now) != now
    }

    /// Receives that wait; none, if the client's index is one that no queue of this size can have.
    fn waiting(&self) -> u32 {
        if self.0.slots.is_none() {
            return 0;
        }
        let posted = self.0.lines.program.load_half(offset_of!(ProgramIndex, recv_posted), Ordering::Acquire);
        let waiting = posted.wrapping_sub(self.0.taken.get());
        if waiting > self.slots() {
            self.0.counters.inc(COUNTER_MALFORMED);
            return 0;
        }
        waiting
    }

    fn tell_taken(&self, taken: u32) {
        self.0.taken.set(taken);
        self.0.lines.card.store_half(offset_of!(CardIndex, recv_taken), taken, Ordering::Release);
    }
}

impl RecvQueue for BoardRq {
    fn take(&self, sges: &mut [Sge]) -> Option<TakenWqe> {
        let rq = &*self.0;
        if let Some((wr_id, held)) = rq.returned.borrow_mut().pop_front() {
            sges.iter_mut().zip(&held).for_each(|(to, from)| *to = *from);
            return Some(TakenWqe { wr_id, num_sge: held.len().min(sges.len()) });
        }
        let slots = rq.slots.as_ref()?;
        if self.waiting() == 0 {
            let starved = rq.starved.get().wrapping_add(u32::from(!broken::rule(23)));
            rq.starved.set(starved);
            rq.lines.card.store_half(offset_of!(CardIndex, recv_starved), starved, Ordering::Relaxed);
            /* the count before the look, as the program's index comes before its look at the count */
            fence(Ordering::SeqCst);
            if self.waiting() == 0 {
                return None;
            }
        }
        let at = (rq.taken.get() & rq.mask) as usize * rq.stride;
        /* by one read: as many SGEs as there may be */
        let most = rq.max_sge.min(sges.len());
        let mut words = [0; RECV_WORDS];
        let words = &mut words[..(size_of::<RecvWqe>() + most * SGE_BYTES) / 8];
        slots.words(at, words);
        let [wr_id, asked, body @ ..] = words else { return None };
        let num_sge = (*asked as u32 as usize).min(most);
        for (sge, [addr, rest]) in sges.iter_mut().zip(&body.as_chunks().0[..num_sge]) {
            *sge = Sge { addr: *addr, len: *rest as u32, lkey: (*rest >> 32) as u32 };
        }
        let wr_id = *wr_id;
        rq.counters.inc(COUNTER_RECV_FETCHES);
        self.tell_taken(rq.taken.get().wrapping_add(1));
        Some(TakenWqe { wr_id, num_sge })
    }

    fn len(&self) -> u32 {
        self.waiting() + self.0.returned.borrow().len() as u32
    }

    fn max_sge(&self) -> usize {
        self.0.max_sge
    }

    fn put_back(&self, recvs: &mut dyn Iterator<Item = HeldWqe<'_>>) -> Result<(), NicError> {
        let mut back = VecDeque::new();
        for HeldWqe { wr_id, sges } in recvs {
            let mut held = Vec::new();
            let room = back.try_reserve(1).and_then(|()| held.try_reserve_exact(sges.len()));
            room.map_err(|_| NicError::Exhausted)?;
            held.extend_from_slice(sges);
            back.push_back((wr_id, held.into_boxed_slice()));
        }
        let mut returned = self.0.returned.borrow_mut();
        back.try_reserve(returned.len()).map_err(|_| NicError::Exhausted)?;
        back.append(&mut returned);
        *returned = back;
        Ok(())
    }

    fn reset(&self) {
        self.0.returned.borrow_mut().clear();
        let waiting = self.waiting();
        self.tell_taken(self.0.taken.get().wrapping_add(waiting));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_grows_as_far_as_the_function_may_have() {
        let quota = QueueQuota::default();
        let (mut a, mut b) = (quota.take(0).unwrap(), quota.take(MAX_KEPT / 2).unwrap());
        assert!(a.resize(MAX_KEPT / 2) && !a.resize(MAX_KEPT / 2 + 1) && !a.resize(usize::MAX));
        assert!(b.resize(MAX_KEPT / 4) && a.resize(MAX_KEPT / 2 + 1));
        assert!(a.resize(0) && b.resize(MAX_KEPT));
        drop((a, b));
        assert!(quota.take(MAX_KEPT).is_ok());
    }
}
