//! Keys that are ready for use, of those whose requests came last.
//!
//! To derive K_d and to make it ready takes two key schedules. Who asks seldom has that done each time, as at
//! the paper's card; the table has a fixed size, and nothing in it is a peer's: the next one to ask takes its
//! place.

use alloc::boxed::Box;

use crate::list::boxed;
use crate::region::RegionId;
use crate::seal::Initiator;
use crate::types::OneRmaOp;

/// Keys in the table.
const PLACES: usize = 16;

/// What a key is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Purpose {
    pub(super) region: RegionId,
    /// Of the region's key: another one's K_d is another one
    pub(super) version: u32,
    pub(super) initiator: Initiator,
    pub(super) op: OneRmaOp,
}

impl Purpose {
    fn place(&self) -> usize {
        let [.., a, b, c, d] = self.initiator.addr.0;
        let word = u32::from_be_bytes([a, b, c, d])
            ^ self.initiator.pid.rotate_left(8)
            ^ self.region.0.rotate_left(16)
            ^ self.op as u32;
        (word.wrapping_mul(0x9e37_79b1) >> 28) as usize % PLACES
    }
}

/// The table.
pub(super) struct ReadyKeys<K>(Box<[Option<(Purpose, K)>]>);

impl<K> ReadyKeys<K> {
    /// An empty one. `None`: there is no memory.
    pub(super) fn new() -> Option<Self> {
        boxed(PLACES, || None).map(ReadyKeys)
    }

    /// The key for this, if it is there.
    pub(super) fn get(&self, purpose: &Purpose) -> Option<&K> {
        let (of, key) = self.0.get(purpose.place())?.as_ref()?;
        (of == purpose).then_some(key)
    }

    /// Keeps a key under which a request was authenticated.
    pub(super) fn keep(&mut self, purpose: Purpose, key: K) {
        if let Some(place) = self.0.get_mut(purpose.place()) {
            *place = Some((purpose, key));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use starverbs_core::Gid;

    #[test]
    fn a_key_is_for_one_purpose_alone() {
        let initiator = Initiator { addr: Gid::from_ipv4([10, 0, 0, 1]), pid: 7 };
        let purpose = Purpose { region: RegionId(3), version: 1, initiator, op: OneRmaOp::Read };
        let others = [
            Purpose { region: RegionId(0x1_0003), ..purpose },
            Purpose { version: 2, ..purpose },
            Purpose { initiator: Initiator { pid: 8, ..initiator }, ..purpose },
            Purpose { initiator: Initiator { addr: Gid::from_ipv4([10, 0, 0, 2]), pid: 7 }, ..purpose },
            Purpose { op: OneRmaOp::Write, ..purpose },
        ];
        let mut keys = ReadyKeys::new().expect("memory");
        keys.keep(purpose, 'a');
        assert_eq!(keys.get(&purpose), Some(&'a'));
        assert!(others.iter().all(|other| keys.get(other).is_none()));
        for pid in 0..100 {
            keys.keep(Purpose { initiator: Initiator { pid, ..initiator }, ..purpose }, 'b');
        }
        assert_eq!(keys.0.len(), PLACES);
        assert_ne!(keys.get(&purpose), Some(&'a'), "others have asked since");
    }
}
