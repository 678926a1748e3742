//! The stateless endpoints of a process: queue pairs of which its card keeps nothing.
//!
//! Each is an [`SlQp`](crate::endpoint::SlQp) in host memory, found by its QPN; the card's part is
//! `stateless::handle`, which knows none of them. This module has their turns and timers. `endpoint` makes
//! and ends them, `calls` does what programs ask of them, `rules` sends the process's memory rules to
//! stateful cards, `revert` gives them back to the card. It must not know how roles were settled.

mod calls;
mod endpoint;
mod revert;
mod rules;

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;

use slab::Slab;
use starverbs_core::coalesce::{Backlog, are_many};
use starverbs_core::mr::{MemoryRule, MrFault, MrTable, Storage, WindowBind};
use starverbs_core::nic::{Nic, TimerId, Timers};
use starverbs_core::qp::EventOwner;
use starverbs_core::room::Room;
use starverbs_core::{Gid, Nanos, NicError, QpId, Qpn, SendOp, SendWqe, WcStatus};

use crate::answers::Answers;
use crate::bounds::Bounds;
use crate::endpoint::{Linger, SlQp, SlState};
use crate::env::{SlEvent, StarSource};
use crate::form::Form;
use crate::stateless::{self, StatelessCard};
use crate::token::CardSecret;
use crate::wire::{Prefix, StarPacket};

use super::places::QpnPlaces;
use super::roles::CardIdentity;
use super::slots::{OwnedArea, SlotPool};
use super::{EndpointHost, Turn};
pub use endpoint::StatefulCard;
use endpoint::{Endpoint, WindowOp};
use rules::Rules;

/// The bit of a timer's number that marks a lingering connection, not a queue pair.
const LINGER_BIT: u32 = 1 << 31;

/// So many ends are a crowd: few of the packets that come together are for the same, and what an end sends
/// should leave beside the answer to its packet, as its peer takes both in one call.
const CROWD: usize = 64;
/// Ends with events that are settled together: what they use of the CPU's caches should still be there.
const SETTLED_TOGETHER: usize = 16;

/// What a process keeps of its queue pairs that are stateless ends.
pub struct Endpoints<E: EndpointHost> {
    boot_epoch: u16,
    boot: u64,
    /// Which packets it sends
    form: Form,
    /// Connections so far: the lower half of their epochs
    begun: u16,
    stats: E::Stats,
    /// What the card lets packets reach
    bounds: Bounds,
    /// What it knows packets of its connections by
    secret: CardSecret,
    /// What it owes for packets of this turn
    answers: Answers,
    ends: Slab<Box<Endpoint<E>>>,
    places: QpnPlaces,
    /// Slots of ended connections
    slots: SlotPool<E::Slots>,
    timers: Timers,
    /// Those with something to send
    ready: VecDeque<u32>,
    /// Those with events in this turn, some of which are settled together
    touched: Vec<u32>,
    /// WQEPs of all of them without an answer
    unanswered: u32,
    rules: Rules,
    /// Rules of keys whose previous rule stateful cards may still know
    reopened: Vec<MemoryRule>,
    /// Those whose window operation waits until all stateful cards know of it
    waiting_ops: Vec<u32>,
    /// Those that take from an SRQ, by it: sorted
    by_srq: Vec<(u32, u32)>,
    /// Connections whose queue pairs are gone
    lingers: Slab<Lingering<E::Slots>>,
    /// The same by QPN and epoch, sorted
    linger_index: Vec<(Prefix, u32)>,
}

/// A connection whose queue pair is gone, until its peer knows.
struct Lingering<M> {
    linger: Linger,
    timer: TimerId,
    /// Its slots, which are quarantined until then. `None`: the secret was replaced
    slots: Option<OwnedArea<M>>,
}

impl<E: EndpointHost> Endpoints<E> {
    /// Without queue pairs, on this card.
    pub fn new(identity: &CardIdentity, stats: E::Stats) -> Self {
        let CardIdentity { boot, form, seed, .. } = *identity;
        Endpoints {
            boot_epoch: identity.boot_epoch(),
            boot,
            form,
            begun: 0,
            stats,
            bounds: Bounds::new(),
            secret: CardSecret::new(seed),
            answers: Answers::new(form),
            ends: Slab::new(),
            places: QpnPlaces::default(),
            slots: SlotPool::default(),
            timers: Timers::default(),
            ready: VecDeque::new(),
            touched: Vec::new(),
            unanswered: 0,
            rules: Rules::default(),
            reopened: Vec::new(),
            waiting_ops: Vec::new(),
            by_srq: Vec::new(),
            lingers: Slab::new(),
            linger_index: Vec::new(),
        }
    }

