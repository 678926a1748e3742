//! Packets to cards of this host, through the memory of sessions ([`crate::peer`]): no system call sends
//! them, and none receives them.
//!
//! A card listens under a name that says its address and UDP port, and takes processes of its own user; each
//! way of two cards has a session of its own. Until the other end has taken it the wire has the packets, as
//! it has those that find no session or no room. Owns the sessions, and when the socket is looked at beside
//! them; it must not know what packets say.

use std::os::fd::RawFd;

use starverbs_core::{FrameMeta, Gid, Nanos};
use starverbs_settings::{LinkMode, Settings};

use super::tap::PacketEnd;
use crate::control::{SENT, StrayFrames, encode_run};
use crate::descriptor::Socket;
use crate::host::{ip_of, is_among, own_gids};
use crate::peer::{NO_BLOCK, Peers, SessionId, socket};
use crate::registry::abstract_address;
use crate::sockopt::monotonic;

/// Cards that are found without a search.
const KNOWN: usize = 64;
/// Cards of this host that are kept in mind.
const WAYS: usize = 4096;
/// How long the wire has the packets for a card that takes no session.
const REFUSED: Nanos = 1_000_000_000;
/// Looks in a row for which the socket had nothing, after which it is asked about together with who begins,
/// ends or wakes a session.
const QUIET: u32 = 64;
/// One look in so many does that in any case, and no other while memory has had something since.
const LOOKS: u32 = 32;

/// What is known of a card.
#[derive(Clone, Copy, Default)]
struct CardFacts {
    end: PacketEnd,
    session: Option<SessionId>,
    /// The other end has taken it
    taken: bool,
    /// There was no session, or nobody took it; it is tried again then
    again: Nanos,
}

/// The way to and from cards of this host.
pub(super) struct HostCards {
    peers: Peers,
    own: PacketEnd,
    /// Addresses of this host
    here: Vec<Gid>,
    /// Cards that were sent to, and where in there they are
    ways: Vec<CardFacts>,
    known: [u16; KNOWN],
    looks: u32,
    /// Looks in a row for which the socket had nothing, and memory
    quiet: u32,
    silent: u32,
    /// Who comes from a sleep looks at all
    slept: bool,
    /// Packets that went this way, and that were received
    pub(super) sent: u64,
    pub(super) received: u64,
}

/// Name under which the card with this end takes sessions.
fn card_name((gid, port): PacketEnd) -> String {
    format!("starverbs/1rma/{}/{port}", ip_of(gid))
}

impl HostCards {
    /// The card's that has this end, and its socket. `None`: the settings want the wire, or the system lacks
    /// something.
    pub(super) fn open(own: PacketEnd, wire: &Socket, settings: &Settings) -> Option<HostCards> {
        if settings.link == LinkMode::Udp {
            return None;
        }
        let peers = Peers::new(own.1).ok()?;
        peers.watch(wire, true).ok()?;
        /* whoever has the name already, nobody comes by it: to this card the others send by the wire */
        let _taken = peers.listen(&abstract_address(&card_name(own)), NO_BLOCK, Some(socket::user()));
        Some(HostCards {
            peers,
            own,
            here: own_gids(),
            ways: Vec::new(),
            known: [0; KNOWN],
            looks: 0,
            quiet: 0,
            silent: 0,
            slept: true,
            sent: 0,
            received: 0,
        })
    }

