//! Connection management, as librdmacm needs it: listening, connecting, resolving, on InfiniBand CM messages (IBTA volume 1
//! chapter 12) to queue pair 1, with the IP addressing header of annex A11 that Linux' rdma_cm puts into private data.
//!
//! An [`Agent`] is the CM of a process's card. [`Agent::bind`] holds an address and port, among all processes of the host;
//! [`Agent::listen`] has requests to it come in; [`Agent::connect`] and [`Agent::resolve`] ask somebody else's. What happens
//! later is told to a [`Sink`].
//!
//! The CM exchanges messages and numbers. It does not touch queue pairs: bringing them to RTR, RTS and ERR is the caller's,
//! as is resolving addresses and routes.
//!
//! # Sinks
//!
//! A sink is called by whoever runs the card (any thread of the program that is in the library, or the progress thread), with
//! none of the card's locks held, never two at a time on one card, and in the order in which things happened. It should queue
//! the event, wake whom it concerns, and return; it may call [`Conn::set_sink`] and drop a `Conn`. It must not hold what
//! holds its own `Conn` (use a `Weak`), or the connection never ends.

mod params;

use std::net::SocketAddr;

pub use params::*;

use crate::context::Context;
use crate::error::{Result, VerbsError};

/// Who is told.
pub type Sink = std::sync::Arc<dyn Fn(CmEvent) + Send + Sync>;

/// The CM of a process's card. Clones are the same.
#[derive(Clone)]
pub struct Agent(());

/// An address and port that is held; free again when the last clone is dropped (and the [`Listener`] on it).
#[derive(Clone)]
pub struct Reservation(());

/// Requests to an address and port come in while it lives. Connections that came through it live on without it.
pub struct Listener(());

/// A connection, on its way, there, or ending; or a question for a datagram queue pair, or one that was asked here. Clones are
/// the same. The last one that is dropped ends it as well as can be without waiting: REJ if a request is not answered or was
/// not yet established by this side, DREQ if it was established, silence afterwards.
#[derive(Clone, Debug)]
pub struct Conn(());

impl Agent {
    /// The CM of the context's card, which begins with the first call.
    ///
    /// # Errors
    /// `Forked`.
    pub fn of(context: &Context) -> Result<Agent> {
        let _ = context;
        Err(VerbsError::Unsupported("connection management"))
    }

    /// Holds an address and port, as `rdma_bind_addr`, exclusively among the processes of this network namespace.
    ///
    /// # Errors
    /// EADDRINUSE: somebody has it; EADDRNOTAVAIL: the address is not in the GID table, somebody has the port at any address, or
    /// any is asked for and somebody has it at one, or no port is left to pick.
    pub fn bind(&self, bind: Bind) -> Result<Reservation> {
        let _ = bind;
        Err(VerbsError::Unsupported("connection management"))
    }

    /// Has requests come in, `backlog` unanswered ones at a time (at least 1, at most 4096); more are rejected for want of
    /// resources. Each comes as an event to `sink`, with its `Conn`, whose later events go there too until
    /// [`Conn::set_sink`].
    ///
    /// # Errors
    /// EADDRINUSE: somebody listens there, or reuses it.
    pub fn listen(&self, at: &Reservation, backlog: u32, sink: Sink) -> Result<Listener> {
        let _ = (at, backlog, sink);
        Err(VerbsError::Unsupported("connection management"))
    }

    /// `rdma_connect` of a connection: sends the REQ. `Response`, `Rejected` or `Unreachable` (after about a minute) follows.
    ///
    /// # Errors
    /// EINVAL: a number out of range, private data too long, an address of the other IP version; EADDRNOTAVAIL: the source is not
    /// in the GID table; ENOMEM: too many connections.
    pub fn connect(&self, connect: &Connect, sink: Sink) -> Result<Conn> {
        let _ = (connect, sink);
        Err(VerbsError::Unsupported("connection management"))
    }

    /// `rdma_connect` of a datagram id: sends the SIDR_REQ. `Resolved` or `Unreachable` follows.
    ///
    /// # Errors
    /// As [`Agent::connect`].
    pub fn resolve(&self, resolve: &Resolve, sink: Sink) -> Result<Conn> {
        let _ = (resolve, sink);
        Err(VerbsError::Unsupported("connection management"))
    }
}

impl Reservation {
    /// What is held: the port that was picked if 0 was asked for.
    pub fn local(&self) -> SocketAddr {
        unreachable!()
    }
}

impl Listener {
    /// Where it listens.
    pub fn local(&self) -> SocketAddr {
        unreachable!()
    }
}

impl Conn {
    /// Its number, which no other connection of this process has while it lives: the local communication ID.
    pub fn id(&self) -> u32 {
        unreachable!()
    }

    /// Where events go from now on; those not yet told go there too. May be called from a sink.
    pub fn set_sink(&self, sink: Sink) {
        let _ = sink;
    }

    /// `rdma_accept` of a connection's request: sends the REP; `Established` follows, or `Rejected`, `Unreachable`. The queue
    /// pair should be in RTS (or RTR) before.
    ///
    /// # Errors
    /// EINVAL: there is no request to answer, a number out of range, or private data too long.
    pub fn accept(&self, accept: &Accept) -> Result<()> {
        let _ = accept;
        Err(VerbsError::Unsupported("connection management"))
    }

    /// `rdma_reject`, of a request, or of a response that this side does not want: sends the REJ with this [`reason`].
    ///
    /// # Errors
    /// EINVAL: there is nothing to reject, or private data too long.
    pub fn reject(&self, reason: u16, private_data: &[u8]) -> Result<()> {
        let _ = (reason, private_data);
        Err(VerbsError::Unsupported("connection management"))
    }

    /// `rdma_establish`, and the end of `rdma_connect` where the queue pair is ours: sends the RTU.
    ///
    /// # Errors
    /// EINVAL: no response came.
    pub fn establish(&self) -> Result<()> {
        Err(VerbsError::Unsupported("connection management"))
    }

    /// `rdma_disconnect`: sends the DREQ. `Disconnected` follows, then `TimewaitExit`. After `Disconnected` it does nothing.
    ///
    /// # Errors
    /// EINVAL: there never was a connection.
    pub fn disconnect(&self) -> Result<()> {
        Err(VerbsError::Unsupported("connection management"))
    }

    /// `rdma_notify` with IBV_EVENT_COMM_EST: data came, so that the peer is ready although its RTU is not seen yet.
    ///
    /// # Errors
    /// EISCONN: it is established already; EINVAL: nothing was accepted.
    pub fn notify_comm_est(&self) -> Result<()> {
        Err(VerbsError::Unsupported("connection management"))
    }

    /// `rdma_accept` and `rdma_reject` of a datagram id's request: sends the SIDR_REP.
    ///
    /// # Errors
    /// EINVAL: it is no such request, is answered already, or private data too long.
    pub fn answer(&self, answer: &Answer) -> Result<()> {
        let _ = answer;
        Err(VerbsError::Unsupported("connection management"))
    }
}
