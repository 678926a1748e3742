//! 1RMA for programs: a process's card, which any of its threads may use.
//!
//! Owns the lock around the card, sleeping, and the thread that serves others while the program is outside
//! the library. It must not know packets, nor C's structs.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use nix::sys::eventfd::EfdFlags;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use starverbs_backend::host;
pub use starverbs_backend::onerma::{
    CardCounts, Class, DerivedKey, Finished, Initiator, OneRmaOp, RegionId, RegionKey, Rights, Status,
    Transfer,
};
use starverbs_backend::onerma::{ControlError, GcmSeal, Process, ProcessOptions, Seal, SubmitError};
use starverbs_core::counters::CounterCell;
use starverbs_core::{Gid, Nanos};
use starverbs_settings::Settings;

use crate::clock::{CpuTime, now};
use crate::device::activity::Activity;
use crate::device::idle::{IDLE, Idle, Then};
use crate::device::thread::{ProgressThread, ThreadWork, TurnResult, drain, lock_patiently, pollfd};
use crate::events::{eventfd, signal};
use crate::stat::StatPage;
use crate::{Context, Result, VerbsError, process};

/// Most commands that a card has under way.
pub const MAX_SLOTS: u16 = 256;
/// How long a poll sleeps where nothing ends its sleep before.
const LONG: Nanos = 60_000_000_000;

/// A 1RMA card: one of those of an address.
pub struct Onerma {
    /// Forks of the process when it was opened: in a forked child it is the parent's
    forks: u32,
    shared: Arc<SharedCard>,
}

/// The card, for the program's threads and the one that serves others meanwhile.
struct SharedCard {
    card: Mutex<LockedCard>,
    thread: ProgressThread,
    activity: Activity,
    stats: StatPage,
    /// Ends the sleep of a poll
    wake: OwnedFd,
}

/// What the lock is for.
struct LockedCard {
    process: Process,
    /// What [`StatPage`] has of its counts
    counted: [u64; COUNTS],
    /// Polls that sleep. They serve others when a packet wakes them, and the thread leaves that to them
    sleepers: u32,
    /// Polls in a row that slept, since the thread last served somebody
    slept: u32,
    /// Polls since then that took what others had to wake the thread for
    taken: u32,
    /// When the thread wakes at the latest, or who sleeps
    alarm: Nanos,
    /// Polls that do not sleep
    idle: Idle,
}

/// How many counters of a page are 1RMA's.
const COUNTS: usize = 18;

/// Each of these, and what a card has counted.
fn counters<'a>(page: &'a StatPage, process: &Process) -> [(&'a CounterCell, u64); COUNTS] {
    let (counts, [unsent, foreign, sent, received]) = (process.counts(), process.port_counts());
    [
        (&page.onerma_received, counts.received),
        (&page.onerma_malformed, counts.malformed),
        (&page.onerma_late, counts.late),
        (&page.onerma_copies, counts.copies),
        (&page.onerma_forged, counts.forged),
        (&page.onerma_auth_failures, counts.auth_failures),
        (&page.onerma_nacks, counts.nacks),
        (&page.onerma_access_failures, counts.access_failures),
        (&page.onerma_rekeys, counts.rekeys),
        (&page.onerma_transfer_timeouts, counts.transfer_timeouts),
        (&page.onerma_completed, counts.completed),
        (&page.onerma_refused, counts.refused),
        (&page.onerma_timeouts, counts.timeouts),
        (&page.onerma_lost_completions, counts.lost_completions),
        (&page.onerma_unsent, unsent),
        (&page.onerma_foreign, foreign),
        (&page.onerma_tx_local, sent),
        (&page.onerma_rx_local, received),
    ]
}

/// K_d of a process of an address for an operation.
pub fn derive_key(region: &RegionKey, initiator: Gid, pid: u32, op: OneRmaOp) -> DerivedKey {
    GcmSeal.derive(region, &Initiator { addr: initiator, pid }, op)
}

/// K_d of a process, and which one that is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerKey {
    /// Its K_d
    pub key: DerivedKey,
    /// Its number in this process's PID namespace, by the kernel's word
    pub pid: u32,
}

