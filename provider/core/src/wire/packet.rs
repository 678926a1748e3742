//! One received packet, checked once.

use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::headers::{Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Feth, Reth, SackEth};
use crate::types::{Mtu, QPN_MASK};

use super::opcode::{BTH_LEN, OpFlags, OpInfo, op_info, rpc_info};

/// A frame is not a packet that this card understands. Each is dropped without an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum WireError {
    /// shorter than its headers, not a multiple of four bytes, or longer than any path MTU
    #[error("shorter than its headers, not a multiple of four bytes, or longer than any path MTU")]
    Length,
    /// op-code not known
    #[error("op-code not known")]
    Opcode,
    /// transport header version not 0
    #[error("transport header version not 0")]
    Version,
    /// more padding than payload, or bytes behind a packet that has no payload
    #[error("more padding than payload, or bytes behind a packet that has no payload")]
    Payload,
}

/// Payload of the largest packet that any path carries, bytes.
const LONGEST: usize = Mtu::M4096.bytes() as usize;

/// Bytes of a frame that are a header as they lie.
trait Header: FromBytes + KnownLayout + Immutable + Unaligned {}
impl<H: FromBytes + KnownLayout + Immutable + Unaligned> Header for H {}

/// A packet whose headers are all there.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    bth: &'a Bth,
    op: &'static OpInfo,
    ext: &'a [u8],
    payload: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Checks a frame without its ICRC: known op-code, version 0, all headers there, a multiple of
    /// four bytes, padding within the payload, no more payload than the largest path MTU (IBTA 9.6.1).
    #[inline]
    pub fn parse(frame: &'a [u8]) -> Result<Self, WireError> {
        let (bth, _) = Bth::ref_from_prefix(frame).map_err(|_| WireError::Length)?;
        let op = op_info(bth.opcode()).ok_or(WireError::Opcode)?;
        Packet::parse_as(frame, bth, op)
    }

    /// As [`Packet::parse`], by StRoM's op-codes alone: for queue pairs that speak that dialect.
    pub fn parse_rpc(frame: &'a [u8]) -> Result<Self, WireError> {
        let (bth, _) = Bth::ref_from_prefix(frame).map_err(|_| WireError::Length)?;
        let op = rpc_info(bth.opcode()).ok_or(WireError::Opcode)?;
        Packet::parse_as(frame, bth, op)
    }

    /// A FLUSH, as a queue pair that speaks StRoM's dialect reads it: an RPC WRITE of as many bytes as its
    /// headers are longer. `None`: it is none.
    pub fn as_rpc(&self) -> Option<Packet<'a>> {
        let op = rpc_info(self.op.code).filter(|op| self.op.header_len > op.header_len)?;
        let (ext, payload) = self.ext.split_at_checked(usize::from(op.header_len) - BTH_LEN)?;
        Some(Packet { bth: self.bth, op, ext, payload })
    }

    #[inline]
    fn parse_as(frame: &'a [u8], bth: &'a Bth, op: &'static OpInfo) -> Result<Self, WireError> {
        if bth.version() != 0 {
            return Err(WireError::Version);
        }
        let (headers, body) = frame.split_at_checked(usize::from(op.header_len)).ok_or(WireError::Length)?;
        let ext = headers.get(BTH_LEN..).ok_or(WireError::Length)?;
        if !frame.len().is_multiple_of(4) {
            return Err(WireError::Length);
        }
        let len = body.len().checked_sub(usize::from(bth.pad())).ok_or(WireError::Payload)?;
        if !op.has(OpFlags::PAYLOAD) && !body.is_empty() {
            return Err(WireError::Payload);
        }
        if len > LONGEST {
            return Err(WireError::Length);
        }
        let payload = body.get(..len).ok_or(WireError::Payload)?;
        Ok(Packet { bth, op, ext, payload })
    }

    /// Base transport header
    #[inline]
    pub fn bth(&self) -> &'a Bth {
        self.bth
    }
    /// What the op-code means
    #[inline]
    pub fn op(&self) -> &'static OpInfo {
        self.op
    }
    /// Payload without its padding
    #[inline]
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }
    /// The frame in parts: BTH, extension headers, payload. `bth().pad()` bytes may be missing at its end.
    pub fn parts(&self) -> [&'a [u8]; 3] {
        [self.bth.as_bytes(), self.ext, self.payload]
    }
    /// What the responder keeps, in op-codes that have it
    #[inline]
    pub fn sack(&self) -> Option<&'a SackEth> {
        if !self.op.has(OpFlags::SACKETH) {
            return None;
        }
        SackEth::ref_from_suffix(self.ext).ok().map(|(_, h)| h)
    }
    /// RDMA header, if the op-code has one
    #[inline]
    pub fn reth(&self) -> Option<&'a Reth> {
        let skip = if self.op.has(OpFlags::FETH) { size_of::<Feth>() } else { 0 };
        self.at(OpFlags::RETH, skip)
    }
    /// FLUSH header, if the op-code has one
    #[inline]
    pub fn feth(&self) -> Option<&'a Feth> {
        self.first(OpFlags::FETH)
    }
    /// Datagram header, if the op-code has one
    #[inline]
    pub fn deth(&self) -> Option<&'a Deth> {
        self.first(OpFlags::DETH)
    }
    /// ACK header, if the op-code has one
    #[inline]
    pub fn aeth(&self) -> Option<&'a Aeth> {
        self.first(OpFlags::AETH)
    }
    /// Atomic header, if the op-code has one
    #[inline]
    pub fn atomic_eth(&self) -> Option<&'a AtomicEth> {
        self.first(OpFlags::ATOMIC)
    }
    /// Value before the atomic, if the op-code has it
    #[inline]
    pub fn atomic_ack(&self) -> Option<u64> {
        if !self.op.has(OpFlags::ATOMIC_ACK) {
            return None;
        }
        AtomicAckEth::ref_from_suffix(self.ext).ok().map(|(_, h)| h.original())
    }
    /// Immediate data as it lies on the wire (network order), if the op-code has it
    #[inline]
    pub fn imm(&self) -> Option<u32> {
        self.last(OpFlags::IMM).map(u32::from_ne_bytes)
    }
    /// Key to invalidate, if the op-code has one
    #[inline]
    pub fn ieth(&self) -> Option<u32> {
        self.last(OpFlags::IETH).map(u32::from_be_bytes)
    }

    /// Number of the SRQ that an XRC request is for
    #[inline]
    pub fn xrc_srq(&self) -> Option<u32> {
        if !self.op.has(OpFlags::XRCETH) {
            return None;
        }
        self.ext.first_chunk::<4>().map(|b| u32::from_be_bytes(*b) & QPN_MASK)
    }

    /// DETH, FETH, RETH without one, AETH and AtomicETH exclude each other and stand directly behind the BTH,
    /// or the XRCETH.
    #[inline]
    fn first<H: Header>(&self, flag: OpFlags) -> Option<&'a H> {
        self.at(flag, 0)
    }

    /// The header `skip` bytes behind the BTH or XRCETH.
    #[inline]
    fn at<H: Header>(&self, flag: OpFlags, skip: usize) -> Option<&'a H> {
        if !self.op.has(flag) {
            return None;
        }
        let skip = skip + if self.op.has(OpFlags::XRCETH) { 4 } else { 0 };
        H::ref_from_prefix(self.ext.get(skip..)?).ok().map(|(h, _)| h)
    }

    /// ImmDt and IETH exclude each other and come last.
    #[inline]
    fn last(&self, flag: OpFlags) -> Option<[u8; 4]> {
        if !self.op.has(flag) {
            return None;
        }
        self.ext.last_chunk::<4>().copied()
    }
}
