//! The Ethernet address behind a GID, for programs that build frames of their own.
//!
//! Owns the rules and the reading of the kernel's neighbour table. It must not know any object.

use crate::edge::Errno;
use starverbs_core::types::Gid;

type Mac = [u8; 6];

/// The MAC of a GID; `own` says that it is one of this host.
pub(crate) fn mac_of(gid: Gid, own: bool) -> Result<Mac, Errno> {
    let raw = gid.0;
    if own {
        // To itself a host speaks through loopback, whose address is zero.
        return Ok([0; 6]);
    }
    if raw[0] == 0xff {
        return Ok([0x33, 0x33, raw[12], raw[13], raw[14], raw[15]]);
    }
    if let Some(ip) = gid.ipv4() {
        if (224..240).contains(&ip[0]) {
            return Ok([0x01, 0x00, 0x5e, ip[1] & 0x7f, ip[2], ip[3]]);
        }
        let table = std::fs::read_to_string("/proc/net/arp").map_err(|_| libc::EHOSTUNREACH)?;
        return neighbour(&table, ip).ok_or(libc::EHOSTUNREACH);
    }
    // A link-local address made from a MAC (RFC 4291, appendix A).
    if raw[..2] == [0xfe, 0x80] && raw[11..13] == [0xff, 0xfe] {
        return Ok([raw[8] ^ 2, raw[9], raw[10], raw[13], raw[14], raw[15]]);
    }
    Err(libc::EHOSTUNREACH)
}

/// Looks an IPv4 neighbour up in the text of /proc/net/arp.
fn neighbour(table: &str, ip: [u8; 4]) -> Option<Mac> {
    let wanted = std::net::Ipv4Addr::from(ip);
    table.lines().skip(1).find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let found: std::net::Ipv4Addr = words.next()?.parse().ok()?;
        let mut mac: Mac = [0; 6];
        let mut digits = words.nth(2)?.split(':');
        for byte in &mut mac {
            *byte = u8::from_str_radix(digits.next()?, 16).ok()?;
        }
        (found == wanted && mac != [0; 6]).then_some(mac)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_and_link_local_addresses_carry_their_mac() {
        assert_eq!(mac_of(Gid::from_ipv4([224, 129, 2, 3]), false), Ok([1, 0, 0x5e, 1, 2, 3]));
        let mut gid = Gid([0; 16]);
        gid.0[..2].copy_from_slice(&[0xff, 0x02]);
        gid.0[15] = 1;
        assert_eq!(mac_of(gid, false), Ok([0x33, 0x33, 0, 0, 0, 1]));
        gid.0 = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0x52, 0x54, 0, 0xff, 0xfe, 1, 2, 3];
        assert_eq!(mac_of(gid, false), Ok([0x50, 0x54, 0, 1, 2, 3]));
        assert_eq!(mac_of(gid, true), Ok([0; 6]));
        gid.0[0] = 0x20;
        assert_eq!(mac_of(gid, false), Err(libc::EHOSTUNREACH));
    }

    #[test]
    fn neighbours_are_read_from_the_kernels_table() {
        let table = "IP address       HW type     Flags       HW address            Mask     Device\n\
                     10.0.0.2         0x1         0x2         02:00:00:aa:bb:cc     *        eth0\n\
                     10.0.0.3         0x1         0x0         00:00:00:00:00:00     *        eth0\n\
                     nonsense\n";
        assert_eq!(neighbour(table, [10, 0, 0, 2]), Some([2, 0, 0, 0xaa, 0xbb, 0xcc]));
        assert_eq!(neighbour(table, [10, 0, 0, 3]), None);
        assert_eq!(neighbour(table, [10, 0, 0, 4]), None);
    }
}
