//! When packets are taken for lost: the retransmission timer, and going back to the oldest of them (IBTA
//! 9.7.6.1, 9.7.5.1.1).

use super::holes::size_of_each;
use super::{Ctx, Requester, TimerAction, enter_error};
use crate::engine::Call;
use crate::env::Env;
use crate::types::{Nanos, QpState, WcStatus};

/// Packets that go first after a loss. What was in flight behind the lost packet still fills the
/// peer's buffer; the answer to these confirms that it is through.
const FIRST_AFTER_LOSS: u32 = 4;
/// A round trip is taken to last at least this, ns.
const RTT_MIN: Nanos = 50_000;
/// Shortest and longest first retransmission timeout, ns. The IBTA timer only bounds how long a
/// silent peer is believed; recovery from loss need not wait for it.
const RTO_MIN: Nanos = 1_000_000;
/// Shortest timeout while only the first packets after a loss fly: a needless repetition of those costs
/// little, and the responder reports a missing packet only once (IBTA 9.7.5.2.8).
const RTO_AFTER_LOSS: Nanos = 500_000;
const RTO_MAX: Nanos = 1_000_000_000;
/// A silent peer is believed for so many eighths of the local ACK timeout, a try: a timeout is noticed
/// between one and four times that (IBTA C9-141). A peer that is a program waits for its CPU now and then.
const EIGHTHS: Nanos = 11;

impl Requester {
    /// A timeout ran out, and the peer has not answered since. It may be gone: one packet at a time goes to
    /// it, which is not charged to the path, so that other QPs to the same address have all of the window.
    #[inline]
    pub(super) fn is_silent(&self) -> bool {
        self.backoff > 0
    }

    /// The peer has answered.
    #[inline]
    pub(super) fn end_silence(&mut self) {
        if self.is_silent() {
            self.timeouts = core::mem::take(&mut self.backoff);
        }
    }

    /// Packets that may be under way before the peer has answered after a loss. `None`: no loss, the window
    /// decides.
    #[inline]
    pub(super) fn after_loss(&self) -> Option<u32> {
        (self.rewound != 0).then_some(if self.is_silent() { 1 } else { FIRST_AFTER_LOSS })
    }
}

