//! From StaR back to RC, while the connection runs and unseen by its programs.
//!
//! Either end asks (Revert). An end that agrees begins nothing new and sends Quiescing; so does the end that
//! asked. SF is quiesced when all that began at both ends is over. It sends the sequences at which that is so
//! (Quiesced), and begins nothing until SL answers. SL completes what is done, gives its QP back to its card
//! and sends Reverted, or Stay. So SL is plain RC before SF is, and a plain request of SL means Reverted,
//! too.
//!
//! Until then either end may send Stay: SL until it has reverted, SF until it has sent Quiesced. SF repeats
//! Quiesced until it knows what SL is. Messages in, messages out, each with the round's number
//! ([`RoundMessage`]).

use starverbs_core::{Nanos, Psn};

use super::channel::timeout;
use super::control::{Control, Preference, Role};
use super::negotiate::{Beginning, Terms};
use super::renegotiation::{ASKS, LOOK, MAX_QUIESCE, RoundMessage};

/// Where SF is quiesced.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QuiescePoint {
    /// Sequence of the first WQE of SL's send queue that is not done
    pub sends: Psn,
    /// Of its receive queue
    pub recvs: Psn,
}

/// What becomes of SL's end when SF is quiesced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RevertStep {
    /// It is plain RC
    Reverted,
    /// Something is not complete yet
    Pending,
    /// It cannot revert
    Impossible,
}

/// One end of the connection, as its card or its host has it.
pub trait StarEnd {
    /// No request begins. False: the end is ending, or no end of StaR that has begun.
    fn quiesce(&mut self) -> bool;
    /// Requests that waited begin, as StaR's.
    fn resume(&mut self);
    /// SF: if nothing is under way, that stays so, and this is where.
    fn quiesce_point(&mut self) -> Option<QuiescePoint>;
    /// SL: reverts, if all that SF has done is complete.
    fn revert(&mut self, point: QuiescePoint) -> RevertStep;
    /// SL: SF has not answered its Setup, and may not have it.
    fn is_beginning(&self) -> bool;
    /// SF: reverts, as SL has.
    fn settle(&mut self);
    /// SF: a plain request of SL has made it plain.
    fn is_settled(&self) -> bool;
    /// SF: if requests wait, the patience of its program.
    fn waits(&self) -> Option<Option<Nanos>>;
}

/// How it ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RevertOutcome {
    /// Plain RC
    Reverted,
    /// StaR still
    Stays,
}

/// Stage of a round.
#[derive(Clone, Copy, Debug)]
enum RevertStage {
    /// Requests go on
    Asking,
    /// No request begins until then at most
    Quiescing { until: Nanos },
    /// SF: SL may have reverted
    Quiesced(QuiescePoint),
    /// The round is over
    Over(RevertOutcome),
}

/// A round at one end.
#[derive(Clone, Debug)]
pub struct Reversion {
    round: u16,
    role: Role,
    mine: Terms,
    stage: RevertStage,
    /// When the next message or look is due
    due: Nanos,
    tries: u32,
    waiting: Beginning,
    /// Requests that wait fail in the end
    bounded: bool,
}

/// From how many connections on a card takes none back: a quarter below the number from which on it gives
/// them away, so that none goes to and fro.
pub fn revert_threshold(threshold: u32) -> u32 {
    threshold - threshold / 4
}

/// Whether an end agrees to revert. SF does unless its program says stateful; SL if its card has room, unless
/// its program says stateless.
pub fn suits(role: Role, mine: &Terms, theirs: &Terms) -> bool {
    let agrees = match role {
        Role::Stateful => mine.preference != Preference::Stateful,
        Role::Stateless => {
            mine.preference != Preference::Stateless && mine.stateful < revert_threshold(mine.threshold)
        }
    };
    /* SL's program leaves it to the cards, and the peer's does not */
    agrees
        || role == Role::Stateless
            && mine.preference == Preference::Auto
            && theirs.preference != Preference::Auto
}

