//! A ring of records against a plain queue, and against a peer that writes anything.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};
use std::collections::VecDeque;

use proptest::prelude::*;

use crate::{
    Broken, DataRoom, Notify, PeerDoorbell, RECORD_WORDS, Record, SlotHead, SlotMemory, SlotReader,
    SlotWriter, StampedRecord,
};

const HEAD: usize = size_of::<SlotHead>();
const SLOT: usize = size_of::<StampedRecord>();
/// Where the head has the reader's index.
const READ: usize = 0;
const CASES: u32 = if cfg!(miri) { 8 } else { 512 };
const STEPS: usize = if cfg!(miri) { 60 } else { 400 };

/// Memory as both sides have it mapped: the head, the slots, the data area.
struct Memory {
    words: Vec<u64>,
    count: u32,
    bytes: u32,
}

impl Memory {
    fn new(count: u32, bytes: u32) -> Memory {
        let len = HEAD + count as usize * SLOT + bytes as usize;
        Memory { words: vec![0; (len + 64).div_ceil(8)], count, bytes }
    }

    fn len(&self) -> usize {
        HEAD + self.count as usize * SLOT + self.bytes as usize
    }

    fn base(&mut self) -> *mut u8 {
        let base = self.words.as_mut_ptr().cast::<u8>();
        base.wrapping_add(base.align_offset(64))
    }

    fn layout(&mut self) -> SlotMemory {
        let (count, bytes, base) = (self.count, self.bytes, self.base());
        let at = |at: usize| NonNull::new(base.wrapping_add(at)).expect("an address");
        let (slots, data) = (at(HEAD).cast(), at(HEAD + count as usize * SLOT));
        SlotMemory { head: at(0).cast(), slots, count, data, bytes }
    }

    fn ends(&mut self) -> (SlotWriter, SlotReader) {
        let layout = self.layout();
        // SAFETY: the tests keep the memory as long as both ends, and use one thread.
        unsafe { (SlotWriter::new(layout), SlotReader::new(layout)) }
    }

    /// Both ends, two laps before their indices wrap.
    fn ends_before_the_wrap(&mut self) -> (SlotWriter, SlotReader) {
        let (mut writer, mut reader) = self.ends();
        let (number, given) = (0u32.wrapping_sub(2 * self.count), 0u32.wrapping_sub(2 * self.bytes));
        writer.begin_at(number, given);
        reader.begin_at(number);
        self.set_word(READ, number);
        (writer, reader)
    }

    /// What a peer that may write everywhere does: a word of the head, a stamp, or any other.
    fn set_word(&mut self, at: usize, word: u32) {
        let at = (at % self.len()) & !3;
        let is_atomic =
            at < HEAD || at < self.len() - self.bytes as usize && (at - HEAD).is_multiple_of(SLOT);
        let to = self.base().wrapping_add(at).cast::<u32>();
        // SAFETY: inside of the memory and aligned; nobody holds a reference to it now. Atomics are written
        // as the other side writes them, which miri's weak memory asks for.
        unsafe {
            if is_atomic {
                AtomicU32::from_ptr(to).store(word, Ordering::Relaxed);
            } else {
                to.write(word);
            }
        }
    }

    fn stamp(slot: usize) -> usize {
        HEAD + slot * SLOT
    }
}

fn record(tag: u32) -> Record {
    core::array::from_fn(|at| tag.wrapping_mul(31).wrapping_add(at as u32))
}

/// Whether the room and `len` bytes behind it are inside the data area.
fn is_inside(memory: SlotMemory, room: &DataRoom, len: u32) -> bool {
    let offset = (room.to as usize).wrapping_sub(memory.data.as_ptr() as usize);
    offset == room.at as usize && room.at <= memory.bytes && len <= memory.bytes - room.at
}

fn fill(room: &DataRoom, data: &[u8]) {
    // SAFETY: `is_inside` was asserted, and the ring's users are on this thread.
    unsafe { room.to.copy_from(data.as_ptr(), data.len()) };
}

fn copy(reader: &SlotReader, at: u32, len: u32) -> Option<Vec<u8>> {
    let from = reader.data(at, len)?;
    let mut bytes = vec![0; len as usize];
    // SAFETY: as many bytes are there, by `data`.
    unsafe { from.copy_to(bytes.as_mut_ptr(), bytes.len()) };
    Some(bytes)
}

