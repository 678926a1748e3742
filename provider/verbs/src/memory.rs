//! The process's memory as the card sees it: what registering looks at, and safe copies for memory that may
//! be missing.
//!
//! Owns the marks in host addresses. The card takes host addresses from regions and hands them to its
//! environment without looking inside; no address of a process has one of its two top bits set on this
//! machine, so a region whose address carries a mark is another kind of memory. [`DEMAND`]: pages may come
//! and go (on-demand paging), and the kernel copies, which finds out what is mapped without a signal.
//! [`NULL`]: what is written is dropped, what is read is zero. Both: memory of another process, a number and
//! an offset.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::sync::OnceLock;

pub(crate) use starverbs_backend::copy::{copy_short, write_in_order};
use starverbs_backend::sealed;

use crate::error::{Result, VerbsError};
use crate::share::FileBytes;

/// Mark of memory that may be missing.
pub(crate) const DEMAND: u64 = 1 << 63;
/// Mark of the memory of null regions.
pub(crate) const NULL: u64 = 1 << 62;
/// Bytes that a marked region may span, from address 0: every address of a process is below.
pub(crate) const SPAN: u64 = 1 << 62;
/// Bytes that memory of another process may span, from address 0: addresses have 47 bits on x86-64 and 48 on
/// aarch64 (larger ones must be asked for by name, mmap(2)).
pub(crate) const FOREIGN_SPAN: u64 = 1 << FOREIGN_SHIFT;
const FOREIGN_SHIFT: u32 = 48;
const MARKS: u64 = DEMAND | NULL;

/// Longer ranges are not touched page by page, but looked up.
const TOUCH: u64 = 16 << 20;

/// Bytes of a page: 4 KiB on x86-64; on aarch64 the kernel's choice, up to 64 KiB.
pub(crate) fn page() -> u64 {
    // SAFETY: sysconf looks at no memory of ours.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).unwrap_or(4096)
}

/// First byte and length of the pages, of `page` bytes each, that hold [start, end).
fn pages(start: u64, end: u64, page: u64) -> (u64, u64) {
    let from = start & !(page - 1);
    (from, (end - from).next_multiple_of(page))
}

/// Whether an address carries a mark.
#[inline]
pub(crate) fn marked(addr: u64) -> bool {
    addr >> 62 != 0
}

/// Whether an address is a null region's.
pub(crate) fn is_null(addr: u64) -> bool {
    addr & MARKS == NULL
}

/// Whether an address is an on-demand region's.
pub(crate) fn is_on_demand(addr: u64) -> bool {
    addr & MARKS == DEMAND
}

/// The address without its mark.
pub(crate) fn plain(addr: u64) -> u64 {
    addr & (SPAN - 1)
}

/// What lies behind a marked address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Marked {
    /// On demand: [`DEMAND`]
    Demand,
    /// The null region: [`NULL`]
    Null,
    /// Another process's memory: [`foreign`]
    Foreign,
}

/// Which mark an address carries that carries one.
pub(crate) fn mark(addr: u64) -> Marked {
    match addr & MARKS {
        MARKS => Marked::Foreign,
        DEMAND => Marked::Demand,
        _ => Marked::Null,
    }
}

/// Address of the first byte of another process's memory, which has a number in this one; `None`: too large a
/// number.
pub(crate) fn foreign(number: usize) -> Option<u64> {
    let number = u64::try_from(number).ok().filter(|number| *number < SPAN >> FOREIGN_SHIFT)?;
    Some(MARKS | number << FOREIGN_SHIFT)
}

/// Number and offset in an address of another process's memory.
pub(crate) fn foreign_place(addr: u64) -> (usize, u64) {
    ((plain(addr) >> FOREIGN_SHIFT) as usize, addr & (FOREIGN_SPAN - 1))
}

/// Whether the kernel copies for us here: a sandbox may forbid the calls.
pub(crate) fn safe_copies_work() -> bool {
    static WORKS: OnceLock<bool> = OnceLock::new();
    *WORKS.get_or_init(|| {
        let (from, mut to) = (*b"on-demand", [0; 9]);
        let read = read(from.as_ptr() as u64, &mut to);
        let wrote = write(to.as_ptr() as u64, b"paging...");
        // SAFETY: a local array, read after the kernel wrote it.
        let now = unsafe { (&raw const to).read_volatile() };
        read && wrote && now == *b"paging..."
    })
}

fn own_pid() -> libc::pid_t {
    // SAFETY: no arguments, no effects. Not kept: a forked child has another.
    unsafe { libc::getpid() }
}

/// Copies memory at `from`; false if not all of it is there to be read.
pub(crate) fn read(from: u64, to: &mut [u8]) -> bool {
    let here = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() };
    let there = libc::iovec { iov_base: plain(from) as *mut libc::c_void, iov_len: to.len() };
    // SAFETY: the kernel writes `to` alone, and checks every page of the other range.
    let copied = unsafe { libc::process_vm_readv(own_pid(), &here, 1, &there, 1, 0) };
    copied == to.len() as isize
}

