//! The calls behind ours: glibc's, or another library's.
//!
//! malloc(3) and its kin are this library's business only where glibc's are the next ones. Another allocator
//! has calls beyond these (sized frees, its own statistics), which would not know our blocks; it is left
//! alone, and what it asks of mmap(2) is served.

use core::ffi::{CStr, c_int, c_void};
use core::mem::transmute;
use core::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

unsafe extern "C" {
    pub(crate) fn __libc_malloc(size: usize) -> *mut c_void;
    pub(crate) fn __libc_calloc(count: usize, size: usize) -> *mut c_void;
    pub(crate) fn __libc_realloc(old: *mut c_void, size: usize) -> *mut c_void;
    pub(crate) fn __libc_free(old: *mut c_void);
    pub(crate) fn __libc_memalign(align: usize, size: usize) -> *mut c_void;
}

/// Unknown, glibc, another
static ALLOCATOR: AtomicU8 = AtomicU8::new(0);

/// Whether glibc's malloc is the next one.
#[inline]
pub(crate) fn is_glibc() -> bool {
    match ALLOCATOR.load(Ordering::Relaxed) {
        0 => look(),
        known => known == 1,
    }
}

#[cold]
fn look() -> bool {
    // SAFETY: the name is a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"malloc".as_ptr()) };
    let glibc = found.is_null() || core::ptr::eq(found, __libc_malloc as *const c_void);
    ALLOCATOR.store(if glibc { 1 } else { 2 }, Ordering::Relaxed);
    glibc
}

#[cold]
fn find(name: &CStr, at: &AtomicPtr<c_void>) -> *mut c_void {
    // SAFETY: the name is a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    let found = if found.is_null() { ABSENT } else { found };
    at.store(found, Ordering::Relaxed);
    found
}

/// The call of an allocator that is not glibc's; not looked for where there is none, as dlsym(3) itself
/// allocates.
#[inline]
pub(crate) fn other<F>(find: impl FnOnce() -> Option<F>) -> Option<F> {
    if is_glibc() { None } else { find() }
}

/// Where a call would be that nobody has.
const ABSENT: *mut c_void = core::ptr::without_provenance_mut(1);

macro_rules! next {
    ($($name:ident: $type:ty;)+) => {$(
        /// The call of this name; None where there is none.
        #[inline]
        pub(crate) fn $name() -> Option<$type> {
            static AT: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
            let mut at = AT.load(Ordering::Relaxed);
            if at.is_null() {
                let name = CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes());
                at = find(name.unwrap_or_default(), &AT);
            }
            if at == ABSENT {
                return None;
            }
            // SAFETY: NULL is None; else it is the function of this name, whose C type this is.
            unsafe { transmute::<*mut c_void, Option<$type>>(at) }
        }
    )+};
}

next! {
    malloc: unsafe extern "C" fn(usize) -> *mut c_void;
    calloc: unsafe extern "C" fn(usize, usize) -> *mut c_void;
    realloc: unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;
    free: unsafe extern "C" fn(*mut c_void);
    memalign: unsafe extern "C" fn(usize, usize) -> *mut c_void;
    malloc_usable_size: unsafe extern "C" fn(*mut c_void) -> usize;
    mmap: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, libc::off_t) -> *mut c_void;
    munmap: unsafe extern "C" fn(*mut c_void, usize) -> c_int;
    mremap: unsafe extern "C" fn(*mut c_void, usize, usize, c_int, *mut c_void) -> *mut c_void;
    close: unsafe extern "C" fn(c_int) -> c_int;
    fork: unsafe extern "C" fn() -> libc::pid_t;
    starverbs_shared_at: unsafe extern "C" fn(*const c_void, usize, *mut c_int, *mut u64) -> c_int;
}
