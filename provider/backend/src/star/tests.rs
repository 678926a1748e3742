//! Two processes' ports, as far as one process can have both.

use std::net::IpAddr;
use std::os::fd::RawFd;

use starverbs_core::{Av, Gid, Mtu, Psn, Seg};
use starverbs_settings::StarWire;
use starverbs_star::env::{News, SlEvent};
use starverbs_star::token::{SlotArea, Token};
use starverbs_star::wire::{Opt, Prefix, Ptype, Queue, StarHead, StarHeader};

use super::*;
use crate::host;
use crate::program::Payload;

const PREFIX: Prefix = Prefix { qpn: 9, epoch: 0x0001_0002 };

/// No card's, which nobody here looks at.
fn token() -> Token {
    Token { slots: SlotArea::new(0x1000, 64).expect("two slots"), mac: 7 }
}

type Ends<'a> = (StarTx<&'a Counters>, StarRx<&'a Counters>);

fn open_one<'a>(settings: &Settings, counters: &'a Counters) -> (Ends<'a>, Vec<HostAddr>) {
    let addrs = host::addresses(settings).expect("loopback");
    (open(settings, &addrs, counters, None).expect("two ports"), addrs)
}

fn settings(ip: IpAddr) -> Settings {
    Settings { addrs: Some(vec![ip]), ..Settings::default() }
}

fn header(ptype: Ptype, qpn: u32, len: u16) -> StarHeader {
    StarHeader {
        ptype,
        opt: Opt::Read,
        migrate: false,
        ack: true,
        qpn,
        epoch: 0,
        psn: Psn::new(5),
        addr: 0x1000,
        len,
    }
}

fn read(qpn: u32, len: u16) -> StarHead {
    StarHead::to_stateless(header(Ptype::Gd, qpn, len), PREFIX, &token())
}

/// Waits for the next packet; gives its side, where it came from, its type and its data.
fn next(rx: &mut StarRx<&Counters>) -> (CardHalf, Gid, u16, StarHeader, Vec<u8>) {
    for _ in 0..1000 {
        rx.recv();
        let mut came = None;
        rx.next_packets(|got, _| {
            let ReceivedPacket { side, meta, port, packet } = got;
            came = Some((side, meta.src, port, packet.header, packet.data.to_vec()));
        });
        if let Some(came) = came {
            return came;
        }
        let fds: Vec<RawFd> = rx.fds().collect();
        sockopt::wait(&fds, libc::POLLIN, std::time::Duration::from_millis(10));
    }
    panic!("nothing came");
}

fn there_and_back(ip: IpAddr) {
    let settings = settings(ip);
    let counters = [Counters::default(), Counters::default()];
    let ((mut stateful, mut answers), addrs) = open_one(&settings, &counters[0]);
    let ((mut stateless, mut requests), _) = open_one(&settings, &counters[1]);
    let ports = |tx: &StarTx<_>| [tx.port(CardHalf::Stateless), tx.port(CardHalf::Stateful)];
    let [a, b] = [ports(&stateful), ports(&stateless)];
    assert!(a.iter().all(|port| !b.contains(port)), "each process has its own: {a:?} {b:?}");

    let gid = addrs[0].gid;
    let to = Av { sgid: gid, dgid: gid, ..Av::default() };
    for qpn in 0..3 {
        stateful.send(&to, stateless.port(CardHalf::Stateless), &read(qpn, 4096), &[], Payload::EMPTY, false);
    }
    stateful.flush(0);
    let data: Vec<u8> = (0..4096u32).map(|n| n as u8).collect();
    for qpn in 0..3 {
        let (side, from, port, header, _) = next(&mut requests);
        assert_eq!((side, from, port), (CardHalf::Stateless, gid, stateful.port(CardHalf::Stateful)));
        assert_eq!((header.ptype, header.qpn), (Ptype::Gd, qpn));
        let head = StarHead::to_stateful(StarHeader { ptype: Ptype::Gda, ack: false, ..header });
        let (first, rest) = data.split_at(96);
        let segs = [Seg { addr: rest.as_ptr() as u64, len: rest.len() as u32 }];
        // SAFETY: the vector lives until the flush.
        stateless.send(&to, port, &head, first, unsafe { Payload::new(&segs) }, false);
    }
    stateless.flush(0);
    for qpn in 0..3 {
        let (side, _, port, header, got) = next(&mut answers);
        assert_eq!((side, port), (CardHalf::Stateful, stateless.port(CardHalf::Stateful)));
        assert_eq!((header.ptype, header.qpn, header.len), (Ptype::Gda, qpn, 4096));
        assert_eq!(got, data);
    }
    assert!(counters.iter().all(|c| c.tx_errors.get() == 0 && c.star_bad.get() == 0));
    let [ours, theirs] = &counters;
    assert_eq!([&theirs.tx_packets, &theirs.tx_bytes].map(|c| c.get()), [3, 3 * 4096]);
    for (from, to) in [(ours, theirs), (theirs, ours)] {
        assert_eq!((to.rx_packets.get(), to.rx_bytes.get()), (from.tx_packets.get(), from.tx_bytes.get()));
    }
}

