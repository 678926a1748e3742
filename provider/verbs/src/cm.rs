//! Connection management, as librdmacm needs it: listening, connecting, resolving, on InfiniBand CM messages
//! (IBTA volume 1 chapter 12) to queue pair 1, with the IP addressing header of annex A11 that Linux' rdma_cm
//! puts into private data.
//!
//! An [`Agent`] is the CM of a process's card. [`Agent::bind`] holds an address and port, among all processes
//! of the host; [`Agent::listen`] has requests to it come in; [`Agent::connect`] and [`Agent::resolve`] ask
//! somebody else's. Later events go to a [`Sink`].
//!
//! The CM exchanges messages and numbers. It does not touch queue pairs: bringing them to RTR, RTS and ERR is
//! the caller's, as is resolving addresses and routes.
//!
//! # Sinks
//!
//! A sink is called by whoever runs the card (any thread of the program that is in the library, or the
//! progress thread), with none of the card's locks held, never two at a time on one card, and in the order in
//! which things happened. It should queue the event, wake whom it concerns, and return; it may call
//! [`Conn::set_sink`] and drop a `Conn`. It must not hold what holds its own `Conn` (use a `Weak`), or the
//! connection never ends.

mod address;
mod card;
mod conn;
mod event;
mod host;

use std::net::SocketAddr;
use std::sync::Arc;

pub use conn::Conn;
pub use event::{CmEvent, CmEventKind, TIMED_OUT};
pub use starverbs_cm::{
    ACCEPT_PRIVATE, ANSWER_PRIVATE, Accept, BindAddr, CONNECT_PRIVATE, Connect, ConnectResponse, Ece,
    PortSpace, QpSide, REJECT_PRIVATE, RESOLVE_PRIVATE, Request, Resolve, Resolved, Resolving, Service,
    SidrAnswer, reason, sidr,
};

use starverbs_cm::{ListenAt, ListenerId};

use crate::context::Context;
use crate::error::{Result, VerbsError};
use card::CmCard;
pub(crate) use card::{MadPort, WeakCmCard};
pub(crate) use host::{CmHost, Deliveries, Delivery};

/// Receives the events of connections.
pub type Sink = Arc<dyn Fn(CmEvent) + Send + Sync>;

/// The CM of a process's card. Clones are the same.
#[derive(Clone)]
pub struct Agent {
    card: CmCard,
}

/// An address and port that is held; free again when the last clone is dropped (and the [`Listener`] on it).
#[derive(Clone)]
pub struct Reservation(Arc<HeldAddress>);

struct HeldAddress {
    card: CmCard,
    at: ListenAt,
    local: SocketAddr,
}

/// Requests to an address and port come in while it lives. Connections that came through it live on without
/// it.
pub struct Listener {
    held: Reservation,
    id: ListenerId,
}

impl Agent {
    /// The CM of the context's card.
    ///
    /// # Errors
    /// `Forked`; EOPNOTSUPP: a board that has no queue pair 1; ENOMEM.
    pub fn of(context: &Context) -> Result<Agent> {
        Ok(Agent { card: CmCard::of(context.device()?)? })
    }

    fn card(&self) -> Result<&CmCard> {
        ours(&self.card)
    }

    /// What the card asks before it takes a request in: false where there is no memory left, and the peer is
    /// refused for want of resources.
    pub fn ask_for_room(&self, room: fn() -> bool) -> Result<()> {
        self.card()?.manage(|cm, _| cm.ask_for_room(room));
        Ok(())
    }

