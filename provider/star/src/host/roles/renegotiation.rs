//! Renegotiation: connections of plain RC become StaR's while their programs run, as their card has come to
//! have too many.
//!
//! A card beyond its threshold asks some peers at a time, until it is not. It does not ask for connections
//! whose program has a preference other than auto. The outcome is settled as at the beginning.

use alloc::boxed::Box;

use starverbs_core::room::is_room_for;
use starverbs_core::{Nanos, Qpn};

use crate::control::{Control, Preference, Role};
use crate::endpoint::Patience;
use crate::env::QpPair;
use crate::negotiate::{Beginning, Outcome, Terms};
use crate::quiesce::CardQp;
use crate::renegotiation::{Renegotiation, RoundInit, RoundMessage, answer, is_new, suits};
use crate::revert::{Reversion, revert_threshold};

use super::super::endpoints::Endpoints;
use super::super::{EndpointHost, Note, Turn};
use super::messages::send_round;
use super::revert::begun;
use super::{CardIdentity, End, Roles};

/// Time between two looks at the balance.
const EVERY: Nanos = 50_000_000;
/// First time until a connection that stayed plain is looked at again, ns; doubled each time.
const AGAIN: Nanos = 1_000_000_000;
/// Doubled so often at most.
const LONGEST: u32 = 6;
/// Longest time between two looks at the balance that find nobody to ask.
const SELDOM: Nanos = 60_000_000_000;
/// The first of them is doubled so often at most.
const LONGEST_PAUSE: u32 = 11;
/// Connections that this card has asked for at a time.
const AT_ONCE: u32 = 16;
/// A peer may have a connection change roles once each [`AGAIN`] in the long run, and so many times more at
/// once.
const AT_WILL: Nanos = 8;

/// A connection's rounds.
#[derive(Default)]
pub(super) struct Rounds {
    /// The one under way in which roles are settled
    renegotiation: Option<Box<Renegotiation>>,
    /// The one under way by which it becomes plain
    pub(super) reversion: Option<Box<Reversion>>,
    /// This end has asked
    pub(super) asked: bool,
    /// And is one of those that its card is asking for
    counts: bool,
    /// The reversion gives up a StaR connection that has not begun
    pub(super) gives_up: bool,
    /// Number of the last one
    pub(super) last: u16,
    /// It made the connection StaR's
    pub(super) switched: bool,
    /// How many in a row left it plain
    failures: u32,
    /// This end does not ask before
    pub(super) not_before: Nanos,
    /// It refuses its peer's rounds before, as the last came to nothing
    pub(super) ignore_until: Nanos,
    /// When the changes that the peer has asked for would be over if each took [`AGAIN`]
    paced_until: Nanos,
}

impl Rounds {
    /// Whether a round is under way in which roles are settled.
    pub(super) fn is_renegotiating(&self) -> bool {
        self.renegotiation.is_some()
    }

    /// Whether no round is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.renegotiation.is_none() && self.reversion.is_none()
    }

    /// Whether one is to end soon.
    pub(super) fn is_busy(&self) -> bool {
        self.is_renegotiating() || self.reversion.as_ref().is_some_and(|reversion| reversion.is_busy())
    }

    /// Whether it refuses its peer's rounds now.
    pub(super) fn ignores_peer(&self, now: Nanos) -> bool {
        now < self.ignore_until || self.paced_until > now + (AT_WILL - 1) * AGAIN
    }

    /// A round has changed the connection's roles. Rounds of the peer are paced.
    fn changed(&mut self, now: Nanos) {
        if !self.asked {
            self.paced_until = self.paced_until.max(now) + AGAIN;
        }
    }

    /// The number of one that this end begins.
    pub(super) fn next_round(&mut self) -> u16 {
        self.last = self.last.wrapping_add(1);
        self.last
    }

    /// The connection is plain again. `crowded`: the card has too many, and wants its peer to keep it.
    pub(super) fn reverted(&mut self, now: Nanos, crowded: bool) {
        (self.switched, self.failures, self.ignore_until) = (false, 0, 0);
        self.changed(now);
        self.not_before = if crowded { now } else { now + AGAIN };
    }

    /// The roles stayed: its requests are not quiesced again and again.
    pub(super) fn failed(&mut self, now: Nanos) {
        self.switched = false;
        self.not_before = now + (AGAIN << self.failures.min(LONGEST));
        if !self.asked {
            self.ignore_until = self.not_before;
        }
        self.failures += 1;
    }
}

