//! Records from one process to another, in slots of memory that both have mapped, for who wants them soon.
//!
//! A record is a slot: a stamp and 60 bytes. What is longer lies in a piece of the ring's data area, which
//! the record names. A reader that polls looks at one word, the next slot's stamp: it says which record the
//! slot holds, so that there is no index to be fetched first. The reader's index gives slots and data back,
//! and tells the writer how far it is.
//!
//! | words | written by |
//! |---|---|
//! | slots and data | writer; the stamp last, with release |
//! | `read` | reader, with release |
//! | `asleep` | set by the reader, cleared by the writer, which then wakes it |
//! | `awaits` | set by the writer, cleared by the reader, which then wakes it |
//!
//! A side with many rings need not poll each: its flag says that it awaits its
//! [`PeerDoorbell`](crate::PeerDoorbell), and the other side rings that.
//!
//! Neither side trusts the other: each keeps its own index to itself, holds the other's against it, and
//! copies bytes before it looks at them. This must not know where the memory comes from, what records mean,
//! or how a sleeper is woken.

use core::cell::UnsafeCell;
use core::ptr::NonNull;

use crate::OwnLine;
use crate::message::Broken;
use crate::notify::{AWAITS, Notify, POLLS, SLEEPS, how_to_notify};
use crate::prefetch;
use crate::sync::{AtomicU32, LoomCells, Ordering, fence};

/// Words of a record.
pub const RECORD_WORDS: usize = 15;
/// Pieces of data begin at multiples of this.
const ALIGN: u32 = 64;

/// A record's bytes, of which the ring knows nothing.
pub type Record = [u32; RECORD_WORDS];

/// The words that both sides of a ring have mapped. All zero: an empty ring whose reader is awake.
#[repr(C)]
pub struct SlotHead {
    /// Records that were read
    read: OwnLine<AtomicU32>,
    /// The reader sleeps until there is a record
    asleep: OwnLine<AtomicU32>,
    /// The writer sleeps until one more was read
    awaits: OwnLine<AtomicU32>,
    watch: LoomCells,
}

impl SlotHead {
    /// As zeroed memory has it, for a ring of so many slots.
    pub fn new(slots: u32) -> Self {
        let zero = || OwnLine(AtomicU32::new(0));
        SlotHead { read: zero(), asleep: zero(), awaits: zero(), watch: LoomCells::new(slots) }
    }
}

/// A record and its stamp: the record's number, from 1 on.
#[repr(C, align(64))]
pub struct StampedRecord {
    stamp: AtomicU32,
    record: UnsafeCell<Record>,
}

impl StampedRecord {
    /// As zeroed memory has it.
    #[allow(clippy::new_without_default, reason = "a ring's part, made with it")]
    pub fn new() -> Self {
        StampedRecord { stamp: AtomicU32::new(0), record: UnsafeCell::new([0; RECORD_WORDS]) }
    }
}

/// Where a ring lies. Sizes are powers of two.
#[derive(Clone, Copy)]
pub struct SlotMemory {
    /// The words of both sides
    pub head: NonNull<SlotHead>,
    /// The slots
    pub slots: NonNull<StampedRecord>,
    /// How many
    pub count: u32,
    /// The data area, aligned to 64
    pub data: NonNull<u8>,
    /// Its bytes
    pub bytes: u32,
}

impl SlotMemory {
    fn head(&self) -> &SlotHead {
        // SAFETY: promised at `SlotWriter::new` and `SlotReader::new`; any bytes are valid for atomics.
        unsafe { self.head.as_ref() }
    }

    #[inline]
    fn slot(&self, number: u32) -> Slot {
        // SAFETY: below the count.
        Slot(unsafe { self.slots.add((number & (self.count - 1)) as usize) })
    }

    fn is_right(&self) -> bool {
        self.count.is_power_of_two() && self.bytes.is_power_of_two() && self.bytes >= ALIGN
    }
}

/// One slot: where it lies.
#[derive(Clone, Copy)]
struct Slot(NonNull<StampedRecord>);

impl Slot {
    /// Its stamp.
    #[inline]
    fn stamp(&self) -> &AtomicU32 {
        // SAFETY: of a ring's memory, as in `SlotMemory::head`.
        unsafe { &(*self.0.as_ptr()).stamp }
    }

    /// Where its record lies.
    #[inline]
    fn record(self) -> *mut Record {
        // SAFETY: as in `stamp`; no reference is made of what others may write.
        unsafe { UnsafeCell::raw_get(&raw const (*self.0.as_ptr()).record) }
    }
}

