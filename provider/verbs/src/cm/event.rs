//! Events of connections, as sinks get them.

use starverbs_cm::{ConnectResponse, Request, Resolved, Resolving};

use super::Conn;

/// `RDMA_CM_EVENT_UNREACHABLE` and `RDMA_CM_EVENT_DISCONNECTED` of a peer that did not answer: `-ETIMEDOUT`.
pub const TIMED_OUT: i32 = -libc::ETIMEDOUT;

/// What happened to a connection, or came to a listener.
#[derive(Debug)]
pub struct CmEvent {
    /// [`Conn::id`] of the connection: of a request, of the one that it would become
    pub conn: u32,
    /// What happened
    pub kind: CmEventKind,
}

/// Each is an event of `rdma_get_cm_event`.
#[derive(Debug)]
pub enum CmEventKind {
    /// CONNECT_REQUEST of a connection, to a listener's sink. Whoever drops the `Conn` rejects it.
    Request(Conn, Box<Request>),
    /// CONNECT_REQUEST of a datagram id, to a listener's sink. Whoever drops the `Conn` rejects it.
    Resolving(Conn, Box<Resolving>),
    /// CONNECT_RESPONSE: bring the queue pair to RTS, then [`Conn::establish`], which raises no further event
    Response(Box<ConnectResponse>),
    /// ESTABLISHED, on the side that accepted: the RTU came, or [`Conn::notify_comm_est`] was called
    Established,
    /// ESTABLISHED of a datagram id that asked
    Resolved(Box<Resolved>),
    /// REJECTED: by the peer's program, or its connection manager
    Rejected {
        /// The event's status: see [`reason`](super::reason)
        reason: u16,
        /// All [`REJECT_PRIVATE`](super::REJECT_PRIVATE) bytes of the message
        private_data: Vec<u8>,
    },
    /// UNREACHABLE: [`TIMED_OUT`], or the [`sidr`](super::sidr) status
    Unreachable {
        /// The event's status
        status: i32,
    },
    /// DISCONNECTED, once: the peer asked for it (it is answered already), or answered [`Conn::disconnect`]
    Disconnected {
        /// The event's status: 0, or [`TIMED_OUT`] if the peer did not answer
        status: i32,
    },
    /// TIMEWAIT_EXIT: nothing of the connection can come any more; its queue pair may serve another
    TimewaitExit,
}
