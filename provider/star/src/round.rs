//! A round: both ends of a connection that runs change from plain RC to StaR, or back, unseen by their
//! programs. The paper leaves that open (VI).
//!
//! Whoever wants it asks (Change). A peer that agrees begins no request and sends Quiescing, and so does the
//! end that asked. SF, or who is to be it, says so when nothing is under way; to become plain, with where the
//! connection stands. From then on it is in doubt: it begins nothing until it knows what SL is. SL alone
//! decides. It changes when it stands there, too, and answers what it is (Settled) whenever it is asked.
//!
//! So no end goes on as what the other is not. Until SF is in doubt either end may stay what it is, then SL
//! alone, and 50 ms at most go by. SF repeats Quiescing until it knows, by SL's word or by a
//! packet that SL sends in one form alone. Messages in, messages out, each with the round's number.

use starverbs_core::{Nanos, Psn};

use super::channel::{seldom, timeout};
use super::control::{Control, Preference, Role, Terms};
use super::form::VERSION;
use super::negotiate::{Outcome, choose};

/// Requests of a round without an answer until it is given up: a sixteenth of a second, nothing quiesced.
const ASKS: u32 = 6;
/// Longest wait for requests under way, ns: one may wait for what the program does next.
const MAX_QUIESCE: Nanos = 50_000_000;
/// Time between two looks whether something is under way, ns.
const LOOK: Nanos = 1_000_000;
/// After so many repetitions of an end in doubt its peer may be gone.
const SILENT_TRIES: u32 = 32;

/// Where a connection stands that has nothing under way. StaR's: the sequences of SL's first WQEs that are
/// not done. A plain one's is zero: its PSNs are not compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QuiescePoint {
    /// Of what SL sends
    pub sends: Psn,
    /// Of what it receives
    pub recvs: Psn,
}

/// One end of the connection, as its card or its host has it.
pub trait RoundEnd {
    /// No request begins. False: the end is ending, or may not change.
    fn quiesce(&mut self) -> bool;
    /// A plain end: whether none of its requests is under way.
    fn is_drained(&self) -> bool;
    /// SF: where the connection stands, if nothing is under way. That stays so until
    /// [`settle`](RoundEnd::settle).
    fn hold(&mut self) -> Option<QuiescePoint>;
    /// SL: becomes this, if it stands there; without a point SF is plain, as it never began. False: something
    /// is not complete yet; `None`: it cannot.
    fn change(&mut self, point: Option<QuiescePoint>, to: Outcome) -> Option<bool>;
    /// The connection is StaR's, or plain: requests begin.
    fn settle(&mut self, star: bool);
}

/// Stage of a round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Requests go on
    Asking,
    /// No request begins until then at most
    Quiescing { until: Nanos },
    /// SF: SL may have changed
    InDoubt(QuiescePoint),
    /// The round is over, and this is what the end is
    Over(Outcome),
}

/// A round at one end.
#[derive(Clone, Debug)]
pub struct Round {
    /// Which round it is
    pub number: u16,
    /// What the end was before
    pub from: Outcome,
    mine: Terms,
    /// This end's address is lower than its peer's
    is_lower: bool,
    /// What the end becomes, once the peer has agreed
    to: Outcome,
    /// Nothing of the peer's is under way
    peer_is_drained: bool,
    stage: Stage,
    /// When the next message or look is due
    due: Nanos,
    tries: u32,
}

/// Whether the round of a message is a new one, after the last that there was.
pub fn is_new(round: u16, last: u16) -> bool {
    (round.wrapping_sub(last) as i16) > 0
}

/// The round is over, and the sender is this.
pub fn settled(round: u16, is: Outcome) -> Control {
    Control::Settled { round, star: is != Outcome::Plain }
}

/// From how many connections on a card takes none back: a quarter below the number from which on it gives
/// them away, so that none goes to and fro.
pub fn revert_threshold(threshold: u32) -> u32 {
    threshold - threshold / 4
}

/// Whether an end that is this agrees to change.
///
/// A plain one becomes stateful whenever the rule has it so, but stateless only if its own card has too many
/// connections, too, or a program wants that. SF becomes plain unless its program says stateful, SL if its
/// card has room, unless its program says stateless, or leaves it to the cards, and the peer's does not.
pub fn suits(is: Outcome, mine: &Terms, theirs: &Terms, is_lower: bool) -> bool {
    let Outcome::Star { role, .. } = is else {
        let crowded = mine.stateful > mine.threshold || mine.preference == Preference::Stateless;
        let wanted = crowded || theirs.preference == Preference::Stateful;
        return choose(mine, theirs, is_lower).is_some_and(|role| role == Role::Stateful || wanted);
    };
    match (role, mine.preference) {
        (Role::Stateful, preference) => preference != Preference::Stateful,
        (Role::Stateless, Preference::Stateless) => false,
        (Role::Stateless, Preference::Auto) if theirs.preference != Preference::Auto => true,
        (Role::Stateless, _) => mine.stateful < revert_threshold(mine.threshold),
    }
}

impl Round {
    /// Asks the peer; if it has asked, that message comes next. `from`: what this end is.
    pub fn ask(number: u16, mine: Terms, is_lower: bool, from: Outcome, now: Nanos) -> Self {
        let (to, stage, peer_is_drained) = (from, Stage::Asking, false);
        Round { number, from, mine, is_lower, to, peer_is_drained, stage, due: now, tries: 0 }
    }

    /// Whether the peer has not answered yet.
    pub fn is_asking(&self) -> bool {
        self.stage == Stage::Asking
    }

