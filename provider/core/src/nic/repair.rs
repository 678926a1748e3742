//! What a requester knows of each packet under way while some are missing (selective repeat).
//!
//! A packet is in flight, held (the peer has it, or its answer is in memory) or lost. Each transmission has a number; when the
//! peer has one, those that left at least [`LATE`] transmissions before it and are not held are taken for lost, as RFC 8985
//! does by time. Only first transmissions prove that: what came may be the first of two.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::num::NonZeroU16;

use crate::room::Room;
use crate::types::Psn;

/// PSNs of which a repair knows: a power of two.
pub(crate) const RING: usize = 1024;
/// Transmissions by which a packet may be overtaken without being taken for lost.
const LATE: u32 = 3;
/// Of a number in `order`: the packet was sent again.
const AGAIN: u32 = 1 << 31;

/// A QP's repair: one more than its place, so that a QP without one says so in two bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RepairId(NonZeroU16);

impl RepairId {
    #[inline]
    fn place(self) -> usize {
        usize::from(self.0.get() - 1)
    }
}

/// Which PSNs of a ring.
#[derive(Clone, Copy)]
struct Set([u64; RING / 64]);

impl Set {
    const EMPTY: Set = Set([0; RING / 64]);
    #[inline]
    fn has(&self, at: usize) -> bool {
        self.0[at / 64] >> (at % 64) & 1 == 1
    }
    #[inline]
    fn put(&mut self, at: usize) {
        self.0[at / 64] |= 1 << (at % 64);
    }
    /// Gives whether it was in.
    #[inline]
    fn drop(&mut self, at: usize) -> bool {
        let was = self.has(at);
        self.0[at / 64] &= !(1 << (at % 64));
        was
    }
}

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
        for n in 0..packets.min(RING as u32) {
            let at = place(psn.plus(n));
            self.counter += 1;
            self.order[at] = self.counter | if again { AGAIN } else { 0 };
            if self.lost.drop(at) {
                self.lost_count -= 1;
            }
        }
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

    /// The peer does not have the packet at `psn` after all. Gives whether that is so of one that was in flight.
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

    /// The request for `packets` answers from `psn` on is with the peer: they are due a round trip from now, and requests that
    /// left before it were overtaken.
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

    /// Declares lost what was overtaken, in `una..max`. Gives how many.
    pub(crate) fn infer(&mut self, una: Psn, max: Psn) -> u32 {
        /* nothing is under way behind the newest: nothing can come that overtook more */
        let late = if self.newest == self.counter { 1 } else { LATE };
        let mut count = 0;
        for n in 0..max.since(una).max(0) as u32 {
            let psn = una.plus(n);
            if (self.order[place(psn)] & !AGAIN) + late <= self.newest {
                count += u32::from(self.lose(psn));
            }
        }
        count
    }

    /// All that is not held between `una` and `max` is lost, `una` in any case. Gives how many were in flight.
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
    /// Makes the pool, once, for so many QPs that repair at a time.
    pub(crate) fn make(&mut self, repairs: u16) {
        if self.all.is_empty() {
            self.all = (0..repairs).map(|_| Box::new(Repair::empty())).collect();
            self.free = (1..=repairs).rev().filter_map(NonZeroU16::new).map(RepairId).collect();
        }
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
mod tests {
    use super::*;

    fn begun(una: u32, packets: u32) -> (Repairs, RepairId, Psn, Psn) {
        let mut repairs = Repairs::default();
        repairs.make(64);
        let (una, max) = (Psn::new(una), Psn::new(una + packets));
        let id = repairs.open(una, max, max).expect("a fresh pool");
        (repairs, id, una, max)
    }

    #[test]
    fn what_was_overtaken_is_lost() {
        let (mut repairs, id, una, max) = begun(0xff_fff0, 40);
        let r = repairs.get(id);
        assert_eq!(r.hold(una.plus(3)), Some(Passed { in_flight: 1, lost: 0 }));
        assert_eq!((r.hold(una.plus(3)), r.infer(una, max)), (None, 1), "una alone is three behind");
        assert!(r.is_lost(una) && !r.is_lost(una.plus(1)));
        r.sent(una, 1, true);
        assert_eq!((r.infer(una, max), r.in_flight(una, max)), (0, 39));
        r.hold(una.plus(39));
        assert_eq!(r.infer(una, max), 35, "all but those just before it, which may be late");
        r.sent(una.plus(1), 1, true);
        assert_eq!(r.pass(una, 2), Passed { in_flight: 2, lost: 0 });
        assert_eq!(r.pass(una.plus(2), 2), Passed { in_flight: 0, lost: 1 });
        assert_eq!((r.find_all(), r.in_flight(una.plus(4), max)), (33, 35));
    }

    #[test]
    fn what_comes_again_proves_nothing_of_the_second_sending() {
        let (mut repairs, id, una, max) = begun(5, 10);
        let r = repairs.get(id);
        assert_eq!(r.lose_all(una, max), 10);
        r.sent(una, 4, true);
        assert_eq!(r.pass(una, 4), Passed { in_flight: 4, lost: 0 });
        assert_eq!(r.infer(una.plus(4), max), 0);
        assert!(!r.is_over(una.plus(4)) && r.has_lost());
        assert!(r.refused(una.plus(9)) as u32 + r.find_all() == 6 && r.is_over(una.plus(4)));
    }

    #[test]
    fn the_pool_is_bounded() {
        let (mut repairs, ..) = begun(0, 10);
        let psn = Psn::new(0);
        assert!(repairs.open(psn, psn, Psn::new(RING as u32 + 1)).is_none());
        assert_eq!(core::iter::from_fn(|| repairs.open(psn, psn, psn)).count(), 63);
    }

    /// A packet of the model: number of its last transmission, whether that was a repetition, and what it is taken for.
    #[derive(Clone, Copy)]
    struct Plain {
        order: u32,
        again: bool,
        is: Is,
    }

    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Is {
        Flying,
        Held,
        Lost,
    }

    /// The model: what is between the oldest and the newest packet, one entry each.
    struct Model {
        una: Psn,
        all: alloc::collections::VecDeque<Plain>,
        counter: u32,
        newest: u32,
    }

    impl Model {
        fn send(&mut self, at: usize, again: bool) {
            self.counter += 1;
            let is =
                self.all.get(at).map_or(Is::Flying, |p| if p.is == Is::Lost { Is::Flying } else { p.is });
            let plain = Plain { order: self.counter, again, is };
            match self.all.get_mut(at) {
                Some(place) => *place = plain,
                None => self.all.push_back(plain),
            }
        }

        fn prove(&mut self, at: usize) {
            if !self.all[at].again {
                self.newest = self.newest.max(self.all[at].order);
            }
        }

        fn infer(&mut self) -> u32 {
            let late = if self.newest == self.counter { 1 } else { LATE };
            let newest = self.newest;
            let overtaken = |p: &&mut Plain| p.is == Is::Flying && p.order + late <= newest;
            self.all.iter_mut().filter(overtaken).map(|p| p.is = Is::Lost).count() as u32
        }

        fn count(&self, is: Is) -> u32 {
            self.all.iter().filter(|p| p.is == is).count() as u32
        }

        fn agrees(&self, r: &Repair) {
            let max = self.una.plus(self.all.len() as u32);
            assert_eq!(r.in_flight(self.una, max), self.count(Is::Flying));
            assert_eq!((r.lost_count(), r.has_lost()), (self.count(Is::Lost), self.count(Is::Lost) > 0));
            assert_eq!(r.is_over(self.una), self.count(Is::Flying) as usize == self.all.len());
            for (n, p) in self.all.iter().enumerate() {
                let psn = self.una.plus(n as u32);
                assert_eq!((r.is_held(psn), r.is_lost(psn)), (p.is == Is::Held, p.is == Is::Lost), "{n}");
            }
        }
    }

    /// Random steps, in the order that chance gives them, leave the scoreboard as they leave one entry for each packet.
    #[test]
    fn the_scoreboard_is_as_a_plain_list() {
        for seed in 1..60u64 {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut below = move |n: u32| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 33) as u32 % n.max(1)
            };
            let una = Psn::new(0xff_ff00 + below(512));
            let mut repairs = Repairs::default();
            repairs.make(64);
            let (sent, behind) = (1 + below(60), below(30));
            let max = una.plus(sent);
            let id = repairs.open(una, una.plus(sent.saturating_sub(behind)), max).expect("a fresh pool");
            let r = repairs.get(id);
            let mut m = Model { una, all: Default::default(), counter: 0, newest: 0 };
            (0..sent as usize).for_each(|at| m.send(at, false));
            (sent.saturating_sub(behind)..sent).for_each(|at| m.all[at as usize].is = Is::Lost);
            for _ in 0..2_000 {
                m.agrees(r);
                step(r, &mut m, &mut below);
            }
        }
    }

    fn step(r: &mut Repair, m: &mut Model, below: &mut impl FnMut(u32) -> u32) {
        let len = m.all.len() as u32;
        let max = m.una.plus(len);
        let at = below(len);
        let psn = m.una.plus(at);
        let some = 1 + below(6).min(len.saturating_sub(at).saturating_sub(1));
        let is = m.all.get(at as usize).map(|p| p.is);
        match below(10) {
            0 | 1 if (len as usize) < RING - 8 => {
                let n = 1 + below(8);
                r.sent(max, n, false);
                (len..len + n).for_each(|at| m.send(at as usize, false));
            }
            _ if len == 0 => {}
            2 if is == Some(Is::Lost) => {
                r.sent(psn, 1, true);
                m.send(at as usize, true);
            }
            3 | 4 => {
                let news = r.hold(psn);
                let flew = Passed {
                    in_flight: u32::from(is == Some(Is::Flying)),
                    lost: u32::from(is == Some(Is::Lost)),
                };
                assert_eq!(news, (is != Some(Is::Held)).then_some(flew));
                if news.is_some() {
                    m.prove(at as usize);
                    m.all[at as usize].is = Is::Held;
                }
            }
            5 => {
                assert_eq!(r.refused(psn), is == Some(Is::Flying));
                m.all[at as usize].is = Is::Lost;
            }
            6 => {
                r.expect(psn, some);
                m.prove(at as usize);
                for p in m.all.range_mut(at as usize..(at + some) as usize) {
                    (p.order, p.again) = (m.counter, true);
                    p.is = if p.is == Is::Lost { Is::Flying } else { p.is };
                }
            }
            7 => {
                let n = below(len.min(12) + 1);
                let mut passed = Passed::default();
                for at in 0..n as usize {
                    m.prove(at);
                    passed.in_flight += u32::from(m.all[at].is == Is::Flying);
                    passed.lost += u32::from(m.all[at].is == Is::Lost);
                }
                m.all.drain(..n as usize);
                assert_eq!(r.pass(m.una, n), passed);
                m.una = m.una.plus(n);
            }
            8 => assert_eq!(r.infer(m.una, max), m.infer()),
            _ if below(20) == 0 => {
                let flying = m.count(Is::Flying);
                assert_eq!(r.lose_all(m.una, max), flying);
                m.all[0].is = Is::Lost;
                m.all.iter_mut().filter(|p| p.is == Is::Flying).for_each(|p| p.is = Is::Lost);
            }
            _ if below(20) == 0 => {
                assert_eq!(r.find_all(), m.count(Is::Lost));
                m.all.iter_mut().filter(|p| p.is == Is::Lost).for_each(|p| p.is = Is::Flying);
            }
            _ => {}
        }
    }
}
