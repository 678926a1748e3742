//! The multicast groups of this port: joined on the interfaces that hold its addresses.
//!
//! Members of a group get its datagrams from the kernel, each socket a copy, however the port's unicast is
//! steered. A process without the port joins with another socket, and a proxy forwards the datagrams:
//! `multicast_proxy`. Owns the list of groups, so that a socket that is opened later joins them too. It must
//! not count who is attached.

use std::io;

use nix::sys::socket::AddressFamily;
use starverbs_core::Gid;

use crate::BackendError;
use crate::descriptor::Socket;
use crate::host::{HostAddr, ip_of};
use crate::sockopt::{self, errno};

/// Memberships of a socket that Linux allows by default (net.ipv4.igmp_max_memberships).
const USUAL_MOST: u32 = 20;
/// Most groups that are offered, whatever the system allows.
const MOST_GROUPS: u32 = 1024;
/// `IPV6_MULTICAST_ALL` of <linux/in6.h>: ipv6(7) does not have it, nor has libc.
const IPV6_MULTICAST_ALL: i32 = 29;

/// Groups and interfaces of a port.
pub(crate) struct Membership {
    v4: Vec<u32>,
    v6: Vec<u32>,
    groups: Vec<Gid>,
    /// Without the port: a socket that is bound to none and receives nothing
    join_socket: Option<Socket>,
}

impl Membership {
    /// In no group yet.
    pub(crate) fn new(addrs: &[HostAddr]) -> Self {
        let (v4, v6) = (interfaces(addrs, true), interfaces(addrs, false));
        Membership { v4, v6, groups: Vec::new(), join_socket: None }
    }

    /// Joins a group on every interface that can, with the `wire` or, without the port, another socket.
    pub(crate) fn join(&mut self, wire: Option<&Socket>, group: Gid) -> Result<(), BackendError> {
        if wire.is_none() && self.join_socket.is_none() {
            self.join_socket = Some(join_socket()?);
        }
        if let Some(socket) = wire.or(self.join_socket.as_ref()) {
            self.join_on(socket, group)?;
        }
        self.groups.push(group);
        Ok(())
    }

    /// Leaves a group.
    pub(crate) fn leave(&mut self, wire: Option<&Socket>, group: Gid) {
        self.groups.retain(|joined| *joined != group);
        if let Some(socket) = wire.or(self.join_socket.as_ref()) {
            self.leave_on(socket, group);
        }
    }

    /// The port was bound: `wire` joins the groups that there are. What the system refuses is not received
    /// there.
    pub(crate) fn rejoin(&mut self, wire: &Socket) {
        for group in &self.groups {
            let _ = self.join_on(wire, *group);
        }
        self.join_socket = None;
    }

    /// Whether it is in `group`.
    pub(crate) fn has(&self, group: Gid) -> bool {
        self.groups.contains(&group)
    }

    /// The groups.
    pub(crate) fn groups(&self) -> &[Gid] {
        &self.groups
    }

    fn interfaces(&self, group: Gid) -> &[u32] {
        if group.ipv4().is_some() { &self.v4 } else { &self.v6 }
    }

    fn join_on(&self, wire: &Socket, group: Gid) -> Result<(), BackendError> {
        let mut joined = false;
        for interface in self.interfaces(group) {
            if change(wire, group, *interface, true) {
                joined = true;
                continue;
            }
            match errno() {
                // Another address of the interface, or another program of this process, did so.
                libc::EADDRINUSE => joined = true,
                full @ (libc::ENOBUFS | libc::ENOMEM) => {
                    self.leave_on(wire, group);
                    return Err(BackendError::Group {
                        group: ip_of(group),
                        source: io::Error::from_raw_os_error(full),
                    });
                }
                // An interface that cannot: others may.
                _ => {}
            }
        }
        if joined { Ok(()) } else { Err(BackendError::NoInterface(ip_of(group))) }
    }

