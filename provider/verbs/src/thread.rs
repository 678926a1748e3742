//! The progress thread: serves peers while the program is outside the library.
//!
//! It decides by itself in which of two modes it is.
//! - Armed: it sleeps in `poll(2)` on the port's descriptors until the next timer, and runs the card when
//!   something arrives. With nothing to do, and alone on the port, it sleeps for ever.
//! - Watching: the program polls, so that waking for its frames is a waste and a quarrel over CPU and
//!   lock. It looks once a tick whether the program still does, and arms itself if not.
//!
//! It turns to watching after a number of wake-ups in vain, and that number grows each time the
//! watching made somebody wait: programs that spin on memory without calling the library end up
//! served by an armed thread.

use std::cell::Cell;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use starverbs_core::Nanos;

use crate::card::{Card, Shard};
use crate::clock;
use crate::error::Result;
use crate::events::{eventfd, signal};
use crate::posix_thread::Thread;
use crate::progress::LEFT;
use crate::receives::Who;

const STOPPED: u8 = 0;
const ARMED: u8 = 1;
const WATCHING: u8 = 2;

/// How often a watching thread looks.
const TICK: Nanos = 1_000_000;
/// Wake-ups in vain before it watches: at first, and at most.
const FEW: u32 = 8;
const MANY: u32 = 1024;
/// Ticks of watching that made nobody wait, after which it needs fewer wake-ups again.
const CLEAN: u32 = 256;
/// A program that ran the card less than this ago is taken to do so again at once.
const JUST_POLLED: Nanos = 2_000;
/// Pause when the program is at it, doubled each time in a row up to a limit: a program that polls
/// once and then spins on memory is served soon, one that polls on and on is left alone.
const NAP: Duration = Duration::from_micros(2);
const NAP_DOUBLINGS: u32 = 4;
/// Longest pause before another try for the lock.
const LONGEST: Duration = Duration::from_micros(200);
/// How long an ACK waits for the program that left it.
const ACK_LEFT: Nanos = 50_000;
/// Datagram batches in one hold of the lock.
const BATCHES: u32 = 4;
/// The CPU slice that it asks of the scheduler: short, so that it preempts spinners when it wakes.
const SLICE: u64 = 100_000;
/// How much nicer than it the program's threads are.
const BEFORE: i32 = 5;

/// The thread, as the rest of the library sees it.
pub(crate) struct Progress {
    wake: OwnedFd,
    mode: AtomicU8,
    stop: AtomicBool,
    handle: Mutex<Option<Thread>>,
}

impl Progress {
    pub(crate) fn new() -> Result<Self> {
        Ok(Progress {
            wake: eventfd(libc::EFD_NONBLOCK)?,
            mode: AtomicU8::new(STOPPED),
            stop: AtomicBool::new(false),
            handle: Mutex::new(None),
        })
    }

