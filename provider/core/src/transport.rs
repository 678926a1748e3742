//! The protocol of a QP: what it sends, what it answers, how it completes.
//!
//! `requester` turns WQEs into packets, `response` takes the answers to them, `loss` times them and goes
//! back, `holes` sends again what is missing and nothing else; `responder` takes requests, `keeping` those
//! behind a missing one, `tagged` those to SRQs that match tags, `remote_srq` those to SRQs of other cards,
//! `placement` the two of annex A19, `rpc` and `dialect` those of StRoM, whose kernels work at a
//! `peer_site`, `answer` sends what it owes; `unreliable` and `datagram` are UC's and UD's receive sides;
//! `complete` makes CQEs and takes a QP into error. The module knows nothing of tables and turns (`nic`)
//! beyond the `Shared` state that it is handed.

mod answer;
mod complete;
mod credits;
mod datagram;
mod dialect;
mod holes;
mod keeping;
mod local;
mod loss;
mod pacing;
mod peer_site;
mod placement;
mod recv;
pub(crate) mod remote_srq;
mod requester;
mod responder;
mod response;
mod rpc;
mod tagged;
mod unreliable;

pub(crate) use complete::{enter_error, flush_posted};
pub use loss::patience;
pub(crate) use pacing::answer_probe;
pub use peer_site::{PeerSite, Turned};
pub(crate) use recv::lacks_receives;
pub use requester::slices;
pub use response::RNR_TIMER_10US;
pub(crate) use rpc::{KernelSite, Rpc, turn};

use alloc::boxed::Box;
use alloc::collections::VecDeque;

use answer::Results;
use recv::HeldRecv;
use remote_srq::{Forwarding, RemoteSrqId};

use crate::env::Env;
use crate::nic::QpShared;
use crate::nic::keep::GapId;
use crate::nic::path::PathId;
use crate::nic::repair::RepairId;
use crate::nic::timers::TimerId;
use crate::qp::RecvSource;
use crate::types::{Access, Av, AvId, FrameMeta, Mtu, Nanos, PdId, Psn, QpState, QpType, Qpn, WcOpcode};
use crate::wire::packet::Packet;

/// One queue pair. There may be many thousands that do nothing: see `Nic::QP_BYTES`. In the order of use: a
/// line of what every doorbell, packet and call of an engine looks at, two each of the halves, one of what
/// the program set, and the rest.
#[repr(C, align(64))]
pub(crate) struct Qp<E: Env> {
    pub(crate) qpn: Qpn,
    pub(crate) qp_type: QpType,
    pub(crate) state: QpState,
    /// It gets no copy of what it sends to a multicast group itself
    pub(crate) block_own: bool,
    /// Whether its work may pass to an engine while it runs
    pub(crate) quiesce: Quiesce,
    /// Where a connected QP's packets go; of a UD QP the path on which it last had its turn
    pub(crate) path: PathId,
    pub(crate) timer: TimerId,
    pub(crate) flags: Flags,
    /// What does its work in the place of its own transport
    pub(crate) engine: Option<E::Engine>,
    pub(crate) sq: E::Sq,
    pub(crate) pd: PdId,
    pub(crate) mtu: u32,
    pub(crate) req: Requester,
    pub(crate) resp: Responder,
    /// What the program set. `attr.av` is where packets go.
    pub(crate) attr: ConnAttr,
    pub(crate) rq: RecvSource<E::Rq>,
    pub(crate) send_cq: E::Cq,
    pub(crate) recv_cq: E::Cq,
    /// It speaks StRoM's dialect
    pub(crate) rpc: Option<Box<Rpc>>,
    /// The host's name for it
    pub(crate) cookie: u64,
}

/// What the program set with modifies, as far as it stands nowhere else in the QP; units as in `QpAttr`.
#[derive(Clone, Copy, Default)]
pub(crate) struct ConnAttr {
    pub(crate) av: Av,
    pub(crate) dest_qpn: Qpn,
    pub(crate) qkey: u32,
    pub(crate) access: Access,
    pub(crate) path_mtu: Mtu,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) en_sqd_async_notify: bool,
}

