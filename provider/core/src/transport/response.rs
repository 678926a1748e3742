//! Answers to our requests: acknowledges, NAKs, READ data, atomic results (IBTA 9.7.5 to 9.7.8).

use super::Ctx;
use super::requester::{READ_CHUNK, in_flight, slices};
use crate::env::{Env, SendQueue};
use crate::types::{Nanos, Psn, QpState, SendOp, WcStatus};
use crate::wire::headers::{CREDITS_NONE, NakCode, Syndrome};
use crate::wire::opcode::PacketKind;
use crate::wire::packet::Packet;

/// RNR NAK timer codes in units of 10 us (IBTA table 45).
pub const RNR_TIMER_10US: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
    3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

impl<E: Env> Ctx<'_, E> {
    /// A packet from the peer's responder.
    pub(super) fn receive_response(&mut self, packet: &Packet<'_>) {
        if !matches!(self.qp.state, QpState::Rts | QpState::Sqd) {
            return self.sh.stats.drop_state.inc();
        }
        let psn = packet.bth().psn();
        if !in_flight(psn, self.qp.req.una_psn, self.qp.req.max_psn) {
            /* A repeat of something acknowledged already: normal after a retransmission. */
            let needless = core::mem::take(&mut self.qp.req.timeouts);
            if needless > 0 {
                self.sh.paths.get(self.qp.path).answered_twice(needless);
            }
            return self.sh.stats.drop_stale_response.inc();
        }
        self.note_answer(packet);
        let syndrome = packet.aeth().and_then(|a| a.syndrome());
        match (packet.op().kind, syndrome) {
            (PacketKind::ReadResponse, _) => self.read_data(psn, packet),
            (PacketKind::AtomicAck, _) => self.atomic_result(psn, packet),
            (_, Some(Syndrome::Ack { .. })) => self.acked(psn),
            (_, Some(Syndrome::Rnr { timer })) => self.rnr(psn, timer),
            (_, Some(Syndrome::Nak(code))) => self.nak(psn, code),
            (_, None) => self.sh.stats.drop_malformed.inc(),
        }
        if let Some(Syndrome::Ack { credits }) = syndrome
            && (credits != CREDITS_NONE || self.qp.req.counted)
        {
            self.note_credits(credits);
        }
    }

    fn acked(&mut self, psn: Psn) {
        self.sh.stats.rcvd_ack.inc();
        self.acked_before(psn.plus(1));
    }

    /// All packets before `psn` are acknowledged. A READ or the like among them whose answer did not
    /// come was lost: gives false, and everything from there is sent again.
    pub(super) fn acked_before(&mut self, psn: Psn) -> bool {
        let from = self.qp.req.una_psn;
        let mut reached = psn;
        while self.qp.req.una != self.qp.req.fresh {
            let track = self.qp.req.track[self.qp.req.slot(self.qp.req.una)];
            let end = track.first.plus(track.packets);
            if !track.first.before(psn) {
                break;
            }
            if self.qp.sq.op(self.qp.req.una).is_answered() {
                /* Only its own answers complete it. */
                reached =
                    if self.qp.req.una_psn.before(track.first) { track.first } else { self.qp.req.una_psn };
                break;
            }
            if psn.before(end) {
                break;
            }
            self.complete_oldest();
        }
        self.progress_to(from, reached);
        let lost = reached.before(psn);
        if lost {
            self.sh.stats.implied_nak.inc();
            match self.qp.flags.repeats {
                true => self.unanswered(psn),
                false => self.on_loss(false),
            }
        }
        !lost
    }

    /// Moves the oldest unacknowledged PSN: window, timers, turn.
    fn progress_to(&mut self, from: Psn, to: Psn) {
        let packets = to.since(from);
        if packets <= 0 {
            return;
        }
        let req = &mut self.qp.req;
        let sent = req.psn.since(from);
        req.una_psn = to;
        /* In flight is a sum over packets of unlike size: an even share is close enough. */
        let bytes = match req.repair {
            Some(id) => self.pass(id, from, packets as u32),
            None => {
                let bytes = match packets >= sent {
                    true => req.inflight,
                    false => (u64::from(req.inflight) * packets as u64 / sent as u64) as u32,
                };
                req.inflight -= bytes;
                bytes
            }
        };
        if self.qp.req.psn.before(to) {
            self.skip_to(to);
        } else if self.qp.req.is_silent() && self.qp.req.repair.is_none() {
            self.cut_window(true);
        }
        let req = &mut self.qp.req;
        let deadline = if req.deadline == 0 { self.now } else { req.deadline };
        (req.progress, req.deadline) = (self.now, 0);
        req.rewound = 0;
        req.end_silence();
        req.rnr_left = self.qp.attr.rnr_retry;
        let rtt = (req.rtt_since != 0 && !to.before(req.rtt_psn)).then_some(req.rtt_since);
        if rtt.is_some() {
            req.rtt_since = 0;
        }
        let outstanding = req.outstanding();
        let path = self.sh.paths.get(self.qp.path);
        path.acked(bytes);
        if let Some(since) = rtt {
            /* What lies behind the deadline is time in which this card did not run (it was stopped, or its
             * clock jumped): the timer would have put an end to the measuring. */
            path.sample_rtt(self.now, self.now.min(deadline).saturating_sub(since));
        }
        if outstanding {
            self.start_timer();
        } else {
            self.disarm_idle_timer();
        }
        if let Some(id) = self.qp.req.repair {
            self.after_pass(id);
        }
        self.wake_path();
        if self.qp.req.next != self.qp.sq.posted() {
            self.ready();
        }
        self.raise_fault();
        self.drained();
    }

    /// The cursor was rewound, but an acknowledge shows that the peer had more: skip what it has. If a
    /// timeout rewound it, that was wrong, and what is further ahead is still under way.
    fn skip_to(&mut self, to: Psn) {
        self.cursor_to(to);
        if self.qp.req.repair.is_some() {
            return;
        }
        let each = u32::from(core::mem::take(&mut self.qp.req.silent));
        let max = self.qp.req.max_psn;
        if each == 0 || self.asks_answers() {
            return self.sh.paths.get(self.qp.path).undo_timeout();
        }
        self.recharge(each * max.since(to).max(0) as u32);
        self.cursor_to(max);
    }

    /// Whether an answer with data is due.
    fn asks_answers(&self) -> bool {
        let (req, mut at) = (&self.qp.req, self.qp.req.una);
        while at != req.fresh {
            if self.qp.sq.op(at).is_answered() {
                return true;
            }
            at = at.wrapping_add(1);
        }
        false
    }

    fn read_data(&mut self, psn: Psn, packet: &Packet<'_>) {
        if !self.acked_up_to_answer(psn) {
            return self.answer_ahead(psn, packet);
        }
        let req = &self.qp.req;
        let wqe = self.qp.sq.wqe(req.una);
        let track = req.track[req.slot(req.una)];
        let offset = psn.since(track.first) as u32 * self.qp.mtu;
        let data = packet.payload();
        let expected = match wqe.op {
            SendOp::Read => Some((wqe.length - offset).min(self.qp.mtu)),
            /* these have no answer of another form than a READ of nothing (A19) */
            SendOp::Flush | SendOp::AtomicWrite => Some(0),
            _ => None,
        };
        if expected != Some(data.len() as u32) {
            return self.fail_oldest(WcStatus::BadRespErr);
        }
        if self.scatter(self.qp.req.una, offset, data).is_none() {
            return self.fail_oldest(WcStatus::LocProtErr);
        }
        let whole = (offset + data.len() as u32).is_multiple_of(READ_CHUNK);
        self.answer_done(psn, track.first.plus(track.packets), whole);
        self.settle();
    }

    fn atomic_result(&mut self, psn: Psn, packet: &Packet<'_>) {
        if !self.acked_up_to_answer(psn) {
            return self.answer_ahead(psn, packet);
        }
        if !self.qp.sq.op(self.qp.req.una).is_atomic() {
            return self.fail_oldest(WcStatus::BadRespErr);
        }
        /* Results are in host byte order for the program (man ibv_post_send). */
        if self.scatter(self.qp.req.una, 0, &packet.atomic_ack().unwrap_or_default().to_ne_bytes()).is_none()
        {
            return self.fail_oldest(WcStatus::LocProtErr);
        }
        self.answer_done(psn, psn.plus(1), true);
        self.settle();
    }

    /// An answer with data at `psn` acknowledges all before it. False: it is not the next answer.
    #[inline]
    fn acked_up_to_answer(&mut self, psn: Psn) -> bool {
        if !self.acked_before(psn) {
            return false;
        }
        let req = &self.qp.req;
        if req.una == req.fresh || req.una_psn != psn {
            return false;
        }
        if !self.qp.sq.op(req.una).is_answered() {
            self.fail_oldest(WcStatus::BadRespErr);
            return false;
        }
        true
    }

    /// The answer at `psn`, of a WQE that ends before `end`, is in memory. `whole`: the request was
    /// for no more than this.
    pub(super) fn answer_done(&mut self, psn: Psn, end: Psn, whole: bool) {
        let to = psn.plus(1);
        if whole || to == end {
            /* none may be left: the cursor was rewound, and this is still the answer to the first sending */
            self.qp.req.reads = self.qp.req.reads.saturating_sub(1);
        }
        if to == end {
            self.complete_oldest();
        }
        self.progress_to(psn, to);
    }

    /// Writes `data` at `offset` of the buffers of WQE `index`.
    pub(super) fn scatter(&mut self, index: u32, offset: u32, data: &[u8]) -> Option<()> {
        let (mrs, env, pd) = (&self.sh.mrs, &mut *self.env, self.qp.pd);
        self.sh.stats.rx_bytes.add(data.len() as u64);
        let mut rest = data;
        slices(self.qp.sq.sges(index), offset, data.len() as u32, |sge, skip, n| {
            let addr =
                mrs.resolve_local(sge.lkey, pd, sge.addr.wrapping_add(u64::from(skip)), n, true).ok()?;
            let (now, later) = rest.split_at_checked(n as usize)?;
            rest = later;
            env.dma_write(addr, now).then_some(())
        })
    }

    fn rnr(&mut self, psn: Psn, timer: u8) {
        self.sh.stats.rcvd_rnr.inc();
        if !self.acked_before(psn) {
            return;
        }
        if self.qp.attr.rnr_retry != 7 {
            if self.qp.req.rnr_left == 0 {
                self.sh.stats.rnr_retry_exceeded.inc();
                return self.fail_oldest(WcStatus::RnrRetryExcErr);
            }
            self.qp.req.rnr_left -= 1;
        }
        match self.qp.req.repair {
            Some(id) => self.oldest_refused(id),
            None => self.rewind(),
        }
        let wait = Nanos::from(RNR_TIMER_10US[usize::from(timer & 31)]) * 10_000;
        let until = self.now + wait;
        self.qp.req.rnr_until = until;
        self.qp.req.progress = until;
        self.qp.req.deadline = 0;
        self.arm(until);
    }

    fn nak(&mut self, psn: Psn, code: NakCode) {
        let stats = &self.sh.stats;
        let (counter, status) = match code {
            NakCode::SequenceError => (&stats.rcvd_nak_seq, None),
            NakCode::InvalidRequest => (&stats.rcvd_nak_invalid, Some(WcStatus::RemInvReqErr)),
            NakCode::RemoteAccess => (&stats.rcvd_nak_access, Some(WcStatus::RemAccessErr)),
            NakCode::RemoteOperation => (&stats.rcvd_nak_op, Some(WcStatus::RemOpErr)),
        };
        counter.inc();
        if !self.acked_before(psn) {
            return;
        }
        match status {
            None => self.on_loss(false),
            Some(status) => self.fail_oldest(status),
        }
    }
}
