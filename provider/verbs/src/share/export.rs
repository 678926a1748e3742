//! The exporter's side: what a card lets other processes see of its memory, and what a context lets them
//! name.

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};

use starverbs_backend::OfferedMemory;

use super::gates::Gates;
use super::mrs::MrMemory;
use super::names::{ExportedBytes, Names, ObjectKind, Whereabouts};
use super::readers::Readers;
use crate::error::{Result, VerbsError};
use crate::process;

/// What a card shows to other processes: its table of regions, by which they reach its memory, and their
/// slots.
pub(crate) struct Published {
    about: Whereabouts,
    readers: Readers,
    /// Shows importers that they reach the memory of this process. At an address that stays.
    _token: Box<u64>,
}

impl Published {
    /// The table of a card with so many keys, and what others need to see it; `None`: the host has no memory
    /// files, or none with the seals (Linux 5.1). `token`: a number that no other process can have by chance.
    ///
    /// # Errors
    /// ENOMEM
    pub(crate) fn create(keys: u32, token: u64) -> Result<(Option<Published>, MrMemory)> {
        let memory = MrMemory::create(keys)?;
        let published = memory.file().zip(Readers::create().ok()).and_then(|(mrs, readers)| {
            let token = Box::new(token);
            let token_at = std::ptr::from_ref(&*token) as u64;
            let about = Whereabouts { token: *token, token_at, mrs, readers: readers.file().ok()? };
            Some(Published { about, readers, _token: token })
        });
        Ok((published, memory))
    }

    /// What peers of equal credentials get, and the card's half of it. `None`: the system lacks something.
    pub(crate) fn offer(&self) -> Option<(OfferedMemory, Gates)> {
        let mrs = File::open(format!("/proc/self/fd/{}", self.about.mrs.fd)).ok()?;
        let (gates, file) = Gates::create().ok()?;
        Some((OfferedMemory { mrs, readers: self.readers.share()?, gates: file }, gates))
    }

    /// Waits until no other process uses what was closed before: for copies that are under way. One of a
    /// stopped process goes on when the process does.
    pub(crate) fn await_readers(&self) {
        self.readers.wait();
    }
}

/// A context's names.
pub(crate) struct Exports {
    names: Names,
    file: File,
    /// Forked children must not touch their parent's
    forks: u32,
}

impl Exports {
    /// No names yet, in a context of a card that shows its memory so; `None`: one that does not, whose
    /// descriptor is for imports in its own process.
    ///
    /// # Errors
    /// No memory file.
    pub(crate) fn new(published: Option<&Published>) -> Result<Exports> {
        let about = published.map_or_else(Whereabouts::default, |published| published.about);
        let (names, file) = Names::create(&about)?;
        // SAFETY: takes numbers. nix does not know F_SETOWN and F_GETOWN.
        let named = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETOWN, libc::getpid()) };
        if named < 0 {
            return Err(VerbsError::last_os());
        }
        Ok(Exports { names, file, forks: process::forks() })
    }

    /// The descriptor that stands for the context. Its owner (F_GETOWN) names this process, in whatever PID
    /// namespace one asks.
    pub(crate) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Lets others have a protection domain.
    pub(crate) fn publish_pd(&self, handle: u32) {
        self.if_ours(|names| names.put(ObjectKind::Pd, handle, ExportedBytes::default()));
    }

    /// Lets others have device memory.
    pub(crate) fn publish_dm(&self, handle: u32, bytes: ExportedBytes) {
        self.if_ours(|names| names.put(ObjectKind::Dm, handle, bytes));
    }

    /// Nobody finds the object from now on. Who may use it already, [`Published::await_readers`] waits for.
    pub(crate) fn withdraw(&self, kind: ObjectKind, handle: u32) {
        self.if_ours(|names| names.take(kind, handle));
    }

    /// Nobody finds anything from now on.
    pub(crate) fn close(&self) {
        self.if_ours(Names::close);
    }

    fn if_ours(&self, call: impl FnOnce(&Names)) {
        if self.forks == process::forks() {
            call(&self.names);
        }
    }
}
