//! A driver without a library: registers, commands and queues as the headers have them. Of what the board
//! says nothing is believed but what is checked, and every wait is bounded.

use std::mem::{offset_of, size_of};
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memmap2::MmapRaw;
use starverbs_backend::give_way::GiveWay;
use starverbs_queues::Cqe;
use starverbs_queues::board::*;
use starverbs_queues::format::CqeWords;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::fault::{RuleFault, Tested};
use crate::kernel::{KernelContext, is_device};
use crate::link::{BoardLink, BoardPatience};
use crate::memory::MemoryFile;

/// The DMA address of the driver's memory.
pub const BASE: u64 = 0x10_0000;
/// Its bytes.
pub const BYTES: usize = 2 << 20;
/// Where the command queue lies in it, as all that follows.
pub const COMMANDS: usize = 0;
/// log2 of the commands.
pub const COMMANDS_LOG: u32 = 4;
/// The event queue.
pub const EVENTS: usize = 0x1000;
/// log2 of the events.
pub const EVENTS_LOG: u32 = 8;
/// The word that says how many CQEs were taken, and 64 bytes behind it the entries.
pub const CQ: usize = 0x2000;
/// log2 of the entries.
pub const CQ_LOG: u32 = 8;
/// A completion queue that is armed to see whether the board has taken doorbells.
const SPARE_CQ: usize = 0x6000;
/// The queues of QP 0; those of the next one [`QP_BYTES`] behind.
pub const QPS: usize = 0x1_0000;
/// Bytes for the queues of a QP.
pub const QP_BYTES: usize = 0x1_0000;
/// Bytes for messages, up to the end.
pub const DATA: usize = 0x10_0000;
/// `enum ibv_access_flags`: local writes, and WRITE, READ, atomics and FLUSH of peers.
pub const ALL: u32 = 0x10f;
/// Contexts for which there is room in front of [`DATA`], each with queues as the first has them.
pub const CONTEXTS: usize = 3;
/// Bytes of each.
pub const CONTEXT_BYTES: usize = 0x4_0000;
/// Doorbells that [`RawDriver::settle`] rings.
pub const SETTLED: u64 = 3;

/// A driver, and the board that it has.
pub struct RawDriver {
    /// The way to the board
    pub link: BoardLink,
    /// What the board reaches
    pub memory: MemoryFile,
    /// The doorbell cells
    pub page: MmapRaw,
    /// Commands posted
    pub tail: u32,
    /// Commands that the kernel has carried out
    carried: u32,
    /// CQEs taken of the queue that [`RawDriver::basics`] makes
    pub taken: u32,
    /// How long the board may take for one thing
    pub patience: Duration,
    /// The context whose commands are posted
    pub context: u16,
    /// Cells of a context's page
    cells: u32,
    /// Where in memory the context has its queues: as of [`CONTEXT_BYTES`]
    slot: usize,
    /// The contexts that have some, and CQEs taken there when they were left
    slots: [Option<(u16, u32)>; CONTEXTS],
    /// The cell of the spare CQ, and how often it was armed
    spare: Option<(u32, u32)>,
}

/// What [`RawDriver::basics`] makes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Basics {
    /// Number of the protection domain
    pub pd: u32,
    /// Key of the region of all of the memory
    pub key: u32,
    /// Number of the completion queue, and its cell
    pub cq: NumberReply,
}

/// What an event says: an [`Event`] without what orders it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RaisedEvent {
    /// As [`Event::kind`]
    pub kind: u32,
    /// Number of the object; 0: the kind has none
    pub number: u32,
}

impl RawDriver {
    /// Connects, and gives the board memory.
    ///
    /// # Errors
    /// There is no board, or it has no doorbell page.
    pub fn connect(socket: &Path, limits: BoardPatience) -> Tested<RawDriver> {
        if !is_device(socket) {
            return RawDriver::with_memory(socket, limits, MemoryFile::new(BYTES)?);
        }
        let (context, page, memory) = KernelContext::open(socket)?;
        RawDriver::new(BoardLink::of_context(context, limits), memory, page, limits)
    }

