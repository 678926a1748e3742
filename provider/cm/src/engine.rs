//! The connection manager: its tables, and the calls in which the world reaches it.
//!
//! `conn` is what is known of a connection, and when its last message goes again; `active` and `passive` are
//! the two sides of connecting (IBTA 12.9.5, 12.9.6), `release` is the way out (12.9.7), `sidr` asks for
//! datagram queue pairs (12.11).

mod active;
mod conn;
mod passive;
mod release;
mod sidr;

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use starverbs_core::{Gid, Mtu, Nanos, Qpn};

use crate::params::{ConnectResponse, Request, Resolved, Resolving};
use crate::wire::message::{self, AnsweredMessage, Ids};
use crate::wire::{Attribute, Mad, fields};
use conn::{Conn, State};

/// Most connections at a time, on their way and ending ones among them.
pub const MAX_CONNS: usize = 1 << 16;
/// Most requests that may wait for a listener's answer.
const MAX_BACKLOG: u32 = 4096;
/// Bits of an ID below those that name its owner.
const ID_BITS: u32 = 20;

/// What a connection manager is made with.
#[derive(Clone, Copy, Debug)]
pub struct CmConfig {
    /// GUID of the card
    pub guid: u64,
    /// Upper 12 bits of each ID that it gives out: among the processes of a host, whose they are
    pub owner: u16,
    /// Where IDs and transactions begin
    pub seed: u64,
}

/// Between which addresses a message goes, and how.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CmPath {
    /// Address of this side
    pub local: Gid,
    /// Address of the peer
    pub remote: Gid,
    /// IP type of service
    pub traffic_class: u8,
    /// IP time to live; 0 is the usual
    pub hop_limit: u8,
}

/// Which addresses a listener is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Scope {
    /// One address
    One(Gid),
    /// All of IPv4
    AnyV4,
    /// All of IPv6
    AnyV6,
    /// All addresses
    Any,
}

impl Scope {
    /// Those that `address` is within, the narrowest first.
    pub fn around(address: Gid) -> [Scope; 3] {
        let family = if address.ipv4().is_some() { Scope::AnyV4 } else { Scope::AnyV6 };
        [Scope::One(address), family, Scope::Any]
    }
}

/// Where a listener listens.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ListenAt {
    /// Service ID
    pub service: u64,
    /// Addresses that it is for
    pub scope: Scope,
}

/// Names a listener.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ListenerId(u32);

struct Listener {
    id: ListenerId,
    backlog: u32,
    /// Requests that wait for an answer
    waiting: u32,
}

/// Why a call fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CmError {
    /// Not in this state of the connection
    State,
    /// A number is out of range, private data too long, or the addresses do not go together
    Invalid,
    /// It is established already
    Established,
    /// There are as many as may be
    Full,
    /// Somebody listens there
    InUse,
}

/// Why a peer was not reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// No answer came in time
    TimedOut,
    /// The status of a SIDR_REP
    Status(u8),
}

/// What happened to a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ConnEvent {
    /// It is new: somebody wants to connect
    Request {
        /// The listener that it is for
        listener: ListenerId,
        /// The REQ's parameters
        request: Box<Request>,
    },
    /// It is new: somebody asks for a datagram queue pair
    Resolving {
        /// The listener that it is for
        listener: ListenerId,
        /// The SIDR_REQ's parameters
        resolving: Box<Resolving>,
    },
    /// A REP was received
    Response(Box<ConnectResponse>),
    /// An RTU or data was received
    Established,
    /// A SIDR_REP was received
    Resolved(Box<Resolved>),
    /// A REJ was received
    Rejected {
        /// See [`crate::reason`]
        reason: u16,
        /// All that the message has
        private_data: Vec<u8>,
    },
    /// No answer, or a SIDR_REP that refuses
    Unreachable(Cause),
    /// A DREQ or DREP was received, or none came in time
    Disconnected {
        /// None came
        timed_out: bool,
    },
    /// Nothing of the connection can come any more
    TimewaitExit,
}

/// An event of a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConnNews {
    /// ID of the connection
    pub id: u32,
    /// What happened to it
    pub event: ConnEvent,
}

/// A message to send.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OutboundMad {
    /// Between which addresses, and how
    pub path: CmPath,
    /// The message
    pub mad: Mad,
}