impl Reversion {
    /// Asks the peer.
    pub fn ask(round: u16, role: Role, mine: Terms, now: Nanos) -> Self {
        let waiting = Beginning::default();
        Reversion {
            round,
            role,
            mine,
            stage: RevertStage::Asking,
            due: now,
            tries: 0,
            waiting,
            bounded: false,
        }
    }

    /// The peer has asked, and it [`suits`] this end. `None`: it cannot quiesce.
    pub fn asked(
        round: u16,
        role: Role,
        mine: Terms,
        now: Nanos,
        end: &mut (impl StarEnd + ?Sized),
    ) -> Option<Self> {
        let stage = RevertStage::Quiescing { until: now + MAX_QUIESCE };
        end.quiesce().then(|| Reversion { stage, ..Reversion::ask(round, role, mine, now) })
    }

    /// Which round it is.
    pub fn round(&self) -> u16 {
        self.round
    }

    /// Whether the peer has not answered yet.
    pub fn is_asking(&self) -> bool {
        matches!(self.stage, RevertStage::Asking)
    }

    /// Whether SF is quiesced, and waits for SL's answer alone.
    pub fn is_quiesced(&self) -> bool {
        matches!(self.stage, RevertStage::Quiesced(_))
    }

    /// Whether more is to come than repetitions of Quiesced to a silent peer: requests that wait for it fail
    /// in the end.
    pub fn is_busy(&self) -> bool {
        !self.is_quiesced() || self.tries < 2 * SELDOM || self.bounded
    }

