//! Memory of a queue, in a client's maps.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use starverbs_queues::board::COUNTER_DMA_MISSES;
use zerocopy::IntoBytes;

use super::PAGE;
use crate::counters::BoardCounters;
use crate::record::BusTap;

/// Whether the memory of a room may be touched.
pub(super) struct RoomGate {
    /// DMA addresses of its first and last byte
    pub(super) first: u64,
    pub(super) last: u64,
    /// A map of it has ended
    pub(super) unmapped: Cell<bool>,
    /// The function masters the bus
    pub(super) master: Rc<Cell<bool>>,
    pub(super) counters: Rc<BoardCounters>,
    pub(super) tap: BusTap,
}

/// Where it is.
pub(super) enum Location {
    One(*mut u8),
    /// Its pages, of [`PAGE`] bytes, and where in the first one it begins
    Pages(Box<[*mut u8]>, usize),
}

/// Memory of a queue. When a map of it ends, or while the function masters no bus, it reads as 0, and what is
/// written is lost; either is counted as a miss.
pub(crate) struct QueueRoom {
    pub(super) gate: Rc<RoomGate>,
    pub(super) place: Location,
    pub(super) len: usize,
}

impl QueueRoom {
    /// Whether its memory may be touched; if not, that is a miss.
    ///
    /// # Panics
    /// The bytes do not lie in the room.
    fn is_open(&self, at: usize, len: usize) -> bool {
        assert!(at <= self.len && len <= self.len - at, "bytes outside of a queue");
        let RoomGate { unmapped, master, counters, .. } = &*self.gate;
        let open = !unmapped.get() && master.get();
        if !open {
            counters.inc(COUNTER_DMA_MISSES);
        }
        open
    }

    /// The DMA address of a byte.
    fn address(&self, at: usize) -> u64 {
        self.gate.first + at as u64
    }

    /// Where a byte is, of a room that is open.
    fn pointer(&self, at: usize) -> *mut u8 {
        match &self.place {
            Location::One(first) => first.wrapping_add(at),
            Location::Pages(pages, skip) => {
                let at = at + skip;
                pages[at / PAGE as usize].wrapping_add(at % PAGE as usize)
            }
        }
    }

    /// Bytes from `at` on that lie one after the other.
    fn run(&self, at: usize) -> usize {
        match &self.place {
            Location::One(_) => self.len - at,
            Location::Pages(_, skip) => PAGE as usize - (at + skip) % PAGE as usize,
        }
    }

    /// An aligned word of 64 bits of a room that is open.
    fn word(&self, at: usize) -> &AtomicU64 {
        let word = self.pointer(at).cast::<u64>();
        assert!(word.is_aligned(), "half a word");
        // SAFETY: aligned, and in a mapping that is there as long as the gate is open, which it is until a
        // message of the client is served: not while this borrow lives.
        unsafe { AtomicU64::from_ptr(word) }
    }

    /// The same of 32 bits.
    fn half(&self, at: usize) -> &AtomicU32 {
        let half = self.pointer(at).cast::<u32>();
        assert!(half.is_aligned(), "half a word");
        // SAFETY: as in `word`.
        unsafe { AtomicU32::from_ptr(half) }
    }

    /// Words of 64 bits from `at` on, which the client may change meanwhile. Those that are not there stay.
    ///
    /// # Panics
    /// They do not lie in the room, or are not aligned: here and below.
    pub(crate) fn words(&self, at: usize, to: &mut [u64]) {
        if self.is_open(at, size_of_val(to)) {
            self.gate.tap.read(self.address(at), to.as_mut_bytes(), |bytes| {
                for (n, word) in bytes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                    *word = self.word(at + 8 * n).load(Ordering::Relaxed).to_ne_bytes();
                }
                true
            });
        }
    }

    /// Stores words of 64 bits, the last one so that who sees it sees the others (release).
    pub(crate) fn store(&self, at: usize, words: &[u64]) {
        if self.is_open(at, size_of_val(words)) {
            self.gate.tap.write(self.address(at), words.as_bytes(), || {
                for (n, word) in words.iter().enumerate() {
                    let is_last = n + 1 == words.len();
                    let order = if is_last { Ordering::Release } else { Ordering::Relaxed };
                    self.word(at + 8 * n).store(*word, order);
                }
                true
            });
        }
    }

    /// A word of 32 bits.
    pub(crate) fn load_half(&self, at: usize, order: Ordering) -> u32 {
        let mut half = [0; 4];
        if self.is_open(at, half.len()) {
            self.gate.tap.read(self.address(at), &mut half, |half| {
                half.copy_from_slice(&self.half(at).load(order).to_ne_bytes());
                true
            });
        }
        u32::from_ne_bytes(half)
    }

    /// The same, stored.
    pub(crate) fn store_half(&self, at: usize, value: u32, order: Ordering) {
        if self.is_open(at, 4) {
            self.gate.tap.write(self.address(at), &value.to_ne_bytes(), || {
                self.half(at).store(value, order);
                true
            });
        }
    }

    /// Copies bytes at `at`.
    pub(crate) fn read(&self, at: usize, to: &mut [u8]) {
        to.fill(0);
        if self.is_open(at, to.len()) {
            self.gate.tap.read(self.address(at), to, |to| {
                let mut done = 0;
                while done < to.len() {
                    let run = self.run(at + done).min(to.len() - done);
                    // SAFETY: inside a mapping that is there; `to` is ours, and has the bytes.
                    unsafe { to[done..].as_mut_ptr().copy_from(self.pointer(at + done), run) };
                    done += run;
                }
                true
            });
        }
    }

    /// The other way round.
    pub(crate) fn write(&self, at: usize, from: &[u8]) {
        if self.is_open(at, from.len()) {
            self.gate.tap.write(self.address(at), from, || {
                let mut done = 0;
                while done < from.len() {
                    let run = self.run(at + done).min(from.len() - done);
                    // SAFETY: inside a mapping that is there and may be written.
                    unsafe { self.pointer(at + done).copy_from(from[done..].as_ptr(), run) };
                    done += run;
                }
                true
            });
        }
    }
}