/// What names a request of a peer's: its address and ID, and whether that is of SIDR.
type RemoteKey = (Gid, u32, bool);

/// The connection manager of one process. See the crate's documentation for the order of calls.
pub struct Cm {
    config: CmConfig,
    conns: BTreeMap<u32, Conn>,
    by_request: BTreeMap<RemoteKey, u32>,
    /// Established connections by the peer's queue pair
    by_qpn: BTreeMap<(Gid, Qpn), u32>,
    listeners: BTreeMap<ListenAt, Listener>,
    timers: BTreeSet<(Nanos, u32)>,
    out: VecDeque<OutboundMad>,
    events: VecDeque<ConnNews>,
    /// Whether there is memory for another request
    room: fn() -> bool,
    /// Largest path MTU towards an address
    mtu: Box<dyn Fn(&Gid) -> Mtu + Send>,
    next_id: u32,
    next_listener: u32,
    transactions: u64,
}

impl Cm {
    /// One without listeners and connections.
    pub fn new(config: CmConfig) -> Cm {
        Cm {
            config,
            conns: BTreeMap::new(),
            by_request: BTreeMap::new(),
            by_qpn: BTreeMap::new(),
            listeners: BTreeMap::new(),
            timers: BTreeSet::new(),
            out: VecDeque::new(),
            events: VecDeque::new(),
            room: || true,
            mtu: Box::new(|_| Mtu::M4096),
            next_id: config.seed as u32,
            next_listener: 0,
            transactions: config.seed >> 16,
        }
    }

    /// What is asked before a request is taken in: false where there is no memory left, and the request is
    /// refused. Without it there always is.
    pub fn ask_for_room(&mut self, room: fn() -> bool) {
        self.room = room;
    }

    /// The largest path MTU that this side has towards an address: a request for a larger one is refused,
    /// with reason 26 and what would do (IBTA 12.6.7.2). Without it there is no limit.
    pub fn limit_mtu(&mut self, mtu: Box<dyn Fn(&Gid) -> Mtu + Send>) {
        self.mtu = mtu;
    }

    /// Has requests come in; at most `backlog` (1 to 4096) wait for an answer at a time, more are rejected.
    ///
    /// # Errors
    /// `InUse`
    pub fn listen(&mut self, at: ListenAt, backlog: u32) -> Result<ListenerId, CmError> {
        if self.listeners.contains_key(&at) {
            return Err(CmError::InUse);
        }
        self.next_listener = self.next_listener.wrapping_add(1);
        let id = ListenerId(self.next_listener);
        let backlog = backlog.clamp(1, MAX_BACKLOG);
        self.listeners.insert(at, Listener { id, backlog, waiting: 0 });
        Ok(id)
    }

    /// No more requests come in. Those that did are as they are.
    pub fn unlisten(&mut self, listener: ListenerId) {
        self.listeners.retain(|_, l| l.id != listener);
    }

    /// Whether somebody listens for `service` at `address`.
    pub fn listens(&self, service: u64, address: Gid) -> bool {
        Scope::around(address)
            .into_iter()
            .any(|scope| self.listeners.contains_key(&ListenAt { service, scope }))
    }

    /// How many connections there are.
    pub fn len(&self) -> usize {
        self.conns.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.conns.is_empty()
    }

    /// A datagram that came to queue pair 1 over `path`.
    pub fn handle_mad(&mut self, now: Nanos, path: CmPath, bytes: &[u8]) {
        let Some(mad) = Mad::parse(bytes) else { return };
        let Some(attribute) = mad.attribute() else { return };
        match attribute {
            Attribute::Req => return self.on_req(now, path, &mad),
            Attribute::SidrReq => return self.on_sidr_req(path, &mad),
            Attribute::SidrRep => return self.on_sidr_rep(path, &mad),
            _ => {}
        }
        let Some(id) = self.find(path, &mad, attribute) else { return self.unknown(path, &mad, attribute) };
        match attribute {
            Attribute::Rep => self.on_rep(id, &mad),
            Attribute::Rtu => self.on_rtu(id),
            Attribute::Mra => self.on_mra(now, id, &mad),
            Attribute::Rej => self.on_rej(now, id, &mad),
            Attribute::Dreq => self.on_dreq(now, id, &mad),
            Attribute::Drep => self.on_drep(now, id),
            Attribute::Lap => self.send_over(path, message::apr(Ids::answering(&mad))),
            _ => {}
        }
    }

