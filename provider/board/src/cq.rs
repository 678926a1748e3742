//! The card's half of a completion queue that lies in a client's memory.
//!
//! Owns how a completion is written, and when a queue has something to tell. Indices of the client are looked
//! at when they are needed.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::Ordering;

use starverbs_core::env::CqOverrun;
use starverbs_core::{CompletionQueue, Cqe, WcOpcode, WcStatus};
use starverbs_queues::BLOCK;
use starverbs_queues::board::{ARM_SOLICITED, COUNTER_CQE_WRITES, CQ_IGNORE_OVERRUN, CQE_PHASE, CreateCq};
use zerocopy::transmute;

use crate::broken;
use crate::counters::BoardCounters;
use crate::dma::{Errno, Maps, Room};

/// log2 of the entries of a completion queue at most.
pub(crate) const MAX_CQ_LOG: u32 = 20;

/// Completion queues of a function that have something to tell, by number.
#[derive(Default)]
pub(crate) struct Due {
    /// An armed queue has a completion
    pub(crate) completions: RefCell<Vec<u32>>,
    /// A queue has overrun
    pub(crate) overruns: RefCell<Vec<u32>>,
}

/// A completion queue. Clones are the same.
#[derive(Clone)]
pub(crate) struct BoardCq(Rc<Cq>);

struct Cq {
    number: u32,
    entries: Room,
    taken: Room,
    log: u32,
    ignore_overrun: bool,
    /// Entries written
    made: Cell<u32>,
    /// What was last seen of the program's index
    seen: Cell<u32>,
    /// Entries written when the last solicited one was
    solicited: Cell<u32>,
    /// The program waits for an event: those after so many entries, solicited ones alone or not
    armed: Cell<Option<(u32, bool)>>,
    overrun: Cell<bool>,
    due: Rc<Due>,
    counters: Rc<BoardCounters>,
}

impl BoardCq {
    /// EINVAL: a size that no queue has; EFAULT: memory that is not mapped here.
    pub(crate) fn open(
        number: u32,
        init: &CreateCq,
        maps: &Maps,
        due: &Rc<Due>,
        counters: &Rc<BoardCounters>,
    ) -> Result<BoardCq, Errno> {
        if init.log > MAX_CQ_LOG {
            return Err(libc::EINVAL);
        }
        Ok(BoardCq(Rc::new(Cq {
            number,
            entries: maps.room(init.entries, size_of::<Cqe>() << init.log, BLOCK)?,
            taken: maps.room(init.taken, 4, 4)?,
            log: init.log,
            ignore_overrun: init.flags & CQ_IGNORE_OVERRUN != 0,
            made: Cell::new(0),
            seen: Cell::new(0),
            solicited: Cell::new(0),
            armed: Cell::new(None),
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

    /// The program wants an event, as its cell says.
    pub(crate) fn arm(&self, cell: u64) {
        let solicited = (cell >> 32) as u32 & ARM_SOLICITED != 0;
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
        if ahead != 0 && ahead <= 1 << cq.log {
            if !broken::rule(31) {
                cq.armed.set(None);
            }
            cq.due.completions.borrow_mut().push(cq.number);
        }
    }

    fn is_full(&self) -> bool {
        let cq = &self.0;
        let full = |taken: u32| cq.made.get().wrapping_sub(taken) >= 1 << cq.log;
        if full(cq.seen.get()) {
            cq.seen.set(cq.taken.load_half(0, Ordering::Acquire));
        }
        full(cq.seen.get())
    }
}

impl CompletionQueue for BoardCq {
    fn push(&self, cqe: &Cqe, solicited: bool) -> Result<(), CqOverrun> {
        let cq = &self.0;
        let flushed = cqe.status == WcStatus::WrFlushErr;
        if broken::rule(25) && flushed || broken::rule(29) && cqe.opcode == WcOpcode::Recv {
            return Ok(());
        }
        if self.is_full() {
            if cq.ignore_overrun {
                return Ok(());
            }
            if !cq.overrun.replace(true) || broken::rule(30) {
                cq.due.overruns.borrow_mut().push(cq.number);
            }
            return Err(CqOverrun);
        }
        let made = cq.made.get();
        let round = made >> cq.log & 1;
        let sl = cqe.sl & !CQE_PHASE | if round == 0 { CQE_PHASE } else { 0 };
        let words: [u64; 4] = transmute!(Cqe { sl, ..*cqe });
        let at = (made & ((1 << cq.log) - 1)) as usize * size_of::<Cqe>();
        let [front @ .., last] = words;
        if broken::rule(28) {
            cq.entries.store(at + 24, last, Ordering::Release);
            broken::linger();
        }
        for (n, word) in front.into_iter().enumerate() {
            cq.entries.store(at + 8 * n, word, Ordering::Relaxed);
        }
        /* release: who sees the phase sees the rest, and the data before it */
        cq.entries.store(at + 24, last, Ordering::Release);
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
