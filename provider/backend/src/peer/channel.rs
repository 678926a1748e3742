//! Channels: memory through which the queue pairs of one process ask those of another, and are answered.
//!
//! Who has something to ask makes a channel and hands its memory over by the session; each of two processes
//! makes one of its own. In it lie two rings of records: requests one way, answers the other, so that who
//! waits for room to answer is asked for no more, and answers always come through. Owns the layout; it must
//! not know what records mean.

use std::fs::File;
use std::os::fd::OwnedFd;

use starverbs_rings::{SlotHead, SlotMemory, SlotReader, SlotWriter, StampedRecord};

use super::memory::SharedMapping;

/// Requests and answers that may be unread.
pub(crate) const REQUESTS: u32 = 512;
/// Answers that may be unread.
pub(crate) const ANSWERS: u32 = 128;
/// Bytes of each ring's data area: several times a CPU's own cache. What one CPU has just written another
/// one gets much slower than what has gone to the cache of both (decision 19). Pages that nothing touched
/// take no memory.
pub(crate) const DATA: u32 = 1 << 22;
/// Those of a process with many channels, each.
pub const DATA_OF_MANY: u32 = 1 << 19;
const HEAD: usize = 1024;
const SLOTS: usize = 4096;
const AREAS: usize = SLOTS + (REQUESTS + ANSWERS) as usize * size_of::<StampedRecord>();
const LEN: usize = AREAS.next_multiple_of(4096) + 2 * DATA as usize;

const _: () = assert!(size_of::<SlotHead>() <= HEAD && 2 * HEAD <= SLOTS && size_of::<StampedRecord>() == 64);

/// Where a channel's rings lie: that of requests, and that of answers.
fn rings(memory: &SharedMapping) -> [SlotMemory; 2] {
    let base = memory.base();
    // SAFETY: all offsets lie in the mapping, as its length follows from them.
    unsafe {
        let ring = |of: usize, first: u32, count: u32| SlotMemory {
            head: base.add(of * HEAD).cast(),
            slots: base.add(SLOTS).cast::<StampedRecord>().add(first as usize),
            count,
            data: base.add(AREAS.next_multiple_of(4096) + of * DATA as usize),
            bytes: DATA,
        };
        [ring(0, 0, REQUESTS), ring(1, REQUESTS, ANSWERS)]
    }
}

/// The end of a channel that asks.
pub struct Asking {
    /// What is asked
    pub requests: SlotWriter,
    /// What is answered
    pub answers: SlotReader,
    _memory: SharedMapping,
}

/// The end of a channel that answers.
pub struct Answering {
    /// What is asked
    pub requests: SlotReader,
    /// What is answered
    pub answers: SlotWriter,
    _memory: SharedMapping,
}

impl Asking {
    /// A new channel, and the memory that the other end is to have. `None`: the system gives none.
    pub(super) fn create() -> Option<(Asking, File)> {
        let (memory, file) = SharedMapping::create(LEN)?;
        let [requests, answers] = rings(&memory);
        // SAFETY: new memory, mapped as long as the value lives, of which each end is made once.
        let (requests, answers) = unsafe { (SlotWriter::new(requests), SlotReader::new(answers)) };
        Some((Asking { requests, answers, _memory: memory }, file))
    }

    /// A channel of a process to itself.
    pub fn to_ourselves() -> Option<(Asking, Answering)> {
        let (asking, file) = Asking::create()?;
        Some((asking, Answering::open(file.into())?))
    }
}

impl Answering {
    /// The other end of a channel that another process has made. `None`: it is none.
    pub(super) fn open(file: OwnedFd) -> Option<Answering> {
        let memory = SharedMapping::open(file, LEN)?;
        let [requests, answers] = rings(&memory);
        // SAFETY: sealed memory stays mapped as long as the value lives; each end is made once in this
        // process, and the rings do not trust the other.
        let (requests, answers) = unsafe { (SlotReader::new(requests), SlotWriter::new(answers)) };
        Some(Answering { requests, answers, _memory: memory })
    }
}

/// Both ends of a channel, beside a peer that writes into its memory what `bytes` say, at any time. Steps of
/// four bytes: what is done, where or how much of it, a word.
#[cfg(feature = "fuzzing")]
pub(super) fn read_anything(mut bytes: &[u8]) {
    let Some((mut asking, mut answering)) = Asking::to_ourselves() else { return };
    let word = |asking: &Asking, at: usize, word: u32| {
        asking._memory.scribble(at & !3, &word.to_ne_bytes());
    };
    while let Some(([step, a, b, c], rest)) = bytes.split_first_chunk() {
        bytes = rest;
        let (at, c) = (u16::from_ne_bytes([*a, *b]), u32::from(*c));
        match step % 8 {
            0 => write(&mut asking.requests, u32::from(at) * 16, c),
            1 => write(&mut answering.answers, u32::from(at) * 16, c),
            2 => read(&mut answering.requests),
            3 => read(&mut asking.answers),
            /* the reader's index, the next stamps, and what lies behind them */
            4 => word(&asking, usize::from(at) % 2 * HEAD, c),
            5 => word(&asking, SLOTS + (c as usize % 8) * size_of::<StampedRecord>(), u32::from(at)),
            6 => word(&asking, SLOTS + usize::from(at), c.wrapping_mul(0x0101_0101)),
            _ => word(&asking, usize::from(at), c),
        }
    }
}

/// Writes what fits, to its last byte.
#[cfg(feature = "fuzzing")]
fn write(writer: &mut SlotWriter, len: u32, word: u32) {
    let _ = (writer.must_notify(), writer.sleep());
    writer.await_doorbell();
    let Ok(Some(room)) = writer.room(len) else { return };
    assert!(room.at <= DATA && len <= DATA - room.at);
    // SAFETY: inside of the data area, as the ring says, which a sanitizer confirms.
    unsafe { room.to.write_bytes(word as u8, len as usize) };
    writer.push(&[room.at, len, word, word, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], room);
}

/// Reads what a record names, to its last byte, whoever wrote the record.
#[cfg(feature = "fuzzing")]
fn read(reader: &mut SlotReader) {
    reader.await_doorbell();
    reader.sleep();
    let Some([at, len, ..]) = reader.peek() else { return };
    let data = reader.data(at, len);
    assert_eq!(data.is_some(), u64::from(at) + u64::from(len) <= u64::from(DATA));
    if let Some(data) = data.filter(|_| len != 0) {
        // SAFETY: that many bytes are there.
        let _ends = unsafe { (data.read_volatile(), data.add(len as usize - 1).read_volatile()) };
    }
    reader.pop();
    reader.give_back();
}
