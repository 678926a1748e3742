//! How many packets that have turns are under way.
//!
//! SL's card does them in their order. What is behind one that is lost it keeps, if it has room; what it has
//! none for goes again. The more there are, the more that costs; so it halves their number, and answers let
//! it grow.

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
    /// Those with a number before that had left when the last loss was seen
    seen: u32,
}

impl TurnWindow {
    /// For packets whose first number is 0.
    pub(super) fn new() -> Self {
        TurnWindow { most: MOST, grown: 0, seen: 0 }
    }

    /// How many there may be, if that is fewer than a connection may have.
    #[inline]
    pub(super) fn limit(&self) -> Option<u32> {
        (self.most < MOST).then_some(self.most.into())
    }

    /// SL's card did not do the packet of this number, as one before it is missing, nor keep it. The next one
    /// that leaves has `next`.
    pub(super) fn shrink(&mut self, number: u32, next: u32) {
        let is_seen = self.most < MOST && (number.wrapping_sub(self.seen) as i32) < 0;
        if !is_seen {
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
        for first in [0, u32::MAX - 50, 1 << 31] {
            let at = |n: u32| first.wrapping_add(n);
            let mut turns = TurnWindow::new();
            assert_eq!(turns.limit(), None);
            turns.shrink(at(10), at(100));
            turns.shrink(at(11), at(100));
            assert_eq!(turns.limit(), Some(128), "both left before the loss was seen");
            (0..16).for_each(|_| turns.grow());
            assert_eq!(turns.limit(), Some(129), "eight more in 128 packets");
            (0..10).for_each(|n| turns.shrink(at(100 + n), at(101 + n)));
            assert_eq!(turns.limit(), Some(8));
            (0..100_000).for_each(|_| turns.grow());
            assert_eq!(turns.limit(), None);
        }
    }
}
