//! A function of the board, as one client sees it: registers, doorbell page, event queue, objects.
//!
//! Owns which objects are whose: the card knows all functions' objects, and a client may name its own alone.
//! It must not know how messages come.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::MmapRaw;
use nix::unistd::write;
use starverbs_backend::{HostAddr, sealed};
use starverbs_core::{AvId, Nanos, Nic, PdId, Qpn, SrqId};
use starverbs_queues::board::{
    CAP_VERBS, CAP_WINDOWS, CELL_FIRST, COMMAND_BYTES, CONTROL_BYTES, COUNTER_DOORBELLS,
    COUNTER_EVENT_WRITES, COUNTER_INTERRUPTS, COUNTER_MALFORMED, COUNTERS, CTRL_ENABLE, CTRL_RESET, Event,
    MAGIC, REG_CAPS, REG_CELLS, REG_COMMANDS, REG_COMMANDS_HEAD, REG_COMMANDS_LOG, REG_COMMANDS_TAIL,
    REG_CONTEXTS, REG_CONTROL, REG_COUNTERS, REG_ERROR, REG_EVENTS, REG_EVENTS_LOG, REG_MAGIC, REG_STATUS,
    REG_VECTORS, REG_VERSION, STATUS_ENABLED, VERSION,
};

use crate::broken;
use crate::counters::BoardCounters;
use crate::cq::{BoardCq, Due};
use crate::dma::{Errno, Maps, Room};
use crate::env::BoardEnv;
use crate::pci::{Config, Effect, MsixTable};
use crate::queues::{BoardSq, Kept};

/// Bytes of a doorbell page.
const PAGE_BYTES: usize = 64 << 10;
/// Bytes of all doorbell pages.
pub(crate) const DOORBELL_BYTES: usize = CONTEXTS * PAGE_BYTES;
/// Cells of a doorbell page.
const CELLS: usize = PAGE_BYTES / 8;
/// log2 of the commands, and of the events, of a queue at most.
const MAX_LOG: u32 = 12;
/// Interrupt vectors.
pub(crate) const VECTORS: u32 = 32;
/// Contexts.
pub(crate) const CONTEXTS: usize = 256;
/// What this board takes.
const CAPS: u64 = CAP_VERBS | CAP_WINDOWS;
/// Events that wait for room in the event queue at most.
const MAX_WAITING: usize = 4096;

/// Whose a doorbell cell is.
pub(crate) enum Cell {
    Free,
    Events,
    Qp(Qpn, BoardSq),
    /// A receive that is posted needs no more than its index
    Srq,
    Cq(BoardCq),
}

/// Registers that the client writes.
#[derive(Clone, Copy, Default)]
struct Registers {
    enabled: bool,
    error: u32,
    commands: u64,
    commands_log: u32,
    head: u32,
    events: u64,
    events_log: u32,
}

/// The event queue.
struct EventQueue {
    room: Room,
    log: u32,
    made: u32,
    taken: u32,
}

/// What a client has made.
#[derive(Default)]
pub(crate) struct Objects {
    pub(crate) pds: BTreeSet<u32>,
    pub(crate) keys: BTreeSet<u32>,
    pub(crate) windows: BTreeSet<u32>,
    pub(crate) ahs: BTreeSet<u32>,
    /// By number: the cell
    pub(crate) cqs: BTreeMap<u32, (u32, BoardCq)>,
    pub(crate) srqs: BTreeMap<u32, SrqEntry>,
    pub(crate) qps: BTreeMap<Qpn, u32>,
}

/// A shared receive queue.
pub(crate) struct SrqEntry {
    pub(crate) cell: u32,
    pub(crate) slots: u32,
}

/// What the functions share.
pub(crate) struct Card {
    pub(crate) nic: Nic<BoardEnv>,
    pub(crate) env: BoardEnv,
    pub(crate) addrs: Vec<HostAddr>,
    pub(crate) guid: u64,
    pub(crate) now: Nanos,
}

impl Card {
    /// Of objects of which the card has so many at most, what one function may have.
    pub(crate) fn share(&self, limit: u32) -> u32 {
        (limit as usize / self.env.memories.len().max(1)).max(1) as u32
    }
}

/// One function.
pub(crate) struct Function {
    pub(crate) number: usize,
    /// Doorbell pages
    page: MmapRaw,
    pub(crate) page_file: File,
    pub(crate) config: Config,
    pub(crate) msix: MsixTable,
    pub(crate) cells: Vec<Cell>,
    seen: Vec<u64>,
    registers: Registers,
    commands: Option<Room>,
    events: Option<EventQueue>,
    /// (kind, number) of events that wait for room
    waiting: Vec<(u32, u32)>,
    /// What is signalled for each vector
    pub(crate) irqs: [Option<OwnedFd>; VECTORS as usize],
    pub(crate) due: Rc<Due>,
    pub(crate) counters: Rc<BoardCounters>,
    pub(crate) objects: Objects,
    pub(crate) kept: Kept,
}