impl<E: Env> Ctx<'_, E> {
    /// Takes the time that this card itself did not run after the deadline (it was stopped, or its clock
    /// jumped) out of the peer's silence: a local stall says nothing about the peer.
    fn discount_local_stall(&mut self) {
        let req = &mut self.qp.req;
        if req.deadline != 0 && req.deadline < self.now {
            req.progress = req.progress.saturating_add(self.now - req.deadline);
            req.deadline = self.now;
        }
    }

    /// (Re)starts the retransmission timer.
    pub(super) fn start_timer(&mut self) {
        let limit = ack_timeout(self.qp.attr.timeout).unwrap_or(RTO_MAX);
        let least = if self.qp.req.rewound == 0 { RTO_MIN } else { RTO_AFTER_LOSS };
        let (path, backoff) = (self.sh.paths.get(self.qp.path), self.qp.req.backoff);
        let probe = path.probe_time(self.qp.req.inflight).filter(|_| backoff == 0);
        let rto = probe.unwrap_or_else(|| path.timeout(least, backoff));
        let rto = rto.min(RTO_MAX).min(limit.max(RTO_MIN));
        self.discount_local_stall();
        let at = (self.now + rto).min(self.given_up_at().unwrap_or(Nanos::MAX).max(self.now + 1));
        self.qp.req.deadline = at;
        self.arm(at);
    }

    /// When the peer is given up if it stays silent. `None`: it was not asked often enough yet, or is
    /// believed for ever.
    fn given_up_at(&self) -> Option<Nanos> {
        let retries = self.qp.attr.retry_cnt;
        let limit = patience(self.qp.attr.timeout, retries)?;
        (self.qp.req.backoff >= retries).then(|| self.qp.req.progress.saturating_add(limit))
    }

    /// Goes back to the oldest unacknowledged packet (go-back-N).
    pub(super) fn rewind(&mut self) {
        self.end_repair();
        self.cursor_to(self.qp.req.una_psn);
        let req = &mut self.qp.req;
        req.reads = 0;
        req.unasked = 0;
        req.rtt_since = 0;
        req.silent = 0;
        self.forget_inflight();
        self.ready();
    }

    /// What this QP has in flight counts no longer against its path.
    pub(crate) fn forget_inflight(&mut self) {
        let inflight = core::mem::take(&mut self.qp.req.inflight);
        if self.sh.paths.exists(self.qp.path) {
            self.sh.paths.get(self.qp.path).forget(inflight);
            self.wake_path();
        }
    }

    /// Everything was sent again a moment ago and nothing has come of it yet: what is noticed now is
    /// the same loss.
    fn just_rewound(&mut self) -> bool {
        let srtt = Nanos::from(self.sh.paths.get(self.qp.path).srtt);
        let at = self.qp.req.rewound;
        at != 0 && self.now.saturating_sub(at) < 2 * srtt.max(RTT_MIN)
    }

    /// A packet was lost; `timeout`: found by the peer's silence.
    pub(super) fn on_loss(&mut self, timeout: bool) {
        if !timeout && self.just_rewound() {
            return;
        }
        let again = self.qp.req.rewound != 0;
        self.qp.req.rewound = self.now;
        if self.qp.flags.repeats && self.begin_repair().is_some() {
            return self.all_lost(timeout, again);
        }
        if !timeout && !again {
            self.cut_window(false);
        }
        let (bytes, packets) = (self.qp.req.inflight, self.qp.req.psn.since(self.qp.req.una_psn));
        self.rewind();
        if timeout && packets > 0 {
            self.qp.req.silent = size_of_each(bytes, packets as u32);
        }
        self.start_timer();
    }

    /// Packets were lost on the path: the peer reported it, or answered again after a `timeout`. Its silence
    /// proves nothing of the path.
    pub(super) fn cut_window(&mut self, timeout: bool) {
        if self.sh.paths.get(self.qp.path).cut(self.now, timeout) {
            self.sh.stats.window_cuts.inc();
        }
    }

    /// The retransmission timer or an RNR wait may have run out.
    pub(crate) fn timer_fired(&mut self) {
        self.qp.flags.armed = false;
        if self.qp.flags.held && self.run_engine(Call::Timeout).is_some() {
            if let Some(path) = self.qp.flags.window_wait {
                self.pace_waiter(path);
            }
            return;
        }
        match core::mem::take(&mut self.qp.flags.due) {
            TimerAction::Nothing => {}
            TimerAction::Flush => return enter_error(self, QpState::Err),
            TimerAction::Rpc => self.rpc_turn(),
        }
        if self.qp.req.rnr_until != 0 {
            if self.qp.req.rnr_until > self.now {
                return self.arm(self.qp.req.rnr_until);
            }
            self.qp.req.rnr_until = 0;
            self.qp.req.progress = self.now;
            if self.qp.req.repair.is_some() {
                /* some are under way that were not refused */
                self.start_timer();
            }
            self.ready();
        }
        if !self.qp.qp_type.is_reliable() {
            return self.pace_timer();
        }
        if let Some(path) = self.qp.flags.window_wait {
            self.pace_waiter(path);
        }
        match self.qp.req.deadline {
            0 => {}
            at if at > self.now => self.arm(at),
            _ if !self.qp.req.outstanding() => self.qp.req.deadline = 0,
            _ => self.timed_out(),
        }
    }

    fn timed_out(&mut self) {
        if !self.awaits_packets() {
            /* Rewound, and waiting for room since: nobody is silent. */
            (self.qp.req.progress, self.qp.req.deadline) = (self.now, 0);
            self.ready();
            return self.start_timer();
        }
        self.sh.stats.timeouts.inc();
        self.discount_local_stall();
        /* Time alone proves nothing: the peer must have been asked as often as the program set, too. */
        if self.given_up_at().is_some_and(|at| at <= self.now) {
            self.sh.stats.retry_exceeded.inc();
            return self.fail_oldest(WcStatus::RetryExcErr);
        }
        self.qp.req.backoff = self.qp.req.backoff.saturating_add(1);
        self.on_loss(true);
    }

    /// Whether something is under way, as far as is known.
    fn awaits_packets(&mut self) -> bool {
        let req = &self.qp.req;
        match req.repair {
            Some(id) => self.sh.repairs.get(id).in_flight(req.una_psn, req.max_psn) > 0,
            None => req.una_psn.before(req.psn),
        }
    }
}

/// How long a silent peer is believed in all. `None`: for ever.
pub fn patience(timeout: u8, retries: u8) -> Option<Nanos> {
    ack_timeout(timeout).map(|limit| limit * (Nanos::from(retries) + 1) * EIGHTHS / 8)
}

/// Local ACK timeout: 4.096 us x 2^code (IBTA 9.7.6.1.3); `None`: wait for ever.
pub(super) fn ack_timeout(code: u8) -> Option<Nanos> {
    (code != 0).then(|| 4096 << code.min(31))
}
