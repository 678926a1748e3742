//! Rounds of connections that run: they become StaR's, or plain, as their cards or programs want.

use alloc::boxed::Box;

use starverbs_core::room::is_room_for;
use starverbs_core::{Nanos, Qpn};

use crate::control::{Control, Preference, Role, Terms};
use crate::negotiate::{Beginning, Outcome};
use crate::role_message::RoleMessage;
use crate::round::{Round, is_new, settled, suits};

use super::super::{EndpointHost, Note, Turn};
use super::end::HostEnd;
use super::messages::send_message;
use super::{End, Roles, is_plain};

/// First time until a connection that stayed what it was is asked for again, ns; doubled each time.
pub(super) const AGAIN: Nanos = 1_000_000_000;
/// Doubled so often at most.
const LONGEST: u32 = 6;
/// Within such a time a stateful end that ran answers the Setup of its peer, if StaR's ports are open, ns.
const FIRST_ANSWER: Nanos = 100_000_000;

/// A connection's rounds.
#[derive(Default)]
pub(super) struct Rounds {
    /// The one under way
    pub(super) round: Option<Box<Round>>,
    /// This end has asked
    asked: bool,
    /// It gives up a StaR connection whose stateful end has not begun
    pub(super) gives_up: bool,
    /// Number of the last one
    last: u16,
    /// How many in a row changed nothing
    failures: u32,
    /// This end does not ask before
    pub(super) not_before: Nanos,
    /// It refuses its peer's rounds before, as the last came to nothing
    pub(super) ignore_until: Nanos,
}

impl Rounds {
    pub(super) fn is_idle(&self) -> bool {
        self.round.is_none()
    }

    /// Whether SF waits for SL, perhaps for long.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.round.as_ref().is_some_and(|round| round.is_in_doubt())
    }

    /// Whether this end has asked for a change that is to be over soon.
    pub(super) fn is_asking(&self) -> bool {
        self.asked && !self.gives_up && !self.is_idle() && !self.is_in_doubt()
    }

    /// The connection is what it was, or cannot be what it became: its requests are not quiesced again and
    /// again.
    pub(super) fn failed(&mut self, now: Nanos) {
        self.not_before = now + (AGAIN << self.failures.min(LONGEST));
        self.failures = self.failures.saturating_add(1);
        if !self.asked || self.gives_up {
            self.ignore_until = now + AGAIN;
        }
    }
}

impl<E: EndpointHost> Roles<E> {
    /// Asks the peer of a connection, which may change, to change it.
    pub(super) fn ask(&mut self, at: &mut HostEnd<'_, '_, E>) {
        let Some(end) = self.ends.get(at.qpn).filter(|end| end.rounds.is_idle()) else { return };
        let number = end.rounds.last.wrapping_add(1);
        self.begin_round(at, number, true);
        self.drive_round(at, None);
    }

    /// A round of this number begins, if there is memory for it; `asked`: this end does.
    fn begin_round(&mut self, at: &HostEnd<'_, '_, E>, number: u16, asked: bool) {
        let Some(end) = self.ends.get(at.qpn).filter(|_| is_room_for(size_of::<Round>())) else { return };
        let (mine, is_lower) = (self.terms(at.turn, end.preference), end.negotiation.is_lower());
        let from = end.negotiation.outcome().unwrap_or(Outcome::Plain);
        let round = Round::ask(number, mine, is_lower, from, at.turn.now);
        let gives_up = at.has_not_begun(end);
        let Some(end) = self.ends.get_mut(at.qpn) else { return };
        if !end.waits_for_peer() {
            /* of a wait that is over */
            end.beginning = Beginning::default();
        }
        let rounds = &mut end.rounds;
        (rounds.asked, rounds.gives_up, rounds.last) = (asked, gives_up, number);
        rounds.round = Some(Box::new(round));
    }

    /// A message of a round from the peer of a connection. One to an incarnation before has no effect, nor
    /// has a Change of another version. Questions are answered all the same, so that who asks knows whom.
    pub(super) fn on_round_message(
        &mut self,
        at: &mut HostEnd<'_, '_, E>,
        number: u16,
        inbound: &RoleMessage,
    ) {
        let message = &inbound.message;
        let Some(end) = self.ends.get_mut(at.qpn) else { return };
        let mut counts = inbound.to == end.incarnation;
        if let Control::Change { version, star, terms, .. } = message
            && counts
        {
            end.negotiation.note_version(*version);
            counts = !end.negotiation.is_foreign();
            if counts && is_new(number, end.rounds.last) {
                self.on_change(at, number, *star, terms);
            }
        }
        let Some(end) = self.ends.get_mut(at.qpn) else { return };
        if counts && end.rounds.round.as_ref().is_some_and(|round| round.number == number) {
            end.peer_incarnation = inbound.from;
            return self.drive_round(at, Some(message));
        }
        match (message, end.negotiation.outcome()) {
            /* nobody will begin: the round may have been forged */
            (Control::Settled { star: false, .. }, _)
                if counts && number == end.rounds.last && end.waits_for_peer() =>
            {
                self.withdraw(at.turn, at.qpn);
            }
            (Control::Settled { .. }, _) | (_, None) => {}
            (_, Some(is)) => {
                let answer = inbound.answered(end.incarnation, settled(number, is));
                send_message(at.turn, end.qps(), &end.av, |room| answer.encode(room));
            }
        }
    }

