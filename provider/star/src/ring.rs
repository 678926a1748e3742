//! Slots in SL's host memory that SF fills through SL's card: completions, results of atomics kept for
//! repeats, and the number of the last turn.
//!
//! A slot begins with a stamp: epoch and sequence of what it holds. The card writes a slot only if that is
//! newer and of the same epoch, so that a late duplicate changes nothing; the host stamps all slots when a
//! connection begins.

use starverbs_core::Psn;

/// Bytes of a completion slot: stamp, completion, nothing. Those of a connection lie in one
/// [`SlotArea`](super::token::SlotArea), behind its gate, which takes as much.
pub const CQE_SLOT: u64 = 32;
/// Bytes of a replay slot: stamp, result.
pub const REPLAY_SLOT: u64 = 16;

/// Address of the slot of `seq` in a ring of `depth` slots, a power of two, of `size` bytes.
pub const fn slot(base: u64, depth: u32, seq: u32, size: u64) -> u64 {
    let index = seq & depth.wrapping_sub(1);
    base.wrapping_add(index as u64 * size)
}

/// Address of the slot of turns, which has the number of the last one that was done: behind the `slots`
/// replay slots.
pub const fn write_slot(replay: u64, slots: u32) -> u64 {
    replay.wrapping_add(slots as u64 * REPLAY_SLOT)
}

/// What a slot's first eight bytes say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stamp {
    /// The connection's epoch
    pub epoch: u32,
    /// Of completions 24 bits
    pub seq: u32,
}

/// How a slot's content compares to what comes for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Age {
    /// The slot is older: it is to be written
    Newer,
    /// It holds this
    Same,
    /// It has been used for something later
    Older,
    /// It is another connection's
    Foreign,
}

impl Stamp {
    /// As a word of memory.
    pub const fn word(self) -> u64 {
        (self.epoch as u64) << 32 | self.seq as u64
    }
    /// Of a word of memory.
    pub const fn of(word: u64) -> Self {
        Stamp { epoch: (word >> 32) as u32, seq: word as u32 }
    }
    /// What slot `index` of `depth` holds before anything came: the sequence one turn before the first.
    pub const fn before(epoch: u32, index: u32, depth: u32) -> Self {
        Stamp { epoch, seq: index.wrapping_sub(depth) }
    }
    /// As `before`, of completions.
    pub const fn before_psn(epoch: u32, index: u32, depth: u32) -> Self {
        Stamp { epoch, seq: Psn::new(index.wrapping_sub(depth)).get() }
    }
    /// That of the atomic or WRITE before.
    pub const fn one_before(self) -> Self {
        Stamp { epoch: self.epoch, seq: self.seq.wrapping_sub(1) }
    }
    /// How a slot with this stamp compares to a completion stamped `new`.
    pub const fn age_of(self, new: Stamp) -> Age {
        let ahead = Psn::new(new.seq).since(Psn::new(self.seq));
        Stamp::age(self.epoch == new.epoch, ahead)
    }
    /// How a slot with this stamp compares to an atomic or WRITE stamped `new`.
    pub const fn age_of_atomic(self, new: Stamp) -> Age {
        Stamp::age(self.epoch == new.epoch, new.seq.wrapping_sub(self.seq) as i32)
    }
    const fn age(same_epoch: bool, ahead: i32) -> Age {
        match ahead {
            _ if !same_epoch => Age::Foreign,
            0 => Age::Same,
            1.. => Age::Newer,
            _ => Age::Older,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_written_once_a_turn() {
        let fresh = Stamp::before_psn(7, 3, 8);
        let of = |seq| Stamp { epoch: 7, seq };
        assert_eq!(fresh.age_of(of(3)), Age::Newer);
        assert_eq!(of(3).age_of(of(3)), Age::Same);
        assert_eq!(of(3).age_of(of(11)), Age::Newer);
        assert_eq!(of(11).age_of(of(3)), Age::Older);
        assert_eq!(of(0xff_fffb).age_of(of(3)), Age::Newer, "across the end of numbers");
        assert_eq!(of(3).age_of(Stamp { epoch: 8, seq: 11 }), Age::Foreign);
        assert_eq!(Stamp::before(7, 1, 4).age_of_atomic(of(1)), Age::Newer);
        assert_eq!(of(u32::MAX - 3).age_of_atomic(of(0)), Age::Newer);
        assert_eq!(Stamp::of(of(9).word()), of(9));
        assert_eq!([0, 7, 8, 9].map(|seq| slot(64, 8, seq, 32)), [64, 64 + 7 * 32, 64, 96]);
    }
}
