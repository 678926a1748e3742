//! Messages between two processes through memory that both have mapped: one writes, one reads.
//!
//! A ring is a power of two of bytes and two free-running counts of bytes, each written by one side alone.
//! Neither side trusts the other: each keeps its own count to itself, looks once at what the other writes,
//! holds it against its own, and copies bytes out before it looks at them. A peer that breaks the rules is
//! found out ([`Broken`]), or gives wrong bytes, and no more.
//!
//! Two flags show that a side sleeps: the reader for a message, the writer for room. Who ends the reason
//! wakes the sleeper. Owns the ring and the flags; it must not know where the memory comes from, what
//! messages mean, or how a sleeper is woken.

use core::ptr::NonNull;

use crate::OwnLine;
use crate::sync::{AtomicU32, LoomCells, Ordering, fence};

/// Messages begin at multiples of this. The first half is the message's length.
const UNIT: usize = 8;
const LENGTH: usize = 4;

/// The words that both sides of a ring have mapped. All zero: an empty ring, whose reader is awake.
#[repr(C)]
pub struct MessageHead {
    /// Bytes that were written
    written: OwnLine<AtomicU32>,
    /// Bytes that were read
    read: OwnLine<AtomicU32>,
    flags: OwnLine<Flags>,
    watch: LoomCells,
}

struct Flags {
    /// The reader sleeps until there is a message
    asleep: AtomicU32,
    /// The writer sleeps until there is room
    starved: AtomicU32,
}

impl MessageHead {
    /// As zeroed memory has it, for a ring of `size` bytes.
    pub fn new(size: u32) -> Self {
        let zero = || AtomicU32::new(0);
        MessageHead {
            written: OwnLine(zero()),
            read: OwnLine(zero()),
            flags: OwnLine(Flags { asleep: zero(), starved: zero() }),
            watch: LoomCells::new(size / UNIT as u32),
        }
    }
}

/// The other side does not keep to the rules: the ring is of no use any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Broken;

/// What became of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Written {
    /// It is in the ring; `wake`: the reader sleeps
    Yes {
        /// The reader must be woken
        wake: bool,
    },
    /// There is no room for it now
    NoRoom,
}

/// Bytes that a message of `len` bytes takes.
fn record(len: usize) -> usize {
    (LENGTH + len).next_multiple_of(UNIT)
}

/// One side's view of the memory.
struct RingView {
    head: NonNull<MessageHead>,
    data: NonNull<u8>,
    size: u32,
}

// SAFETY: plain memory without thread affinity; the protocol orders the accesses.
unsafe impl Send for RingView {}

impl RingView {
    fn head(&self) -> &MessageHead {
        // SAFETY: promised at `MessageWriter::new` and `MessageReader::new`; any bytes are valid for atomics.
        unsafe { self.head.as_ref() }
    }

    /// Where position `at` lies, and how many bytes follow before the ring begins anew.
    fn place(&self, at: u32) -> (*mut u8, usize) {
        let from = at & (self.size - 1);
        // SAFETY: below the size, so inside of the data.
        (unsafe { self.data.as_ptr().add(from as usize) }, (self.size - from) as usize)
    }

    /// Copies into the ring, from position `at` on.
    ///
    /// # Safety
    /// The bytes can be read; others may write them meanwhile.
    unsafe fn write(&self, at: u32, piece: *const [u8]) {
        let (from, len) = (piece.cast::<u8>(), piece.len());
        debug_assert!(len <= self.size as usize);
        self.touch(at, len, |unit| self.head().watch.write(unit));
        let (to, room) = self.place(at);
        let first = len.min(room);
        // SAFETY: the first bytes fit before the end, the rest before where they begin; the rest is the
        // caller's terms. What the peer does to the bytes meanwhile is its own loss.
        unsafe {
            to.copy_from_nonoverlapping(from, first);
            self.data.as_ptr().copy_from_nonoverlapping(from.add(first), len - first);
        }
    }

    /// Copies out of the ring, from position `at` on.
    fn read(&self, at: u32, bytes: &mut [u8]) {
        debug_assert!(bytes.len() <= self.size as usize);
        self.touch(at, bytes.len(), |unit| self.head().watch.read(unit));
        let (from, room) = self.place(at);
        let (first, rest) = bytes.split_at_mut(bytes.len().min(room));
        // SAFETY: as in `write`; the bytes are looked at only after they are copied.
        unsafe {
            first.as_mut_ptr().copy_from_nonoverlapping(from, first.len());
            rest.as_mut_ptr().copy_from_nonoverlapping(self.data.as_ptr(), rest.len());
        }
    }

