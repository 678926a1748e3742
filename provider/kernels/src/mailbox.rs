//! How a kernel that is a module of its own, in WebAssembly, and the card talk: through one struct in the
//! module's memory. The card fills it in, calls the module, and reads what the module left.
//!
//! A module exports its `memory` and three functions, and imports nothing: [`MAILBOX`] says where the struct
//! lies, [`START`] and [`STEP`] do what [`Kernel`](starverbs_core::strom::Kernel)'s methods do. They return
//! [`PENDING`], or the code of the answer. `include/starverbs/kernel.h` has the same for C.

use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// `() -> i32`: where the [`Mailbox`] lies. The number is the version of all of this.
pub const MAILBOX: &str = "starverbs_mailbox_v1";
/// `() -> i32`: a request begins, or a stream goes on.
pub const START: &str = "starverbs_start";
/// `() -> i32`: the commands were executed.
pub const STEP: &str = "starverbs_step";
/// What these return of a kernel that is not done. Others: a [`Code`](starverbs_core::strom::Code).
pub const PENDING: i32 = -1;

pub use starverbs_core::strom::{COMMANDS, PIECE};

/// What [`Mailbox::input`] says.
pub mod input {
    /// RPC: `bytes` are its parameters
    pub const PARAMS: u32 = 0;
    /// RPC WRITE: `bytes` are a packet's payload
    pub const DATA: u32 = 1;
    /// With `DATA`: it begins a message
    pub const FIRST: u32 = 2;
    /// With `DATA`: it ends one
    pub const LAST: u32 = 4;
}

/// What [`Mailbox::reply`] says.
pub mod reply {
    /// Nothing is added to the answer
    pub const NONE: u32 = 0;
    /// `reply_len` bytes at `reply_at` are added
    pub const BYTES: u32 = 1;
    /// It is `reply_len` bytes of a region, as they are when they leave
    pub const REGION: u32 = 2;
}

/// What [`MailboxCommand::kind`] says.
pub mod command {
    /// A read, whose bytes are there at the next step
    pub const READ: u32 = 1;
    /// A write
    pub const WRITE: u32 = 2;
    /// A write by the queue pair whose number is in the upper 24 bits, to a region of its peer
    pub const SEND: u32 = 3;
}

/// A DMA command.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MailboxCommand {
    /// [`command`]; of `SEND` the queue pair above the lower 8 bits
    pub kind: U32,
    /// Key of the region
    pub key: U32,
    /// First byte in there
    pub va: U64,
    /// How many bytes
    pub len: U32,
    /// Write, send: where they lie in the module's memory
    pub at: U32,
}

/// The struct.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Mailbox {
    /// The request's own: 0 at the start of a message, and kept between the packets of one
    pub regs: [U64; 8],
    /// The queue pair that the request came to
    pub qpn: U32,
    /// [`input`]
    pub input: U32,
    /// Of `bytes`
    pub bytes_len: U32,
    /// Of `read`
    pub read_len: U32,
    /// By the module: commands in `queue`. 0 before each call
    pub commands: U32,
    /// By the module: [`reply`]. 0 before each call
    pub reply: U32,
    /// By the module: where the bytes lie in its memory
    pub reply_at: U32,
    /// By the module: how many
    pub reply_len: U32,
    /// By the module: key of the region
    pub reply_key: U32,
    /// 0, for alignment
    pub reserved: U32,
    /// By the module: first byte of the region
    pub reply_va: U64,
    /// By the module: 64 commands at most, executed in this order
    pub queue: [MailboxCommand; COMMANDS],
    /// The parameters, or a packet's payload
    pub bytes: [u8; PIECE],
    /// What the last read brought
    pub read: [u8; PIECE],
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::offset_of;

    /// As C lays it out.
    #[test]
    fn nothing_lies_where_c_would_not_put_it() {
        assert_eq!(size_of::<MailboxCommand>(), 24);
        assert_eq!((offset_of!(Mailbox, qpn), offset_of!(Mailbox, reply_va)), (64, 104));
        assert_eq!((offset_of!(Mailbox, queue), offset_of!(Mailbox, bytes)), (112, 112 + 64 * 24));
        assert_eq!(size_of::<Mailbox>(), 112 + 64 * 24 + 2 * 4096);
    }
}
