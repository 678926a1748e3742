//! What a function of the board counts, as its registers show it.

use std::cell::Cell;

use starverbs_queues::board::COUNTERS;

/// Counters of one function, by the numbers `COUNTER_*`.
#[derive(Default)]
pub(crate) struct BoardCounters([Cell<u64>; COUNTERS as usize]);

impl BoardCounters {
    /// One more of `which`.
    pub(crate) fn inc(&self, which: u32) {
        if let Some(counter) = self.0.get(which as usize) {
            counter.set(counter.get().wrapping_add(1));
        }
    }

    /// The value of `which`; 0 where there is none.
    pub(crate) fn get(&self, which: usize) -> u64 {
        self.0.get(which).map_or(0, Cell::get)
    }
}
