//! The program's thread that polls, as the card's thread sees it: does it not come because it spins or sleeps,
//! or because others have its CPU?
//!
//! Owns that question. It must not know what follows from the answer.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicI32, Ordering};

use starverbs_core::Nanos;

use crate::clock;

/// The thread that polls; 0 before the first that said so.
#[derive(Default)]
pub(crate) struct Poller(AtomicI32);

impl Poller {
    /// The calling thread polls.
    pub(crate) fn note(&self) {
        // SAFETY: it takes nothing and always succeeds.
        self.0.store(unsafe { libc::gettid() }, Ordering::Relaxed);
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
    /// Whether of the `time` since then it could not run for more than a half, and still cannot. One that
    /// sleeps, or whose state cannot be known, could.
    pub(crate) fn waits_for_a_cpu(&self, time: Nanos) -> bool {
        let ran = clock::cpu_time_of(self.thread).zip(self.cpu).map(|(now, then)| now.saturating_sub(then));
        ran.is_some_and(|ran| ran < time / 2) && is_runnable(self.thread)
    }
}

/// Whether the scheduler would run this thread, or does (proc(5), the state in `stat`). Nothing is allocated:
/// messages are under way.
fn is_runnable(thread: libc::pid_t) -> bool {
    let (mut path, mut stat) = ([0; 64], [0; 128]);
    let mut rest = &mut path[..];
    let written = write!(rest, "/proc/self/task/{thread}/stat").map(|()| 64 - rest.len());
    let read = written.and_then(|len| {
        File::open(OsStr::from_bytes(&path[..len])).and_then(|mut file| file.read(&mut stat))
    });
    let stat = read.map_or(&[][..], |len| &stat[..len]);
    /* the name before it may hold anything, parentheses, too */
    let name_ends = stat.windows(2).rposition(|two| two == b") ");
    name_ends.is_some_and(|at| stat.get(at + 2) == Some(&b'R'))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn one_that_sleeps_waits_for_no_cpu() {
        let poller = Poller::default();
        let (done, until) = channel::<()>();
        std::thread::scope(|scope| {
            let (noted, ready) = channel();
            let poller = &poller;
            scope.spawn(move || {
                poller.note();
                noted.send(()).unwrap();
                let _ = until.recv();
            });
            ready.recv().unwrap();
            let time = poller.begin();
            while is_runnable(time.thread) {
                std::thread::yield_now();
            }
            assert!(!time.waits_for_a_cpu(Nanos::MAX));
            drop(done);
        });
    }

    #[test]
    fn one_that_could_run_and_did_not_waits() {
        let poller = Poller::default();
        poller.note();
        let time = poller.begin();
        assert!(time.waits_for_a_cpu(Nanos::MAX), "it has run for less than that, and would");
        assert!(!time.waits_for_a_cpu(0));
    }

    #[test]
    fn one_that_is_not_there_waits_for_nothing() {
        let nobody = Poller::default().begin();
        assert_eq!(nobody.cpu, None);
        assert!(!nobody.waits_for_a_cpu(Nanos::MAX));
        let gone = PollerTime { thread: libc::pid_t::MAX, cpu: Some(0) };
        assert!(!gone.waits_for_a_cpu(Nanos::MAX));
    }
}
