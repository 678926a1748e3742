//! One stateless end: how it begins, and how it ends.

use alloc::boxed::Box;

use starverbs_core::env::SendQueue;
use starverbs_core::mr::MrAttr;
use starverbs_core::nic::released::Released;
use starverbs_core::nic::{QpHandover, TimerId};
use starverbs_core::qp::QpAttr;
use starverbs_core::room::{is_room_for, make_room_in};
use starverbs_core::{Access, Counters, Mtu, Nanos, NicError, PdId, QpState, Qpn};

use crate::bounds::MemRange;
use crate::card::{Queues, bytes_of};
use crate::control::Setup;
use crate::endpoint::{Linger, Patience, SlInit, SlQp};
use crate::stateless::SfPeer;
use crate::token::Token;
use crate::wire::Prefix;

use super::super::queues_of;
use super::super::slots::OwnedArea;
use super::super::{EndpointHost, Turn};
use super::rules::GroupKey;
use super::{Endpoints, LINGER_BIT, Lingering};

/// Receives of an SRQ that one connection holds at most.
const SHARED_RECVS: u32 = 64;
/// Silence after which SF is asked whether it lives, while sends wait for it.
const KEEPALIVE: Nanos = 50_000_000;

/// What a [`Setup`] has before anything is known.
const BLANK: Setup = Setup {
    boot: 0,
    pd: PdId(0),
    mtu: Mtu::M256,
    sq_depth: 1,
    rq_depth: 1,
    srq: false,
    token: Token::NONE,
    replay_slots: 1,
    access: Access::empty(),
    max_rd_atomic: 1,
    rnr_retry: 7,
    min_rnr_timer: 0,
};

/// A window operation that was executed, and is not complete.
#[derive(Clone, Copy)]
pub(super) enum WindowOp {
    /// Its change of rules is being sent
    Announcing,
    /// A bind or an invalidation that the program posted; whether it succeeded
    Posted(bool),
    /// The invalidation that a message of the peer asks for; whether it succeeded
    Invalidated(bool),
}

/// A stateless endpoint: what each turn looks at, then what seldom is.
#[repr(C)]
pub(super) struct Endpoint<E: EndpointHost> {
    /// It is among those with something to send
    pub(super) queued: bool,
    /// It is among those with events
    pub(super) touched: bool,
    /// It has sent the end of a rule beside its group's leader
    pub(super) sends_unrule: bool,
    /// It ends soon, and is to lead no group
    pub(super) ending: bool,
    /// Its window operation
    pub(super) window_op: Option<WindowOp>,
    /// Its WQEPs without an answer, as they were counted last
    pub(super) unanswered: u32,
    pub(super) timer: TimerId,
    pub(super) group: usize,
    pub(super) qp: SlQp<E>,
    /// What the card has left of it; its attributes are as the program has set them
    pub(super) released: Released<E>,
    /// Memory that the card fills
    pub(super) slots: OwnedArea<E::Slots>,
    /// The send queue's memory, if inline bytes may have to be fetched from there
    inline: Option<u32>,
}

impl<E: EndpointHost> Endpoint<E> {
    /// What it costs the host beside the program's own queues, bytes.
    pub(super) fn bytes(&self) -> usize {
        size_of::<Self>() - size_of::<SlQp<E>>() + self.qp.bytes()
    }
}

/// The part of a Setup that the program may change.
pub(super) fn setup_of(attr: &QpAttr, base: Setup) -> Setup {
    let ready = attr.state == QpState::Rts;
    Setup {
        mtu: attr.path_mtu,
        access: attr.access,
        min_rnr_timer: attr.min_rnr_timer,
        /* not set before RTS */
        max_rd_atomic: if ready { attr.max_rd_atomic } else { 1 },
        rnr_retry: if ready { attr.rnr_retry } else { 7 },
        ..base
    }
}

pub(super) fn patience_of(attr: &QpAttr) -> Patience {
    Patience::of(attr.timeout, attr.retry_cnt)
}

/// The peer's card, as far as a stateless end needs to know it.
#[derive(Clone, Copy, Debug)]
pub struct StatefulCard {
    /// Its boot ID
    pub boot: u64,
    /// UDP port of its stateful half
    pub port: u16,
}

