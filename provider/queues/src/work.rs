//! Work requests: what a program asks of a send queue, and the memory that it names.

use core::mem::{offset_of, size_of};

use bitflags::bitflags;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes, try_transmute};

use crate::{BLOCK, WcOpcode};

/// Handle of an address vector of a card.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct AvId(pub u32);

/// What a send work request asks for. Values as `enum ibv_wr_opcode`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(u8)]
pub enum SendOp {
    /// RDMA WRITE
    Write = 0,
    /// RDMA WRITE with immediate
    WriteImm = 1,
    /// SEND, without immediate
    #[default]
    Send = 2,
    /// SEND with immediate
    SendImm = 3,
    /// RDMA READ
    Read = 4,
    /// Compare and swap
    CmpSwap = 5,
    /// Fetch and add
    FetchAdd = 6,
    /// Unbind a memory window of this card
    LocalInv = 7,
    /// Bind a memory window
    BindMw = 8,
    /// SEND that unbinds a memory window of the peer
    SendInv = 9,
    /// Make what was written before visible, or persistent, before the answer
    Flush = 14,
    /// Write eight bytes at once
    AtomicWrite = 15,
    /// StRoM: start a kernel of the peer's card with parameters. No `enum ibv_wr_opcode` has it; below 64, as
    /// sets of op-codes are then tested by one instruction
    Rpc = 62,
    /// StRoM: bytes for a kernel of the peer's card. No `enum ibv_wr_opcode` has it
    RpcWrite = 63,
    /// None that a card knows. Stands for what was found in a queue's memory; nobody posts it.
    Malformed = 255,
}

impl SendOp {
    /// From `enum ibv_wr_opcode`; `None` for those this card does not offer.
    #[inline]
    pub fn from_code(code: u32) -> Option<Self> {
        let op = Self::try_read_from_bytes(&[u8::try_from(code).ok()?]).ok()?;
        (!matches!(op, SendOp::Malformed | SendOp::Rpc | SendOp::RpcWrite)).then_some(op)
    }
    /// What was found in a queue's memory.
    #[inline]
    pub fn decode(found: u8) -> Self {
        Self::try_read_from_bytes(&[found]).unwrap_or(SendOp::Malformed)
    }
    /// Whether only an answer of its own completes it; such are outstanding in limited numbers (IBTA 9.4.4,
    /// A19).
    pub const fn is_answered(self) -> bool {
        self.brings_data() || matches!(self, SendOp::Flush | SendOp::AtomicWrite)
    }
    /// Whether it is StRoM's: such take a queue pair that speaks its dialect.
    pub const fn is_rpc(self) -> bool {
        matches!(self, SendOp::Rpc | SendOp::RpcWrite)
    }
    /// Whether the answer carries data (READ, atomics).
    pub const fn brings_data(self) -> bool {
        matches!(self, SendOp::Read | SendOp::CmpSwap | SendOp::FetchAdd)
    }
    /// Whether it has SGEs or inline bytes.
    pub const fn has_data(self) -> bool {
        !matches!(self, SendOp::LocalInv | SendOp::BindMw | SendOp::Flush | SendOp::Malformed)
    }
    /// Whether the card does it by itself, without a packet.
    pub const fn is_local(self) -> bool {
        matches!(self, SendOp::LocalInv | SendOp::BindMw)
    }
    /// Whether it is a SEND of any kind: the peer's receive WQE says where its bytes go.
    pub const fn is_send(self) -> bool {
        matches!(self, SendOp::Send | SendOp::SendImm | SendOp::SendInv)
    }
    /// Whether it is an atomic.
    pub const fn is_atomic(self) -> bool {
        matches!(self, SendOp::CmpSwap | SendOp::FetchAdd)
    }
    /// Whether it carries immediate data.
    pub const fn has_imm(self) -> bool {
        matches!(self, SendOp::WriteImm | SendOp::SendImm)
    }
    /// Whether the message consumes a receive WQE at the peer.
    pub const fn takes_recv(self) -> bool {
        matches!(self, SendOp::Send | SendOp::SendImm | SendOp::SendInv | SendOp::WriteImm)
    }
    /// The completion's op-code.
    pub const fn wc_opcode(self) -> WcOpcode {
        match self {
            SendOp::Write | SendOp::WriteImm | SendOp::Rpc | SendOp::RpcWrite => WcOpcode::RdmaWrite,
            SendOp::Send | SendOp::SendImm | SendOp::SendInv | SendOp::Malformed => WcOpcode::Send,
            SendOp::Read => WcOpcode::RdmaRead,
            SendOp::CmpSwap => WcOpcode::CompSwap,
            SendOp::FetchAdd => WcOpcode::FetchAdd,
            SendOp::LocalInv => WcOpcode::LocalInv,
            SendOp::BindMw => WcOpcode::BindMw,
            SendOp::Flush => WcOpcode::Flush,
            SendOp::AtomicWrite => WcOpcode::AtomicWrite,
        }
    }
}

