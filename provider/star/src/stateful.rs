//! The stateful half: all that a connection's two cards know, kept by one (III-C).
//!
//! A [`Stateful`] executes two send queues, its own and SL's, against two receive queues, its own and
//! SL's. `remote` keeps SL's queues, `stream` orders WQEs, `begin` begins them, `packets` and `rdc` make
//! their packets, `short` does all that for what is short, `window` knows which are under way, `answers`
//! takes those of SL's card, `results` sends results of SL's atomics, `inquiry` asks SL before a request
//! fails for want of a rule, `rpc` has kernels answer SL's RPCs and take its RPC WRITEs, `finish` completes
//! in order, `events` sends SL's completions, `messages` takes control messages, `failing` takes either end
//! into error, `rare` has what few connections need, `clock` does what is due, `quiesce` lets nothing begin,
//! `fetch` has the CPU fetch what will be used. It knows no sockets and no negotiation: it begins when both
//! ends know what they are.
//!
//! Order of calls: after any `handle_*`, [`Stateful::transmit`] until nothing is left, then sleep until
//! [`Stateful::next_deadline`] or the next event.

mod answers;
mod begin;
mod clock;
mod eager;
mod events;
mod failing;
mod fetch;
mod finish;
mod inquiry;
mod messages;
mod packets;
mod places;
mod quiesce;
mod rare;
mod rdc;
mod remote;
mod results;
mod rpc;
mod short;
mod stream;
mod turns;
mod window;

pub use super::registry::SlPeer;
use clock::KEEPALIVE;
use events::{Completions, OwedAcks};
use inquiry::Inquiry;
use places::Places;
use rare::RareBox;
use remote::{KeptRecv, RemoteQueue};
use stream::{OPS, WqeStream};
use turns::TurnWindow;
use window::{Of, PacketWindow};

use starverbs_core::engine::{EngineAttr, EngineRpc, TakenRecv};
use starverbs_core::env::SendQueue;
use starverbs_core::mr::MrTable;
use starverbs_core::nic::Path;
use starverbs_core::{
    Access, Counters, Mtu, Nanos, NicError, PdId, Psn, QpState, Qpn, SendWqe, Sge, WcStatus,
};

use super::channel::ControlChannel;
use super::control::Setup;
use super::env::StarEnv;
use super::form::Form;
use super::registry::{ConnId, MemoryOwner, RuleRegistry};
use super::stateless::is_later;

/// Packets of a connection that may be under way, by default.
pub const WINDOW: u32 = 256;

const MS: Nanos = 1_000_000;

/// Where a connection's receives come from when they are shared.
pub trait SharedReceives {
    /// Takes the oldest receive WQE of the SRQ of a connection, and copies its SGEs. `None`: there is none.
    fn take(&mut self, qpn: Qpn, sges: &mut [Sge]) -> Option<TakenRecv>;
}

/// The card's context of a call.
pub struct CardCtx<'a, E: StarEnv> {
    /// The host
    pub env: &'a mut E,
    /// Memory of this end
    pub mrs: &'a mut MrTable<E::Mrs>,
    /// What may be done with memory of others
    pub registry: &'a mut RuleRegistry,
    /// Shared receive queues
    pub srqs: &'a mut dyn SharedReceives,
    /// The way to SL's card
    pub path: &'a mut Path<E::Congestion>,
    /// Kernels that SL's RPCs call
    pub rpc: EngineRpc<'a>,
    /// What is counted
    pub stats: &'a Counters,
    /// The time
    pub now: Nanos,
}

/// How long a program lets its peer be silent, in milliseconds: packets go again after 1 ms at the earliest.
#[derive(Clone, Copy, Debug)]
pub struct Silence(u32);

impl Silence {
    /// Of nanoseconds; 0: for ever.
    pub fn of(time: Nanos) -> Self {
        Silence(time.div_ceil(MS).try_into().unwrap_or(u32::MAX))
    }
    fn get(self) -> Nanos {
        Nanos::from(self.0) * MS
    }
}

/// Our own end of a connection, as the program made and set it.
pub struct Local<E: StarEnv> {
    /// Our QPN
    pub qpn: Qpn,
    /// Protection domain
    pub pd: PdId,
    /// Send queue
    pub sq: E::Sq,
    /// Receive queue; `None`: a shared one
    pub rq: Option<E::Rq>,
    /// Completions of sends
    pub send_cq: E::Cq,
    /// Completions of receives
    pub recv_cq: E::Cq,
    /// How long the program lets SL be silent, with timeout and retry_cnt
    pub patience: Silence,
    /// What SL may do
    pub access: Access,
    /// Longest message, bytes: a power of two, of which this is the logarithm
    pub max_msg_log: u8,
    /// Path MTU
    pub mtu: Mtu,
    /// Most SGEs of a receive WQE
    pub max_recv_sge: u8,
    /// Whether every send makes a completion
    pub sig_all: bool,
    /// READs and atomics of ours outstanding at most
    pub max_rd_atomic: u8,
    /// RNR NAK timer code of our receive queue
    pub min_rnr_timer: u8,
    /// Times that our SENDs are tried without a receive of SL; 7: for ever
    pub rnr_retry: u8,
    /// Which packets it sends
    pub form: Form,
}

