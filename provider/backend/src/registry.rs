//! Who owns which QPNs of this host: a process owns a block of them by holding an abstract unix socket.
//!
//! The kernel keeps the registry. A name exists as long as a process holds it, however that process ends, and
//! as far as the UDP port does: in one network namespace. Owns the names and the claiming; it must not read
//! messages.

use std::os::fd::{AsRawFd, RawFd};

use nix::errno::Errno;
use nix::sys::socket::{self, UnixAddr};
use starverbs_core::{QPN_BLOCK_SHIFT, Qpn};

use crate::BackendError;
use crate::descriptor::Socket;
use crate::error::os_error;
use crate::sockopt;

/// Blocks that can be claimed: 1 to this. Block 0 holds the reserved QPNs 0 and 1, block 4095 the multicast
/// QPN.
pub(crate) const LAST_BLOCK: u32 = 4094;

/// UDP port of RoCEv2 (annex A17.3.2).
const ROCE_PORT: u16 = 4791;

/// Room that a block's socket asks for: some runs of joined frames.
const BUFFER: usize = 4 << 20;

/// Name of the abstract socket (without its leading NUL) that stands for block `block` of the wire on UDP
/// `port`.
pub fn socket_name(port: u16, block: u32) -> String {
    if port == ROCE_PORT { format!("starverbs/qpn/{block}") } else { format!("starverbs/{port}/qpn/{block}") }
}

/// Name under which the process that has block `block` takes sessions with others ([`crate::Peers`]).
pub(crate) fn peer_name(port: u16, block: u32) -> String {
    format!("starverbs/{port}/peer/{block}")
}

/// Blocks that processes of this host have, in no order (`/proc/net/unix` shows those of the network
/// namespace).
pub(crate) fn blocks_of_host(port: u16) -> Vec<u32> {
    let text = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let name = socket_name(port, 0);
    let prefix = format!("@{}", &name[..name.len() - 1]);
    let names = text.lines().filter_map(|line| line.rsplit(' ').next()?.strip_prefix(&prefix));
    names.filter_map(|number| number.parse().ok()).collect()
}

/// The address of an abstract name, which is cut where an address ends.
pub(crate) fn abstract_address(name: &str) -> UnixAddr {
    const ROOM: usize = 107;
    let name = &name.as_bytes()[..name.len().min(ROOM)];
    UnixAddr::new_abstract(name).expect("a name that has room in an address")
}

/// A block of QPNs, this process's as long as the value lives.
#[derive(Debug)]
pub struct QpnBlock {
    number: u32,
    socket: Socket,
}

impl QpnBlock {
    /// Claims a free block, the search beginning anywhere.
    ///
    /// # Errors
    /// No socket can be made, or every block is taken.
    pub fn claim(port: u16) -> Result<QpnBlock, BackendError> {
        let start = (sockopt::random() % u64::from(LAST_BLOCK)) as u32;
        for step in 0..LAST_BLOCK {
            if let Some(block) = QpnBlock::claim_one(port, 1 + (start + step) % LAST_BLOCK)? {
                return Ok(block);
            }
        }
        Err(BackendError::NoBlock(LAST_BLOCK))
    }

    /// Claims block `number`; `None` if somebody has it.
    pub(crate) fn claim_one(port: u16, number: u32) -> Result<Option<QpnBlock>, BackendError> {
        const WHAT: &str = "the unix socket of a QPN block";
        let socket = sockopt::host_socket(WHAT)?;
        match socket::bind(socket.as_raw_fd(), &abstract_address(&socket_name(port, number))) {
            Ok(()) => {}
            Err(Errno::EADDRINUSE) => return Ok(None),
            Err(error) => return Err(os_error(WHAT, error)),
        }
        sockopt::receive_buffer(&socket, BUFFER);
        Ok(Some(QpnBlock { number, socket }))
    }

    /// The block's number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Its first QPN; `QPN_BLOCK` of them belong to it.
    pub fn first_qpn(&self) -> Qpn {
        self.number << QPN_BLOCK_SHIFT
    }

    /// Its socket.
    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Its socket's descriptor.
    pub(crate) fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_one_owner_until_it_is_dropped() {
        let first = QpnBlock::claim(65001).expect("a free block");
        let again = QpnBlock::claim_one(65001, first.number()).expect("a socket");
        assert!(again.is_none(), "claimed twice");
        let other = QpnBlock::claim(65001).expect("a free block");
        assert_ne!(first.number(), other.number());
        assert_eq!(first.first_qpn(), first.number() * starverbs_core::QPN_BLOCK);
        let number = first.number();
        drop(first);
        assert!(
            QpnBlock::claim_one(65001, number).expect("a socket").is_some(),
            "the name outlived its owner"
        );
    }

    #[test]
    fn blocks_of_the_host_are_listed_by_port() {
        let [a, b] = [65003, 65004].map(|port| QpnBlock::claim(port).expect("a free block"));
        assert_eq!(blocks_of_host(65003), [a.number()]);
        assert_eq!(blocks_of_host(65004), [b.number()]);
        assert_eq!(blocks_of_host(65005), []);
    }

    #[test]
    fn names_differ_by_port() {
        assert_eq!(socket_name(4791, 7), "starverbs/qpn/7");
        assert_eq!(socket_name(5000, 7), "starverbs/5000/qpn/7");
    }
}