/// A ring whose writer and reader are honest, and the plain queue that it should be.
struct Pair {
    layout: SlotMemory,
    writer: SlotWriter,
    reader: SlotReader,
    /// Written and not popped; popped and not given back
    unread: VecDeque<Piece>,
    held: VecDeque<Piece>,
    tag: u32,
    _memory: Memory,
}

struct Piece {
    record: Record,
    at: u32,
    data: Vec<u8>,
}

impl Pair {
    fn new(count: u32, bytes: u32, before_the_wrap: bool) -> Pair {
        let mut memory = Memory::new(count, bytes);
        let layout = memory.layout();
        let (writer, reader) = if before_the_wrap { memory.ends_before_the_wrap() } else { memory.ends() };
        let (unread, held) = (VecDeque::new(), VecDeque::new());
        Pair { layout, writer, reader, unread, held, tag: 0, _memory: memory }
    }

    fn outstanding(&self) -> impl Iterator<Item = &Piece> {
        self.held.iter().chain(&self.unread)
    }

    fn room(&mut self, len: u32) -> Option<DataRoom> {
        let room = self.writer.room(len).expect("an honest peer");
        let (count, bytes) = (self.layout.count as usize, self.layout.bytes);
        let number = self.outstanding().count();
        let Some(room) = room else {
            assert!(number != 0 || len > bytes, "an idle ring takes all that fits into its area");
            assert!(number == count || len != 0, "a record without data needs a slot alone");
            return None;
        };
        assert!(number < count && is_inside(self.layout, &room, len));
        assert!(!self.writer.is_idle() || room.at == 0, "a ring that is known to be idle begins anew");
        for piece in self.outstanding().filter(|piece| !piece.data.is_empty() && len != 0) {
            let apart = room.at + len <= piece.at || piece.at + piece.data.len() as u32 <= room.at;
            assert!(apart, "room where unread data is");
        }
        Some(room)
    }

    fn push(&mut self, len: u32) -> bool {
        let Some(room) = self.room(len) else { return false };
        self.tag += 1;
        let data: Vec<u8> = (0..len).map(|at| (at + self.tag) as u8).collect();
        fill(&room, &data);
        let record = record(self.tag);
        self.writer.push(&record, room);
        self.unread.push_back(Piece { record, at: room.at, data });
        true
    }

    fn pop(&mut self) -> bool {
        assert_eq!(self.reader.has_next(), !self.unread.is_empty());
        assert_eq!(self.reader.peek(), self.unread.front().map(|piece| piece.record));
        let Some(piece) = self.unread.pop_front() else { return false };
        self.reader.pop();
        self.held.push_back(piece);
        true
    }

    /// Popped data is what it was until it is given back.
    fn give_back(&mut self) -> Notify {
        for piece in self.held.drain(..) {
            let data = copy(&self.reader, piece.at, piece.data.len() as u32);
            assert_eq!(data, Some(piece.data));
        }
        self.reader.give_back()
    }
}