/// K_d of the process at the other end of a connected Unix socket, and the number of that process by the
/// kernel's word: whoever connected, or listened. So nobody of this host gets another one's key by a claim.
///
/// # Errors
/// EACCES: the process has no number here, as the socket is no connected one of Unix, or as its PID namespace
/// is not seen from this one; or `initiator` is not an address of this host. ENOTSOCK; EBADF.
pub fn derive_peer_key(
    socket: BorrowedFd<'_>,
    region: &RegionKey,
    initiator: Gid,
    op: OneRmaOp,
) -> Result<PeerKey> {
    let who = getsockopt(&socket, PeerCredentials).map_err(|errno| VerbsError::Os(errno as i32))?;
    let pid = u32::try_from(who.pid()).ok().filter(|pid| *pid > 0);
    let pid = pid.filter(|_| host::is_own(initiator)).ok_or(VerbsError::Os(libc::EACCES))?;
    Ok(PeerKey { key: derive_key(region, initiator, pid, op), pid })
}

fn of_control(error: ControlError) -> VerbsError {
    match error {
        ControlError::Full => VerbsError::NoMemory("the card's table of regions is full"),
        ControlError::Unknown => VerbsError::Invalid("no such region"),
    }
}

impl Onerma {
    /// A card at an address of the context's GID table, with so many slots (0: 64), for the process `pid`
    /// (0: this one's number).
    ///
    /// # Errors
    /// EADDRINUSE: the address has as many cards as it can; ENODATA: no such address; EINVAL: too many
    /// slots, a clock that was never set; ENOMEM; EIO in a forked child.
    pub fn open(context: &Context, gid_index: u32, slots: u32, pid: u32) -> Result<Self> {
        if !context.is_ours() {
            return Err(VerbsError::Forked);
        }
        let usual = ProcessOptions::default();
        let slots = match u16::try_from(slots) {
            Ok(0) => usual.slots,
            Ok(slots) if slots <= MAX_SLOTS => slots,
            _ => return Err(VerbsError::Invalid("more slots than a card has")),
        };
        let gid = context.query_gid(1, gid_index)?.gid;
        let this = Settings { addrs: Some(vec![host::ip_of(gid)]), ..Settings::default() };
        let addrs = host::addresses(&this)?;
        let addr = addrs.first().ok_or(VerbsError::NoData)?;
        let pid = if pid == 0 { usual.pid } else { pid };
        let device = context.device()?;
        let process = Process::open(addr, &ProcessOptions { slots, pid, ..usual }, device.settings())?;
        let shared = Arc::new(SharedCard {
            card: Mutex::new(LockedCard {
                process,
                counted: [0; COUNTS],
                sleepers: 0,
                slept: 0,
                taken: 0,
                alarm: Nanos::MAX,
                idle: Idle::default(),
            }),
            thread: ProgressThread::new()?,
            activity: Activity::default(),
            stats: *device.stats(),
            wake: eventfd(EfdFlags::EFD_NONBLOCK)?,
        });
        if device.settings().progress_thread {
            shared.thread.start(Arc::clone(&shared))?;
        }
        Ok(Onerma { forks: process::forks(), shared })
    }

