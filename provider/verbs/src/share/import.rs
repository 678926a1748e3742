//! The importer's side: an exporter's table, the exporter's memory, and a desk to use it from.

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::sync::{Arc, Mutex, PoisonError};

use starverbs_rings::ReaderSlot;

use super::export::byte;
use super::table::{DESKS, Desks, Found, Identity, Kind, Table, Tag};
use crate::error::{Result, VerbsError};
use crate::memory;
use crate::process;

/// The exporter is gone, or not in sight.
const GONE: VerbsError = VerbsError::Os(libc::ENODEV);
/// Most bytes of one use: whoever waits for a desk waits for no more.
const PIECE: usize = 1 << 16;

/// A table of an exporter, and the way to its memory.
pub(crate) struct Importer {
    table: Table,
    /// As this process's PID namespace has it
    exporter: libc::pid_t,
    /// User who made the table
    owner: u32,
    /// Once somebody needed it
    reach: Mutex<Option<Arc<Reach>>>,
}

impl Importer {
    /// The exporter behind a `cmd_fd`.
    ///
    /// # Errors
    /// EBADF; EINVAL: the descriptor of something else; ENODEV: its process is gone, closed the context, or
    /// is in a PID namespace that this one does not see.
    pub(crate) fn open(fd: RawFd) -> Result<Importer> {
        // SAFETY: takes and gives numbers, of which any will do.
        let own = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
        if own < 0 {
            return Err(VerbsError::last_os());
        }
        // SAFETY: the descriptor is new and nobody else's.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(own) });
        let table = Table::open(&file)?;
        // SAFETY: takes and gives numbers.
        let exporter = unsafe { libc::fcntl(own, libc::F_GETOWN) };
        if exporter <= 0 || table.is_closed() {
            return Err(GONE);
        }
        Ok(Importer { table, exporter, owner: file.metadata()?.uid(), reach: Mutex::default() })
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

    /// The exporter's memory, and a desk.
    ///
    /// # Errors
    /// EPERM: the system does not let this process reach it, or another user made the table than runs the
    /// process; ENODEV: the exporter is gone; ENOMEM: too many importers; EOPNOTSUPP: no `/proc`.
    pub(super) fn reach(&self) -> Result<Arc<Reach>> {
        let mut slot = self.reach.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reach) = &*slot {
            return Ok(Arc::clone(reach));
        }
        Ok(Arc::clone(slot.insert(Arc::new(self.go()?))))
    }

    fn go(&self) -> Result<Reach> {
        let about = self.table.whereabouts();
        /* The directory stays that of one process. Which one says a field that whoever has the descriptor can set, so
        we look whether it is the exporter before anything is written there: it has the desks, and the token. */
        let process = open(&format!("/proc/{}", self.exporter), false)?;
        let memory = open(&inside(&process, "mem"), true)?;
        let desks = self.desks(&process)?;
        /* Who made the table may know what others' memory holds where, and have lent them the desks: a process of more
        rights than its own must not be taken for it. The file is root's if the process may not be looked at; the
        directory has its user of now, should that have changed since the file was opened. */
        if memory.metadata()?.uid() != self.owner || process.metadata()?.uid() != self.owner {
            return Err(VerbsError::Os(libc::EPERM));
        }
        let mut there = [0; 8];
        if memory.read_exact_at(&mut there, about.token_at).is_err()
            || u64::from_ne_bytes(there) != about.token
        {
            return Err(GONE);
        }
        Reach::new(memory, &desks)
    }

    /// The desks' file among a process's descriptors.
    fn desks(&self, process: &File) -> Result<File> {
        let about = self.table.whereabouts();
        let path = inside(process, &format!("fd/{}", about.desks_fd));
        /* looked at before it is opened: opening does things to devices and pipes */
        let found = File::options().read(true).custom_flags(libc::O_PATH).open(path).map_err(told)?;
        let seen = found.metadata()?;
        if !seen.is_file() || Identity::from(&seen) != about.desks {
            return Err(GONE);
        }
        open(&format!("/proc/self/fd/{}", found.as_raw_fd()), true)
    }
}

/// The path of what a directory has now.
fn inside(directory: &File, name: &str) -> String {
    format!("/proc/self/fd/{}/{name}", directory.as_raw_fd())
}

/// Opens what is in `/proc`.
fn open(path: &str, write: bool) -> Result<File> {
    File::options().read(true).write(write).open(path).map_err(told)
}

/// What an error in `/proc` says about the exporter.
fn told(error: io::Error) -> VerbsError {
    match error.kind() {
        io::ErrorKind::PermissionDenied => VerbsError::Os(libc::EPERM),
        io::ErrorKind::NotFound if !std::path::Path::new("/proc/self/mem").exists() => {
            VerbsError::Unsupported("memory of other processes: /proc is missing")
        }
        io::ErrorKind::NotFound => GONE,
        _ if error.raw_os_error() == Some(libc::ESRCH) => GONE,
        _ => VerbsError::from(error),
    }
}

/// An exporter's memory, and this process's desk. The desks' mapping has the file description that has the
/// desk's lock, so that the lock goes when the process does, whatever becomes of descriptors.
pub(super) struct Reach {
    memory: File,
    desks: ManuallyDrop<Desks>,
    number: usize,
    /// Forked children do not have the mapping
    forks: u32,
    /// Held by who sits at the desk
    seat: Mutex<()>,
}

