use super::*;
use crate::negotiate::{Beginning, THRESHOLD};

#[path = "round_world_tests.rs"]
mod world;

const BOOT: u64 = 7;
const PORTS: [u16; 2] = [4793, 4794];
const SL: Role = Role::Stateless;
const SF: Role = Role::Stateful;
/// How long what waits bears a silent peer, ns.
const PATIENCE: Nanos = 10_000_000_000;

fn terms(preference: Preference, stateful: u32) -> Terms {
    Terms { preference, stateful, threshold: THRESHOLD, ports: PORTS, boot: BOOT }
}

fn star(role: Role) -> Outcome {
    Outcome::Star { role, boot: BOOT, ports: PORTS }
}

fn auto(stateful: u32) -> Terms {
    terms(Preference::Auto, stateful)
}

/// An end of the model: what it has begun of its own requests, and what is done of them.
#[derive(Default)]
struct End {
    role: Option<Role>,
    posted: u32,
    begun: u32,
    done: u32,
    /// Requests of the peer that were executed
    received: u32,
    /// SF: requests of SL that it has begun
    begun_of_peer: u32,
    /// SF: its peer's Setup has come
    runs: bool,
    quiescing: bool,
    held: bool,
    /// Something keeps SL from changing
    busy: bool,
    no_memory: bool,
}

impl End {
    fn has_nothing_under_way(&self) -> bool {
        self.begun == self.done && (!self.runs || self.begun_of_peer == self.received)
    }

    fn runs_plain(&self) -> bool {
        self.role.is_none() && !self.held
    }

    /// An SF that executes requests.
    fn runs_star(&self) -> bool {
        self.runs && !self.held
    }

    fn becomes_plain(&mut self) {
        (self.role, self.runs, self.held, self.quiescing) = (None, false, false, false);
    }
}

impl RoundEnd for End {
    fn quiesce(&mut self) -> bool {
        self.quiescing = true;
        true
    }
    fn is_drained(&self) -> bool {
        self.role.is_none() && self.has_nothing_under_way()
    }
    fn hold(&mut self) -> Option<QuiescePoint> {
        assert!(self.quiescing);
        self.held |= self.has_nothing_under_way();
        let point = QuiescePoint { sends: Psn::new(self.received), recvs: Psn::new(self.done) };
        self.held.then_some(if self.runs { point } else { QuiescePoint::default() })
    }
    fn change(&mut self, point: Option<QuiescePoint>, to: Outcome) -> Option<bool> {
        let point = point?;
        let Outcome::Star { role, .. } = to else {
            assert_eq!((point.sends.get(), point.recvs.get()), (self.done, self.received));
            if !self.busy {
                self.becomes_plain();
            }
            return Some(!self.busy);
        };
        assert!(role == SL && self.is_drained());
        if self.no_memory {
            return None;
        }
        (self.role, self.quiescing) = (Some(SL), false);
        Some(true)
    }
    fn settle(&mut self, star: bool) {
        match (self.role, star) {
            /* it waits for SL's Setup */
            (None, true) => (self.role, self.quiescing) = (Some(SF), false),
            (Some(_), true) => (self.held, self.quiescing) = (false, false),
            (_, false) => self.becomes_plain(),
        }
    }
}

const NUMBER: u16 = 1;

fn settled(is: Outcome) -> Control {
    Control::Settled { round: NUMBER, star: is != Outcome::Plain }
}

#[test]
fn rounds_are_counted_up() {
    assert!(is_new(0, u16::MAX) && is_new(5, 4) && !is_new(4, 4) && !is_new(3, 4));
}

fn agrees(is: Outcome, mine: &Terms, theirs: &Terms) -> bool {
    suits(is, mine, theirs, true)
}

#[test]
fn a_card_takes_back_what_it_has_room_for() {
    let most = revert_threshold(THRESHOLD);
    assert_eq!((most, revert_threshold(1), revert_threshold(0)), (90, 1, 0));
    let [sl, sf] = [SL, SF].map(star);
    assert!(agrees(sl, &auto(most - 1), &auto(0)) && !agrees(sl, &auto(most), &auto(999)));
    assert!(agrees(sf, &auto(999), &auto(0)), "it keeps it in any case");
    for (is, other, preference) in [(sl, sf, Preference::Stateless), (sf, sl, Preference::Stateful)] {
        assert!(!agrees(is, &terms(preference, 0), &terms(Preference::Off, 0)));
        assert!(agrees(other, &terms(preference, 0), &auto(0)));
    }
    assert!(agrees(sl, &auto(999), &terms(Preference::Stateless, 0)), "a program wants another role");
}

#[test]
fn a_card_keeps_what_its_peer_has_too_much_of() {
    let (few, many) = (auto(3), auto(THRESHOLD + 1));
    assert!(agrees(Outcome::Plain, &few, &many));
    assert!(agrees(Outcome::Plain, &many, &few), "and what it has too much of itself, its peer keeps");
    let roomy = Terms { threshold: 2 * THRESHOLD, stateful: THRESHOLD + 2, ..auto(0) };
    assert!(!agrees(Outcome::Plain, &roomy, &many), "it has more, but not too many");
    assert!(!agrees(Outcome::Plain, &few, &auto(3)), "nobody has too many");
    assert!(agrees(Outcome::Plain, &few, &terms(Preference::Stateful, 0)), "a program wants it");
}

