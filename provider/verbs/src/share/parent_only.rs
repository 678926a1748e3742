//! A mapping that forked children do not have.

use std::mem::ManuallyDrop;
use std::ops::Deref;

use memmap2::MmapRaw;

use crate::error::{Result, VerbsError};
use crate::process;

/// A mapping of a memory file, of the process that made it alone.
pub(super) struct ParentOnly {
    map: ManuallyDrop<MmapRaw>,
    forks: u32,
}

impl ParentOnly {
    /// Keeps a mapping from children.
    ///
    /// # Errors
    /// What madvise(2) says.
    pub(super) fn new(map: MmapRaw) -> Result<ParentOnly> {
        // SAFETY: the whole mapping is ours; what changes is what a fork does.
        let kept = unsafe { libc::madvise(map.as_mut_ptr().cast(), map.len(), libc::MADV_DONTFORK) };
        if kept != 0 {
            return Err(VerbsError::last_os());
        }
        Ok(ParentOnly { map: ManuallyDrop::new(map), forks: process::forks() })
    }

    /// False in a child, where something else may lie at its address.
    #[inline]
    pub(super) fn is_ours(&self) -> bool {
        self.forks == process::forks()
    }
}

impl Deref for ParentOnly {
    type Target = MmapRaw;

    fn deref(&self) -> &MmapRaw {
        &self.map
    }
}

impl Drop for ParentOnly {
    fn drop(&mut self) {
        if self.is_ours() {
            // SAFETY: dropped once, here. A child must not unmap what may be something else there.
            unsafe { ManuallyDrop::drop(&mut self.map) };
        }
    }
}