/// A length that is near a limit as often as not.
fn len_of(kind: u8, any: u32, bytes: u32) -> u32 {
    match kind % 8 {
        0 | 1 => 0,
        2 => bytes - any % 2,
        3 => bytes / 2 + any % 3 - 1,
        4 => bytes + any % 70,
        5 => any % (bytes + 1),
        _ => any % 130,
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: CASES,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// The same records come out that went in, with their data, in their order.
    #[test]
    fn records_come_out_as_they_went_in(
        (count, bytes, wrap) in (0u32..5, 6u32..11, any::<bool>()),
        steps in prop::collection::vec((0u8..8, any::<u8>(), 0u32..4096), 1..STEPS),
    ) {
        let mut pair = Pair::new(1 << count, 1 << bytes, wrap);
        for (step, kind, any) in steps {
            match step {
                0..=2 => { pair.push(len_of(kind, any, 1 << bytes)); }
                /* given up */
                3 => { pair.room(len_of(kind, any, 1 << bytes)); }
                4..=6 => { pair.pop(); }
                _ => { pair.give_back(); }
            }
        }
        while pair.pop() {}
        pair.give_back();
        prop_assert!(pair.push(1 << bytes), "all of it is free again");
    }

    /// A peer writes any words anywhere, at any time: no side reads or writes outside (miri looks) or panics.
    #[test]
    fn a_peer_that_writes_anything_does_no_harm(
        steps in prop::collection::vec((0u8..9, any::<u16>(), any::<u32>(), any::<u8>()), 1..STEPS / 2),
    ) {
        let mut memory = Memory::new(4, 256);
        let layout = memory.layout();
        let (mut writer, mut reader) = memory.ends();
        for (step, at, word, kind) in steps {
            let number = [word, word % 16, writer.written().wrapping_add(word % 6)][usize::from(kind) % 3];
            match step {
                0 => { let _ = writer.look(); }
                1 => { let _ = writer.sleep(); }
                2 => { reader.sleep(); }
                3 => { writer.must_notify(); reader.give_back(); }
                4 | 5 => {
                    let len = len_of(kind, word, 256);
                    if let Ok(Some(room)) = writer.room(len) {
                        prop_assert!(is_inside(layout, &room, len));
                        fill(&room, &vec![kind; len as usize]);
                        writer.push(&record(word), room);
                    }
                }
                6 => if let Some(record) = reader.peek() {
                    /* where data is, as the record says, of whoever wrote it */
                    let (at, len) = (record[0], record[1] % 512);
                    let inside = u64::from(at) + u64::from(len) <= 256;
                    prop_assert_eq!(copy(&reader, at, len).is_some(), inside);
                    reader.pop();
                },
                7 => memory.set_word([READ, Memory::stamp(0), Memory::stamp(usize::from(at) % 4)]
                    [usize::from(at) % 3], number),
                _ => memory.set_word(usize::from(at), number),
            }
        }
    }
}

#[test]
fn records_and_their_data_are_given_back_together() {
    let mut pair = Pair::new(4, 256, false);
    assert!(pair.push(100) && pair.push(64) && pair.push(0));
    assert!(!pair.push(65), "192 bytes are taken");
    assert!(pair.push(64));
    assert!(!pair.push(0), "no slot");
    assert!(pair.pop());
    assert!(!pair.push(64), "it was read, and not given back");
    pair.give_back();
    assert!(pair.push(128), "from the beginning");
    assert!((0..4).all(|_| pair.pop()));
    pair.give_back();
    assert!(pair.push(256) && !pair.push(1) && pair.push(0));
}

#[test]
fn a_writer_may_keep_to_the_beginning_of_the_area() {
    let mut memory = Memory::new(8, 512);
    let (mut writer, mut reader) = memory.ends();
    writer.keep_to(128);
    assert!(writer.room(129).unwrap().is_none());
    for at in [0, 64] {
        let room = writer.room(64).unwrap().expect("room");
        assert_eq!(room.at, at);
        writer.push(&record(0), room);
    }
    assert!(writer.room(1).unwrap().is_none());
    writer.keep_to(64);
    (0..2).for_each(|_| reader.pop());
    reader.give_back();
    assert!(writer.room(128).unwrap().is_some(), "what has begun goes on as it was");
}

/// A piece is never split: what is left at the end goes with it, and comes back with it.
#[test]
fn a_piece_that_would_reach_beyond_the_end_begins_anew() {
    let mut pair = Pair::new(8, 256, false);
    assert!(pair.push(128) && pair.push(64));
    assert!(pair.pop());
    pair.give_back();
    assert_eq!(pair.room(128).map(|room| room.at), Some(0));
    assert_eq!(pair.room(64).map(|room| room.at), Some(192), "the other room was given up");
    assert!(pair.push(128));
    assert!(!pair.push(1), "the end is passed over");
    assert!(pair.pop());
    pair.give_back();
    assert_eq!(pair.room(1).map(|room| room.at), Some(128));
}

#[test]
fn indices_wrap() {
    let mut pair = Pair::new(2, 128, true);
    for _ in 0..20 {
        assert!(pair.push(64) && pair.push(1) && !pair.push(0));
        assert!(pair.pop() && pair.pop() && !pair.pop());
        pair.give_back();
    }
    assert!(pair.writer.written() < 40, "past the wrap");
}

#[test]
fn an_idle_ring_begins_at_its_beginning() {
    let mut pair = Pair::new(4, 1024, false);
    for _ in 0..50 {
        assert!(pair.writer.is_idle());
        assert!(pair.push(100) && !pair.writer.is_idle());
        assert!(pair.pop());
        pair.give_back();
        assert_eq!(pair.writer.look(), Ok(pair.writer.written()));
    }
}

#[test]
fn data_lies_inside_its_area() {
    let mut memory = Memory::new(2, 128);
    let (_writer, reader) = memory.ends();
    let inside = [(0, 0), (0, 128), (127, 1), (128, 0)];
    assert!(inside.into_iter().all(|(at, len)| reader.data(at, len).is_some()));
    let outside = [(0, 129), (128, 1), (129, 0), (1, u32::MAX), (u32::MAX, 1), (u32::MAX, u32::MAX)];
    assert!(outside.into_iter().all(|(at, len)| reader.data(at, len).is_none()));
}

#[test]
fn sleepers_are_woken_once() {
    let mut pair = Pair::new(2, 128, false);
    assert!(pair.reader.sleep());
    assert!(pair.push(1));
    assert_eq!([pair.writer.must_notify(), pair.writer.must_notify()], [Notify::Wake, Notify::No]);
    assert!(!pair.reader.sleep(), "there is a record");
    pair.reader.wake();
    assert!(pair.push(1) && pair.writer.must_notify() == Notify::No, "it polls");
    assert!(!pair.push(1));
    assert_eq!(pair.writer.sleep(), Ok(true));
    assert_eq!(pair.give_back(), Notify::No, "nothing was popped");
    assert!(pair.pop() && pair.give_back() == Notify::Wake);
    assert!(pair.pop() && pair.give_back() == Notify::No, "once");
    assert_eq!(pair.writer.sleep(), Ok(false), "there is room meanwhile");
}

#[test]
fn who_awaits_its_doorbell_is_rung_for_each_until_it_sleeps_or_polls() {
    let mut pair = Pair::new(4, 128, false);
    pair.reader.await_doorbell();
    pair.writer.await_doorbell();
    for _ in 0..2 {
        assert!(pair.push(1));
        assert_eq!(pair.writer.must_notify(), Notify::Doorbell);
        assert!(pair.pop());
        assert_eq!(pair.give_back(), Notify::Doorbell);
    }
    assert!(pair.reader.sleep() && pair.writer.sleep() == Ok(false));
    assert!(pair.push(1));
    assert_eq!(pair.writer.must_notify(), Notify::Wake);
    assert!(pair.pop());
    assert_eq!(pair.give_back(), Notify::Wake);
    pair.reader.wake();
    assert!(pair.push(1));
    assert_eq!(pair.writer.must_notify(), Notify::No);

    let doorbell = PeerDoorbell::new();
    assert!(!doorbell.take());
    doorbell.ring();
    doorbell.ring();
    assert!(doorbell.take() && !doorbell.take());
}

#[test]
fn an_index_that_cannot_be_is_found_out() {
    /* two read of three that were written */
    let look = |read: u32| {
        let mut memory = Memory::new(4, 256);
        let (mut writer, mut reader) = memory.ends();
        for tag in 0..3 {
            let room = writer.room(8).expect("honest so far").expect("room");
            writer.push(&record(tag), room);
        }
        (0..2).for_each(|_| reader.pop());
        reader.give_back();
        assert_eq!(writer.look(), Ok(2));
        memory.set_word(READ, read);
        let found = writer.look();
        let needs_a_look = writer.room(256).map(|room| room.is_some());
        assert_eq!([needs_a_look.is_err(), writer.sleep().is_err()], [found.is_err(); 2]);
        found
    };
    assert_eq!([look(2), look(3)], [Ok(2), Ok(3)]);
    for read in [4, 1, 0, u32::MAX, 1 << 31, 5] {
        assert_eq!(look(read), Err(Broken), "{read}");
    }
}

/// No stamp but the next one shows a record, and the reader goes on by one each time.
#[test]
fn stamps_that_are_not_next_show_nothing() {
    let mut memory = Memory::new(2, 64);
    let (_writer, mut reader) = memory.ends();
    for stamp in [2, 3, u32::MAX, 1 << 31] {
        memory.set_word(Memory::stamp(0), stamp);
        assert_eq!(reader.peek(), None, "{stamp}");
    }
    memory.set_word(Memory::stamp(0), 1);
    assert_eq!(reader.peek(), Some([0; RECORD_WORDS]));
    reader.pop();
    assert_eq!(reader.peek(), None);
}