impl<E: EndpointHost> Endpoints<E> {
    /// A QP becomes a stateless end; `peer` is to be the stateful one. `Exhausted`: it stays where it is.
    pub fn begin(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn, peer: StatefulCard) -> Result<(), NicError> {
        let queues = queues_of(turn, qpn)?;
        let timer = self.timers.join()?;
        let inline = self.open_inline(turn, qpn, &queues.sq);
        let begun = inline.and_then(|inline| {
            let begun = self.begin_with(turn, qpn, peer, queues, (timer, inline));
            begun.inspect_err(|_| self.close_inline(turn, inline))
        });
        begun.inspect_err(|_| self.timers.leave(timer))
    }

    fn begin_with(
        &mut self,
        turn: &mut Turn<'_, E>,
        qpn: Qpn,
        peer: StatefulCard,
        queues: Queues<E>,
        (timer, inline): (TimerId, Option<u32>),
    ) -> Result<(), NicError> {
        let QpHandover { owner, attr, srq, sq_sig_all, first_send, .. } = turn.nic.handover(qpn)?;
        let Queues { sq, rq, send_cq, recv_cq } = queues;
        let ring = || srq.as_ref().map(|srq| srq.ring.clone());
        let rq = rq.or_else(ring).ok_or(NicError::Invalid)?;
        let rq_depth = if srq.is_some() { SHARED_RECVS } else { E::slots_of(&rq) };
        let replay_slots = u32::from(attr.max_dest_rd_atomic).next_power_of_two();
        let base = Setup {
            boot: self.boot,
            pd: owner.pd,
            sq_depth: sq.slots(),
            rq_depth,
            srq: srq.is_some(),
            replay_slots,
            ..BLANK
        };
        let key = GroupKey { ends: [attr.av.sgid, attr.av.dgid], boot: peer.boot, pd: owner.pd };
        self.make_room(qpn)?;
        let (group, known, rules) = self.rules.join(key)?;
        let slots = self.slots.take(turn.env, base.slot_bytes(), E::program_of(owner.cookie));
        let slots = slots.inspect_err(|_| self.rules.forget_empty(group))?;
        self.answers.begin();
        let epoch = u32::from(self.boot_epoch) << 16 | u32::from(self.begun);
        let token = self.secret.token(&attr.av.dgid, Prefix { qpn, epoch }, slots.area);
        let setup = Setup { token, ..base };
        let made = SlQp::new(SlInit {
            qpn,
            sq,
            first_send,
            rq,
            send_cq,
            recv_cq,
            sq_sig_all,
            setup: setup_of(&attr, setup),
            inline_key: inline.unwrap_or_default(),
            patience: patience_of(&attr),
            keepalive: KEEPALIVE,
            rules,
            form: self.form,
            dialect: turn.nic.speaks_strom(qpn),
            stats: self.stats.clone(),
        });
        let released = |qp| turn.nic.release_qp(turn.env, qpn).map(|released| (qp, released));
        let made = made.and_then(released);
        let (qp, released) = match made {
            Ok(made) => made,
            Err(error) => {
                self.rules.forget_empty(group);
                self.slots.keep(&slots);
                self.release_slots(Some(slots), true);
                self.replace_secret();
                return Err(error);
            }
        };
        let end = Endpoint {
            qp,
            released,
            group,
            timer,
            queued: false,
            touched: false,
            sends_unrule: false,
            ending: false,
            unanswered: 0,
            window_op: None,
            slots,
            inline,
        };
        let at = self.ends.insert(Box::new(end)) as u32;
        self.count(turn, at, u64::wrapping_add);
        self.stats.star_quarantined_bytes.set(self.slots.kept());
        self.places.set(qpn, Some(at));
        self.rules.add_member(group, at);
        if let Some(srq) = self.ends[at as usize].released.srq() {
            self.join_srq(srq, at);
        }
        self.begun = self.begun.wrapping_add(1);
        let peer = SfPeer { av: attr.av, port: peer.port, qpn: attr.dest_qpn, epoch };
        let of_domain = turn.nic.memory().rules().filter(|rule| rule.pd == owner.pd);
        self.ends[at as usize].qp.start(turn.env, turn.now, peer, known, of_domain);
        self.settle(turn, at);
        Ok(())
    }

