//! libc's calls, as programs reach them: each checks whether its path is in the sysfs view.
//!
//! Owns how a call is exported and how it goes on. Calls of one purpose share a module. A name with 64, and
//! the ones that fortified programs call (`__open_2`), take and do the same on the machines served here.

mod exec;
mod folder;
mod link;
mod map;
mod open;
mod socket;
mod stat;

use core::ffi::{CStr, c_char};

use crate::path::{self, Leads, PATH_MAX};
use crate::{next, present};

/// Goes on with libc's call; where libc has none, fails with ENOSYS and the given value.
macro_rules! go_on {
    ($name:ident($($arg:expr),*) or $failed:expr) => {
        match $crate::next::$name() {
            Some(call) => call($($arg),*),
            None => {
                $crate::errno::set(libc::ENOSYS);
                $failed
            }
        }
    };
}

use crate::interpose::interpose;
use go_on;

/// Makes the call with the path, or with its place below the view's folder if it is in the view.
///
/// # Safety
/// `path` is NULL or a NUL-terminated string.
#[inline]
unsafe fn through<R>(path: *const c_char, call: impl FnOnce(*const c_char) -> R) -> R {
    // SAFETY: as above.
    match unsafe { path::leads(path) } {
        Leads::Elsewhere => call(path),
        // SAFETY: as above.
        Leads::Inside => unsafe { redirected(path, call) },
        // SAFETY: as above.
        Leads::Through => unsafe { led_around(path, call) },
    }
}

/// # Safety
/// `path` is a NUL-terminated string.
#[cold]
#[inline(never)]
unsafe fn led_around<R>(path: *const c_char, call: impl FnOnce(*const c_char) -> R) -> R {
    let mut room = [0; PATH_MAX];
    // SAFETY: a string, by contract.
    let path = unsafe { CStr::from_ptr(path) };
    call(path::around(path, &mut room).unwrap_or(path).as_ptr())
}

/// # Safety
/// `path` is a NUL-terminated string.
#[cold]
#[inline(never)]
unsafe fn redirected<R>(path: *const c_char, call: impl FnOnce(*const c_char) -> R) -> R {
    let mut room = [0; PATH_MAX];
    // SAFETY: a string, by contract.
    let path = unsafe { CStr::from_ptr(path) };
    let there = present::current().and_then(|tree| path::below(&tree.root, path, &mut room));
    call(there.unwrap_or(path).as_ptr())
}

/// Runs when the process starts.
#[cfg_attr(not(test), used, unsafe(link_section = ".init_array"))]
#[cfg_attr(test, allow(dead_code))]
static START: extern "C" fn() = {
    extern "C" fn start() {
        next::find_all();
        present::start();
    }
    start
};
