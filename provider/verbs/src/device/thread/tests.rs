//! The thread beside programs that poll, that spin on memory, and that hold the device.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::*;

/// Turns of the thread after which a test looks.
const TURNS: u64 = 2_000;

/// What the program does between two frames.
enum Program {
    /// It polls and polls.
    Polls,
    /// It polls a few times and spins on memory from then on.
    Spins,
    /// It posts and takes completions all the time, and seldom looks for frames.
    Completes,
    /// It posts all the time.
    Posts,
    /// It polled a lot, some time ago.
    PolledBefore,
    /// It has the device whenever the thread looks.
    HoldsTheDevice,
    /// It has asked for an event, and polls meanwhile.
    AwaitsEvent,
    /// It calls nothing.
    Sleeps,
}

/// A device to which frames come without end.
struct Busy {
    thread: ProgressThread,
    activity: Activity,
    frames: OwnedFd,
    program: Program,
    turns: AtomicU64,
    looks_at: LooksAt,
    looks: AtomicU64,
}

impl Busy {
    fn new(program: Program, looks_at: LooksAt) -> Arc<Busy> {
        let frames = eventfd(EfdFlags::EFD_NONBLOCK).unwrap();
        signal(&frames);
        Arc::new(Busy {
            thread: ProgressThread::new().unwrap(),
            activity: Activity::default(),
            frames,
            program,
            turns: AtomicU64::new(0),
            looks_at,
            looks: AtomicU64::new(0),
        })
    }
}

impl ThreadWork for Arc<Busy> {
    fn thread(&self) -> &ProgressThread {
        &self.thread
    }
    fn activity(&self) -> &Activity {
        &self.activity
    }
    fn wait_fds(&self, fds: &mut Vec<libc::pollfd>, armed: bool) -> Option<Nanos> {
        if !armed {
            return Some(Nanos::MAX);
        }
        fds.push(pollfd(self.frames.as_raw_fd()));
        match self.program {
            Program::HoldsTheDevice => return None,
            Program::Sleeps => return Some(Nanos::MAX),
            Program::Spins => (0..CALLS / 4).for_each(|_| self.activity.note_call()),
            _ => (0..2 * CALLS).for_each(|_| self.activity.note_call()),
        }
        /* when it last polled: too long ago for a program that is in a poll just now */
        let long = matches!(self.program, Program::Completes | Program::Posts | Program::PolledBefore);
        let ago = if long { 2 * SOON } else { JUST_POLLED };
        self.activity.note_poll(clock::now().saturating_sub(ago));
        Some(Nanos::MAX)
    }
    fn turn(&self, _: &[libc::pollfd]) -> TurnResult {
        self.turns.fetch_add(1, Ordering::Relaxed);
        TurnResult { work: Some(1), looks_at: self.looks_at, ..TurnResult::default() }
    }
    fn pause(&self, _: Duration) {
        match self.program {
            Program::Completes => self.activity.note_look(),
            Program::Posts => self.activity.note_call(),
            _ => {}
        }
    }
    fn look(&self, at: LooksAt) -> bool {
        assert!(at == self.looks_at);
        self.looks.fetch_add(1, Ordering::Relaxed);
        false
    }
}

/// Runs the thread until it watches, or has had `TURNS` turns; says whether it watches.
fn comes_to_watch(program: Program) -> bool {
    let busy = Busy::new(program, LooksAt::Nothing);
    if matches!(busy.program, Program::AwaitsEvent) {
        busy.activity.awaits_event();
    }
    busy.thread.start(Arc::clone(&busy)).unwrap();
    let watches = loop {
        if busy.thread.is_watching() {
            break true;
        }
        if busy.turns.load(Ordering::Relaxed) >= TURNS {
            break false;
        }
        std::thread::yield_now();
    };
    busy.thread.stop();
    watches
}

#[test]
fn a_program_that_polls_is_left_alone() {
    assert!(comes_to_watch(Program::Polls));
}

#[test]
fn one_that_spins_on_memory_is_served() {
    assert!(!comes_to_watch(Program::Spins));
}

#[test]
fn one_that_completes_without_a_break_is_left_alone() {
    assert!(comes_to_watch(Program::Completes));
}

#[test]
fn one_that_polled_before_or_posts_alone_is_served() {
    assert!(!comes_to_watch(Program::PolledBefore));
    assert!(!comes_to_watch(Program::Posts));
}

#[test]
fn one_that_may_sleep_is_served() {
    assert!(!comes_to_watch(Program::AwaitsEvent));
}

#[test]
fn who_has_the_device_is_not_waited_for() {
    assert!(comes_to_watch(Program::HoldsTheDevice));
}

/// Whether a thread with a CPU of its own looks for the next request of a program that sleeps.
fn looks(at: LooksAt) -> bool {
    let busy = Busy::new(Program::Sleeps, at);
    let mut worker = Worker::new(Arc::clone(&busy));
    worker.shares_its_cpu = false;
    while busy.looks.load(Ordering::Relaxed) == 0 && busy.turns.load(Ordering::Relaxed) < TURNS {
        worker.serve();
    }
    busy.looks.load(Ordering::Relaxed) > 0
}

#[test]
fn requests_that_follow_are_looked_for_where_there_is_something_to_look_at() {
    assert!(looks(LooksAt::All) && looks(LooksAt::Memory));
    assert!(!looks(LooksAt::Nothing));
}
