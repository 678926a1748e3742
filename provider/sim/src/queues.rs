//! Queues as a program and a card see them, without shared memory: one thread, `Rc` and `Cell`.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use starverbs_core::env::{CompletionQueue, CqOverrun, HeldWqe, RecvQueue, SendQueue, TakenWqe};
use starverbs_core::{Cqe, NicError, Seg, SendWqe, Sge};

/// The queue has no room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full;

/// A send work request as a program gives it.
#[derive(Clone, Debug, Default)]
pub struct Send {
    /// Fixed part; `length`, `num_sge` and the INLINE flag are set when posting
    pub wqe: SendWqe,
    /// Where the bytes are
    pub sges: Vec<Sge>,
    /// Bytes to copy into the queue instead
    pub inline: Option<Seg>,
}

/// Slots of the first chunk; each has twice as many as the one before.
const CHUNK: u32 = 16;
const CHUNKS: usize = 14;

struct Slot {
    wqe: SendWqe,
    sges: Vec<Sge>,
    inline: Seg,
}

type Chunk = Box<[OnceCell<Slot>]>;

/// A send queue. Slots are written once and never again, so that references to them may be given
/// out without unsafe code; it takes 256 Ki posts in its life, and memory as it needs it.
#[derive(Clone)]
pub struct SimSq(Rc<Sq>);

struct Sq {
    slots: u32,
    chunks: [OnceCell<Chunk>; CHUNKS],
    posted: Cell<u32>,
    released: Cell<u32>,
}

impl SimSq {
    /// A queue of `slots`, a power of two.
    pub fn new(slots: u32) -> Self {
        assert!(slots.is_power_of_two());
        SimSq(Rc::new(Sq {
            slots,
            chunks: [const { OnceCell::new() }; CHUNKS],
            posted: Cell::new(0),
            released: Cell::new(0),
        }))
    }

    fn slot(&self, index: u32) -> &OnceCell<Slot> {
        let chunk = ((index + CHUNK) / CHUNK).ilog2();
        let slots = CHUNK << chunk;
        let all = self.0.chunks[chunk as usize].get_or_init(|| (0..slots).map(|_| OnceCell::new()).collect());
        &all[(index + CHUNK - slots) as usize]
    }

    fn filled(&self, index: u32) -> &Slot {
        let live = index.wrapping_sub(self.0.released.get()) < self.outstanding();
        assert!(live, "the card looked at WQE {index}, which is not posted");
        self.slot(index).get().expect("a posted slot is filled")
    }

    /// WQEs posted and not released.
    pub fn outstanding(&self) -> u32 {
        self.0.posted.get().wrapping_sub(self.0.released.get())
    }

    /// Whether a post would fail.
    pub fn is_full(&self) -> bool {
        self.outstanding() == self.0.slots
    }

    /// Posts. Ring the doorbell afterwards.
    pub fn post(&self, send: Send) -> Result<(), Full> {
        if self.is_full() {
            return Err(Full);
        }
        let mut wqe = send.wqe;
        let sges = if send.inline.is_some() { Vec::new() } else { send.sges };
        wqe.num_sge = sges.len() as u16;
        wqe.length = send.inline.map_or_else(|| sges.iter().map(|s| s.len).sum(), |s| s.len);
        wqe.flags.set(starverbs_core::SendFlags::INLINE, send.inline.is_some());
        let slot = Slot { wqe, sges, inline: send.inline.unwrap_or_default() };
        let fresh = self.slot(self.0.posted.get()).set(slot).is_ok();
        assert!(fresh, "slots are written once");
        self.0.posted.set(self.0.posted.get().wrapping_add(1));
        Ok(())
    }
}

impl SendQueue for SimSq {
    fn slots(&self) -> u32 {
        self.0.slots
    }
    fn posted(&self) -> u32 {
        self.0.posted.get()
    }
    fn wqe(&self, index: u32) -> SendWqe {
        self.filled(index).wqe
    }
    fn sges(&self, index: u32) -> impl Iterator<Item = Sge> + '_ {
        self.filled(index).sges.iter().copied()
    }
    fn inline(&self, index: u32) -> Seg {
        self.filled(index).inline
    }
    fn release(&self, index: u32) {
        let n = index.wrapping_sub(self.0.released.get());
        assert!(n <= self.outstanding(), "the card released WQE {index}, which was not posted");
        self.0.released.set(index);
    }
    fn reset(&self) {
        self.0.released.set(self.0.posted.get());
    }
    fn post_own(&self, wqe: SendWqe, sges: &[Sge]) -> bool {
        self.post(Send { wqe, sges: sges.to_vec(), inline: None }).is_ok()
    }
}

