//! The card's half of a completion queue that lies in a client's memory.
//!
//! Owns how a completion is written, and when a queue has something to tell. Indices of the client are looked
//! at when they are needed. A queue that is moved to another place begins there at index 0.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::atomic::Ordering;

use starverbs_core::env::CqOverrun;
use starverbs_core::{CompletionQueue, Cqe, Nanos, WcOpcode, WcStatus};
use starverbs_queues::BLOCK;
use starverbs_queues::board::{
    ARM_SOLICITED, COUNTER_CQE_WRITES, CQ_IGNORE_OVERRUN, CQE_PHASE, CreateCq, ModifyCq, ResizeCq,
};
use zerocopy::transmute;

use crate::broken;
use crate::counters::BoardCounters;
use crate::dma::{Errno, Maps, QueueRoom};

/// log2 of the entries of a completion queue at most.
pub(crate) const MAX_CQ_LOG: u32 = 20;

/// Completion queues of a function that have something to tell, by number.
#[derive(Default)]
pub(crate) struct PendingCqs {
    /// An armed queue has a completion
    pub(crate) completions: RefCell<Vec<u32>>,
    /// A queue has overrun
    pub(crate) overruns: RefCell<Vec<u32>>,
    /// Events that are held back
    held: RefCell<Vec<HeldEvent>>,
}

/// An event that is held back.
struct HeldEvent {
    cq: Weak<Cq>,
    /// Which of the queue's
    number: u32,
    /// Until then; from when it is seen
    until: Option<Nanos>,
}

impl PendingCqs {
    /// Raises the events that were held back long enough.
    pub(crate) fn end_waits(&self, now: Nanos) {
        if self.held.borrow().is_empty() {
            return;
        }
        let mut held = self.held.take();
        held.retain_mut(|HeldEvent { cq, number, until }| {
            let Some(cq) = cq.upgrade() else { return false };
            let (_, Some(period)) = cq.moderation.get() else { return false };
            if cq.held.get() != Some(*number) {
                return false;
            }
            let until = *until.get_or_insert(now + period);
            if until <= now {
                cq.raise();
            }
            until > now
        });
        self.held.borrow_mut().append(&mut held);
    }
}

/// A completion queue. Clones are the same.
#[derive(Clone)]
pub(crate) struct BoardCq(Rc<Cq>);

/// Where a queue lies.
struct QueuePlace {
    entries: QueueRoom,
    taken: QueueRoom,
    log: u32,
}

impl QueuePlace {
    /// EINVAL: a size that no queue has; EFAULT: memory that is not mapped here.
    fn open(entries: u64, taken: u64, log: u32, maps: &Maps) -> Result<QueuePlace, Errno> {
        if log > MAX_CQ_LOG {
            return Err(libc::EINVAL);
        }
        Ok(QueuePlace {
            entries: maps.room(entries, size_of::<Cqe>() << log, BLOCK)?,
            taken: maps.room(taken, 4, 4)?,
            log,
        })
    }
}

struct Cq {
    number: u32,
    ring: RefCell<QueuePlace>,
    ignore_overrun: bool,
    /// Completions that make an event, and for how long it waits for them at most
    moderation: Cell<(u32, Option<Nanos>)>,
    /// Entries written
    made: Cell<u32>,
    /// What was last seen of the program's index
    seen: Cell<u32>,
    /// Entries written when the last solicited one was
    solicited: Cell<u32>,
    /// The program waits for an event: those after so many entries, solicited ones alone or not
    armed: Cell<Option<(u32, bool)>>,
    /// That event is due, and held back: which of those it is
    held: Cell<Option<u32>>,
    /// Events that were ever held back
    waits: Cell<u32>,
    overrun: Cell<bool>,
    due: Rc<PendingCqs>,
    counters: Rc<BoardCounters>,
}

impl BoardCq {
    /// EINVAL: a size that no queue has; EFAULT: memory that is not mapped here.
    pub(crate) fn open(
        number: u32,
        init: &CreateCq,
        maps: &Maps,
        due: &Rc<PendingCqs>,
        counters: &Rc<BoardCounters>,
    ) -> Result<BoardCq, Errno> {
        Ok(BoardCq(Rc::new(Cq {
            number,
            ring: RefCell::new(QueuePlace::open(init.entries, init.taken, init.log, maps)?),
            ignore_overrun: init.flags & CQ_IGNORE_OVERRUN != 0,
            moderation: Cell::new((0, None)),
            made: Cell::new(0),
            seen: Cell::new(0),
            solicited: Cell::new(0),
            armed: Cell::new(None),
            held: Cell::new(None),
            waits: Cell::new(0),
            overrun: Cell::new(false),
            due: Rc::clone(due),
            counters: Rc::clone(counters),
        })))
    }

    /// Whether queue pairs, or shared receive queues, complete here.
    pub(crate) fn is_used(&self) -> bool {
        /* the function has two handles: its table's and its cell's */
        Rc::strong_count(&self.0) > 2
    }