    /// Holds an address and port, as `rdma_bind_addr`, exclusively among the processes of this network
    /// namespace.
    ///
    /// # Errors
    /// EADDRINUSE: somebody has it; EADDRNOTAVAIL: the address is not in the GID table, somebody has the port
    /// at any address, or any is asked for and somebody has it at one, or no port is left to pick;
    /// ENOMEM: this process holds 1024; EACCES: the port is for who has CAP_NET_BIND_SERVICE
    /// (`ip_unprivileged_port_start`, ip(7)).
    pub fn bind(&self, bind: BindAddr) -> Result<Reservation> {
        let (scope, local) = address::scope(&self.card()?.info().addrs, bind.local, bind.v6_only)?;
        let claim = |port: u16| {
            let at = ListenAt { service: bind.space.service_id(port), scope };
            self.card.claim_service(at, bind.reuse)?;
            let local = SocketAddr::new(local.ip(), port);
            Ok(Reservation(Arc::new(HeldAddress { card: self.card.clone(), at, local })))
        };
        if local.port() != 0 {
            address::check_port(local.port())?;
            return claim(local.port());
        }
        let taken = |error: &VerbsError| matches!(error.errno(), libc::EADDRINUSE | libc::EADDRNOTAVAIL);
        for port in address::ephemeral_ports() {
            match claim(port) {
                Err(error) if taken(&error) => {}
                other => return other,
            }
        }
        Err(VerbsError::Os(libc::EADDRNOTAVAIL))
    }

    /// Has requests come in, `backlog` unanswered ones at a time (at least 1, at most 4096); more are
    /// rejected for want of resources. Each comes as an event to `sink`, with its `Conn`, whose later
    /// events go there too until [`Conn::set_sink`].
    ///
    /// # Errors
    /// EADDRINUSE: somebody listens there, on the same reservation or one that shares the port.
    pub fn listen(&self, at: &Reservation, backlog: u32, sink: Sink) -> Result<Listener> {
        let card = self.card()?;
        let id = card.with(|host, _, _, _| host.listen(at.0.at, backlog, sink))?;
        Ok(Listener { held: at.clone(), id })
    }

    /// `rdma_connect` of a connection: sends the REQ. `Response`, `Rejected` or `Unreachable` (after about a
    /// minute) follows.
    ///
    /// # Errors
    /// EINVAL: a number out of range, private data too long, an address of the other IP version;
    /// EADDRNOTAVAIL: the source is not in the GID table; ENOMEM: too many connections.
    pub fn connect(&self, connect: &Connect, sink: Sink) -> Result<Conn> {
        let card = self.card()?;
        address::check_source(&card.info().addrs, connect.local)?;
        Conn::begin(&self.card, sink, |cm, now| cm.connect(now, connect))
    }

    /// `rdma_connect` of a datagram id: sends the SIDR_REQ. `Resolved` or `Unreachable` follows.
    ///
    /// # Errors
    /// As [`Agent::connect`].
    pub fn resolve(&self, resolve: &Resolve, sink: Sink) -> Result<Conn> {
        let card = self.card()?;
        address::check_source(&card.info().addrs, resolve.local)?;
        Conn::begin(&self.card, sink, |cm, now| cm.resolve(now, resolve))
    }

    /// The process is about to go: requests that wait are rejected, peers get a DREQ, and the
    /// card receives nothing more, so that what was not read goes to its owners. Nothing in a process
    /// that was forked since.
    pub fn leave(&self) {
        if let Ok(card) = self.card() {
            card.retire();
        }
    }
}

impl Reservation {
    /// What is held: the port that was picked if 0 was asked for.
    pub fn local(&self) -> SocketAddr {
        self.0.local
    }
}

impl Drop for HeldAddress {
    fn drop(&mut self) {
        if self.card.is_ours() {
            self.card.release_service(self.at);
        }
    }
}

impl Listener {
    /// Where it listens.
    pub fn local(&self) -> SocketAddr {
        self.held.local()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let card = &self.held.0.card;
        if card.is_ours() {
            /* what its sink holds is dropped when the card's lock is given back */
            let _sink = card.with(|host, _, _, _| host.unlisten(self.id));
        }
    }
}

/// A port as the system picks one, which nobody holds: the number that a peer is shown of an end that nobody
/// asks for.
pub fn any_port() -> u16 {
    address::ephemeral_ports().next().unwrap_or(u16::MAX)
}

/// EIO in a forked child.
fn ours(card: &CmCard) -> Result<&CmCard> {
    if card.is_ours() { Ok(card) } else { Err(VerbsError::Forked) }
}