    /// Takes over all memory rules there are, and follows their changes. `Exhausted`: no memory.
    pub fn learn(&mut self, nic: &mut Nic<E>) -> Result<(), NicError> {
        let memory = nic.memory();
        memory.rules().try_for_each(|rule| self.keep_rule(&rule))?;
        memory.follow()
    }

    /// A packet for the card's stateless half; its event is handled at once. The card keeps nothing of
    /// connections and looks none up: the host finds the one that an event is of.
    pub fn handle_packet(&mut self, turn: &mut Turn<'_, E>, from: StarSource<'_>, packet: &StarPacket<'_>) {
        let card = StatelessCard { bounds: Some(&self.bounds), secret: &self.secret, stats: &self.stats };
        stateless::handle(&card, &mut self.answers, turn.env, from, packet);
        while let Some(event) = turn.env.next_event() {
            self.on_event(turn, &event);
        }
        if self.touched.len() >= if self.ends.len() > CROWD { 1 } else { SETTLED_TOGETHER } {
            self.settle_touched(turn);
        }
    }

    /// A packet or a doorbell for `qpn` will come soon. `None`: it is none of these.
    #[inline]
    pub fn expect(&self, env: &E, qpn: Qpn) -> Option<&SlQp<E>> {
        let end = self.end(qpn)?;
        env.prefetch(&end.queued);
        env.prefetch(&end.qp);
        Some(&end.qp)
    }

    /// A doorbell of `qpn`, whose end was fetched, is handled soon.
    #[inline]
    pub(super) fn expect_requests(&self, env: &E, qpn: Qpn) -> bool {
        self.end(qpn).inspect(|end| end.qp.expect_requests(env)).is_some()
    }

    fn on_event(&mut self, turn: &mut Turn<'_, E>, event: &SlEvent) {
        if let Some(at) = self.places.get(event.qpn)
            && let Some(end) = self.ends.get_mut(at as usize)
        {
            end.qp.handle_event(turn.env, turn.now, event);
            if !end.touched {
                end.touched = true;
                self.touched.push_in_room(at);
            }
        }
    }

    /// What follows from events, once for each queue pair.
    fn settle_touched(&mut self, turn: &mut Turn<'_, E>) {
        let mut n = 0;
        while let Some(at) = self.touched.get(n).copied() {
            n += 1;
            if let Some(end) = self.ends.get_mut(at as usize) {
                end.touched = false;
                self.settle(turn, at);
            }
        }
        self.touched.clear();
    }

    /// A control message; false: for none of its QPs.
    pub fn handle_control(&mut self, turn: &mut Turn<'_, E>, source: &Gid, packet: &StarPacket<'_>) -> bool {
        let qpn = packet.header.qpn;
        if let Some(at) = self.places.get(qpn)
            && let Some(end) = self.ends.get_mut(at as usize)
        {
            end.qp.handle_control(turn.env, turn.now, source, packet);
            self.settle(turn, at);
            return true;
        }
        let linger = packet.prefix.and_then(|prefix| self.find_linger(Prefix { qpn, ..prefix }).ok());
        let Some(at) = linger.map(|place| self.linger_index[place].1 as usize) else { return false };
        let Some(Lingering { linger, .. }) = self.lingers.get_mut(at) else { return false };
        if linger.handle_control(turn.env, turn.now, source, packet) {
            self.end_linger(at);
        }
        true
    }

    /// The program posted to a QP, if it is one of these.
    #[inline]
    pub fn ring(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn) -> bool {
        let Some(at) = self.places.get(qpn) else { return false };
        if let Some(end) = self.ends.get_mut(at as usize) {
            end.qp.handle_doorbell(turn.now);
            self.settle(turn, at);
        }
        true
    }

    /// What `qpn`, if it is one of these, has to send, and what is without an answer: whether its doorbell
    /// may wait.
    #[inline]
    pub fn backlog(&self, qpn: Qpn) -> Backlog {
        Backlog::of_requests(self.unanswered, || self.end(qpn).is_some_and(|end| end.qp.has_small_backlog()))
    }

    /// Whether `qpn` is one of these, and so much of all of them has no answer that small messages wait.
    #[inline]
    pub fn has_many_unanswered(&self, qpn: Qpn) -> bool {
        are_many(self.unanswered) && self.places.get(qpn).is_some()
    }

