//! One received packet, checked once.

use thiserror::Error;
use zerocopy::FromBytes;

use super::headers::{Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Reth, Syndrome};
use super::opcode::{BTH_LEN, OpFlags, OpInfo, op_info};
use crate::types::{Psn, Qpn};

/// A frame is not a packet that this card understands. Each is dropped without an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum WireError {
    /// shorter than its headers, or not a multiple of four bytes
    #[error("shorter than its headers, or not a multiple of four bytes")]
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
    /// reserved AETH syndrome
    #[error("reserved AETH syndrome")]
    Syndrome,
}

/// A packet whose headers are all there. A header that the op-code does not bring reads as zeros.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    bth: &'a Bth,
    op: &'static OpInfo,
    syndrome: Syndrome,
    ext: &'a [u8],
    payload: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Checks a frame without its ICRC: known op-code, version 0, all headers there, a multiple of
    /// four bytes, padding within the payload (IBTA 9.6.1).
    #[inline]
    pub fn parse(frame: &'a [u8]) -> Result<Self, WireError> {
        let (bth, _) = Bth::ref_from_prefix(frame).map_err(|_| WireError::Length)?;
        let op = op_info(bth.opcode()).ok_or(WireError::Opcode)?;
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
        let payload = body.get(..len).ok_or(WireError::Payload)?;
        let mut syndrome = Syndrome::Ack;
        if let (true, Some(b)) = (op.has(OpFlags::AETH), ext.first()) {
            syndrome = Syndrome::from_byte(*b).ok_or(WireError::Syndrome)?;
        }
        Ok(Packet { bth, op, syndrome, ext, payload })
    }

    /// Base transport header
    #[inline]
    pub fn bth(&self) -> &'a Bth {
        self.bth
    }
    /// What the op-code means
    #[inline]
    pub fn info(&self) -> &'static OpInfo {
        self.op
    }
    /// Packet sequence number
    #[inline]
    pub fn psn(&self) -> Psn {
        self.bth.psn()
    }
    /// Destination QPN
    #[inline]
    pub fn dest_qpn(&self) -> Qpn {
        self.bth.dest_qpn()
    }
    /// The requester wants an acknowledge
    #[inline]
    pub fn ack_req(&self) -> bool {
        self.bth.ack_req()
    }
    /// Solicited event
    #[inline]
    pub fn solicited(&self) -> bool {
        self.bth.solicited()
    }
    /// Payload without its padding
    #[inline]
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }
    /// RDMA header
    #[inline]
    pub fn reth(&self) -> Reth {
        self.first(OpFlags::RETH)
    }
    /// Datagram header
    #[inline]
    pub fn deth(&self) -> Deth {
        self.first(OpFlags::DETH)
    }
    /// ACK header
    #[inline]
    pub fn aeth(&self) -> Aeth {
        self.first(OpFlags::AETH)
    }
    /// What an acknowledge says
    #[inline]
    pub fn syndrome(&self) -> Syndrome {
        self.syndrome
    }
    /// Atomic header
    #[inline]
    pub fn atomic_eth(&self) -> AtomicEth {
        self.first(OpFlags::ATOMIC)
    }
    /// Value before the atomic
    #[inline]
    pub fn atomic_original(&self) -> u64 {
        if !self.op.has(OpFlags::ATOMIC_ACK) {
            return 0;
        }
        AtomicAckEth::read_from_suffix(self.ext).map_or(0, |(_, h)| h.original())
    }
    /// Immediate data as it lies on the wire (network order)
    #[inline]
    pub fn imm(&self) -> u32 {
        u32::from_ne_bytes(self.last(OpFlags::IMM))
    }
    /// Key to invalidate
    #[inline]
    pub fn ieth(&self) -> u32 {
        u32::from_be_bytes(self.last(OpFlags::IETH))
    }

    /// DETH, RETH, AETH and AtomicETH exclude each other and stand directly behind the BTH.
    #[inline]
    fn first<H: FromBytes>(&self, flag: OpFlags) -> H {
        let bytes = if self.op.has(flag) { self.ext } else { &[] };
        H::read_from_prefix(bytes).map_or_else(|_| H::new_zeroed(), |(h, _)| h)
    }

    /// ImmDt and IETH exclude each other and come last.
    #[inline]
    fn last(&self, flag: OpFlags) -> [u8; 4] {
        if !self.op.has(flag) {
            return [0; 4];
        }
        self.ext.last_chunk::<4>().copied().unwrap_or_default()
    }
}