/// What SF needs of SL's [`Setup`] from then on.
#[derive(Clone, Copy)]
struct SlTerms {
    /// Rights of the QP: all that one may have lie in these bits
    access: u16,
    /// Slots of atomics: a power of two, of which this is the logarithm
    replay_log: u8,
    srq: bool,
    max_rd_atomic: u8,
    rnr_retry: u8,
    min_rnr_timer: u8,
}

impl SlTerms {
    fn of(setup: &Setup) -> Self {
        let Setup { replay_slots, access, srq, max_rd_atomic, rnr_retry, min_rnr_timer, .. } = *setup;
        let (access, replay_log) = (access.bits() as u16, replay_slots.ilog2() as u8);
        SlTerms { access, replay_log, srq, max_rd_atomic, rnr_retry, min_rnr_timer }
    }
    fn access(&self) -> Access {
        Access::from_bits_retain(self.access.into())
    }
    fn replay_slots(&self) -> u32 {
        1 << self.replay_log
    }
}

/// The answer to a control message of SL. One message is under way at a time.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// None is owed
    None,
    /// It is to leave, of the last one that was done
    Owed,
    /// One was done whose answer waits until none of our packets can be under way
    Quiet,
    /// One was done whose answer waits ([`Rare::answer_at`](rare::Rare::answer_at))
    Later,
}

/// Where a connection begins.
pub struct Start {
    /// Index of the oldest WQE of our send queue that is not done
    pub first_send: u32,
    /// SL's end
    pub setup: Setup,
    /// Where SL is
    pub peer: SlPeer,
    /// Control messages, on which SL's set-up has come
    pub channel: ControlChannel,
    /// Packets under way at most: a power of two
    pub window: u32,
}

/// A receive WQE of ours that a WQE of SL has taken.
#[derive(Clone, Copy, Default)]
struct RecvOfSl {
    wr_id: u64,
    /// Its SGE, if receive WQEs have one at most
    sge: Sge,
    pd: PdId,
    num_sge: u8,
}

/// How SL's end ends, or has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ended {
    /// It has not ended
    Not,
    /// Its oldest send WQE, now or when it comes, completes so
    Owed(WcStatus),
    /// That completion was made
    Reported,
}

/// One connection. In the order of use: what every call looks at, our end, what is under way, SL's queues; in
/// the last line what SL's sends need alone, and what few calls look at.
#[repr(C, align(64))]
pub struct Stateful<E: StarEnv> {
    state: QpState,
    ended: Ended,
    /// SL's QP refused a request of ours, and its Bye was not sent
    refused: Option<WcStatus>,
    /// SL has sent all rules of before: our own requests may begin
    open: bool,
    /// No WQE begins
    quiescing: bool,
    /// Nothing that began is under way, and SL may know
    quiesced: bool,
    /// SL did not answer for our program's patience: no CQEP leaves until it sends something
    silent: bool,
    /// A CQ overran: the rest is flushed by the timer
    overrun: bool,
    /// Packets wait for room on the path
    crowded: bool,
    /// SL has sent a WQE, or has answered a packet, in this epoch
    met: bool,
    /// Of late a relaxed WRITE found one before it at its place
    overlaps: bool,
    /// Timeouts in a row
    backoff: u8,
    /// The next of our two send queues to have its turn
    turn: Of,
    owed_acks: OwedAcks,
    answer: Answer,
    /// Whether SL has rules that our card lacks
    inquiry: Inquiry,
    conn: ConnId,
    /// SL's QPN and epoch: what its packets show
    peer_qpn: Qpn,
    epoch: u32,
    /// What the path counts as this connection's in flight
    charged: u32,
    /// Oldest WQE of SL's receive queue that nobody took
    next_recv: Psn,
    /// Packets of ours so far that had turns
    writes: u32,
    deadline: Nanos,
    /// When SL last sent something, or was first asked
    last_inbound: Nanos,
    rare: RareBox,
    local: Local<E>,
    /// How many packets that have turns may be under way
    turns: TurnWindow,
    /// Our send queue, and SL's
    streams: [WqeStream; 2],
    window: PacketWindow,
    terms: SlTerms,
    completions: [Completions; 2],
    recvs: RemoteQueue<KeptRecv>,
    sends: RemoteQueue<SendWqe>,
    channel: ControlChannel,
    /// Receive WQEs of ours, by the WQE of SL that has taken them
    held: Places<RecvOfSl>,
    /// The send of SL before this one has a CQEP, though it is unsignaled
    report_at: Psn,
    /// All of SL's WQEs before it have their data where it belongs, as far as was looked
    settled: u32,
    /// Atomics of ours so far
    atomics: u32,
    /// Shared receives were asked for up to here; 0: none were
    wanted: Psn,
    /// Memory windows of type 2 were bound on it
    windows: bool,
    /// When our own sends fail that SL left behind; 0: there are none
    left_until: Nanos,
    /// After a local stall: nothing counts as late before
    stalled_until: Nanos,
    /// No packet that we sent before the end can be under way after this
    quiet_at: Nanos,
}

