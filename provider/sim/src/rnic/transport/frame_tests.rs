use starverbs_core::wire::IcrcHeader;
use starverbs_core::{Psn, SendFlags, SendOp, SendWqe, Sge};
use starverbs_star::bundle::{Bundle, ShortRdc};
use starverbs_star::packed::PackedWqes;
use starverbs_star::token::{CardSecret, SlotArea};
use starverbs_star::wire::{Prefix, StarHead, StarHeader};

use super::*;

fn header(ptype: Ptype, psn: u32, len: usize) -> StarHeader {
    let (psn, len) = (Psn::new(psn), len as u16);
    let opt = if ptype == Ptype::Wqeps { Opt::Recv } else { Opt::Send };
    StarHeader { ptype, opt, migrate: false, ack: true, qpn: 7, epoch: 1, psn, addr: 64, len }
}

fn frame(side: CardHalf, header: StarHeader, data: &[u8]) -> CardFrame {
    let head = match side {
        CardHalf::Stateless => {
            let (prefix, slots) = (Prefix { qpn: 5, epoch: 1 }, SlotArea::new(4096, SlotArea::len_for(8)));
            let token = CardSecret::new([1, 2]).token(&Gid::default(), prefix, slots.unwrap());
            StarHead::to_stateless(header, prefix, &token)
        }
        CardHalf::Stateful => StarHead::to_stateful(header),
    };
    let path = IcrcHeader { dport: side.default_port(), ..IcrcHeader::default() };
    CardFrame::star(StarFrame { path, bytes: [head.bytes(), data, &[0; CRC_LEN]].concat() })
}

/// Each message of an RDCS is read and written by itself; its completion is in no memory of its sender's.
#[test]
fn several_messages_in_a_packet_are_several_transfers() {
    let mut bundle = Bundle::default();
    bundle.make_room().unwrap();
    for (number, len) in [32, 20].into_iter().enumerate() {
        let header = header(Ptype::Rdc, 4 * number as u32, 0);
        let rdc = ShortRdc { header, completion: &[0; CARRIED_LEN], data: &[9; 32][..len] };
        assert!(bundle.add(&rdc, 1024));
    }
    let (header_of_all, data) = bundle.packet().unwrap();
    let MemoryAccess { reads, gathers, follows_writes, receives, writes } =
        frame(CardHalf::Stateless, header_of_all, data).memory;
    assert_eq!((reads.all(), writes.all()), (&[32, 20][..], &[64, 52][..]));
    assert_eq!((gathers.all(), follows_writes, receives), (&[][..], false, 0), "SF knows the RECVs");
    for ptype in [Ptype::Rda, Ptype::Rdas, Ptype::Ea] {
        assert!(frame(CardHalf::Stateful, header(ptype, 4, 2), &[]).memory.follows_writes, "{ptype:?}");
    }
}

/// WQEs are read first, then what they carry; each message takes a RECV where it comes to.
#[test]
fn wqes_and_what_they_carry_are_read_in_turn() {
    let mut wqes = PackedWqes::new(1024);
    for seq in 0..3 {
        wqes.push_recv(Psn::new(seq), &[Sge { addr: 4096, len: 32, lkey: 1 }]).unwrap();
    }
    let wqe = SendWqe { op: SendOp::Send, flags: SendFlags::INLINE, length: 40, ..SendWqe::default() };
    wqes.push_inline(Psn::new(0), &wqe, 40, |bytes| bytes.len() == 40).unwrap();
    let all = wqes.bytes().len();
    let MemoryAccess { reads, gathers, follows_writes, receives, writes } =
        frame(CardHalf::Stateful, header(Ptype::Wqeps, 0, all), wqes.bytes()).memory;
    let recvs = 3 * recv_len(1) as u32;
    assert_eq!((reads.all(), gathers.all()), (&[recvs, all as u32 - recvs - 40][..], &[40][..]));
    assert_eq!((writes.all(), receives, follows_writes), (&[40][..], 1, false));
}

#[test]
fn small_packets_to_one_half_of_a_card_share_a_frame() {
    let ea = || frame(CardHalf::Stateless, header(Ptype::Ea, 1, 0), &[]);
    let long = || frame(CardHalf::Stateless, header(Ptype::Rd, 2, 600), &[0; 600]);
    let answer = || frame(CardHalf::Stateful, header(Ptype::Rda, 1, 0), &[]);
    let flights = share(3, [ea(), answer(), ea(), long(), ea(), ea()].into_iter(), |_| Some(1));
    let packets: Vec<u64> = flights.iter().map(|flight| flight.packets()).collect();
    assert_eq!(packets, [2, 1, 1, 2], "what follows the long one stays behind it");
    let alone = HEADER_LEN + starverbs_star::wire::PREFIX_LEN + starverbs_star::token::TOKEN_LEN;
    let both = HEADER_LEN + 2 * (LENGTH_LEN + alone) + CRC_LEN;
    assert_eq!(flights[0].beside_header() as usize, both - BTH_AND_ICRC);
    assert_eq!(flights[1].beside_header() as usize, HEADER_LEN + CRC_LEN - BTH_AND_ICRC);
    let many = share(3, (0..30).map(|_| ea()), |_| Some(1));
    let most = (SHARED - HEADER_LEN) / (LENGTH_LEN + alone);
    assert_eq!(many[0].packets(), most as u64, "no more than the path MTU takes");
    assert_eq!(many.iter().map(|flight| flight.packets()).sum::<u64>(), 30);
}
