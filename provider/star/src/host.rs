//! A host's queue pairs that are ends of StaR connections, or may become such: who settles their roles, and
//! the library that serves the stateless ones.
//!
//! [`Ends`] has them all. Packets for the stateless half are done and forgotten, those for the stateful half
//! go to the card, control messages to the library if the queue pair is one of its. Time, memory and frames
//! come from the [`Host`]. It must not know what a queue pair is to a program, nor how packets travel.

use starverbs_core::env::Env;
use starverbs_core::nic::{Handover, Nic};
use starverbs_core::{FrameMeta, Gid, Nanos, NicError, QpState, Qpn};

use super::card::{CardEnv, Queues, Turn};
use super::control::{MAX_CONTROL, Role, Wish};
use super::datagram::MAX_NEGOTIATION;
use super::env::SlEvent;
use super::seal::{self, Seal};
use super::wire::{Packet, Side};

pub mod library;
mod places;
pub mod roles;

use library::Library;
use roles::{Identity, Roles};

/// What [`Ends`] needs beside what both halves do. Clones of a queue are handles of the same one, used by the
/// one owner of the card too. Who posts to an SRQ of which there is one, and where somebody looked in vain,
/// tells [`Library::ring_srq`].
pub trait Host: CardEnv + Env<Stats: Clone, Sq: Clone, Rq: Clone, Cq: Clone> {
    /// Memory of slots, which its owner gives back by dropping it
    type Slots;
    /// So many bytes that a card may fill, and where they are: aligned to the largest slot. `None`: no
    /// memory.
    fn make_slots(&mut self, bytes: u64) -> Option<(Self::Slots, u64)>;
    /// Slots of a receive queue: a power of two.
    fn slots_of(queue: &Self::Rq) -> u32;
    /// Where a send queue has inline bytes that are too many for some packets
    /// ([`SMALL_INLINE`](super::message::SMALL_INLINE)): first byte and bytes. `None`: it takes no such.
    fn inline_memory(queue: &Self::Sq) -> Option<(u64, u64)>;
    /// What messages are sealed with. `None`: they are plain.
    fn seal(&mut self) -> Option<&mut Seal>;
    /// The next of [`star_event`](super::env::StarEnv::star_event).
    fn next_event(&mut self) -> Option<SlEvent>;
    /// The oldest of what [`negotiate`](super::env::StarEnv::negotiate) heard.
    fn next_heard(&mut self) -> Option<Heard>;
    /// For people: something of a QP is settled.
    fn note(&mut self, qpn: Qpn, what: &Note) {
        let _ = (qpn, what);
    }
}

/// What became of a QP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Note {
    /// Plain RoCEv2, as it is none that StaR can have
    Unsuited(NicError),
    /// Plain RoCEv2, as its peer is, or as both chose
    Plain,
    /// Plain RoCEv2, as its peer does not begin
    Alone,
    /// What it was, after a round
    Stays,
    /// Plain RoCEv2 no longer, while it runs
    Leaves,
    /// Plain RoCEv2 again, while it runs
    Returns,
    /// An end of a StaR connection
    Begun(Role),
    /// That could not be; it is in ERR
    Failed(NicError),
}

/// What a peer says of the roles.
pub struct Heard {
    source: Gid,
    at: Gid,
    from: Qpn,
    to: Qpn,
    bytes: [u8; MAX_NEGOTIATION],
    len: usize,
}

impl Heard {
    /// What came from the first of these QPs to the second. `None`: it is too long to be understood.
    pub fn new(meta: &FrameMeta, (from, to): (Qpn, Qpn), message: &[u8]) -> Option<Self> {
        let mut bytes = [0; MAX_NEGOTIATION];
        bytes.get_mut(..message.len())?.copy_from_slice(message);
        Some(Heard { source: meta.src, at: meta.dst, from, to, bytes, len: message.len() })
    }

