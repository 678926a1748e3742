//! A host's queue pairs that are ends of StaR connections, or may become such: `roles` settles their roles,
//! `endpoints` serves the stateless ones.
//!
//! [`Ends`] has them all. Packets for the stateless half are handled and forgotten, those for the stateful
//! half go to the card. Control messages go to whichever of the two has the queue pair. Time, memory and
//! frames come from the [`EndpointHost`]. It must not know what a queue pair is to a program, nor how packets
//! travel.

use starverbs_core::env::Env;
use starverbs_core::nic::{Nic, QpHandover};
use starverbs_core::{FrameMeta, Gid, Nanos, NicError, QpState, Qpn};

use super::bounds::MemRange;
use super::card::{self, CardEnv, Queues, Turn};
use super::control::{MAX_CONTROL, Preference, Role};
use super::datagram::MAX_NEGOTIATION;
use super::endpoint::SlQp;
use super::env::{QpPair, SlEvent, StarSource};
use super::seal::{self, ControlSeal};
use super::stateful::Stateful;
use super::wire::{CardHalf, StarPacket};

pub mod endpoints;
mod places;
pub mod roles;
mod slots;

use endpoints::Endpoints;
use roles::{CardIdentity, Roles};

/// Memory of slots that was made.
pub struct MadeSlots<M> {
    /// Its owner's hold on it
    pub memory: M,
    /// Host address of its first byte
    pub addr: u64,
}

/// What [`Ends`] needs beside what both halves do. Clones of a queue are handles of the same one, which
/// the card's owner uses, too. Who posts to an SRQ that was found empty calls [`Endpoints::ring_srq`].
pub trait EndpointHost: CardEnv + Env<Stats: Clone, Sq: Clone, Rq: Clone, Cq: Clone> {
    /// Memory of slots, which its owner gives back by dropping it
    type Slots;
    /// The addresses of slot memory that was given back are those of slots, or of nothing: it need not be
    /// kept for tokens that name it
    const SLOTS_APART: bool = false;
    /// So many bytes that a card may fill for this program, aligned to the largest slot, until they are given
    /// back. `None`: no memory.
    fn make_slots(&mut self, bytes: u64, program: u64) -> Option<MadeSlots<Self::Slots>>;
    /// Which of the card's programs has made an object of this cookie.
    #[inline]
    fn program_of(cookie: u64) -> u64 {
        let _ = cookie;
        0
    }
    /// Slots of a receive queue: a power of two.
    fn slots_of(queue: &Self::Rq) -> u32;
    /// Where a send queue has inline bytes that are too many for some packets
    /// ([`SMALL_INLINE`](super::message::SMALL_INLINE)): its memory. `None`: it takes no such.
    fn inline_memory(queue: &Self::Sq) -> Option<MemRange>;
    /// What messages are sealed with. `None`: they are plain.
    fn seal(&mut self) -> Option<&mut ControlSeal>;
    /// The next of [`star_event`](super::env::StarEnv::star_event).
    fn next_event(&mut self) -> Option<SlEvent>;
    /// The oldest message that [`negotiate`](super::env::StarEnv::negotiate) has kept.
    fn next_message(&mut self) -> Option<InboundMessage>;
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
    Reverts,
    /// An end of a StaR connection
    Begun(Role),
    /// That could not be; it is in ERR
    Failed(NicError),
}

/// A role message of a peer.
pub struct InboundMessage {
    source: Gid,
    dest: Gid,
    qps: QpPair,
    bytes: [u8; MAX_NEGOTIATION],
    len: usize,
}

impl InboundMessage {
    /// A message between these QPs. `None`: it is too long to be one.
    pub fn new(meta: &FrameMeta, qps: QpPair, message: &[u8]) -> Option<Self> {
        let mut bytes = [0; MAX_NEGOTIATION];
        bytes.get_mut(..message.len())?.copy_from_slice(message);
        Some(InboundMessage { source: meta.src, dest: meta.dst, qps, bytes, len: message.len() })
    }

    fn message(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

/// A StaR packet that came to a host.
pub struct InboundPacket<'a> {
    /// For which half
    pub side: CardHalf,
    /// Between which addresses
    pub meta: &'a FrameMeta,
    /// Its sender's UDP port
    pub port: u16,
    /// The packet, checked
    pub packet: &'a StarPacket<'a>,
}

/// An end that packets are for which come soon, and that was fetched itself.
pub enum ExpectedEnd<'a, E: CardEnv> {
    /// A stateless one
    Stateless(&'a SlQp<E>),
    /// A stateful one
    Stateful(&'a Stateful<E>),
}

impl<E: CardEnv> ExpectedEnd<'_, E> {
    /// Fetches what lies behind it.
    #[inline]
    pub fn expect_behind(&self, turn: &Turn<'_, E>) {
        match self {
            ExpectedEnd::Stateless(end) => end.expect(turn.env),
            ExpectedEnd::Stateful(end) => end.expect(turn.env, turn.nic.engines()),
        }
    }

    /// Once more: what lies in the queues behind that.
    #[inline]
    pub fn expect_wqes(&self) {
        match self {
            ExpectedEnd::Stateless(end) => end.expect_wqes(),
            ExpectedEnd::Stateful(end) => end.expect_wqes(),
        }
    }
}

/// All of a host's ends.
pub struct Ends<E: EndpointHost> {
    /// Who settles roles
    pub roles: Roles<E>,
    /// The stateless ends
    pub endpoints: Endpoints<E>,
    stats: E::Stats,
}

impl<E: EndpointHost> Ends<E> {
    /// None yet, on a card with this memory. `Exhausted`: the host has none to keep that.
    pub fn new(identity: CardIdentity, nic: &mut Nic<E>) -> Result<Self, NicError> {
        let stats = nic.stats().clone();
        let mut endpoints = Endpoints::new(&identity, stats.clone());
        endpoints.learn(nic)?;
        Ok(Ends { roles: Roles::new(identity, stats.clone()), endpoints, stats })
    }