    /// The same with this memory, of [`BYTES`].
    ///
    /// # Errors
    /// As of [`RawDriver::connect`].
    pub fn with_memory(socket: &Path, limits: BoardPatience, memory: MemoryFile) -> Tested<RawDriver> {
        let mut link = BoardLink::open(socket, limits)?;
        link.set_master(true)?;
        link.map(memory.file(), BASE, BYTES as u64)?;
        let page = link.map_cells()?;
        RawDriver::new(link, memory, page, limits)
    }

    fn new(
        mut link: BoardLink,
        memory: MemoryFile,
        page: MmapRaw,
        limits: BoardPatience,
    ) -> Tested<RawDriver> {
        let mut cells = [0; 4];
        link.read(REG_CELLS, &mut cells)?;
        Ok(RawDriver {
            link,
            memory,
            page,
            tail: 0,
            carried: 0,
            taken: 0,
            patience: limits.patience,
            context: 0,
            cells: u32::from_le_bytes(cells),
            slot: 0,
            slots: [Some((0, 0)), None, None],
            spare: None,
        })
    }

    /// Connects, and enables the board.
    ///
    /// # Errors
    /// As of [`RawDriver::connect`]; it is not enabled.
    pub fn open(socket: &Path, limits: BoardPatience) -> Tested<RawDriver> {
        let mut raw = RawDriver::connect(socket, limits)?;
        /* the kernel has enabled its boards */
        if raw.link.context().is_none() {
            raw.enable()?;
        }
        Ok(raw)
    }

    /// Names command and event queue, and enables the board.
    ///
    /// # Errors
    /// It is not enabled.
    pub fn enable(&mut self) -> Tested {
        self.link.set_master(true)?;
        self.set_queues(BASE + COMMANDS as u64, COMMANDS_LOG, BASE + EVENTS as u64, EVENTS_LOG)?;
        self.write(REG_CONTROL, &CTRL_ENABLE.to_le_bytes())?;
        (self.tail, self.spare) = (0, None);
        (self.context, self.slot, self.slots) = (0, 0, [Some((0, 0)), None, None]);
        match self.register(REG_STATUS)? & STATUS_ENABLED {
            0 => Err(RuleFault::failed("enabled", format_args!("REG_ERROR {}", self.register(REG_ERROR)?))),
            _ => Ok(()),
        }
    }

    /// Works in another context from now on, with its queues and its doorbell page.
    ///
    /// # Panics
    /// It is none that was opened.
    pub fn enter(&mut self, context: u16) {
        self.slots[self.slot] = Some((self.context, self.taken));
        let is_it = |slot: &Option<(u16, u32)>| slot.is_some_and(|(number, _)| number == context);
        self.slot = self.slots.iter().position(is_it).expect("a context that was opened");
        (self.context, self.taken) = self.slots[self.slot].unwrap_or_default();
    }

    /// Opens a context from the first one, and works in it; gives its number.
    ///
    /// # Errors
    /// It is refused, or none that the board can have.
    ///
    /// # Panics
    /// There is no room for one more.
    pub fn open_context(&mut self, vector: u32) -> Tested<u16> {
        self.enter(0);
        let slot = self.slots.iter().position(Option::is_none).expect("room for three contexts");
        let begin = slot * CONTEXT_BYTES;
        self.put(begin, &vec![0; CONTEXT_BYTES]);
        let open = OpenContext { events: BASE + (begin + EVENTS) as u64, events_log: EVENTS_LOG, vector };
        let NumberReply { number, cell } = self.number(OP_OPEN_CONTEXT, open.as_bytes())?;
        let contexts = self.register(REG_CONTEXTS)?;
        if !(1..contexts).contains(&number) || cell != CELL_EVENTS {
            let seen = format_args!("context {number}, cell {cell}");
            return Err(RuleFault::failed(format_args!("a context from 1 to {contexts} - 1, cell 0"), seen));
        }
        self.slots[slot] = Some((number as u16, 0));
        self.enter(number as u16);
        Ok(self.context)
    }