    /// Whether it is SF that waits for SL's word alone.
    pub fn is_in_doubt(&self) -> bool {
        matches!(self.stage, Stage::InDoubt(_))
    }

    /// Whether more is to come than repetitions to a silent peer.
    pub fn is_busy(&self) -> bool {
        !self.is_in_doubt() || self.tries < SILENT_TRIES
    }

    /// Whether SL of this boot has changed if it sends its Setup.
    pub fn awaits_setup(&self, of: u64) -> bool {
        self.is_in_doubt() && matches!(self.to, Outcome::Star { boot, .. } if boot == of)
    }

    /// What the end is when the round is over; `None`: it is not.
    pub fn outcome(&self) -> Option<Outcome> {
        match self.stage {
            Stage::Over(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// When [`poll`](Round::poll) has something to do.
    pub fn deadline(&self) -> Option<Nanos> {
        self.outcome().is_none().then_some(self.due)
    }

    /// Gives the message that is due.
    pub fn poll(&mut self, now: Nanos, end: &mut impl RoundEnd) -> Option<Control> {
        let is_sf = self.role() == Role::Stateful;
        if let Stage::Quiescing { .. } = self.stage
            && is_sf
            && (self.is_star() || self.peer_is_drained)
            && let Some(point) = end.hold()
        {
            (self.stage, self.due, self.tries) = (Stage::InDoubt(point), now, 0);
        }
        let (point, wait) = match self.stage {
            Stage::Over(_) => return None,
            Stage::Quiescing { until } if now >= until => return Some(self.stay(end)),
            _ if now < self.due => return None,
            Stage::Asking if self.tries >= ASKS => return Some(self.stay(end)),
            Stage::Asking => (None, timeout(self.tries)),
            Stage::Quiescing { until } => {
                let is_drained = !is_sf && end.is_drained();
                (is_drained.then(QuiescePoint::default), LOOK.min(until - now))
            }
            /* it has failed meanwhile */
            Stage::InDoubt(_) if end.hold().is_none() => return Some(self.stay(end)),
            Stage::InDoubt(point) => (Some(point), seldom(self.tries)),
        };
        (self.due, self.tries) = (now + wait, self.tries.saturating_add(1));
        let (round, terms, role) = (self.number, self.mine, self.role());
        if self.is_asking() {
            return Some(Control::Change { round, version: VERSION, star: self.is_star(), terms });
        }
        Some(Control::Quiescing { round, role, ports: terms.ports, boot: terms.boot, point })
    }

    /// A message of the peer in this round; gives the answer.
    pub fn handle(&mut self, now: Nanos, message: &Control, end: &mut impl RoundEnd) -> Option<Control> {
        match *message {
            Control::Change { terms, .. } if self.is_asking() => {
                let role = choose(&self.mine, &terms, self.is_lower);
                self.quiesce(now, role, (terms.boot, terms.ports), end);
            }
            Control::Quiescing { role, ports, boot, point, .. } => {
                if self.is_asking() {
                    self.quiesce(now, Some(role.other()), (boot, ports), end);
                }
                self.peer_is_drained = point.is_some();
                let decides = self.outcome().is_none() && self.role() == Role::Stateless;
                if decides && point.is_some() {
                    match end.change(point, self.to) {
                        Some(true) => self.stage = Stage::Over(self.to),
                        Some(false) => return None,
                        None => _ = self.stay(end),
                    }
                }
            }
            Control::Settled { star, .. } => {
                self.peer_is(star, end);
                return None;
            }
            _ => {}
        }
        match self.stage {
            Stage::Over(is) => return Some(settled(self.number, is)),
            /* the message was lost, and the peer is there */
            Stage::InDoubt(_) => (self.due, self.tries) = (now, 0),
            _ => {}
        }
        self.poll(now, end)
    }

    /// Both ends quiesce, this one is to have that role of StaR; else it stays what it is.
    fn quiesce(&mut self, now: Nanos, role: Option<Role>, peer: (u64, [u16; 2]), end: &mut impl RoundEnd) {
        let (boot, ports) = peer;
        let star = role.map(|role| Outcome::Star { role, boot, ports });
        let to = if self.is_star() { Some(Outcome::Plain) } else { star };
        match to.filter(|_| end.quiesce()) {
            Some(to) => {
                (self.to, self.due) = (to, now);
                self.stage = Stage::Quiescing { until: now + MAX_QUIESCE };
            }
            None => _ = self.stay(end),
        }
    }

    /// The peer is StaR's, or plain.
    fn peer_is(&mut self, star: bool, end: &mut impl RoundEnd) {
        if star == self.is_star() {
            self.stay(end);
        } else if self.is_in_doubt() {
            end.settle(star);
            self.stage = Stage::Over(self.to);
        } else if !star && self.role() == Role::Stateless && end.change(None, Outcome::Plain) == Some(true) {
            self.stage = Stage::Over(Outcome::Plain);
        }
    }

    /// The end stays what it was; gives the message for the peer.
    fn stay(&mut self, end: &mut impl RoundEnd) -> Control {
        if !self.is_asking() {
            end.settle(self.is_star());
        }
        self.stage = Stage::Over(self.from);
        settled(self.number, self.from)
    }

    fn is_star(&self) -> bool {
        self.from != Outcome::Plain
    }

    /// What it is of StaR, or becomes.
    fn role(&self) -> Role {
        match (self.from, self.to) {
            (Outcome::Star { role, .. }, _) | (_, Outcome::Star { role, .. }) => role,
            _ => Role::Stateful,
        }
    }
}

#[cfg(test)]
#[path = "round_tests.rs"]
mod tests;
