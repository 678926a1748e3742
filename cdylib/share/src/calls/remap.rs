//! mremap(2): a range of the arena grows where it lies if what is behind it is free, and is copied otherwise.
//!
//! The kernel's own would move the file's part along, away from the address that it stands for.

use core::ffi::{c_int, c_void};
use core::ptr::copy_nonoverlapping;

use super::interpose;
use super::map::{mmap, munmap};
use crate::arena;
use crate::ranges::Span;
use crate::system::{self, FAILED, READ_WRITE};
use crate::{errno, next};

const PRIVATE: c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

fn fail(error: c_int) -> *mut c_void {
    errno::set(error);
    FAILED
}

/// Whether all of a range is memory of the arena.
fn is_own(span: &Span) -> bool {
    arena::inside(span) == *span && arena::books().with(|books| books.space.is_shared(span))
}

/// # Safety
/// libc's terms; `old` is of the arena.
#[cold]
unsafe fn remap(old: Span, len: usize, flags: c_int, to: *mut c_void) -> *mut c_void {
    let (moves, fixed) = (flags & libc::MREMAP_MAYMOVE != 0, flags & libc::MREMAP_FIXED != 0);
    if fixed && !moves || old.is_empty() || len == 0 {
        return fail(libc::EINVAL);
    }
    if !fixed && flags & libc::MREMAP_DONTUNMAP == 0 {
        if let Some(at) = errno::kept(|| in_place(&old, len)) {
            return at;
        }
        if !moves {
            return fail(libc::ENOMEM);
        }
    }
    // SAFETY: libc's terms.
    unsafe { copied(&old, len, flags, fixed.then_some(to)) }
}

/// The range with another length where it lies.
fn in_place(old: &Span, len: usize) -> Option<*mut c_void> {
    let rest = arena::books().with(|books| {
        let rest = books.space.resize(old, len)?;
        let grown = old.end..old.start + len;
        (grown.is_empty() || books.reach(&grown)).then_some(rest)
    })?;
    arena::give_back(rest);
    Some(old.start as *mut c_void)
}

/// A copy elsewhere; what was there before goes.
unsafe fn copied(old: &Span, len: usize, flags: c_int, to: Option<*mut c_void>) -> *mut c_void {
    let how = PRIVATE | if to.is_some() { libc::MAP_FIXED } else { 0 };
    let at = to.unwrap_or(core::ptr::null_mut());
    let target = at as usize..(at as usize).saturating_add(len);
    if to.is_some() && target.start < old.end && old.start < target.end {
        return fail(libc::EINVAL);
    }
    // SAFETY: libc's terms; the old range is read through while nobody else has it.
    unsafe {
        let new = mmap(at, len, READ_WRITE, how, -1, 0);
        if new == FAILED {
            return FAILED;
        }
        errno::kept(|| {
            // It may have been made unreadable.
            let _ = system::protect(old, READ_WRITE);
            copy_nonoverlapping(old.start as *const u8, new.cast::<u8>(), old.len().min(len));
            if flags & libc::MREMAP_DONTUNMAP != 0 {
                let _ = arena::empty(old);
            } else {
                munmap(old.start as *mut c_void, old.len());
            }
        });
        new
    }
}

interpose! {
    /// mremap(2)
    [mremap] (at: *mut c_void, old_len: usize, len: usize, flags: c_int, to: *mut c_void) -> *mut c_void {
        let start = at as usize;
        if arena::meets(start, old_len.max(1)) && arena::is_live() && start.is_multiple_of(system::page()) {
            let (Some(old_len), Some(len)) = (system::pages(old_len), system::pages(len)) else {
                return fail(libc::EINVAL);
            };
            let old = start..start.saturating_add(old_len);
            if is_own(&old) {
                return remap(old, len, flags, to);
            }
            if arena::books().with(|books| !books.space.own(&arena::inside(&old)).is_empty()) {
                return fail(libc::EFAULT);
            }
        }
        match next::mremap() {
            Some(mremap) => mremap(at, old_len, len, flags, to),
            None => system::mremap(at, old_len, len, flags, to),
        }
    }
}
