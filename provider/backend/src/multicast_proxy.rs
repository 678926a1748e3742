//! Multicast for processes without the UDP port, which belongs to another user's processes.
//!
//! Such a process, a *client*, has no socket on the port, so the kernel gives it no multicast. It joins its
//! groups with a socket of its own, and leases them from a process that has the port, its *proxy*, which
//! forwards what comes for them. A lease lasts [`LEASE_TIME`]. The client renews it, and finds another proxy
//! when that one is gone or silent. Each lease has a tag that forwarded frames carry, so that a former proxy
//! and the new one do not both deliver.
//!
//! Owns both sides of that protocol. It must not receive or forward frames: [`crate::Rx`] does.

use std::os::fd::AsRawFd;
use std::time::Duration;

use nix::sys::socket::{AddressFamily, MsgFlags, UnixAddr, bind, sendto};
use starverbs_core::{Gid, Nanos};

use crate::control::{LeaseRequest, decode_lease_reply, encode_lease_request};
use crate::descriptor::Socket;
use crate::registry::{abstract_address, blocks_of_host, socket_name};
use crate::sockopt::{self, datagram};

/// How long a lease lasts.
const LEASE_TIME: Nanos = 4_000_000_000;
/// How long a client waits for one proxy's reply, and how many requests it sends in a row: to the same ones
/// again where there are few, as on a busy host a reply may be late.
const REPLY_TIMEOUT: Duration = Duration::from_millis(50);
const TRIES: usize = 8;
/// Clients of a proxy, and groups of each.
const MAX_CLIENTS: usize = 64;
const MAX_GROUPS: usize = 1024;

/// The clients of this process, which has the port.
#[derive(Default)]
pub(crate) struct Clients(Vec<ProxyClients>);

struct ProxyClients {
    request: LeaseRequest,
    until: Nanos,
}

impl Clients {
    /// Grants a lease; false: there are too many.
    pub(crate) fn grant(&mut self, request: LeaseRequest, now: Nanos) -> bool {
        self.0.retain(|client| client.until > now && client.request.block != request.block);
        let room = self.0.len() < MAX_CLIENTS && request.groups.len() <= MAX_GROUPS;
        if room && !request.groups.is_empty() {
            self.0.push(ProxyClients { request, until: now + LEASE_TIME });
        }
        room
    }

    /// Whether there are any; some may be gone.
    pub(crate) fn any(&self) -> bool {
        !self.0.is_empty()
    }

    /// Block and tag of the clients that lease `group`.
    pub(crate) fn of(&mut self, group: Gid, now: Nanos) -> impl Iterator<Item = (u16, u8)> {
        self.0.retain(|client| client.until > now);
        let wants = self.0.iter().filter(move |client| client.request.groups.contains(&group));
        wants.map(|client| (client.request.block, client.request.tag))
    }
}

/// The proxy of this process, which does not have the port.
pub(crate) struct MulticastProxy {
    port: u16,
    /// Receives replies
    socket: Option<Socket>,
    block: Option<u32>,
    tag: u8,
    /// It granted the last request
    granted: bool,
}

impl MulticastProxy {
    /// None yet.
    pub(crate) fn new(port: u16) -> Self {
        MulticastProxy { port, socket: None, block: None, tag: sockopt::random() as u8, granted: false }
    }

    /// Whether frames forwarded with `tag` come from the proxy.
    pub(crate) fn is_its(&self, tag: u8) -> bool {
        self.block.is_some() && tag == self.tag
    }

    /// Leases `groups` from the proxy, and waits for its reply; if it does not grant them, from others. `own`
    /// is this process's block.
    pub(crate) fn lease(&mut self, own: u32, groups: &[Gid]) {
        if groups.is_empty() {
            self.send_request(own, groups);
            return;
        }
        let known = self.block;
        let mut blocks: Vec<u32> = known.into_iter().collect();
        let others = blocks_of_host(self.port).into_iter();
        blocks.extend(others.filter(|block| *block != own && Some(*block) != known));
        for block in blocks.into_iter().cycle().take(TRIES) {
            if self.block != Some(block) {
                (self.block, self.tag) = (Some(block), self.tag.wrapping_add(1));
            }
            if self.send_request(own, groups) && self.await_reply() {
                return;
            }
        }
        self.block = None;
    }

