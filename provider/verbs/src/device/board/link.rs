//! The way to the board: its doorbell page, its events, its commands.
//!
//! At a socket the registers and the command queue are this process's, and one command is under way at a
//! time. Through the kernel (`chardev`) they are the module's. What the board answers is checked: it may be a
//! device that lies, or is silent.

use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use memmap2::{MmapOptions, MmapRaw};
use starverbs_backend::give_way::GiveWay;
use starverbs_core::NicError;
use starverbs_queues::board::{
    BAR_CONTROL, BAR_DOORBELLS, BODY_BYTES, CAP_DOORBELL_OPS, CAP_VERBS, CELL_BYTES, COMMAND_BYTES,
    CTRL_ENABLE, CommandHead, DoorbellMessage, Event, MAGIC, PENDING, REG_CAPS, REG_CELLS, REG_COMMANDS,
    REG_COMMANDS_LOG, REG_COMMANDS_TAIL, REG_CONTROL, REG_EVENTS, REG_EVENTS_LOG, REG_MAGIC, REG_STATUS,
    REG_VERSION, STATUS_ENABLED, VERSION,
};
use starverbs_vfio::message::{IRQ_MSIX, PCI_CONFIG, REGION_MMAP};
use starverbs_vfio::{VfioClient, socket_path};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::chardev::{self, Begun, CharDev};
use super::memory::{BoardMemory, Connection, Heap, PROGRAM_END, Piece, SharedClient};
use super::qps::BoardQps;
use crate::error::{Result, VerbsError};

/// log2 of the entries of an event queue of our own.
const EVENTS_LOG: u32 = 12;
/// How long a command may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// PCI's command register, and what a driver sets there: the BARs answer, the board reaches memory.
const PCI_COMMAND: u64 = 4;
const PCI_MEMORY_AND_MASTER: u16 = 6;
/// Bytes of a page.
const PAGE: u64 = 4096;

/// A body of a command, or an answer.
pub(super) type Body = [u8; BODY_BYTES];

/// What is wrong with a device that says something else than its contract.
pub(super) const BROKEN: VerbsError = VerbsError::Os(libc::EIO);

/// The way to a board.
pub(super) struct BoardLink {
    /// The function's socket, or the kernel's device
    pub(super) path: PathBuf,
    way: CommandWay,
    pub(super) heap: Arc<Heap>,
    pub(super) qps: BoardQps,
    /// `CAP_*`
    pub(super) caps: u64,
    page: MmapRaw,
    /// Where a message to the board goes in BAR 2; `None`: it takes none, or not by this way
    message_at: Option<u64>,
    events: Events,
    pub(super) events_log: u32,
}

/// Who carries commands.
enum CommandWay {
    /// The board itself, at a socket
    Socket { client: SharedClient, commands: Mutex<Commands>, end: RawFd },
    /// The kernel
    Kernel(Arc<CharDev>),
}

/// The event queue.
enum Events {
    Piece(Piece),
    Map(MmapRaw),
}

/// The command queue: one entry.
struct Commands {
    piece: Piece,
    tail: u32,
}

impl BoardLink {
    /// Connects to the board at `path`, a socket or a character device, and enables it: at a socket, to the
    /// first function that is free. `irq` is signalled for its events.
    pub(super) fn open(path: &Path, irq: OwnedFd) -> Result<(BoardLink, OwnedFd)> {
        let is_device = std::fs::metadata(path).is_ok_and(|file| file.file_type().is_char_device());
        if is_device { BoardLink::open_device(path, irq) } else { BoardLink::open_socket(path, irq) }
    }

    fn open_device(path: &Path, irq: OwnedFd) -> Result<(BoardLink, OwnedFd)> {
        let (device, Begun { caps, page, events, events_log }) = CharDev::open(path, irq.as_fd())?;
        let device = Arc::new(device);
        let heap = Arc::new(Heap::new(BoardMemory::Kernel(Arc::clone(&device))));
        let (way, events) = (CommandWay::Kernel(device), Events::Map(events));
        Ok((
            BoardLink {
                path: path.to_owned(),
                way,
                heap,
                qps: BoardQps::new(),
                caps,
                page,
                message_at: None,
                events,
                events_log,
            },
            irq,
        ))
    }

