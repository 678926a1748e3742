//! The board's part of a completion queue: a ring in shared memory, of which the board writes the entries.
//! What is found there moves to the queue that the program polls. A queue that was resized has another ring;
//! what the board had written into the one before is taken first.

use std::collections::VecDeque;
use std::mem::{offset_of, size_of};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use starverbs_core::{Cqe, Qpn};
use starverbs_queues::board::{
    ARM_SOLICITED, CQE_PHASE, ModifyCq, NumberReply, OP_MODIFY_CQ, OP_RESIZE_CQ, ResizeCq,
};
use starverbs_queues::format::CqeWords;
use starverbs_rings::CqRoom;

use super::link::BoardLink;
use super::memory::{Heap, NO_MEMORY, Piece};
use super::qps::BoardQps;
use crate::cq::{CqShared, TOO_SMALL};
use crate::error::Result;
use crate::moderation::Moderation;

/// Bytes of the program's index, in front of the entries: a cache line of its own.
const INDEX_BYTES: usize = 64;
/// Words of an entry.
const WORDS: usize = size_of::<Cqe>() / 8;

/// The board's part of a completion queue.
pub(crate) struct BoardCq {
    /// Its number on the board
    pub(super) number: u32,
    cell: u32,
    link: Arc<BoardLink>,
    /// Where it lies; whoever takes entries has the lock
    rings: Mutex<Rings>,
    /// Counts the times that it was armed
    armed: AtomicU32,
    /// The last time it was for solicited completions alone
    solicited: AtomicBool,
    /// The thread knows it
    pub(super) is_known: AtomicBool,
}

/// Where a queue lies, and lay.
struct Rings {
    now: BoardCqRing,
    /// Rings of which not all is taken, the oldest first, and how many entries each has
    before: VecDeque<(BoardCqRing, u32)>,
    /// Where `now` ends, once the board is gone
    end: Option<u32>,
}

/// An index, then the entries.
pub(super) struct BoardCqRing {
    piece: Piece,
    log: u32,
    /// Entries taken
    head: u32,
}

impl BoardCqRing {
    /// One for at least `cqe` completions.
    pub(super) fn new(heap: &Arc<Heap>, cqe: u32) -> Result<BoardCqRing> {
        let entries = cqe.max(1).checked_next_power_of_two().ok_or(NO_MEMORY)?;
        let piece = heap.piece(INDEX_BYTES + entries as usize * size_of::<Cqe>())?;
        Ok(BoardCqRing { piece, log: entries.ilog2(), head: 0 })
    }

    /// DMA addresses of the index and of the entries, and log2 of these.
    pub(super) fn place(&self) -> Result<(u64, u64, u32)> {
        let taken = self.piece.address()?;
        Ok((taken, taken + INDEX_BYTES as u64, self.log))
    }

    /// A word of entry `index`, counted from when the ring was made.
    fn word(&self, index: u32, word: usize) -> &AtomicU64 {
        let entry = (index & ((1 << self.log) - 1)) as usize;
        let at = INDEX_BYTES + entry * size_of::<Cqe>() + word * 8;
        // SAFETY: inside the piece, by the mask; entries are aligned, and `word` is one of theirs.
        unsafe { AtomicU64::from_ptr(self.piece.at.as_ptr().add(at).cast()) }
    }

    /// Whether the board has written entry `index`: by the phase in the last byte of its last word.
    #[inline]
    fn is_written(&self, index: u32, last: u64) -> bool {
        let phase = last.to_ne_bytes()[offset_of!(Cqe, sl) % 8] & CQE_PHASE != 0;
        phase == (index >> self.log & 1 == 0)
    }

    /// The oldest entry from `index` on, if the board has written it.
    #[inline]
    fn read(&self, index: u32) -> Option<Cqe> {
        /* acquire: the phase before the rest, and before the data that it tells of */
        let last = self.word(index, WORDS - 1).load(Ordering::Acquire);
        if !self.is_written(index, last) {
            return None;
        }
        let words: CqeWords = std::array::from_fn(|word| match word {
            word if word == WORDS - 1 => last,
            word => self.word(index, word).load(Ordering::Relaxed),
        });
        let cqe = Cqe::decode(words);
        Some(Cqe { sl: cqe.sl & !CQE_PHASE, ..cqe })
    }

