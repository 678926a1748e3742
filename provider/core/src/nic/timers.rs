//! Deadlines of a card's QPs, or of whatever joins: one of each, the earliest first.
//!
//! A binary heap that knows where each one's entry stands, so that an earlier deadline moves the entry
//! that is there instead of adding one. Memory for an entry is taken when somebody joins: the heap cannot
//! grow while packets move.

use alloc::vec::Vec;

use crate::error::NicError;
use crate::room::Room;
use crate::types::Nanos;

/// A place among the timers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TimerId(u32);

impl TimerId {
    /// A number that nobody else has who joined the same timers, and small.
    pub fn index(self) -> u32 {
        self.0
    }
}

/// Deadlines that are no crowd: as long as those who have them all lie in the CPU's caches.
const CROWD: usize = 64;
/// Not in the heap.
const OFF: u32 = u32::MAX;

/// A deadline, whose it is, and its place's number, in one number: which entry comes first is one comparison.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct TimerEntry(u128);

impl TimerEntry {
    fn new(at: Nanos, who: u32, id: u32) -> Self {
        TimerEntry(u128::from(at) << 64 | u128::from(who) << 32 | u128::from(id))
    }
    fn at(self) -> Nanos {
        (self.0 >> 64) as Nanos
    }
    fn who(self) -> u32 {
        (self.0 >> 32) as u32
    }
    fn id(self) -> u32 {
        self.0 as u32
    }
}

/// The deadlines.
#[derive(Default)]
pub struct Timers {
    heap: Vec<TimerEntry>,
    /// By id: where in the heap
    places: Vec<u32>,
    /// Ids that nobody has
    free: Vec<u32>,
}

impl Timers {
    /// Somebody joins, without a deadline. `Exhausted`: no memory.
    pub fn join(&mut self) -> Result<TimerId, NicError> {
        if let Some(id) = self.free.pop() {
            return Ok(TimerId(id));
        }
        let places = self.places.len() + 1;
        self.places.make_room(places)?;
        self.heap.make_room(places)?;
        self.free.make_room(places)?;
        self.places.push_in_room(OFF);
        Ok(TimerId(self.places.len() as u32 - 1))
    }

    /// Who had this place leaves, and the deadline with it.
    pub fn leave(&mut self, id: TimerId) {
        self.disarm(id);
        self.free.push_in_room(id.0);
    }

    /// There is no deadline, whether there was or not.
    pub fn disarm(&mut self, id: TimerId) {
        self.take(self.places[id.0 as usize] as usize);
    }

    /// The deadline is at `at`, unless it is earlier already; `who` gets it when it comes.
    pub fn arm(&mut self, id: TimerId, at: Nanos, who: u32) {
        let mut place = self.places[id.0 as usize] as usize;
        let mut entry = TimerEntry::new(at, who, id.0);
        if let Some(before) = self.heap.get(place) {
            if before.at() <= at {
                return;
            }
            entry = TimerEntry::new(at, before.who(), id.0);
        } else {
            place = self.heap.len();
            self.heap.push_in_room(entry);
        }
        self.up(place, entry);
    }

    /// The next one whose deadline has come, and who has none afterwards.
    pub fn pop_due(&mut self, now: Nanos) -> Option<u32> {
        let first = *self.heap.first().filter(|first| first.at() <= now)?;
        self.take(0);
        Some(first.who())
    }

    /// Whether there are so many deadlines that one which means nothing any more is better taken out at once.
    #[inline]
    pub fn is_crowded(&self) -> bool {
        self.heap.len() > CROWD
    }

    /// The earliest deadline.
    pub fn next(&self) -> Option<Nanos> {
        self.heap.first().map(|first| first.at())
    }

    /// Takes an entry out; the last one fills the gap.
    fn take(&mut self, place: usize) {
        let Some(gone) = self.heap.get(place).copied() else { return };
        self.places[gone.id() as usize] = OFF;
        let last = self.heap.pop().filter(|_| place < self.heap.len());
        let Some(last) = last else { return };
        if place > 0 && last < self.heap[(place - 1) / 2] {
            self.up(place, last);
        } else {
            self.down(place, last);
        }
    }

    fn put(&mut self, place: usize, entry: TimerEntry) {
        self.heap[place] = entry;
        self.places[entry.id() as usize] = place as u32;
    }

    /// Puts `entry` at `place`, or before those above that it precedes.
    fn up(&mut self, mut place: usize, entry: TimerEntry) {
        while place > 0 {
            let parent = (place - 1) / 2;
            let above = self.heap[parent];
            if above <= entry {
                break;
            }
            self.put(place, above);
            place = parent;
        }
        self.put(place, entry);
    }

    /// Puts `entry` at `place`, or behind those below that precede it.
    fn down(&mut self, mut place: usize, entry: TimerEntry) {
        while let Some(&left) = self.heap.get(2 * place + 1) {
            let right = self.heap.get(2 * place + 2).copied().filter(|right| *right < left);
            let (least, child) = right.map_or((left, 2 * place + 1), |right| (right, 2 * place + 2));
            if entry <= least {
                break;
            }
            self.put(place, least);
            place = child;
        }
        self.put(place, entry);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn an_earlier_deadline_moves_the_entry_and_a_later_one_waits() {
        let mut timers = Timers::default();
        let id = timers.join().unwrap();
        for at in [500, 400, 450, 300, 900] {
            timers.arm(id, at, 7);
        }
        assert_eq!((timers.heap.len(), timers.next()), (1, Some(300)));
        assert_eq!(
            (timers.pop_due(299), timers.pop_due(300), timers.pop_due(u64::MAX)),
            (None, Some(7), None)
        );
    }

    /// Against a plain map, with as many changes as there may be, in the memory that was there at first.
    #[test]
    fn it_is_a_queue_by_time_in_the_same_memory_for_ever() {
        let mut timers = Timers::default();
        let ids: Vec<TimerId> = (0..50).map(|_| timers.join().unwrap()).collect();
        let room = (timers.heap.capacity(), timers.free.capacity(), timers.places.capacity());
        let mut plain: BTreeMap<u32, Nanos> = BTreeMap::new();
        let (mut rng, mut now) = (1u64, 0);
        for _ in 0..100_000 {
            rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (who, what) = ((rng >> 33) as usize % ids.len(), (rng >> 60) as u32);
            let qpn = who as u32;
            match what {
                0 => {
                    timers.leave(ids[who]);
                    assert_eq!(timers.join(), Ok(ids[who]), "the place that is free");
                    plain.remove(&qpn);
                }
                1 => {
                    timers.disarm(ids[who]);
                    plain.remove(&qpn);
                }
                2..6 => {
                    now += (rng >> 40) % 50;
                    let due = plain.iter().map(|(qpn, at)| (*at, *qpn)).min().filter(|(at, _)| *at <= now);
                    assert_eq!(timers.pop_due(now), due.map(|(_, qpn)| qpn));
                    due.map(|(_, qpn)| plain.remove(&qpn));
                }
                _ => {
                    let at = now + (rng >> 40) % 1000;
                    timers.arm(ids[who], at, qpn);
                    let entry = plain.entry(qpn).or_insert(at);
                    *entry = (*entry).min(at);
                }
            }
            assert_eq!(timers.next(), plain.values().min().copied());
        }
        assert_eq!(room, (timers.heap.capacity(), timers.free.capacity(), timers.places.capacity()));
    }
}
