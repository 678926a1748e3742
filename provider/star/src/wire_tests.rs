use std::vec::Vec;

use proptest::prelude::*;

use starverbs_core::Gid;

use super::checksum::{WAYS, crc16};
use super::*;

fn path() -> IcrcHeader {
    let [src, dst] = [1, 2].map(|n| Gid::from_ipv4([10, 0, 0, n]));
    IcrcHeader { src, dst, sport: 0xc123, dport: PORT_STATELESS, ip_id: 0 }
}

/// A frame as a port sends it.
fn frame(path: &IcrcHeader, head: &StarHead, data: &[u8]) -> Vec<u8> {
    let mut bytes = [head.bytes(), data].concat();
    fill_checksum(path, &mut bytes);
    bytes.extend(Crc::of(&bytes));
    bytes
}

fn any_header() -> impl Strategy<Value = (StarHeader, Prefix, Token)> {
    let kinds = (1u8..=9, 0u8..=3, any::<bool>(), any::<bool>());
    let numbers = (0..=QPN_MASK, any::<u32>(), any::<u64>(), 0u16..=4096, 0..=QPN_MASK, any::<u32>());
    let token = (1u8.., any::<[u8; TOKEN_LEN]>());
    let token = token.prop_map(|(count, bytes)| Token::decode(count, bytes).expect("slots"));
    (kinds, numbers, token).prop_map(
        |((ptype, opt, migrate, ack), (qpn, psn, addr, len, sl, epoch), token)| {
            let header = StarHeader {
                ptype: Ptype::from_code(ptype).expect("a kind"),
                opt: Opt::from_code(opt),
                migrate,
                ack,
                qpn,
                epoch: epoch as u8,
                psn: Psn::new(psn),
                addr,
                len,
            };
            (header, Prefix { qpn: sl, epoch }, token)
        },
    )
}