    /// A packet came to one of the two ports.
    pub fn handle_packet(&mut self, turn: &mut Turn<'_, E>, inbound: &InboundPacket<'_>) {
        self.handle_packets(turn, inbound, || None);
    }

    /// As [`handle_packet`](Ends::handle_packet); `more` gives packets that came behind it in the same way,
    /// for the same half and QPN, as long as there are any. Those that are not taken come by themselves.
    pub fn handle_packets<'p>(
        &mut self,
        turn: &mut Turn<'_, E>,
        inbound: &InboundPacket<'_>,
        more: impl FnMut() -> Option<StarPacket<'p>>,
    ) {
        let InboundPacket { side, meta, port, packet } = *inbound;
        match side {
            CardHalf::Stateless => self.endpoints.handle_packet(turn, StarSource { meta, port }, packet),
            CardHalf::Stateful if packet.header.migrate => {
                let mut room = [0; MAX_CONTROL];
                let ends = seal::AddrPair { src: &meta.src, dst: &meta.dst };
                let opened = match turn.env.seal() {
                    Some(seal) => seal.open_packet(ends, packet, &mut room),
                    None => Ok(*packet),
                };
                let Ok(packet) = opened.map_err(|error| error.count(&self.stats)) else { return };
                if !self.endpoints.handle_control(turn, &meta.src, &packet) {
                    self.roles.begin_stateful(turn, &mut self.endpoints, &meta.src, &packet);
                    turn.handle_stateful(&meta.src, &packet, || None);
                }
            }
            CardHalf::Stateful => turn.handle_stateful(&meta.src, packet, more),
        }
    }

    /// Packets for this QPN come behind others that are handled first: what they use may be fetched meanwhile
    /// (csRNA's prefetch, as [`Nic::expect`]). `None`: no end has this number.
    #[inline]
    pub fn expect<'a>(
        &'a self,
        turn: &'a Turn<'_, E>,
        side: CardHalf,
        qpn: Qpn,
    ) -> Option<ExpectedEnd<'a, E>> {
        match side {
            CardHalf::Stateless => self.endpoints.expect(turn.env, qpn).map(ExpectedEnd::Stateless),
            CardHalf::Stateful => card::expect(turn.nic, turn.env, qpn).map(ExpectedEnd::Stateful),
        }
    }

    /// As [`expect`](Ends::expect), of a doorbell. False: no end of StaR has this number.
    #[inline]
    pub fn expect_doorbell(&self, nic: &Nic<E>, env: &E, qpn: Qpn) -> bool {
        card::expect(nic, env, qpn).is_some() || self.endpoints.expect(env, qpn).is_some()
    }

    /// As [`expect_doorbell`](Ends::expect_doorbell), soon: what lies behind the end. False: there is none.
    #[inline]
    pub fn expect_requests(&self, nic: &Nic<E>, env: &E, qpn: Qpn) -> bool {
        card::expect_requests(nic, env, qpn) || self.endpoints.expect_requests(env, qpn)
    }

    /// Takes the role messages that came, and does what is due.
    pub fn poll(&mut self, turn: &mut Turn<'_, E>) {
        let Ends { roles, endpoints, .. } = self;
        while let Some(message) = turn.env.next_message() {
            roles.handle(turn, endpoints, &message);
        }
        roles.handle_timeout(turn, endpoints);
        endpoints.run_timers(turn);
        roles.balance(turn, endpoints);
    }

    /// When [`poll`](Ends::poll) has something to do, with so many connections on the card.
    pub fn next_deadline(&self, connections: u32) -> Option<Nanos> {
        let Ends { roles, endpoints, .. } = self;
        [
            roles.next_deadline(),
            endpoints.next_deadline(),
            roles.balance_due(connections, !endpoints.is_empty()),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// The program of a connected QP has this preference from now on. False: the peer cannot be asked.
    pub fn set_preference(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn, preference: Preference) -> bool {
        self.roles.set_preference(turn, &mut self.endpoints, qpn, preference)
    }

    /// A program has moved a QP of this preference to a state.
    pub fn on_qp_state(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn, preference: Preference, state: QpState) {
        let Ends { roles, endpoints, .. } = self;
        match state {
            QpState::Rtr => roles.begin(turn, endpoints, qpn, preference),
            QpState::Init | QpState::Reset => roles.end(qpn),
            QpState::Err => roles.stop(qpn),
            QpState::Rts | QpState::Sqd | QpState::Sqe => {}
        }
    }
}

/// Other handles of the queues of a QP that the card has.
fn queues_of<E: EndpointHost>(turn: &Turn<'_, E>, qpn: Qpn) -> Result<Queues<E>, NicError> {
    let QpHandover { sq, rq, send_cq, recv_cq, .. } = turn.nic.handover(qpn)?;
    Ok(Queues { sq: sq.clone(), rq: rq.cloned(), send_cq: send_cq.clone(), recv_cq: recv_cq.clone() })
}
