//! Connections between the cards of processes that share an XRC domain: unix sockets that keep messages apart
//! (SOCK_SEQPACKET) and tell of the other end's death.
//!
//! A process that is in a domain listens under a name that says which file, by device and inode, which user,
//! and which QPN block: the kernel forgets it with the process. The one that has messages for the other's
//! SRQs connects. Both look whether the other is of the same user (SO_PEERCRED). Owns names, sockets, and
//! what waits for room; it must not look into messages.

mod domain;
mod due;
mod seqpacket;

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::null_mut;

use starverbs_core::relay::{LinkError, LinkId};

use crate::BackendError;
use crate::descriptor::Socket;
use crate::epoll::{Epoll, Event};
use crate::error::os;
use crate::sockopt::{self, errno};
pub use domain::{DomainName, FileId, Opening};
use due::Due;
use seqpacket::{Sent, is_of, receive, send, seqpacket};

/// Longest message: its head and a packet's payload.
pub const MESSAGE: usize = 4096 + 64;
/// Connections that a process keeps, and accepts.
const LINKS: usize = 1024;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// What one direction of a connection holds, bytes.
const BUFFER: usize = 4 << 20;
/// Looked at in one turn.
const EVENTS: usize = 16;
/// Of what is ready and gives no message, so many in a row.
const IN_VAIN: u32 = 16;
/// Messages of one link in a row, while others wait.
const IN_A_ROW: u32 = 32;
/// The connections of a card.
pub struct Links {
    epoll: Epoll,
    listeners: Vec<Listener>,
    links: Vec<Option<Link>>,
    ready: Vec<Event>,
    /// Messages of the last of them that were given in a row
    given: u32,
}

/// A domain.
struct Listener {
    domain: u32,
    name: DomainName,
    block: u32,
    socket: Socket,
}

struct Link {
    domain: u32,
    /// The other end's block, if this end connected
    to: Option<u32>,
    socket: Socket,
    /// What must arrive and found no room. While it waits, an accepted link is not read: its other end asks
    /// for no more.
    due: Due,
}

/// What came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// So many bytes of a message, on a link, in a domain
    Message(LinkId, u32, usize),
    /// The other end is gone
    Ended(LinkId),
}

/// What a link gave.
enum Taken {
    Came(Incoming),
    Nothing,
    /// It is not read before its other end has taken what is due
    NoRoom,
}

const LISTENER: u64 = 1 << 32;

