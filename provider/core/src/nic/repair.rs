//! What a requester knows of each packet under way while some are missing (selective repeat).
//!
//! A packet is in flight, held (the peer has it, or its answer is in memory) or lost. Each transmission has a
//! number; when the peer has one, those that left at least [`LATE`] transmissions before it and are not held
//! are taken for lost, as RFC 8985 does by time. Only first transmissions prove that: what came may be the
//! first of two.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::num::NonZeroU16;

use crate::room::{Room, is_room_for};
use crate::types::Psn;

/// PSNs of which a repair knows: a power of two.
pub(crate) const RING: usize = 1024;
/// Transmissions by which a packet may be overtaken without being taken for lost.
const LATE: u32 = 3;
/// Of a number in `order`: the packet was sent again.
const AGAIN: u32 = 1 << 31;
/// Numbers end here, far below [`AGAIN`].
const REBASE: u32 = 1 << 30;

/// A QP's repair: one more than its index, so that none takes two bytes in a QP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RepairId(NonZeroU16);

impl RepairId {
    #[inline]
    fn place(self) -> usize {
        usize::from(self.0.get() - 1)
    }
}

/// Which PSNs of the ring.
type Set = super::psn_set::Set<{ RING / 64 }>;

/// The packets of one QP.
pub(crate) struct Repair {
    held: Set,
    lost: Set,
    order: [u32; RING],
    held_count: u32,
    lost_count: u32,
    /// Number of the last transmission
    counter: u32,
    /// Highest number of a first transmission that the peer has
    newest: u32,
    /// All before this were executed by the peer
    pub(crate) executed: Psn,
}

/// What became of packets that were passed.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Passed {
    /// They were in flight
    pub(crate) in_flight: u32,
    /// They had been declared lost and were not sent again
    pub(crate) lost: u32,
}

/// Packets that were declared lost at one time.
pub(crate) struct Overtaken {
    set: Set,
    pub(crate) count: u32,
}

impl Overtaken {
    /// Whether the packet at `psn`, of the range that was looked at, is one.
    pub(crate) fn has(&self, psn: Psn) -> bool {
        self.set.has(place(psn))
    }
}

#[inline]
fn place(psn: Psn) -> usize {
    psn.get() as usize % RING
}

impl Passed {
    /// These, too.
    pub(crate) fn add(&mut self, other: Passed) {
        self.in_flight += other.in_flight;
        self.lost += other.lost;
    }
}

impl Repair {
    fn empty() -> Self {
        Repair {
            held: Set::EMPTY,
            lost: Set::EMPTY,
            order: [0; RING],
            held_count: 0,
            lost_count: 0,
            counter: 0,
            newest: 0,
            executed: Psn::default(),
        }
    }

    /// Begins with `una..max` sent once, of which those from `psn` on are to be sent again.
    fn begin(&mut self, una: Psn, psn: Psn, max: Psn) {
        (self.held, self.lost) = (Set::EMPTY, Set::EMPTY);
        (self.held_count, self.lost_count) = (0, 0);
        (self.counter, self.newest, self.executed) = (0, 0, una);
        self.sent(una, max.since(una) as u32, false);
        for n in 0..max.since(psn) as u32 {
            self.lose(psn.plus(n));
        }
    }

    /// `packets` from `psn` on are sent.
    pub(crate) fn sent(&mut self, psn: Psn, packets: u32, again: bool) {
        if self.counter > REBASE {
            self.rebase();
        }
        for n in 0..packets.min(RING as u32) {
            let at = place(psn.plus(n));
            self.counter += 1;
            self.order[at] = self.counter | if again { AGAIN } else { 0 };
            if self.lost.drop(at) {
                self.lost_count -= 1;
            }
        }
    }

    /// Numbers begin anew: a repair on a wire that loses all the time may never end. What lies far back stays
    /// oldest.
    #[cold]
    fn rebase(&mut self) {
        let base = self.counter - 2 * RING as u32;
        for order in &mut self.order {
            *order = *order & AGAIN | (*order & !AGAIN).saturating_sub(base);
        }
        self.newest = self.newest.saturating_sub(base);
        self.counter -= base;
    }

    /// The peer has the packet at `psn`. Gives what it was taken for before; `None`: that is known.
    pub(crate) fn hold(&mut self, psn: Psn) -> Option<Passed> {
        let at = place(psn);
        if self.held.has(at) {
            return None;
        }
        self.held.put(at);
        self.held_count += 1;
        self.note_order(at);
        let lost = self.lost.drop(at);
        self.lost_count -= u32::from(lost);
        Some(Passed { in_flight: u32::from(!lost), lost: u32::from(lost) })
    }

    fn note_order(&mut self, at: usize) {
        let order = self.order[at];
        if order & AGAIN == 0 {
            self.newest = self.newest.max(order);
        }
    }

    /// The packet at `psn` is lost. False: it is held, or known to be lost.
    pub(crate) fn lose(&mut self, psn: Psn) -> bool {
        let at = place(psn);
        let news = !self.held.has(at) && !self.lost.has(at);
        if news {
            self.lost.put(at);
            self.lost_count += 1;
        }
        news
    }

