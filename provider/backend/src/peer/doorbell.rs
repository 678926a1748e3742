//! The doorbell of a process: a word of memory that it hands to those who have channels with it.
//!
//! Who has many channels polls this word instead of each of them ([`starverbs_rings::PeerDoorbell`]). Owns
//! the memory; it must not know when it is awaited.

use std::fs::File;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use starverbs_rings::PeerDoorbell;

use super::memory::SharedMapping;

const LEN: usize = 4096;

const _: () = assert!(size_of::<PeerDoorbell>() <= LEN);

/// A doorbell in memory that several processes have mapped.
pub struct SharedDoorbell(SharedMapping);

// SAFETY: memory without thread affinity, of which only the doorbell's word is used, by atomics.
unsafe impl Send for SharedDoorbell {}
// SAFETY: as before.
unsafe impl Sync for SharedDoorbell {}

impl SharedDoorbell {
    /// A new one, and the file that the others are to map. `None`: the system gives none.
    pub(super) fn create() -> Option<(Arc<SharedDoorbell>, File)> {
        let (memory, file) = SharedMapping::create(LEN)?;
        Some((Arc::new(SharedDoorbell(memory)), file))
    }

    /// Another process's. `None`: it is none.
    pub(super) fn open(file: OwnedFd) -> Option<Arc<SharedDoorbell>> {
        SharedMapping::open(file, LEN).map(|memory| Arc::new(SharedDoorbell(memory)))
    }
}

impl Deref for SharedDoorbell {
    type Target = PeerDoorbell;

    #[inline]
    fn deref(&self) -> &PeerDoorbell {
        // SAFETY: it lies at the beginning of sealed memory, which stays mapped as long as the value lives;
        // any bytes are valid for atomics.
        unsafe { self.0.base().cast().as_ref() }
    }
}
