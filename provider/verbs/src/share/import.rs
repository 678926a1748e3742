//! The importer's side: an exporter's names, its table of regions, its memory, and a slot to read from.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, Mutex, PoisonError};

use starverbs_core::mr::MrAttr;

use super::file::{self, FileAt, FileIdentity};
use super::mrs::PeerMrs;
use super::names::{ExportedBytes, Names, ObjectKind, Tag};
use super::readers::ExporterSlot;
use crate::error::{Result, VerbsError};
use crate::memory;

/// The exporter is gone, or not in sight.
const GONE: VerbsError = VerbsError::Os(libc::ENODEV);
const NONE: VerbsError = VerbsError::Invalid("handle of another process");
/// Most bytes of one use: whoever waits for a reader waits for no more.
const PIECE: usize = 1 << 16;

/// Names of an exporter, and the way to its memory.
pub(crate) struct Importer {
    names: Names,
    /// As this process's PID namespace has it
    exporter: libc::pid_t,
    /// User who made the names
    owner: u32,
    /// Once somebody needed it
    reach: Mutex<Option<Arc<Reach>>>,
}

impl Importer {
    /// The exporter behind a `cmd_fd`.
    ///
    /// # Errors
    /// EBADF; EINVAL: the descriptor of something else; ENODEV: its process is gone, closed the context, or
    /// is in a PID namespace that this one does not see; EOPNOTSUPP: of a card that shows no memory, a board.
    pub(crate) fn open(fd: RawFd) -> Result<Importer> {
        // SAFETY: takes and gives numbers, of which any will do.
        let own = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
        if own < 0 {
            return Err(VerbsError::last_os());
        }
        // SAFETY: the descriptor is new and nobody else's.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(own) });
        let names = Names::open(&file)?;
        // SAFETY: takes and gives numbers.
        let exporter = unsafe { libc::fcntl(own, libc::F_GETOWN) };
        if exporter <= 0 || names.is_closed() {
            return Err(GONE);
        }
        if names.whereabouts().token_at == 0 {
            return Err(VerbsError::Unsupported("imports from a board's client"));
        }
        Ok(Importer { names, exporter, owner: file.metadata()?.uid(), reach: Mutex::default() })
    }

    /// The object of this kind and handle.
    ///
    /// # Errors
    /// EINVAL: none; ENODEV: the context is closed.
    pub(crate) fn find(&self, kind: ObjectKind, handle: u32) -> Result<(Tag, ExportedBytes)> {
        if self.names.is_closed() {
            return Err(GONE);
        }
        self.names.find(kind, handle).ok_or(NONE)
    }

    /// What a key of the exporter's opens.
    ///
    /// # Errors
    /// EINVAL: nothing; ENODEV: the context is closed; and as [`Importer::reach`].
    pub(crate) fn find_mr(&self, key: u32) -> Result<(Tag, MrAttr)> {
        if self.names.is_closed() {
            return Err(GONE);
        }
        let found = self.reach()?.mrs.find(key);
        let (tag, entry) = found.filter(|(_, entry)| entry.is_mr()).ok_or(NONE)?;
        Ok((Tag::Mr(tag), entry.attr()))
    }

    /// Whether that incarnation of a protection domain or of device memory goes on.
    pub(crate) fn is_valid(&self, tag: Tag) -> bool {
        let Tag::Name(kind, handle, incarnation) = tag else { return false };
        self.names.is_valid(kind, handle, incarnation) && !self.names.is_closed()
    }

    /// The exporter's memory and table, and a reader's slot.
    ///
    /// # Errors
    /// EPERM: the system does not let this process reach it, or another user made the names than runs the
    /// process; ENODEV: the exporter is gone; ENOMEM: too many importers; EOPNOTSUPP: no `/proc`.
    pub(super) fn reach(&self) -> Result<Arc<Reach>> {
        let mut slot = self.reach.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reach) = &*slot {
            return Ok(Arc::clone(reach));
        }
        Ok(Arc::clone(slot.insert(Arc::new(self.go()?))))
    }

    fn go(&self) -> Result<Reach> {
        let about = self.names.whereabouts();
        /* The directory stays that of one process. Which one says a field that whoever has the descriptor
         * can set, so we look whether it is the exporter before anything is written there: it has the
         * files, and the token. */
        let process = open(&format!("/proc/{}", self.exporter), false)?;
        let memory = open(&inside(&process, "mem"), true)?;
        let readers = file_of(&process, about.readers, true)?;
        let mrs = file_of(&process, about.mrs, false)?;
        /* The process of that number may be another one by now, of more rights, to which who sent the names
         * has passed the same files on. The file is root's if the process may not be looked at; the directory
         * has its user of now, should that have changed since the file was opened. */
        if memory.metadata()?.uid() != self.owner || process.metadata()?.uid() != self.owner {
            return Err(VerbsError::Os(libc::EPERM));
        }
        let mut there = [0; 8];
        if memory.read_exact_at(&mut there, about.token_at).is_err()
            || u64::from_ne_bytes(there) != about.token
        {
            return Err(GONE);
        }
        let reader = Mutex::new(ExporterSlot::join(&readers)?);
        Ok(Reach { memory, mrs: PeerMrs::open(&mrs)?, reader })
    }
}

/// A file among a process's descriptors.
fn file_of(process: &File, at: FileAt, write: bool) -> Result<File> {
    let found = file::open_of(process.as_raw_fd(), at.fd, write, |seen| FileIdentity::from(seen) == at.file);
    found.map_err(open_error)?.ok_or(GONE)
}

/// The path of what a directory has now.
fn inside(directory: &File, name: &str) -> String {
    format!("/proc/self/fd/{}/{name}", directory.as_raw_fd())
}

