//! Memory files that other processes map: sealed, so that nobody takes pages away under those who have them.
//!
//! Owns how they are made and what of another process's is believed. It must not know what lies in them.

use std::ffi::CStr;
use std::fs::File;
use std::io;

use memmap2::{MmapOptions, MmapRaw};
pub use nix::fcntl::SealFlag;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};

use crate::ParentOnly;
use crate::quiet::without_signals;

/// Nobody changes a file's size.
pub const SIZE_STAYS: SealFlag =
    SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW).union(SealFlag::F_SEAL_SEAL);
/// And nobody writes it but by a mapping that was there before, the maker's (Linux 5.1).
pub const ONLY_OURS: SealFlag = SIZE_STAYS.union(SealFlag::F_SEAL_FUTURE_WRITE);

/// A memory file of `len` bytes, all zero, mapped, then sealed; `/proc/PID/fd/N` shows its name. Pages that
/// nobody touched take no memory.
///
/// # Errors
/// What the system says: no memory, no descriptors, no such seals (memfd_create(2), fcntl(2), mmap(2)).
pub fn create(name: &CStr, len: usize, seals: SealFlag) -> io::Result<(MmapRaw, File)> {
    let file = unsealed(name, len)?;
    let map = MmapOptions::new().len(len).map_raw(&file)?;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
    Ok((map, file))
}

/// The same, and children of this process do not have the mapping.
///
/// # Errors
/// As of [`create`], and madvise(2).
pub fn create_ours(name: &CStr, len: usize, seals: SealFlag) -> io::Result<(ParentOnly, File)> {
    let (map, file) = create(name, len, seals)?;
    Ok((ParentOnly::new(map)?, file))
}

/// As [`create`], of a size that stays, and not mapped.
///
/// # Errors
/// As of [`create`].
pub fn file(name: &CStr, len: usize) -> io::Result<File> {
    let file = unsealed(name, len)?;
    fcntl(&file, FcntlArg::F_ADD_SEALS(SIZE_STAYS))?;
    Ok(file)
}

fn unsealed(name: &CStr, len: usize) -> io::Result<File> {
    let file = File::from(memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?);
    /* it counts against the limit on files (RLIMIT_FSIZE) */
    without_signals(|| file.set_len(len as u64))?;
    Ok(file)
}

/// The length of another process's memory file. `None`: it is something else, has not all these seals, or is
/// of huge pages, of which there may be none when they are touched.
pub fn check(file: &File, seals: SealFlag) -> Option<usize> {
    /* only a memory file has seals */
    let has = SealFlag::from_bits_retain(fcntl(file, FcntlArg::F_GET_SEALS).ok()?);
    if !has.contains(seals) || fstatfs(file).ok()?.filesystem_type() != TMPFS_MAGIC {
        return None;
    }
    usize::try_from(file.metadata().ok()?.len()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 3 * 4096;

    fn memory_file(flags: MFdFlags, seals: SealFlag) -> nix::Result<File> {
        let file = File::from(memfd_create(c"test", flags | MFdFlags::MFD_ALLOW_SEALING)?);
        file.set_len(LEN as u64).expect("memory");
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
        Ok(file)
    }

    #[test]
    fn only_memory_that_stays_is_believed() {
        let (_map, made) = create(c"test", LEN, ONLY_OURS).expect("memory");
        assert_eq!([check(&made, ONLY_OURS), check(&made, SIZE_STAYS)], [Some(LEN); 2]);
        let sealed = |seals| memory_file(MFdFlags::empty(), seals).expect("a memory file");
        assert_eq!(check(&sealed(SealFlag::F_SEAL_GROW), SIZE_STAYS), None, "it can be made shorter");
        assert_eq!(check(&sealed(SIZE_STAYS), ONLY_OURS), None, "it can be written");
        let exe = File::open("/proc/self/exe").expect("a file");
        assert_eq!(check(&exe, SIZE_STAYS), None);
        if let Ok(huge) = memfd_create(c"huge", MFdFlags::MFD_HUGETLB | MFdFlags::MFD_ALLOW_SEALING) {
            fcntl(&huge, FcntlArg::F_ADD_SEALS(SIZE_STAYS)).expect("a memory file");
            assert_eq!(check(&huge.into(), SIZE_STAYS), None, "its pages may be missing");
        }
    }
}
