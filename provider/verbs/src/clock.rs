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
    // SAFETY: a writable timespec; both clocks always exist.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
