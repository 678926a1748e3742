//! IP addressing (annex A11): which service ID a port is, and the header before a program's private data that
//! names ports and addresses, as Linux' rdma_cm has it.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use starverbs_core::Gid;

use crate::params::PortSpace;

/// Bytes of the header.
pub const HEADER_LEN: usize = 36;

impl PortSpace {
    /// From `enum rdma_port_space`.
    pub fn from_code(code: u64) -> Option<Self> {
        use PortSpace::{Ib, Ipoib, Tcp, Udp};
        [Ipoib, Tcp, Udp, Ib].into_iter().find(|space| *space as u64 == code)
    }

    /// Whether its ids ask for a datagram queue pair rather than a connection.
    pub fn is_datagram(self) -> bool {
        matches!(self, PortSpace::Udp | PortSpace::Ipoib)
    }

    /// The service ID that stands for one of its ports.
    pub fn service_id(self, port: u16) -> u64 {
        (self as u64) << 16 | u64::from(port)
    }

    /// The port that a service ID stands for; `None`: it stands for none.
    pub fn of_service(id: u64) -> Option<(PortSpace, u16)> {
        Some((PortSpace::from_code(id >> 16)?, id as u16))
    }
}

/// The address that a GID stands for.
pub fn ip_of(gid: Gid) -> IpAddr {
    match gid.ipv4() {
        Some(v4) => IpAddr::V4(Ipv4Addr::from(v4)),
        None => IpAddr::V6(Ipv6Addr::from(gid.0)),
    }
}

/// The GID that stands for an address.
pub fn gid_of(ip: IpAddr) -> Gid {
    match ip {
        IpAddr::V4(v4) => Gid::from_ipv4(v4.octets()),
        IpAddr::V6(v6) => Gid(v6.octets()),
    }
}

/// The header: version 0, the addresses' version, the source's port and both addresses. Both are of one
/// version.
pub fn header(from: SocketAddr, to: SocketAddr) -> [u8; HEADER_LEN] {
    let mut out = [0; HEADER_LEN];
    out[1] = if from.is_ipv4() { 4 << 4 } else { 6 << 4 };
    out[2..4].copy_from_slice(&from.port().to_be_bytes());
    for (place, ip) in [(4, from.ip()), (20, to.ip())] {
        match ip {
            IpAddr::V4(v4) => out[place + 12..place + 16].copy_from_slice(&v4.octets()),
            IpAddr::V6(v6) => out[place..place + 16].copy_from_slice(&v6.octets()),
        }
    }
    out
}

/// The source's port in a header. `None`: it is no header, or one of other addresses than those that
/// the message came from and to, which are where answers go, and must be what the program sees.
pub fn source_port(header: &[u8; HEADER_LEN], from: Gid, to: Gid) -> Option<u16> {
    let port = u16::from_be_bytes([header[2], header[3]]);
    let want = self::header(SocketAddr::new(ip_of(from), port), SocketAddr::new(ip_of(to), 0));
    (*header == want).then_some(port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_that_of_the_annex() {
        let from: SocketAddr = "192.0.2.1:4660".parse().expect("an address");
        let to: SocketAddr = "192.0.2.2:7174".parse().expect("an address");
        let bytes = header(from, to);
        assert_eq!(bytes[..4], [0, 0x40, 0x12, 0x34]);
        assert_eq!((&bytes[4..16], &bytes[16..20]), (&[0u8; 12][..], &[192u8, 0, 2, 1][..]));
        assert_eq!((&bytes[20..32], &bytes[32..36]), (&[0u8; 12][..], &[192u8, 0, 2, 2][..]));
        let gids = (gid_of(from.ip()), gid_of(to.ip()));
        assert_eq!(source_port(&bytes, gids.0, gids.1), Some(4660));
        assert_eq!(source_port(&bytes, gids.1, gids.0), None, "not who sent it");
        let v6: SocketAddr = "[2001:db8::1]:1".parse().expect("an address");
        let bytes = header(v6, v6);
        assert_eq!((bytes[1], &bytes[4..8]), (0x60, &[0x20, 0x01, 0x0d, 0xb8][..]));
        assert_eq!(source_port(&bytes, gid_of(v6.ip()), gid_of(v6.ip())), Some(1));
    }

    #[test]
    fn ports_are_service_ids() {
        assert_eq!(PortSpace::Tcp.service_id(7174), 0x0106_1c06);
        assert_eq!(PortSpace::of_service(0x0111_0001), Some((PortSpace::Udp, 1)));
        for foreign in [0x1_0000_0106_0001, 0x0107_0001, 0] {
            assert_eq!(PortSpace::of_service(foreign), None);
        }
    }
}
