use starverbs_core::Gid;
use starverbs_core::rng::Rng;

use super::*;
use crate::negotiate::THRESHOLD;

use std::vec::Vec;

fn terms(n: u8, wish: Wish, stateful: u32) -> Terms {
    Terms { wish, stateful, threshold: THRESHOLD, gid: Gid::from_ipv4([10, 0, 0, n]), qpn: n.into() }
}

/// An end of the model: what it has begun, and what is done of it.
#[derive(Default)]
struct End {
    begun: u32,
    done: u32,
    rests: bool,
    halted: bool,
    plain: bool,
    settled_at_last: bool,
    /// Something keeps SL from going home
    busy: bool,
    /// Requests wait
    waits: bool,
}

impl Half for End {
    fn rest(&mut self) -> bool {
        self.rests = !self.plain;
        self.rests
    }
    fn resume(&mut self) {
        assert!(!self.plain, "what has gone home is StaR's no more");
        (self.rests, self.halted) = (false, false);
    }
    fn halt(&mut self) -> Option<Done> {
        self.halted |= self.rests && self.begun == self.done;
        let psn = Psn::new(self.done);
        self.halted.then_some(Done { sends: psn, recvs: psn })
    }
    fn go_home(&mut self, _: Done) -> Came {
        assert!(self.rests);
        if self.busy {
            return Came::Later;
        }
        (self.plain, self.rests) = (true, false);
        Came::Home
    }
    fn is_beginning(&self) -> bool {
        false
    }
    fn settle(&mut self) {
        (self.plain, self.rests, self.halted) = (true, false, false);
    }
    fn is_settled(&self) -> bool {
        self.settled_at_last
    }
    fn waits(&self) -> Option<Option<Nanos>> {
        self.waits.then_some(Some(10_000_000_000))
    }
}

const SL: Role = Role::Stateless;
const SF: Role = Role::Stateful;

fn said(message: Control) -> Option<Renewed> {
    Some(Renewed { round: 1, message })
}

#[test]
fn a_card_takes_back_what_it_has_room_for() {
    let auto = |stateful| terms(1, Wish::Auto, stateful);
    let most = few(THRESHOLD);
    assert_eq!((most, few(1), few(0)), (90, 1, 0));
    assert!(suits(SL, &auto(most - 1), &auto(0)) && !suits(SL, &auto(most), &auto(999)));
    assert!(suits(SF, &auto(999), &auto(0)), "it keeps it in any case");
    for (role, wish) in [(SL, Wish::Stateless), (SF, Wish::Stateful)] {
        assert!(!suits(role, &terms(1, wish, 0), &terms(2, Wish::Off, 0)));
        assert!(suits(role.other(), &terms(1, wish, 0), &auto(0)));
    }
    assert!(suits(SL, &auto(999), &terms(2, Wish::Stateless, 0)), "a program wants another role");
}

#[test]
fn who_hears_nothing_lets_nothing_rest() {
    let mut end = End::default();
    let mut round = Homing::ask(1, SL, terms(1, Wish::Auto, 0), 5);
    let mut asked = 0;
    while let Some(due) = round.deadline() {
        asked += u32::from(round.poll(due, &mut end).is_some());
        assert!(!end.rests);
    }
    assert_eq!((asked, round.outcome()), (ASKS, Some(Outcome::Stays)));
}

#[test]
fn neither_end_rests_for_long() {
    for (role, busy) in [(SL, true), (SF, false)] {
        let mut end = End { begun: 1, busy, ..End::default() };
        let mut round = Homing::asked(1, role, terms(1, Wish::Auto, 0), 100, &mut end).expect("it rests");
        let mut last = None;
        while let Some(due) = round.deadline() {
            assert!(end.rests && due <= 100 + REST);
            last = round.poll(due.max(100), &mut end);
            if let (SL, Some(_)) = (role, round.deadline()) {
                let done = Done { sends: Psn::new(0), recvs: Psn::new(0) };
                assert_eq!(round.handle(due, &Control::Halted(done), &mut end), None, "not yet");
            }
        }
        assert_eq!((last, round.outcome()), (said(Control::Stay), Some(Outcome::Stays)));
        assert!(!end.rests);
    }
}

