//! Roles are settled anew while a connection of plain RC runs, unseen by its programs: what the paper leaves
//! as future work (VI).
//!
//! An end whose card has too many connections asks its peer (Renegotiate). A peer that agrees quiesces its
//! requests and sends Quiescing; the end that asked does the same when that comes. What is under way ends,
//! what is posted waits. When neither end has anything under way, both negotiate as at the beginning
//! ([`Negotiation`]), each message with the number of the round.
//!
//! Until then either end may stay plain, and does so before its program could notice: a new request, or
//! Plain, has the other stay plain, too. PSNs go on.

use starverbs_core::Nanos;

use super::channel::timeout;
use super::control::{Control, Preference, Role};
use super::message::{WqeReader, Writer};
use super::negotiate::{Negotiation, Outcome, PeerQp, Terms, choose};

/// Requests of a round without an answer until it is given up: a sixteenth of a second, nothing quiesced.
pub(super) const ASKS: u32 = 6;
/// Longest wait for requests under way, ns: one may wait for what the program does next.
pub(super) const MAX_QUIESCE: Nanos = 50_000_000;
/// Time between two looks whether something is under way, ns.
pub(super) const LOOK: Nanos = 1_000_000;
/// Marks a message of a round: its number and the message follow.
const ROUND: u8 = 17;

/// A message of a round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RoundMessage {
    /// Counts the rounds of a connection
    pub round: u16,
    /// The message itself
    pub message: Control,
}

impl RoundMessage {
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
        let mut from = WqeReader(bytes);
        if from.byte()? != ROUND {
            return None;
        }
        let round = from.half()?;
        Some(RoundMessage { round, message: Control::decode(from.0)? })
    }
}

/// The requests of an end, as its card has them.
pub trait Requests {
    /// None begins from now on. False: the roles of this end may not change.
    fn quiesce(&mut self) -> bool;
    /// All that began are done.
    fn are_drained(&self) -> bool;
    /// None begins before the roles are settled; a new request of the peer settles that the end is plain.
    /// False: some are under way.
    fn hold(&mut self) -> bool;
    /// Whether [`hold`](Requests::hold) still lasts.
    fn are_held(&self) -> bool;
    /// They begin again.
    fn resume(&mut self);
}

/// What an end brings to a round.
#[derive(Clone, Copy, Debug)]
pub struct RoundInit {
    /// Boot ID of the card
    pub boot: u64,
    /// UDP ports of its stateless half and of its stateful one
    pub ports: [u16; 2],
    /// The program's patience; `None`: for ever
    pub patience: Option<Nanos>,
}

/// Stage of a round.
#[derive(Clone, Debug)]
enum RoundStage {
    /// Requests go on
    Asking,
    /// No request begins until then at most; `peer_drained`: the peer has none under way
    Quiescing { until: Nanos, peer_drained: bool },
    /// Neither end has a request under way
    Settling(Negotiation),
    /// The round is over
    Over(Outcome),
}

/// A round at one end.
#[derive(Clone, Debug)]
pub struct Renegotiation {
    round: u16,
    mine: Terms,
    init: RoundInit,
    stage: RoundStage,
    /// When the next message or look is due
    due: Nanos,
    tries: u32,
}

/// Whether the round of a message is a new one, after the last that there was.
pub fn is_new(round: u16, last: u16) -> bool {
    (round.wrapping_sub(last) as i16) > 0
}

/// Whether this end agrees to renegotiate. It becomes stateful whenever the rule has it so, but stateless
/// only if its own card has too many connections, too, or a program wants that.
pub fn suits(mine: &Terms, theirs: &Terms) -> bool {
    match choose(mine, theirs) {
        Some(Role::Stateful) => true,
        Some(Role::Stateless) => {
            mine.stateful > mine.threshold
                || mine.preference == Preference::Stateless
                || theirs.preference == Preference::Stateful
        }
        None => false,
    }
}

