//! News of the host's interfaces and addresses: a netlink socket of the kernel's (rtnetlink(7)).
//!
//! Owns that socket. What the news say is not read: whoever is notified looks at the interfaces anew.

use std::os::fd::{AsRawFd, RawFd};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, socket};

use crate::BackendError;
use crate::descriptor::Socket;
use crate::error::os_error;
use crate::sockopt::errno;

/// RTMGRP_LINK, RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR
const GROUPS: u32 = 0x1 | 0x10 | 0x100;

/// Watches for changes.
#[derive(Debug)]
pub struct InterfaceWatch(Socket);

impl InterfaceWatch {
    /// Listens from now on.
    ///
    /// # Errors
    /// No descriptor, or a kernel or sandbox without netlink.
    pub fn open() -> Result<InterfaceWatch, BackendError> {
        const WHAT: &str = "a netlink socket";
        let listens = || {
            let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
            let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute)?;
            bind(socket.as_raw_fd(), &NetlinkAddr::new(0, GROUPS))?;
            Ok(InterfaceWatch(Socket::new(socket)))
        };
        listens().map_err(|error: Errno| os_error(WHAT, error))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_news_is_none() {
        let watch = InterfaceWatch::open().expect("a netlink socket");
        while watch.take_news() {}
        assert!(!watch.take_news());
    }
}
