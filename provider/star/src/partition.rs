//! The part of a network in which there is StaR: the paper trusts all cards there to check what they send
//! (III-E3).

use alloc::boxed::Box;

use starverbs_core::Gid;

/// Addresses between which there is StaR.
#[derive(Clone, Debug, Default)]
pub struct StarPartition(Option<Box<[Mask]>>);

/// Addresses of which these bits are equal.
#[derive(Clone, Copy, Debug)]
struct Mask {
    value: u128,
    mask: u128,
}

fn word(gid: &Gid) -> u128 {
    u128::from_be_bytes(gid.0)
}

impl StarPartition {
    /// Networks: an address of each, and how many bits of it all have, at most 128 ([mapped](Gid::from_ipv4)
    /// IPv4 addresses have 96 more than as such). Without any, there is no StaR.
    pub fn of(networks: impl IntoIterator<Item = (Gid, u8)>) -> Self {
        let mask = |(gid, bits): (Gid, u8)| {
            let mask = u128::MAX.checked_shl(128 - u32::from(bits.min(128))).unwrap_or(0);
            Mask { value: word(&gid) & mask, mask }
        };
        StarPartition(Some(networks.into_iter().map(mask).collect()))
    }

    /// Whether both addresses lie in one of its networks.
    pub fn holds(&self, ours: &Gid, theirs: &Gid) -> bool {
        let Some(masks) = &self.0 else { return true };
        let in_one =
            |Mask { value, mask }: &Mask| [ours, theirs].iter().all(|gid| word(gid) & mask == *value);
        masks.iter().any(in_one)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_lie_in_one_network() {
        let at = |a, b, c, d| Gid::from_ipv4([a, b, c, d]);
        let some = StarPartition::of([(at(10, 1, 7, 7), 96 + 16), (at(10, 9, 0, 0), 96 + 24)]);
        assert!(some.holds(&at(10, 1, 0, 1), &at(10, 1, 255, 2)));
        assert!(!some.holds(&at(10, 1, 0, 1), &at(10, 2, 0, 1)), "the peer is outside");
        assert!(!some.holds(&at(10, 2, 0, 1), &at(10, 1, 0, 1)), "we are");
        assert!(!some.holds(&at(10, 1, 0, 1), &at(10, 9, 0, 1)), "two networks");
        assert!(StarPartition::of([(at(0, 0, 0, 0), 0)]).holds(&at(1, 2, 3, 4), &Gid([0xfd; 16])));
        let host = StarPartition::of([(Gid([0xfd; 16]), 128)]);
        assert!(
            host.holds(&Gid([0xfd; 16]), &Gid([0xfd; 16])) && !host.holds(&Gid([0xfd; 16]), &Gid([0; 16]))
        );
        assert!(StarPartition::default().holds(&at(1, 2, 3, 4), &at(9, 9, 9, 9)), "anywhere");
        assert!(!StarPartition::of([]).holds(&at(1, 2, 3, 4), &at(1, 2, 3, 4)), "nowhere");
    }
}
