//! The progress thread: runs a device while the program is outside the library.
//!
//! Of the device it knows what to wait for, until when, and how to give it a turn. It has two modes.
//! - Armed: it sleeps in `poll(2)` on the device's descriptors until the next timer, and gives it a turn when
//!   something arrives. With nothing to do, and alone on the port, it sleeps for ever.
//! - Watching: the application polls, so that waking for its frames wastes CPU and contends for the lock.
//!   It looks once a tick whether the application still polls, and arms itself if not.
//!
//! It turns to watching after a number of spurious wake-ups, and that number grows each time the
//! watching delayed a frame of a program that spins on memory without calling the library (`poller.rs`): such
//! end up served by an armed thread. A program that calls all the time and was served nevertheless counts as
//! spurious, too: it was kept from its poll, most likely by this thread. So does one that posts and takes
//! completions without a break, and looks for frames only when it has taken all.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::sys::eventfd::EfdFlags;
use starverbs_core::Nanos;

use super::activity::Activity;
use super::posix_thread::Thread;
use crate::clock::{self, CpuTime};
use crate::error::Result;
use crate::events::{eventfd, signal};

const STOPPED: u8 = 0;
const ARMED: u8 = 1;
const WATCHING: u8 = 2;

/// How often a watching thread looks.
const TICK: Nanos = 1_000_000;
/// Spurious wake-ups before it watches: at first, and at most.
const SPURIOUS_MIN: u32 = 8;
const SPURIOUS_MAX: u32 = 16_384;
/// Ticks of watching without a delayed frame, after which fewer spurious wake-ups suffice again.
const CLEAN: u32 = 256;
/// An application that ran the card less than this ago is polling: it will do so again at once.
const JUST_POLLED: Nanos = 2_000;
/// Pause while the application is polling, doubled each time in a row up to a limit: one that polls once and
/// then spins on memory is served soon, one that keeps polling is left alone.
const NAP: Duration = Duration::from_micros(2);
const NAP_DOUBLINGS: u32 = 4;
/// In which a program that is in the library calls it again, and so often until it looks for completions.
const MOMENT: Duration = Duration::from_micros(20);
const MOMENTS: u32 = 10;
/// Calls after which that is looked at again, at most.
const ASKED_MAX: u32 = 4_096;
/// Before each try for the device's lock, microseconds.
const PAUSES: [u64; 5] = [0, 20, 40, 80, 160];
/// A program whose last poll is less than this ago serves itself on the wire.
const SOON: Nanos = 50_000;
/// Requests that follow the last ones so soon, wake-ups included, are waited for without a sleep. The wait
/// lasts so long, and all waits in a row so long: what comes by another way is to be looked at.
const FOLLOWS: Nanos = 100_000;
const WAIT: Nanos = 20_000;
const STAY: Nanos = 1_000_000;
/// Calls of the program in which it serves itself.
const CALLS: u32 = 16;
/// A yield that no program uses takes less, nearly always.
const YIELD: Nanos = 5_000;
/// Sleeps at once after one that a program used: at first, and at most.
const CROWDED_MIN: u32 = 2;
const CROWDED_MAX: u32 = 16_384;
/// Its stack.
const STACK: usize = 256 << 10;
/// The CPU slice that it asks of the scheduler: short, so that it preempts spinners when it wakes.
const SLICE: u64 = 100_000;
/// How much nicer than it the program's threads are.
const BEFORE: i32 = 5;

/// What a thread runs.
pub(crate) trait ThreadWork: Send + 'static {
    /// Its thread.
    fn thread(&self) -> &ProgressThread;

    /// What the program does in the library.
    fn activity(&self) -> &Activity;

    /// Lists what a sleeping thread waits for; gives when the device must work at the latest, `Nanos::MAX`
    /// for never. Not `armed`: the program runs the device, and the thread waits for nothing that the
    /// program's calls look at. `None`: another thread runs the device just now.
    fn wait_fds(&self, fds: &mut Vec<libc::pollfd>, armed: bool) -> Option<Nanos>;

    /// A turn of the thread, which one of these descriptors, or the time, has woken.
    fn turn(&self, woken: &[libc::pollfd]) -> TurnResult;

    /// Sleeps, so that the program may call meanwhile.
    fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }

    /// Takes what has come meanwhile, for a thread that does not sleep yet; says whether anything had.
    fn look(&self, _at: LooksAt) -> bool {
        false
    }
}

