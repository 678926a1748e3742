//! Control data beside each message: where it goes, and how it is to be sent.

use std::mem;

use starverbs_core::Gid;

use super::{HOPS, OutboundMessage};
use crate::HostAddr;
use crate::host::is_link_local;

/// Three control messages with an integer each, and one with an address.
pub(super) const CONTROL: usize = 136;

/// Room for a destination of either family.
#[derive(Clone, Copy)]
pub(super) union Name {
    v4: libc::sockaddr_in,
    v6: libc::sockaddr_in6,
}

/// Writes the address to send to: `dgid`, on the interface of `from` where that matters. Gives its length.
pub(super) fn write_name(out: &mut Name, dgid: Gid, from: &HostAddr, port: u16) -> usize {
    match dgid.ipv4() {
        Some(ip) => {
            out.v4 = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: port.to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(ip) },
                sin_zero: [0; 8],
            };
            mem::size_of::<libc::sockaddr_in>()
        }
        None => {
            let local = is_link_local(dgid) || dgid.0[0] == 0xff;
            out.v6 = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: port.to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: dgid.0 },
                sin6_scope_id: if local { from.ifindex } else { 0 },
            };
            mem::size_of::<libc::sockaddr_in6>()
        }
    }
}

/// Writes what the message needs beyond the defaults; gives the length, 0 for most.
#[inline]
pub(super) fn write_controls(out: &mut [u8; CONTROL], message: &OutboundMessage, from: &HostAddr) -> usize {
    let group = &message.group;
    let v4 = group.dgid.ipv4().is_some();
    let mut len = 0;
    if message.frames > 1 {
        len = put_control(out, len, libc::SOL_UDP, libc::UDP_SEGMENT, &message.segment.to_ne_bytes());
    }
    if group.traffic_class != 0 {
        let (level, name) =
            if v4 { (libc::SOL_IP, libc::IP_TOS) } else { (libc::SOL_IPV6, libc::IPV6_TCLASS) };
        len = put_control(out, len, level, name, &i32::from(group.traffic_class).to_ne_bytes());
    }
    if group.hop_limit != HOPS {
        let (level, name) =
            if v4 { (libc::SOL_IP, libc::IP_TTL) } else { (libc::SOL_IPV6, libc::IPV6_HOPLIMIT) };
        len = put_control(out, len, level, name, &i32::from(group.hop_limit).to_ne_bytes());
    }
    if group.anywhere {
        len = put_source(out, len, from);
    }
    len
}

/// Sets which address of this host a message is from (ip(7), ipv6(7): struct in_pktinfo, struct in6_pktinfo).
fn put_source(out: &mut [u8; CONTROL], at: usize, from: &HostAddr) -> usize {
    let mut info = [0; 20];
    match from.gid.ipv4() {
        Some(ip) => {
            info[4..8].copy_from_slice(&ip);
            put_control(out, at, libc::SOL_IP, libc::IP_PKTINFO, &info[..12])
        }
        None => {
            let interface = if from.is_link_local() { from.ifindex } else { 0 };
            info[..16].copy_from_slice(&from.gid.0);
            info[16..].copy_from_slice(&interface.to_ne_bytes());
            put_control(out, at, libc::SOL_IPV6, libc::IPV6_PKTINFO, &info)
        }
    }
}

/// Writes one `struct cmsghdr` and its data at `at`; gives where the next begins (both are 8-aligned).
#[inline]
fn put_control(out: &mut [u8; CONTROL], at: usize, level: i32, name: i32, data: &[u8]) -> usize {
    const HEAD: usize = mem::size_of::<libc::cmsghdr>();
    let end = at + HEAD + data.len().next_multiple_of(8);
    let out = &mut out[at..end];
    out.fill(0);
    out[..mem::size_of::<usize>()].copy_from_slice(&(HEAD + data.len()).to_ne_bytes());
    out[HEAD - 8..HEAD - 4].copy_from_slice(&level.to_ne_bytes());
    out[HEAD - 4..HEAD].copy_from_slice(&name.to_ne_bytes());
    out[HEAD..HEAD + data.len()].copy_from_slice(data);
    end
}