impl Reach {
    /// Takes any free desk. `desks` is a file description of nobody else's.
    fn new(memory: File, desks: &File) -> Result<Reach> {
        let forks = process::forks();
        let map = Desks::open(desks)?;
        map.keep_from_children()?;
        let lock = |number: &usize| {
            let byte = byte(*number);
            // SAFETY: the flock lives across the call.
            unsafe { libc::fcntl(desks.as_raw_fd(), libc::F_OFD_SETLK, &raw const byte) == 0 }
        };
        let number = (0..DESKS).find(lock).ok_or(VerbsError::NoMemory("importers of a context"))?;
        let reach = Reach { memory, desks: ManuallyDrop::new(map), number, forks, seat: Mutex::default() };
        /* the desk of one who died in his seat */
        reach.slot().reset();
        Ok(reach)
    }

    /// Runs `copy` while `tag` stands in `table`: its exporter waits for the end of it. False: it does not
    /// stand, or the copy failed.
    pub(super) fn at_desk(&self, table: &Table, tag: Tag, copy: impl FnOnce(&File) -> bool) -> bool {
        if self.forks != process::forks() {
            return false;
        }
        let _seat = self.seat.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = self.slot();
        slot.enter();
        let done = table.stands(tag) && copy(&self.memory);
        slot.leave();
        done
    }

    fn slot(&self) -> &ReaderSlot {
        &self.desks.all()[self.number].slot
    }
}

impl Drop for Reach {
    fn drop(&mut self) {
        if self.forks == process::forks() {
            // SAFETY: dropped once, here. A child must not unmap what may be something else there.
            unsafe { ManuallyDrop::drop(&mut self.desks) };
        }
    }
}

#[cfg(test)]
impl Importer {
    pub(super) fn table(&self) -> &Table {
        &self.table
    }

    /// As if this process was killed in the middle of a copy.
    pub(super) fn die_at_desk(self) {
        self.reach().unwrap().slot().enter();
    }

    /// How often the desk was used, twice.
    pub(super) fn uses(&self) -> u32 {
        self.reach().unwrap().slot().uses()
    }
}

/// Memory of an exporter that this process may use as long as an object of the exporter's stands.
#[derive(Clone)]
pub(crate) struct Foreign {
    importer: Arc<Importer>,
    reach: Arc<Reach>,
    tag: Tag,
    addr: u64,
    length: u64,
}

impl Foreign {
    /// The memory of what was found.
    ///
    /// # Errors
    /// As [`Importer::reach`], and EOPNOTSUPP: no memory that lies there at all times.
    pub(crate) fn new(importer: &Arc<Importer>, found: &Found) -> Result<Foreign> {
        let (addr, length) = (found.item.addr, found.item.length);
        let plain = addr.checked_add(length).is_some_and(|end| end <= memory::FOREIGN_SPAN);
        if !plain {
            return Err(VerbsError::Unsupported("on-demand and null regions of another process"));
        }
        let reach = importer.reach()?;
        Ok(Foreign { importer: Arc::clone(importer), reach, tag: found.tag, addr, length })
    }

    /// EFAULT unless it has `len` bytes at all.
    pub(crate) fn fits(&self, len: u64) -> Result<()> {
        if len <= self.length { Ok(()) } else { Err(VerbsError::Fault) }
    }

    /// Copies bytes at `offset`; false if they are not there any more. What is long is copied in pieces.
    pub(crate) fn read(&self, offset: u64, to: &mut [u8]) -> bool {
        let Some(at) = self.place(offset, to.len()) else { return false };
        let mut pieces = (at..).step_by(PIECE).zip(to.chunks_mut(PIECE));
        pieces.all(|(at, to)| self.at_desk(|memory| memory.read_exact_at(to, at).is_ok()))
    }

    /// Copies `data` to `offset`, its last eight bytes last; false if the place is not there any more. What
    /// is long is copied in pieces.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> bool {
        let Some(at) = self.place(offset, data.len()) else { return false };
        let mut pieces = (at..).step_by(PIECE).zip(data.chunks(PIECE));
        pieces.all(|(at, data)| self.at_desk(|memory| write(memory, at, data)))
    }

    fn at_desk(&self, copy: impl FnOnce(&File) -> bool) -> bool {
        self.reach.at_desk(&self.importer.table, self.tag, copy)
    }

    fn place(&self, offset: u64, len: usize) -> Option<u64> {
        let end = offset.checked_add(len as u64)?;
        (end <= self.length).then(|| self.addr + offset)
    }
}

/// Writes another process's memory, the last eight bytes last.
fn write(memory: &File, at: u64, data: &[u8]) -> bool {
    let (body, tail) = data.split_at(data.len().saturating_sub(8));
    let piece = |b: &[u8]| libc::iovec { iov_base: b.as_ptr().cast_mut().cast(), iov_len: b.len() };
    let pieces = [piece(body), piece(tail)];
    let pieces = &pieces[usize::from(body.is_empty())..];
    let (count, at) = (pieces.len() as libc::c_int, at as libc::off_t);
    // SAFETY: the kernel reads `data` through `pieces`; the memory it changes is another process's, or is
    // registered with the card as any region.
    let wrote = unsafe { libc::pwritev(memory.as_raw_fd(), pieces.as_ptr(), count, at) };
    wrote == data.len() as isize
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
