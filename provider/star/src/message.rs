//! What StaR packets carry: WQEs, completions, atomics. Bytes in, numbers out.

use starverbs_core::{AvId, SendFlags, SendOp, SendWqe, Sge, WcFlags, WcOpcode, WcStatus};

use super::ring::REPLAY_SLOT;
use super::wire::MAX_DATA;

/// Most SGEs of a WQE in a packet.
pub const MAX_SGE: usize = 32;
/// Inline bytes of a WQE that any packet takes: of more, see [`inline_room`].
pub const SMALL_INLINE: usize = MAX_SGE * SGE_LEN;
/// Most inline bytes of a WQE in a packet.
pub const MAX_INLINE: usize = MAX_DATA - WQE_HEAD;
/// Bytes that SF keeps for the inline bytes of a send queue at most, if they are more than
/// [`SMALL_INLINE`] of a WQE.
pub(super) const INLINE_KEPT: usize = 1 << 18;
/// Bytes of a WQE before its SGEs or inline bytes.
pub const WQE_HEAD: usize = 48;
/// Bytes of the largest WQE.
pub const MAX_WQE: usize = WQE_HEAD + MAX_INLINE;
/// Bytes of the largest WQE without more inline bytes than any packet takes.
pub const SMALL_WQE: usize = WQE_HEAD + SMALL_INLINE;
/// Bytes of a completion in a CQEP.
pub const CQE_LEN: usize = 32;
/// Bytes of an atomic in a GD.
pub const ATOMIC_LEN: usize = 32;

pub(super) const SGE_LEN: usize = 16;
/// Logarithm of the largest number of replay slots.
const MOST_SLOTS: u8 = 31;
/// The op-code of a receive WQE, which no send WQE has.
pub(super) const RECV: u8 = 0xff;

/// Most inline bytes of a WQE in a packet of this path MTU, bytes, from a send queue of `depth` WQEs: all of
/// it fits the MTU, and as many in each WQE of the queue what SF keeps. More lie in host memory of SL, and an
/// SGE says where.
pub fn inline_room(mtu: u32, depth: u32) -> usize {
    let fits = (mtu as usize).saturating_sub(WQE_HEAD).min(MAX_INLINE);
    fits.min(INLINE_KEPT / depth.max(1) as usize).max(SMALL_INLINE)
}

/// Reads a message front to back.
pub(super) struct WqeReader<'a>(pub(super) &'a [u8]);

impl<'a> WqeReader<'a> {
    /// So many bytes, where they are.
    pub(super) fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (now, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(now)
    }
    pub(super) fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (now, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*now)
    }
    pub(super) fn byte(&mut self) -> Option<u8> {
        self.bytes().map(u8::from_be_bytes)
    }
    pub(super) fn half(&mut self) -> Option<u16> {
        self.bytes().map(u16::from_be_bytes)
    }
    pub(super) fn word(&mut self) -> Option<u32> {
        self.bytes().map(u32::from_be_bytes)
    }
    pub(super) fn long(&mut self) -> Option<u64> {
        self.bytes().map(u64::from_be_bytes)
    }
    /// Nothing may be left.
    pub(super) fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

/// Writes a message front to back, into room that may be too small.
pub(super) struct Writer<'a> {
    room: &'a mut [u8],
    at: usize,
}

impl<'a> Writer<'a> {
    pub(super) fn new(room: &'a mut [u8]) -> Self {
        Writer { room, at: 0 }
    }
    pub(super) fn bytes(&mut self, bytes: &[u8]) -> Option<()> {
        let end = self.at.checked_add(bytes.len())?;
        self.room.get_mut(self.at..end)?.copy_from_slice(bytes);
        self.at = end;
        Some(())
    }
    /// Place for so many bytes.
    pub(super) fn take(&mut self, len: usize) -> Option<&mut [u8]> {
        let from = self.at;
        let end = from.checked_add(len)?;
        let place = self.room.get_mut(from..end)?;
        self.at = end;
        Some(place)
    }
    pub(super) fn byte(&mut self, value: u8) -> Option<()> {
        self.bytes(&[value])
    }
    pub(super) fn half(&mut self, value: u16) -> Option<()> {
        self.bytes(&value.to_be_bytes())
    }
    pub(super) fn word(&mut self, value: u32) -> Option<()> {
        self.bytes(&value.to_be_bytes())
    }
    pub(super) fn long(&mut self, value: u64) -> Option<()> {
        self.bytes(&value.to_be_bytes())
    }
    /// Bytes written.
    pub(super) fn len(&self) -> usize {
        self.at
    }
}