/// Room for the next record and its data.
#[derive(Clone, Copy, Debug)]
pub struct DataRoom {
    /// Where the record goes: the writer's alone until it is pushed
    pub record: *mut Record,
    /// Where the bytes of its data go
    pub to: *mut u8,
    /// How the record names it
    pub at: u32,
    /// Where the data area goes on behind it
    end: u32,
}

/// What the writer keeps of a record.
#[derive(Clone, Copy, Default)]
struct SentRecord {
    /// Where the data area's next piece began behind it
    end: u32,
    /// Its owner's word
    tag: u32,
}

/// The writing side of a ring.
pub struct SlotWriter {
    memory: SlotMemory,
    /// The slot of the next record
    next: Slot,
    /// Records written, and of those read when it was last looked
    written: u32,
    read: u32,
    /// By slot
    sent: Box<[SentRecord]>,
    /// Bytes of the data area ever given out, and of those given back
    given: u32,
    back: u32,
}

// SAFETY: plain memory without thread affinity; the protocol orders the accesses.
unsafe impl Send for SlotWriter {}

impl SlotWriter {
    /// Of a ring that nobody has written to.
    ///
    /// # Safety
    /// All of `memory` is mapped, writable and aligned as long as the value lives; in this process nobody but
    /// the writer and a reader of the ring has pointers to it that are used.
    pub unsafe fn new(memory: SlotMemory) -> Self {
        debug_assert!(memory.is_right());
        let sent = vec![SentRecord::default(); memory.count as usize].into_boxed_slice();
        SlotWriter { memory, next: memory.slot(0), written: 0, read: 0, sent, given: 0, back: 0 }
    }

    /// Keeps to the first `bytes` of the data area, a power of two of 64 at least, if nothing was written
    /// yet.
    pub fn keep_to(&mut self, bytes: u32) {
        debug_assert!(bytes.is_power_of_two() && bytes >= ALIGN);
        if self.written == 0 {
            self.memory.bytes = bytes.min(self.memory.bytes);
        }
    }

