//! Memory of slots, which stays such for as long as a token may name it.
//!
//! A card that has no record of connections reads the gate where a token says. So memory that a token was
//! made for is never anything but an area of slots of this length until the secret is replaced: what comes
//! late, or is replayed, finds a gate, and not its own token there. An ended connection's area is quarantined
//! until its peer has confirmed the end. Then another connection may have it.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use starverbs_core::NicError;
use starverbs_core::room::Room;

use crate::token::SlotArea;

use super::{EndpointHost, MadeSlots};

/// Bytes of areas whose peer was silent, at most: of more, the oldest are as good as confirmed. Their gates
/// keep out whoever comes back.
const MAX_SILENT: u64 = 16 << 20;

/// Slots of a connection, and who keeps their memory.
pub(super) struct OwnedArea<M> {
    pub(super) area: SlotArea,
    /// Whose: another program does not get it
    program: u64,
    _memory: M,
}

impl<M> OwnedArea<M> {
    fn len(&self) -> u64 {
        self.area.range().len
    }
}

/// Areas that no connection has.
pub(super) struct SlotPool<M> {
    /// Confirmed: another connection may have them
    free: Vec<OwnedArea<M>>,
    /// Of peers that did not confirm, the oldest first
    silent: VecDeque<OwnedArea<M>>,
    silent_bytes: u64,
    /// Bytes of areas that ended connections have left, those that wait for their peer included
    kept: u64,
    /// Areas that there are, in use or not
    made: usize,
}

impl<M> Default for SlotPool<M> {
    fn default() -> Self {
        SlotPool { free: Vec::new(), silent: VecDeque::new(), silent_bytes: 0, kept: 0, made: 0 }
    }
}

impl<M> SlotPool<M> {
    /// An area for so many bytes of a program's slots. `Exhausted`: no memory.
    pub(super) fn take<E: EndpointHost<Slots = M>>(
        &mut self,
        env: &mut E,
        slots: u64,
        program: u64,
    ) -> Result<OwnedArea<M>, NicError> {
        let len = SlotArea::len_for(slots);
        let suits = |free: &OwnedArea<M>| free.len() == len && free.program == program;
        if let Some(at) = self.free.iter().rposition(suits) {
            self.kept -= len;
            return Ok(self.free.swap_remove(at));
        }
        /* room for what is given back when there is none to be had */
        let made = self.made + 1;
        self.free.make_room(made)?;
        self.silent.make_room(made)?;
        let MadeSlots { memory, addr } = env.make_slots(len, program).ok_or(NicError::Exhausted)?;
        let area = SlotArea::new(addr, len).ok_or(NicError::Exhausted)?;
        self.made = made;
        Ok(OwnedArea { area, program, _memory: memory })
    }

    /// A connection has ended, or did not begin: its area is kept.
    pub(super) fn keep(&mut self, slots: &OwnedArea<M>) {
        self.kept += slots.len();
    }

    /// The peer of a kept area has confirmed the end, or there was none.
    pub(super) fn confirmed(&mut self, slots: OwnedArea<M>) {
        self.free.push_in_room(slots);
    }

    /// The area is kept from nobody any more.
    pub(super) fn give_back(&mut self, slots: OwnedArea<M>) {
        self.kept -= slots.len();
        self.made -= 1;
    }

    /// It does not answer.
    pub(super) fn unconfirmed(&mut self, slots: OwnedArea<M>) {
        self.silent_bytes += slots.len();
        self.silent.push_in_room(slots);
        while self.silent_bytes > MAX_SILENT
            && let Some(oldest) = self.silent.pop_front()
        {
            self.silent_bytes -= oldest.len();
            self.confirmed(oldest);
        }
    }

    /// The secret was replaced, and no connection is there: no token names any of this memory.
    pub(super) fn clear(&mut self) {
        *self = SlotPool::default();
    }

    /// Bytes that are kept.
    pub(super) fn kept(&self) -> u64 {
        self.kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of peers that do not confirm no more is kept from others than the bound says, and the oldest first.
    #[test]
    fn silent_peers_have_so_much_and_no_more() {
        let len = SlotArea::len_for(MAX_SILENT / 4);
        let area = |n: u64| SlotArea::new((n + 1) << 30, len).unwrap();
        let mut pool = SlotPool::default();
        pool.free.make_room(8).unwrap();
        pool.silent.make_room(8).unwrap();
        for n in 0..5 {
            let slots = OwnedArea { area: area(n), program: 0, _memory: () };
            pool.keep(&slots);
            pool.unconfirmed(slots);
        }
        let areas: Vec<_> = pool.free.iter().map(|free| free.area).collect();
        assert_eq!(areas, [area(0), area(1)], "each is a little longer than a fourth");
        assert!(pool.silent_bytes == 3 * len && pool.silent.len() == 3 && pool.kept() == 5 * len);
        pool.clear();
        assert!(pool.free.is_empty() && pool.silent.is_empty() && pool.kept() == 0);
    }
}
