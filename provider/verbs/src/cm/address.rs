//! Addresses and ports of this host.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use starverbs_backend::{HostAddr, host};
use starverbs_cm::Scope;
use starverbs_core::Gid;

use crate::error::{Result, VerbsError};
use crate::process::seed;

/// Where a port is picked from, if the system does not say.
const EPHEMERAL: (u16, u16) = (32768, 60999);

/// The first port that everybody may use, if the system does not say.
const UNPRIVILEGED: u32 = 1024;
/// CAP_NET_BIND_SERVICE in a set of capabilities.
const NET_BIND_SERVICE: u64 = 1 << 10;

/// For which addresses who binds to `local` gets requests, and the address, an IPv4 one as IPv4.
pub(super) fn scope(addrs: &[HostAddr], local: SocketAddr, v6_only: bool) -> Result<(Scope, SocketAddr)> {
    let local = SocketAddr::new(local.ip().to_canonical(), local.port());
    let scope = match local.ip() {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => Scope::AnyV4,
        IpAddr::V6(ip) if ip.is_unspecified() && v6_only => Scope::AnyV6,
        IpAddr::V6(ip) if ip.is_unspecified() => Scope::Any,
        _ => {
            check_source(addrs, local)?;
            Scope::One(host::gid_of(local.ip()))
        }
    };
    Ok((scope, local))
}

/// EADDRNOTAVAIL unless the address is in the GID table.
pub(super) fn check_source(addrs: &[HostAddr], local: SocketAddr) -> Result<()> {
    index_of(addrs, host::gid_of(local.ip())).map(drop).ok_or(VerbsError::Os(libc::EADDRNOTAVAIL))
}

/// EACCES unless the calling thread may use the port: the first ones are for who has CAP_NET_BIND_SERVICE
/// (ip(7)).
pub(super) fn check_port(port: u16) -> Result<()> {
    let first = std::fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start");
    let first = first.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(UNPRIVILEGED);
    let status = || std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    if u32::from(port) >= first || binds_services(&status()) {
        Ok(())
    } else {
        Err(VerbsError::Os(libc::EACCES))
    }
}

/// Whether CAP_NET_BIND_SERVICE is in the effective set of a status file (proc(5)).
fn binds_services(status: &str) -> bool {
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    set.is_some_and(|set| set & NET_BIND_SERVICE != 0)
}

/// Place of an address in the GID table.
pub(super) fn index_of(addrs: &[HostAddr], gid: Gid) -> Option<u8> {
    addrs.iter().position(|addr| addr.gid == gid).and_then(|at| u8::try_from(at).ok())
}

/// Gives an address of fe80::/10 the interface on which it is one: that of this side's.
pub(super) fn with_interface(addrs: &[HostAddr], local: IpAddr, mut address: SocketAddr) -> SocketAddr {
    if let SocketAddr::V6(v6) = &mut address
        && v6.ip().is_unicast_link_local()
        && let Some(addr) = addrs.iter().find(|addr| addr.ip() == local)
    {
        v6.set_scope_id(addr.ifindex);
    }
    address
}

/// The system's range of ports to pick from, from anywhere in it.
pub(super) fn ephemeral_ports() -> impl Iterator<Item = u16> {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let mut numbers = text.split_whitespace().filter_map(|number| number.parse().ok());
    let range = numbers.next().zip(numbers.next()).filter(|(low, high)| low <= high && *low > 0);
    let (low, high): (u16, u16) = range.unwrap_or(EPHEMERAL);
    let count = u64::from(high - low) + 1;
    let start = seed()[0] % count;
    (0..count).map(move |step| low + ((start + step) % count) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_port_of_the_range_is_tried_once() {
        let mut ports: Vec<u16> = ephemeral_ports().collect();
        ports.sort_unstable();
        let before = ports.len();
        ports.dedup();
        assert!(before == ports.len() && before > 1 && !ports.contains(&0));
    }

    #[test]
    fn who_may_bind_services_is_told_by_the_effective_set() {
        assert!(binds_services("CapPrm:\t0\nCapEff:\t0000000000000400\n"));
        assert!(!binds_services("CapPrm:\t0000000000000400\nCapEff:\t000001fffefffbff\n"));
        assert!(!binds_services("") && !binds_services("CapEff:\tnone\n"));
    }

    #[test]
    fn scopes_are_those_of_the_address() {
        let of = |text: &str, v6_only| scope(&[], text.parse().expect("an address"), v6_only);
        assert!(matches!(of("0.0.0.0:1", false), Ok((Scope::AnyV4, _))));
        assert!(matches!(of("[::]:1", false), Ok((Scope::Any, _))));
        assert!(matches!(of("[::]:1", true), Ok((Scope::AnyV6, _))));
        assert_eq!(of("192.0.2.1:1", false).map_err(|e| e.errno()).err(), Some(libc::EADDRNOTAVAIL));
    }
}
