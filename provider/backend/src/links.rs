//! Links between the cards of processes that share an XRC domain. They go over the sessions of these
//! processes ([`crate::Peers`]), and end with the other process.
//!
//! A process that is in a domain listens for sessions under a name that says which file, by device and
//! inode, which user, and which QPN block: the kernel forgets it with the process. The one that has messages
//! for the other's SRQs begins a link. Both look whether the other is of the same user, and who is asked
//! whether it is in the domain. Owns names and links; it must not look into messages.

mod domain;

use std::os::fd::RawFd;

use starverbs_core::relay::{LinkError, LinkId};

use crate::BackendError;
use crate::peer::{LinkNews, Peers, SessionId, SessionListenerId};
pub use domain::{DomainLock, DomainName, FileId};

/// Longest message: its head and a packet's payload.
pub const MESSAGE: usize = 4096 + 64;
/// Links that a process keeps, and accepts.
const LINKS: usize = 1024;
/// Events in a row that give no message, before others have their turn.
const WITHOUT_MESSAGE: u32 = 16;

/// What stands before a message in a session: its kind, three zeroes, and whose link it is about.
const HEAD: usize = 8;
/// The link begins; the message is its domain's name
const OPEN: u8 = 1;
/// A message of the link's users
const DATA: u8 = 2;
/// The link ends
const CLOSE: u8 = 3;

/// The links of a card.
pub struct Links {
    peers: Peers,
    domains: Vec<Domain>,
    links: Vec<Option<Link>>,
    /// Links that have ended and were not reported yet
    ended: usize,
    serial: u32,
    /// Where the last message came
    last: usize,
}

/// A domain.
struct Domain {
    domain: u32,
    name: DomainName,
    block: u32,
    listener: SessionListenerId,
}

struct Link {
    domain: u32,
    /// The other end's block, if this end began it
    to: Option<u32>,
    session: SessionId,
    /// Its name in the session, by whoever began it
    tag: u32,
    ended: bool,
}

/// A message, or the end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// So many bytes of a message, on a link, in a domain
    Message(LinkId, u32, usize),
    /// The other end is gone
    Ended(LinkId),
}

fn head(kind: u8, tag: u32) -> [u8; HEAD] {
    let [a, b, c, d] = tag.to_ne_bytes();
    [kind, 0, 0, 0, a, b, c, d]
}

impl Links {
    /// None yet.
    pub fn new(peers: &Peers) -> Links {
        peers.use_links(true);
        let peers = peers.clone();
        Links { peers, domains: Vec::new(), links: Vec::new(), ended: 0, serial: 0, last: 0 }
    }

    /// What to poll(2) for POLLIN, now that there is nothing to do.
    pub fn fd(&self) -> RawFd {
        self.peers.prepare_to_sleep();
        self.peers.fd()
    }

    /// Other processes reach the SRQs of `domain` from now on, under `block`, as the domain `name`.
    ///
    /// # Errors
    /// No socket or no memory can be had, or the name is taken.
    pub fn listen(&mut self, domain: u32, name: &DomainName, block: u32) -> Result<(), BackendError> {
        self.domains.try_reserve(1).map_err(|_| BackendError::NoMemory)?;
        let listener = self.peers.listen(&name.address(block), block, Some(name.user))?;
        self.domains.push(Domain { domain, name: name.clone(), block, listener });
        Ok(())
    }

    /// The domain ends, and with it its links. The other ends are notified.
    pub fn end(&mut self, domain: u32) {
        for ending in self.domains.extract_if(.., |has| has.domain == domain) {
            self.peers.end_listening(ending.listener);
        }
        for at in 0..self.links.len() {
            if self.links[at].as_ref().is_some_and(|link| link.domain == domain) {
                self.close(at, true);
            }
        }
    }

    /// Whether there is any domain.
    pub fn any(&self) -> bool {
        !self.domains.is_empty()
    }

    /// The link to the process that has `block`, in `domain`; begins one if there is none.
    ///
    /// # Errors
    /// Gone: no process of this user has that block and is in the domain. Busy: it does not accept now.
    pub fn link(&mut self, domain: u32, block: u32) -> Result<LinkId, LinkError> {
        let known = |link: &Option<Link>| {
            link.as_ref().is_some_and(|l| l.to == Some(block) && l.domain == domain && !l.ended)
        };
        if let Some(at) = self.links.iter().position(known) {
            return Ok(LinkId(at as u32));
        }
        let here = self.domains.iter().find(|has| has.domain == domain && has.block != block);
        let name = &here.ok_or(LinkError::Gone)?.name;
        let session = self.peers.connect(&name.address(block), block, name.user)?;
        let (name, tag) = (name.clone(), self.serial.wrapping_add(1));
        self.serial = tag;
        let link = Link { domain, to: Some(block), session, tag, ended: false };
        let id = self.add(link).ok_or(LinkError::Busy)?;
        if !self.peers.send(session, true, &[&head(OPEN, tag), name.prefix().as_bytes()], true) {
            self.links[id.0 as usize] = None;
            return Err(LinkError::Busy);
        }
        Ok(id)
    }

