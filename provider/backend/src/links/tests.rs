//! Two ends of connections, in one process.

use super::*;

const FILE: FileId = FileId { device: 1, inode: 2 };

fn pair(port: u16) -> (Links, Links) {
    let mut both = [7, 8].map(|block| {
        let mut links = Links::new(&Peers::new(port).expect("descriptors"));
        links.listen(block, &DomainName::new(port, FILE), block).expect("the name is free");
        links
    });
    let [a, b] = &mut both;
    assert_eq!(a.link(7, 9), Err(LinkError::Gone));
    assert_eq!(a.link(7, 7), Err(LinkError::Gone), "itself");
    assert_eq!(b.link(7, 7), Err(LinkError::Gone), "no such domain here");
    let [a, b] = both;
    (a, b)
}

#[test]
fn messages_arrive_in_order_and_so_does_the_end() {
    let (mut a, mut b) = pair(65011);
    let link = a.link(7, 8).expect("it listens");
    assert_eq!(a.link(7, 8), Ok(link), "the same one");
    assert!(a.send(link, b"one", b"", false) && a.send(link, b"t", b"wo", true));
    let mut room = [0; MESSAGE];
    let Some(Incoming::Message(back, 8, 3)) = b.next(&mut room) else { panic!("nothing came") };
    assert!(b.send(back, b"three", b"", true));
    assert_eq!(a.next(&mut room), Some(Incoming::Message(link, 7, 5)));
    drop(a);
    assert_eq!(b.next(&mut room), Some(Incoming::Message(back, 8, 3)));
    assert_eq!(&room[..3], b"two");
    assert_eq!(b.next(&mut room), Some(Incoming::Ended(back)));
    assert_eq!(b.next(&mut room), None);
    assert!(!b.send(back, b"", b"", true));
}

#[test]
fn who_does_not_read_is_not_waited_for_and_misses_nothing_that_is_due() {
    let (mut a, mut b) = pair(65012);
    let link = a.link(7, 8).expect("it listens");
    let data = [5; 4096];
    let mut sent = 0;
    while a.send(link, b"x", &data, false) {
        sent += 1;
    }
    for _ in 0..3 {
        assert!(a.send(link, b"due", b"", true));
    }
    assert!(!a.send(link, b"x", &data, false), "behind what is due");
    let mut room = [0; MESSAGE];
    let mut got = Vec::new();
    for _ in 0..2 {
        while let Some(Incoming::Message(_, _, len)) = b.next(&mut room) {
            got.push(len);
        }
        assert_eq!(a.next(&mut room), None);
    }
    assert_eq!(got, [vec![4097; sent], vec![3; 3]].concat());
}

/// What is kept for an end that takes nothing is bounded, whatever the size of the messages; then its link is
/// closed.
#[test]
fn what_is_due_costs_no_more_than_its_bytes() {
    for (port, len, least) in [(65016, 4096, 200), (65017, 0, 10_000)] {
        let (mut a, mut b) = pair(port);
        let link = a.link(7, 8).expect("it listens");
        let head = [5; 60];
        while a.send(link, &head, &[5; 4096], false) {}
        let mut kept = 0;
        while a.send(link, &head, &[5; 4096][..len], true) {
            kept += 1;
        }
        assert!(kept >= least && kept * (head.len() + len) <= 1 << 20, "{kept} messages of {len} bytes");
        let mut room = [0; MESSAGE];
        while let Some(Incoming::Message(..)) = b.next(&mut room) {}
        assert!(!b.any() || matches!(a.next(&mut room), Some(Incoming::Ended(_))));
    }
}

#[test]
fn a_domain_that_ends_is_seen_by_all() {
    let lock = DomainLock::acquire(DomainName::new(65013, FILE)).expect("nobody opens it");
    assert!(!lock.is_open());
    let (mut a, mut b) = pair(65013);
    assert!(lock.is_open());
    let link = a.link(7, 8).expect("it listens");
    b.end(8);
    let mut room = [0; MESSAGE];
    assert_eq!(a.next(&mut room), Some(Incoming::Ended(link)));
    assert_eq!(a.link(7, 8), Err(LinkError::Gone));
    a.end(7);
    assert!(!lock.is_open() && !a.any());
}

/// Only a privileged process can change its user; others have nothing to look at.
#[test]
fn who_changes_its_user_stays_in_the_domain() {
    let become_user = |user: libc::uid_t| {
        // SAFETY: no memory is involved. The kernel's call, unlike the library's, concerns the calling thread
        // alone.
        unsafe { libc::syscall(libc::SYS_setresuid, -1, user, -1) == 0 }
    };
    let (mut a, mut b) = pair(65014);
    // SAFETY: no memory is involved.
    if unsafe { libc::geteuid() } != 0 || !become_user(65534) {
        return;
    }
    let refused = b.link(8, 7).is_ok();
    assert!(become_user(0), "the real user is as it was");
    let link = a.link(7, 8).expect("it listens");
    assert!(a.send(link, b"one", b"", true));
    become_user(65534);
    let mut room = [0; MESSAGE];
    let next = b.next(&mut room);
    become_user(0);
    assert!(matches!(next, Some(Incoming::Message(_, 8, 3))), "{next:?}: it serves those whom it served");
    assert!(refused, "the name is the one that it had, though the other end will not have it");
    let mut room = [0; MESSAGE];
    assert_eq!(a.next(&mut room), None, "no message on another user's connection");
}