/// A WQE of SL as it travels in a WQEP.
#[derive(Clone, Copy, Debug)]
pub struct Wqe<'a> {
    /// A receive WQE: of `wqe` only `length` and `num_sge` count
    pub recv: bool,
    /// The fixed part. It has no `wr_id`: the SL host keeps that.
    pub wqe: SendWqe,
    /// Its bytes or where they are
    pub body: Body<'a>,
}

/// Where a WQE's bytes are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Body<'a> {
    /// In SL's memory
    Sges(Sges<'a>),
    /// The bytes themselves
    Inline(&'a [u8]),
}

/// SGEs as they lie in a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sges<'a>(&'a [[u8; SGE_LEN]]);

impl<'a> Sges<'a> {
    pub(super) fn new(bytes: &'a [[u8; SGE_LEN]]) -> Self {
        Sges(bytes)
    }
    /// How many
    pub fn len(&self) -> usize {
        self.0.len()
    }
    /// Whether there are none
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    /// Each of them
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Sge> + use<'a> {
        self.0.iter().map(sge)
    }
}

pub(super) fn sge(bytes: &[u8; SGE_LEN]) -> Sge {
    let word = u128::from_be_bytes(*bytes);
    Sge { addr: (word >> 64) as u64, len: (word >> 32) as u32, lkey: word as u32 }
}

pub(super) fn sge_bytes(sge: &Sge) -> [u8; SGE_LEN] {
    (u128::from(sge.addr) << 64 | u128::from(sge.len) << 32 | u128::from(sge.lkey)).to_be_bytes()
}

/// Sum of lengths. `None`: 4 GiB or more.
pub(super) fn sum(mut lengths: impl Iterator<Item = u32>) -> Option<u32> {
    lengths.try_fold(0u32, u32::checked_add)
}

/// Of SGEs as they lie in a packet.
pub(super) fn sge_sum(sges: &[[u8; SGE_LEN]]) -> Option<u32> {
    sum(sges.iter().map(|s| sge(s).len))
}

/// What a send WQE asks for. `None`: nothing that a program may post.
pub(super) fn op_of(code: u8) -> Option<SendOp> {
    Some(SendOp::decode(code)).filter(|op| *op != SendOp::Malformed)
}

/// Immediate data is kept in the order in which it was given; a key is a number.
pub(super) fn imm_bytes(op: SendOp, imm: u32) -> [u8; 4] {
    if op.has_imm() { imm.to_ne_bytes() } else { imm.to_be_bytes() }
}

pub(super) fn imm_of(op: SendOp, imm: [u8; 4]) -> u32 {
    if op.has_imm() { u32::from_ne_bytes(imm) } else { u32::from_be_bytes(imm) }
}

/// Writes a send WQE to `room`; gives its length. `inline` are its bytes if it has the INLINE flag, `sges`
/// where they are otherwise. `None`: more of them than a packet takes, or than `room` does.
pub fn encode_send(wqe: &SendWqe, sges: &[Sge], inline: &[u8], room: &mut [u8]) -> Option<usize> {
    let is_inline = wqe.flags.contains(SendFlags::INLINE);
    let (sges, inline) = if is_inline { (&[][..], inline) } else { (sges, &[][..]) };
    if sges.len() > MAX_SGE || inline.len() > MAX_INLINE {
        return None;
    }
    let length = if is_inline { u32::try_from(inline.len()).ok()? } else { sum(sges.iter().map(|s| s.len))? };
    let mut out = Writer::new(room);
    encode_head(wqe, sges.len() as u8, length, &mut out)?;
    sges.iter().try_for_each(|s| out.bytes(&sge_bytes(s)))?;
    out.bytes(inline)?;
    Some(out.len())
}

/// As [`encode_send`], of an inline WQE without its `length` bytes, which follow in the packet.
pub fn encode_inline(wqe: &SendWqe, length: u32, room: &mut [u8]) -> Option<usize> {
    if length as usize > MAX_INLINE {
        return None;
    }
    let mut out = Writer::new(room);
    encode_head(wqe, 0, length, &mut out)?;
    Some(out.len())
}

