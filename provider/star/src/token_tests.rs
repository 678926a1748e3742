use std::vec::Vec;

use proptest::prelude::*;

use super::*;

const PEER: Gid = Gid::from_ipv4([10, 0, 0, 1]);
const PREFIX: Prefix = Prefix { qpn: 7, epoch: 0x1_0002 };

/// The hash is that of its authors: SipHash-2-4 of 0, 1, 2, ... under the key 00 01 ... 0f (vectors.h of
/// their reference).
#[test]
fn the_mac_is_siphash() {
    let (first, second) = (0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908);
    let sum = |len: u8| {
        let mut hash = SipHasher24::new_with_keys(first, second);
        hash.write(&(0..len).collect::<Vec<u8>>());
        hash.finish()
    };
    assert_eq!(
        [sum(0), sum(1), sum(15)],
        [0x726f_db47_dd0e_0e31, 0x74f8_39c5_93dc_67fd, 0xa129_ca61_49be_45e5]
    );
    let secret = CardSecret { key: [first, second], ..CardSecret::new([0; 2]) };
    let slots = SlotArea::new(0x4_0020, 3 * CQE_SLOT).unwrap();
    let mut bound = PEER.0.to_vec();
    bound.extend([3, 0, 0, 7, 0, 1, 0, 2, 0, 0, 0, 0, 0, 4, 0, 0x20]);
    let mut hash = SipHasher24::new_with_keys(first, second);
    hash.write(&bound);
    assert_eq!(secret.token(&PEER, PREFIX, slots), Token { slots, mac: hash.finish() });
}

#[test]
fn a_token_is_good_for_what_it_was_made_for() {
    let mut secret = CardSecret::new([1, 2]);
    let area = |addr, slots| SlotArea::new(addr, slots * CQE_SLOT).unwrap();
    let slots = area(0x1000, 40);
    let token = secret.token(&PEER, PREFIX, slots);
    assert!(secret.admits(&PEER, PREFIX, &token));
    let other = Gid::from_ipv4([10, 0, 0, 2]);
    assert!(!secret.admits(&other, PREFIX, &token), "from another address");
    for of in [Prefix { qpn: 8, ..PREFIX }, Prefix { epoch: 0x1_0003, ..PREFIX }] {
        assert!(!secret.admits(&PEER, of, &token), "{of:?}");
    }
    for slots in [area(0x1020, 40), area(0x1000, 41), area(0x1000, 80)] {
        assert!(!secret.admits(&PEER, PREFIX, &Token { slots, ..token }), "{slots:?}");
    }
    for bit in 0..64 {
        assert!(!secret.admits(&PEER, PREFIX, &Token { mac: token.mac ^ 1 << bit, ..token }));
    }
    assert!(!CardSecret::new([1, 3]).admits(&PEER, PREFIX, &token), "of another card");
    secret.replace();
    assert!(!secret.admits(&PEER, PREFIX, &token), "of an earlier secret");
}

#[test]
fn slots_are_behind_the_gate() {
    let area = SlotArea::new(64, 4 * CQE_SLOT).unwrap();
    assert_eq!((area.gate(), area.first()), (64, 96));
    assert!(area.has_slot(96, 32) && area.has_slot(160, 32) && area.has_slot(176, 16));
    for (addr, len) in [(64, 32), (80, 16), (192, 16), (176, 32), (0, 16), (u64::MAX, 2)] {
        assert!(!area.has_slot(addr, len), "{addr}");
    }
    assert!(!Token::NONE.slots.has_slot(32, 16), "none has no slots");
    for (addr, len) in [(64, 0), (65, 64), (80, 64), (64, 33), (64, 511 * CQE_SLOT), (64, !31)] {
        assert_eq!(SlotArea::new(addr, len), None, "{addr} {len}");
    }
}

proptest! {
    /// Any number of slots has an area that is hardly longer, and packets can name it.
    #[test]
    fn areas_survive(slots in 0u64..1 << 26, addr in 0u64..1 << 59, mac: u64) {
        let len = SlotArea::len_for(slots * 16);
        let least = slots.div_ceil(2) + 1;
        prop_assert!(len / CQE_SLOT >= least && (len / CQE_SLOT - least) * 128 <= least);
        let area = SlotArea::new(addr * CQE_SLOT, len).unwrap();
        let token = Token { slots: area, mac };
        let (count, bytes) = token.encode();
        prop_assert_eq!(Token::decode(count, bytes), Some(token));
        prop_assert_eq!(Token::decode(0, bytes), None);
    }

    #[test]
    fn any_bytes_are_an_area_or_none(count: u8, bytes: [u8; TOKEN_LEN], addr: u64, len: u64) {
        let token = Token::decode(count, bytes);
        prop_assert_eq!(token.is_some(), count != 0);
        if let Some(Token { slots, .. }) = token {
            _ = slots.has_slot(addr, len);
            prop_assert!(!slots.has_slot(slots.gate(), 1));
            _ = slots.encode();
        }
    }
}