    /// Starts the thread, armed, with all signals blocked.
    pub(crate) fn start(&self, card: &Arc<Card>) -> Result<()> {
        self.stop.store(false, Ordering::Release);
        self.mode.store(ARMED, Ordering::SeqCst);
        let card = Arc::clone(card);
        let started = Thread::start(c"starverbs", Box::new(move || Worker::new(card).run()));
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

    /// Whether it only looks now and then: the program must run the card itself.
    #[inline]
    pub(crate) fn is_watching(&self) -> bool {
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

    /// Has it serve from now on.
    #[inline]
    pub(crate) fn arm(&self) {
        if self.mode.load(Ordering::SeqCst) == WATCHING {
            signal(&self.wake);
        }
    }

    /// Has it look at its alarm, or at the port's descriptors, anew.
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

struct Worker {
    card: Arc<Card>,
    /// `poll(2)`'s list: the wake descriptor, then the port's
    polled: Vec<libc::pollfd>,
    /// Wake-ups in vain in a row, and how many make it watch
    vain: u32,
    limit: u32,
    /// Ticks of watching since somebody had to wait
    clean: u32,
    /// Of the last turn: until when frames wait for receives, and others for them
    held: Cell<Option<Nanos>>,
}

impl Worker {
    fn new(card: Arc<Card>) -> Self {
        Worker { card, polled: Vec::with_capacity(16), vain: 0, limit: FEW, clean: 0, held: Cell::new(None) }
    }

    fn run(mut self) {
        hurry();
        while !self.card.progress.stop.load(Ordering::Acquire) {
            if self.card.progress.is_watching() { self.watch() } else { self.serve() }
        }
    }

    /// Armed: one sleep and what follows.
    fn serve(&mut self) {
        let until = self.prepare();
        let woken = self.sleep(until);
        if woken == Woken::Frames {
            if self.program_is_at_it() {
                return self.nobody_called();
            }
            match self.turn() {
                _ if self.held.get().is_some() => self.sit_out(),
                Some(0) | None => self.nobody_called(),
                Some(_) => self.vain = 0,
            }
        } else if woken == Woken::Alarm {
            self.turn();
        }
        if self.card.settings.qpc_cache.is_some() {
            self.card.bring_through();
        }
    }

    /// Watching: one tick and what follows.
    fn watch(&mut self) {
        let calls = self.card.polled.calls.load(Ordering::Relaxed);
        self.list_wakers();
        let woken = self.sleep(clock::now() + TICK);
        if woken == Woken::Alarm && self.card.polled.calls.load(Ordering::Relaxed) != calls {
            self.clean += 1;
            if self.clean >= CLEAN {
                self.clean = 0;
                self.limit = (self.limit / 2).max(FEW);
            }
            /* who posts, or polls what is there already, calls the card but does not run it */
            let ran = self.card.polled.at.load(Ordering::Relaxed);
            if clock::now().saturating_sub(ran) > TICK {
                self.turn();
            }
            return;
        }
        self.card.progress.mode.store(ARMED, Ordering::SeqCst);
        self.vain = 0;
        let late = self.turn().is_some_and(|frames| frames > 0);
        if late && woken == Woken::Alarm {
            self.clean = 0;
            self.limit = (self.limit * 2).min(MANY);
        }
    }

    /// Before a sleep: settles the port, notes the alarm, lists what to wait for.
    fn prepare(&mut self) -> Nanos {
        let card = Arc::clone(&self.card);
        self.list_wakers();
        let mut pause = Duration::from_micros(20);
        loop {
            let Some(mut guard) = card.try_lock() else {
                /* whoever has the lock may need this CPU to give it back */
                std::thread::sleep(pause);
                pause = (pause * 2).min(LONGEST);
                continue;
            };
            let now = clock::now();
            let port = card.maintain(&mut guard, now);
            let next = guard.next_deadline(now);
            self.polled.extend(guard.rx.fds().iter().map(|fd| pollfd(*fd)));
            self.polled.extend(guard.star.iter().flat_map(|star| star.fds()).map(pollfd));
            self.polled.extend(guard.env.links.as_ref().map(|links| pollfd(links.fd())));
            let deadline = [port, next].into_iter().flatten().min().unwrap_or(Nanos::MAX);
            /* An alarm that is still to come stays, though nothing may be due then: one wake-up in vain
            costs less than a call to this thread each time that the only timer is set anew. */
            if guard.alarm <= now || deadline < guard.alarm {
                guard.alarm = deadline;
            }
            let owed = if guard.nic.owes_acks() { now + ACK_LEFT } else { Nanos::MAX };
            let until = guard.alarm.min(owed);
            drop(guard);
            card.serve_bells();
            return until;
        }
    }

    /// What ends any sleep, the wake descriptor first.
    fn list_wakers(&mut self) {
        self.polled.clear();
        self.polled.push(pollfd(self.card.progress.wake.as_raw_fd()));
        self.polled.extend(self.card.links_fd().map(pollfd));
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
        if self.card.links_fd().is_some() && self.polled.get(1).is_some_and(|fd| fd.revents != 0) {
            self.card.look_at_links();
            return Woken::Called;
        }
        if self.polled.first().is_some_and(|fd| fd.revents != 0) {
            drain(self.card.progress.wake.as_raw_fd());
            return Woken::Called;
        }
        Woken::Frames
    }

    /// Whether the program has just polled, and so will take the frames itself.
    fn program_is_at_it(&self) -> bool {
        let polled = self.card.polled.at.load(Ordering::Relaxed);
        clock::now().saturating_sub(polled) < JUST_POLLED
    }

    /// Runs the card; gives how many datagram batches and timers there were, `None` if somebody else
    /// runs it.
    fn turn(&mut self) -> Option<u32> {
        let mut guard = self.card.try_lock()?;
        let shard: &mut Shard = &mut guard;
        shard.stats.thread_runs.inc();
        let now = clock::now();
        self.held.set(None);
        self.card.take_bells(shard, now);
        let mut work = self.take_batches(shard, now);
        work += shard.run_star(now, Who::Thread);
        work += shard.run_links(now, &self.card.notes);
        /* behind the frames: the answer that a timer waits for may be among them */
        work += u32::from(shard.run_timers(now));
        shard.transmit(now, true);
        self.card.hand_on(shard, now, false);
        self.card.finish(shard, now);
        drop(guard);
        self.card.serve_bells();
        Some(work)
    }

    /// Handles what has come; gives how many batches.
    fn take_batches(&self, shard: &mut Shard, now: Nanos) -> u32 {
        let mut work = 0;
        let mut got = shard.rx.recv_all();
        while got > 0 && work <= BATCHES {
            let out = shard.nic.ran_out() && shard.waits_for_receives(now, Who::Thread);
            if out || !shard.take_frames(now, || false) {
                self.held.set(shard.out.left(now).map(|left| now + left));
                self.card.lower_alarm(shard, now + LEFT);
                return work + u32::from(!out);
            }
            work += 1;
            if work <= BATCHES {
                shard.transmit(now, true);
                got = shard.rx.recv();
            }
        }
        work
    }

    /// Sleeps until frames are taken again, which are in the socket already.
    fn sit_out(&mut self) {
        let Some(until) = self.held.take() else { return };
        self.list_wakers();
        if self.sleep(until) == Woken::Alarm {
            self.turn();
        }
    }

    fn nobody_called(&mut self) {
        self.vain += 1;
        if self.vain >= self.limit {
            self.vain = 0;
            self.card.progress.mode.store(WATCHING, Ordering::SeqCst);
        } else {
            std::thread::sleep(NAP * (1 << self.vain.min(NAP_DOUBLINGS)));
        }
    }
}

fn pollfd(fd: RawFd) -> libc::pollfd {
    libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
}

/// Empties an eventfd that does not block.
fn drain(fd: RawFd) {
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

/// Asks to be run soon after waking: short CPU slices, exact timers and, where the process may (root,
/// RLIMIT_NICE), precedence over the program's own spinning threads, which otherwise make peers wait
/// for milliseconds. What is refused costs latency only.
fn hurry() {
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
