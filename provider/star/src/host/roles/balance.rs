//! Which connections change: those of which a card has too many, or for which it has room again, and those
//! whose programs want another role.
//!
//! A card beyond its threshold asks some peers at a time, until it is not. It does not ask for connections
//! whose program has a preference other than auto.

use starverbs_core::{Nanos, Qpn};

use crate::control::{Preference, Role};
use crate::round::revert_threshold;

use super::super::endpoints::Endpoints;
use super::super::{EndpointHost, Turn};
use super::end::{HostEnd, has_own_receives, may_change};
use super::rounds::AGAIN;
use super::{End, Roles};

/// Time between two looks at the balance.
const EVERY: Nanos = 50_000_000;
/// Longest time between two looks at the balance that find nobody to ask.
const SELDOM: Nanos = 60_000_000_000;
/// The first of them is doubled so often at most.
const LONGEST_PAUSE: u32 = 11;
/// Connections that this card has asked for at a time.
const AT_ONCE: usize = 16;

/// When the card looks whether it has too many connections, or too few.
#[derive(Default)]
pub(super) struct Balance {
    /// When it is looked at next
    due: Nanos,
    /// Looks in a row that found no connection to ask for
    empty_looks: u32,
    /// Since when the card has room to take connections back
    uncrowded_since: Option<Nanos>,
}

impl Balance {
    /// There is one more connection that may be asked for, from then on.
    pub(super) fn look_at(&mut self, then: Nanos) {
        (self.due, self.empty_looks) = (self.due.min(then + EVERY), 0);
    }

    /// The threshold was changed.
    pub(super) fn look_now(&mut self, now: Nanos) {
        (self.due, self.empty_looks, self.uncrowded_since) = (now, 0, Some(now));
    }
}

impl<E: EndpointHost> Roles<E> {
    /// How many connections the card has too many, and for how many it has room again.
    fn excess(&self, connections: u32) -> (u32, u32) {
        let threshold = self.identity.threshold;
        (connections.saturating_sub(threshold), revert_threshold(threshold).saturating_sub(connections))
    }

    /// When the balance is to be looked at, with so many connections on the card; `away`: some have left it.
    pub(in crate::host) fn balance_due(&self, connections: u32, away: bool) -> Option<Nanos> {
        match self.excess(connections) {
            (0, 1..) if away => Some(self.balance.uncrowded_since.map_or(0, |_| self.balance.due)),
            /* the card has no room any more: forget since when it had */
            (0, _) => self.balance.uncrowded_since.map(|_| 0),
            _ => (!self.ends.is_empty()).then_some(self.balance.due),
        }
    }

    /// Asks for some of the connections of which there are too many, or that may come back.
    pub(in crate::host) fn balance(&mut self, turn: &mut Turn<'_, E>, endpoints: &mut Endpoints<E>) {
        let connections = turn.nic.connection_count();
        let away = !endpoints.is_empty();
        let (fewer, more) = self.excess(connections);
        if !away || more == 0 {
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
        /* plain ones first: those that it keeps as SF need room at their peers */
        let roles = match fewer {
            0 => &[Some(Role::Stateless)][..],
            _ => &[None, Some(Role::Stateful)],
        };
        let asking = self.ends.all().filter(|end| end.rounds.is_asking()).count();
        let most = (fewer.max(more) as usize).min(AT_ONCE).saturating_sub(asking);
        if most == 0 {
            return;
        }
        let (mut found, mut count, mut later) = ([Qpn::default(); AT_ONCE], 0, None::<Nanos>);
        for role in roles {
            for end in self.ends.all().filter(|end| end.role() == *role) {
                let until = end.rounds.not_before;
                if !self.may_be_asked(turn, endpoints, end) {
                    continue;
                }
                if until > turn.now {
                    later = Some(later.map_or(until, |later| later.min(until)));
                } else if let Some(place) = found.get_mut(count).filter(|_| count < most) {
                    (*place, count) = (end.qpn, count + 1);
                }
            }
            if count > 0 {
                break;
            }
        }
        if count == 0 {
            let Balance { due, empty_looks, .. } = &mut self.balance;
            *due = later.unwrap_or(turn.now + (EVERY << *empty_looks).min(SELDOM));
            *empty_looks = (*empty_looks + 1).min(LONGEST_PAUSE);
        }
        for qpn in found.into_iter().take(count) {
            self.ask(&mut HostEnd { turn, endpoints, qpn });
        }
    }

    /// Whether the cards decide what an end is, and it may change.
    fn may_be_asked(&self, turn: &Turn<'_, E>, endpoints: &Endpoints<E>, end: &End) -> bool {
        let speaks = end.negotiation.has_answer() || self.plain.has_star(&end.av.dgid);
        let free = end.preference == Preference::Auto && end.rounds.is_idle();
        speaks && free && may_change(turn, endpoints, end) == Some(true)
    }

    /// The program has this preference from now on. False: the peer's card has no StaR, or another version of
    /// it, the end takes from an SRQ, or it had no preference when it was connected.
    pub fn set_preference(
        &mut self,
        turn: &mut Turn<'_, E>,
        endpoints: &mut Endpoints<E>,
        qpn: Qpn,
        preference: Preference,
    ) -> bool {
        let Some(end) = self.ends.get_mut(qpn).filter(|_| has_own_receives(turn, endpoints, qpn)) else {
            return false;
        };
        let settled = end.negotiation.outcome().is_some();
        if settled && (turn.nic.speaks_strom(qpn) || endpoints.speaks_strom(qpn)) {
            return false;
        }
        if end.negotiation.is_foreign() {
            return false;
        }
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
        match (end.preference, end.role()) {
            (Preference::Auto, _)
            | (Preference::Off, None)
            | (Preference::Stateless, Some(Role::Stateless))
            | (Preference::Stateful, Some(Role::Stateful)) => end.pursued = false,
            _ if may_change(turn, endpoints, end) == Some(true) => {
                self.ask(&mut HostEnd { turn, endpoints, qpn })
            }
            _ => {}
        }
        /* it could not ask now */
        if let Some(end) = self.ends.get_mut(qpn).filter(|end| end.pursued && end.rounds.is_idle()) {
            end.rounds.not_before = end.rounds.not_before.max(turn.now + EVERY);
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
