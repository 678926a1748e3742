//! News of the host's interfaces and addresses: a netlink socket of the kernel's (rtnetlink(7)).
//!
//! Owns that socket. What the news say is not read: whoever is notified looks at the interfaces anew.

use std::os::fd::{AsRawFd, RawFd};

use crate::BackendError;
use crate::descriptor::Socket;
use crate::error::os;
use crate::sockopt::errno;

/// RTMGRP_LINK, RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR
const GROUPS: u32 = 0x1 | 0x10 | 0x100;

/// Watches for changes.
#[derive(Debug)]
pub struct Watch(Socket);

impl Watch {
    /// Listens from now on.
    ///
    /// # Errors
    /// No descriptor, or a kernel or sandbox without netlink.
    pub fn open() -> Result<Watch, BackendError> {
        const WHAT: &str = "a netlink socket";
        let socket = netlink(WHAT)?;
        // SAFETY: a sockaddr_nl of zeroes is valid: a C struct of integers.
        let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
        address.nl_family = libc::AF_NETLINK as libc::sa_family_t;
        address.nl_groups = GROUPS;
        // SAFETY: the pointer and length describe `address`, alive across the call.
        let rc = unsafe {
            let len = std::mem::size_of_val(&address) as libc::socklen_t;
            libc::bind(socket.as_raw_fd(), std::ptr::from_ref(&address).cast(), len)
        };
        if rc < 0 { Err(os(WHAT)) } else { Ok(Watch(socket)) }
    }

    /// What to `poll(2)` for POLLIN.
    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Takes all news there are; gives whether there were some, or some were lost.
    pub fn take_news(&self) -> bool {
        let mut any = false;
        loop {
            let mut byte = 0u8;
            // SAFETY: one writable byte; the rest of the message is cut off.
            let got = unsafe { libc::recv(self.fd(), (&raw mut byte).cast(), 1, libc::MSG_DONTWAIT) };
            if got < 0 && !matches!(errno(), libc::ENOBUFS | libc::EINTR) {
                return any;
            }
            any = true;
        }
    }
}

fn netlink(what: &'static str) -> Result<Socket, BackendError> {
    use std::os::fd::{FromRawFd, OwnedFd};
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: socket() takes no pointers.
    let fd = unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE) };
    if fd < 0 {
        return Err(os(what));
    }
    // SAFETY: `fd` was just opened and nobody else knows it.
    Ok(Socket::new(unsafe { OwnedFd::from_raw_fd(fd) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_news_is_none() {
        let watch = Watch::open().expect("a netlink socket");
        while watch.take_news() {}
        assert!(!watch.take_news());
    }
}
