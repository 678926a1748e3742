//! Links and canonical paths: what leads into the picture's folder is shown as if it lay where the program looked.

use core::ffi::{c_char, c_int};

use super::{go_on, interpose, through};
use crate::path::{strip, strip_string};
use crate::present;

/// # Safety
/// If `length` is positive, `to` holds so many bytes.
unsafe fn stripped(to: *mut c_char, length: isize) -> isize {
    match (present::root(), usize::try_from(length)) {
        (Some(root), Ok(length)) if length > 0 => {
            // SAFETY: the call that gave `length` wrote so many bytes.
            strip(root, unsafe { core::slice::from_raw_parts_mut(to.cast::<u8>(), length) }) as isize
        }
        _ => length,
    }
}

/// # Safety
/// libc's terms.
unsafe fn canonical(path: *const c_char, to: *mut c_char) -> *mut c_char {
    // SAFETY: libc's terms.
    unsafe {
        let found = through(path, |path| go_on!(realpath(path, to) or core::ptr::null_mut()));
        if let Some(root) = present::root() {
            strip_string(root, found);
        }
        found
    }
}

interpose! {
    /// readlink(2)
    [readlink] (path: *const c_char, to: *mut c_char, size: usize) -> isize {
        stripped(to, through(path, |path| go_on!(readlink(path, to, size) or -1)))
    }
    /// readlink(2), as fortified programs call it
    [__readlink_chk] (path: *const c_char, to: *mut c_char, size: usize, _room: usize) -> isize {
        stripped(to, through(path, |path| go_on!(readlink(path, to, size) or -1)))
    }
    /// readlinkat(2)
    [readlinkat] (folder: c_int, path: *const c_char, to: *mut c_char, size: usize) -> isize {
        stripped(to, through(path, |path| go_on!(readlinkat(folder, path, to, size) or -1)))
    }
    /// readlinkat(2), as fortified programs call it
    [__readlinkat_chk] (folder: c_int, path: *const c_char, to: *mut c_char, size: usize, _room: usize) -> isize {
        stripped(to, through(path, |path| go_on!(readlinkat(folder, path, to, size) or -1)))
    }
    /// realpath(3)
    [realpath] (path: *const c_char, to: *mut c_char) -> *mut c_char { canonical(path, to) }
    /// realpath(3), as fortified programs call it
    [__realpath_chk] (path: *const c_char, to: *mut c_char, _room: usize) -> *mut c_char { canonical(path, to) }
    /// canonicalize_file_name(3)
    [canonicalize_file_name] (path: *const c_char) -> *mut c_char { canonical(path, core::ptr::null_mut()) }
}