    /// How it ended; `None`: it has not.
    pub fn outcome(&self) -> Option<RevertOutcome> {
        match self.stage {
            RevertStage::Over(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// When [`poll`](Reversion::poll) has something to do.
    pub fn deadline(&self) -> Option<Nanos> {
        self.outcome().is_none().then_some(self.due)
    }

    /// Gives the message that is due.
    pub fn poll(&mut self, now: Nanos, end: &mut (impl StarEnd + ?Sized)) -> Option<RoundMessage> {
        if matches!(self.stage, RevertStage::Quiesced(_)) && self.peer_reverted(now, end) {
            self.peer_has_reverted(end);
        }
        let reply = match self.stage {
            RevertStage::Over(_) => None,
            RevertStage::Asking if now < self.due => None,
            RevertStage::Asking if self.tries >= ASKS => {
                self.stage = RevertStage::Over(RevertOutcome::Stays);
                None
            }
            RevertStage::Asking => {
                self.due = now + timeout(self.tries);
                self.tries += 1;
                let Terms { preference, stateful, threshold, .. } = self.mine;
                Some(Control::Revert { preference, stateful, threshold })
            }
            RevertStage::Quiescing { until } => match quiesce_point(self.role, end) {
                Some(point) => Some(self.quiesced(now, point)),
                None if now >= until => Some(self.stay(end)),
                None if now < self.due => None,
                None => {
                    self.due = (now + LOOK).min(until);
                    Some(Control::Quiescing { drained: false })
                }
            },
            RevertStage::Quiesced(_) if now < self.due => None,
            RevertStage::Quiesced(_) => match end.quiesce_point() {
                Some(point) => Some(self.quiesced(now, point)),
                None => Some(self.stay(end)),
            },
        };
        reply.map(|message| self.of_round(message))
    }

    /// A message of the peer in this round; gives the answer.
    pub fn handle(
        &mut self,
        now: Nanos,
        message: &Control,
        end: &mut (impl StarEnd + ?Sized),
    ) -> Option<RoundMessage> {
        if let RevertStage::Asking = self.stage
            && matches!(message, Control::Quiescing { .. } | Control::Revert { .. } | Control::Quiesced(_))
        {
            if !end.quiesce() {
                let message = self.stay(end);
                return Some(self.of_round(message));
            }
            (self.stage, self.due) = (RevertStage::Quiescing { until: now + MAX_QUIESCE }, now);
        }
        let reply = match (*message, self.stage) {
            (Control::Quiesced(point), RevertStage::Quiescing { .. }) if self.role == Role::Stateless => {
                match end.revert(point) {
                    RevertStep::Reverted => {
                        self.stage = RevertStage::Over(RevertOutcome::Reverted);
                        Some(Control::Reverted)
                    }
                    RevertStep::Pending => None,
                    RevertStep::Impossible => Some(self.stay(end)),
                }
            }
            (Control::Reverted, RevertStage::Quiesced(_)) => {
                self.peer_has_reverted(end);
                None
            }
            /* SF gave up before it began, and does not begin any more */
            (Control::Reverted, RevertStage::Asking | RevertStage::Quiescing { .. })
                if end.is_beginning() && end.quiesce() =>
            {
                (self.stage, self.due) = (RevertStage::Quiescing { until: now + MAX_QUIESCE }, now);
                if end.revert(QuiescePoint::default()) == RevertStep::Reverted {
                    self.stage = RevertStage::Over(RevertOutcome::Reverted);
                }
                None
            }
            (
                Control::Stay,
                RevertStage::Asking | RevertStage::Quiescing { .. } | RevertStage::Quiesced(_),
            ) => {
                self.stay(end);
                None
            }
            /* Quiesced was lost */
            (Control::Revert { .. } | Control::Quiescing { .. }, RevertStage::Quiesced(point)) => {
                Some(Control::Quiesced(point))
            }
            (Control::Revert { .. } | Control::Quiescing { .. }, RevertStage::Quiescing { .. }) => {
                return self.poll(now, end);
            }
            _ => None,
        };
        reply.map(|message| self.of_round(message))
    }

    /// SF: SL sent what only a plain end sends.
    pub fn peer_has_reverted(&mut self, end: &mut (impl StarEnd + ?Sized)) {
        if let RevertStage::Quiesced(_) = self.stage {
            end.settle();
            self.stage = RevertStage::Over(RevertOutcome::Reverted);
        }
    }

    /// The connection stays StaR's; gives the message for the peer. Once SF is quiesced, SL alone may decide
    /// so.
    pub fn stay(&mut self, end: &mut (impl StarEnd + ?Sized)) -> Control {
        self.stage = RevertStage::Over(RevertOutcome::Stays);
        end.resume();
        Control::Stay
    }

    /// Whether SL is plain by a request of its own, or has been silent for the patience of what waits here.
    fn peer_reverted(&mut self, now: Nanos, end: &(impl StarEnd + ?Sized)) -> bool {
        let waits = end.waits();
        self.bounded = waits.flatten().is_some();
        end.is_settled() || self.waiting.is_overdue(now, waits.is_some(), waits.flatten())
    }

    fn quiesced(&mut self, now: Nanos, point: QuiescePoint) -> Control {
        if !matches!(self.stage, RevertStage::Quiesced(_)) {
            (self.stage, self.tries) = (RevertStage::Quiesced(point), 0);
        }
        /* SL may be gone, and nothing wait for it: back off to four seconds */
        let seldom = || Beginning::LOOK << (self.tries / SELDOM - 1).min(4);
        let wait = if self.tries < SELDOM { timeout(self.tries) } else { seldom() };
        self.due = now + wait;
        self.tries = self.tries.saturating_add(1);
        Control::Quiesced(point)
    }

    fn of_round(&self, message: Control) -> RoundMessage {
        RoundMessage { round: self.round, message }
    }
}

/// After so many repetitions of Quiesced the interval grows.
const SELDOM: u32 = 16;

fn quiesce_point(role: Role, end: &mut (impl StarEnd + ?Sized)) -> Option<QuiescePoint> {
    if role == Role::Stateful { end.quiesce_point() } else { None }
}

/// The answer of an end without that round. `star`: whether it is StaR's.
pub fn answer(inbound: &RoundMessage, star: bool) -> Option<RoundMessage> {
    let message = match inbound.message {
        Control::Quiesced(_) if star => Control::Stay,
        Control::Quiesced(_) => Control::Reverted,
        Control::Revert { .. } if star => Control::Stay,
        Control::Revert { .. } => Control::Reverted,
        _ => return None,
    };
    Some(RoundMessage { message, ..*inbound })
}

#[cfg(test)]
#[path = "revert_tests.rs"]
mod tests;
