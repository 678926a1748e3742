//! Memory files that other processes map, found by their inode.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

#[cfg(feature = "fuzzing")]
use memmap2::MmapRaw;
use starverbs_backend::sealed::{self, SealFlag};

use crate::error::{Result, VerbsError};

pub(super) const OTHER: VerbsError = VerbsError::Invalid("the descriptor of something else");

/// EINVAL unless it is a memory file with those seals; gives its length.
pub(super) fn check(file: &File, seals: SealFlag) -> Result<usize> {
    sealed::check(file, seals).ok_or(OTHER)
}

/// Which file: device and inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct FileIdentity(pub(super) u64, pub(super) u64);

impl FileIdentity {
    pub(super) fn of(file: &File) -> Result<FileIdentity> {
        Ok(FileIdentity::from(&file.metadata()?))
    }
}

impl From<&Metadata> for FileIdentity {
    fn from(about: &Metadata) -> FileIdentity {
        FileIdentity(about.dev(), about.ino())
    }
}

/// A file of an exporter's: which one, and its number among the exporter's descriptors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct FileAt {
    pub(super) file: FileIdentity,
    pub(super) fd: u32,
}

impl FileAt {
    pub(super) fn of(file: &File) -> Result<FileAt> {
        Ok(FileAt { file: FileIdentity::of(file)?, fd: file.as_raw_fd() as u32 })
    }
}

/// Opens a file anew that a process has open as `fd`; `process` is its directory in /proc. `None`: it is not
/// the one that is meant.
pub(super) fn open_of(
    process: RawFd,
    fd: u32,
    write: bool,
    is_meant: impl FnOnce(&Metadata) -> bool,
) -> io::Result<Option<File>> {
    /* looked at before it is opened: opening does things to devices and pipes */
    let path = format!("/proc/self/fd/{process}/fd/{fd}");
    let found = File::options().read(true).custom_flags(libc::O_PATH).open(path)?;
    let seen = found.metadata()?;
    if !seen.is_file() || !is_meant(&seen) {
        return Ok(None);
    }
    let path = format!("/proc/self/fd/{}", found.as_raw_fd());
    File::options().read(true).write(write).open(path).map(Some)
}

/// Overwrites all that follows the first eight bytes.
#[cfg(feature = "fuzzing")]
pub(super) fn scribble(map: &MmapRaw, bytes: &[u8]) {
    const MAGIC: usize = size_of::<u64>();
    let words = bytes.chunks_exact(4).take((map.len() - MAGIC) / 4);
    for (at, word) in words.map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]])).enumerate() {
        // SAFETY: `at` lies in the mapping, by `take`; every word of it is part of an atomic, and nobody else
        // has it.
        unsafe { map.as_mut_ptr().add(MAGIC).cast::<u32>().add(at).write_volatile(word) };
    }
}
