//! FIFOs of places in a table: a place is in at most one of them and can leave it from anywhere, so that they
//! need no memory beside the table's own.

use alloc::boxed::Box;
use alloc::vec::Vec;

/// The number of a place. The greatest is none's.
pub(crate) trait ListPlace: Copy + PartialEq {
    /// No place
    const NONE: Self;
    /// Where it is in the table.
    fn index(self) -> usize;
}

impl ListPlace for u16 {
    const NONE: Self = u16::MAX;

    fn index(self) -> usize {
        usize::from(self)
    }
}

impl ListPlace for u32 {
    const NONE: Self = u32::MAX;

    fn index(self) -> usize {
        self as usize
    }
}

/// A boxed slice of `len` things. `None`: there is no memory.
pub(crate) fn boxed<T>(len: usize, make: impl FnMut() -> T) -> Option<Box<[T]>> {
    let mut things = Vec::new();
    things.try_reserve_exact(len).ok()?;
    things.resize_with(len, make);
    Some(things.into_boxed_slice())
}

#[derive(Clone, Copy)]
struct ListLink<P> {
    before: P,
    after: P,
}

impl<P: ListPlace> ListLink<P> {
    const NONE: Self = ListLink { before: P::NONE, after: P::NONE };
}

/// The neighbours of each place.
pub(crate) struct Neighbours<P = u16>(Vec<ListLink<P>>);

impl<P: ListPlace> Neighbours<P> {
    /// Of no places.
    pub(crate) const fn none() -> Self {
        Neighbours(Vec::new())
    }

    /// For places before this one. `None`: there is no memory.
    pub(crate) fn new(end: P) -> Option<Self> {
        let mut links = Neighbours::none();
        links.0.try_reserve_exact(end.index()).ok()?;
        links.0.resize(end.index(), ListLink::NONE);
        Some(links)
    }

    /// One place more. False: there is no memory.
    pub(crate) fn grow(&mut self) -> bool {
        let room = self.0.try_reserve(1).is_ok();
        if room {
            self.0.push(ListLink::NONE);
        }
        room
    }

    fn at(&mut self, place: P) -> Option<&mut ListLink<P>> {
        self.0.get_mut(place.index())
    }
}

/// A FIFO.
#[derive(Debug)]
pub(crate) struct List<P = u16> {
    first: P,
    last: P,
}

impl<P: ListPlace> List<P> {
    /// An empty one.
    pub(crate) const fn new() -> Self {
        List { first: P::NONE, last: P::NONE }
    }

    /// The place that is longest in it.
    pub(crate) fn first(&self) -> Option<P> {
        (self.first != P::NONE).then_some(self.first)
    }

    /// Puts in a place that is in no list.
    pub(crate) fn push(&mut self, links: &mut Neighbours<P>, place: P) {
        let Some(link) = links.at(place) else { return };
        *link = ListLink { before: self.last, after: P::NONE };
        match links.at(self.last) {
            Some(last) => last.after = place,
            None => self.first = place,
        }
        self.last = place;
    }

    /// Takes out a place that is in this list.
    pub(crate) fn remove(&mut self, links: &mut Neighbours<P>, place: P) {
        let Some(link) = links.at(place) else { return };
        let ListLink { before, after } = *link;
        *link = ListLink::NONE;
        match links.at(before) {
            Some(link) => link.after = after,
            None => self.first = after,
        }
        match links.at(after) {
            Some(link) => link.before = before,
            None => self.last = before,
        }
    }

    /// Its places, that one first.
    pub(crate) fn iter<'a>(&self, links: &'a Neighbours<P>) -> impl Iterator<Item = P> + use<'a, P> {
        core::iter::successors(self.first(), |place| links.0.get(place.index()).map(|link| link.after))
            .take_while(|place| *place != P::NONE)
    }

    /// Takes out the place that is longest in it.
    pub(crate) fn pop(&mut self, links: &mut Neighbours<P>) -> Option<P> {
        let first = self.first()?;
        self.remove(links, first);
        Some(first)
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
            let mut links = Neighbours::new(4u16).expect("memory");
            prop_assert!((4..8).all(|_| links.grow()));
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
                    (2, _) => prop_assert_eq!(list.pop(&mut links), model.pop_front()),
                    _ => {}
                }
                prop_assert_eq!(list.first(), model.front().copied());
                prop_assert!(list.iter(&links).eq(model.iter().copied()));
            }
        }
    }
}
