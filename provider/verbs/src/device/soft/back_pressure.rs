//! Receive back-pressure: a message of UC or UD took the last receive of its queue, so that the next message
//! would be lost. Frames are held in the socket for a moment.
//!
//! A card drops such a message (IBTA 9.8.3). But this one takes frames in batches, and its thread while the
//! program does not run at all, so that a program that posts a receive for each completion would lose
//! messages because it was preempted. Senders of this implementation wait for the answer to their probe,
//! which is held, too.
//!
//! All frames are held, of all queue pairs. Where others wait for them, a hold lasts 100 us at most, whether
//! the program polls or not, and holds take a ninth of the time at most. Others are peers of reliable QPs
//! (ACKs are among the frames), and processes to which this one hands frames on. On a card with UC and UD
//! alone a hold lasts as long as a program may be without CPU.

use starverbs_core::Nanos;

use super::progress::LEFT;

/// Longest hold for a program that polls, and for any where others wait.
const POLLING: Nanos = 100_000;
/// Longest hold for a program that does not poll: it may be off the CPU.
const OFF_CPU: Nanos = 50_000_000;
/// After a hold that others waited for, or that brought no receive, there is none for so many times as long.
const COOL_DOWN: Nanos = 8;
/// This process hands frames on for others if there is one in each such time. While the kernel does not know
/// yet which process has which QPNs, some are handed on anyway.
const HANDS_ON: Nanos = 1_000_000;

/// Who asks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    /// The program, in a poll that has found nothing
    Program,
    /// The card's thread
    Thread,
}

/// The current hold, and when the next may begin.
#[derive(Default)]
pub(super) struct BackPressure {
    /// When the hold began
    since: Option<Nanos>,
    /// When a poll that found nothing first saw it
    polled: Option<Nanos>,
    /// Others wait for this hold. Determined as it begins: who comes later waits for `OFF_CPU` once
    others_wait: bool,
    /// No hold begins before
    not_before: Nanos,
    /// Frames that were handed on when a hold last began, and when that was
    handed_on: (u64, Nanos),
}

impl BackPressure {
    /// Whether a hold goes on.
    pub(super) fn is_held(&self) -> bool {
        self.since.is_some()
    }

    /// Whether frames are held. `others_wait` is asked when a hold begins.
    pub(super) fn holds(&mut self, now: Nanos, who: Who, others_wait: impl FnOnce() -> bool) -> bool {
        if self.since.is_none() {
            if now < self.not_before {
                return false;
            }
            *self = BackPressure { since: Some(now), polled: None, others_wait: others_wait(), ..*self };
        }
        let held = |since: Option<Nanos>| since.map_or(0, |since| now.saturating_sub(since));
        if who == Who::Program {
            self.polled = self.polled.or(Some(now));
        }
        match who {
            _ if self.others_wait => held(self.since) < POLLING,
            Who::Program => held(self.polled) < POLLING,
            Who::Thread => held(self.since) < OFF_CPU,
        }
    }

    /// Ends the hold, if there is one. `starved`: no receive was posted.
    pub(super) fn end(&mut self, now: Nanos, starved: bool) {
        let Some(since) = self.since.take() else { return };
        if self.others_wait || starved {
            /* nobody may have looked for long, with no frame that waited */
            let most = if self.others_wait { LEFT } else { OFF_CPU };
            self.not_before = now.saturating_add(COOL_DOWN * now.saturating_sub(since).min(most));
        }
    }

    /// Whether this process hands on so much that others wait, of `frames` in all by now.
    pub(super) fn hands_on(&mut self, now: Nanos, frames: u64) -> bool {
        let (before, then) = std::mem::replace(&mut self.handed_on, (frames, now));
        frames.saturating_sub(before).saturating_mul(HANDS_ON) > now.saturating_sub(then)
    }

