//! The UDP port of a 1RMA card: one socket, bound to one address, which no other process can have meanwhile.
//!
//! A packet is a datagram. Owns the socket and its settings; it must not know what packets say.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, RawFd};

use nix::sys::socket::{AddressFamily, MsgFlags, SockaddrStorage, recvfrom, sendto};
use starverbs_core::Gid;
use starverbs_onerma::Path;

use crate::descriptor::Socket;
use crate::host::{gid_of, ip_of};
use crate::{BackendError, sockopt};

/// Differentiated services codepoint of all packets, 18 (AF21): a class of their own beside RoCEv2's.
const DSCP: i32 = 18;
/// Room that the socket asks for, each way: what the window and a burst of requests may hold.
const BUFFER: usize = 4 << 20;

/// The port.
#[derive(Debug)]
pub(super) struct Port {
    socket: Socket,
    local: Gid,
    number: u16,
    /// Packets that the socket did not take: lost, as on any wire
    pub(super) unsent: u64,
    /// Datagrams that came from another UDP port
    pub(super) foreign: u64,
}

impl Port {
    /// Claims UDP port `number` of `local`.
    ///
    /// # Errors
    /// There is no socket, or the port of this address is another card's.
    pub(super) fn open(local: Gid, number: u16) -> Result<Self, BackendError> {
        let ip = ip_of(local);
        let family = if ip.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        let socket = sockopt::datagram(family, "the UDP socket of 1RMA")?;
        /* no SO_REUSEADDR, no SO_REUSEPORT: who has the address, has it alone */
        sockopt::bind(&socket, SocketAddr::new(ip, number))
            .map_err(|source| BackendError::OnermaAddress { addr: ip, port: number, source })?;
        let (level, name) = match ip {
            IpAddr::V4(_) => (libc::SOL_IP, libc::IP_TOS),
            IpAddr::V6(_) => (libc::SOL_IPV6, libc::IPV6_TCLASS),
        };
        sockopt::set_int(&socket, level, name, DSCP << 2);
        sockopt::receive_buffer(&socket, BUFFER);
        sockopt::send_buffer(&socket, BUFFER);
        Ok(Port { socket, local, number, unsent: 0, foreign: 0 })
    }

    /// Sends a packet.
    pub(super) fn send(&mut self, to: &Gid, packet: &[u8]) {
        let to = SockaddrStorage::from(SocketAddr::new(ip_of(*to), self.number));
        let sent = sendto(self.socket.as_raw_fd(), packet, &to, MsgFlags::MSG_NOSIGNAL);
        self.unsent += u64::from(sent.is_err());
    }

    /// The next packet: its ends, and how many bytes of `room` it fills. `None`: none is there. One that is
    /// longer than `room` is cut.
    pub(super) fn recv(&mut self, room: &mut [u8]) -> Option<(Path, usize)> {
        loop {
            /* an error is one of an earlier send, of a closed port at the other end, and says nothing */
            let (len, from) = recvfrom::<SockaddrStorage>(self.socket.as_raw_fd(), room).ok()?;
            match from.as_ref().and_then(sockopt::internet) {
                Some(from) if from.port() == self.number => {
                    return Some((Path { local: self.local, remote: gid_of(from.ip()) }, len));
                }
                _ => self.foreign += 1,
            }
        }
    }
}

impl AsRawFd for Port {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}