/// The thread, as the device sees it.
pub(crate) struct ProgressThread {
    wake: OwnedFd,
    mode: AtomicU8,
    /// Spurious wake-ups that make it watch
    limit: AtomicU32,
    stop: AtomicBool,
    handle: Mutex<Option<Thread>>,
}

/// What a turn of the device did.
#[derive(Clone, Copy, Default)]
pub(crate) struct TurnResult {
    /// Frames and timers handled; `None`: another thread runs the device
    pub(crate) work: Option<u32>,
    /// Until when frames wait for receives, and other frames behind them
    pub(crate) held_until: Option<Nanos>,
    /// Where more is likely to come
    pub(crate) looks_at: LooksAt,
}

/// What a thread looks at that stays awake for the next request.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum LooksAt {
    /// It sleeps
    #[default]
    Nothing,
    /// What comes through memory, from processes of this host
    Memory,
    /// All
    All,
}

impl ProgressThread {
    pub(crate) fn new() -> Result<Self> {
        Ok(ProgressThread {
            wake: eventfd(EfdFlags::EFD_NONBLOCK)?,
            mode: AtomicU8::new(STOPPED),
            limit: AtomicU32::new(SPURIOUS_MIN),
            stop: AtomicBool::new(false),
            handle: Mutex::new(None),
        })
    }

    /// Starts the thread of `device`, armed, with all signals blocked.
    pub(crate) fn start(&self, device: impl ThreadWork) -> Result<()> {
        self.stop.store(false, Ordering::Release);
        self.mode.store(ARMED, Ordering::SeqCst);
        let started = Thread::start(c"starverbs", STACK, Box::new(move || Worker::new(device).run()));
        match started {
            Ok(thread) => {
                *self.handle.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
                Ok(())
            }
            Err(error) => {
                self.mode.store(STOPPED, Ordering::SeqCst);
                Err(error)
            }
        }
    }

    /// Ends the thread and waits for it.
    pub(crate) fn stop(&self) {
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(handle) = handle else { return };
        self.stop.store(true, Ordering::Release);
        signal(&self.wake);
        if handle.is_caller() {
            handle.detach()
        } else {
            handle.join()
        }
        self.mode.store(STOPPED, Ordering::SeqCst);
    }

    /// Whether it only looks once a tick: the program must run the device itself.
    #[inline]
    fn is_watching(&self) -> bool {
        self.mode.load(Ordering::Relaxed) == WATCHING
    }

    /// The clock of the CPU time that it takes, if it runs.
    pub(crate) fn cpu_clock(&self) -> Option<libc::clockid_t> {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner).as_ref().and_then(Thread::cpu_clock)
    }

    /// Whether it sleeps until something comes or is due.
    #[inline]
    pub(crate) fn is_armed(&self) -> bool {
        self.mode.load(Ordering::Relaxed) == ARMED
    }

    /// Arms it.
    #[inline]
    pub(crate) fn arm(&self) {
        if self.mode.load(Ordering::SeqCst) == WATCHING {
            signal(&self.wake);
        }
    }

    /// The program has taken so much in a row by polls, for which others had to wake this thread: if that is
    /// enough, from now on it looks once a tick.
    #[cold]
    pub(crate) fn watch(&self, taken: u32) {
        if taken >= self.limit.load(Ordering::Relaxed)
            && self.mode.compare_exchange(ARMED, WATCHING, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        {
            signal(&self.wake);
        }
    }

    /// Has it look at the device's deadline, or at its descriptors, anew.
    #[cold]
    pub(crate) fn kick_if_armed(&self) {
        if self.mode.load(Ordering::SeqCst) == ARMED {
            signal(&self.wake);
        }
    }
}