/// Opens what is in `/proc`.
fn open(path: &str, write: bool) -> Result<File> {
    File::options().read(true).write(write).open(path).map_err(open_error)
}

/// What an error in `/proc` says about the exporter.
fn open_error(error: io::Error) -> VerbsError {
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

/// An exporter's memory and table of regions, and this process's slot there.
pub(super) struct Reach {
    memory: File,
    mrs: PeerMrs,
    /// Locked while it reads
    pub(super) reader: Mutex<ExporterSlot>,
}

/// Memory of an exporter that this process may use as long as an object of the exporter's is valid.
#[derive(Clone)]
pub(crate) struct Foreign {
    importer: Arc<Importer>,
    reach: Arc<Reach>,
    tag: Tag,
    addr: u64,
    length: u64,
}

impl Foreign {
    /// The memory of an object that was found.
    ///
    /// # Errors
    /// As [`Importer::reach`], and EOPNOTSUPP: no memory that lies there at all times.
    pub(crate) fn new(importer: &Arc<Importer>, tag: Tag, bytes: ExportedBytes) -> Result<Foreign> {
        let ExportedBytes { addr, length } = bytes;
        let plain = addr.checked_add(length).is_some_and(|end| end <= memory::FOREIGN_SPAN);
        if !plain {
            return Err(VerbsError::Unsupported("on-demand and null regions of another process"));
        }
        let reach = importer.reach()?;
        Ok(Foreign { importer: Arc::clone(importer), reach, tag, addr, length })
    }

    /// EFAULT unless it has `len` bytes at all.
    pub(crate) fn fits(&self, len: u64) -> Result<()> {
        if len <= self.length { Ok(()) } else { Err(VerbsError::Fault) }
    }

    /// Copies bytes at `offset`; false if they are not there any more. What is long is copied in pieces.
    pub(crate) fn read(&self, offset: u64, to: &mut [u8]) -> bool {
        // SAFETY: the slice can be written.
        unsafe { self.read_raw(offset, to.as_mut_ptr(), to.len()) }
    }

    /// [`Foreign::read`] to memory that others may write meanwhile.
    ///
    /// # Safety
    /// [to, to + len) can be written.
    pub(crate) unsafe fn read_raw(&self, offset: u64, to: *mut u8, len: usize) -> bool {
        let Some(from) = self.place(offset, len) else { return false };
        (0..len).step_by(PIECE).all(|at| {
            let piece = (len - at).min(PIECE);
            // SAFETY: at + piece <= len.
            self.with_memory(|memory| unsafe { read(memory, from + at as u64, to.add(at), piece) })
        })
    }

    /// Copies `data` to `offset`, its last eight bytes last; false if the place is not there any more. What
    /// is long is copied in pieces.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> bool {
        // SAFETY: the slice can be read.
        unsafe { self.write_raw(offset, data.as_ptr(), data.len()) }
    }

    /// [`Foreign::write`] of memory that others may write meanwhile.
    ///
    /// # Safety
    /// [from, from + len) can be read.
    pub(crate) unsafe fn write_raw(&self, offset: u64, from: *const u8, len: usize) -> bool {
        let Some(to) = self.place(offset, len) else { return false };
        (0..len).step_by(PIECE).all(|at| {
            let piece = (len - at).min(PIECE);
            // SAFETY: at + piece <= len.
            self.with_memory(|memory| unsafe { write(memory, to + at as u64, from.add(at), piece) })
        })
    }

    /// Runs `copy` while the object is there: its exporter waits for the end of it. False: it is not, or the
    /// copy failed.
    pub(super) fn with_memory(&self, copy: impl FnOnce(&File) -> bool) -> bool {
        let mut reader = self.reach.reader.lock().unwrap_or_else(PoisonError::into_inner);
        reader.read(|| (self.is_valid() && copy(&self.reach.memory)).then_some(())).is_some()
    }

    fn is_valid(&self) -> bool {
        match self.tag {
            Tag::Mr(tag) => self.reach.mrs.is_valid(tag) && !self.importer.names.is_closed(),
            name => self.importer.is_valid(name),
        }
    }

    fn place(&self, offset: u64, len: usize) -> Option<u64> {
        let end = offset.checked_add(len as u64)?;
        (end <= self.length).then(|| self.addr + offset)
    }
}

/// Reads another process's memory. A page that is not there ends a read early: the next one fails.
///
/// # Safety
/// [to, to + len) can be written.
unsafe fn read(memory: &File, at: u64, to: *mut u8, len: usize) -> bool {
    // SAFETY: the kernel writes the caller's bytes alone.
    let done = unsafe { libc::pread(memory.as_raw_fd(), to.cast(), len, at as libc::off_t) };
    done == len as isize
}

/// Writes another process's memory, the last eight bytes last.
///
/// # Safety
/// [from, from + len) can be read.
unsafe fn write(memory: &File, at: u64, from: *const u8, len: usize) -> bool {
    let body = len.saturating_sub(8);
    let piece =
        |at: usize, len| libc::iovec { iov_base: from.wrapping_add(at).cast_mut().cast(), iov_len: len };
    let pieces = [piece(0, body), piece(body, len - body)];
    let pieces = &pieces[usize::from(body == 0)..];
    let (count, at) = (pieces.len() as libc::c_int, at as libc::off_t);
    // SAFETY: the kernel reads the caller's bytes through `pieces`; the memory it changes is another
    // process's, or is registered with the card as any region.
    let wrote = unsafe { libc::pwritev(memory.as_raw_fd(), pieces.as_ptr(), count, at) };
    wrote == len as isize
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
