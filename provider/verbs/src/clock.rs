//! The time that a card goes by.

use starverbs_core::Nanos;

/// CLOCK_MONOTONIC in nanoseconds.
#[inline]
pub(crate) fn now() -> Nanos {
    read(libc::CLOCK_MONOTONIC)
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
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
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
