//! Frames from a port to a port, and what is on the wire between.

use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use crate::common::{Node, bth, drive, free_port, gid, icrc_v4, icrc_v6, pattern, payload_of, seg};
use starverbs_backend::Payload;
use starverbs_core::{Av, QPN_BLOCK};
use starverbs_settings::{FaultSpec, Settings};

const SIZES: [usize; 13] = [0, 1, 2, 3, 4, 64, 256, 511, 512, 513, 1024, 4095, 4096];

fn every_size_arrives(ip: &str, gso: bool, gro: bool) {
    let settings = Settings { port: free_port(), gso, gro, ..Settings::default() };
    let mut node = Node::with(&settings);
    let (to, qpn) = (node.av(ip), node.qpn(5));
    let payloads: Vec<_> = SIZES.iter().map(|&len| pattern(len, len)).collect();
    for payload in &payloads {
        node.send(&to, qpn, payload);
    }
    node.flush();
    assert!(drive(&mut [&mut node], |n| n[0].got.len() == SIZES.len()), "{:?}", node.counters);
    for ((meta, frame), payload) in node.got.iter().zip(&payloads) {
        assert_eq!((meta.src, meta.dst), (gid(ip), gid(ip)));
        assert_eq!(frame[..12], bth(qpn));
        assert_eq!(frame[12..12 + payload.len()], payload[..]);
        assert_eq!(frame.len(), 12 + payload.len().next_multiple_of(4));
    }
    assert_eq!(node.counters.drop_icrc.get() + node.counters.tx_errors.get(), 0);
    assert_eq!(node.counters.tx_packets.get(), SIZES.len() as u64);
}

#[test]
fn every_size_arrives_over_ipv4_and_ipv6() {
    for ip in ["127.0.0.1", "::1"] {
        for (gso, gro) in [(true, true), (true, false), (false, true), (false, false)] {
            every_size_arrives(ip, gso, gro);
        }
    }
}

#[test]
fn payload_is_gathered_from_many_pieces() {
    let mut node = Node::new(free_port());
    let (to, qpn) = (node.av("127.0.0.1"), node.qpn(1));
    let data = pattern(4096, 9);
    for pieces in [1, 2, 7, 8, 9, 32, 128] {
        for volatile in [false, true] {
            let segs: Vec<_> = data.chunks(4096 / pieces).map(seg).collect();
            node.tx.send_frame(&to, &bth(qpn), payload_of(&segs), 0, volatile);
        }
    }
    node.flush();
    assert!(drive(&mut [&mut node], |n| n[0].got.len() >= 14), "{:?}", node.counters);
    assert!(node.got.iter().all(|(_, frame)| frame[12..] == data[..]));
}

#[test]
fn equal_frames_leave_as_one_segmented_send_and_arrive_joined() {
    let mut node = Node::new(free_port());
    let (to, qpn) = (node.av("127.0.0.1"), node.qpn(1));
    node.poll();
    let before = (node.counters.tx_syscalls.get(), node.counters.rx_syscalls.get());
    let data = pattern(1024, 3);
    for _ in 0..60 {
        node.send(&to, qpn, &data);
    }
    node.send(&to, qpn, &data[..100]);
    node.flush();
    assert_eq!(node.counters.tx_syscalls.get() - before.0, 1);
    assert!(drive(&mut [&mut node], |n| n[0].got.len() == 61), "{:?}", node.counters);
    assert!(node.counters.rx_syscalls.get() - before.1 < 20, "received one by one");
    assert_eq!(node.got[60].1.len(), 112);
}

/// What lies behind a frame can be seen before it is taken: the rest of a joined datagram, then those that
/// came with it.
#[test]
fn frames_that_wait_are_seen_ahead() {
    let mut node = Node::new(free_port());
    let to = node.av("127.0.0.1");
    node.poll();
    let [a, b, c] = [1, 2, 3].map(|n| node.qpn(n));
    for (qpn, len) in [(a, 8), (a, 8), (b, 8), (c, 700), (a, 700)] {
        node.send(&to, qpn, &pattern(len, 3));
    }
    node.flush();
    let (mut order, mut ahead) = (Vec::new(), Vec::new());
    for _ in 0..100_000 {
        node.rx.recv();
        while let Some((_, frame)) = node.rx.next_frame() {
            order.push(u32::from_be_bytes([0, frame[5], frame[6], frame[7]]));
            let mut seen = Vec::new();
            let worth_it = node.rx.has_more();
            let frames = node.rx.look_ahead(3, |qpn| seen.push(qpn));
            assert!(!worth_it || frames > 1, "one that waits alone is not looked at");
            assert!(worth_it || frames < 3);
            ahead.push((frames, seen));
        }
        if order.len() == 5 {
            break;
        }
    }
    assert_eq!(order, [a, a, b, c, a]);
    for (at, (frames, seen)) in ahead.into_iter().enumerate() {
        let mut rest = order[at + 1..].to_vec();
        assert!(frames <= rest.len().min(3), "not more than there are, nor than asked for");
        rest.truncate(frames);
        rest.dedup();
        assert_eq!(seen, rest, "each QPN once in a row, in order");
        assert!(at > 0 || frames > 0, "the first three came as one datagram");
    }
}