/// When the card looks whether it has too many connections, or too few.
#[derive(Default)]
pub(super) struct Balance {
    /// When it is looked at next
    due: Nanos,
    /// Looks in a row that found no connection to ask for
    empty_looks: u32,
    /// Rounds that this card has asked for
    asking: u32,
    /// Since when the card has room to take connections back
    uncrowded_since: Option<Nanos>,
}

/// How many connections a card wants.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Want {
    /// Fewer, by so many
    Fewer(u32),
    /// It would take so many back
    More(u32),
    /// Nothing
    Nothing,
}

impl Balance {
    /// A look found nobody to ask before `later`; `None`: at any time. Looks that find nobody back off.
    fn none_free(&mut self, now: Nanos, later: Option<Nanos>) {
        self.due = later.unwrap_or(now + (EVERY << self.empty_looks).min(SELDOM));
        self.empty_looks = (self.empty_looks + 1).min(LONGEST_PAUSE);
    }

    /// There is one more connection that may be asked for, from then on.
    pub(super) fn look_at(&mut self, then: Nanos) {
        (self.due, self.empty_looks) = (self.due.min(then + EVERY), 0);
    }

    /// The threshold was changed.
    pub(super) fn look_now(&mut self, now: Nanos) {
        (self.due, self.empty_looks, self.uncrowded_since) = (now, 0, Some(now));
    }

    /// This card asks for a connection.
    pub(super) fn ask_for(&mut self, rounds: &mut Rounds) {
        (rounds.asked, rounds.counts) = (true, true);
        self.asking += 1;
    }

    /// It may ask for another in place of this one.
    pub(super) fn give_back(&mut self, rounds: &mut Rounds) {
        if core::mem::take(&mut rounds.counts) {
            self.asking = self.asking.saturating_sub(1);
        }
    }

    /// A connection's round is over, if there was one.
    pub(super) fn stop(&mut self, rounds: &mut Rounds) -> Option<Box<Renegotiation>> {
        self.give_back(rounds);
        rounds.reversion = None;
        rounds.renegotiation.take()
    }
}

/// Connections whose peers are asked.
struct AskedPeers {
    some: [Qpn; AT_ONCE as usize],
    count: usize,
    /// When another may be asked
    later: Option<Nanos>,
}

impl AskedPeers {
    /// With one that may be asked then.
    fn or_later(mut self, later: Option<Nanos>) -> Self {
        self.later = [self.later, later].into_iter().flatten().min();
        self
    }
}

impl<E: EndpointHost> Roles<E> {
    /// When the balance is to be looked at, with so many connections on the card; `away`: some have left it.
    pub(in crate::host) fn balance_due(&self, connections: u32, away: bool) -> Option<Nanos> {
        match self.want(connections) {
            Want::Fewer(_) => (!self.ends.is_empty()).then_some(self.balance.due),
            Want::More(_) if away => Some(self.balance.uncrowded_since.map_or(0, |_| self.balance.due)),
            /* the card has no room any more: forget since when it had */
            _ => self.balance.uncrowded_since.map(|_| 0),
        }
    }

    fn want(&self, connections: u32) -> Want {
        let threshold = self.identity.threshold;
        if connections > threshold {
            Want::Fewer(connections - threshold)
        } else if connections < revert_threshold(threshold) {
            Want::More(revert_threshold(threshold) - connections)
        } else {
            Want::Nothing
        }
    }

    /// Asks for some of the connections of which there are too many, or that may come back.
    pub(in crate::host) fn balance(&mut self, turn: &mut Turn<'_, E>, endpoints: &mut Endpoints<E>) {
        let connections = turn.nic.connection_count();
        let away = !endpoints.is_empty();
        let want = self.want(connections);
        if !away || !matches!(want, Want::More(_)) {
            self.balance.uncrowded_since = None;
        } else if self.balance.uncrowded_since.is_none() {
            /* not at once: it may be crowded again in a moment */
            self.balance.uncrowded_since = Some(turn.now);
            (self.balance.due, self.balance.empty_looks) = (turn.now + AGAIN, 0);
        }
        if self.balance_due(connections, away).is_none_or(|due| due > turn.now) {
            return;
        }
        self.balance.due = turn.now + EVERY;
        let count = match want {
            Want::Fewer(count) | Want::More(count) => count,
            Want::Nothing => return,
        };
        let most = count.min(AT_ONCE).saturating_sub(self.balance.asking) as usize;
        if most == 0 {
            return;
        }
        let found = match want {
            Want::More(_) => {
                let away = |end: &End| begun(turn, endpoints, end) == Some(Role::Stateless);
                self.find(turn.now, most, |end| end.may_be_changed() && away(end))
            }
            /* plain ones first: those that it keeps as SF need room at their peers */
            _ => match self.find(turn.now, most, |end| self.may_be_asked(end)) {
                AskedPeers { count: 0, later, .. } => {
                    let kept = |end: &End| begun(turn, endpoints, end) == Some(Role::Stateful);
                    let found = self.find(turn.now, most, |end| end.may_be_changed() && kept(end));
                    found.or_later(later)
                }
                found => found,
            },
        };
        if found.count == 0 {
            self.balance.none_free(turn.now, found.later);
        }
        for qpn in &found.some[..found.count] {
            if self.ends.get(*qpn).is_some_and(End::is_star) {
                self.ask_to_revert(turn, endpoints, *qpn);
            } else {
                self.ask(turn, endpoints, *qpn);
            }
        }
    }

