//! Which of a host's queue pairs has a QPN, in two array steps behind a short search.

use alloc::boxed::Box;
use alloc::vec::Vec;

use slab::Slab;
use starverbs_core::room::make_room_in;
use starverbs_core::{NicError, QPN_BLOCK, QPN_BLOCK_SHIFT, Qpn};

/// Nobody.
const NONE: u32 = u32::MAX;

/// A number for each QPN of the blocks that had one. A process has few blocks.
#[derive(Default)]
pub(super) struct QpnPlaces {
    blocks: Vec<(u32, Box<[u32]>)>,
}

impl QpnPlaces {
    #[inline]
    pub(super) fn get(&self, qpn: Qpn) -> Option<u32> {
        let (_, places) = self.blocks.iter().find(|(block, _)| *block == qpn >> QPN_BLOCK_SHIFT)?;
        places.get((qpn & (QPN_BLOCK - 1)) as usize).copied().filter(|place| *place != NONE)
    }

    /// Room for a QPN, so that [`set`](QpnPlaces::set) needs none. `Exhausted`: no memory.
    pub(super) fn make_room(&mut self, qpn: Qpn) -> Result<(), NicError> {
        let block = qpn >> QPN_BLOCK_SHIFT;
        if self.blocks.iter().any(|(known, _)| *known == block) {
            return Ok(());
        }
        let mut places = Vec::new();
        places.try_reserve_exact(QPN_BLOCK as usize).map_err(|_| NicError::Exhausted)?;
        places.resize(QPN_BLOCK as usize, NONE);
        self.blocks.try_reserve(1).map_err(|_| NicError::Exhausted)?;
        self.blocks.push((block, places.into_boxed_slice()));
        Ok(())
    }

    pub(super) fn set(&mut self, qpn: Qpn, place: Option<u32>) {
        let block = self.blocks.iter_mut().find(|(block, _)| *block == qpn >> QPN_BLOCK_SHIFT);
        if let Some(slot) = block.and_then(|(_, all)| all.get_mut((qpn & (QPN_BLOCK - 1)) as usize)) {
            *slot = place.unwrap_or(NONE);
        }
    }
}

/// Something of some queue pairs.
pub(super) struct ByQpn<T> {
    places: QpnPlaces,
    all: Slab<T>,
}

impl<T> Default for ByQpn<T> {
    fn default() -> Self {
        ByQpn { places: QpnPlaces::default(), all: Slab::new() }
    }
}

impl<T> ByQpn<T> {
    pub(super) fn get(&self, qpn: Qpn) -> Option<&T> {
        self.all.get(self.places.get(qpn)? as usize)
    }

    pub(super) fn get_mut(&mut self, qpn: Qpn) -> Option<&mut T> {
        self.all.get_mut(self.places.get(qpn)? as usize)
    }

    /// What there is, in no order.
    pub(super) fn all(&self) -> impl Iterator<Item = &T> {
        self.all.iter().map(|(_, what)| what)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Room for one more, which [`insert`](ByQpn::insert) needs. `Exhausted`: no memory.
    pub(super) fn make_room(&mut self, qpn: Qpn) -> Result<(), NicError> {
        self.places.make_room(qpn)?;
        make_room_in(&mut self.all)
    }

    /// What a QPN has from now on, which had nothing.
    pub(super) fn insert(&mut self, qpn: Qpn, what: T) {
        let at = self.all.insert(what);
        self.places.set(qpn, Some(at as u32));
    }

    pub(super) fn remove(&mut self, qpn: Qpn) -> Option<T> {
        let at = self.places.get(qpn)?;
        self.places.set(qpn, None);
        self.all.try_remove(at as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_finds_its_own_and_no_other() {
        let mut places = QpnPlaces::default();
        assert_eq!(places.get(0x1005), None);
        for qpn in [0x1005, 0x2005, 0x1006] {
            places.make_room(qpn).unwrap();
            places.set(qpn, Some(qpn >> 4));
        }
        assert_eq!([0x1005, 0x2005, 0x1006].map(|qpn| places.get(qpn)), [0x100, 0x200, 0x100].map(Some));
        places.set(0x1005, None);
        assert_eq!((places.get(0x1005), places.get(0x1006), places.get(0x3005)), (None, Some(0x100), None));
        assert_eq!(places.blocks.len(), 2);
    }
}
