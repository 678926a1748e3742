//! Frames made from an input's bytes: any op-code with the headers that belong to it, near what the QP
//! expects.

use starverbs_core::wire::{Bth, OpFlags, op_info};
use starverbs_core::{FrameMeta, Gid, Psn, Qpn};
use zerocopy::IntoBytes;

use super::Mode;
use super::world::{MTU, World};
use crate::bytes::Bytes;

const WRONG_QKEY: u32 = 0x2222_2222;
/// Ways in which an unconnected peer's frame is wrong.
const SPOILS: u8 = 7;

/// A frame with where it seems to come from.
pub(crate) struct Frame {
    pub(crate) meta: FrameMeta,
    pub(crate) bytes: Vec<u8>,
    /// What is wrong with an unconnected peer's
    spoil: u8,
}

impl Frame {
    /// Bytes as they are.
    pub(crate) fn raw(bytes: &[u8]) -> Frame {
        Frame { meta: FrameMeta::default(), bytes: bytes.to_vec(), spoil: 0 }
    }

    /// The next one of an input.
    pub(crate) fn read(world: &World, lane: usize, bytes: &mut Bytes<'_>) -> Frame {
        let (opcode, how) = (bytes.byte(), bytes.half());
        let op = op_info(opcode);
        let flags = op.map_or(OpFlags::PAYLOAD, |op| op.flags);
        let response = op.is_some_and(|op| op.kind.is_response());
        let psn = world.next_psn(lane, response);
        let psn = match how & 3 {
            0 => psn,
            1 => psn.plus(bytes.byte() as i8 as u32),
            2 => psn.plus(u32::from(bytes.half()) << 8),
            _ => psn.plus(0x00ff_ffff),
        };
        let qpn = if how & 0x1c == 0x1c { bytes.word() } else { world.qpn(lane) };
        let payload = payload(world, how, bytes);
        let pad = if how & 0x4000 == 0 { (payload.len().wrapping_neg() & 3) as u8 } else { (how >> 5) as u8 };
        let bth = Bth::new(
            opcode,
            qpn,
            psn,
            how & 0x20 != 0,
            how & 0x40 != 0,
            pad,
            starverbs_core::wire::PKEY_DEFAULT,
        );
        let mut frame = bth.as_bytes().to_vec();
        let (va, key) = world.target(bytes);
        if flags.contains(OpFlags::XRCETH) {
            frame.extend(world.srq(bytes.byte()).to_be_bytes());
        }
        if flags.contains(OpFlags::DETH) {
            let qkey = if how & 0x80 == 0 { world.qkey() } else { WRONG_QKEY };
            frame.extend(qkey.to_be_bytes());
            frame.extend(world.peer_qpn(lane).to_be_bytes());
        }
        if flags.contains(OpFlags::FETH) {
            frame.extend(u32::from(bytes.byte()).to_be_bytes());
        }
        if flags.contains(OpFlags::RETH) {
            frame.extend(va.to_be_bytes());
            frame.extend(key.to_be_bytes());
            let len = match how >> 8 & 3 {
                0 => payload.len() as u32,
                1 => u32::from(bytes.byte()),
                2 => u32::from(bytes.half()),
                _ => bytes.word(),
            };
            frame.extend(len.to_be_bytes());
        }
        if flags.contains(OpFlags::AETH) {
            frame.extend([bytes.byte(), 0, 0, bytes.byte()]);
        }
        if flags.contains(OpFlags::ATOMIC) {
            frame.extend(va.to_be_bytes());
            frame.extend(key.to_be_bytes());
            frame.extend([0, 0, 0, 0, 0, 0, 0, bytes.byte()]);
            frame.extend([0; 8]);
        }
        if flags.contains(OpFlags::ATOMIC_ACK) {
            frame.extend([7; 8]);
        }
        if flags.contains(OpFlags::RESERVED) {
            frame.extend([0; 16]);
        }
        if flags.contains(OpFlags::IMM) {
            frame.extend([1, 2, 3, 4]);
        }
        if flags.contains(OpFlags::IETH) {
            frame.extend(key.to_be_bytes());
        }
        if flags.contains(OpFlags::PAYLOAD) || how & 0x8000 != 0 {
            frame.extend(payload);
            frame.resize(frame.len() + usize::from(pad & 3), 0);
        }
        let mut frame = Frame { meta: FrameMeta::default(), bytes: frame, spoil: (how >> 10) as u8 & 7 };
        if how & 0x2000 != 0 {
            frame.disturb(bytes);
        }
        frame
    }

