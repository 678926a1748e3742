//! Connected queue pairs as their programs and the oracle know them.

use std::collections::VecDeque;

use starverbs_core::{Nanos, Qpn, SendOp, Sge, WcStatus};
use starverbs_sim::{SimRq, SimSq};

use crate::arena::Arena;
use crate::plan::{ConnPlan, Transport};
use crate::pool::Pieces;
use crate::strom::RpcEnd;

/// Time without a working link that a patient connection outlives, ns.
const PATIENCE: Nanos = 10_000_000_000;

/// What is wrong with a request on purpose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Bad {
    /// A local key
    Lkey,
    /// Longer than any message
    TooLong,
    /// An atomic of not eight bytes, parameters of more than a packet
    Size,
    /// The transport does not have it
    OpCode,
    /// A bind to what may not be bound
    Bind,
    /// The peer's key
    Rkey,
    /// Beyond the peer's region
    Bounds,
    /// A right that the peer did not give
    Rights,
    /// An address that atomics may not have
    Unaligned,
    /// Longer than the receive
    Oversize,
    /// An invalidation of what is not bound
    Invalidate,
    /// A key of a domain that is not the connection's
    Foreign,
    /// A key that was taken away
    Revoked,
    /// A window that is bound for another connection
    Others,
    /// An RPC WRITE to no kernel
    NoKernel,
    /// An RPC whose parameters do not say where its answer goes
    NoTarget,
}

impl Bad {
    /// How it must end on a reliable connection (IBTA table 58 and 10.10.2.3; man ibv_poll_cq).
    pub(crate) fn status(self) -> WcStatus {
        match self {
            Bad::Lkey => WcStatus::LocProtErr,
            Bad::TooLong | Bad::Size => WcStatus::LocLenErr,
            Bad::OpCode => WcStatus::LocQpOpErr,
            Bad::Bind => WcStatus::MwBindErr,
            Bad::Rkey | Bad::Bounds | Bad::Rights | Bad::Invalidate => WcStatus::RemAccessErr,
            Bad::Foreign | Bad::Revoked | Bad::Others => WcStatus::RemAccessErr,
            Bad::Unaligned | Bad::Oversize | Bad::NoTarget => WcStatus::RemInvReqErr,
            Bad::NoKernel => WcStatus::RemOpErr,
        }
    }

    /// Whether the requester's card sees it by itself.
    pub(crate) fn is_local(self) -> bool {
        matches!(self, Bad::Lkey | Bad::TooLong | Bad::Size | Bad::OpCode | Bad::Bind)
    }
}

/// What a READ or atomic must bring.
#[derive(Debug)]
pub(crate) struct Brings {
    pub(crate) want: Vec<u8>,
    pub(crate) off: usize,
    /// Nothing else will do
    pub(crate) exact: bool,
}

/// A send request that is posted and not known to be done.
#[derive(Debug)]
pub(crate) struct Wr {
    pub(crate) seq: u64,
    pub(crate) op: SendOp,
    pub(crate) len: u32,
    pub(crate) signaled: bool,
    pub(crate) fence: bool,
    pub(crate) bad: Option<Bad>,
    pub(crate) pieces: Pieces,
    pub(crate) brings: Option<Brings>,
    /// It works on the peer's window
    pub(crate) window: bool,
    /// Where it works on the peer's memory, if it does
    pub(crate) remote: u64,
    /// The card posted it for a kernel: it completes to nobody
    pub(crate) of_card: bool,
}

impl Wr {
    /// One of the card's.
    pub(crate) fn of_card(seq: u64, op: SendOp, len: u32) -> Self {
        Wr {
            seq,
            op,
            len,
            signaled: false,
            fence: false,
            bad: None,
            pieces: vec![],
            brings: None,
            window: false,
            remote: 0,
            of_card: true,
        }
    }
}

/// A message that a receive must show.
#[derive(Clone, Debug)]
pub(crate) struct Msg {
    pub(crate) seq: u64,
    pub(crate) op: SendOp,
    pub(crate) data: Vec<u8>,
    pub(crate) len: u32,
    pub(crate) imm: u32,
    pub(crate) solicited: bool,
    /// XRC: which of the host's queues
    pub(crate) srq: usize,
    pub(crate) bad: Option<Bad>,
    /// UC, where it may come twice or never
    pub(crate) came: u32,
    /// Where a WRITE went
    pub(crate) off: usize,
}

/// A receive that is posted.
#[derive(Debug)]
pub(crate) struct RecvWr {
    pub(crate) id: u64,
    pub(crate) pieces: Pieces,
    /// Its key opens nothing
    pub(crate) bad: bool,
}

