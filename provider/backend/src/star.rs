//! The two UDP ports of StaR: one for the half of a card that keeps no connection, one for the half that
//! keeps them.
//!
//! Each process has ports of its own: 4793 and 4794 where they are free, others where another process has
//! them, which peers get to know when they connect. So nothing has to find out whose a packet is; a stateless
//! half could not. Answers go to the port that a packet came from: everything leaves from the
//! port of the stateful half.
//!
//! Owns the sockets, checksums and CRCs, which know no more of a packet than the half that it is for; and the
//! turns of a card's host with StaR (`host`, `calls`), which a process's card and an emulated board share.

mod calls;
mod frame;
mod host;
mod info;
mod port;
mod rx;
mod sealing;
mod tx;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Deref;
use std::sync::Arc;

use nix::sys::socket::AddressFamily;
use starverbs_core::Counters;
use starverbs_settings::Settings;
use starverbs_star::wire::{CardHalf, PORT_STATEFUL, PORT_STATELESS};

use crate::descriptor::Socket;
use crate::pcap::Capture;
use crate::sockopt::{self, datagram, set_int};
use crate::{BackendError, HostAddr};
pub use calls::PATIENCE;
pub use host::{NicEnv, OpenError, StarHost};
pub use info::{Settled, StarInfo};
pub use port::{StarCard, StarPort};
pub use rx::{FollowingPackets, ReceivedPacket, StarRx};
pub use sealing::Sealing;
pub use tx::{StarFraming, StarTx};

const WHAT: &str = "the UDP sockets of StaR";
/// Ports of the kernel's choice that are tried: one that is free for IPv4 may be taken for IPv6.
const TRIES: u32 = 8;

/// A half's sockets.
struct Half {
    port: u16,
    v4: Arc<Socket>,
    /// A host may be without IPv6
    v6: Option<Arc<Socket>>,
}

impl Half {
    /// On the port `wanted`, or on one that is free for both IP versions.
    fn open(wanted: u16, settings: &Settings) -> Result<Self, BackendError> {
        if let Some(half) = Half::on(wanted, settings)? {
            return Ok(half);
        }
        for _ in 0..TRIES {
            if let Some(half) = Half::on(0, settings)? {
                return Ok(half);
            }
        }
        Err(BackendError::Socket { what: WHAT, source: io::ErrorKind::AddrInUse.into() })
    }

    /// `None`: the port is taken.
    fn on(port: u16, settings: &Settings) -> Result<Option<Self>, BackendError> {
        let v4 = open_socket(AddressFamily::Inet, settings)?;
        let Some(port) = bind(&v4, Ipv4Addr::UNSPECIFIED.into(), port)? else { return Ok(None) };
        let v6 = match open_socket(AddressFamily::Inet6, settings) {
            Ok(v6) => match bind(&v6, Ipv6Addr::UNSPECIFIED.into(), port) {
                Ok(Some(_)) => Some(Arc::new(v6)),
                Ok(None) => return Ok(None),
                /* the protocol is there, its addresses are not */
                Err(_) => None,
            },
            Err(_) => None,
        };
        Ok(Some(Half { port, v4: Arc::new(v4), v6 }))
    }
}

fn open_socket(family: AddressFamily, settings: &Settings) -> Result<Socket, BackendError> {
    let fd = datagram(family, WHAT)?;
    if family == AddressFamily::Inet6 {
        set_int(&fd, libc::SOL_IPV6, libc::IPV6_V6ONLY, 1);
        set_int(&fd, libc::SOL_IPV6, libc::IPV6_RECVPKTINFO, 1);
        set_int(&fd, libc::SOL_IPV6, libc::IPV6_RECVTCLASS, 1);
        set_int(&fd, libc::SOL_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO);
    } else {
        set_int(&fd, libc::SOL_IP, libc::IP_PKTINFO, 1);
        set_int(&fd, libc::SOL_IP, libc::IP_RECVTOS, 1);
        set_int(&fd, libc::SOL_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO);
    }
    if settings.gro {
        set_int(&fd, libc::SOL_UDP, libc::UDP_GRO, 1);
    }
    sockopt::receive_buffer(&fd, settings.rcvbuf);
    sockopt::send_buffer(&fd, settings.sndbuf);
    Ok(fd)
}

/// Gives the port; `None` where it is taken.
fn bind(socket: &Socket, ip: IpAddr, port: u16) -> Result<Option<u16>, BackendError> {
    match sockopt::bind(socket, SocketAddr::from((ip, port))) {
        Ok(port) => Ok(Some(port)),
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => Ok(None),
        Err(source) => Err(BackendError::Bind { port, source }),
    }
}

/// Opens both ports, and gives the sending and the receiving half of each; see [`crate::RoceTx`].
pub(crate) fn open<C>(
    settings: &Settings,
    addrs: &[HostAddr],
    counters: C,
    capture: Option<Capture>,
) -> Result<(StarTx<C>, StarRx<C>), BackendError>
where
    C: Deref<Target = Counters> + Clone,
{
    let stateless = Half::open(PORT_STATELESS, settings)?;
    let stateful = Half::open(PORT_STATEFUL, settings)?;
    let tx = StarTx::open(settings, addrs, [&stateless, &stateful], counters.clone(), capture.clone())?;
    let halves = [(CardHalf::Stateless, stateless), (CardHalf::Stateful, stateful)];
    Ok((tx, StarRx::new(&halves, counters, capture)?))
}

#[cfg(test)]
mod tests;
