//! The bell of a process: a word of memory that it hands to those who have channels with it.
//!
//! Who has many channels looks at this word instead of at each of them ([`starverbs_rings::Bell`]). Owns the
//! memory; it must not know when one listens.

use std::fs::File;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use starverbs_rings::Bell;

use super::memory::SharedMapping;

const LEN: usize = 4096;

const _: () = assert!(size_of::<Bell>() <= LEN);

/// A bell in memory that several processes have mapped.
pub struct SharedBell(SharedMapping);

// SAFETY: memory without thread affinity, of which only the bell's word is used, by atomics.
unsafe impl Send for SharedBell {}
// SAFETY: as before.
unsafe impl Sync for SharedBell {}

impl SharedBell {
    /// A new one, and the file that the others are to map. `None`: the system gives none.
    pub(super) fn create() -> Option<(Arc<SharedBell>, File)> {
        let (memory, file) = SharedMapping::create(LEN)?;
        Some((Arc::new(SharedBell(memory)), file))
    }

    /// Another process's. `None`: it is none.
    pub(super) fn open(file: OwnedFd) -> Option<Arc<SharedBell>> {
        SharedMapping::open(file, LEN).map(|memory| Arc::new(SharedBell(memory)))
    }
}

impl Deref for SharedBell {
    type Target = Bell;

    #[inline]
    fn deref(&self) -> &Bell {
        // SAFETY: it lies at the beginning of sealed memory, which stays mapped as long as the value lives;
        // any bytes are valid for atomics.
        unsafe { self.0.base().cast().as_ref() }
    }
}
