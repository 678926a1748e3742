//! The way to a board through the kernel: an open `/dev/starN` is a context of the board.
//!
//! The module puts the program's memory and queues into the board's reach, and its answers are checked by it;
//! posting, polling and ringing go without it. What is mapped of the file keeps it open: closing puts plain
//! memory in the place of all that, so that a late look of the program finds zeros.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use memmap2::{MmapOptions, MmapRaw};
use starverbs_backend::Listed;
use starverbs_queues::board::{CAP_VERBS, CELL_BYTES, COMMAND_BYTES, Event, VERSION};
use starverbs_queues::chardev::{
    Command, EventFd, IOC_COMMAND, IOC_EVENTFD, IOC_INFO, IOC_QUEUE_MEMORY, Info, QueueMemory,
};
use zerocopy::transmute;

use crate::error::{Result, VerbsError};

/// Bytes of a doorbell page at most.
const MAX_PAGE: u64 = 1 << 30;
/// log2 of the entries of an event queue at most.
const MAX_EVENTS_LOG: u32 = 16;

/// An open device.
pub(super) struct CharDev {
    /* first: the list must not have the number when it is another's */
    _listed: Listed,
    file: File,
    is_closed: AtomicBool,
}

/// What a context has from its beginning.
pub(super) struct Begun {
    /// `CAP_*`
    pub(super) caps: u64,
    pub(super) page: MmapRaw,
    pub(super) events: MmapRaw,
    pub(super) events_log: u32,
}

impl CharDev {
    /// Opens a context, whose events signal `irq`. ENODEV: it is no board, of another version, or takes no
    /// verbs; the errno of open(2).
    pub(super) fn open(path: &Path, irq: BorrowedFd<'_>) -> Result<(CharDev, Begun)> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let device =
            CharDev { _listed: Listed::new(file.as_raw_fd()), file, is_closed: AtomicBool::new(false) };
        let mut info = Info::default();
        device.ask(IOC_INFO, &mut info).map_err(|_| VerbsError::Os(libc::ENODEV))?;
        let page = u64::from(info.cells) * u64::from(CELL_BYTES);
        let is_board = info.version >> 16 == VERSION >> 16
            && info.caps & CAP_VERBS != 0
            && (1..=MAX_PAGE).contains(&page)
            && info.events_log <= MAX_EVENTS_LOG;
        if !is_board {
            return Err(VerbsError::Os(libc::ENODEV));
        }
        let events = device.map(info.events, size_of::<Event>() << info.events_log)?;
        let page = device.map(0, page as usize)?;
        device.ask(IOC_EVENTFD, &mut EventFd { fd: irq.as_raw_fd(), reserved: 0 })?;
        Ok((device, Begun { caps: info.caps, page, events, events_log: info.events_log }))
    }

    fn ask<T>(&self, request: u32, argument: &mut T) -> io::Result<()> {
        // SAFETY: each request's argument is a plain struct of its size, which lives for the call.
        let done = unsafe { libc::ioctl(self.file.as_raw_fd(), request.into(), &raw mut *argument) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    fn map(&self, offset: u64, len: usize) -> io::Result<MmapRaw> {
        if self.is_closed.load(Ordering::Acquire) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        MmapOptions::new().offset(offset).len(len).map_raw(&self.file)
    }

    /// Carries out a command in its place.
    pub(super) fn command(&self, request: &mut [u8; COMMAND_BYTES]) -> io::Result<()> {
        if self.is_closed.load(Ordering::Acquire) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let mut command: Command = transmute!(*request);
        self.ask(IOC_COMMAND, &mut command)?;
        *request = transmute!(command);
        Ok(())
    }

    /// New queue memory, and the address by which commands know it. ENOMEM: beyond RLIMIT_MEMLOCK, or more
    /// than can be had in one piece.
    pub(super) fn queue_memory(&self, bytes: usize) -> io::Result<(MmapRaw, u64)> {
        let mut memory = QueueMemory { bytes: bytes as u64, offset: 0 };
        self.ask(IOC_QUEUE_MEMORY, &mut memory)?;
        Ok((self.map(memory.offset, bytes)?, memory.offset))
    }

    /// Whether the board has gone, or was reset since.
    pub(super) fn is_gone(&self) -> bool {
        let gone = |error: io::Error| error.raw_os_error() == Some(libc::ENODEV);
        self.ask(IOC_INFO, &mut Info::default()).is_err_and(gone)
    }

    /// From now on nothing is asked or mapped.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }
}

/// Puts memory of zeros in the place of what is mapped, which the program may still look at.
pub(super) fn forget(map: &MmapRaw) {
    // SAFETY: covers exactly a mapping that is this process's own and stays one; what is there are plain
    // words, of which zero is one.
    unsafe {
        libc::mmap(
            map.as_mut_ptr().cast(),
            map.len(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
    }
}
