//! Mappings that are kept, made by the kernel's calls themselves.

use std::sync::Mutex;

use super::*;

const PAGE: usize = 4096;
/// The table is the process's.
static ONE: Mutex<()> = Mutex::new(());

struct Mapped {
    fd: c_int,
    at: usize,
    len: usize,
}

impl Mapped {
    fn new(pages: usize, first: u64) -> Mapped {
        let len = pages * PAGE;
        // SAFETY: a new file, of which a new mapping is made.
        unsafe {
            let fd = libc::memfd_create(c"a program's".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
            assert_eq!(libc::ftruncate(fd, (first as usize * PAGE + len) as libc::off_t), 0);
            let (protection, offset) = (libc::PROT_READ | libc::PROT_WRITE, first as i64 * PAGE as i64);
            let at = libc::mmap(core::ptr::null_mut(), len, protection, libc::MAP_SHARED, fd, offset);
            assert_ne!(at, libc::MAP_FAILED);
            keep(at as usize, len, fd, first * PAGE as u64);
            Mapped { fd, at: at as usize, len }
        }
    }

    fn seal(&self) {
        // SAFETY: no pointers.
        assert_eq!(unsafe { libc::fcntl(self.fd, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) }, 0);
    }

    fn pages(&self, pages: Span) -> Option<(bool, u64)> {
        let (fd, offset) = find(&(self.at + pages.start * PAGE..self.at + pages.end * PAGE))?;
        Some((identity(fd) == identity(self.fd), offset / PAGE as u64))
    }

    fn unmap(&self, pages: Span) {
        // SAFETY: the test's own mapping.
        unsafe { libc::munmap((self.at + pages.start * PAGE) as *mut _, pages.len() * PAGE) };
    }

    fn all(&self) -> Span {
        self.at..self.at + self.len
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.unmap(0..self.len / PAGE);
        forget(&self.all());
        // SAFETY: the test's own descriptor.
        unsafe { libc::close(self.fd) };
    }
}

#[test]
fn a_mapping_is_found_once_its_file_is_sealed() {
    let _one = ONE.lock();
    let mapped = Mapped::new(4, 2);
    assert_eq!(mapped.pages(0..4), None, "it can be made shorter");
    mapped.seal();
    assert_eq!(mapped.pages(0..4), Some((true, 2)));
    assert_eq!(mapped.pages(3..4), Some((true, 5)));
    assert_eq!(mapped.pages(3..5), None);
    let before = any();
    drop(mapped);
    assert!(before && !any());
}

#[test]
fn what_goes_unseen_is_not_believed() {
    let _one = ONE.lock();
    let mapped = Mapped::new(4, 0);
    mapped.seal();
    mapped.unmap(2..3);
    assert_eq!(mapped.pages(0..2), Some((true, 0)));
    assert_eq!(mapped.pages(1..4), None, "a part is gone");
    let (fd, _) = find(&mapped.all().start.checked_add(1).map_or(0..0, |at| at..at + 1)).expect("kept");
    // SAFETY: what a program does that closes descriptors by number.
    unsafe { libc::close(fd) };
    assert_eq!(mapped.pages(0..1), None, "the descriptor is gone");
}

#[test]
fn parts_are_forgotten() {
    let _one = ONE.lock();
    let mapped = Mapped::new(8, 0);
    mapped.seal();
    let part = |pages: Span| forget(&(mapped.at + pages.start * PAGE..mapped.at + pages.end * PAGE));
    part(0..1);
    assert_eq!((mapped.pages(0..1), mapped.pages(1..8)), (None, Some((true, 1))));
    part(7..9);
    assert_eq!((mapped.pages(7..8), mapped.pages(1..7)), (None, Some((true, 1))));
    part(3..4);
    assert_eq!((mapped.pages(1..3), mapped.pages(4..5)), (Some((true, 1)), None));
    let far = mapped.at + (1 << 40);
    moved(&(mapped.at + PAGE..mapped.at + 3 * PAGE), &(far..far + PAGE));
    assert_eq!(mapped.pages(1..2), None);
    forget(&(far..far + PAGE));
    assert!(!any());
}

#[test]
fn there_is_room_for_some() {
    let _one = ONE.lock();
    let mapped: Vec<Mapped> = (0..ROOM + 2).map(|_| Mapped::new(1, 0)).collect();
    mapped.iter().for_each(Mapped::seal);
    assert_eq!(mapped.iter().filter(|mapped| mapped.pages(0..1).is_some()).count(), ROOM);
}

#[test]
fn files_that_are_none_of_memory_are_passed_over() {
    let _one = ONE.lock();
    let file = File::open("/proc/self/exe").expect("a file");
    keep(PAGE, PAGE, std::os::fd::AsRawFd::as_raw_fd(&file), 0);
    // SAFETY: the name is a C string.
    let own = unsafe { libc::memfd_create(c"starverbs".as_ptr(), libc::MFD_ALLOW_SEALING) };
    keep(PAGE, PAGE, own, 0);
    assert!(!any());
    // SAFETY: made above.
    unsafe { libc::close(own) };
}

#[test]
fn lines_of_maps_are_read() {
    let line = MapsLine::parse("7f01a000-7f01c000 rw-s 00003000 00:01 42   /memfd:x y (deleted)");
    let file = (libc::makedev(0, 1), 42);
    let expected = MapsLine { span: 0x7f01a000..0x7f01c000, is_shared: true, offset: 0x3000, file };
    assert_eq!(line, Some(expected));
    assert_eq!(MapsLine::parse("1000-2000 rw-p 00000000 00:00 0").map(|line| line.is_shared), Some(false));
    assert_eq!(MapsLine::parse("nonsense"), None);
}
