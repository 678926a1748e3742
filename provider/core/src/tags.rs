//! The list of an SRQ that matches tags: buffers that wait for messages with their tag, in the order in which
//! they were added (rdma-core, Documentation/tag_matching.md).
//!
//! Program and card both match: the program whatever comes unexpected. So that both see one order, a buffer
//! that was added while the program had not seen every unexpected message matches nothing until it has. The
//! module knows no packets; its memory is taken when the list is made.

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::error::NicError;
use crate::room::{Room, exact, filled};
use crate::types::{Qpn, Sge};
use crate::wire::tags::Rendezvous;

/// Most buffers in a list.
pub const MAX_TAGS: u32 = 1024;
/// Most SGEs of a buffer.
pub const MAX_TAG_SGE: usize = 4;

/// A buffer and what it is for. A message matches if its tag, where `mask` has ones, is `tag`.
#[derive(Clone, Copy, Debug, Default)]
pub struct TaggedBuffer {
    /// The program's cookie of the receive
    pub wr_id: u64,
    /// Wanted tag
    pub tag: u64,
    /// Bits of it that count
    pub mask: u64,
    /// Where the data goes
    pub sges: [Sge; MAX_TAG_SGE],
    /// How many of them
    pub num_sge: u8,
}

impl TaggedBuffer {
    /// The SGEs that count.
    pub fn sges(&self) -> &[Sge] {
        self.sges.get(..usize::from(self.num_sge)).unwrap_or(&self.sges)
    }

    /// Bytes that it holds.
    pub fn room(&self) -> u64 {
        self.sges().iter().map(|sge| u64::from(sge.len)).sum()
    }
}

/// A place in the list, by number.
pub(crate) type Slot = u16;

/// The list.
pub(crate) struct TagList {
    entries: Box<[TagEntry]>,
    /// Buffers that wait, oldest first
    order: Vec<Slot>,
    /// So many of them match; those behind were added before the program had seen all that was unexpected
    live: usize,
    free: Vec<Slot>,
    /// Matched rendezvous whose data nobody fetches yet, oldest first
    pending: Vec<Slot>,
    /// Unexpected messages: those there were, and those that the program has seen, by its own count
    unexpected: u32,
    seen: u32,
}

#[derive(Clone, Copy, Default)]
struct TagEntry {
    buffer: TaggedBuffer,
    /// A matched rendezvous: what was asked for
    rendezvous: Rendezvous,
    /// Its QP; 0: there is none
    qpn: Qpn,
    /// Uses of the slot: a handle of an earlier one names nothing
    uses: u16,
}

impl TagList {
    /// An empty list of up to `max` buffers. `Exhausted`: no memory.
    pub(crate) fn new(max: u32) -> Result<Self, NicError> {
        let max = max.min(MAX_TAGS) as usize;
        let list = || {
            let mut list = Vec::new();
            exact(&mut list, max).map(|()| list)
        };
        let mut free = list()?;
        free.extend((0..max as Slot).rev());
        Ok(TagList {
            entries: filled(max)?,
            order: list()?,
            live: 0,
            free,
            pending: list()?,
            unexpected: 0,
            seen: 0,
        })
    }

    /// Adds a buffer; gives its handle. `None`: the list is full.
    pub(crate) fn add(&mut self, buffer: TaggedBuffer) -> Option<u32> {
        let slot = self.free.pop()?;
        self.order.push_in_room(slot);
        let entry = &mut self.entries[usize::from(slot)];
        entry.buffer = buffer;
        let handle = u32::from(entry.uses) << 16 | u32::from(slot);
        self.revive();
        Some(handle)
    }

    /// Takes a buffer back. False: it is not in the list (any more).
    pub(crate) fn remove(&mut self, handle: u32) -> bool {
        let slot = handle as Slot;
        let current = self.entries.get(usize::from(slot)).is_some_and(|e| u32::from(e.uses) == handle >> 16);
        let Some(at) = self.order.iter().position(|s| *s == slot).filter(|_| current) else { return false };
        self.unlist(at);
        self.release(slot);
        true
    }

    /// The program has seen so many unexpected messages.
    pub(crate) fn report(&mut self, seen: u32) {
        self.seen = seen;
        self.revive();
    }

    /// Whether the program has seen every unexpected message.
    pub(crate) fn in_step(&self) -> bool {
        self.seen == self.unexpected
    }

    /// A message goes to the program without a match.
    pub(crate) fn note_unexpected(&mut self) {
        self.unexpected = self.unexpected.wrapping_add(1);
    }

    /// The oldest buffer that matches leaves the list; its slot is the caller's to [`TagList::release`].
    pub(crate) fn take(&mut self, tag: u64) -> Option<Slot> {
        let matches = |slot: &Slot| {
            let wanted = &self.entries[usize::from(*slot)].buffer;
            tag & wanted.mask == wanted.tag
        };
        let at = self.order[..self.live].iter().position(matches)?;
        Some(self.unlist(at))
    }

