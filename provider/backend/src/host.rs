//! The host's addresses, as the GID table of the card, and a GUID that stays the same.
//!
//! Owns the order of the table. It must not open the port or know who uses an address.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;

use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use nix::net::if_::{InterfaceFlags, if_nametoindex};
use nix::sys::socket::AddressFamily;
use starverbs_core::Gid;
use starverbs_settings::Settings;

use crate::{BackendError, MAX_ADDRS, sockopt};

/// One address of this host: an entry of the GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostAddr {
    /// The address
    pub gid: Gid,
    /// Index of its interface
    pub ifindex: u32,
    /// Largest IP packet of the interface, in bytes
    pub link_mtu: u32,
    /// Name of the interface
    pub name: String,
    /// Whether the interface is loopback
    pub loopback: bool,
}

impl HostAddr {
    /// The address.
    pub fn ip(&self) -> IpAddr {
        ip_of(self.gid)
    }

    /// Whether it means anything on its own interface alone (fe80::/10), so that sockets need the interface's
    /// index.
    pub fn is_link_local(&self) -> bool {
        is_link_local(self.gid)
    }
}

/// Whether a GID is of fe80::/10.
pub(crate) fn is_link_local(gid: Gid) -> bool {
    gid.0[0] == 0xfe && gid.0[1] & 0xc0 == 0x80
}

/// The address that a GID stands for.
pub fn ip_of(gid: Gid) -> IpAddr {
    match gid.ipv4() {
        Some(a) => IpAddr::V4(Ipv4Addr::from(a)),
        None => IpAddr::V6(Ipv6Addr::from(gid.0)),
    }
}

/// The GID that an address becomes.
pub fn gid_of(ip: IpAddr) -> Gid {
    match ip {
        IpAddr::V4(a) => Gid::from_ipv4(a.octets()),
        IpAddr::V6(a) => Gid(a.octets()),
    }
}

/// The addresses of interfaces that are up, in the order of the GID table: IPv4 of real interfaces, IPv4 of
/// loopback, global IPv6, link-local IPv6, `::1`. With `STARVERBS_ADDRS`, exactly those, in the order given.
///
/// # Errors
/// No interface is up, or `STARVERBS_ADDRS` names an address that the host does not have.
pub fn addresses(settings: &Settings) -> Result<Vec<HostAddr>, BackendError> {
    let mut found = interface_addresses()?;
    found.sort_by_key(rank);
    if let Some(wanted) = &settings.addrs {
        return wanted.iter().take(MAX_ADDRS).map(|ip| choose(&found, *ip)).collect();
    }
    found.truncate(MAX_ADDRS);
    if found.is_empty() { Err(BackendError::NoAddress) } else { Ok(found) }
}

fn choose(found: &[HostAddr], ip: IpAddr) -> Result<HostAddr, BackendError> {
    if let Some(known) = found.iter().find(|a| a.ip() == ip) {
        return Ok(known.clone());
    }
    // All of 127.0.0.0/8 is this host, though only 127.0.0.1 is listed.
    let lo = found.iter().find(|a| a.loopback && a.gid.ipv4().is_some());
    match (ip, lo) {
        (IpAddr::V4(v4), Some(lo)) if v4.is_loopback() => Ok(HostAddr { gid: gid_of(ip), ..lo.clone() }),
        _ => Err(BackendError::ForeignAddress(ip)),
    }
}

/// What has become of an address of the table since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// The host has it
    pub present: bool,
    /// Its interface is up and has a carrier
    pub running: bool,
}

/// How the addresses of a table stand now.
///
/// # Errors
/// The interfaces cannot be listed.
pub fn standing(addrs: &[HostAddr]) -> Result<Vec<Standing>, BackendError> {
    let list = getifaddrs().map_err(|e| BackendError::Interfaces(io::Error::from(e)))?;
    let mut all = vec![Standing::default(); addrs.len()];
    for entry in list {
        let Some(ip) = ip_of_entry(&entry) else { continue };
        let running = entry.flags.contains(InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING);
        for (addr, standing) in addrs.iter().zip(&mut all) {
            // All of 127.0.0.0/8 stands and falls with what is listed of it.
            let is_it = gid_of(ip) == addr.gid
                || (addr.name == entry.interface_name
                    && ip.is_ipv4()
                    && ip.is_loopback()
                    && addr.ip().is_loopback());
            if is_it && ip.is_ipv4() == addr.gid.ipv4().is_some() {
                standing.present = true;
                standing.running |= running;
            }
        }
    }
    Ok(all)
}

/// Whether an address is one of this host's, on an interface that is up.
pub fn is_own(gid: Gid) -> bool {
    is_among(&[], gid) || own_gids().contains(&gid)
}

/// Whether an address is this host's, which has these: all of 127.0.0.0/8 is, too.
#[inline]
pub fn is_among(own: &[Gid], gid: Gid) -> bool {
    matches!(gid.ipv4(), Some([127, ..])) || own.contains(&gid)
}

/// Addresses of this host, on interfaces that are up.
pub(crate) fn own_gids() -> Vec<Gid> {
    interface_addresses().unwrap_or_default().iter().map(|addr| addr.gid).collect()
}

/// Order of the table; sorting is stable, so that the kernel's order decides among equals.
fn rank(addr: &HostAddr) -> u8 {
    match (addr.gid.ipv4().is_some(), addr.loopback) {
        (true, false) => 0,
        (true, true) => 1,
        (false, false) if !addr.is_link_local() => 2,
        (false, false) => 3,
        (false, true) => 4,
    }
}

