//! Connections of StaR revert to RC while their programs run: as the card of the stateless end has room for
//! them, as that of the stateful end has too many and wants the other to keep them, or as a program wants
//! another role.

use alloc::boxed::Box;

use starverbs_core::room::is_room_for;
use starverbs_core::{Nanos, Qpn};

use crate::card::stateful;
use crate::control::{Control, Preference, Role};
use crate::negotiate::{Beginning, Negotiation, Outcome, Terms};
use crate::quiesce::CardQp;
use crate::renegotiation::{RoundMessage, is_new};
use crate::revert::{Reversion, RevertOutcome, StarEnd, answer, suits};

use super::super::endpoints::{Endpoints, Stateless};
use super::super::{EndpointHost, Note, Turn};
use super::messages::send_round;
use super::{CardIdentity, End, Roles};

/// Within such a time a stateful end that ran answers the Setup of its peer, if StaR's ports are open, ns.
const FIRST_ANSWER: Nanos = 100_000_000;
/// The same of an end that its program has just connected, ns: its process may be waiting for a CPU.
const FIRST_ANSWER_OF_NEW: Nanos = 2_000_000_000;

impl<E: EndpointHost> Roles<E> {
    /// Asks the peer of an end of StaR to revert.
    pub(super) fn ask_to_revert(&mut self, turn: &mut Turn<'_, E>, endpoints: &mut Endpoints<E>, qpn: Qpn) {
        let Some(end) = self.ends.get(qpn) else { return };
        let (Some((role, has_begun)), preference, av) =
            (settled(turn, endpoints, end), end.preference, end.av)
        else {
            return;
        };
        let mine = self.terms(turn, qpn, preference, &av);
        let Some(end) = self.ends.get_mut(qpn).filter(|end| end.rounds.is_idle()) else { return };
        if !is_room_for(size_of::<Reversion>()) {
            return;
        }
        let round = end.rounds.next_round();
        end.rounds.gives_up = !has_begun;
        end.rounds.reversion = Some(Box::new(Reversion::ask(round, role, mine, turn.now)));
        self.balance.ask_for(&mut end.rounds);
        self.drive_reversion(turn, endpoints, qpn, None);
    }

    /// A message of a round from the peer of an end. False: it is not about reverting.
    pub(super) fn on_revert_message(
        &mut self,
        turn: &mut Turn<'_, E>,
        endpoints: &mut Endpoints<E>,
        qpn: Qpn,
        message: &RoundMessage,
    ) -> bool {
        let Some(end) = self.ends.get(qpn) else { return true };
        let round = end.rounds.reversion.as_ref().map(|reversion| reversion.round());
        if round == Some(message.round) {
            self.drive_reversion(turn, endpoints, qpn, Some(&message.message));
            return true;
        }
        let new = is_new(message.round, end.rounds.last);
        match message.message {
            /* only a plain end sends that */
            Control::Renegotiate { .. } if new && round.is_some() => {
                self.with_reversion(turn, endpoints, qpn, |reversion, end| reversion.peer_has_reverted(end));
                self.end_reversion(turn, qpn);
                return false;
            }
            Control::Revert { preference, stateful, threshold } if new => {
                let gid = end.av.dgid;
                let theirs = Terms { preference, stateful, threshold, gid, qpn: end.peer };
                if self.on_revert_request(turn, endpoints, qpn, (message.round, &theirs)) {
                    return true;
                }
            }
            Control::Revert { .. } | Control::Quiesced(_) => {}
            Control::Reverted | Control::Stay => return true,
            _ => return false,
        }
        let Some(end) = self.ends.get(qpn).filter(|end| !end.rounds.is_renegotiating()) else { return true };
        if let Some(answer) = answer(message, end.is_star()) {
            send_round(turn, end.qps(), &end.av, &answer);
        }
        true
    }

