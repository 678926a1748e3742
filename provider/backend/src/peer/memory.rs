//! The memory of a session's rings: a memory file whose size is sealed, mapped by both processes.
//!
//! Who connects makes it. Who accepts looks at the seals, without which the other could take pages away that
//! are in use. What lies in it is the rings' affair.

use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use memmap2::{MmapOptions, MmapRaw};
use starverbs_rings::{MessageHead, MessageReader, MessageWriter};

use crate::sealed::{self, SIZE_STAYS};

/// Lanes of a session: in each one ring each way.
pub(super) const LANES: usize = 3;
/// Bytes of a ring. Pages that no message touched take no memory.
pub(super) const RING: usize = 1 << 20;
/// Where the rings' bytes begin, behind all heads.
const DATA: usize = 4096;
const LEN: usize = DATA + 2 * LANES * RING;

const _: () = assert!(2 * LANES * size_of::<MessageHead>() <= DATA);

/// A session's memory, mapped.
pub(super) struct Memory {
    map: ManuallyDrop<MmapRaw>,
    /// Who mapped it: a forked child does not have it
    process: u32,
}

impl Memory {
    /// New memory, all zero, and the file that the other process is to map. `None`: the system gives none.
    pub(super) fn create() -> Option<(Memory, File)> {
        let (map, file) = sealed::create(c"starverbs", LEN, SIZE_STAYS).ok()?;
        Some((Memory::keep(map)?, file))
    }

    /// Maps what the other process made. `None`: it is something else, or can still be made shorter.
    pub(super) fn open(file: OwnedFd) -> Option<Memory> {
        let file = File::from(file);
        let right = sealed::check(&file, SIZE_STAYS) == Some(LEN);
        Memory::keep(right.then(|| MmapOptions::new().len(LEN).map_raw(&file))?.ok()?)
    }

    /// Writes bytes anywhere, as a hostile peer may.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn scribble(&self, at: usize, bytes: &[u8]) {
        let len = bytes.len().min(LEN.saturating_sub(at));
        // SAFETY: inside of the mapping, to which there are no references but those of atomics.
        unsafe { self.map.as_mut_ptr().add(at.min(LEN)).copy_from(bytes.as_ptr(), len) };
    }

    fn keep(map: MmapRaw) -> Option<Memory> {
        let memory = Memory { map: ManuallyDrop::new(map), process: std::process::id() };
        // SAFETY: the whole mapping is ours; what changes is what a fork does.
        let kept = unsafe { libc::madvise(memory.map.as_mut_ptr().cast(), LEN, libc::MADV_DONTFORK) };
        (kept == 0).then_some(memory)
    }

    /// The ends of lane `lane` that belong to who connected, or to who accepted.
    ///
    /// # Safety
    /// Called once for a lane; the ends are used no longer than this memory lives.
    pub(super) unsafe fn lane(&self, lane: usize, connected: bool) -> (MessageWriter, MessageReader) {
        let (out, inward) = (2 * lane + usize::from(!connected), 2 * lane + usize::from(connected));
        let size = RING as u32;
        // SAFETY: a mapping is not at 0, and heads and bytes of that many rings lie in it. It is
        // page-aligned, and the heads' size a multiple of their alignment; sealed memory stays mapped as long
        // as `self`, which the caller promises is long enough. The lanes' rings are apart, and each end is
        // given out once.
        unsafe {
            let base = NonNull::new_unchecked(self.map.as_mut_ptr());
            let head = |ring: usize| base.add(ring * size_of::<MessageHead>()).cast();
            let data = |ring: usize| base.add(DATA + ring * RING);
            (
                MessageWriter::new(head(out), data(out), size),
                MessageReader::new(head(inward), data(inward), size),
            )
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        /* in a forked child something else may lie there */
        if self.process == std::process::id() {
            // SAFETY: dropped here alone.
            unsafe { ManuallyDrop::drop(&mut self.map) };
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::fcntl::SealFlag;

    use super::*;

    #[test]
    fn only_sealed_memory_of_the_right_size_is_mapped() {
        let (_map, short) = sealed::create(c"starverbs", LEN - 4096, SIZE_STAYS).expect("memory");
        assert!(Memory::open(short.into()).is_none());
        let (_map, unsealed) = sealed::create(c"starverbs", LEN, SealFlag::F_SEAL_GROW).expect("memory");
        assert!(Memory::open(unsealed.into()).is_none(), "it can be made shorter");
        let (_memory, file) = Memory::create().expect("memory");
        assert!(Memory::open(file.into()).is_some());
    }
}
