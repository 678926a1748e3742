//! Frames wait for receives: a message of UC or UD took the last one of its queue, so that the next message
//! would be lost.
//!
//! A card drops it (IBTA 9.8.3). But this one takes frames in batches, and its thread while the program does
//! not run at all, so that a program that posts a receive for each completion would lose messages for having
//! been interrupted. They stay in the socket for a moment instead. Senders of this make wait for the answer
//! to their probe, which stays behind them.
//!
//! All frames wait, whoever they are for. So where others wait for them, the moment is 100 us for a program
//! that polls and for one that does not, and a ninth of the time at most: peers of reliable QPs (ACKs are
//! among the frames), and processes to which this one hands frames on. On a card that has UC and UD alone it
//! is as long as a program may be without CPU.

use starverbs_core::Nanos;

use super::progress::LEFT;

/// How long a program that polls has for posting what it takes, and any where others wait.
const POLLING: Nanos = 100_000;
/// How long a program has that does not poll: it may not run, for having used up its slices of the CPU.
const AWAY: Nanos = 50_000_000;
/// After a hold that others waited for, or that was in vain, there is none for this many times as long.
const REST: Nanos = 8;
/// This process hands frames on in earnest if there is one in each such time. A few are handed on while the
/// kernel does not know yet which process has which QPNs, as when one begins.
const HANDS_ON: Nanos = 1_000_000;

/// Who asks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    /// The program, in a poll that has found nothing
    Program,
    /// The card's thread
    Thread,
}

/// The queue that is out of receives, and what such queues have cost.
#[derive(Default)]
pub(super) struct RunOut {
    /// When a hold began, as anybody saw it first
    since: Option<Nanos>,
    /// The same as a poll saw it that found nothing
    polled: Option<Nanos>,
    /// Others wait for this hold. Looked at as it begins: whoever comes later waits for `AWAY` once
    pressed: bool,
    /// No hold begins before
    rests_until: Nanos,
    /// Frames that were handed on when a hold last began, and when that was
    handed_on: (u64, Nanos),
}

impl RunOut {
    /// Whether a hold goes on.
    pub(super) fn is_held(&self) -> bool {
        self.since.is_some()
    }

    /// Whether frames wait. `pressed` says whether others wait for that; it is asked when a hold begins.
    pub(super) fn holds(&mut self, now: Nanos, who: Who, pressed: impl FnOnce() -> bool) -> bool {
        if self.since.is_none() {
            if now < self.rests_until {
                return false;
            }
            *self = RunOut { since: Some(now), polled: None, pressed: pressed(), ..*self };
        }
        let held = |since: Option<Nanos>| since.map_or(0, |since| now.saturating_sub(since));
        if who == Who::Program {
            self.polled = self.polled.or(Some(now));
        }
        match who {
            _ if self.pressed => held(self.since) < POLLING,
            Who::Program => held(self.polled) < POLLING,
            Who::Thread => held(self.since) < AWAY,
        }
    }

    /// A hold, if there is one, is over: a receive was posted, or it was in vain.
    pub(super) fn end(&mut self, now: Nanos, nobody_called: bool) {
        let Some(since) = self.since.take() else { return };
        if self.pressed || nobody_called {
            /* nobody may have looked for long, with no frame that waited */
            let most = if self.pressed { LEFT } else { AWAY };
            self.rests_until = now.saturating_add(REST * now.saturating_sub(since).min(most));
        }
    }

    /// Whether this process hands on so much that others wait, of `frames` in all by now.
    pub(super) fn hands_on(&mut self, now: Nanos, frames: u64) -> bool {
        let (before, then) = std::mem::replace(&mut self.handed_on, (frames, now));
        frames.saturating_sub(before).saturating_mul(HANDS_ON) > now.saturating_sub(then)
    }

