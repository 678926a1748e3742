//! QPN to QP in three array steps: block number, slot of its block, place in the pool. The tables of the
//! first two are small: a QP's line is the one that is not in the CPU's caches where there are many.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::pool::{PoolIndex, QpPool};
use crate::env::Env;
use crate::error::NicError;
use crate::rng::Rng;
use crate::room::{Room, exact};
use crate::transport::Qp;
use crate::types::{QPN_BLOCK, QPN_BLOCK_SHIFT, QPN_MASK, Qpn};

const BLOCKS: usize = 1 << (24 - QPN_BLOCK_SHIFT);

/// The card's QPs.
pub(crate) struct QpTable<E: Env> {
    /// Block number to its place among `slots`, counted from 1; 0: not ours.
    index: Box<[u16; BLOCKS]>,
    /// Those of one block after the other
    slots: Vec<Option<PoolIndex>>,
    pool: QpPool<E>,
    /// QPNs that were never used
    fresh: Vec<Qpn>,
    /// Draws from them
    rng: Rng,
    /// Free QPNs that were; given back at the end, so that a number rests as long as possible.
    free: VecDeque<Qpn>,
}

impl<E: Env> QpTable<E> {
    pub(crate) fn new() -> Self {
        QpTable {
            index: Box::new([0; BLOCKS]),
            slots: Vec::new(),
            pool: QpPool::new(),
            fresh: Vec::new(),
            rng: Rng::new([0; 2]),
            free: VecDeque::new(),
        }
    }

    pub(crate) fn add_block(&mut self, block: u16, random: u64) -> Result<(), NicError> {
        let entry = self.index.get_mut(block as usize).ok_or(NicError::Invalid)?;
        if block == 0 || *entry != 0 {
            return Err(NicError::Invalid);
        }
        let all = self.slots.len() + QPN_BLOCK as usize;
        exact(&mut self.slots, all)?;
        /* numbers come back as QPs end, which must not need memory */
        self.free.make_room(all)?;
        let base = u32::from(block) << QPN_BLOCK_SHIFT;
        let fresh = self.fresh.len() + QPN_BLOCK as usize;
        exact(&mut self.fresh, fresh)?;
        self.fresh.extend(base..base + QPN_BLOCK);
        self.slots.resize(all, None);
        *entry = (all >> QPN_BLOCK_SHIFT) as u16;
        self.rng = Rng::new([random, base.into()]);
        Ok(())
    }

    pub(crate) fn free(&self) -> usize {
        self.fresh.len() + self.free.len()
    }

    pub(crate) fn reserve(&mut self) -> Result<Qpn, NicError> {
        /* any of them: who knows one of a process's QPNs does not know the next */
        match self.rng.draw(&mut self.fresh) {
            Some(qpn) => Ok(qpn),
            None => self.free.pop_front().ok_or(NicError::Exhausted),
        }
    }

    /// Makes sure that one more has memory. `Exhausted`: there is none.
    pub(crate) fn make_room(&mut self) -> Result<(), NicError> {
        self.pool.make_room()
    }

    /// Memory for one more is kept. `Exhausted`: there is none.
    pub(crate) fn promise(&mut self) -> Result<(), NicError> {
        self.pool.promise()
    }

    /// Memory that was kept is used now, or not needed.
    pub(crate) fn end_promise(&mut self) {
        self.pool.end_promise();
    }

    /// A QP for which there is room, as [`QpTable::make_room`] has seen to.
    pub(crate) fn insert(&mut self, qpn: Qpn, qp: Qp<E>) {
        let place = self.pool.insert(qp);
        debug_assert!(place.is_some(), "no room for a QP");
        if let Some(slot) = self.slot(qpn) {
            *slot = place;
        }
    }

    /// Takes one out, whose number stays taken until it is given back.
    pub(crate) fn take(&mut self, qpn: Qpn) -> Option<Qp<E>> {
        let place = self.slot(qpn)?.take()?;
        let (qp, moved) = self.pool.take(place)?;
        if let Some(slot) = moved.and_then(|moved| self.slot(moved)) {
            *slot = Some(place);
        }
        Some(qp)
    }

    pub(crate) fn give_back(&mut self, qpn: Qpn) {
        self.free.push_back(qpn);
    }

    /// How many numbers are taken.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free()
    }

    /// All of them.
    pub(crate) fn each(&self) -> impl Iterator<Item = &Qp<E>> {
        self.pool.each()
    }

    #[inline]
    fn slot(&mut self, qpn: Qpn) -> Option<&mut Option<PoolIndex>> {
        let at = self.slot_of(qpn);
        self.slots.get_mut(at)
    }

    /// Where a QPN's slot is; beyond all slots for one that is not ours.
    #[inline]
    fn slot_of(&self, qpn: Qpn) -> usize {
        let qpn = qpn & QPN_MASK;
        let block = usize::from(self.index[(qpn >> QPN_BLOCK_SHIFT) as usize]);
        (block.wrapping_sub(1) << QPN_BLOCK_SHIFT) | (qpn & (QPN_BLOCK - 1)) as usize
    }

    #[inline]
    fn place(&self, qpn: Qpn) -> Option<PoolIndex> {
        *self.slots.get(self.slot_of(qpn))?
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, qpn: Qpn) -> Option<&mut Qp<E>> {
        let place = self.place(qpn)?;
        self.pool.get_mut(place)
    }

    #[inline]
    pub(crate) fn get(&self, qpn: Qpn) -> Option<&Qp<E>> {
        self.pool.get(self.place(qpn)?)
    }
}
