//! `/dev/starN` without a library: requests, commands, mappings. Nothing is checked before it is asked.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use starverbs_queues::board::{BODY_BYTES, COMMAND_BYTES, CommandHead, NumberReply, Object};
use starverbs_queues::chardev::{
    Command, EventFd, IOC_COMMAND, IOC_EVENTFD, IOC_FREE_QUEUE_MEMORY, IOC_INFO, IOC_QUEUE_MEMORY, Info,
    QueueMemory,
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, transmute};

/// What went wrong, in words.
pub(crate) type Tested<T = ()> = Result<T, String>;

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;

/// An open device: a context of the board.
pub(crate) struct Device {
    file: File,
    pub info: Info,
}

/// The answer to a command, or the board's errno.
pub(crate) type Answer = Result<[u8; BODY_BYTES], i32>;

impl Device {
    pub(crate) fn open(path: &Path) -> io::Result<Device> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let mut device = Device { file, info: Info::default() };
        let mut info = Info::default();
        device.ask(IOC_INFO, &mut info)?;
        device.info = info;
        Ok(device)
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Bytes of its doorbell page.
    pub(crate) fn page_bytes(&self) -> usize {
        self.info.cells as usize * 8
    }

    /// A request with an argument of its size.
    pub(crate) fn ask<T>(&self, request: u32, argument: &mut T) -> io::Result<()> {
        self.request(request, ptr::from_mut(argument) as u64)
    }

    /// A request with anything as its argument.
    pub(crate) fn request(&self, request: u32, argument: u64) -> io::Result<()> {
        // SAFETY: the kernel checks the address; at worst it writes 128 bytes there, and all callers name
        // memory of their own, or none that is mapped.
        let done = unsafe { libc::ioctl(self.fd(), request.into(), argument) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// A command, with whatever head.
    pub(crate) fn command_of(&self, head: CommandHead, body: &[u8]) -> io::Result<Answer> {
        let mut bytes = [0; COMMAND_BYTES];
        let (front, rest) = bytes.split_at_mut(size_of::<CommandHead>());
        front.copy_from_slice(head.as_bytes());
        rest[..body.len()].copy_from_slice(body);
        let mut command: Command = transmute!(bytes);
        self.ask(IOC_COMMAND, &mut command)?;
        let bytes: [u8; COMMAND_BYTES] = transmute!(command);
        let status = CommandHead::read_from_prefix(&bytes).map_or(u32::MAX, |(head, _)| head.status);
        let mut body = [0; BODY_BYTES];
        body.copy_from_slice(&bytes[size_of::<CommandHead>()..]);
        Ok(if status == 0 { Ok(body) } else { Err(status as i32) })
    }

    pub(crate) fn command(&self, op: u16, body: &impl AsBody) -> io::Result<Answer> {
        self.command_of(CommandHead { op, context: 0, status: 0 }, body.bytes())
    }

    /// A command that must succeed, and its answer.
    pub(crate) fn answer<R: FromBytes + KnownLayout + Immutable>(
        &self,
        op: u16,
        body: &impl AsBody,
    ) -> Tested<R> {
        let answer = self.command(op, body).map_err(|error| format!("command {op:#x}: {error}"))?;
        let body = answer.map_err(|errno| format!("command {op:#x}: errno {errno}"))?;
        R::read_from_prefix(&body).map(|(reply, _)| reply).map_err(|_| "a short answer".to_owned())
    }

    /// Makes something: its number and cell.
    pub(crate) fn make(&self, op: u16, body: &impl AsBody) -> Tested<NumberReply> {
        self.answer(op, body)
    }

    /// The errno of a command on an object; 0: it was carried out.
    pub(crate) fn object(&self, op: u16, number: u32) -> Tested<i32> {
        let answer = self.command(op, &Object { number, reserved: 0 });
        Ok(answer.map_err(|error| format!("command {op:#x}: {error}"))?.err().unwrap_or(0))
    }

    /// New queue memory: where it begins.
    pub(crate) fn queue_memory(&self, bytes: u64) -> io::Result<u64> {
        let mut memory = QueueMemory { bytes, offset: 0 };
        self.ask(IOC_QUEUE_MEMORY, &mut memory).map(|()| memory.offset)
    }

    pub(crate) fn free_queue_memory(&self, offset: u64) -> io::Result<()> {
        self.ask(IOC_FREE_QUEUE_MEMORY, &mut QueueMemory { bytes: 0, offset })
    }

    pub(crate) fn set_eventfd(&self, fd: RawFd) -> io::Result<()> {
        self.ask(IOC_EVENTFD, &mut EventFd { fd, reserved: 0 })
    }

    pub(crate) fn map(&self, offset: u64, len: usize) -> io::Result<Map> {
        self.map_as(offset, len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED)
    }

    pub(crate) fn map_as(&self, offset: u64, len: usize, prot: i32, flags: i32) -> io::Result<Map> {
        Map::new(self.fd(), offset, len, prot, flags)
    }
}

/// Bytes of a command's body.
pub(crate) trait AsBody {
    fn bytes(&self) -> &[u8];
}

impl<T: IntoBytes + Immutable> AsBody for T {
    fn bytes(&self) -> &[u8] {
        self.as_bytes()
    }
}

/// A mapping of this process, which others may write.
pub(crate) struct Map {
    pub at: *mut u8,
    pub len: usize,
}

impl Map {
    pub(crate) fn new(fd: RawFd, offset: u64, len: usize, prot: i32, flags: i32) -> io::Result<Map> {
        // SAFETY: a new mapping, at a place that the kernel chooses.
        let at = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, fd, offset.cast_signed()) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Map { at: at.cast(), len })
    }

    /// Memory of no file, zero, which children share if it is to be so.
    pub(crate) fn anonymous(len: usize, is_shared: bool) -> io::Result<Map> {
        let kind = if is_shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
        Map::new(-1, 0, len, libc::PROT_READ | libc::PROT_WRITE, kind | libc::MAP_ANONYMOUS)
    }

    pub(crate) fn address(&self) -> u64 {
        self.at as u64
    }

    /// An aligned word of it.
    pub(crate) fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.len, "a word of the mapping");
        // SAFETY: inside the mapping, which lives as long as this; aligned.
        unsafe { AtomicU64::from_ptr(self.at.add(at).cast()) }
    }

    pub(crate) fn load(&self, at: usize) -> u64 {
        self.word(at).load(Ordering::Acquire)
    }

    pub(crate) fn store(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::Release);
    }

    /// Takes a part of it away.
    pub(crate) fn unmap(&self, from: usize, len: usize) {
        // SAFETY: a part of this mapping, which nothing but this refers to.
        unsafe { libc::munmap(self.at.add(from).cast(), len) };
    }

    /// Lets go of it without unmapping.
    pub(crate) fn forget(self) {
        std::mem::forget(self);
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        self.unmap(0, self.len);
    }
}

/// The errno of a call that must fail; 0: it did not.
pub(crate) fn errno<T>(result: io::Result<T>) -> i32 {
    result.err().map_or(0, |error| error.raw_os_error().unwrap_or(-1))
}

/// What must be so.
pub(crate) fn expect<T: PartialEq + std::fmt::Debug>(what: &str, seen: T, wanted: T) -> Tested {
    if seen == wanted { Ok(()) } else { Err(format!("{what}: {seen:?} in place of {wanted:?}")) }
}
