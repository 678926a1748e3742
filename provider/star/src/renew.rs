//! Roles settled anew, while a connection of plain RoCEv2 runs, and unseen by its programs: what the paper
//! leaves as future work (VI).
//!
//! An end whose card has too many connections asks its peer (Renew). A peer whom it suits lets its requests
//! rest and says so (Resting); who asked does the same once it hears that. What is under way ends as ever,
//! what is posted waits. An end under whose requests nothing is left may be told by the other that this is so
//! there too. Then both are where connections begin, and settle what they become as at the beginning
//! ([`Negotiation`]), each message with the number of the round.
//!
//! Until then either end may go on alone, and does so before its program could notice: a request that is new,
//! or Plain, has the other go on too, and after that the rules of the beginning hold. Nothing else of the
//! connection changes: its PSNs go on.

use starverbs_core::{Gid, Nanos, Qpn};

use super::channel::timeout;
use super::control::{Control, Role, Wish};
use super::message::{Reader, Writer};
use super::negotiate::{Negotiation, Outcome, Terms, choose};

/// Askings without an answer until nobody is asked any more: a sixteenth of a second, in which nothing rests.
pub(super) const ASKS: u32 = 6;
/// For so long requests rest at most, while some are under way: one may wait for what the program does next.
pub(super) const REST: Nanos = 50_000_000;
/// Time between two looks whether something is under way.
pub(super) const LOOK: Nanos = 1_000_000;
/// What says that a round's number and a message follow.
const ROUND: u8 = 17;

/// A message of a round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Renewed {
    /// Counts the rounds of a connection
    pub round: u16,
    /// What is said
    pub message: Control,
}

impl Renewed {
    /// Writes it to `room`; gives its length. `None`: `room` is too small, which
    /// [`MAX_CONTROL`](super::control::MAX_CONTROL) never is.
    pub fn encode(&self, room: &mut [u8]) -> Option<usize> {
        let mut out = Writer::new(room);
        out.byte(ROUND)?;
        out.half(self.round)?;
        let len = out.len();
        Some(len + self.message.encode(room.get_mut(len..)?)?)
    }

    /// The message that these bytes are. `None`: they are none of a round.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        if from.byte()? != ROUND {
            return None;
        }
        let round = from.half()?;
        Some(Renewed { round, message: Control::decode(from.0)? })
    }
}

/// The requests of an end, as its card has them.
pub trait Requests {
    /// None begins from now on. False: the end is none of which the roles may change.
    fn rest(&mut self) -> bool;
    /// All that began are done.
    fn are_done(&self) -> bool;
    /// None begins before it is settled what the end is; a new one of the peer settles that it is plain.
    /// False: some are under way.
    fn hold(&mut self) -> bool;
    /// Whether [`hold`](Requests::hold) still lasts.
    fn are_held(&self) -> bool;
    /// They begin again.
    fn resume(&mut self);
}

/// What an end brings to a round.
#[derive(Clone, Copy, Debug)]
pub struct Card {
    /// Which life of the card this is
    pub boot: u64,
    /// UDP ports of its stateless half and of its stateful one
    pub ports: [u16; 2],
    /// How long the program lets a peer be silent; `None`: for ever
    pub patience: Option<Nanos>,
}

/// How far a round is.
#[derive(Clone, Debug)]
enum Stage {
    /// Asking; requests go on
    Asking,
    /// Requests rest until then; whether those of the peer are done, as it says
    Resting { until: Nanos, ready: bool },
    /// Both rest
    Settling(Negotiation),
    /// Over
    Over(Outcome),
}

/// A round at one end.
#[derive(Clone, Debug)]
pub struct Renewal {
    round: u16,
    mine: Terms,
    card: Card,
    stage: Stage,
    /// When something is to be said or looked at
    due: Nanos,
    tries: u32,
}

/// Whether a round that a peer speaks of is a new one, after the last that there was.
pub fn is_new(round: u16, last: u16) -> bool {
    (round.wrapping_sub(last) as i16) > 0
}

