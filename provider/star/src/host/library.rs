//! The library of the stateless half: a process's queue pairs of which its card keeps nothing.
//!
//! Each is an [`SlQp`](crate::library::SlQp) in host memory, found by its QPN; the card's part of it is
//! `stateless::handle`, which knows of none. This module has their turns and their time; `end` makes and ends
//! them, `calls` does what programs ask of them, `rules` tells stateful cards of the process's memory. It
//! must not know how roles were settled.

mod calls;
mod end;
mod home;
mod rules;

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;

use slab::Slab;
use starverbs_core::coalesce::Backlog;
use starverbs_core::mr::{Bind, MrFault, MrTable, Rule, Storage};
use starverbs_core::nic::{Nic, TimerId, Timers};
use starverbs_core::qp::Owner;
use starverbs_core::room::Room;
use starverbs_core::{FrameMeta, Gid, Nanos, NicError, QpId, Qpn, SendOp, SendWqe, WcStatus};

use crate::bounds::Bounds;
use crate::env::SlEvent;
use crate::form::Form;
use crate::library::{Parting, SlState};
use crate::stateless;
use crate::wire::Packet;

use super::places::Places;
use super::{Host, Turn};
use end::{Chore, End};
pub(super) use home::Stateless;
use rules::Rules;

/// The bit of a timer's number that says that a connection's last words are due, not a queue pair.
const PARTING: u32 = 1 << 31;

/// What a process keeps of its queue pairs that are stateless ends.
pub struct Library<E: Host> {
    life: u16,
    boot: u64,
    /// Which packets it sends
    form: Form,
    /// Connections so far: the lower half of their epochs
    begun: u16,
    stats: E::Stats,
    /// What the card lets packets reach
    bounds: Bounds,
    ends: Slab<Box<End<E>>>,
    places: Places,
    timers: Timers,
    /// Those with something to send
    ready: VecDeque<u32>,
    /// Those of which something came that is done at once, and what follows from it in company
    touched: Vec<u32>,
    /// WQEPs of all of them without an answer
    unanswered: u32,
    rules: Rules,
    /// What keys open now that stateful cards may know by what they opened before
    reopened: Vec<Rule>,
    /// Those whose change of a window is to be known to all before it is complete
    patient: Vec<u32>,
    /// Of queue pairs that are gone
    partings: Slab<(Parting, TimerId)>,
    /// Which of them had a number in an epoch, in their order
    parting_of: Vec<((Qpn, u32), u32)>,
}

impl<E: Host> Library<E> {
    /// Without queue pairs, on a card of this life: the lower half of its number is what epochs tell of it.
    pub fn new(life: u16, boot: u64, form: Form, stats: E::Stats) -> Self {
        Library {
            life,
            boot,
            form,
            begun: 0,
            stats,
            bounds: Bounds::new(),
            ends: Slab::new(),
            places: Places::default(),
            timers: Timers::default(),
            ready: VecDeque::new(),
            touched: Vec::new(),
            unanswered: 0,
            rules: Rules::default(),
            reopened: Vec::new(),
            patient: Vec::new(),
            partings: Slab::new(),
            parting_of: Vec::new(),
        }
    }

    /// All memory that there is; from now on it is told what changes. `Exhausted`: no memory.
    pub fn learn(&mut self, nic: &mut Nic<E>) -> Result<(), NicError> {
        let memory = nic.memory();
        memory.rules().try_for_each(|rule| self.keep_rule(&rule))?;
        memory.follow()
    }

    /// A packet for the card's stateless half. What it tells the library is done at once. The card keeps
    /// nothing of connections and would believe whoever names its life; the library, which has them all in
    /// host memory, lets packets pass for one of them from its peer alone.
    pub fn serve(&mut self, turn: &mut Turn<'_, E>, from: (&FrameMeta, u16), packet: &Packet<'_>) {
        let Some(slots) = self.slots_for(&from.0.src, packet) else { return self.stats.star_drops.inc() };
        let card = stateless::Card {
            bounds: Some(&self.bounds),
            slots: Some(slots),
            life: self.life,
            stats: &self.stats,
        };
        stateless::handle(&card, turn.env, from, packet);
        while let Some(event) = turn.env.next_event() {
            self.hear(turn, &event);
        }
    }