/// Of the packets of a frame, those behind one that are for the same queue pair may be taken with it; what is
/// left comes by itself.
#[test]
fn packets_of_one_queue_pair_are_taken_together() {
    let settings = settings(IpAddr::from([127, 0, 0, 1]));
    let counters = Counters::default();
    let ((mut tx, mut rx), addrs) = open_one(&settings, &counters);
    let (to, port) =
        (Av { sgid: addrs[0].gid, dgid: addrs[0].gid, ..Av::default() }, tx.port(CardHalf::Stateful));
    for most in [0, 1, usize::MAX] {
        for qpn in [1, 1, 1, 2, 2, 1] {
            let head = StarHead::to_stateful(header(Ptype::Rda, qpn, 0));
            tx.send(&to, port, &head, &[], Payload::EMPTY, false);
        }
        tx.flush(0);
        let mut got = Vec::new();
        while got.iter().map(|(_, taken)| taken).sum::<usize>() < 6 {
            rx.recv();
            let mut qpn = 0;
            let taken = rx.next_packets(|first, more| {
                qpn = first.packet.header.qpn;
                assert!(more.take(most).all(|packet| packet.header.qpn == qpn));
            });
            if taken > 0 {
                got.push((qpn, taken));
            }
        }
        let wanted: &[_] = match most {
            0 => &[(1, 1), (1, 1), (1, 1), (2, 1), (2, 1), (1, 1)],
            1 => &[(1, 2), (1, 1), (2, 2), (1, 1)],
            _ => &[(1, 3), (2, 2), (1, 1)],
        };
        assert_eq!(got, wanted);
    }
    assert_eq!(counters.rx_packets.get(), 3, "each time one frame");
}

/// A socket that was quiet for long is read soon after something came, however much comes to another.
#[test]
fn no_socket_waits_for_another_to_be_empty() {
    let settings = settings(IpAddr::from([127, 0, 0, 1]));
    let counters = [Counters::default(), Counters::default()];
    let ((mut tx, _), addrs) = open_one(&settings, &counters[0]);
    let ((peer, mut rx), _) = open_one(&settings, &counters[1]);
    let to = Av { sgid: addrs[0].gid, dgid: addrs[0].gid, ..Av::default() };
    let mut send = |half: CardHalf| {
        let head = match half {
            CardHalf::Stateless => read(1, 64),
            CardHalf::Stateful => StarHead::to_stateful(header(Ptype::Rda, 1, 0)),
        };
        tx.send(&to, peer.port(half), &head, &[], Payload::EMPTY, false);
        tx.flush(0);
    };
    let mut take = || {
        let got = rx.recv();
        let mut side = None;
        rx.next_packets(|packet, _| side = Some(packet.side));
        while rx.next_packets(|_, _| ()) > 0 {}
        (got, side)
    };
    for phase in 0..32 {
        while take().0 > 0 {}
        (0..1000).for_each(|_| assert_eq!(take(), (0, None)));
        send(CardHalf::Stateless);
        while take().1.is_none() {}
        for _ in 0..100 + phase {
            send(CardHalf::Stateless);
            assert_eq!(take(), (1, Some(CardHalf::Stateless)));
        }
        assert_eq!(take(), (0, None));
        send(CardHalf::Stateful);
        let is_taken = (0..100).any(|_| {
            send(CardHalf::Stateless);
            take().1 == Some(CardHalf::Stateful)
        });
        assert!(is_taken, "phase {phase}");
    }
}