impl Function {
    /// # Errors
    /// No memory file.
    pub(crate) fn new(number: usize) -> std::io::Result<Function> {
        let (page, page_file) = sealed::create(c"starverbs-doorbells", DOORBELL_BYTES, sealed::SIZE_STAYS)?;
        Ok(Function {
            number,
            page,
            page_file,
            config: Config::new(VECTORS, DOORBELL_BYTES as u64),
            msix: MsixTable::new(VECTORS),
            cells: vec![Cell::Events],
            seen: vec![0],
            registers: Registers::default(),
            commands: None,
            events: None,
            waiting: Vec::new(),
            irqs: [const { None }; VECTORS as usize],
            due: Rc::default(),
            counters: Rc::default(),
            objects: Objects::default(),
            kept: Kept::default(),
        })
    }

    fn cell(&self, at: usize) -> &AtomicU64 {
        assert!(at < CONTEXTS * CELLS, "a cell behind the pages");
        // SAFETY: inside the pages, which lives as long as the function; pages are aligned.
        unsafe { AtomicU64::from_ptr(self.page.as_mut_ptr().cast::<u64>().add(at)) }
    }

    /// A cell for a queue, which is zero. ENOSPC: all are taken.
    pub(crate) fn take_cell(&mut self, of: Cell) -> Result<u32, Errno> {
        let first = CELL_FIRST as usize;
        let free = self.cells.iter().skip(first).position(|cell| matches!(cell, Cell::Free));
        let at = free.map_or(self.cells.len(), |at| at + first);
        if at >= CELLS {
            return Err(libc::ENOSPC);
        }
        if at == self.cells.len() {
            self.cells.push(Cell::Free);
            self.seen.push(0);
        }
        if !broken::rule(6) {
            self.cell(at).store(0, Ordering::Relaxed);
        }
        self.seen[at] = 0;
        self.cells[at] = of;
        Ok(at as u32)
    }

    pub(crate) fn free_cell(&mut self, at: u32) {
        if let Some(cell) = self.cells.get_mut(at as usize) {
            *cell = Cell::Free;
        }
    }

    /// Takes the doorbells that changed; says how many.
    pub(crate) fn take_doorbells(&mut self, card: &mut Card) -> u32 {
        let mut changed = 0;
        for at in 0..self.cells.len() {
            let value = self.cell(at).load(Ordering::Acquire);
            let counts_old = broken::rule(18) && matches!(self.cells[at], Cell::Qp(..));
            if value == self.seen[at] && !counts_old {
                continue;
            }
            self.seen[at] = value;
            changed += 1;
            self.counters.inc(COUNTER_DOORBELLS);
            match &self.cells[at] {
                Cell::Free | Cell::Srq => {}
                Cell::Events => self.events_taken(value as u32),
                Cell::Qp(qpn, sq) => {
                    if !sq.ring(value as u32) {
                        self.counters.inc(COUNTER_MALFORMED);
                    }
                    card.nic.handle_doorbell(&mut card.env, *qpn, card.now);
                }
                Cell::Cq(cq) => cq.arm(value),
            }
        }
        changed
    }

    fn events_taken(&mut self, taken: u32) {
        if let Some(events) = &mut self.events {
            /* an index that no queue can have is none */
            if events.made.wrapping_sub(taken) <= 1 << events.log {
                events.taken = taken;
            }
        }
    }

    /// Adds an event of an object.
    pub(crate) fn raise(&mut self, kind: u32, number: u32) {
        let number = if broken::rule(34) { number + 1 } else { number };
        if self.waiting.len() < MAX_WAITING {
            self.waiting.push((kind, number));
        } else {
            self.registers.error = libc::EOVERFLOW as u32;
        }
    }

    /// Adds the events of completion queues.
    pub(crate) fn raise_due(&mut self) {
        use starverbs_queues::board::EVENT_COMPLETION;
        let due = Rc::clone(&self.due);
        /* IBV_EVENT_CQ_ERR */
        due.overruns.borrow_mut().drain(..).for_each(|cq| self.raise(0, cq));
        due.completions.borrow_mut().drain(..).for_each(|cq| self.raise(EVENT_COMPLETION, cq));
    }

