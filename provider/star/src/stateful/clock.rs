//! What is due: packets that were not answered, completions that waited, receives that did not come.

use starverbs_core::{Nanos, QpState};

use super::events::Completions;
use super::stream::WqeStream;
use super::window::Of;
use super::{CardCtx, Stateful};
use crate::env::StarEnv;

/// A timer that is later than this, ns, shows a local stall.
const LATE: Nanos = 500_000;
/// An end in ERR repeats its last messages for so long at most, ns; the peer's own patience does the rest.
const MAX_LINGER: Nanos = 2_000_000_000;

/// Times that a packet is repeated before SL is given up, if it has also been silent for the patience.
const TRIES: u8 = 7;
/// Silence after which SL gets a KeepAlive, when nothing is under way and something waits for it, ns.
pub(super) const KEEPALIVE: Nanos = 1_000_000_000;
/// What is due and waits for its turn, or for the QP's context, is looked at again after so long, ns.
const TURN: Nanos = 10_000;

impl<E: StarEnv> Stateful<E> {
    /// Does what is due now.
    pub fn handle_timeout(&mut self, card: &mut CardCtx<'_, E>) {
        self.discount_local_stall(card.now);
        self.deadline = 0;
        if self.overrun {
            self.enter_error(card);
        }
        self.expire(card);
        self.fail_left(card);
        self.stream_turn_due(card);
        self.finish(card);
        self.answer_due(card.now);
        self.charge(card);
        self.rearm(card);
    }

    /// After a local stall (the process was stopped, or had no CPU) SL's answers have not been read: the
    /// stall does not count as silence.
    fn discount_local_stall(&mut self, now: Nanos) {
        let late = now.saturating_sub(self.deadline);
        if self.deadline == 0 || late <= LATE {
            return;
        }
        /* what came is looked at first, once: one that is always late must decide, too */
        self.last_inbound = self.last_inbound.saturating_add(late).min(now);
        if now > self.stalled_until {
            self.stalled_until = now + LATE;
        }
    }

    fn expire(&mut self, card: &mut CardCtx<'_, E>) {
        if card.now < self.stalled_until {
            return;
        }
        let Some(then) = card.now.checked_sub(self.timeout(card)) else { return };
        let lost = self.window.expire(then, card.now);
        let repeated = self.completions.iter_mut().filter(|_| !self.silent);
        let tries = repeated.map(|completions| completions.expire(then)).max().unwrap_or(0);
        if lost > 0 || tries > 0 && self.window.is_empty() {
            card.stats.timeouts.inc();
            self.backoff = self.backoff.saturating_add(1);
        }
        /* what waits for a kernel asks SL for nothing */
        let tries = if self.window.asks() { tries.max(self.window.most_tries()) } else { tries };
        let tries = tries.max(self.channel.tries().min(u8::MAX.into()) as u8);
        let silent = card.now.saturating_sub(self.last_inbound);
        let patience = match (self.state, self.local.patience.get()) {
            /* only the last messages are left */
            (QpState::Err, 0) => MAX_LINGER,
            (QpState::Err, patience) => patience.min(MAX_LINGER),
            (_, patience) => patience,
        };
        /* in doubt, when SL may be plain, the round decides what its silence means */
        if tries > TRIES && patience != 0 && silent > patience && !self.quiesced {
            self.peer_silent(card);
        }
    }

    /// Something was answered: if nothing is waited for any more, there is no deadline.
    #[inline]
    pub(super) fn disarm_if_idle(&mut self) {
        let [local, remote] = &self.streams;
        let idle = |stream: &WqeStream| stream.under_way() == 0 && !stream.lacks_recv();
        let acked = |completions: &Completions| completions.is_acked();
        if self.window.is_empty()
            && idle(local)
            && idle(remote)
            && self.completions.iter().all(acked)
            && self.open
            && self.state == QpState::Rts
            && !self.overrun
            && self.left_until == 0
            && !self.is_message_due()
        {
            self.deadline = 0;
        }
    }

    /// Sets the deadline to the earliest of all that is waited for.
    fn rearm(&mut self, card: &CardCtx<'_, E>) {
        let (now, timeout) = (card.now, self.timeout(card));
        let answer = self.window.oldest().map(|sent| (sent + timeout).max(self.stalled_until));
        let repeated = self.completions.iter().filter(|_| !self.silent);
        let cqep = repeated.filter_map(|c| c.due(timeout).map(|due| due.max(self.stalled_until))).min();
        let left = (self.left_until != 0).then_some(self.left_until);
        for at in [answer, cqep, left, self.message_due()].into_iter().flatten() {
            /* what may leave now waits for nothing but its turn */
            if at > now {
                self.arm(at);
            } else if self.deadline == 0 {
                self.arm(now + TURN);
            }
        }
        for of in [Of::Local, Of::Remote] {
            let stream = &self.streams[of as usize];
            let lacks = stream.lacks_recv();
            let oldest = stream.oldest().filter(|op| op.until > now);
            if let Some(op) = oldest.copied().filter(|_| self.state == QpState::Rts) {
                self.arm(if op.probe > now { op.probe } else { op.until });
            }
            if self.state == QpState::Rts && lacks {
                self.arm_for_recv(of, now);
            }
        }
    }

    /// A WQE waits for a receive WQE: when it is to be looked for again, or given up.
    fn arm_for_recv(&mut self, of: Of, now: Nanos) {
        let (code, retries) = match of {
            Of::Local => (self.terms.min_rnr_timer, self.local.rnr_retry),
            Of::Remote => (self.local.min_rnr_timer, self.terms.rnr_retry),
        };
        if of == Of::Remote || retries != 7 {
            self.arm(now + super::begin::rnr_time(code));
        }
    }
}
