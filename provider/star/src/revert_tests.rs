use starverbs_core::Gid;
use starverbs_core::rng::Rng;

use super::*;
use crate::negotiate::THRESHOLD;

use std::vec::Vec;

fn terms(n: u8, preference: Preference, stateful: u32) -> Terms {
    Terms { preference, stateful, threshold: THRESHOLD, gid: Gid::from_ipv4([10, 0, 0, n]), qpn: n.into() }
}

/// An end of the model: what it has begun, and what is done of it.
#[derive(Default)]
struct End {
    begun: u32,
    done: u32,
    quiescing: bool,
    quiesced: bool,
    plain: bool,
    settled: bool,
    /// Something keeps SL from reverting
    busy: bool,
    /// Requests wait
    waits: bool,
}

impl StarEnd for End {
    fn quiesce(&mut self) -> bool {
        self.quiescing = !self.plain;
        self.quiescing
    }
    fn resume(&mut self) {
        assert!(!self.plain, "what has reverted is StaR's no more");
        (self.quiescing, self.quiesced) = (false, false);
    }
    fn quiesce_point(&mut self) -> Option<QuiescePoint> {
        self.quiesced |= self.quiescing && self.begun == self.done;
        let psn = Psn::new(self.done);
        self.quiesced.then_some(QuiescePoint { sends: psn, recvs: psn })
    }
    fn revert(&mut self, _: QuiescePoint) -> RevertStep {
        assert!(self.quiescing);
        if self.busy {
            return RevertStep::Pending;
        }
        (self.plain, self.quiescing) = (true, false);
        RevertStep::Reverted
    }
    fn is_beginning(&self) -> bool {
        false
    }
    fn settle(&mut self) {
        (self.plain, self.quiescing, self.quiesced) = (true, false, false);
    }
    fn is_settled(&self) -> bool {
        self.settled
    }
    fn waits(&self) -> Option<Option<Nanos>> {
        self.waits.then_some(Some(10_000_000_000))
    }
}

const SL: Role = Role::Stateless;
const SF: Role = Role::Stateful;

fn of_round(message: Control) -> Option<RoundMessage> {
    Some(RoundMessage { round: 1, message })
}

#[test]
fn a_card_takes_back_what_it_has_room_for() {
    let auto = |stateful| terms(1, Preference::Auto, stateful);
    let most = revert_threshold(THRESHOLD);
    assert_eq!((most, revert_threshold(1), revert_threshold(0)), (90, 1, 0));
    assert!(suits(SL, &auto(most - 1), &auto(0)) && !suits(SL, &auto(most), &auto(999)));
    assert!(suits(SF, &auto(999), &auto(0)), "it keeps it in any case");
    for (role, preference) in [(SL, Preference::Stateless), (SF, Preference::Stateful)] {
        assert!(!suits(role, &terms(1, preference, 0), &terms(2, Preference::Off, 0)));
        assert!(suits(role.other(), &terms(1, preference, 0), &auto(0)));
    }
    assert!(suits(SL, &auto(999), &terms(2, Preference::Stateless, 0)), "a program wants another role");
}

#[test]
fn without_an_answer_nothing_is_quiesced() {
    let mut end = End::default();
    let mut round = Reversion::ask(1, SL, terms(1, Preference::Auto, 0), 5);
    let mut asked = 0;
    while let Some(due) = round.deadline() {
        asked += u32::from(round.poll(due, &mut end).is_some());
        assert!(!end.quiescing);
    }
    assert_eq!((asked, round.outcome()), (ASKS, Some(RevertOutcome::Stays)));
}

#[test]
fn neither_end_waits_for_long() {
    for (role, busy) in [(SL, true), (SF, false)] {
        let mut end = End { begun: 1, busy, ..End::default() };
        let mut round =
            Reversion::asked(1, role, terms(1, Preference::Auto, 0), 100, &mut end).expect("it quiesces");
        let mut last = None;
        while let Some(due) = round.deadline() {
            assert!(end.quiescing && due <= 100 + MAX_QUIESCE);
            last = round.poll(due.max(100), &mut end);
            if let (SL, Some(_)) = (role, round.deadline()) {
                let point = QuiescePoint { sends: Psn::new(0), recvs: Psn::new(0) };
                assert_eq!(round.handle(due, &Control::Quiesced(point), &mut end), None, "not yet");
            }
        }
        assert_eq!((last, round.outcome()), (of_round(Control::Stay), Some(RevertOutcome::Stays)));
        assert!(!end.quiescing);
    }
}

