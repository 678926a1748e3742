//! Memory files that other processes map: sealed, so that nobody takes pages away under those who have them, and
//! found by their inode.

use std::fs::{File, Metadata};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::MetadataExt;

use memmap2::{MmapOptions, MmapRaw};

use crate::error::{Result, VerbsError};

/// Nobody changes a file's size.
pub(super) const SIZE_STAYS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
/// And nobody writes it but by a mapping that was there before, the maker's (Linux 5.1).
pub(super) const ONLY_OURS: i32 = SIZE_STAYS | libc::F_SEAL_FUTURE_WRITE;

pub(super) const OTHER: VerbsError = VerbsError::Invalid("the descriptor of something else");

/// A memory file of `len` bytes, mapped, then sealed.
pub(super) fn create(len: usize, seals: i32) -> Result<(MmapRaw, File)> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: a constant name; the call makes a new descriptor.
    let fd = unsafe { libc::memfd_create(c"starverbs".as_ptr(), flags) };
    if fd < 0 {
        return Err(VerbsError::last_os());
    }
    // SAFETY: the descriptor is new and nobody else's.
    let file = unsafe { File::from_raw_fd(fd) };
    /* it counts against the limit on files (RLIMIT_FSIZE) */
    starverbs_backend::without_signals(|| file.set_len(len as u64))?;
    let map = MmapOptions::new().len(len).map_raw(&file)?;
    // SAFETY: takes numbers.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
        return Err(VerbsError::last_os());
    }
    Ok((map, file))
}

/// EINVAL unless it is a memory file with those seals; gives its length.
pub(super) fn check(file: &File, seals: i32) -> Result<usize> {
    // SAFETY: takes and gives numbers.
    let has = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if has < 0 || has & seals != seals {
        return Err(OTHER);
    }
    usize::try_from(file.metadata()?.len()).map_err(|_| OTHER)
}

/// Which file: device and inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Identity(pub(super) u64, pub(super) u64);

impl Identity {
    pub(super) fn of(file: &File) -> Result<Identity> {
        Ok(Identity::from(&file.metadata()?))
    }
}

impl From<&Metadata> for Identity {
    fn from(about: &Metadata) -> Identity {
        Identity(about.dev(), about.ino())
    }
}

/// A file of an exporter's: which one, and its number among the exporter's descriptors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct FileAt {
    pub(super) file: Identity,
    pub(super) fd: u32,
}

impl FileAt {
    pub(super) fn of(file: &File) -> Result<FileAt> {
        Ok(FileAt { file: Identity::of(file)?, fd: file.as_raw_fd() as u32 })
    }
}

/// Writes bytes over all that stands behind the first eight.
#[cfg(feature = "fuzzing")]
pub(super) fn scribble(map: &MmapRaw, bytes: &[u8]) {
    const MAGIC: usize = size_of::<u64>();
    let words = bytes.chunks_exact(4).take((map.len() - MAGIC) / 4);
    for (at, word) in words.map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]])).enumerate() {
        // SAFETY: `at` lies in the mapping, by `take`; every word of it is part of an atomic, and nobody else has
        // it.
        unsafe { map.as_mut_ptr().add(MAGIC).cast::<u32>().add(at).write_volatile(word) };
    }
}
