//! What a poll does that has found nothing for a while.
//!
//! With more spinners than CPUs the peer may be among those that wait for this CPU, so the poll yields it.
//! But its caller may hold a lock: whoever spins on that lock then gets the CPU just when it must wait, each
//! time. The library sees neither lock nor waiter, which never gets as far as a call. It sees whether other
//! threads of the program take CPU time, and whether one of them calls during a yield. Those that run and do
//! not call may wait for the caller: no poll yields then, and the scheduler preempts it wherever it is. So
//! that this is outside of the lock sometimes, polls leave the card alone for moments and are short.
//!
//! Who yields after each poll gets next to nothing beside a thread that takes all it is given, and its peers
//! would give it up: of a wait for which yields bring nothing, a part is without.
//!
//! Owns that decision (docs/decisions/0012-idle-polls.md). It must not know what the card does.

use std::sync::atomic::{AtomicBool, Ordering};

use starverbs_core::Nanos;

use crate::clock::CpuTime;

/// After so long without a frame a poll is idle. Longer than a round trip on one host, so that two that have
/// a CPU each never get there.
pub(crate) const IDLE: Nanos = 20_000;
/// Between two looks at the CPU time: the kernel counts what runs on other CPUs by ticks, of up to 10 ms.
const LOOK: Nanos = 10_000_000;
/// Others run if they take more than this fraction of what the poller takes.
const FRACTION: Nanos = 4;
/// While others run, no poll yields between one look of so many and the next: of three threads two may call
/// and the third wait.
const LOOKS: u32 = 8;
/// Polls that do not yield leave the card alone for this fraction of the time since the last frame, at most
/// for so long.
const BACK_OFF: Nanos = 16;
const LONGEST_BACK_OFF: Nanos = 8_000;

/// Behind so much time given to others for nothing, no poll yields for a fraction of that.
const GIVEN: Nanos = 8_000_000;
const KEPT: Nanos = 8;

/// The polls since the last frame.
#[derive(Default)]
pub(crate) struct Idle {
    since: Nanos,
    looked: Nanos,
    looks: u32,
    time: CpuTime,
    others_run: bool,
    yields: bool,
    /// When the last poll yielded, if it did
    yielded: Option<Nanos>,
    /// What others had by yields since the last frame, or since polls last kept the CPU
    given: Nanos,
    /// No poll yields before
    keeps_until: Nanos,
}

/// What follows a poll.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Then {
    /// It yields the CPU
    Yield,
    /// The next ones leave the card alone for so many nanoseconds
    BackOff(u32),
}

impl Idle {
    /// A poll at `now` received something.
    #[inline]
    pub(crate) fn restart(&mut self, now: Nanos) {
        self.since = now;
        (self.yielded, self.given) = (None, 0);
    }

    /// A poll at `now` comes after a pause.
    #[inline]
    pub(crate) fn resume(&mut self, now: Nanos) {
        self.since = now;
    }

    /// When polls were last not idle.
    #[cfg(test)]
    pub(crate) fn since(&self) -> Nanos {
        self.since
    }

    /// What follows a poll at `now`. `nobody_called` says whether no other thread called during the last
    /// yield; `time` is asked for the CPU time taken until now.
    #[inline]
    pub(crate) fn after(
        &mut self,
        now: Nanos,
        nobody_called: &AtomicBool,
        time: impl FnOnce() -> CpuTime,
    ) -> Then {
        if let Some(yielded) = self.yielded.take() {
            self.given += now.saturating_sub(yielded);
        }
        let idle = now.saturating_sub(self.since);
        if idle <= IDLE {
            return Then::BackOff(0);
        }
        if self.given > GIVEN {
            self.keeps_until = now + self.given / KEPT;
            self.given = 0;
        }
        if now.saturating_sub(self.looked) >= LOOK {
            self.look(now, time());
            nobody_called.store(false, Ordering::Relaxed);
        } else if self.others_run && nobody_called.load(Ordering::Relaxed) {
            self.yields = false;
        }
        match self.yields {
            true if now < self.keeps_until => Then::BackOff(0),
            true => {
                self.yielded = Some(now);
                Then::Yield
            }
            false => Then::BackOff((idle / BACK_OFF).min(LONGEST_BACK_OFF) as u32),
        }
    }