    /// Closes a context from the first one, and works there.
    ///
    /// # Errors
    /// It is refused.
    pub fn close_context(&mut self, context: u16) -> Tested {
        self.enter(0);
        self.done(OP_CLOSE_CONTEXT, context.into())?;
        for slot in &mut self.slots {
            slot.take_if(|(number, _)| *number == context);
        }
        Ok(())
    }

    /// Where in its memory the context has what the first has at `at`.
    pub fn at(&self, at: usize) -> usize {
        self.slot * CONTEXT_BYTES + at
    }

    /// Writes the registers that name the queues.
    ///
    /// # Errors
    /// What the board says.
    pub fn set_queues(&mut self, commands: u64, commands_log: u32, events: u64, events_log: u32) -> Tested {
        self.write(REG_COMMANDS, &commands.to_le_bytes())?;
        self.write(REG_COMMANDS_LOG, &commands_log.to_le_bytes())?;
        self.write(REG_EVENTS, &events.to_le_bytes())?;
        self.write(REG_EVENTS_LOG, &events_log.to_le_bytes())?;
        Ok(())
    }

    /// Writes a register.
    ///
    /// # Errors
    /// What the board says.
    pub fn write(&mut self, at: u32, bytes: &[u8]) -> std::io::Result<()> {
        self.link.write(at, bytes)
    }

