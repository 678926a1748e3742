//! One stateless endpoint, in host memory: its card keeps nothing of the connection.
//!
//! An [`SlQp`] sends the WQEs of a QP to SF in WQEPs (`pack`), repeats them until SF has stored them
//! (`track`, `timers`), and makes completions of what SF has the card write into the QP's slots. The send
//! queue itself is the copy of what was sent; receives are kept here. `start` sends the set-up and memory
//! rules, `messages` takes SF's, `window_op` has binds and invalidations done by the host, `failing` is its
//! way into error, `revert` gives the QP back to the card, `linger` sends the Bye without it. It must not
//! know how roles were chosen.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicU32, Ordering};

use starverbs_core::coalesce::is_small;
use starverbs_core::env::{CompletionQueue, RecvQueue, SendQueue, TakenWqe};
use starverbs_core::room::filled;
use starverbs_core::{AsyncEvent, Cqe, Nanos, NicError, Psn, Qpn, SendFlags, Sge, WcFlags, WcStatus};

use super::channel::{ControlChannel, SpareOutbox};
use super::control::{Control, Setup};
use super::env::{News, SlEvent, StarEnv};
use super::form::Form;
use super::message::{CQE_BODY, CqeMsg, MAX_SGE};
use super::ring::{Age, CQE_SLOT, Stamp, slot};
use super::stateless::SfPeer;
use super::wire::Queue;

mod failing;
mod linger;
mod messages;
mod pack;
mod revert;
mod start;
mod timers;
mod track;
mod window_op;

pub use linger::Linger;
pub use track::Patience;
use track::QueueTrack;
use window_op::WindowOpState;

/// Unsignaled sends with a CQEP in a turn of the send queue.
const REPORTS: u32 = 4;

/// After so many tries of a message, which take two seconds, SF is unreachable by this connection.
const SILENT: u32 = 32;

/// What a QP is made of on SL.
pub struct SlInit<E: StarEnv> {
    /// Its number
    pub qpn: Qpn,
    /// Send queue
    pub sq: E::Sq,
    /// Index there of the first WQE that it sends
    pub first_send: u32,
    /// Receive queue, private or shared
    pub rq: E::Rq,
    /// Completion queue of sends
    pub send_cq: E::Cq,
    /// Completion queue of receives
    pub recv_cq: E::Cq,
    /// Whether all sends make completions
    pub sq_sig_all: bool,
    /// The Setup that SF gets. `sq_depth` is that of the send queue; the slots are memory of the host.
    pub setup: Setup,
    /// Key of the send queue's memory, from where SF gets inline bytes that fit no WQEP
    pub inline_key: u32,
    /// How long SF may be silent
    pub patience: Patience,
    /// Silence after which SF is asked whether it lives, while sends wait for it
    pub keepalive: Nanos,
    /// Count of rules that another connection sent, without an answer: WQEs wait, as they may name them
    pub rules: Arc<AtomicU32>,
    /// Which packets it sends
    pub form: Form,
    /// It speaks StRoM's dialect: RPCs
    pub dialect: bool,
    /// Where it counts
    pub stats: E::Stats,
}

/// Memory messages that SF has not answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Changes {
    /// Rules that were added
    pub given: u32,
    /// Rules that were removed
    pub taken: u32,
}

impl Changes {
    fn count(&mut self, message: &Control, change: fn(u32, u32) -> u32) {
        match message {
            Control::Rule(_) => self.given = change(self.given, 1),
            Control::Unrule { .. } => self.taken = change(self.taken, 1),
            _ => {}
        }
    }
}

/// Where a connection stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlState {
    /// Not begun
    Idle,
    /// SF has not answered the set-up
    Starting,
    /// WQEs flow
    Ready,
    /// Everything is flushed
    Error,
}

