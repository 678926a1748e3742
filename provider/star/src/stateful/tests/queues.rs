//! Queues of a program, for one thread.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::vec::Vec;

use starverbs_core::env::{CompletionQueue, CqOverrun, HeldWqe, RecvQueue, SendQueue, TakenWqe};
use starverbs_core::{Cqe, NicError, Seg, SendWqe, Sge};

pub(super) struct Slot {
    pub(super) wqe: SendWqe,
    pub(super) sges: Vec<Sge>,
    pub(super) inline: Seg,
}

struct Ring {
    slots: Vec<OnceCell<Slot>>,
    posted: Cell<u32>,
    released: Cell<u32>,
}

/// A send queue that takes 4096 posts.
#[derive(Clone)]
pub(super) struct Sq(Rc<Ring>);

impl Sq {
    pub(super) fn new() -> Self {
        let slots = (0..4096).map(|_| OnceCell::new()).collect();
        Sq(Rc::new(Ring { slots, posted: Cell::new(0), released: Cell::new(0) }))
    }
    pub(super) fn post(&self, slot: Slot) {
        let index = self.posted();
        assert!(self.0.slots[index as usize].set(slot).is_ok());
        self.0.posted.set(index + 1);
    }
}

impl SendQueue for Sq {
    fn slots(&self) -> u32 {
        self.0.slots.len() as u32
    }
    fn posted(&self) -> u32 {
        self.0.posted.get()
    }
    fn wqe(&self, index: u32) -> SendWqe {
        assert!(index >= self.0.released.get() && index < self.posted(), "WQE {index} is not posted");
        self.0.slots[index as usize].get().unwrap().wqe
    }
    fn sges(&self, index: u32) -> impl Iterator<Item = Sge> + '_ {
        self.0.slots[index as usize].get().unwrap().sges.iter().copied()
    }
    fn inline(&self, index: u32) -> Seg {
        self.0.slots[index as usize].get().unwrap().inline
    }
    fn release(&self, index: u32) {
        assert!(index > self.0.released.get() && index <= self.posted());
        self.0.released.set(index);
    }
    fn reset(&self) {}
    fn post_own(&self, _: SendWqe, _: &[Sge]) -> bool {
        false
    }
}

type Recv = (u64, Vec<Sge>);

#[derive(Clone, Default)]
pub(super) struct Rq(pub(super) Rc<RefCell<VecDeque<Recv>>>);

impl RecvQueue for Rq {
    fn take(&self, sges: &mut [Sge]) -> Option<TakenWqe> {
        let (wr_id, list) = self.0.borrow_mut().pop_front()?;
        sges[..list.len()].copy_from_slice(&list);
        Some(TakenWqe { wr_id, num_sge: list.len() })
    }
    fn len(&self) -> u32 {
        self.0.borrow().len() as u32
    }
    fn max_sge(&self) -> usize {
        4
    }
    fn put_back(&self, recvs: &mut dyn Iterator<Item = HeldWqe<'_>>) -> Result<(), NicError> {
        let back: Vec<_> = recvs.map(|held| (held.wr_id, held.sges.to_vec())).collect();
        back.into_iter().rev().for_each(|recv| self.0.borrow_mut().push_front(recv));
        Ok(())
    }
    fn reset(&self) {}
}

#[derive(Clone, Default)]
pub(super) struct Cq(pub(super) Rc<RefCell<VecDeque<Cqe>>>);

impl CompletionQueue for Cq {
    fn push(&self, cqe: &Cqe, _: bool) -> Result<(), CqOverrun> {
        if self.0.borrow().len() >= 4096 {
            return Err(CqOverrun);
        }
        self.0.borrow_mut().push_back(*cqe);
        Ok(())
    }
    fn purge(&self, _: u32) {}
}