/// Copies `data` to memory at `to`, its last eight bytes last, as programs spin on them; false if not all of
/// it could be written.
pub(crate) fn write(to: u64, data: &[u8]) -> bool {
    let to = plain(to);
    let body = data.len().saturating_sub(8);
    let here = libc::iovec { iov_base: data.as_ptr().cast_mut().cast(), iov_len: data.len() };
    let piece = |at: usize, len| libc::iovec { iov_base: (to + at as u64) as *mut _, iov_len: len };
    let there = [piece(0, body), piece(body, data.len() - body)];
    let there = &there[usize::from(body == 0)..];
    // SAFETY: the kernel reads `data`, and checks every page that it writes. The program gave the card the
    // right to write there, as with any region.
    let copied = unsafe {
        libc::process_vm_writev(own_pid(), &here, 1, there.as_ptr(), there.len() as libc::c_ulong, 0)
    };
    copied == data.len() as isize
}

/// EFAULT unless [start, end) is mapped, readable, and writable if `write`.
pub(crate) fn probe(start: u64, end: u64, write: bool) -> Result<()> {
    if start == end || (end - start <= TOUCH && populate(start, end, write).is_ok()) {
        return Ok(());
    }
    /* refused, unknown to this kernel, a special mapping, or long: the map decides */
    covered(start, end, write)
}

/// Brings the pages of [start, end) in. EFAULT: not mapped, or not with these rights.
pub(crate) fn prefetch(start: u64, end: u64, write: bool) -> Result<()> {
    match populate(start, end, write) {
        Err(libc::ENOMEM | libc::EFAULT) => Err(VerbsError::Fault),
        Err(_) => covered(start, end, write),
        Ok(()) => Ok(()),
    }
}

/// Asks for the pages of [start, end) without waiting for them. EFAULT: not mapped.
pub(crate) fn will_need(start: u64, end: u64) -> Result<()> {
    match advise(start, end, libc::MADV_WILLNEED) {
        Err(libc::ENOMEM) => Err(VerbsError::Fault),
        /* nothing to read in, or not asked to */
        _ => Ok(()),
    }
}

fn populate(start: u64, end: u64, write: bool) -> std::result::Result<(), i32> {
    advise(start, end, if write { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ })
}

fn advise(start: u64, end: u64, advice: i32) -> std::result::Result<(), i32> {
    let (from, len) = pages(start, end, page());
    // SAFETY: these advices fault pages in as an access would, or less, and change no contents.
    match unsafe { libc::madvise(from as *mut libc::c_void, len as usize, advice) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)),
    }
}

fn covered(start: u64, end: u64, write: bool) -> Result<()> {
    let Ok(maps) = fs::read_to_string("/proc/self/maps") else { return Ok(()) };
    if covers(&maps, start, end, write) { Ok(()) } else { Err(VerbsError::Fault) }
}

/// Whether the lines of `/proc/PID/maps`, sorted as they are, cover the range with the rights.
fn covers(maps: &str, start: u64, end: u64, write: bool) -> bool {
    let mut at = start;
    for line in maps.lines() {
        let Some((range, rest)) = line.split_once(' ') else { continue };
        let Some((from, to)) = range.split_once('-') else { continue };
        let (Ok(from), Ok(to)) = (u64::from_str_radix(from, 16), u64::from_str_radix(to, 16)) else {
            continue;
        };
        if to <= at {
            continue;
        }
        let rights = rest.as_bytes();
        if from > at || rights.first() != Some(&b'r') || (write && rights.get(1) != Some(&b'w')) {
            return false;
        }
        at = to;
        if at >= end {
            return true;
        }
    }
    false
}

/// What [`Mapping::zeroes`] gives.
pub(crate) struct Zeroes {
    /// Address of the first byte
    pub(crate) start: u64,
    file: Option<File>,
    map: Mapping,
}

impl Zeroes {
    /// Where a byte of it lies, for other processes.
    pub(crate) fn file_bytes(&self, addr: u64) -> Option<FileBytes> {
        FileBytes::of(self.file.as_ref()?, addr.checked_sub(self.map.addr)?)
    }
}

/// Memory that this library mapped; unmapped with it.
#[derive(Debug)]
pub(crate) struct Mapping {
    addr: u64,
    len: usize,
}

impl Mapping {
    /// `len` bytes of zeroes that forked children share, at a multiple of `align` (a power of two): of a
    /// memory file that other processes may map, if there can be one.
    pub(crate) fn zeroes(len: u64, align: u64) -> Result<Zeroes> {
        let room =
            usize::try_from(len + align.max(page())).map_err(|_| VerbsError::NoMemory("device memory"))?;
        let file = sealed::file(c"starverbs-memory", room).ok();
        let (fd, flags) = file.as_ref().map_or((-1, libc::MAP_ANONYMOUS), |file| (file.as_raw_fd(), 0));
        let map = Mapping::new(room, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0)?;
        let start = map.addr.next_multiple_of(align);
        Ok(Zeroes { start, file, map })
    }

