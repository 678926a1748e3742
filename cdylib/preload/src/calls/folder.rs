//! Folders: listing them, going there, matching names.
//!
//! The view's folders are real ones, so that what libc does with an open folder needs no help.

use core::ffi::{CStr, c_char, c_int};

use super::{go_on, interpose, through};
use crate::errno;
use crate::next::Entries;
use crate::path::{PATH_MAX, strip_string};
use crate::present;
use crate::sysfs_view::DEVICE_NODE;

type Filter = Option<unsafe extern "C" fn(*const libc::dirent64) -> c_int>;
type Compare = Option<unsafe extern "C" fn(*mut *const libc::dirent64, *mut *const libc::dirent64) -> c_int>;
type GlobError = Option<unsafe extern "C" fn(*const c_char, c_int) -> c_int>;

/// The entry of the device node says what that is.
///
/// # Safety
/// `entry` is NULL or one of readdir's.
unsafe fn corrected(entry: *mut libc::dirent64) -> *mut libc::dirent64 {
    // SAFETY: NULL or an entry, which is the caller's until the next call.
    if let Some(entry) = unsafe { entry.as_mut() }
        && present::peek().is_some_and(|tree| tree.node == entry.d_ino)
        // SAFETY: names of entries end with a NUL.
        && DEVICE_NODE.as_bytes().ends_with(unsafe { CStr::from_ptr(entry.d_name.as_ptr()) }.to_bytes())
    {
        entry.d_type = libc::DT_CHR;
    }
    entry
}

/// Takes the view's folder off the paths that were found.
///
/// # Safety
/// `found` is what glob gave.
unsafe fn stripped(found: *mut libc::glob_t) {
    let Some(root) = present::root() else { return };
    // SAFETY: gl_pathv has gl_offs unused places and then gl_pathc strings.
    unsafe {
        if (*found).gl_pathv.is_null() {
            return;
        }
        for i in 0..(*found).gl_pathc {
            strip_string(root, *(*found).gl_pathv.add((*found).gl_offs + i));
        }
    }
}

interpose! {
    /// opendir(3)
    [opendir] (path: *const c_char) -> *mut libc::DIR {
        through(path, |path| go_on!(opendir(path) or core::ptr::null_mut()))
    }
    /// readdir(3)
    [readdir, readdir64] (folder: *mut libc::DIR) -> *mut libc::dirent64 {
        corrected(go_on!(readdir64(folder) or core::ptr::null_mut()))
    }
    /// scandir(3)
    [scandir, scandir64] (path: *const c_char, list: Entries, filter: Filter, compare: Compare) -> c_int {
        through(path, |path| go_on!(scandir64(path, list, filter, compare) or -1))
    }
    /// scandirat(3)
    [scandirat, scandirat64] (
        folder: c_int, path: *const c_char, list: Entries, filter: Filter, compare: Compare,
    ) -> c_int {
        through(path, |path| go_on!(scandirat64(folder, path, list, filter, compare) or -1))
    }
    /// glob(3)
    [glob, glob64] (
        pattern: *const c_char, flags: c_int, error: GlobError, found: *mut libc::glob_t,
    ) -> c_int {
        let done = through(pattern, |pattern| {
            go_on!(glob64(pattern, flags, error, found) or libc::GLOB_ABORTED)
        });
        if done == 0 && crate::path::is_ours(pattern) {
            stripped(found);
        }
        done
    }
    /// chdir(2)
    [chdir] (path: *const c_char) -> c_int { through(path, |path| go_on!(chdir(path) or -1)) }
    /// getcwd(3)
    [getcwd] (to: *mut c_char, size: usize) -> *mut c_char { here(to, size) }
    /// getcwd(3), as fortified programs call it: ends the program if there is less room than it says
    [__getcwd_chk] (to: *mut c_char, size: usize, room: usize) -> *mut c_char {
        if room < size {
            return go_on!(__getcwd_chk(to, size, room) or core::ptr::null_mut());
        }
        here(to, size)
    }
    /// get_current_dir_name(3), which may give $PWD with its links
    [get_current_dir_name] () -> *mut c_char {
        let path = go_on!(get_current_dir_name() or core::ptr::null_mut());
        if let Some(root) = present::root() {
            strip_string(root, path);
        }
        path
    }
}

/// # Safety
/// libc's terms.
unsafe fn here(to: *mut c_char, size: usize) -> *mut c_char {
    // SAFETY: libc's terms.
    unsafe {
        let path = go_on!(getcwd(to, size) or core::ptr::null_mut());
        match present::root() {
            Some(root) if path.is_null() && errno::get() == libc::ERANGE => here_without(root, to, size),
            Some(root) => {
                strip_string(root, path);
                path
            }
            None => path,
        }
    }
}

/// The working directory without `root`, where there was no room for both.
///
/// # Safety
/// libc's terms.
unsafe fn here_without(root: &CStr, to: *mut c_char, size: usize) -> *mut c_char {
    let mut room = [0; PATH_MAX];
    // SAFETY: libc's terms, and the room is as long as it says; what is allocated is the caller's, as libc
    // has it.
    unsafe {
        let path = go_on!(getcwd(room.as_mut_ptr(), room.len()) or core::ptr::null_mut());
        if path.is_null() {
            return path;
        }
        strip_string(root, path);
        let length = CStr::from_ptr(path).to_bytes_with_nul().len();
        if length > size {
            errno::set(libc::ERANGE);
            return core::ptr::null_mut();
        }
        let to = if to.is_null() { libc::malloc(size).cast() } else { to };
        if !to.is_null() {
            to.copy_from_nonoverlapping(path, length);
        }
        to
    }
}