impl Links {
    /// None yet.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new() -> Result<Links, BackendError> {
        let epoll = Epoll::new()?;
        let ready = Vec::with_capacity(EVENTS);
        Ok(Links { epoll, listeners: Vec::new(), links: Vec::new(), ready, given: 0 })
    }

    /// What to poll(2) for POLLIN.
    pub fn fd(&self) -> RawFd {
        self.epoll.fd()
    }

    /// Other processes reach the SRQs of `domain` from now on, under `block`, as the domain `name`.
    ///
    /// # Errors
    /// No socket or no memory can be had, or the name is taken.
    pub fn listen(&mut self, domain: u32, name: &DomainName, block: u32) -> Result<(), BackendError> {
        const WHAT: &str = "the unix socket of an XRC domain";
        let socket = seqpacket().ok_or_else(|| os(WHAT))?;
        if self.listeners.try_reserve(1).is_err() {
            return Err(BackendError::Socket {
                what: WHAT,
                source: io::Error::from_raw_os_error(libc::ENOMEM),
            });
        }
        let (address, len) = name.address(block);
        // SAFETY: the pointer and length describe `address`, alive across the call.
        let bound = unsafe { libc::bind(socket.as_raw_fd(), std::ptr::from_ref(&address).cast(), len) };
        // SAFETY: no memory is involved.
        if bound < 0 || unsafe { libc::listen(socket.as_raw_fd(), BACKLOG) } < 0 {
            return Err(os(WHAT));
        }
        self.epoll.add(socket.as_raw_fd(), LISTENER | u64::from(domain), libc::EPOLLIN)?;
        self.listeners.push(Listener { domain, name: name.clone(), block, socket });
        Ok(())
    }

    /// The domain ends, and with it its links. The other ends are told by the kernel.
    pub fn end(&mut self, domain: u32) {
        for listener in self.listeners.iter().filter(|listener| listener.domain == domain) {
            self.epoll.remove(listener.socket.as_raw_fd());
        }
        self.listeners.retain(|listener| listener.domain != domain);
        for at in 0..self.links.len() {
            if self.links[at].as_ref().is_some_and(|link| link.domain == domain) {
                self.close(at);
            }
        }
    }

    /// Whether there is any domain.
    pub fn any(&self) -> bool {
        !self.listeners.is_empty()
    }

    /// The link to the process that has `block`, in `domain`; connects if there is none.
    ///
    /// # Errors
    /// Gone: no process of this user has that block and is in the domain. Busy: it does not accept now.
    pub fn link(&mut self, domain: u32, block: u32) -> Result<LinkId, LinkError> {
        let known =
            |link: &Option<Link>| link.as_ref().is_some_and(|l| l.to == Some(block) && l.domain == domain);
        if let Some(at) = self.links.iter().position(known) {
            return Ok(LinkId(at as u32));
        }
        let listener = self.listeners.iter().find(|listener| listener.domain == domain);
        let listener = listener.filter(|listener| listener.block != block).ok_or(LinkError::Gone)?;
        let socket = seqpacket().ok_or(LinkError::Busy)?;
        let (address, len) = listener.name.address(block);
        // SAFETY: the pointer and length describe `address`, alive across the call.
        let rc = unsafe { libc::connect(socket.as_raw_fd(), std::ptr::from_ref(&address).cast(), len) };
        if rc < 0 {
            return Err(if errno() == libc::EAGAIN { LinkError::Busy } else { LinkError::Gone });
        }
        if !is_of(&socket, listener.name.user) {
            return Err(LinkError::Gone);
        }
        self.add(socket, domain, Some(block)).ok_or(LinkError::Busy)
    }

    /// Sends `head` and `data` as one message; what is `due` is kept if there is no room. False: it is not
    /// sent.
    pub fn send(&mut self, link: LinkId, head: &[u8], data: &[u8], due: bool) -> bool {
        let Some(Some(found)) = self.links.get_mut(link.0 as usize) else { return false };
        let full = !found.due.is_empty();
        if !full {
            match send(&found.socket, head, data) {
                Sent::Yes => return true,
                Sent::NoRoom => {}
                Sent::Nobody => return false,
            }
        }
        if !due {
            return false;
        }
        if found.due.keep(head, data).is_none() {
            /* it makes work and does not take the results, or there is no memory for them: it will be seen
             * as ended */
            // SAFETY: no memory is involved.
            unsafe { libc::shutdown(found.socket.as_raw_fd(), libc::SHUT_RDWR) };
            return false;
        }
        if !full {
            let (fd, accepted) = (found.socket.as_raw_fd(), found.to.is_none());
            let also = if accepted { 0 } else { libc::EPOLLIN };
            self.epoll.change(fd, u64::from(link.0), libc::EPOLLOUT | also);
        }
        true
    }

    /// What came next, its bytes in `room`. `None`: nothing now, or nothing that could be done; who waits for
    /// [`Links::fd`] hears of the rest.
    pub fn next(&mut self, room: &mut [u8; MESSAGE]) -> Option<Incoming> {
        /* what cannot be done now is reported again at once: nobody's turn lasts because of it */
        for _ in 0..IN_VAIN {
            if self.given >= IN_A_ROW {
                self.pop();
            }
            if self.ready.is_empty() && !self.look() {
                return None;
            }
            let what = self.ready.last()?.u64;
            if what & LISTENER != 0 {
                self.pop();
                self.accept(what as u32)?;
                continue;
            }
            match self.take(what as usize, room) {
                Taken::Came(incoming) => return Some(incoming),
                Taken::Nothing => self.pop(),
                Taken::NoRoom => {
                    self.pop();
                    return None;
                }
            }
        }
        None
    }

    /// Takes from a link that is ready.
    fn take(&mut self, at: usize, room: &mut [u8; MESSAGE]) -> Taken {
        self.flush(at);
        let Some(Some(link)) = self.links.get(at) else { return Taken::Nothing };
        if !link.due.is_empty() && link.to.is_none() {
            return Taken::NoRoom;
        }
        let id = LinkId(at as u32);
        match receive(&link.socket, room) {
            Some(0) => {
                self.pop();
                self.close(at);
                Taken::Came(Incoming::Ended(id))
            }
            Some(len) => {
                self.given += 1;
                Taken::Came(Incoming::Message(id, link.domain, len))
            }
            None => Taken::Nothing,
        }
    }

    /// Has the next link's turn come.
    fn pop(&mut self) {
        self.ready.pop();
        self.given = 0;
    }

    /// Asks the kernel what came. False: nothing.
    fn look(&mut self) -> bool {
        self.epoll.look(&mut self.ready);
        !self.ready.is_empty()
    }

    /// Accepts a connection. `None`: it could not, and may be able to later.
    fn accept(&mut self, domain: u32) -> Option<()> {
        let Some(listener) = self.listeners.iter().find(|listener| listener.domain == domain) else {
            return Some(());
        };
        let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: nobody asks for the address.
        let fd = unsafe { libc::accept4(listener.socket.as_raw_fd(), null_mut(), null_mut(), flags) };
        if fd < 0 {
            return None;
        }
        // SAFETY: just opened, known to nobody else.
        let socket = Socket::new(unsafe { OwnedFd::from_raw_fd(fd) });
        if is_of(&socket, listener.name.user) {
            let _full = self.add(socket, domain, None);
        }
        Some(())
    }

    fn add(&mut self, socket: Socket, domain: u32, to: Option<u32>) -> Option<LinkId> {
        let at = match self.links.iter().position(Option::is_none) {
            Some(at) => at,
            None if self.links.len() < LINKS => {
                self.links.try_reserve(1).ok()?;
                self.links.push(None);
                self.links.len() - 1
            }
            None => return None,
        };
        sockopt::send_buffer(&socket, BUFFER);
        self.epoll.add(socket.as_raw_fd(), at as u64, libc::EPOLLIN).ok()?;
        self.links[at] = Some(Link { domain, to, socket, due: Due::default() });
        Some(LinkId(at as u32))
    }

    /// Sends what waited; reads again once all is sent.
    fn flush(&mut self, at: usize) {
        let Some(Some(link)) = self.links.get_mut(at) else { return };
        if link.due.is_empty() {
            return;
        }
        while let Some(message) = link.due.front() {
            match send(&link.socket, message, &[]) {
                Sent::Yes => link.due.pop_front(),
                Sent::NoRoom => return,
                /* what it said before it ended is read all the same */
                Sent::Nobody => link.due.clear(),
            }
        }
        let fd = link.socket.as_raw_fd();
        self.epoll.change(fd, at as u64, libc::EPOLLIN);
    }

    fn close(&mut self, at: usize) {
        if let Some(link) = self.links[at].take() {
            self.epoll.remove(link.socket.as_raw_fd());
        }
    }
}

#[cfg(test)]
mod tests;
