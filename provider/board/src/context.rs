//! A context of a function, which is one program's: its doorbell page, its event queue, its objects.
//!
//! Owns which objects are whose: the card knows all of them, and a context may name its own alone. It must
//! not know registers, nor how messages come.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::atomic::Ordering;

use starverbs_core::strom::KernelId;
use starverbs_core::{AvId, Gid, Nanos, PdId, Qpn, SrqId};
use starverbs_queues::board::{
    CELL_FIRST, COUNTER_DOORBELLS, COUNTER_EVENT_WRITES, COUNTER_MALFORMED, DOORBELL_RECV, DOORBELL_SEND,
    DoorbellMessage, EVENT_COMPLETION, EVENT_STAR, Event,
};

use crate::broken;
use crate::counters::BoardCounters;
use crate::cq::{BoardCq, PendingCqs};
use crate::dma::{Errno, Maps, QueueRoom};
use crate::doorbells::{Doorbells, MESSAGE_CELL};
use crate::function::CommonCard;
use crate::kernels::AnswerRegion;
use crate::qps::QpEntry;
use crate::queues::{BoardSq, QueueQuota};
use crate::record::BusTap;

/// log2 of the events of a queue at most.
const MAX_EVENTS_LOG: u32 = 12;
/// Events that wait for room in the event queue at most.
const MAX_WAITING: usize = 4096;
/// IBV_EVENT_CQ_ERR
const CQ_ERR: u32 = 0;

/// Whose a doorbell cell is.
pub(crate) enum CellOwner {
    Free,
    Events,
    Qp(Qpn, BoardSq),
    /// A receive that is posted needs no more than its index, but for stateless ends that wait for one
    Srq(SrqId),
    Cq(BoardCq),
}

/// The event queue.
struct EventQueue {
    room: QueueRoom,
    log: u32,
    made: u32,
    taken: u32,
}

impl EventQueue {
    /// EINVAL: a size that no queue has; EFAULT: memory that is not mapped here.
    fn open(maps: &Maps, address: u64, log: u32) -> Result<EventQueue, Errno> {
        if log > MAX_EVENTS_LOG {
            return Err(libc::EINVAL);
        }
        let room = maps.room(address, size_of::<Event>() << log, 64)?;
        Ok(EventQueue { room, log, made: 0, taken: 0 })
    }

    fn room_left(&self) -> u32 {
        let waiting = if broken::rule(32) { 0 } else { self.made.wrapping_sub(self.taken) };
        (1u32 << self.log) - waiting
    }

    fn push(&mut self, kind: u32, number: u32) {
        let at = (self.made & ((1 << self.log) - 1)) as usize * size_of::<Event>();
        self.made = self.made.wrapping_add(1);
        let words = [u64::from(kind) | u64::from(number) << 32, u64::from(self.made) << 32];
        self.room.store(at, &words);
    }
}

/// What was made in a context.
#[derive(Default)]
pub(crate) struct ContextObjects {
    pub(crate) pds: BTreeSet<u32>,
    pub(crate) keys: BTreeSet<u32>,
    pub(crate) windows: BTreeSet<u32>,
    pub(crate) ahs: BTreeSet<u32>,
    /// By number: the cell
    pub(crate) cqs: BTreeMap<u32, (u32, BoardCq)>,
    pub(crate) srqs: BTreeMap<u32, SrqEntry>,
    pub(crate) qps: BTreeMap<Qpn, QpEntry>,
    /// Queue pairs in multicast groups
    pub(crate) groups: BTreeSet<(Qpn, Gid)>,
    /// What answers RPCs, by protection domain and op-code
    pub(crate) kernels: BTreeMap<(u32, u64), KernelId>,
    /// Of queue pairs that speak StRoM's dialect
    pub(crate) answers: BTreeMap<Qpn, AnswerRegion>,
}

impl ContextObjects {
    /// Regions, with those that the board has made for answers.
    pub(crate) fn regions(&self) -> usize {
        self.keys.len() + self.answers.len()
    }
}

/// A shared receive queue.
pub(crate) struct SrqEntry {
    pub(crate) cell: u32,
    pub(crate) slots: u32,
}

/// How many objects there are.
#[derive(Clone, Copy, Default)]
pub(crate) struct ObjectCounts {
    pub(crate) pds: usize,
    pub(crate) keys: usize,
    pub(crate) windows: usize,
    pub(crate) ahs: usize,
    pub(crate) cqs: usize,
    pub(crate) srqs: usize,
    pub(crate) qps: usize,
    pub(crate) groups: usize,
    pub(crate) kernels: usize,
    pub(crate) answers: usize,
}