/// Whether the work of a QP may pass to an engine while it runs.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Quiesce {
    /// It may
    #[default]
    No,
    /// It may be about to: no request begins
    Asked,
    /// The connection has carried what engines do not
    Never,
}

/// Small facts of a QP.
#[derive(Clone, Copy, Default)]
pub(crate) struct Flags {
    /// Every send makes a completion
    pub(crate) sig_all: bool,
    /// In the queue of those with something to send
    pub(crate) queued: bool,
    /// In the queue of those that owe an ACK
    pub(crate) ack_queued: bool,
    /// Waits for the window of this path
    pub(crate) window_wait: Option<PathId>,
    /// IBV_EVENT_COMM_EST was raised
    pub(crate) established: bool,
    /// Requests advertise selective repeat: 0 or 1. 0 after an answer of a peer that does not
    pub(crate) advertises: u8,
    /// Answers advertise it: the peer's last request did, and we can
    pub(crate) answers: u8,
    /// The peer's last answer advertised selective repeat
    pub(crate) repeats: bool,
    /// SQD: the drained event was raised
    pub(crate) drained: bool,
    /// A memory window of type 2 was bound on it
    pub(crate) windows: bool,
    /// Its own transport does nothing: an engine does its work, or it is not settled what does
    pub(crate) held: bool,
    /// What is to be done when the timer fires, whatever it fires for
    pub(crate) due: TimerAction,
    /// The timer may be set
    pub(crate) armed: bool,
}

/// What a QP's timer finds to do beside retransmission.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum TimerAction {
    /// Nothing
    #[default]
    Nothing,
    /// A CQ overran: flush what is posted
    Flush,
    /// A kernel goes on, or the peer is asked for its dialect
    Rpc,
}

/// The sending half: a cursor into the send queue, and what is outstanding behind it. A line of what each
/// message needs, and one of timers and losses.
#[repr(C, align(64))]
pub(crate) struct Requester {
    /// Where each begun WQE lies in PSN space, by slot
    pub(crate) track: Box<[Track]>,
    /// RNR NAK: send nothing before; 0: free
    pub(crate) rnr_until: Nanos,
    /// WQE being sent
    pub(crate) next: u32,
    /// Bytes of it that are sent
    pub(crate) offset: u32,
    /// PSN of the next packet
    pub(crate) psn: Psn,
    /// Oldest PSN not acknowledged
    pub(crate) una_psn: Psn,
    /// Oldest WQE not completed
    pub(crate) una: u32,
    /// First WQE that was never begun
    pub(crate) fresh: u32,
    /// First PSN that was never sent: before it, a packet is a retransmission
    pub(crate) max_psn: Psn,
    /// Bytes in flight, as charged to the path
    pub(crate) inflight: u32,
    /// Index behind the last WQE for which the peer has a receive, if it gives credits
    pub(crate) credit_limit: u32,
    /// The queue is the card's: its SRQ matches tags
    pub(crate) own: bool,
    /// READs and atomics outstanding
    pub(crate) reads: u8,
    /// The peer gives end-to-end credits
    pub(crate) counted: bool,
    /// The newest message began without knowing of one
    pub(crate) alone: bool,
    /// Acknowledge timer; 0: off
    pub(crate) deadline: Nanos,
    /// When something was last acknowledged, or first sent
    pub(crate) progress: Nanos,
    /// When all was last sent again for a loss; 0: something was acknowledged since
    pub(crate) rewound: Nanos,
    /// When the PSN whose round trip is being measured was sent; 0: none is
    pub(crate) rtt_since: Nanos,
    /// That PSN
    pub(crate) rtt_psn: Psn,
    /// Bytes sent since a packet asked for an ACK
    pub(crate) unasked: u32,
    /// This WQE cannot be sent: complete it so, once it is the oldest
    pub(crate) fault: Option<(u32, crate::types::WcStatus)>,
    /// A timeout took all for lost, packets of this many bytes; 0: none did, or it is known to have been
    /// wrong
    pub(crate) silent: u16,
    /// What is known of each packet while some are missing; the cursor then goes from one lost packet to the
    /// next
    pub(crate) repair: Option<RepairId>,
    /// Timeouts since all was sent again: the peer is silent
    pub(crate) backoff: u8,
    /// Timeouts before the last answer that came after any, until it is known whether they were needless
    pub(crate) timeouts: u8,
    /// RNR retries left
    pub(crate) rnr_left: u8,
}

