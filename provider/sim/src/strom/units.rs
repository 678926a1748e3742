//! Units that bytes pass one after the other, and when they are where.

use crate::rnic::Picos;

/// When the first and the last of some bytes are somewhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Span {
    pub(super) first: Picos,
    pub(super) last: Picos,
}

impl Span {
    /// All at once.
    pub(super) fn at(time: Picos) -> Span {
        Span { first: time, last: time }
    }

    /// As much later.
    pub(super) fn after(self, time: Picos) -> Span {
        Span { first: self.first + time, last: self.last + time }
    }

    /// Held until the last has come: store and forward.
    pub(super) fn stored(self) -> Span {
        Span::at(self.last)
    }
}

/// A unit that serves one after the other, in the order in which they ask.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Unit {
    free_at: Picos,
}

impl Unit {
    /// Bytes that occupy it for `busy` pass, as soon as it is free and the first is there; the last not
    /// before it is there, too.
    pub(super) fn pass(&mut self, bytes: Span, busy: Picos) -> Span {
        let first = bytes.first.max(self.free_at);
        let last = bytes.last.max(first + busy);
        self.free_at = last;
        Span { first, last }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_serves_in_turn_and_no_faster_than_bytes_come() {
        let mut unit = Unit::default();
        assert_eq!(unit.pass(Span::at(10), 5), Span { first: 10, last: 15 });
        assert_eq!(unit.pass(Span::at(11), 5), Span { first: 15, last: 20 }, "it waits");
        assert_eq!(unit.pass(Span { first: 30, last: 50 }, 5), Span { first: 30, last: 50 }, "slow bytes");
        assert_eq!(unit.pass(Span::at(0), 1).stored().after(9), Span::at(60));
    }
}