/// Flags of a send work request. Values as `enum ibv_send_flags`. Bits that are none are passed over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct SendFlags(u8);

bitflags! {
    impl SendFlags: u8 {
        /// Wait for earlier READs and atomics of the same QP
        const FENCE = 1;
        /// Make a completion
        const SIGNALED = 2;
        /// Ask for an event at the receiver
        const SOLICITED = 4;
        /// Data was copied into the WQE at posting
        const INLINE = 8;
    }
}

impl SendFlags {
    /// The card's own request among a program's: it completes to nobody. No bit of a program's.
    pub const CARD: SendFlags = SendFlags(1 << 7);
    /// Between cards: the request's data is on its way, and need not be asked for. No bit of a program's.
    pub const EAGER: SendFlags = SendFlags(1 << 6);
}

/// One piece of local memory in a work request: `struct ibv_sge`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Sge {
    /// Virtual address
    pub addr: u64,
    /// Length, bytes
    pub len: u32,
    /// Key of the MR that covers it
    pub lkey: u32,
}

/// The first block of a send WQE. Its SGEs, or its inline bytes, fill the blocks behind it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SendWqe {
    /// The program's cookie
    pub wr_id: u64,
    /// RDMA and atomics: the peer's address. Bind: the window's first byte, as the MR counts
    pub remote_addr: u64,
    /// Atomics: compare value, or the number to add. Bind, FLUSH: bytes
    pub compare_add: u64,
    /// Atomics: swap value
    pub swap: u64,
    /// RDMA and atomics: the peer's key. Bind: the window's new key. LOCAL_INV: the key to invalidate
    pub rkey: u32,
    /// Immediate data, in the byte order in which it was given (network order). SEND with invalidate: the
    /// peer's key. Bind: the MR's key. FLUSH: the word of its header (FETH)
    pub imm: u32,
    /// Bytes of all SGEs, or inline
    pub length: u32,
    /// UD: destination QPN. XRC: number of the peer's SRQ. Bind: a key of the window
    pub remote_qpn: u32,
    /// UD: Q_Key. Bind: access rights
    pub qkey: u32,
    /// UD: number of the address vector
    pub av: AvId,
    /// What to do
    pub op: SendOp,
    /// [`SendFlags`] bits
    pub flags: SendFlags,
    /// SGEs; 0 where the bytes are inline
    pub num_sge: u16,
    /// Blocks of the whole WQE, this one included: what a device fetches
    pub blocks: u16,
    /// Reserved: 0
    pub reserved: u16,
}

const _: () =
    assert!(size_of::<SendWqe>() == BLOCK && offset_of!(SendWqe, op) == 56 && size_of::<Sge>() == 16);

/// What a queue's memory holds where a [`SendWqe`] should be.
pub type SendBlock = [u64; BLOCK / size_of::<u64>()];

impl SendWqe {
    /// What was found in a queue's memory. It has the operation `Malformed` if there is none of its number.
    #[inline]
    pub fn decode(found: SendBlock) -> SendWqe {
        try_transmute!(found).unwrap_or_else(|_| Self::malformed(found))
    }

    #[cold]
    fn malformed(mut found: SendBlock) -> SendWqe {
        found.as_mut_bytes()[offset_of!(SendWqe, op)] = SendOp::Malformed as u8;
        try_transmute!(found).unwrap_or_default()
    }

    /// With `body` bytes of SGEs or inline data behind it.
    #[inline]
    pub fn with_body(self, body: usize) -> SendWqe {
        SendWqe { blocks: blocks(body) as u16, ..self }
    }
}

/// Blocks of a send WQE with `body` bytes of SGEs or inline data.
#[inline]
pub const fn blocks(body: usize) -> usize {
    1 + body.div_ceil(BLOCK)
}
