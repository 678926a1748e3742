//! Roles settled anew: connections of plain RoCEv2 whose card has come to have too many become StaR's, while
//! their programs run.
//!
//! Whose card has more connections than its threshold asks, some peers at a time, until it has not. Nobody is
//! asked on behalf of a program that has said what its ends are to be. What came of it is settled as at the
//! beginning.

use alloc::boxed::Box;

use starverbs_core::room::is_room_for;
use starverbs_core::{Av, Nanos, Qpn};

use crate::control::{Control, Role, Wish};
use crate::homing::{Homing, few};
use crate::library::Patience;
use crate::negotiate::{Beginning, Outcome, Terms};
use crate::quiesce::Resting;
use crate::renew::{Card, Renewal, Renewed, answer, is_new, suits};

use super::super::library::Library;
use super::super::{Host, Note, Turn};
use super::returning::begun;
use super::{End, Identity, Roles, say};

/// Time between two looks at the balance.
const EVERY: Nanos = 50_000_000;
/// Until a connection that stayed plain is looked at again, at first; doubled each time.
const AGAIN: Nanos = 1_000_000_000;
/// Doubled so often at most.
const LONGEST: u32 = 6;
/// Longest time between two looks at the balance that find nobody to ask.
const SELDOM: Nanos = 60_000_000_000;
/// The first of them is doubled so often at most.
const LONGEST_PAUSE: u32 = 11;
/// Connections that this card has asked for at a time.
const AT_ONCE: u32 = 16;
/// A peer may have a connection become something else as often as it likes, but for a time not more often
/// than each [`AGAIN`], and so many times more.
const AT_WILL: Nanos = 8;

/// A connection's rounds.
#[derive(Default)]
pub(super) struct Renewing {
    /// The one under way
    now: Option<Box<Renewal>>,
    /// The one under way by which it becomes plain
    pub(super) homing: Option<Box<Homing>>,
    /// This end has asked
    pub(super) asked: bool,
    /// And is one of those that its card is asking for
    counts: bool,
    /// By it an end gives up what was settled before it has begun
    pub(super) gives_up: bool,
    /// Number of the last one
    pub(super) last: u16,
    /// That was settled in it what the connection is
    pub(super) switched: bool,
    /// How many in a row left it plain
    vain: u32,
    /// This end does not ask before
    pub(super) rests_until: Nanos,
    /// Nor answers to its peer's asking, as that came to nothing
    pub(super) deaf_until: Nanos,
    /// When the rounds for which the peer has asked, and which changed the connection, would be over if each
    /// took [`AGAIN`]
    paced_until: Nanos,
}

impl Renewing {
    /// Whether a round is under way in which roles are settled.
    pub(super) fn lasts(&self) -> bool {
        self.now.is_some()
    }

    /// Whether no round is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.now.is_none() && self.homing.is_none()
    }

    /// Whether something is to come of one soon.
    pub(super) fn is_busy(&self) -> bool {
        self.lasts() || self.homing.as_ref().is_some_and(|homing| homing.is_pressing())
    }

    /// Whether it does not answer to its peer's asking.
    pub(super) fn is_deaf(&self, now: Nanos) -> bool {
        now < self.deaf_until || self.paced_until > now + (AT_WILL - 1) * AGAIN
    }

    /// A round has made the connection something else: its peer does not have that done as fast as messages
    /// travel.
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

    /// The connection is plain again. `crowded`: and the card has too many, so that its peer is to keep it.
    pub(super) fn returned(&mut self, now: Nanos, crowded: bool) {
        (self.switched, self.vain, self.deaf_until) = (false, 0, 0);
        self.changed(now);
        self.rests_until = if crowded { now } else { now + AGAIN };
    }

    /// It stayed plain: nobody makes its requests rest again and again.
    pub(super) fn failed(&mut self, now: Nanos) {
        self.switched = false;
        self.rests_until = now + (AGAIN << self.vain.min(LONGEST));
        if !self.asked {
            self.deaf_until = self.rests_until;
        }
        self.vain += 1;
    }
}

