//! Memory of a queue, in a client's maps.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use starverbs_queues::BLOCK;
use starverbs_queues::board::COUNTER_DMA_MISSES;

use super::PAGE;
use crate::counters::BoardCounters;

/// Whether the memory of a room may be touched.
pub(super) struct Gate {
    /// DMA addresses of its first and last byte
    pub(super) first: u64,
    pub(super) last: u64,
    /// A map of it has ended
    pub(super) unmapped: Cell<bool>,
    /// The function masters the bus
    pub(super) master: Rc<Cell<bool>>,
    pub(super) counters: Rc<BoardCounters>,
}

/// Where it is.
pub(super) enum Place {
    One(*mut u8),
    /// Its pages, of [`PAGE`] bytes, and where in the first one it begins
    Pages(Box<[*mut u8]>, usize),
}

/// Memory of a queue. When a map of it ends, or while the function masters no bus, it reads as 0, and what is
/// written is lost; either is counted as a miss.
pub(crate) struct Room {
    pub(super) gate: Rc<Gate>,
    pub(super) place: Place,
    pub(super) len: usize,
}

impl Room {
    /// Where `len` bytes at `at` are, of which a room has the first page's and no others'.
    ///
    /// # Panics
    /// They do not lie in the room.
    fn at(&self, at: usize, len: usize) -> Option<*mut u8> {
        assert!(at <= self.len && len <= self.len - at, "bytes outside of a queue");
        if self.gate.unmapped.get() || !self.gate.master.get() {
            self.gate.counters.inc(COUNTER_DMA_MISSES);
            return None;
        }
        Some(match &self.place {
            Place::One(first) => first.wrapping_add(at),
            Place::Pages(pages, skip) => {
                let at = at + skip;
                pages[at / PAGE as usize].wrapping_add(at % PAGE as usize)
            }
        })
    }

    /// Bytes from `at` on that lie one after the other.
    fn run(&self, at: usize) -> usize {
        match &self.place {
            Place::One(_) => self.len - at,
            Place::Pages(_, skip) => PAGE as usize - (at + skip) % PAGE as usize,
        }
    }

    /// The words of a block at `at`, which the client may change meanwhile.
    ///
    /// # Panics
    /// It does not lie in the room, or is not aligned: here and below.
    pub(crate) fn block(&self, at: usize) -> [u64; BLOCK / 8] {
        std::array::from_fn(|word| self.load(at + 8 * word, Ordering::Relaxed))
    }

    /// A word of 64 bits.
    pub(crate) fn load(&self, at: usize, order: Ordering) -> u64 {
        // SAFETY: `word` gives an aligned word of a mapping that is there, as the gate is open.
        self.word(at).map_or(0, |word| unsafe { AtomicU64::from_ptr(word) }.load(order))
    }

    /// The same, stored.
    pub(crate) fn store(&self, at: usize, value: u64, order: Ordering) {
        if let Some(word) = self.word(at) {
            // SAFETY: as in `load`, and rooms may be written.
            unsafe { AtomicU64::from_ptr(word) }.store(value, order);
        }
    }

    fn word(&self, at: usize) -> Option<*mut u64> {
        let word = self.at(at, 8)?.cast::<u64>();
        assert!(word.is_aligned(), "half a word");
        Some(word)
    }

    /// A word of 32 bits.
    pub(crate) fn load_half(&self, at: usize, order: Ordering) -> u32 {
        // SAFETY: as in `load`.
        self.half(at).map_or(0, |half| unsafe { AtomicU32::from_ptr(half) }.load(order))
    }

    /// The same, stored.
    pub(crate) fn store_half(&self, at: usize, value: u32, order: Ordering) {
        if let Some(half) = self.half(at) {
            // SAFETY: as in `store`.
            unsafe { AtomicU32::from_ptr(half) }.store(value, order);
        }
    }

    fn half(&self, at: usize) -> Option<*mut u32> {
        let half = self.at(at, 4)?.cast::<u32>();
        assert!(half.is_aligned(), "half a word");
        Some(half)
    }

    /// Copies bytes at `at`.
    pub(crate) fn read(&self, at: usize, to: &mut [u8]) {
        to.fill(0);
        let mut done = 0;
        while done < to.len() {
            let run = self.run(at + done).min(to.len() - done);
            let Some(from) = self.at(at + done, run) else { return };
            // SAFETY: inside a mapping that is there; `to` is ours, and has the bytes.
            unsafe { to[done..].as_mut_ptr().copy_from(from, run) };
            done += run;
        }
    }

    /// The other way round.
    pub(crate) fn write(&self, at: usize, from: &[u8]) {
        let mut done = 0;
        while done < from.len() {
            let run = self.run(at + done).min(from.len() - done);
            let Some(to) = self.at(at + done, run) else { return };
            // SAFETY: inside a mapping that is there and may be written.
            unsafe { to.copy_from(from[done..].as_ptr(), run) };
            done += run;
        }
    }
}