    /// Changes a byte, or the length.
    fn disturb(&mut self, bytes: &mut Bytes<'_>) {
        let (at, with) = (usize::from(bytes.half()), bytes.byte());
        match with & 3 {
            0 => self.bytes.truncate(at),
            1 => self.bytes.resize(self.bytes.len() + at, with),
            _ => {
                let len = self.bytes.len().max(1);
                if let Some(byte) = self.bytes.get_mut(at % len) {
                    *byte ^= with;
                }
            }
        }
    }

    /// Gives it its addresses. An unconnected peer's frame is made one that no QP may take.
    pub(crate) fn address(&mut self, world: &World, peer: Gid, own: Gid) {
        self.meta = FrameMeta { src: peer, dst: own, traffic_class: self.spoil & 3, hop_limit: 64 };
        if world.mode != Mode::Unconnected {
            return;
        }
        let foreign = Gid::from_ipv4([10, 0, 9, 9]);
        match self.spoil % SPOILS {
            0 | 1 => self.meta.src = foreign,
            2 => self.set(1, |flags| flags | 1),
            3 => self.set(2, |_| 0x12),
            4 => {
                let whole = self.bytes.len() & !3;
                self.bytes.resize(whole + 1, 0);
            }
            5 => self.set(0, |opcode| if op_info(opcode).is_some() { 0x3f } else { opcode }),
            _ => self.meta.dst = Gid::from_ipv4([239, 1, 2, 3]),
        }
        /* a datagram may come from anywhere, and a probe's answer concerns who sends it */
        self.set(0, |opcode| if matches!(opcode, 0xc0 | 0xc1 | 0x81) { 0x3f } else { opcode });
        if world.qpn_of(&self.bytes) == Some(world.datagram_qpn()) {
            for at in 12..16 {
                self.set(at, |_| 0x22);
            }
        }
    }

    fn set(&mut self, at: usize, change: impl Fn(u8) -> u8) {
        if let Some(byte) = self.bytes.get_mut(at) {
            *byte = change(*byte);
        }
    }
}

/// What a frame carries.
fn payload(world: &World, how: u16, bytes: &mut Bytes<'_>) -> Vec<u8> {
    match bytes.byte() {
        0 => vec![0x5a; MTU],
        1 => vec![0x5a; MTU + usize::from(bytes.byte())],
        2 => vec![0x5a; usize::from(bytes.half())],
        3 => message(world, 3, bytes),
        4 => message(world, 1, bytes),
        5 => message(world, bytes.byte(), bytes),
        6 => {
            let len = usize::from(bytes.byte());
            bytes.take(len).to_vec()
        }
        7 => vec![how as u8; 8],
        len => vec![0x5a; usize::from(len)],
    }
}

/// A message with a tag: `struct ibv_tmh`, and what comes behind it.
fn message(world: &World, kind: u8, bytes: &mut Bytes<'_>) -> Vec<u8> {
    let mut out = vec![kind, 0, 0, 0, 0, 0, 0, bytes.byte()];
    out.extend(u64::from(bytes.byte() & 3).to_be_bytes());
    if kind == 1 {
        let (va, key) = world.peer_target(bytes.byte());
        out.extend(va.to_be_bytes());
        out.extend(key.to_be_bytes());
        out.extend(u32::from(bytes.half()).to_be_bytes());
    }
    let more = if bytes.byte() & 1 == 0 { usize::from(bytes.byte()) } else { MTU - out.len() };
    out.resize(out.len() + more, 0x3c);
    out
}

/// Distance of a response's PSN from the first one of its QP; `None`: before it.
pub(crate) fn behind(psn: Psn, first: Psn) -> Option<u32> {
    u32::try_from(psn.since(first)).ok()
}

/// Destination QPN of a frame that is long enough to have one.
pub(crate) fn dest_qpn(frame: &[u8]) -> Option<Qpn> {
    frame.get(5..8).map(|b| u32::from_be_bytes([0, b[0], b[1], b[2]]))
}
