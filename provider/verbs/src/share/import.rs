//! The importer's side: an exporter's table, a desk in it, and the exporter's memory.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicI32, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use super::export::byte;
use super::table::{DESKS, Found, Kind, Table, Tag};
use crate::card;
use crate::error::{Result, VerbsError};
use crate::memory;

/// The exporter is gone, or not in sight.
const GONE: VerbsError = VerbsError::Os(libc::ENODEV);

/// A table of an exporter, and this process's desk in it.
pub(crate) struct Importer {
    table: Table,
    desk: Claim,
    /// As this process's PID namespace has it
    exporter: libc::pid_t,
    /// Its memory, once somebody needed it
    memory: Mutex<Option<Arc<File>>>,
    /// Held by who sits at the desk
    seat: Mutex<()>,
}

impl Importer {
    /// The exporter behind a `cmd_fd`.
    ///
    /// # Errors
    /// EINVAL: the descriptor of something else; ENODEV: its process is gone, closed the context, or is in a PID
    /// namespace that this one does not see; ENOMEM: too many importers; what opening `/proc/self/fd` says.
    pub(crate) fn open(fd: RawFd) -> Result<Importer> {
        // SAFETY: the caller's descriptor; nothing here closes it.
        let given = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?;
        let table = Table::open(&File::from(given))?;
        // SAFETY: takes and gives numbers.
        let exporter = unsafe { libc::fcntl(fd, libc::F_GETOWN) };
        if exporter <= 0 || table.is_closed() {
            return Err(GONE);
        }
        /* a file description of its own: locks belong to it */
        let file = File::options().read(true).write(true).open(format!("/proc/self/fd/{fd}"))?;
        let desk = Claim::any(file)?;
        let uses = &table.desk(desk.number).uses;
        /* the desk of one who died in his seat */
        uses.fetch_add(uses.load(Ordering::Relaxed) & 1, Ordering::SeqCst);
        Ok(Importer { table, desk, exporter, memory: Mutex::default(), seat: Mutex::default() })
    }

    /// The object of this kind and handle.
    ///
    /// # Errors
    /// EINVAL: none; ENODEV: the context is closed.
    pub(crate) fn find(&self, kind: Kind, handle: u32) -> Result<Found> {
        if self.table.is_closed() {
            return Err(GONE);
        }
        self.table.find(kind, handle).ok_or(VerbsError::Invalid("handle of another process"))
    }

    /// Whether that life of an object goes on.
    pub(crate) fn stands(&self, tag: Tag) -> bool {
        self.table.stands(tag)
    }

    /// The exporter's memory.
    ///
    /// # Errors
    /// EPERM: the system does not let this process reach it; ENODEV: the exporter is gone; EOPNOTSUPP: no `/proc`.
    fn memory(&self) -> Result<Arc<File>> {
        let mut slot = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = &*slot {
            return Ok(Arc::clone(memory));
        }
        let path = format!("/proc/{}/mem", self.exporter);
        let file = File::options().read(true).write(true).open(path).map_err(|e| match e.kind() {
            io::ErrorKind::PermissionDenied => VerbsError::Os(libc::EPERM),
            io::ErrorKind::NotFound if std::path::Path::new("/proc/self/mem").exists() => GONE,
            io::ErrorKind::NotFound => VerbsError::Unsupported("memory of other processes: /proc is missing"),
            _ => VerbsError::from(e),
        })?;
        /* Whoever has the number now: the file stays with the memory that it opened, so one look is enough. */
        let (token, at) = self.table.token();
        let mut there = [0; 8];
        if file.read_exact_at(&mut there, at).is_err() || u64::from_ne_bytes(there) != token {
            return Err(GONE);
        }
        Ok(Arc::clone(slot.insert(Arc::new(file))))
    }

    /// Runs `copy` while `tag` stands: its exporter waits for the end of it. False: it does not stand, or the copy
    /// failed.
    pub(super) fn at_desk(&self, tag: Tag, copy: impl FnOnce() -> bool) -> bool {
        if self.desk.forks != card::forks() {
            return false;
        }
        let _seat = self.seat.lock().unwrap_or_else(PoisonError::into_inner);
        let uses = &self.table.desk(self.desk.number).uses;
        uses.fetch_add(1, Ordering::SeqCst);
        /* see `Exports::wait_for_users` */
        fence(Ordering::SeqCst);
        let done = self.table.stands(tag) && copy();
        uses.fetch_add(1, Ordering::SeqCst);
        done
    }
}

#[cfg(test)]
impl Importer {
    /// As if this process was killed in the middle of a copy.
    pub(super) fn die_at_desk(&self) {
        self.table.desk(self.desk.number).uses.fetch_add(1, Ordering::SeqCst);
        let free = libc::flock { l_type: libc::F_UNLCK as i16, ..byte(self.desk.number) };
        // SAFETY: the flock lives across the call.
        unsafe { libc::fcntl(self.desk.fd, libc::F_OFD_SETLK, &raw const free) };
    }
}

/// Descriptors that hold a desk's lock. Forked children must not: the desk is free when its importer dies.
static CLAIMS: [AtomicI32; DESKS] = [const { AtomicI32::new(-1) }; DESKS];

