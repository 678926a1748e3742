//! The program's thread that polls, as the card's thread sees it: does it not come because it spins on
//! memory, or because it sleeps, or others have its CPU?
//!
//! Owns that question. It must not know what follows from the answer.

use std::cell::Cell;
use std::sync::atomic::{AtomicI32, Ordering};

use starverbs_core::Nanos;

use crate::{clock, process};

thread_local! {
    /// This thread's number, and how often its process had been forked when it was asked for: the kernel is
    /// asked once
    static NUMBER: Cell<(u32, libc::pid_t)> = const { Cell::new((0, 0)) };
}

/// The calling thread's number.
pub(super) fn number() -> libc::pid_t {
    let (forks, number) = NUMBER.get();
    if number != 0 && forks == process::forks() {
        return number;
    }
    // SAFETY: it takes nothing and always succeeds.
    let number = unsafe { libc::gettid() };
    NUMBER.set((process::forks(), number));
    number
}

/// The thread that polls; 0 before the first that said so.
#[derive(Default)]
pub(crate) struct Poller(AtomicI32);

impl Poller {
    /// The calling thread polls.
    pub(crate) fn note(&self) {
        self.0.store(number(), Ordering::Relaxed);
    }

    /// Begins a time in which it is looked at.
    pub(crate) fn begin(&self) -> PollerTime {
        let thread = self.0.load(Ordering::Relaxed);
        PollerTime { thread, cpu: clock::cpu_time_of(thread) }
    }
}

/// The CPU time that the poller had taken at some moment.
pub(crate) struct PollerTime {
    thread: libc::pid_t,
    /// `None`: there is no such thread
    cpu: Option<Nanos>,
}

impl PollerTime {
    /// Whether it ran for more than half of the `time` since then.
    pub(crate) fn ran(&self, time: Nanos) -> bool {
        let ran = clock::cpu_time_of(self.thread).zip(self.cpu).map(|(now, then)| now.saturating_sub(then));
        ran.is_some_and(|ran| ran > time / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_runs_or_it_does_not() {
        let poller = Poller::default();
        poller.note();
        let time = poller.begin();
        assert!(!time.ran(Nanos::MAX));
        while !time.ran(1000) {}
    }

    #[test]
    fn one_that_is_not_there_does_not_run() {
        let nobody = Poller::default().begin();
        assert_eq!(nobody.cpu, None);
        assert!(!nobody.ran(0));
        let gone = Poller::default();
        std::thread::scope(|scope| {
            scope.spawn(|| gone.note());
        });
        while gone.begin().cpu.is_some() {
            std::thread::yield_now();
        }
        assert!(!gone.begin().ran(0));
    }
}
