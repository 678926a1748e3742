//! Two ends of a session, in one process; and ends that do not keep to the rules.

use std::os::fd::{FromRawFd, OwnedFd};

use nix::fcntl::SealFlag;
use starverbs_rings::{RECORD_WORDS, SlotReader, SlotWriter};

use super::memory::{RING, RingMemory, SharedMapping};
use super::*;
use crate::descriptor::Socket;
use crate::handover::Stall;
use crate::sealed;

/// Sessions of a process that has `block`.
pub(super) fn peers(port: u16, block: u32) -> Peers {
    let peers = Peers::new(port).expect("descriptors");
    assert!(peers.offer_block(block).expect("a descriptor").is_some(), "the name is free");
    peers
}

fn take(peers: &Peers) -> Option<Vec<u8>> {
    let mut room = vec![0; 1 << 16];
    peers.look();
    let len = peers.next_frames(&mut room)?;
    Some(room[..len].to_vec())
}

/// The first session's own memory, as its process may write to it.
fn sessions(peers: &Peers) -> usize {
    peers.with(|sessions| sessions.all().count())
}

#[test]
fn messages_reach_owners_and_nobody_else_is_waited_for() {
    const PORT: u16 = 65020;
    let (a, b) = (peers(PORT, 7), peers(PORT, 8));
    assert_eq!(a.pass(9, b"ab", b"cd"), PassedOn::NoOwner);
    assert_eq!(a.pass(8, b"ab", b"cd"), PassedOn::Yes, "it need not be there to take it");
    assert_eq!(take(&b).as_deref(), Some(&b"abcd"[..]));
    assert_eq!(take(&b), None);
    assert_eq!(b.pass(7, b"", b"back"), PassedOn::Yes);
    assert_eq!(take(&a).as_deref(), Some(&b"back"[..]));
    assert_eq!([sessions(&a), sessions(&b)], [1, 1], "one for the pair, whoever began it");
    let body = [1; 4096];
    while a.pass(8, b"ab", &body) == PassedOn::Yes {}
    assert_eq!(a.pass(8, b"ab", &body), PassedOn::Full, "an owner that does not read");
    a.with(|sessions| {
        let stall = &mut sessions.all().next().expect("a session").stall;
        assert!(!stall.is_over(monotonic()), "it is not waited for again soon");
        *stall = Stall::default();
    });
    while take(&b).is_some() {}
    assert_eq!(a.pass(8, b"ab", b"cd"), PassedOn::Yes, "it reads again");
    drop(b);
    a.look();
    assert_eq!(a.pass(8, b"ab", b"cd"), PassedOn::NoOwner);
    let heir = peers(PORT, 8);
    assert_eq!(a.pass(8, b"ab", b"cd"), PassedOn::Yes, "the next owner is found");
    assert!(take(&heir).is_some());
}

#[test]
fn messages_before_the_end_are_read() {
    const PORT: u16 = 65021;
    let b = peers(PORT, 8);
    let a = peers(PORT, 7);
    for n in 0..100u8 {
        assert_eq!(a.pass(8, &[n], b""), PassedOn::Yes);
    }
    drop(a);
    for n in 0..100 {
        assert_eq!(take(&b), Some(vec![n]));
    }
    assert_eq!((take(&b), sessions(&b)), (None, 0));
}

#[test]
fn a_block_that_is_claimed_later_is_reached_by_the_same_session() {
    const PORT: u16 = 65022;
    let (a, b) = (peers(PORT, 7), peers(PORT, 8));
    assert_eq!(a.pass(8, b"", b"x"), PassedOn::Yes);
    assert!(take(&b).is_some());
    assert!(b.offer_block(9).expect("a descriptor").is_some());
    assert!(a.offer_block(9).expect("a descriptor").is_none(), "somebody has it");
    a.look();
    assert_eq!(a.pass(9, b"", b"y"), PassedOn::Yes);
    assert_eq!(take(&b).as_deref(), Some(&b"y"[..]));
    assert_eq!([sessions(&a), sessions(&b)], [1, 1]);
}