/// A QP on SL. In the order of use: what each event and doorbell looks at, what the QP is made of, and the
/// rest.
#[repr(C)]
pub struct SlQp<E: StarEnv> {
    state: SlState,
    /// The next send cannot be sent
    stuck: bool,
    /// The oldest send, if it is a window operation
    window_op: WindowOpState,
    /// The oldest receive, if its message invalidates a key: that is done before the completion
    invalidation: WindowOpState,
    /// SF's card lacks rules: all are to be sent
    sf_lacks_rules: bool,
    /// SF has asked for the sum of all rules
    sum_wanted: bool,
    /// No WQE leaves for the first time
    quiescing: bool,
    /// There was no room in the port when receives were to be looked for: until somebody has, and found none,
    /// a post of one may ring nobody
    owes_look: bool,
    /// No message goes to SF any more: SF is gone, or the QP has reverted
    detached: bool,
    /// Messages without an answer that WQEs must not overtake: the set-up, and rules
    gate: u32,
    /// Memory messages without an answer
    changes: Changes,
    /// The send behind the last that has a fence
    fenced: u32,
    /// Index in the send queue of sequence 0
    base: u32,
    /// Since when SF is silent while an answer is due
    quiet_since: Nanos,
    /// Since when sends wait that SF left behind
    left_at: Option<Nanos>,
    send: QueueTrack,
    recv: QueueTrack,
    /// Receives that were sent, by slot
    recvs: Box<[Recv]>,
    /// Their SGEs, `stride` each
    sges: Box<[Sge]>,
    stride: usize,
    channel: ControlChannel,
    /// Memory for messages while there are none: else one of later might find none
    spare: Option<SpareOutbox>,
    init: SlInit<E>,
    peer: SfPeer,
    /// Shared receive queue: sequence up to which SF wants receives
    wanted: Psn,
    /// SF knows that the connection is over, and sends nothing for it any more
    sf_ended: bool,
    /// SF was not given up at the last deadline, because of a local stall
    stall_discounted: bool,
}

/// A receive that SF has.
#[derive(Clone, Copy, Debug, Default)]
struct Recv {
    wr_id: u64,
    sges: u16,
}

impl<E: StarEnv> SlQp<E> {
    /// A QP without a peer. `Invalid`: depths are not powers of two, or too large for the slots; `Exhausted`:
    /// no memory.
    pub fn new(init: SlInit<E>) -> Result<Self, NicError> {
        let Setup { sq_depth, rq_depth, replay_slots, .. } = init.setup;
        let powers = [sq_depth, rq_depth, replay_slots].iter().all(|depth| depth.is_power_of_two());
        if !powers || !init.setup.fits() {
            return Err(NicError::Invalid);
        }
        let stride = init.rq.max_sge().min(MAX_SGE);
        Ok(SlQp {
            send: QueueTrack::new(sq_depth)?,
            recv: QueueTrack::new(rq_depth)?,
            recvs: filled(rq_depth as usize)?,
            sges: filled(rq_depth as usize * stride)?,
            init,
            peer: SfPeer::default(),
            state: SlState::Idle,
            stuck: false,
            fenced: 0,
            window_op: WindowOpState::None,
            invalidation: WindowOpState::None,
            base: 0,
            stride,
            wanted: Psn::default(),
            channel: ControlChannel::new(),
            spare: None,
            gate: 0,
            changes: Changes::default(),
            sf_lacks_rules: false,
            sum_wanted: false,
            quiescing: false,
            owes_look: false,
            detached: false,
            sf_ended: false,
            left_at: None,
            stall_discounted: false,
            quiet_since: 0,
        })
    }

    /// Queues a message. Without memory for it SF gets none any more, as if it were gone.
    fn push_message(&mut self, now: Nanos, message: Control) {
        if self.detached {
            return;
        }
        self.channel.reuse(&mut self.spare);
        if self.channel.send(message).is_err() {
            return self.detach(now);
        }
        self.gate += u32::from(is_gate(&message));
        self.changes.count(&message, u32::wrapping_add);
    }