impl<E: StarEnv> Stateful<E> {
    /// A connection that begins, with both ends ready to send and nothing under way but control messages.
    /// `Invalid`: SL's queues are none. `Exhausted`: no memory.
    pub fn new(card: &mut CardCtx<'_, E>, local: Local<E>, start: Start) -> Result<Self, NicError> {
        let Start { setup, peer, .. } = &start;
        let depths = [setup.sq_depth, setup.rq_depth, setup.replay_slots];
        if depths.iter().any(|depth| !depth.is_power_of_two()) {
            return Err(NicError::Invalid);
        }
        let server = MemoryOwner { gid: peer.av.dgid, boot: setup.boot, pd: setup.pd };
        let conn = card.registry.join(server, *peer, setup.token)?;
        card.registry.count(card.stats);
        let mtu = local.mtu.min(setup.mtu);
        card.env.note_star_mtu(mtu);
        Ok(Stateful::begin(card.now, Local { mtu, ..local }, start, conn))
    }

    /// With nothing under way.
    fn begin(now: Nanos, local: Local<E>, start: Start, conn: ConnId) -> Self {
        let Start { first_send, setup, peer, channel, window } = start;
        Stateful {
            state: QpState::Rts,
            ended: Ended::Not,
            refused: None,
            open: false,
            quiescing: false,
            quiesced: false,
            silent: false,
            overrun: false,
            crowded: false,
            met: false,
            overlaps: false,
            backoff: 0,
            turn: Of::Local,
            owed_acks: OwedAcks::default(),
            answer: Answer::None,
            inquiry: Inquiry::None,
            conn,
            peer_qpn: peer.qpn,
            epoch: peer.epoch,
            charged: 0,
            next_recv: Psn::default(),
            writes: 0,
            /* what was posted before waits for SL's rules, and has a KeepAlive sent */
            deadline: now + KEEPALIVE,
            last_inbound: now,
            rare: RareBox::default(),
            turns: TurnWindow::new(),
            streams: [WqeStream::new(first_send, local.sq.slots()), WqeStream::new(0, setup.sq_depth)],
            window: PacketWindow::new(window),
            terms: SlTerms::of(&setup),
            completions: [Completions::new(setup.sq_depth), Completions::new(setup.rq_depth)],
            recvs: RemoteQueue::new(),
            sends: RemoteQueue::new(),
            channel,
            held: Places::new(),
            report_at: Psn::default(),
            settled: 0,
            atomics: 0,
            wanted: Psn::default(),
            windows: false,
            left_until: 0,
            stalled_until: 0,
            quiet_at: 0,
            local,
        }
    }

    /// Whether SL has begun a later epoch than this one, in which it exchanged control messages alone.
    pub fn is_before(&self, epoch: u32) -> bool {
        !self.met && self.state == QpState::Rts && is_later(epoch, self.epoch)
    }

    /// Ends as if it had not begun: what our program posted waits, as far as it is not done. Windows stay
    /// bound. Gives the first WQE of our send queue that is not done.
    pub fn rewind(mut self, card: &mut CardCtx<'_, E>) -> u32 {
        self.windows = false;
        let first_send = self.streams[Of::Local as usize].una;
        self.close(card);
        first_send
    }

    /// The connection ends without a message. Its packets may still be under way for [`Stateful::lifetime`].
    pub fn close(self, card: &mut CardCtx<'_, E>) {
        if self.windows {
            card.mrs.unbind_all(self.local.qpn);
        }
        self.leave(card);
    }

    fn leave(self, card: &mut CardCtx<'_, E>) {
        card.path.forget(self.charged);
        card.rpc.stop();
        /* less is never refused */
        _ = card.env.may_keep(&self.local.sq, 0);
        card.registry.leave(self.conn);
        card.registry.count(card.stats);
    }