    /// Lies elsewhere from now on, where its indices begin at 0 anew; gives how many entries it has written
    /// in all where it lay before. EINVAL: a size that no queue has; EFAULT: memory that is not mapped here.
    pub(crate) fn resize(&self, to: &ResizeCq, maps: &Maps) -> Result<u32, Errno> {
        let cq = &self.0;
        *cq.ring.borrow_mut() = QueuePlace::open(to.entries, to.taken, to.log, maps)?;
        let made = cq.made.get();
        if !broken::rule(50) {
            cq.made.set(0);
        }
        cq.seen.set(0);
        cq.solicited.set(cq.solicited.get().wrapping_sub(made));
        cq.armed.set(cq.armed.get().map(|(from, solicited)| (from.wrapping_sub(made), solicited)));
        Ok(made)
    }

    /// Events are moderated so from now on. One that is held back is raised at once.
    pub(crate) fn moderate(&self, how: &ModifyCq) {
        let cq = &self.0;
        let period = (how.period > 0).then_some(Nanos::from(how.period) * 1000);
        /* neither a count nor a time: nothing waits */
        let count = if how.count == 0 && period.is_some() { u32::MAX } else { how.count.into() };
        cq.moderation.set((count, period));
        if cq.held.get().is_some() {
            cq.raise();
        }
    }

    /// The program wants an event, as its cell says.
    pub(crate) fn arm(&self, cell: u64) {
        let solicited = (cell >> 32) as u32 & ARM_SOLICITED != 0;
        self.0.held.set(None);
        self.0.armed.set(Some((cell as u32, solicited)));
        self.look();
    }

    /// Whether the event that the program waits for is due.
    fn look(&self) {
        let cq = &self.0;
        let Some((from, solicited)) = cq.armed.get() else { return };
        let newest = if solicited { cq.solicited.get() } else { cq.made.get() };
        let ahead = newest.wrapping_sub(from);
        /* an index from the future is as good as none */
        if ahead == 0 || ahead > 1 << cq.ring.borrow().log {
            return;
        }
        let (count, period) = cq.moderation.get();
        if ahead >= count || broken::rule(51) {
            cq.raise();
        } else if cq.held.get().is_none() {
            let number = cq.waits.get().wrapping_add(1);
            cq.waits.set(number);
            cq.held.set(Some(number));
            if period.is_some() {
                let held = HeldEvent { cq: Rc::downgrade(&self.0), number, until: None };
                cq.due.held.borrow_mut().push(held);
            }
        }
    }

    fn is_full(&self, ring: &QueuePlace) -> bool {
        let cq = &self.0;
        let full = |taken: u32| cq.made.get().wrapping_sub(taken) >= 1 << ring.log;
        if full(cq.seen.get()) {
            cq.seen.set(ring.taken.load_half(0, Ordering::Acquire));
        }
        full(cq.seen.get())
    }
}

impl Cq {
    /// Raises the event that the program waits for.
    fn raise(&self) {
        self.held.set(None);
        let armed = self.armed.get();
        if !broken::rule(31) {
            self.armed.set(None);
        }
        if armed.is_some() {
            self.due.completions.borrow_mut().push(self.number);
        }
    }
}

impl CompletionQueue for BoardCq {
    fn push(&self, cqe: &Cqe, solicited: bool) -> Result<(), CqOverrun> {
        let cq = &self.0;
        let flushed = cqe.status == WcStatus::WrFlushErr;
        if broken::rule(25) && flushed || broken::rule(29) && cqe.opcode == WcOpcode::Recv {
            return Ok(());
        }
        let ring = cq.ring.borrow();
        if cq.overrun.get() || self.is_full(&ring) {
            if cq.ignore_overrun {
                return Ok(());
            }
            if !cq.overrun.replace(true) || broken::rule(30) {
                cq.due.overruns.borrow_mut().push(cq.number);
            }
            return Err(CqOverrun);
        }
        let made = cq.made.get();
        let round = made >> ring.log & 1;
        let sl = cqe.sl & !CQE_PHASE | if round == 0 { CQE_PHASE } else { 0 };
        let words: [u64; 4] = transmute!(Cqe { sl, ..*cqe });
        let at = (made & ((1 << ring.log) - 1)) as usize * size_of::<Cqe>();
        if broken::rule(28) {
            let [.., last] = words;
            ring.entries.store(at + 24, &[last]);
            broken::linger();
        }
        /* the last word is released: who sees the phase sees the rest, and the data before it */
        ring.entries.store(at, &words);
        cq.counters.inc(COUNTER_CQE_WRITES);
        let made = made.wrapping_add(1);
        cq.made.set(made);
        if solicited || cqe.status != WcStatus::Success {
            cq.solicited.set(made);
        }
        self.look();
        Ok(())
    }

    /* the program's side takes out what it has not polled */
    fn purge(&self, _: u32) {}
}
