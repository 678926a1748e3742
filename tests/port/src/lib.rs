//! UDP ports for the cards of tests.

use std::io::ErrorKind;
use std::net::UdpSocket;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Below the ports that the kernel gives away (`net.ipv4.ip_local_port_range`): it gives one again as soon as
/// its socket is closed, and a card without its port receives nothing. Scripts of tests take higher ones.
const FIRST: u32 = 10_000;
const PORTS: u32 = 10_000;

/// A port that no other test has while this process lives, nor anybody else.
///
/// # Panics
/// All are taken.
pub fn free_port() -> u16 {
    let first = std::process::id().wrapping_mul(7);
    let ports = (0..PORTS).map(|n| (FIRST + first.wrapping_add(n) % PORTS) as u16);
    ports.into_iter().find(|port| claim(*port) == Some(())).expect("a free port")
}

/// Holds the port's name until the process ends.
fn claim(port: u16) -> Option<()> {
    let name = SocketAddr::from_abstract_name(format!("starverbs-test-port/{port}")).ok()?;
    let holder = UnixDatagram::bind_addr(&name).ok()?;
    match UdpSocket::bind(("::", port)) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => return None,
        /* a host may be without IPv6 */
        Err(_) => _ = UdpSocket::bind(("0.0.0.0", port)).ok()?,
        Ok(_) => {}
    }
    std::mem::forget(holder);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_port_is_given_once() {
        let mut ports: Vec<u16> = (0..100).map(|_| free_port()).collect();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 100);
    }

    #[test]
    fn what_somebody_has_is_not_given() {
        let bind = |port: u32| UdpSocket::bind(("0.0.0.0", port as u16)).ok();
        let socket = (FIRST..FIRST + PORTS).rev().find_map(bind).expect("a port");
        let port = socket.local_addr().expect("it is bound").port();
        assert_eq!(claim(port), None);
    }
}