/// A receive work request.
#[derive(Clone, Debug, Default)]
pub struct Recv {
    /// The program's cookie
    pub wr_id: u64,
    /// Where the bytes go
    pub sges: Vec<Sge>,
}

/// A receive queue, private or shared.
#[derive(Clone)]
pub struct SimRq(Rc<Rq>);

struct Rq {
    slots: usize,
    max_sge: usize,
    queue: RefCell<VecDeque<Recv>>,
    /// How many of these came back: they take no slot
    back: Cell<usize>,
    /// Whether the card found none since it was asked
    starved: Cell<bool>,
}

impl SimRq {
    /// A queue of `slots` WQEs of up to `max_sge` SGEs.
    pub fn new(slots: usize, max_sge: usize) -> Self {
        let (queue, back, starved) = Default::default();
        SimRq(Rc::new(Rq { slots, max_sge, queue, back, starved }))
    }

    /// WQEs that it has room for.
    pub(crate) fn slots(&self) -> usize {
        self.0.slots
    }

    /// Whether a post would fail.
    pub fn is_full(&self) -> bool {
        self.0.queue.borrow().len() - self.0.back.get() == self.0.slots
    }

    /// Posts a receive.
    pub fn post(&self, recv: Recv) -> Result<(), Full> {
        if self.is_full() || recv.sges.len() > self.0.max_sge {
            return Err(Full);
        }
        self.0.queue.borrow_mut().push_back(recv);
        Ok(())
    }

    /// After posting receives: whether the card found none since the last such question. Only then does a
    /// program ring.
    pub fn was_starved(&self) -> bool {
        self.0.starved.take()
    }
}

impl RecvQueue for SimRq {
    fn take(&self, sges: &mut [Sge]) -> Option<TakenWqe> {
        let Some(recv) = self.0.queue.borrow_mut().pop_front() else {
            self.0.starved.set(true);
            return None;
        };
        self.0.back.set(self.0.back.get().saturating_sub(1));
        let num_sge = recv.sges.len();
        sges[..num_sge].copy_from_slice(&recv.sges);
        Some(TakenWqe { wr_id: recv.wr_id, num_sge })
    }
    fn len(&self) -> u32 {
        self.0.queue.borrow().len() as u32
    }
    fn max_sge(&self) -> usize {
        self.0.max_sge
    }
    fn put_back(&self, recvs: &mut dyn Iterator<Item = HeldWqe<'_>>) -> Result<(), NicError> {
        let mut queue = self.0.queue.borrow_mut();
        let back: Vec<Recv> =
            recvs.map(|held| Recv { wr_id: held.wr_id, sges: held.sges.to_vec() }).collect();
        self.0.back.set(self.0.back.get() + back.len());
        back.into_iter().rev().for_each(|recv| queue.push_front(recv));
        Ok(())
    }
    fn reset(&self) {
        self.0.queue.borrow_mut().clear();
        self.0.back.set(0);
    }
}

/// A completion queue.
#[derive(Clone)]
pub struct SimCq(Rc<Cq>);

struct Cq {
    depth: usize,
    queue: RefCell<VecDeque<(Cqe, bool)>>,
}

impl SimCq {
    /// A queue of `depth` CQEs.
    pub fn new(depth: usize) -> Self {
        SimCq(Rc::new(Cq { depth, queue: RefCell::default() }))
    }

    /// The oldest completion, and whether it was a solicited one.
    pub fn poll(&self) -> Option<(Cqe, bool)> {
        self.0.queue.borrow_mut().pop_front()
    }

    /// Completions waiting.
    pub fn len(&self) -> usize {
        self.0.queue.borrow().len()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl CompletionQueue for SimCq {
    fn push(&self, cqe: &Cqe, solicited: bool) -> Result<(), CqOverrun> {
        let mut queue = self.0.queue.borrow_mut();
        if queue.len() == self.0.depth {
            return Err(CqOverrun);
        }
        queue.push_back((*cqe, solicited));
        Ok(())
    }
    fn purge(&self, qpn: u32) {
        self.0.queue.borrow_mut().retain(|(cqe, _)| cqe.qpn != qpn);
    }
}
