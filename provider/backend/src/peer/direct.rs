//! What a process hands over so that a peer of equal credentials reaches its registered memory by itself.
//!
//! Owns which descriptors these are, and how they are opened for each peer. It must not know what lies in
//! them, nor who may have them.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use crate::descriptor::Socket;

/// What a process may hand over.
pub struct OfferedMemory {
    /// Its table of memory regions, which the others read
    pub mrs: File,
    /// The slots of readers, in which the others say what they do
    pub readers: File,
    /// The gates of its queue pairs, which the others read
    pub gates: File,
}

/// The same, of one process for another, and the way to its memory.
pub struct MemoryFiles {
    /// Its table of memory regions
    pub mrs: File,
    /// The slots of readers: a file description of nobody else's
    pub readers: File,
    /// The gates of its queue pairs
    pub gates: File,
    /// Its /proc/self/mem, as itself has opened it
    pub memory: ProcessFile,
    /// Its /proc/self: the directory of this one process, whoever gets its number later
    pub process: ProcessFile,
}

/// A descriptor that says something of a process, which forked children do not keep.
#[derive(Debug)]
pub struct ProcessFile(Socket);

impl ProcessFile {
    pub(super) fn new(fd: OwnedFd) -> ProcessFile {
        ProcessFile(Socket::new(fd))
    }
}

impl AsRawFd for ProcessFile {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl OfferedMemory {
    /// For one peer. Each gets a file description of its own: the lock that says whose a slot is belongs to
    /// it.
    pub(super) fn open(&self) -> Option<MemoryFiles> {
        let again = |file: &File, write: bool| {
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            File::options().read(true).write(write).open(path).ok()
        };
        let memory = File::options().read(true).write(true).open("/proc/self/mem").ok()?;
        Some(MemoryFiles {
            mrs: again(&self.mrs, false)?,
            readers: again(&self.readers, true)?,
            gates: again(&self.gates, false)?,
            memory: ProcessFile::new(memory.into()),
            process: ProcessFile::new(File::open("/proc/self").ok()?.into()),
        })
    }
}