/// How many connections this card has, beside those that it means to be rid of.
#[derive(Default)]
pub(super) struct Balance {
    /// When it is looked at next
    due: Nanos,
    /// How many looks found nobody to ask since there was somebody new
    vain: u32,
    /// Rounds that this card has asked for
    asking: u32,
    /// Since when the card has so few that it would have some back
    few_since: Option<Nanos>,
}

/// What a card would have of its connections.
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
    /// A look found nobody to ask before `later`; `None`: at any time. Nobody looks at all of a card's
    /// connections in vain again and again.
    fn none_free(&mut self, now: Nanos, later: Option<Nanos>) {
        self.due = later.unwrap_or(now + (EVERY << self.vain).min(SELDOM));
        self.vain = (self.vain + 1).min(LONGEST_PAUSE);
    }

    /// There is one more connection that may be asked for, from then on.
    pub(super) fn look_at(&mut self, then: Nanos) {
        (self.due, self.vain) = (self.due.min(then + EVERY), 0);
    }

    /// What it depends on has been changed: that is no matter of a moment.
    pub(super) fn look_now(&mut self, now: Nanos) {
        (self.due, self.vain, self.few_since) = (now, 0, Some(now));
    }

    /// This card asks for a connection.
    pub(super) fn ask_for(&mut self, renewing: &mut Renewing) {
        (renewing.asked, renewing.counts) = (true, true);
        self.asking += 1;
    }

    /// It may ask for another in its place.
    pub(super) fn give_back(&mut self, renewing: &mut Renewing) {
        if core::mem::take(&mut renewing.counts) {
            self.asking = self.asking.saturating_sub(1);
        }
    }

    /// A connection's round is over, if there was one.
    pub(super) fn stop(&mut self, renewing: &mut Renewing) -> Option<Box<Renewal>> {
        self.give_back(renewing);
        renewing.homing = None;
        renewing.now.take()
    }
}

/// Connections whose peers are asked.
struct Found {
    some: [Qpn; AT_ONCE as usize],
    count: usize,
    /// When another may be asked
    later: Option<Nanos>,
}

impl Found {
    /// With one that may be asked then.
    fn or_later(mut self, later: Option<Nanos>) -> Self {
        self.later = [self.later, later].into_iter().flatten().min();
        self
    }
}

impl<E: Host> Roles<E> {
    /// When the balance is to be looked at, with so many connections on the card; `away`: some have left it.
    pub(in crate::host) fn balance_due(&self, connections: u32, away: bool) -> Option<Nanos> {
        match self.want(connections) {
            Want::Fewer(_) => (!self.ends.is_empty()).then_some(self.balance.due),
            Want::More(_) if away => Some(self.balance.few_since.map_or(0, |_| self.balance.due)),
            /* that it lasted is not so any more */
            _ => self.balance.few_since.map(|_| 0),
        }
    }

    fn want(&self, connections: u32) -> Want {
        let threshold = self.identity.threshold;
        if connections > threshold {
            Want::Fewer(connections - threshold)
        } else if connections < few(threshold) {
            Want::More(few(threshold) - connections)
        } else {
            Want::Nothing
        }
    }

    /// Asks for some of the connections of which there are too many, or that may come back.
    pub(in crate::host) fn balance(&mut self, turn: &mut Turn<'_, E>, library: &mut Library<E>) {
        let connections = turn.nic.connection_count();
        let away = !library.is_empty();
        let want = self.want(connections);
        if !away || !matches!(want, Want::More(_)) {
            self.balance.few_since = None;
        } else if self.balance.few_since.is_none() {
            /* it may be crowded again in a moment */
            self.balance.few_since = Some(turn.now);
            (self.balance.due, self.balance.vain) = (turn.now + AGAIN, 0);
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
                let away = |end: &End| begun(turn, library, end) == Some(Role::Stateless);
                self.find(turn.now, most, |end| end.may_be_changed() && away(end))
            }
            /* plain ones first: of those that it keeps for others the peers must have room */
            _ => match self.find(turn.now, most, |end| self.may_be_asked(end)) {
                Found { count: 0, later, .. } => {
                    let kept = |end: &End| begun(turn, library, end) == Some(Role::Stateful);
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
                self.ask_back(turn, library, *qpn);
            } else {
                self.ask(turn, library, *qpn);
            }
        }
    }