fn interface_addresses() -> Result<Vec<HostAddr>, BackendError> {
    let list = getifaddrs().map_err(|e| BackendError::Interfaces(io::Error::from(e)))?;
    Ok(list.filter_map(|entry| from_entry(&entry)).collect())
}

fn from_entry(entry: &InterfaceAddress) -> Option<HostAddr> {
    if !entry.flags.contains(InterfaceFlags::IFF_UP) {
        return None;
    }
    let ip = ip_of_entry(entry)?;
    let name = entry.interface_name.clone();
    Some(HostAddr {
        gid: gid_of(ip),
        // An alias (eth0:1) has no index of its own; its interface has.
        ifindex: if_nametoindex(name.split(':').next()?).unwrap_or(0),
        link_mtu: link_mtu(&name),
        loopback: entry.flags.contains(InterfaceFlags::IFF_LOOPBACK),
        name,
    })
}

fn ip_of_entry(entry: &InterfaceAddress) -> Option<IpAddr> {
    Some(sockopt::internet(entry.address.as_ref()?)?.ip())
}

/// The interface's speed in Mb/s; `None` where there is none, as of loopback and of many a virtual interface.
pub fn link_speed(name: &str) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/sys/class/net/{name}/speed")).ok()?;
    text.trim().parse().ok().filter(|&speed| speed > 0)
}

/// The interface's MTU; 1500 if the kernel does not say.
fn link_mtu(name: &str) -> u32 {
    const USUAL: u32 = 1500;
    // SAFETY: an ifreq of zeroes is valid: a C struct of integers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().take(libc::IFNAMSIZ - 1).zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    let Ok(socket) = sockopt::datagram(AddressFamily::Inet, "a socket to ask for an interface's MTU") else {
        return USUAL;
    };
    // SAFETY: SIOCGIFMTU reads and writes one ifreq, which lives across the call.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &mut request) } < 0 {
        return USUAL;
    }
    // SAFETY: on success SIOCGIFMTU has filled the ifru_mtu member.
    u32::try_from(unsafe { request.ifr_ifru.ifru_mtu }).unwrap_or(USUAL)
}

/// A node GUID (host byte order) that does not change while the host keeps its first interface's MAC address:
/// that address as EUI-64; without one, made from the machine's id or name.
pub fn guid(addrs: &[HostAddr]) -> u64 {
    let mac = addrs.iter().filter(|a| !a.loopback).find_map(|a| mac_of(&a.name));
    match mac {
        Some([a, b, c, d, e, f]) => u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f]),
        None => {
            let mut hasher = DefaultHasher::new();
            ["/etc/machine-id", "/proc/sys/kernel/hostname"].map(|p| std::fs::read(p).ok()).hash(&mut hasher);
            // The "local" bit, as of an address nobody assigned.
            hasher.finish() | 0x0200_0000_0000_0000
        }
    }
}

fn mac_of(interface: &str) -> Option<[u8; 6]> {
    let base = interface.split(':').next()?;
    let text = std::fs::read_to_string(format!("/sys/class/net/{base}/address")).ok()?;
    let mut mac = [0; 6];
    let mut parts = text.trim().split(':');
    for byte in &mut mac {
        *byte = u8::from_str_radix(parts.next()?, 16).ok()?;
    }
    (mac != [0; 6]).then_some(mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_alone_gives_a_table_that_begins_with_ipv4() {
        let table = addresses(&Settings::default()).expect("the test host has loopback");
        assert!(table[0].gid.ipv4().is_some());
        assert!(table.is_sorted_by_key(rank));
        assert!(
            table
                .iter()
                .any(|a| a.gid == Gid::from_ipv4([127, 0, 0, 1]) && a.loopback && a.link_mtu >= 16384)
        );
    }

    #[test]
    fn chosen_addresses_keep_their_order_and_foreign_ones_are_named() {
        let lo = |last| IpAddr::from([127, 0, 0, last]);
        let settings = Settings { addrs: Some(vec![lo(2), lo(1)]), ..Settings::default() };
        let table = addresses(&settings).expect("127.0.0.0/8 is local");
        assert_eq!(table.iter().map(HostAddr::ip).collect::<Vec<_>>(), [lo(2), lo(1)]);

        let settings = Settings { addrs: Some(vec![IpAddr::from([203, 0, 113, 77])]), ..Settings::default() };
        let error = addresses(&settings).expect_err("TEST-NET-3 is nobody's");
        assert!(error.to_string().contains("STARVERBS_ADDRS") && error.to_string().contains("203.0.113.77"));
    }

    #[test]
    fn loopback_stands_and_what_is_nobodys_does_not() {
        let lo = |last| IpAddr::from([127, 0, 0, last]);
        let settings = Settings { addrs: Some(vec![lo(1), lo(9)]), ..Settings::default() };
        let mut table = addresses(&settings).expect("127.0.0.0/8 is local");
        table.push(HostAddr { gid: Gid::from_ipv4([203, 0, 113, 77]), ..table[0].clone() });
        let (up, gone) = (Standing { present: true, running: true }, Standing::default());
        assert_eq!(standing(&table).expect("a list"), [up, up, gone]);
    }

    #[test]
    fn guid_is_stable_and_not_zero() {
        let table = addresses(&Settings::default()).expect("the test host has loopback");
        assert_eq!(guid(&table), guid(&table));
        assert_ne!(guid(&[]), 0);
    }
}
