//! The calls behind ours: libc's, or those of the next preloaded library.
//!
//! Found once each, at the start of the process for all, so that a signal handler need not search. Owns their
//! addresses and types.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::mem::transmute;
use core::sync::atomic::{AtomicPtr, Ordering};

type Strings = *const *const c_char;
type Filter = Option<unsafe extern "C" fn(*const libc::dirent64) -> c_int>;
type Compare = Option<unsafe extern "C" fn(*mut *const libc::dirent64, *mut *const libc::dirent64) -> c_int>;
type GlobError = Option<unsafe extern "C" fn(*const c_char, c_int) -> c_int>;

/// A list of entries, as scandir(3) allocates it.
pub(crate) type Entries = *mut *mut *mut libc::dirent64;

fn find(name: &CStr, at: &AtomicPtr<c_void>) -> *mut c_void {
    // SAFETY: the name is a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    at.store(found, Ordering::Relaxed);
    found
}

macro_rules! next {
    ($($name:ident: $type:ty;)+) => {
        $(
            /// The call of this name; None where libc has none.
            #[inline]
            pub(crate) fn $name() -> Option<$type> {
                static AT: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
                let mut at = AT.load(Ordering::Relaxed);
                if at.is_null() {
                    let name = CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes());
                    at = find(name.unwrap_or_default(), &AT);
                }
                // SAFETY: NULL is None; else it is libc's function of this name, whose C type this is.
                unsafe { transmute::<*mut c_void, Option<$type>>(at) }
            }
        )+

        /// Finds all.
        pub(crate) fn find_all() {
            $(let _ = $name();)+
        }
    };
}

// The names with 64 are the same functions as those without where `long` has 64 bits, and the types are, too.
next! {
    open64: unsafe extern "C" fn(*const c_char, c_int, ...) -> c_int;
    __open64_2: unsafe extern "C" fn(*const c_char, c_int) -> c_int;
    __openat64_2: unsafe extern "C" fn(c_int, *const c_char, c_int) -> c_int;
    openat64: unsafe extern "C" fn(c_int, *const c_char, c_int, ...) -> c_int;
    fopen64: unsafe extern "C" fn(*const c_char, *const c_char) -> *mut libc::FILE;
    freopen64: unsafe extern "C" fn(*const c_char, *const c_char, *mut libc::FILE) -> *mut libc::FILE;
    fstat64: unsafe extern "C" fn(c_int, *mut libc::stat) -> c_int;
    fstatat64: unsafe extern "C" fn(c_int, *const c_char, *mut libc::stat, c_int) -> c_int;
    statx: unsafe extern "C" fn(c_int, *const c_char, c_int, c_uint, *mut libc::statx) -> c_int;
    statfs64: unsafe extern "C" fn(*const c_char, *mut libc::statfs) -> c_int;
    statvfs64: unsafe extern "C" fn(*const c_char, *mut libc::statvfs) -> c_int;
    access: unsafe extern "C" fn(*const c_char, c_int) -> c_int;
    euidaccess: unsafe extern "C" fn(*const c_char, c_int) -> c_int;
    faccessat: unsafe extern "C" fn(c_int, *const c_char, c_int, c_int) -> c_int;
    getxattr: unsafe extern "C" fn(*const c_char, *const c_char, *mut c_void, usize) -> isize;
    lgetxattr: unsafe extern "C" fn(*const c_char, *const c_char, *mut c_void, usize) -> isize;
    listxattr: unsafe extern "C" fn(*const c_char, *mut c_char, usize) -> isize;
    llistxattr: unsafe extern "C" fn(*const c_char, *mut c_char, usize) -> isize;
    readlink: unsafe extern "C" fn(*const c_char, *mut c_char, usize) -> isize;
    readlinkat: unsafe extern "C" fn(c_int, *const c_char, *mut c_char, usize) -> isize;
    __readlink_chk: unsafe extern "C" fn(*const c_char, *mut c_char, usize, usize) -> isize;
    __readlinkat_chk: unsafe extern "C" fn(c_int, *const c_char, *mut c_char, usize, usize) -> isize;
    realpath: unsafe extern "C" fn(*const c_char, *mut c_char) -> *mut c_char;
    __realpath_chk: unsafe extern "C" fn(*const c_char, *mut c_char, usize) -> *mut c_char;
    chdir: unsafe extern "C" fn(*const c_char) -> c_int;
    getcwd: unsafe extern "C" fn(*mut c_char, usize) -> *mut c_char;
    __getcwd_chk: unsafe extern "C" fn(*mut c_char, usize, usize) -> *mut c_char;
    get_current_dir_name: unsafe extern "C" fn() -> *mut c_char;
    opendir: unsafe extern "C" fn(*const c_char) -> *mut libc::DIR;
    readdir64: unsafe extern "C" fn(*mut libc::DIR) -> *mut libc::dirent64;
    scandir64: unsafe extern "C" fn(*const c_char, Entries, Filter, Compare) -> c_int;
    scandirat64: unsafe extern "C" fn(c_int, *const c_char, Entries, Filter, Compare) -> c_int;
    glob64: unsafe extern "C" fn(*const c_char, c_int, GlobError, *mut libc::glob_t) -> c_int;
    execve: unsafe extern "C" fn(*const c_char, Strings, Strings) -> c_int;
    execv: unsafe extern "C" fn(*const c_char, Strings) -> c_int;
    execvp: unsafe extern "C" fn(*const c_char, Strings) -> c_int;
    execvpe: unsafe extern "C" fn(*const c_char, Strings, Strings) -> c_int;
    fexecve: unsafe extern "C" fn(c_int, Strings, Strings) -> c_int;
    execveat: unsafe extern "C" fn(c_int, *const c_char, Strings, Strings, c_int) -> c_int;
    socket: unsafe extern "C" fn(c_int, c_int, c_int) -> c_int;
    send: unsafe extern "C" fn(c_int, *const c_void, usize, c_int) -> isize;
    sendto: unsafe extern "C" fn(
        c_int, *const c_void, usize, c_int, *const libc::sockaddr, libc::socklen_t
    ) -> isize;
    sendmsg: unsafe extern "C" fn(c_int, *const libc::msghdr, c_int) -> isize;
    mmap: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, libc::off_t) -> *mut c_void;
    munmap: unsafe extern "C" fn(*mut c_void, usize) -> c_int;
    mremap: unsafe extern "C" fn(*mut c_void, usize, usize, c_int, *mut c_void) -> *mut c_void;
    inotify_add_watch: unsafe extern "C" fn(c_int, *const c_char, u32) -> c_int;
}
