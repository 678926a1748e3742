//! Socket addresses as C has them, and the GIDs they stand for.
//!
//! Owns that translation. It must not know any object.

use crate::edge::Errno;
use crate::handle::zeroed;
use starverbs_core::types::Gid;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// The IP address and port that a program gives: EINVAL for none, EAFNOSUPPORT for another family's (AF_IB
/// among them: RoCE's addresses are IP's).
///
/// # Safety
/// `from` is NULL, or a socket address of its family's length; it need not be aligned.
pub(super) unsafe fn read(from: *const libc::sockaddr) -> Result<SocketAddr, Errno> {
    if from.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller's terms: every socket address begins with its family, whose length it has.
    unsafe {
        match c_family((&raw const (*from).sa_family).read_unaligned()) {
            libc::AF_INET => {
                let v4 = from.cast::<libc::sockaddr_in>().read_unaligned();
                let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
                Ok(SocketAddr::V4(SocketAddrV4::new(ip, u16::from_be(v4.sin_port))))
            }
            libc::AF_INET6 => {
                let v6 = from.cast::<libc::sockaddr_in6>().read_unaligned();
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                let (port, flow) = (u16::from_be(v6.sin6_port), u32::from_be(v6.sin6_flowinfo));
                Ok(SocketAddr::V6(SocketAddrV6::new(ip, port, flow, v6.sin6_scope_id)))
            }
            _ => Err(libc::EAFNOSUPPORT),
        }
    }
}

fn c_family(family: libc::sa_family_t) -> i32 {
    i32::from(family)
}

/// An address in C's words, and its length.
pub(super) fn stored(from: SocketAddr) -> (libc::sockaddr_storage, usize) {
    // SAFETY: a sockaddr_storage is numbers: zero is valid.
    let mut to: libc::sockaddr_storage = unsafe { zeroed() };
    let length = match from {
        SocketAddr::V4(v4) => {
            // SAFETY: numbers: zero is valid.
            let mut sin: libc::sockaddr_in = unsafe { zeroed() };
            sin.sin_family = libc::AF_INET as libc::sa_family_t;
            sin.sin_port = v4.port().to_be();
            sin.sin_addr.s_addr = u32::from(*v4.ip()).to_be();
            // SAFETY: a sockaddr_storage has room, and is aligned, for every family's address.
            unsafe { (&raw mut to).cast::<libc::sockaddr_in>().write(sin) };
            size_of::<libc::sockaddr_in>()
        }
        SocketAddr::V6(v6) => {
            // SAFETY: numbers: zero is valid.
            let mut sin6: libc::sockaddr_in6 = unsafe { zeroed() };
            sin6.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            sin6.sin6_port = v6.port().to_be();
            sin6.sin6_flowinfo = v6.flowinfo().to_be();
            sin6.sin6_addr.s6_addr = v6.ip().octets();
            sin6.sin6_scope_id = v6.scope_id();
            // SAFETY: as above.
            unsafe { (&raw mut to).cast::<libc::sockaddr_in6>().write(sin6) };
            size_of::<libc::sockaddr_in6>()
        }
    };
    (to, length)
}

/// The GID that an address stands for (annex A17.4.1). A multicast group's is made the same way.
pub(super) fn gid(ip: IpAddr) -> Gid {
    match ip {
        IpAddr::V4(v4) => Gid::from_ipv4(v4.octets()),
        IpAddr::V6(v6) => Gid(v6.octets()),
    }
}

/// "Any address", of the same family, at this port.
pub(super) fn any_like(addr: SocketAddr, port: u16) -> SocketAddr {
    match addr {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)),
    }
}

/// Whether it names no device: any address, and those of loopback, 127.0.0.0/8 and ::1. Linux' rdma_cm takes
/// loopback for any address, and programs (libfabric) tell by the missing device which addresses peers can
/// use.
pub(super) fn is_wildcard(ip: IpAddr) -> bool {
    ip.is_unspecified() || ip.is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_both_translations() {
        for text in ["192.0.2.1:7471", "[2001:db8::1]:5", "0.0.0.0:0", "[fe80::1%3]:9"] {
            let addr: SocketAddr = text.parse().expect("an address");
            let (stored, length) = stored(addr);
            assert_eq!(length, if addr.is_ipv4() { 16 } else { 28 });
            // SAFETY: a whole sockaddr_storage.
            assert_eq!(unsafe { read((&raw const stored).cast()) }, Ok(addr));
        }
    }

    #[test]
    fn other_families_are_refused() {
        let (mut addr, _) = stored(SocketAddr::from(([127, 0, 0, 1], 1)));
        addr.ss_family = 27;
        // SAFETY: NULL, and a whole sockaddr_storage.
        unsafe {
            assert_eq!(read(core::ptr::null()), Err(libc::EINVAL));
            assert_eq!(read((&raw const addr).cast()), Err(libc::EAFNOSUPPORT));
        }
    }

    #[test]
    fn loopback_is_a_wildcard_in_both_families() {
        for (text, wildcard) in [
            ("0.0.0.0", true),
            ("::", true),
            ("127.0.0.1", true),
            ("127.9.9.9", true),
            ("::1", true),
            ("192.0.2.1", false),
            ("fe80::1", false),
        ] {
            assert_eq!(is_wildcard(text.parse().expect("an address")), wildcard, "{text}");
        }
    }

    #[test]
    fn gids_are_those_of_the_table() {
        assert_eq!(gid(IpAddr::from([10, 0, 0, 1])), Gid::from_ipv4([10, 0, 0, 1]));
        assert_eq!(gid("2001:db8::1".parse().expect("an address")).0[..4], [0x20, 1, 0xd, 0xb8]);
    }
}
