//! Files that maps lie in: which of them the board believes, and how their bytes are reached.
//!
//! A file is mapped once for each client, however many maps of it there are: a guest with an IOMMU maps its
//! memory page by page.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::rc::Rc;

use memmap2::MmapOptions;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::statfs::{FsType, HUGETLBFS_MAGIC, PROC_SUPER_MAGIC, TMPFS_MAGIC, fstatfs};

use super::guard::Guarded;
use super::{Errno, PAGE};
use crate::broken;

/// Where the bytes of a map are.
#[derive(Clone)]
pub(super) enum MapBytes {
    /// Mapped here, from an offset on
    Here(Rc<MappedFile>, usize),
    /// Of a process: its address of the first byte
    Process(Rc<File>, u64),
}

/// A file, or a part of it, that is mapped here.
pub(super) struct MappedFile {
    guarded: Guarded,
    inode: (u64, u64),
    /// Where in the file it begins
    first: u64,
    len: u64,
    writable: bool,
    /// Nobody can take its pages away
    stays: bool,
}

impl MappedFile {
    /// A byte of it.
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        self.guarded.as_mut_ptr().wrapping_add(offset)
    }

    pub(super) fn is_lost(&self) -> bool {
        self.guarded.is_lost()
    }

    pub(super) fn stays(&self) -> bool {
        self.stays
    }

    fn has(&self, inode: (u64, u64), offset: u64, end: u64, writable: bool) -> bool {
        self.inode == inode
            && self.first <= offset
            && end <= self.first + self.len
            && (self.writable || !writable)
    }
}

/// The files of one client.
pub(super) struct ClientFiles {
    mapped: Vec<Rc<MappedFile>>,
    /// Bytes that may still be mapped
    left: u64,
}

impl ClientFiles {
    /// `most`: bytes of address space that they may take.
    pub(super) fn new(most: u64) -> ClientFiles {
        ClientFiles { mapped: Vec::new(), left: most }
    }

    /// Opens `size` bytes of a file from `offset` on. EACCES: it is none that the board believes; EINVAL: it
    /// ends before; ENOMEM: it is too long.
    pub(super) fn open(
        &mut self,
        file: File,
        offset: u64,
        size: u64,
        writable: bool,
        same_user: bool,
    ) -> Result<MapBytes, Errno> {
        let kind = fstatfs(&file).map_err(|error| error as i32)?.filesystem_type();
        if kind == PROC_SUPER_MAGIC && same_user || broken::rule(40) {
            return Ok(MapBytes::Process(Rc::new(file), offset));
        }
        let stays = stays(&file, kind);
        let is_own = same_user && matches!(kind, TMPFS_MAGIC | HUGETLBFS_MAGIC);
        if !stays && !is_own {
            return Err(libc::EACCES);
        }
        let about = file.metadata().map_err(errno)?;
        let end = offset.checked_add(size).ok_or(libc::EINVAL)?;
        /* behind a file's end its last page is zeroes */
        if end > about.len().next_multiple_of(PAGE) {
            return Err(libc::EINVAL);
        }
        let inode = (about.dev(), about.ino());
        let known = self.mapped.iter().find(|mapped| mapped.has(inode, offset, end, writable));
        let mapped = match known {
            Some(mapped) => Rc::clone(mapped),
            None => self.map(&file, &about, offset, size, writable, stays)?,
        };
        let at = usize::try_from(offset - mapped.first).map_err(|_| libc::EINVAL)?;
        Ok(MapBytes::Here(mapped, at))
    }

    /// Maps a file as a whole, if it may be so long, or what was asked for.
    fn map(
        &mut self,
        file: &File,
        about: &Metadata,
        offset: u64,
        size: u64,
        writable: bool,
        stays: bool,
    ) -> Result<Rc<MappedFile>, Errno> {
        let whole = about.len().next_multiple_of(PAGE);
        let (first, len) = if whole <= self.left { (0, whole) } else { (offset, size) };
        let left = self.left.checked_sub(len).ok_or(libc::ENOMEM)?;
        let options = {
            let mut options = MmapOptions::new();
            options.offset(first).len(usize::try_from(len).map_err(|_| libc::EINVAL)?);
            options
        };
        let (map, may_write) = match options.map_raw(file) {
            Ok(map) => (map, true),
            Err(_) if !writable => (options.map_raw_read_only(file).map_err(errno)?, false),
            Err(error) => return Err(errno(error)),
        };
        let guarded = Guarded::new(map).map_err(errno)?;
        let inode = (about.dev(), about.ino());
        let mapped = Rc::new(MappedFile { guarded, inode, first, len, writable: may_write, stays });
        self.mapped.push(Rc::clone(&mapped));
        self.left = left;
        Ok(mapped)
    }

    /// Ends mappings that no map needs any more.
    pub(super) fn tidy(&mut self) {
        let left = &mut self.left;
        self.mapped.retain(|mapped| {
            let used = Rc::strong_count(mapped) > 1;
            *left += if used { 0 } else { mapped.len };
            used
        });
    }

    /// Pages of one were missing.
    pub(super) fn are_lost(&self) -> bool {
        self.mapped.iter().any(|mapped| mapped.is_lost())
    }
}

fn errno(error: io::Error) -> Errno {
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// Whether a file is a memory file that is sealed against shrinking: only those have seals. One of huge pages
/// may lack pages all the same.
fn stays(file: &File, kind: FsType) -> bool {
    let seals = || fcntl(file, FcntlArg::F_GET_SEALS).map(SealFlag::from_bits_retain);
    kind == TMPFS_MAGIC && seals().is_ok_and(|seals| seals.contains(SealFlag::F_SEAL_SHRINK))
}
