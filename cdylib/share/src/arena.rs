//! The arena of this process: one memory file, mapped once.
//!
//! Owns the mapping, the lock over its books ([`Space`]), and how a range is emptied. The mapping is not
//! inherited by a fork ([`crate::fork`] gives the child a copy), and beyond the highest range that was ever
//! used it cannot be read, so that mlockall(2) and core dumps do not fill it.

use core::ffi::c_int;
use core::sync::atomic::{AtomicI32, AtomicU8, AtomicUsize, Ordering};
use std::io;

use crate::lock::Lock;
use crate::ranges::{Span, overlap};
use crate::say::say;
use crate::space::Space;
use crate::system::{self, READ_WRITE};
use crate::{errno, fork};

/// Requests of so many bytes are served from here.
pub(crate) const LARGE: usize = 128 << 10;
/// How the arena's mapping is aligned, and by how much it becomes readable.
const STEP: usize = 64 << 20;
/// Away from the descriptors that shells and programs name.
const LOWEST_FD: c_int = 500;

const NEW: u8 = 0;
const LIVE: u8 = 1;
const FROZEN: u8 = 2;
const NONE: u8 = 3;

static STATE: AtomicU8 = AtomicU8::new(NEW);
static BASE: AtomicUsize = AtomicUsize::new(0);
static LEN: AtomicUsize = AtomicUsize::new(0);
static FILE: AtomicI32 = AtomicI32::new(-1);
static BOOKS: Lock<Books> = Lock::new(Books { space: Space::new(), readable: 0, identity: (0, 0) });

/// What the lock is for.
pub(crate) struct Books {
    pub(crate) space: Space,
    /// Where the part ends that can be read and written
    readable: usize,
    /// The memory file, by device and inode
    identity: (u64, u64),
}

/// The arena's books.
pub(crate) fn books() -> &'static Lock<Books> {
    &BOOKS
}

/// Whether an address is in the arena, or in what was the parent's.
#[inline]
pub(crate) fn has(address: usize) -> bool {
    address.wrapping_sub(BASE.load(Ordering::Relaxed)) < LEN.load(Ordering::Relaxed)
}

/// The arena's addresses.
pub(crate) fn span() -> Span {
    let base = BASE.load(Ordering::Relaxed);
    base..base + LEN.load(Ordering::Relaxed)
}

/// Whether a range is in part the arena's.
#[inline]
pub(crate) fn meets(start: usize, len: usize) -> bool {
    let base = BASE.load(Ordering::Relaxed);
    start < base + LEN.load(Ordering::Relaxed) && start.saturating_add(len) > base
}

/// What of a range is the arena's.
pub(crate) fn inside(of: &Span) -> Span {
    overlap(of, &span())
}

/// Whether this process serves requests from the arena; makes it when first asked.
#[inline]
pub(crate) fn serves() -> bool {
    match STATE.load(Ordering::Acquire) {
        LIVE => true,
        NEW => errno::kept(make),
        _ => false,
    }
}

/// Whether this process has an arena of its own.
#[inline]
pub(crate) fn is_live() -> bool {
    STATE.load(Ordering::Acquire) == LIVE
}

/// The memory file; None if the program has closed the descriptor.
pub(crate) fn file(books: &Books) -> Option<c_int> {
    file_of(books.identity)
}

fn file_of(identity: (u64, u64)) -> Option<c_int> {
    let fd = FILE.load(Ordering::Relaxed);
    (fd >= 0 && errno::kept(|| system::identity(fd)) == Some(identity)).then_some(fd)
}

/// The memory file's descriptor, which programs that close all descriptors leave open.
#[inline]
pub(crate) fn kept_descriptor() -> Option<u32> {
    u32::try_from(FILE.load(Ordering::Relaxed)).ok()
}

/// Where an address lies in the memory file.
pub(crate) fn offset(address: usize) -> usize {
    address - BASE.load(Ordering::Relaxed)
}

#[cold]
fn make() -> bool {
    fork::register();
    BOOKS.with(|books| {
        if STATE.load(Ordering::Acquire) == NEW {
            let made = mapped(books);
            if let Err(error) = &made {
                say(format_args!("large allocations stay private: {error}"));
            }
            STATE.store(if made.is_ok() { LIVE } else { NONE }, Ordering::Release);
        }
        STATE.load(Ordering::Acquire) == LIVE
    })
}

/// Several times what the machine has: ranges of it come and go, and addresses cost nothing.
fn size() -> io::Result<usize> {
    // SAFETY: a sysinfo of zeroes is valid: integers.
    let mut info: libc::sysinfo = unsafe { core::mem::zeroed() };
    // SAFETY: sysinfo fills the struct.
    unsafe { libc::syscall(libc::SYS_sysinfo, &raw mut info) };
    let ram = (info.totalram as usize).saturating_mul(info.mem_unit as usize);
    let size = ram.saturating_mul(4).clamp(4 << 30, 1 << 45).next_multiple_of(STEP);
    for (limit, name) in [(libc::RLIMIT_AS, "address space"), (libc::RLIMIT_FSIZE, "size of files")] {
        if system::limit(limit as c_int).is_some_and(|limit| limit < size as u64) {
            return Err(io::Error::other(format!("the process has a limit on its {name}")));
        }
    }
    Ok(size)
}