fn encode_head(wqe: &SendWqe, num_sge: u8, length: u32, out: &mut Writer<'_>) -> Option<()> {
    out.bytes(&[wqe.op as u8, wqe.flags.bits(), num_sge, 0])?;
    out.word(length)?;
    out.long(wqe.remote_addr)?;
    out.long(wqe.compare_add)?;
    out.long(wqe.swap)?;
    out.word(wqe.rkey)?;
    out.bytes(&imm_bytes(wqe.op, wqe.imm))?;
    out.word(wqe.remote_qpn)?;
    out.word(wqe.qkey)
}

/// Writes a receive WQE to `room`; gives its length. `None`: as of [`encode_send`].
pub fn encode_recv(sges: &[Sge], room: &mut [u8]) -> Option<usize> {
    if sges.len() > MAX_SGE {
        return None;
    }
    let mut out = Writer::new(room);
    out.bytes(&[RECV, 0, sges.len() as u8, 0])?;
    out.word(sum(sges.iter().map(|s| s.len))?)?;
    out.bytes(&[0; WQE_HEAD - 8])?;
    sges.iter().try_for_each(|s| out.bytes(&sge_bytes(s)))?;
    Some(out.len())
}

impl<'a> Wqe<'a> {
    /// The WQE that these bytes are. `None`: they are none.
    pub fn decode(bytes: &'a [u8]) -> Option<Self> {
        let mut from = WqeReader(bytes);
        let [code, flags, num_sge, zero] = from.bytes()?;
        let recv = code == RECV;
        let op = if recv { SendOp::Send } else { op_of(code)? };
        let flags = SendFlags::from_bits(flags)?;
        let length = from.word()?;
        let (remote_addr, compare_add, swap) = (from.long()?, from.long()?, from.long()?);
        let rkey = from.word()?;
        let imm = imm_of(op, from.bytes()?);
        let (remote_qpn, qkey) = (from.word()?, from.word()?);
        let inline = flags.contains(SendFlags::INLINE);
        let (body, sum) = if inline {
            (Body::Inline(from.0), u32::try_from(from.0.len()).ok()?)
        } else {
            let (sges, []) = from.0.as_chunks::<SGE_LEN>() else { return None };
            (Body::Sges(Sges(sges)), sge_sum(sges)?)
        };
        let count = match body {
            Body::Sges(sges) => sges.len(),
            Body::Inline(_) => 0,
        };
        let plain = zero == 0 && (!recv || flags.is_empty()) && count == usize::from(num_sge);
        if !plain || count > MAX_SGE || sum != length || bytes.len() > MAX_WQE {
            return None;
        }
        let wqe = SendWqe {
            wr_id: 0,
            remote_addr,
            compare_add,
            swap,
            rkey,
            imm,
            length,
            remote_qpn,
            qkey,
            av: AvId(0),
            op,
            flags,
            num_sge: num_sge.into(),
            ..SendWqe::default()
        };
        Some(Wqe { recv, wqe, body })
    }
}

/// A completion for SL, and where it belongs. Its queue and sequence stand in the header.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CqeMsg {
    /// Address of its slot in SL's memory: see [`ring`](super::ring)
    pub slot: u64,
    /// How the WQE ended
    pub status: WcStatus,
    /// What was done
    pub opcode: WcOpcode,
    /// Which fields are valid
    pub flags: WcFlags,
    /// Receives: the sender asked for an event
    pub solicited: bool,
    /// Bytes moved
    pub byte_len: u32,
    /// As in a [`Cqe`](starverbs_core::Cqe)
    pub imm: u32,
    /// More about an error
    pub vendor_err: u32,
}

/// Bytes of a completion without its slot: as they lie in a packet, and in SL's memory.
pub const CQE_BODY: usize = 16;

impl CqeMsg {
    /// Its bytes.
    pub fn encode(&self) -> [u8; CQE_LEN] {
        let mut bytes = [0; CQE_LEN];
        bytes[0..8].copy_from_slice(&self.slot.to_be_bytes());
        bytes[8..24].copy_from_slice(&self.body());
        bytes
    }

