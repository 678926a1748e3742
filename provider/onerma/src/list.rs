//! FIFOs of places in a table: a place is in at most one of them and can leave it from anywhere, so that they
//! need no memory beside the table's own.

use alloc::boxed::Box;
use alloc::vec::Vec;

const NONE: u16 = u16::MAX;

/// A boxed slice of `len` things. `None`: there is no memory.
pub(crate) fn boxed<T>(len: usize, make: impl FnMut() -> T) -> Option<Box<[T]>> {
    let mut things = Vec::new();
    things.try_reserve_exact(len).ok()?;
    things.resize_with(len, make);
    Some(things.into_boxed_slice())
}

#[derive(Clone, Copy)]
struct ListLink {
    before: u16,
    after: u16,
}

/// The neighbours of each place.
pub(crate) struct Neighbours(Box<[ListLink]>);

impl Neighbours {
    /// For places 0..len.
    pub(crate) fn new(len: u16) -> Option<Self> {
        boxed(usize::from(len), || ListLink { before: NONE, after: NONE }).map(Neighbours)
    }

    fn at(&mut self, place: u16) -> Option<&mut ListLink> {
        self.0.get_mut(usize::from(place))
    }
}

/// A FIFO.
#[derive(Debug)]
pub(crate) struct List {
    first: u16,
    last: u16,
}

impl List {
    /// An empty one.
    pub(crate) const fn new() -> Self {
        List { first: NONE, last: NONE }
    }

    /// The place that is longest in it.
    pub(crate) fn first(&self) -> Option<u16> {
        (self.first != NONE).then_some(self.first)
    }

    /// Puts in a place that is in no list.
    pub(crate) fn push(&mut self, links: &mut Neighbours, place: u16) {
        let Some(link) = links.at(place) else { return };
        *link = ListLink { before: self.last, after: NONE };
        match links.at(self.last) {
            Some(last) => last.after = place,
            None => self.first = place,
        }
        self.last = place;
    }

    /// Takes out a place that is in this list.
    pub(crate) fn remove(&mut self, links: &mut Neighbours, place: u16) {
        let Some(link) = links.at(place) else { return };
        let ListLink { before, after } = *link;
        *link = ListLink { before: NONE, after: NONE };
        match links.at(before) {
            Some(link) => link.after = after,
            None => self.first = after,
        }
        match links.at(after) {
            Some(link) => link.before = before,
            None => self.last = before,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_list_is_a_queue_that_any_place_may_leave(
            moves in prop::collection::vec((0..3u8, 0..8u16), 0..200),
        ) {
            let mut links = Neighbours::new(8).expect("memory");
            let (mut list, mut model) = (List::new(), VecDeque::new());
            for (what, place) in moves {
                let inside = model.iter().position(|one| *one == place);
                match (what, inside) {
                    (0, None) => {
                        list.push(&mut links, place);
                        model.push_back(place);
                    }
                    (1, Some(at)) => {
                        list.remove(&mut links, place);
                        model.remove(at);
                    }
                    (2, _) => {
                        if let Some(first) = list.first() {
                            list.remove(&mut links, first);
                        }
                        model.pop_front();
                    }
                    _ => {}
                }
                prop_assert_eq!(list.first(), model.front().copied());
            }
        }
    }
}
