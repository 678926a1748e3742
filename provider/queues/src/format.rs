//! The formats as they lie in memory: little-endian integers at fixed offsets, without padding.
//!
//! Any bytes are a value of these types but [`SendWqe`] and [`Cqe`], so that a reader may copy one from
//! memory that another writes. Those two have numbers that mean something, and come out of memory by
//! [`SendWqe::decode`] and [`Cqe::decode`]. `include/starverbs/queues.h` has the same for C;
//! `tests/header.rs` holds the two together.

use core::mem::size_of;

use crate::BLOCK;

pub use crate::completion::{Cqe, CqeWords};
pub use crate::work::{SendBlock, SendWqe, Sge, blocks};

/// A receive WQE; its SGEs stand behind it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct RecvWqe {
    /// The program's cookie
    pub wr_id: u64,
    /// Number of SGEs
    pub num_sge: u32,
    /// Reserved: 0
    pub reserved: u32,
}

/// A program's half of a QP's queues, or an SRQ's: a cache line that the program alone writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct ProgramIndex {
    /// Send WQEs posted so far, modulo 2^32
    pub send_posted: u32,
    /// Receive WQEs posted so far, modulo 2^32
    pub recv_posted: u32,
    /// Reserved: 0
    pub reserved: [u32; 14],
}

/// The device's half: a cache line that the device alone writes, with whatever it likes. It writes nothing
/// else of a QP's queues, or an SRQ's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct CardIndex {
    /// Send WQEs whose slots may be written again
    pub send_released: u32,
    /// Receive WQEs whose slots may be written again
    pub recv_taken: u32,
    /// How often the device looked for a receive WQE and found none: who posts one and sees another number
    /// than at the last post rings the doorbell
    pub recv_starved: u32,
    /// The device's own: the program does not look at it
    pub own: [u32; 13],
}

const _: () = assert!(size_of::<ProgramIndex>() == BLOCK && size_of::<CardIndex>() == BLOCK);
const _: () = assert!(size_of::<RecvWqe>() == 16);