    /// If a packet names a connection that there is, and comes from where its peer is: the slots that it may
    /// fill. One in ERR takes nothing and answers nothing: its program has its buffers back, and what was
    /// flushed has not arrived.
    #[inline]
    fn slots_for(&self, source: &Gid, packet: &Packet<'_>) -> Option<(u64, u64)> {
        let prefix = packet.prefix?;
        let end = self.end(prefix.qpn)?;
        let peer = end.qp.peer();
        let alive = matches!(end.qp.state(), SlState::Starting | SlState::Ready);
        (alive && peer.epoch == prefix.epoch && peer.av.dgid == *source).then_some(end.slots.range)
    }

    /// A packet for `qpn` will come soon.
    #[inline]
    pub fn expect(&self, env: &E, qpn: Qpn) {
        if let Some(end) = self.end(qpn) {
            env.prefetch(end);
        }
    }

    fn hear(&mut self, turn: &mut Turn<'_, E>, event: &SlEvent) {
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

    /// What follows from what came, once for each queue pair.
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
    pub fn handle_control(&mut self, turn: &mut Turn<'_, E>, source: &Gid, packet: &Packet<'_>) -> bool {
        let qpn = packet.header.qpn;
        if let Some(at) = self.places.get(qpn)
            && let Some(end) = self.ends.get_mut(at as usize)
        {
            end.qp.handle_control(turn.env, turn.now, source, packet);
            self.settle(turn, at);
            return true;
        }
        let parting = packet.prefix.and_then(|prefix| self.find_parting((qpn, prefix.epoch)).ok());
        let Some(at) = parting.map(|place| self.parting_of[place].1 as usize) else { return false };
        let Some((parting, _)) = self.partings.get_mut(at) else { return false };
        if parting.handle_control(turn.env, turn.now, source, packet) {
            self.forget_parting(at);
        }
        true
    }

    /// The program posted to a QP, if it is one of these.
    #[inline]
    pub fn ring(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn) -> bool {
        let Some(at) = self.places.get(qpn) else { return false };
        if let Some(end) = self.ends.get_mut(at as usize) {
            end.qp.handle_doorbell(turn.env, turn.now);
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

    /// Goes on with what came, runs the timers that are due, and follows the table of memory.
    pub fn run_timers(&mut self, turn: &mut Turn<'_, E>) {
        self.settle_touched(turn);
        self.follow_memory(turn);
        while let Some(who) = self.timers.pop_due(turn.now) {
            if who & PARTING != 0 {
                self.go_on_parting(turn, (who & !PARTING) as usize);
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

    /// When [`run_timers`](Library::run_timers) has something to do.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.timers.next()
    }

    /// Whether anything is to come but questions that are asked in vain.
    pub fn is_busy(&self) -> bool {
        let waits = |end: &End<E>| end.qp.next_deadline().is_some() && !end.qp.asks_in_vain();
        !self.partings.is_empty() || self.ends.iter().any(|(_, end)| waits(end))
    }

    /// Sends what waits, and what ends have to send because others could go on; whether more waits for room
    /// in the port.
    pub fn transmit(&mut self, turn: &mut Turn<'_, E>) -> bool {
        for _ in 0..self.ready.len() + self.ends.len() {
            let Some(at) = self.ready.pop_front() else { return false };
            let Some(end) = self.ends.get_mut(at as usize) else { continue };
            end.queued = false;
            /* who is in the list again without having met a full port may go since it was looked at: in this
            turn */
            if self.settle(turn, at) {
                return true;
            }
        }
        !self.ready.is_empty()
    }

    /// After each call of a QP: what it is to send, and when it is due; what it asks of the card, and what it
    /// had to tell. True: it has more to send than the port takes.
    fn settle(&mut self, turn: &mut Turn<'_, E>, at: u32) -> bool {
        loop {
            self.begin_chore(turn, at);
            if !self.finish_chore(turn, at) {
                break;
            }
        }
        let Some(end) = self.ends.get_mut(at as usize) else { return false };
        if end.qp.must_tell() {
            let pd = end.released.init.pd;
            let rules = turn.nic.memory().rules().filter(|rule| rule.pd == pd);
            end.qp.tell_all(turn.env, turn.now, rules);
        }
        if end.qp.must_sum_up() {
            end.qp.sum_up(turn.env, turn.now, self.rules.sum(end.released.init.pd));
        }
        let more = end.qp.poll_transmit(turn.env, turn.now);
        let unanswered = end.qp.unanswered();
        self.unanswered = self.unanswered - end.unanswered + unanswered;
        end.unanswered = unanswered;
        if more && !end.queued {
            end.queued = true;
            self.ready.push_back(at);
        }
        if let Some(due) = end.qp.next_deadline() {
            /* what a full port held up is still due; in this turn there is no more to do for it */
            self.timers.arm(end.timer, due.max(turn.now + 1), at);
        }
        if let Some(srq) = end.released.srq() {
            turn.nic.took_from_srq(turn.env, srq);
        }
        self.follow_teller(turn, at);
        more
    }

    /// The next of a QP's WQEs may change a window, one at a time. All are told before it can be complete.
    fn begin_chore(&mut self, turn: &mut Turn<'_, E>, at: u32) {
        let Some(end) = self.ends.get_mut(at as usize).filter(|end| end.chore.is_none()) else { return };
        let owner = QpId { pd: end.released.init.pd, qpn: end.released.qpn };
        let chore = if let Some(wqe) = end.qp.take_own() {
            end.released.windows = true;
            Chore::Own(change_window(turn.nic.memory(), &wqe, owner).is_ok())
        } else if let Some(key) = end.qp.take_invalid(turn.env) {
            Chore::Invalidated(turn.nic.memory().invalidate_remote(key, owner).is_ok())
        } else {
            return;
        };
        end.chore = Some(Chore::Untold);
        self.follow_memory(turn);
        if let Some(end) = self.ends.get_mut(at as usize) {
            end.chore = Some(chore);
        }
    }

    /// A window was changed: that is complete once all who knew of it, or are to know, have answered. True:
    /// the next WQE may be one that changes a window, too.
    fn finish_chore(&mut self, turn: &mut Turn<'_, E>, at: u32) -> bool {
        let Some(end) = self.ends.get(at as usize) else { return false };
        let (pd, Some(chore)) = (end.released.init.pd, end.chore) else { return false };
        if matches!(chore, Chore::Untold) {
            return false;
        }
        if !self.is_settled(pd) {
            if !self.patient.contains(&at) {
                self.patient.push(at);
            }
            return false;
        }
        let Some(end) = self.ends.get_mut(at as usize) else { return false };
        end.chore = None;
        match chore {
            Chore::Own(true) => end.qp.own_done(turn.env, turn.now, WcStatus::Success),
            Chore::Own(false) => end.qp.own_done(turn.env, turn.now, WcStatus::MwBindErr),
            Chore::Invalidated(done) => end.qp.invalidated(turn.env, turn.now, done),
            Chore::Untold => {}
        }
        true
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Whose a QP is, if it is one of these.
    pub fn owner(&self, qpn: Qpn) -> Option<Owner> {
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

    fn end(&self, qpn: Qpn) -> Option<&End<E>> {
        self.ends.get(self.places.get(qpn)? as usize).map(|end| &**end)
    }

    /// Whether SF can be told anything by this connection.
    fn is_heard(&self, at: u32) -> bool {
        self.ends.get(at as usize).is_some_and(|end| end.qp.is_heard())
    }

    /// Whether SF has answered it, does no longer, and may again.
    fn is_silent(&self, at: u32) -> bool {
        let end = self.ends.get(at as usize);
        end.is_some_and(|end| end.qp.speaks() && !end.qp.is_heard() && end.qp.state() == SlState::Ready)
    }

    /// Whether SF has answered it, and still does.
    fn is_ready(&self, at: u32) -> bool {
        let end = self.ends.get(at as usize);
        end.is_some_and(|end| end.qp.is_heard() && end.qp.state() == SlState::Ready)
    }
}

/// A bind or an invalidation was posted to a QP of this owner, and all before it is done.
fn change_window<S: Storage>(memory: &mut MrTable<S>, wqe: &SendWqe, owner: QpId) -> Result<(), MrFault> {
    match wqe.op {
        SendOp::BindMw => memory.bind(&Bind::of(wqe, owner)).map(|_| ()),
        _ => memory.invalidate(wqe.rkey, owner),
    }
}
