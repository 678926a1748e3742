//! A function of the board, as one client sees it: configuration space, registers, commands, contexts.
//!
//! It must not know how messages come.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use nix::unistd::write;
use starverbs_backend::HostAddr;
use starverbs_core::{Nanos, Nic};
use starverbs_queues::board::{
    CAP_CQ_CHANGES, CAP_DOORBELL_OPS, CAP_MADS, CAP_MTT, CAP_MULTICAST, CAP_NULL, CAP_QPC_HOST, CAP_STROM,
    CAP_VERBS, CAP_WINDOWS, CAP_XRC, COMMAND_BYTES, CONTROL_BYTES, COUNTER_INTERRUPTS, COUNTERS, CTRL_ENABLE,
    CTRL_RESET, DoorbellMessage, MAGIC, OpenContext, QPC_IN_BOARD, QPC_IN_HOST, REG_CAPS, REG_CELLS,
    REG_COMMANDS, REG_COMMANDS_HEAD, REG_COMMANDS_LOG, REG_COMMANDS_TAIL, REG_CONTEXTS, REG_CONTROL,
    REG_COUNTERS, REG_ERROR, REG_EVENTS, REG_EVENTS_LOG, REG_MAGIC, REG_QPC_MEMORY, REG_QPC_MEMORY_LOG,
    REG_QPC_PLACEMENT, REG_STATUS, REG_VECTORS, REG_VERSION, STATUS_ENABLED, STATUS_FAILED, VERSION,
};

use crate::broken;
use crate::command_queue::CommandProgress;
use crate::context::{BoardContext, FunctionContexts, ObjectCounts};
use crate::counters::BoardCounters;
use crate::dma::{Errno, Maps, QueueRoom};
use crate::doorbells::{CELLS, CONTEXTS, DOORBELL_BYTES, Doorbells, message_of};
use crate::env::BoardEnv;
use crate::mads::BoardQp1;
use crate::pci::{ConfigSpace, Effect, MsixTable};
use crate::qpc::{HostContexts, QpcRegisters};
use crate::queues::QueueQuota;
use crate::record::{BusTap, Tap};
use crate::star::BoardStar;
use crate::wire::WireRx;

/// log2 of the commands of a queue at most.
const MAX_LOG: u32 = 12;
/// Interrupt vectors.
pub(crate) const VECTORS: u32 = 32;
/// What each board takes.
const CAPS: u64 = CAP_VERBS
    | CAP_WINDOWS
    | CAP_MTT
    | CAP_XRC
    | CAP_MULTICAST
    | CAP_DOORBELL_OPS
    | CAP_CQ_CHANGES
    | CAP_NULL
    | CAP_MADS
    | CAP_QPC_HOST
    | CAP_STROM;
/// The context that the registers open, which may open others.
pub(crate) const FIRST: u16 = 0;

/// Registers that the client writes.
#[derive(Clone, Copy, Default)]
struct Registers {
    enabled: bool,
    failed: bool,
    error: u32,
    commands: u64,
    commands_log: u32,
    events: u64,
    events_log: u32,
    qpc: u64,
    qpc_log: u32,
}

/// What the functions share.
pub(crate) struct CommonCard {
    pub(crate) nic: Nic<BoardEnv>,
    pub(crate) env: BoardEnv,
    pub(crate) rx: WireRx,
    pub(crate) mads: BoardQp1,
    pub(crate) addrs: Vec<HostAddr>,
    pub(crate) guid: u64,
    pub(crate) now: Nanos,
    pub(crate) tap: Rc<Tap>,
    /// `None`: there is no StaR
    pub(crate) star: Option<BoardStar>,
}

impl CommonCard {
    /// Of objects of which the card has so many at most, what one function may have.
    pub(crate) fn share(&self, limit: u32) -> u32 {
        (limit as usize / self.env.memories.len().max(1)).max(1) as u32
    }
}

/// One function.
pub(crate) struct Function {
    shared: FunctionContexts,
    qpc: QpcRegisters,
    caps: u64,
    pub(crate) config: ConfigSpace,
    pub(crate) msix: MsixTable,
    registers: Registers,
    pub(crate) commands: Option<QueueRoom>,
    pub(crate) progress: CommandProgress,
    pub(crate) contexts: BTreeMap<u16, BoardContext>,
    /// What is signalled for each vector
    pub(crate) irqs: [Option<OwnedFd>; VECTORS as usize],
    /// Clients may map the doorbell pages
    pub(crate) maps_doorbells: bool,
}