    /// How long a hold still takes for which others wait.
    pub(super) fn left(&self, now: Nanos) -> Option<Nanos> {
        let since = self.since.filter(|_| self.others_wait)?;
        POLLING.checked_sub(now.saturating_sub(since)).filter(|left| *left > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Nanos = 1_000_000_000;

    fn holds(hold: &mut BackPressure, now: Nanos, who: Who, others_wait: bool) -> bool {
        let held = hold.holds(now, who, || others_wait);
        if !held {
            hold.end(now, true);
        }
        held
    }

    #[test]
    fn a_program_that_polls_has_a_moment() {
        for others_wait in [false, true] {
            let mut hold = BackPressure::default();
            assert!(holds(&mut hold, START, Who::Program, others_wait));
            assert!(holds(&mut hold, START + POLLING - 1, Who::Program, others_wait));
            assert!(!holds(&mut hold, START + POLLING, Who::Program, others_wait));
        }
    }

    #[test]
    fn a_program_without_cpu_has_longer_where_nobody_waits() {
        let mut hold = BackPressure::default();
        assert!(holds(&mut hold, START, Who::Thread, false));
        assert!(holds(&mut hold, START + OFF_CPU / 2, Who::Thread, false));
        assert_eq!(hold.left(START + OFF_CPU / 2), None, "nobody waits");
        /* it comes back, and has its moment from there */
        assert!(holds(&mut hold, START + OFF_CPU - 10, Who::Program, false));
        assert!(!holds(&mut hold, START + OFF_CPU, Who::Thread, false));
    }

    #[test]
    fn where_others_wait_the_thread_waits_no_longer_than_a_poll() {
        let mut hold = BackPressure::default();
        assert!(holds(&mut hold, START, Who::Thread, true));
        assert_eq!(hold.left(START + 1), Some(POLLING - 1));
        assert!(holds(&mut hold, START + POLLING - 1, Who::Program, true));
        assert_eq!(hold.left(START + POLLING), None);
        assert!(!holds(&mut hold, START + POLLING, Who::Program, true), "from when anybody saw it first");
    }

    /// A program that posts one receive again and again, each of which is used up at once, keeps the card for
    /// a ninth of the time.
    #[test]
    fn holds_that_others_wait_for_have_their_share() {
        const TURNS: u64 = 10_000;
        let (mut hold, mut held, step) = (BackPressure::default(), 0, 10_000);
        for turn in 0..TURNS {
            let now = START + turn * step;
            let holds = hold.holds(now, Who::Thread, || true);
            if !holds || turn % 7 == 0 {
                held += hold.since.map_or(0, |since| now - since);
                hold.end(now, !holds);
            }
        }
        let ninth = TURNS * step / (1 + COOL_DOWN);
        assert!((ninth / 2..=ninth + POLLING).contains(&held), "{held} ns of {}", TURNS * step);
    }

    #[test]
    fn a_hold_that_was_worth_it_is_followed_by_the_next_where_nobody_waits() {
        let mut hold = BackPressure::default();
        assert!(holds(&mut hold, START, Who::Thread, false));
        let posted = START + OFF_CPU / 2;
        hold.end(posted, false);
        assert!(holds(&mut hold, posted, Who::Thread, false));
        assert!(!holds(&mut hold, posted + OFF_CPU, Who::Thread, false), "no receive was posted");
        let cooled = posted + OFF_CPU + COOL_DOWN * OFF_CPU;
        assert!(!holds(&mut hold, cooled - 1, Who::Thread, false));
        assert!(holds(&mut hold, cooled, Who::Thread, false));
    }

    #[test]
    fn an_end_that_nobody_saw_for_long_is_no_long_hold() {
        let mut hold = BackPressure::default();
        assert!(holds(&mut hold, START, Who::Thread, true));
        let late = START + 1_000 * OFF_CPU;
        hold.end(late, false);
        assert!(!holds(&mut hold, late + COOL_DOWN * LEFT - 1, Who::Thread, true));
        assert!(holds(&mut hold, late + COOL_DOWN * LEFT, Who::Thread, true));
    }

    #[test]
    fn few_frames_handed_on_make_nobody_wait() {
        let mut hold = BackPressure::default();
        assert!(!hold.hands_on(START, 500), "while the kernel did not know");
        assert!(!hold.hands_on(START + 100 * HANDS_ON, 600), "one each millisecond");
        assert!(hold.hands_on(START + 200 * HANDS_ON, 701));
    }
}
