//! Slot memory of stateless ends, which is the board's own: a card in hardware has it in the host's memory,
//! where this board's host half is the board itself.
//!
//! Owns the memory, and the host addresses by which the card knows it: each names the function whose
//! connection it is of, so that what a packet may reach is told by the slots that it names.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::queues::QuotaShare;

/// Of a host address: it is one of slot memory. Neither regions nor null regions begin so.
const SLOTS: u64 = 1 << 62;
/// Of a host address, the bits that say what it is one of.
const KIND: u64 = 3 << 62;
/// Where in such an address the function stands: below the two bits of [`KIND`].
const FUNCTION_SHIFT: u32 = 48;
/// Where the number of the area stands; below are bytes of it.
const AREA_SHIFT: u32 = 24;
/// Bytes of an area at most.
const MAX_AREA: u64 = 1 << AREA_SHIFT;

const WORD: u64 = size_of::<u64>() as u64;

/// A place in slot memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SlotPlace {
    pub(crate) function: usize,
    area: usize,
    /// Bytes from its begin on
    offset: u64,
}

impl SlotPlace {
    /// That of a host address. `None`: it is none of slot memory.
    pub(crate) fn of(host: u64) -> Option<SlotPlace> {
        let below = |bits: u32| host & ((1 << bits) - 1);
        (host & KIND == SLOTS).then(|| SlotPlace {
            function: ((host & !KIND) >> FUNCTION_SHIFT) as usize,
            area: (below(FUNCTION_SHIFT) >> AREA_SHIFT) as usize,
            offset: below(AREA_SHIFT),
        })
    }
}

/// The host address of an area.
fn address(function: usize, number: usize) -> u64 {
    SLOTS | (function as u64) << FUNCTION_SHIFT | (number as u64) << AREA_SHIFT
}

/// The function that has it, and its words.
type Area = Option<(usize, Box<[Cell<u64>]>)>;

/// All of it.
#[derive(Default)]
struct Areas {
    all: Vec<Area>,
    /// Numbers that no area has
    free: Vec<usize>,
}

/// The memory. Clones are the same.
#[derive(Clone, Default)]
pub(crate) struct SlotTable(Rc<RefCell<Areas>>);

/// An area, which goes back when this is dropped.
pub(crate) struct BoardSlots {
    memory: SlotTable,
    number: usize,
    _share: QuotaShare,
}

impl SlotTable {
    /// An area of so many bytes, all zero, of a connection of this function, and its host address. `None`: no
    /// memory, or too much.
    pub(crate) fn make(&self, bytes: u64, function: usize, share: QuotaShare) -> Option<(BoardSlots, u64)> {
        if bytes > MAX_AREA {
            return None;
        }
        let mut words = Vec::new();
        let count = bytes.div_ceil(WORD) as usize;
        words.try_reserve_exact(count).ok()?;
        words.resize_with(count, Cell::default);
        let mut areas = self.0.borrow_mut();
        let number = areas.free.pop().unwrap_or(areas.all.len());
        if number >> (FUNCTION_SHIFT - AREA_SHIFT) != 0 {
            return None;
        }
        if number == areas.all.len() {
            areas.all.push(None);
        }
        areas.all[number] = Some((function, words.into_boxed_slice()));
        Some((BoardSlots { memory: self.clone(), number, _share: share }, address(function, number)))
    }

    /// Calls with the words of so many bytes. `None`: they are not whole words, or not there, or another
    /// function's.
    fn with<R>(&self, at: SlotPlace, bytes: usize, call: impl FnOnce(&[Cell<u64>]) -> R) -> Option<R> {
        let areas = self.0.borrow();
        let (_, area) = areas.all.get(at.area)?.as_ref().filter(|(function, _)| *function == at.function)?;
        let whole = at.offset.is_multiple_of(WORD) && (bytes as u64).is_multiple_of(WORD);
        let first = (at.offset / WORD) as usize;
        let words = area.get(first..first.checked_add(bytes / WORD as usize)?)?;
        whole.then(|| call(words))
    }

    /// False: as of [`SlotTable::read`].
    pub(crate) fn write(&self, at: SlotPlace, bytes: &[u8]) -> bool {
        let write = |words: &[Cell<u64>]| {
            for (word, bytes) in words.iter().zip(bytes.as_chunks().0) {
                word.set(u64::from_ne_bytes(*bytes));
            }
        };
        self.with(at, bytes.len(), write).is_some()
    }

    /// False: the bytes are not whole words, or not there.
    pub(crate) fn read(&self, at: SlotPlace, bytes: &mut [u8]) -> bool {
        let len = bytes.len();
        let read = |words: &[Cell<u64>]| {
            for (word, bytes) in words.iter().zip(bytes.as_chunks_mut().0) {
                *bytes = word.get().to_ne_bytes();
            }
        };
        self.with(at, len, read).is_some()
    }
}

#[cfg(test)]
impl SlotTable {
    /// Areas that there are.
    pub(crate) fn count(&self) -> usize {
        self.0.borrow().all.iter().flatten().count()
    }

    /// The address and the words of an area of a function.
    pub(crate) fn words(&self, function: usize, number: usize) -> Option<(u64, Vec<u64>)> {
        let areas = self.0.borrow();
        let words = areas.all.get(number)?.as_ref().filter(|(of, _)| *of == function)?.1.iter();
        Some((address(function, number), words.map(Cell::get).collect()))
    }
}

impl Drop for BoardSlots {
    fn drop(&mut self) {
        let mut areas = self.memory.0.borrow_mut();
        if let Some(area) = areas.all.get_mut(self.number) {
            *area = None;
            areas.free.push(self.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queues::QueueQuota;

    #[test]
    fn areas_are_their_own_and_come_back() {
        let (memory, quota) = (SlotTable::default(), QueueQuota::default());
        let make = |bytes, function| memory.make(bytes, function, quota.take(64).unwrap());
        let (first, a) = make(64, 0).unwrap();
        let (second, b) = make(32, 5).unwrap();
        let at = |host| SlotPlace::of(host).unwrap();
        assert_eq!((at(a).function, at(b + 8).function), (0, 5));
        assert!(memory.write(at(a + 32), &[7; 32]) && memory.write(at(b), &[9; 32]));
        let mut bytes = [0; 32];
        assert!(memory.read(at(a), &mut bytes) && bytes == [0; 32], "zero where nothing was written");
        assert!(memory.read(at(a + 32), &mut bytes) && bytes == [7; 32]);
        assert!(memory.read(at(b), &mut bytes) && bytes == [9; 32]);
        assert!(!memory.write(at(b + 8), &[1; 32]), "behind the end");
        assert!(!memory.write(at(b + 4), &[1; 8]) && !memory.write(at(b), &[1; 4]), "no whole words");
        assert!(!memory.write(at(b ^ 1 << FUNCTION_SHIFT), &[1; 32]), "another function's");
        assert_eq!(SlotPlace::of(3 << 62), None);
        assert_eq!(SlotPlace::of(1 << 63), None);
        assert!(make(MAX_AREA + 1, 0).is_none());
        drop(first);
        assert!(!memory.read(at(a), &mut bytes), "it is gone");
        let (_third, c) = make(64, 1).unwrap();
        assert!(memory.read(at(c), &mut bytes) && bytes == [0; 32], "as new");
        drop(second);
    }
}
