//! A set of addresses, as ranges that do not touch.
//!
//! Pure: owns no memory but its own nodes, and must not know what the addresses mean.

use core::ops::Range;
use std::collections::BTreeMap;

/// Addresses from one to another.
pub(crate) type Span = Range<usize>;

/// What of `one` is in `other`.
pub(crate) fn overlap(one: &Span, other: &Span) -> Span {
    one.start.max(other.start)..one.end.min(other.end)
}

/// Ranges by their start, with their end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ranges(BTreeMap<usize, usize>);

impl Ranges {
    pub(crate) const fn new() -> Ranges {
        Ranges(BTreeMap::new())
    }

    /// All ranges, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Span> {
        self.0.iter().map(|(&start, &end)| start..end)
    }

    /// Adds a range; what it touches becomes one with it.
    pub(crate) fn insert(&mut self, span: Span) {
        if span.is_empty() {
            return;
        }
        let (mut start, mut end) = (span.start, span.end);
        while let Some((&before, &its_end)) = self.0.range(..=end).next_back() {
            if its_end < start {
                break;
            }
            self.0.remove(&before);
            (start, end) = (start.min(before), end.max(its_end));
        }
        self.0.insert(start, end);
    }

    /// Takes a range out, as far as it is in.
    pub(crate) fn remove(&mut self, span: Span) {
        while !span.is_empty() {
            let last = self.0.range(..span.end).next_back().map(|(&start, &end)| start..end);
            let Some(found) = last.filter(|found| found.end > span.start) else { return };
            self.0.remove(&found.start);
            if found.end > span.end {
                self.0.insert(span.end, found.end);
            }
            if found.start < span.start {
                self.0.insert(found.start, span.start);
            }
        }
    }

    /// What of a range is in, in order.
    pub(crate) fn within(&self, span: &Span) -> Vec<Span> {
        let first = self.0.range(..=span.start).next_back().map_or(span.start, |(&start, _)| start);
        let found =
            self.0.range(first..span.end.max(first)).map(|(&start, &end)| overlap(&(start..end), span));
        found.filter(|part| !part.is_empty()).collect()
    }

    /// What of a range is not in, in order.
    pub(crate) fn gaps(&self, span: &Span) -> Vec<Span> {
        let mut gaps = Vec::new();
        let mut at = span.start;
        for part in self.within(span) {
            if at < part.start {
                gaps.push(at..part.start);
            }
            at = part.end;
        }
        if at < span.end {
            gaps.push(at..span.end);
        }
        gaps
    }

    /// Whether any address of a range is in.
    pub(crate) fn meets(&self, span: &Span) -> bool {
        self.0.range(..span.end).next_back().is_some_and(|(_, &end)| end > span.start) && !span.is_empty()
    }

    /// Whether all addresses of a range are in.
    pub(crate) fn holds(&self, span: &Span) -> bool {
        self.0.range(..=span.start).next_back().is_some_and(|(_, &end)| end >= span.end)
    }

    /// Takes the first place of `len` addresses out that begins at a multiple of `align`, a power of two.
    pub(crate) fn take(&mut self, len: usize, align: usize) -> Option<Span> {
        let place = |(&start, &end): (&usize, &usize)| {
            let from = start.checked_next_multiple_of(align)?;
            let to = from.checked_add(len)?;
            (to <= end).then_some(from..to)
        };
        let span = self.0.iter().find_map(place)?;
        self.remove(span.clone());
        Some(span)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const END: usize = 64;

    fn span() -> impl Strategy<Value = Span> {
        (0..END, 0..12usize).prop_map(|(start, len)| start..(start + len).min(END))
    }

    fn joined(spans: Vec<Span>) -> Vec<usize> {
        spans.into_iter().flatten().collect()
    }

    proptest! {
        #[test]
        fn it_is_a_set_of_addresses(
            steps in prop::collection::vec((any::<bool>(), span()), 0..60),
            asked in span(),
        ) {
            let (mut ranges, mut model) = (Ranges::new(), BTreeSet::new());
            for (adds, span) in steps {
                if adds {
                    model.extend(span.clone());
                    ranges.insert(span);
                } else {
                    model.retain(|at| !span.contains(at));
                    ranges.remove(span);
                }
                let all: Vec<Span> = ranges.iter().collect();
                prop_assert!(all.windows(2).all(|pair| pair[0].end < pair[1].start), "apart: {all:?}");
                prop_assert_eq!(joined(all), model.iter().copied().collect::<Vec<_>>());
            }
            let inside: Vec<usize> = asked.clone().filter(|at| model.contains(at)).collect();
            let outside: Vec<usize> = asked.clone().filter(|at| !model.contains(at)).collect();
            prop_assert_eq!(ranges.meets(&asked), !inside.is_empty());
            if !asked.is_empty() {
                prop_assert_eq!(ranges.holds(&asked), outside.is_empty());
            }
            prop_assert_eq!(joined(ranges.within(&asked)), inside);
            prop_assert_eq!(joined(ranges.gaps(&asked)), outside);
        }

        #[test]
        fn the_first_place_that_fits_is_taken(
            spans in prop::collection::vec(span(), 0..12),
            len in 1..9usize,
            shift in 0..4u32,
        ) {
            let mut ranges = Ranges::new();
            spans.into_iter().for_each(|span| ranges.insert(span));
            let align = 1 << shift;
            let fits = |start: &usize| start.is_multiple_of(align) && ranges.holds(&(*start..start + len));
            let expected = (0..END).find(fits).map(|start| start..start + len);
            let before = ranges.clone();
            let taken = ranges.take(len, align);
            prop_assert_eq!(&taken, &expected);
            if let Some(span) = taken {
                prop_assert!(!ranges.meets(&span));
                ranges.insert(span);
            }
            prop_assert_eq!(ranges, before);
        }
    }
}
