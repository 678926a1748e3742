//! Who listens for which service ID on this host: a process holds one by an abstract unix socket, as it holds its QPNs.
//!
//! A request names a service and no process. It comes to any process that shares the UDP port, which passes it on to the
//! socket whose name says the port, the service ID and the address. Owns those sockets, and which names exclude each other; it
//! must not read what comes: [`crate::Rx`] does.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use starverbs_cm::{ListenAt, Scope};
use starverbs_core::Gid;

use crate::descriptor::Socket;
use crate::error::os;
use crate::host::ip_of;
use crate::registry::abstract_address;
use crate::sockopt::{self, errno};
use crate::{BackendError, HostAddr};

const WHAT: &str = "the unix socket of a service";
/// Most services that a process holds.
const MOST: usize = 1024;

/// Name of the abstract socket (without its leading NUL) of whoever listens there on the wire of UDP `port`.
pub(crate) fn door_name(port: u16, at: ListenAt) -> String {
    let service = at.service;
    match at.scope {
        Scope::One(gid) => format!("starverbs/{port}/cm/{service:x}/{}", ip_of(gid)),
        Scope::AnyV4 => format!("starverbs/{port}/cm/{service:x}/v4"),
        Scope::AnyV6 => format!("starverbs/{port}/cm/{service:x}/v6"),
        Scope::Any => format!("starverbs/{port}/cm/{service:x}/all"),
    }
}

struct Door {
    at: ListenAt,
    /// The name is held as long as it lives
    _socket: Socket,
    /// How often it is held, by holders that all share it
    holders: u32,
    shared: bool,
}

/// The services of this process.
pub(crate) struct Doors {
    port: u16,
    addrs: Vec<Gid>,
    doors: Vec<Door>,
    /// An epoll instance on their sockets: what comes is rare, and one call sees it
    bell: Option<Socket>,
}

impl Doors {
    pub(crate) fn new(port: u16, addrs: &[HostAddr]) -> Self {
        Doors { port, addrs: addrs.iter().map(|addr| addr.gid).collect(), doors: Vec::new(), bell: None }
    }

    /// Holds a service; `shared`: others of this process may hold it, if they say so too.
    pub(crate) fn claim(&mut self, at: ListenAt, shared: bool) -> Result<(), BackendError> {
        if let Some(door) = self.doors.iter_mut().find(|door| door.at == at) {
            if !(shared && door.shared) {
                return Err(BackendError::ServiceTaken);
            }
            door.holders += 1;
            return Ok(());
        }
        if self.doors.len() >= MOST {
            return Err(BackendError::ServicesFull(MOST));
        }
        let socket = sockopt::datagram(libc::AF_UNIX, WHAT)?;
        let (address, len) = abstract_address(&door_name(self.port, at));
        // SAFETY: the pointer and length describe `address`, alive across the call.
        let rc = unsafe { libc::bind(socket.as_raw_fd(), std::ptr::from_ref(&address).cast(), len) };
        if rc < 0 {
            return Err(if errno() == libc::EADDRINUSE { BackendError::ServiceTaken } else { os(WHAT) });
        }
        /* behind the binding, so that of two that do this at once one at least sees the other */
        if self.is_held_elsewhere(at) {
            return Err(BackendError::ServiceOverlaps);
        }
        self.watch(&socket)?;
        self.doors.push(Door { at, _socket: socket, holders: 1, shared });
        Ok(())
    }

    /// Gives a service back; it is free when all holders have.
    pub(crate) fn release(&mut self, at: ListenAt) {
        if let Some(place) = self.doors.iter().position(|door| door.at == at) {
            self.doors[place].holders -= 1;
            if self.doors[place].holders == 0 {
                self.doors.swap_remove(place);
            }
        }
    }

    /// Holds nothing any more.
    pub(crate) fn clear(&mut self) {
        self.doors.clear();
        self.bell = None;
    }

    /// Whether this process holds `service` for `address`.
    pub(crate) fn holds(&self, service: u64, address: Gid) -> bool {
        let scopes = Scope::around(address);
        self.doors.iter().any(|door| door.at.service == service && scopes.contains(&door.at.scope))
    }

