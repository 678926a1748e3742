use starverbs_core::Gid;

use super::*;
use crate::negotiate::THRESHOLD;

#[path = "round_world_tests.rs"]
mod world;

const CARD: (u64, [u16; 2]) = (7, [4793, 4794]);
const SL: Role = Role::Stateless;
const SF: Role = Role::Stateful;
/// How long what waits bears a silent peer, ns.
const PATIENCE: Nanos = 10_000_000_000;

fn terms(n: u8, preference: Preference, stateful: u32) -> Terms {
    Terms { preference, stateful, threshold: THRESHOLD, gid: Gid::from_ipv4([10, 0, 0, n]), qpn: n.into() }
}

fn star(role: Role) -> Outcome {
    Outcome::Star { role, boot: 7, ports: [4793, 4794] }
}

fn auto(stateful: u32) -> Terms {
    terms(1, Preference::Auto, stateful)
}

const PEER: PeerQp = PeerQp { gid: Gid::from_ipv4([10, 0, 0, 2]), qpn: 2 };

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
    fn is_drained(&self) -> bool {
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
    fn drained_at(&self) -> Option<QuiescePoint> {
        let (sends, recvs) = (Psn::new(self.done), Psn::new(self.received));
        (self.role.is_none() && self.is_drained()).then_some(QuiescePoint { sends, recvs })
    }
    fn hold(&mut self, peer_point: Option<QuiescePoint>) -> Option<QuiescePoint> {
        let point = QuiescePoint { sends: Psn::new(self.received), recvs: Psn::new(self.done) };
        assert!(self.quiescing);
        self.held |= self.is_drained() && (self.runs || peer_point == Some(point));
        self.held.then_some(point)
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
        assert_eq!(role, SL);
        if self.drained_at() != Some(point) {
            return Some(false);
        }
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

#[test]
fn a_card_takes_back_what_it_has_room_for() {
    let most = revert_threshold(THRESHOLD);
    assert_eq!((most, revert_threshold(1), revert_threshold(0)), (90, 1, 0));
    let [sl, sf] = [SL, SF].map(star);
    assert!(suits(sl, &auto(most - 1), &auto(0)) && !suits(sl, &auto(most), &auto(999)));
    assert!(suits(sf, &auto(999), &auto(0)), "it keeps it in any case");
    for (is, other, preference) in [(sl, sf, Preference::Stateless), (sf, sl, Preference::Stateful)] {
        assert!(!suits(is, &terms(1, preference, 0), &terms(2, Preference::Off, 0)));
        assert!(suits(other, &terms(1, preference, 0), &auto(0)));
    }
    assert!(suits(sl, &auto(999), &terms(2, Preference::Stateless, 0)), "a program wants another role");
}

#[test]
fn a_card_keeps_what_its_peer_has_too_much_of() {
    let (few, many) = (auto(3), terms(2, Preference::Auto, THRESHOLD + 1));
    assert!(suits(Outcome::Plain, &few, &many));
    assert!(suits(Outcome::Plain, &many, &few), "and what it has too much of itself, its peer keeps");
    let roomy = Terms { threshold: 2 * THRESHOLD, stateful: THRESHOLD + 2, ..auto(0) };
    assert!(!suits(Outcome::Plain, &roomy, &many), "it has more, but not too many");
    assert!(!suits(Outcome::Plain, &few, &auto(3)), "nobody has too many");
    let stateful = terms(2, Preference::Stateful, 0);
    assert!(suits(Outcome::Plain, &few, &stateful), "a program wants it");
}

#[test]
fn without_an_answer_nothing_is_quiesced() {
    for from in [Outcome::Plain, star(SL), star(SF)] {
        let mut end = End::default();
        let mut round = Round::ask(NUMBER, auto(200), CARD, from, 5);
        let mut asked = 0;
        while let Some(due) = round.deadline() {
            asked += u32::from(round.poll(due, &mut end).is_some());
            assert!(!end.quiescing);
        }
        assert_eq!((asked, round.outcome()), (ASKS, Some(from)));
    }
}

/// A round at an end that is this, whose peer has agreed.
fn agreed(from: Outcome, role: Role, end: &mut End) -> Round {
    let mut round = Round::ask(NUMBER, auto(200), CARD, from, 100);
    let (boot, ports) = CARD;
    round.handle(
        100,
        PEER,
        &Control::Quiescing { round: NUMBER, role: role.other(), ports, boot, point: None },
        end,
    );
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
    let point = QuiescePoint { sends: Psn::new(4), recvs: Psn::new(3) };
    let ((boot, ports), role) = (CARD, SL);
    let quiesced = Control::Quiescing { round: NUMBER, role, ports, boot, point: Some(point) };
    let said = if is.is_none() {
        let elsewhere = QuiescePoint { sends: Psn::new(5), ..point };
        let wrong = Control::Quiescing { round: NUMBER, role, ports, boot, point: Some(elsewhere) };
        round.handle(100, PEER, &wrong, &mut end);
        assert!(!round.is_in_doubt(), "SL stands elsewhere");
        round.handle(100, PEER, &quiesced, &mut end)
    } else {
        round.handle(
            100,
            PEER,
            &Control::Quiescing { round: NUMBER, role, ports, boot, point: None },
            &mut end,
        )
    };
    let message = Control::Quiescing { round: NUMBER, role: SF, ports, boot, point: Some(point) };
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
        assert!(round.deadline().expect("it lasts") > 10 * Beginning::LOOK, "ever more seldom");
        assert!(!round.is_busy(), "it may wait for ever");
        for n in 0..100 {
            let due = round.deadline().expect("it lasts");
            let change = Control::Change {
                round: NUMBER,
                version: VERSION,
                star: from != Outcome::Plain,
                preference: Preference::Auto,
                stateful: 0,
                threshold: 1,
                ports: CARD.1,
                boot: CARD.0,
            };
            assert_eq!(round.handle(due, PEER, &change, &mut end), Some(message), "it was lost");
            assert!(round.is_busy() && round.deadline() <= Some(due + 64 * LOOK), "{n}: the peer is there");
        }
        assert_eq!(round.handle(9, PEER, &settled(to), &mut end), None);
        assert_eq!((round.outcome(), end.role.is_some()), (Some(to), to != Outcome::Plain));

        let (mut end, mut round, _) = in_doubt(from);
        assert_eq!(round.handle(9, PEER, &settled(from), &mut end), None);
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
    assert!(round.awaits_setup(CARD.0) && !round.awaits_setup(CARD.0 + 1));
    assert!(!in_doubt(star(SF)).1.awaits_setup(CARD.0));
}