    /// Our program has set its end anew.
    pub fn set(&mut self, to: &EngineAttr) {
        let EngineAttr { access, max_rd_atomic, min_rnr_timer, rnr_retry, patience, drain_event: _ } = *to;
        let local = &mut self.local;
        (local.access, local.max_rd_atomic) = (access, max_rd_atomic);
        (local.min_rnr_timer, local.rnr_retry) = (min_rnr_timer, rnr_retry);
        local.patience = Silence::of(patience);
    }

    /// SL has sent all rules of memory that was registered before the connection: our program's requests may
    /// name it.
    pub fn open(&mut self) {
        self.open = true;
    }

    /// Whether it has: it knows of this end then.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// How long a packet of this connection may be under way.
    pub fn lifetime(&self, path: &Path<E::Congestion>) -> Nanos {
        path.rtt.lifetime()
    }

    /// How long the answer to a packet that leaves now is waited for; at first, before tail-loss probes go.
    fn timeout(&self, card: &CardCtx<'_, E>) -> Nanos {
        let timeout = card.path.rtt.timeout(self.backoff);
        let alone = self.backoff == 0 && card.path.is_all(self.charged);
        card.path.rtt.probe_time().filter(|_| alone).map_or(timeout, |probe| probe.min(timeout))
    }

    /// The path learns what is in flight: of a peer that is silent nothing, so that other connections have
    /// the window.
    fn charge(&mut self, card: &mut CardCtx<'_, E>) {
        let now = if self.backoff > 0 { 0 } else { self.window.in_flight() };
        if now > self.charged {
            card.path.add(now - self.charged);
        } else if now < self.charged {
            card.path.forget(self.charged - now);
        }
        self.charged = now;
    }

    /// RTS, or ERR: this also when what a full CQ leaves to do is still to be done.
    pub fn state(&self) -> QpState {
        if self.overrun { QpState::Err } else { self.state }
    }

    /// The first WQE of our send queue that has not begun.
    pub fn next_send(&self) -> u32 {
        let stream = &self.streams[Of::Local as usize];
        stream.next.wrapping_add(stream.begun.into())
    }

    /// Its place in the registry: rules of SL that come on this connection belong there.
    pub fn conn(&self) -> ConnId {
        self.conn
    }

    /// When [`Stateful::handle_timeout`] is to be called.
    pub fn next_deadline(&self) -> Option<Nanos> {
        (self.deadline != 0).then_some(self.deadline)
    }

    /// Bytes of memory that the connection takes beside those of its queues.
    pub fn bytes(&self) -> usize {
        size_of::<Self>()
            + self.sends.bytes()
            + self.recvs.bytes()
            + self.window.bytes()
            + self.streams.iter().map(WqeStream::bytes).sum::<usize>()
            + self.held.bytes()
            + self.completions.iter().map(Completions::bytes).sum::<usize>()
            + self.rare.bytes()
            + self.channel.bytes()
    }

    /// The longest message, bytes.
    fn max_msg(&self) -> u32 {
        1 << self.local.max_msg_log
    }

    /// The path MTU, bytes.
    fn mtu(&self) -> u32 {
        self.local.mtu.bytes()
    }

    /// The first WQE of SL whose data is not all where it belongs.
    fn settled(&mut self) -> u32 {
        self.settled = self.streams[Of::Remote as usize].settled(self.settled);
        self.settled
    }

    /// WQEs of ours that are posted, have not begun, and take a receive WQE of SL; of those that may begin
    /// soon.
    fn unmatched(&self) -> u32 {
        let stream = &self.streams[Of::Local as usize];
        let posted = self.local.sq.posted().wrapping_sub(stream.next).min(OPS);
        let takes = |n: &u32| self.local.sq.op(stream.next.wrapping_add(*n)).takes_recv();
        (u32::from(stream.begun)..posted).filter(takes).count() as u32
    }

    /// Something that SL answers is about to leave: if it owed no answer, its silence begins now, and so do
    /// the timeouts in a row.
    fn asks(&mut self, now: Nanos) {
        if !self.window.asks()
            && self.completions.iter().all(Completions::is_idle)
            && self.channel.tries() == 0
        {
            (self.last_inbound, self.backoff) = (self.last_inbound.max(now), 0);
        }
    }

    fn stream(&mut self, of: Of) -> &mut WqeStream {
        &mut self.streams[of as usize]
    }

    fn arm(&mut self, at: Nanos) {
        if self.deadline == 0 || at < self.deadline {
            self.deadline = at.max(1);
        }
    }
}

#[cfg(test)]
mod tests;