impl ObjectCounts {
    /// These and those of a context.
    pub(crate) fn with(self, of: &ContextObjects) -> ObjectCounts {
        ObjectCounts {
            pds: self.pds + of.pds.len(),
            keys: self.keys + of.regions(),
            windows: self.windows + of.windows.len(),
            ahs: self.ahs + of.ahs.len(),
            cqs: self.cqs + of.cqs.len(),
            srqs: self.srqs + of.srqs.len(),
            qps: self.qps + of.qps.len(),
            groups: self.groups + of.groups.len(),
            kernels: self.kernels + of.kernels.len(),
            answers: self.answers + of.answers.len(),
        }
    }
}

/// What the contexts of a function share.
#[derive(Clone)]
pub(crate) struct FunctionContexts {
    /// The function's number
    pub(crate) number: usize,
    pub(crate) doorbells: Rc<Doorbells>,
    pub(crate) counters: Rc<BoardCounters>,
    pub(crate) kept: QueueQuota,
    pub(crate) tap: BusTap,
}

/// One context.
pub(crate) struct BoardContext {
    pub(crate) shared: FunctionContexts,
    id: u16,
    /// Interrupt vector of its events
    pub(crate) vector: u32,
    pub(crate) cells: Vec<CellOwner>,
    seen: Vec<u64>,
    events: EventQueue,
    /// (kind, number) of events that wait for room
    waiting: Vec<(u32, u32)>,
    pub(crate) due: Rc<PendingCqs>,
    pub(crate) objects: ContextObjects,
    /// Of the function's objects, those that other contexts had when the command under way came
    pub(crate) others: ObjectCounts,
}

/// The card's cookie of an object: whose it is.
pub(crate) fn owner(function: usize, context: u16) -> u64 {
    (function as u64) << 16 | u64::from(context)
}

/// The function and the context that a cookie names.
pub(crate) fn owner_of(cookie: u64) -> (usize, u16) {
    ((cookie >> 16) as usize, cookie as u16)
}

impl BoardContext {
    /// One whose events are written to `events`, a queue of 2^`log` entries, and whose doorbell page is zero.
    /// EINVAL, EFAULT: no such queue.
    pub(crate) fn open(
        shared: &FunctionContexts,
        id: u16,
        maps: &Maps,
        (events, log): (u64, u32),
        vector: u32,
    ) -> Result<BoardContext, Errno> {
        let events = EventQueue::open(maps, events, log)?;
        shared.doorbells.clear(id);
        Ok(BoardContext {
            shared: shared.clone(),
            id,
            vector,
            cells: vec![CellOwner::Events],
            seen: vec![0],
            events,
            waiting: Vec::new(),
            due: Rc::default(),
            objects: ContextObjects::default(),
            others: ObjectCounts::default(),
        })
    }

    /// Its number.
    pub(crate) fn id(&self) -> u16 {
        self.id
    }

    /// By which the card knows whose an object is.
    pub(crate) fn cookie(&self) -> u64 {
        owner(self.shared.number, self.id)
    }

    /// A cell for a queue, which is zero. ENOSPC: all are taken.
    pub(crate) fn take_cell(&mut self, of: CellOwner) -> Result<u32, Errno> {
        let first = CELL_FIRST as usize;
        let free = self.cells.iter().skip(first).position(|cell| matches!(cell, CellOwner::Free));
        let at = free.map_or(self.cells.len(), |at| at + first);
        if at >= MESSAGE_CELL {
            return Err(libc::ENOSPC);
        }
        if at == self.cells.len() {
            self.cells.push(CellOwner::Free);
            self.seen.push(0);
        }
        if !broken::rule(6) {
            self.shared.doorbells.cell(self.id, at).store(0, Ordering::Relaxed);
        }
        self.seen[at] = 0;
        self.cells[at] = of;
        Ok(at as u32)
    }

    pub(crate) fn free_cell(&mut self, at: u32) {
        if let Some(cell) = self.cells.get_mut(at as usize) {
            *cell = CellOwner::Free;
        }
    }

    /// Takes the doorbells that changed; says how many.
    pub(crate) fn take_doorbells(&mut self, card: &mut CommonCard) -> u32 {
        let mut changed = 0;
        for at in 0..self.cells.len() {
            let FunctionContexts { doorbells, tap, .. } = &self.shared;
            let cell = doorbells.cell(self.id, at);
            let value = tap.bell(self.id, at, self.seen[at], || cell.load(Ordering::Acquire));
            let counts_old = broken::rule(18) && matches!(self.cells[at], CellOwner::Qp(..));
            if value == self.seen[at] && !counts_old {
                continue;
            }
            self.seen[at] = value;
            changed += 1;
            self.shared.counters.inc(COUNTER_DOORBELLS);
            match &self.cells[at] {
                CellOwner::Free => {}
                CellOwner::Srq(srq) => card.ring_srq(*srq),
                CellOwner::Events => self.events_taken(value as u32),
                CellOwner::Qp(qpn, sq) => {
                    if !sq.ring(value as u32) {
                        self.shared.counters.inc(COUNTER_MALFORMED);
                    }
                    card.ring(*qpn);
                }
                CellOwner::Cq(cq) => cq.arm(value),
            }
        }
        changed
    }

