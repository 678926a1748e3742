//! Multicast for guests: processes of another user than the one whose processes share the UDP port.
//!
//! A guest has no socket on the port, so the kernel gives it no multicast. It joins its groups with a socket
//! of its own, and asks a process that has the port, its patron, to hand on what comes for them. The patron's
//! promise lasts [`LEASE`]; the guest renews it, and finds another patron when that one is gone or silent.
//! Each promise has a tag that is on what is handed on, so that two patrons, the one given up and the new
//! one, do not both deliver.
//!
//! Owns both sides of that dialogue. It must not receive frames or hand them on: [`crate::Rx`] does.

use std::os::fd::AsRawFd;
use std::time::Duration;

use nix::sys::socket::{AddressFamily, MsgFlags, UnixAddr, bind, sendto};
use starverbs_core::{Gid, Nanos};

use crate::control::{Wish, decode_grant, encode_wish};
use crate::descriptor::Socket;
use crate::registry::{abstract_address, blocks_of_host, socket_name};
use crate::sockopt::{self, datagram};

/// How long a patron hands on without being asked again.
const LEASE: Nanos = 4_000_000_000;
/// How long a guest waits for one patron's answer, and how often it asks in a row: where there are few, the
/// same ones again, as on a busy host each may take its time.
const PATIENCE: Duration = Duration::from_millis(50);
const TRIES: usize = 8;
/// Guests that a patron serves, and groups of each.
const GUESTS: usize = 64;
const GROUPS: usize = 1024;

/// A patron's guests.
#[derive(Default)]
pub(crate) struct Guests(Vec<Guest>);

struct Guest {
    wish: Wish,
    until: Nanos,
}

impl Guests {
    /// Grants a wish; false: there are too many.
    pub(crate) fn grant(&mut self, wish: Wish, now: Nanos) -> bool {
        self.0.retain(|guest| guest.until > now && guest.wish.block != wish.block);
        let room = self.0.len() < GUESTS && wish.groups.len() <= GROUPS;
        if room && !wish.groups.is_empty() {
            self.0.push(Guest { wish, until: now + LEASE });
        }
        room
    }

    /// Whether there are any, some of whom may be gone.
    pub(crate) fn any(&self) -> bool {
        !self.0.is_empty()
    }

    /// Block and tag of those who want what comes for `group`.
    pub(crate) fn of(&mut self, group: Gid, now: Nanos) -> impl Iterator<Item = (u16, u8)> {
        self.0.retain(|guest| guest.until > now);
        let wants = self.0.iter().filter(move |guest| guest.wish.groups.contains(&group));
        wants.map(|guest| (guest.wish.block, guest.wish.tag))
    }
}

/// A guest's patron.
pub(crate) struct Patron {
    port: u16,
    /// Where grants come
    socket: Option<Socket>,
    block: Option<u32>,
    tag: u8,
    /// It granted the last wish
    granted: bool,
}

impl Patron {
    /// Nobody yet.
    pub(crate) fn new(port: u16) -> Self {
        Patron { port, socket: None, block: None, tag: sockopt::random() as u8, granted: false }
    }

    /// Whether what was handed on with `tag` comes from the patron.
    pub(crate) fn is_its(&self, tag: u8) -> bool {
        self.block.is_some() && tag == self.tag
    }

    /// Asks the patron for `groups` from now on, and waits for its answer; if it does not grant them, asks
    /// others. `own` is the block of who asks.
    pub(crate) fn ask(&mut self, own: u32, groups: &[Gid]) {
        if groups.is_empty() {
            self.wish(own, groups);
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
            if self.wish(own, groups) && self.await_grant() {
                return;
            }
        }
        self.block = None;
    }

    /// Renews the patron's promise without waiting; the next renewal finds whether it was granted.
    pub(crate) fn renew(&mut self, own: u32, groups: &[Gid]) {
        self.take_grants();
        let renewed = groups.is_empty() || (self.granted && self.wish(own, groups));
        if !renewed {
            self.ask(own, groups);
        }
    }