    /// Some connections that are such, `most` at most, whose round may begin now.
    fn find(&self, now: Nanos, most: usize, is_such: impl Fn(&End) -> bool) -> Found {
        let mut found = Found { some: [Qpn::default(); AT_ONCE as usize], count: 0, later: None };
        for end in self.ends.all().filter(|end| is_such(end)) {
            let until = end.renewing.rests_until;
            if until > now {
                found = found.or_later(Some(until));
            } else if found.count < most {
                found.some[found.count] = end.qpn;
                found.count += 1;
            }
        }
        found
    }

    /// Whether the peer of a connection is one to ask, at some time.
    fn may_be_asked(&self, end: &End) -> bool {
        let speaks = || end.negotiation.heard() || self.plain.speaks(&end.av.dgid);
        end.wish == Wish::Auto && end.is_plain() && speaks()
    }

    pub(super) fn ask(&mut self, turn: &mut Turn<'_, E>, library: &mut Library<E>, qpn: Qpn) {
        let Some((mine, card)) = self.what_for(turn, qpn) else { return };
        let Some(end) = self.ends.get_mut(qpn) else { return };
        if !is_room_for(size_of::<Renewal>()) {
            return;
        }
        let renewing = &mut end.renewing;
        let round = renewing.next_round();
        renewing.now = Some(Box::new(Renewal::ask(round, mine, card, turn.now)));
        self.balance.ask_for(renewing);
        self.renew(turn, library, qpn, None);
    }

    /// What this end brings to a round. `None`: the card does not have it.
    fn what_for(&self, turn: &Turn<'_, E>, qpn: Qpn) -> Option<(Terms, Card)> {
        let end = self.ends.get(qpn)?;
        let attr = turn.nic.query_qp(qpn).ok()?;
        let Identity { boot, ports, .. } = self.identity;
        let patience = Patience::of(attr.timeout, attr.retry_cnt).time;
        Some((self.terms(turn, (qpn, end.wish), &end.av), Card { boot, ports, patience }))
    }

    /// The peer of a connection says something in a round.
    pub(super) fn hear_again(
        &mut self,
        turn: &mut Turn<'_, E>,
        library: &mut Library<E>,
        qpn: Qpn,
        said: &Renewed,
    ) {
        if self.hear_of_return(turn, library, qpn, said) {
            return;
        }
        if let Control::Renew { wish, stateful, threshold } = said.message {
            self.peer_asks(turn, qpn, said.round, (wish, stateful, threshold));
        }
        let Some(end) = self.ends.get_mut(qpn).filter(|end| end.renewing.homing.is_none()) else { return };
        if end.renewing.now.as_ref().is_some_and(|round| round.round() == said.round) {
            return self.renew(turn, library, qpn, Some(&said.message));
        }
        let last = said.round == end.renewing.last && end.is_star();
        /* whose peer is plain waits for nobody: somebody else may have spoken for it before */
        if last && end.renewing.switched && said.message == Control::Plain && end.may_begin {
            return self.withdraw(turn, qpn);
        }
        let negotiation = last.then_some(&mut end.negotiation);
        if let Some(answer) = answer(said, (end.av.dgid, end.peer), negotiation) {
            say_again(turn, (qpn, end.peer), &end.av, &answer);
        }
    }

    /// The peer's card has too many connections: if it suits this end, too, a round begins. The peer's
    /// numbers count on in any case, so that what either says is new to the other.
    fn peer_asks(
        &mut self,
        turn: &mut Turn<'_, E>,
        qpn: Qpn,
        round: u16,
        (wish, stateful, threshold): (Wish, u32, u32),
    ) {
        let Some((mine, card)) = self.what_for(turn, qpn) else { return };
        let Some(end) = self.ends.get_mut(qpn) else { return };
        let theirs = Terms { wish, stateful, threshold, gid: end.av.dgid, qpn: end.peer };
        if end.is_star() || !is_new(round, end.renewing.last) {
            return;
        }
        end.renewing.last = round;
        let free = end.is_plain() && !end.renewing.is_deaf(turn.now);
        if !free || !suits(&mine, &theirs) || !is_room_for(size_of::<Renewal>()) {
            return;
        }
        let (now, mut requests) = (turn.now, Resting { turn, qpn });
        let renewal = Renewal::asked(round, mine, card, now, &mut requests);
        end.renewing.asked = false;
        end.renewing.now = renewal.map(Box::new);
    }