/// In a forked child, before anything else runs: async-signal-safe.
pub(crate) fn forked() {
    for claim in &CLAIMS {
        let fd = claim.swap(-1, Ordering::Relaxed);
        if fd >= 0 {
            // SAFETY: owned by a Claim, which closes nothing in a forked child.
            unsafe { libc::close(fd) };
        }
    }
}

/// The lock of a desk.
struct Claim {
    number: usize,
    fd: RawFd,
    /// Where it stands in [`CLAIMS`]
    slot: usize,
    forks: u32,
}

impl Claim {
    /// Any free desk.
    fn any(file: File) -> Result<Claim> {
        let lock = |number: &usize| {
            let byte = byte(*number);
            // SAFETY: the flock lives across the call.
            unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const byte) == 0 }
        };
        let number = (0..DESKS).find(lock).ok_or(VerbsError::NoMemory("importers of a context"))?;
        let fd = file.as_raw_fd();
        let free =
            |slot: &AtomicI32| slot.compare_exchange(-1, fd, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        let slot = CLAIMS.iter().position(free).ok_or(VerbsError::NoMemory("imported contexts"))?;
        let _ = file.into_raw_fd();
        Ok(Claim { number, fd, slot, forks: card::forks() })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.forks == card::forks() {
            CLAIMS[self.slot].store(-1, Ordering::Release);
            // SAFETY: `any` took it over.
            drop(unsafe { File::from_raw_fd(self.fd) });
        }
    }
}

/// Memory of an exporter that this process may use as long as an object of the exporter's stands.
#[derive(Clone)]
pub(crate) struct Foreign {
    importer: Arc<Importer>,
    memory: Arc<File>,
    tag: Tag,
    addr: u64,
    length: u64,
}

impl Foreign {
    /// The memory of what was found.
    ///
    /// # Errors
    /// As [`Importer::open`] and: EPERM: the system does not let this process reach the exporter's memory;
    /// EOPNOTSUPP: no memory that lies there at all times, or no `/proc`.
    pub(crate) fn new(importer: &Arc<Importer>, found: &Found) -> Result<Foreign> {
        let (addr, length) = (found.item.addr, found.item.length);
        let plain = addr.checked_add(length).is_some_and(|end| end <= memory::FOREIGN_SPAN);
        if !plain {
            return Err(VerbsError::Unsupported("on-demand and null regions of another process"));
        }
        let memory = importer.memory()?;
        Ok(Foreign { importer: Arc::clone(importer), memory, tag: found.tag, addr, length })
    }

    /// EFAULT unless it has `len` bytes at all.
    pub(crate) fn fits(&self, len: u64) -> Result<()> {
        if len <= self.length { Ok(()) } else { Err(VerbsError::Fault) }
    }

    /// Copies bytes at `offset`; false if they are not there any more.
    pub(crate) fn read(&self, offset: u64, to: &mut [u8]) -> bool {
        let Some(at) = self.place(offset, to.len()) else { return false };
        self.importer.at_desk(self.tag, || self.memory.read_exact_at(to, at).is_ok())
    }

    /// Copies `data` to `offset`, its last eight bytes last; false if the place is not there any more.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> bool {
        let Some(at) = self.place(offset, data.len()) else { return false };
        let (body, tail) = data.split_at(data.len().saturating_sub(8));
        let piece = |b: &[u8]| libc::iovec { iov_base: b.as_ptr().cast_mut().cast(), iov_len: b.len() };
        let pieces = [piece(body), piece(tail)];
        let pieces = &pieces[usize::from(body.is_empty())..];
        self.importer.at_desk(self.tag, || {
            let (count, at) = (pieces.len() as libc::c_int, at as libc::off_t);
            // SAFETY: the kernel reads `data` through `pieces`; the memory it changes is another process's, or is
            // registered with the card as any region.
            let wrote = unsafe { libc::pwritev(self.memory.as_raw_fd(), pieces.as_ptr(), count, at) };
            wrote == data.len() as isize
        })
    }

    fn place(&self, offset: u64, len: usize) -> Option<u64> {
        let end = offset.checked_add(len as u64)?;
        (end <= self.length).then(|| self.addr + offset)
    }
}

/// The foreign memory that a card has under marked addresses: a number, and an offset in it.
#[derive(Default)]
pub(crate) struct ForeignList(Vec<Option<Foreign>>);

impl ForeignList {
    /// Adds some; gives the address of its first byte for the card. ENOMEM: no number is left.
    pub(crate) fn add(&mut self, foreign: Foreign) -> Result<u64> {
        let free = self.0.iter().position(Option::is_none).unwrap_or(self.0.len());
        let addr = memory::foreign(free).ok_or(VerbsError::NoMemory("imported regions"))?;
        if free == self.0.len() {
            self.0.push(None);
        }
        self.0[free] = Some(foreign);
        Ok(addr)
    }

    /// Forgets what `add` gave this address for.
    pub(crate) fn remove(&mut self, addr: u64) {
        if let Some(slot) = self.0.get_mut(memory::foreign_place(addr).0) {
            *slot = None;
        }
    }

    /// What lies at an address: the memory and the offset in it.
    pub(crate) fn at(&self, addr: u64) -> Option<(&Foreign, u64)> {
        let (number, offset) = memory::foreign_place(addr);
        Some((self.0.get(number)?.as_ref()?, offset))
    }
}