    /// Bytes [offset, offset + len) of a descriptor; gives the address of the first.
    pub(crate) fn of_fd(fd: i32, offset: u64, len: u64, write: bool) -> Result<(Mapping, u64)> {
        let skip = offset & (page() - 1);
        let from = i64::try_from(offset - skip).map_err(|_| VerbsError::Invalid("offset"))?;
        let room = usize::try_from(len + skip).map_err(|_| VerbsError::Invalid("length"))?;
        let prot = libc::PROT_READ | if write { libc::PROT_WRITE } else { 0 };
        let map = Mapping::new(room, prot, 0, fd, from)?;
        let start = map.addr + skip;
        Ok((map, start))
    }

    fn new(len: usize, prot: i32, flags: i32, fd: i32, offset: i64) -> Result<Mapping> {
        /* memmap2 has no mapping without a file that forked children share */
        // SAFETY: a new mapping at an address that the kernel chooses hurts nobody.
        let addr =
            unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags | libc::MAP_SHARED, fd, offset) };
        if addr == libc::MAP_FAILED {
            Err(VerbsError::last_os())
        } else {
            Ok(Mapping { addr: addr as u64, len })
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, with this length; regions over it are deregistered before it is dropped.
        unsafe { libc::munmap(self.addr as *mut libc::c_void, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str =
        "1000-3000 rw-p 00000000 00:00 0 [heap]\n3000-4000 r--p 0 00:00 0\n6000-7000 ---p 0 0:0 0\n";

    #[test]
    fn ranges_must_be_mapped_with_their_rights() {
        assert!(covers(MAPS, 0x1000, 0x3000, true));
        assert!(covers(MAPS, 0x1800, 0x4000, false));
        assert!(!covers(MAPS, 0x1800, 0x4000, true));
        assert!(!covers(MAPS, 0x3000, 0x5000, false));
        assert!(!covers(MAPS, 0x6000, 0x6001, false));
        assert!(!covers(MAPS, 0x8000, 0x8001, false));
    }

    #[test]
    fn addresses_of_other_processes_are_numbers_and_offsets() {
        for number in [0, 1, 0x3fff] {
            let first = foreign(number).unwrap();
            let last = first + (FOREIGN_SPAN - 1);
            assert_eq!((mark(first), mark(last)), (Marked::Foreign, Marked::Foreign));
            assert_eq!(foreign_place(last), (number, FOREIGN_SPAN - 1));
        }
        assert_eq!(foreign(0x4000), None);
        assert_eq!((mark(DEMAND | 7), mark(NULL)), (Marked::Demand, Marked::Null));
    }

    #[test]
    fn probing_tells_memory_from_holes() {
        let heap = vec![0u8; 100_000];
        let start = heap.as_ptr() as u64;
        assert!(probe(start, start + 100_000, true).is_ok());
        assert!(prefetch(start, start + 100_000, true).is_ok());
        let code = "text".as_ptr() as u64;
        assert!(probe(code, code + 4, false).is_ok());
        for (from, to, write) in [(code, code + 4, true), (64, 128, false), (64, 1 << 40, false)] {
            assert_eq!(probe(from, to, write).unwrap_err().errno(), libc::EFAULT);
            assert_eq!(prefetch(from, to, write).unwrap_err().errno(), libc::EFAULT);
        }
        assert_eq!(will_need(page(), 2 * page()).unwrap_err().errno(), libc::EFAULT);
        assert!(will_need(start, start + 100_000).is_ok());
    }

    /// 4, 16 and 64 KiB: a call about pages takes whole ones only.
    #[test]
    fn ranges_become_whole_pages_of_any_size() {
        for page in [1 << 12, 1 << 14, 1 << 16] {
            for (start, end) in
                [(page, 2 * page), (page + 4096 % page, page + 4097), (3 * page - 1, 3 * page + 1)]
            {
                let (from, len) = pages(start, end, page);
                assert!(from.is_multiple_of(page) && len.is_multiple_of(page));
                assert!(from <= start && start - from < page && end <= from + len && from + len - end < page);
            }
        }
        assert_eq!(pages(0, page(), page()), (0, page()));
    }

    #[test]
    fn safe_copies_find_holes_without_a_signal() {
        assert!(safe_copies_work());
        let page = page();
        let Zeroes { start, map, .. } = Mapping::zeroes(2 * page, page).unwrap();
        let mut back = [0; 20];
        for at in [0, 5, page - 3] {
            assert!(write(DEMAND | (start + at), b"twenty bytes of text"));
            assert!(read(start + at, &mut back));
            assert_eq!(&back, b"twenty bytes of text");
        }
        assert!(write(start, b"few") && read(start, &mut back[..3]) && &back[..3] == b"few");
        // SAFETY: the second page of the mapping, which nobody has a reference to.
        unsafe { libc::mprotect((start + page) as *mut libc::c_void, page as usize, libc::PROT_NONE) };
        assert!(!write(start + page - 3, b"twenty bytes of text"));
        assert!(!read(start + page - 3, &mut back));
        assert!(!write("text".as_ptr() as u64, b"TEXT"), "rights are kept");
        assert!(!read(8, &mut back));
        drop(map);
    }
}