    /// Reads registers.
    ///
    /// # Errors
    /// What the board says.
    pub fn registers(&mut self, at: u32, len: usize) -> Tested<Vec<u8>> {
        let mut bytes = vec![0xff; len];
        self.link.read(at, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads a register of 32 bits.
    ///
    /// # Errors
    /// What the board says.
    pub fn register(&mut self, at: u32) -> Tested<u32> {
        let mut word = [0; 4];
        self.link.read(at, &mut word)?;
        Ok(u32::from_le_bytes(word))
    }

    /// Reads a register of 64 bits.
    ///
    /// # Errors
    /// What the board says.
    pub fn long(&mut self, at: u32) -> Tested<u64> {
        let mut word = [0; 8];
        self.link.read(at, &mut word)?;
        Ok(u64::from_le_bytes(word))
    }

    /// Reads a counter (`COUNTER_*`).
    ///
    /// # Errors
    /// What the board says.
    pub fn counter(&mut self, which: u32) -> Tested<u64> {
        self.long(REG_COUNTERS + 8 * which)
    }

    /// Writes memory; as of [`MemoryFile`], whose methods these are.
    pub fn put(&self, at: usize, bytes: &[u8]) {
        self.memory.put(at, bytes);
    }

    /// Reads memory.
    pub fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        self.memory.bytes(at, len)
    }

    /// Reads memory as a struct.
    pub fn get<T: FromBytes + KnownLayout + Immutable>(&self, at: usize) -> T {
        self.memory.get(at)
    }

    /// A word of 32 bits.
    pub fn word(&self, at: usize) -> &AtomicU32 {
        self.memory.word(at)
    }

    /// A word of 64 bits.
    pub fn quad(&self, at: usize) -> &AtomicU64 {
        self.memory.quad(at)
    }

    /// A doorbell cell of the context.
    ///
    /// # Errors
    /// The page has no such cell.
    pub fn cell(&self, cell: u32) -> Tested<&AtomicU64> {
        let at = u64::from(self.context) * u64::from(self.cells) + u64::from(cell);
        if at >= self.page.len() as u64 / 8 {
            return Err(RuleFault::failed("a cell of the doorbell page", format_args!("cell {at}")));
        }
        // SAFETY: inside the page, which lives as long as this; aligned.
        Ok(unsafe { AtomicU64::from_ptr(self.page.as_mut_ptr().cast::<u64>().add(at as usize)) })
    }

    /// Stores into a doorbell cell.
    ///
    /// # Errors
    /// The page has no such cell.
    pub fn ring(&self, cell: u32, value: u64) -> Tested {
        self.cell(cell)?.store(value, Ordering::Release);
        Ok(())
    }

    /// Where command `n` of all lies.
    pub fn command_at(n: u32) -> usize {
        COMMANDS + (n & ((1 << COMMANDS_LOG) - 1)) as usize * COMMAND_BYTES
    }

    /// Puts a command into the queue, and does not say so yet; gives its place.
    pub fn put_command(&mut self, op: u16, body: &[u8]) -> usize {
        let at = RawDriver::command_at(self.tail);
        self.put(at, CommandHead { op, context: self.context, status: PENDING }.as_bytes());
        self.put(at + size_of::<CommandHead>(), body);
        self.tail = self.tail.wrapping_add(1);
        at
    }

    /// Tells the board of all commands that were put into the queue.
    ///
    /// # Errors
    /// What the board says.
    pub fn post_commands(&mut self) -> Tested {
        let Some(context) = self.link.context() else {
            let tail = self.tail.to_le_bytes();
            return Ok(self.write(REG_COMMANDS_TAIL, &tail)?);
        };
        while self.carried != self.tail {
            context.command(&self.memory, RawDriver::command_at(self.carried))?;
            self.carried = self.carried.wrapping_add(1);
        }
        Ok(())
    }

    /// The status of the command at `at`, once it is done; [`PENDING`], if that takes too long.
    pub fn status(&self, at: usize) -> u32 {
        let (begun, mut give_way) = (Instant::now(), GiveWay::default());
        loop {
            match self.word(at + offset_of!(CommandHead, status)).load(Ordering::Acquire) {
                PENDING if begun.elapsed() < self.patience => give_way.pause(),
                done => return done,
            }
        }
    }

    /// Carries out a command; gives its status or its answer.
    ///
    /// # Errors
    /// The board cannot be told of it.
    pub fn command<R: FromBytes + KnownLayout + Immutable>(
        &mut self,
        op: u16,
        body: &[u8],
    ) -> Tested<Result<R, u32>> {
        let at = self.put_command(op, body);
        self.post_commands()?;
        Ok(match self.status(at) {
            0 => Ok(self.get(at + size_of::<CommandHead>())),
            errno => Err(errno),
        })
    }

    /// Carries out a command on one object.
    ///
    /// # Errors
    /// As of [`RawDriver::command`].
    pub fn object(&mut self, op: u16, number: u32) -> Tested<Result<(), u32>> {
        Ok(self.command::<Object>(op, Object { number, reserved: 0 }.as_bytes())?.map(drop))
    }

    /// Carries out a command that must succeed.
    ///
    /// # Errors
    /// It does not.
    pub fn ask<R: FromBytes + KnownLayout + Immutable>(&mut self, op: u16, body: &[u8]) -> Tested<R> {
        self.command(op, body)?.map_err(|errno| refused(op, errno))
    }

    /// Makes something.
    ///
    /// # Errors
    /// It is refused.
    pub fn number(&mut self, op: u16, body: &[u8]) -> Tested<NumberReply> {
        self.ask(op, body)
    }

    /// Ends an object, or asks after it.
    ///
    /// # Errors
    /// It is refused.
    pub fn done(&mut self, op: u16, number: u32) -> Tested {
        self.object(op, number)?.map_err(|errno| refused(op, errno))
    }

    /// Looks until there is something to see.
    ///
    /// # Errors
    /// There is nothing in time; what `look` says.
    pub fn wait<T>(
        &mut self,
        what: &str,
        mut look: impl FnMut(&mut RawDriver) -> Tested<Option<T>>,
    ) -> Tested<T> {
        let (begun, mut give_way) = (Instant::now(), GiveWay::default());
        loop {
            if let Some(found) = look(self)? {
                return Ok(found);
            }
            if begun.elapsed() > self.patience {
                return Err(RuleFault::failed(what, format_args!("nothing in {:?}", self.patience)));
            }
            give_way.pause();
        }
    }

    /// A domain, a region of all of the memory, and a CQ.
    ///
    /// # Errors
    /// One is refused.
    pub fn basics(&mut self) -> Tested<Basics> {
        let pd = self.number(OP_ALLOC_PD, &[])?.number;
        let key = self.number(OP_REG_MR, RawDriver::region(pd, 0, BYTES).as_bytes())?.number;
        Ok(Basics { pd, key, cq: self.cq(self.at(CQ), CQ_LOG, 0)? })
    }

    /// A region of this memory, by whose addresses it is known.
    pub fn region(pd: u32, at: usize, len: usize) -> Region {
        let addr = BASE + at as u64;
        Region { pd, access: ALL, addr, length: len as u64, iova: addr, ..Region::default() }
    }

    /// A completion queue at `at`.
    ///
    /// # Errors
    /// It is refused.
    pub fn cq(&mut self, at: usize, log: u32, flags: u32) -> Tested<NumberReply> {
        let (taken, entries) = (BASE + at as u64, BASE + at as u64 + 64);
        self.number(OP_CREATE_CQ, CreateCq { entries, taken, log, flags }.as_bytes())
    }

    /// CQE `index` of the queue at `at`, if the board has written it.
    pub fn cqe(&self, at: usize, log: u32, index: u32) -> Option<Cqe> {
        let at = at + 64 + (index & ((1 << log) - 1)) as usize * size_of::<Cqe>();
        let last = self.quad(at + 24).load(Ordering::Acquire);
        let phase = last.to_le_bytes()[7] & CQE_PHASE != 0;
        let words: CqeWords = [self.get(at), self.get(at + 8), self.get(at + 16), last];
        (phase == (index >> log & 1 == 0)).then(|| Cqe::decode(words))
    }

    /// The next completion of the queue that [`RawDriver::basics`] makes.
    ///
    /// # Errors
    /// None comes.
    pub fn completion(&mut self) -> Tested<Cqe> {
        self.wait("a completion", |raw| Ok(raw.poll()))
    }

    /// The same, if it is there.
    pub fn poll(&mut self) -> Option<Cqe> {
        let cqe = self.cqe(self.at(CQ), CQ_LOG, self.taken)?;
        self.taken = self.taken.wrapping_add(1);
        self.word(self.at(CQ)).store(self.taken, Ordering::Release);
        Some(cqe)
    }

    /// Event `index`, counted from 0, if the board has written it.
    pub fn event(&self, index: u32) -> Option<RaisedEvent> {
        let at = self.at(EVENTS) + (index & ((1 << EVENTS_LOG) - 1)) as usize * size_of::<Event>();
        let valid = self.word(at + offset_of!(Event, valid)).load(Ordering::Acquire);
        let Event { kind, number, .. } = self.get(at);
        (valid == index.wrapping_add(1)).then_some(RaisedEvent { kind, number })
    }

    /// Event `index`, counted from 0.
    ///
    /// # Errors
    /// It does not come.
    pub fn wait_for_event(&mut self, index: u32) -> Tested<RaisedEvent> {
        self.wait("an event", |raw| Ok(raw.event(index)))
    }

    /// The board has taken the doorbells that were rung before this: each of [`SETTLED`] more is seen behind
    /// one of them.
    ///
    /// # Errors
    /// It takes none.
    pub fn settle(&mut self) -> Tested {
        let (cell, mut times) = match self.spare {
            Some(spare) => spare,
            None => (self.cq(SPARE_CQ, 0, 0)?.cell, 0),
        };
        for _ in 0..SETTLED {
            times += 1;
            let before = self.counter(COUNTER_DOORBELLS)?;
            /* nothing completes in that queue, so that arming it raises nothing */
            self.ring(cell, arm(0, times, false))?;
            self.wait("a doorbell that is counted", |raw| {
                Ok((raw.counter(COUNTER_DOORBELLS)? != before).then_some(()))
            })?;
        }
        self.spare = Some((cell, times));
        Ok(())
    }
}

fn refused(op: u16, errno: u32) -> RuleFault {
    let seen = match errno {
        PENDING => "no status in time".to_owned(),
        errno => format!("errno {errno}"),
    };
    RuleFault::failed(format_args!("command {op:#x} done"), seen)
}

/// The value of a CQ's cell that arms it for the `times`th time.
pub fn arm(taken: u32, times: u32, solicited: bool) -> u64 {
    u64::from(taken) | u64::from(times | if solicited { ARM_SOLICITED } else { 0 }) << 32
}
