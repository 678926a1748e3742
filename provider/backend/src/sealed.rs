//! Memory files that other processes map: sealed, so that nobody takes pages away under those who have them.
//!
//! Owns how they are made and what of another process's is believed. It must not know what lies in them.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};

use memmap2::{MmapOptions, MmapRaw};

use crate::quiet::without_signals;

/// Nobody changes a file's size.
pub const SIZE_STAYS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
/// And nobody writes it but by a mapping that was there before, the maker's (Linux 5.1).
pub const ONLY_OURS: i32 = SIZE_STAYS | libc::F_SEAL_FUTURE_WRITE;

/// A memory file of `len` bytes, all zero, mapped, then sealed. Pages that nobody touched take no memory.
///
/// # Errors
/// What the system says: no memory, no descriptors, no such seals (memfd_create(2), fcntl(2), mmap(2)).
pub fn create(len: usize, seals: i32) -> io::Result<(MmapRaw, File)> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: a constant name; the call makes a new descriptor.
    let fd = unsafe { libc::memfd_create(c"starverbs".as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    let file = unsafe { File::from_raw_fd(fd) };
    /* it counts against the limit on files (RLIMIT_FSIZE) */
    without_signals(|| file.set_len(len as u64))?;
    let map = MmapOptions::new().len(len).map_raw(&file)?;
    // SAFETY: takes numbers.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((map, file))
}

/// The length of another process's memory file. `None`: it is something else, has not all these seals, or is of
/// huge pages, of which there may be none when they are touched.
pub fn check(file: &File, seals: i32) -> Option<usize> {
    // SAFETY: takes and gives numbers. Only a memory file can have these seals.
    let has = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if has < 0 || has & seals != seals || is_huge(file) {
        return None;
    }
    usize::try_from(file.metadata().ok()?.len()).ok()
}

fn is_huge(file: &File) -> bool {
    // SAFETY: a statfs of zeroes is valid: a C struct of integers.
    let mut about: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: room for a statfs, alive across the call.
    let known = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut about) } == 0;
    !known || about.f_type != libc::TMPFS_MAGIC
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 3 * 4096;

    fn file(flags: u32, seals: i32) -> File {
        // SAFETY: a constant name; a new descriptor, nobody else's.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(c"test".as_ptr(), flags)) };
        file.set_len(LEN as u64).expect("memory");
        // SAFETY: takes numbers.
        assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }, 0);
        file
    }

    #[test]
    fn only_memory_that_stays_is_believed() {
        let (_map, made) = create(LEN, ONLY_OURS).expect("memory");
        assert_eq!(check(&made, ONLY_OURS), Some(LEN));
        assert_eq!(check(&made, SIZE_STAYS), Some(LEN));
        let shrinks = file(libc::MFD_ALLOW_SEALING, libc::F_SEAL_GROW);
        assert_eq!(check(&shrinks, SIZE_STAYS), None, "it can be made shorter");
        assert_eq!(check(&file(libc::MFD_ALLOW_SEALING, SIZE_STAYS), ONLY_OURS), None, "it can be written");
        let exe = File::open("/proc/self/exe").expect("a file");
        assert_eq!(check(&exe, SIZE_STAYS), None);
        // SAFETY: a constant name; a new descriptor, nobody else's.
        let huge =
            unsafe { libc::memfd_create(c"huge".as_ptr(), libc::MFD_ALLOW_SEALING | libc::MFD_HUGETLB) };
        if huge >= 0 {
            // SAFETY: as above.
            let huge = unsafe { File::from_raw_fd(huge) };
            // SAFETY: takes numbers.
            assert_eq!(unsafe { libc::fcntl(huge.as_raw_fd(), libc::F_ADD_SEALS, SIZE_STAYS) }, 0);
            assert_eq!(check(&huge, SIZE_STAYS), None, "its pages may be missing");
        }
    }
}