impl Renegotiation {
    /// Asks the peer.
    pub fn ask(round: u16, mine: Terms, init: RoundInit, now: Nanos) -> Self {
        Renegotiation { round, mine, init, stage: RoundStage::Asking, due: now, tries: 0 }
    }

    /// The peer has asked, and it [`suits`] this end, which quiesces. `None`: it cannot.
    pub fn asked(
        round: u16,
        mine: Terms,
        init: RoundInit,
        now: Nanos,
        requests: &mut impl Requests,
    ) -> Option<Self> {
        let stage = RoundStage::Quiescing { until: now + MAX_QUIESCE, peer_drained: false };
        requests.quiesce().then_some(Renegotiation { round, mine, init, stage, due: now, tries: 0 })
    }

    /// Which round it is.
    pub fn round(&self) -> u16 {
        self.round
    }

    /// How it ended; `None`: it has not.
    pub fn outcome(&self) -> Option<Outcome> {
        match self.stage {
            RoundStage::Over(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// What the ends have settled, for messages that still come.
    pub fn into_negotiation(self) -> Negotiation {
        let outcome = self.outcome().unwrap_or(Outcome::Plain);
        Negotiation::settled(self.mine, self.init.boot, self.init.ports, outcome)
    }

    /// When [`poll`](Renegotiation::poll) has something to do.
    pub fn deadline(&self) -> Option<Nanos> {
        match &self.stage {
            RoundStage::Asking | RoundStage::Quiescing { .. } => Some(self.due),
            RoundStage::Settling(negotiation) => negotiation.deadline(),
            RoundStage::Over(_) => None,
        }
    }

    /// Gives the message that is due.
    pub fn poll(&mut self, now: Nanos, requests: &mut impl Requests) -> Option<RoundMessage> {
        let reply = match &mut self.stage {
            RoundStage::Asking if now < self.due => None,
            RoundStage::Asking if self.tries >= ASKS => {
                self.stage = RoundStage::Over(Outcome::Plain);
                None
            }
            RoundStage::Asking => {
                self.due = now + timeout(self.tries);
                self.tries += 1;
                let Terms { preference, stateful, threshold, .. } = self.mine;
                Some(Control::Renegotiate { preference, stateful, threshold })
            }
            RoundStage::Quiescing { until, .. } if now >= *until => Some(self.stay_plain(requests)),
            RoundStage::Quiescing { peer_drained: true, .. } if requests.are_drained() => {
                return self.settle(now, requests);
            }
            RoundStage::Quiescing { .. } if now < self.due => None,
            RoundStage::Quiescing { until, .. } => {
                self.due = (now + LOOK).min(*until);
                Some(Control::Quiescing { drained: requests.are_drained() })
            }
            RoundStage::Settling(negotiation) => {
                if !requests.are_held() {
                    negotiation.plain();
                }
                let offer = negotiation.poll(now);
                self.look(requests);
                offer
            }
            RoundStage::Over(_) => None,
        };
        reply.map(|message| self.of_round(message))
    }

    /// A message of the `peer` in this round; gives the answer.
    pub fn handle(
        &mut self,
        now: Nanos,
        peer: PeerQp,
        message: &Control,
        requests: &mut impl Requests,
    ) -> Option<RoundMessage> {
        if let RoundStage::Settling(_) = self.stage {
            return self.handle_settling(peer, message, requests);
        }
        let reply = match *message {
            Control::Quiescing { drained } => return self.peer_quiesces(now, drained, requests),
            /* the peer asks, too, or Quiescing was lost */
            Control::Renegotiate { .. } if matches!(self.stage, RoundStage::Asking) => {
                return self.peer_quiesces(now, false, requests);
            }
            Control::Renegotiate { .. } => Some(Control::Quiescing { drained: requests.are_drained() }),
            /* it has nothing under way, and neither has this end */
            Control::Offer { .. }
                if matches!(self.stage, RoundStage::Quiescing { .. }) && requests.hold() =>
            {
                self.stage = RoundStage::Settling(self.negotiation(now));
                return self.handle_settling(peer, message, requests);
            }
            Control::Offer { .. } | Control::Accept { .. } => Some(self.stay_plain(requests)),
            Control::Plain => {
                self.stay_plain(requests);
                None
            }
            _ => None,
        };
        reply.map(|message| self.of_round(message))
    }

    /// A stateless end has begun at the peer: all was settled, whatever came here.
    pub fn peer_began(&mut self, peer: PeerQp, requests: &mut impl Requests) {
        if let RoundStage::Settling(_) = self.stage {
            self.handle_settling(peer, &Control::Confirm { role: Role::Stateless }, requests);
        }
    }

    /// The peer is quiescing; `drained`: it has nothing under way.
    fn peer_quiesces(
        &mut self,
        now: Nanos,
        drained: bool,
        requests: &mut impl Requests,
    ) -> Option<RoundMessage> {
        if let RoundStage::Asking = self.stage {
            if !requests.quiesce() {
                let message = self.stay_plain(requests);
                return Some(self.of_round(message));
            }
            self.stage = RoundStage::Quiescing { until: now + MAX_QUIESCE, peer_drained: false };
            self.due = now;
        }
        if let RoundStage::Quiescing { peer_drained, .. } = &mut self.stage {
            *peer_drained |= drained;
        }
        self.poll(now, requests)
    }

    fn negotiation(&self, now: Nanos) -> Negotiation {
        let RoundInit { boot, ports, patience } = self.init;
        Negotiation::of_running(self.mine, boot, ports, now, patience)
    }

    /// Neither has anything under way: what the ends become is settled as at the beginning.
    fn settle(&mut self, now: Nanos, requests: &mut impl Requests) -> Option<RoundMessage> {
        if requests.hold() {
            self.stage = RoundStage::Settling(self.negotiation(now));
            return self.poll(now, requests);
        }
        let message = self.stay_plain(requests);
        Some(self.of_round(message))
    }

    fn handle_settling(
        &mut self,
        peer: PeerQp,
        message: &Control,
        requests: &mut impl Requests,
    ) -> Option<RoundMessage> {
        let RoundStage::Settling(negotiation) = &mut self.stage else { return None };
        if !requests.are_held() {
            negotiation.plain();
        }
        let answer = match message {
            /* of before */
            Control::Renegotiate { .. } | Control::Quiescing { .. } => None,
            message => negotiation.handle(peer, message),
        };
        self.look(requests);
        answer.map(|message| self.of_round(message))
    }

    /// Ends the round if all is settled.
    fn look(&mut self, requests: &mut impl Requests) {
        let RoundStage::Settling(negotiation) = &self.stage else { return };
        let Some(outcome) = negotiation.outcome() else { return };
        self.stage = RoundStage::Over(outcome);
        if outcome == Outcome::Plain {
            requests.resume();
        }
    }

    /// The connection stays plain; gives the message for the peer.
    fn stay_plain(&mut self, requests: &mut impl Requests) -> Control {
        self.stage = RoundStage::Over(Outcome::Plain);
        requests.resume();
        Control::Plain
    }

    fn of_round(&self, message: Control) -> RoundMessage {
        RoundMessage { round: self.round, message }
    }
}

/// The answer of an end without a round. `settled`: what became of the last, if the message is of it.
pub fn answer(
    inbound: &RoundMessage,
    peer: PeerQp,
    settled: Option<&mut Negotiation>,
) -> Option<RoundMessage> {
    let RoundMessage { round, message } = *inbound;
    let answer = match (message, settled) {
        (Control::Renegotiate { .. } | Control::Quiescing { .. }, Some(_)) => None,
        (message, Some(negotiation)) => negotiation.handle(peer, &message),
        (Control::Renegotiate { .. } | Control::Quiescing { .. }, None)
        | (Control::Offer { .. } | Control::Accept { .. }, None) => Some(Control::Plain),
        _ => None,
    };
    answer.map(|message| RoundMessage { round, message })
}

#[cfg(test)]
#[path = "renegotiation_tests.rs"]
mod tests;
