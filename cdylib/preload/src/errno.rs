//! The calling thread's errno, which calls of this library, and of the one that shares allocations, may not
//! change but for libc's own reasons.

use core::ffi::c_int;

/// The value now.
pub(crate) fn get() -> c_int {
    // SAFETY: __errno_location returns a valid pointer to the calling thread's errno.
    unsafe { *libc::__errno_location() }
}

/// Sets it.
pub(crate) fn set(errno: c_int) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Runs `work` and puts back what errno was.
pub(crate) fn kept<R>(work: impl FnOnce() -> R) -> R {
    let before = get();
    let result = work();
    set(before);
    result
}
