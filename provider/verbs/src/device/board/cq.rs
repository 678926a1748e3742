//! The board's part of a completion queue: a ring in shared memory, of which the board writes the entries.
//! What is found there moves to the queue that the program polls.

use std::mem::{offset_of, size_of};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use starverbs_core::{Cqe, Qpn};
use starverbs_queues::board::{ARM_SOLICITED, CQE_PHASE};
use starverbs_queues::format::CqeWords;

use super::link::Link;
use super::memory::Piece;
use crate::cq::CqShared;

/// Bytes of the program's index, in front of the entries: a cache line of its own.
pub(super) const INDEX_BYTES: usize = 64;
/// Words of an entry.
const WORDS: usize = size_of::<Cqe>() / 8;

/// The board's part of a completion queue.
pub(crate) struct BoardCq {
    /// Its number on the board
    pub(super) number: u32,
    cell: u32,
    link: Arc<Link>,
    /// The index, then the entries
    piece: Piece,
    log: u32,
    /// Entries taken, under the lock of whoever takes them
    head: Mutex<u32>,
    /// Counts the times that it was armed
    armed: AtomicU32,
    /// The last time it was for solicited completions alone
    solicited: AtomicBool,
    /// The thread knows it
    pub(super) is_known: AtomicBool,
}

impl BoardCq {
    /// `piece`: an index and `1 << log` entries.
    pub(super) fn new(number: u32, cell: u32, link: &Arc<Link>, piece: Piece, log: u32) -> BoardCq {
        BoardCq {
            number,
            cell,
            link: Arc::clone(link),
            piece,
            log,
            head: Mutex::new(0),
            armed: AtomicU32::new(0),
            solicited: AtomicBool::new(false),
            is_known: AtomicBool::new(false),
        }
    }

    /// A word of entry `index`, counted from when the queue was made.
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

    /// Moves what the board has written to `cq`, as far as that has room; says whether anybody is at it.
    #[inline]
    pub(super) fn harvest(&self, cq: &CqShared) -> bool {
        let mut head = match self.head.try_lock() {
            Ok(head) => head,
            Err(TryLockError::Poisoned(head)) => head.into_inner(),
            Err(TryLockError::WouldBlock) => return true,
        };
        self.take(&mut head, cq) > 0
    }

    /// The same, of who has to wait for others.
    pub(super) fn harvest_all(&self, cq: &CqShared) {
        let mut head = self.head.lock().unwrap_or_else(PoisonError::into_inner);
        self.take(&mut head, cq);
    }

    #[inline]
    fn take(&self, head: &mut u32, cq: &CqShared) -> u32 {
        let first = *head;
        /* the other ring has room for as many */
        let room = (1u32 << self.log).saturating_sub(cq.waiting());
        while head.wrapping_sub(first) < room
            && let Some(cqe) = self.read(*head)
        {
            *head = head.wrapping_add(1);
            /* 0: it was of a queue pair that is gone */
            if cqe.qpn != 0 {
                // SAFETY: under the lock of `head`; this device has no other ring to move to.
                let _ = unsafe { cq.push(&cqe, false) };
            }
        }
        let taken = head.wrapping_sub(first);
        if taken > 0 {
            // SAFETY: the index is the first word of the piece, and aligned.
            let index = unsafe { AtomicU32::from_ptr(self.piece.at.as_ptr().cast()) };
            /* release: our reading comes before the board's writing the entries again */
            index.store(*head, Ordering::Release);
        }
        taken
    }

    /// Forgets what was written of a queue pair that is gone, or in RESET, and not taken yet.
    pub(super) fn purge(&self, qpn: Qpn) {
        let head = self.head.lock().unwrap_or_else(PoisonError::into_inner);
        let mut at = *head;
        while at.wrapping_sub(*head) < 1 << self.log
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

    /// The program waits for an event: says so to the board, with what was taken so far.
    pub(super) fn arm(&self, cq: &CqShared, solicited: bool) {
        let mut head = self.head.lock().unwrap_or_else(PoisonError::into_inner);
        self.take(&mut head, cq);
        self.solicited.store(solicited, Ordering::Relaxed);
        let times = self.armed.fetch_add(1, Ordering::Relaxed).wrapping_add(1) & !ARM_SOLICITED;
        let high = times | if solicited { ARM_SOLICITED } else { 0 };
        if let Some(cell) = self.link.cell(self.cell) {
            cell.store(u64::from(*head) | u64::from(high) << 32, Ordering::Release);
        }
    }

    /// The board says that an event is due.
    pub(super) fn on_event(&self, cq: &CqShared) {
        self.harvest_all(cq);
        /* any other was raised when its completion was moved */
        if self.solicited.load(Ordering::Relaxed) {
            cq.announce_solicited();
        }
    }
}
