//! 1RMA packets: what stands behind the UDP header. The paper has the fields and no layout.
//!
//! ```text
//! all       version 4 | hop 4, op 8, status 8, class 8
//!           sender 32, counter 64                          the initialisation vector
//! Request   from 64, PID 32, RegionId 32, offset 64, size 32, timeout 32
//! Ask       to 64, from 64, size 32
//! Data      to 64, offset 32, encrypted bytes
//! Done      to 64
//! Fail      to 64
//! all       tag 128
//! ```
//!
//! READ is a Request and Data; WRITE and REKEY are a Request, an Ask, Data the other way, and Done. Fail
//! answers a Request, or an Ask. `to` and `from` are [`Handle`]s: index 32, generation 32. All numbers are
//! big-endian. Everything before the encrypted bytes is bound to them. Pure: bytes in, numbers out.

use alloc::vec::Vec;

use starverbs_core::Gid;
use thiserror::Error;

use crate::region::RegionId;
use crate::seal::{IV_LEN, TAG_LEN};
use crate::types::{Class, Handle, MAX_OP, OneRmaOp, Status};

/// UDP port of an address's first 1RMA card; the others' are the next ones.
pub const PORT: u16 = 4795;
/// Bytes of the longest header.
pub const MAX_HEADER: usize = 48;
/// Bytes of a packet around its data.
pub const OVERHEAD: usize = 28 + TAG_LEN;
/// Bytes of the longest packet.
pub const MAX_PACKET: usize = OVERHEAD + MAX_OP as usize;

const VERSION: u8 = 1;
const PREFIX_LEN: usize = 16;

/// Why bytes are no packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum WireError {
    /// Shorter than its header and tag, or longer
    #[error("the length is not that of such a packet")]
    Length,
    /// A version, hop, operation, class or status that is not known
    #[error("unknown version, hop, operation, class or status")]
    Unknown,
    /// An operation of this kind does not have this size or offset
    #[error("no operation has this size or offset")]
    Size,
}

/// The initialisation vector of a packet: no two packets under one key have the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Iv {
    /// The card that sent it
    pub sender: u32,
    /// Its number there
    pub counter: u64,
}

impl Iv {
    /// As the cipher takes it.
    pub fn bytes(self) -> [u8; IV_LEN] {
        let mut bytes = [0; IV_LEN];
        let mut out = Writer { bytes: &mut bytes, len: 0 };
        out.word(self.sender);
        out.long(self.counter);
        bytes
    }
}

/// What all packets begin with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PacketPrefix {
    /// The operation that it belongs to
    pub op: OneRmaOp,
    /// Its class
    pub class: Class,
    /// Its initialisation vector
    pub iv: Iv,
}

/// What a packet says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hop {
    /// Initiator to target: the operation
    Request {
        /// The command slot
        from: Handle,
        /// The process of the slot
        pid: u32,
        /// The region at the target
        region: RegionId,
        /// Where in the region
        offset: u64,
        /// How many bytes
        size: u32,
        /// How long the initiator waits, ns: the target's wait for the data of a WRITE is no longer
        timeout: u32,
    },
    /// Target to initiator: the data of a WRITE or REKEY is wanted
    Ask {
        /// The command slot
        to: Handle,
        /// The transfer at the target
        from: Handle,
        /// How many bytes
        size: u32,
    },
    /// Some of the data, to a command slot (READ) or a transfer
    Data {
        /// The command slot or the transfer
        to: Handle,
        /// Where in the operation
        offset: u32,
    },
    /// Target to initiator: a WRITE or REKEY is done
    Done {
        /// The command slot
        to: Handle,
    },
    /// The operation does not take place. To a transfer: the initiator will not send its data
    Fail {
        /// The command slot or the transfer
        to: Handle,
        /// Why, as the initiator's program learns it
        status: Status,
    },
}

const REQUEST: u8 = 1;
const ASK: u8 = 2;
const DATA: u8 = 3;
const DONE: u8 = 4;
const FAIL: u8 = 5;

/// A header: the prefix and what the packet says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OneRmaHeader {
    /// The prefix
    pub prefix: PacketPrefix,
    /// The rest
    pub hop: Hop,
}

/// The bytes of a header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadBytes {
    bytes: [u8; MAX_HEADER],
    len: usize,
}

impl HeadBytes {
    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&self.bytes)
    }
}

struct Writer<'a> {
    bytes: &'a mut [u8],
    len: usize,
}

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) {
        let end = self.len + bytes.len();
        if let Some(to) = self.bytes.get_mut(self.len..end) {
            to.copy_from_slice(bytes);
            self.len = end;
        }
    }
    fn word(&mut self, word: u32) {
        self.put(&word.to_be_bytes());
    }
    fn long(&mut self, long: u64) {
        self.put(&long.to_be_bytes());
    }
    fn handle(&mut self, handle: Handle) {
        self.word(handle.index);
        self.word(handle.generation);
    }
}

struct FieldReader<'a>(&'a [u8]);

impl FieldReader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (first, rest) = self.0.split_first_chunk::<N>().ok_or(WireError::Length)?;
        self.0 = rest;
        Ok(*first)
    }
    fn word(&mut self) -> Result<u32, WireError> {
        self.take().map(u32::from_be_bytes)
    }
    fn long(&mut self) -> Result<u64, WireError> {
        self.take().map(u64::from_be_bytes)
    }
    fn handle(&mut self) -> Result<Handle, WireError> {
        Ok(Handle { index: self.word()?, generation: self.word()? })
    }
}