/// Whether a peer's asking suits this end. An end keeps the state whenever the rule says so; it leaves its
/// card only if that has too many connections, too, whatever the peer says of its own, or as a program wants
/// that.
pub fn suits(mine: &Terms, theirs: &Terms) -> bool {
    match choose(mine, theirs) {
        Some(Role::Stateful) => true,
        Some(Role::Stateless) => {
            mine.stateful > mine.threshold || mine.wish == Wish::Stateless || theirs.wish == Wish::Stateful
        }
        None => false,
    }
}

impl Renewal {
    /// Asks the peer.
    pub fn ask(round: u16, mine: Terms, card: Card, now: Nanos) -> Self {
        Renewal { round, mine, card, stage: Stage::Asking, due: now, tries: 0 }
    }

    /// The peer has asked, and it [`suits`] this end: its requests rest. `None`: they cannot.
    pub fn asked(
        round: u16,
        mine: Terms,
        card: Card,
        now: Nanos,
        requests: &mut impl Requests,
    ) -> Option<Self> {
        let stage = Stage::Resting { until: now + REST, ready: false };
        requests.rest().then_some(Renewal { round, mine, card, stage, due: now, tries: 0 })
    }

    /// Which round it is.
    pub fn round(&self) -> u16 {
        self.round
    }