    /// Renews the lease without waiting; the next renewal finds whether it was granted.
    pub(crate) fn renew(&mut self, own: u32, groups: &[Gid]) {
        self.take_replies();
        let renewed = groups.is_empty() || (self.granted && self.send_request(own, groups));
        if !renewed {
            self.lease(own, groups);
        }
    }

    /// Sends a request to the proxy; false: there is none, it is gone, or does not read.
    fn send_request(&mut self, own: u32, groups: &[Gid]) -> bool {
        self.granted = false;
        let Some(block) = self.block else { return false };
        if self.socket.is_none() {
            self.socket = reply_socket();
        }
        let Some(socket) = &self.socket else { return false };
        let bytes =
            encode_lease_request(&LeaseRequest { block: own as u16, tag: self.tag, groups: groups.to_vec() });
        let to = abstract_address(&socket_name(self.port, block));
        sendto(socket.as_raw_fd(), &bytes, &to, MsgFlags::MSG_DONTWAIT).is_ok()
    }

    /// Waits for the reply to the last request.
    fn await_reply(&mut self) -> bool {
        let Some(fd) = self.socket.as_ref().map(AsRawFd::as_raw_fd) else { return false };
        let end = sockopt::monotonic() + REPLY_TIMEOUT.as_nanos() as Nanos;
        let mut answered = false;
        while !answered && sockopt::monotonic() < end {
            sockopt::wait(&[fd], libc::POLLIN, Duration::from_millis(5));
            answered = self.take_replies();
        }
        self.granted
    }

    /// Takes replies; gives whether the current proxy's was among them.
    fn take_replies(&mut self) -> bool {
        let Some(socket) = &self.socket else { return false };
        let mut answered = false;
        loop {
            let mut bytes = [0u8; 64];
            let (to, room) = (bytes.as_mut_ptr().cast(), bytes.len());
            // SAFETY: the pointer and length describe `bytes`, alive across the call.
            let len = unsafe { libc::recv(socket.as_raw_fd(), to, room, libc::MSG_DONTWAIT) };
            let Ok(len) = usize::try_from(len) else { return answered };
            if let Some((tag, granted)) = decode_lease_reply(&bytes[..len])
                && tag == self.tag
            {
                (self.granted, answered) = (granted, true);
            }
        }
    }
}

/// A unix socket with a name of the kernel's choice, to which replies can be sent.
fn reply_socket() -> Option<Socket> {
    let socket = datagram(AddressFamily::Unix, "a unix socket").ok()?;
    bind(socket.as_raw_fd(), &UnixAddr::new_unnamed()).ok()?;
    Some(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: Gid = Gid::from_ipv4([239, 1, 1, 1]);

    fn request(block: u16, tag: u8, groups: &[Gid]) -> LeaseRequest {
        LeaseRequest { block, tag, groups: groups.to_vec() }
    }

    #[test]
    fn leases_end_unless_they_are_renewed() {
        let mut clients = Clients::default();
        let other = Gid::from_ipv4([239, 1, 1, 2]);
        assert!(
            clients.grant(request(7, 1, &[GROUP]), 0) && clients.grant(request(8, 1, &[GROUP, other]), 10)
        );
        let who = |clients: &mut Clients, group, now| clients.of(group, now).collect::<Vec<_>>();
        assert_eq!(who(&mut clients, GROUP, 20), [(7, 1), (8, 1)]);
        assert_eq!(who(&mut clients, other, 20), [(8, 1)]);
        assert!(clients.grant(request(7, 2, &[GROUP]), LEASE_TIME / 2), "renewed under another tag");
        assert_eq!(who(&mut clients, GROUP, LEASE_TIME + 10), [(7, 2)]);
        assert!(clients.grant(request(7, 2, &[]), LEASE_TIME + 10) && !clients.any(), "nothing is wanted");
    }

    #[test]
    fn a_proxy_has_a_bound_of_clients() {
        let mut clients = Clients::default();
        assert!((0..MAX_CLIENTS as u16).all(|block| clients.grant(request(block, 1, &[GROUP]), 0)));
        assert!(!clients.grant(request(MAX_CLIENTS as u16, 1, &[GROUP]), 0));
        assert!(clients.grant(request(3, 9, &[GROUP]), 0), "one of them asks again");
        assert!(clients.grant(request(MAX_CLIENTS as u16, 1, &[GROUP]), LEASE_TIME), "the others are gone");
    }
}
