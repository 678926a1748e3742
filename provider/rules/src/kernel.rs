//! The way to a board through the kernel: an open `/dev/starN` is a context of the board.
//!
//! The driver's memory is put together from what a context has: its event queue and queue memory where the
//! driver has its own, and the process's memory for messages. Commands name all of that by the driver's DMA
//! addresses, and get what the kernel knows it by. Of the registers it has what the kernel tells.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use memmap2::{MmapOptions, MmapRaw};
use starverbs_queues::board::*;
use starverbs_queues::chardev::*;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, transmute};

use crate::memory::MemoryFile;
use crate::raw::{BASE, BYTES, CQ, DATA, EVENTS, EVENTS_LOG};

/// Bytes of a context's doorbell page, at most.
const MOST_CELLS: u32 = 1 << 27;
/// Bytes of the event queue that the driver looks at.
const EVENT_BYTES: usize = size_of::<Event>() << EVENTS_LOG;
/// Counters in the order of their numbers, as the kernel's files are named.
const COUNTER_FILES: [&str; COUNTERS as usize] = [
    "doorbells",
    "send_fetches",
    "recv_fetches",
    "cqe_writes",
    "event_writes",
    "interrupts",
    "dma_reads",
    "dma_writes",
    "dma_misses",
    "commands",
    "commands_refused",
    "malformed",
    "qpc_hits",
    "qpc_misses",
    "qpc_waited",
    "qpc_prefetched",
    "qpc_evicted",
];

/// A context of a board.
pub(crate) struct KernelContext {
    file: File,
    info: Info,
    /// Where the kernel has the board's counters
    counters: PathBuf,
    /// Where the memory for messages begins
    data: u64,
    /// Where queue memory begins, as commands know it
    queues: u64,
}

/// What only the board's function has.
pub(crate) fn of_function(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, format!("{what}: the kernel has it, and no program"))
}

/// Whether it is a board of the kernel, and no socket.
pub(crate) fn is_device(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.file_type().is_char_device())
}

