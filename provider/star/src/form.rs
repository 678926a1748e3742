//! Which packets a card sends: those of the paper one by one, or the same in fewer packets.

use starverbs_core::{Psn, QPN_MASK};

/// Version of the protocol, in Offer and Change. Connections of cards of different versions are plain RoCEv2,
/// and stay so. Those before 3 and later ones do not understand each other's offers.
pub const VERSION: u8 = 16;

/// What a card sends. It understands both, so each end may choose.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Form {
    /// Many WQEs in one packet, and one answer to many
    #[default]
    Packed,
    /// The paper's seven packet types, one by one
    Paper,
}

/// How far SF has stored SL's WQEs: all before these sequences, of the send and of the receive queue. It
/// stands in ADDR of EAs and CQEPs, which the paper does not use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Upto {
    /// Of the send queue
    pub sends: Psn,
    /// Of the receive queue
    pub recvs: Psn,
}

/// Set where the word has sequences: in the paper's packets it is 0.
const PRESENT: u64 = 1 << 63;

impl Upto {
    /// As ADDR.
    pub const fn word(self) -> u64 {
        PRESENT | (self.sends.get() as u64) << 32 | self.recvs.get() as u64
    }

    /// Of ADDR. `None`: it has none.
    pub const fn of(word: u64) -> Option<Self> {
        if word & PRESENT == 0 {
            return None;
        }
        let mask = QPN_MASK as u64;
        Some(Upto { sends: Psn::new((word >> 32 & mask) as u32), recvs: Psn::new((word & mask) as u32) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_paper_s_word_says_nothing() {
        let upto = Upto { sends: Psn::new(QPN_MASK), recvs: Psn::new(7) };
        assert_eq!((Upto::of(upto.word()), Upto::of(0)), (Some(upto), None));
        assert_eq!(Upto::of(Upto::default().word()), Some(Upto::default()), "not even the first");
    }
}