    /// Some connections that are such, `most` at most, whose round may begin now.
    fn find(&self, now: Nanos, most: usize, is_such: impl Fn(&End) -> bool) -> AskedPeers {
        let mut found = AskedPeers { some: [Qpn::default(); AT_ONCE as usize], count: 0, later: None };
        for end in self.ends.all().filter(|end| is_such(end)) {
            let until = end.rounds.not_before;
            if until > now {
                found = found.or_later(Some(until));
            } else if found.count < most {
                found.some[found.count] = end.qpn;
                found.count += 1;
            }
        }
        found
    }

    /// Whether the peer of a connection may be asked, at some time.
    fn may_be_asked(&self, end: &End) -> bool {
        let speaks = || end.negotiation.has_answer() || self.plain.has_star(&end.av.dgid);
        end.preference == Preference::Auto && end.is_plain() && speaks()
    }

    pub(super) fn ask(&mut self, turn: &mut Turn<'_, E>, endpoints: &mut Endpoints<E>, qpn: Qpn) {
        let Some((mine, init)) = self.what_for(turn, qpn) else { return };
        let Some(end) = self.ends.get_mut(qpn) else { return };
        if !is_room_for(size_of::<Renegotiation>()) {
            return;
        }
        let rounds = &mut end.rounds;
        let round = rounds.next_round();
        rounds.renegotiation = Some(Box::new(Renegotiation::ask(round, mine, init, turn.now)));
        self.balance.ask_for(rounds);
        self.drive_renegotiation(turn, endpoints, qpn, None);
    }

    /// What this end brings to a round. `None`: the card does not have it.
    fn what_for(&self, turn: &Turn<'_, E>, qpn: Qpn) -> Option<(Terms, RoundInit)> {
        let end = self.ends.get(qpn)?;
        let attr = turn.nic.query_qp(qpn).ok()?;
        let CardIdentity { boot, ports, .. } = self.identity;
        let patience = Patience::of(attr.timeout, attr.retry_cnt).time;
        Some((self.terms(turn, qpn, end.preference, &end.av), RoundInit { boot, ports, patience }))
    }

    /// A message of a round from the peer of a connection.
    pub(super) fn on_round_message(
        &mut self,
        turn: &mut Turn<'_, E>,
        endpoints: &mut Endpoints<E>,
        qpn: Qpn,
        message: &RoundMessage,
    ) {
        if self.on_revert_message(turn, endpoints, qpn, message) {
            return;
        }
        if let Control::Renegotiate { preference, stateful, threshold } = message.message {
            self.on_renegotiate(turn, qpn, message.round, (preference, stateful, threshold));
        }
        let Some(end) = self.ends.get_mut(qpn).filter(|end| end.rounds.reversion.is_none()) else { return };
        if end.rounds.renegotiation.as_ref().is_some_and(|round| round.round() == message.round) {
            return self.drive_renegotiation(turn, endpoints, qpn, Some(&message.message));
        }
        let last = message.round == end.rounds.last && end.is_star();
        /* the peer is plain, so nobody will begin: the round may have been forged */
        if last && end.rounds.switched && message.message == Control::Plain && end.may_begin {
            return self.withdraw(turn, qpn);
        }
        let peer = end.peer_qp();
        let negotiation = last.then_some(&mut end.negotiation);
        if let Some(answer) = answer(message, peer, negotiation) {
            send_round(turn, end.qps(), &end.av, &answer);
        }
    }

