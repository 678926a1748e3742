//! Mappings: the program's shared ones of memory files are kept, with a descriptor each, so that peers can be
//! given the memory (`kept`). All others pass after a comparison.

use core::ffi::{c_int, c_void};

use super::{go_on, interpose};
use crate::kept::{self, Span};

/// The whole pages of a range, as the kernel takes it; they may be larger than they are.
fn pages(at: *mut c_void, len: usize) -> Span {
    at as usize..(at as usize).saturating_add(len).checked_next_multiple_of(4096).unwrap_or(usize::MAX)
}

/// # Safety
/// libc's terms.
unsafe fn map(
    at: *mut c_void,
    len: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    let replaces = flags & libc::MAP_FIXED != 0 && kept::any();
    // SAFETY: libc's terms.
    let mapped = unsafe { go_on!(mmap(at, len, protection, flags, fd, offset) or libc::MAP_FAILED) };
    if mapped != libc::MAP_FAILED && replaces {
        kept::forget(&pages(mapped, len));
    }
    let shared = flags & libc::MAP_SHARED != 0 && flags & libc::MAP_ANONYMOUS == 0;
    if shared && protection & libc::PROT_WRITE != 0 && mapped != libc::MAP_FAILED {
        kept::keep(mapped as usize, pages(mapped, len).len(), fd, offset as u64);
    }
    mapped
}

interpose! {
    /// mmap(2)
    [mmap, mmap64] (
        at: *mut c_void, len: usize, protection: c_int, flags: c_int, fd: c_int, offset: libc::off_t
    ) -> *mut c_void {
        map(at, len, protection, flags, fd, offset)
    }
    /// munmap(2)
    [munmap] (at: *mut c_void, len: usize) -> c_int {
        // Before it is done: another thread's mapping may come to lie there at once.
        if kept::any() && (at as usize).is_multiple_of(4096) {
            kept::forget(&pages(at, len));
        }
        go_on!(munmap(at, len) or -1)
    }
    /// mremap(2)
    [mremap] (at: *mut c_void, old_len: usize, len: usize, flags: c_int, to: *mut c_void) -> *mut c_void {
        let mapped = go_on!(mremap(at, old_len, len, flags, to) or libc::MAP_FAILED);
        if kept::any() && mapped != libc::MAP_FAILED {
            if flags & libc::MREMAP_FIXED != 0 {
                kept::forget(&pages(mapped, len));
            }
            // Without a length, what was there stays where it is.
            if old_len > 0 {
                kept::moved(&pages(at, old_len), &pages(mapped, len));
            }
        }
        mapped
    }
    /// Which sealed memory file a range is mapped from, and where: 0, or -1 if there is none
    [starverbs_shared_at] (at: *const c_void, len: usize, fd: *mut c_int, offset: *mut u64) -> c_int {
        let start = at as usize;
        match kept::find(&(start..start.saturating_add(len))) {
            Some((file, place)) => {
                *fd = file;
                *offset = place;
                0
            }
            None => -1,
        }
    }
}
