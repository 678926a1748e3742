//! Service listeners: a process listens for a service ID by holding an abstract unix socket, as it holds its
//! QPNs.
//!
//! A request names a service and no process. Any process that shares the UDP port may receive it, and passes
//! it on to the socket whose name has the port, the service ID and the address. Owns those sockets, and which
//! names exclude each other; it must not read what comes: [`crate::Rx`] does.

use std::os::fd::{AsRawFd, RawFd};

use nix::errno::Errno;
use nix::sys::socket::{self, AddressFamily};
use starverbs_cm::{ListenAt, Scope};
use starverbs_core::Gid;

use crate::descriptor::Socket;
use crate::epoll::Epoll;
use crate::error::os_error;
use crate::host::ip_of;
use crate::registry::abstract_address;
use crate::sockopt;
use crate::{BackendError, HostAddr};

const WHAT: &str = "the unix socket of a service";
/// Most services of a process.
const MOST: usize = 1024;

/// Name of the abstract socket (without its leading NUL) of the listener there, on the wire of UDP `port`.
pub(crate) fn socket_name(port: u16, at: ListenAt) -> String {
    let service = at.service;
    match at.scope {
        Scope::One(gid) => format!("starverbs/{port}/cm/{service:x}/{}", ip_of(gid)),
        Scope::AnyV4 => format!("starverbs/{port}/cm/{service:x}/v4"),
        Scope::AnyV6 => format!("starverbs/{port}/cm/{service:x}/v6"),
        Scope::Any => format!("starverbs/{port}/cm/{service:x}/all"),
    }
}

struct ServiceListener {
    at: ListenAt,
    /// Its name, and the narrower ones within it: each is held as long as its socket lives, and frames come
    /// to any
    sockets: Vec<Socket>,
    /// How often it is held, by holders that all share it
    holders: u32,
    shared: bool,
}

/// The services that this process listens for.
pub(crate) struct ServiceListeners {
    port: u16,
    addrs: Vec<Gid>,
    listeners: Vec<ServiceListener>,
    /// An epoll instance on their sockets: requests are rare, and one call sees all of them
    epoll: Option<Epoll>,
}

impl ServiceListeners {
    pub(crate) fn new(port: u16, addrs: &[HostAddr]) -> Self {
        let addrs = addrs.iter().map(|addr| addr.gid).collect();
        ServiceListeners { port, addrs, listeners: Vec::new(), epoll: None }
    }

    /// Holds a service; `shared`: others of this process may hold it, if they share it too.
    pub(crate) fn claim(&mut self, at: ListenAt, shared: bool) -> Result<(), BackendError> {
        if let Some(listener) = self.listeners.iter_mut().find(|listener| listener.at == at) {
            if !(shared && listener.shared) {
                return Err(BackendError::ServiceTaken);
            }
            listener.holders += 1;
            return Ok(());
        }
        if self.listeners.len() >= MOST {
            return Err(BackendError::ServicesFull(MOST));
        }
        let sockets = self.bind_all(at)?;
        for (n, socket) in sockets.iter().enumerate() {
            if let Err(error) = self.watch(socket) {
                sockets[..n].iter().for_each(|socket| self.unwatch(socket));
                return Err(error);
            }
        }
        self.listeners.push(ServiceListener { at, sockets, holders: 1, shared });
        Ok(())
    }

    /// Binds the name of `at` and those of all that it takes in: whoever passes a request on tries the
    /// narrowest name first, and the kernel gives each name once.
    fn bind_all(&self, at: ListenAt) -> Result<Vec<Socket>, BackendError> {
        let held = |scopes: &[Scope]| {
            scopes.iter().any(|scope| is_held(self.port, ListenAt { scope: *scope, ..at }))
        };
        let first = bind(self.port, at)?.ok_or_else(|| {
            if held(&wider(at.scope)) { BackendError::ServiceOverlaps } else { BackendError::ServiceTaken }
        })?;
        let mut sockets = vec![first];
        for scope in self.within(at.scope) {
            let narrower = bind(self.port, ListenAt { scope, ..at })?;
            sockets.push(narrower.ok_or(BackendError::ServiceOverlaps)?);
        }
        /* a wider holder that does not know of this address has not bound its name. After the binding, so
         * that of two that do this at once one at least sees the other */
        if held(&wider(at.scope)) { Err(BackendError::ServiceOverlaps) } else { Ok(sockets) }
    }

    /// Gives a service back; it is free when all holders have.
    pub(crate) fn release(&mut self, at: ListenAt) {
        if let Some(place) = self.listeners.iter().position(|listener| listener.at == at) {
            self.listeners[place].holders -= 1;
            if self.listeners[place].holders == 0 {
                let listener = self.listeners.swap_remove(place);
                listener.sockets.iter().for_each(|socket| self.unwatch(socket));
            }
        }
    }

    /// Holds nothing any more.
    pub(crate) fn clear(&mut self) {
        self.listeners.clear();
        self.epoll = None;
    }

    /// Whether this process holds `service` for `address`.
    pub(crate) fn holds(&self, service: u64, address: Gid) -> bool {
        let scopes = Scope::around(address);
        self.listeners
            .iter()
            .any(|listener| listener.at.service == service && scopes.contains(&listener.at.scope))
    }

    /// What to poll(2): readable when a request came.
    pub(crate) fn ready_fd(&self) -> Option<RawFd> {
        self.epoll.as_ref().map(Epoll::fd)
    }