    /// The peer asks to revert. Whether this end agrees, and a round has begun.
    fn on_revert_request(
        &mut self,
        turn: &mut Turn<'_, E>,
        endpoints: &mut Endpoints<E>,
        qpn: Qpn,
        (round, theirs): (u16, &Terms),
    ) -> bool {
        /* the peer has given up the round before */
        self.with_reversion(turn, endpoints, qpn, |reversion, end| {
            reversion.stay(end);
        });
        self.end_reversion(turn, qpn);
        let Some(end) = self.ends.get_mut(qpn) else { return false };
        end.rounds.last = round;
        let (preference, av, ignores) = (end.preference, end.av, end.rounds.ignores_peer(turn.now));
        let Some((role, has_begun)) = settled(turn, endpoints, end) else { return false };
        let mine = self.terms(turn, qpn, preference, &av);
        /* before SL has said all that it begins with, it may not know of this end */
        let unknown = stateful(turn.nic, qpn).is_some_and(|stateful| !stateful.is_open());
        let agrees = !has_begun || !ignores && (unknown || suits(role, &mine, theirs));
        if !agrees || !is_room_for(size_of::<Reversion>()) {
            return false;
        }
        let now = turn.now;
        let asked =
            with_end(turn, endpoints, (qpn, role), |end| Reversion::asked(round, role, mine, now, end));
        let (Some(reversion), Some(end)) = (asked, self.ends.get_mut(qpn)) else { return false };
        end.rounds.reversion = Some(Box::new(reversion));
        (end.rounds.asked, end.rounds.gives_up) = (false, !has_begun);
        self.drive_reversion(turn, endpoints, qpn, None);
        true
    }

    /// Goes on with a round: takes a message of the peer, or sends what is due.
    pub(super) fn drive_reversion(
        &mut self,
        turn: &mut Turn<'_, E>,
        endpoints: &mut Endpoints<E>,
        qpn: Qpn,
        message: Option<&Control>,
    ) {
        let now = turn.now;
        /* its Setup was answered meanwhile */
        let gives_up = self.ends.get(qpn).is_some_and(|end| end.rounds.gives_up);
        let has_begun = gives_up && endpoints.has_begun(qpn);
        let answer = self.with_reversion(turn, endpoints, qpn, |reversion, end| match message {
            _ if has_begun && reversion.is_asking() => {
                reversion.stay(end);
                None
            }
            Some(message) => reversion.handle(now, message, end),
            None => reversion.poll(now, end),
        });
        let Some(end) = self.ends.get(qpn) else { return };
        if let Some(answer) = answer.flatten() {
            send_round(turn, end.qps(), &end.av, &answer);
        }
        if let Some(due) = end.rounds.reversion.as_ref().and_then(|reversion| reversion.deadline()) {
            self.timers.arm(end.timer, due.max(now + 1), qpn);
            return self.release_slot(qpn);
        }
        self.end_reversion(turn, qpn);
    }

    /// The card may ask for another connection while a quiesced end waits for its peer, perhaps for long.
    fn release_slot(&mut self, qpn: Qpn) {
        let Some(end) = self.ends.get_mut(qpn) else { return };
        let quiesced = end.rounds.reversion.as_ref().is_some_and(|reversion| reversion.is_quiesced());
        if quiesced {
            self.balance.give_back(&mut end.rounds);
        }
    }

    fn with_reversion<R>(
        &mut self,
        turn: &mut Turn<'_, E>,
        endpoints: &mut Endpoints<E>,
        qpn: Qpn,
        call: impl FnOnce(&mut Reversion, &mut dyn StarEnd) -> R,
    ) -> Option<R> {
        let end = self.ends.get_mut(qpn)?;
        let role = end.role()?;
        let reversion = end.rounds.reversion.as_mut()?;
        Some(with_end(turn, endpoints, (qpn, role), |end| call(reversion, end)))
    }

    /// A round is over, perhaps.
    fn end_reversion(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn) {
        let Some(end) = self.ends.get_mut(qpn) else { return };
        let Some(outcome) = end.rounds.reversion.as_ref().and_then(|reversion| reversion.outcome()) else {
            return;
        };
        self.timers.disarm(end.timer);
        self.balance.stop(&mut end.rounds);
        let gave_up = core::mem::take(&mut end.rounds.gives_up);
        if outcome == RevertOutcome::Stays && gave_up {
            return self.watch_beginning(turn.now, qpn);
        }
        if outcome == RevertOutcome::Stays {
            turn.env.note(qpn, &Note::Stays);
            end.rounds.failed(turn.now);
            return self.pursue_later(qpn);
        }
        turn.env.note(qpn, &Note::Reverts);
        let (preference, av) = (end.preference, end.av);
        let mine = self.terms(turn, qpn, preference, &av);
        let CardIdentity { boot, ports, .. } = self.identity;
        let crowded = mine.stateful > mine.threshold;
        let Some(end) = self.ends.get_mut(qpn) else { return };
        end.negotiation = Negotiation::settled(mine, boot, ports, Outcome::Plain);
        end.may_begin = true;
        end.beginning = Beginning::default();
        match gave_up {
            true => {
                end.rounds.failed(turn.now);
                /* whoever asked: it would come to the same */
                end.rounds.ignore_until = end.rounds.not_before;
                end.pursued = end.preference != Preference::Auto;
            }
            false => end.rounds.reverted(turn.now, crowded),
        }
        let until = end.rounds.not_before;
        self.balance.look_at(until);
        self.stats.star_plain_qps.inc();
        self.stats.star_returns.inc();
        self.epochs.end(qpn, turn.now);
        self.pursue_later(qpn);
    }