    fn open_socket(path: &Path, irq: OwnedFd) -> Result<(BoardLink, OwnedFd)> {
        let (path, mut client) = connect(path)?;
        let caps = check(&mut client)?;
        client.write(PCI_CONFIG, PCI_COMMAND, &PCI_MEMORY_AND_MASTER.to_le_bytes())?;
        let page = map_page(&mut client)?;
        let last = register(&mut client, REG_CELLS)?.saturating_sub(1);
        let message_at = (caps & CAP_DOORBELL_OPS != 0).then(|| u64::from(last) * u64::from(CELL_BYTES));
        give_program_memory(&mut client)?;
        let end = client.as_fd().as_raw_fd();
        let irqs = [irq];
        client.set_irqs(IRQ_MSIX, &irqs)?;
        let [irq] = irqs;
        let client: SharedClient = Arc::new(Mutex::new(Some(Connection::new(client))));
        let heap = Arc::new(Heap::new(BoardMemory::Files(Arc::clone(&client))));
        let commands = heap.piece(COMMAND_BYTES)?;
        let events = heap.piece(size_of::<Event>() << EVENTS_LOG)?;
        enable(&client, commands.address()?, events.address()?)?;
        let commands = Mutex::new(Commands { piece: commands, tail: 0 });
        let way = CommandWay::Socket { client, commands, end };
        let (events, events_log) = (Events::Piece(events), EVENTS_LOG);
        let qps = BoardQps::new();
        Ok((BoardLink { path, way, heap, qps, caps, page, message_at, events, events_log }, irq))
    }

    /// What registers have. `None`: they are the kernel's.
    pub(super) fn registers<const N: usize>(&self, at: [u32; N]) -> Result<Option<[u32; N]>> {
        let CommandWay::Socket { client, .. } = &self.way else { return Ok(None) };
        let mut words = [0; N];
        with(client, |client| {
            for (word, at) in words.iter_mut().zip(at) {
                *word = register(client, at)?;
            }
            Ok(())
        })?;
        Ok(Some(words))
    }

    /// Whether the board finds pages of the program's memory when it needs them: the kernel pins them before.
    pub(super) fn is_on_demand(&self) -> bool {
        matches!(self.way, CommandWay::Socket { .. })
    }

    /// The event queue: `1 << events_log` entries.
    #[inline]
    pub(super) fn events(&self) -> *mut u8 {
        match &self.events {
            Events::Piece(piece) => piece.at.as_ptr(),
            Events::Map(map) => map.as_mut_ptr(),
        }
    }

    /// Has the board map a memory file; gives the DMA address of its first byte. `None`: it does not.
    pub(super) fn map_file(&self, file: BorrowedFd<'_>, len: u64) -> Option<u64> {
        let CommandWay::Socket { client, .. } = &self.way else { return None };
        let address = self.heap.reserve(len);
        with(client, |client| Ok(client.dma_map(file, 0, address, len)?)).ok().map(|()| address)
    }

    /// Takes it back.
    pub(super) fn unmap_file(&self, address: u64, len: u64) {
        if let CommandWay::Socket { client, .. } = &self.way {
            /* a board that is gone has none */
            let _ = with(client, |client| Ok(client.dma_unmap(address, len)?));
        }
    }

    /// Whether the kernel says that the board is gone, or its end of the socket is closed.
    pub(super) fn is_gone(&self) -> bool {
        match &self.way {
            CommandWay::Socket { end, .. } => {
                let mut fds = [libc::pollfd { fd: *end, events: 0, revents: 0 }];
                // SAFETY: one entry; the descriptor is open until the device is closed.
                unsafe { libc::poll(fds.as_mut_ptr(), 1, 0) > 0 && fds[0].revents & libc::POLLHUP != 0 }
            }
            CommandWay::Kernel(device) => device.is_gone(),
        }
    }

    /// What hangs up (POLLHUP) when the board is gone.
    pub(super) fn end_fd(&self) -> Option<RawFd> {
        match &self.way {
            CommandWay::Socket { end, .. } => Some(*end),
            CommandWay::Kernel(_) => None,
        }
    }

    /// Hangs up: the board ends all that was made.
    pub(super) fn close(&self) {
        match &self.way {
            CommandWay::Socket { client, .. } => {
                *client.lock().unwrap_or_else(PoisonError::into_inner) = None
            }
            CommandWay::Kernel(device) => {
                device.close();
                chardev::forget(&self.page);
                if let Events::Map(events) = &self.events {
                    chardev::forget(events);
                }
                self.heap.forget();
            }
        }
    }

