//! The way to a board: its registers, its doorbell page, the memory that it reaches, its interrupts.
//!
//! All that the driver asks of the world beyond memory is here: at a vfio-user socket the driver has the
//! board itself, at a device of the kernel (`kernel`) a context of it. Every call is bounded in time.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use memmap2::{MmapOptions, MmapRaw};
use starverbs_backend::sealed;
use starverbs_queues::board::{BAR_CONTROL, BAR_DOORBELLS};
use starverbs_vfio::VfioClient;
use starverbs_vfio::message::{IRQ_MSIX, PCI_CONFIG, REGION_MMAP};

use crate::kernel::{KernelContext, of_function};

/// How many times the patience for one thing all that a test does may take.
const WHOLE: u32 = 6;
/// Bytes of a doorbell page, or of all of a function's, at most.
const MOST_CELLS: u64 = 1 << 30;

/// PCI's command register, and bits of it.
const COMMAND: u64 = 4;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_MASTER: u16 = 1 << 2;

/// The way to a board.
pub struct BoardLink {
    way: BoardWay,
    limits: BoardPatience,
}

enum BoardWay {
    Socket(VfioClient),
    Kernel(KernelContext),
}

/// How long a board may take.
#[derive(Clone, Copy, Debug)]
pub struct BoardPatience {
    /// For one thing
    pub patience: Duration,
    /// For all: no call is made any more then
    pub until: Instant,
}

impl BoardPatience {
    /// From now on: `patience` for one thing, and some times as long for all.
    pub fn new(patience: Duration) -> BoardPatience {
        BoardPatience { patience, until: Instant::now() + patience * WHOLE }
    }
}

fn other(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl BoardLink {
    /// Connects to the board's socket.
    ///
    /// # Errors
    /// Nobody is there, or says nothing in time: so for all calls.
    pub fn open(socket: &Path, limits: BoardPatience) -> io::Result<BoardLink> {
        let client = VfioClient::connect_within(socket, limits.patience)?;
        Ok(BoardLink { way: BoardWay::Socket(client), limits })
    }

    /// The kernel's way.
    pub(crate) fn of_context(context: KernelContext, limits: BoardPatience) -> BoardLink {
        BoardLink { way: BoardWay::Kernel(context), limits }
    }

    /// The context, where the kernel is the board's driver.
    pub(crate) fn context(&self) -> Option<&KernelContext> {
        match &self.way {
            BoardWay::Kernel(context) => Some(context),
            BoardWay::Socket(_) => None,
        }
    }

    /// Has the function answer at its BARs and master the bus, as drivers do at first and after its resets.
    ///
    /// # Errors
    /// What the board says.
    pub fn set_master(&mut self, master: bool) -> io::Result<()> {
        let command = COMMAND_MEMORY | if master { COMMAND_MASTER } else { 0 };
        self.client()?.write(PCI_CONFIG, COMMAND, &command.to_le_bytes())
    }

    /// The vfio-user client, for what is of vfio-user alone.
    ///
    /// # Errors
    /// There is no time left.
    pub fn client(&mut self) -> io::Result<&mut VfioClient> {
        if Instant::now() >= self.limits.until {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match &mut self.way {
            BoardWay::Socket(client) => Ok(client),
            BoardWay::Kernel(_) => Err(of_function("vfio-user")),
        }
    }

    /// Reads registers.
    ///
    /// # Errors
    /// What the board says.
    pub fn read(&mut self, at: u32, to: &mut [u8]) -> io::Result<()> {
        match self.context() {
            Some(context) => context.read(at, to),
            None => self.client()?.read(BAR_CONTROL, at.into(), to),
        }
    }

    /// Writes registers.
    ///
    /// # Errors
    /// What the board says.
    pub fn write(&mut self, at: u32, bytes: &[u8]) -> io::Result<()> {
        self.client()?.write(BAR_CONTROL, at.into(), bytes)
    }

    /// Has the board know memory of a file by a DMA address.
    ///
    /// # Errors
    /// What the board says.
    pub fn map(&mut self, file: BorrowedFd<'_>, address: u64, size: u64) -> io::Result<()> {
        self.client()?.dma_map(file, 0, address, size)
    }

    /// The same, of memory that the board may not write.
    ///
    /// # Errors
    /// What the board says.
    pub fn map_read_only(&mut self, file: BorrowedFd<'_>, address: u64, size: u64) -> io::Result<()> {
        self.client()?.dma_map_read_only(file, 0, address, size)
    }

    /// Takes memory back.
    ///
    /// # Errors
    /// What the board says.
    pub fn unmap(&mut self, address: u64, size: u64) -> io::Result<()> {
        self.client()?.dma_unmap(address, size)
    }

    /// Resets the function, by the bus and not by a register.
    ///
    /// # Errors
    /// What the board says.
    pub fn reset(&mut self) -> io::Result<()> {
        self.client()?.reset()
    }

    /// Has the board signal these for its vectors from 0 on.
    ///
    /// # Errors
    /// What the board says.
    pub fn signal(&mut self, eventfds: &[OwnedFd]) -> io::Result<()> {
        match self.context() {
            Some(context) => context.signal(eventfds),
            None => self.client()?.set_irqs(IRQ_MSIX, eventfds),
        }
    }

    /// Maps the doorbell cells.
    ///
    /// # Errors
    /// They cannot be mapped, or not safely: a page that its owner may take away ends who touches it.
    pub fn map_cells(&mut self) -> io::Result<MmapRaw> {
        let region = self.client()?.region(BAR_DOORBELLS)?;
        let file = region.file.filter(|_| region.flags & REGION_MMAP != 0);
        let file = file.ok_or_else(|| other("doorbell cells that cannot be mapped"))?;
        let fits = (4096..=MOST_CELLS).contains(&region.size);
        let end = region.offset.checked_add(region.size).filter(|_| fits);
        let end = end.ok_or_else(|| other("a doorbell region of a size that is none"))?;
        if sealed::check(&file, sealed::SIZE_STAYS).is_none_or(|len| (len as u64) < end) {
            return Err(other("doorbell cells in a file that is not sealed against shrinking"));
        }
        let len = usize::try_from(region.size).map_err(|_| other("a doorbell region that is too large"))?;
        MmapOptions::new().offset(region.offset).len(len).map_raw(&file)
    }
}
