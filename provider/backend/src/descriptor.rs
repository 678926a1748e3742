//! The card's sockets, and how a forked child lets go of them.
//!
//! A name or port exists as long as any process holds its socket. A child of fork(2) holds what its parent
//! holds until it ends or calls exec(2): when the parent is killed, its peers would not notice, and its
//! frames would wait for nobody. Owns the list of what is open; it must not know what the sockets are for.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

/// Most sockets that are listed; a child keeps those beyond.
const LISTED: usize = 8192;
/// A free place in the list.
const NONE: RawFd = -1;

/// Descriptors of this process's sockets: a signal handler may read it, and so may a child of a process whose
/// other threads stood anywhere.
static OPEN: [AtomicI32; LISTED] = [const { AtomicI32::new(NONE) }; LISTED];

/// A descriptor that no forked child keeps, as long as this lives: no longer than the descriptor.
#[derive(Debug)]
pub struct Listed(RawFd);

impl Listed {
    /// Lists a descriptor.
    pub fn new(fd: RawFd) -> Self {
        swap(NONE, fd);
        Listed(fd)
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        swap(self.0, NONE);
    }
}

/// A socket that no forked child keeps.
#[derive(Debug)]
pub(crate) struct Socket {
    /* first: the list must not have the number when it is another's */
    _listed: Listed,
    fd: OwnedFd,
}

impl Socket {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Socket { _listed: Listed::new(fd.as_raw_fd()), fd }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// Replaces one entry of the list.
fn swap(from: RawFd, to: RawFd) {
    let replaced = |place: &AtomicI32| {
        place.load(Ordering::Relaxed) == from
            && place.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    };
    let _listed = OPEN.iter().any(replaced);
}

/// In a child of fork(2), before anything else: puts a descriptor that stands for nothing in the place of
/// each socket, so that the parent alone holds those. The numbers stay taken: their owners, which the child
/// has copies of, close them. Async-signal-safe. Where no descriptor is left, the child keeps the sockets.
pub fn let_go() {
    // SAFETY: no memory is involved.
    let nothing = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if nothing < 0 {
        return;
    }
    for place in &OPEN {
        let fd = place.load(Ordering::Acquire);
        if fd != NONE {
            // SAFETY: the socket's number is this library's, and whoever holds it in this process must not
            // use it.
            unsafe { libc::dup3(nothing, fd, libc::O_CLOEXEC) };
        }
    }
    // SAFETY: opened above, known to nobody else.
    unsafe { libc::close(nothing) };
}
