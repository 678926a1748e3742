//! A requester that sends again what is missing and nothing else, to a peer that repeats selectively: see
//! `nic::repair`.
//!
//! While something is missing the QP has a `Repair`. The cursor of the send queue then goes from one lost
//! packet to the next, and on to what was never sent. Packets that the peer keeps, and answers that came
//! before others, count as held.

use super::Ctx;
use super::requester::READ_CHUNK;
use crate::env::{Env, SendQueue};
use crate::nic::repair::{Overtaken, Passed, RepairId};
use crate::types::{Psn, QpState, SendOp};
use crate::wire::headers::SackEth;
use crate::wire::opcode::PacketKind;
use crate::wire::packet::Packet;

/// Bytes that `packets` of `of` take of `bytes`: packets are of unlike size, an even share is close enough.
fn share(bytes: u32, packets: u32, of: u32) -> u32 {
    if packets >= of { bytes } else { (u64::from(bytes) * u64::from(packets) / u64::from(of)) as u32 }
}

/// Bytes of each of `packets` that are `bytes` together: no packet is as large as a u16 can be.
pub(super) fn size_of_each(bytes: u32, packets: u32) -> u16 {
    (bytes / packets.max(1)).min(u16::MAX.into()) as u16
}

impl<E: Env> Ctx<'_, E> {
    /// What an answer advertises of the peer.
    #[inline]
    pub(super) fn note_answer(&mut self, packet: &Packet<'_>) {
        let flags = &mut self.qp.flags;
        flags.advertises &= packet.bth().repeats();
        flags.repeats = flags.advertises != 0;
    }

    /// Whether the cursor stands at a packet that was sent before, in a repair.
    #[inline]
    pub(super) fn repeats_packet(&self) -> bool {
        let req = &self.qp.req;
        req.repair.is_some() && req.psn.before(req.max_psn)
    }

    /// Whether a packet goes without room in the window: the one that asks a silent peer, and the oldest,
    /// which was lost, while READs or the like are under way (RFC 6675, section 5, step 4.1): the window may
    /// be full of answers that the peer owes once it has this one.
    #[inline]
    pub(super) fn needs_no_room(&self) -> bool {
        let req = &self.qp.req;
        req.is_silent() || (req.psn == req.una_psn && req.reads > 0 && self.repeats_packet())
    }

    /// Moves the cursor to the next packet that may go: a lost one, or one never sent. False: it must wait.
    pub(super) fn next_lost(&mut self, id: RepairId) -> bool {
        let (una, max) = (self.qp.req.una_psn, self.qp.req.max_psn);
        let repair = self.sh.repairs.get(id);
        let mut psn = if repair.has_lost() { self.qp.req.psn } else { max };
        while psn.before(max) && !repair.is_lost(psn) {
            psn = psn.plus(1);
        }
        let flying = repair.in_flight(una, max);
        if psn != self.qp.req.psn {
            self.cursor_to(psn);
        }
        if self.qp.req.after_loss().is_some_and(|most| flying >= most) {
            return false;
        }
        /* what is further ahead the peer would not keep */
        psn != max || max.since(una) < SackEth::SPAN as i32
    }

    /// Moves the cursor to `psn`, which is not acknowledged and not behind what was sent.
    pub(super) fn cursor_to(&mut self, psn: Psn) {
        let mtu = self.qp.mtu;
        let req = &mut self.qp.req;
        let begun = req.fresh.wrapping_sub(req.una);
        let ahead = !psn.before(req.psn) && req.next.wrapping_sub(req.una) <= begun;
        let mut next = if ahead { req.next } else { req.una };
        req.offset = 0;
        while next != req.fresh {
            let track = req.track[req.slot(next)];
            let done = psn.since(track.first).max(0) as u32;
            if done < track.packets {
                req.offset = done * mtu;
                break;
            }
            next = next.wrapping_add(1);
        }
        (req.psn, req.next) = (psn, next);
    }

    /// The repair under way, or a new one. `None`: there are too many, or too much is under way.
    pub(super) fn begin_repair(&mut self) -> Option<RepairId> {
        if self.qp.req.repair.is_none() {
            let req = &self.qp.req;
            let id = self.sh.repairs.open(req.una_psn, req.psn, req.max_psn)?;
            self.qp.req.reads = self.reads_begun();
            self.qp.req.repair = Some(id);
        }
        self.qp.req.repair
    }

    /// READs (by pieces) and the like that are begun and not answered.
    fn reads_begun(&self) -> u8 {
        let (req, per) = (&self.qp.req, (READ_CHUNK / self.qp.mtu) as i32);
        let (mut at, mut count) = (req.una, 0);
        while at != req.fresh {
            let track = req.track[req.slot(at)];
            let low = req.una_psn.since(track.first).max(0);
            let high = req.max_psn.since(track.first).min(track.packets as i32);
            if high > low && self.qp.sq.op(at).is_answered() {
                count += (high - 1) / per - low / per + 1;
            }
            at = at.wrapping_add(1);
        }
        count.min(255) as u8
    }

    /// Ends a repair, whatever is missing.
    pub(super) fn end_repair(&mut self) {
        if let Some(id) = self.qp.req.repair.take() {
            self.sh.repairs.close(id);
            self.qp.req.silent = 0;
        }
    }

    /// Of a piece of a READ that begins at the cursor, bytes to ask for: those up to the first that came, of
    /// a silent peer one packet.
    pub(super) fn missing_of(&mut self, piece: u32) -> u32 {
        let (mtu, psn) = (self.qp.mtu, self.qp.req.psn);
        if self.qp.req.is_silent() {
            return piece.min(mtu);
        }
        let Some(id) = self.qp.req.repair else { return piece };
        let repair = self.sh.repairs.get(id);
        let packets = (1..piece.div_ceil(mtu)).take_while(|n| !repair.is_held(psn.plus(*n))).count() as u32;
        piece.min((packets + 1) * mtu)
    }

    /// An ACK with what the peer keeps behind the packet that it misses.
    pub(crate) fn receive_sack(&mut self, packet: &Packet<'_>) {
        if !matches!(self.qp.state, QpState::Rts | QpState::Sqd) {
            return self.sh.stats.drop_state.inc();
        }
        let missing = packet.bth().psn().plus(1);
        let Some(kept) = packet.sack() else { return self.sh.stats.drop_malformed.inc() };
        let (una, max) = (self.qp.req.una_psn, self.qp.req.max_psn);
        let near = (-(SackEth::SPAN as i32)..=max.since(una)).contains(&missing.since(una));
        if !self.qp.req.outstanding() || !near || self.qp.flags.advertises == 0 {
            return self.sh.stats.drop_stale_response.inc();
        }
        self.note_answer(packet);
        self.sh.stats.rcvd_sack.inc();
        if una.before(missing) {
            self.acked_before(missing);
        }
        let alive = matches!(self.qp.state, QpState::Rts | QpState::Sqd) && self.qp.req.outstanding();
        if !alive || !self.qp.flags.repeats {
            return;
        }
        match self.begin_repair() {
            Some(id) => self.hold_kept(id, missing, kept),
            /* an old one has nothing new */
            None if missing == self.qp.req.una_psn => self.on_loss(false),
            None => {}
        }
    }

    /// Marks what a SACK acknowledges.
    fn hold_kept(&mut self, id: RepairId, missing: Psn, kept: &SackEth) {
        let (una, max) = (self.qp.req.una_psn, self.qp.req.max_psn);
        let begin = missing.plus(1);
        let per = (READ_CHUNK / self.qp.mtu) as i32;
        let flying = self.sh.repairs.get(id).in_flight(una, max);
        let (mut at, mut news) = (self.qp.req.una, Passed::default());
        while at != self.qp.req.fresh {
            let track = self.qp.req.track[self.qp.req.slot(at)];
            let op = self.qp.sq.op(at);
            at = at.wrapping_add(1);
            let first = track.first;
            let low = begin.since(first).max(una.since(first) + 1).max(0);
            let high =
                (begin.since(first) + SackEth::SPAN as i32).min(max.since(first)).min(track.packets as i32);
            for n in low..high {
                let psn = first.plus(n as u32);
                if !kept.has(psn.since(begin) as u32) {
                    continue;
                }
                let repair = self.sh.repairs.get(id);
                if op.is_answered() {
                    /* The request is there; its answer is what counts, and is not due yet. */
                    let end = if op == SendOp::Read { (n / per + 1) * per } else { n + 1 };
                    repair.expect(psn, (end.min(track.packets as i32).min(max.since(first)) - n) as u32);
                } else if let Some(was) = repair.hold(psn) {
                    news.add(was);
                    self.sample_rtt_of(psn.plus(1));
                }
            }
        }
        self.learned(id, flying, news);
    }

    /// The packet before `psn` came: if its round trip is being measured, that was it.
    fn sample_rtt_of(&mut self, psn: Psn) {
        let req = &mut self.qp.req;
        if req.rtt_since != 0 && req.rtt_psn == psn {
            let since = core::mem::take(&mut req.rtt_since);
            /* as in `progress_to`: behind the deadline this card did not run, or its clock jumped */
            let until = if req.deadline == 0 { self.now } else { self.now.min(req.deadline) };
            self.sh.paths.get(self.qp.path).sample_rtt(self.now, until.saturating_sub(since));
        }
    }

    /// More is held than before, when `flying` packets were in flight: the window opens, and gaps show.
    fn learned(&mut self, id: RepairId, flying: u32, news: Passed) {
        if news != Passed::default() {
            let bytes = share(self.qp.req.inflight, news.in_flight, flying);
            let req = &mut self.qp.req;
            req.inflight -= bytes;
            (req.progress, req.rewound) = (self.now, 0);
            req.end_silence();
            self.sh.paths.get(self.qp.path).acked(bytes);
            self.take_back(id, news.lost);
        }
        self.infer_losses(id);
        if self.qp.req.rnr_until <= self.now && (news != Passed::default() || self.qp.req.deadline == 0) {
            self.start_timer();
        }
        self.end_repair_if_over(id);
        self.wake_path();
        self.ready();
    }

    /// `lost` packets that a timeout had declared lost came without being sent again: so did the others, or
    /// will.
    fn take_back(&mut self, id: RepairId, lost: u32) {
        if lost == 0 || self.qp.req.silent == 0 {
            return;
        }
        let bytes = self.sh.repairs.get(id).find_all() * u32::from(core::mem::take(&mut self.qp.req.silent));
        self.recharge(bytes);
    }

    /// A timeout was wrong: `bytes` are in flight after all.
    pub(super) fn recharge(&mut self, bytes: u32) {
        self.qp.req.inflight += bytes;
        let path = self.sh.paths.get(self.qp.path);
        path.undo_timeout();
        path.add(bytes);
    }

    fn infer_losses(&mut self, id: RepairId) {
        let (una, max) = (self.qp.req.una_psn, self.qp.req.max_psn);
        let repair = self.sh.repairs.get(id);
        let flying = repair.in_flight(una, max);
        let lost = repair.infer(una, max);
        if lost.count > 0 {
            let by_wire = lost.count - self.never_sent(id, &lost);
            let bytes = share(self.qp.req.inflight, lost.count, flying);
            self.qp.req.inflight -= bytes;
            let path = self.sh.paths.get(self.qp.path);
            path.forget(bytes);
            path.lost(share(bytes, by_wire, lost.count));
            self.cursor_to(una);
        }
    }

    /// Of what is missing, answers that the peer never sent: of a READ's piece none came, so that it was the
    /// request that was lost, one packet.
    fn never_sent(&mut self, id: RepairId, lost: &Overtaken) -> u32 {
        let (una, max, per) = (self.qp.req.una_psn, self.qp.req.max_psn, READ_CHUNK / self.qp.mtu);
        let repair = self.sh.repairs.get(id);
        let (req, sq) = (&self.qp.req, &self.qp.sq);
        let (mut at, mut count) = (req.una, 0);
        while at != req.fresh {
            let track = req.track[req.slot(at)];
            let is_read = sq.op(at) == SendOp::Read;
            at = at.wrapping_add(1);
            let high = max.since(track.first).clamp(0, track.packets as i32) as u32;
            for begin in (0..if is_read { high } else { 0 }).step_by(per as usize) {
                let piece = (begin..high.min(begin + per)).map(|n| track.first.plus(n));
                let silent = |psn| !una.since(psn).is_positive() && !repair.is_held(psn);
                if piece.clone().all(silent) {
                    count += piece.skip(1).filter(|psn| lost.has(*psn)).count() as u32;
                }
            }
        }
        count
    }

    fn end_repair_if_over(&mut self, id: RepairId) {
        if self.qp.req.repair == Some(id) && self.sh.repairs.get(id).is_over(self.qp.req.una_psn) {
            self.cursor_to(self.qp.req.max_psn);
            self.end_repair();
        }
    }

    /// Packets before `psn` were executed, but answers before it did not come.
    pub(super) fn unanswered(&mut self, psn: Psn) {
        let Some(id) = self.begin_repair() else { return self.on_loss(false) };
        let (una, max) = (self.qp.req.una_psn, self.qp.req.max_psn);
        let repair = self.sh.repairs.get(id);
        let flying = repair.in_flight(una, max);
        if repair.executed.before(psn) {
            repair.executed = psn;
        }
        let (mut at, mut news) = (self.qp.req.una, Passed::default());
        while at != self.qp.req.fresh {
            let track = self.qp.req.track[self.qp.req.slot(at)];
            let answered = self.qp.sq.op(at).is_answered();
            at = at.wrapping_add(1);
            let low = una.since(track.first).max(0);
            let high = psn.since(track.first).min(track.packets as i32);
            for n in low..if answered { low } else { high } {
                if let Some(was) = self.sh.repairs.get(id).hold(track.first.plus(n as u32)) {
                    news.add(was);
                }
            }
        }
        self.learned(id, flying, news);
    }

    /// An answer that came before another one: its bytes go where they belong, and wait.
    pub(super) fn answer_ahead(&mut self, psn: Psn, packet: &Packet<'_>) {
        let Some(id) = self.qp.req.repair else { return };
        let (una, max) = (self.qp.req.una_psn, self.qp.req.max_psn);
        let Some((index, first)) = self.begun_at(psn) else { return };
        let (wqe, offset) = (self.qp.sq.wqe(index), psn.since(first) as u32 * self.qp.mtu);
        let value = packet.atomic_ack().unwrap_or_default().to_ne_bytes();
        let (expected, data) = match (packet.op().kind, wqe.op) {
            (PacketKind::AtomicAck, op) if op.is_atomic() => (8, &value[..]),
            (PacketKind::ReadResponse, SendOp::Read) => {
                ((wqe.length - offset).min(self.qp.mtu), packet.payload())
            }
            (PacketKind::ReadResponse, SendOp::Flush | SendOp::AtomicWrite) => (0, packet.payload()),
            _ => return self.sh.stats.drop_malformed.inc(),
        };
        if data.len() as u32 != expected {
            return self.sh.stats.drop_malformed.inc();
        }
        if self.sh.repairs.get(id).is_held(psn) || self.scatter(index, offset, data).is_none() {
            /* what cannot be placed fails when it comes in order */
            return self.sh.stats.drop_stale_response.inc();
        }
        let repair = self.sh.repairs.get(id);
        let flying = repair.in_flight(una, max);
        if repair.executed.before(psn.plus(1)) {
            repair.executed = psn.plus(1);
        }
        if let Some(was) = repair.hold(psn) {
            self.learned(id, flying, was);
        }
    }

    /// The begun WQE that has `psn`, and its first PSN.
    fn begun_at(&self, psn: Psn) -> Option<(u32, Psn)> {
        let req = &self.qp.req;
        let mut at = req.una;
        while at != req.fresh {
            let track = req.track[req.slot(at)];
            if (0..track.packets as i32).contains(&psn.since(track.first)) {
                return Some((at, track.first));
            }
            at = at.wrapping_add(1);
        }
        None
    }

    /// The oldest answer came: so may have those behind it, and what is executed between them.
    pub(super) fn settle(&mut self) {
        while let Some(id) = self.qp.req.repair {
            let (req, una) = (&self.qp.req, self.qp.req.una_psn);
            let repair = self.sh.repairs.get(id);
            let executed = repair.executed;
            if req.una == req.fresh || !una.before(executed) {
                return;
            }
            if !self.qp.sq.op(req.una).is_answered() {
                self.acked_before(executed);
                if self.qp.req.una_psn == una {
                    return;
                }
            } else if repair.is_held(una) {
                let track = req.track[req.slot(req.una)];
                let per = READ_CHUNK / self.qp.mtu;
                let whole = (una.since(track.first) as u32 + 1).is_multiple_of(per);
                self.answer_done(una, track.first.plus(track.packets), whole);
            } else {
                return;
            }
        }
    }

    /// `packets` from `from` on are acknowledged, in a repair; gives the bytes of those that were in flight.
    pub(super) fn pass(&mut self, id: RepairId, from: Psn, packets: u32) -> u32 {
        let repair = self.sh.repairs.get(id);
        let flying = repair.in_flight(from, self.qp.req.max_psn);
        let passed = repair.pass(from, packets);
        let left = repair.lost_count();
        let all = from.plus(packets) == self.qp.req.max_psn;
        let bytes = share(self.qp.req.inflight, if all { flying } else { passed.in_flight }, flying);
        self.qp.req.inflight -= bytes;
        if passed.lost > 0 {
            self.take_back(id, passed.lost);
        } else if self.qp.req.rewound != 0 {
            /* what was sent again came, and nothing else: the timeout was right, and of a READ about its
             * request */
            let req = &self.qp.req;
            let is_read = req.una != req.fresh && self.qp.sq.op(req.una) == SendOp::Read;
            let packets = if is_read { left.div_ceil(READ_CHUNK / self.qp.mtu) } else { left };
            let lost = packets * u32::from(core::mem::take(&mut self.qp.req.silent));
            self.sh.paths.get(self.qp.path).lost(lost);
        }
        bytes
    }

    /// The peer acknowledges all before the oldest packet: it has not got that, whatever it kept before.
    pub(super) fn after_pass(&mut self, id: RepairId) {
        let req = &self.qp.req;
        let una = req.una_psn;
        if req.outstanding() && req.una != req.fresh && !self.qp.sq.op(req.una).is_answered() {
            let repair = self.sh.repairs.get(id);
            if repair.is_held(una) && !una.before(repair.executed) {
                repair.refused(una);
                self.cursor_to(una);
            }
        }
        self.end_repair_if_over(id);
    }

    /// The peer could not take the oldest packet, for want of a receive WQE or as its kernel is at work. It
    /// answers nothing behind that before, perhaps not before others have sent: the room that READs wait for
    /// is theirs meanwhile.
    pub(super) fn oldest_refused(&mut self, id: RepairId) {
        let (una, max) = (self.qp.req.una_psn, self.qp.req.max_psn);
        self.sh.repairs.get(id).lose_all(una, max);
        self.cursor_to(una);
        (self.qp.req.unasked, self.qp.req.rtt_since, self.qp.req.silent) = (0, 0, 0);
        self.forget_inflight();
        self.ready();
    }

    /// All that is not held is lost: the peer is silent, or could not keep it. `again`: it was
    /// so before.
    pub(super) fn all_lost(&mut self, timeout: bool, again: bool) {
        let Some(id) = self.qp.req.repair else { return };
        let (una, max) = (self.qp.req.una_psn, self.qp.req.max_psn);
        let lost = self.sh.repairs.get(id).lose_all(una, max);
        let bytes = self.qp.req.inflight;
        let path = self.sh.paths.get(self.qp.path);
        if !timeout {
            path.lost(bytes);
            self.qp.req.silent = 0;
        } else if !again {
            self.qp.req.silent = size_of_each(bytes, lost);
        }
        self.cursor_to(una);
        (self.qp.req.unasked, self.qp.req.rtt_since) = (0, 0);
        self.forget_inflight();
        self.ready();
        self.start_timer();
    }
}
