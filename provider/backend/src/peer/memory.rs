//! Memory of a session: a memory file whose size is sealed, mapped by both processes.
//!
//! Who connects makes it. Who accepts looks at the seals, without which the other could take pages away that
//! are in use. What lies in it is the affair of rings ([`RingMemory`], and [`super::channel`]).

use std::fs::File;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use memmap2::MmapOptions;
use starverbs_rings::{MessageHead, MessageReader, MessageWriter};

use crate::ParentOnly;
use crate::sealed::{self, SIZE_STAYS};

/// Lanes of a session: in each one ring each way.
pub(super) const LANES: usize = 3;
/// Bytes of a ring. Pages that no message touched take no memory.
pub(super) const RING: usize = 1 << 20;
/// Where the rings' bytes begin, behind all heads.
const DATA: usize = 4096;
const LEN: usize = DATA + 2 * LANES * RING;

const _: () = assert!(2 * LANES * size_of::<MessageHead>() <= DATA);

/// Memory that two processes have mapped.
pub(super) struct SharedMapping(ParentOnly);

impl SharedMapping {
    /// So many bytes of new memory, all zero, and the file that the other process is to map. `None`: the
    /// system gives none.
    pub(super) fn create(len: usize) -> Option<(SharedMapping, File)> {
        let (map, file) = sealed::create_ours(c"starverbs", len, SIZE_STAYS).ok()?;
        Some((SharedMapping(map), file))
    }

    /// Maps what the other process made. `None`: it is something else, or can still be made shorter.
    pub(super) fn open(file: OwnedFd, len: usize) -> Option<SharedMapping> {
        let file = File::from(file);
        let right = sealed::check(&file, SIZE_STAYS) == Some(len);
        let map = right.then(|| MmapOptions::new().len(len).map_raw(&file))?.ok()?;
        Some(SharedMapping(ParentOnly::new(map).ok()?))
    }

    /// Where it begins: at a page.
    pub(super) fn base(&self) -> NonNull<u8> {
        // SAFETY: a mapping is not at 0.
        unsafe { NonNull::new_unchecked(self.0.as_mut_ptr()) }
    }

    /// Writes bytes anywhere, as a hostile peer may.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn scribble(&self, at: usize, bytes: &[u8]) {
        let at = at.min(self.0.len());
        let len = bytes.len().min(self.0.len() - at);
        // SAFETY: inside of the mapping, to which there are no references but those of atomics.
        unsafe { self.0.as_mut_ptr().add(at).copy_from(bytes.as_ptr(), len) };
    }
}

/// The memory of a session's rings.
pub(super) struct RingMemory(SharedMapping);

impl RingMemory {
    /// As [`SharedMapping::create`].
    pub(super) fn create() -> Option<(RingMemory, File)> {
        SharedMapping::create(LEN).map(|(memory, file)| (RingMemory(memory), file))
    }

    /// As [`SharedMapping::open`].
    pub(super) fn open(file: OwnedFd) -> Option<RingMemory> {
        SharedMapping::open(file, LEN).map(RingMemory)
    }

    /// As [`SharedMapping::scribble`].
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn scribble(&self, at: usize, bytes: &[u8]) {
        self.0.scribble(at, bytes);
    }

    /// The ends of lane `lane` that belong to who connected, or to who accepted.
    ///
    /// # Safety
    /// Called once for a lane; the ends are used no longer than this memory lives.
    pub(super) unsafe fn lane(&self, lane: usize, connected: bool) -> (MessageWriter, MessageReader) {
        let (out, inward) = (2 * lane + usize::from(!connected), 2 * lane + usize::from(connected));
        let size = RING as u32;
        // SAFETY: heads and bytes of that many rings lie in the mapping. It is page-aligned, and the heads'
        // size a multiple of their alignment; sealed memory stays mapped as long as `self`, which the caller
        // promises is long enough. The lanes' rings are apart, and each end is given out once.
        unsafe {
            let base = self.0.base();
            let head = |ring: usize| base.add(ring * size_of::<MessageHead>()).cast();
            let data = |ring: usize| base.add(DATA + ring * RING);
            (
                MessageWriter::new(head(out), data(out), size),
                MessageReader::new(head(inward), data(inward), size),
            )
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
        assert!(RingMemory::open(short.into()).is_none());
        let (_map, unsealed) = sealed::create(c"starverbs", LEN, SealFlag::F_SEAL_GROW).expect("memory");
        assert!(RingMemory::open(unsealed.into()).is_none(), "it can be made shorter");
        let (_memory, file) = RingMemory::create().expect("memory");
        assert!(RingMemory::open(file.into()).is_some());
    }
}
