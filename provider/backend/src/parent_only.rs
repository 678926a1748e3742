//! A mapping that forked children do not have, and what tells them from their parent.

use std::io;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use memmap2::MmapRaw;

/// Forks of this process so far, counted in the children: a device of an earlier count is the parent's.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Forks so far, as far as anybody needs to know.
#[inline]
pub fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// Counts forks in the children, from now on, and has them hold nothing of the device's that others see.
pub fn watch_forks() {
    extern "C" fn in_child() {
        FORKS.fetch_add(1, Ordering::Relaxed);
        crate::let_go();
    }
    static ONCE: Once = Once::new();
    // SAFETY: the handler is async-signal-safe, and stays as long as the library: it must not be
    // unloaded, as every library with threads.
    ONCE.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
    });
}

/// A mapping of a memory file, of the process that made it alone.
pub struct ParentOnly {
    map: ManuallyDrop<MmapRaw>,
    forks: u32,
}

impl ParentOnly {
    /// Keeps a mapping from children.
    ///
    /// # Errors
    /// What madvise(2) says.
    pub fn new(map: MmapRaw) -> io::Result<ParentOnly> {
        watch_forks();
        // SAFETY: the whole mapping is ours; what changes is what a fork does.
        let kept = unsafe { libc::madvise(map.as_mut_ptr().cast(), map.len(), libc::MADV_DONTFORK) };
        if kept != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(ParentOnly { map: ManuallyDrop::new(map), forks: forks() })
    }

    /// False in a child, where something else may lie at its address.
    #[inline]
    pub fn is_ours(&self) -> bool {
        self.forks == forks()
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

#[cfg(test)]
mod tests {
    use memmap2::MmapOptions;

    use super::*;

    /// What mincore(2) says of the mapping's page: 0, or ENOMEM where nothing is mapped.
    fn mincore(map: &MmapRaw) -> i32 {
        let mut there = 0;
        // SAFETY: it writes a byte for the one page; an address where nothing is mapped is an error.
        match unsafe { libc::mincore(map.as_mut_ptr().cast(), map.len(), &raw mut there) } {
            0 => 0,
            _ => std::io::Error::last_os_error().raw_os_error().unwrap_or(-1),
        }
    }

    #[test]
    fn a_child_has_nothing_there() {
        let file = nix::sys::memfd::memfd_create(c"test", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
        nix::unistd::ftruncate(&file, 4096).unwrap();
        let map = MmapOptions::new().len(4096).map_raw(std::os::fd::AsRawFd::as_raw_fd(&file)).unwrap();
        let map = ParentOnly::new(map).unwrap();
        // SAFETY: the child makes two system calls, of which the second ends it.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above; ends the child without what else the test's process would do.
            unsafe { libc::_exit(mincore(&map)) };
        }
        assert!(child > 0);
        let mut status = 0;
        // SAFETY: waits for our own child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!((libc::WEXITSTATUS(status), mincore(&map)), (libc::ENOMEM, 0));
    }
}