#[test]
fn a_stateful_end_that_has_come_to_rest_waits_for_the_other_s_word() {
    let halted = || {
        let mut end = End { begun: 3, done: 3, ..End::default() };
        let mut round = Homing::asked(1, SF, terms(1, Wish::Auto, 0), 1, &mut end).expect("it rests");
        let done = Done { sends: Psn::new(3), recvs: Psn::new(3) };
        assert_eq!(round.poll(1, &mut end), said(Control::Halted(done)));
        (end, round, done)
    };
    let (mut end, mut round, done) = halted();
    for _ in 0..100 {
        let due = round.deadline().expect("it lasts");
        assert_eq!(round.poll(due, &mut end), said(Control::Halted(done)), "again");
        assert_eq!(
            round.handle(due, &Control::Resting { drained: false }, &mut end),
            said(Control::Halted(done))
        );
    }
    assert!(round.deadline().expect("it lasts") > 10 * Beginning::LOOK, "ever more seldom");
    assert!(!round.is_pressing(), "it may wait for ever");
    assert_eq!(round.handle(9, &Control::Home, &mut end), None);
    assert_eq!((round.outcome(), end.plain), (Some(Outcome::Home), true));

    let (mut end, mut round, _) = halted();
    assert_eq!(round.handle(9, &Control::Stay, &mut end), None);
    assert_eq!((round.outcome(), end.plain, end.rests), (Some(Outcome::Stays), false, false));

    let (mut end, mut round, _) = halted();
    end.settled_at_last = true;
    assert_eq!(round.poll(2, &mut end), None);
    assert_eq!(round.outcome(), Some(Outcome::Home), "a plain request says as much");

    let (mut end, mut round, _) = halted();
    end.waits = true;
    let mut now = 0;
    while let Some(due) = round.deadline() {
        assert!(round.is_pressing(), "what waits will fail");
        now = due;
        round.poll(now, &mut end);
    }
    assert!(end.plain && (10_000_000_000..15_000_000_000).contains(&now), "nobody is there: {now}");

    let (mut end, mut round, _) = halted();
    (end.halted, end.begun) = (false, 4);
    let due = round.deadline().expect("it lasts");
    assert_eq!(round.poll(due, &mut end), said(Control::Stay), "it has failed meanwhile");
}

#[test]
fn an_end_without_a_round_says_what_it_is() {
    let done = Done { sends: Psn::new(0), recvs: Psn::new(0) };
    let halted = Renewed { round: 7, message: Control::Halted(done) };
    assert_eq!(answer(&halted, true), Some(Renewed { round: 7, message: Control::Stay }));
    assert_eq!(answer(&halted, false), Some(Renewed { round: 7, message: Control::Home }));
    assert_eq!(answer(&Renewed { round: 7, message: Control::Home }, true), None);
    assert_eq!(answer(&Renewed { round: 7, message: Control::Stay }, false), None);
}

/// Whatever the wire loses, repeats and delays: both ends become the same, SL first, and neither while
/// something of the other is under way.
#[test]
fn no_wire_makes_the_ends_differ() {
    let (mut homes, mut stays) = (0, 0);
    for seed in 0..1500u64 {
        let mut rng = Rng::new([seed, 3]);
        let mut ends = [End::default(), End::default()];
        let asks = (rng.word() % 2) as usize;
        let mine = |at: usize| terms(at as u8 + 1, Wish::Auto, 3);
        let mut rounds = [None, None];
        rounds[asks] = Some(Homing::ask(1, [SL, SF][asks], mine(asks), 0));
        let mut last = [0, 0];
        last[asks] = 1;
        let (loss, late) = (rng.word() % 60, 1 + rng.word() % 60_000_000);
        let mut wire: Vec<(Nanos, usize, Renewed)> = Vec::new();
        for tick in 0..42_000u64 {
            /* in the end the wire is a good one, and all is heard */
            let over = tick.saturating_sub(40_000);
            let now = tick.min(40_000) * 50_000 + over * 5_000_000;
            let loss = if over > 0 { 0 } else { loss };
            let mut out = Vec::new();
            /* what SF executes, of both ends */
            let sf = &mut ends[1];
            if !sf.rests && !sf.plain && sf.begun - sf.done < 3 && rng.word().is_multiple_of(5) {
                sf.begun += 1;
            }
            if sf.begun != sf.done && rng.word().is_multiple_of(40) {
                sf.done += 1;
            }
            ends[0].busy = rng.word().is_multiple_of(3);
            for me in 0..2 {
                let end = &mut ends[me];
                out.extend(rounds[me].as_mut().and_then(|round| round.poll(now, end)).map(|said| (me, said)));
            }
            wire.sort_by_key(|(at, ..)| core::cmp::Reverse(*at));
            while let Some((_, to, said)) = wire.pop_if(|(at, ..)| *at <= now) {
                let end = &mut ends[to];
                if let (Control::Return { .. }, 0) = (said.message, last[to]) {
                    last[to] = 1;
                    rounds[to] = Homing::asked(1, [SL, SF][to], mine(to), now, end);
                }
                let round = rounds[to].as_mut().filter(|round| round.outcome().is_none());
                let said = match round {
                    Some(round) => round.handle(now, &said.message, end),
                    None => answer(&said, !end.plain),
                };
                out.extend(said.map(|said| (to, said)));
                let [sl, sf] = &ends;
                assert!(!sl.plain || sf.plain || sf.halted, "seed {seed}: SL is plain, and SF goes on");
                assert!(!sf.plain || sl.plain, "seed {seed}: SF is plain before SL");
            }
            for (from, said) in out {
                for _ in 0..1 + u64::from(rng.word().is_multiple_of(8)) {
                    if rng.word() % 100 >= loss {
                        wire.push((now + 10_000 + rng.word() % late, 1 - from, said));
                    }
                }
            }
        }
        let [sl, sf] = &ends;
        assert_eq!(sl.plain, sf.plain, "seed {seed}");
        assert!(!sl.rests && !sf.rests && !sf.halted, "seed {seed}");
        homes += u32::from(sl.plain);
        stays += u32::from(!sl.plain);
    }
    assert!(homes > 200 && stays > 20, "{homes} {stays}");
}