#[test]
fn a_full_batch_flushes_itself_and_loses_nothing() {
    let mut node = Node::new(free_port());
    let (to, qpn) = (node.av("127.0.0.1"), node.qpn(1));
    let data = pattern(4096, 3);
    for _ in 0..300 {
        node.tx.send_frame(&to, &bth(qpn), payload_of(&[seg(&data)]), 0, true);
    }
    node.flush();
    assert_eq!(node.counters.tx_packets.get(), 300);
    assert!(drive(&mut [&mut node], |n| n[0].got.len() == 300), "{:?}", node.counters);
}

#[test]
fn icrc_on_the_wire_is_that_of_the_standard() {
    for ip in ["127.0.0.1", "::1"] {
        let settings = Settings { port: free_port(), ..Settings::default() };
        let mut node = Node::with(&settings);
        drop(node.rx);
        let peer = UdpSocket::bind((ip, settings.port)).expect("the port is free again");
        let to = Av { hop_limit: 3, traffic_class: 0x68, ..common_av(&node.addrs, ip) };
        let sport = node.tx.source_port(to.sgid_index);
        // Payload is read until the flush.
        let payloads = [0, 3, 700, 700, 700, 20].map(|size| pattern(size, size));
        for data in &payloads {
            node.tx.send_frame(
                &to,
                &bth(77),
                payload_of(&[seg(data)]),
                data.len().wrapping_neg() as u8 & 3,
                false,
            );
        }
        node.tx.flush(1);
        // Messages: [0], [4] as the frames grow, then three equal ones and a shorter.
        for id in [0, 0, 0, 1, 2, 3] {
            let mut buffer = [0; 2048];
            let (len, from) = peer.recv_from(&mut buffer).expect("a frame");
            assert_eq!(from.port(), sport);
            let (body, icrc) = buffer[..len].split_at(len - 4);
            let expected = match (to.sgid.ipv4(), to.dgid.ipv4()) {
                (Some(src), Some(dst)) => icrc_v4(src, dst, sport, settings.port, id, body),
                _ => icrc_v6(to.sgid.0, to.dgid.0, sport, settings.port, body),
            };
            assert_eq!(icrc, expected, "{ip}, identification {id}, {len} bytes");
        }
    }
}

fn common_av(addrs: &[starverbs_backend::HostAddr], ip: &str) -> Av {
    let gid = gid(ip);
    let sgid_index = addrs.iter().position(|a| a.gid == gid).expect("a local address") as u8;
    Av { dgid: gid, sgid: gid, sgid_index, ..Av::default() }
}

/// Linux' rdma_rxe sends so.
#[test]
fn ipv6_frames_without_a_udp_checksum_are_taken() {
    let port = free_port();
    let mut node = Node::new(port);
    let to = node.av("::1");
    let sender = UdpSocket::bind("[::1]:0").expect("a socket");
    let one: i32 = 1;
    // SAFETY: the pointer and length describe `one`, which the kernel only reads.
    let set = unsafe {
        let (fd, value) = (sender.as_raw_fd(), std::ptr::from_ref(&one).cast());
        libc::setsockopt(fd, libc::SOL_UDP, libc::UDP_NO_CHECK6_TX, value, 4)
    };
    assert_eq!(set, 0);
    let mut frame = [&bth(node.qpn(3))[..], &pattern(100, 1)].concat();
    let sport = sender.local_addr().expect("bound").port();
    frame.extend(icrc_v6(to.sgid.0, to.dgid.0, sport, port, &frame));
    sender.send_to(&frame, ("::1", port)).expect("sent");
    assert!(drive(&mut [&mut node], |n| n[0].got.len() == 1), "{:?}", node.counters);
}

#[test]
fn any_ipv4_identification_is_accepted_and_a_flipped_bit_is_not() {
    let port = free_port();
    let mut node = Node::new(port);
    let peer = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let sport = peer.local_addr().expect("bound").port();
    let lo = [127, 0, 0, 1];
    let mut body = bth(node.qpn(1)).to_vec();
    body.extend(pattern(500, 1));
    let frame = |id| [&body[..], &icrc_v4(lo, lo, sport, port, id, &body)].concat();
    for id in [0, 1, 0x1234, 0xffff] {
        peer.send_to(&frame(id), ("127.0.0.1", port)).expect("sent");
    }
    assert!(drive(&mut [&mut node], |n| n[0].got.len() == 4), "{:?}", node.counters);
    assert!(node.got.iter().all(|(_, got)| *got == body));
    for byte in [0, 12, 100, 511, 513] {
        let mut bad = frame(0);
        bad[byte] ^= 0x10;
        peer.send_to(&bad, ("127.0.0.1", port)).expect("sent");
    }
    assert!(drive(&mut [&mut node], |n| n[0].counters.drop_icrc.get() == 5), "{:?}", node.counters);
    for len in [0, 1, 15] {
        peer.send_to(&body[..len], ("127.0.0.1", port)).expect("sent");
    }
    assert!(drive(&mut [&mut node], |n| n[0].counters.drop_malformed.get() >= 2), "{:?}", node.counters);
    assert_eq!(node.got.len(), 4);
}