impl OneRmaHeader {
    pub(crate) fn encode(&self) -> HeadBytes {
        let mut bytes = [0; MAX_HEADER];
        let PacketPrefix { op, class, iv } = self.prefix;
        let (hop, status) = match self.hop {
            Hop::Request { .. } => (REQUEST, Status::Ok),
            Hop::Ask { .. } => (ASK, Status::Ok),
            Hop::Data { .. } => (DATA, Status::Ok),
            Hop::Done { .. } => (DONE, Status::Ok),
            Hop::Fail { status, .. } => (FAIL, status),
        };
        let mut out = Writer { bytes: &mut bytes, len: 0 };
        out.put(&[VERSION << 4 | hop, op as u8, status as u8, class as u8]);
        out.put(&iv.bytes());
        match self.hop {
            Hop::Request { from, pid, region, offset, size, timeout } => {
                out.handle(from);
                out.word(pid);
                out.word(region.0);
                out.long(offset);
                out.word(size);
                out.word(timeout);
            }
            Hop::Ask { to, from, size } => {
                out.handle(to);
                out.handle(from);
                out.word(size);
            }
            Hop::Data { to, offset } => {
                out.handle(to);
                out.word(offset);
            }
            Hop::Done { to } | Hop::Fail { to, .. } => out.handle(to),
        }
        let len = out.len;
        HeadBytes { bytes, len }
    }

    /// The bytes of a header, for who makes packets without a card.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.encode().bytes().to_vec()
    }

    /// Reads a packet: its header, and where the encrypted bytes begin.
    pub fn parse(packet: &[u8]) -> Result<(OneRmaHeader, usize), WireError> {
        let (front, _) = packet.split_last_chunk::<TAG_LEN>().ok_or(WireError::Length)?;
        let mut input = FieldReader(front);
        let [first, op, status, class] = input.take()?;
        if first >> 4 != VERSION {
            return Err(WireError::Unknown);
        }
        let op = OneRmaOp::from_code(op).ok_or(WireError::Unknown)?;
        let class = Class::from_code(class).ok_or(WireError::Unknown)?;
        let status = Status::from_code(status).ok_or(WireError::Unknown)?;
        let hop = first & 15;
        if (hop == FAIL) == (status == Status::Ok) {
            return Err(WireError::Unknown);
        }
        let iv = Iv { sender: input.word()?, counter: input.long()? };
        let hop = Hop::read(&mut input, hop, status)?;
        hop.check(op, input.0.len())?;
        Ok((OneRmaHeader { prefix: PacketPrefix { op, class, iv }, hop }, front.len() - input.0.len()))
    }
}

impl Hop {
    fn read(input: &mut FieldReader<'_>, hop: u8, status: Status) -> Result<Hop, WireError> {
        let first = input.handle()?;
        Ok(match hop {
            REQUEST => Hop::Request {
                from: first,
                pid: input.word()?,
                region: RegionId(input.word()?),
                offset: input.long()?,
                size: input.word()?,
                timeout: input.word()?,
            },
            ASK => Hop::Ask { to: first, from: input.handle()?, size: input.word()? },
            DATA => Hop::Data { to: first, offset: input.word()? },
            DONE => Hop::Done { to: first },
            FAIL => Hop::Fail { to: first, status },
            _ => return Err(WireError::Unknown),
        })
    }

    /// Whether an operation has such a hop, with so many encrypted bytes.
    fn check(&self, op: OneRmaOp, body: usize) -> Result<(), WireError> {
        let four_hops = op != OneRmaOp::Read;
        match *self {
            Hop::Data { offset, .. } => {
                let room = MAX_OP.checked_sub(offset).ok_or(WireError::Size)? as usize;
                if body == 0 || body > room { Err(WireError::Size) } else { Ok(()) }
            }
            _ if body != 0 => Err(WireError::Length),
            Hop::Request { size, .. } if !op.takes(size) => Err(WireError::Size),
            Hop::Ask { size, .. } if !op.takes(size) => Err(WireError::Size),
            Hop::Ask { .. } | Hop::Done { .. } if !four_hops => Err(WireError::Unknown),
            _ => Ok(()),
        }
    }
}

/// Bytes of what is bound to a packet, at most.
const BOUND: usize = MAX_HEADER + IV_LEN + 16;

/// What is bound to a packet: its header, the initialisation vector of the packet that it answers, and the
/// address of the target, so that a request serves at one target only.
pub(crate) struct PacketAad {
    bytes: [u8; BOUND],
    len: usize,
}

impl PacketAad {
    pub(crate) fn new(head: &[u8], answers: Iv, target: &Gid) -> Self {
        let mut bytes = [0; BOUND];
        let mut out = Writer { bytes: &mut bytes, len: 0 };
        out.put(head);
        out.put(&answers.bytes());
        out.put(&target.0);
        let len = out.len;
        PacketAad { bytes, len }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&self.bytes)
    }
}

const _: () = assert!(PREFIX_LEN + 8 + 4 + TAG_LEN == OVERHEAD && PREFIX_LEN + 32 <= MAX_HEADER);

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
