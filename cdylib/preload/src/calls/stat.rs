//! What files are and who may use them: the families of stat(2), access(2) and the extended attributes.

use core::ffi::{c_char, c_int, c_uint, c_void};

use super::{go_on, interpose, through};
use crate::{next, present};

/// # Safety
/// libc's terms: `path` is a string, `stat` has room for the answer.
unsafe fn at(folder: c_int, path: *const c_char, stat: *mut libc::stat, flags: c_int) -> c_int {
    // SAFETY: libc's terms.
    unsafe {
        let done = through(path, |path| match next::fstatat64() {
            Some(call) => call(folder, path, stat, flags),
            // Before version 2.33 glibc had these calls in the programs.
            None => libc::syscall(libc::SYS_newfstatat, folder, path, stat, flags) as c_int,
        });
        corrected(done, stat)
    }
}

/// # Safety
/// As [`at`].
unsafe fn of_descriptor(fd: c_int, stat: *mut libc::stat) -> c_int {
    // SAFETY: libc's terms.
    unsafe {
        let done = match next::fstat64() {
            Some(call) => call(fd, stat),
            None => libc::syscall(libc::SYS_fstat, fd, stat) as c_int,
        };
        corrected(done, stat)
    }
}

/// # Safety
/// `stat` holds the answer if `done` is 0.
#[inline]
unsafe fn corrected(done: c_int, stat: *mut libc::stat) -> c_int {
    if done == 0 {
        // SAFETY: filled by the call that succeeded.
        present::correct(unsafe { &mut *stat });
    }
    done
}

interpose! {
    /// stat(2)
    [stat, stat64] (path: *const c_char, to: *mut libc::stat) -> c_int { at(libc::AT_FDCWD, path, to, 0) }
    /// lstat(2)
    [lstat, lstat64] (path: *const c_char, to: *mut libc::stat) -> c_int {
        at(libc::AT_FDCWD, path, to, libc::AT_SYMLINK_NOFOLLOW)
    }
    /// fstat(2)
    [fstat, fstat64] (fd: c_int, to: *mut libc::stat) -> c_int { of_descriptor(fd, to) }
    /// fstatat(2)
    [fstatat, fstatat64] (folder: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) -> c_int {
        at(folder, path, to, flags)
    }
    /// stat(2), as programs built before glibc 2.33 call it
    [__xstat, __xstat64] (_version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int {
        at(libc::AT_FDCWD, path, to, 0)
    }
    /// lstat(2), as above
    [__lxstat, __lxstat64] (_version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int {
        at(libc::AT_FDCWD, path, to, libc::AT_SYMLINK_NOFOLLOW)
    }
    /// fstat(2), as above
    [__fxstat, __fxstat64] (_version: c_int, fd: c_int, to: *mut libc::stat) -> c_int {
        of_descriptor(fd, to)
    }
    /// fstatat(2), as above
    [__fxstatat, __fxstatat64] (
        _version: c_int, folder: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int,
    ) -> c_int {
        at(folder, path, to, flags)
    }
    /// statx(2)
    [statx] (folder: c_int, path: *const c_char, flags: c_int, mask: c_uint, to: *mut libc::statx) -> c_int {
        let done = through(path, |path| go_on!(statx(folder, path, flags, mask, to) or -1));
        if done == 0 {
            present::correct_extended(&mut *to);
        }
        done
    }
    /// statfs(2)
    [statfs, statfs64] (path: *const c_char, to: *mut libc::statfs) -> c_int {
        through(path, |path| go_on!(statfs64(path, to) or -1))
    }
    /// statvfs(3)
    [statvfs, statvfs64] (path: *const c_char, to: *mut libc::statvfs) -> c_int {
        through(path, |path| go_on!(statvfs64(path, to) or -1))
    }
    /// access(2)
    [access] (path: *const c_char, mode: c_int) -> c_int {
        through(path, |path| go_on!(access(path, mode) or -1))
    }
    /// euidaccess(3)
    [euidaccess, eaccess] (path: *const c_char, mode: c_int) -> c_int {
        through(path, |path| go_on!(euidaccess(path, mode) or -1))
    }
    /// faccessat(2)
    [faccessat] (folder: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int {
        through(path, |path| go_on!(faccessat(folder, path, mode, flags) or -1))
    }
    /// getxattr(2)
    [getxattr] (path: *const c_char, name: *const c_char, value: *mut c_void, size: usize) -> isize {
        through(path, |path| go_on!(getxattr(path, name, value, size) or -1))
    }
    /// lgetxattr(2)
    [lgetxattr] (path: *const c_char, name: *const c_char, value: *mut c_void, size: usize) -> isize {
        through(path, |path| go_on!(lgetxattr(path, name, value, size) or -1))
    }
    /// listxattr(2)
    [listxattr] (path: *const c_char, list: *mut c_char, size: usize) -> isize {
        through(path, |path| go_on!(listxattr(path, list, size) or -1))
    }
    /// llistxattr(2)
    [llistxattr] (path: *const c_char, list: *mut c_char, size: usize) -> isize {
        through(path, |path| go_on!(llistxattr(path, list, size) or -1))
    }
    /// inotify_add_watch(2)
    [inotify_add_watch] (fd: c_int, path: *const c_char, mask: u32) -> c_int {
        through(path, |path| go_on!(inotify_add_watch(fd, path, mask) or -1))
    }
}
