//! 1RMA for programs: a process's card, which any of its threads may use.
//!
//! Owns the lock around the card, and sleeping. Nothing happens to the card but in its calls: there is no
//! thread behind it. It must not know packets, nor C's structs.

use std::os::fd::AsRawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use starverbs_backend::host;
pub use starverbs_backend::onerma::{
    Class, Counts, DerivedKey, Finished, Initiator, Op, RegionId, RegionKey, Rights, Status, Transfer,
};
use starverbs_backend::onerma::{ControlError, GcmSeal, Options, Process, Seal, SubmitError};
use starverbs_core::Gid;
use starverbs_settings::Settings;

use crate::clock::now;
use crate::{Context, Result, VerbsError, process};

/// Most commands that a card has under way.
pub const MAX_SLOTS: u16 = 256;

/// A 1RMA card. It has an address of its own as long as it lives.
pub struct Onerma {
    /// Forks of the process when it was opened: in a forked child it is the parent's
    forks: u32,
    process: Mutex<Process>,
}

/// K_d of a process of an address for an operation.
pub fn derive_key(region: &RegionKey, initiator: Gid, pid: u32, op: Op) -> DerivedKey {
    GcmSeal.derive(region, &Initiator { addr: initiator, pid }, op)
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
    /// EADDRINUSE: the address has a card; ENODATA: no such address; EINVAL: too many slots, a clock that
    /// was never set; ENOMEM; EIO in a forked child.
    pub fn open(context: &Context, gid_index: u32, slots: u32, pid: u32) -> Result<Self> {
        if !context.is_ours() {
            return Err(VerbsError::Forked);
        }
        let usual = Options::default();
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
        let card = Process::open(addr, &Options { slots, pid, ..usual })?;
        Ok(Onerma { forks: process::forks(), process: Mutex::new(card) })
    }

    fn process(&self) -> Result<MutexGuard<'_, Process>> {
        if process::forks() != self.forks {
            return Err(VerbsError::Forked);
        }
        Ok(self.process.lock().unwrap_or_else(PoisonError::into_inner))
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
        unsafe { self.process()?.open_region(addr, len, rights, key) }.map_err(of_control)
    }

    /// Closes a region: when this returns nobody reaches it.
    ///
    /// # Errors
    /// EINVAL: there is none; EIO in a forked child.
    pub fn close_region(&self, region: RegionId) -> Result<()> {
        self.process()?.close_region(region).map_err(of_control)
    }

    /// Changes a region's key: when this returns the old one opens nothing.
    ///
    /// # Errors
    /// As of [`Onerma::close_region`].
    pub fn rekey_region(&self, region: RegionId, key: RegionKey) -> Result<()> {
        self.process()?.rekey_region(region, key).map_err(of_control)
    }

    /// Begins a transfer.
    ///
    /// # Errors
    /// EINVAL: its length; ENOMEM; EIO in a forked child.
    pub fn post(&self, transfer: Transfer) -> Result<()> {
        let mut process = self.process()?;
        process.submit(transfer).map_err(|error| match error {
            SubmitError::Length => VerbsError::Invalid("no transfer has this length"),
            SubmitError::NoMemory => VerbsError::NoMemory("no memory for a transfer"),
        })?;
        process.turn(now());
        Ok(())
    }

    /// Serves others, goes on with transfers, and hands those that have ended to `take`, up to `max`. Where
    /// none has, it waits for one as long as `limit`; `None`: without an end. Gives how many there were.
    ///
    /// # Errors
    /// EIO in a forked child.
    pub fn poll(&self, max: usize, limit: Option<Duration>, mut take: impl FnMut(Finished)) -> Result<usize> {
        let long = Duration::from_secs(60);
        let end =
            limit.map(|limit| now().saturating_add(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX)));
        loop {
            let mut process = self.process()?;
            let at = now();
            process.turn(at);
            let mut taken = 0;
            while taken < max
                && let Some(finished) = process.poll()
            {
                take(finished);
                taken += 1;
            }
            let left = end.map_or(long, |end| Duration::from_nanos(end.saturating_sub(at)));
            if taken > 0 || left.is_zero() {
                return Ok(taken);
            }
            let next = process.next_time().map(|next| Duration::from_nanos(next.saturating_sub(at)));
            let fd = process.as_raw_fd();
            drop(process);
            sleep(fd, left.min(next.unwrap_or(long)));
        }
    }

    /// What the card has counted; and packets that the socket did not take, and datagrams of strangers.
    ///
    /// # Errors
    /// EIO in a forked child.
    pub fn counts(&self) -> Result<(Counts, [u64; 2])> {
        let process = self.process()?;
        Ok((*process.counts(), process.port_counts()))
    }
}

/// Sleeps until the descriptor is readable, a signal comes or `limit` is over.
fn sleep(fd: i32, limit: Duration) {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let limit = libc::timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    // SAFETY: one pollfd and a timespec, both alive across the call.
    unsafe { libc::ppoll(&mut poll, 1, &limit, std::ptr::null()) };
}