    /// Sends `message` and `data` as one message; what is `due` is kept if there is no room. False: it is not
    /// sent.
    pub fn send(&mut self, link: LinkId, message: &[u8], data: &[u8], due: bool) -> bool {
        let Some(Some(found)) = self.links.get(link.0 as usize) else { return false };
        let parts = [&head(DATA, found.tag)[..], message, data];
        self.peers.send(found.session, found.to.is_some(), &parts, due)
    }

    /// The next one, its bytes in `room`. `None`: nothing now, or nothing that could be done; who waits for
    /// [`Links::fd`] is woken for the rest.
    pub fn next(&mut self, room: &mut [u8; MESSAGE]) -> Option<Incoming> {
        for _ in 0..WITHOUT_MESSAGE {
            if self.ended > 0 {
                return self.next_ended();
            }
            let mut head = [0; HEAD];
            match self.peers.next_for_links(&mut head, room)? {
                LinkNews::Ended(session) => {
                    let of = self.links.iter_mut().flatten().filter(|link| link.session == session);
                    for link in of.filter(|link| !link.ended) {
                        link.ended = true;
                        self.ended += 1;
                    }
                }
                LinkNews::Message { session, ours, len } => {
                    let bytes = room.get(..len - HEAD)?;
                    if let Some(incoming) = self.take(session, ours, head, bytes) {
                        return Some(incoming);
                    }
                }
            }
        }
        None
    }

    fn next_ended(&mut self) -> Option<Incoming> {
        self.ended -= 1;
        let at = self.links.iter().position(|link| link.as_ref().is_some_and(|link| link.ended))?;
        self.links[at] = None;
        Some(Incoming::Ended(LinkId(at as u32)))
    }

    /// Another process's message on a link that this end began (`ours`), or that one.
    fn take(&mut self, session: SessionId, ours: bool, head: [u8; HEAD], bytes: &[u8]) -> Option<Incoming> {
        let [kind, _, _, _, tag @ ..] = head;
        let tag = u32::from_ne_bytes(tag);
        let known = self.find(session, ours, tag);
        match (kind, known) {
            (OPEN, None) if !ours => {
                self.open(session, tag, bytes);
                None
            }
            (DATA, Some(at)) => {
                let domain = self.links[at].as_ref()?.domain;
                Some(Incoming::Message(LinkId(at as u32), domain, bytes.len()))
            }
            (CLOSE, Some(at)) => {
                self.close(at, false);
                Some(Incoming::Ended(LinkId(at as u32)))
            }
            _ => None,
        }
    }

    /// The link that a message names.
    fn find(&mut self, session: SessionId, ours: bool, tag: u32) -> Option<usize> {
        let is = |link: &Option<Link>| {
            link.as_ref().is_some_and(|link| {
                (link.session, link.to.is_some(), link.tag) == (session, ours, tag) && !link.ended
            })
        };
        /* nearly always the one that the last message was about */
        if !self.links.get(self.last).is_some_and(is) {
            self.last = self.links.iter().position(is)?;
        }
        Some(self.last)
    }

    /// Another process begins a link. It gets one if it is of the domain's user, and the domain is open here.
    fn open(&mut self, session: SessionId, tag: u32, name: &[u8]) {
        let user = self.peers.user_of(session);
        let named = |has: &&Domain| has.name.prefix().as_bytes() == name && Some(has.name.user) == user;
        let domain = self.domains.iter().find(named).map(|has| has.domain);
        let link = domain.map(|domain| Link { domain, to: None, session, tag, ended: false });
        if link.and_then(|link| self.add(link)).is_none() {
            self.peers.send(session, false, &[&head(CLOSE, tag)], true);
        }
    }

    fn add(&mut self, link: Link) -> Option<LinkId> {
        let at = match self.links.iter().position(Option::is_none) {
            Some(at) => at,
            None if self.links.len() < LINKS => {
                self.links.try_reserve(1).ok()?;
                self.links.push(None);
                self.links.len() - 1
            }
            None => return None,
        };
        self.links[at] = Some(link);
        Some(LinkId(at as u32))
    }

    /// A link ends; `notify`: the other end is to know.
    fn close(&mut self, at: usize, notify: bool) {
        let Some(link) = self.links[at].take() else { return };
        self.ended -= usize::from(link.ended);
        if notify {
            self.peers.send(link.session, link.to.is_some(), &[&head(CLOSE, link.tag)], true);
        }
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        if !self.peers.are_ours() {
            return;
        }
        let domains: Vec<u32> = self.domains.iter().map(|has| has.domain).collect();
        domains.into_iter().for_each(|domain| self.end(domain));
        self.peers.use_links(false);
    }
}

#[cfg(test)]
mod tests;