const _: () = assert!(size_of::<Requester>() == 128, "the responder begins with a line of its own");

/// PSN span of a begun WQE. No packets: the card did it by itself.
#[derive(Clone, Copy, Default)]
pub(crate) struct Track {
    pub(crate) first: Psn,
    pub(crate) packets: u32,
}

/// The receiving half: a line of what each request needs, and one of the message that is being received.
#[repr(C)]
pub(crate) struct Responder {
    /// Expected PSN
    pub(crate) epsn: Psn,
    /// Messages completed, 24 bits
    pub(crate) msn: u32,
    /// A NAK went out for `epsn`: be silent until it comes
    pub(crate) nak_sent: bool,
    /// An ACK for all before `epsn` is owed
    pub(crate) ack: bool,
    /// A NAK is owed, by syndrome
    pub(crate) nak: Option<u8>,
    /// Requests kept behind the expected one, which is missing
    pub(crate) gap: Option<GapId>,
    /// READ and atomic answers owed, in the order of their requests, repeated ones among them; at most twice
    /// `max_dest_rd_atomic`
    pub(crate) out: VecDeque<OwedResponse>,
    /// XRC, where the domain is shared with other cards
    pub(crate) fwd: Option<Box<Forwarding>>,
    /// Results of the last atomics, for their duplicates; where the program allows atomics
    pub(crate) results: Option<Box<Results>>,
    /// Message being received
    pub(crate) cur: MessageInProgress,
    /// Receive WQE taken from the queue
    pub(crate) recv: HeldRecv,
}

/// The message that a responder is in the middle of.
#[derive(Clone, Copy, Default)]
pub(crate) enum MessageInProgress {
    /// None: the next packet begins one
    #[default]
    Idle,
    /// A SEND into the held receive WQE; the op-code of its completion
    Send { received: u32, opcode: WcOpcode },
    /// A SEND into the buffer of its tag
    Tagged { received: u32, app_ctx: u32, tag: u64 },
    /// An RDMA WRITE
    Write { va: u64, key: u32, left: u32, total: u32 },
    /// An RPC WRITE
    Rpc { op: u64, left: u32 },
    /// A kernel is at the expected packet
    Running,
}

impl MessageInProgress {
    /// Bytes of a SEND that are in memory.
    fn received(self) -> u32 {
        match self {
            MessageInProgress::Send { received, .. } | MessageInProgress::Tagged { received, .. } => received,
            _ => 0,
        }
    }

    /// The same message, further on.
    fn with_received(mut self, total: u32) -> Self {
        if let MessageInProgress::Send { received, .. } | MessageInProgress::Tagged { received, .. } =
            &mut self
        {
            *received = total;
        }
        self
    }
}

/// A READ or atomic answer that is owed.
#[derive(Clone, Copy)]
pub(crate) enum OwedResponse {
    /// Bytes from memory. `psn` is the next packet's; `begun`: it is not the first; `again`: the request
    /// came before, so that its answer may have arrived; `remote`: the SRQ, if the memory is another card's.
    Read { psn: Psn, va: u64, key: u32, left: u32, begun: bool, again: bool, remote: Option<RemoteSrqId> },
    /// The value before
    Atomic { psn: Psn, value: u64 },
}

impl OwedResponse {
    /// To what is done, without data: the answer to a READ of nothing.
    fn done(psn: Psn) -> OwedResponse {
        OwedResponse::Read { psn, va: 0, key: 0, left: 0, begun: false, again: false, remote: None }
    }

    fn psn(&self) -> Psn {
        match self {
            OwedResponse::Read { psn, .. } | OwedResponse::Atomic { psn, .. } => *psn,
        }
    }