    /// A socket to which a request came.
    pub(crate) fn next_ready(&self) -> Option<RawFd> {
        self.epoll.as_ref()?.look().next().map(|fd| fd as RawFd)
    }

    /// The narrower scopes that `scope` takes in.
    fn within(&self, scope: Scope) -> Vec<Scope> {
        let families: &[(Scope, bool)] = match scope {
            Scope::One(_) => &[],
            Scope::AnyV4 => &[(scope, true)],
            Scope::AnyV6 => &[(scope, false)],
            Scope::Any => &[(Scope::AnyV4, true), (Scope::AnyV6, false)],
        };
        let mut all = Vec::new();
        for (family, v4) in families {
            let addresses = self.addrs.iter().filter(|gid| gid.ipv4().is_some() == *v4);
            for narrower in addresses.map(|gid| Scope::One(*gid)).chain([*family]) {
                /* interfaces may have an address in common */
                if narrower != scope && !all.contains(&narrower) {
                    all.push(narrower);
                }
            }
        }
        all
    }

    fn watch(&mut self, socket: &Socket) -> Result<(), BackendError> {
        let epoll = match &mut self.epoll {
            Some(epoll) => epoll,
            none => none.insert(Epoll::new()?),
        };
        epoll.add(socket, socket.as_raw_fd() as u64)
    }

    fn unwatch(&self, socket: &Socket) {
        if let Some(epoll) = &self.epoll {
            epoll.remove(socket);
        }
    }
}

/// The scopes that take `scope` in.
fn wider(scope: Scope) -> Vec<Scope> {
    match scope {
        Scope::One(gid) => Scope::around(gid)[1..].to_vec(),
        Scope::AnyV4 | Scope::AnyV6 => vec![Scope::Any],
        Scope::Any => vec![],
    }
}

/// A socket with the name of `at`; `None`: some process has it.
fn bind(port: u16, at: ListenAt) -> Result<Option<Socket>, BackendError> {
    let socket = sockopt::host_socket(WHAT)?;
    match socket::bind(socket.as_raw_fd(), &abstract_address(&socket_name(port, at))) {
        Ok(()) => Ok(Some(socket)),
        Err(Errno::EADDRINUSE) => Ok(None),
        Err(error) => Err(os_error(WHAT, error)),
    }
}

/// Whether some process holds a service.
fn is_held(port: u16, at: ListenAt) -> bool {
    let Ok(socket) = sockopt::datagram(AddressFamily::Unix, WHAT) else { return false };
    socket::connect(socket.as_raw_fd(), &abstract_address(&socket_name(port, at))).is_ok()
}

#[cfg(test)]
mod tests {
    use std::os::fd::{FromRawFd, OwnedFd};

    use super::*;

    const PORT: u16 = 65006;

    fn at(scope: Scope) -> ListenAt {
        ListenAt { service: 0x0106_1c06, scope }
    }

    fn listeners() -> ServiceListeners {
        let addrs = crate::host::addresses(&Default::default()).expect("loopback");
        ServiceListeners::new(PORT, &addrs)
    }

    #[test]
    fn a_service_has_one_holder_unless_all_share_it() {
        let (mut a, mut b) = (listeners(), listeners());
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
        assert_eq!(a.next_ready(), None);
    }

    #[test]
    fn nobody_gets_between_a_holder_of_all_addresses_and_its_requests() {
        let one = Scope::One(Gid::from_ipv4([127, 0, 0, 1]));
        for (held, within) in [(Scope::AnyV4, vec![one]), (Scope::Any, vec![one, Scope::AnyV4, Scope::AnyV6])]
        {
            let service = ListenAt { service: 0x0106_1c07, scope: held };
            let mut listeners = listeners();
            listeners.claim(service, false).expect("free");
            for scope in within {
                let name = socket_name(PORT, ListenAt { scope, ..service });
                /* a program of another user, which asks nobody, and one that passes a request on */
                assert!(!binds(&name), "{held:?} {scope:?}");
                assert_eq!(crate::handover::pass_to(&name, b"x", b""), crate::handover::PassedOn::Yes);
                let mut room = [0u8; 8];
                let fd = listeners.next_ready().expect("it comes to the holder");
                // SAFETY: the pointer and length describe `room`.
                assert_eq!(unsafe { libc::recv(fd, room.as_mut_ptr().cast(), 8, 0) }, 1);
            }
            listeners.release(service);
        }
    }

    #[test]
    fn a_service_that_a_child_has_too_is_silent_when_it_is_given_back() {
        let mut listeners = listeners();
        let service = ListenAt { service: 0x0106_1c08, scope: Scope::One(Gid::from_ipv4([127, 0, 0, 1])) };
        listeners.claim(service, false).expect("free");
        // SAFETY: no memory is involved; the copy is known to nobody else.
        let child = unsafe { OwnedFd::from_raw_fd(libc::dup(listeners.listeners[0].sockets[0].as_raw_fd())) };
        listeners.release(service);
        let name = socket_name(PORT, service);
        assert_eq!(crate::handover::pass_to(&name, b"x", b""), crate::handover::PassedOn::Yes);
        assert_eq!(listeners.next_ready(), None);
        drop(child);
    }

    /// Whether the name can be had.
    fn binds(name: &str) -> bool {
        let socket = sockopt::datagram(AddressFamily::Unix, WHAT).expect("a socket");
        socket::bind(socket.as_raw_fd(), &abstract_address(name)).is_ok()
    }
}