    fn leave_on(&self, wire: &Socket, group: Gid) {
        for interface in self.interfaces(group) {
            change(wire, group, *interface, false);
        }
    }
}

/// How many groups a card with these addresses may join: each costs a membership an IPv4 interface.
pub fn max_groups(addrs: &[HostAddr]) -> u32 {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/igmp_max_memberships");
    let most = text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(USUAL_MOST);
    (most / interfaces(addrs, true).len().max(1) as u32).min(MOST_GROUPS)
}

/// Whether a socket receives the multicast of `all` groups that anybody on the host joined, or of those that
/// it joined itself.
pub(crate) fn receive_all(wire: &Socket, all: bool) {
    sockopt::set_int(wire, libc::SOL_IP, libc::IP_MULTICAST_ALL, i32::from(all));
    sockopt::set_int(wire, libc::SOL_IPV6, IPV6_MULTICAST_ALL, i32::from(all));
}

/// A socket of either IP version to join with.
fn join_socket() -> Result<Socket, BackendError> {
    const WHAT: &str = "a socket to join multicast groups with";
    sockopt::datagram(AddressFamily::Inet6, WHAT).or_else(|_| sockopt::datagram(AddressFamily::Inet, WHAT))
}

/// Has a socket send multicast from the interface of `addr`, to members on this host too, and as far as
/// unicast unless a frame says otherwise.
pub(crate) fn send_from(socket: &Socket, addr: &HostAddr, hops: i32) {
    if addr.gid.ipv4().is_some() {
        let interface = libc::ip_mreqn {
            imr_multiaddr: libc::in_addr { s_addr: 0 },
            imr_address: libc::in_addr { s_addr: 0 },
            imr_ifindex: addr.ifindex as i32,
        };
        sockopt::set(socket, libc::SOL_IP, libc::IP_MULTICAST_IF, &interface);
        sockopt::set_int(socket, libc::SOL_IP, libc::IP_MULTICAST_LOOP, 1);
        sockopt::set_int(socket, libc::SOL_IP, libc::IP_MULTICAST_TTL, hops);
    } else {
        sockopt::set_int(socket, libc::SOL_IPV6, libc::IPV6_MULTICAST_IF, addr.ifindex as i32);
        sockopt::set_int(socket, libc::SOL_IPV6, libc::IPV6_MULTICAST_LOOP, 1);
        sockopt::set_int(socket, libc::SOL_IPV6, libc::IPV6_MULTICAST_HOPS, hops);
    }
}

/// Interfaces with an address of one IP version, each once.
fn interfaces(addrs: &[HostAddr], v4: bool) -> Vec<u32> {
    let mut list: Vec<u32> =
        addrs.iter().filter(|addr| addr.gid.ipv4().is_some() == v4).map(|addr| addr.ifindex).collect();
    list.sort_unstable();
    list.dedup();
    list
}

/// Joins or leaves on one interface; says whether the kernel did.
fn change(wire: &Socket, group: Gid, interface: u32, join: bool) -> bool {
    match group.ipv4() {
        Some(ip) => {
            let request = libc::ip_mreqn {
                imr_multiaddr: libc::in_addr { s_addr: u32::from_ne_bytes(ip) },
                imr_address: libc::in_addr { s_addr: 0 },
                imr_ifindex: interface as i32,
            };
            let name = if join { libc::IP_ADD_MEMBERSHIP } else { libc::IP_DROP_MEMBERSHIP };
            sockopt::set(wire, libc::SOL_IP, name, &request)
        }
        None => {
            let request = libc::ipv6_mreq {
                ipv6mr_multiaddr: libc::in6_addr { s6_addr: group.0 },
                ipv6mr_interface: interface,
            };
            let name = if join { libc::IPV6_ADD_MEMBERSHIP } else { libc::IPV6_DROP_MEMBERSHIP };
            sockopt::set(wire, libc::SOL_IPV6, name, &request)
        }
    }
}