    /// The buffer in a slot.
    pub(crate) fn buffer(&self, slot: Slot) -> &TaggedBuffer {
        &self.entries[usize::from(slot)].buffer
    }

    /// What the rendezvous in a slot asked for.
    pub(crate) fn rendezvous(&self, slot: Slot) -> &Rendezvous {
        &self.entries[usize::from(slot)].rendezvous
    }

    /// A slot is free again.
    pub(crate) fn release(&mut self, slot: Slot) {
        let entry = &mut self.entries[usize::from(slot)];
        entry.uses = entry.uses.wrapping_add(1);
        entry.qpn = 0;
        self.free.push_in_room(slot);
    }

    /// A matched rendezvous waits for a QP to fetch its data.
    pub(crate) fn suspend(&mut self, slot: Slot, qpn: Qpn, rendezvous: Rendezvous) {
        let entry = &mut self.entries[usize::from(slot)];
        (entry.qpn, entry.rendezvous) = (qpn, rendezvous);
        self.pending.push_in_room(slot);
    }

    /// The oldest rendezvous that waits for a QP.
    pub(crate) fn waiting(&self, qpn: Qpn) -> Option<Slot> {
        self.pending.iter().copied().find(|slot| self.entries[usize::from(*slot)].qpn == qpn)
    }

    /// A rendezvous waits no more.
    pub(crate) fn resume(&mut self, slot: Slot) {
        self.pending.retain(|s| *s != slot);
    }

    /// A QP ends: what it matched is free.
    pub(crate) fn forget(&mut self, qpn: Qpn) {
        for slot in 0..self.entries.len() as Slot {
            if self.entries[usize::from(slot)].qpn == qpn {
                self.resume(slot);
                self.release(slot);
            }
        }
    }

    fn unlist(&mut self, at: usize) -> Slot {
        if at < self.live {
            self.live -= 1;
        }
        self.order.remove(at)
    }

    fn revive(&mut self) {
        if self.in_step() {
            self.live = self.order.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffer(wr_id: u64, tag: u64, mask: u64) -> TaggedBuffer {
        TaggedBuffer { wr_id, tag, mask, ..TaggedBuffer::default() }
    }

    fn taken(list: &mut TagList, tag: u64) -> Option<u64> {
        let slot = list.take(tag)?;
        let wr_id = list.buffer(slot).wr_id;
        list.release(slot);
        Some(wr_id)
    }

    #[test]
    fn the_oldest_match_is_taken() {
        let mut list = TagList::new(4).unwrap();
        for (wr_id, tag, mask) in [(1, 5, 0xff), (2, 0, 0), (3, 5, 0xff)] {
            list.add(buffer(wr_id, tag, mask)).expect("there is room");
        }
        assert_eq!(taken(&mut list, 0x105), Some(1));
        assert_eq!(taken(&mut list, 0x105), Some(2));
        assert_eq!(taken(&mut list, 6), None);
        assert_eq!(taken(&mut list, 5), Some(3));
        assert_eq!(taken(&mut list, 5), None);
    }

    #[test]
    fn handles_name_one_use() {
        let mut list = TagList::new(1).unwrap();
        let first = list.add(buffer(1, 1, u64::MAX)).expect("room");
        assert_eq!(list.add(buffer(2, 2, u64::MAX)), None, "full");
        assert_eq!(taken(&mut list, 1), Some(1));
        let second = list.add(buffer(2, 2, u64::MAX)).expect("room");
        assert!(!list.remove(first) && !list.remove(77));
        assert!(list.remove(second) && !list.remove(second));
    }

    /// A message that came before a buffer was added is the program's to match with it.
    #[test]
    fn buffers_sleep_until_the_program_has_seen_all() {
        let mut list = TagList::new(4).unwrap();
        list.add(buffer(1, 1, u64::MAX)).expect("room");
        list.note_unexpected();
        assert!(!list.in_step());
        list.add(buffer(2, 2, u64::MAX)).expect("room");
        assert_eq!(taken(&mut list, 2), None, "asleep");
        assert_eq!(taken(&mut list, 1), Some(1), "older than the message");
        list.report(0);
        assert_eq!(taken(&mut list, 2), None);
        list.report(1);
        assert_eq!(taken(&mut list, 2), Some(2));
    }

    #[test]
    fn what_an_ended_qp_matched_is_free() {
        let mut list = TagList::new(2).unwrap();
        for _ in 0..2 {
            list.add(buffer(1, 1, 0)).expect("room");
        }
        for qpn in [7, 8] {
            list.entries.iter_mut().for_each(|e| e.buffer.tag = 0);
            let slot = list.take(0).expect("a match");
            list.suspend(slot, qpn, Rendezvous::default());
        }
        let other = list.waiting(8).expect("it waits");
        list.forget(7);
        assert_eq!((list.waiting(7), list.waiting(8), list.free.len()), (None, Some(other), 1));
        list.resume(other);
        assert_eq!(list.waiting(8), None);
        list.forget(8);
        assert_eq!(list.free.len(), 2);
    }
}
