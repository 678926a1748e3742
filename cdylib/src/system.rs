//! Verbs about the process and the machine: fork support and sysfs.
//!
//! Nothing is pinned and no page is shared with hardware, so fork needs no preparation. Owns no state; it
//! must not know any object.

use crate::edge;
use core::ffi::{CStr, c_char, c_int};
use starverbs_abi as abi;
use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// ibv_fork_init(3): nothing to do.
pub(crate) extern "C" fn fork_init() -> c_int {
    0
}

/// ibv_is_fork_initialized(3): the device's memory is safe across fork without help.
pub(crate) extern "C" fn is_fork_initialized() -> abi::ibv_fork_status {
    abi::IBV_FORK_UNNEEDED
}

/// ibv_dontfork_range and ibv_dofork_range: no page needs either.
pub(crate) extern "C" fn fork_range() -> c_int {
    0
}

/// ibv_get_sysfs_path: where sysfs is mounted.
pub(crate) extern "C" fn get_sysfs_path() -> *const c_char {
    c"/sys".as_ptr()
}

/// ibv_read_sysfs_file: reads a small file below `dir` without its newline; the number of bytes, or -1 with
/// errno.
///
/// # Safety
/// `dir` and `file` are NUL-terminated strings, `buf` has room for `size` bytes.
pub(crate) unsafe extern "C" fn read_sysfs_file(
    dir: *const c_char,
    file: *const c_char,
    buf: *mut c_char,
    size: usize,
) -> c_int {
    let mut length = 0;
    let failed = edge::minus_one(|| {
        if dir.is_null() || file.is_null() || buf.is_null() || size == 0 {
            return Err(libc::EINVAL);
        }
        // SAFETY: the caller passes two strings and a buffer of `size` bytes, none of them NULL.
        let (dir, file, out) = unsafe {
            (
                CStr::from_ptr(dir),
                CStr::from_ptr(file),
                core::slice::from_raw_parts_mut(buf.cast::<u8>(), size),
            )
        };
        out.fill(0);
        let path = Path::new(OsStr::from_bytes(dir.to_bytes())).join(OsStr::from_bytes(file.to_bytes()));
        let errno = |e: std::io::Error| e.raw_os_error().unwrap_or(libc::EIO);
        length = std::fs::File::open(path).map_err(errno)?.read(out).map_err(errno)?;
        if length > 0 && (out[length - 1] == b'\n' || length == size) {
            length -= 1;
            out[length] = 0;
        }
        Ok(())
    });
    if failed == 0 { c_int::try_from(length).unwrap_or(c_int::MAX) } else { -1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_without_its_newline() {
        let dir = std::env::temp_dir();
        let name = format!("starverbs-sysfs-{}", std::process::id());
        std::fs::write(dir.join(&name), "65536\n").expect("a temporary file");
        let dir_c = std::ffi::CString::new(dir.as_os_str().as_bytes()).expect("no NUL in a path");
        let name_c = std::ffi::CString::new(name.as_str()).expect("no NUL in a name");
        let mut buf = [1 as c_char; 16];
        // SAFETY: two strings and a buffer of its stated size.
        let n = unsafe { read_sysfs_file(dir_c.as_ptr(), name_c.as_ptr(), buf.as_mut_ptr(), buf.len()) };
        // SAFETY: the function NUL-terminates what it reads.
        let text = unsafe { CStr::from_ptr(buf.as_ptr()) };
        std::fs::remove_file(dir.join(&name)).expect("the temporary file");
        assert_eq!((n, text), (5, c"65536"));
        // SAFETY: as above.
        let gone = unsafe { read_sysfs_file(dir_c.as_ptr(), name_c.as_ptr(), buf.as_mut_ptr(), buf.len()) };
        assert_eq!(gone, -1);
    }
}