fn mapped(books: &mut Books) -> io::Result<()> {
    let size = size()?;
    let fd = memory_file(size)?;
    let made = place(fd, size);
    let (Ok(base), Some(identity)) = (&made, system::identity(fd)) else {
        system::close(fd);
        return made.map(drop);
    };
    books.identity = identity;
    books.readable = *base;
    books.space.give(*base..base + size);
    FILE.store(fd, Ordering::Relaxed);
    BASE.store(*base, Ordering::Relaxed);
    LEN.store(size, Ordering::Release);
    Ok(())
}

/// A sealed memory file.
fn memory_file(size: usize) -> io::Result<c_int> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    let checked = |result: libc::c_long| {
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as c_int) }
    };
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: the name is a C string; the other calls take numbers.
    unsafe {
        let fd = checked(libc::syscall(libc::SYS_memfd_create, c"starverbs-share".as_ptr(), flags))?;
        let sized = checked(libc::syscall(libc::SYS_ftruncate, fd, size));
        let sealed =
            sized.and_then(|_| checked(libc::syscall(libc::SYS_fcntl, fd, libc::F_ADD_SEALS, seals)));
        let high = libc::syscall(libc::SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, LOWEST_FD) as c_int;
        // Where so high a number is not allowed, the low one does.
        if sealed.is_err() || high >= 0 {
            system::close(fd);
        }
        sealed.map(|_| if high >= 0 { high } else { fd })
    }
}

/// Maps the file at a place of the kernel's choice, aligned for huge pages.
fn place(fd: c_int, size: usize) -> io::Result<usize> {
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let shared = libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: a new range, of which a part is taken and the rest given back.
    unsafe {
        let reserved = system::map(&(0..size + STEP), libc::PROT_NONE, private, None)?;
        let base = reserved.next_multiple_of(STEP);
        let arena = base..base + size;
        let all = reserved..reserved + size + STEP;
        for rest in [all.start..arena.start, arena.end..all.end] {
            if !rest.is_empty() {
                system::unmap(&rest)?;
            }
        }
        let done = system::map(&arena, libc::PROT_NONE, shared, Some((fd, 0)))
            .and_then(|_| system::advise(&arena, libc::MADV_DONTFORK))
            .and_then(|()| system::advise(&arena, libc::MADV_DONTDUMP));
        if done.is_err() {
            let _ = system::unmap(&arena);
        }
        done.map(|()| base)
    }
}

impl Books {
    /// The part of the arena that was ever used.
    pub(crate) fn reached(&self) -> Span {
        span().start..self.readable
    }

    /// Has all up to an address readable. If it fails, the range is given back.
    pub(crate) fn reach(&mut self, taken: &Span) -> bool {
        if taken.end <= self.readable {
            return true;
        }
        let end = taken.end.next_multiple_of(STEP).min(span().end);
        let more = self.readable..end;
        // SAFETY: nobody has anything beyond what was readable.
        let done = unsafe {
            system::protect(&more, READ_WRITE).and_then(|()| system::advise(&more, libc::MADV_DODUMP))
        };
        if done.is_ok() {
            self.readable = end;
        } else {
            self.space.give(taken.clone());
        }
        done.is_ok()
    }

    /// Takes a range that reads as zero and can be written.
    pub(crate) fn take(&mut self, len: usize, align: usize) -> Option<Span> {
        let span = self.space.take(len, align)?;
        self.reach(&span).then_some(span)
    }
}

/// Empties a range that is in nobody's hands and gives it back to the books.
pub(crate) fn give_back(span: Span) {
    if span.is_empty() {
        return;
    }
    errno::kept(|| {
        if renew(&span, READ_WRITE) {
            BOOKS.with(|books| books.space.give(span));
        }
    });
}

/// Maps the file anew over a range, empty, so that nothing is left of what the program said of it. If that
/// fails, nobody gets the range again.
pub(crate) fn renew(span: &Span, protection: c_int) -> bool {
    let identity = BOOKS.with(|books| books.identity);
    let Some(fd) = file_of(identity) else { return emptied_in_place(span, protection) };
    let offset = offset(span.start);
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: the range is in nobody's hands, by contract.
    let done = unsafe {
        system::punch(fd, offset, span.len())
            .and_then(|()| system::map(span, protection, flags, Some((fd, offset))))
            .and_then(|_| system::advise(span, libc::MADV_DONTFORK))
    };
    done.is_ok()
}

/// As above, where the program has closed the descriptor.
fn emptied_in_place(span: &Span, protection: c_int) -> bool {
    if BOOKS.with(|books| !books.space.lost(span).is_empty()) {
        return false;
    }
    // SAFETY: as above.
    unsafe {
        let _ = libc::syscall(libc::SYS_munlock, span.start, span.len());
        let done = system::protect(span, READ_WRITE)
            .and_then(|()| system::advise(span, libc::MADV_REMOVE))
            .and_then(|()| system::protect(span, protection));
        done.is_ok()
    }
}

/// Empties a part of a range that stays in use.
pub(crate) fn empty(span: &Span) -> io::Result<()> {
    let identity = BOOKS.with(|books| books.identity);
    match file_of(identity) {
        Some(fd) => system::punch(fd, offset(span.start), span.len()),
        // SAFETY: the caller's range.
        None => unsafe { system::advise(span, libc::MADV_REMOVE) },
    }
}

/// Says that this process is a forked child: what was the arena is private memory now.
pub(crate) fn freeze() {
    system::close(FILE.swap(-1, Ordering::Relaxed));
    STATE.store(FROZEN, Ordering::Release);
}
