//! Queues of the data path: their memory is taken on the control path, and never there.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;

use slab::Slab;

use crate::error::NicError;

/// Adding to a queue that has room. Whoever made the queue promised it; debug builds, and so the
/// simulator's runs, hold it to that.
pub trait Room<T> {
    /// Makes room for `entries` in all, and more, so that to grow by one again and again costs little.
    /// `Exhausted`: the host has no memory for it.
    fn make_room(&mut self, entries: usize) -> Result<(), NicError>;
    /// Adds at the end.
    fn push_in_room(&mut self, value: T);
}

/// Message of the assertion on a full queue.
const FULL: &str = "no room: this would allocate on the data path";

impl<T> Room<T> for VecDeque<T> {
    fn make_room(&mut self, entries: usize) -> Result<(), NicError> {
        self.try_reserve(entries.saturating_sub(self.len())).map_err(|_| NicError::Exhausted)
    }

    #[inline]
    fn push_in_room(&mut self, value: T) {
        debug_assert!(self.len() < self.capacity(), "{FULL}");
        self.push_back(value);
    }
}

impl<T> Room<T> for Vec<T> {
    fn make_room(&mut self, entries: usize) -> Result<(), NicError> {
        self.try_reserve(entries.saturating_sub(self.len())).map_err(|_| NicError::Exhausted)
    }

    #[inline]
    fn push_in_room(&mut self, value: T) {
        debug_assert!(self.len() < self.capacity(), "{FULL}");
        self.push(value);
    }
}

/// What queues with two ends can do beside.
pub trait TwoEnds<T>: Room<T> {
    /// Makes room for `entries` in all and no more: of these there is one for each QP. `Exhausted`: no
    /// memory.
    fn make_exact_room(&mut self, entries: usize) -> Result<(), NicError>;
    /// Adds at the front.
    fn push_front_in_room(&mut self, value: T);
}

impl<T> TwoEnds<T> for VecDeque<T> {
    fn make_exact_room(&mut self, entries: usize) -> Result<(), NicError> {
        self.try_reserve_exact(entries.saturating_sub(self.len())).map_err(|_| NicError::Exhausted)
    }

    #[inline]
    fn push_front_in_room(&mut self, value: T) {
        debug_assert!(self.len() < self.capacity(), "{FULL}");
        self.push_front(value);
    }
}

/// Room for `entries` in all and no more. `Exhausted`: no memory.
pub fn exact<T>(list: &mut Vec<T>, entries: usize) -> Result<(), NicError> {
    list.try_reserve_exact(entries.saturating_sub(list.len())).map_err(|_| NicError::Exhausted)
}

/// Whether the host has memory for something of so many bytes, which is then made at once: another thread may
/// still get it first.
pub fn is_room_for(bytes: usize) -> bool {
    hold(bytes).is_some()
}

/// Memory that is kept for something of `bytes` bytes, which is made later: given back just before, that
/// finds it free although others took what they could find meanwhile. `None`: there is none.
pub fn hold(bytes: usize) -> Option<Vec<u8>> {
    let mut held = Vec::new();
    held.try_reserve_exact(bytes).ok()?;
    Some(held)
}

/// `entries` times the default, as large as a program asks for. `Exhausted`: no memory.
pub fn filled<T: Clone + Default>(entries: usize) -> Result<Box<[T]>, NicError> {
    let mut all = Vec::new();
    exact(&mut all, entries)?;
    all.resize(entries, T::default());
    Ok(all.into_boxed_slice())
}

/// A value in memory of its own. `Exhausted`: there is none.
pub fn boxed<T>(value: T) -> Result<Box<T>, NicError> {
    if is_room_for(size_of::<T>()) { Ok(Box::new(value)) } else { Err(NicError::Exhausted) }
}

/// Room for one more in a table of objects. A slab cannot be asked to grow if it can, so another vector of
/// the size that it would grow to is asked first. `Exhausted`: no memory.
pub fn make_room_in<T>(table: &mut Slab<T>) -> Result<(), NicError> {
    if table.len() < table.capacity() {
        return Ok(());
    }
    let more = table.capacity().max(4);
    /* an entry of a slab is a value or the number of the next free one */
    exact(&mut Vec::<(usize, T)>::new(), table.capacity() + more)?;
    table.reserve_exact(more);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_had_is_an_error() {
        assert!(filled::<u64>(isize::MAX as usize / 8 + 1).is_err());
        assert!(Vec::<u64>::new().make_room(usize::MAX).is_err());
        assert!(VecDeque::<u64>::new().make_exact_room(usize::MAX).is_err());
        let mut table = Slab::new();
        for entry in 0..1000 {
            assert!(make_room_in(&mut table).is_ok() && table.capacity() > table.len());
            table.insert(entry);
        }
    }
}