    /// Moves what the board has written up to entry `end` to `cq`, as far as that has room for `room`
    /// completions; says how many. `qps` notes them.
    #[inline]
    fn take(&mut self, cq: &CqShared, end: Option<u32>, room: u32, qps: Option<&BoardQps>) -> u32 {
        // SAFETY: the index is the first word of the piece, and aligned.
        let index = unsafe { AtomicU32::from_ptr(self.piece.at.as_ptr().cast()) };
        let first = self.head;
        while self.head.wrapping_sub(first) < room
            && end != Some(self.head)
            && let Some(cqe) = self.read(self.head)
        {
            self.head = self.head.wrapping_add(1);
            /* Before the program has it: by another thread it may post at once, and the board needs the room.
             * Release: our reading comes before the board's writing the entry again. */
            index.store(self.head, Ordering::Release);
            /* 0: it was of a queue pair that is gone */
            if cqe.qpn != 0 {
                if let Some(qps) = qps {
                    qps.note(&cqe);
                }
                // SAFETY: under the lock of the rings; this device has no other ring to move to.
                let _ = unsafe { cq.push(&cqe, false) };
            }
        }
        self.head.wrapping_sub(first)
    }

    /// The board writes no more: `qps` notes what it has written up to `end`. Gives where that is.
    fn end(&self, end: Option<u32>, qps: &BoardQps) -> u32 {
        let mut at = self.head;
        while at.wrapping_sub(self.head) < 1 << self.log
            && end != Some(at)
            && let Some(cqe) = self.read(at)
        {
            qps.note(&cqe);
            at = at.wrapping_add(1);
        }
        at
    }

    /// Forgets what was written of a queue pair and not taken yet.
    fn purge(&self, qpn: Qpn) {
        let mut at = self.head;
        while at.wrapping_sub(self.head) < 1 << self.log
            && let Some(cqe) = self.read(at)
        {
            if cqe.qpn == qpn {
                let word = offset_of!(Cqe, qpn) / 8;
                let kept = if offset_of!(Cqe, qpn) % 8 == 0 { 0xffff_ffff << 32 } else { 0xffff_ffff };
                self.word(at, word).fetch_and(kept, Ordering::Relaxed);
            }
            at = at.wrapping_add(1);
        }
    }
}

impl Rings {
    #[inline]
    fn take(&mut self, cq: &CqShared, qps: &BoardQps) -> u32 {
        /* the other ring has room for as many */
        let room = (1u32 << self.now.log).saturating_sub(cq.waiting());
        /* of a board that is gone all is noted */
        let qps = if self.end.is_none() { Some(qps) } else { None };
        if !self.before.is_empty() {
            return self.take_from_all(cq, room, qps);
        }
        self.now.take(cq, self.end, room, qps)
    }

    #[cold]
    fn take_from_all(&mut self, cq: &CqShared, room: u32, qps: Option<&BoardQps>) -> u32 {
        let mut taken = 0;
        while let Some((ring, end)) = self.before.front_mut() {
            taken += ring.take(cq, Some(*end), room - taken, qps);
            if ring.head != *end {
                return taken;
            }
            self.before.pop_front();
        }
        taken + self.now.take(cq, self.end, room - taken, qps)
    }
}

impl BoardCq {
    pub(super) fn new(number: u32, cell: u32, link: &Arc<BoardLink>, ring: BoardCqRing) -> BoardCq {
        BoardCq {
            number,
            cell,
            link: Arc::clone(link),
            rings: Mutex::new(Rings { now: ring, before: VecDeque::new(), end: None }),
            armed: AtomicU32::new(0),
            solicited: AtomicBool::new(false),
            is_known: AtomicBool::new(false),
        }
    }

    fn rings(&self) -> MutexGuard<'_, Rings> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves what the board has written to `cq`, as far as that has room; says whether anybody is at it.
    #[inline]
    pub(super) fn harvest(&self, cq: &CqShared) -> bool {
        let mut rings = match self.rings.try_lock() {
            Ok(rings) => rings,
            Err(TryLockError::Poisoned(rings)) => rings.into_inner(),
            Err(TryLockError::WouldBlock) => return true,
        };
        rings.take(cq, &self.link.qps) > 0
    }

