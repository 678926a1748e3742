//! Progress inside the program's own calls: whoever is in the library runs the card.

use std::fmt::Write as _;

use starverbs_backend::host;
use starverbs_backend::links::Incoming;
use starverbs_core::opening::Opening;
use starverbs_core::relay::Relay;
use starverbs_core::{Nanos, PdId, Qpn};

use crate::card::{Behind, Card, DEFERRED, Shard};
use crate::clock::{self, CpuTime};
use crate::cq::CqShared;
use crate::idle::{IDLE, Then};
use crate::notes::Notes;
use crate::receives::Who;

/// Rounds of filling and flushing the port in one turn.
const ROUNDS: u32 = 16;
/// Bytes of frames with short payloads that one turn sends at most. For tests that need more than that.
pub const BYTES_OF_A_TURN: usize = ROUNDS as usize * starverbs_backend::ARENA;
/// Messages from other processes in one turn.
const RELAYS: u32 = 128;
/// Polls between two looks at what the port has to do beside frames.
const MAINTENANCE: u32 = 256;
/// Frames whose contexts are fetched at once: about as many as a CPU has misses under way at the same time.
pub(crate) const AHEAD: usize = 16;
/// How long the thread leaves frames alone that a poll has received but not taken, and doorbells that wait.
pub(crate) const LEFT: Nanos = 1_000_000;

impl Card {
    /// A poll of `cq` found nothing: runs the card until `cq` holds `wanted` completions or nothing is
    /// left to do. Says whether the card ran.
    #[inline]
    pub(crate) fn progress_from_poll(&self, cq: &CqShared, wanted: usize) -> bool {
        if self.polled.rests() {
            return false;
        }
        let Some(mut guard) = self.try_lock() else {
            self.missed();
            return true;
        };
        let shard = &mut *guard;
        let now = clock::now();
        let pause = now.saturating_sub(self.polled.note(now));
        self.take_bells(shard, now);
        let owed = shard.nic.owes_acks();
        let out = shard.nic.ran_out() && shard.waits_for_receives(now, Who::Program);
        let got = if out { 0 } else { shard.rx.recv() };
        let all = !out && (got == 0 || shard.take_frames(now, || cq.waiting() as usize >= wanted));
        if !all {
            self.lower_alarm(shard, now + LEFT);
        }
        let got = got + shard.run_star(now, Who::Program) as usize;
        shard.run_links(now, &self.notes);
        shard.run_timers(now);
        shard.turns = shard.turns.wrapping_add(1);
        if shard.turns.is_multiple_of(MAINTENANCE) {
            self.maintain(shard, now);
        }
        /* The program's answer to what just came goes first; ACKs go with it, or with the next poll: a
        program that only receives would otherwise keep them until its peer's window is used up. Of a
        program that does not come back, the thread sends them. */
        let acks = owed || got == 0 || cq.waiting() == 0;
        shard.transmit(now, acks);
        self.finish(shard, now);
        if got > 0 || pause > IDLE {
            shard.idle.restart(now);
        }
        let then =
            shard.idle.after(now, &self.polled.nobody_called, || CpuTime::now(self.progress.cpu_clock()));
        self.polled.rest(then);
        drop(guard);
        self.serve_bells();
        if then == Then::Yield {
            self.polled.yield_now();
        }
        true
    }

    /// What a call of the program sent to another process of this host may have come to this process's own socket, while steering does
    /// not know everybody. It is handed on before the program goes on, which may be to its end (_exit(2)): of a datagram, and of a
    /// connection manager's last word (`spoke`), nobody would send another.
    #[inline]
    pub(crate) fn hand_on(&self, shard: &mut Shard, now: Nanos, spoke: bool) {
        if spoke || !shard.rx.is_settled() {
            self.take_what_came(shard, now);
        }
    }

    #[cold]
    fn take_what_came(&self, shard: &mut Shard, now: Nanos) {
        /* A program may find by polls all that comes in here, and so never run the card by them. */
        self.maintain(shard, now);
        for _ in 0..ROUNDS {
            /* what was received before, and left, comes first */
            if shard.nic.ran_out() || shard.rx.recv() == 0 {
                return;
            }
            if !shard.take_frames(now, || false) {
                return self.lower_alarm(shard, now + LEFT);
            }
            shard.transmit(now, true);
        }
    }

    /// Work beside frames: steering, questions from tools. Gives when there is more.
    pub(crate) fn maintain(&self, shard: &mut Shard, now: Nanos) -> Option<Nanos> {
        while let Some(request) = shard.rx.take_request() {
            let text = self.describe_qps(shard);
            shard.rx.answer(&request, text.as_bytes());
        }
        let next = shard.rx.maintenance(now);
        if let Some(owners) = shard.rx.take_owners() {
            shard.env.tx.set_owners(owners);
        }
        next
    }

    /// One line a QP, for `starverbs stat`.
    fn describe_qps(&self, shard: &Shard) -> String {
        let mut text = String::from("qpn state remote_qpn remote_gid path_mtu sq_psn rq_psn star\n");
        let mut qpns: Vec<Qpn> = shard.qpns().collect();
        qpns.sort_unstable();
        for qpn in qpns {
            if let Ok(attr) = shard.query_qp(qpn) {
                let (remote, gid) = (attr.dest_qpn, host::ip_of(attr.av.dgid));
                let (mtu, sq, rq) = (attr.path_mtu.bytes(), attr.sq_psn.get(), attr.rq_psn.get());
                let star = shard.star_word(qpn);
                /* writing to a String cannot fail */
                let _ = writeln!(text, "{qpn:#x} {:?} {remote:#x} {gid} {mtu} {sq} {rq} {star}", attr.state);
            }
        }
        text
    }
}