/// Why a sleep ended.
#[derive(PartialEq, Eq)]
enum Woken {
    /// Somebody signalled
    Called,
    /// Something arrived
    Frames,
    /// The time was up
    Alarm,
}

struct Worker<D> {
    device: D,
    /// `poll(2)`'s list: the wake descriptor, then the device's
    polled: Vec<libc::pollfd>,
    /// Spurious wake-ups in a row
    spurious: u32,
    /// Ticks of watching since a frame was delayed
    clean: u32,
    /// When a turn last had something
    served_at: Nanos,
    /// The program's calls until then
    calls: u32,
    /// And until it was last looked at whether it takes completions; after how many more that is done again
    asked_at: u32,
    asked_after: u32,
    /// Times in a row that it did
    taking: u32,
    /// Its process has one CPU: who is to send the next request may wait for it
    shares_its_cpu: bool,
    /// When it was last looked whether others want it, and the CPU time taken until then
    looked: (Nanos, CpuTime),
    /// Sleeps at once until it is looked again whether others want it, and how many there were
    crowded: u32,
    crowded_for: u32,
}

impl<D: ThreadWork> Worker<D> {
    fn new(device: D) -> Self {
        let shares_its_cpu = std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() == 1);
        Worker {
            device,
            polled: Vec::with_capacity(16),
            spurious: 0,
            clean: 0,
            served_at: 0,
            calls: 0,
            asked_at: 0,
            asked_after: CALLS,
            taking: 0,
            shares_its_cpu,
            looked: Default::default(),
            crowded: 0,
            crowded_for: 0,
        }
    }

    fn run(mut self) {
        request_low_latency();
        while !self.device.thread().stop.load(Ordering::Acquire) {
            if self.device.thread().is_watching() { self.watch() } else { self.serve() }
        }
    }

    /// Armed: one sleep and what follows.
    fn serve(&mut self) {
        let Some(until) = self.list(true) else { return self.on_spurious_wakeup() };
        match self.sleep(until) {
            Woken::Frames => self.on_frames(),
            Woken::Alarm => {
                self.device.turn(&self.polled);
            }
            Woken::Called => {}
        }
    }

    /// Something arrived, which the program takes itself if it is polling.
    fn on_frames(&mut self) {
        let woken = clock::now();
        let since_poll = woken.saturating_sub(self.device.activity().polled_at());
        if since_poll < JUST_POLLED {
            return self.on_spurious_wakeup();
        }
        match self.device.turn(&self.polled) {
            TurnResult { held_until: Some(until), .. } => self.wait_for_receives(until),
            TurnResult { work: Some(0) | None, .. } => self.on_spurious_wakeup(),
            TurnResult { looks_at, .. } => self.after_work(looks_at, woken, since_poll),
        }
    }

    /// The turn had something. A program that polls all the time would have taken it: on the same CPU this
    /// thread comes before its next poll, each time. Else, where requests follow each other soon, it looks
    /// for the next ones before it sleeps.
    fn after_work(&mut self, looks_at: LooksAt, woken: Nanos, since_poll: Nanos) {
        let (begun, calls) = (clock::now(), self.device.activity().calls());
        let ago = woken.saturating_sub(std::mem::replace(&mut self.served_at, begun));
        let called = calls.wrapping_sub(std::mem::replace(&mut self.calls, calls));
        /* between two bursts of polls the wire's frames are this thread's */
        let polls = since_poll < if looks_at == LooksAt::Memory { TICK } else { SOON };
        let often = ago < TICK && !self.device.activity().may_sleep();
        if often && polls && called > CALLS {
            return self.count_spurious();
        }
        self.spurious = 0;
        if often && calls.wrapping_sub(self.asked_at) >= self.asked_after {
            return self.ask(calls);
        }
        /* who polls, if not just now, may want the CPU that a look at sockets takes */
        let looks = looks_at == LooksAt::Memory || looks_at == LooksAt::All && since_poll > TICK;
        if looks && ago < FOLLOWS && (!self.shares_its_cpu || self.is_alone()) {
            self.stay(begun, calls, looks_at);
        }
    }

    /// Looks whether the program, which had made so many calls, posts and takes completions without a break:
    /// that is as spurious, as it looks for frames once it has taken all that are there. Else it is looked at
    /// after more calls than before.
    fn ask(&mut self, mut calls: u32) {
        self.asked_at = calls;
        let activity = self.device.activity();
        let looks = activity.looks();
        for _ in 0..MOMENTS {
            self.device.pause(MOMENT);
            let before = std::mem::replace(&mut calls, activity.calls());
            if activity.looks() != looks || calls == before {
                break;
            }
        }
        if activity.looks() == looks || activity.may_sleep() {
            (self.taking, self.asked_after) = (0, (self.asked_after * 2).min(ASKED_MAX));
            return;
        }
        /* one that was served too late before, and takes completions in between, is asked seldom */
        let limit = self.limit();
        (self.taking, self.asked_after) = (self.taking + 1, (2 * limit).clamp(CALLS, ASKED_MAX));
        if self.taking >= limit {
            self.leave_it_to_polls();
        }
    }

    /// Looks for the next requests.
    fn stay(&mut self, begun: Nanos, calls: u32, looks_at: LooksAt) {
        loop {
            let now = clock::now();
            if self.device.look(looks_at) {
                self.served_at = now;
            }
            let called = self.device.activity().calls().wrapping_sub(calls);
            if now - self.served_at > WAIT || now - begun > STAY || called > CALLS {
                return;
            }
            /* no yield: on a busy CPU it is the last to run again, while one that sleeps is soon woken */
            std::hint::spin_loop();
        }
    }

    /// Whether nobody else wants the process's only CPU: neither the program, which would have run for most
    /// of the time since the last look, nor another one, which a yield would last for.
    fn is_alone(&mut self) -> bool {
        if self.crowded > 0 {
            self.crowded -= 1;
            return false;
        }
        let (before, cpu) = (clock::now(), CpuTime::now(None));
        let (looked, taken) = std::mem::replace(&mut self.looked, (before, cpu));
        std::thread::yield_now();
        let alone = cpu.since(&taken).others < before.saturating_sub(looked) / 2
            && clock::now().saturating_sub(before) < YIELD;
        self.crowded_for = if alone { 0 } else { (self.crowded_for * 2).clamp(CROWDED_MIN, CROWDED_MAX) };
        self.crowded = self.crowded_for;
        alone
    }

    /// Watching: one tick and what follows.
    fn watch(&mut self) {
        let calls = self.device.activity().calls();
        let poller = self.device.activity().poller.begin();
        self.list(false);
        let woken = self.sleep(clock::now() + TICK);
        if woken == Woken::Alarm && self.device.activity().calls() != calls {
            self.clean += 1;
            if self.clean >= CLEAN {
                self.clean = 0;
                self.set_limit(|limit| (limit / 2).max(SPURIOUS_MIN));
            }
            /* who posts, or polls what is there already, calls the device but does not run it */
            if clock::now().saturating_sub(self.device.activity().polled_at()) > TICK {
                self.device.turn(&self.polled);
            }
            return;
        }
        if woken == Woken::Alarm {
            self.device.activity().unread.leave();
        }
        self.device.thread().mode.store(ARMED, Ordering::SeqCst);
        self.spurious = 0;
        let late = self.device.turn(&self.polled).work.is_some_and(|work| work > 0);
        /* it spins on memory; one that sleeps, or that others keep from polling, would have been late, too */
        if late && woken == Woken::Alarm && poller.ran(TICK) {
            self.clean = 0;
            self.set_limit(|limit| (limit * 2).min(SPURIOUS_MAX));
        }
    }

    /// Lists what ends the sleep that follows; gives when it ends at the latest. `None`: another thread runs
    /// the device just now.
    fn list(&mut self, armed: bool) -> Option<Nanos> {
        self.polled.clear();
        self.polled.push(pollfd(self.device.thread().wake.as_raw_fd()));
        self.device.wait_fds(&mut self.polled, armed)
    }

    fn sleep(&mut self, until: Nanos) -> Woken {
        let wait;
        let timeout = if until == Nanos::MAX {
            ptr::null()
        } else {
            let left = until.saturating_sub(clock::now());
            wait = libc::timespec {
                tv_sec: (left / 1_000_000_000) as libc::time_t,
                tv_nsec: (left % 1_000_000_000) as libc::c_long,
            };
            &raw const wait
        };
        // SAFETY: the list and the timeout live across the call; no signal mask.
        let ready = unsafe {
            libc::ppoll(self.polled.as_mut_ptr(), self.polled.len() as libc::nfds_t, timeout, ptr::null())
        };
        if ready <= 0 {
            return Woken::Alarm;
        }
        if let Some(fd) = self.polled.first_mut().filter(|fd| fd.revents != 0) {
            /* the device, which has not this one, looks at all that it has */
            fd.revents = 0;
            drain(self.device.thread().wake.as_raw_fd());
            return Woken::Called;
        }
        Woken::Frames
    }

    /// Changed by this thread alone.
    fn set_limit(&self, to: impl FnOnce(u32) -> u32) {
        let limit = &self.device.thread().limit;
        limit.store(to(limit.load(Ordering::Relaxed)), Ordering::Relaxed);
    }

    /// Sleeps until frames are taken again, which are in the socket already.
    fn wait_for_receives(&mut self, until: Nanos) {
        self.list(false);
        if self.sleep(until) == Woken::Alarm {
            self.device.turn(&self.polled);
        }
    }

    /// The program runs the device just now.
    fn on_spurious_wakeup(&mut self) {
        self.count_spurious();
        if !self.device.thread().is_watching() {
            std::thread::sleep(NAP * (1 << self.spurious.min(NAP_DOUBLINGS)));
        }
    }

    fn count_spurious(&mut self) {
        self.spurious += 1;
        if self.spurious >= self.limit() {
            self.leave_it_to_polls();
        }
    }

    fn limit(&self) -> u32 {
        self.device.thread().limit.load(Ordering::Relaxed)
    }

    /// From now on it watches.
    fn leave_it_to_polls(&mut self) {
        (self.spurious, self.taking) = (0, 0);
        self.device.thread().mode.store(WATCHING, Ordering::SeqCst);
    }
}

