//! Several ports of one host on one UDP port: steering, handing on, and what a death does to them.

use std::io::IoSlice;
use std::net::{Ipv6Addr, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use crate::common::{Node, bth, drive, free_port, icrc_v4, pattern};
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use starverbs_core::{Counters, Nanos, QPN_BLOCK, QPN_GSI};
use starverbs_settings::Settings;

/// Sends `count` frames from the first node to each, and waits until all have theirs.
fn everyone_gets(nodes: &mut [&mut Node], count: usize) {
    let targets: Vec<_> = nodes.iter().map(|n| n.qpn(7)).collect();
    for node in nodes.iter_mut() {
        node.got.clear();
    }
    let data = pattern(1000, 1);
    let to = nodes[0].av("127.0.0.1");
    for qpn in targets {
        for _ in 0..count {
            nodes[0].send(&to, qpn, &data);
            nodes[0].flush();
        }
        // Few at a time: a block's socket takes ten messages unread.
        for node in nodes.iter_mut() {
            node.poll();
        }
    }
    let all = drive(nodes, |nodes| nodes.iter().all(|n| n.got.len() == count));
    let got: Vec<_> = nodes.iter().map(|n| (n.got.len(), n.counters)).collect();
    assert!(all, "{got:?}");
}

fn sum(nodes: &[&mut Node], of: fn(&Counters) -> u64) -> u64 {
    nodes.iter().map(|n| of(n.counters)).sum()
}

/// Traffic until nothing is steered wrongly any more.
fn settles(nodes: &mut [&mut Node]) {
    for _ in 0..200 {
        let before = sum(nodes, |c| c.handed_on.get());
        everyone_gets(nodes, 3);
        if sum(nodes, |c| c.handed_on.get()) == before {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("frames are still handed on: {:?}", nodes.iter().map(|n| n.counters).collect::<Vec<_>>());
}

#[test]
fn frames_are_steered_to_the_owner_of_their_block() {
    let port = free_port();
    for members in 2..=4 {
        let mut nodes: Vec<_> = (0..members).map(|_| Node::new(port)).collect();
        let mut nodes: Vec<_> = nodes.iter_mut().collect();
        settles(&mut nodes);
    }
}

#[test]
fn steering_heals_when_members_die_and_the_group_shifts() {
    let port = free_port();
    let mut nodes: Vec<_> = (0..4).map(|_| Node::new(port)).collect();
    settles(&mut nodes.iter_mut().collect::<Vec<_>>());
    while nodes.len() > 1 {
        drop(nodes.remove(0));
        settles(&mut nodes.iter_mut().collect::<Vec<_>>());
    }
}

#[test]
fn a_further_block_is_steered_too() {
    let port = free_port();
    let (mut a, mut b) = (Node::new(port), Node::new(port));
    settles(&mut [&mut a, &mut b]);
    let block = b.rx.claim_block().expect("a free block");
    assert_eq!(b.rx.blocks().collect::<Vec<_>>().len(), 2);
    let to = a.av("127.0.0.1");
    for _ in 0..200 {
        let before = sum(&[&mut a, &mut b], |c| c.handed_on.get());
        b.got.clear();
        for _ in 0..3 {
            a.send(&to, block * QPN_BLOCK + 3, b"to the second block");
            a.flush();
        }
        let all = drive(&mut [&mut a, &mut b], |n| n[1].got.len() == 3);
        assert!(all, "{:?} {:?}", a.counters, b.counters);
        if sum(&[&mut a, &mut b], |c| c.handed_on.get()) == before {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("frames are still handed on: {:?} {:?}", a.counters, b.counters);
}

/// Frames to a process that has two blocks are one segmented send, as soon as its answer is there, and all
/// come to it.
#[test]
fn blocks_of_one_process_share_a_send() {
    let port = free_port();
    let mut b = Node::new(port);
    let second = b.rx.claim_block().expect("a free block") * QPN_BLOCK;
    // Whoever comes asks, and is answered, if late.
    let mut a = Node::new(port);
    settles(&mut [&mut a, &mut b]);
    let (to, first) = (a.av("127.0.0.1"), b.qpn(1));
    for _ in 0..200 {
        let before = sum(&[&mut a, &mut b], |c| c.handed_on.get());
        b.got.clear();
        for _ in 0..10 {
            a.send(&to, first, b"to the first block");
            a.send(&to, second + 3, b"to the other block");
        }
        a.flush();
        let all = drive(&mut [&mut a, &mut b], |n| n[1].got.len() == 20);
        assert!(all, "{:?} {:?}", a.counters, b.counters);
        // Of two sends the first one's frames come first.
        let blocks =
            b.got.iter().map(|(_, frame)| u32::from_be_bytes([0, frame[5], frame[6], frame[7]]) / QPN_BLOCK);
        let in_turn = blocks.collect::<Vec<_>>().windows(2).all(|two| two[0] != two[1]);
        if in_turn && sum(&[&mut a, &mut b], |c| c.handed_on.get()) == before {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("each block has a send of its own: {:?} {:?}", a.counters, b.counters);
}

#[test]
fn joined_frames_of_a_mixed_burst_all_find_their_owner() {
    let port = free_port();
    let (mut a, mut b) = (Node::new(port), Node::new(port));
    settles(&mut [&mut a, &mut b]);
    let before = sum(&[&mut a, &mut b], |c| c.handed_on.get());
    for node in [&mut a, &mut b] {
        node.got.clear();
    }
    let (to, data) = (a.av("127.0.0.1"), pattern(2048, 4));
    let (qa, qb) = (a.qpn(1), b.qpn(1));
    for _ in 0..10 {
        a.send(&to, qa, &data);
        a.send(&to, qb, &data);
    }
    a.flush();
    let all = drive(&mut [&mut a, &mut b], |n| n[0].got.len() == 10 && n[1].got.len() == 10);
    assert!(all, "{:?} {:?}", a.counters, b.counters);
    assert_eq!(sum(&[&mut a, &mut b], |c| c.handed_on.get()), before, "one send for two processes");
}

#[test]
fn a_member_that_does_not_read_disturbs_the_others_no_longer_than_they_need_to_notice() {
    let port = free_port();
    let mut stopped = Node::new(port);
    let (mut a, mut b) = (Node::new(port), Node::new(port));
    // Each joined while nobody else read. Their answers come late, and are taken: both know the place of all
    // who read.
    let settled = drive(&mut [&mut a, &mut b], |n| n.iter().all(|node| node.rx.is_settled()));
    assert!(settled, "{:?} {:?}", a.counters, b.counters);
    settles(&mut [&mut a, &mut b]);
    settles(&mut [&mut a, &mut b, &mut stopped]);
}

/// Sends a frame to `qpn` of the port from a source of its own, as steering by hash goes by the source.
fn send_from_anywhere(port: u16, qpn: u32) {
    let sender = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let sport = sender.local_addr().expect("bound").port();
    let mut frame = bth(qpn).to_vec();
    frame.extend(icrc_v4([127, 0, 0, 1], [127, 0, 0, 1], sport, port, 0, &frame));
    sender.send_to(&frame, ("127.0.0.1", port)).expect("sent");
}

#[test]
fn a_death_is_noticed_though_whoever_gets_the_frames_now_does_not_run() {
    const FRAMES: usize = 16;
    let port = free_port();
    let (mut dying, mut stopped, mut last) = (Node::new(port), Node::new(port), Node::new(port));
    settles(&mut [&mut dying, &mut stopped, &mut last]);
    drop(dying);
    // The last one has the first place now; its frames go to where it was, which is to either by hash.
    for _ in 0..200 {
        last.got.clear();
        (0..FRAMES).for_each(|_| send_from_anywhere(port, last.qpn(7)));
        /* frames that are where nobody reads never come: the limit is for those */
        for _ in 0..50 {
            last.poll();
            if last.got.len() == FRAMES {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    panic!("frames still go to who does not run: {:?}", last.counters);
}

#[test]
fn who_leaves_hands_on_what_it_has_not_read() {
    let port = free_port();
    let leaver = Node::new(port);
    let mut heir = Node::new(port);
    // Steering does not know the heir before its round ends: its frames go to either, by their source. A
    // block's socket takes ten messages unread, so few must wait.
    let mut sent = 0usize;
    while sent - heir.got.len() < 5 {
        send_from_anywhere(port, heir.qpn(1));
        sent += 1;
        heir.take();
        assert!(sent < 1000, "the leaver gets nothing: this test shows nothing");
    }
    drop(leaver);
    let all = drive(&mut [&mut heir], |n| n[0].got.len() == sent);
    assert!(all, "{} of {sent}: {:?}", heir.got.len(), heir.counters);
}

#[test]
fn frames_for_nobody_are_counted() {
    let mut node = Node::new(free_port());
    let to = node.av("127.0.0.1");
    let nobody = if node.block() == 1 { 2 } else { 1 };
    node.send(&to, nobody * QPN_BLOCK, b"to nobody");
    node.flush();
    assert!(drive(&mut [&mut node], |n| n[0].counters.drop_no_owner.get() == 1), "{:?}", node.counters);
    assert!(node.got.is_empty());
    // The general service interface is every process's.
    node.send(&to, QPN_GSI, b"to the general service interface");
    node.flush();
    assert!(drive(&mut [&mut node], |n| n[0].got.len() == 1), "{:?}", node.counters);
}

#[test]
fn a_process_without_the_port_becomes_a_member_when_the_port_is_free() {
    const LATER: Nanos = 3600 * 1_000_000_000;
    let port = free_port();
    let holder = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port)).expect("a free port");
    let mut node = Node::new(port);
    assert!(node.rx.lacks_port());
    assert!(node.rx.is_settled(), "nothing comes to a socket that it has not");
    assert!(node.rx.maintenance(1).is_some(), "a outsider has something to do later");
    drop(holder);
    node.rx.maintenance(LATER);
    assert!(!node.rx.lacks_port());
    let (to, qpn) = (node.av("127.0.0.1"), node.qpn(1));
    node.send(&to, qpn, b"hello");
    node.flush();
    assert!(drive(&mut [&mut node], |n| n[0].got.len() == 1), "{:?}", node.counters);
}

#[test]
fn another_users_process_gets_its_frames_handed_on() {
    let port = free_port();
    let mut member = Node::new(port);
    let Some(mut outsider) = Node::of_nobody(&Settings { port, ..Settings::default() }) else { return };
    assert!(outsider.rx.lacks_port());
    let (to, qpn, data) = (member.av("127.0.0.1"), outsider.qpn(1), pattern(4096, 2));
    for _ in 0..30 {
        member.send(&to, qpn, &data);
    }
    member.flush();
    let all = drive(&mut [&mut member, &mut outsider], |n| n[1].got.len() == 30);
    assert!(all, "{:?} {:?}", member.counters, outsider.counters);
    assert_eq!(outsider.counters.handed_in.get(), 30);
    assert!(outsider.got.iter().all(|(_, frame)| frame[12..] == data[..]));
    let (to, qpn) = (outsider.av("127.0.0.1"), member.qpn(1));
    outsider.send(&to, qpn, b"answer");
    outsider.flush();
    assert!(drive(&mut [&mut member, &mut outsider], |n| n[0].got.len() == 1), "{:?}", member.counters);
}

#[test]
fn questions_are_answered() {
    let settings = Settings { port: free_port(), ..Settings::default() };
    let mut node = Node::with(&settings);
    let block = node.block();
    let asking = std::thread::spawn(move || {
        starverbs_backend::ask(settings.port, block, b"qps", Duration::from_secs(10))
    });
    let mut asked = None;
    assert!(drive(&mut [&mut node], |_| true));
    while asked.is_none() {
        node.poll();
        asked = node.rx.take_request();
        assert!(asked.is_some() || !asking.is_finished(), "nothing was asked");
    }
    let request = asked.expect("a request");
    assert_eq!(request.text, b"qps");
    assert!(request.may_change());
    node.rx.answer(&request, b"none");
    assert_eq!(asking.join().expect("no panic").expect("an answer"), b"none");
    drop(node);
    let error = starverbs_backend::ask(settings.port, block, b"qps", Duration::from_secs(1));
    assert_eq!(error.expect_err("nobody is there").kind(), std::io::ErrorKind::ConnectionRefused);
}

/// Anybody of the host may write to a block's socket: descriptors sent along are not taken, and whose process
/// it was is the kernel's word.
#[test]
fn strangers_hand_in_no_descriptors_and_no_names() {
    let settings = Settings { port: free_port(), ..Settings::default() };
    let mut node = Node::with(&settings);
    let to = UnixAddr::new_abstract(starverbs_backend::socket_name(settings.port, node.block()).as_bytes());
    let to = to.expect("a name");
    let stranger = UnixDatagram::unbound().expect("a socket");
    let send = |beside: &[ControlMessage<'_>]| {
        let message = [IoSlice::new(b"SVB1\x03\0\0\0load - 1 /x")];
        sendmsg(stranger.as_raw_fd(), &message, beside, MsgFlags::empty(), Some(&to)).map(drop)
    };
    assert!(drive(&mut [&mut node], |_| true));
    /* of a file of its own: other tests open descriptors meanwhile */
    let (read_end, _write_end) = nix::unistd::pipe().expect("a pipe");
    let link = |fd: &str| std::fs::read_link(format!("/proc/self/fd/{fd}")).ok();
    let pipe = link(&read_end.as_raw_fd().to_string());
    let descriptors = || {
        let all = std::fs::read_dir("/proc/self/fd").expect("/proc");
        let names = all.flatten().map(|fd| fd.file_name().to_string_lossy().into_owned());
        names.filter(|fd| link(fd) == pipe).count()
    };
    let mut asked = |beside: &[ControlMessage<'_>]| {
        let before = descriptors();
        send(beside).expect("sent");
        let request = std::iter::repeat_with(|| {
            node.poll();
            node.rx.take_request()
        });
        let request = request.take(1000).flatten().next().expect("it came");
        assert_eq!(descriptors(), before, "descriptors were taken");
        request
    };
    let given = [read_end.as_raw_fd(); 20];
    assert!(asked(&[ControlMessage::ScmRights(&given)]).may_change());
    /* only root may send another's name */
    if nix::unistd::geteuid().is_root() {
        let other = libc::ucred { pid: std::process::id() as i32, uid: 4711, gid: 0 };
        let named = ControlMessage::ScmCredentials(&other.into());
        let request = asked(&[named, ControlMessage::ScmRights(&given)]);
        assert!(!request.may_change(), "{request:?}");
    }
}
