//! A program of its own: without descriptors, nothing of an XRC domain's connections goes round in circles.

use starverbs_backend::Peers;
use starverbs_backend::links::{DomainName, FileId, Incoming, Links, MESSAGE};

#[test]
fn who_has_no_descriptors_left_accepts_later() {
    // SAFETY: no memory is involved. A turn that does not end ends the program.
    unsafe { libc::alarm(60) };
    let name = DomainName::new(65016, FileId { device: 3, inode: 4 });
    let mut both = [7, 8].map(|block| {
        let mut links = Links::new(&Peers::new(65016).expect("descriptors"));
        links.listen(block, &name, block).expect("the name is free");
        links
    });
    let [a, b] = &mut both;
    let link = a.link(7, 8).expect("it listens");
    assert!(a.send(link, b"one", b"", true));
    let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: room for the limits, which are then read.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut before), 0);
        let none = libc::rlimit { rlim_cur: 0, ..before };
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &none), 0);
    }
    let mut room = [0; MESSAGE];
    let without = b.next(&mut room);
    // SAFETY: as above.
    unsafe { assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &before), 0) };
    assert_eq!(without, None);
    assert!(matches!(b.next(&mut room), Some(Incoming::Message(_, 8, 3))));
}
