//! Formats of the queues between a program and a card: work requests, completions.
//!
//! [`mod@format`] has them as they lie in memory, in plain integers: `include/starverbs/queues.h` is the
//! same in C, for a board and its driver; [`board`] has what else those two agree on. What a queue's memory
//! holds is decoded, which finds what nobody may write there: the other side of a queue is another program,
//! or a device.
//!
//! Numeric values of the enums are those of `<infiniband/verbs.h>`.
//!
//! This crate must not know protocol, locks, indices' orderings or memory.
#![no_std]
#![forbid(unsafe_code)]

#[macro_use]
mod macros;

pub mod board;
pub mod chardev;
mod completion;
pub mod format;
mod work;

pub use completion::{Cqe, TagMatch, WcFlags, WcOpcode, WcStatus};
pub use work::{AvId, SendFlags, SendOp, SendWqe, Sge};

/// Bytes of a block, of which send WQEs are made: a cache line.
pub const BLOCK: usize = 64;