    /// Sends a wish to the patron; false: there is none, it is gone, or does not read.
    fn wish(&mut self, own: u32, groups: &[Gid]) -> bool {
        self.granted = false;
        let Some(block) = self.block else { return false };
        if self.socket.is_none() {
            self.socket = dialogue();
        }
        let Some(socket) = &self.socket else { return false };
        let bytes = encode_wish(&Wish { block: own as u16, tag: self.tag, groups: groups.to_vec() });
        let to = abstract_address(&socket_name(self.port, block));
        sendto(socket.as_raw_fd(), &bytes, &to, MsgFlags::MSG_DONTWAIT).is_ok()
    }

    /// Waits for the answer to the last wish.
    fn await_grant(&mut self) -> bool {
        let Some(fd) = self.socket.as_ref().map(AsRawFd::as_raw_fd) else { return false };
        let end = sockopt::monotonic() + PATIENCE.as_nanos() as Nanos;
        let mut answered = false;
        while !answered && sockopt::monotonic() < end {
            sockopt::wait(&[fd], libc::POLLIN, Duration::from_millis(5));
            answered = self.take_grants();
        }
        self.granted
    }

    /// Takes what patrons answered; says whether this one did.
    fn take_grants(&mut self) -> bool {
        let Some(socket) = &self.socket else { return false };
        let mut answered = false;
        loop {
            let mut bytes = [0u8; 64];
            let (to, room) = (bytes.as_mut_ptr().cast(), bytes.len());
            // SAFETY: the pointer and length describe `bytes`, alive across the call.
            let len = unsafe { libc::recv(socket.as_raw_fd(), to, room, libc::MSG_DONTWAIT) };
            let Ok(len) = usize::try_from(len) else { return answered };
            if let Some((tag, granted)) = decode_grant(&bytes[..len])
                && tag == self.tag
            {
                (self.granted, answered) = (granted, true);
            }
        }
    }
}

/// A unix socket with a name of the kernel's choice, so that it can be answered.
fn dialogue() -> Option<Socket> {
    let socket = datagram(AddressFamily::Unix, "a unix socket").ok()?;
    bind(socket.as_raw_fd(), &UnixAddr::new_unnamed()).ok()?;
    Some(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: Gid = Gid::from_ipv4([239, 1, 1, 1]);

    fn wish(block: u16, tag: u8, groups: &[Gid]) -> Wish {
        Wish { block, tag, groups: groups.to_vec() }
    }

    #[test]
    fn promises_end_unless_they_are_renewed() {
        let mut guests = Guests::default();
        let other = Gid::from_ipv4([239, 1, 1, 2]);
        assert!(guests.grant(wish(7, 1, &[GROUP]), 0) && guests.grant(wish(8, 1, &[GROUP, other]), 10));
        let who = |guests: &mut Guests, group, now| guests.of(group, now).collect::<Vec<_>>();
        assert_eq!(who(&mut guests, GROUP, 20), [(7, 1), (8, 1)]);
        assert_eq!(who(&mut guests, other, 20), [(8, 1)]);
        assert!(guests.grant(wish(7, 2, &[GROUP]), LEASE / 2), "renewed under another tag");
        assert_eq!(who(&mut guests, GROUP, LEASE + 10), [(7, 2)]);
        assert!(guests.grant(wish(7, 2, &[]), LEASE + 10) && !guests.any(), "nothing is wanted");
    }

    #[test]
    fn a_patron_serves_so_many() {
        let mut guests = Guests::default();
        assert!((0..GUESTS as u16).all(|block| guests.grant(wish(block, 1, &[GROUP]), 0)));
        assert!(!guests.grant(wish(GUESTS as u16, 1, &[GROUP]), 0));
        assert!(guests.grant(wish(3, 9, &[GROUP]), 0), "one of them asks again");
        assert!(guests.grant(wish(GUESTS as u16, 1, &[GROUP]), LEASE), "the others are gone");
    }
}
