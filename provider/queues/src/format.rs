//! The formats as they lie in memory: little-endian integers at fixed offsets, without padding.
//!
//! Any bytes are a value of these types, so that a reader may copy one from memory that another writes.
//! `include/starverbs/queues.h` has the same for C; `tests/abi/queues_format.c` holds the two together.

use core::mem::{offset_of, size_of};

use crate::work::{AvId, SendFlags, SendOp};
use crate::{BLOCK, Malformed, WcFlags, WcOpcode, WcStatus};

pub use crate::work::Sge;

/// The first block of a send WQE. Its SGEs, or its inline bytes, fill the blocks behind it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct SendWqe {
    /// The program's cookie
    pub wr_id: u64,
    /// RDMA and atomics: the peer's address. Bind: the window's first byte
    pub remote_addr: u64,
    /// Atomics: compare value, or the number to add. Bind, FLUSH: bytes
    pub compare_add: u64,
    /// Atomics: swap value
    pub swap: u64,
    /// RDMA and atomics: the peer's key. Bind: the window's new key. LOCAL_INV: the key to invalidate
    pub rkey: u32,
    /// Immediate data in network order. SEND with invalidate: the peer's key. Bind: the MR's key. FLUSH: FETH
    pub imm: u32,
    /// Bytes of all SGEs, or inline
    pub length: u32,
    /// UD: destination QPN. XRC: the peer's SRQ. Bind: a key of the window
    pub remote_qpn: u32,
    /// UD: Q_Key. Bind: access rights
    pub qkey: u32,
    /// UD: number of the address vector
    pub av: u32,
    /// `enum ibv_wr_opcode`
    pub op: u8,
    /// `enum ibv_send_flags`
    pub flags: u8,
    /// SGEs; 0 where the bytes are inline
    pub num_sge: u16,
    /// Blocks of the whole WQE, this one included: what a device fetches
    pub blocks: u16,
    /// 0
    pub reserved: u16,
}

/// A receive WQE; its SGEs stand behind it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct RecvWqe {
    /// The program's cookie
    pub wr_id: u64,
    /// SGEs
    pub num_sge: u32,
    /// 0
    pub reserved: u32,
}

/// What a program tells a device of a QP's queues, or an SRQ's: a cache line that the program alone writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct ProgramIndex {
    /// Send WQEs posted so far, modulo 2^32
    pub send_posted: u32,
    /// Receive WQEs posted so far, modulo 2^32
    pub recv_posted: u32,
    /// 0
    pub reserved: [u32; 14],
}

/// What a device tells the program: a cache line that the device alone writes.
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

/// A completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct Cqe {
    /// The work request's cookie
    pub wr_id: u64,
    /// Bytes moved
    pub byte_len: u32,
    /// Immediate data in network order, or an invalidated key
    pub imm: u32,
    /// Local QP
    pub qpn: u32,
    /// UD receives: the sender's QPN. Matched tags: the tag's high half
    pub src_qp: u32,
    /// More about an error. Matched tags: the tag's low half
    pub vendor_err: u32,
    /// `enum ibv_wc_status`
    pub status: u8,
    /// `enum ibv_wc_opcode`
    pub opcode: u8,
    /// `enum ibv_wc_flags`
    pub flags: u8,
    /// Service level
    pub sl: u8,
}

const _: () = assert!(size_of::<SendWqe>() == BLOCK && offset_of!(SendWqe, op) == 56);
const _: () = assert!(size_of::<ProgramIndex>() == BLOCK && size_of::<CardIndex>() == BLOCK);
const _: () = assert!(size_of::<RecvWqe>() == 16 && size_of::<Sge>() == 16 && size_of::<Cqe>() == 32);

/// Blocks of a send WQE with `body` bytes of SGEs or inline data.
#[inline]
pub const fn blocks(body: usize) -> usize {
    1 + body.div_ceil(BLOCK)
}

impl SendWqe {
    /// What it asks for.
    ///
    /// # Errors
    /// An operation that there is none of. Unknown flags are ignored.
    #[inline]
    pub fn decode(&self) -> Result<crate::SendWqe, Malformed> {
        match SendOp::from_code(u32::from(self.op)) {
            Some(op) => Ok(self.decode_as(op)),
            None => Err(Malformed::Op(self.op)),
        }
    }

    /// What it would ask for with this operation.
    #[inline]
    pub fn decode_as(&self, op: SendOp) -> crate::SendWqe {
        crate::SendWqe {
            wr_id: self.wr_id,
            remote_addr: self.remote_addr,
            compare_add: self.compare_add,
            swap: self.swap,
            rkey: self.rkey,
            imm: self.imm,
            length: self.length,
            remote_qpn: self.remote_qpn,
            qkey: self.qkey,
            av: AvId(self.av),
            op,
            flags: SendFlags::from_bits_truncate(self.flags),
            num_sge: self.num_sge,
        }
    }
}

impl crate::SendWqe {
    /// As it lies in memory, with `body` bytes behind it.
    #[inline]
    pub fn encode(&self, body: usize) -> SendWqe {
        SendWqe {
            wr_id: self.wr_id,
            remote_addr: self.remote_addr,
            compare_add: self.compare_add,
            swap: self.swap,
            rkey: self.rkey,
            imm: self.imm,
            length: self.length,
            remote_qpn: self.remote_qpn,
            qkey: self.qkey,
            av: self.av.0,
            op: self.op as u8,
            flags: self.flags.bits(),
            num_sge: self.num_sge,
            blocks: blocks(body) as u16,
            reserved: 0,
        }
    }
}

impl Cqe {
    /// What it tells.
    ///
    /// # Errors
    /// A status or an operation that there is none of. Unknown flags are ignored.
    #[inline]
    pub fn decode(&self) -> Result<crate::Cqe, Malformed> {
        let status = WcStatus::from_code(self.status).ok_or(Malformed::Status(self.status))?;
        let opcode = WcOpcode::from_code(self.opcode).ok_or(Malformed::Opcode(self.opcode))?;
        Ok(crate::Cqe {
            wr_id: self.wr_id,
            byte_len: self.byte_len,
            imm: self.imm,
            qpn: self.qpn,
            src_qp: self.src_qp,
            vendor_err: self.vendor_err,
            status,
            opcode,
            flags: WcFlags::from_bits_truncate(self.flags),
            sl: self.sl,
        })
    }
}

impl crate::Cqe {
    /// As it lies in memory.
    #[inline]
    pub fn encode(&self) -> Cqe {
        Cqe {
            wr_id: self.wr_id,
            byte_len: self.byte_len,
            imm: self.imm,
            qpn: self.qpn,
            src_qp: self.src_qp,
            vendor_err: self.vendor_err,
            status: self.status as u8,
            opcode: self.opcode as u8,
            flags: self.flags.bits(),
            sl: self.sl,
        }
    }
}