    /// Takes a doorbell of csRNA's form. One that names no queue pair of this context, or does not begin
    /// where its send queue ends, is counted and is none.
    pub(crate) fn take_message(&mut self, card: &mut CommonCard, message: DoorbellMessage) {
        let DoorbellMessage { op, offset, count, qpn } = message;
        let cell = self.objects.qps.get(&qpn).and_then(|qp| self.cells.get(qp.cell as usize));
        let is_sound = match (cell, op) {
            (Some(CellOwner::Qp(_, sq)), DOORBELL_SEND) => sq.ring_at(offset, count),
            (Some(CellOwner::Qp(..)), DOORBELL_RECV) => true,
            _ => false,
        };
        self.shared.counters.inc(COUNTER_DOORBELLS);
        if is_sound {
            card.ring(qpn);
        } else {
            self.shared.counters.inc(COUNTER_MALFORMED);
        }
    }

    fn events_taken(&mut self, taken: u32) {
        /* an index that no queue can have is none */
        if self.events.made.wrapping_sub(taken) <= 1 << self.events.log {
            self.events.taken = taken;
        }
    }

    /// Adds an event of an object. False: it is lost, as too many wait.
    #[must_use]
    pub(crate) fn raise(&mut self, kind: u32, number: u32) -> bool {
        let number = if broken::rule(34) { number + 1 } else { number };
        let has_room = self.waiting.len() < MAX_WAITING;
        if has_room {
            self.waiting.push((kind, number));
        }
        has_room
    }

    /// Adds the event that a queue pair may be another end of StaR. It is left out where many events wait: it
    /// takes no other's place.
    pub(crate) fn raise_star(&mut self, qpn: Qpn) {
        if self.waiting.len() < MAX_WAITING / 2 {
            self.waiting.push((EVENT_STAR, qpn));
        }
    }

    /// Adds the events of completion queues. False: as of [`BoardContext::raise`].
    #[must_use]
    pub(crate) fn raise_due(&mut self, now: Nanos) -> bool {
        let due = Rc::clone(&self.due);
        due.end_waits(now);
        let mut all = true;
        due.overruns.borrow_mut().drain(..).for_each(|cq| all &= self.raise(CQ_ERR, cq));
        due.completions.borrow_mut().drain(..).for_each(|cq| all &= self.raise(EVENT_COMPLETION, cq));
        all
    }

    /// Writes the events that wait, as far as there is room; says whether there were any.
    pub(crate) fn write_events(&mut self) -> bool {
        let count = self.waiting.len().min(self.events.room_left() as usize);
        for (kind, number) in self.waiting.drain(..count) {
            self.events.push(kind, number);
            self.shared.counters.inc(COUNTER_EVENT_WRITES);
        }
        count > 0
    }

    /// Ends all objects, in the order in which they depend on each other. The context is of no use any more.
    pub(crate) fn end(&mut self, card: &mut CommonCard) {
        card.close_mads(self.cookie());
        for (qpn, gid) in self.objects.groups.clone() {
            let _ = self.leave_group(card, qpn, gid);
        }
        let ContextObjects { pds, keys, windows, ahs, cqs, srqs, qps, kernels, answers, .. } =
            std::mem::take(&mut self.objects);
        if broken::rule(49) {
            return;
        }
        card.prepare_to_end(qps.keys().copied());
        for qpn in qps.into_keys() {
            let _ = card.destroy_qp(qpn);
            card.env.memories[self.shared.number].leave_qp(qpn);
        }
        answers.into_values().for_each(|region| region.end(card));
        for kernel in kernels.into_values() {
            let _ = card.nic.unload_kernel(kernel);
        }
        let CommonCard { nic, env, .. } = card;
        for srq in srqs.into_keys() {
            let _ = nic.destroy_srq(SrqId(srq));
        }
        for window in windows {
            let _ = nic.dealloc_mw(window);
        }
        for key in keys {
            let addr = nic.query_mr(key).map(|attr| attr.addr);
            let _ = nic.dereg_mr(key);
            env.forget_table(addr);
        }
        /* none of their memory is reached any more, before it may be another's */
        card.follow_memory();
        let CommonCard { nic, .. } = card;
        for ah in ahs {
            let _ = nic.destroy_av(AvId(ah));
        }
        for pd in pds {
            let _ = nic.dealloc_pd(PdId(pd));
        }
        drop(cqs);
        self.cells.clear();
        if !broken::rule(5) {
            self.shared.doorbells.clear(self.id);
        }
    }
}