    /// As if so many records were written and read, and so many bytes of data given out and back.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn begin_at(&mut self, number: u32, given: u32) {
        (self.written, self.read, self.next) = (number, number, self.memory.slot(number));
        (self.given, self.back) = (given, given);
    }

    /// Records written so far; the next one's number less 1.
    #[inline]
    pub fn written(&self) -> u32 {
        self.written
    }

    /// Of these those that were read, as far as is known.
    #[inline]
    pub fn read(&self) -> u32 {
        self.read
    }

    /// How many slots the ring has: a power of two.
    #[inline]
    pub fn slots(&self) -> u32 {
        self.memory.count
    }

    /// Whether all that was written has been read, as far as is known.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.read == self.written
    }

    /// Looks how many records were read.
    ///
    /// # Errors
    /// [`Broken`]
    #[inline]
    pub fn look(&mut self) -> Result<u32, Broken> {
        /* acquire: the reader's copying comes before our writing over it */
        let read = self.memory.head().read.load(Ordering::Acquire);
        if read == self.read {
            return Ok(read);
        }
        /* it goes on from what it was, and not past what was written */
        if self.written.wrapping_sub(read) > self.written.wrapping_sub(self.read) {
            return Err(Broken);
        }
        self.read = read;
        self.back = self.sent(read.wrapping_sub(1)).end;
        Ok(read)
    }

    /// Whether there is room for one record more without data.
    ///
    /// # Errors
    /// [`Broken`]
    #[inline]
    pub fn has_room(&mut self) -> Result<bool, Broken> {
        if !self.is_full() {
            return Ok(true);
        }
        self.look()?;
        Ok(!self.is_full())
    }

    /// Whether all slots hold records that are unread, as far as is known.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.written.wrapping_sub(self.read) >= self.memory.count
    }

    /// Room for one record with `len` bytes of data; `None`: there is none now.
    ///
    /// # Errors
    /// [`Broken`]
    #[inline(always)]
    pub fn room(&mut self, len: u32) -> Result<Option<DataRoom>, Broken> {
        if let Some(room) = self.fits(len) {
            return Ok(Some(room));
        }
        self.look()?;
        Ok(self.fits(len))
    }

    #[inline(always)]
    fn fits(&mut self, len: u32) -> Option<DataRoom> {
        if self.is_full() {
            return None;
        }
        let record = self.next.record();
        if len == 0 {
            return Some(DataRoom { record, to: self.memory.data.as_ptr(), at: 0, end: self.given });
        }
        let (to, at, end) = self.piece(len)?;
        Some(DataRoom { record, to, at, end })
    }

    /// The next piece of the data area, if there is room: where it lies, how a record names it, and where the
    /// area goes on behind it.
    #[inline(never)]
    fn piece(&mut self, len: u32) -> Option<(*mut u8, u32, u32)> {
        let SlotMemory { bytes, data, .. } = self.memory;
        if len > bytes {
            return None;
        }
        if self.is_idle() {
            /* from the beginning: a ring with little in it keeps to few pages */
            self.given = self.given.wrapping_add(bytes - 1) & !(bytes - 1);
            self.back = self.given;
        }
        let mut at = self.given & (bytes - 1);
        let mut end = self.given.wrapping_add(len.next_multiple_of(ALIGN));
        if len > bytes - at {
            /* one piece: it begins anew where it would reach beyond the end */
            end = end.wrapping_add(bytes - at);
            at = 0;
        }
        if end.wrapping_sub(self.back) > bytes {
            return None;
        }
        // SAFETY: at + len <= bytes, inside the data area.
        Some((unsafe { data.as_ptr().add(at as usize) }, at, end))
    }

    /// Writes the next record, for which there was this room last; its data has been written there.
    #[inline]
    pub fn push(&mut self, record: &Record, room: DataRoom) {
        self.memory.head().watch.write(self.written & (self.memory.count - 1));
        // SAFETY: the slot is the writer's: there was room. What the peer does to it meanwhile is its own
        // loss.
        unsafe { room.record.write(*record) };
        self.push_written(room, 0);
    }

    /// The same of a record that has been written to its place. `tag` is kept until the slot is used again.
    #[inline]
    pub fn push_written(&mut self, room: DataRoom, tag: u32) {
        self.given = room.end;
        let number = self.written;
        let at = number as usize & (self.sent.len() - 1);
        self.sent[at] = SentRecord { end: room.end, tag };
        self.written = number.wrapping_add(1);
        /* release: the record and its data before the stamp */
        self.next.stamp().store(self.written, Ordering::Release);
        self.next = self.memory.slot(self.written);
    }

    /// What was given with a record, one of the last that the ring has slots for.
    #[inline]
    pub fn tag(&self, number: u32) -> u32 {
        self.sent(number).tag
    }

    #[inline]
    fn sent(&self, number: u32) -> SentRecord {
        self.sent[number as usize & (self.sent.len() - 1)]
    }

    /// After one push or more: how the reader is to be notified.
    #[inline]
    pub fn must_notify(&self) -> Notify {
        /* the stamps before the look at the flag; see `SlotReader::sleep` */
        fence(Ordering::SeqCst);
        how_to_notify(&self.memory.head().asleep)
    }

    /// Asks the reader for a wake-up once it has read more. False: it has, meanwhile.
    ///
    /// # Errors
    /// [`Broken`]
    pub fn sleep(&mut self) -> Result<bool, Broken> {
        let before = self.read;
        self.memory.head().awaits.store(SLEEPS, Ordering::Relaxed);
        /* the flag before the look at the index; see `SlotReader::give_back` */
        fence(Ordering::SeqCst);
        Ok(self.look()? == before)
    }

    /// The reader is to ring this side's doorbell each time that it has read more, once that is armed. What
    /// it has read before is looked for behind that.
    pub fn await_doorbell(&self) {
        self.memory.head().awaits.store(AWAITS, Ordering::Relaxed);
    }
}

/// The reading side of a ring.
pub struct SlotReader {
    memory: SlotMemory,
    /// The slot of the next record
    next: Slot,
    read: u32,
    /// What the writer knows of it
    given_back: u32,
    /// It was not looked whether the writer waits for that
    unseen: bool,
}

// SAFETY: plain memory without thread affinity; the protocol orders the accesses.
unsafe impl Send for SlotReader {}

impl SlotReader {
    /// Of a ring that nobody has read from.
    ///
    /// # Safety
    /// As [`SlotWriter::new`].
    pub unsafe fn new(memory: SlotMemory) -> Self {
        debug_assert!(memory.is_right());
        SlotReader { memory, next: memory.slot(0), read: 0, given_back: 0, unseen: false }
    }

