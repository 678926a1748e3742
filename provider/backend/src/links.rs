//! Connections between the cards of processes that share an XRC domain: unix sockets that keep messages apart
//! (SOCK_SEQPACKET) and tell of the other end's death.
//!
//! A process that is in a domain listens under a name that says which file, by device and inode, which user, and which QPN
//! block: the kernel forgets it with the process. The one that has messages for the other's SRQs connects. Both
//! look whether the other is of the same user (SO_PEERCRED). Owns names, sockets, and what waits for room; it must not look into messages.

mod domain;
mod seqpacket;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::null_mut;

use starverbs_core::relay::{LinkError, LinkId};

use crate::BackendError;
use crate::descriptor::Socket;
use crate::error::os;
use crate::sockopt::{self, errno};
pub use domain::{DomainName, FileId, Opening};
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
/// Messages that wait for room, at most.
const DUE: usize = 8192;
/// The connections of a card.
pub struct Links {
    epoll: Socket,
    listeners: Vec<Listener>,
    links: Vec<Option<Link>>,
    ready: Vec<libc::epoll_event>,
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
    /// What must arrive and found no room. While it waits, an accepted link is not read: its other end asks for no more.
    due: VecDeque<Vec<u8>>,
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
        // SAFETY: no memory is involved.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(os("an epoll descriptor"));
        }
        // SAFETY: just opened, known to nobody else.
        let epoll = Socket::new(unsafe { OwnedFd::from_raw_fd(fd) });
        let ready = Vec::with_capacity(EVENTS);
        Ok(Links { epoll, listeners: Vec::new(), links: Vec::new(), ready, given: 0 })
    }

    /// What to poll(2) for POLLIN.
    pub fn fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
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
        self.watch(socket.as_raw_fd(), LISTENER | u64::from(domain), libc::EPOLLIN);
        self.listeners.push(Listener { domain, name: name.clone(), block, socket });
        Ok(())
    }

    /// The domain ends, and with it its links. The other ends are told by the kernel.
    pub fn end(&mut self, domain: u32) {
        for listener in self.listeners.iter().filter(|listener| listener.domain == domain) {
            self.unwatch(&listener.socket);
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

    /// Sends `head` and `data` as one message; what is `due` is kept if there is no room. False: it is not sent.
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
        let kept = if found.due.len() < DUE { keep(&mut found.due, head, data) } else { None };
        if kept.is_none() {
            /* it makes work and does not take the results, or there is no memory for them: it will be seen as ended */
            // SAFETY: no memory is involved.
            unsafe { libc::shutdown(found.socket.as_raw_fd(), libc::SHUT_RDWR) };
            return false;
        }
        if !full {
            let (fd, accepted) = (found.socket.as_raw_fd(), found.to.is_none());
            let also = if accepted { 0 } else { libc::EPOLLIN };
            self.rewatch(fd, u64::from(link.0), libc::EPOLLOUT | also);
        }
        true
    }

    /// What came next, its bytes in `room`. `None`: nothing now, or nothing that could be done; who waits for [`Links::fd`]
    /// hears of the rest.
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
        self.ready.clear();
        // SAFETY: room for that many events, which the kernel writes before it says how many.
        unsafe {
            let room = self.ready.as_mut_ptr();
            let got = libc::epoll_wait(self.epoll.as_raw_fd(), room, EVENTS as i32, 0);
            self.ready.set_len(usize::try_from(got).unwrap_or(0));
        }
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
        self.watch(socket.as_raw_fd(), at as u64, libc::EPOLLIN);
        self.links[at] = Some(Link { domain, to, socket, due: VecDeque::new() });
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
                Sent::Yes => drop(link.due.pop_front()),
                Sent::NoRoom => return,
                /* what it said before it ended is read all the same */
                Sent::Nobody => link.due.clear(),
            }
        }
        let fd = link.socket.as_raw_fd();
        self.rewatch(fd, at as u64, libc::EPOLLIN);
    }

    fn close(&mut self, at: usize) {
        if let Some(link) = self.links[at].take() {
            self.unwatch(&link.socket);
        }
    }

    /// Before a socket is closed: the kernel goes on reporting one that a child of this process has, too.
    fn unwatch(&self, socket: &Socket) {
        self.control(libc::EPOLL_CTL_DEL, socket.as_raw_fd(), 0, 0);
    }

    fn watch(&self, fd: RawFd, what: u64, events: i32) {
        self.control(libc::EPOLL_CTL_ADD, fd, what, events);
    }

    fn rewatch(&self, fd: RawFd, what: u64, events: i32) {
        self.control(libc::EPOLL_CTL_MOD, fd, what, events);
    }

    fn control(&self, op: i32, fd: RawFd, what: u64, events: i32) {
        let mut event = libc::epoll_event { events: events as u32, u64: what };
        // SAFETY: the event lives across the call.
        unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), op, fd, &mut event) };
    }
}

