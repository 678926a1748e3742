//! Places for what is under way, by number: as many as were ever needed at once.
//!
//! Things are numbered in the order in which they come, and go in about that order, so a ring of a power of
//! two places holds them. Its places are doubled when one more is needed: a connection at rest takes little
//! memory, and one that has little under way uses the same few lines again and again.

use alloc::boxed::Box;
use core::ops::{Index, IndexMut};

use starverbs_core::NicError;
use starverbs_core::env::Host;
use starverbs_core::room::filled;

/// A ring of places. Room is made before a number is used: for as many as its owner says at `most`, a power
/// of two.
#[derive(Clone)]
pub(super) struct Places<T> {
    all: Box<[T]>,
}

impl<T: Copy + Default> Places<T> {
    /// None yet.
    pub(super) fn new() -> Self {
        Places { all: Box::default() }
    }

    /// Places that there are.
    pub(super) fn len(&self) -> u32 {
        self.all.len() as u32
    }

    /// Bytes of memory that they take.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.all)
    }

    /// All places, in no order that says anything.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.all.iter_mut()
    }

    /// Places that there are once there is room for this many.
    pub(super) fn places_for(&self, count: u32, most: u32) -> u32 {
        if count <= self.len() { self.len() } else { count.min(most).next_power_of_two() }
    }

    /// Bytes of memory that room for this many takes more.
    pub(super) fn growth(&self, count: u32, most: u32) -> usize {
        (self.places_for(count, most) - self.len()) as usize * size_of::<T>()
    }

    /// There is room for this many, from number `first` on; what is there of them stays. `Exhausted`: no
    /// memory, or more than there may be.
    pub(super) fn make_room(&mut self, first: u32, count: u32, most: u32) -> Result<(), NicError> {
        if count <= self.len() { Ok(()) } else { self.widen(first, count, most) }
    }

    #[cold]
    fn widen(&mut self, first: u32, count: u32, most: u32) -> Result<(), NicError> {
        if count > most {
            return Err(NicError::Exhausted);
        }
        let wide = filled(self.places_for(count, most) as usize)?;
        let old = core::mem::replace(self, Places { all: wide });
        for number in (0..old.len()).map(|n| first.wrapping_add(n)) {
            self[number] = old[number];
        }
        Ok(())
    }
}

impl<T> Places<T> {
    /// The place of a number will be used soon.
    #[inline]
    pub(super) fn expect(&self, env: &impl Host, number: u32) {
        if let Some(place) = self.all.get(self.at(number)) {
            env.prefetch(place);
        }
    }

    fn at(&self, number: u32) -> usize {
        number as usize & self.all.len().wrapping_sub(1)
    }
}

impl<T> Index<u32> for Places<T> {
    type Output = T;

    fn index(&self, number: u32) -> &T {
        &self.all[self.at(number)]
    }
}

impl<T> IndexMut<u32> for Places<T> {
    fn index_mut(&mut self, number: u32) -> &mut T {
        let at = self.at(number);
        &mut self.all[at]
    }
}

/// A list in each of the places of a [`Places`]. By default there are none.
#[derive(Default)]
pub(super) struct Lists<T> {
    all: Box<[T]>,
    places: u32,
    /// Most entries of one
    each: u32,
}

impl<T: Copy + Default> Lists<T> {
    /// Bytes of memory that they take.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.all)
    }

    fn each(&self) -> usize {
        self.each as usize
    }

    /// Entries of a list once there are `each` at least.
    fn entries_for(&self, each: usize) -> usize {
        if each > self.each() { each.next_power_of_two() } else { self.each() }
    }

    /// Bytes of memory that [`make_room`](Lists::make_room) takes more.
    pub(super) fn growth(&self, places: u32, each: usize) -> usize {
        if places <= self.places && each <= self.each() {
            return 0;
        }
        (places as usize * self.entries_for(each)).saturating_sub(self.all.len()) * size_of::<T>()
    }

    /// There are as many lists as `places`, a power of two, of `each` entries at least; those from number
    /// `first` on stay. `Exhausted`: no memory.
    pub(super) fn make_room(&mut self, first: u32, places: u32, each: usize) -> Result<(), NicError> {
        if places <= self.places && each <= self.each() { Ok(()) } else { self.widen(first, places, each) }
    }

    #[cold]
    fn widen(&mut self, first: u32, places: u32, each: usize) -> Result<(), NicError> {
        let each = self.entries_for(each);
        let all = filled(places as usize * each)?;
        let old = core::mem::replace(self, Lists { all, places, each: each as u32 });
        for number in (0..old.places).map(|n| first.wrapping_add(n)) {
            let list = old.of(number, old.each());
            self.of_mut(number).iter_mut().zip(list).for_each(|(entry, value)| *entry = *value);
        }
        Ok(())
    }

    fn start(&self, number: u32) -> usize {
        (number & self.places.wrapping_sub(1)) as usize * self.each()
    }

    /// The first `n` entries of the list of this number; none where there are not so many.
    pub(super) fn of(&self, number: u32, n: usize) -> &[T] {
        let start = self.start(number);
        self.all.get(start..start + n).unwrap_or(&[])
    }

    /// The whole list of this number, to be changed; nothing where there is none.
    pub(super) fn of_mut(&mut self, number: u32) -> &mut [T] {
        let start = self.start(number);
        self.all.get_mut(start..start + self.each()).unwrap_or(&mut [])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From numbers just before the last one on, with places and without.
    #[test]
    fn what_is_there_stays_when_there_are_more_places() {
        let (mut places, mut lists) = (Places::new(), Lists::default());
        assert_eq!((places.bytes(), lists.of(3, 1), lists.bytes()), (0, &[][..], 0));
        let first = u32::MAX - 6;
        for (n, len) in [(1, 1), (4, 4), (5, 8), (9, 16), (64, 64)] {
            for entries in 1..=n {
                let number = first.wrapping_add(entries - 1);
                places.make_room(first, entries, 64).unwrap();
                places[number] = entries;
                let (before, each) = (lists.bytes(), n as usize / 4 + 1);
                let growth = lists.growth(places.len(), each);
                lists.make_room(first, places.len(), each).unwrap();
                assert_eq!(lists.bytes(), before + growth);
                lists.of_mut(number)[0] = entries;
            }
            assert_eq!(places.len(), len);
            for entries in 1..=n {
                let number = first.wrapping_add(entries - 1);
                assert_eq!((places[number], lists.of(number, 1)), (entries, &[entries][..]));
            }
        }
        assert_eq!(places.make_room(first, 65, 64), Err(NicError::Exhausted));
    }
}