    /// As if so many records were read and given back.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn begin_at(&mut self, number: u32) {
        (self.read, self.given_back, self.next) = (number, number, self.memory.slot(number));
    }

    /// How many slots the ring has: a power of two.
    #[inline]
    pub fn slots(&self) -> u32 {
        self.memory.count
    }

    /// Records that were popped: the number of the last one.
    #[inline]
    pub fn popped(&self) -> u32 {
        self.read
    }

    /// Whether there is a record.
    #[inline]
    pub fn has_next(&self) -> bool {
        /* acquire: the stamp before the record */
        self.next.stamp().load(Ordering::Acquire) == self.read.wrapping_add(1)
    }

    /// The oldest record; `None`: there is none. It stays until [`SlotReader::pop`].
    #[inline(always)]
    pub fn peek(&self) -> Option<Record> {
        if !self.has_next() {
            return None;
        }
        self.memory.head().watch.read(self.read & (self.memory.count - 1));
        // SAFETY: the writer leaves the slot alone until it is given back; one that does not changes bytes
        // that are looked at only after they are copied.
        Some(unsafe { self.next.record().read() })
    }

    /// A word of the record that comes so many behind the oldest one; `None`: there is none yet.
    #[inline]
    pub fn word_ahead(&self, behind: u32, word: usize) -> Option<u32> {
        let number = self.read.wrapping_add(behind);
        let slot = self.memory.slot(number);
        if slot.stamp().load(Ordering::Acquire) != number.wrapping_add(1) || word >= RECORD_WORDS {
            return None;
        }
        self.memory.head().watch.read(number & (self.memory.count - 1));
        // SAFETY: as in `peek`.
        Some(unsafe { slot.record().cast::<u32>().add(word).read() })
    }

    /// Has the slot that comes so many behind the oldest one fetched into the CPU's caches.
    #[inline]
    pub fn fetch_ahead(&self, behind: u32) {
        prefetch(self.memory.slot(self.read.wrapping_add(behind)).0.as_ptr().cast());
    }

    /// Where the data of the oldest record lies, as it names it: bytes that its writer may change at any
    /// time. `None`: outside of the data area.
    #[inline]
    pub fn data(&self, at: u32, len: u32) -> Option<*const u8> {
        let inside = at <= self.memory.bytes && len <= self.memory.bytes - at;
        // SAFETY: inside the data area, or at its end.
        inside.then(|| unsafe { self.memory.data.as_ptr().add(at as usize).cast_const() })
    }

    /// The oldest record is done with.
    #[inline]
    pub fn pop(&mut self) {
        self.read = self.read.wrapping_add(1);
        self.next = self.memory.slot(self.read);
    }

    /// The writer has the slots and data of what was popped, and sees that it was read before it sees
    /// anything that is stored later. How it is to be notified says [`SlotReader::must_notify`].
    #[inline]
    pub fn publish(&mut self) {
        if self.read != self.given_back {
            (self.given_back, self.unseen) = (self.read, true);
            /* release: the copying before the index */
            self.memory.head().read.store(self.read, Ordering::Release);
        }
    }

    /// Whether [`SlotReader::must_notify`] has to look.
    #[inline]
    pub fn may_notify(&self) -> bool {
        self.unseen
    }

    /// After one publish or more: how the writer, if it waited for that, is to be notified.
    #[inline]
    pub fn must_notify(&mut self) -> Notify {
        if !std::mem::take(&mut self.unseen) {
            return Notify::No;
        }
        /* the index before the look at the flag; see `SlotWriter::sleep` */
        fence(Ordering::SeqCst);
        how_to_notify(&self.memory.head().awaits)
    }

    /// Whether the writer awaits its doorbell, and so does not see by itself what is given back.
    #[inline]
    pub fn is_awaited(&self) -> bool {
        self.memory.head().awaits.load(Ordering::Relaxed) == AWAITS
    }

    /// Both at once.
    #[inline]
    pub fn give_back(&mut self) -> Notify {
        self.publish();
        self.must_notify()
    }

    /// The writer is to wake the reader when there is a record. False: there is one now.
    pub fn sleep(&self) -> bool {
        self.memory.head().asleep.store(SLEEPS, Ordering::Relaxed);
        /* the flag before the look at the stamp: the writer sees that this side sleeps, or this side the
         * record */
        fence(Ordering::SeqCst);
        !self.has_next()
    }

    /// It looks by itself from now on, and need not be woken.
    #[inline]
    pub fn wake(&self) {
        self.memory.head().asleep.store(POLLS, Ordering::Relaxed);
    }

    /// The writer is to ring this side's doorbell each time that there is a record, once that is armed. One
    /// that was there before is looked for behind that.
    pub fn await_doorbell(&self) {
        self.memory.head().asleep.store(AWAITS, Ordering::Relaxed);
    }
}