    /// A doorbell cell. `None`: the page has no such cell.
    #[inline]
    pub(super) fn cell(&self, at: u32) -> Option<&AtomicU64> {
        let at = at as usize * CELL_BYTES as usize;
        if at + CELL_BYTES as usize > self.page.len() {
            return None;
        }
        // SAFETY: inside the page, which lives as long as this; pages are aligned.
        Some(unsafe { AtomicU64::from_ptr(self.page.as_mut_ptr().add(at).cast()) })
    }

    /// Whether the board takes messages, by the way there is to it.
    pub(super) fn takes_messages(&self) -> bool {
        self.message_at.is_some()
    }

    /// Sends the board a message, and waits until it has it. EOPNOTSUPP: it takes none.
    pub(super) fn send_message(&self, message: DoorbellMessage) -> Result<()> {
        let (CommandWay::Socket { client, .. }, Some(at)) = (&self.way, self.message_at) else {
            return Err(VerbsError::Unsupported("by this board"));
        };
        let word = message.to_word().to_le_bytes();
        with(client, |client| Ok(client.write(BAR_DOORBELLS, at, &word)?))
    }

    /// Carries out a command, whose answer begins with a `R`.
    pub(super) fn ask<R>(&self, op: u16, body: &(impl IntoBytes + Immutable)) -> Result<R>
    where
        R: FromBytes + KnownLayout + Immutable,
    {
        let reply = self.carry_out(op, body.as_bytes())?;
        R::read_from_prefix(&reply).map(|(reply, _)| reply).map_err(|_| BROKEN)
    }

    /// Carries out a command without an answer.
    pub(super) fn tell(&self, op: u16, body: &(impl IntoBytes + Immutable)) -> Result<()> {
        self.carry_out(op, body.as_bytes()).map(drop)
    }

    fn carry_out(&self, op: u16, body: &[u8]) -> Result<Body> {
        let mut request = [0; COMMAND_BYTES];
        let head = CommandHead { op, context: 0, status: PENDING };
        let (front, rest) = request.split_at_mut(size_of::<CommandHead>());
        front.copy_from_slice(head.as_bytes());
        rest.get_mut(..body.len()).ok_or(BROKEN)?.copy_from_slice(body);
        match &self.way {
            CommandWay::Socket { client, commands, .. } => {
                let mut commands = commands.lock().unwrap_or_else(PoisonError::into_inner);
                commands.carry_out(client, &mut request)?;
            }
            CommandWay::Kernel(device) => device.command(&mut request)?,
        }
        let (head, body) = request.split_at(size_of::<CommandHead>());
        match CommandHead::read_from_bytes(head).map_err(|_| BROKEN)?.status {
            0 => body.try_into().map_err(|_| BROKEN),
            errno => Err(refused(errno)),
        }
    }
}

impl Commands {
    /// Carries out a command in its place.
    fn carry_out(&mut self, client: &SharedClient, request: &mut [u8; COMMAND_BYTES]) -> Result<()> {
        let at = self.piece.at;
        // SAFETY: the piece has a command's bytes, and the board looks at them when the tail is written.
        unsafe { at.as_ptr().copy_from_nonoverlapping(request.as_ptr(), COMMAND_BYTES) };
        self.tail = self.tail.wrapping_add(1);
        let tail = self.tail.to_le_bytes();
        with(client, |client| Ok(client.write(BAR_CONTROL, REG_COMMANDS_TAIL.into(), &tail)?))?;
        // SAFETY: an aligned word of the piece, which the board stores into.
        let status = unsafe { AtomicU32::from_ptr(at.as_ptr().add(offset_of!(CommandHead, status)).cast()) };
        if let Err(silent) = wait(status) {
            /* it may write the answer later, over that to another command */
            with(client, |client| {
                client.hang_up();
                Ok(())
            })?;
            return Err(silent);
        }
        // SAFETY: the piece has a command's bytes; the board is done with them.
        unsafe { request.as_mut_ptr().copy_from(at.as_ptr(), COMMAND_BYTES) };
        Ok(())
    }
}

/// Calls the board at a socket. EIO: it is closed.
fn with<T>(client: &SharedClient, call: impl FnOnce(&mut VfioClient) -> Result<T>) -> Result<T> {
    let mut client = client.lock().unwrap_or_else(PoisonError::into_inner);
    call(&mut client.as_mut().ok_or(BROKEN)?.client)
}

