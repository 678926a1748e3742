//! SL's host library: what a connection costs there, in host memory, as the card keeps nothing.
//!
//! An [`SlQp`] sends the WQEs of a QP to SF as WQEPs, again until SF says that they are stored, and makes
//! completions of what SF lets the card write into the slots of the QP. The send queue itself is the copy of
//! what was sent; receives are kept here. It begins with [`SlQp::start`], which tells SF of the QP and of the
//! memory it may reach. It must not know how roles were chosen.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicU32, Ordering};

use starverbs_core::coalesce::is_small;
use starverbs_core::env::{CompletionQueue, RecvQueue, SendQueue};
use starverbs_core::room::filled;
use starverbs_core::{AsyncEvent, Cqe, Nanos, NicError, Psn, Qpn, SendFlags, Sge, WcFlags, WcStatus};

use super::channel::Channel;
use super::control::{Control, Setup};
use super::env::{News, SlEvent, StarEnv};
use super::form::Form;
use super::message::{CQE_BODY, CqeMsg, MAX_SGE};
use super::ring::{Age, CQE_SLOT, REPLAY_SLOT, Stamp, slot};
use super::stateless::Peer;
use super::wire::Queue;

mod care;
mod home;
mod own;
mod pack;
mod part;
mod start;
mod track;

use own::Chore;
pub use part::Parting;
pub use track::Patience;
use track::Track;

/// So often in a turn of the send queue SF tells of a send for whose completion the program did not ask.
const REPORTS: u32 = 4;

/// After so many tries of a message, which take two seconds, others tell SF.
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
    /// What SF is told. `sq_depth` is that of the send queue; the slots are memory of the host, aligned to
    /// their size.
    pub setup: Setup,
    /// Key of the send queue's memory, from where SF gets inline bytes that fit no WQEP
    pub inline_key: u32,
    /// How long SF may be silent
    pub patience: Patience,
    /// Silence after which SF is asked whether it lives, while sends wait for it
    pub keepalive: Nanos,
    /// Rules that SF is told through other connections and has not answered: WQEs wait, as they may name
    /// them
    pub rules: Arc<AtomicU32>,
    /// Which packets it sends
    pub form: Form,
    /// Where it counts
    pub stats: E::Stats,
}

/// Messages of SL's memory that SF has not answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Changes {
    /// Rules
    pub given: u32,
    /// Rules taken away
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
    /// SF is being told
    Starting,
    /// WQEs flow
    Ready,
    /// Everything is flushed
    Error,
}

/// A QP on SL.
pub struct SlQp<E: StarEnv> {
    init: SlInit<E>,
    peer: Peer,
    state: SlState,
    send: Track,
    recv: Track,
    /// The next send cannot be sent
    stuck: bool,
    /// Whether the oldest send is one that SL does by itself, and is to be done now
    own: Chore,
    /// Whether the oldest receive has a message that takes a key away, which is to be done before the
    /// program sees it
    invalid: Chore,
    /// Index in the send queue of sequence 0
    base: u32,
    /// Receives that were sent, by slot
    recvs: Box<[Recv]>,
    /// Their SGEs, `stride` each
    sges: Box<[Sge]>,
    stride: usize,
    /// Shared receive queue: sequence up to which SF wants receives
    wanted: Psn,
    channel: Channel,
    /// Messages without an answer that WQEs must not overtake: the set-up, and rules
    gate: u32,
    /// What was said of SL's memory, and has no answer
    changes: Changes,
    /// SF's card does not know the rules
    ignorant: bool,
    /// SF asks whether its card knows them all
    inquired: bool,
    /// No WQE leaves for the first time
    resting: bool,
    /// SF has said that it is gone
    parted: bool,
    /// Since when sends wait that were under way when it said so
    left_at: Option<Nanos>,
    /// SF was not given up as this end itself was late
    excused: bool,
    /// Since when SF is silent while something of it is awaited
    quiet_since: Nanos,
}

/// A receive that SF has.
#[derive(Clone, Copy, Debug, Default)]
struct Recv {
    wr_id: u64,
    sges: u16,
}