    /// Where it stands.
    pub fn state(&self) -> SlState {
        self.state
    }
    /// Whether messages go to SF.
    pub fn is_connected(&self) -> bool {
        matches!(self.state, SlState::Starting | SlState::Ready) && !self.detached
    }
    /// Whether SF answers, or may yet. One that does not answer the set-up may never begin, and one that is
    /// silent for two seconds may be gone: other connections do not send their rules by this one.
    pub fn is_reachable(&self) -> bool {
        let most = if self.state == SlState::Starting { self.init.patience.tries } else { SILENT };
        self.is_connected() && self.channel.tries() < most
    }
    /// Its peer.
    pub fn peer(&self) -> &SfPeer {
        &self.peer
    }
    /// What it costs the host beside the program's own queues, bytes: the slots in memory and what is kept
    /// here.
    pub fn bytes(&self) -> usize {
        let slots = self.init.setup.token.slots.range().len as usize;
        let recvs = size_of_val(&*self.recvs) + size_of_val(&*self.sges);
        size_of::<Self>() + slots + recvs + self.send.bytes() + self.recv.bytes()
    }

    /// SF may reach this memory, or no longer: a [`Control::Rule`] or [`Control::Unrule`]. WQEs posted from
    /// now on are sent once it has answered.
    pub fn send_rule(&mut self, env: &mut E, now: Nanos, rule: Control) {
        if self.is_connected() {
            if let Control::Unrule { key } = rule
                && self.changes.given > 0
            {
                /* else it would be known again until its end arrives */
                let retracted = self.channel.retract_rule(key);
                (self.gate, self.changes.given) = (self.gate - retracted, self.changes.given - retracted);
            }
            self.push_message(now, rule);
            self.send_messages(env, now);
        }
    }

    /// WQEs that SF has, or that are on their way there, without an answer.
    pub fn unanswered(&self) -> u32 {
        self.send.unanswered() + self.recv.unanswered()
    }

    /// Whether all that it has to send is receives, or small messages: they may wait for others.
    pub fn has_small_backlog(&self) -> bool {
        let idle = self.send.next == self.posted();
        self.state == SlState::Ready && (idle || is_small(&self.init.sq, self.index(self.send.next)))
    }

    /// The program posted to a queue.
    pub fn handle_doorbell(&mut self, now: Nanos) {
        if self.state == SlState::Error {
            return self.flush(WcStatus::WrFlushErr);
        }
        if self.sends_wait() {
            self.channel.wake(now);
        }
    }

    /// Whether WQEs wait, as SF may lack rules that they name.
    fn is_closed(&self) -> bool {
        self.gate > 0 || self.sf_lacks_rules || self.init.rules.load(Ordering::Relaxed) > 0
    }

    /// The next WQE is none that StaR carries: it fails once it is the oldest.
    fn refuse(&mut self, env: &mut E, now: Nanos) {
        self.stuck = true;
        if self.send.una == self.send.next {
            self.enter_error(env, now, WcStatus::LocQpOpErr);
        }
    }

    /// Whether WQEs wait for room in the port.
    fn has_more(&self) -> bool {
        let recvs = self.has_recv() || self.owes_look;
        let sends = !self.stuck
            && !self.behind_window_op()
            && self.send.next != self.posted()
            && self.send.has_room();
        self.state == SlState::Ready && !self.quiescing && !self.is_closed() && (recvs || sends)
    }

    /// Sequence of the next WQE that the program will post.
    fn posted(&self) -> u32 {
        self.init.sq.posted().wrapping_sub(self.base)
    }
    fn index(&self, seq: u32) -> u32 {
        seq.wrapping_add(self.base)
    }

    fn may_take(&self) -> bool {
        !self.init.setup.srq || self.wanted.since(Psn::new(self.recv.next)) > 0
    }

    /// Takes a receive from the queue into the slot of the next sequence.
    fn take_recv(&mut self) -> bool {
        if !self.recv.has_room() || !self.may_take() {
            return false;
        }
        let at = (self.recv.next & (self.init.setup.rq_depth - 1)) as usize;
        let first = at * self.stride;
        let (Some(sges), Some(recv)) =
            (self.sges.get_mut(first..first + self.stride), self.recvs.get_mut(at))
        else {
            return false;
        };
        let Some(TakenWqe { wr_id, num_sge }) = self.init.rq.take(sges) else { return false };
        *recv = Recv { wr_id, sges: num_sge as u16 };
        true
    }

