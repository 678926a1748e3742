//! When packets are taken for lost: the retransmission timer, and going back to the oldest of them (IBTA 9.7.6.1, 9.7.5.1.1).

use super::holes::size_of_each;
use super::{Ctx, enter_error};
use crate::env::Env;
use crate::nic::star::Call;
use crate::types::{Nanos, QpState, WcStatus};

/// Packets that go first after a loss. What was in flight behind the lost packet still fills the
/// peer's buffer; the answer to these says that it is through.
pub(super) const FEELERS: i32 = 4;
/// A round trip is taken to last at least this, ns.
const RTT_MIN: Nanos = 50_000;
/// Shortest and longest first retransmission timeout, ns. The IBTA timer only bounds how long a
/// silent peer is believed; recovery from loss need not wait for it.
const RTO_MIN: Nanos = 1_000_000;
/// Shortest timeout while only feelers fly: a needless repetition of those costs little, and the
/// responder says but once what it misses (IBTA 9.7.5.2.8).
pub(super) const RTO_FEELERS: Nanos = 500_000;
const RTO_MAX: Nanos = 4_000_000_000;
/// A timeout is noticed between one and four times the local ACK timeout (IBTA C9-141). A peer that is a
/// program waits for its CPU now and then, so it is given all of that, but for the last timer's run.
const STRETCH: Nanos = 4;

impl<E: Env> Ctx<'_, E> {
    /// When this card itself did not run past the deadline (it was stopped, or its clock jumped), nobody else is to blame: it
    /// neither asked nor listened.
    fn forgive_lateness(&mut self) {
        let req = &mut self.qp.req;
        if req.deadline != 0 && req.deadline < self.now {
            req.progress = req.progress.saturating_add(self.now - req.deadline);
            req.deadline = self.now;
        }
    }

    /// (Re)starts the retransmission timer.
    pub(super) fn start_timer(&mut self) {
        let limit = ack_timeout(self.qp.attr.timeout).unwrap_or(RTO_MAX);
        let srtt = Nanos::from(self.sh.paths.get(self.qp.path).srtt);
        let least = if self.qp.req.rewound == 0 { RTO_MIN } else { RTO_FEELERS };
        let first = (4 * srtt).max(least);
        self.forgive_lateness();
        let rto = (first << self.qp.req.backoff.min(16)).min(RTO_MAX).min(limit.max(RTO_MIN));
        self.qp.req.deadline = self.now + rto;
        self.arm(self.now + rto);
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

    /// A lost packet was noticed: `timeout` says by silence.
    pub(super) fn on_loss(&mut self, timeout: bool) {
        if !timeout && self.just_rewound() {
            return;
        }
        let again = self.qp.req.rewound != 0;
        self.qp.req.rewound = self.now;
        if self.qp.flags.repeats && self.begin_repair().is_some() {
            return self.all_lost(timeout, again);
        }
        if !again && self.sh.paths.get(self.qp.path).cut(self.now, timeout) {
            self.sh.stats.window_cuts.inc();
        }
        let (bytes, packets) = (self.qp.req.inflight, self.qp.req.psn.since(self.qp.req.una_psn));
        self.rewind();
        if timeout && packets > 0 {
            self.qp.req.silent = size_of_each(bytes, packets as u32);
        }
        self.start_timer();
    }

    /// The retransmission timer or an RNR wait may have run out.
    pub(crate) fn timer_fired(&mut self) {
        self.qp.req.armed = 0;
        if self.qp.flags.star && self.star(Call::Timeout).is_some() {
            if let Some(path) = self.qp.flags.window_wait {
                self.pace_waiter(path);
            }
            return;
        }
        if core::mem::take(&mut self.qp.flags.overrun) {
            return enter_error(self, QpState::Err);
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
        self.forgive_lateness();
        let silent = self.now.saturating_sub(self.qp.req.progress);
        /* Time alone proves nothing: the peer must have been asked as often as the program said, too. */
        let retries = self.qp.attr.retry_cnt;
        if let Some(limit) = patience(self.qp.attr.timeout, retries)
            && silent >= limit
            && self.qp.req.backoff >= retries
        {
            self.sh.stats.retry_exceeded.inc();
            return self.fail_oldest(WcStatus::RetryExcErr);
        }
        self.qp.req.backoff = self.qp.req.backoff.saturating_add(1);
        self.on_loss(true);
    }

    /// Whether something is under way, as far as is known. Without a repair, with the cursor behind all, it is, whatever the
    /// bytes say: a repair may end with answers due that a SACK took back from what was lost.
    fn awaits_packets(&mut self) -> bool {
        let req = &self.qp.req;
        match req.repair {
            Some(id) => self.sh.repairs.get(id).in_flight(req.una_psn, req.max_psn) > 0,
            None => req.inflight > 0 || !req.psn.before(req.max_psn),
        }
    }
}

/// How long a silent peer is believed in all: each try for as long as the IBTA allows. `None`: for ever.
pub(crate) fn patience(timeout: u8, retries: u8) -> Option<Nanos> {
    ack_timeout(timeout).map(|limit| limit * (STRETCH * (Nanos::from(retries) + 1) - 1))
}

/// Local ACK timeout: 4.096 us x 2^code (IBTA 9.7.6.1.3); `None`: wait for ever.
pub(super) fn ack_timeout(code: u8) -> Option<Nanos> {
    (code != 0).then(|| 4096 << code.min(31))
}