    /// Whose memory it brings, if that is another card's.
    fn remote_srq(&self) -> Option<RemoteSrqId> {
        match self {
            OwedResponse::Read { remote, .. } => *remote,
            OwedResponse::Atomic { .. } => None,
        }
    }

    /// PSN behind its last packet.
    fn end(&self, mtu: u32) -> Psn {
        match self {
            OwedResponse::Read { psn, left, .. } => psn.plus(left.div_ceil(mtu).max(1)),
            OwedResponse::Atomic { psn, .. } => psn.plus(1),
        }
    }
}

/* an idle QP has room for what it may owe */
const _: () = assert!(size_of::<OwedResponse>() == 24);

impl Responder {
    /// Whether more than an ACK is owed, and waits for no other card.
    pub(crate) fn owes_answer(&self) -> bool {
        (!self.out.is_empty() || self.nak.is_some())
            && self.fwd.as_ref().is_none_or(|fwd| fwd.may_answer(self.out.front(), self.nak))
    }
}

impl Requester {
    /// One with nothing to do, whose queue has as many slots as `track`.
    pub(crate) fn new(track: Box<[Track]>) -> Self {
        Requester {
            next: 0,
            offset: 0,
            psn: Psn::default(),
            una_psn: Psn::default(),
            una: 0,
            fresh: 0,
            max_psn: Psn::default(),
            inflight: 0,
            unasked: 0,
            track,
            own: false,
            reads: 0,
            fault: None,
            deadline: 0,
            rnr_until: 0,
            progress: 0,
            rewound: 0,
            backoff: 0,
            timeouts: 0,
            rnr_left: 0,
            silent: 0,
            repair: None,
            credit_limit: 0,
            counted: false,
            alone: false,
            rtt_psn: Psn::default(),
            rtt_since: 0,
        }
    }

    pub(crate) fn slot(&self, index: u32) -> usize {
        index as usize & (self.track.len() - 1)
    }

    /// Nothing is under way, and the first request that has not begun is WQE `index`.
    pub(crate) fn start_at(&mut self, index: u32) {
        (self.next, self.una, self.fresh) = (index, index, index);
    }

    /// Whether packets wait for an acknowledge.
    pub(crate) fn outstanding(&self) -> bool {
        self.una_psn != self.max_psn
    }
}

impl Responder {
    /// Most SGEs of a receive WQE.
    pub(crate) fn max_sge(&self) -> usize {
        self.recv.max_sge()
    }

    pub(crate) fn new(max_sge: usize) -> Self {
        Responder {
            epsn: Psn::default(),
            msn: 0,
            nak_sent: false,
            ack: false,
            nak: None,
            gap: None,
            cur: MessageInProgress::Idle,
            recv: HeldRecv::new(max_sge),
            out: VecDeque::new(),
            results: None,
            fwd: None,
        }
    }
}

/// Everything that a step of the protocol works on.
pub(crate) struct Ctx<'a, E: Env> {
    pub(crate) qp: &'a mut Qp<E>,
    pub(crate) sh: &'a mut QpShared<E>,
    pub(crate) env: &'a mut E,
    pub(crate) now: Nanos,
}

/// Why a QP stopped sending.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SendPause {
    /// One packet went out
    Sent,
    /// Nothing (more) to send now
    Idle,
    /// The port is full: come back first
    PortFull,
    /// The turn is over, more is left
    TurnOver,
}

/// Packets a QP may send before another gets its turn.
const TURN: u32 = 64;