    /// Room for one more end, so that from here on none is needed but for what the end is made of.
    /// `Exhausted`: no memory.
    fn make_room(&mut self, qpn: Qpn) -> Result<(), NicError> {
        self.places.make_room(qpn)?;
        make_room_in(&mut self.ends)?;
        let ends = self.ends.len() + 1;
        self.ready.try_reserve(ends).map_err(|_| NicError::Exhausted)?;
        self.touched.try_reserve(ends).map_err(|_| NicError::Exhausted)?;
        self.waiting_ops.try_reserve(ends).map_err(|_| NicError::Exhausted)?;
        self.by_srq.try_reserve(1).map_err(|_| NicError::Exhausted)?;
        if is_room_for(size_of::<Endpoint<E>>()) { Ok(()) } else { Err(NicError::Exhausted) }
    }

    /// Inline bytes that are too many for a packet are fetched from the send queue.
    fn open_inline(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn, sq: &E::Sq) -> Result<Option<u32>, NicError> {
        let Some(MemRange { addr, len: length }) = E::inline_memory(sq) else { return Ok(None) };
        let pd = turn.nic.qp_owner(qpn).ok_or(NicError::NotFound)?.pd;
        let key = turn.nic.reg_mr(MrAttr {
            pd,
            addr,
            length,
            iova: addr,
            access: Access::empty(),
            ..MrAttr::default()
        })?;
        self.follow_memory(turn);
        if turn.nic.memory().rule(key).is_none() {
            /* stateful cards would not get its rule */
            turn.nic.dereg_mr(key)?;
            return Err(NicError::Exhausted);
        }
        Ok(Some(key))
    }

    fn close_inline(&mut self, turn: &mut Turn<'_, E>, inline: Option<u32>) {
        let Some(key) = inline else { return };
        if turn.nic.dereg_mr(key).is_ok() {
            self.follow_memory(turn);
        }
    }

    /// Counts an end, what it costs the host, and what it costs the card.
    fn count(&self, turn: &Turn<'_, E>, at: u32, change: fn(u64, u64) -> u64) {
        let Some(end) = self.ends.get(at as usize) else { return };
        let Counters { star_stateless_qps, star_host_bytes, star_stateless_connection_bytes, .. } =
            &*self.stats;
        let on_card = bytes_of(turn.nic, end.released.qpn) as u64;
        star_stateless_connection_bytes.set(change(star_stateless_connection_bytes.get(), on_card));
        star_stateless_qps.set(change(star_stateless_qps.get(), 1));
        star_host_bytes.set(change(star_host_bytes.get(), end.bytes() as u64));
    }

    /// Takes an end out: its gate is closed, and its Bye lingers. Gives what the card has left of it, to come
    /// back or to end.
    pub(super) fn take_out(&mut self, turn: &mut Turn<'_, E>, at: u32) -> Option<Released<E>> {
        self.count(turn, at, u64::wrapping_sub);
        let end = *self.ends.try_remove(at as usize)?;
        let Endpoint {
            qp,
            released,
            group,
            timer,
            queued,
            touched,
            sends_unrule,
            unanswered,
            inline,
            slots,
            ..
        } = end;
        self.unanswered -= unanswered;
        self.places.set(released.qpn, None);
        if let Some(srq) = released.srq() {
            self.leave_srq(srq, at);
        }
        self.timers.leave(timer);
        if queued {
            self.ready.retain(|ready| *ready != at);
        }
        if touched {
            self.touched.retain(|touched| *touched != at);
        }
        let others_send = self.leave_group(turn, group, at, sends_unrule);
        qp.close_gate(turn.env);
        self.answers.forget_ahead();
        self.slots.keep(&slots);
        let confirmed = qp.is_confirmed();
        let linger = qp.close(turn.env, turn.now, others_send);
        self.close_inline(turn, inline);
        let slots = match linger {
            Some(linger) => self.begin_linger(turn, linger, slots),
            None => Some(slots),
        };
        self.release_slots(slots, confirmed);
        self.replace_secret();
        Some(released)
    }