proptest! {
    #[test]
    fn headers_survive((header, prefix, _) in any_header()) {
        prop_assert_eq!(StarHeader::decode(&header.encode()), Some(header));
        prop_assert_eq!(Prefix::decode(prefix.encode()), Some(prefix));
    }

    #[test]
    fn packets_survive(
        (header, prefix, token) in any_header(),
        bytes in prop::collection::vec(any::<u8>(), 4096),
    ) {
        for side in [CardHalf::Stateless, CardHalf::Stateful] {
            let Some(shape) = PacketShape::of(side, &header) else { continue };
            let data = if shape.data { &bytes[..usize::from(header.len)] } else { &[] };
            let head = match (header.migrate, side) {
                (true, _) => StarHead::with_prefix(header, prefix),
                (false, CardHalf::Stateless) => StarHead::to_stateless(header, prefix, &token),
                _ => StarHead::to_stateful(header),
            };
            let path = path();
            let whole = frame(&path, &head, data);
            let packet = StarPacket::open(side, &path, &whole);
            let prefix = shape.prefix.then_some(prefix);
            let token = (side == CardHalf::Stateless).then_some(token);
            prop_assert_eq!(packet, Ok(StarPacket { header, prefix, token, data }));
            for cut in [1, CRC_LEN, whole.len() - 1] {
                prop_assert!(StarPacket::open(side, &path, &whole[..whole.len() - cut]).is_err());
            }
        }
    }

    #[test]
    fn a_flipped_bit_is_seen((header, prefix, token) in any_header(), at in any::<prop::sample::Index>()) {
        let path = path();
        let header = StarHeader { ptype: Ptype::Rd, opt: Opt::Write, len: 9, ..header };
        let mut bytes = frame(&path, &StarHead::to_stateless(header, prefix, &token), b"nine byte");
        let bit = at.index(bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert_eq!(StarPacket::open(CardHalf::Stateless, &path, &bytes), Err(StarError::Checksum));
    }

    #[test]
    fn any_bytes_are_looked_at(bytes in prop::collection::vec(any::<u8>(), 0..80), first in any::<u8>()) {
        let mut bytes = bytes;
        if let Some(byte) = bytes.first_mut() {
            *byte = first;
        }
        for side in [CardHalf::Stateless, CardHalf::Stateful] {
            _ = StarPacket::open(side, &path(), &bytes);
            if let Ok(packet) = StarPacket::parse(side, &bytes) {
                prop_assert!(packet.data.len() <= bytes.len());
            }
        }
    }
}

#[test]
fn the_header_belongs_to_its_path() {
    let header = StarHeader {
        ptype: Ptype::Ea,
        opt: Opt::Send,
        migrate: false,
        ack: false,
        qpn: 5,
        epoch: 1,
        psn: Psn::new(2),
        addr: 3,
        len: 0,
    };
    let path = path();
    let bytes = frame(&path, &StarHead::to_stateful(header), &[]);
    assert!(StarPacket::open(CardHalf::Stateful, &path, &bytes).is_ok());
    let IcrcHeader { src, dst, sport, .. } = path;
    let others = [
        IcrcHeader { src: dst, ..path },
        IcrcHeader { dst: src, ..path },
        IcrcHeader { sport: sport ^ 1, ..path },
        IcrcHeader { dport: PORT_STATEFUL, ..path },
    ];
    for other in others {
        assert_eq!(StarPacket::open(CardHalf::Stateful, &other, &bytes), Err(StarError::Checksum));
    }
}

#[test]
fn checksum_is_the_known_one() {
    assert_eq!(crc16(0xffff, b"123456789"), 0x29b1, "CRC-16/CCITT-FALSE's check value");
    let bytes: [u8; 60] = core::array::from_fn(|n| (n * 37 + n / 7) as u8);
    for len in 0..=bytes.len() {
        let bit_by_bit = bytes[..len].iter().fold(0xffff, |crc, byte| {
            (0..8).fold(crc ^ u16::from(*byte) << 8, |crc, _| {
                crc << 1 ^ if crc & 0x8000 == 0 { 0 } else { 0x1021 }
            })
        });
        assert_eq!(crc16(0xffff, &bytes[..len]), bit_by_bit, "{len} bytes");
    }
}

#[test]
fn only_known_packets_come_in() {
    let header = |ptype, opt| StarHeader {
        ptype,
        opt,
        migrate: false,
        ack: true,
        qpn: 5,
        epoch: 0,
        psn: Psn::new(0),
        addr: 0,
        len: 0,
    };
    use Ptype::{Cqep, Ea, Gd, Gda, Rd, Rda, Wqep};
    let allowed = |side, migrate| {
        let kinds = [Wqep, Ea, Rd, Rda, Gd, Gda, Cqep].into_iter();
        let known =
            |p: &Ptype| PacketShape::of(side, &StarHeader { migrate, ..header(*p, Opt::Send) }).is_some();
        kinds.filter(known).collect::<Vec<_>>()
    };
    assert_eq!(allowed(CardHalf::Stateless, false), [Ea, Rd, Gd, Cqep]);
    assert_eq!(allowed(CardHalf::Stateful, false), [Wqep, Ea, Rda, Gda]);
    assert_eq!(allowed(CardHalf::Stateless, true), []);
    assert_eq!(allowed(CardHalf::Stateful, true), [Wqep, Ea]);
    assert!(PacketShape::of(CardHalf::Stateless, &StarHeader { len: 1, ..header(Ea, Opt::Send) }).is_none());
}

/// Of more ways than are remembered each has its own checksums, whichever was used before.
#[test]
fn ways_are_not_mixed_up() {
    let header = StarHead::to_stateful(StarHeader {
        ptype: Ptype::Ea,
        opt: Opt::Recv,
        migrate: false,
        ack: false,
        qpn: 7,
        epoch: 1,
        psn: Psn::new(2),
        addr: 3,
        len: 0,
    });
    let mut ways = Ways::default();
    for _ in 0..2 {
        for n in 0..3 * WAYS as u16 {
            let path = IcrcHeader { sport: n, dport: 4794 + n / 5, ..path() };
            let mut kept = header.bytes().to_vec();
            ways.get(&path).fill_checksum(&mut kept);
            let whole = [&kept[..], &Crc::of(&kept)].concat();
            assert!(StarPacket::open(CardHalf::Stateful, &path, &whole).is_ok());
            assert!(checked(ways.get(&path), &whole).is_ok());
            let other = IcrcHeader { sport: n ^ 1, ..path };
            assert_eq!(checked(ways.get(&other), &whole), Err(StarError::Checksum));
        }
    }
}

/// What counts together has one lane, what may pass each other has several; and whose a packet is, its first
/// bytes say.
#[test]
fn the_first_bytes_say_where_a_packet_belongs() {
    let of = |ptype, opt| StarHeader {
        ptype,
        opt,
        migrate: false,
        ack: true,
        qpn: 0x12_3456,
        epoch: 0,
        psn: Psn::new(0),
        addr: 0,
        len: 0,
    };
    let prefix = Prefix { qpn: 0x65_4321, epoch: 9 };
    let to_sl = |ptype, opt| StarHead::to_stateless(of(ptype, opt), prefix, &Token::NONE);
    let lane_of = |head: StarHead| lane(head.bytes());
    assert_eq!(lane_of(to_sl(Ptype::Gd, Opt::Send)), lane_of(to_sl(Ptype::Gd, Opt::Recv)));
    let [wqes, eager] =
        [Ptype::Wqeps, Ptype::Ed].map(|ptype| lane_of(StarHead::to_stateful(of(ptype, Opt::Send))));
    assert_eq!(wqes, eager, "data follows its WQE");
    let lanes = [
        lane_of(StarHead::control(1, prefix, Psn::new(0), 0)),
        lane_of(to_sl(Ptype::Rd, Opt::Send)),
        lane_of(to_sl(Ptype::Gd, Opt::Send)),
        lane_of(to_sl(Ptype::Cqep, Opt::Recv)),
        lane_of(to_sl(Ptype::Ea, Opt::Recv)),
        lane_of(StarHead::to_stateful(of(Ptype::Rda, Opt::Send))),
        lane_of(StarHead::to_stateful(of(Ptype::Gda, Opt::Send))),
        lane_of(StarHead::to_stateful(of(Ptype::Wqep, Opt::Send))),
        lane_of(StarHead::to_stateful(of(Ptype::Wqep, Opt::Recv))),
    ];
    for (n, one) in lanes.iter().enumerate() {
        assert!(*one < 1 << LANE_BITS && !lanes[..n].contains(one), "{lanes:?}");
    }
    let frame = to_sl(Ptype::Rd, Opt::Send);
    assert_eq!(qpn_in(CardHalf::Stateless, frame.bytes()), Some(prefix.qpn));
    assert_eq!(
        qpn_in(CardHalf::Stateful, StarHead::to_stateful(of(Ptype::Ea, Opt::Send)).bytes()),
        Some(0x12_3456)
    );
    assert_eq!(qpn_in(CardHalf::Stateless, &frame.bytes()[..HEADER_LEN + 3]), None);
}