/// Keeps a message; `None`: no memory.
fn keep(due: &mut VecDeque<Vec<u8>>, head: &[u8], data: &[u8]) -> Option<()> {
    let mut message = Vec::new();
    message.try_reserve_exact(head.len() + data.len()).ok()?;
    due.try_reserve(1).ok()?;
    message.extend_from_slice(head);
    message.extend_from_slice(data);
    due.push_back(message);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = (1, 2);

    fn pair(port: u16) -> (Links, Links) {
        let mut both = [7, 8].map(|block| {
            let mut links = Links::new().expect("descriptors");
            links.listen(block, &DomainName::new(port, FILE), block).expect("the name is free");
            links
        });
        let [a, b] = &mut both;
        assert_eq!(a.link(7, 9), Err(LinkError::Gone));
        assert_eq!(a.link(7, 7), Err(LinkError::Gone), "itself");
        assert_eq!(b.link(7, 7), Err(LinkError::Gone), "no such domain here");
        let [a, b] = both;
        (a, b)
    }

    #[test]
    fn messages_arrive_in_order_and_so_does_the_end() {
        let (mut a, mut b) = pair(65011);
        let link = a.link(7, 8).expect("it listens");
        assert_eq!(a.link(7, 8), Ok(link), "the same one");
        assert!(a.send(link, b"one", b"", false) && a.send(link, b"t", b"wo", true));
        let mut room = [0; MESSAGE];
        let Some(Incoming::Message(back, 8, 3)) = b.next(&mut room) else { panic!("nothing came") };
        assert!(b.send(back, b"three", b"", true));
        assert_eq!(a.next(&mut room), Some(Incoming::Message(link, 7, 5)));
        drop(a);
        assert_eq!(b.next(&mut room), Some(Incoming::Message(back, 8, 3)));
        assert_eq!(&room[..3], b"two");
        assert_eq!(b.next(&mut room), Some(Incoming::Ended(back)));
        assert_eq!(b.next(&mut room), None);
        assert!(!b.send(back, b"", b"", true));
    }

    #[test]
    fn who_does_not_read_is_not_waited_for_and_misses_nothing_that_is_due() {
        let (mut a, mut b) = pair(65012);
        let link = a.link(7, 8).expect("it listens");
        let data = [5; 4096];
        let mut sent = 0;
        while a.send(link, b"x", &data, false) {
            sent += 1;
        }
        for _ in 0..3 {
            assert!(a.send(link, b"due", b"", true));
        }
        assert!(!a.send(link, b"x", &data, false), "behind what is due");
        let mut room = [0; MESSAGE];
        let mut got = Vec::new();
        for _ in 0..2 {
            while let Some(Incoming::Message(_, _, len)) = b.next(&mut room) {
                got.push(len);
            }
            assert_eq!(a.next(&mut room), None);
        }
        assert_eq!(got, [vec![4097; sent], vec![3; 3]].concat());
    }

    #[test]
    fn a_domain_that_ends_is_seen_by_all() {
        let opening = Opening::begin(DomainName::new(65013, FILE)).expect("nobody opens it");
        assert!(!opening.is_open());
        let (mut a, mut b) = pair(65013);
        assert!(opening.is_open());
        let link = a.link(7, 8).expect("it listens");
        b.end(8);
        let mut room = [0; MESSAGE];
        assert_eq!(a.next(&mut room), Some(Incoming::Ended(link)));
        assert_eq!(a.link(7, 8), Err(LinkError::Gone));
        a.end(7);
        assert!(!opening.is_open() && !a.any());
    }

    #[test]
    fn a_link_that_a_child_has_too_ends_here() {
        let (mut a, b) = pair(65015);
        a.link(7, 8).expect("it listens");
        let in_child = |socket: &Socket| {
            // SAFETY: no memory is involved; the copy is known to nobody else.
            unsafe { OwnedFd::from_raw_fd(libc::dup(socket.as_raw_fd())) }
        };
        let link = in_child(&a.links[0].as_ref().expect("it is open").socket);
        let listener = in_child(&a.listeners[0].socket);
        drop(b);
        let mut room = [0; MESSAGE];
        assert!(matches!(a.next(&mut room), Some(Incoming::Ended(_))));
        assert!(!a.look(), "the kernel reports no link that is closed");
        a.end(7);
        // SAFETY: no memory is involved.
        unsafe { libc::shutdown(listener.as_raw_fd(), libc::SHUT_RDWR) };
        assert!(!a.look(), "and no listener");
        drop((link, listener));
    }

    /// Only a privileged process can change its user; others have nothing to look at.
    #[test]
    fn who_changes_its_user_stays_in_the_domain() {
        let become_user = |user: libc::uid_t| {
            // SAFETY: no memory is involved. The kernel's call, unlike the library's, concerns the calling thread alone.
            unsafe { libc::syscall(libc::SYS_setresuid, -1, user, -1) == 0 }
        };
        let (mut a, mut b) = pair(65014);
        // SAFETY: no memory is involved.
        if unsafe { libc::geteuid() } != 0 || !become_user(65534) {
            return;
        }
        let refused = b.link(8, 7).is_ok();
        assert!(become_user(0), "the real user is as it was");
        let link = a.link(7, 8).expect("it listens");
        assert!(a.send(link, b"one", b"", true));
        become_user(65534);
        let mut room = [0; MESSAGE];
        let came = b.next(&mut room);
        become_user(0);
        assert!(matches!(came, Some(Incoming::Message(_, 8, 3))), "{came:?}: it serves those whom it served");
        assert!(refused, "the name is the one that it had, though the other end will not have it");
        let mut room = [0; MESSAGE];
        assert_eq!(a.next(&mut room), None, "a stranger's connection says nothing");
    }
}
