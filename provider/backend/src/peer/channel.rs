//! Channels: memory through which the queue pairs of one process ask those of another, and are answered.
//!
//! Who has something to ask makes a channel and hands its memory over by the session; each of two processes
//! makes one of its own. In it lie two rings of records: requests one way, answers the other, so that who
//! waits for room to answer is asked for no more, and answers always come through. Owns the layout; it must
//! not know what records mean.

use std::fs::File;
use std::os::fd::OwnedFd;

use starverbs_rings::{Slot, SlotHead, SlotMemory, SlotReader, SlotWriter};

use super::memory::Memory;

/// Requests and answers that may be unread.
pub(crate) const REQUESTS: u32 = 512;
/// Answers that may be unread.
pub(crate) const ANSWERS: u32 = 128;
/// Bytes of each ring's data area. Pages that nothing touched take no memory.
pub(crate) const DATA: u32 = 1 << 19;
const HEAD: usize = 1024;
const SLOTS: usize = 4096;
const AREAS: usize = SLOTS + (REQUESTS + ANSWERS) as usize * size_of::<Slot>();
const LEN: usize = AREAS.next_multiple_of(4096) + 2 * DATA as usize;

const _: () = assert!(size_of::<SlotHead>() <= HEAD && 2 * HEAD <= SLOTS && size_of::<Slot>() == 64);

/// Where a channel's rings lie: that of requests, and that of answers.
fn rings(memory: &Memory) -> [SlotMemory; 2] {
    let base = memory.base();
    // SAFETY: all offsets lie in the mapping, as its length follows from them.
    unsafe {
        let ring = |of: usize, first: u32, count: u32| SlotMemory {
            head: base.add(of * HEAD).cast(),
            slots: base.add(SLOTS).cast::<Slot>().add(first as usize),
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
    _memory: Memory,
}

/// The end of a channel that answers.
pub struct Answering {
    /// What is asked
    pub requests: SlotReader,
    /// What is answered
    pub answers: SlotWriter,
    _memory: Memory,
}

impl Asking {
    /// A new channel, and the memory that the other end is to have. `None`: the system gives none.
    pub(super) fn create() -> Option<(Asking, File)> {
        let (memory, file) = Memory::create(LEN)?;
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
        let memory = Memory::open(file, LEN)?;
        let [requests, answers] = rings(&memory);
        // SAFETY: sealed memory stays mapped as long as the value lives; each end is made once in this
        // process, and the rings do not trust the other.
        let (requests, answers) = unsafe { (SlotReader::new(requests), SlotWriter::new(answers)) };
        Some(Answering { requests, answers, _memory: memory })
    }
}