    /// Time went on.
    pub fn handle_timeout(&mut self, now: Nanos) {
        while let Some((at, id)) = self.timers.first().copied().filter(|(at, _)| *at <= now) {
            self.timers.remove(&(at, id));
            if let Some(conn) = self.conns.get_mut(&id) {
                conn.due = None;
                self.timer_fired(now, id);
            }
        }
    }

    /// When [`Cm::handle_timeout`] has something to do next.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// The next message to send.
    pub fn poll_send(&mut self) -> Option<OutboundMad> {
        self.out.pop_front()
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<ConnNews> {
        self.events.pop_front()
    }

    /// The connection that a message is for: it names its ID, comes from its peer, and names the peer's ID if
    /// that is known.
    fn find(&self, path: CmPath, mad: &Mad, attribute: Attribute) -> Option<u32> {
        let (id, from) = (mad.get32(fields::REMOTE_ID), mad.get32(fields::LOCAL_ID));
        let id = if id == 0 && attribute == Attribute::Rej { self.rejected_unnamed(path, mad)? } else { id };
        let conn = self.conns.get(&id)?;
        let known = conn.ids.remote;
        /* a peer that rejects without a connection has no ID to name */
        let same = known == 0 || known == from || (attribute == Attribute::Rej && from == 0);
        (conn.path.remote == path.remote && same && !conn.state.is_sidr()).then_some(id)
    }

    /// A peer that gave up before it knew this side's ID names its own (IBTA 12.6.7.2, reason 4).
    fn rejected_unnamed(&self, path: CmPath, mad: &Mad) -> Option<u32> {
        self.by_request.get(&(path.remote, mad.get32(fields::LOCAL_ID), false)).copied()
    }

    /// A message of a connection that is not there.
    fn unknown(&mut self, path: CmPath, mad: &Mad, attribute: Attribute) {
        let ids = Ids::answering(mad);
        let answer = match attribute {
            Attribute::Rep => {
                message::rej(ids, AnsweredMessage::Rep, crate::reason::INVALID_COMM_ID, None, &[])
            }
            /* a side that does not have it has released it */
            Attribute::Dreq => message::drep(ids),
            _ => return,
        };
        self.send_over(path, answer);
    }

    /// Queues a message, once.
    fn send_over(&mut self, path: CmPath, mad: Mad) {
        self.out.push_back(OutboundMad { path, mad });
    }

    /// An ID for a new connection.
    fn new_id(&mut self) -> Result<u32, CmError> {
        if self.conns.len() >= MAX_CONNS {
            return Err(CmError::Full);
        }
        loop {
            self.next_id = self.next_id.wrapping_add(1);
            let id = u32::from(self.config.owner) << ID_BITS | self.next_id & ((1 << ID_BITS) - 1);
            if id != 0 && !self.conns.contains_key(&id) {
                return Ok(id);
            }
        }
    }

    fn new_transaction(&mut self) -> u64 {
        self.transactions = self.transactions.wrapping_add(1);
        self.transactions
    }

    /// The listener for `service` at `address`, the narrowest first.
    fn listener(&mut self, service: u64, address: Gid) -> Option<&mut Listener> {
        let scopes = Scope::around(address).into_iter();
        let at =
            scopes.map(|scope| ListenAt { service, scope }).find(|at| self.listeners.contains_key(at))?;
        self.listeners.get_mut(&at)
    }

    /// Queues an event of a connection, unless the program has released it.
    fn notify(&mut self, id: u32, event: ConnEvent) {
        if self.conns.get(&id).is_some_and(|conn| !conn.released) {
            self.events.push_back(ConnNews { id, event });
        }
    }

    /// A connection is at its end: its record goes, when nobody holds it.
    fn forget_if_released(&mut self, id: u32) {
        let over = |conn: &Conn| conn.released && conn.state == State::Dead;
        if self.conns.get(&id).is_some_and(over) {
            self.disarm(id);
            self.leave_state(id);
            if let Some(conn) = self.conns.remove(&id)
                && let Some(key) = conn.request
            {
                self.by_request.remove(&key);
            }
        }
    }
}