impl<E: StarEnv> SlQp<E> {
    /// A QP without a peer. `Invalid`: depths are not powers of two, or slots not aligned; `Exhausted`: no
    /// memory.
    pub fn new(init: SlInit<E>) -> Result<Self, NicError> {
        let Setup { sq_depth, rq_depth, send_ring, recv_ring, replay, replay_slots, .. } = init.setup;
        let powers = [sq_depth, rq_depth, replay_slots].iter().all(|depth| depth.is_power_of_two());
        let rings = send_ring | recv_ring;
        if !powers || !rings.is_multiple_of(CQE_SLOT) || !replay.is_multiple_of(REPLAY_SLOT) {
            return Err(NicError::Invalid);
        }
        let stride = init.rq.max_sge().min(MAX_SGE);
        Ok(SlQp {
            send: Track::new(sq_depth)?,
            recv: Track::new(rq_depth)?,
            recvs: filled(rq_depth as usize)?,
            sges: filled(rq_depth as usize * stride)?,
            init,
            peer: Peer::default(),
            state: SlState::Idle,
            stuck: false,
            own: Chore::None,
            invalid: Chore::None,
            base: 0,
            stride,
            wanted: Psn::default(),
            channel: Channel::new(),
            gate: 0,
            changes: Changes::default(),
            ignorant: false,
            inquired: false,
            resting: false,
            parted: false,
            left_at: None,
            excused: false,
            quiet_since: 0,
        })
    }

    /// What there is no memory to say ends the talk: SF is told nothing more, and is as one that is gone.
    fn ask(&mut self, now: Nanos, message: Control) {
        if self.parted {
            return;
        }
        if self.channel.send(message).is_err() {
            return self.depart(now);
        }
        self.gate += u32::from(is_gate(&message));
        self.changes.count(&message, u32::wrapping_add);
    }

    /// Where it stands.
    pub fn state(&self) -> SlState {
        self.state
    }
    /// Whether SF hears what it is told.
    pub fn speaks(&self) -> bool {
        matches!(self.state, SlState::Starting | SlState::Ready) && !self.parted
    }
    /// Whether SF is there to hear it. One that does not answer the first word may never begin, and one that
    /// is silent for two seconds may be gone: it is no one through whom others tell.
    pub fn is_heard(&self) -> bool {
        let most = if self.state == SlState::Starting { self.init.patience.tries } else { SILENT };
        self.speaks() && self.channel.tries() < most
    }
    /// Its peer.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }
    /// What it costs the host beside the program's own queues, bytes: the slots in memory and what is kept
    /// here.
    pub fn bytes(&self) -> usize {
        let Setup { sq_depth, rq_depth, replay_slots, .. } = self.init.setup;
        let slots = (sq_depth as usize + rq_depth as usize) * CQE_SLOT as usize
            + replay_slots as usize * REPLAY_SLOT as usize;
        let recvs = size_of_val(&*self.recvs) + size_of_val(&*self.sges);
        size_of::<Self>() + slots + recvs + self.send.bytes() + self.recv.bytes()
    }

    /// SF may reach this memory, or no longer: a [`Control::Rule`] or [`Control::Unrule`]. WQEs posted from
    /// now on are sent once it has answered.
    pub fn tell(&mut self, env: &mut E, now: Nanos, rule: Control) {
        if self.speaks() {
            if let Control::Unrule { key } = rule
                && self.changes.given > 0
            {
                /* told late, it would be known again until its end is heard */
                let unsaid = self.channel.unsay(key);
                (self.gate, self.changes.given) = (self.gate - unsaid, self.changes.given - unsaid);
            }
            self.ask(now, rule);
            self.poll_transmit(env, now);
        }
    }

    /// WQEs that SF has, or that are on their way there, without an answer.
    pub fn unanswered(&self) -> u32 {
        self.send.unanswered() + self.recv.unanswered()
    }

    /// Whether all that it has to send is receives, or a few messages, the last of them small: they may wait
    /// for others.
    pub fn has_small_backlog(&self) -> bool {
        let idle = self.send.next == self.posted();
        self.state == SlState::Ready && (idle || is_small(&self.init.sq, self.index(self.send.next)))
    }