impl Shard {
    /// Handles the frames of the last `recv` until `enough`; says whether all are handled.
    #[inline]
    pub(crate) fn take_frames(&mut self, now: Nanos, mut enough: impl FnMut() -> bool) -> bool {
        if self.nic.has_few_contexts() {
            return self.offer_frames(now, &mut enough);
        }
        while let Some((meta, frame)) = self.rx.next_frame() {
            self.nic.handle_frame(&mut self.env, now, &meta, frame);
            self.look_ahead();
            if enough() || self.nic.ran_out() {
                return false;
            }
        }
        self.looked = 0;
        true
    }

    /// After a frame: has the contexts of those behind it fetched, [`AHEAD`] at a time. Of a frame that came alone this is two
    /// comparisons.
    #[inline]
    fn look_ahead(&mut self) {
        if self.looked > 0 {
            self.looked -= 1;
        } else if self.ahead > 0 && self.rx.has_more() {
            let Shard { nic, env, rx, .. } = self;
            self.looked = rx.look_ahead(self.ahead, |qpn| nic.expect_frame(env, qpn));
        }
    }

    /// Takes messages from other processes of this one's XRC domains, as long as the port has room for what they bring; says
    /// how many.
    #[inline]
    pub(crate) fn run_links(&mut self, now: Nanos, notes: &Notes) -> u32 {
        if self.link_room.is_none() { 0 } else { self.take_relays(now, notes) }
    }

    #[cold]
    fn take_relays(&mut self, now: Nanos, notes: &Notes) -> u32 {
        let Shard { nic, env, openings, link_room: Some(room), .. } = self else { return 0 };
        let mut came = 0;
        while came < RELAYS && env.tx.can_send() {
            match env.links.as_mut().and_then(|links| links.next(room)) {
                None => break,
                Some(Incoming::Ended(link)) => {
                    nic.handle_unlink(env, now, link);
                    openings.unlink(link);
                }
                Some(Incoming::Message(link, domain, len)) => {
                    let (bytes, domain) = (room.get(..len).unwrap_or_default(), PdId(domain));
                    if let Some(message) = Relay::decode(bytes) {
                        nic.handle_relay(env, now, link, domain, &message);
                    } else if let Some(message) = Opening::decode(bytes) {
                        openings.handle((&mut *nic, &mut *env), now, (link, domain), &message);
                    }
                }
            }
            came += 1;
        }
        openings.hand_over(notes);
        came
    }

    /// Has the doorbell of `qpn` wait for the card's next turn, if it may and there is room, behind packets of its own queue pair or, if `company`,
    /// of others; says which.
    #[inline]
    pub(crate) fn defer(&mut self, qpn: Qpn, company: bool) -> Option<Behind> {
        let stateless = || self.star.as_ref().is_some_and(|star| star.library().may_wait_if_kept(qpn));
        let behind = if self.nic.may_wait(qpn) {
            Behind::Own
        } else if company && (self.nic.may_wait_if_kept(qpn) || stateless()) {
            Behind::Others
        } else {
            return None;
        };
        if !self.deferred.contains(&qpn) {
            if self.deferred.len() >= DEFERRED {
                return None;
            }
            self.deferred.push(qpn);
        }
        Some(behind)
    }

    /// Handles the doorbells that were deferred, in their order.
    #[inline]
    pub(crate) fn ring_deferred(&mut self, now: Nanos) {
        for at in 0..self.deferred.len() {
            self.ring(self.deferred[at], now);
        }
        self.deferred.clear();
    }

    /// Runs the timers that are due; says whether any was.
    #[inline]
    pub(crate) fn run_timers(&mut self, now: Nanos) -> bool {
        /* what a reliable QP's timer waits for may stand in the socket, where frames wait for receives */
        let due =
            self.nic.next_deadline().is_some_and(|deadline| deadline <= now) && self.out.left(now).is_none();
        if due {
            self.nic.handle_timeout(&mut self.env, now);
        }
        self.moderator.run(now) || due
    }

    /// Sends what the card wants to send.
    #[inline]
    pub(crate) fn transmit(&mut self, now: Nanos, acks: bool) {
        for _ in 0..ROUNDS {
            let mut more = self.nic.poll_transmit(&mut self.env, now, acks);
            if self.star.is_some() {
                more |= self.transmit_star(now);
            }
            self.env.tx.flush(now);
            self.unsent = more;
            if !more {
                return;
            }
        }
        /* more than one turn's worth: whoever comes next goes on, at once if need be */
    }

    /// When the card has to run again, frames and doorbells aside.
    #[inline]
    pub(crate) fn next_deadline(&mut self, now: Nanos) -> Option<Nanos> {
        /* frames that wait for receives come no sooner for being held back by the card, too */
        let held_back = self.held_back.then(|| if self.nic.ran_out() { now + LEFT } else { now });
        if self.unsent || held_back == Some(now) {
            return Some(now);
        }
        let sooner = |a: Option<Nanos>, b: Option<Nanos>| match (a, b) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let of_timers = self.nic.next_deadline().map(|at| at.max(now + self.out.left(now).unwrap_or(0)));
        let of_frames = sooner(sooner(of_timers, held_back), self.env.tx.next_deadline());
        /* of a program that may have gone */
        let of_bells = (!self.deferred.is_empty()).then_some(now + LEFT);
        let of_host = sooner(of_bells, self.moderator.next_deadline());
        sooner(sooner(of_frames, of_host), self.next_star(now))
    }
}