    /// How it ended; `None`: it has not.
    pub fn outcome(&self) -> Option<Outcome> {
        match self.stage {
            Stage::Over(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// What the ends have settled, for messages that still come.
    pub fn into_negotiation(self) -> Negotiation {
        let outcome = self.outcome().unwrap_or(Outcome::Plain);
        Negotiation::settled(self.mine, self.card.boot, self.card.ports, outcome)
    }

    /// When [`poll`](Renewal::poll) has something to do.
    pub fn deadline(&self) -> Option<Nanos> {
        match &self.stage {
            Stage::Asking | Stage::Resting { .. } => Some(self.due),
            Stage::Settling(negotiation) => negotiation.deadline(),
            Stage::Over(_) => None,
        }
    }

    /// Time has passed; gives what is to be said now.
    pub fn poll(&mut self, now: Nanos, requests: &mut impl Requests) -> Option<Renewed> {
        let said = match &mut self.stage {
            Stage::Asking if now < self.due => None,
            Stage::Asking if self.tries >= ASKS => {
                self.stage = Stage::Over(Outcome::Plain);
                None
            }
            Stage::Asking => {
                self.due = now + timeout(self.tries);
                self.tries += 1;
                let Terms { wish, stateful, threshold, .. } = self.mine;
                Some(Control::Renew { wish, stateful, threshold })
            }
            Stage::Resting { until, .. } if now >= *until => Some(self.go_on(requests)),
            Stage::Resting { ready: true, .. } if requests.are_done() => return self.settle(now, requests),
            Stage::Resting { .. } if now < self.due => None,
            Stage::Resting { until, .. } => {
                self.due = (now + LOOK).min(*until);
                Some(Control::Resting { drained: requests.are_done() })
            }
            Stage::Settling(negotiation) => {
                if !requests.are_held() {
                    negotiation.plain();
                }
                let offer = negotiation.poll(now);
                self.look(requests);
                offer
            }
            Stage::Over(_) => None,
        };
        said.map(|message| self.of_round(message))
    }

    /// The peer, whose address and QPN are `peer`, says something in this round; gives the answer.
    pub fn handle(
        &mut self,
        now: Nanos,
        peer: (Gid, Qpn),
        message: &Control,
        requests: &mut impl Requests,
    ) -> Option<Renewed> {
        if let Stage::Settling(_) = self.stage {
            return self.handle_settling(peer, message, requests);
        }
        let said = match *message {
            Control::Resting { drained } => return self.peer_rests(now, drained, requests),
            /* the peer asks too, or did not hear that this end rests */
            Control::Renew { .. } if matches!(self.stage, Stage::Asking) => {
                return self.peer_rests(now, false, requests);
            }
            Control::Renew { .. } => Some(Control::Resting { drained: requests.are_done() }),
            /* it has nothing under way, and neither has this end */
            Control::Offer { .. } if matches!(self.stage, Stage::Resting { .. }) && requests.hold() => {
                self.stage = Stage::Settling(self.negotiation(now));
                return self.handle_settling(peer, message, requests);
            }
            Control::Offer { .. } | Control::Accept { .. } => Some(self.go_on(requests)),
            Control::Plain => {
                self.go_on(requests);
                None
            }
            _ => None,
        };
        said.map(|message| self.of_round(message))
    }

    /// A stateless end has begun at the peer: all was settled, whatever this end has heard.
    pub fn peer_began(&mut self, peer: (Gid, Qpn), requests: &mut impl Requests) {
        if let Stage::Settling(_) = self.stage {
            self.handle_settling(peer, &Control::Confirm { role: Role::Stateless }, requests);
        }
    }

    /// The peer's requests rest, and are done perhaps.
    fn peer_rests(&mut self, now: Nanos, drained: bool, requests: &mut impl Requests) -> Option<Renewed> {
        if let Stage::Asking = self.stage {
            if !requests.rest() {
                let message = self.go_on(requests);
                return Some(self.of_round(message));
            }
            self.stage = Stage::Resting { until: now + REST, ready: false };
            self.due = now;
        }
        if let Stage::Resting { ready, .. } = &mut self.stage {
            *ready |= drained;
        }
        self.poll(now, requests)
    }

    fn negotiation(&self, now: Nanos) -> Negotiation {
        let Card { boot, ports, patience } = self.card;
        Negotiation::of_speakers(self.mine, boot, ports, now, patience)
    }

    /// Neither has anything under way: what the ends become is settled as at the beginning.
    fn settle(&mut self, now: Nanos, requests: &mut impl Requests) -> Option<Renewed> {
        if requests.hold() {
            self.stage = Stage::Settling(self.negotiation(now));
            return self.poll(now, requests);
        }
        let message = self.go_on(requests);
        Some(self.of_round(message))
    }

    fn handle_settling(
        &mut self,
        peer: (Gid, Qpn),
        message: &Control,
        requests: &mut impl Requests,
    ) -> Option<Renewed> {
        let Stage::Settling(negotiation) = &mut self.stage else { return None };
        if !requests.are_held() {
            negotiation.plain();
        }
        let answer = match message {
            /* of before */
            Control::Renew { .. } | Control::Resting { .. } => None,
            message => negotiation.handle(peer, message),
        };
        self.look(requests);
        answer.map(|message| self.of_round(message))
    }

    /// Ends if it is settled.
    fn look(&mut self, requests: &mut impl Requests) {
        let Stage::Settling(negotiation) = &self.stage else { return };
        let Some(outcome) = negotiation.outcome() else { return };
        self.stage = Stage::Over(outcome);
        if outcome == Outcome::Plain {
            requests.resume();
        }
    }

    /// The connection stays plain; gives what tells the peer.
    fn go_on(&mut self, requests: &mut impl Requests) -> Control {
        self.stage = Stage::Over(Outcome::Plain);
        requests.resume();
        Control::Plain
    }

    fn of_round(&self, message: Control) -> Renewed {
        Renewed { round: self.round, message }
    }
}

/// What an end without a round says to a message of one. `settled`: what became of the last, if the message
/// is of it.
pub fn answer(renewed: &Renewed, peer: (Gid, Qpn), settled: Option<&mut Negotiation>) -> Option<Renewed> {
    let Renewed { round, message } = *renewed;
    let answer = match (message, settled) {
        (Control::Renew { .. } | Control::Resting { .. }, Some(_)) => None,
        (message, Some(negotiation)) => negotiation.handle(peer, &message),
        (Control::Renew { .. } | Control::Resting { .. }, None)
        | (Control::Offer { .. } | Control::Accept { .. }, None) => Some(Control::Plain),
        _ => None,
    };
    answer.map(|message| Renewed { round, message })
}

#[cfg(test)]
#[path = "renew_tests.rs"]
mod tests;
