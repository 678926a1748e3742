//! What stands before data that SL's card writes in its turn: once, and behind what was before.
//!
//! ```text
//! slot 64
//! number 32 | 0 31 | to a receive buffer 1
//! ```
//!
//! Bytes in, numbers out.

use super::message::WqeReader;

/// Bytes before the data.
pub const TURN_LEN: usize = 16;

/// The turn of a packet of a WRITE or SEND.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DataTurn {
    /// Where in SL's memory the last number is kept that was written
    pub slot: u64,
    /// Its number among those of the connection
    pub number: u32,
    /// Its data goes to a receive buffer: it is of a SEND
    pub send: bool,
}

impl DataTurn {
    /// Its bytes.
    pub fn encode(&self) -> [u8; TURN_LEN] {
        let mut bytes = [0; TURN_LEN];
        bytes[0..8].copy_from_slice(&self.slot.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.number.to_be_bytes());
        bytes[12..16].copy_from_slice(&u32::from(self.send).to_be_bytes());
        bytes
    }

    /// The turn at the front of these bytes, and the data behind it. `None`: there is none.
    pub fn decode(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let mut from = WqeReader(bytes);
        let (slot, number) = (from.long()?, from.word()?);
        let send = match from.word()? {
            0 => false,
            1 => true,
            _ => return None,
        };
        Some((DataTurn { slot, number, send }, from.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_stands_before_the_data() {
        for send in [false, true] {
            let turn = DataTurn { slot: 0x1020, number: u32::MAX, send };
            let mut bytes = std::vec::Vec::from(turn.encode());
            assert_eq!(DataTurn::decode(&bytes), Some((turn, &[][..])));
            assert_eq!(DataTurn::decode(&bytes[..TURN_LEN - 1]), None);
            bytes.extend(b"abc");
            assert_eq!(DataTurn::decode(&bytes), Some((turn, &b"abc"[..])));
            bytes[15] = 2;
            assert_eq!(DataTurn::decode(&bytes), None);
        }
    }
}