    /// Hands packets of one size over to a card, the last of which may be shorter. False: the wire is to have
    /// them.
    ///
    /// # Safety
    /// The pieces can be read.
    pub(super) unsafe fn pass(&mut self, to: PacketEnd, segment: u16, pieces: &[libc::iovec]) -> bool {
        let [.., low] = to.0.0;
        let place = (usize::from(low) ^ usize::from(to.1)) % KNOWN;
        let mut at = usize::from(self.known[place]);
        if self.ways.get(at).is_none_or(|card| card.end != to) {
            let Some(found) = self.search(to) else { return false };
            (at, self.known[place]) = (found, found as u16);
        }
        if !self.ways[at].taken && !self.is_taken_now(at) {
            return false;
        }
        let Some(session) = self.ways[at].session else { return false };
        let meta = FrameMeta { src: self.own.0, dst: to.0, ..FrameMeta::default() };
        let run = StrayFrames { meta, sport: self.own.1, segment, first: to.1, tag: SENT };
        // SAFETY: the caller's terms.
        let sent = unsafe { self.peers.send_frames(session, &encode_run(&run), pieces) };
        if sent.is_none() {
            self.ways[at] = CardFacts { end: to, ..CardFacts::default() };
        }
        sent == Some(true)
    }

    /// Where a card of this host is in [`HostCards::ways`]. `None`: it is another host's.
    #[cold]
    fn search(&mut self, to: PacketEnd) -> Option<usize> {
        if !self.is_here(to.0) {
            return None;
        }
        let at = self.ways.iter().position(|card| card.end == to).unwrap_or(self.ways.len());
        if at == self.ways.len() {
            (at < WAYS && self.ways.try_reserve(1).is_ok()).then_some(())?;
            self.ways.push(CardFacts { end: to, ..CardFacts::default() });
        }
        Some(at)
    }

    /// Whether the session with a card has been taken since the last look; begins one where there is none.
    #[cold]
    fn is_taken_now(&mut self, at: usize) -> bool {
        let (now, card) = (monotonic(), &mut self.ways[at]);
        match card.session.map(|session| self.peers.is_taken(session)) {
            Some(Some(taken)) => card.taken = taken,
            Some(None) => (card.session, card.again) = (None, now + REFUSED),
            None if now < card.again => {}
            None => {
                let address = abstract_address(&card_name(card.end));
                card.session = self.peers.connect(&address, NO_BLOCK, socket::user()).ok();
                card.again = now + REFUSED;
            }
        }
        card.taken
    }

    /// Whether an address is this host's.
    pub(super) fn is_here(&self, gid: Gid) -> bool {
        is_among(&self.here, gid)
    }

    /// Takes a message of packets, its run before them, into `room`; gives its length.
    pub(super) fn next(&mut self, room: &mut [u8]) -> Option<usize> {
        let len = if self.peers.may_have_frames() { self.peers.next_frames(room) } else { None };
        if len.is_some() {
            self.silent = 0;
        }
        len
    }

    /// Looks at who begins or ends a session, now and then. Whether the socket is to be looked at, too.
    pub(super) fn look(&mut self) -> bool {
        self.looks = self.looks.wrapping_add(1);
        self.silent = self.silent.saturating_add(1);
        let busy = self.quiet < QUIET;
        let due = self.looks.is_multiple_of(LOOKS) || (!busy && self.silent > LOOKS);
        let something = (std::mem::take(&mut self.slept) || due) && self.peers.look();
        something || busy
    }

    /// The socket had so many datagrams.
    pub(super) fn note_socket(&mut self, got: usize) {
        self.quiet = if got > 0 { 0 } else { self.quiet.saturating_add(1) };
    }

    /// Who calls looks again soon, and need not be woken.
    pub(super) fn set_polled(&mut self, polled: bool) {
        self.peers.set_polled(polled);
    }

    /// At the end of a turn: who sleeps on [`HostCards::fd`] while nobody polls is woken for what was left.
    pub(super) fn settle(&self) {
        self.peers.settle();
    }

    /// A sleep on [`HostCards::fd`] is over: the next turn looks at all.
    pub(super) fn note_woken(&mut self) {
        self.slept = true;
    }

    /// Whoever looked is about to sleep on [`HostCards::fd`].
    pub(super) fn prepare_to_sleep(&mut self) {
        self.note_woken();
        self.peers.prepare_to_sleep();
    }

    /// Readable when something came, of the socket, too.
    pub(super) fn fd(&self) -> RawFd {
        self.peers.fd()
    }
}
