//! Why the port cannot be opened or a block of QPNs not claimed.

use std::io;
use std::net::IpAddr;

use thiserror::Error;

/// Something the host refused. The messages name the setting or object, and what to do.
#[derive(Debug, Error)]
pub enum BackendError {
    /// The interfaces cannot be listed.
    #[error("cannot list the network interfaces of this host: {0}")]
    Interfaces(#[source] io::Error),
    /// No interface is up, not even loopback.
    #[error("no network interface with an address is up; bring up loopback (ip link set lo up)")]
    NoAddress,
    /// `STARVERBS_ADDRS` names an address that this host does not have.
    #[error("STARVERBS_ADDRS: {0} is not an address of this host; `ip addr` lists them")]
    ForeignAddress(IpAddr),
    /// A socket for `what` cannot be made or set up.
    #[error("cannot open {what}: {source}")]
    Socket {
        /// What it was for
        what: &'static str,
        /// The system's answer
        #[source]
        source: io::Error,
    },
    /// The UDP port cannot be bound, for a reason other than its being taken.
    #[error("cannot bind UDP port {port}: {source}; set STARVERBS_PORT on both sides to use another")]
    Bind {
        /// The port
        port: u16,
        /// The system's answer
        #[source]
        source: io::Error,
    },
    /// No UDP port of an address can be claimed for a 1RMA card; this is the last.
    #[error("cannot claim UDP port {port} of {addr} for 1RMA: {source}; each card of an address has one")]
    OnermaAddress {
        /// The address
        addr: IpAddr,
        /// The port
        port: u16,
        /// The system's answer
        #[source]
        source: io::Error,
    },
    /// The clock is before 2024: initialisation vectors would repeat.
    #[error("the clock of this host was never set: 1RMA would repeat initialisation vectors")]
    ClockUnset,
    /// A multicast group cannot be joined.
    #[error("cannot join the multicast group {group}: {source} (net.ipv4.igmp_max_memberships bounds them)")]
    Group {
        /// Its address
        group: IpAddr,
        /// The system's answer
        #[source]
        source: io::Error,
    },
    /// No interface of the card takes a multicast group.
    #[error(
        "no interface of the card can join the multicast group {0}: has it an address of that IP version?"
    )]
    NoInterface(IpAddr),
    /// Somebody holds the service at that address.
    #[error("somebody has that port")]
    ServiceTaken,
    /// Somebody holds the service at any address, or at one of those asked for.
    #[error("somebody has that port at another, overlapping address")]
    ServiceOverlaps,
    /// This process holds as many services as it may.
    #[error("more than {0} ports for connections")]
    ServicesFull(usize),
    /// There is no memory for the port's buffers.
    #[error("no memory for the port's buffers")]
    NoMemory,
    /// Every QPN block of this host is claimed.
    #[error("all {0} QPN blocks of this host are claimed by running processes; end some of them")]
    NoBlock(u32),
}

impl BackendError {
    /// The Linux errno that a program should see.
    pub fn errno(&self) -> i32 {
        match self {
            BackendError::Interfaces(e)
            | BackendError::Socket { source: e, .. }
            | BackendError::Bind { source: e, .. }
            | BackendError::OnermaAddress { source: e, .. } => e.raw_os_error().unwrap_or(libc::EIO),
            BackendError::NoAddress => libc::ENODEV,
            BackendError::Group { .. } | BackendError::NoMemory => libc::ENOMEM,
            BackendError::NoInterface(_) | BackendError::ClockUnset => libc::EINVAL,
            BackendError::ForeignAddress(_) | BackendError::ServiceOverlaps => libc::EADDRNOTAVAIL,
            BackendError::ServiceTaken => libc::EADDRINUSE,
            BackendError::ServicesFull(_) => libc::ENOMEM,
            BackendError::NoBlock(_) => libc::EAGAIN,
        }
    }
}

/// The calling thread's last system error, as the error for `what`.
pub(crate) fn os(what: &'static str) -> BackendError {
    os_error(what, io::Error::last_os_error())
}

/// A system error, as the error for `what`.
pub(crate) fn os_error(what: &'static str, source: impl Into<io::Error>) -> BackendError {
    BackendError::Socket { what, source: source.into() }
}
