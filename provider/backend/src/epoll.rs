//! An epoll instance: which of many sockets have something, in one call.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use crate::BackendError;
use crate::descriptor::Socket;
use crate::error::os;

/// What is registered for a socket, and reported when that has something.
pub(crate) type Event = libc::epoll_event;

/// Sockets that are looked at together. A socket is taken out before it is closed: the kernel goes on
/// reporting one that a child of this process has, too.
pub(crate) struct Epoll(Socket);

impl Epoll {
    /// Of no sockets.
    ///
    /// # Errors
    /// No descriptors are left.
    pub(crate) fn new() -> Result<Epoll, BackendError> {
        // SAFETY: epoll_create1() takes no pointers.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(os("an epoll descriptor"));
        }
        // SAFETY: just opened, known to nobody else.
        Ok(Epoll(Socket::new(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// What to poll(2) for POLLIN.
    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Looks at a socket from now on, for these events; `what` comes with them.
    ///
    /// # Errors
    /// The kernel has no memory, or the user too many watches.
    pub(crate) fn add(&self, fd: RawFd, what: u64, events: i32) -> Result<(), BackendError> {
        let done = self.control(libc::EPOLL_CTL_ADD, fd, what, events);
        if done { Ok(()) } else { Err(os("an epoll descriptor")) }
    }

    /// Looks at it no longer.
    pub(crate) fn remove(&self, fd: RawFd) {
        self.control(libc::EPOLL_CTL_DEL, fd, 0, 0);
    }

    fn control(&self, op: i32, fd: RawFd, what: u64, events: i32) -> bool {
        let mut event = Event { events: events as u32, u64: what };
        // SAFETY: the event lives across the call.
        unsafe { libc::epoll_ctl(self.0.as_raw_fd(), op, fd, &mut event) == 0 }
    }

    /// Replaces `ready` by what came, as far as it has room.
    pub(crate) fn look(&self, ready: &mut Vec<Event>) {
        ready.clear();
        // SAFETY: room for that many events, which the kernel writes before it says how many.
        unsafe {
            let (room, most) = (ready.as_mut_ptr(), ready.capacity().min(i32::MAX as usize));
            let got = libc::epoll_wait(self.0.as_raw_fd(), room, most as i32, 0);
            ready.set_len(usize::try_from(got).unwrap_or(0));
        }
    }
}