    /// Adds a completion of this process's own, behind all that the board has written, and wakes who waits.
    pub(super) fn complete(&self, cq: &CqShared, cqe: &Cqe) {
        let mut rings = self.rings();
        rings.take(cq, &self.link.qps);
        // SAFETY: as in `Ring::take`.
        let _ = unsafe { cq.push(cqe, true) };
        drop(rings);
        if cq.is_moderated() {
            cq.notify_moderated();
        }
    }

    /// The board is gone: what it has written by now is all. One that was silent may write more.
    pub(super) fn end(&self) {
        let mut rings = self.rings();
        rings.before.iter().for_each(|(ring, end)| _ = ring.end(Some(*end), &self.link.qps));
        rings.end = Some(rings.now.end(None, &self.link.qps));
    }

    /// Moves what the board has written, of who has to wait for others.
    pub(super) fn harvest_all(&self, cq: &CqShared) {
        self.rings().take(cq, &self.link.qps);
    }

    /// Forgets what was written of a queue pair that is gone, or in RESET, and not taken yet.
    pub(super) fn purge(&self, qpn: Qpn) {
        let rings = self.rings();
        rings.before.iter().for_each(|(ring, _)| ring.purge(qpn));
        rings.now.purge(qpn);
    }

    /// Has `cq` be as large as `room`, and the board write to another ring. EINVAL: it is too small for what
    /// it holds.
    pub(super) fn resize(&self, cq: &CqShared, room: &mut CqRoom) -> Result<()> {
        let ring = BoardCqRing::new(&self.link.heap, room.capacity())?;
        let mut rings = self.rings();
        rings.take(cq, &self.link.qps);
        cq.move_to(room)?;
        let old = 1 << rings.now.log;
        let done = self.move_to(&mut rings, ring).and_then(|()| {
            rings.take(cq, &self.link.qps);
            if rings.before.is_empty() {
                return Ok(());
            }
            /* the board wrote more meanwhile */
            self.move_to(&mut rings, BoardCqRing::new(&self.link.heap, old)?)?;
            Err(TOO_SMALL)
        });
        if done.is_err() {
            /* as large as before: what it holds fits */
            let _ = cq.move_to(room);
        }
        done
    }

    /// Has the board write to another ring.
    fn move_to(&self, rings: &mut Rings, ring: BoardCqRing) -> Result<()> {
        let (taken, entries, log) = ring.place()?;
        rings.before.try_reserve(1).map_err(|_| NO_MEMORY)?;
        let to = ResizeCq { entries, taken, cq: self.number, log };
        let NumberReply { number: end, .. } = self.link.ask(OP_RESIZE_CQ, &to)?;
        let before = std::mem::replace(&mut rings.now, ring);
        /* more than a ring holds is what no board has written */
        if end.wrapping_sub(before.head) <= 1 << before.log {
            rings.before.push_back((before, end));
        }
        Ok(())
    }

    /// Has events of `cq` moderated so.
    pub(super) fn moderate(&self, cq: &CqShared, to: Moderation) -> Result<()> {
        let mut rings = self.rings();
        rings.take(cq, &self.link.qps);
        let Moderation { count, period } = to;
        self.link.tell(OP_MODIFY_CQ, &ModifyCq { cq: self.number, count, period })?;
        cq.moderated_by_device(to);
        Ok(())
    }

    /// The program waits for an event: says so to the board, with what was taken so far.
    pub(super) fn arm(&self, cq: &CqShared, solicited: bool) {
        let mut rings = self.rings();
        rings.take(cq, &self.link.qps);
        self.solicited.store(solicited, Ordering::Relaxed);
        let times = self.armed.fetch_add(1, Ordering::Relaxed).wrapping_add(1) & !ARM_SOLICITED;
        let high = times | if solicited { ARM_SOLICITED } else { 0 };
        if let Some(cell) = self.link.cell(self.cell) {
            cell.store(u64::from(rings.now.head) | u64::from(high) << 32, Ordering::Release);
        }
    }

    /// The board says that an event is due.
    pub(super) fn on_event(&self, cq: &CqShared) {
        self.harvest_all(cq);
        let solicited = self.solicited.load(Ordering::Relaxed);
        /* by count alone it was raised when the last completion was moved, and this may come after the
        program has asked for the next one */
        if cq.is_moderated() && (solicited || cq.has_period()) {
            cq.notify_moderated();
        }
        /* any other was raised when its completion was moved */
        if solicited {
            cq.announce_solicited();
        }
    }
}