    /// How long a hold still takes for which others wait.
    pub(super) fn left(&self, now: Nanos) -> Option<Nanos> {
        let since = self.since.filter(|_| self.pressed)?;
        POLLING.checked_sub(now.saturating_sub(since)).filter(|left| *left > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Nanos = 1_000_000_000;

    fn holds(out: &mut RunOut, now: Nanos, who: Who, pressed: bool) -> bool {
        let held = out.holds(now, who, || pressed);
        if !held {
            out.end(now, true);
        }
        held
    }

    #[test]
    fn a_program_that_polls_has_a_moment() {
        for pressed in [false, true] {
            let mut out = RunOut::default();
            assert!(holds(&mut out, START, Who::Program, pressed));
            assert!(holds(&mut out, START + POLLING - 1, Who::Program, pressed));
            assert!(!holds(&mut out, START + POLLING, Who::Program, pressed));
        }
    }

    #[test]
    fn a_program_without_cpu_has_longer_where_nobody_waits() {
        let mut out = RunOut::default();
        assert!(holds(&mut out, START, Who::Thread, false));
        assert!(holds(&mut out, START + AWAY / 2, Who::Thread, false));
        assert_eq!(out.left(START + AWAY / 2), None, "nobody waits");
        /* it comes back, and has its moment from there */
        assert!(holds(&mut out, START + AWAY - 10, Who::Program, false));
        assert!(!holds(&mut out, START + AWAY, Who::Thread, false));
    }

    #[test]
    fn where_others_wait_the_thread_waits_no_longer_than_a_poll() {
        let mut out = RunOut::default();
        assert!(holds(&mut out, START, Who::Thread, true));
        assert_eq!(out.left(START + 1), Some(POLLING - 1));
        assert!(holds(&mut out, START + POLLING - 1, Who::Program, true));
        assert_eq!(out.left(START + POLLING), None);
        assert!(!holds(&mut out, START + POLLING, Who::Program, true), "from when anybody saw it first");
    }

    /// A program that posts one receive again and again, each of which is used up at once, keeps the card for
    /// a ninth of the time.
    #[test]
    fn holds_that_others_wait_for_have_their_share() {
        const TURNS: u64 = 10_000;
        let (mut out, mut held, step) = (RunOut::default(), 0, 10_000);
        for turn in 0..TURNS {
            let now = START + turn * step;
            let holds = out.holds(now, Who::Thread, || true);
            if !holds || turn % 7 == 0 {
                held += out.since.map_or(0, |since| now - since);
                out.end(now, !holds);
            }
        }
        let ninth = TURNS * step / (1 + REST);
        assert!((ninth / 2..=ninth + POLLING).contains(&held), "{held} ns of {}", TURNS * step);
    }

    #[test]
    fn a_hold_that_was_worth_it_is_followed_by_the_next_where_nobody_waits() {
        let mut out = RunOut::default();
        assert!(holds(&mut out, START, Who::Thread, false));
        let posted = START + AWAY / 2;
        out.end(posted, false);
        assert!(holds(&mut out, posted, Who::Thread, false));
        assert!(!holds(&mut out, posted + AWAY, Who::Thread, false), "in vain");
        let rested = posted + AWAY + REST * AWAY;
        assert!(!holds(&mut out, rested - 1, Who::Thread, false));
        assert!(holds(&mut out, rested, Who::Thread, false));
    }

    #[test]
    fn an_end_that_nobody_saw_for_long_is_no_long_hold() {
        let mut out = RunOut::default();
        assert!(holds(&mut out, START, Who::Thread, true));
        let late = START + 1_000 * AWAY;
        out.end(late, false);
        assert!(!holds(&mut out, late + REST * LEFT - 1, Who::Thread, true));
        assert!(holds(&mut out, late + REST * LEFT, Who::Thread, true));
    }

    #[test]
    fn few_frames_handed_on_make_nobody_wait() {
        let mut out = RunOut::default();
        assert!(!out.hands_on(START, 500), "while the kernel did not know");
        assert!(!out.hands_on(START + 100 * HANDS_ON, 600), "one each millisecond");
        assert!(out.hands_on(START + 200 * HANDS_ON, 701));
    }
}
