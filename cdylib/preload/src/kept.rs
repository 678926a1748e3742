//! The program's own shared mappings of memory files: which descriptor each is mapped from.
//!
//! A program may close its descriptor when it has mapped the file; a peer that is to map the same needs one.
//! So a duplicate is kept with each mapping, of a few of them. Whether the file is sealed is asked when
//! somebody wants to know, as programs seal late. What stands here may be wrong: mappings and descriptors go
//! by system calls that no library sees. So an answer is compared with what the kernel says, and a
//! descriptor with the file that it was.

use core::ffi::c_int;
use core::ops::Range;
use std::cell::UnsafeCell;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use crate::errno;

/// Addresses from one to another.
pub(crate) type Span = Range<usize>;

/// Mappings that are kept at most.
const ROOM: usize = 64;
/// Away from the descriptors that shells name.
const LOWEST: c_int = 200;
/// Memory files of this library's own are not the program's.
const OWN: &[u8] = b"/memfd:starverbs";

/// Device and inode.
type Identity = (u64, u64);

#[derive(Clone)]
struct Mapping {
    span: Span,
    /// Where in the file it begins
    offset: u64,
    fd: c_int,
    file: Identity,
}

/// What is kept, and its lock. Not std's: a fork may copy it while it is taken, and who cannot have it soon
/// does without, as a signal handler may be in its own thread's way.
struct Table {
    holder: AtomicU32,
    mappings: UnsafeCell<[Option<Mapping>; ROOM]>,
}

// SAFETY: the mappings are touched by the one thread that `with` lets in.
unsafe impl Sync for Table {}

static TABLE: Table = Table { holder: AtomicU32::new(0), mappings: UnsafeCell::new([const { None }; ROOM]) };
/// How many there are, for all who have nothing to do with them.
static COUNT: AtomicUsize = AtomicUsize::new(0);

impl Table {
    fn with<R>(&self, work: impl FnOnce(&mut [Option<Mapping>; ROOM]) -> R) -> Option<R> {
        let me = std::process::id();
        for _ in 0..1000 {
            match self.holder.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => {
                    // SAFETY: this thread alone is here.
                    let mappings = unsafe { &mut *self.mappings.get() };
                    let result = work(mappings);
                    COUNT.store(mappings.iter().flatten().count(), Ordering::Relaxed);
                    self.holder.store(0, Ordering::Release);
                    return Some(result);
                }
                Err(holder) if holder == me => std::thread::yield_now(),
                // The parent's thread that was at it when this process was forked; it is not here.
                Err(parent) => {
                    let _ = self.holder.compare_exchange(parent, 0, Ordering::Acquire, Ordering::Relaxed);
                }
            }
        }
        None
    }
}

/// Whether anything is kept.
#[inline]
pub(crate) fn any() -> bool {
    COUNT.load(Ordering::Relaxed) != 0
}

/// Keeps a mapping that was just made from a descriptor, if it is of a memory file that can be sealed.
#[cold]
pub(crate) fn keep(at: usize, len: usize, fd: c_int, offset: u64) {
    errno::kept(|| {
        let seals = seals(fd);
        // One that is closed to seals, and can be made shorter, stays so.
        if seals < 0 || (seals & libc::F_SEAL_SEAL != 0 && !is_sealed(seals)) || is_own(fd) {
            return;
        }
        let Some(file) = identity(fd) else { return };
        let Some(end) = at.checked_add(len) else { return };
        forget(&(at..end));
        TABLE.with(|mappings| {
            let Some(room) = mappings.iter_mut().find(|room| room.is_none()) else { return };
            if let Some(fd) = duplicate(fd) {
                *room = Some(Mapping { span: at..end, offset, fd, file });
            }
        });
    });
}

/// Forgets what lies in a range: it is unmapped, or something else is mapped there. Of a mapping that it
/// cuts in two the first part stays.
#[cold]
pub(crate) fn forget(range: &Span) {
    errno::kept(|| {
        TABLE.with(|mappings| {
            for room in mappings.iter_mut() {
                let Some(mapping) = room else { continue };
                cut(mapping, range);
                if mapping.span.is_empty() {
                    give_up(mapping);
                    *room = None;
                }
            }
        })
    });
}

/// Has a mapping follow to where mremap(2) put it.
#[cold]
pub(crate) fn moved(old: &Span, new: &Span) {
    let whole = |mapping: &&mut Mapping| mapping.span.start == old.start && mapping.span.end <= old.end;
    let found = TABLE.with(|mappings| {
        let mapping = mappings.iter_mut().flatten().find(whole)?;
        mapping.span = new.clone();
        Some(())
    });
    if found.flatten().is_none() {
        forget(old);
    }
}