    /// The card, unless this is a forked child.
    fn card(&self) -> Result<MutexGuard<'_, LockedCard>> {
        if process::forks() != self.forks {
            return Err(VerbsError::Forked);
        }
        Ok(self.shared.lock())
    }

    /// Opens memory to whoever has a key of it.
    ///
    /// # Errors
    /// ENOMEM: the table is full; EIO in a forked child.
    ///
    /// # Safety
    /// The memory can be read and, with rights to write, written by anybody at any time until the region is
    /// closed or the card gone.
    pub unsafe fn open_region(
        &self,
        addr: *mut u8,
        len: usize,
        rights: Rights,
        key: RegionKey,
    ) -> Result<RegionId> {
        // SAFETY: the caller's terms.
        unsafe { self.card()?.process.open_region(addr, len, rights, key) }.map_err(of_control)
    }

    /// Closes a region: when this returns nobody reaches it.
    ///
    /// # Errors
    /// EINVAL: there is none; EIO in a forked child.
    pub fn close_region(&self, region: RegionId) -> Result<()> {
        self.card()?.process.close_region(region).map_err(of_control)
    }

    /// Changes a region's key: when this returns the old one opens nothing.
    ///
    /// # Errors
    /// As of [`Onerma::close_region`].
    pub fn rekey_region(&self, region: RegionId, key: RegionKey) -> Result<()> {
        self.card()?.process.rekey_region(region, key).map_err(of_control)
    }

    /// Begins a transfer.
    ///
    /// # Errors
    /// EINVAL: its length; ENOMEM; EIO in a forked child.
    pub fn post(&self, transfer: Transfer) -> Result<()> {
        let mut card = self.card()?;
        card.process.submit(transfer).map_err(|error| match error {
            SubmitError::Length => VerbsError::Invalid("no transfer has this length"),
            SubmitError::NoMemory => VerbsError::NoMemory("no memory for a transfer"),
        })?;
        self.shared.activity.note_call();
        self.shared.take_turn(&mut card);
        self.shared.settle(&mut card);
        Ok(())
    }

    /// Serves others, goes on with transfers, and hands those that have ended to `take`, up to `max`. Where
    /// none has, it waits for one as long as `limit`; `None`: without an end. Gives how many there were.
    ///
    /// # Errors
    /// EIO in a forked child.
    pub fn poll(&self, max: usize, limit: Option<Duration>, mut take: impl FnMut(Finished)) -> Result<usize> {
        let shared = &*self.shared;
        let mut card = self.card()?;
        let ended = card.process.has_finished();
        if limit == Some(Duration::ZERO) && !ended && shared.activity.backs_off() {
            return Ok(0);
        }
        let end =
            limit.map(|limit| now().saturating_add(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX)));
        let mut has_slept = false;
        loop {
            let at = now();
            shared.activity.note_look();
            let pause = at.saturating_sub(shared.activity.note_poll(at));
            if shared.take_turn(&mut card) > 0 || card.process.has_finished() {
                card.idle.restart(at);
            } else if pause > IDLE {
                card.idle.resume(at);
            }
            let mut taken = 0;
            while taken < max
                && let Some(finished) = card.process.poll()
            {
                take(finished);
                taken += 1;
            }
            let end = end.unwrap_or(at + LONG);
            if taken > 0 || end <= at {
                if has_slept {
                    shared.resume(&mut card);
                }
                shared.settle(&mut card);
                shared.give_way(card, at, limit);
                return Ok(taken);
            }
            let until = card.process.next_time().map_or(end, |next| next.min(end));
            card.alarm = if card.sleepers == 0 { until } else { until.min(card.alarm) };
            card.sleepers += 1;
            card.process.prepare_to_sleep();
            let mut fds = [pollfd(card.process.as_raw_fd()), pollfd(shared.wake.as_raw_fd())];
            has_slept = true;
            drop(card);
            sleep(&mut fds, Duration::from_nanos(until.saturating_sub(at)));
            if fds[1].revents != 0 {
                drain(shared.wake.as_raw_fd());
            }
            card = shared.lock();
            card.sleepers -= 1;
            card.process.note_woken();
            /* it may have been the one that was to wake in time: unless it sleeps again, others hear of it */
            card.alarm = Nanos::MAX;
        }
    }

    /// What the card has counted; and what [`Process::port_counts`] has.
    ///
    /// # Errors
    /// EIO in a forked child.
    pub fn counts(&self) -> Result<(CardCounts, [u64; 4])> {
        let card = self.card()?;
        Ok((*card.process.counts(), card.process.port_counts()))
    }
}

impl Drop for Onerma {
    /// Ends the thread, which a forked child does not have.
    fn drop(&mut self) {
        if process::forks() == self.forks {
            self.shared.thread.stop();
        }
    }
}

