//! The requester (section 4.4): numbers its requests, keeps what belongs to them, and finds it again by the
//! number.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// Number of a request among those of its channel that are in flight.
pub type Index = u8;

/// Index FIFO and waiting memory of one channel. `T` is what waits for a context: a doorbell, a WQE, a
/// packet.
#[derive(Debug)]
pub struct RequesterUnit<T> {
    free: VecDeque<Index>,
    waiting: Vec<Option<T>>,
}

impl<T> RequesterUnit<T> {
    /// One with `ooo_cap` indices, at most 256.
    pub fn new(ooo_cap: u16) -> Self {
        let cap = ooo_cap.min(256);
        let mut waiting = Vec::new();
        waiting.resize_with(usize::from(cap), || None);
        RequesterUnit { free: (0..cap).map(|index| index as Index).collect(), waiting }
    }

    /// Keeps `info` until its context comes, and gives it a number; hands it back when all numbers are in
    /// use.
    pub fn begin(&mut self, info: T) -> Result<Index, T> {
        let Some(index) = self.free.pop_front() else { return Err(info) };
        self.waiting[usize::from(index)] = Some(info);
        Ok(index)
    }

    /// The context came: what waited for it. `None` for a number that is not in use.
    pub fn finish(&mut self, index: Index) -> Option<T> {
        let info = self.waiting.get_mut(usize::from(index))?.take()?;
        self.free.push_back(index);
        Some(info)
    }

    /// Whether one more may begin.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// How many wait.
    pub fn in_flight(&self) -> usize {
        self.waiting.len() - self.free.len()
    }
}
