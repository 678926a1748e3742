//! The completion that the last data of a message carries to SL, in place of a packet of its own: SL's card
//! writes the data, then the slot, and answers both at once.
//!
//! ```text
//! slot 64
//! queue 8 (1: receive) | op-code 8 | flags 8 | solicited 8
//! length 32
//! immediate data or key 32
//! 0 8 | sequence 24
//! how far SF has stored SL's WQEs 64
//! ```
//!
//! Bytes in, numbers out.

use starverbs_core::{Psn, QPN_MASK, WcFlags, WcOpcode};

use super::message::{CqeMsg, WqeReader};
use super::wire::Queue;

/// Bytes before the data.
pub const CARRIED_LEN: usize = 32;

/// A completion that has succeeded, and where it belongs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Carried {
    /// Of which queue
    pub queue: Queue,
    /// Its sequence there
    pub seq: Psn,
    /// The completion
    pub cqe: CqeMsg,
    /// As ADDR of a CQEP ([`Upto`](super::form::Upto))
    pub stored: u64,
}

impl Carried {
    /// Its bytes.
    pub fn encode(&self) -> [u8; CARRIED_LEN] {
        let CqeMsg { slot, opcode, flags, solicited, byte_len, .. } = self.cqe;
        let says = u32::from_be_bytes([self.queue as u8, opcode as u8, flags.bits(), solicited.into()]);
        let imm = u32::from_be_bytes(self.cqe.imm_bytes());
        let pair = |high: u32, low: u32| (u64::from(high) << 32 | u64::from(low)).to_be_bytes();
        let mut bytes = [0; CARRIED_LEN];
        /* whole words: no call copies them */
        if let [first, second, third, last] = bytes.as_chunks_mut().0 {
            (*first, *last) = (slot.to_be_bytes(), self.stored.to_be_bytes());
            (*second, *third) = (pair(says, byte_len), pair(imm, self.seq.get()));
        }
        bytes
    }

    /// The completion at the front of these bytes, and the data behind it. `None`: there is none.
    pub fn decode(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let mut from = WqeReader(bytes);
        let slot = from.long()?;
        let [queue, opcode, flags, solicited @ 0..=1] = from.bytes()? else { return None };
        let flags = WcFlags::from_bits(flags)?;
        let (byte_len, imm, seq) = (from.word()?, from.bytes()?, from.word()?);
        if queue > 1 || seq > QPN_MASK {
            return None;
        }
        let queue = if queue == 1 { Queue::Recv } else { Queue::Send };
        let cqe = CqeMsg {
            slot,
            opcode: WcOpcode::from_code(opcode)?,
            flags,
            solicited: solicited == 1,
            byte_len,
            imm: CqeMsg::imm_of(flags, imm),
            ..CqeMsg::default()
        };
        Some((Carried { queue, seq: Psn::new(seq), cqe, stored: from.long()? }, from.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_stands_before_the_data() {
        let cqe = CqeMsg {
            slot: 0x1020,
            opcode: WcOpcode::RecvRdmaWithImm,
            flags: WcFlags::WITH_IMM,
            solicited: true,
            byte_len: 3,
            imm: 0x0102_0304,
            ..CqeMsg::default()
        };
        for queue in [Queue::Send, Queue::Recv] {
            let carried = Carried { queue, seq: Psn::new(QPN_MASK), cqe, stored: 1 << 63 | 5 };
            let mut bytes = std::vec::Vec::from(carried.encode());
            assert_eq!(Carried::decode(&bytes), Some((carried, &[][..])));
            bytes.extend(b"abc");
            assert_eq!(Carried::decode(&bytes), Some((carried, &b"abc"[..])));
            assert_eq!(Carried::decode(&bytes[..CARRIED_LEN - 1]), None);
            for (at, bad) in [(8, 2), (9, 99), (11, 2), (20, 1)] {
                let mut bytes = bytes.clone();
                bytes[at] = bad;
                assert_eq!(Carried::decode(&bytes), None, "byte {at}");
            }
        }
    }
}
