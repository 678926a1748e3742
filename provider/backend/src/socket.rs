//! The socket on the wire's UDP port, shared by the host's processes (SO_REUSEPORT).

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use nix::sys::socket::AddressFamily;
use starverbs_settings::Settings;

use crate::descriptor::Socket;
use crate::sockopt::{self, datagram};
use crate::{BackendError, membership};

const WHAT: &str = "the UDP socket to receive from";

/// Binds the wire's port for IPv4 and IPv6. `None`: the port is taken by who does not share it, another
/// user's processes for instance.
pub(crate) fn open_wire(settings: &Settings) -> Result<Option<Socket>, BackendError> {
    let port = settings.port;
    // A host may be without IPv6.
    let (fd, any) = match datagram(AddressFamily::Inet6, WHAT) {
        Ok(fd) => (fd, SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))),
        Err(_) => (datagram(AddressFamily::Inet, WHAT)?, SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))),
    };
    let on = |level, name| sockopt::set_int(&fd, level, name, 1);
    if any.is_ipv6() {
        sockopt::set_int(&fd, libc::SOL_IPV6, libc::IPV6_V6ONLY, 0);
        on(libc::SOL_IPV6, libc::IPV6_RECVPKTINFO);
        on(libc::SOL_IPV6, libc::IPV6_RECVTCLASS);
        // Linux' rdma_rxe sends without a UDP checksum, over IPv6 too; the ICRC covers more.
        on(libc::SOL_UDP, libc::UDP_NO_CHECK6_RX);
    } else {
        on(libc::SOL_IP, libc::IP_PKTINFO);
    }
    // For IPv4 datagrams, also those that an IPv6 socket receives.
    on(libc::SOL_IP, libc::IP_RECVTOS);
    if !on(libc::SOL_SOCKET, libc::SO_REUSEPORT) {
        return Err(crate::error::os(WHAT));
    }
    if settings.gro {
        on(libc::SOL_UDP, libc::UDP_GRO);
    }
    membership::receive_all(&fd, false);
    sockopt::receive_buffer(&fd, settings.rcvbuf);
    match sockopt::bind(&fd, any) {
        Ok(_) => Ok(Some(fd)),
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => Ok(None),
        Err(source) => Err(BackendError::Bind { port, source }),
    }
}
