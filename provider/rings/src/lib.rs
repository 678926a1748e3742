//! Queues between a program and its card: send, receive and completion rings.
//!
//! A ring is a power of two of equal slots and two free-running 32-bit indices, each written by one
//! side only and kept on a cache line of its own:
//!
//! | ring          | producer index         | consumer index        |
//! |---------------|------------------------|-----------------------|
//! | [`SendRing`]  | program (post lock)    | card                  |
//! | [`RecvRing`]  | program(s) (post lock) | card                  |
//! | [`CqRing`]    | card                   | program (poll lock)   |
//!
//! The producer writes a slot, then stores its index with release; the consumer loads that index
//! with acquire before it reads the slot, and hands the slot back the same way. "The card" is
//! whoever holds the lock of the card's shard: one thread at a time.
//!
//! Slots come from zeroed memory, which the kernel backs only when it is touched.
//!
//! This crate must not know what the entries mean, who wakes whom, or the verbs C ABI.

mod cq;
mod recv;
mod send;
mod slots;
mod spin;
mod sync;

pub use cq::{CqConsumer, CqRing};
pub use recv::{CardRq, RecvProducer, RecvRing};
pub use send::{CardSq, SendProducer, SendRing};
pub use spin::{SpinGuard, SpinLock};

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
}

/// An index on a cache line of its own, beside its owner's copy of the other side's index.
#[repr(align(64))]
struct Side {
    /// Written by this side alone.
    index: AtomicU32,
    /// What this side last saw of the other side's index; touched by this side alone.
    seen: AtomicU32,
}

impl Side {
    fn new() -> Self {
        Side { index: AtomicU32::new(0), seen: AtomicU32::new(0) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
