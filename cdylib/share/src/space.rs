//! Which range of the arena is whose.
//!
//! Pure bookkeeping: it makes no system call and touches no memory of the arena. What is free reads as
//! zero; who gives a range back has emptied it before.

use std::collections::BTreeMap;

use crate::ranges::{Ranges, Span};

/// Blocks kept for the next malloc, with what stands in them: as much as glibc keeps at most.
const KEPT_BYTES: usize = 64 << 20;
const KEPT_BLOCKS: usize = 32;

/// The arena's ranges.
pub(crate) struct Space {
    /// Nobody's; all of it is zero
    free: Ranges,
    /// Another mapping of the program's lies there
    lost: Ranges,
    /// A forked child has nothing there (MADV_DONTFORK)
    pub(crate) not_forked: Ranges,
    /// A forked child finds zeroes there (MADV_WIPEONFORK)
    pub(crate) wiped: Ranges,
    /// malloc's, by their start, with their length
    blocks: BTreeMap<usize, usize>,
    /// Given back by free, oldest first, and not emptied
    kept: Vec<Span>,
}

impl Space {
    pub(crate) const fn new() -> Space {
        Space {
            free: Ranges::new(),
            lost: Ranges::new(),
            not_forked: Ranges::new(),
            wiped: Ranges::new(),
            blocks: BTreeMap::new(),
            kept: Vec::new(),
        }
    }

    /// Takes a range that reads as zero.
    pub(crate) fn take(&mut self, len: usize, align: usize) -> Option<Span> {
        self.free.take(len, align)
    }

    /// Takes this range, if all of it is free.
    pub(crate) fn take_at(&mut self, span: &Span) -> bool {
        let free = self.free.holds(span);
        if free {
            self.free.remove(span.clone());
        }
        free
    }

    /// Takes a range for malloc; `true` if what stands in it may be anything.
    pub(crate) fn take_block(&mut self, len: usize, align: usize) -> Option<(Span, bool)> {
        let fits = |kept: &&Span| {
            kept.len() >= len && kept.len() <= len + len / 8 && kept.start.is_multiple_of(align)
        };
        let best = self.kept.iter().filter(fits).min_by_key(|kept| kept.len()).cloned();
        let (span, used) = match best {
            Some(span) => {
                self.kept.retain(|kept| *kept != span);
                (span, true)
            }
            None => (self.take(len, align)?, false),
        };
        self.blocks.insert(span.start, span.len());
        Some((span, used))
    }

    /// malloc's block that begins there.
    pub(crate) fn block(&self, start: usize) -> Option<Span> {
        self.blocks.get(&start).map(|len| start..start + len)
    }

    /// Takes malloc's block that begins there out of the books: it is the caller's.
    pub(crate) fn forget_block(&mut self, start: usize) -> Option<Span> {
        self.blocks.remove(&start).map(|len| start..start + len)
    }

    /// Keeps a block that the caller has for the next malloc; what has to go for it is the caller's.
    pub(crate) fn keep(&mut self, span: Span) -> Vec<Span> {
        if span.len() > KEPT_BYTES / 2 {
            return vec![span];
        }
        self.kept.push(span);
        let (mut excess, mut bytes) = (0, self.kept.iter().map(|kept| kept.len()).sum::<usize>());
        while bytes > KEPT_BYTES || self.kept.len() - excess > KEPT_BLOCKS {
            bytes -= self.kept.get(excess).map_or(0, |kept| kept.len());
            excess += 1;
        }
        self.kept.drain(..excess).collect()
    }

    /// Gives a block another end. Growing takes what is free behind it; what it leaves is the caller's.
    pub(crate) fn resize_block(&mut self, start: usize, len: usize) -> Option<Span> {
        let old = self.block(start)?;
        let rest = self.resize(&old, len)?;
        self.blocks.insert(start, len);
        Some(rest)
    }

    /// Gives a range of the caller's another end, as above; None if what is behind it is not free.
    pub(crate) fn resize(&mut self, span: &Span, len: usize) -> Option<Span> {
        let end = span.start.checked_add(len)?;
        if end <= span.end {
            return Some(end..span.end);
        }
        self.take_at(&(span.end..end)).then_some(end..end)
    }

    /// Adds ranges that are zero, mapped and nobody's.
    pub(crate) fn give(&mut self, span: Span) {
        for of in [&mut self.lost, &mut self.not_forked, &mut self.wiped] {
            of.remove(span.clone());
        }
        self.free.insert(span);
    }

    /// What of a range is somebody's: not free.
    pub(crate) fn used(&self, span: &Span) -> Vec<Span> {
        self.free.gaps(span)
    }

    /// Says that the program put a mapping of its own in a range.
    pub(crate) fn lose(&mut self, span: Span) {
        self.free.remove(span.clone());
        for of in [&mut self.not_forked, &mut self.wiped] {
            of.remove(span.clone());
        }
        self.lost.insert(span);
    }

    /// Says that a range is the arena's again, and used.
    pub(crate) fn regain(&mut self, span: Span) {
        for of in [&mut self.free, &mut self.lost, &mut self.not_forked, &mut self.wiped] {
            of.remove(span.clone());
        }
    }

    /// What of a range is a mapping of the program's own.
    pub(crate) fn lost(&self, span: &Span) -> Vec<Span> {
        self.lost.within(span)
    }

    /// What of a range is the arena's own mapping.
    pub(crate) fn own(&self, span: &Span) -> Vec<Span> {
        self.lost.gaps(span)
    }

    /// Whether all of a range is somebody's, and the arena's memory.
    pub(crate) fn is_shared(&self, span: &Span) -> bool {
        !self.free.meets(span) && !self.lost.meets(span)
    }

    /// What a forked child has of a range: neither free, nor kept, nor of another mapping, nor left out.
    pub(crate) fn inherited(&self, span: &Span) -> Vec<Span> {
        let mut absent = self.free.clone();
        let others = self.lost.iter().chain(self.not_forked.iter()).chain(self.kept.iter().cloned());
        others.for_each(|span| absent.insert(span));
        absent.gaps(span)
    }
}

#[cfg(test)]
#[path = "space_tests.rs"]
mod tests;
