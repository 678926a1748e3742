//! What stands before the data of a WRITE that SL's card does in its turn: once, and behind the one before.
//!
//! ```text
//! slot 64
//! number 32 | 0 32
//! ```
//!
//! Bytes in, numbers out.

use super::message::WqeReader;

/// Bytes before the data.
pub const TURN_LEN: usize = 16;

/// The turn of a packet of a WRITE.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WriteTurn {
    /// Where in SL's memory the last number is kept that was written
    pub slot: u64,
    /// Its number among those of the connection
    pub number: u32,
}

impl WriteTurn {
    /// Its bytes.
    pub fn encode(&self) -> [u8; TURN_LEN] {
        let mut bytes = [0; TURN_LEN];
        bytes[0..8].copy_from_slice(&self.slot.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.number.to_be_bytes());
        bytes
    }

    /// The turn at the front of these bytes, and the data behind it. `None`: there is none.
    pub fn decode(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let mut from = WqeReader(bytes);
        let (slot, number) = (from.long()?, from.word()?);
        let unused = from.word()?;
        (unused == 0).then_some((WriteTurn { slot, number }, from.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_stands_before_the_data() {
        let turn = WriteTurn { slot: 0x1020, number: u32::MAX };
        let mut bytes = std::vec::Vec::from(turn.encode());
        assert_eq!(WriteTurn::decode(&bytes), Some((turn, &[][..])));
        assert_eq!(WriteTurn::decode(&bytes[..TURN_LEN - 1]), None);
        bytes.extend(b"abc");
        assert_eq!(WriteTurn::decode(&bytes), Some((turn, &b"abc"[..])));
        bytes[15] = 1;
        assert_eq!(WriteTurn::decode(&bytes), None);
    }
}