    /// The peer asks in a new round. What was under way is over, as it says what the peer is; if this end
    /// agrees, the round begins. Its number counts in any case, so that the next message of either end is new
    /// to the other.
    fn on_change(&mut self, at: &mut HostEnd<'_, '_, E>, number: u16, star: bool, theirs: &Terms) {
        self.drive_round(at, Some(&Control::Settled { round: number, star }));
        if let Some(end) = self.ends.get_mut(at.qpn) {
            end.rounds.last = number;
        }
        let free = |end: &&End| end.rounds.is_idle() && end.is_star() == star;
        let Some(end) = self.ends.get(at.qpn).filter(free) else { return };
        let (mine, is_lower) = (self.terms(at.turn, end.preference), end.negotiation.is_lower());
        let is = end.negotiation.outcome().unwrap_or(Outcome::Plain);
        let agrees = || suits(is, &mine, theirs, is_lower) && self.may_change(at.turn, at.endpoints, end);
        if at.has_not_begun(end) || at.turn.now >= end.rounds.ignore_until && agrees() {
            self.begin_round(at, number, false);
        }
    }

    /// Goes on with a round: takes a message of the peer, or sends what is due.
    pub(super) fn drive_round(&mut self, at: &mut HostEnd<'_, '_, E>, message: Option<&Control>) {
        let (now, qpn) = (at.turn.now, at.qpn);
        let in_doubt = self.ends.get(qpn).is_some_and(|end| end.rounds.is_in_doubt());
        let overdue = message.is_none() && in_doubt && self.is_overdue(at.turn, qpn);
        let alone = in_doubt && is_plain(at.turn.nic, qpn) || overdue;
        let Some(end) = self.ends.get_mut(qpn) else { return };
        let (qps, av) = (end.qps(), end.av);
        let Some(round) = &mut end.rounds.round else { return };
        /* its Setup was answered meanwhile */
        let has_begun = end.rounds.gives_up && round.is_asking() && at.endpoints.has_begun(qpn);
        let is = Control::Settled { round: round.number, star: has_begun };
        let answer = match if alone || has_begun { Some(&is) } else { message } {
            Some(message) => round.handle(now, message, at),
            None => round.poll(now, at),
        };
        let deadline = round.deadline();
        if let Some(answer) = answer.map(|answer| end.message(answer)) {
            send_message(at.turn, qps, &av, |room| answer.encode(room));
        }
        match deadline {
            Some(due) => self.timers.arm(end.timer, due.max(now + 1), qpn),
            None => self.end_round(at.turn, qpn),
        }
    }

    /// A round is over.
    fn end_round(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn) {
        let Some(end) = self.ends.get_mut(qpn) else { return };
        let Some(round) = end.rounds.round.take() else { return };
        let now = turn.now;
        self.timers.disarm(end.timer);
        let Some(outcome) = round.outcome().filter(|outcome| *outcome != round.from) else {
            if end.rounds.gives_up {
                return self.await_answer(now, qpn);
            }
            turn.env.note(qpn, &Note::Stays);
            end.rounds.failed(now);
            return self.balance.look_at(end.rounds.not_before);
        };
        end.negotiation.settle(outcome);
        /* a stateless end has begun */
        end.may_begin = end.role() != Some(Role::Stateless);
        if end.is_star() {
            turn.env.note(qpn, &Note::Leaves);
            self.stats.star_plain_qps.sub(1);
            self.stats.star_switches.inc();
            (end.grace, end.beginning) = (FIRST_ANSWER, Beginning::default());
            if !end.waits_for_peer() {
                end.note_reached();
            }
            self.balance.look_at(now);
            return self.await_answer(now, qpn);
        }
        if end.rounds.gives_up {
            end.rounds.failed(now);
            end.has_stated = true;
        } else {
            (end.rounds.failures, end.rounds.not_before) = (0, now);
            end.note_reached();
        }
        self.stats.star_returns.inc();
        self.epochs.end(qpn, now);
        self.has_become_plain(turn, qpn, &Note::Reverts);
    }

    /// An end of StaR looks at times whether its peer has begun, too: that one may have given up and be
    /// plain, or StaR's ports be closed.
    pub(super) fn await_answer(&mut self, now: Nanos, qpn: Qpn) {
        let Some(end) = self.ends.get(qpn) else { return };
        let wait = if end.waits_for_peer() { Beginning::LOOK } else { end.grace };
        self.timers.arm(end.timer, now + wait, qpn);
    }
}

impl End {
    /// What it has become of StaR.
    pub(super) fn role(&self) -> Option<Role> {
        match self.negotiation.outcome() {
            Some(Outcome::Star { role, .. }) => Some(role),
            _ => None,
        }
    }

    pub(super) fn is_star(&self) -> bool {
        self.role().is_some()
    }

    /// If it is what its program has stated, nobody is asked for that again.
    pub(super) fn note_reached(&mut self) {
        let reached = matches!(
            (self.preference, self.role()),
            (Preference::Off, None)
                | (Preference::Stateless, Some(Role::Stateless))
                | (Preference::Stateful, Some(Role::Stateful))
        );
        self.has_stated &= !reached;
    }

    /// Whether it may become one of StaR.
    pub(super) fn is_plain(&self) -> bool {
        self.negotiation.outcome() == Some(Outcome::Plain) && self.may_begin
    }
}