#[test]
fn packets_go_there_and_back_over_ipv4() {
    there_and_back(IpAddr::from([127, 0, 0, 1]));
}

/// A source address of the host's that its socket is not bound to is said with each packet.
#[test]
fn packets_come_from_the_address_that_the_card_chose() {
    there_and_back(IpAddr::from([127, 0, 0, 3]));
}

#[test]
fn packets_go_there_and_back_over_ipv6() {
    let ip = IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]);
    if std::net::UdpSocket::bind((ip, 0)).is_err() {
        return eprintln!("skipped: this host has no IPv6 on loopback");
    }
    there_and_back(ip);
}

#[test]
fn what_is_no_packet_is_dropped_and_counted() {
    let settings = settings(IpAddr::from([127, 0, 0, 1]));
    let counters = Counters::default();
    let ((mut tx, mut rx), addrs) = open_one(&settings, &counters);
    let unknown = std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket");
    for bytes in [&[][..], &[0x51], &[0xff; 24], &[0; 4200], &[0xc0; 64]] {
        for side in [CardHalf::Stateless, CardHalf::Stateful] {
            unknown.send_to(bytes, ("127.0.0.1", tx.port(side))).expect("sent");
        }
    }
    let gid = addrs[0].gid;
    let to = Av { sgid: gid, dgid: gid, ..Av::default() };
    // A packet for one half does not belong on the other's port.
    tx.send(&to, tx.port(CardHalf::Stateful), &read(1, 8), &[], Payload::EMPTY, false);
    tx.send(&to, tx.port(CardHalf::Stateless), &read(2, 8), &[], Payload::EMPTY, false);
    tx.flush(0);
    assert_eq!(next(&mut rx).3.qpn, 2);
    while rx.recv() > 0 {
        assert_eq!(rx.next_packets(|_, _| ()), 0);
    }
    // An empty datagram holds nothing that could be bad.
    assert_eq!((counters.star_bad.get(), counters.rx_packets.get()), (9, 1));
    let foreign = Av { sgid: Gid([7; 16]), ..to };
    tx.send(&foreign, 1, &read(1, 8), &[], Payload::EMPTY, false);
    tx.flush(0);
    assert_eq!(counters.tx_errors.get(), 1);
}

#[test]
fn the_fault_of_the_settings_hurts_these_packets_too() {
    let fault = starverbs_settings::FaultSpec::parse("loss=20%,dup=20%,corrupt=20%,reorder=20%,seed=3");
    let settings = Settings { fault: fault.expect("a good one"), ..settings(IpAddr::from([127, 0, 0, 1])) };
    let counters = Counters::default();
    let ((mut tx, mut rx), addrs) = open_one(&settings, &counters);
    let gid = addrs[0].gid;
    let to = Av { sgid: gid, dgid: gid, ..Av::default() };
    let (mut got, port) = (Vec::new(), tx.port(CardHalf::Stateless));
    for qpn in 0..200 {
        tx.send(&to, port, &read(qpn, 8), &[], Payload::EMPTY, false);
        tx.flush(qpn.into());
        while rx.recv() > 0 {
            rx.next_packets(|next, _| got.push(next.packet.header.qpn));
        }
    }
    drop(tx);
    while rx.recv() > 0 {
        rx.next_packets(|next, _| got.push(next.packet.header.qpn));
    }
    let [lost, doubled, corrupted] =
        [&counters.fault_lost, &counters.fault_duplicated, &counters.fault_corrupted].map(|c| c.get());
    assert!(lost > 20 && doubled > 10 && corrupted > 10, "{lost} {doubled} {corrupted}");
    assert_eq!(counters.star_bad.get() + got.len() as u64, 200 - lost + doubled);
    assert!(counters.star_bad.get() >= corrupted);
    assert!(got.windows(2).any(|two| two[1] < two[0]), "some were late");
}

