use std::collections::BTreeSet;
use std::vec::Vec;

use proptest::prelude::*;
use starverbs_core::Psn;

use super::*;
use crate::control::Control;
use crate::wire::{CardHalf, Prefix};

const KEY: [u8; KEY_LEN] = [7; KEY_LEN];

fn card(key: [u8; KEY_LEN], boot: u8) -> ControlSeal {
    ControlSeal::new(&key, [boot; SALT_LEN])
}

fn gids() -> [Gid; 2] {
    [1, 2].map(|n| Gid::from_ipv4([10, 0, 0, n]))
}

/// A control message from QP 5 to QP 6, as the packet that arrives, before its checksums.
fn sealed(from: &mut ControlSeal, seq: u32, data: &[u8]) -> Vec<u8> {
    let [src, dst] = gids();
    let head = StarHead::control(6, Prefix { qpn: 5, epoch: 3 }, Psn::new(seq), data.len() as u16);
    let mut room = [0; MAX_SEALED];
    let ends = AddrPair { src: &src, dst: &dst };
    let (head, len) = from.seal_packet(ends, &head, data, &mut room).expect("a control message");
    [head.bytes(), &room[..len]].concat()
}

fn open(to: &mut ControlSeal, ends: [Gid; 2], bytes: &[u8]) -> Result<Vec<u8>, SealError> {
    let packet = StarPacket::parse(CardHalf::Stateful, bytes).map_err(|_| SealError::Foreign)?;
    let mut room = [0; MAX_CONTROL];
    let [src, dst] = &ends;
    let opened = to.open_packet(AddrPair { src, dst }, &packet, &mut room)?;
    assert_eq!(usize::from(opened.header.len), opened.data.len());
    assert_eq!((opened.prefix, opened.header.psn), (packet.prefix, packet.header.psn));
    Ok(opened.data.to_vec())
}

proptest! {
    #[test]
    fn what_is_sealed_is_opened_once(
        data in prop::collection::vec(any::<u8>(), 0..=MAX_CONTROL), seq in 0u32..1 << 24,
    ) {
        let (mut a, mut b) = (card(KEY, 1), card(KEY, 2));
        let bytes = sealed(&mut a, seq, &data);
        let again = sealed(&mut a, seq, &data);
        prop_assert_ne!(&bytes, &again, "sealed anew");
        prop_assert!(data.len() < 8 || !bytes.windows(data.len()).any(|w| w == data), "it can be read");
        prop_assert_eq!(open(&mut b, gids(), &bytes), Ok(data.clone()));
        prop_assert_eq!(open(&mut b, gids(), &bytes), Err(SealError::Replayed));
        prop_assert_eq!(open(&mut b, gids(), &again), Ok(data));
    }

    /// No bit of a packet can be changed, but those that its checksums alone protect.
    #[test]
    fn what_was_changed_is_foreign(
        data in prop::collection::vec(any::<u8>(), 0..=MAX_CONTROL), at in any::<prop::sample::Index>(),
    ) {
        let (mut a, mut b) = (card(KEY, 1), card(KEY, 2));
        let mut bytes = sealed(&mut a, 9, &data);
        let bit = at.index(bytes.len() * 8);
        prop_assume!(!(18..20).contains(&(bit / 8)));
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert_eq!(open(&mut b, gids(), &bytes), Err(SealError::Foreign));
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert_eq!(open(&mut b, gids(), &bytes), Ok(data), "a forgery takes nothing's place");
    }

    #[test]
    fn any_bytes_are_looked_at(bytes in prop::collection::vec(any::<u8>(), 0..300), first in any::<bool>()) {
        let mut bytes = bytes;
        if let Some(byte) = bytes.first_mut().filter(|_| first) {
            *byte = SEALED;
        }
        let [src, dst] = &gids();
        let mut room = [0; MAX_CONTROL];
        let qps = QpPair { from: 1, to: 2 };
        let opened = card(KEY, 1).open_offer(AddrPair { src, dst }, qps, &bytes, &mut room);
        prop_assert_eq!(opened, Err(SealError::Foreign));
    }

    /// In whatever order numbers come: none is taken twice, and all are that are not far behind the highest.
    #[test]
    fn each_number_is_taken_once(
        numbers in prop::collection::vec(
            prop_oneof![1u64..200, 1u64..5_000, 1u64 << 40..(1 << 40) + 100], 1..300,
        ),
    ) {
        let mut boot = Boot { salt: [0; SALT_LEN], top: 0, bits: [0; WORDS], used: 0 };
        let (mut taken, mut top) = (BTreeSet::new(), 0);
        for number in numbers {
            let old = number + WINDOW <= top;
            let fresh = !taken.contains(&number);
            prop_assert_eq!(boot.take(number), fresh && !old, "{} after {}", number, top);
            if !old {
                taken.insert(number);
            }
            top = top.max(number);
        }
    }
}

