//! The private interface between libibverbs and its drivers (version nodes IBVERBS_PRIVATE_*).
//!
//! Debian's libmlx5, libefa and librdmacm bind every one of these names when they are loaded, so they must
//! exist; a driver finds no kernel device here, so none of them has work to do. Owns answers that look at no
//! argument. It must not know any object.

use crate::edge::{self, set_errno};
use core::ffi::{c_int, c_uint, c_void};

/// Accepts a driver and forgets it: the only device here is the library's own.
pub(crate) extern "C" fn register_driver() {}

/// For functions that return nothing and have nothing to do.
pub(crate) extern "C" fn nothing() {}

/// For commands to a kernel device.
pub(crate) extern "C" fn not_offered() -> c_int {
    edge::refuse(libc::EOPNOTSUPP)
}

/// For functions that would return an object.
pub(crate) extern "C" fn no_object() -> *mut c_void {
    set_errno(libc::EOPNOTSUPP);
    core::ptr::null_mut()
}

/// For functions whose failure is -1 with errno.
pub(crate) extern "C" fn minus_one() -> c_int {
    set_errno(libc::EOPNOTSUPP);
    -1
}

/// The number of attributes of an ioctl that is never issued.
pub(crate) extern "C" fn no_attributes() -> c_uint {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_say_that_nothing_is_offered() {
        assert_eq!(not_offered(), libc::EOPNOTSUPP);
        assert!(no_object().is_null());
        assert_eq!(minus_one(), -1);
        assert_eq!(no_attributes(), 0);
    }
}