/// Where an end's receives come from.
#[derive(Clone)]
pub(crate) enum Source {
    Own(SimRq),
    Shared,
    Xrc,
    None,
}

/// Why a queue pair is in ERR or SQE.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cause {
    /// A request failed
    Send,
    /// A receive failed
    Recv,
    /// The card said so in an event
    Event,
    /// Its program wanted it
    Killed,
    /// Its host went away
    Gone,
}

/// State of a memory window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Bound {
    No,
    /// By request `seq`
    Binding(u64),
    Yes,
    /// The peer was asked to, with its request `seq`
    Leaving,
    /// By an own request
    Closing(u64),
}

/// A window of an end for its peer.
pub(crate) struct Window {
    pub(crate) arena: Arena,
    pub(crate) mr: u32,
    pub(crate) key: u32,
    pub(crate) bound: Bound,
}

/// An end: its queue pair, the requests that it posted, and the messages that must come.
pub(crate) struct ConnEnd {
    pub(crate) host: usize,
    pub(crate) qpn: Qpn,
    pub(crate) sq: SimSq,
    pub(crate) source: Source,
    pub(crate) cqs: [usize; 2],
    /// Operations that are still to be posted
    pub(crate) left: u32,
    /// Number of the next request
    pub(crate) next: u64,
    /// First request that is not known to be done
    pub(crate) done: u64,
    pub(crate) rung: bool,
    pub(crate) sends: VecDeque<Wr>,
    pub(crate) recvs: VecDeque<RecvWr>,
    pub(crate) next_recv: u64,
    /// Messages that must come, in this order
    pub(crate) inbox: VecDeque<Msg>,
    /// UC: all that were ever sent here
    pub(crate) mail: Vec<Msg>,
    /// Memory of this end that the peer works on
    pub(crate) arena: Arena,
    /// Memory of this end that the peer may work on while the window is bound
    pub(crate) window: Option<Window>,
    pub(crate) cause: Option<Cause>,
    /// A flush was seen whose cause is not known yet
    pub(crate) unexplained: bool,
    pub(crate) flushing: bool,
    /// A receive of this queue (0, but for XRC) failed; what comes behind it in the same completion queue
    /// has failed, too
    pub(crate) recv_failed: Option<usize>,
    /// First request of this incarnation that must fail
    pub(crate) doomed: Option<(u64, Bad)>,
    /// A receive with a bad key was posted in this incarnation
    pub(crate) bad_recv: bool,
    /// Last request that may have been executed, after a failure
    pub(crate) failed_at: Option<(u64, u64)>,
    pub(crate) last_wqe: u32,
    /// SQD was asked for
    pub(crate) draining: bool,
    /// What it has for StRoM's dialect, if its connection is of that
    pub(crate) rpc: Option<RpcEnd>,
}

/// A connection.
pub(crate) struct Conn {
    pub(crate) plan: ConnPlan,
    pub(crate) ends: [ConnEnd; 2],
    pub(crate) reconnects: u32,
    pub(crate) incarnation: u32,
    /// For how long a link between the hosts was cut, ns
    pub(crate) silent: Nanos,
    /// Step at which what is left is taken to ERR and set up anew
    pub(crate) doom: Option<usize>,
    /// Until when its programs do nothing about an end in ERR, ns
    pub(crate) abandoned: Nanos,
    pub(crate) over: bool,
    pub(crate) psn: u32,
}

impl Conn {
    pub(crate) fn reliable(&self) -> bool {
        self.plan.kind != Transport::Uc
    }

    /// Whether its timeouts give a peer so much time that it must not be given up for a wire that only loses,
    /// and for links that are cut for some seconds: 34 s is the least that the IBTA lets a card wait with
    /// these attributes.
    pub(crate) fn patient(&self) -> bool {
        let setup = &self.plan.setup;
        setup.timeout == 0 || (setup.timeout >= 20 && self.silent < PATIENCE)
    }
}

impl ConnEnd {
    /// Whether something is known to have gone wrong with it.
    pub(crate) fn down(&self) -> bool {
        self.cause.is_some() || self.unexplained
    }

    /// First request with a fault among those posted, if it is for the peer to see.
    pub(crate) fn first_bad(&self) -> Option<&Wr> {
        self.sends.iter().find(|wr| wr.bad.is_some())
    }

    /// Requests that work on the peer's window.
    pub(crate) fn uses_window(&self) -> bool {
        self.sends.iter().any(|wr| wr.window)
    }
}

/// A piece with a key that opens nothing.
pub(crate) fn spoil(pieces: &mut [Sge]) -> bool {
    match pieces.iter_mut().find(|s| s.len > 0) {
        Some(piece) => {
            piece.lkey ^= 0x5500;
            true
        }
        None => false,
    }
}