    /// What to poll(2): readable when something came.
    pub(crate) fn bell(&self) -> Option<RawFd> {
        self.bell.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// A socket to which something came.
    pub(crate) fn ready(&self) -> Option<RawFd> {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: room for one event, alive across the call.
        let got = unsafe { libc::epoll_wait(self.bell()?, &mut event, 1, 0) };
        (got == 1).then_some(event.u64 as RawFd)
    }

    /// Whether a service of any address is held where one of one address is to be, or the other way round.
    fn is_held_elsewhere(&self, at: ListenAt) -> bool {
        let held = |scope| is_held(self.port, ListenAt { scope, ..at });
        let one = |v4: bool| {
            let family = self.addrs.iter().filter(move |gid| gid.ipv4().is_some() == v4);
            family.map(|gid| Scope::One(*gid)).any(held)
        };
        match at.scope {
            Scope::One(gid) => Scope::around(gid)[1..].iter().any(|scope| held(*scope)),
            Scope::AnyV4 => held(Scope::Any) || one(true),
            Scope::AnyV6 => held(Scope::Any) || one(false),
            Scope::Any => held(Scope::AnyV4) || held(Scope::AnyV6) || one(true) || one(false),
        }
    }

    fn watch(&mut self, socket: &Socket) -> Result<(), BackendError> {
        if self.bell.is_none() {
            // SAFETY: epoll_create1() takes no pointers.
            let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
            if fd < 0 {
                return Err(os("an epoll instance"));
            }
            // SAFETY: `fd` was just opened and nobody else knows it.
            self.bell = Some(Socket::new(unsafe { OwnedFd::from_raw_fd(fd) }));
        }
        let fd = socket.as_raw_fd();
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: fd as u64 };
        let bell = self.bell().unwrap_or(-1);
        // SAFETY: the event lives across the call. The kernel takes the entry out when the socket is closed.
        let rc = unsafe { libc::epoll_ctl(bell, libc::EPOLL_CTL_ADD, fd, &mut event) };
        if rc < 0 { Err(os("an epoll instance")) } else { Ok(()) }
    }
}

/// Whether some process holds a service.
fn is_held(port: u16, at: ListenAt) -> bool {
    let Ok(socket) = sockopt::datagram(libc::AF_UNIX, WHAT) else { return false };
    let (address, len) = abstract_address(&door_name(port, at));
    // SAFETY: the pointer and length describe `address`, alive across the call.
    unsafe { libc::connect(socket.as_raw_fd(), std::ptr::from_ref(&address).cast(), len) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORT: u16 = 65006;

    fn at(scope: Scope) -> ListenAt {
        ListenAt { service: 0x0106_1c06, scope }
    }

    fn doors() -> Doors {
        let addrs = crate::host::addresses(&Default::default()).expect("loopback");
        Doors::new(PORT, &addrs)
    }

    #[test]
    fn a_service_has_one_holder_unless_all_share_it() {
        let (mut a, mut b) = (doors(), doors());
        let one = Scope::One(Gid::from_ipv4([127, 0, 0, 1]));
        a.claim(at(one), false).expect("free");
        assert!(a.holds(at(one).service, Gid::from_ipv4([127, 0, 0, 1])));
        assert!(!a.holds(at(one).service, Gid::from_ipv4([127, 0, 0, 2])));
        assert!(matches!(a.claim(at(one), true), Err(BackendError::ServiceTaken)));
        assert!(matches!(b.claim(at(one), true), Err(BackendError::ServiceTaken)));
        for any in [Scope::AnyV4, Scope::Any] {
            assert!(matches!(b.claim(at(any), false), Err(BackendError::ServiceOverlaps)), "{any:?}");
        }
        b.claim(at(Scope::AnyV6), false).expect("another family");
        b.release(at(Scope::AnyV6));
        a.release(at(one));
        b.claim(at(Scope::Any), true).expect("free again");
        assert!(matches!(a.claim(at(one), false), Err(BackendError::ServiceOverlaps)));
        b.claim(at(Scope::Any), true).expect("shared");
        b.release(at(Scope::Any));
        assert!(b.holds(at(one).service, Gid::from_ipv4([127, 0, 0, 1])), "one holder is left");
        b.release(at(Scope::Any));
        a.claim(at(one), false).expect("free again");
        assert_eq!(a.ready(), None);
    }
}
