//! Sessions between processes that are killed, stopped, or become another program. A file of its own: its
//! children are forked.

use std::time::Duration;

use starverbs_backend::Peers;
use starverbs_backend::links::{DomainName, FileId, Incoming, Links, MESSAGE};

/// Blocks of the parent and of its child.
const PARENT: u32 = 7;
const CHILD: u32 = 8;
/// Long enough for any machine; nothing is measured.
const LIMIT: u32 = 60;

fn links(port: u16, block: u32) -> Links {
    let mut links = Links::new(&Peers::new(port).expect("descriptors"));
    links
        .listen(block, &DomainName::new(port, FileId { device: 3, inode: 4 }), block)
        .expect("the name is free");
    links
}

/// What came next; waits for it.
fn next(links: &mut Links, room: &mut [u8; MESSAGE]) -> Incoming {
    loop {
        if let Some(incoming) = links.next(room) {
            return incoming;
        }
        let mut wait = libc::pollfd { fd: links.fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: a list of one, alive across the call.
        unsafe { libc::poll(&raw mut wait, 1, -1) };
    }
}

/// A child that does `what`, and ends. One of both that waits for ever ends as well.
fn child(what: impl FnOnce()) -> libc::pid_t {
    // SAFETY: this thread alone is used in the child, and no other held a lock that it needs.
    unsafe {
        libc::alarm(LIMIT);
        let child = libc::fork();
        if child == 0 {
            libc::alarm(LIMIT);
            what();
            libc::_exit(0);
        }
        assert!(child > 0);
        child
    }
}

fn signal(child: libc::pid_t, signal: i32) {
    // SAFETY: the child of this test.
    unsafe { libc::kill(child, signal) };
}

fn reap(child: libc::pid_t) {
    // SAFETY: the child of this test; nobody asks for its status.
    unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
}

/// Until the parent listens.
fn link(links: &mut Links, domain: u32, to: u32) -> starverbs_core::relay::LinkId {
    loop {
        match links.link(domain, to) {
            Ok(link) => return link,
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// A process that is killed while it sends: what came is whole and in order, and the end is seen.
#[test]
fn a_peer_that_is_killed_leaves_whole_messages() {
    const PORT: u16 = 65030;
    let child = child(|| {
        let mut links = links(PORT, CHILD);
        let to = link(&mut links, CHILD, PARENT);
        for n in 0u32.. {
            while !links.send(to, &n.to_ne_bytes(), &[n as u8; 4000], false) {
                std::thread::yield_now();
            }
        }
    });
    let mut here = links(PORT, PARENT);
    let mut room = [0; MESSAGE];
    let mut count = 0u32;
    while let Incoming::Message(_, PARENT, len) = next(&mut here, &mut room) {
        assert_eq!((len, &room[..4]), (4004, &count.to_ne_bytes()[..]));
        assert!(room[4..len].iter().all(|byte| *byte == count as u8), "message {count}");
        count += 1;
        if count == 1000 {
            signal(child, libc::SIGKILL);
        }
    }
    assert!(count >= 1000);
    reap(child);
}

/// A process that becomes another program has no session any more, though it lives.
#[test]
fn a_peer_that_execs_is_gone() {
    const PORT: u16 = 65031;
    let child = child(|| {
        let mut links = links(PORT, CHILD);
        let to = link(&mut links, CHILD, PARENT);
        assert!(links.send(to, b"last", b"", true));
        // SAFETY: constant strings that end in NUL, and a list that ends.
        unsafe {
            libc::execlp(
                c"sleep".as_ptr(),
                c"sleep".as_ptr(),
                c"60".as_ptr(),
                std::ptr::null::<libc::c_char>(),
            )
        };
    });
    let mut here = links(PORT, PARENT);
    let mut room = [0; MESSAGE];
    assert!(matches!(next(&mut here, &mut room), Incoming::Message(_, PARENT, 4)));
    assert!(matches!(next(&mut here, &mut room), Incoming::Ended(_)));
    // SAFETY: the child of this test.
    assert_eq!(unsafe { libc::kill(child, 0) }, 0, "it lives");
    signal(child, libc::SIGKILL);
    reap(child);
}

/// A process that is stopped while many messages come is not waited for, and gets all that were sent.
#[test]
fn a_peer_that_is_stopped_misses_nothing_that_was_sent() {
    const PORT: u16 = 65032;
    let child = child(|| {
        let mut links = links(PORT, CHILD);
        let mut room = [0; MESSAGE];
        let mut sum = 0u64;
        loop {
            match next(&mut links, &mut room) {
                Incoming::Message(_, _, 4) => {
                    sum += u64::from(u32::from_ne_bytes([room[0], room[1], room[2], room[3]]));
                }
                Incoming::Message(link, _, 0) => assert!(links.send(link, &sum.to_ne_bytes(), b"", true)),
                _ => return,
            }
        }
    });
    let mut here = links(PORT, PARENT);
    let to = link(&mut here, PARENT, CHILD);
    signal(child, libc::SIGSTOP);
    let (mut sum, mut last) = (0u64, 0);
    for n in 0..100_000u32 {
        if here.send(to, &n.to_ne_bytes(), b"", n < 10_000) {
            (sum, last) = (sum + u64::from(n), n);
        }
    }
    assert!(last >= 9_999);
    assert!(here.send(to, b"", b"", true));
    signal(child, libc::SIGCONT);
    let mut room = [0; MESSAGE];
    assert_eq!(next(&mut here, &mut room), Incoming::Message(to, PARENT, 8));
    assert_eq!(room[..8], sum.to_ne_bytes());
    signal(child, libc::SIGKILL);
    assert_eq!(next(&mut here, &mut room), Incoming::Ended(to));
    reap(child);
}