    /// A packet for it, which was fetched itself, is handled soon: what lies behind it.
    #[inline]
    pub(crate) fn expect(&self, env: &E) {
        let Setup { sq_depth, rq_depth, token, .. } = &self.init.setup;
        let slots = [
            slot(self.init.setup.send_ring(), *sq_depth, self.send.una, CQE_SLOT),
            slot(self.init.setup.recv_ring(), *rq_depth, self.recv.una, CQE_SLOT),
        ];
        self.init.sq.expect();
        env.prefetch_at(token.slots.gate());
        slots.iter().for_each(|slot| env.prefetch_at(*slot));
        self.expect_recv(env, self.recv.una);
    }

    /// A doorbell for it, which was fetched itself, is handled soon: what its requests use.
    #[inline]
    pub(crate) fn expect_requests(&self, env: &E) {
        self.expect_recv(env, self.recv.next);
    }

    #[inline]
    fn expect_recv(&self, env: &E, seq: u32) {
        let at = (seq & (self.init.setup.rq_depth - 1)) as usize;
        if let (Some(recv), Some(sge)) = (self.recvs.get(at), self.sges.get(at * self.stride)) {
            env.prefetch(recv);
            env.prefetch(sge);
        }
    }

    /// The same, soon: WQEs.
    #[inline]
    pub(crate) fn expect_wqes(&self) {
        self.init.sq.expect_wqe(self.index(self.send.una));
        self.init.rq.expect_wqe();
    }

    /// An event of the card.
    pub fn handle_event(&mut self, env: &mut E, now: Nanos, event: &SlEvent) {
        if event.epoch != self.peer.epoch || self.state != SlState::Ready {
            return;
        }
        self.quiet_since = now;
        self.channel.wake(now);
        self.recv.wake(now);
        if let Some(upto) = event.upto {
            self.send.store_to(upto.sends, now);
            self.recv.store_to(upto.recvs, now);
        }
        match (event.what, event.queue) {
            (News::Stored(seq), queue) => {
                if self.track(queue).store(seq, now) {
                    let (low, gap) = (self.track(queue).low(), self.track(queue).gap());
                    let most = if self.init.form == Form::Paper { 1 } else { gap };
                    self.send_again(env, queue, low, most);
                }
            }
            (News::Completed, queue) => self.complete(env, now, queue),
        }
    }

    fn track(&mut self, queue: Queue) -> &mut QueueTrack {
        match queue {
            Queue::Send => &mut self.send,
            Queue::Recv => &mut self.recv,
        }
    }

    /// Completes what is in the slots of a queue, in order. For polls, too, as an event may be lost.
    pub fn complete(&mut self, env: &mut E, now: Nanos, queue: Queue) {
        while self.state == SlState::Ready {
            let Some((seq, msg)) = self.next_completion(env, queue) else { return };
            if msg.status == WcStatus::Success && self.waits_for_host(queue, seq, &msg, now) {
                return;
            }
            let cqe = self.cqe(queue, seq, &msg);
            self.finish(env, now, (queue, seq), &cqe, msg.solicited);
        }
    }

    /// WQE `seq` of a queue has ended so.
    fn finish(&mut self, env: &mut E, now: Nanos, of: (Queue, u32), cqe: &Cqe, solicited: bool) {
        let (queue, seq) = of;
        let failed = cqe.status != WcStatus::Success;
        let notifies = queue == Queue::Recv || failed || self.is_signaled(seq);
        let next = seq.wrapping_add(1);
        self.track(queue).complete(next, now);
        if queue == Queue::Send {
            /* before the completion: who polls it may post at once */
            self.init.sq.release(self.index(next));
            if self.left_at.is_some() && next == self.posted() {
                /* those that SF left behind are done; later ones wait anew */
                self.left_at = None;
            }
        }
        let full = notifies && !self.push(queue, cqe, solicited);
        if full {
            self.init.stats.cq_overrun.inc();
            env.event(AsyncEvent::QpFatal(self.init.qpn));
        }
        if full || failed {
            self.enter_error(env, now, WcStatus::WrFlushErr);
        }
    }

    /// The first receive whose completion is not in its slot.
    fn received(&self, env: &mut E) -> Psn {
        let (ring, rq_depth) = (self.init.setup.recv_ring(), self.init.setup.rq_depth);
        let mut seq = self.recv.una;
        while seq != self.recv.next && self.is_filled(env, slot(ring, rq_depth, seq, CQE_SLOT), seq) {
            seq = seq.wrapping_add(1);
        }
        Psn::new(seq)
    }

