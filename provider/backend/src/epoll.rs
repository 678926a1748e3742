//! An epoll instance: which of many sockets have something, in one call.

use std::os::fd::{AsFd, AsRawFd, RawFd};

use nix::errno::Errno;
use nix::sys::epoll::{self, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use crate::BackendError;
use crate::descriptor::Listed;
use crate::error::os_error;

/// Events that are looked at in one turn.
const EVENTS: usize = 16;

/// Sockets that are looked at together, for what can be read. A socket is taken out before it is closed: the
/// kernel goes on reporting one that a child of this process has, too.
pub(crate) struct Epoll {
    /* first: the list must not have the number when it is another's */
    _listed: Listed,
    epoll: epoll::Epoll,
}

fn error(error: Errno) -> BackendError {
    os_error("an epoll descriptor", error)
}

impl Epoll {
    /// Of no sockets.
    ///
    /// # Errors
    /// No descriptors are left.
    pub(crate) fn new() -> Result<Epoll, BackendError> {
        let epoll = epoll::Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(error)?;
        Ok(Epoll { _listed: Listed::new(epoll.0.as_raw_fd()), epoll })
    }

    /// What to poll(2) for POLLIN.
    pub(crate) fn fd(&self) -> RawFd {
        self.epoll.0.as_raw_fd()
    }

    /// Looks at a socket from now on; `what` comes when it has something.
    ///
    /// # Errors
    /// The kernel has no memory, or the user too many watches.
    pub(crate) fn add(&self, socket: impl AsFd, what: u64) -> Result<(), BackendError> {
        self.epoll.add(socket, EpollEvent::new(EpollFlags::EPOLLIN, what)).map_err(error)
    }

    /// Looks at it no longer.
    pub(crate) fn remove(&self, socket: impl AsFd) {
        let _was_not_there = self.epoll.delete(socket);
    }

    /// What came: some of it, where it is much.
    pub(crate) fn look(&self) -> impl Iterator<Item = u64> + use<> {
        let mut ready = [EpollEvent::empty(); EVENTS];
        let count = self.epoll.wait(&mut ready, EpollTimeout::ZERO).unwrap_or(0);
        ready.into_iter().take(count).map(|event| event.data())
    }
}