impl<E: Env> Ctx<'_, E> {
    /// Sends what the QP owes and has: answers first (IBTA 9.7.5.1: they unblock the peer), then requests.
    pub(crate) fn transmit(&mut self) -> SendPause {
        if self.qp.flags.held {
            return self.engine_turn();
        }
        for _ in 0..TURN {
            if !self.env.can_send() {
                return SendPause::PortFull;
            }
            let step = if self.qp.resp.owes_answer() { self.emit_answer() } else { self.emit_request() };
            if step != SendPause::Sent {
                return step;
            }
        }
        SendPause::TurnOver
    }

    /// The QP's turn ended so. True: the port is full, and the QP is next.
    #[inline]
    pub(crate) fn end_turn(&mut self, step: SendPause) -> bool {
        match step {
            SendPause::Idle | SendPause::Sent => self.qp.flags.queued = false,
            SendPause::TurnOver => self.sh.sched.push_ready(self.qp.qpn),
            SendPause::PortFull => self.sh.sched.push_ready_front(self.qp.qpn),
        }
        if step != SendPause::PortFull {
            /* whoever has sent all that it may waits behind the others next time */
            self.sh.paths.end_turn(self.qp.path, self.qp.qpn);
        }
        step == SendPause::PortFull
    }

    /// A packet for this QP, already matched to its number and checked for form.
    pub(crate) fn receive(&mut self, meta: &FrameMeta, packet: &Packet<'_>) {
        match self.qp.qp_type {
            QpType::Ud => self.receive_datagram(meta, packet),
            QpType::Uc => self.receive_unreliable(packet),
            QpType::Rc if packet.op().kind.is_response() => self.receive_response(packet),
            QpType::Rc => self.receive_request(packet),
            QpType::XrcSend if packet.op().kind.is_response() => self.receive_response(packet),
            QpType::XrcRecv if packet.op().kind.is_request() => self.receive_request(packet),
            QpType::XrcSend | QpType::XrcRecv => self.sh.stats.drop_opcode.inc(),
        }
    }

    /// Puts the QP in the queue of those with something to send.
    pub(crate) fn ready(&mut self) {
        if !self.qp.flags.queued {
            self.qp.flags.queued = true;
            self.sh.sched.push_ready(self.qp.qpn);
        }
    }

    /// Notes that an ACK is owed.
    pub(crate) fn owe_ack(&mut self) {
        self.qp.resp.ack = true;
        self.queue_ack();
    }

    /// Puts the QP in the queue of those that owe an ACK.
    pub(crate) fn queue_ack(&mut self) {
        if !self.qp.flags.ack_queued {
            self.qp.flags.ack_queued = true;
            self.sh.sched.push_ack(self.qp.qpn);
        }
    }

    /// Makes sure that the QP is looked at by `at`.
    pub(crate) fn arm(&mut self, at: Nanos) {
        self.qp.flags.armed = true;
        self.sh.sched.arm(self.qp.timer, at, self.qp.qpn);
    }

    /// All is acknowledged: the timer has nothing to do, unless it was set for something else.
    pub(crate) fn disarm_idle_timer(&mut self) {
        let qp = &mut self.qp;
        let flags = &mut qp.flags;
        let idle = flags.armed && flags.window_wait.is_none() && flags.due == TimerAction::Nothing;
        if idle && (flags.held || qp.req.rnr_until == 0) && self.sh.sched.disarm_if_crowded(qp.timer) {
            flags.armed = false;
        }
    }

    /// Leaves all queues of turns: the QP ends, or begins anew.
    pub(crate) fn leave_queues(&mut self) {
        let (flags, qpn) = (&mut self.qp.flags, self.qp.qpn);
        if core::mem::take(&mut flags.queued) {
            self.sh.sched.forget_ready(qpn);
        }
        if core::mem::take(&mut flags.ack_queued) {
            self.sh.sched.forget_ack(qpn);
        }
        if let Some(contexts) = &mut self.sh.contexts {
            contexts.forget(self.qp.timer, qpn);
        }
        self.leave_window();
    }

    /// Waits for no path's window any more.
    pub(crate) fn leave_window(&mut self) {
        if let Some(path) = self.qp.flags.window_wait.take() {
            self.sh.paths.get(path).forget_waiter(self.qp.qpn);
            self.sh.open_path(path);
        }
    }
}

/// UD's destination as it stands in a WQE.
pub(crate) fn datagram_path<E: Env>(sh: &QpShared<E>, av: AvId) -> Option<(Av, PathId)> {
    sh.avs.get(av.0 as usize).map(|e| (e.av, e.path))
}
