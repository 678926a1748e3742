//! Which bytes of an operation have come: answers arrive in any order, some of them twice.

use crate::types::MAX_OP;

/// Answers begin at multiples of so many bytes, and only the last one of an operation may end elsewhere. So a
/// bit a granule tells a copy from news, and 64 bits are an operation.
pub const GRANULE: u32 = MAX_OP / 64;

/// What has come of one operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Fragments(u64);

impl Fragments {
    /// Whether `len` bytes at `offset` of an operation of `size` bytes are new: a fragment that is none of
    /// it, or of which a part came before, is not. What is new is to be [taken](Fragments::take) when it is
    /// in memory.
    pub(crate) fn is_new(self, offset: u32, len: u32, size: u32) -> bool {
        bits(offset, len, size).is_some_and(|bits| self.0 & bits == 0)
    }

    /// These bytes are in memory. True: that were all.
    pub(crate) fn take(&mut self, offset: u32, len: u32, size: u32) -> bool {
        self.0 |= bits(offset, len, size).unwrap_or(0);
        bits(0, size, size) == Some(self.0)
    }
}

/// The granules of a fragment. `None`: it is no fragment of such an operation.
fn bits(offset: u32, len: u32, size: u32) -> Option<u64> {
    let end = offset.checked_add(len)?;
    let whole = offset.is_multiple_of(GRANULE) && (end.is_multiple_of(GRANULE) || end == size);
    if !whole || len == 0 || end > size || size > MAX_OP {
        return None;
    }
    let (first, count) = (offset / GRANULE, len.div_ceil(GRANULE));
    Some((u64::MAX >> (64 - count)) << first)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_no_fragment_of_it_is_never_new() {
        for (offset, len, size) in
            [(1, 64, 4096), (0, 65, 4096), (0, 0, 64), (64, 64, 64), (u32::MAX, 64, 64), (0, 4160, 4160)]
        {
            assert!(!Fragments::default().is_new(offset, len, size), "{offset} {len} {size}");
        }
        assert!(Fragments::default().is_new(0, 4096, 4096));
        assert!(Fragments::default().is_new(64, 1, 65));
    }

    proptest! {
        #[test]
        fn all_is_there_when_every_byte_came_once(
            size in 1..=MAX_OP,
            step in 1..=64u32,
            order in prop::collection::vec(any::<prop::sample::Index>(), 1..200),
        ) {
            let step = step * GRANULE;
            let mut left: Vec<u32> = (0..size).step_by(step as usize).collect();
            let mut here = Fragments::default();
            for pick in order.iter().chain(core::iter::repeat_n(&order[0], 64)) {
                if left.is_empty() { break }
                let offset = left.swap_remove(pick.index(left.len()));
                let len = step.min(size - offset);
                prop_assert!(here.is_new(offset, len, size));
                prop_assert_eq!(here.take(offset, len, size), left.is_empty());
                prop_assert!(!here.is_new(offset, len, size), "a copy");
            }
        }
    }

    use std::vec::Vec;
}