#[test]
fn without_an_answer_nothing_is_quiesced() {
    for from in [Outcome::Plain, star(SL), star(SF)] {
        let mut end = End::default();
        let mut round = Round::ask(NUMBER, auto(200), true, from, 5);
        let mut asked = 0;
        while let Some(due) = round.deadline() {
            asked += u32::from(matches!(round.poll(due, &mut end), Some(Control::Change { .. })));
            assert!(!end.quiescing);
        }
        assert_eq!((asked, round.outcome()), (ASKS, Some(from)));
    }
}

/// What an end of that role says that has begun to quiesce.
fn quiescing(role: Role, point: Option<QuiescePoint>) -> Control {
    Control::Quiescing { round: NUMBER, role, ports: PORTS, boot: BOOT, point }
}

/// A round at an end that is this, whose peer has agreed.
fn agreed(from: Outcome, role: Role, end: &mut End) -> Round {
    let mut round = Round::ask(NUMBER, auto(200), true, from, 100);
    round.handle(100, &quiescing(role.other(), None), end);
    round
}

#[test]
fn neither_end_waits_for_long() {
    for (from, role) in [(Outcome::Plain, SL), (Outcome::Plain, SF), (star(SL), SL), (star(SF), SF)] {
        let is = (from != Outcome::Plain).then_some(role);
        let mut end = End { posted: 2, begun: 2, role: is, ..End::default() };
        let mut round = agreed(from, role, &mut end);
        let mut last = None;
        while let Some(due) = round.deadline() {
            assert!(end.quiescing && due <= 100 + MAX_QUIESCE);
            last = round.poll(due.max(101), &mut end);
        }
        assert_eq!((last, round.outcome()), (Some(settled(from)), Some(from)));
        assert!(!end.quiescing && !end.held);
    }
}

/// SF in doubt, on the way to or from StaR.
fn in_doubt(from: Outcome) -> (End, Round, Control) {
    let is = (from != Outcome::Plain).then_some(SF);
    let mut end = End {
        posted: 3,
        begun: 3,
        done: 3,
        received: 4,
        begun_of_peer: 4,
        role: is,
        runs: is.is_some(),
        ..End::default()
    };
    let mut round = agreed(from, SF, &mut end);
    let mut point = QuiescePoint { sends: Psn::new(4), recvs: Psn::new(3) };
    if is.is_none() {
        assert!(!round.is_in_doubt(), "SL has something under way");
        point = QuiescePoint::default();
    }
    let said = round.handle(100, &quiescing(SL, is.is_none().then_some(point)), &mut end);
    let message = quiescing(SF, Some(point));
    assert!(round.is_in_doubt() && end.held && said == Some(message), "{said:?}");
    (end, round, message)
}

#[test]
fn an_end_in_doubt_waits_for_the_other() {
    for from in [Outcome::Plain, star(SF)] {
        let to = if from == Outcome::Plain { star(SF) } else { Outcome::Plain };
        let (mut end, mut round, message) = in_doubt(from);
        for _ in 0..100 {
            let due = round.deadline().expect("it lasts");
            assert_eq!(round.poll(due, &mut end), Some(message), "again");
        }
        assert!(round.deadline().expect("it lasts") > 40 * Beginning::LOOK, "ever more seldom");
        assert!(!round.is_busy(), "it may wait for ever");
        for n in 0..100 {
            let due = round.deadline().expect("it lasts");
            let star = from != Outcome::Plain;
            let change = Control::Change { round: NUMBER, version: VERSION, star, terms: auto(0) };
            assert_eq!(round.handle(due, &change, &mut end), Some(message), "it was lost");
            assert!(round.is_busy() && round.deadline() <= Some(due + 64 * LOOK), "{n}: the peer is there");
        }
        assert_eq!(round.handle(9, &settled(to), &mut end), None);
        assert_eq!((round.outcome(), end.role.is_some()), (Some(to), to != Outcome::Plain));

        let (mut end, mut round, _) = in_doubt(from);
        assert_eq!(round.handle(9, &settled(from), &mut end), None);
        assert_eq!((round.outcome(), end.held, end.quiescing), (Some(from), false, false));
    }
    let (mut end, mut round, _) = in_doubt(star(SF));
    (end.held, end.begun) = (false, 4);
    let due = round.deadline().expect("it lasts");
    assert_eq!(round.poll(due, &mut end), Some(settled(star(SF))), "it has failed meanwhile");
}

#[test]
fn the_setup_of_another_boot_settles_nothing() {
    let (_, round, _) = in_doubt(Outcome::Plain);
    assert!(round.awaits_setup(BOOT) && !round.awaits_setup(BOOT + 1));
    assert!(!in_doubt(star(SF)).1.awaits_setup(BOOT));
}
