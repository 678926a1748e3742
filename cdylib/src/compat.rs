//! Version node IBVERBS_1.0: what programs built before 2007 bind to.
//!
//! Its structs are laid out differently from today's. Such a program is told that there is no device, so that it never
//! holds an object of the old layout, and the other names of the node answer without looking at their arguments.

use core::ffi::{c_int, c_void};

/// ibv_get_device_list(3) at IBVERBS_1.0: an empty list.
pub(crate) unsafe extern "C" fn get_device_list(num_devices: *mut c_int) -> *mut *mut c_void {
    if !num_devices.is_null() {
        // SAFETY: the caller passes NULL or a place for the count.
        unsafe { num_devices.write(0) };
    }
    // SAFETY: calloc may be called with any sizes; NULL means ENOMEM to the caller as well.
    unsafe { libc::calloc(1, size_of::<*mut c_void>()) }.cast()
}

/// ibv_free_device_list(3) at IBVERBS_1.0.
pub(crate) unsafe extern "C" fn free_device_list(list: *mut *mut c_void) {
    // SAFETY: the list came from `get_device_list` above, or is NULL.
    unsafe { libc::free(list.cast()) };
}

/// ibv_get_device_guid(3) at IBVERBS_1.0: there is no device whose GUID to tell.
pub(crate) extern "C" fn no_guid() -> u64 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_program_sees_an_empty_list() {
        let mut count: c_int = -1;
        // SAFETY: `count` is a valid place, and the list is freed once.
        unsafe {
            let list = get_device_list(&mut count);
            assert_eq!(count, 0);
            assert!((*list).is_null());
            free_device_list(list);
            free_device_list(get_device_list(core::ptr::null_mut()));
        }
        assert_eq!(no_guid(), 0);
    }
}