    /// Writes the events that wait, as far as there is room, and interrupts once.
    pub(crate) fn write_events(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let Some(events) = &mut self.events else { return self.waiting.clear() };
        let waiting = if broken::rule(32) { 0 } else { events.made.wrapping_sub(events.taken) };
        let room = (1u32 << events.log) - waiting;
        let count = self.waiting.len().min(room as usize);
        for (kind, number) in self.waiting.drain(..count) {
            let at = (events.made & ((1 << events.log) - 1)) as usize * size_of::<Event>();
            events.made = events.made.wrapping_add(1);
            events.room.word(at).store(u64::from(kind) | u64::from(number) << 32, Ordering::Relaxed);
            events.room.word(at + 8).store(u64::from(events.made) << 32, Ordering::Release);
            self.counters.inc(COUNTER_EVENT_WRITES);
        }
        if count > 0 && !broken::rule(33) {
            self.interrupt(0);
        }
    }

    /// Signals a vector, if there is anything to signal.
    pub(crate) fn interrupt(&self, vector: u32) {
        if let Some(Some(irq)) = self.irqs.get(vector as usize) {
            /* full: it is signalled already */
            let _ = write(irq, &1u64.to_ne_bytes());
            self.counters.inc(COUNTER_INTERRUPTS);
        }
    }

    /// Reads registers; what is none reads as 0.
    pub(crate) fn read(&self, offset: u64, to: &mut [u8]) {
        for (n, byte) in to.iter_mut().enumerate() {
            let at = offset.saturating_add(n as u64);
            let word = self.word(at & !3);
            *byte = word.to_le_bytes()[(at & 3) as usize];
        }
    }

    /// The register of 32 bits, or the half of one of 64, at `at`.
    fn word(&self, at: u64) -> u32 {
        let Ok(at) = u32::try_from(at) else { return 0 };
        let Registers { enabled, error, commands, commands_log, head, events, events_log } = self.registers;
        let counters = REG_COUNTERS..REG_COUNTERS + 8 * COUNTERS;
        match at {
            REG_MAGIC if broken::rule(1) => !MAGIC,
            REG_MAGIC => MAGIC,
            REG_VERSION => VERSION,
            REG_CAPS => CAPS as u32,
            REG_CONTROL if enabled => CTRL_ENABLE,
            REG_STATUS if enabled => STATUS_ENABLED,
            REG_ERROR => error,
            REG_CELLS => CELLS as u32,
            REG_COMMANDS => commands as u32,
            at if at == REG_COMMANDS + 4 => (commands >> 32) as u32,
            REG_COMMANDS_LOG => commands_log,
            REG_COMMANDS_TAIL | REG_COMMANDS_HEAD => head,
            REG_VECTORS => VECTORS,
            REG_CONTEXTS => CONTEXTS as u32,
            REG_EVENTS => events as u32,
            at if at == REG_EVENTS + 4 => (events >> 32) as u32,
            REG_EVENTS_LOG => events_log,
            at if counters.contains(&at) => {
                let value = self.counters.get((at - REG_COUNTERS) as usize / 8);
                if at & 4 == 0 { value as u32 } else { (value >> 32) as u32 }
            }
            _ => 0,
        }
    }

    /// Writes a register of 32 or 64 bits. EINVAL: none is there, or it is not written as a whole.
    pub(crate) fn write(&mut self, card: &mut Card, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        let value = match bytes.len() {
            4 => u64::from(u32::from_le_bytes(bytes.try_into().map_err(|_| libc::EINVAL)?)),
            8 => u64::from_le_bytes(bytes.try_into().map_err(|_| libc::EINVAL)?),
            _ => return Err(libc::EINVAL),
        };
        let at = u32::try_from(offset).ok().filter(|at| *at < CONTROL_BYTES).ok_or(libc::EINVAL)?;
        let long = matches!(at, REG_COMMANDS | REG_EVENTS);
        if long != (bytes.len() == 8) && !broken::rule(3) {
            return Err(libc::EINVAL);
        }
        let word = value as u32;
        match at {
            REG_CONTROL if word & CTRL_RESET != 0 => self.reset(card),
            REG_CONTROL if word & CTRL_ENABLE != 0 => {
                let enabled = self.enable(&card.env.memories[self.number].maps);
                self.registers.error = enabled.err().unwrap_or(0) as u32;
            }
            REG_CONTROL => {}
            REG_ERROR => self.registers.error = 0,
            REG_COMMANDS_TAIL => self.take_commands(card, word),
            REG_COMMANDS | REG_COMMANDS_LOG | REG_EVENTS | REG_EVENTS_LOG
                if self.registers.enabled && !broken::rule(4) =>
            {
                return Err(libc::EBUSY);
            }
            REG_COMMANDS => self.registers.commands = value,
            REG_COMMANDS_LOG => self.registers.commands_log = word,
            REG_EVENTS => self.registers.events = value,
            REG_EVENTS_LOG => self.registers.events_log = word,
            _ => return Err(libc::EINVAL),
        }
        Ok(())
    }

