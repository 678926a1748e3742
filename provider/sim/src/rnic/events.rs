//! What happens when: a wheel of buckets, one nanosecond each, with a heap for what lies beyond it.
//!
//! Nearly all events of a card lie within a few microseconds, many in the same nanosecond. A bucket is sorted
//! when its time comes. Events of the same picosecond come in the order in which they were put in, so that a
//! run is repeatable.

use std::collections::BinaryHeap;

/// Picoseconds since the run began.
pub type Picos = u64;

/// Buckets of the wheel: 4 us, more than a link's and a bus's latency.
const BUCKETS: u64 = 4096;
/// A bucket is 1024 ps wide.
const WIDTH_SHIFT: u32 = 10;

struct Entry<E> {
    at: Picos,
    number: u64,
    event: E,
}

impl<E> Entry<E> {
    fn key(&self) -> (Picos, u64) {
        (self.at, self.number)
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}
impl<E> Eq for Entry<E> {}
impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl<E> Ord for Entry<E> {
    /// The earliest is the greatest, as the heap gives the greatest first.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.key().cmp(&self.key())
    }
}

/// Events in order of time.
pub struct EventQueue<E> {
    now: Picos,
    put: u64,
    taken: u64,
    /// The bucket that `current` was, counted from time 0
    bucket: u64,
    /// What is left of it, the earliest last
    current: Vec<Entry<E>>,
    wheel: Vec<Vec<Entry<E>>>,
    /// A bit for each bucket of the wheel that holds something
    filled: Vec<u64>,
    far: BinaryHeap<Entry<E>>,
}

impl<E> Default for EventQueue<E> {
    fn default() -> Self {
        let mut wheel = Vec::new();
        wheel.resize_with(BUCKETS as usize, Vec::new);
        EventQueue {
            now: 0,
            put: 0,
            taken: 0,
            bucket: 0,
            current: Vec::new(),
            wheel,
            filled: vec![0; BUCKETS as usize / 64],
            far: BinaryHeap::new(),
        }
    }
}

impl<E> EventQueue<E> {
    /// The time of the event taken last.
    pub fn now(&self) -> Picos {
        self.now
    }

    /// How many were taken.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Puts in an event at `at`, which is not before now.
    pub fn push(&mut self, at: Picos, event: E) {
        let at = at.max(self.now);
        let entry = Entry { at, number: self.put, event };
        self.put += 1;
        let bucket = at >> WIDTH_SHIFT;
        if bucket == self.bucket {
            let place = self.current.partition_point(|other| other.key() > entry.key());
            self.current.insert(place, entry);
        } else if bucket < self.bucket + BUCKETS {
            self.put_in_wheel(bucket, entry);
        } else {
            self.far.push(entry);
        }
    }

    /// Takes the next event, and moves the time on to it.
    pub fn pop(&mut self) -> Option<E> {
        if self.current.is_empty() {
            self.turn()?;
        }
        let entry = self.current.pop()?;
        self.now = entry.at;
        self.taken += 1;
        Some(entry.event)
    }

    fn put_in_wheel(&mut self, bucket: u64, entry: Entry<E>) {
        let slot = (bucket % BUCKETS) as usize;
        self.wheel[slot].push(entry);
        self.filled[slot / 64] |= 1 << (slot % 64);
    }

    /// Goes on to the next bucket that holds something.
    fn turn(&mut self) -> Option<()> {
        self.bucket = match (self.next_filled(), self.far.peek()) {
            // all of the wheel is before all that is far
            (Some(bucket), _) => bucket,
            (None, Some(entry)) => entry.at >> WIDTH_SHIFT,
            (None, None) => return None,
        };
        while let Some(entry) = self.far.peek()
            && entry.at >> WIDTH_SHIFT < self.bucket + BUCKETS
        {
            let bucket = entry.at >> WIDTH_SHIFT;
            if let Some(entry) = self.far.pop() {
                self.put_in_wheel(bucket, entry);
            }
        }
        let slot = (self.bucket % BUCKETS) as usize;
        self.filled[slot / 64] &= !(1 << (slot % 64));
        std::mem::swap(&mut self.current, &mut self.wheel[slot]);
        self.current.sort_unstable_by_key(|entry| std::cmp::Reverse(entry.key()));
        Some(())
    }

    /// The next bucket after this one that holds something, once round the wheel.
    fn next_filled(&self) -> Option<u64> {
        let start = self.bucket + 1;
        let slot = start % BUCKETS;
        let words = self.filled.len() as u64;
        for step in 0..=words {
            let word = (slot / 64 + step) % words;
            let mut bits = self.filled[word as usize];
            if step == 0 {
                bits &= !0 << (slot % 64);
            } else if step == words {
                bits &= !(!0 << (slot % 64));
            }
            if bits != 0 {
                let found = word * 64 + u64::from(bits.trailing_zeros());
                return Some(start + (found + BUCKETS - slot) % BUCKETS);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rng;

    #[test]
    fn events_come_in_order_of_time_and_then_of_arrival() {
        let (mut queue, mut rng) = (EventQueue::default(), Rng::new(1));
        let mut model: Vec<(Picos, u64)> = Vec::new();
        for number in 0..200_000u64 {
            if rng.chance(0.52) || model.is_empty() {
                let spread = *[1u64, 2000, 3_000_000, 40_000_000].get(rng.below(4) as usize).unwrap_or(&1);
                let at = queue.now() + rng.below(spread);
                queue.push(at, (at, number));
                model.push((at, number));
            } else {
                let next = *model.iter().min().unwrap();
                model.swap_remove(model.iter().position(|entry| *entry == next).unwrap());
                assert_eq!(queue.pop(), Some(next));
                assert_eq!(queue.now(), next.0);
            }
            if model.len() > 300 {
                model.sort_unstable();
                for next in model.drain(..) {
                    assert_eq!(queue.pop(), Some(next));
                }
                assert_eq!(queue.pop(), None);
            }
        }
    }
}
