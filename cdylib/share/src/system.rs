//! System calls by number: libc's functions of these names are this library's own, or another's that was
//! preloaded.

use core::ffi::{c_int, c_long, c_void};
use core::ptr;
use std::io;

use crate::ranges::Span;

/// What mmap(2) gives where it fails.
pub(crate) const FAILED: *mut c_void = libc::MAP_FAILED;
pub(crate) const READ_WRITE: c_int = libc::PROT_READ | libc::PROT_WRITE;

fn checked(result: c_long) -> io::Result<c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// mmap(2); [`FAILED`] with errno set.
///
/// # Safety
/// As for mmap(2): what MAP_FIXED replaces is the caller's.
pub(crate) unsafe fn mmap(
    at: *mut c_void,
    len: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    // SAFETY: by contract.
    unsafe { libc::syscall(libc::SYS_mmap, at, len, protection, flags, fd, offset) as *mut c_void }
}

/// Maps new memory over a range, or anywhere.
///
/// # Safety
/// What lies in `span` is the caller's, if there is one.
pub(crate) unsafe fn map(
    span: &Span,
    protection: c_int,
    flags: c_int,
    file: Option<(c_int, usize)>,
) -> io::Result<usize> {
    let (fd, offset) = file.unwrap_or((-1, 0));
    // SAFETY: by contract.
    let at =
        unsafe { mmap(span.start as *mut c_void, span.len(), protection, flags, fd, offset as libc::off_t) };
    if at == FAILED { Err(io::Error::last_os_error()) } else { Ok(at as usize) }
}

/// munmap(2).
///
/// # Safety
/// The range is the caller's.
pub(crate) unsafe fn unmap(span: &Span) -> io::Result<()> {
    // SAFETY: by contract.
    checked(unsafe { libc::syscall(libc::SYS_munmap, span.start, span.len()) }).map(drop)
}

/// mprotect(2).
///
/// # Safety
/// The range is the caller's.
pub(crate) unsafe fn protect(span: &Span, protection: c_int) -> io::Result<()> {
    // SAFETY: by contract.
    checked(unsafe { libc::syscall(libc::SYS_mprotect, span.start, span.len(), protection) }).map(drop)
}

/// madvise(2).
///
/// # Safety
/// The range is the caller's.
pub(crate) unsafe fn advise(span: &Span, advice: c_int) -> io::Result<()> {
    // SAFETY: by contract.
    checked(unsafe { libc::syscall(libc::SYS_madvise, span.start, span.len(), advice) }).map(drop)
}

/// mremap(2).
///
/// # Safety
/// As for mremap(2).
pub(crate) unsafe fn mremap(
    old: *mut c_void,
    old_len: usize,
    len: usize,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    // SAFETY: by contract.
    unsafe { libc::syscall(libc::SYS_mremap, old, old_len, len, flags, to) as *mut c_void }
}

/// Takes the pages of a part of a memory file away: they read as zero from then on.
pub(crate) fn punch(fd: c_int, offset: usize, len: usize) -> io::Result<()> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: no pointers.
    checked(unsafe { libc::syscall(libc::SYS_fallocate, fd, mode, offset, len) }).map(drop)
}

/// The next place of a file with data, or without, from `offset` on.
pub(crate) fn seek(fd: c_int, offset: usize, whence: c_int) -> io::Result<usize> {
    // SAFETY: no pointers.
    checked(unsafe { libc::syscall(libc::SYS_lseek, fd, offset, whence) }).map(|found| found as usize)
}

/// Fills a range from a file.
///
/// # Safety
/// The range is the caller's, and can be written.
pub(crate) unsafe fn fill(span: &Span, fd: c_int, offset: usize) -> io::Result<()> {
    let mut done = 0;
    while done < span.len() {
        let (to, rest) = (span.start + done, span.len() - done);
        // SAFETY: the rest of the range.
        match checked(unsafe { libc::syscall(libc::SYS_pread64, fd, to, rest, offset + done) }) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => done += read as usize,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// close(2).
pub(crate) fn close(fd: c_int) {
    // SAFETY: no pointers; the caller's descriptor.
    unsafe { libc::syscall(libc::SYS_close, fd) };
}

/// A pipe that ends with an exec: what to read from, what to write to.
pub(crate) fn pipe() -> io::Result<(c_int, c_int)> {
    let mut ends = [0; 2];
    // SAFETY: the call writes two descriptors.
    checked(unsafe { libc::syscall(libc::SYS_pipe2, ends.as_mut_ptr(), libc::O_CLOEXEC) })?;
    Ok((ends[0], ends[1]))
}

/// Reads a byte; false at the end.
pub(crate) fn read_byte(fd: c_int) -> bool {
    let mut byte = 0u8;
    loop {
        // SAFETY: room for one byte.
        match checked(unsafe { libc::syscall(libc::SYS_read, fd, &raw mut byte, 1usize) }) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => return read.is_ok_and(|read| read == 1),
        }
    }
}

/// Writes some bytes, if there is room.
pub(crate) fn write(fd: c_int, bytes: &[u8]) {
    // SAFETY: the bytes live across the call.
    unsafe { libc::syscall(libc::SYS_write, fd, bytes.as_ptr(), bytes.len()) };
}

/// Device and inode of a descriptor's file.
pub(crate) fn identity(fd: c_int) -> Option<(u64, u64)> {
    // SAFETY: a stat of zeroes is valid: integers.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: fstat fills the struct, which lives across the call.
    let done = unsafe { libc::syscall(libc::SYS_fstat, fd, &raw mut stat) };
    (done == 0).then_some((stat.st_dev, stat.st_ino))
}

/// A limit of this process; None: there is none.
pub(crate) fn limit(of: c_int) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let old: *const libc::rlimit = ptr::null();
    // SAFETY: prlimit fills the struct, which lives across the call.
    unsafe { libc::syscall(libc::SYS_prlimit64, 0, of, old, &raw mut limit) };
    (limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Bytes of a page.
pub(crate) fn page() -> usize {
    use core::sync::atomic::{AtomicUsize, Ordering};
    static PAGE: AtomicUsize = AtomicUsize::new(0);
    let mut page = PAGE.load(Ordering::Relaxed);
    if page == 0 {
        // SAFETY: getauxval reads a table of the process.
        page = (unsafe { libc::getauxval(libc::AT_PAGESZ) } as usize).max(4096);
        PAGE.store(page, Ordering::Relaxed);
    }
    page
}

/// Whole pages for so many bytes; None if there are no such numbers.
pub(crate) fn pages(len: usize) -> Option<usize> {
    len.checked_next_multiple_of(page()).filter(|len| *len <= isize::MAX as usize)
}
