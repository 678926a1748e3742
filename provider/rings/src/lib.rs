//! Queues between a program and its card: send, receive and completion rings.
//!
//! A ring is a power of two of equal slots and two free-running 32-bit indices, each written by one
//! side only, on a cache line that the other side does not write:
//!
//! | ring                      | producer index         | consumer index        |
//! |---------------------------|------------------------|-----------------------|
//! | send, in [`WorkRings`]    | program (post lock)    | card                  |
//! | receive, in [`WorkRings`] | program(s) (post lock) | card                  |
//! | [`CqRing`]                | card                   | program (poll lock)   |
//!
//! The producer writes a slot, then stores its index with release; the consumer loads that index
//! with acquire before it reads the slot, and hands the slot back the same way. "The card" is
//! whoever holds the lock of the card's shard: one thread at a time.
//!
//! Slots are zeroed when a ring is made, so that the data path takes no page faults.
//!
//! Two flags go with them, whether a completion raises an event ([`Armed`]) and which doorbells the card has
//! missed ([`PendingDoorbells`]): they hold by the same kind of argument, so that loom looks at all of it
//! (tests/loom).
//!
//! Between processes go messages of any length ([`MessageWriter`]), by a ring of bytes, and records of their
//! queue pairs ([`SlotWriter`]), by a ring of slots that is polled. The two sides do not trust each other.
//!
//! What one process lets others look up and use is a table of its own ([`TableEntry`], [`Incarnation`]), in
//! memory that they only read, and slots from which they use it ([`ReaderSlot`]).
//!
//! This crate must not know what the entries mean, how a sleeper is woken, or the verbs C ABI.

mod armed;
pub mod budget;
mod cq;
mod memory;
mod message;
mod notify;
mod pending_doorbells;
mod prefetch;
mod recv;
mod send;
mod shared;
mod slot_ring;
mod slots;
mod spin;
mod sync;
mod table;
mod work;

pub use armed::Armed;
pub use cq::{CqConsumer, CqRing, CqRoom};
pub use memory::{AllocResult, Memory, ProgramMemory, Resource};
pub use message::{Broken, MessageHead, MessageReader, MessageWriter, Written};
pub use notify::{Notify, PeerDoorbell};
pub use pending_doorbells::PendingDoorbells;
pub use prefetch::prefetch;
pub use recv::{CardRq, RecvProducer};
pub use send::{CardSq, SendMemory, SendProducer, SendRemote};
pub use shared::{Incarnation, ReaderSlot};
pub use slot_ring::{
    DataRoom, RECORD_WORDS, Record, SlotHead, SlotMemory, SlotReader, SlotWriter, StampedRecord,
};
pub use spin::{SpinGuard, SpinLock};
#[cfg(loom)]
pub use sync::crash;
pub use table::{TableEntry, TableLength};
pub use work::{RecvSize, SendSize, SlotLayout, WorkLayout, WorkRings};

use core::ops::Deref;

use sync::AtomicU32;

/// Why a work request was not put into a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PushError {
    /// No free slot.
    Full,
    /// More SGEs than a slot holds.
    TooManySges,
    /// More inline bytes than a slot holds.
    InlineTooLong,
    /// Data for a WQE that was not begun.
    NotBegun,
}

/// A cache line of one side's own.
#[repr(align(64))]
struct OwnLine<T>(T);

impl<T> Deref for OwnLine<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        &self.0
    }
}

/// One side's index, beside its copy of the other side's index.
struct IndexPair {
    /// Written by this side alone.
    index: AtomicU32,
    /// What this side last saw of the other side's index; touched by this side alone.
    seen: AtomicU32,
}

impl IndexPair {
    fn new() -> Self {
        IndexPair { index: AtomicU32::new(0), seen: AtomicU32::new(0) }
    }
}

#[cfg(all(test, not(loom)))]
mod message_tests;
#[cfg(all(test, not(loom)))]
mod slot_ring_tests;
#[cfg(all(test, not(loom)))]
mod tests;