    fn message(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

/// A StaR packet that came to a host.
pub struct Came<'a> {
    /// For which half
    pub side: Side,
    /// Between which addresses
    pub meta: &'a FrameMeta,
    /// Its sender's UDP port
    pub port: u16,
    /// What it says
    pub packet: &'a Packet<'a>,
}

/// All of a host's ends.
pub struct Ends<E: Host> {
    /// Who settles roles
    pub roles: Roles<E>,
    /// The stateless ends
    pub library: Library<E>,
    stats: E::Stats,
}

impl<E: Host> Ends<E> {
    /// None yet, on a card with this memory. `Exhausted`: the host has none to keep that.
    pub fn new(identity: Identity, nic: &mut Nic<E>) -> Result<Self, NicError> {
        let stats = nic.stats().clone();
        let mut library = Library::new(identity.life(), identity.boot, identity.form, stats.clone());
        library.learn(nic)?;
        Ok(Ends { roles: Roles::new(identity, stats.clone()), library, stats })
    }

    /// A packet came.
    pub fn handle_packet(&mut self, turn: &mut Turn<'_, E>, came: &Came<'_>) {
        let Came { side, meta, port, packet } = *came;
        match side {
            Side::Stateless => self.library.serve(turn, (meta, port), packet),
            Side::Stateful if packet.header.migrate => {
                let mut room = [0; MAX_CONTROL];
                let ends = seal::Ends { src: &meta.src, dst: &meta.dst };
                let opened = match turn.env.seal() {
                    Some(seal) => seal.open_packet(ends, packet, &mut room),
                    None => Ok(*packet),
                };
                let Ok(packet) = opened.map_err(|error| error.count(&self.stats)) else { return };
                if !self.library.handle_control(turn, &meta.src, &packet) {
                    self.roles.begin_stateful(turn, &meta.src, &packet);
                    turn.handle_stateful(&meta.src, &packet);
                }
            }
            Side::Stateful => turn.handle_stateful(&meta.src, packet),
        }
    }

    /// Packets for this QPN come behind others that are handled first: what they use may be fetched meanwhile
    /// (csRNA's prefetch, as [`Nic::expect`]).
    #[inline]
    pub fn expect(&self, turn: &Turn<'_, E>, side: Side, qpn: Qpn) {
        match side {
            Side::Stateless => self.library.expect(turn.env, qpn),
            Side::Stateful => turn.expect_stateful(qpn),
        }
    }

    /// Goes on with the roles that are not settled, and with what is due.
    pub fn go_on(&mut self, turn: &mut Turn<'_, E>) {
        let Ends { roles, library, .. } = self;
        while let Some(heard) = turn.env.next_heard() {
            roles.handle(turn, library, &heard);
        }
        roles.handle_timeout(turn, library);
        library.run_timers(turn);
        roles.balance(turn, library);
    }

    /// When [`go_on`](Ends::go_on) has something to do, with so many connections on the card.
    pub fn next_deadline(&self, connections: u32) -> Option<Nanos> {
        let Ends { roles, library, .. } = self;
        [roles.next_deadline(), library.next_deadline(), roles.balance_due(connections, !library.is_empty())]
            .into_iter()
            .flatten()
            .min()
    }

    /// A program wants a connection that it has to be this from now on. False: nobody can be asked for it.
    pub fn wish(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn, wish: Wish) -> bool {
        self.roles.wish(turn, &mut self.library, qpn, wish)
    }

    /// A program has moved a QP of this wish to a state.
    pub fn moved(&mut self, turn: &mut Turn<'_, E>, (qpn, wish): (Qpn, Wish), state: QpState) {
        let Ends { roles, library, .. } = self;
        match state {
            QpState::Rtr => roles.begin(turn, library, (qpn, wish)),
            QpState::Init | QpState::Reset => roles.end(qpn),
            QpState::Err => roles.stop(qpn),
            QpState::Rts | QpState::Sqd | QpState::Sqe => {}
        }
    }
}

/// Other handles of the queues of a QP that the card has.
fn queues_of<E: Host>(turn: &Turn<'_, E>, qpn: Qpn) -> Result<Queues<E>, NicError> {
    let Handover { sq, rq, send_cq, recv_cq, .. } = turn.nic.handover(qpn)?;
    Ok(Queues { sq: sq.clone(), rq: rq.cloned(), send_cq: send_cq.clone(), recv_cq: recv_cq.clone() })
}