/// A device's lock, for its thread, which may wait: whoever has it may need this CPU to give it back. `None`:
/// somebody had it each time.
pub(crate) fn lock_patiently<T>(try_lock: impl Fn() -> Option<T>) -> Option<T> {
    PAUSES.into_iter().find_map(|pause| {
        std::thread::sleep(Duration::from_micros(pause));
        try_lock()
    })
}

/// A descriptor to be waited for until it can be read.
pub(crate) fn pollfd(fd: RawFd) -> libc::pollfd {
    libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
}

/// Empties an eventfd that does not block.
pub(crate) fn drain(fd: RawFd) {
    let mut count = 0u64;
    // SAFETY: eight writable bytes.
    unsafe { libc::read(fd, (&raw mut count).cast(), 8) };
}

/// `struct sched_attr` of sched_setattr(2), its first version.
#[repr(C)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Requests low latency from the scheduler: short CPU slices, exact timers and, where the process may (root,
/// RLIMIT_NICE), precedence over the program's own spinning threads, which otherwise make peers wait
/// for milliseconds. What is refused costs latency only.
fn request_low_latency() {
    // SAFETY: calls about this thread with plain numbers; the structure lives across its calls and says
    // its size.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, 1);
        if libc::sched_getscheduler(0) != libc::SCHED_OTHER {
            return;
        }
        let nice = libc::getpriority(libc::PRIO_PROCESS, 0);
        for nice in [(nice - BEFORE).max(-20), nice] {
            let attr = SchedAttr {
                size: size_of::<SchedAttr>() as u32,
                policy: libc::SCHED_OTHER as u32,
                flags: 0,
                nice,
                priority: 0,
                runtime: SLICE,
                deadline: 0,
                period: 0,
            };
            if libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) == 0 {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests;