impl SharedCard {
    fn lock(&self) -> MutexGuard<'_, LockedCard> {
        self.card.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, LockedCard>> {
        match self.card.try_lock() {
            Ok(card) => Some(card),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// A turn of the program's. Where the thread or a poll sleeps, it is to be woken whoever looked last; if
    /// the program takes by itself what others wake it for, it looks once a tick instead.
    fn take_turn(&self, card: &mut LockedCard) -> usize {
        let armed = self.thread.is_armed();
        card.process.set_polled(!armed && card.sleepers == 0);
        let came = card.process.turn(now);
        if came > 0 && armed {
            card.taken = card.taken.saturating_add(1);
            self.thread.watch(card.taken);
        }
        came
    }

    /// At the end of a poll at `now`: one that does not sleep, and that has found nothing for a while, lets
    /// others have the CPU.
    fn give_way(&self, mut card: MutexGuard<'_, LockedCard>, now: Nanos, limit: Option<Duration>) {
        let nobody_called = self.activity.nobody_called();
        let then = match limit {
            Some(Duration::ZERO) => {
                card.idle.after(now, nobody_called, || CpuTime::now(self.thread.cpu_clock()))
            }
            _ => Then::BackOff(0),
        };
        self.activity.back_off_for(if let Then::BackOff(time) = then { time } else { 0 });
        drop(card);
        if then == Then::Yield {
            self.activity.yield_now();
        }
    }

    /// The process's page has what the card has counted since.
    fn publish(&self, card: &mut LockedCard) {
        let counters = counters(&self.stats, &card.process);
        for ((cell, now), before) in counters.into_iter().zip(&mut card.counted) {
            if now != *before {
                cell.add_beside_others(now - std::mem::replace(before, now));
            }
        }
    }

    /// At the end of a call: who sleeps hears of what has ended, and of what is due before the sleep is over.
    fn settle(&self, card: &mut LockedCard) {
        self.publish(card);
        let next = card.process.next_time().unwrap_or(Nanos::MAX);
        let sooner = next < card.alarm;
        card.alarm = next.min(card.alarm);
        if card.sleepers == 0 {
            if sooner {
                self.thread.kick_if_armed();
            }
        } else if sooner || card.process.has_finished() {
            signal(&self.wake);
        }
    }

    /// A poll that slept returns: if no other sleeps, the thread serves others from now on. Where polls do so
    /// again and again it looks once a tick instead, whether they still do.
    fn resume(&self, card: &mut LockedCard) {
        if card.sleepers == 0 {
            card.slept = card.slept.saturating_add(1);
            self.thread.watch(card.slept);
            self.thread.kick_if_armed();
        }
    }
}

impl ThreadWork for Arc<SharedCard> {
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
        let mut card = lock_patiently(|| self.try_lock())?;
        if card.sleepers > 0 {
            return Some(Nanos::MAX);
        }
        card.process.prepare_to_sleep();
        fds.push(pollfd(card.process.as_raw_fd()));
        card.alarm = card.process.next_time().unwrap_or(Nanos::MAX);
        Some(card.alarm)
    }

    fn turn(&self, _: &[libc::pollfd]) -> TurnResult {
        let Some(mut card) = self.try_lock() else { return TurnResult::default() };
        if card.sleepers > 0 {
            return TurnResult::default();
        }
        card.process.set_polled(false);
        card.process.note_woken();
        let came = card.process.turn(now);
        if came > 0 {
            (card.slept, card.taken) = (0, 0);
        }
        self.publish(&mut card);
        TurnResult { work: Some(u32::try_from(came).unwrap_or(u32::MAX)), ..TurnResult::default() }
    }
}

/// Sleeps until one of the descriptors is readable, a signal comes or `limit` is over.
fn sleep(fds: &mut [libc::pollfd], limit: Duration) {
    let limit = libc::timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    // SAFETY: the list and a timespec, both alive across the call.
    unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, &limit, std::ptr::null()) };
}