    /// For loom: which units are looked at or written.
    #[inline]
    fn touch(&self, at: u32, len: usize, mut see: impl FnMut(u32)) {
        if cfg!(loom) {
            let units = self.size / UNIT as u32;
            let first = at / UNIT as u32;
            (first..(at + len as u32).div_ceil(UNIT as u32)).for_each(|unit| see(unit % units));
        }
    }
}

/// The writing side of a ring.
pub struct MessageWriter {
    ring: RingView,
    written: u32,
    /// What the reader has read, when it was last looked at
    read: u32,
}

impl MessageWriter {
    /// Of a ring that nobody has written to.
    ///
    /// # Safety
    /// `head` and `size` bytes at `data` are mapped, writable and aligned (for the head) as long as the value
    /// lives; in this process nobody but the writer and a reader of the ring has pointers to them that are
    /// used. `size` is a power of two, 16 or more.
    pub unsafe fn new(head: NonNull<MessageHead>, data: NonNull<u8>, size: u32) -> Self {
        debug_assert!(size.is_power_of_two() && size as usize >= 2 * UNIT);
        MessageWriter { ring: RingView { head, data, size }, written: 0, read: 0 }
    }

    /// Longest message for which [`MessageWriter::await_room`] promises anything.
    pub fn longest(&self) -> usize {
        self.ring.size as usize / 2 - LENGTH
    }

    /// Writes one message, of these parts.
    ///
    /// # Errors
    /// [`Broken`]
    #[inline]
    pub fn push(&mut self, parts: &[&[u8]]) -> Result<Written, Broken> {
        // SAFETY: references can be read.
        unsafe { self.push_pieces(parts.iter().map(|part| &raw const **part)) }
    }

    /// As [`MessageWriter::push`], of pieces of memory.
    ///
    /// # Safety
    /// They can be read; others may write them meanwhile.
    ///
    /// # Errors
    /// [`Broken`]
    #[inline]
    pub unsafe fn push_pieces(
        &mut self,
        pieces: impl Iterator<Item = *const [u8]> + Clone,
    ) -> Result<Written, Broken> {
        let len = pieces.clone().map(<*const [u8]>::len).sum::<usize>();
        if !self.has_room(len)? {
            return Ok(Written::NoRoom);
        }
        /* it has room, so that its length is below the ring's */
        let length = (len as u32).to_ne_bytes();
        let mut at = self.written;
        for piece in core::iter::once(&raw const length[..]).chain(pieces) {
            // SAFETY: the caller's terms, and an array that lives.
            unsafe { self.ring.write(at, piece) };
            at = at.wrapping_add(piece.len() as u32);
        }
        self.written = self.written.wrapping_add(record(len) as u32);
        let head = self.ring.head();
        /* release: the message before the count */
        head.written.store(self.written, Ordering::Release);
        /* the count before the look at the flag; see `MessageReader::sleep` */
        fence(Ordering::SeqCst);
        let asleep = &head.flags.asleep;
        let wake = asleep.load(Ordering::Relaxed) != 0 && asleep.swap(0, Ordering::Relaxed) != 0;
        Ok(Written::Yes { wake })
    }

    /// Whether a message of `len` bytes finds room.
    ///
    /// # Errors
    /// [`Broken`]
    #[inline]
    pub fn has_room(&mut self, len: usize) -> Result<bool, Broken> {
        let size = self.ring.size;
        let fits = |read: u32| record(len) <= (size - self.written.wrapping_sub(read)) as usize;
        if fits(self.read) {
            return Ok(true);
        }
        /* acquire: the reader's copying comes before our writing over it */
        let read = self.ring.head().read.load(Ordering::Acquire);
        /* it goes on from what it was, and not past what was written */
        if self.written.wrapping_sub(read) > self.written.wrapping_sub(self.read) {
            return Err(Broken);
        }
        self.read = read;
        Ok(fits(read))
    }

