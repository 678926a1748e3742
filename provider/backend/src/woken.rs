//! What has woken who slept.

use std::os::fd::RawFd;

/// A list that ppoll(2) has filled; an empty one of who does not know where something has come.
#[derive(Clone, Copy, Debug)]
pub struct Woken<'a>(pub &'a [libc::pollfd]);

impl Woken<'_> {
    /// Whether this descriptor has.
    pub fn has(&self, fd: RawFd) -> bool {
        self.0.iter().any(|woken| woken.fd == fd && woken.revents != 0)
    }

    /// Whether any has: who looks after others has nothing to look for.
    pub fn any(&self) -> bool {
        self.0.iter().any(|woken| woken.revents != 0)
    }
}