    /// Settles what came, follows the table of memory, and runs the timers that are due.
    pub fn run_timers(&mut self, turn: &mut Turn<'_, E>) {
        self.settle_touched(turn);
        self.follow_memory(turn);
        while let Some(who) = self.timers.pop_due(turn.now) {
            if who & LINGER_BIT != 0 {
                self.poll_linger(turn, (who & !LINGER_BIT) as usize);
            } else if let Some(end) = self.ends.get_mut(who as usize) {
                match end.qp.next_deadline() {
                    Some(due) if due <= turn.now => {
                        end.qp.handle_timeout(turn.env, turn.now);
                        self.settle(turn, who);
                    }
                    /* timers are lazy */
                    Some(due) => self.timers.arm(end.timer, due, who),
                    None => {}
                }
            }
        }
    }

    /// When [`run_timers`](Endpoints::run_timers) has something to do.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.timers.next()
    }

    /// Whether answers are owed that [`transmit`](Endpoints::transmit) has left.
    #[inline]
    pub fn owes_answers(&self) -> bool {
        self.answers.is_owed()
    }

    /// Whether these are to completions alone.
    #[inline]
    pub fn owes_for_completions(&self) -> bool {
        self.answers.is_owed() && self.answers.data_owed() == 0
    }

    /// Whether anything is to come but keep-alives to silent peers for which no send waits.
    pub fn is_busy(&self) -> bool {
        let waits = |end: &Endpoint<E>| end.qp.next_deadline().is_some() && !end.qp.is_only_probing();
        !self.lingers.is_empty() || self.ends.iter().any(|(_, end)| waits(end))
    }

    /// Sends what waits, and what follows from that; answers of the last packets only with `acks`, so that
    /// they may go with what the program answers. True: more waits for room in the port.
    pub fn transmit(&mut self, turn: &mut Turn<'_, E>, acks: bool) -> bool {
        if acks {
            self.answers.flush(turn.env);
        }
        for _ in 0..self.ready.len() + self.ends.len() {
            let Some(at) = self.ready.pop_front() else { return false };
            let Some(end) = self.ends.get_mut(at as usize) else { continue };
            end.queued = false;
            /* one that is in the list again without a full port was woken meanwhile: it goes in this turn */
            if self.settle(turn, at) {
                return true;
            }
        }
        !self.ready.is_empty()
    }

    /// After each call of a QP: its window operations, what it has to send, its timer, and its group. True:
    /// it has more to send than the port takes.
    fn settle(&mut self, turn: &mut Turn<'_, E>, at: u32) -> bool {
        let busy = |end: &mut Endpoint<E>| end.window_op.is_some() || end.qp.has_window_op();
        while self.ends.get_mut(at as usize).is_some_and(|end| busy(end)) {
            self.begin_window_op(turn, at);
            if !self.finish_window_op(turn, at) {
                break;
            }
        }
        let Some(end) = self.ends.get_mut(at as usize) else { return false };
        if end.qp.must_send_rules() {
            let pd = end.released.init.pd;
            let rules = turn.nic.memory().rules().filter(|rule| rule.pd == pd);
            end.qp.send_rules(turn.env, turn.now, rules);
        }
        if end.qp.must_send_sum() {
            end.qp.send_sum(turn.env, turn.now, self.rules.sum(end.released.init.pd));
        }
        /* the pace of many is SF's, and their small packets share frames */
        let alone = self.unanswered == end.unanswered && self.ready.is_empty();
        let owed = self.answers.data_owed();
        if owed > 0 && (end.qp.may_outrun(owed) || alone && !end.qp.has_small_backlog()) {
            /* SF has no place for more receives before it knows that those before are done; and they would be
             * behind data that follows its WQE, in frames of its own */
            self.answers.send_owed(turn.env);
        }
        let more = end.qp.poll_transmit(turn.env, turn.now, turn.nic.memory(), alone);
        let unanswered = end.qp.unanswered();
        self.unanswered = self.unanswered - end.unanswered + unanswered;
        end.unanswered = unanswered;
        if more && !end.queued {
            end.queued = true;
            self.ready.push_back(at);
        }
        match end.qp.next_deadline() {
            /* what a full port held up is still due; in this turn there is no more to do for it */
            Some(due) => self.timers.arm(end.timer, due.max(turn.now + 1), at),
            /* one that stays comes for nothing, when its end lies no longer in the CPU's caches */
            None if self.timers.is_crowded() => self.timers.disarm(end.timer),
            None => {}
        }
        if end.qp.setup().srq
            && let Some(srq) = end.released.srq()
        {
            turn.nic.took_from_srq(turn.env, srq);
        }
        self.follow_leader(turn, at);
        more
    }

    /// Begins the next window operation of a QP, one at a time. All stateful cards know of it before it
    /// completes.
    fn begin_window_op(&mut self, turn: &mut Turn<'_, E>, at: u32) {
        let Some(end) = self.ends.get_mut(at as usize).filter(|end| end.window_op.is_none()) else { return };
        let owner = QpId { pd: end.released.init.pd, qpn: end.released.qpn };
        let window_op = if let Some(wqe) = end.qp.take_window_op() {
            end.released.windows = true;
            WindowOp::Posted(change_window(turn.nic.memory(), &wqe, owner).is_ok())
        } else if let Some(key) = end.qp.take_invalidation(turn.env) {
            WindowOp::Invalidated(turn.nic.memory().invalidate_remote(key, owner).is_ok())
        } else {
            return;
        };
        end.window_op = Some(WindowOp::Announcing);
        self.follow_memory(turn);
        if let Some(end) = self.ends.get_mut(at as usize) {
            end.window_op = Some(window_op);
        }
    }

    /// Completes a window operation once all stateful cards have answered. True: the next WQE may be another.
    fn finish_window_op(&mut self, turn: &mut Turn<'_, E>, at: u32) -> bool {
        let Some(end) = self.ends.get(at as usize) else { return false };
        let (pd, Some(window_op)) = (end.released.init.pd, end.window_op) else { return false };
        if matches!(window_op, WindowOp::Announcing) {
            return false;
        }
        if !self.is_settled(pd) {
            if !self.waiting_ops.contains(&at) {
                self.waiting_ops.push(at);
            }
            return false;
        }
        let Some(end) = self.ends.get_mut(at as usize) else { return false };
        end.window_op = None;
        match window_op {
            WindowOp::Posted(true) => end.qp.window_op_done(turn.env, turn.now, WcStatus::Success),
            WindowOp::Posted(false) => end.qp.window_op_done(turn.env, turn.now, WcStatus::MwBindErr),
            WindowOp::Invalidated(done) => end.qp.invalidation_done(turn.env, turn.now, done),
            WindowOp::Announcing => {}
        }
        true
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Whose a QP is, if it is one of these.
    pub fn owner(&self, qpn: Qpn) -> Option<EventOwner> {
        self.end(qpn).map(|end| end.released.owner())
    }

    /// Numbers of those there are.
    pub fn qpns(&self) -> impl Iterator<Item = Qpn> + '_ {
        self.ends.iter().map(|(_, end)| end.released.qpn)
    }

    /// Whether it is one of these, and its peer has begun.
    pub(super) fn has_begun(&self, qpn: Qpn) -> bool {
        self.end(qpn).is_some_and(|end| end.qp.state() == SlState::Ready)
    }

    /// Whether it is one of these, and its peer has not answered yet.
    pub(super) fn is_beginning(&self, qpn: Qpn) -> bool {
        self.end(qpn).is_some_and(|end| end.qp.state() == SlState::Starting)
    }

    fn end(&self, qpn: Qpn) -> Option<&Endpoint<E>> {
        self.ends.get(self.places.get(qpn)? as usize).map(|end| &**end)
    }

    /// Whether SF answers this connection, or may yet.
    fn is_reachable(&self, at: u32) -> bool {
        self.ends.get(at as usize).is_some_and(|end| end.qp.is_reachable())
    }

    /// Whether SF has answered it, does no longer, and may again.
    fn is_silent(&self, at: u32) -> bool {
        let end = self.ends.get(at as usize);
        end.is_some_and(|end| {
            end.qp.is_connected() && !end.qp.is_reachable() && end.qp.state() == SlState::Ready
        })
    }

    /// Whether SF has answered it, and still does.
    fn is_ready(&self, at: u32) -> bool {
        let end = self.ends.get(at as usize);
        end.is_some_and(|end| end.qp.is_reachable() && end.qp.state() == SlState::Ready)
    }
}

/// A bind or an invalidation was posted to a QP of this owner, and all before it is done.
fn change_window<S: Storage>(memory: &mut MrTable<S>, wqe: &SendWqe, owner: QpId) -> Result<(), MrFault> {
    match wqe.op {
        SendOp::BindMw => memory.bind(&WindowBind::of(wqe, owner)).map(|_| ()),
        _ => memory.invalidate(wqe.rkey, owner),
    }
}