    /// Whether the slot at this address has the completion of `seq`.
    fn is_filled(&self, env: &mut E, at: u64, seq: u32) -> bool {
        let here = Stamp { epoch: self.peer.epoch, seq: Psn::new(seq).get() };
        let stamp = env.star_load(at).map(|word| Stamp::of(u64::from_ne_bytes(word)));
        stamp.is_some_and(|stamp| stamp.age_of(here) == Age::Same)
    }

    /// The oldest completion that is in its slot, if nothing before it must come first.
    fn next_completion(&mut self, env: &mut E, queue: Queue) -> Option<(u32, CqeMsg)> {
        let setup = &self.init.setup;
        let (ring, depth) = match queue {
            Queue::Send => (setup.send_ring(), setup.sq_depth),
            Queue::Recv => (setup.recv_ring(), setup.rq_depth),
        };
        let (mut seq, next) = (self.track(queue).una, self.track(queue).next);
        while seq != next {
            let at = slot(ring, depth, seq, CQE_SLOT);
            if self.is_filled(env, at, seq) {
                let mut body = [0; CQE_BODY];
                let (first, second) = body.split_at_mut(8);
                first.copy_from_slice(&env.star_load(at + 8)?);
                second.copy_from_slice(&env.star_load(at + 16)?);
                return Some((seq, CqeMsg::from_body(at, &body)?));
            }
            /* an unsignaled one has no slot filled, unless it failed, and then nothing comes behind it */
            if queue == Queue::Recv || self.is_reported(seq) {
                return None;
            }
            seq = seq.wrapping_add(1);
        }
        None
    }

    /// Whether the program wants to know that a send has succeeded.
    fn is_signaled(&self, seq: u32) -> bool {
        let wqe = self.init.sq.wqe(self.index(seq));
        self.init.sq_sig_all || wqe.flags.contains(SendFlags::SIGNALED)
    }

    /// Whether SF is asked for a CQEP: for the program, for a window operation, and so that slots of
    /// unsignaled sends come free.
    fn is_reported(&self, seq: u32) -> bool {
        let every = (self.init.setup.sq_depth / REPORTS).max(1);
        let last = seq & (every - 1) == every - 1;
        last || self.is_signaled(seq) || self.init.sq.op(self.index(seq)).is_local()
    }

    /// The completion of `seq`.
    fn cqe(&self, queue: Queue, seq: u32, msg: &CqeMsg) -> Cqe {
        let (wr_id, opcode, src_qp) = match queue {
            Queue::Send => {
                let wqe = self.init.sq.wqe(self.index(seq));
                (wqe.wr_id, wqe.op.wc_opcode(), 0)
            }
            Queue::Recv => (self.recv_id(seq), msg.opcode, self.peer.qpn),
        };
        let CqeMsg { status, flags, byte_len, imm, vendor_err, .. } = *msg;
        let flags = flags & (WcFlags::WITH_IMM | WcFlags::WITH_INV);
        let qpn = self.init.qpn;
        Cqe { wr_id, byte_len, imm, qpn, src_qp, vendor_err, status, opcode, flags, sl: 0 }
    }

    fn recv_id(&self, seq: u32) -> u64 {
        let at = (seq & (self.init.setup.rq_depth - 1)) as usize;
        self.recvs.get(at).map_or(0, |recv| recv.wr_id)
    }

    /// False: the completion queue was full.
    fn push(&self, queue: Queue, cqe: &Cqe, solicited: bool) -> bool {
        let failed = cqe.status != WcStatus::Success;
        self.init.stats.completions.inc();
        if failed {
            self.init.stats.error_completions.inc();
        }
        let cq = match queue {
            Queue::Send => &self.init.send_cq,
            Queue::Recv => &self.init.recv_cq,
        };
        cq.push(cqe, solicited || failed).is_ok()
    }
}

/// Whether WQEs wait for the answer, as they may name memory of this message.
fn is_gate(message: &Control) -> bool {
    matches!(message, Control::Setup(_) | Control::Rule(_) | Control::Begin { .. })
}