/// Packets of three kinds, added in turn: each kind comes in order, and in fewer datagrams than packets where
/// the kernel joins them.
#[test]
fn kinds_in_turn_stay_in_order_each_for_itself() {
    let star_wire = StarWire::Paper;
    let settings = Settings { star_wire, ..settings(IpAddr::from([127, 0, 0, 1])) };
    let counters = Counters::default();
    let ((mut tx, mut rx), addrs) = open_one(&settings, &counters);
    let gid = addrs[0].gid;
    let to = Av { sgid: gid, dgid: gid, ..Av::default() };
    let port = tx.port(CardHalf::Stateless);
    let header = |ptype, qpn| StarHeader {
        ptype,
        opt: Opt::Recv,
        migrate: false,
        ack: false,
        qpn,
        epoch: 0,
        psn: Psn::new(qpn),
        addr: 0,
        len: 0,
    };
    let ea = |qpn| StarHead::to_stateless(header(Ptype::Ea, qpn), Prefix { qpn, ..PREFIX }, &token());
    let data = [7; 64];
    let put = |qpn| {
        let header = StarHeader { opt: Opt::Send, len: 64, ..header(Ptype::Rd, qpn) };
        StarHead::to_stateless(header, Prefix { qpn, ..PREFIX }, &token())
    };
    for qpn in 0..40 {
        tx.send(&to, port, &ea(qpn), &[], Payload::EMPTY, false);
        tx.send(&to, port, &put(qpn), &data, Payload::EMPTY, false);
        tx.send(&to, port, &read(qpn, 64), &[], Payload::EMPTY, false);
    }
    assert_eq!(tx.tx.batch.groups(), 3, "one send for each kind");
    tx.flush(0);
    let (mut answers, mut puts, mut gets, mut ahead) = (Vec::new(), Vec::new(), Vec::new(), 0);
    while answers.len() + puts.len() + gets.len() < 120 {
        let (_, _, _, header, got) = next(&mut rx);
        let (to, len) = match header.ptype {
            Ptype::Ea => (&mut answers, 0),
            Ptype::Rd => (&mut puts, 64),
            _ => (&mut gets, 0),
        };
        assert_eq!(got.len(), len);
        to.push(header.qpn);
        ahead += rx.look_ahead(4, |side, qpn| assert!(side == CardHalf::Stateless && qpn < 40));
    }
    let each: Vec<u32> = (0..40).collect();
    assert_eq!((answers, puts, gets), (each.clone(), each.clone(), each));
    assert!(!settings.gro || ahead > 0, "datagrams hold several packets");
    assert_eq!((counters.tx_errors.get(), counters.star_bad.get()), (0, 0));
}

/// The next `count` packets: what `of` says of each.
fn take<T>(rx: &mut StarRx<&Counters>, count: usize, of: impl Fn(&StarHeader, usize) -> T) -> Vec<T> {
    let got = (0..count).map(|_| next(rx));
    got.map(|(_, _, _, header, data)| of(&header, data.len())).collect()
}

/// Small packets to one place share frames, no longer than the longest of its connections, and come as they
/// were sent.
#[test]
fn small_packets_to_one_place_share_a_frame() {
    for (mtu, frames) in [(Mtu::M4096, 2), (Mtu::M1024, 3), (Mtu::M256, 10)] {
        let counters = Counters::default();
        let ((mut tx, mut rx), addrs) = open_one(&settings(IpAddr::from([127, 0, 0, 1])), &counters);
        let gid = addrs[0].gid;
        let to = Av { sgid: gid, dgid: gid, ..Av::default() };
        tx.note_mtu(mtu);
        let port = tx.port(CardHalf::Stateless);
        (0..60).for_each(|qpn| tx.send(&to, port, &read(qpn, 8), &[], Payload::EMPTY, false));
        tx.flush(0);
        assert_eq!((next(&mut rx).3.qpn, rx.look_ahead(4, |_, qpn| assert_eq!(qpn, PREFIX.qpn))), (0, 4));
        let rest: Vec<u32> = (1..60).collect();
        assert_eq!(take(&mut rx, 59, |header, _| header.qpn), rest);
        assert_eq!([&counters.tx_packets, &counters.rx_packets].map(|c| c.get()), [frames; 2], "{mtu:?}");
        assert_eq!(counters.tx_bytes.get(), counters.rx_bytes.get());
        assert_eq!(counters.tx_syscalls.get(), 1, "full frames have one length");
    }
}