/// Has the board work with the queues at these addresses.
fn enable(client: &SharedClient, commands: u64, events: u64) -> Result<()> {
    with(client, |client| {
        let mut long = |at: u32, value: u64| client.write(BAR_CONTROL, at.into(), &value.to_le_bytes());
        long(REG_COMMANDS, commands)?;
        long(REG_EVENTS, events)?;
        let mut word = |at: u32, value: u32| client.write(BAR_CONTROL, at.into(), &value.to_le_bytes());
        word(REG_COMMANDS_LOG, 0)?;
        word(REG_EVENTS_LOG, EVENTS_LOG)?;
        word(REG_CONTROL, CTRL_ENABLE)?;
        if register(client, REG_STATUS)? & STATUS_ENABLED == 0 {
            return Err(VerbsError::Os(libc::ENODEV));
        }
        Ok(())
    })
}

/// Waits until a command is done.
fn wait(status: &AtomicU32) -> Result<()> {
    let (begun, mut give_way) = (Instant::now(), GiveWay::default());
    loop {
        match status.load(Ordering::Acquire) {
            PENDING if begun.elapsed() > PATIENCE => return Err(VerbsError::Os(libc::ETIMEDOUT)),
            PENDING => give_way.pause(),
            _ => return Ok(()),
        }
    }
}

/// Why the board refuses a command.
fn refused(errno: u32) -> VerbsError {
    match errno as i32 {
        libc::EINVAL => VerbsError::Card(NicError::Invalid),
        libc::EBUSY => VerbsError::Card(NicError::Busy),
        libc::ENOMEM => VerbsError::Card(NicError::Exhausted),
        libc::ENODATA => VerbsError::NoData,
        libc::EOPNOTSUPP => VerbsError::Unsupported("by this board"),
        errno => VerbsError::Os(errno),
    }
}

fn register(client: &mut VfioClient, at: u32) -> Result<u32> {
    let mut word = [0; 4];
    client.read(BAR_CONTROL, at.into(), &mut word)?;
    Ok(u32::from_le_bytes(word))
}

/// Connects to the first function that is free of those at `path`, `path.1` and so on. The board ends the
/// connection to one that is in use.
fn connect(path: &Path) -> Result<(PathBuf, VfioClient)> {
    let mut functions = 0;
    loop {
        let socket = socket_path(path, functions);
        match VfioClient::connect(&socket) {
            Ok(client) => return Ok((socket, client)),
            Err(error) if error.raw_os_error() == Some(libc::EPIPE) => functions += 1,
            Err(error) if functions > 0 && is_nobody(&error) => {
                return Err(VerbsError::BoardTaken { path: path.display().to_string(), functions });
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether nobody listens there.
fn is_nobody(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// What it takes. ENODEV: it is no board, of another version, or takes no verbs.
fn check(client: &mut VfioClient) -> Result<u64> {
    let major = |version: u32| version >> 16;
    let caps = u64::from(register(client, REG_CAPS)?) | u64::from(register(client, REG_CAPS + 4)?) << 32;
    let is_board = register(client, REG_MAGIC)? == MAGIC
        && major(register(client, REG_VERSION)?) == major(VERSION)
        && caps & CAP_VERBS != 0;
    if is_board { Ok(caps) } else { Err(VerbsError::Os(libc::ENODEV)) }
}

/// Maps the doorbell page.
fn map_page(client: &mut VfioClient) -> Result<MmapRaw> {
    let region = client.region(BAR_DOORBELLS)?;
    let file = region.file.filter(|_| region.flags & REGION_MMAP != 0).ok_or(BROKEN)?;
    let len = usize::try_from(region.size).ok().filter(|len| (4096..=1 << 30).contains(len)).ok_or(BROKEN)?;
    let end = region.offset.checked_add(region.size).ok_or(BROKEN)?;
    /* pages that could vanish would end the program that touches them */
    let stays = starverbs_backend::sealed::check(&file, starverbs_backend::sealed::SIZE_STAYS);
    if stays.is_none_or(|size| (size as u64) < end) {
        return Err(BROKEN);
    }
    Ok(MmapOptions::new().offset(region.offset).len(len).map_raw(&file)?)
}

/// Lets the board reach the program's memory, as a debugger would, if it runs for the same user. EPERM: it
/// does not.
fn give_program_memory(client: &mut VfioClient) -> Result<()> {
    // SAFETY: takes nothing, and cannot fail.
    let own = unsafe { libc::geteuid() };
    if client.peer_uid() != Some(own) {
        return Err(VerbsError::Os(libc::EPERM));
    }
    let memory = std::fs::OpenOptions::new().read(true).write(true).open("/proc/self/mem")?;
    client.dma_map(memory.as_fd(), PAGE, PAGE, PROGRAM_END - PAGE)?;
    Ok(())
}