#[test]
fn another_key_address_or_direction_is_foreign() {
    let (mut a, mut b) = (card(KEY, 1), card(KEY, 2));
    let bytes = sealed(&mut a, 1, b"rule");
    let [src, dst] = gids();
    assert_eq!(open(&mut card([8; KEY_LEN], 2), gids(), &bytes), Err(SealError::Foreign));
    for ends in [[dst, src], [src, src], [Gid::from_ipv4([10, 0, 0, 3]), dst]] {
        assert_eq!(open(&mut b, ends, &bytes), Err(SealError::Foreign));
    }
    assert_eq!(open(&mut b, gids(), &bytes).as_deref(), Ok(&b"rule"[..]));
}

#[test]
fn plain_messages_are_foreign_and_sealed_ones_are_no_plain_ones() {
    let head = StarHead::control(6, Prefix { qpn: 5, epoch: 3 }, Psn::new(1), 1);
    let plain = [head.bytes(), &[10]].concat();
    assert_eq!(Control::decode(&plain[28..]), Some(Control::KeepAlive));
    assert_eq!(open(&mut card(KEY, 2), gids(), &plain), Err(SealError::Foreign));
    let bytes = sealed(&mut card(KEY, 1), 1, &[10]);
    assert_eq!(Control::decode(&bytes[28..]), None);
}

#[test]
fn only_what_is_settled_is_sealed() {
    let [src, dst] = &gids();
    let mut room = [0; MAX_SEALED];
    let mut a = card(KEY, 1);
    let prefix = Prefix { qpn: 5, epoch: 3 };
    let answer = StarHead::control_ack(6, prefix, Psn::new(1));
    let (head, len) = a
        .seal_packet(AddrPair { src, dst }, &answer, &[], &mut room)
        .expect("an answer to a control message");
    let packet = [head.bytes(), &room[..len]].concat();
    assert_eq!(open(&mut card(KEY, 2), gids(), &packet).as_deref(), Ok(&[][..]));
    let data = StarHead::of(
        crate::wire::StarHeader {
            migrate: false,
            ..StarPacket::parse(CardHalf::Stateful, &packet).expect("whole").header
        },
        prefix,
    );
    assert!(a.seal_packet(AddrPair { src, dst }, &data, &[], &mut room).is_none(), "data has no seal");
}

#[test]
fn offers_belong_to_their_queue_pairs() {
    const QPS: QpPair = QpPair { from: 5, to: 6 };
    let (mut a, mut b) = (card(KEY, 1), card(KEY, 2));
    let [src, dst] = &gids();
    let ends = AddrPair { src, dst };
    let (mut room, mut opened) = ([0; MAX_SEALED], [0; MAX_CONTROL]);
    let len = a.seal_offer(ends, QPS, b"offer", &mut room).expect("it fits");
    assert!(a.seal_offer(ends, QPS, b"offer", &mut [0; OVERHEAD]).is_none());
    for qps in [QpPair { from: 6, to: 5 }, QpPair { from: 5, to: 7 }] {
        assert_eq!(b.open_offer(ends, qps, &room[..len], &mut opened), Err(SealError::Foreign));
    }
    assert_eq!(b.open_offer(ends, QPS, &room[..len], &mut opened), Ok(&b"offer"[..]));
    assert_eq!(b.open_offer(ends, QPS, &room[..len], &mut opened), Err(SealError::Replayed));
}

#[test]
fn the_least_recently_used_boot_is_forgotten() {
    let mut seen = Seen::default();
    let of = |boot: u64, number| {
        let mut salt = [0; SALT_LEN];
        salt[..8].copy_from_slice(&boot.to_be_bytes());
        nonce(&salt, number)
    };
    for boot in 0..BOOTS as u64 {
        assert!(seen.take(&of(boot, 1)));
    }
    assert!(!seen.take(&of(0, 1)), "used again");
    assert!(seen.take(&of(5_000, 1)));
    assert_eq!(seen.boots.len(), BOOTS);
    assert!(!seen.take(&of(0, 1)) && !seen.take(&of(2, 1)), "remembered");
    assert!(seen.take(&of(1, 1)), "forgotten");
}