/// Full frames and what is left behind them, be it one packet, are segments of one send.
#[test]
fn one_packet_behind_full_frames_is_no_send_of_its_own() {
    let counters = Counters::default();
    let ((mut tx, mut rx), addrs) = open_one(&settings(IpAddr::from([127, 0, 0, 1])), &counters);
    let gid = addrs[0].gid;
    let to = Av { sgid: gid, dgid: gid, ..Av::default() };
    tx.note_mtu(Mtu::M1024);
    let port = tx.port(CardHalf::Stateless);
    for packets in 1..60 {
        (0..packets).for_each(|qpn| tx.send(&to, port, &read(qpn, 8), &[], Payload::EMPTY, false));
        tx.close_all(|_| true);
        assert_eq!(tx.tx.batch.groups(), 1, "{packets}");
        tx.flush(0);
        let all: Vec<u32> = (0..packets).collect();
        assert_eq!(take(&mut rx, packets as usize, |header, _| header.qpn), all);
    }
    assert_eq!(counters.star_bad.get(), 0);
}

/// A connection with a shorter path begins while packets wait.
#[test]
fn a_frame_that_is_too_long_by_now_leaves_as_it_is() {
    let counters = Counters::default();
    let ((mut tx, mut rx), addrs) = open_one(&settings(IpAddr::from([127, 0, 0, 1])), &counters);
    let gid = addrs[0].gid;
    let to = Av { sgid: gid, dgid: gid, ..Av::default() };
    let port = tx.port(CardHalf::Stateless);
    (0..20).for_each(|qpn| tx.send(&to, port, &read(qpn, 8), &[], Payload::EMPTY, false));
    tx.note_mtu(Mtu::M256);
    (20..26).for_each(|qpn| tx.send(&to, port, &read(qpn, 8), &[], Payload::EMPTY, false));
    tx.flush(0);
    let all: Vec<u32> = (0..26).collect();
    assert_eq!(take(&mut rx, 26, |header, _| header.qpn), all);
    assert_eq!((counters.tx_packets.get(), counters.star_bad.get()), (2, 0));
}

/// A packet that leaves by itself does not overtake those of its lane that were collected, nor they it.
#[test]
fn what_leaves_by_itself_keeps_its_place() {
    let counters = Counters::default();
    let ((mut tx, mut rx), addrs) = open_one(&settings(IpAddr::from([127, 0, 0, 1])), &counters);
    let gid = addrs[0].gid;
    let to = Av { sgid: gid, dgid: gid, ..Av::default() };
    let port = tx.port(CardHalf::Stateless);
    let data = [7; 1000];
    let len = |n: u32| if n % 5 < 2 { 1000 } else { 64 };
    for n in 0..40 {
        let header = StarHeader {
            ptype: Ptype::Rd,
            opt: Opt::Send,
            migrate: false,
            ack: false,
            qpn: n,
            epoch: 0,
            psn: Psn::new(n),
            addr: 0,
            len: len(n),
        };
        let head = StarHead::to_stateless(header, PREFIX, &token());
        tx.send(&to, port, &head, &data[..usize::from(len(n))], Payload::EMPTY, false);
    }
    tx.flush(0);
    let all: Vec<(u32, usize)> = (0..40).map(|n| (n, usize::from(len(n)))).collect();
    assert_eq!(take(&mut rx, 40, |header, len| (header.qpn, len)), all);
    assert_eq!(counters.tx_packets.get(), 16 + 8, "three small ones between each two large ones are one");
}