impl Function {
    /// # Errors
    /// No memory file.
    pub(crate) fn new(number: usize, qpc: QpcRegisters, tap: &Rc<Tap>) -> std::io::Result<Function> {
        let doorbells = Rc::new(Doorbells::new()?);
        let (counters, kept, tap) = (Rc::default(), QueueQuota::default(), BusTap::new(tap, number));
        let shared = FunctionContexts { number, doorbells, counters, kept, tap };
        Ok(Function {
            shared,
            qpc,
            caps: CAPS,
            config: ConfigSpace::new(VECTORS, DOORBELL_BYTES as u64),
            msix: MsixTable::new(VECTORS),
            registers: Registers::default(),
            commands: None,
            progress: CommandProgress::default(),
            contexts: BTreeMap::new(),
            irqs: [const { None }; VECTORS as usize],
            maps_doorbells: true,
        })
    }

    /// It takes this, too.
    pub(crate) fn add_caps(&mut self, caps: u64) {
        self.caps |= caps;
    }

    pub(crate) fn set_error(&mut self, errno: Errno) {
        self.registers.error = errno as u32;
    }

    pub(crate) fn commands_log(&self) -> u32 {
        self.registers.commands_log
    }

    pub(crate) fn number(&self) -> usize {
        self.shared.number
    }

    /// What the board keeps for its client.
    pub(crate) fn kept(&self) -> &QueueQuota {
        &self.shared.kept
    }

    pub(crate) fn doorbells(&self) -> &Doorbells {
        &self.shared.doorbells
    }

    pub(crate) fn counters(&self) -> &Rc<BoardCounters> {
        &self.shared.counters
    }