    /// Its bytes without the slot.
    pub fn body(&self) -> [u8; CQE_BODY] {
        let mut bytes = [0; CQE_BODY];
        bytes[0] = self.status as u8;
        bytes[1] = self.opcode as u8;
        bytes[2] = self.flags.bits();
        bytes[3] = u8::from(self.solicited);
        bytes[4..8].copy_from_slice(&self.byte_len.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.imm_bytes());
        bytes[12..16].copy_from_slice(&self.vendor_err.to_be_bytes());
        bytes
    }

    /// Immediate data is kept in the order in which it was given; a key is a number.
    pub(super) fn imm_bytes(&self) -> [u8; 4] {
        if self.flags.contains(WcFlags::WITH_IMM) { self.imm.to_ne_bytes() } else { self.imm.to_be_bytes() }
    }

    pub(super) fn imm_of(flags: WcFlags, imm: [u8; 4]) -> u32 {
        if flags.contains(WcFlags::WITH_IMM) { u32::from_ne_bytes(imm) } else { u32::from_be_bytes(imm) }
    }

    /// The completion that these bytes are. `None`: they are none.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = WqeReader(bytes);
        let slot = from.long()?;
        let body = from.bytes()?;
        if from.bytes()? != [0; CQE_LEN - CQE_BODY - 8] {
            return None;
        }
        from.end()?;
        CqeMsg::from_body(slot, &body)
    }

    /// As [`decode`](CqeMsg::decode), of [`body`](CqeMsg::body).
    pub fn from_body(slot: u64, body: &[u8; CQE_BODY]) -> Option<Self> {
        let mut from = WqeReader(body);
        let [status, opcode, flags, solicited] = from.bytes()?;
        let flags = WcFlags::from_bits(flags)?;
        let byte_len = from.word()?;
        let imm = from.bytes()?;
        Some(CqeMsg {
            slot,
            status: WcStatus::from_code(status)?,
            opcode: WcOpcode::from_code(opcode)?,
            flags,
            solicited: match solicited {
                0 => false,
                1 => true,
                _ => return None,
            },
            byte_len,
            imm: CqeMsg::imm_of(flags, imm),
            vendor_err: from.word()?,
        })
    }
}

/// An atomic of SF on SL's memory, in a GD with [`Opt::Recv`](super::wire::Opt::Recv). The target's address
/// is the header's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Atomic {
    /// CMP_SWAP, FETCH_ADD or ATOMIC_WRITE
    pub op: SendOp,
    /// Counts the connection's atomics
    pub seq: u32,
    /// How many replay slots there are: the logarithm to base 2, at most 31
    pub slots: u8,
    /// Address of its replay slot in SL's memory
    pub slot: u64,
    /// Compare value, or the number to add, or the eight bytes to write as a big-endian number
    pub compare_add: u64,
    /// Swap value
    pub swap: u64,
}

impl Atomic {
    /// Address of the slot of the atomic before it. `None`: there is no such address.
    pub const fn slot_before(&self) -> Option<u64> {
        let last = (1u32 << (self.slots & MOST_SLOTS)) - 1;
        match self.seq & last {
            0 => self.slot.checked_add(last as u64 * REPLAY_SLOT),
            _ => self.slot.checked_sub(REPLAY_SLOT),
        }
    }

    /// Its bytes.
    pub fn encode(&self) -> [u8; ATOMIC_LEN] {
        let mut bytes = [0; ATOMIC_LEN];
        bytes[0] = self.op as u8;
        bytes[1] = self.slots;
        bytes[4..8].copy_from_slice(&self.seq.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.slot.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.compare_add.to_be_bytes());
        bytes[24..32].copy_from_slice(&self.swap.to_be_bytes());
        bytes
    }

    /// The atomic that these bytes are. `None`: they are none.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = WqeReader(bytes);
        let [code, slots @ ..=MOST_SLOTS, 0, 0] = from.bytes()? else { return None };
        let op = SendOp::from_code(code.into()).filter(|op| op.is_atomic() || *op == SendOp::AtomicWrite)?;
        let atomic = Atomic {
            op,
            seq: from.word()?,
            slots,
            slot: from.long()?,
            compare_add: from.long()?,
            swap: from.long()?,
        };
        from.end()?;
        Some(atomic)
    }
}

#[cfg(test)]
#[path = "message_tests.rs"]
mod tests;
