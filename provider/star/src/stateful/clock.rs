//! What is due: packets that were not answered, completions that waited, receives that did not come.

use starverbs_core::rtt::RttBounds;
use starverbs_core::{Nanos, QpState};

use super::events::Completions;
use super::stream::Stream;
use super::window::Of;
use super::{Card, Stateful};
use crate::env::StarEnv;

/// A timer that is later than this, ns, was late because of this card.
const LATE: Nanos = 500_000;
/// An end in ERR says so for so long at most to a peer that does not answer: the peer's own time tells it.
const LAST_WORDS: Nanos = 2_000_000_000;

/// How a connection waits. Nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Waits {
    /// For answers
    pub rtt: RttBounds,
    /// Times that a packet is repeated before SL is given up, if it has also been silent for `patience`
    pub tries: u8,
    /// What the program allowed with timeout and retry_cnt; 0: for ever
    pub patience: Nanos,
    /// Silence after which SL is asked whether it lives, when nothing is under way and something waits for
    /// it
    pub keepalive: Nanos,
}

impl Default for Waits {
    fn default() -> Self {
        let rtt = RttBounds::default();
        Waits { rtt, tries: 7, patience: 500_000_000, keepalive: 1_000_000_000 }
    }
}

impl<E: StarEnv> Stateful<E> {
    /// Does what is due now.
    pub fn handle_timeout(&mut self, card: &mut Card<'_, E>) {
        self.forgive_lateness(card.now);
        self.deadline = 0;
        if self.overrun {
            self.enter_error(card);
        }
        self.expire(card);
        self.fail_left(card);
        self.finish(card);
        self.answer_due(card.now);
        self.charge(card);
        self.rearm(card);
    }

    /// When this card itself was late (it was stopped, or had no CPU), SL is not to blame: what it answered
    /// meanwhile has not been read.
    fn forgive_lateness(&mut self, now: Nanos) {
        let late = now.saturating_sub(self.deadline);
        if self.deadline == 0 || late <= LATE {
            return;
        }
        /* what it slept is no silence, however often it does; what came is looked at once, lest one that is
        always late never decides */
        self.heard = self.heard.saturating_add(late).min(now);
        if now > self.excused {
            self.excused = now + LATE;
        }
    }

    fn expire(&mut self, card: &mut Card<'_, E>) {
        if card.now < self.excused {
            return;
        }
        let waits = self.local.waits;
        let Some(then) = card.now.checked_sub(self.timeout(card)) else { return };
        let lost = self.window.expire(then, card.now);
        let told = self.completions.iter_mut().filter(|_| !self.silent);
        let tries = told.map(|completions| completions.expire(then)).max().unwrap_or(0);
        if lost > 0 || tries > 0 && self.window.is_empty() {
            card.stats.timeouts.inc();
            self.backoff = self.backoff.saturating_add(1);
        }
        let tries = tries.max(self.window.most_tries());
        let tries = tries.max(self.channel.tries().min(u8::MAX.into()) as u8);
        let silent = card.now.saturating_sub(self.heard);
        let patience = match (self.state, waits.patience) {
            /* there are only last words left */
            (QpState::Err, 0) => LAST_WORDS,
            (QpState::Err, patience) => patience.min(LAST_WORDS),
            (_, patience) => patience,
        };
        /* one that was told that all is over may have left, and be plain: who asks it that says what comes of
        silence */
        if tries > waits.tries && patience != 0 && silent > patience && !self.halted {
            self.peer_silent(card);
        }
    }

    /// Something was answered: if nothing is waited for any more, there is no deadline, and what the timer
    /// finds when it comes is one number.
    #[inline]
    pub(super) fn rest(&mut self) {
        let [local, remote] = &self.streams;
        let idle = |stream: &Stream| stream.under_way() == 0 && stream.rnr_since == 0;
        let told = |completions: &Completions| completions.is_told();
        if self.window.is_empty()
            && idle(local)
            && idle(remote)
            && self.completions.iter().all(told)
            && self.open
            && self.state == QpState::Rts
            && !self.overrun
            && self.left_until == 0
            && self.message_due().is_none()
        {
            self.deadline = 0;
        }
    }

    /// Sets the deadline to the earliest of all that is waited for.
    fn rearm(&mut self, card: &Card<'_, E>) {
        let (now, timeout) = (card.now, self.timeout(card));
        let answer = self.window.oldest().map(|sent| (sent + timeout).max(self.excused));
        let told = self.completions.iter().filter(|_| !self.silent);
        let told = told.filter_map(|c| c.due(timeout).map(|due| due.max(self.excused))).min();
        let left = (self.left_until != 0).then_some(self.left_until);
        for at in [answer, told, left, self.message_due()].into_iter().flatten() {
            /* a completion that may leave now waits for nothing but its turn */
            if at > now || self.deadline == 0 {
                self.arm(at.max(now + 1));
            }
        }
        for of in [Of::Local, Of::Remote] {
            let stream = &self.streams[of as usize];
            let (una, lacks) = (*stream.get(stream.una), stream.rnr_since != 0);
            if self.state == QpState::Rts && stream.under_way() > 0 && una.until > now {
                self.arm(if una.probe > now { una.probe } else { una.until });
            }
            if self.state == QpState::Rts && lacks {
                self.arm_for_recv(of, now);
            }
        }
    }

    /// A WQE waits for a receive WQE: when it is to be looked for again, or given up.
    fn arm_for_recv(&mut self, of: Of, now: Nanos) {
        let (code, retries) = match of {
            Of::Local => (self.setup.min_rnr_timer, self.local.rnr_retry),
            Of::Remote => (self.local.min_rnr_timer, self.setup.rnr_retry),
        };
        if of == Of::Remote || retries != 7 {
            self.arm(now + super::begin::rnr_time(code));
        }
    }
}