    /// Goes on with a round: hears what the peer says, or says what is due.
    pub(super) fn renew(
        &mut self,
        turn: &mut Turn<'_, E>,
        library: &mut Library<E>,
        qpn: Qpn,
        said: Option<&Control>,
    ) {
        let Some(end) = self.ends.get_mut(qpn) else { return };
        let Some(round) = &mut end.renewing.now else { return };
        let (now, mut requests) = (turn.now, Resting { turn, qpn });
        let answer = match said {
            Some(said) => round.handle(now, (end.av.dgid, end.peer), said, &mut requests),
            None => round.poll(now, &mut requests),
        };
        if let Some(answer) = answer {
            say_again(turn, (qpn, end.peer), &end.av, &answer);
        }
        if let Some(due) = round.deadline() {
            return self.timers.arm(end.timer, due.max(turn.now + 1), qpn);
        }
        if self.end_round(turn, qpn) {
            self.settled(turn, library, qpn);
        }
    }

    /// The peer has begun as a stateless end, whatever of the round was heard here.
    pub(super) fn peer_began(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn) {
        let Some(end) = self.ends.get_mut(qpn) else { return };
        let Some(round) = &mut end.renewing.now else { return };
        let mut requests = Resting { turn, qpn };
        round.peer_began((end.av.dgid, end.peer), &mut requests);
        if round.outcome().is_some() && self.end_round(turn, qpn) {
            self.look_later(turn.now, qpn);
        }
    }

    /// A stateless end could not begin, and is on the card still. What ran before runs on as it was; its
    /// peer, who waits for it, hears that. False: no round has settled it.
    pub(super) fn take_back(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn) -> bool {
        let Some(end) = self.ends.get_mut(qpn).filter(|end| end.renewing.switched) else { return false };
        end.may_begin = true;
        let plain = Renewed { round: end.renewing.last, message: Control::Plain };
        say_again(turn, (qpn, end.peer), &end.av, &plain);
        self.withdraw(turn, qpn);
        true
    }

    /// What a round has settled that has not begun yet: the peer may not have heard it, or have gone back.
    pub(super) fn tell_again(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn) {
        let Some(end) = self.ends.get(qpn).filter(|end| end.renewing.switched) else { return };
        if let Some(message) = end.negotiation.again() {
            let round = end.renewing.last;
            say_again(turn, (qpn, end.peer), &end.av, &Renewed { round, message });
        }
    }

    /// A round is over. Whether the connection is one of StaR now.
    fn end_round(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn) -> bool {
        let Some(end) = self.ends.get_mut(qpn) else { return false };
        self.timers.disarm(end.timer);
        end.beginning = Beginning::default();
        let Some(round) = self.balance.stop(&mut end.renewing) else { return false };
        if !matches!(round.outcome(), Some(Outcome::Star { .. })) {
            turn.env.note(qpn, &Note::Stays);
            end.renewing.failed(turn.now);
            self.balance.look_at(end.renewing.rests_until);
            self.pursue_later(qpn);
            return false;
        }
        turn.env.note(qpn, &Note::Leaves);
        (end.renewing.last, end.renewing.switched) = (round.round(), true);
        end.renewing.changed(turn.now);
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
        plain && self.renewing.is_idle()
    }

    /// Whether the card may say what it becomes.
    fn may_be_changed(&self) -> bool {
        self.wish == Wish::Auto && self.renewing.is_idle()
    }
}

/// Sends a message of a round.
pub(super) fn say_again<E: Host>(turn: &mut Turn<'_, E>, ends: (Qpn, Qpn), av: &Av, message: &Renewed) {
    say(turn, ends, av, |room| message.encode(room));
}
