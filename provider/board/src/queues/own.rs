//! Send WQEs of the board's own: answers of kernels, which stand in the queue among those of the client.
//!
//! The client counts its own WQEs alone, and the core counts all of them. Owns which is which.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use starverbs_core::{SendWqe, Sge};

use crate::dma::Errno;

/// SGEs of one.
const SGES: usize = 2;

/// One of the board's own.
#[derive(Clone, Copy)]
pub(super) struct OwnWqe {
    /// The core's index of it
    index: u32,
    pub(super) wqe: SendWqe,
    pub(super) sges: [Sge; SGES],
}

/// Whose a WQE is that the core asks for.
#[derive(Clone, Copy)]
pub(super) enum WqeOwner {
    /// The client's, of which this is the index
    Client(u32),
    Board(OwnWqe),
}

/// Those of a queue.
pub(super) struct OwnWqes {
    most: usize,
    /// How many there ever were, and of those how many are released
    posted: Cell<u32>,
    done: Cell<u32>,
    /// The others, the oldest first
    waiting: RefCell<VecDeque<OwnWqe>>,
}

impl OwnWqes {
    /// Room for so many. ENOMEM.
    pub(super) fn new(most: usize) -> Result<OwnWqes, Errno> {
        let mut waiting = VecDeque::new();
        waiting.try_reserve_exact(most).map_err(|_| libc::ENOMEM)?;
        Ok(OwnWqes { most, posted: Cell::new(0), done: Cell::new(0), waiting: RefCell::new(waiting) })
    }

    /// How many there may be at a time.
    pub(super) fn most(&self) -> u32 {
        self.most as u32
    }

    /// How many there ever were.
    pub(super) fn posted(&self) -> u32 {
        self.posted.get()
    }

    /// Whose the WQE is that the core counts as `index`.
    #[inline]
    pub(super) fn owner(&self, index: u32) -> WqeOwner {
        if self.most == 0 {
            return WqeOwner::Client(index);
        }
        let mut before = self.done.get();
        for own in self.waiting.borrow().iter() {
            match index.wrapping_sub(own.index) as i32 {
                0 => return WqeOwner::Board(*own),
                1.. => before = before.wrapping_add(1),
                _ => break,
            }
        }
        WqeOwner::Client(index.wrapping_sub(before))
    }

    /// One more, which the core counts as `index`. False: there is no room.
    pub(super) fn post(&self, index: u32, wqe: SendWqe, sges: &[Sge]) -> bool {
        let mut waiting = self.waiting.borrow_mut();
        let mut own = OwnWqe { index, wqe, sges: [Sge::default(); SGES] };
        if waiting.len() >= self.most || sges.len() > SGES {
            return false;
        }
        own.sges[..sges.len()].copy_from_slice(sges);
        own.wqe.num_sge = sges.len() as u16;
        own.wqe.length = sges.iter().fold(0, |sum, sge| sum.saturating_add(sge.len));
        waiting.push_back(own);
        self.posted.set(self.posted.get().wrapping_add(1));
        true
    }

    /// All before the core's `index` are done; gives the client's index that this is.
    pub(super) fn release(&self, index: u32) -> u32 {
        let mut waiting = self.waiting.borrow_mut();
        while waiting.front().is_some_and(|own| index.wrapping_sub(own.index) as i32 > 0) {
            waiting.pop_front();
            self.done.set(self.done.get().wrapping_add(1));
        }
        index.wrapping_sub(self.done.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What stands at each index, by the numbers of the client's, and of the board's own, 100 on.
    fn at(own: &OwnWqes, from: u32, count: u32) -> Vec<u64> {
        let number = |index| match own.owner(index) {
            WqeOwner::Client(index) => u64::from(index),
            WqeOwner::Board(own) => own.wqe.wr_id,
        };
        (0..count).map(|n| number(from.wrapping_add(n))).collect()
    }

    #[test]
    fn each_index_is_one_of_the_clients_or_an_own() {
        let own = OwnWqes::new(2).unwrap();
        let wqe = |wr_id| SendWqe { wr_id, ..SendWqe::default() };
        let sge = Sge { len: 3, ..Sge::default() };
        /* two of the client's, one own, one of the client's, one own, and no more */
        assert!(own.post(2, wqe(100), &[sge, sge]) && own.post(4, wqe(101), &[]));
        assert!(!own.post(5, wqe(102), &[]), "there is room for two");
        assert_eq!(at(&own, 0, 6), [0, 1, 100, 2, 101, 3]);
        let WqeOwner::Board(first) = own.owner(2) else { panic!("the client's") };
        assert_eq!((first.wqe.num_sge, first.wqe.length, own.posted()), (2, 6, 2));
        /* those that are done are counted */
        assert_eq!([own.release(1), own.release(2), own.release(3)], [1, 2, 2]);
        assert_eq!(at(&own, 3, 3), [2, 101, 3]);
        assert!(own.post(7, wqe(103), &[]));
        assert_eq!((at(&own, 3, 6), own.posted()), (vec![2, 101, 3, 4, 103, 5], 3));
        assert_eq!((own.release(8), own.posted()), (5, 3));
        /* where no answers are, the client's index is the core's, whatever it is */
        let none = OwnWqes::new(0).unwrap();
        assert!(!none.post(0, wqe(1), &[]));
        assert_eq!(
            (at(&none, u32::MAX, 2), none.release(u32::MAX)),
            (vec![u64::from(u32::MAX), 0], u32::MAX)
        );
    }

    #[test]
    fn indices_run_over() {
        let own = OwnWqes::new(1).unwrap();
        assert!(own.post(u32::MAX, SendWqe { wr_id: 100, ..SendWqe::default() }, &[]));
        assert_eq!(at(&own, u32::MAX - 1, 3), [u64::from(u32::MAX - 1), 100, u64::from(u32::MAX)]);
        assert_eq!(own.release(1), 0);
    }
}