    fn maps<'a>(&self, card: &'a CommonCard) -> &'a Maps {
        &card.env.memories[self.number()].maps
    }

    /// Takes the doorbells that changed; says how many. None is seen while the function masters no bus.
    pub(crate) fn take_doorbells(&mut self, card: &mut CommonCard) -> u32 {
        if !self.config.masters() {
            return 0;
        }
        self.contexts.values_mut().map(|context| context.take_doorbells(card)).sum()
    }

    /// Writes a doorbell page: cells, or the one that takes messages. EINVAL: as of [`Doorbells::write`].
    pub(crate) fn write_doorbells(
        &mut self,
        card: &mut CommonCard,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), Errno> {
        let Some((context, word)) = message_of(offset, bytes) else {
            return self.doorbells().write(offset, bytes);
        };
        let is_master = self.config.masters();
        if let Some(context) = self.contexts.get_mut(&context).filter(|_| is_master) {
            context.take_message(card, DoorbellMessage::from_word(word));
        }
        Ok(())
    }

    /// Adds an event of an object of a context.
    pub(crate) fn raise(&mut self, context: u16, kind: u32, number: u32) {
        let lost = self.contexts.get_mut(&context).is_some_and(|context| !context.raise(kind, number));
        if lost {
            self.registers.error = libc::EOVERFLOW as u32;
        }
    }

    /// Adds the events of completion queues.
    pub(crate) fn raise_due(&mut self, now: Nanos) {
        for context in self.contexts.values_mut() {
            if !context.raise_due(now) {
                self.registers.error = libc::EOVERFLOW as u32;
            }
        }
    }

    /// Writes the events that wait, as far as there is room, and interrupts once for each context that has
    /// some.
    pub(crate) fn write_events(&mut self) {
        if !self.config.masters() {
            return;
        }
        let mut vectors = 0u32;
        for context in self.contexts.values_mut() {
            if context.write_events() && !broken::rule(33) {
                vectors |= 1 << context.vector;
            }
        }
        (0..VECTORS).filter(|vector| vectors >> vector & 1 != 0).for_each(|vector| self.interrupt(vector));
    }

    /// Signals a vector, if there is anything to signal.
    pub(crate) fn interrupt(&self, vector: u32) {
        if let Some(Some(irq)) = self.irqs.get(vector as usize) {
            self.shared.tap.interrupt(vector);
            /* full: it is signalled already */
            let _ = write(irq, &1u64.to_ne_bytes());
            self.counters().inc(COUNTER_INTERRUPTS);
        }
    }

    /// Says so when the client has taken pages away under its maps.
    pub(crate) fn look_after_memory(&mut self, card: &CommonCard) {
        let lost = self.maps(card).are_lost();
        if lost != self.registers.failed {
            self.shared.tap.lost(lost);
            self.set_lost(lost);
        }
    }

    /// Memory of the client lacks pages, or does not any more.
    pub(crate) fn set_lost(&mut self, lost: bool) {
        if lost {
            self.registers.error = libc::EFAULT as u32;
        }
        self.registers.failed = lost;
    }

    /// Opens a context with a doorbell page of its own; gives its number. EINVAL: no such vector or queue;
    /// EFAULT: memory that is not mapped here; ENOSPC: there are no more.
    pub(crate) fn open_context(&mut self, card: &CommonCard, init: &OpenContext) -> Result<u16, Errno> {
        if init.vector >= VECTORS {
            return Err(libc::EINVAL);
        }
        let free = (FIRST + 1..CONTEXTS as u16).find(|id| !self.contexts.contains_key(id));
        let id = free.ok_or(libc::ENOSPC)?;
        let events = (init.events, init.events_log);
        let context = BoardContext::open(&self.shared, id, self.maps(card), events, init.vector)?;
        self.contexts.insert(id, context);
        Ok(id)
    }

    /// Ends a context and all that was made in it. EINVAL: it is none, or the first.
    pub(crate) fn close_context(&mut self, card: &mut CommonCard, id: u32) -> Result<(), Errno> {
        let id = u16::try_from(id).ok().filter(|id| *id != FIRST).ok_or(libc::EINVAL)?;
        let mut context = self.contexts.remove(&id).ok_or(libc::EINVAL)?;
        context.end(card);
        Ok(())
    }

    /// A context, which knows how many objects the others have.
    pub(crate) fn context(&mut self, id: u16) -> Option<&mut BoardContext> {
        let others = self.contexts.iter().filter(|(other, _)| **other != id);
        let others = others.fold(ObjectCounts::default(), |sum, (_, context)| sum.with(&context.objects));
        let context = self.contexts.get_mut(&id)?;
        context.others = others;
        Some(context)
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
        let Registers { enabled, failed, error, commands, commands_log, events, events_log, qpc, qpc_log } =
            self.registers;
        let counters = REG_COUNTERS..REG_COUNTERS + 8 * COUNTERS;
        match at {
            REG_MAGIC if broken::rule(1) => !MAGIC,
            REG_MAGIC => MAGIC,
            REG_VERSION => VERSION,
            REG_CAPS => self.caps as u32,
            REG_CONTROL if enabled => CTRL_ENABLE,
            REG_STATUS => (if enabled { STATUS_ENABLED } else { 0 }) | if failed { STATUS_FAILED } else { 0 },
            REG_ERROR => error,
            REG_CELLS => CELLS as u32,
            REG_COMMANDS => commands as u32,
            at if at == REG_COMMANDS + 4 => (commands >> 32) as u32,
            REG_COMMANDS_LOG => commands_log,
            REG_COMMANDS_TAIL | REG_COMMANDS_HEAD => self.progress.head,
            REG_VECTORS => VECTORS,
            REG_CONTEXTS => CONTEXTS as u32,
            REG_EVENTS => events as u32,
            at if at == REG_EVENTS + 4 => (events >> 32) as u32,
            REG_EVENTS_LOG => events_log,
            REG_QPC_PLACEMENT if enabled && qpc != 0 => QPC_IN_HOST,
            REG_QPC_PLACEMENT => QPC_IN_BOARD,
            REG_QPC_MEMORY => qpc as u32,
            at if at == REG_QPC_MEMORY + 4 => (qpc >> 32) as u32,
            REG_QPC_MEMORY_LOG => qpc_log,
            at if counters.contains(&at) => {
                let which = (at - REG_COUNTERS) / 8;
                let value = self.qpc.counter(which).unwrap_or_else(|| self.counters().get(which as usize));
                if at & 4 == 0 { value as u32 } else { (value >> 32) as u32 }
            }
            at => self.qpc.register(at).unwrap_or(0),
        }
    }

    /// Writes a register of 32 or 64 bits. EINVAL: none is there, or it is not written as a whole.
    pub(crate) fn write(&mut self, card: &mut CommonCard, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        let value = match bytes.len() {
            4 => u64::from(u32::from_le_bytes(bytes.try_into().map_err(|_| libc::EINVAL)?)),
            8 => u64::from_le_bytes(bytes.try_into().map_err(|_| libc::EINVAL)?),
            _ => return Err(libc::EINVAL),
        };
        let at = u32::try_from(offset).ok().filter(|at| *at < CONTROL_BYTES).ok_or(libc::EINVAL)?;
        let long = matches!(at, REG_COMMANDS | REG_EVENTS | REG_QPC_MEMORY);
        if long != (bytes.len() == 8) && !broken::rule(3) {
            return Err(libc::EINVAL);
        }
        let word = value as u32;
        match at {
            REG_CONTROL if word & CTRL_RESET != 0 => self.reset(card),
            REG_CONTROL if word & CTRL_ENABLE != 0 => {
                let enabled = self.enable(card);
                self.registers.error = enabled.err().unwrap_or(0) as u32;
            }
            REG_CONTROL => {}
            REG_ERROR => self.registers.error = 0,
            REG_COMMANDS_TAIL => self.take_commands(card, word),
            REG_COMMANDS | REG_COMMANDS_LOG | REG_EVENTS | REG_EVENTS_LOG | REG_QPC_MEMORY
            | REG_QPC_MEMORY_LOG
                if self.registers.enabled && !broken::rule(4) =>
            {
                return Err(libc::EBUSY);
            }
            REG_COMMANDS => self.registers.commands = value,
            REG_COMMANDS_LOG => self.registers.commands_log = word,
            REG_EVENTS => self.registers.events = value,
            REG_EVENTS_LOG => self.registers.events_log = word,
            REG_QPC_MEMORY => self.registers.qpc = value,
            REG_QPC_MEMORY_LOG => self.registers.qpc_log = word,
            _ => return Err(libc::EINVAL),
        }
        Ok(())
    }

    /// Begins to work with the queues that the registers name. EACCES: the function masters no bus.
    fn enable(&mut self, card: &mut CommonCard) -> Result<(), Errno> {
        let Registers { enabled, commands, commands_log, events, events_log, qpc, qpc_log, .. } =
            self.registers;
        let maps = self.maps(card);
        if enabled {
            return Ok(());
        }
        if !maps.is_master() {
            return Err(libc::EACCES);
        }
        if commands_log > MAX_LOG {
            return Err(libc::EINVAL);
        }
        let queue = maps.room(commands, COMMAND_BYTES << commands_log, 64)?;
        let context = BoardContext::open(&self.shared, FIRST, maps, (events, events_log), 0)?;
        let places = (qpc != 0).then(|| HostContexts::open(maps, qpc, qpc_log)).transpose()?;
        card.env.memories[self.number()].contexts = places;
        self.contexts.insert(FIRST, context);
        self.commands = Some(queue);
        (self.registers.enabled, self.progress) = (true, CommandProgress::default());
        Ok(())
    }

    /// Ends all contexts, and forgets the registers.
    pub(crate) fn reset(&mut self, card: &mut CommonCard) {
        for context in self.contexts.values_mut() {
            context.end(card);
        }
        self.contexts.clear();
        card.env.memories[self.shared.number].contexts = None;
        self.registers = Registers::default();
        (self.commands, self.progress) = (None, CommandProgress::default());
    }

    /// The same, and configuration space is as it was when the board was started: FLR, DEVICE_RESET.
    pub(crate) fn reset_function(&mut self, card: &mut CommonCard) {
        self.config.reset();
        self.msix.reset();
        self.reset(card);
        self.maps(card).set_master(false);
    }

    /// Writes configuration space.
    pub(crate) fn write_config(&mut self, card: &mut CommonCard, offset: u64, bytes: &[u8]) {
        if self.config.write(offset, bytes) == Effect::Flr {
            self.reset_function(card);
        }
        self.maps(card).set_master(self.config.masters());
    }

    /// The client is gone: all that it made and gave ends.
    pub(crate) fn disconnect(&mut self, card: &mut CommonCard) {
        self.reset_function(card);
        self.irqs = [const { None }; VECTORS as usize];
        let number = self.number();
        card.env.memories[number].maps.clear();
        if broken::rule(9) {
            card.env.memories.iter_mut().for_each(|memory| memory.maps.clear());
        }
    }
}