impl KernelContext {
    /// Opens a context, with its doorbell page and the driver's memory.
    pub(crate) fn open(path: &Path) -> io::Result<(KernelContext, MmapRaw, MemoryFile)> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let name = path.file_name().unwrap_or_default();
        let counters = Path::new("/sys/class/starverbs").join(name).join("counters");
        let mut context = KernelContext { file, info: Info::default(), counters, data: 0, queues: 0 };
        let mut info = Info::default();
        context.ask(IOC_INFO, &mut info)?;
        if !(1..=MOST_CELLS).contains(&info.cells) || size_of::<Event>() << info.events_log < EVENT_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a context of a size that is none"));
        }
        context.info = info;
        let cells = info.cells as usize * CELL_BYTES as usize;
        let page = MmapOptions::new().len(cells).map_raw(&context.file)?;
        let memory = context.memory()?;
        Ok((context, page, memory))
    }

    fn memory(&mut self) -> io::Result<MemoryFile> {
        let mut queues = QueueMemory { bytes: (DATA - CQ) as u64, offset: 0 };
        self.ask(IOC_QUEUE_MEMORY, &mut queues)?;
        let memory = MemoryFile::new(BYTES)?;
        memory.place(EVENTS, EVENT_BYTES, self.file.as_fd(), self.info.events)?;
        memory.place(CQ, DATA - CQ, self.file.as_fd(), queues.offset)?;
        (self.queues, self.data) = (queues.offset, memory.address() + DATA as u64);
        Ok(memory)
    }

    fn ask<T>(&self, request: u32, argument: &mut T) -> io::Result<()> {
        // SAFETY: each request's argument is a plain struct of its size, which lives for the call.
        let done = unsafe { libc::ioctl(self.file.as_raw_fd(), request.into(), &raw mut *argument) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Reads what the kernel tells of the registers.
    pub(crate) fn read(&self, at: u32, to: &mut [u8]) -> io::Result<()> {
        let value = match at {
            REG_VERSION => self.info.version.into(),
            REG_CAPS => self.info.caps,
            REG_CELLS => self.info.cells.into(),
            at => self.counter(at)?,
        };
        let bytes = value.to_le_bytes();
        to.copy_from_slice(bytes.get(..to.len()).ok_or_else(|| of_function("a row of registers"))?);
        Ok(())
    }

    fn counter(&self, at: u32) -> io::Result<u64> {
        let number = at.checked_sub(REG_COUNTERS).map(|at| at as usize / size_of::<u64>());
        let name = number.and_then(|number| COUNTER_FILES.get(number));
        let name = name.ok_or_else(|| of_function(&format!("the register at {at:#x}")))?;
        let text = std::fs::read_to_string(self.counters.join(name))?;
        text.trim().parse().map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "a counter of no number"))
    }

    /// Has events signal the first of these. The kernel signals it at once, as some may have come before.
    pub(crate) fn signal(&self, eventfds: &[OwnedFd]) -> io::Result<()> {
        let Some(eventfd) = eventfds.first() else { return Ok(()) };
        self.ask(IOC_EVENTFD, &mut EventFd { fd: eventfd.as_raw_fd(), reserved: 0 })?;
        nix::unistd::read(eventfd, &mut [0; size_of::<u64>()])?;
        Ok(())
    }

    /// Carries out the command at `at` of the memory, in its place.
    pub(crate) fn command(&self, memory: &MemoryFile, at: usize) -> io::Result<()> {
        let mut bytes: [u8; COMMAND_BYTES] = memory.get(at);
        let (head, body) = bytes.split_at_mut(size_of::<CommandHead>());
        let CommandHead { op, .. } = *at_front(head);
        self.translate(op, body)?;
        let mut command: Command = transmute!(bytes);
        self.ask(IOC_COMMAND, &mut command)?;
        let bytes: [u8; COMMAND_BYTES] = transmute!(command);
        let status = offset_of!(CommandHead, status);
        if bytes[status..status + 4] == [0; 4] {
            memory.put(at + size_of::<CommandHead>(), &bytes[size_of::<CommandHead>()..]);
        }
        memory.put(at + status, &bytes[status..status + 4]);
        Ok(())
    }

    /// The addresses of a command, as the kernel knows them.
    fn translate(&self, op: u16, body: &mut [u8]) -> io::Result<()> {
        match op {
            OP_CREATE_CQ => {
                let CreateCq { entries, taken, .. } = at_front(body);
                [entries, taken].into_iter().for_each(|address| self.in_queues(address));
            }
            OP_RESIZE_CQ => {
                let ResizeCq { entries, taken, .. } = at_front(body);
                [entries, taken].into_iter().for_each(|address| self.in_queues(address));
            }
            OP_CREATE_QP | OP_CREATE_SRQ | OP_CREATE_XRC_SRQ => {
                if op == OP_CREATE_QP {
                    self.in_queues(&mut at_front::<CreateQp>(body).answers);
                }
                let Queues { program, card, send, recv, .. } = at_front(body);
                [program, card, send, recv].into_iter().for_each(|address| self.in_queues(address));
            }
            OP_REG_MR | OP_REREG_MR => self.in_memory(at_front(body))?,
            OP_SEND_MAD | OP_RECEIVE_MAD => self.in_queues(&mut at_front::<Mad>(body).addr),
            _ => {}
        }
        Ok(())
    }

    fn in_queues(&self, address: &mut u64) {
        let at = address.wrapping_sub(BASE + CQ as u64);
        if at < (DATA - CQ) as u64 {
            *address = self.queues + at;
        }
    }

    /// A region of all memory is one of that for messages.
    fn in_memory(&self, region: &mut Region) -> io::Result<()> {
        let (first, last) = (BASE + DATA as u64, BASE + BYTES as u64);
        let end = region.addr.saturating_add(region.length);
        if region.pieces != 0 || end <= first || end > last {
            return Err(of_function("such a region"));
        }
        let skipped = first.saturating_sub(region.addr);
        region.addr = self.data + (region.addr + skipped - first);
        region.iova = region.iova.wrapping_add(skipped);
        region.length -= skipped;
        Ok(())
    }
}

/// The struct that these bytes begin with.
fn at_front<T: FromBytes + IntoBytes + KnownLayout + Immutable>(bytes: &mut [u8]) -> &mut T {
    match T::mut_from_prefix(bytes) {
        Ok((value, _)) => value,
        Err(_) => unreachable!("a command has room for each body, aligned to 8"),
    }
}
