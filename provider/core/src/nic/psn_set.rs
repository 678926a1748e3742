//! Which PSNs of a ring: a bit for each place.

/// So many words of 64 places.
#[derive(Clone, Copy)]
pub(super) struct Set<const WORDS: usize>([u64; WORDS]);

impl<const WORDS: usize> Set<WORDS> {
    pub(super) const EMPTY: Self = Set([0; WORDS]);

    #[inline]
    pub(super) fn has(&self, at: usize) -> bool {
        self.0[at / 64] >> (at % 64) & 1 == 1
    }

    #[inline]
    pub(super) fn put(&mut self, at: usize) {
        self.0[at / 64] |= 1 << (at % 64);
    }

    /// Gives whether it was in.
    #[inline]
    pub(super) fn drop(&mut self, at: usize) -> bool {
        let was = self.has(at);
        self.0[at / 64] &= !(1 << (at % 64));
        was
    }

    /// Which of the 64 places from `at` on, round the ring's end; the lowest bit is `at` itself.
    pub(super) fn from(&self, at: usize) -> u64 {
        let (low, shift) = (self.0[at / 64] >> (at % 64), at % 64);
        if shift == 0 { low } else { low | self.0[(at / 64 + 1) % WORDS] << (64 - shift) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_in_or_not() {
        let mut set = Set::<2>::EMPTY;
        for at in [0, 63, 64, 127] {
            set.put(at);
        }
        let all = |set: &Set<2>| (0..128).filter(|at| set.has(*at)).collect::<std::vec::Vec<_>>();
        assert_eq!(all(&set), [0, 63, 64, 127]);
        assert_eq!((set.from(0), set.from(64)), (1 | 1 << 63, 1 | 1 << 63));
        assert_eq!(set.from(127), 1 | 1 << 1, "round the end");
        assert_eq!(set.from(60), 1 << 3 | 1 << 4);
        assert!(set.drop(64) && !set.drop(64));
        assert_eq!(all(&set), [0, 63, 127]);
    }
}