    /// An end of StaR looks at times whether its peer has begun, too: that one may have given up and be
    /// plain, or StaR's ports be closed.
    pub(super) fn watch_beginning(&mut self, now: Nanos, qpn: Qpn) {
        let Some(end) = self.ends.get_mut(qpn) else { return };
        if end.waits_for_peer() {
            return self.look_later(now, qpn);
        }
        end.asks_at = now + if end.rounds.switched { FIRST_ANSWER } else { FIRST_ANSWER_OF_NEW };
        self.timers.arm(end.timer, end.asks_at, qpn);
    }

    /// The program has this preference from now on. False: the peer's card has no StaR, or the end had no
    /// preference when it was connected.
    pub fn set_preference(
        &mut self,
        turn: &mut Turn<'_, E>,
        endpoints: &mut Endpoints<E>,
        qpn: Qpn,
        preference: Preference,
    ) -> bool {
        let Some(end) = self.ends.get_mut(qpn) else { return false };
        let settled = end.negotiation.outcome().is_some();
        if settled && !end.negotiation.has_answer() && !self.plain.has_star(&end.av.dgid) {
            return false;
        }
        (end.preference, end.pursued) = (preference, preference != Preference::Auto);
        (end.rounds.not_before, end.rounds.ignore_until) = (turn.now, turn.now);
        if settled && end.rounds.is_idle() {
            self.pursue(turn, endpoints, qpn);
        }
        true
    }

    /// Asks the peer for the role that the program wants.
    pub(super) fn pursue(&mut self, turn: &mut Turn<'_, E>, endpoints: &mut Endpoints<E>, qpn: Qpn) {
        let Some(end) = self.ends.get_mut(qpn).filter(|end| end.pursued && end.rounds.is_idle()) else {
            return;
        };
        let role = end.role();
        match (end.preference, role) {
            (Preference::Auto, _)
            | (Preference::Off, None)
            | (Preference::Stateless, Some(Role::Stateless))
            | (Preference::Stateful, Some(Role::Stateful)) => end.pursued = false,
            (_, None) if end.is_plain() => self.ask(turn, endpoints, qpn),
            (_, Some(_)) if begun(turn, endpoints, end).is_some() => self.ask_to_revert(turn, endpoints, qpn),
            _ => {}
        }
        /* it could not ask now */
        if let Some(end) = self.ends.get_mut(qpn).filter(|end| end.pursued && end.rounds.is_idle()) {
            end.rounds.not_before = end.rounds.not_before.max(turn.now + Beginning::LOOK);
        }
        self.pursue_later(qpn);
    }

    /// If the program wants another role, and no round is under way, the peer is asked again.
    pub(super) fn pursue_later(&mut self, qpn: Qpn) {
        if let Some(end) = self.ends.get(qpn).filter(|end| end.pursued && end.rounds.is_idle()) {
            self.timers.arm(end.timer, end.rounds.not_before, qpn);
        }
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
}

/// The role of an end of StaR, if it and its peer have begun.
pub(super) fn begun<E: EndpointHost>(
    turn: &Turn<'_, E>,
    endpoints: &Endpoints<E>,
    end: &End,
) -> Option<Role> {
    let role = end.role()?;
    let there = match role {
        Role::Stateless => endpoints.has_begun(end.qpn),
        Role::Stateful => stateful(turn.nic, end.qpn).is_some(),
    };
    there.then_some(role)
}

/// As [`begun`], and true; or false with the role of an end whose SL's Setup has not come or has no answer.
fn settled<E: EndpointHost>(turn: &Turn<'_, E>, endpoints: &Endpoints<E>, end: &End) -> Option<(Role, bool)> {
    if let Some(role) = begun(turn, endpoints, end) {
        return Some((role, true));
    }
    let role = end.role()?;
    let waits = match role {
        Role::Stateless => endpoints.is_beginning(end.qpn),
        Role::Stateful => end.waits_for_peer() && turn.nic.is_held(end.qpn),
    };
    waits.then_some((role, false))
}

fn with_end<E: EndpointHost, R>(
    turn: &mut Turn<'_, E>,
    endpoints: &mut Endpoints<E>,
    (qpn, role): (Qpn, Role),
    call: impl FnOnce(&mut dyn StarEnd) -> R,
) -> R {
    match role {
        Role::Stateless => call(&mut Stateless { endpoints, turn, qpn }),
        Role::Stateful => call(&mut CardQp { turn, qpn }),
    }
}
