//! Words that all modules share.

/// Bytes that one operation moves, at most (1RMA, section 4.1).
pub const MAX_OP: u32 = 4096;
/// Bytes that a REKEY moves: a region key.
pub const REKEY_LEN: u32 = 16;

/// What a command asks for. The number is part of what a derived key is made from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum OneRmaOp {
    /// Remote memory to local memory: two hops
    Read = 1,
    /// Local memory to remote memory: four hops
    Write = 2,
    /// A new key for the remote region, from local memory: four hops
    Rekey = 3,
}

impl OneRmaOp {
    /// From its number.
    pub const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => OneRmaOp::Read,
            2 => OneRmaOp::Write,
            3 => OneRmaOp::Rekey,
            _ => return None,
        })
    }

    /// Whether an operation of this kind may have `size` bytes.
    pub const fn takes(self, size: u32) -> bool {
        match self {
            OneRmaOp::Read | OneRmaOp::Write => 0 < size && size <= MAX_OP,
            OneRmaOp::Rekey => size == REKEY_LEN,
        }
    }
}

/// Class of service: each has a FIFO of its own before the solicitation window.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum Class {
    /// First, but for one of eight
    #[default]
    High = 0,
    /// After it
    Low = 1,
}

impl Class {
    /// From its number.
    pub const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            0 => Class::High,
            1 => Class::Low,
            _ => return None,
        })
    }
}

/// How a command ended (1RMA, table 3). The last three are not the paper's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Status {
    /// The data is where it belongs
    Ok = 0,
    /// The key is not that of the remote region; also: there is no such region
    RemoteAuthenticationFailure = 1,
    /// The remote card has too much to do
    Nack = 2,
    /// No answer in time
    Timeout = 3,
    /// The window at this card did not admit it in time
    DispatchTimeout = 4,
    /// The remote region does not reach so far, or does not allow this
    RemoteAccess = 5,
    /// The local region does not reach so far, does not allow this, or has been closed
    LocalAccess = 6,
    /// The card has no message counter left
    Exhausted = 7,
}

impl Status {
    /// From its number.
    pub const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            0 => Status::Ok,
            1 => Status::RemoteAuthenticationFailure,
            2 => Status::Nack,
            3 => Status::Timeout,
            4 => Status::DispatchTimeout,
            5 => Status::RemoteAccess,
            6 => Status::LocalAccess,
            7 => Status::Exhausted,
            _ => return None,
        })
    }
}

/// Names a command slot or a transfer on the wire: its place, and how often the place was used. Packets for
/// an earlier use are dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Handle {
    /// Place in its table
    pub index: u32,
    /// Uses of the place before this one, modulo 2^32
    pub generation: u32,
}
