//! Parameters that a program gives for a connection, and those of its events: the numbers of `rdma_connect`,
//! `rdma_accept` and `struct rdma_cm_event`.
//!
//! Private data is the program's own: what the CM puts before it (the IP addressing header of annex A11) is
//! not seen here.

use alloc::vec::Vec;
use core::net::SocketAddr;

use starverbs_core::{Mtu, Psn, Qpn};

/// Bytes of private data that a program may give to `rdma_connect` for a connection.
pub const CONNECT_PRIVATE: usize = 56;
/// Bytes of private data that a program may give to `rdma_accept` of a connection.
pub const ACCEPT_PRIVATE: usize = 196;
/// Bytes of private data that a program may give to `rdma_reject` of a connection.
pub const REJECT_PRIVATE: usize = 148;
/// Bytes of private data that a program may give to `rdma_connect` of a datagram id.
pub const RESOLVE_PRIVATE: usize = 180;
/// Bytes of private data that a program may give to `rdma_accept` and `rdma_reject` of a datagram id.
pub const ANSWER_PRIVATE: usize = 136;

/// `enum rdma_port_space`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u16)]
pub enum PortSpace {
    /// RDMA_PS_IPOIB: datagrams of IP over InfiniBand
    Ipoib = 0x0002,
    /// RDMA_PS_TCP: connections
    Tcp = 0x0106,
    /// RDMA_PS_UDP: datagrams, by SIDR
    Udp = 0x0111,
    /// RDMA_PS_IB: any transport, by service ID
    Ib = 0x013f,
}

/// Transport of the queue pair that is to be connected (IBTA 12.7.9, and the extended type of annex A14).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Service {
    /// Reliable connection
    Rc,
    /// Unreliable connection
    Uc,
    /// Extended reliable connection
    Xrc,
}

/// Enhanced connection establishment: `struct ibv_ece` without its mask.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ece {
    /// Vendor, 24 bits
    pub vendor_id: u32,
    /// The vendor's options
    pub options: u32,
}

/// One side's queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpSide {
    /// Its number
    pub qpn: Qpn,
    /// PSN with which the other side shall begin (IBTA 12.7.31): this side's `rq_psn`, the other's `sq_psn`.
    /// Take a random one.
    pub psn: Psn,
    /// Whether it has a shared receive queue
    pub srq: bool,
}

/// `rdma_bind_addr`: an address and port to hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BindAddr {
    /// 0.0.0.0 and :: are any; port 0 picks one
    pub local: SocketAddr,
    /// Port space of the service
    pub space: PortSpace,
    /// RDMA_OPTION_ID_REUSEADDR: others of this process may hold the same, if they set it too, while none
    /// listens
    pub reuse: bool,
    /// RDMA_OPTION_ID_AFONLY: :: does not mean IPv4 too
    pub v6_only: bool,
}

/// `rdma_connect` of a connection: what goes into the REQ.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Connect {
    /// Source: an address of the GID table, and the port that the peer sees
    pub local: SocketAddr,
    /// Whom to connect to
    pub remote: SocketAddr,
    /// Port space; not UDP or IPOIB
    pub space: PortSpace,
    /// Transport of the queue pair
    pub service: Service,
    /// This side's queue pair
    pub qp: QpSide,
    /// READs and atomics that this side answers at a time (`max_dest_rd_atomic`)
    pub responder_resources: u8,
    /// READs and atomics that this side would have under way (`max_rd_atomic`)
    pub initiator_depth: u8,
    /// End-to-end flow control
    pub flow_control: bool,
    /// Transport retries, 0 to 7
    pub retry_count: u8,
    /// RNR retries that the peer shall do, 0 to 7
    pub rnr_retry_count: u8,
    /// Path MTU that is proposed; the peer may use less
    pub path_mtu: Mtu,
    /// Local ACK timeout that the peer shall use, an exponent: 4.096 us * 2^n, 0 to 31
    pub ack_timeout: u8,
    /// IP type of service, of the CM's messages too
    pub traffic_class: u8,
    /// IP time to live; 0 is 64
    pub hop_limit: u8,
    /// ECE; all zero is none
    pub ece: Ece,
    /// At most [`CONNECT_PRIVATE`] bytes
    pub private_data: Vec<u8>,
}

/// `rdma_accept` of a connection: what goes into the REP.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Accept {
    /// This side's queue pair
    pub qp: QpSide,
    /// READs and atomics that this side answers at a time
    pub responder_resources: u8,
    /// READs and atomics that this side would have under way
    pub initiator_depth: u8,
    /// End-to-end flow control
    pub flow_control: bool,
    /// RNR retries that the peer shall do, 0 to 7
    pub rnr_retry_count: u8,
    /// ECE; all zero is none
    pub ece: Ece,
    /// At most [`ACCEPT_PRIVATE`] bytes
    pub private_data: Vec<u8>,
}

