//! Links and canonical paths: what leads into the view's folder is shown as if it lay where the program
//! looked.

use core::ffi::{CStr, c_char, c_int};

use super::{go_on, interpose, through};
use crate::path::{PATH_MAX, strip, strip_string};
use crate::present;

/// Reads a link with `call`, which takes the room for it. What fills that room may have been cut, at a length
/// that the view's folder is part of: it is read again where there is room for both.
///
/// # Safety
/// libc's terms for the room and the call.
unsafe fn linked(to: *mut c_char, size: usize, call: impl Fn(*mut c_char, usize) -> isize) -> isize {
    let length = call(to, size);
    let (Some(root), Ok(read)) = (present::root(), usize::try_from(length)) else { return length };
    // SAFETY: the call wrote so many bytes.
    let text = unsafe { core::slice::from_raw_parts_mut(to.cast::<u8>(), read) };
    if read < size || !may_lie_below(root, text) {
        return strip(root, text) as isize;
    }
    let mut room = [0u8; PATH_MAX];
    let whole = call(room.as_mut_ptr().cast(), room.len());
    let Ok(whole) = usize::try_from(whole) else { return whole };
    let fits = strip(root, &mut room[..whole]).min(size);
    text[..fits].copy_from_slice(&room[..fits]);
    fits as isize
}

/// Whether a path that may have been cut begins as one below `root` does.
fn may_lie_below(root: &CStr, path: &[u8]) -> bool {
    root.to_bytes().iter().zip(path).all(|(one, other)| one == other)
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
        linked(to, size, |to, size| through(path, |path| go_on!(readlink(path, to, size) or -1)))
    }
    /// readlink(2), as fortified programs call it: ends the program if there is less room than it says
    [__readlink_chk] (path: *const c_char, to: *mut c_char, size: usize, room: usize) -> isize {
        if room < size {
            return go_on!(__readlink_chk(path, to, size, room) or -1);
        }
        readlink(path, to, size)
    }
    /// readlinkat(2)
    [readlinkat] (folder: c_int, path: *const c_char, to: *mut c_char, size: usize) -> isize {
        linked(to, size, |to, size| through(path, |path| go_on!(readlinkat(folder, path, to, size) or -1)))
    }
    /// readlinkat(2), as above
    [__readlinkat_chk] (
        folder: c_int, path: *const c_char, to: *mut c_char, size: usize, room: usize,
    ) -> isize {
        if room < size {
            return go_on!(__readlinkat_chk(folder, path, to, size, room) or -1);
        }
        readlinkat(folder, path, to, size)
    }
    /// realpath(3)
    [realpath] (path: *const c_char, to: *mut c_char) -> *mut c_char { canonical(path, to) }
    /// realpath(3), as fortified programs call it: ends the program if a path may need more room
    [__realpath_chk] (path: *const c_char, to: *mut c_char, room: usize) -> *mut c_char {
        if room < PATH_MAX {
            return go_on!(__realpath_chk(path, to, room) or core::ptr::null_mut());
        }
        canonical(path, to)
    }
    /// canonicalize_file_name(3)
    [canonicalize_file_name] (path: *const c_char) -> *mut c_char { canonical(path, core::ptr::null_mut()) }
}