/// Who sleeps is woken, and who polls costs its peer no system call.
#[test]
fn sleepers_are_woken() {
    const PORT: u16 = 65023;
    let (a, b) = (peers(PORT, 7), peers(PORT, 8));
    let is_called = |peers: &Peers| {
        let mut wait = libc::pollfd { fd: peers.fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: a list of one, alive across the call.
        unsafe { libc::poll(&mut wait, 1, 0) == 1 }
    };
    a.pass(8, b"", b"first");
    assert!(is_called(&b));
    b.set_polled(true);
    assert!(take(&b).is_some() && take(&b).is_none());
    a.look();
    a.pass(8, b"", b"second");
    assert!(!is_called(&b), "it looks by itself");
    b.prepare_to_sleep();
    assert!(is_called(&b), "it must not sleep now");
    assert!(take(&b).is_some() && take(&b).is_none());
    b.prepare_to_sleep();
    assert!(!is_called(&b));
    a.pass(8, b"", b"third");
    assert!(is_called(&b));
    b.look();
    b.settle();
    assert!(is_called(&b), "who looked has left it to who sleeps");
    assert_eq!(take(&b).as_deref(), Some(&b"third"[..]));
}

#[test]
fn a_reader_that_is_stopped_costs_no_more_than_its_ring() {
    const PORT: u16 = 65024;
    let (a, b) = (peers(PORT, 7), peers(PORT, 8));
    assert_eq!(a.pass(8, b"", b"x"), PassedOn::Yes);
    assert!(take(&b).is_some());
    let mut sent = 0;
    for n in 0..10_000u32 {
        sent += u32::from(a.pass(8, &n.to_ne_bytes(), &[3; 1000]) == PassedOn::Yes);
    }
    assert!(sent > 100 && sent as usize <= RING / 1000, "{sent}");
    for n in 0..sent {
        assert_eq!(take(&b).map(|got| got[..4].to_vec()), Some(n.to_ne_bytes().to_vec()));
    }
    assert_eq!(take(&b), None);
}

/// A peer that writes anything into the rings is found out, and its session ends; others go on.
#[test]
fn garbage_in_the_rings_ends_the_session() {
    const PORT: u16 = 65025;
    let b = peers(PORT, 8);
    for (at, byte) in [(0, 0xff), (0, 9), (4096, 0xff), (4096 + 3, 1)] {
        let liar = connect_as_liar(PORT, |memory| {
            memory.scribble(0, &16u32.to_ne_bytes());
            memory.scribble(at, &[byte]);
        });
        assert_eq!(take(&b), None, "byte {at}");
        assert_eq!(sessions(&b), 0);
        drop(liar);
    }
    let a = peers(PORT, 7);
    assert_eq!(a.pass(8, b"", b"x"), PassedOn::Yes);
    assert!(take(&b).is_some());
}

/// Who says hello without memory, or with memory that it can take away, gets no session.
#[test]
fn a_bad_hello_gets_no_session() {
    const PORT: u16 = 65026;
    let b = peers(PORT, 8);
    let address = abstract_address(&peer_name(PORT, 8));
    let hello = hello::Hello { kinds: &[hello::RINGS], blocks: vec![] }.encode();
    let file = std::fs::File::open("/proc/self/exe").expect("a file");
    let other: [&[RawFd]; 2] = [&[], &[file.as_raw_fd()]];
    for (bytes, descriptors) in [(&hello[..], other[0]), (&hello[..], other[1]), (b"garbage", other[0])] {
        let socket = socket::connect(&address).expect("it listens");
        socket::send(&socket, bytes, descriptors).expect("room");
        assert_eq!((take(&b), sessions(&b)), (None, 0));
    }
    let silent: Vec<Socket> = (0..80).map(|_| socket::connect(&address).expect("it listens")).collect();
    for _ in 0..80 {
        b.look();
    }
    assert_eq!(sessions(&b), 80, "of the same user they may be many");
    drop(silent);
    (0..80).for_each(|_| assert_eq!(take(&b), None));
    assert_eq!(sessions(&b), 0);
}

/// A process that another user's process cannot have as its peer in an XRC domain: the session's credentials
/// say so.
#[test]
fn a_session_of_another_user_carries_frames_alone() {
    const PORT: u16 = 65027;
    let (a, b) = (peers(PORT, 7), peers(PORT, 8));
    assert_eq!(a.pass(8, b"", b"x"), PassedOn::Yes);
    assert!(take(&b).is_some());
    a.look();
    for peers in [&a, &b] {
        peers.with(|sessions| sessions.all().for_each(|session| session.who.uid += 1));
    }
    use crate::links::{DomainName, FileId, Links, MESSAGE};
    let name = DomainName::new(PORT, FileId { device: 5, inode: 6 });
    let mut links = [Links::new(&a), Links::new(&b)];
    for (links, block) in links.iter_mut().zip([7, 8]) {
        links.listen(1, &name, block).expect("the name is free");
    }
    assert!(links[0].link(1, 8).is_ok(), "another session");
    assert_eq!(sessions(&a), 2);
    /* whoever opens a link in the old one, though */
    let old = a.with(|sessions| sessions.all().next().expect("a session").id);
    let open = [&[1, 0, 0, 0, 9, 0, 0, 0][..], format!("starverbs/{PORT}/xrc/0/5/6/").as_bytes()].concat();
    assert!(a.send(old, true, &[&open], true));
    assert!(a.send(old, true, &[&[2, 0, 0, 0, 9, 0, 0, 0], b"data"], true));
    let mut room = [0; MESSAGE];
    assert_eq!(links[1].next(&mut room), None);
    assert_eq!(a.pass(8, b"", b"y"), PassedOn::Yes);
    assert!(take(&b).is_some());
}

#[test]
fn a_session_that_a_child_has_too_ends_here() {
    const PORT: u16 = 65028;
    let (a, b) = (peers(PORT, 7), peers(PORT, 8));
    assert_eq!(a.pass(8, b"", b"x"), PassedOn::Yes);
    assert!(take(&b).is_some());
    a.look();
    let in_child = a.with(|sessions| {
        let session = sessions.all().next().expect("a session");
        let socket = session.socket.as_ref().expect("it is open");
        // SAFETY: no memory is involved; the copy is known to nobody else.
        unsafe { OwnedFd::from_raw_fd(libc::dup(socket.as_raw_fd())) }
    });
    drop(b);
    assert_eq!((take(&a), sessions(&a)), (None, 0));
    a.prepare_to_sleep();
    assert!(!sockopt::wait(&[a.fd()], libc::POLLIN, Duration::from_millis(1)), "nothing is reported of it");
    drop(in_child);
}

/// The next channel that another process has made, and its session.
fn take_channel(peers: &Peers) -> Option<(SessionId, Box<Answering>)> {
    peers.look();
    match peers.next_news()? {
        ChannelNews::Opened(session, channel, _) => Some((session, channel)),
        ChannelNews::Doorbell(..) | ChannelNews::Woken(_) => panic!("nobody awaits a doorbell"),
        ChannelNews::Ended(_) | ChannelNews::Broken => panic!("a session has ended"),
    }
}

/// A record with data, from one end to the other.
fn carry(writer: &mut SlotWriter, reader: &mut SlotReader, byte: u8) {
    let mut data = [byte; 100];
    let room = writer.room(100).expect("an honest peer").expect("room");
    // SAFETY: the room is for that many bytes.
    unsafe { room.to.copy_from(data.as_ptr(), data.len()) };
    writer.push(&[room.at; RECORD_WORDS], room);
    let record = reader.peek().expect("it is there");
    let from = reader.data(record[0], 100).expect("it is inside");
    data.fill(0);
    // SAFETY: that many bytes are there.
    unsafe { from.copy_to(data.as_mut_ptr(), data.len()) };
    assert_eq!((record, data), ([room.at; RECORD_WORDS], [byte; 100]));
    reader.pop();
    reader.give_back();
    assert!(!reader.has_next() && writer.look().is_ok() && writer.is_idle());
}

/// A channel to the process that has a block.
fn open_channel(peers: &Peers, block: u32) -> Option<(SessionId, Asking)> {
    let session = peers.session_to(block)?;
    Some((session, peers.open_channel(session)?))
}

#[test]
fn who_makes_too_many_channels_is_told_at_once() {
    const PORT: u16 = 65099;
    let (a, b) = (peers(PORT, 7), peers(PORT, 8));
    let channels: Vec<_> = (0..5).map(|_| open_channel(&a, 8).expect("a channel")).collect();
    b.look();
    a.look();
    assert!(matches!(a.next_news(), Some(ChannelNews::Ended(id)) if id == channels[0].0));
    let news: Vec<_> = std::iter::from_fn(|| b.next_news()).collect();
    assert_eq!(news.iter().filter(|news| matches!(news, ChannelNews::Broken)).count(), 1, "and counted once");
}

#[test]
fn a_doorbell_is_rung_in_another_process() {
    const PORT: u16 = 65098;
    let (a, b) = (peers(PORT, 7), peers(PORT, 8));
    let (session, _asking) = open_channel(&a, 8).expect("a channel");
    let (back, _answering) = take_channel(&b).expect("it has come");
    assert!(!a.hand_doorbell(session), "it has none");
    let doorbell = a.doorbell().expect("memory");
    assert!(a.hand_doorbell(session) && a.hand_doorbell(session), "once");
    b.look();
    let Some(ChannelNews::Doorbell(from, theirs)) = b.next_news() else { panic!("it has not come") };
    assert_eq!(from, back);
    assert!(b.doorbell_of(back).is_some() && b.next_news().is_none());
    assert!(!doorbell.take());
    theirs.ring();
    assert!(doorbell.take() && !doorbell.take());
    /* a wake-up is heard, too */
    b.wake(back);
    a.look();
    assert!(matches!(a.next_news(), Some(ChannelNews::Woken(id)) if id == session));
}

#[test]
fn records_go_both_ways_through_a_channel() {
    const PORT: u16 = 65029;
    let (a, b) = (peers(PORT, 7), peers(PORT, 8));
    assert!(open_channel(&a, 9).is_none(), "nobody has that block");
    let (session, mut asking) = open_channel(&a, 8).expect("a channel");
    let (back, mut answering) = take_channel(&b).expect("it has come");
    for byte in 1..=3 {
        carry(&mut asking.requests, &mut answering.requests, byte);
        carry(&mut answering.answers, &mut asking.answers, byte + 10);
    }
    a.look();
    let (again, mut other) = open_channel(&b, 7).expect("one the other way");
    assert_eq!((again, [sessions(&a), sessions(&b)]), (back, [1, 1]), "in the same session");
    let (seen, mut other_end) = take_channel(&a).expect("it has come");
    assert_eq!(seen, session);
    carry(&mut other.requests, &mut other_end.requests, 5);
    carry(&mut other_end.answers, &mut other.answers, 6);
    assert!(!asking.answers.has_next() && !answering.requests.has_next(), "channels are apart");
    assert!(take_channel(&a).is_none() && take_channel(&b).is_none());
}

#[test]
fn the_other_end_of_a_channel_is_woken() {
    const PORT: u16 = 65030;
    let (a, b) = (peers(PORT, 7), peers(PORT, 8));
    let is_called = |peers: &Peers| sockopt::wait(&[peers.fd()], libc::POLLIN, Duration::ZERO);
    let (session, _asking) = open_channel(&a, 8).expect("a channel");
    assert!(is_called(&b), "a new channel is seen");
    let (back, _answering) = take_channel(&b).expect("it has come");
    a.look();
    for (peers, other, session) in [(&a, &b, session), (&b, &a, back)] {
        while take(other).is_some() {}
        other.prepare_to_sleep();
        assert!(!is_called(other));
        peers.wake(session);
        assert!(is_called(other));
        other.look();
    }
}

#[test]
fn what_was_asked_before_the_end_is_read() {
    const PORT: u16 = 65031;
    let b = peers(PORT, 8);
    let a = peers(PORT, 7);
    let (_, mut asking) = open_channel(&a, 8).expect("a channel");
    for n in 0..3 {
        let room = asking.requests.room(0).expect("an honest peer").expect("room");
        asking.requests.push(&[n; RECORD_WORDS], room);
    }
    drop((asking, a));
    b.look();
    let Some(ChannelNews::Opened(session, mut channel, _)) = b.next_news() else { panic!("a channel") };
    while take(&b).is_some() {}
    assert!(matches!(b.next_news(), Some(ChannelNews::Ended(id)) if id == session));
    for n in 0..3 {
        assert_eq!(channel.requests.peek(), Some([n; RECORD_WORDS]));
        channel.requests.pop();
    }
    assert!(!channel.requests.has_next() && b.next_news().is_none(), "the end is said once");
    b.wake(session);
    assert!(open_channel(&b, 7).is_none());
}

/// The end that made a channel is told of the session's end, too; who has none is not.
#[test]
fn who_has_channels_is_told_of_the_end() {
    const PORT: u16 = 65032;
    let (a, b, c) = (peers(PORT, 7), peers(PORT, 8), peers(PORT, 9));
    let (session, _asking) = open_channel(&a, 8).expect("a channel");
    assert_eq!(c.pass(8, b"", b"x"), PassedOn::Yes);
    b.look();
    [&a, &c].into_iter().for_each(|peers| assert!(!peers.look()));
    drop(b);
    [&a, &c].into_iter().for_each(|peers| assert!(!peers.look()));
    assert!(matches!(a.next_news(), Some(ChannelNews::Ended(id)) if id == session));
    assert!(a.next_news().is_none() && c.next_news().is_none());
}

/// Only what the kernel says of the other ends counts, and a process that cannot be seen is no known one.
#[test]
fn sessions_are_of_one_process_where_the_kernel_says_so() {
    const PORT: u16 = 65033;
    let (a, b, c) = (peers(PORT, 7), peers(PORT, 8), peers(PORT, 9));
    let (one, _) = open_channel(&a, 8).expect("a channel");
    let (other, _) = open_channel(&a, 9).expect("a channel");
    assert!(one != other && a.are_of_one_process(one, one) && a.are_of_one_process(one, other));
    let set = |session, pid| {
        a.with(|sessions| sessions.get(session).expect("it is open").who.pid = pid);
    };
    set(other, 1);
    assert!(!a.are_of_one_process(one, other) && !a.are_of_one_process(other, one));
    set(one, 0);
    set(other, 0);
    assert!(!a.are_of_one_process(one, other) && !a.are_of_one_process(one, one));
    drop((b, c));
    (0..3).for_each(|_| assert_eq!(take(&a), None));
    assert_eq!(sessions(&a), 0);
    assert!(!a.are_of_one_process(one, one), "both are gone");
}

/// What is no channel is passed over, and the session goes on; more channels than a process has reason to
/// make are its end.
#[test]
fn what_is_no_channel_is_ignored() {
    const PORT: u16 = 65034;
    let b = peers(PORT, 8);
    let socket = connect_as_liar(PORT, |_| ());
    let hello = hello::Hello { kinds: &[hello::CHANNEL], blocks: vec![] }.encode();
    let offer = |descriptors: &[RawFd]| {
        socket::send(&socket, &hello, descriptors).expect("room");
        take_channel(&b).is_some()
    };
    let (_asking, right) = Asking::create().expect("memory");
    let len = right.metadata().expect("its size").len() as usize;
    let (_memory, short) = SharedMapping::create(len - 4096).expect("memory");
    let (_memory, long) = SharedMapping::create(len + 4096).expect("memory");
    let (_map, unsealed) = sealed::create(c"starverbs", len, SealFlag::F_SEAL_GROW).expect("memory");
    let other = std::fs::File::open("/proc/self/exe").expect("a file");
    assert!(!offer(&[]));
    for file in [&short, &long, &unsealed, &other] {
        assert!(!offer(&[file.as_raw_fd()]));
    }
    assert_eq!(sessions(&b), 1);
    assert!((0..4).all(|_| offer(&[right.as_raw_fd()])));
    socket::send(&socket, &hello, &[right.as_raw_fd()]).expect("room");
    b.look();
    assert!(matches!(b.next_news(), Some(ChannelNews::Broken)), "for its card to count");
    assert!(matches!(b.next_news(), Some(ChannelNews::Ended(_))));
    (0..3).for_each(|_| assert_eq!(take(&b), None));
    assert_eq!(sessions(&b), 0);
}

/// A session whose first end writes what it likes.
fn connect_as_liar(port: u16, write: impl FnOnce(&RingMemory)) -> Socket {
    let (memory, file) = RingMemory::create().expect("memory");
    write(&memory);
    let socket = socket::connect(&abstract_address(&peer_name(port, 8))).expect("it listens");
    let hello = hello::Hello { kinds: &[hello::RINGS], blocks: vec![] }.encode();
    socket::send(&socket, &hello, &[file.as_raw_fd()]).expect("room");
    socket
}
