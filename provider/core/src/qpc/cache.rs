//! The QPC cache: fully associative, least recently used out first, never one that is waited for.
//!
//! The tag store of a chip compares all tags at once. Here a table from QPN to line gives the same answer in
//! one step.

use alloc::vec;
use alloc::vec::Vec;

use crate::error::NicError;
use crate::room::Room;
use crate::types::Qpn;

const NONE: u32 = u32::MAX;

/// Content-addressed lookup: QPN to slot number.
pub(super) struct Tags(Vec<u32>);

impl Tags {
    pub(super) fn new(qps: u32) -> Tags {
        Tags(vec![NONE; qps as usize])
    }
    /// Room for numbers below `qps`.
    pub(super) fn grow(&mut self, qps: u32) -> Result<(), NicError> {
        let qps = qps as usize;
        if qps > self.0.len() {
            self.0.make_room(qps)?;
            self.0.resize(qps, NONE);
        }
        Ok(())
    }
    #[inline]
    pub(super) fn get(&self, qpn: Qpn) -> Option<usize> {
        match self.0.get(qpn as usize) {
            Some(&slot) if slot != NONE => Some(slot as usize),
            _ => None,
        }
    }
    #[inline]
    pub(super) fn set(&mut self, qpn: Qpn, slot: Option<usize>) {
        if let Some(place) = self.0.get_mut(qpn as usize) {
            *place = slot.map_or(NONE, |slot| slot as u32);
        }
    }
}

struct CacheLine<C> {
    qpn: Qpn,
    context: C,
    /// Neighbours in order of use
    older: u32,
    newer: u32,
}

/// Contexts, the newest used first in a list of lines.
pub(super) struct Cache<C> {
    lines: Vec<CacheLine<C>>,
    tags: Tags,
    capacity: usize,
    oldest: u32,
    newest: u32,
}

impl<C> Cache<C> {
    pub(super) fn new(capacity: u32, qps: u32) -> Self {
        // no more lines than QPs are ever used
        let lines = Vec::with_capacity(capacity.min(qps) as usize);
        Cache { lines, tags: Tags::new(qps), capacity: capacity as usize, oldest: NONE, newest: NONE }
    }

    /// Room for the contexts of QPs with numbers below `qps`.
    pub(super) fn grow(&mut self, qps: u32) -> Result<(), NicError> {
        self.lines.make_room(self.capacity.min(qps as usize))?;
        self.tags.grow(qps)
    }

    pub(super) fn contains(&self, qpn: Qpn) -> bool {
        self.tags.get(qpn).is_some()
    }

    /// The context, which becomes the newest used.
    pub(super) fn touch(&mut self, qpn: Qpn) -> Option<&mut C> {
        let slot = self.tags.get(qpn)?;
        self.unlink(slot);
        self.link_newest(slot);
        Some(&mut self.lines[slot].context)
    }

    /// The line that would make room: a new one, or the least recently used that is not pinned.
    fn victim(&self, pinned: impl Fn(Qpn) -> bool) -> Option<usize> {
        if self.lines.len() < self.capacity {
            return Some(self.lines.len());
        }
        let mut slot = self.oldest;
        while slot != NONE {
            let line = &self.lines[slot as usize];
            if !pinned(line.qpn) {
                return Some(slot as usize);
            }
            slot = line.newer;
        }
        None
    }

    /// Whether there is a line for one more.
    pub(super) fn has_room(&self, pinned: impl Fn(Qpn) -> bool) -> bool {
        self.victim(pinned).is_some()
    }

    /// Puts in a context that is not there, and gives what must go to memory: the one evicted for it, or
    /// itself when all lines are pinned.
    pub(super) fn insert(&mut self, qpn: Qpn, context: C, pinned: impl Fn(Qpn) -> bool) -> Option<(Qpn, C)> {
        let Some(slot) = self.victim(pinned) else { return Some((qpn, context)) };
        let line = CacheLine { qpn, context, older: NONE, newer: NONE };
        let evicted = if slot == self.lines.len() {
            self.lines.push(line);
            None
        } else {
            self.unlink(slot);
            let old = core::mem::replace(&mut self.lines[slot], line);
            self.tags.set(old.qpn, None);
            Some((old.qpn, old.context))
        };
        self.tags.set(qpn, Some(slot));
        self.link_newest(slot);
        evicted
    }

    fn unlink(&mut self, slot: usize) {
        let (older, newer) = (self.lines[slot].older, self.lines[slot].newer);
        match older {
            NONE => self.oldest = newer,
            older => self.lines[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.lines[newer as usize].older = older,
        }
    }

    fn link_newest(&mut self, slot: usize) {
        let before = core::mem::replace(&mut self.newest, slot as u32);
        self.lines[slot].older = before;
        self.lines[slot].newer = NONE;
        match before {
            NONE => self.oldest = slot as u32,
            before => self.lines[before as usize].newer = slot as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_goes_first_and_never_a_pinned_one() {
        let mut cache = Cache::new(2, 10);
        assert_eq!(cache.insert(1, 'a', |_| false), None);
        assert_eq!(cache.insert(2, 'b', |_| false), None);
        assert_eq!(cache.touch(1), Some(&mut 'a'));
        assert_eq!(cache.insert(3, 'c', |_| false), Some((2, 'b')));
        assert_eq!(cache.insert(4, 'd', |qpn| qpn == 1), Some((3, 'c')));
        assert!(!cache.has_room(|_| true));
        assert_eq!(cache.insert(5, 'e', |_| true), Some((5, 'e')));
        assert!(cache.contains(1) && cache.contains(4) && !cache.contains(5));
    }
}
