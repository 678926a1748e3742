//! The memory of a session's rings: a memory file whose size is sealed, mapped by both processes.
//!
//! Who connects makes it. Who accepts looks at the seals, without which the other could take pages away that
//! are in use. What lies in it is the rings' affair.

use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

use memmap2::{MmapOptions, MmapRaw};
use starverbs_rings::{MessageHead, MessageReader, MessageWriter};

use crate::quiet::without_signals;

/// Lanes of a session: in each one ring each way.
pub(super) const LANES: usize = 3;
/// Bytes of a ring. Pages that no message touched take no memory.
pub(super) const RING: usize = 1 << 20;
/// Where the rings' bytes begin, behind all heads.
const DATA: usize = 4096;
const LEN: usize = DATA + 2 * LANES * RING;
/// Nobody can make it shorter, under the other's hands, or let it grow.
const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

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
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: a constant name; the call makes a new descriptor.
        let fd = unsafe { libc::memfd_create(c"starverbs-peer".as_ptr(), flags) };
        if fd < 0 {
            return None;
        }
        // SAFETY: the descriptor is new and nobody else's.
        let file = unsafe { File::from_raw_fd(fd) };
        /* it counts against the limit on files (RLIMIT_FSIZE) */
        without_signals(|| file.set_len(LEN as u64)).ok()?;
        // SAFETY: takes numbers.
        let sealed = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } == 0;
        let memory = sealed.then(|| Memory::map(&file))??;
        Some((memory, file))
    }

    /// Maps what the other process made. `None`: it is something else, or can still be made shorter.
    pub(super) fn open(file: OwnedFd) -> Option<Memory> {
        let file = File::from(file);
        // SAFETY: takes and gives numbers. Only a memory file can have these seals.
        let has = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        let right =
            has >= 0 && has & SEALS == SEALS && !is_huge(&file) && file.metadata().ok()?.len() == LEN as u64;
        if right { Memory::map(&file) } else { None }
    }

    /// Writes bytes anywhere, as a hostile peer may.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn scribble(&self, at: usize, bytes: &[u8]) {
        let len = bytes.len().min(LEN.saturating_sub(at));
        // SAFETY: inside of the mapping, to which there are no references but those of atomics.
        unsafe { self.map.as_mut_ptr().add(at.min(LEN)).copy_from(bytes.as_ptr(), len) };
    }

    fn map(file: &File) -> Option<Memory> {
        let map = ManuallyDrop::new(MmapOptions::new().len(LEN).map_raw(file).ok()?);
        let memory = Memory { map, process: std::process::id() };
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
        // SAFETY: a mapping is not at 0, and heads and bytes of that many rings lie in it. It is page-aligned,
        // and the heads' size a multiple of their alignment; sealed memory stays mapped as long as `self`,
        // which the caller promises is long enough. The lanes' rings are apart, and each end is given out once.
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

/// Whether a file is of huge pages, of which there may be none when they are touched.
fn is_huge(file: &File) -> bool {
    // SAFETY: a statfs of zeroes is valid: a C struct of integers.
    let mut about: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: room for a statfs, alive across the call.
    let known = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut about) } == 0;
    !known || about.f_type != libc::TMPFS_MAGIC
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
    use super::*;

    #[test]
    fn only_sealed_memory_is_mapped() {
        let file = |flags: u32, len: usize| {
            // SAFETY: a constant name; a new descriptor, nobody else's.
            let file = unsafe { File::from_raw_fd(libc::memfd_create(c"test".as_ptr(), flags)) };
            file.set_len(len as u64).expect("memory");
            file
        };
        let seal = |file: &File, seals: i32| {
            // SAFETY: takes numbers.
            assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }, 0);
        };
        let unsealed = file(libc::MFD_ALLOW_SEALING, LEN);
        seal(&unsealed, libc::F_SEAL_GROW);
        assert!(Memory::open(unsealed.into()).is_none(), "it can be made shorter");
        let short = file(libc::MFD_ALLOW_SEALING, LEN - 4096);
        seal(&short, SEALS);
        assert!(Memory::open(short.into()).is_none());
        let other = File::open("/proc/self/exe").expect("a file");
        assert!(Memory::open(other.into()).is_none());
        let (_memory, file) = Memory::create().expect("memory");
        assert!(Memory::open(file.into()).is_some());
    }
}
