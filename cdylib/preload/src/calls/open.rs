//! Opening files: the families of open(2) and fopen(3).
//!
//! Nothing in the view can be written: asking for that fails with EACCES, as sysfs answers. The device
//! node opens for writing, because programs try whether they may, but takes no commands: a write fails with
//! EBADF.

use core::ffi::{CStr, c_char, c_int};

use super::{go_on, interpose, redirected, through};
use crate::errno;
use crate::path::{is_ours, is_relative};
use crate::present::{self, FileKind};

/// Opens with `call`, which takes a path and flags.
///
/// # Safety
/// libc's terms for `path` and the call.
unsafe fn opened(path: *const c_char, flags: c_int, call: impl Fn(*const c_char, c_int) -> c_int) -> c_int {
    // SAFETY: libc's terms.
    unsafe {
        if is_ours(path) {
            return redirected(path, |there| {
                if there == path { call(path, flags) } else { ours(there, flags, call) }
            });
        }
        let fd = through(path, |path| call(path, flags));
        if is_relative(path) {
            seen(fd, flags);
        }
        fd
    }
}

/// Opens a file of the view.
fn ours(path: *const c_char, flags: c_int, call: impl Fn(*const c_char, c_int) -> c_int) -> c_int {
    /// The bit that O_TMPFILE has beside O_DIRECTORY
    const TEMPORARY: c_int = libc::O_TMPFILE & !libc::O_DIRECTORY;
    const CHANGES: c_int =
        libc::O_ACCMODE | libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC | libc::O_APPEND | TEMPORARY;
    let fd = call(path, flags & !CHANGES);
    if fd < 0 {
        return fd;
    }
    let writes = flags & (libc::O_ACCMODE | libc::O_TRUNC | TEMPORARY) != libc::O_RDONLY;
    let kind = seen(fd, flags);
    if writes && flags & libc::O_PATH == 0 && !matches!(kind, Some(FileKind::Device)) {
        // SAFETY: opened above, and handed to nobody.
        unsafe { libc::close(fd) };
        errno::set(libc::EACCES);
        return -1;
    }
    fd
}

/// Looks what was opened, and shows a counter's value if it is one. A path that begins at a descriptor or the
/// working directory may lead into the view too, once this process has looked at it.
fn seen(fd: c_int, flags: c_int) -> Option<FileKind> {
    let tree = present::peek().filter(|_| fd >= 0)?;
    let kind = errno::kept(|| present::kind(tree, fd));
    if let Some(FileKind::Live(live)) = &kind
        && flags & libc::O_PATH == 0
    {
        present::show_value(live, fd, flags);
    }
    kind
}

/// The flags of open(2) that a mode of fopen(3) stands for.
///
/// # Safety
/// `mode` is a string.
unsafe fn flags_of(mode: *const c_char) -> c_int {
    // SAFETY: a string, by contract.
    let mode = unsafe { CStr::from_ptr(mode) }.to_bytes();
    let access = match (mode.contains(&b'+'), mode.first()) {
        (true, _) => libc::O_RDWR,
        (false, Some(b'w' | b'a')) => libc::O_WRONLY,
        _ => libc::O_RDONLY,
    };
    access | if mode.contains(&b'e') { libc::O_CLOEXEC } else { 0 }
}

/// # Safety
/// libc's terms.
unsafe fn opened_stream(path: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    // SAFETY: libc's terms; the descriptor is the stream's, or closed.
    unsafe {
        if is_ours(path) {
            let fd = opened(path, flags_of(mode), |path, flags| go_on!(open64(path, flags, 0o666) or -1));
            if fd < 0 {
                return core::ptr::null_mut();
            }
            if flags_of(mode) & libc::O_ACCMODE != libc::O_RDONLY {
                return over(fd, mode, |path| go_on!(fopen64(path, mode) or core::ptr::null_mut()));
            }
            let stream = libc::fdopen(fd, mode);
            if stream.is_null() {
                errno::kept(|| libc::close(fd));
            }
            return stream;
        }
        let stream = through(path, |path| go_on!(fopen64(path, mode) or core::ptr::null_mut()));
        if !stream.is_null() && is_relative(path) && present::peek().is_some() {
            seen(libc::fileno(stream), flags_of(mode));
        }
        stream
    }
}

/// A stream for writing over a descriptor of the device node, which takes none: libc makes no such stream of
/// a descriptor that can only be read, so `open` makes one of a file that takes everything.
///
/// # Safety
/// `fd` is the caller's to give, `mode` a string, and `open` gives a stream or NULL.
unsafe fn over(
    fd: c_int,
    mode: *const c_char,
    open: impl FnOnce(*const c_char) -> *mut libc::FILE,
) -> *mut libc::FILE {
    let stream = open(c"/dev/null".as_ptr());
    // SAFETY: the stream's descriptor is open, and `fd` is closed once.
    errno::kept(|| unsafe {
        if !stream.is_null() {
            libc::dup3(fd, libc::fileno(stream), flags_of(mode) & libc::O_CLOEXEC);
        }
        libc::close(fd);
    });
    stream
}

interpose! {
    // C declares the mode as a variable argument, which is passed as a fixed one is on the machines served
    // here.
    /// open(2)
    [open, open64, __open, __open64] (path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
        opened(path, flags, |path, flags| go_on!(open64(path, flags, mode) or -1))
    }
    /// open(2), as fortified programs call it without a mode: ends the program where one is needed
    [__open_2, __open64_2] (path: *const c_char, flags: c_int) -> c_int {
        opened(path, flags, |path, flags| go_on!(__open64_2(path, flags) or -1))
    }
    /// openat(2)
    [openat, openat64] (folder: c_int, path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
        opened(path, flags, |path, flags| go_on!(openat64(folder, path, flags, mode) or -1))
    }
    /// openat(2), as above
    [__openat_2, __openat64_2] (folder: c_int, path: *const c_char, flags: c_int) -> c_int {
        opened(path, flags, |path, flags| go_on!(__openat64_2(folder, path, flags) or -1))
    }
    /// fopen(3)
    [fopen, fopen64] (path: *const c_char, mode: *const c_char) -> *mut libc::FILE {
        opened_stream(path, mode)
    }
    /// freopen(3)
    [freopen, freopen64] (
        path: *const c_char, mode: *const c_char, stream: *mut libc::FILE,
    ) -> *mut libc::FILE {
        let flags = flags_of(mode);
        if is_ours(path) && flags & libc::O_ACCMODE != libc::O_RDONLY {
            let fd = opened(path, flags, |path, flags| go_on!(open64(path, flags, 0o666) or -1));
            if fd < 0 {
                errno::kept(|| libc::fclose(stream));
                return core::ptr::null_mut();
            }
            return over(fd, mode, |path| go_on!(freopen64(path, mode, stream) or core::ptr::null_mut()));
        }
        let reopened = super::through(path, |path| {
            go_on!(freopen64(path, mode, stream) or core::ptr::null_mut())
        });
        if !reopened.is_null() && present::peek().is_some() {
            seen(libc::fileno(reopened), flags);
        }
        reopened
    }
}
