//! The last line before C: every entry point's body runs inside one of these guards.
//!
//! Owns how results become errno values and how a panic ends here: it never unwinds into C. Where nothing
//! panics a guard costs nothing but its landing pad. It must not know any object.

use crate::reserve;
use core::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A failed verb: the errno value that the man pages promise.
pub(crate) type Errno = c_int;

/// What a panic becomes. The object may be half changed, so it is reported as a broken address would be.
const PANICKED: Errno = libc::EFAULT;

/// Sets the calling thread's errno.
pub(crate) fn set_errno(errno: Errno) {
    // SAFETY: __errno_location returns a valid pointer to the calling thread's errno.
    unsafe { *libc::__errno_location() = errno };
}

/// Leaves errno as it was, whatever the kernel answers on the way.
#[inline]
pub(crate) fn kept<T>(run: impl FnOnce() -> T) -> T {
    // SAFETY: __errno_location returns a valid pointer to the calling thread's errno.
    let (place, before) = unsafe { (libc::__errno_location(), *libc::__errno_location()) };
    let done = run();
    // SAFETY: as above, and no verb leaves its thread.
    unsafe { *place = before };
    done
}

/// Runs a verb that returns 0 or the errno value, which errno gets too: programs print it with perror(3).
/// One that succeeds leaves errno as it was.
#[inline]
pub(crate) fn int(verb: impl FnOnce() -> Result<(), Errno>) -> c_int {
    let failed = status(verb);
    if failed != 0 {
        set_errno(failed);
    }
    failed
}

/// As [`int`], but what it returns may be no failure, as that a queue is empty: errno is not for it.
#[inline]
pub(crate) fn status(verb: impl FnOnce() -> Result<(), Errno>) -> c_int {
    kept(|| match catch_unwind(AssertUnwindSafe(verb)) {
        Ok(Ok(())) => 0,
        Ok(Err(errno)) => errno,
        Err(_) => PANICKED,
    })
}

/// A verb that always fails in the same way.
#[inline]
pub(crate) fn refuse(errno: Errno) -> c_int {
    int(|| Err(errno))
}

/// Runs a verb that returns 0, or sets errno and returns -1.
#[inline]
pub(crate) fn minus_one(verb: impl FnOnce() -> Result<(), Errno>) -> c_int {
    if int(verb) == 0 { 0 } else { -1 }
}

/// Runs a verb that returns a new object, or sets errno and returns NULL. Nothing new is made where memory is
/// gone.
#[inline]
pub(crate) fn object<T>(verb: impl FnOnce() -> Result<*mut T, Errno>) -> *mut T {
    let verb = || if reserve::has_room() { verb() } else { Err(libc::ENOMEM) };
    let errno = match kept(|| catch_unwind(AssertUnwindSafe(verb))) {
        Ok(Ok(object)) => return object,
        Ok(Err(errno)) => errno,
        Err(_) => PANICKED,
    };
    set_errno(errno);
    core::ptr::null_mut()
}

/// Runs a verb with a value of its own kind, `broken` standing for a panic.
#[inline]
pub(crate) fn value<T>(broken: T, verb: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(verb)).unwrap_or(broken)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errno() -> c_int {
        std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
    }

    #[test]
    fn results_become_what_each_kind_of_verb_promises() {
        assert_eq!((int(|| Err(libc::EINVAL)), errno()), (libc::EINVAL, libc::EINVAL));
        assert_eq!((refuse(libc::EOPNOTSUPP), errno()), (libc::EOPNOTSUPP, libc::EOPNOTSUPP));
        let asks_the_kernel = || {
            set_errno(libc::EAGAIN);
            Ok(())
        };
        assert_eq!((int(asks_the_kernel), errno()), (0, libc::EOPNOTSUPP), "as it was");
        assert_eq!((status(|| Err(libc::ENOENT)), errno()), (libc::ENOENT, libc::EOPNOTSUPP));
        assert_eq!((minus_one(|| Err(libc::EAGAIN)), errno()), (-1, libc::EAGAIN));
        assert!(object::<u8>(|| Err(libc::ENOMEM)).is_null());
        assert_eq!(errno(), libc::ENOMEM);
        assert_eq!(value(7, || 8), 8);
    }

    #[test]
    fn a_panic_becomes_an_error() {
        let boom = || -> Result<(), Errno> { panic!("expected by the test") };
        assert_eq!((int(boom), errno()), (libc::EFAULT, libc::EFAULT));
        assert_eq!((minus_one(boom), errno()), (-1, libc::EFAULT));
        assert!(object::<u8>(|| panic!("expected by the test")).is_null());
        assert_eq!(value(-1, || panic!("expected by the test")), -1);
    }
}
