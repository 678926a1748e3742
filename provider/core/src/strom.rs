//! StRoM: code that runs on the card (EuroSys 2020). What kernels see, and which there are.
//!
//! A *kernel* answers RPCs on a queue pair whose op-codes are StRoM's dialect (the paper's table 1). It has
//! no memory but its own and reaches the host's through commands, by the keys of the queue pair's protection
//! domain; the card executes them, checks them, and calls the kernel again. The module knows no packets
//! and no queues: `transport::rpc` runs kernels, docs/strom.md has the rules.

mod kernel;
mod registry;
mod wire;

pub(crate) use kernel::{COMMAND, ReplyBody};
pub use kernel::{
    COMMANDS, DmaCommand, Input, Kernel, KernelMemory, KernelRun, KernelSend, PIECE, Poll, RegionRange,
};
pub(crate) use registry::KernelRegistry;
pub use registry::{ANY_OP, KernelId, LoadedHandler, MAX_KERNELS, MAX_RUNNING, RpcHandler};
pub use wire::{
    Code, RECORD_LEN, ReplyFlags, ReplyHead, ReplyRecord, ReplyTarget, RpcAnswer, RpcOutcome, TARGET_LEN,
};

/// Op-codes that a queue pair speaks beside the common ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum Dialect {
    /// Those of IBTA alone
    #[default]
    Plain = 0,
    /// StRoM's: 0x18 to 0x1c are RPCs, and there is no FLUSH
    Strom = 1,
}

/// Memory of a queue pair's card in which answers stand until the peer has acknowledged them: a registered
/// region of the queue pair's protection domain with the right to write locally, and no other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReplyMemory {
    /// First byte, as SGEs know it
    pub addr: u64,
    /// Its key
    pub lkey: u32,
    /// [`SLOT_BYTES`] each; 64 at most
    pub slots: u8,
}

/// Longest answer that a kernel puts together itself, bytes. Longer ones are bytes of a memory region.
pub const MAX_REPLY: usize = 4096;
/// Bytes of a slot of [`ReplyMemory`]: an answer, and its record.
pub const SLOT_BYTES: usize = MAX_REPLY + 64;