    /// The peer does not have the packet at `psn` after all. Gives whether that is so of one that was in
    /// flight.
    pub(crate) fn refused(&mut self, psn: Psn) -> bool {
        let was_held = self.held.drop(place(psn));
        self.held_count -= u32::from(was_held);
        self.lose(psn) && !was_held
    }

    /// Whether the peer has the packet at `psn`.
    #[inline]
    pub(crate) fn is_held(&self, psn: Psn) -> bool {
        self.held.has(place(psn))
    }

    /// Whether the packet at `psn` is to be sent again.
    #[inline]
    pub(crate) fn is_lost(&self, psn: Psn) -> bool {
        self.lost.has(place(psn))
    }

    /// Packets between `una` and `max` that are in flight.
    #[inline]
    pub(crate) fn in_flight(&self, una: Psn, max: Psn) -> u32 {
        (max.since(una) as u32).saturating_sub(self.held_count + self.lost_count)
    }

    /// Whether nothing is missing, with all before `una` acknowledged.
    pub(crate) fn is_over(&self, una: Psn) -> bool {
        self.held_count == 0 && self.lost_count == 0 && !una.before(self.executed)
    }

    /// The request for `packets` answers from `psn` on is with the peer: they are due a round trip from now,
    /// and requests that left before it were overtaken.
    pub(crate) fn expect(&mut self, psn: Psn, packets: u32) {
        self.note_order(place(psn));
        for n in 0..packets.min(RING as u32) {
            let at = place(psn.plus(n));
            self.order[at] = self.counter | AGAIN;
            if self.lost.drop(at) {
                self.lost_count -= 1;
            }
        }
    }

    /// Packets to be sent again.
    pub(crate) fn lost_count(&self) -> u32 {
        self.lost_count
    }

    /// Whether something is to be sent again.
    pub(crate) fn has_lost(&self) -> bool {
        self.lost_count > 0
    }

    /// `packets` from `psn` on are acknowledged and forgotten.
    pub(crate) fn pass(&mut self, psn: Psn, packets: u32) -> Passed {
        let mut passed = Passed::default();
        for n in 0..packets.min(RING as u32) {
            let at = place(psn.plus(n));
            self.note_order(at);
            match (self.held.drop(at), self.lost.drop(at)) {
                (true, _) => self.held_count -= 1,
                (false, true) => {
                    self.lost_count -= 1;
                    passed.lost += 1;
                }
                (false, false) => passed.in_flight += 1,
            }
        }
        passed
    }

    /// Declares lost what was overtaken, in `una..max`. Gives which those are.
    pub(crate) fn infer(&mut self, una: Psn, max: Psn) -> Overtaken {
        /* nothing is under way behind the newest: nothing can come that overtook more */
        let late = if self.newest == self.counter { 1 } else { LATE };
        let mut overtaken = Overtaken { set: Set::EMPTY, count: 0 };
        for n in 0..max.since(una).max(0) as u32 {
            let psn = una.plus(n);
            if (self.order[place(psn)] & !AGAIN) + late <= self.newest && self.lose(psn) {
                overtaken.set.put(place(psn));
                overtaken.count += 1;
            }
        }
        overtaken
    }

    /// All that is not held between `una` and `max` is lost, `una` in any case. Gives how many were in
    /// flight.
    pub(crate) fn lose_all(&mut self, una: Psn, max: Psn) -> u32 {
        let first = u32::from(self.refused(una));
        (1..max.since(una) as u32).filter(|n| self.lose(una.plus(*n))).count() as u32 + first
    }

    /// Nothing is lost after all. Gives how many were.
    pub(crate) fn find_all(&mut self) -> u32 {
        self.lost = Set::EMPTY;
        core::mem::take(&mut self.lost_count)
    }
}

/// The repairs of a card, made once.
#[derive(Default)]
pub(crate) struct Repairs {
    all: Vec<Box<Repair>>,
    free: Vec<RepairId>,
}

impl Repairs {
    /// Makes the pool, once, for so many QPs that repair at a time. False: there is no memory for it.
    pub(crate) fn make(&mut self, repairs: u16) -> bool {
        if self.all.is_empty() {
            if !is_room_for(usize::from(repairs) * (size_of::<Repair>() + 64)) {
                return false;
            }
            self.all = (0..repairs).map(|_| Box::new(Repair::empty())).collect();
            self.free = (1..=repairs).rev().filter_map(NonZeroU16::new).map(RepairId).collect();
        }
        true
    }

    /// Begins a repair, see [`Repair::begin`]; `None`: there are as many as may be, or too much is under way.
    pub(crate) fn open(&mut self, una: Psn, psn: Psn, max: Psn) -> Option<RepairId> {
        if max.since(una) as usize > RING {
            return None;
        }
        let id = self.free.pop()?;
        self.all[id.place()].begin(una, psn, max);
        Some(id)
    }

    /// Ends it.
    pub(crate) fn close(&mut self, id: RepairId) {
        self.free.push_in_room(id);
    }

    /// A repair under way.
    #[inline]
    pub(crate) fn get(&mut self, id: RepairId) -> &mut Repair {
        &mut self.all[id.place()]
    }
}

#[cfg(test)]
#[path = "repair_tests.rs"]
mod tests;