    /// The peer's card has too many connections: if this end agrees, a round begins. Its number counts in any
    /// case, so that the next message of either end is new to the other.
    fn on_renegotiate(
        &mut self,
        turn: &mut Turn<'_, E>,
        qpn: Qpn,
        round: u16,
        (preference, stateful, threshold): (Preference, u32, u32),
    ) {
        let Some((mine, init)) = self.what_for(turn, qpn) else { return };
        let Some(end) = self.ends.get_mut(qpn) else { return };
        let theirs = Terms { preference, stateful, threshold, gid: end.av.dgid, qpn: end.peer };
        if end.is_star() || !is_new(round, end.rounds.last) {
            return;
        }
        end.rounds.last = round;
        let free = end.is_plain() && !end.rounds.ignores_peer(turn.now);
        if !free || !suits(&mine, &theirs) || !is_room_for(size_of::<Renegotiation>()) {
            return;
        }
        let (now, mut requests) = (turn.now, CardQp { turn, qpn });
        let renegotiation = Renegotiation::asked(round, mine, init, now, &mut requests);
        end.rounds.asked = false;
        end.rounds.renegotiation = renegotiation.map(Box::new);
    }

    /// Goes on with a round: takes a message of the peer, or sends what is due.
    pub(super) fn drive_renegotiation(
        &mut self,
        turn: &mut Turn<'_, E>,
        endpoints: &mut Endpoints<E>,
        qpn: Qpn,
        message: Option<&Control>,
    ) {
        let Some(end) = self.ends.get_mut(qpn) else { return };
        let peer = end.peer_qp();
        let Some(round) = &mut end.rounds.renegotiation else { return };
        let (now, mut requests) = (turn.now, CardQp { turn, qpn });
        let answer = match message {
            Some(message) => round.handle(now, peer, message, &mut requests),
            None => round.poll(now, &mut requests),
        };
        if let Some(answer) = answer {
            send_round(turn, QpPair { from: qpn, to: end.peer }, &end.av, &answer);
        }
        if let Some(due) = round.deadline() {
            return self.timers.arm(end.timer, due.max(turn.now + 1), qpn);
        }
        if self.end_round(turn, qpn) {
            self.settled(turn, endpoints, qpn);
        }
    }

    /// The peer has begun as a stateless end, whatever messages of the round were lost.
    pub(super) fn peer_began(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn) {
        let Some(end) = self.ends.get_mut(qpn) else { return };
        let peer = end.peer_qp();
        let Some(round) = &mut end.rounds.renegotiation else { return };
        let mut requests = CardQp { turn, qpn };
        round.peer_began(peer, &mut requests);
        if round.outcome().is_some() && self.end_round(turn, qpn) {
            self.look_later(turn.now, qpn);
        }
    }

    /// A stateless end could not begin, and is still on the card. If a round settled it, the connection stays
    /// plain, and the peer gets Plain. False: no round has settled it.
    pub(super) fn cancel_switch(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn) -> bool {
        let Some(end) = self.ends.get_mut(qpn).filter(|end| end.rounds.switched) else { return false };
        end.may_begin = true;
        let plain = RoundMessage { round: end.rounds.last, message: Control::Plain };
        send_round(turn, end.qps(), &end.av, &plain);
        self.withdraw(turn, qpn);
        true
    }

    /// Repeats what a round has settled and has not begun: the message may be lost, or the peer have
    /// reverted.
    pub(super) fn repeat_outcome(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn) {
        let Some(end) = self.ends.get(qpn).filter(|end| end.rounds.switched) else { return };
        if let Some(message) = end.negotiation.again() {
            let round = end.rounds.last;
            send_round(turn, end.qps(), &end.av, &RoundMessage { round, message });
        }
    }

    /// A round is over. Whether the connection is one of StaR now.
    fn end_round(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn) -> bool {
        let Some(end) = self.ends.get_mut(qpn) else { return false };
        self.timers.disarm(end.timer);
        end.beginning = Beginning::default();
        let Some(round) = self.balance.stop(&mut end.rounds) else { return false };
        if !matches!(round.outcome(), Some(Outcome::Star { .. })) {
            turn.env.note(qpn, &Note::Stays);
            end.rounds.failed(turn.now);
            self.balance.look_at(end.rounds.not_before);
            self.pursue_later(qpn);
            return false;
        }
        turn.env.note(qpn, &Note::Leaves);
        (end.rounds.last, end.rounds.switched) = (round.round(), true);
        end.rounds.changed(turn.now);
        end.negotiation = round.into_negotiation();
        self.stats.star_plain_qps.sub(1);
        self.stats.star_switches.inc();
        true
    }
}

impl End {
    pub(super) fn is_star(&self) -> bool {
        matches!(self.negotiation.outcome(), Some(Outcome::Star { .. }))
    }

    /// Whether its roles may be settled anew.
    pub(super) fn is_plain(&self) -> bool {
        let plain = self.negotiation.outcome() == Some(Outcome::Plain) && self.may_begin;
        plain && self.rounds.is_idle()
    }

    /// Whether its program leaves its role to the card, and no round is under way.
    fn may_be_changed(&self) -> bool {
        self.preference == Preference::Auto && self.rounds.is_idle()
    }
}