fn cut(mapping: &mut Mapping, range: &Span) {
    let span = mapping.span.clone();
    if range.start >= span.end || range.end <= span.start {
        return;
    }
    if range.start > span.start {
        mapping.span.end = range.start;
    } else {
        mapping.span.start = range.end.min(span.end);
        mapping.offset += (mapping.span.start - span.start) as u64;
    }
}

/// The descriptor and the offset in its file of a range that lies in one kept mapping, of a file that cannot
/// be made shorter.
pub(crate) fn find(range: &Span) -> Option<(c_int, u64)> {
    if range.is_empty() || !any() {
        return None;
    }
    let holds = |mapping: &&Mapping| mapping.span.start <= range.start && range.end <= mapping.span.end;
    errno::kept(|| {
        let found = TABLE.with(|mappings| mappings.iter().flatten().find(holds).cloned()).flatten()?;
        let offset = found.offset + (range.start - found.span.start) as u64;
        let holds = identity(found.fd) == Some(found.file)
            && is_sealed(seals(found.fd))
            && is_mapped(range, found.file, offset);
        holds.then_some((found.fd, offset))
    })
}

/// Whether the kernel has all of a range mapped from there in the file, shared, to read and write.
fn is_mapped(range: &Span, file: Identity, offset: u64) -> bool {
    let Ok(maps) = File::open("/proc/self/maps") else { return false };
    let mut at = range.start;
    for line in BufReader::new(maps).lines().map_while(Result::ok) {
        let Some(line) = MapsLine::parse(&line) else { continue };
        if line.span.end <= at {
            continue;
        }
        let expected = offset + (at - range.start) as u64;
        let starts =
            line.span.start <= at && line.offset + (at.wrapping_sub(line.span.start)) as u64 == expected;
        if !starts || line.file != file || !line.is_shared {
            return false;
        }
        at = line.span.end;
        if at >= range.end {
            return true;
        }
    }
    false
}

/// What a line of /proc/self/maps says.
#[derive(Debug, PartialEq, Eq)]
struct MapsLine {
    span: Span,
    /// To read and write, MAP_SHARED
    is_shared: bool,
    offset: u64,
    file: Identity,
}

impl MapsLine {
    fn parse(line: &str) -> Option<MapsLine> {
        let mut words = line.split_ascii_whitespace();
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let (start, end) = words.next()?.split_once('-')?;
        let mode = words.next()?;
        let offset = hex(words.next()?)?;
        let (major, minor) = words.next()?.split_once(':')?;
        let device = libc::makedev(u32::try_from(hex(major)?).ok()?, u32::try_from(hex(minor)?).ok()?);
        let span = usize::try_from(hex(start)?).ok()?..usize::try_from(hex(end)?).ok()?;
        let is_shared = mode.starts_with("rw") && mode.ends_with('s');
        Some(MapsLine { span, is_shared, offset, file: (device, words.next()?.parse().ok()?) })
    }
}

fn is_sealed(seals: c_int) -> bool {
    seals >= 0 && seals & libc::F_SEAL_SHRINK != 0
}

fn seals(fd: c_int) -> c_int {
    // SAFETY: no pointers; any number may be asked for.
    unsafe { libc::fcntl(fd, libc::F_GET_SEALS) }
}

fn duplicate(fd: c_int) -> Option<c_int> {
    // SAFETY: as above.
    let high = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, LOWEST) };
    // Where so high a number is not allowed, nothing is kept: the low ones are the program's.
    (high >= 0).then_some(high)
}

/// Closes what was kept, if the program has not put another file in its place.
fn give_up(mapping: &Mapping) {
    if identity(mapping.fd) == Some(mapping.file) {
        // SAFETY: the duplicate that `keep` made.
        unsafe { libc::syscall(libc::SYS_close, mapping.fd) };
    }
}

fn identity(fd: c_int) -> Option<Identity> {
    // SAFETY: a stat of zeroes is valid: integers.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: fstat fills the struct, which lives across the call.
    let done = unsafe { libc::syscall(libc::SYS_fstat, fd, &raw mut stat) };
    (done == 0).then_some((stat.st_dev, stat.st_ino))
}

fn is_own(fd: c_int) -> bool {
    let path = format!("/proc/self/fd/{fd}\0");
    let mut name = [0u8; OWN.len()];
    // SAFETY: a C string; the call writes at most that many bytes.
    unsafe {
        libc::syscall(libc::SYS_readlinkat, libc::AT_FDCWD, path.as_ptr(), name.as_mut_ptr(), name.len())
    };
    name == *OWN
}

#[cfg(test)]
#[path = "kept_tests.rs"]
mod tests;
