use super::*;
use crate::rng::SplitMix64;

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
    assert_eq!((r.hold(una.plus(3)), r.infer(una, max).count), (None, 1), "una alone is three behind");
    assert!(r.is_lost(una) && !r.is_lost(una.plus(1)));
    r.sent(una, 1, true);
    assert_eq!((r.infer(una, max).count, r.in_flight(una, max)), (0, 39));
    r.hold(una.plus(39));
    assert_eq!(r.infer(una, max).count, 35, "all but those just before it, which may be late");
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
    assert_eq!(r.infer(una.plus(4), max).count, 0);
    assert!(!r.is_over(una.plus(4)) && r.has_lost());
    assert!(r.refused(una.plus(9)) as u32 + r.find_all() == 6 && r.is_over(una.plus(4)));
}

#[test]
fn numbers_that_end_begin_anew() {
    let (mut repairs, id, una, max) = begun(9, 20);
    let r = repairs.get(id);
    r.order.iter_mut().for_each(|order| *order += REBASE);
    r.counter += REBASE;
    r.sent(max, 4, false);
    assert!(r.counter < 4 * RING as u32);
    r.hold(max.plus(3));
    assert_eq!(r.infer(una, max.plus(4)).count, 23, "all but the newest, behind which nothing is under way");
    r.sent(una, 1, true);
    assert!(!r.is_lost(una) && r.infer(una, max.plus(4)).count == 0);
}

#[test]
fn the_pool_is_bounded() {
    let (mut repairs, ..) = begun(0, 10);
    let psn = Psn::new(0);
    assert!(repairs.open(psn, psn, Psn::new(RING as u32 + 1)).is_none());
    assert_eq!(core::iter::from_fn(|| repairs.open(psn, psn, psn)).count(), 63);
}

/// A packet of the model: number of its last transmission, whether that was a repetition, and what it is
/// taken for.
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
        let is = self.all.get(at).map_or(Is::Flying, |p| if p.is == Is::Lost { Is::Flying } else { p.is });
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

/// Random steps, in the order that chance gives them, leave the scoreboard as they leave one entry for each
/// packet.
#[test]
fn the_scoreboard_is_as_a_plain_list() {
    for seed in 1..60u64 {
        let mut rng = SplitMix64::new(seed);
        let mut below = move |n: u32| rng.below(u64::from(n)) as u32;
        let una = Psn::new(0xff_ff00 + below(512));
        let mut repairs = Repairs::default();
        repairs.make(1);
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
        8 => assert_eq!(r.infer(m.una, max).count, m.infer()),
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