    /// There was no room for a message of `len` bytes, at most [`MessageWriter::longest`]: the reader reports
    /// when there is. True: there is room now.
    ///
    /// # Errors
    /// [`Broken`]
    pub fn await_room(&mut self, len: usize) -> Result<bool, Broken> {
        self.ring.head().flags.starved.store(1, Ordering::Relaxed);
        /* the flag before the look at the count; see `MessageReader::pop` */
        fence(Ordering::SeqCst);
        self.has_room(len)
    }
}

/// The reading side of a ring.
pub struct MessageReader {
    ring: RingView,
    read: u32,
    /// What the writer has written, when it was last looked at
    written: u32,
    /// Length of the oldest message, once that was looked at
    next: Option<u32>,
}

impl MessageReader {
    /// Of a ring that nobody has read from.
    ///
    /// # Safety
    /// As [`MessageWriter::new`].
    pub unsafe fn new(head: NonNull<MessageHead>, data: NonNull<u8>, size: u32) -> Self {
        debug_assert!(size.is_power_of_two() && size as usize >= 2 * UNIT);
        MessageReader { ring: RingView { head, data, size }, read: 0, written: 0, next: None }
    }

    /// Length of the oldest message; `None`: there is none.
    ///
    /// # Errors
    /// [`Broken`]
    #[inline]
    pub fn peek(&mut self) -> Result<Option<usize>, Broken> {
        if let Some(len) = self.next {
            return Ok(Some(len as usize));
        }
        if self.written == self.read && !self.refresh()? {
            return Ok(None);
        }
        let mut len = [0; LENGTH];
        self.ring.read(self.read, &mut len);
        let len = u32::from_ne_bytes(len);
        /* of what is written, whatever the length is: there is a unit at least */
        if len > self.written.wrapping_sub(self.read) - LENGTH as u32 {
            return Err(Broken);
        }
        self.next = Some(len);
        Ok(Some(len as usize))
    }

    /// Looks at what the writer has written. False: nothing more.
    fn refresh(&mut self) -> Result<bool, Broken> {
        /* acquire: the count before the messages */
        let written = self.ring.head().written.load(Ordering::Acquire);
        let there = written.wrapping_sub(self.read);
        if there > self.ring.size || !(written as usize).is_multiple_of(UNIT) {
            return Err(Broken);
        }
        self.written = written;
        Ok(there > 0)
    }

    /// Copies bytes of the oldest message, from its byte `at` on; as many as it has and `to` takes.
    #[inline]
    pub fn copy(&self, at: usize, to: &mut [u8]) -> usize {
        let len = (self.next.unwrap_or(0) as usize).saturating_sub(at).min(to.len());
        let from = self.read.wrapping_add((LENGTH + at) as u32);
        self.ring.read(from, &mut to[..len]);
        len
    }

    /// The oldest message is done with, which [`MessageReader::peek`] found. True: the writer waits for room,
    /// and must be woken when there is.
    #[inline]
    pub fn pop(&mut self) -> bool {
        let Some(len) = self.next.take() else { return false };
        self.read = self.read.wrapping_add(record(len as usize) as u32);
        let head = self.ring.head();
        /* release: the copying before the count */
        head.read.store(self.read, Ordering::Release);
        /* the count before the look at the flag: the writer sees that there is room, or this side that it
         * waits */
        fence(Ordering::SeqCst);
        /* not for each message: once half of the ring is free, when any that may be waited for has room */
        let starved = &head.flags.starved;
        starved.load(Ordering::Relaxed) != 0
            && head.written.load(Ordering::Relaxed).wrapping_sub(self.read) <= self.ring.size / 2
            && starved.swap(0, Ordering::Relaxed) != 0
    }

    /// The writer is to wake the reader when there is a message. False: there is one now.
    ///
    /// # Errors
    /// [`Broken`]
    pub fn sleep(&mut self) -> Result<bool, Broken> {
        let asleep = &self.ring.head().flags.asleep;
        asleep.store(1, Ordering::Relaxed);
        /* the flag before the look at the count: the writer sees that this side sleeps, or this side the
         * message */
        fence(Ordering::SeqCst);
        let empty = self.peek()?.is_none();
        if !empty {
            self.wake();
        }
        Ok(empty)
    }

    /// It looks by itself from now on, and need not be woken.
    #[inline]
    pub fn wake(&self) {
        self.ring.head().flags.asleep.store(0, Ordering::Relaxed);
    }
}