#[test]
fn ecn_marks_are_seen() {
    for ip in ["127.0.0.1", "::1"] {
        let mut node = Node::new(free_port());
        let (to, qpn) = (Av { traffic_class: 0x6b, ..node.av(ip) }, node.qpn(1));
        node.send(&to, qpn, b"mark");
        node.flush();
        assert!(drive(&mut [&mut node], |n| n[0].got.len() == 1), "{:?}", node.counters);
        assert_eq!(node.got[0].0.traffic_class, 0x6b, "{ip}");
    }
}

#[test]
fn frames_that_cannot_go_are_counted_and_harm_nobody() {
    let mut node = Node::new(free_port());
    let (to, qpn) = (node.av("127.0.0.1"), node.qpn(1));
    let long = pattern(9000, 1);
    node.send(&to, qpn, &long);
    node.tx.send_frame(&to, &[1, 2, 3], Payload::EMPTY, 0, false);
    node.send(&Av { dgid: gid("::1"), ..to }, qpn, b"family");
    node.send(&Av { sgid: gid("203.0.113.1"), ..to }, qpn, b"not ours");
    node.send(&Av { dgid: gid("203.0.113.1"), ..to }, qpn, b"loopback does not lead there");
    node.send(&to, qpn, b"good");
    node.flush();
    assert!(drive(&mut [&mut node], |n| n[0].got.len() == 1), "{:?}", node.counters);
    assert_eq!(node.counters.tx_errors.get(), 5);
}

#[test]
fn an_address_is_found_without_its_index() {
    let mut node = Node::new(free_port());
    let (to, qpn) = (node.av("::1"), node.qpn(QPN_BLOCK - 1));
    node.send(&Av { sgid_index: 0, ..to }, qpn, b"answer");
    node.send(&Av { sgid_index: 255, ..to }, qpn, b"answer");
    node.flush();
    assert!(drive(&mut [&mut node], |n| n[0].got.len() == 2), "{:?}", node.counters);
}

#[test]
fn corrupted_frames_fail_the_check_and_lost_ones_do_not_come() {
    let fault = FaultSpec::parse("corrupt=20%,loss=10%,dup=5%,reorder=5%,seed=3").expect("a good spec");
    let mut node = Node::with(&Settings { port: free_port(), fault, ..Settings::default() });
    let (to, qpn) = (node.av("127.0.0.1"), node.qpn(1));
    for round in 0..50 {
        for n in 0..20 {
            node.send(&to, qpn, &pattern(n * 10, round));
        }
        node.flush();
        node.poll();
    }
    let counters = node.counters;
    let sent = 1000 - counters.fault_lost.get() + counters.fault_duplicated.get();
    let seen = |n: &Node| {
        let c = n.counters;
        n.got.len() as u64 + c.drop_icrc.get() + c.drop_no_owner.get() + c.drop_handover.get()
    };
    // Frames that were held back come at a later flush.
    let start = Instant::now();
    while seen(&node) < sent && start.elapsed() < Duration::from_secs(60) {
        node.flush();
        node.poll();
    }
    assert!(seen(&node) >= sent, "{counters:?}");
    assert!((150..250).contains(&counters.fault_corrupted.get()), "{counters:?}");
    assert!(seen(&node) - node.got.len() as u64 >= counters.fault_corrupted.get(), "{counters:?}");
    assert!(counters.fault_lost.get() > 50 && counters.fault_duplicated.get() > 20);
    assert!(counters.fault_reordered.get() > 20);
}

#[test]
fn delayed_frames_arrive_though_their_sender_is_gone() {
    let port = free_port();
    let fault = FaultSpec::parse("delay=10s,reorder=50%,seed=3").expect("a good spec");
    let mut sender = Node::with(&Settings { port, fault, ..Settings::default() });
    let mut receiver = Node::new(port);
    let (to, qpn) = (sender.av("127.0.0.1"), receiver.qpn(1));
    for _ in 0..8 {
        sender.send(&to, qpn, &pattern(100, 1));
        sender.flush();
    }
    assert!(receiver.got.is_empty());
    drop(sender);
    assert!(drive(&mut [&mut receiver], |n| n[0].got.len() == 8), "{:?}", receiver.counters);
}