    #[cold]
    fn look(&mut self, now: Nanos, time: CpuTime) {
        let taken = time.since(&self.time);
        self.looks = self.looks.wrapping_add(1);
        self.others_run = taken.others > taken.poller / FRACTION;
        self.yields = !self.others_run || !self.looks.is_multiple_of(LOOKS);
        (self.looked, self.time) = (now, time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Between two polls
    const STEP: Nanos = 1_000;

    /// A program whose polls find nothing.
    #[derive(Default)]
    struct IdleProgram {
        idle: Idle,
        nobody_called: AtomicBool,
        now: Nanos,
        /// CPU time of the poller
        own_time: Nanos,
        /// CPU time of others
        others_time: Nanos,
        /// Others take so much in the time in which the poller takes 16.
        others: Nanos,
    }

    impl IdleProgram {
        fn with(others: Nanos) -> IdleProgram {
            IdleProgram { now: 1 << 40, others, ..IdleProgram::default() }
        }

        fn poll_by(&mut self, poller: libc::pthread_t) -> Then {
            self.now += STEP;
            self.own_time += STEP;
            self.others_time += STEP * self.others / 16;
            let time = || CpuTime::of(poller, self.own_time, self.others_time);
            self.idle.after(self.now, &self.nobody_called, time)
        }

        fn poll(&mut self) -> Then {
            self.poll_by(1)
        }

        /// Of the next polls, how many yield. `called`: others call meanwhile.
        fn yields(&mut self, polls: u64, called: bool) -> u64 {
            let mut yields = 0;
            for _ in 0..polls {
                if self.poll() == Then::Yield {
                    yields += 1;
                    self.nobody_called.store(!called, Ordering::Relaxed);
                }
            }
            yields
        }
    }

    #[test]
    fn a_program_alone_yields_once_it_is_idle() {
        let mut program = IdleProgram::with(2);
        program.idle.restart(program.now);
        assert_eq!(program.yields(IDLE / STEP, false), 0);
        assert_eq!(program.yields(GIVEN / STEP, false), GIVEN / STEP);
        program.idle.restart(program.now);
        assert_eq!(program.poll(), Then::BackOff(0), "what came last may have a successor");
    }

    #[test]
    fn polls_back_off_for_a_waiter_that_spins() {
        let mut program = IdleProgram::with(16);
        let looks = 80;
        let yields = program.yields(looks * LOOK / STEP, false);
        assert_eq!(yields, looks - looks / u64::from(LOOKS), "one to see whether somebody calls");
        program.yields(1, false);
        assert_eq!(program.poll(), Then::BackOff(LONGEST_BACK_OFF as u32));
        program.idle.restart(program.now);
        for polls in 1..=IDLE / STEP {
            assert_eq!(program.poll(), Then::BackOff(0), "{polls}");
        }
        let back_off = (IDLE + STEP) / BACK_OFF;
        assert_eq!(program.poll(), Then::BackOff(back_off as u32), "a fraction of the wait");
    }

    #[test]
    fn others_that_call_get_the_cpu_most_of_the_time() {
        let mut program = IdleProgram::with(16);
        let (looks, each) = (10 * u64::from(LOOKS), LOOK / STEP);
        let most = looks * each / 8 * 7;
        let yields = program.yields(looks * each, true);
        assert!((most / 9 * 7..=most).contains(&yields), "{yields} of {most}");
    }

    /// Beside a thread that takes all that it is given, and one that answers.
    #[test]
    fn a_part_of_a_wait_that_yields_do_not_end_is_without() {
        let mut program = IdleProgram::with(0);
        let wait = 9 * GIVEN / STEP;
        let yields = program.yields(wait, false);
        assert!((wait / 9 * 7..wait / 9 * 8 + GIVEN / STEP).contains(&yields), "{yields} of {wait}");
        program.idle.restart(program.now);
        for _ in 0..wait {
            program.yields(IDLE / STEP + 2, false);
            assert_eq!(program.poll(), Then::Yield, "what came ends the wait");
            program.idle.restart(program.now);
        }
    }

    #[test]
    fn two_that_poll_are_others_to_each_other() {
        let mut program = IdleProgram::with(0);
        program.yields(LOOK / STEP, false);
        for _ in 0..LOOK / STEP {
            program.poll_by(2);
        }
        assert!(program.idle.others_run);
        program.yields(2 * LOOK / STEP, false);
        program.yields(2 * LOOK / STEP, false);
        assert!(!program.idle.others_run, "the other polls no more");
    }
}
