//! What memory of its host a stateless card lets packets reach.
//!
//! Rights are checked where they are known: at SF, before a packet leaves. This table is SL's own second
//! look. It grows with memory regions, never with connections, and knows no keys: whether each byte is
//! registered with the right that a packet needs.

use alloc::collections::BTreeMap;

use starverbs_core::room::is_room_for;
use starverbs_core::{Access, NicError};

/// Memory of the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemRange {
    /// Its first byte
    pub addr: u64,
    /// How many bytes
    pub len: u64,
}

/// What a packet does with memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    /// Fetches what SL's program sends
    Gather = 0,
    /// Writes into a receive buffer, or what SL's READ or atomic brings
    Place = 1,
    /// SF's WRITE
    Write = 2,
    /// SF's READ
    Read = 3,
    /// SF's atomic
    Atomic = 4,
}

const USES: usize = 5;

/// How many registrations allow each use.
type Counts = [u32; USES];

/// A table of memory. Overlapping registrations count each for itself.
#[derive(Clone, Debug, Default)]
pub struct Bounds {
    /// From this address to the next entry's: counts. Neighbours differ.
    segments: BTreeMap<u64, Counts>,
}

fn uses(access: Access) -> Counts {
    let has = |right| u32::from(access.contains(right));
    [
        1,
        has(Access::LOCAL_WRITE),
        has(Access::REMOTE_WRITE),
        has(Access::REMOTE_READ),
        has(Access::REMOTE_ATOMIC),
    ]
}

/// Nodes of the map that two more segments may take, bytes: a few of each half a KiB.
const TWO_SEGMENTS: usize = 4096;

impl Bounds {
    /// No memory.
    pub const fn new() -> Self {
        Bounds { segments: BTreeMap::new() }
    }

    /// A region of the host's memory is registered with these rights. `Exhausted`: no memory to keep that.
    pub fn add(&mut self, addr: u64, len: u64, access: Access) -> Result<(), NicError> {
        self.make_room()?;
        self.change(addr, len, uses(access), u32::saturating_add);
        Ok(())
    }
    /// It no longer is: the arguments are those of [`add`](Bounds::add).
    pub fn remove(&mut self, addr: u64, len: u64, access: Access) {
        self.change(addr, len, uses(access), u32::saturating_sub);
    }

    /// Whether all of these bytes may be used so. No bytes may always.
    pub fn permits(&self, addr: u64, len: u64, what: Use) -> bool {
        if len == 0 {
            return true;
        }
        let Some(last) = addr.checked_add(len - 1) else { return false };
        let may = |counts: &Counts| counts[what as usize] > 0;
        for (first, counts) in self.segments.range(..=last).rev() {
            if !may(counts) || *first <= addr {
                return may(counts);
            }
        }
        false
    }

    /// Whether there is memory for two more segments. A map cannot be asked, so that the host is.
    fn make_room(&self) -> Result<(), NicError> {
        if is_room_for(TWO_SEGMENTS) { Ok(()) } else { Err(NicError::Exhausted) }
    }

    fn change(&mut self, addr: u64, len: u64, by: Counts, apply: fn(u32, u32) -> u32) {
        let Some(last) = len.checked_sub(1).and_then(|more| addr.checked_add(more)) else { return };
        let end = last.checked_add(1);
        self.split(addr);
        if let Some(end) = end {
            self.split(end);
        }
        for (_, counts) in self.segments.range_mut(addr..=last) {
            counts.iter_mut().zip(by).for_each(|(count, by)| *count = apply(*count, by));
        }
        self.join(addr);
        if let Some(end) = end {
            self.join(end);
        }
    }

    /// Makes a segment begin at `addr`.
    fn split(&mut self, addr: u64) {
        let before = self.segments.range(..=addr).next_back().map_or([0; USES], |(_, counts)| *counts);
        self.segments.entry(addr).or_insert(before);
    }

    /// Takes the segment at `addr` together with the one before it, if they are alike.
    fn join(&mut self, addr: u64) {
        let before = self.segments.range(..addr).next_back().map_or([0; USES], |(_, counts)| *counts);
        if self.segments.get(&addr) == Some(&before) {
            self.segments.remove(&addr);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_right_is_its_own() {
        let mut bounds = Bounds::new();
        bounds.add(100, 50, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
        bounds.add(150, 50, Access::LOCAL_WRITE).unwrap();
        assert!(bounds.permits(100, 100, Use::Place) && bounds.permits(100, 50, Use::Write));
        assert!(!bounds.permits(100, 51, Use::Write) && !bounds.permits(99, 2, Use::Place));
        assert!(!bounds.permits(100, 1, Use::Read) && bounds.permits(199, 1, Use::Gather));
        assert!(!bounds.permits(200, 1, Use::Gather));
        assert!(!bounds.permits(u64::MAX, 2, Use::Gather) && bounds.permits(7, 0, Use::Atomic));
        bounds.remove(100, 50, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        bounds.remove(150, 50, Access::LOCAL_WRITE);
        assert!(bounds.segments.is_empty());
    }

    proptest! {
        #[test]
        fn overlaps_count(
            regions in prop::collection::vec((0u64..60, 0u64..20, any::<bool>()), 0..12),
            gone in any::<u16>(),
        ) {
            let base = u64::MAX - 79;
            let mut bounds = Bounds::new();
            let access = |read| if read { Access::REMOTE_READ } else { Access::LOCAL_WRITE };
            for (addr, len, read) in &regions {
                bounds.add(base + addr, *len, access(*read)).unwrap();
            }
            let left = regions.iter().enumerate().filter(|(n, _)| gone >> n & 1 == 0);
            let left: Vec<_> = left.map(|(_, region)| *region).collect();
            for (n, (addr, len, read)) in regions.iter().enumerate() {
                if gone >> n & 1 == 1 {
                    bounds.remove(base + addr, *len, access(*read));
                }
            }
            let may = |at, read| {
                left.iter().any(|(addr, len, r)| *r == read && (*addr..addr + len).contains(&at))
            };
            for addr in 0..80 {
                for len in [1, 2, 9] {
                    let all = |read| addr + len <= 80 && (addr..addr + len).all(|at| may(at, read));
                    prop_assert_eq!(bounds.permits(base + addr, len, Use::Read), all(true));
                    prop_assert_eq!(bounds.permits(base + addr, len, Use::Place), all(false));
                }
            }
            for (addr, len, read) in left {
                bounds.remove(base + addr, len, access(read));
            }
            prop_assert!(bounds.segments.is_empty());
        }
    }
}