    /// The program posted to a queue.
    pub fn handle_doorbell(&mut self, env: &mut E, now: Nanos) {
        if self.state == SlState::Error {
            return self.flush(WcStatus::WrFlushErr);
        }
        if self.sends_wait() {
            self.channel.wake(now);
        }
        self.supply(env, now);
    }

    /// SF may not know what WQEs name.
    fn is_closed(&self) -> bool {
        self.gate > 0 || self.ignorant || self.init.rules.load(Ordering::Relaxed) > 0
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
        let recvs = self.has_recv();
        let sends =
            !self.stuck && !self.behind_own() && self.send.next != self.posted() && self.send.has_room();
        self.state == SlState::Ready && !self.resting && !self.is_closed() && (recvs || sends)
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
        let Some((wr_id, n)) = self.init.rq.take(sges) else { return false };
        *recv = Recv { wr_id, sges: n as u16 };
        true
    }

    /// The card tells of something new.
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
                    let low = self.track(queue).low();
                    self.send_again(env, queue, low, 1);
                }
            }
            (News::Completed, queue) => self.complete(env, now, queue),
        }
        self.supply(env, now);
    }

    fn track(&mut self, queue: Queue) -> &mut Track {
        match queue {
            Queue::Send => &mut self.send,
            Queue::Recv => &mut self.recv,
        }
    }

    /// Looks at the slots of a queue and completes what is there, in order. For who polls, too: an event may
    /// be lost.
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
        let told = queue == Queue::Recv || failed || self.is_signaled(seq);
        let next = seq.wrapping_add(1);
        self.track(queue).complete(next, now);
        if queue == Queue::Send {
            /* before the completion: who polls it may post at once */
            self.init.sq.release(self.index(next));
            if self.left_at.is_some() && next == self.posted() {
                /* those that SF left are done; what comes now waits for itself */
                self.left_at = None;
            }
        }
        let full = told && !self.push(queue, cqe, solicited);
        if full {
            self.init.stats.cq_overrun.inc();
            env.event(AsyncEvent::QpFatal(self.init.qpn));
        }
        if full || failed {
            self.enter_error(env, now, WcStatus::WrFlushErr);
        }
    }

    /// The oldest completion that is in its slot, if nothing before it must come first.
    fn next_completion(&mut self, env: &mut E, queue: Queue) -> Option<(u32, CqeMsg)> {
        let Setup { sq_depth, rq_depth, send_ring, recv_ring, .. } = self.init.setup;
        let (ring, depth) = match queue {
            Queue::Send => (send_ring, sq_depth),
            Queue::Recv => (recv_ring, rq_depth),
        };
        let (mut seq, next) = (self.track(queue).una, self.track(queue).next);
        while seq != next {
            let at = slot(ring, depth, seq, CQE_SLOT);
            let here = Stamp { epoch: self.peer.epoch, seq: Psn::new(seq).get() };
            let stamp = Stamp::of(u64::from_ne_bytes(env.star_load(at)?));
            if stamp.age_of(here) == Age::Same {
                let mut body = [0; CQE_BODY];
                let (first, second) = body.split_at_mut(8);
                first.copy_from_slice(&env.star_load(at + 8)?);
                second.copy_from_slice(&env.star_load(at + 16)?);
                return Some((seq, CqeMsg::from_body(at, &body)?));
            }
            /* of one without a completion none comes, unless it failed, and then nothing comes behind it */
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

    /// Whether SF is asked to tell: for the program, or as the library has to do something then; and now and
    /// then, so that slots of sends without completions come free.
    fn is_reported(&self, seq: u32) -> bool {
        let every = (self.init.setup.sq_depth / REPORTS).max(1);
        let last = seq & (every - 1) == every - 1;
        last || self.is_signaled(seq) || self.init.sq.op(self.index(seq)).is_local()
    }

    /// What the program is told of `seq`.
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

/// WQEs wait until SF has answered this: they may name what it tells of.
fn is_gate(message: &Control) -> bool {
    matches!(message, Control::Setup(_) | Control::Rule(_) | Control::Begin { .. })
}