    /// What becomes of the slots of an ended connection that nobody waits for.
    fn release_slots(&mut self, slots: Option<OwnedArea<E::Slots>>, confirmed: bool) {
        match slots {
            Some(slots) if E::SLOTS_APART => self.slots.give_back(slots),
            Some(slots) if confirmed => self.slots.confirmed(slots),
            Some(slots) => self.slots.unconfirmed(slots),
            None => {}
        }
    }

    /// If there are no connections, another secret takes its place, and no token names slots of before.
    fn replace_secret(&mut self) {
        if self.ends.is_empty() {
            self.secret.replace();
            self.answers.forget_token();
            self.lingers.iter_mut().for_each(|(_, lingering)| lingering.slots = None);
            self.slots.clear();
        }
        self.stats.star_quarantined_bytes.set(self.slots.kept());
    }

    /// This QP, if it is one of these, is about to be destroyed, as are others: none of them is to send for
    /// the rest, as each would send all rules of the domain.
    pub fn prepare_to_end(&mut self, qpn: Qpn) {
        let at = self.places.get(qpn);
        if let Some(end) = at.and_then(|at| self.ends.get_mut(at as usize)) {
            end.ending = true;
        }
    }

    /// `ibv_destroy_qp`, if it is one of these.
    pub fn destroy(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn) -> bool {
        let Some(released) = self.places.get(qpn).and_then(|at| self.take_out(turn, at)) else {
            return false;
        };
        turn.nic.end_released(&released);
        self.follow_memory(turn);
        true
    }

    /// The QP goes to RESET: it is the card's again. `Exhausted`: it stays as it is.
    pub(super) fn reset(&mut self, turn: &mut Turn<'_, E>, at: u32) -> Result<(), NicError> {
        let end = self.ends.get(at as usize).ok_or(NicError::NotFound)?;
        let places = turn.nic.prepare_return(&end.released)?;
        let released = self.take_out(turn, at).ok_or(NicError::NotFound)?;
        turn.nic.readmit(released, places);
        self.follow_memory(turn);
        Ok(())
    }

    /// Has a connection linger whose QP is gone, with its slots. Without memory for that it gives them back,
    /// and the peer finds out by silence.
    fn begin_linger(
        &mut self,
        turn: &mut Turn<'_, E>,
        linger: Linger,
        slots: OwnedArea<E::Slots>,
    ) -> Option<OwnedArea<E::Slots>> {
        if make_room_in(&mut self.lingers).is_err() || self.linger_index.try_reserve(1).is_err() {
            return Some(slots);
        }
        let Ok(timer) = self.timers.join() else { return Some(slots) };
        let of = linger.prefix();
        let at = self.lingers.insert(Lingering { linger, timer, slots: Some(slots) });
        let place = self.find_linger(of).unwrap_or_else(|place| place);
        self.linger_index.insert(place, (of, at as u32));
        self.poll_linger(turn, at);
        None
    }

    pub(super) fn poll_linger(&mut self, turn: &mut Turn<'_, E>, at: usize) {
        let Some(Lingering { linger, timer, .. }) = self.lingers.get_mut(at) else { return };
        if linger.poll(turn.env, turn.now) {
            return self.end_linger(at);
        }
        /* a full port has room in a moment */
        let due = linger.next_deadline().max(turn.now + 1);
        self.timers.arm(*timer, due, LINGER_BIT | at as u32);
    }

    /// Its place in the order; else where it belongs.
    pub(super) fn find_linger(&self, of: Prefix) -> Result<usize, usize> {
        self.linger_index.binary_search_by_key(&of, |(of, _)| *of)
    }

    pub(super) fn end_linger(&mut self, at: usize) {
        if let Some(Lingering { linger, timer, slots }) = self.lingers.try_remove(at) {
            self.release_slots(slots, linger.is_confirmed());
            self.timers.leave(timer);
            if let Ok(place) = self.find_linger(linger.prefix()) {
                self.linger_index.remove(place);
            }
        }
    }
}