/// `rdma_connect` of a datagram id: what goes into the SIDR_REQ.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Resolve {
    /// Source: an address of the GID table, and the port that the peer sees
    pub local: SocketAddr,
    /// Whom to ask
    pub remote: SocketAddr,
    /// Port space: UDP or IPOIB
    pub space: PortSpace,
    /// IP type of service
    pub traffic_class: u8,
    /// IP time to live; 0 is 64
    pub hop_limit: u8,
    /// At most [`RESOLVE_PRIVATE`] bytes
    pub private_data: Vec<u8>,
}

/// `rdma_accept` or `rdma_reject` of a datagram id: what goes into the SIDR_REP.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SidrAnswer {
    /// [`sidr`] status: 0 gives the queue pair away
    pub status: u8,
    /// The queue pair; 0 unless the status is 0
    pub qpn: Qpn,
    /// Its Q_Key
    pub qkey: u32,
    /// ECE; all zero is none
    pub ece: Ece,
    /// At most [`ANSWER_PRIVATE`] bytes
    pub private_data: Vec<u8>,
}

impl SidrAnswer {
    /// One that gives nothing away but its status.
    pub fn refusal(status: u8) -> SidrAnswer {
        SidrAnswer { status, qpn: 0, qkey: 0, ece: Ece::default(), private_data: Vec::new() }
    }
}

/// `RDMA_CM_EVENT_CONNECT_REQUEST` of a connection: the peer's [`Connect`], as seen from here.
/// Numbers are turned round, as `struct rdma_cm_event` has them: what the peer would initiate is what this
/// side shall answer. The queue pair and the ECE are the peer's, the retries and the ACK timeout this side's
/// to use, the private data all [`CONNECT_PRIVATE`] bytes of the message.
pub type Request = Connect;

/// `RDMA_CM_EVENT_CONNECT_RESPONSE`: the peer accepted, and waits for
/// [`Cm::establish`](crate::Cm::establish). Numbers are turned round, as in [`Request`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConnectResponse {
    /// The peer's queue pair
    pub qp: QpSide,
    /// READs and atomics that this side is asked to answer at a time
    pub responder_resources: u8,
    /// READs and atomics that this side may have under way
    pub initiator_depth: u8,
    /// End-to-end flow control
    pub flow_control: bool,
    /// RNR retries to do
    pub rnr_retry_count: u8,
    /// How long the peer takes for an ACK, an exponent
    pub target_ack_delay: u8,
    /// The peer's ECE
    pub ece: Ece,
    /// All [`ACCEPT_PRIVATE`] bytes of the message
    pub private_data: Vec<u8>,
}

/// `RDMA_CM_EVENT_CONNECT_REQUEST` of a datagram id.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Resolving {
    /// Address and port that the peer asked for
    pub local: SocketAddr,
    /// The peer's
    pub remote: SocketAddr,
    /// Port space of the service
    pub space: PortSpace,
    /// All [`RESOLVE_PRIVATE`] bytes of the message
    pub private_data: Vec<u8>,
}

/// `RDMA_CM_EVENT_ESTABLISHED` of a datagram id: where to send to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Resolved {
    /// The peer's queue pair
    pub qpn: Qpn,
    /// Its Q_Key
    pub qkey: u32,
    /// The peer's ECE
    pub ece: Ece,
    /// All [`ANSWER_PRIVATE`] bytes of the message
    pub private_data: Vec<u8>,
}

/// Status of a SIDR_REP (IBTA 12.11.2), which `RDMA_CM_EVENT_UNREACHABLE` shows unless it is 0.
pub mod sidr {
    /// The queue pair is in the message
    pub const SUCCESS: u8 = 0;
    /// No such service
    pub const UNSUPPORTED: u8 = 1;
    /// The program refused
    pub const REJECT: u8 = 2;
    /// No queue pair is available
    pub const NO_QP: u8 = 3;
    /// Another port has the service
    pub const REDIRECT: u8 = 4;
    /// The class version is not supported
    pub const UNSUPPORTED_VERSION: u8 = 5;
}

/// Reasons of a REJ (IBTA 12.6.7.2) that programs see most; others are passed on as they are.
pub mod reason {
    /// There is no room for another connection
    pub const NO_RESOURCES: u16 = 3;
    /// No reply came in time
    pub const TIMEOUT: u16 = 4;
    /// The request is not supported
    pub const UNSUPPORTED: u16 = 5;
    /// The communication ID names no connection
    pub const INVALID_COMM_ID: u16 = 6;
    /// Nobody listens for the service ID
    pub const INVALID_SERVICE_ID: u16 = 8;
    /// The transport is not supported
    pub const INVALID_TRANSPORT: u16 = 9;
    /// The queue pair is in use by an older connection
    pub const STALE_CONNECTION: u16 = 10;
    /// The path MTU is too large
    pub const INVALID_PATH_MTU: u16 = 26;
    /// The program refused
    pub const CONSUMER: u16 = 28;
    /// The ECE options are not supported
    pub const VENDOR_OPTION: u16 = 35;
}