/// To more places than are collected for: nothing is lost, and what goes to each stays in order.
#[test]
fn many_places_take_turns() {
    let counters = Counters::default();
    let ((mut tx, mut rx), addrs) = open_one(&settings(IpAddr::from([127, 0, 0, 1])), &counters);
    let sgid = addrs[0].gid;
    let port = tx.port(CardHalf::Stateless);
    for n in 0..3 {
        for place in 0..20 {
            let to = Av { sgid, dgid: Gid::from_ipv4([127, 0, 1, place]), ..Av::default() };
            let head = read(u32::from(place) * 10 + n, 8);
            (0..2).for_each(|_| tx.send(&to, port, &head, &[], Payload::EMPTY, false));
        }
    }
    tx.flush(0);
    let mut got = take(&mut rx, 120, |header, _| header.qpn);
    let of = |place: u32| (0..3).flat_map(move |n| [place * 10 + n; 2]);
    got.sort_by_key(|qpn| qpn / 10);
    assert_eq!(got, (0..20u32).flat_map(of).collect::<Vec<u32>>());
    assert_eq!((counters.tx_errors.get(), counters.tx_packets.get()), (0, 60));
}

/// A header of this type, with `len` bytes of data.
fn head_of(ptype: Ptype, qpn: u32, len: u16) -> StarHeader {
    let (opt, psn) = (Opt::Send, Psn::new(qpn));
    StarHeader { ptype, opt, migrate: false, ack: false, qpn, epoch: 0, psn, addr: 0, len }
}

/// What was answered or completed before leaves before larger packets with data, and before small ones to the
/// same card of another class; the hop limit does not matter.
#[test]
fn answers_and_completions_leave_before_what_is_sent_later() {
    let data = [7; 1000];
    for (answer, len, class) in [
        (Ptype::Cqep, 1000, 0),
        (Ptype::Ea, 1000, 0),
        (Ptype::Ea, 1000, 4),
        (Ptype::Ea, 64, 4),
        (Ptype::Ea, 64, 0),
    ] {
        let counters = Counters::default();
        let ((mut tx, mut rx), addrs) = open_one(&settings(IpAddr::from([127, 0, 0, 1])), &counters);
        let gid = addrs[0].gid;
        let to = Av { sgid: gid, dgid: gid, hop_limit: 64, ..Av::default() };
        let with_data = Av { hop_limit: 1, traffic_class: class, ..to };
        let port = tx.port(CardHalf::Stateless);
        let mut send = |to: &Av, ptype, qpn, len: u16| {
            let head = StarHead::to_stateless(head_of(ptype, qpn, len), PREFIX, &token());
            tx.send(to, port, &head, &data[..usize::from(len)], Payload::EMPTY, false);
        };
        /* the place of the data is known first, and a send of its kind is begun */
        send(&with_data, Ptype::Rd, 0, len);
        send(&to, answer, 1, 0);
        send(&with_data, Ptype::Rd, 2, len);
        tx.flush(0);
        assert_eq!(
            take(&mut rx, 3, |header, _| header.qpn),
            [0, 1, 2],
            "{answer:?}, {len} bytes, class {class}"
        );
        assert!(class > 0 || len > 512 || counters.tx_packets.get() == 1, "one place");
    }
}

/// A packet has several completions: the host takes the first one first.
#[test]
fn events_come_in_order() {
    let (counters, settings) = (Counters::default(), settings(IpAddr::from([127, 0, 0, 1])));
    let ((tx, _rx), _) = open_one(&settings, &counters);
    let mut port = StarPort::new(tx, Sealing::new(&settings).expect("no key"));
    let epochs = [1, 2, 3];
    for epoch in epochs {
        let (queue, what) = (Queue::Recv, News::Completed);
        port.keep_event(SlEvent { qpn: 9, epoch, queue, what, upto: None });
    }
    let taken: Vec<u32> = std::iter::from_fn(|| port.next_event()).map(|event| event.epoch).collect();
    assert_eq!(taken, epochs);
}
