//! The time that a card goes by.

use starverbs_core::Nanos;

/// Of a CPU clock's number: what a thread was scheduled for (CPUCLOCK_PERTHREAD, CPUCLOCK_SCHED).
const THREAD_CPU: libc::clockid_t = 4 | 2;

/// CLOCK_MONOTONIC in nanoseconds.
#[inline]
pub(crate) fn now() -> Nanos {
    let now = read(libc::CLOCK_MONOTONIC);
    #[cfg(test)]
    let now = now + stalls::so_far();
    now
}

/// Moments at which a test's thread seems to have been left out by the scheduler.
#[cfg(test)]
pub(crate) mod stalls {
    use std::cell::RefCell;

    use starverbs_core::Nanos;
    use starverbs_core::rng::SplitMix64;

    struct Stalls {
        rng: SplitMix64,
        left: u32,
        /// How long each is, and all were that have been, ns
        each: Nanos,
        all: Nanos,
    }

    thread_local! {
        static STALLS: RefCell<Stalls> =
            RefCell::new(Stalls { rng: SplitMix64::new(0), left: 0, each: 0, all: 0 });
    }

    /// From now on this thread's clock is `each` later at some of the next looks, `count` times.
    pub(crate) fn begin(seed: u64, count: u32, each: Nanos) {
        STALLS.with_borrow_mut(|stalls| {
            let rng = SplitMix64::new(seed);
            *stalls = Stalls { rng, left: count, each, all: stalls.all };
        });
    }

    pub(super) fn so_far() -> Nanos {
        STALLS.with_borrow_mut(|stalls| {
            if stalls.left > 0 && stalls.rng.below(16) == 0 {
                stalls.left -= 1;
                stalls.all += stalls.each;
            }
            stalls.all
        })
    }
}

/// The clock of completions' stamps: nanoseconds, as the device's `hca_core_clock` says.
pub fn raw_clock() -> Nanos {
    now()
}

/// Nanoseconds since 1970 of a completion's stamp, by what the two clocks say now.
pub fn wallclock(stamp: Nanos) -> u64 {
    read(libc::CLOCK_REALTIME).wrapping_sub(now().wrapping_sub(stamp))
}

#[inline]
fn read(clock: libc::clockid_t) -> Nanos {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a writable timespec, which stays 0 if the clock is that of a thread that has ended.
    unsafe { libc::clock_gettime(clock, &mut time) };
    nanos(time)
}

#[inline]
fn nanos(time: libc::timespec) -> Nanos {
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// CPU time that a thread of this process has taken; `None` if there is none of this number.
pub(crate) fn cpu_time_of(thread: libc::pid_t) -> Option<Nanos> {
    if thread == 0 {
        return None;
    }
    /* clock_getres(2): a clock's number is the complement of the thread's, and what it counts */
    let clock = (!thread << 3) | THREAD_CPU;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a writable timespec; the kernel refuses numbers of no thread.
    let failed = unsafe { libc::clock_gettime(clock, &mut time) };
    (failed == 0).then_some(nanos(time))
}

/// CPU time that a process has taken, as its thread that polls sees it.
#[derive(Clone, Copy, Default)]
pub(crate) struct CpuTime {
    poller: Option<libc::pthread_t>,
    own: Nanos,
    others: Nanos,
}

/// CPU time between two looks.
pub(crate) struct CpuInterval {
    /// Of the thread that polls
    pub(crate) poller: Nanos,
    /// Of others
    pub(crate) others: Nanos,
}

impl CpuTime {
    /// Until now, for the calling thread. The thread with the CPU clock `aside` is none of the others.
    pub(crate) fn now(aside: Option<libc::clockid_t>) -> CpuTime {
        let own = read(libc::CLOCK_THREAD_CPUTIME_ID);
        let aside = aside.map_or(0, read);
        let all = read(libc::CLOCK_PROCESS_CPUTIME_ID);
        // SAFETY: it takes nothing and always succeeds.
        let poller = Some(unsafe { libc::pthread_self() });
        CpuTime { poller, own, others: all.saturating_sub(own + aside) }
    }

    #[cfg(test)]
    pub(crate) fn of(poller: libc::pthread_t, own: Nanos, others: Nanos) -> CpuTime {
        CpuTime { poller: Some(poller), own, others }
    }

    /// What was taken since `before`. If another thread polled then, it is others that run.
    pub(crate) fn since(&self, before: &CpuTime) -> CpuInterval {
        if before.poller.is_some_and(|poller| self.poller != Some(poller)) {
            return CpuInterval { poller: 0, others: Nanos::MAX };
        }
        let poller = self.own.saturating_sub(before.own);
        CpuInterval { poller, others: self.others.saturating_sub(before.others) }
    }
}
