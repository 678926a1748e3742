//! Memory of the QPs: in pieces of several, each QP at a cache line's begin.
//!
//! QPs lie side by side, without an allocator's own bytes or holes between them: the last one takes the place
//! of one that goes. A piece is memory that is taken when it is needed; the last one stays.

use alloc::vec::Vec;

use crate::env::Env;
use crate::error::NicError;
use crate::room::{Room, exact};
use crate::transport::Qp;
use crate::types::Qpn;

/// QPs of a piece.
const PIECE: usize = 1 << PIECE_SHIFT;
const PIECE_SHIFT: u32 = 6;

/// Where a QP lies.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct PoolIndex(core::num::NonZeroU32);

impl PoolIndex {
    /// `None`: there are no more.
    fn of(index: usize) -> Option<PoolIndex> {
        core::num::NonZeroU32::new(u32::try_from(index).ok()?.checked_add(1)?).map(PoolIndex)
    }

    #[inline]
    fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// The memory of all QPs.
pub(super) struct QpPool<E: Env> {
    /// Full ones, then at most one that is not, then those that are empty
    pieces: Vec<Vec<Qp<E>>>,
    len: usize,
    /// QPs that come back later, and for which there is room
    promised: usize,
}

impl<E: Env> QpPool<E> {
    pub(super) fn new() -> Self {
        QpPool { pieces: Vec::new(), len: 0, promised: 0 }
    }

    /// Makes sure that there is room for one more. `Exhausted`: no memory.
    pub(super) fn make_room(&mut self) -> Result<(), NicError> {
        let at = self.len + self.promised;
        if at >> PIECE_SHIFT < self.pieces.len() {
            return Ok(());
        }
        PoolIndex::of(at).ok_or(NicError::Exhausted)?;
        self.pieces.make_room(self.pieces.len() + 1)?;
        let mut piece = Vec::new();
        exact(&mut piece, PIECE)?;
        self.pieces.push(piece);
        Ok(())
    }

    /// Room for one more is kept. `Exhausted`: no memory.
    pub(super) fn promise(&mut self) -> Result<(), NicError> {
        self.make_room()?;
        self.promised += 1;
        Ok(())
    }

    /// Room that was kept is used now, or not needed.
    pub(super) fn end_promise(&mut self) {
        self.promised = self.promised.saturating_sub(1);
    }

    /// Adds a QP for which there is room.
    pub(super) fn insert(&mut self, qp: Qp<E>) -> Option<PoolIndex> {
        let place = PoolIndex::of(self.len)?;
        self.pieces.get_mut(self.len >> PIECE_SHIFT)?.push_in_room(qp);
        self.len += 1;
        Some(place)
    }

    /// Takes one out, and says which one lies in its place now, if any does.
    pub(super) fn take(&mut self, place: PoolIndex) -> Option<(Qp<E>, Option<Qpn>)> {
        let last = self.len.checked_sub(1)?;
        let mut taken = self.pieces.get_mut(last >> PIECE_SHIFT)?.pop()?;
        self.len = last;
        self.pieces.truncate(((self.len + self.promised) >> PIECE_SHIFT) + 1);
        let Some(hole) = self.get_mut(place) else { return Some((taken, None)) };
        core::mem::swap(hole, &mut taken);
        let moved = hole.qpn;
        Some((taken, Some(moved)))
    }

    #[inline]
    pub(super) fn get(&self, place: PoolIndex) -> Option<&Qp<E>> {
        let at = place.index();
        self.pieces.get(at >> PIECE_SHIFT)?.get(at & (PIECE - 1))
    }

    #[inline]
    pub(super) fn get_mut(&mut self, place: PoolIndex) -> Option<&mut Qp<E>> {
        let at = place.index();
        self.pieces.get_mut(at >> PIECE_SHIFT)?.get_mut(at & (PIECE - 1))
    }

    /// All of them.
    pub(super) fn each(&self) -> impl Iterator<Item = &Qp<E>> {
        self.pieces.iter().flatten()
    }
}
