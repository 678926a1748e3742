//! How many packets that have turns are under way.
//!
//! SL's card does them in their order, so behind one that is lost all go again. The more there are, the more
//! that costs; so a loss halves their number, and answers let it grow.

use starverbs_core::Psn;

/// Most of them, which is what a connection may have under way; and fewest.
const MOST: u16 = 256;
const LEAST: u16 = 8;
/// By so many more in a round trip.
const GROWTH: u16 = 8;

/// Packets that have turns and may be under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct TurnWindow {
    most: u16,
    /// Of one more, in parts of `most`
    grown: u16,
    /// What left before that is of a loss that was seen
    seen: Psn,
}

impl TurnWindow {
    pub(super) fn new() -> Self {
        TurnWindow { most: MOST, grown: 0, seen: Psn::new(0) }
    }

    /// Whether one more may leave beside so many.
    #[inline]
    pub(super) fn has_room(&self, under_way: u32) -> bool {
        under_way < u32::from(self.most)
    }

    /// SL's card did not do the packet of this PSN, as one before it is missing. The next one that leaves has
    /// that of `next`.
    pub(super) fn shrink(&mut self, psn: Psn, next: Psn) {
        if !psn.before(self.seen) {
            (self.most, self.grown, self.seen) = ((self.most / 2).max(LEAST), 0, next);
        }
    }

    /// One was done.
    #[inline]
    pub(super) fn grow(&mut self) {
        if self.most < MOST {
            self.grown += GROWTH;
            if self.grown >= self.most {
                (self.most, self.grown) = (self.most + 1, 0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_halves_them_once_and_answers_let_them_grow() {
        let mut turns = TurnWindow::new();
        assert!(turns.has_room(255) && !turns.has_room(256));
        turns.shrink(Psn::new(40), Psn::new(400));
        turns.shrink(Psn::new(44), Psn::new(400));
        assert!(turns.has_room(127) && !turns.has_room(128), "both left before the loss was seen");
        (0..16).for_each(|_| turns.grow());
        assert!(turns.has_room(128) && !turns.has_room(129), "eight more in 128 packets");
        (0..10).for_each(|n| turns.shrink(Psn::new(400 + n), Psn::new(401 + n)));
        assert!(turns.has_room(7) && !turns.has_room(8));
        (0..100_000).for_each(|_| turns.grow());
        assert!(turns.has_room(255) && !turns.has_room(256));
    }
}
