//! Packets to cards of this host, through the memory of sessions ([`crate::peer`]): no system call sends
//! them, and none receives them.
//!
//! A card listens under a name that says its address and UDP port, and takes processes of its own user; each
//! way of two cards has a session of its own. What finds no session, or no room there, is the wire's. Owns
//! the sessions, and when the socket is looked at beside them; it must not know what packets say.

use std::os::fd::RawFd;

use starverbs_core::{FrameMeta, Gid, Nanos};
use starverbs_settings::{LinkMode, Settings};

use super::tap::PacketEnd;
use crate::control::{SENT, StrayFrames, encode_run};
use crate::descriptor::Socket;
use crate::host::{ip_of, own_gids};
use crate::peer::{NO_BLOCK, Peers, SessionId, socket};
use crate::registry::abstract_address;
use crate::sockopt::monotonic;

/// Cards that are known at once.
const KNOWN: usize = 64;
/// How long the wire has the packets for a card that takes no session.
const REFUSED: Nanos = 1_000_000_000;
/// Looks in a row for which the socket had nothing, after which most leave it alone while memory has
/// something.
const QUIET: u32 = 64;
/// And one in so many looks at it, and at who begins or ends a session.
const LOOKS: u32 = 32;

/// What is known of a card.
#[derive(Clone, Copy, Default)]
struct CardFacts {
    end: PacketEnd,
    session: Option<SessionId>,
    /// There was no session; it is tried again then
    again: Nanos,
}

/// The way to and from cards of this host.
pub(super) struct HostCards {
    peers: Peers,
    own: PacketEnd,
    /// Addresses of this host
    here: Vec<Gid>,
    known: [CardFacts; KNOWN],
    looks: u32,
    /// Looks in a row for which the socket had nothing
    quiet: u32,
    /// Who comes from a sleep looks at all
    slept: bool,
    /// Packets that went and that came this way
    pub(super) sent: u64,
    pub(super) came: u64,
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
            known: [CardFacts::default(); KNOWN],
            looks: 0,
            quiet: 0,
            slept: true,
            sent: 0,
            came: 0,
        })
    }

    /// Hands packets of one size over to a card, the last of which may be shorter. False: the wire is to have
    /// them.
    ///
    /// # Safety
    /// The pieces can be read.
    pub(super) unsafe fn pass(&mut self, to: PacketEnd, segment: u16, pieces: &[libc::iovec]) -> bool {
        let [.., low] = to.0.0;
        let at = (usize::from(low) ^ usize::from(to.1)) % KNOWN;
        let known = self.known[at];
        let session = if known.end == to { known.session } else { None };
        let Some(session) = session.or_else(|| self.find(at, to)) else { return false };
        let meta = FrameMeta { src: self.own.0, dst: to.0, ..FrameMeta::default() };
        let run = StrayFrames { meta, sport: self.own.1, segment, first: to.1, tag: SENT };
        // SAFETY: the caller's terms.
        let sent = unsafe { self.peers.send_frames(session, &encode_run(&run), pieces) };
        if sent.is_none() {
            self.known[at] = CardFacts::default();
        }
        sent == Some(true)
    }

    /// The session with a card of which nothing is known.
    #[cold]
    fn find(&mut self, at: usize, to: PacketEnd) -> Option<SessionId> {
        let loopback = matches!(to.0.ipv4(), Some([127, ..]));
        if !loopback && !self.here.contains(&to.0) {
            return None;
        }
        let (now, known) = (monotonic(), self.known[at]);
        if known.end == to && now < known.again {
            return None;
        }
        let address = abstract_address(&card_name(to));
        let session = self.peers.connect(&address, NO_BLOCK, socket::user()).ok();
        self.known[at] = CardFacts { end: to, session, again: now + REFUSED };
        session
    }

    /// Takes a message of packets, its run before them, into `room`; gives its length.
    pub(super) fn next(&mut self, room: &mut [u8]) -> Option<usize> {
        if self.peers.may_have_frames() { self.peers.next_frames(room) } else { None }
    }

    /// Looks at who begins or ends a session, now and then. Whether the socket is to be looked at, too.
    pub(super) fn look(&mut self) -> bool {
        self.looks = self.looks.wrapping_add(1);
        let slept = std::mem::take(&mut self.slept);
        let something = (slept || self.looks.is_multiple_of(LOOKS)) && self.peers.look();
        something || self.quiet < QUIET || !self.peers.may_have_frames()
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

    /// Whoever looked is about to sleep on [`HostCards::fd`].
    pub(super) fn prepare_to_sleep(&mut self) {
        self.slept = true;
        self.peers.prepare_to_sleep();
    }

    /// Readable when something came, of the socket, too.
    pub(super) fn fd(&self) -> RawFd {
        self.peers.fd()
    }
}
