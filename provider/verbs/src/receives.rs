//! Frames wait for receives: a message of UC or UD took the last one of its queue, so that the next message would be lost.
//!
//! A card drops it (IBTA 9.8.3). But this one takes frames in batches, and its thread while the program does not run at all, so that
//! a program that posts a receive for each completion would lose messages for having been interrupted. They stay in the
//! socket for a moment instead; senders of this make wait for the answer to their probe, which stays behind them. All frames wait,
//! those of RC among them, so the moment is short, and there is one for each time that a queue runs out.

use starverbs_core::Nanos;

use crate::card::Shard;

/// How long a program that polls has for posting what it takes.
const POLLING: Nanos = 100_000;
/// How long it has when it does not poll: it may not run, for having used up its slices of the CPU.
const AWAY: Nanos = 10_000_000;
/// The same where the card has no reliable QP, whose peers would wait for their ACKs.
const AWAY_ALONE: Nanos = 50_000_000;

/// Who asks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Who {
    /// The program, in a poll that has found nothing
    Program,
    /// The card's thread
    Thread,
}

/// Since when the queue is out of receives; 0: not seen yet.
#[derive(Default)]
pub(crate) struct RunOut {
    /// As anybody saw it
    since: Nanos,
    /// As a poll saw it that found nothing
    polled: Nanos,
}

impl Shard {
    /// Whether frames should wait for the receives that [`starverbs_core::Nic::ran_out`] misses.
    #[cold]
    pub(crate) fn waits_for_receives(&mut self, now: Nanos, who: Who) -> bool {
        if self.nic.still_out() {
            let RunOut { since, polled } = &mut self.out;
            let see = |first: &mut Nanos| {
                *first = if *first == 0 { now } else { *first };
                now.saturating_sub(*first)
            };
            let patient = match who {
                Who::Program => see(polled) < POLLING,
                Who::Thread => {
                    let away = see(since);
                    away < AWAY || away < AWAY_ALONE && !self.nic.has_reliable()
                }
            };
            if patient {
                return true;
            }
            self.nic.go_without();
        }
        self.out = RunOut::default();
        false
    }
}