#[test]
fn a_quiesced_stateful_end_waits_for_the_other() {
    let quiesced = || {
        let mut end = End { begun: 3, done: 3, ..End::default() };
        let mut round =
            Reversion::asked(1, SF, terms(1, Preference::Auto, 0), 1, &mut end).expect("it quiesces");
        let point = QuiescePoint { sends: Psn::new(3), recvs: Psn::new(3) };
        assert_eq!(round.poll(1, &mut end), of_round(Control::Quiesced(point)));
        (end, round, point)
    };
    let (mut end, mut round, point) = quiesced();
    for _ in 0..100 {
        let due = round.deadline().expect("it lasts");
        assert_eq!(round.poll(due, &mut end), of_round(Control::Quiesced(point)), "again");
        assert_eq!(
            round.handle(due, &Control::Quiescing { drained: false }, &mut end),
            of_round(Control::Quiesced(point))
        );
    }
    assert!(round.deadline().expect("it lasts") > 10 * Beginning::LOOK, "ever more seldom");
    assert!(!round.is_busy(), "it may wait for ever");
    assert_eq!(round.handle(9, &Control::Reverted, &mut end), None);
    assert_eq!((round.outcome(), end.plain), (Some(RevertOutcome::Reverted), true));

    let (mut end, mut round, _) = quiesced();
    assert_eq!(round.handle(9, &Control::Stay, &mut end), None);
    assert_eq!((round.outcome(), end.plain, end.quiescing), (Some(RevertOutcome::Stays), false, false));

    let (mut end, mut round, _) = quiesced();
    end.settled = true;
    assert_eq!(round.poll(2, &mut end), None);
    assert_eq!(round.outcome(), Some(RevertOutcome::Reverted), "a plain request says as much");

    let (mut end, mut round, _) = quiesced();
    end.waits = true;
    let mut now = 0;
    while let Some(due) = round.deadline() {
        assert!(round.is_busy(), "what waits will fail");
        now = due;
        round.poll(now, &mut end);
    }
    assert!(end.plain && (10_000_000_000..15_000_000_000).contains(&now), "nobody is there: {now}");

    let (mut end, mut round, _) = quiesced();
    (end.quiesced, end.begun) = (false, 4);
    let due = round.deadline().expect("it lasts");
    assert_eq!(round.poll(due, &mut end), of_round(Control::Stay), "it has failed meanwhile");
}

#[test]
fn an_end_without_a_round_answers_what_it_is() {
    let point = QuiescePoint { sends: Psn::new(0), recvs: Psn::new(0) };
    let quiesced = RoundMessage { round: 7, message: Control::Quiesced(point) };
    assert_eq!(answer(&quiesced, true), Some(RoundMessage { round: 7, message: Control::Stay }));
    assert_eq!(answer(&quiesced, false), Some(RoundMessage { round: 7, message: Control::Reverted }));
    assert_eq!(answer(&RoundMessage { round: 7, message: Control::Reverted }, true), None);
    assert_eq!(answer(&RoundMessage { round: 7, message: Control::Stay }, false), None);
}

/// Whatever the wire loses, repeats and delays: both ends become the same, SL first, and neither while
/// something of the other is under way.
#[test]
fn no_wire_makes_the_ends_differ() {
    let (mut reverts, mut stays) = (0, 0);
    for seed in 0..1500u64 {
        let mut rng = Rng::new([seed, 3]);
        let mut ends = [End::default(), End::default()];
        let asks = (rng.word() % 2) as usize;
        let mine = |at: usize| terms(at as u8 + 1, Preference::Auto, 3);
        let mut rounds = [None, None];
        rounds[asks] = Some(Reversion::ask(1, [SL, SF][asks], mine(asks), 0));
        let mut last = [0, 0];
        last[asks] = 1;
        let (loss, late) = (rng.word() % 60, 1 + rng.word() % 60_000_000);
        let mut wire: Vec<(Nanos, usize, RoundMessage)> = Vec::new();
        for tick in 0..42_000u64 {
            /* in the end the wire is a good one, and all arrives */
            let over = tick.saturating_sub(40_000);
            let now = tick.min(40_000) * 50_000 + over * 5_000_000;
            let loss = if over > 0 { 0 } else { loss };
            let mut out = Vec::new();
            /* what SF executes, of both ends */
            let sf = &mut ends[1];
            if !sf.quiescing && !sf.plain && sf.begun - sf.done < 3 && rng.word().is_multiple_of(5) {
                sf.begun += 1;
            }
            if sf.begun != sf.done && rng.word().is_multiple_of(40) {
                sf.done += 1;
            }
            ends[0].busy = rng.word().is_multiple_of(3);
            for me in 0..2 {
                let end = &mut ends[me];
                out.extend(
                    rounds[me].as_mut().and_then(|round| round.poll(now, end)).map(|message| (me, message)),
                );
            }
            wire.sort_by_key(|(at, ..)| core::cmp::Reverse(*at));
            while let Some((_, to, message)) = wire.pop_if(|(at, ..)| *at <= now) {
                let end = &mut ends[to];
                if let (Control::Revert { .. }, 0) = (message.message, last[to]) {
                    last[to] = 1;
                    rounds[to] = Reversion::asked(1, [SL, SF][to], mine(to), now, end);
                }
                let round = rounds[to].as_mut().filter(|round| round.outcome().is_none());
                let reply = match round {
                    Some(round) => round.handle(now, &message.message, end),
                    None => answer(&message, !end.plain),
                };
                out.extend(reply.map(|message| (to, message)));
                let [sl, sf] = &ends;
                assert!(!sl.plain || sf.plain || sf.quiesced, "seed {seed}: SL is plain, and SF goes on");
                assert!(!sf.plain || sl.plain, "seed {seed}: SF is plain before SL");
            }
            for (from, message) in out {
                for _ in 0..1 + u64::from(rng.word().is_multiple_of(8)) {
                    if rng.word() % 100 >= loss {
                        wire.push((now + 10_000 + rng.word() % late, 1 - from, message));
                    }
                }
            }
        }
        let [sl, sf] = &ends;
        assert_eq!(sl.plain, sf.plain, "seed {seed}");
        assert!(!sl.quiescing && !sf.quiescing && !sf.quiesced, "seed {seed}");
        reverts += u32::from(sl.plain);
        stays += u32::from(!sl.plain);
    }
    assert!(reverts > 200 && stays > 20, "{reverts} {stays}");
}