    /// Begins to work with the queues that the registers name.
    fn enable(&mut self, maps: &Maps) -> Result<(), Errno> {
        let Registers { enabled, commands, commands_log, events, events_log, .. } = self.registers;
        if enabled {
            return Ok(());
        }
        if commands_log > MAX_LOG || events_log > MAX_LOG {
            return Err(libc::EINVAL);
        }
        let queue = maps.room(commands, COMMAND_BYTES << commands_log, 64)?;
        let room = maps.room(events, size_of::<Event>() << events_log, 64)?;
        self.clear_page();
        self.commands = Some(queue);
        self.events = Some(EventQueue { room, log: events_log, made: 0, taken: 0 });
        (self.registers.enabled, self.registers.head) = (true, 0);
        Ok(())
    }

    fn clear_page(&mut self) {
        for at in 0..CELLS {
            self.cell(at).store(0, Ordering::Relaxed);
        }
        self.seen.fill(0);
    }

    /// Carries out the commands up to `tail`: no more than the queue holds.
    fn take_commands(&mut self, card: &mut Card, tail: u32) {
        let Some(queue) = self.commands.take() else {
            self.registers.error = libc::ENXIO as u32;
            return;
        };
        let log = self.registers.commands_log;
        if tail.wrapping_sub(self.registers.head) > 1 << log {
            self.registers.error = if broken::rule(11) { 0 } else { libc::EINVAL as u32 };
            self.counters.inc(COUNTER_MALFORMED);
        } else {
            while self.registers.head != tail {
                let at = (self.registers.head & ((1 << log) - 1)) as usize * COMMAND_BYTES;
                self.carry_out(card, &queue, at);
                self.registers.head = self.registers.head.wrapping_add(1);
            }
        }
        self.commands = Some(queue);
    }

    /// Ends all objects, in the order in which they depend on each other, and forgets the registers.
    pub(crate) fn reset(&mut self, card: &mut Card) {
        let Objects { pds, keys, windows, ahs, cqs, srqs, qps } = std::mem::take(&mut self.objects);
        let Card { nic, env, .. } = card;
        for qpn in qps.into_keys() {
            let _ = nic.destroy_qp(env, qpn);
        }
        for srq in srqs.into_keys() {
            let _ = nic.destroy_srq(SrqId(srq));
        }
        for window in windows {
            let _ = nic.dealloc_mw(window);
        }
        for key in keys {
            let _ = nic.dereg_mr(key);
        }
        for ah in ahs {
            let _ = nic.destroy_av(AvId(ah));
        }
        for pd in pds {
            let _ = nic.dealloc_pd(PdId(pd));
        }
        drop(cqs);
        self.cells.truncate(CELL_FIRST as usize);
        self.seen.truncate(CELL_FIRST as usize);
        self.registers = Registers::default();
        (self.commands, self.events) = (None, None);
        self.waiting.clear();
        self.due = Rc::default();
        if !broken::rule(5) {
            self.clear_page();
        }
    }

    /// The same, and configuration space is as it was when the board was started: FLR, DEVICE_RESET.
    pub(crate) fn reset_function(&mut self, card: &mut Card) {
        self.config.reset();
        self.msix.reset();
        self.reset(card);
    }

    /// Writes configuration space.
    pub(crate) fn write_config(&mut self, card: &mut Card, offset: u64, bytes: &[u8]) {
        if self.config.write(offset, bytes) == Effect::Flr {
            self.reset_function(card);
        }
    }

    /// Reads doorbell pages.
    pub(crate) fn read_doorbells(&self, offset: u64, to: &mut [u8]) {
        for (n, byte) in to.iter_mut().enumerate() {
            let at = offset.saturating_add(n as u64);
            let cell = usize::try_from(at / 8).ok().filter(|cell| *cell < CONTEXTS * CELLS);
            *byte =
                cell.map_or(0, |cell| self.cell(cell).load(Ordering::Relaxed).to_le_bytes()[at as usize % 8]);
        }
    }

    /// Writes doorbell cells, for who has not mapped them. EINVAL: they are not written as wholes.
    pub(crate) fn write_doorbells(&self, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        let at = usize::try_from(offset).map_err(|_| libc::EINVAL)?;
        let end = at.checked_add(bytes.len()).ok_or(libc::EINVAL)?;
        if !at.is_multiple_of(8) || !bytes.len().is_multiple_of(8) || end > DOORBELL_BYTES {
            return Err(libc::EINVAL);
        }
        for (n, cell) in bytes.chunks_exact(8).enumerate() {
            let value = cell.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
            self.cell(at / 8 + n).store(value, Ordering::Release);
        }
        Ok(())
    }

    /// The client is gone: all that it made and gave ends.
    pub(crate) fn disconnect(&mut self, card: &mut Card) {
        self.reset_function(card);
        self.irqs = [const { None }; VECTORS as usize];
        card.env.memories[self.number].maps.clear();
        if broken::rule(9) {
            card.env.memories.iter_mut().for_each(|memory| memory.maps.clear());
        }
    }
}
