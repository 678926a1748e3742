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
use super::end::HostEnd;
use super::rounds::AGAIN;
use super::{End, Roles};

/// Time between two looks at the balance.
const EVERY: Nanos = 50_000_000;
/// Longest time between two looks at the balance that find nobody to ask.
const SELDOM: Nanos = 60_000_000_000;
/// The first of them is doubled so often at most.
const LONGEST_PAUSE: u32 = 11;
/// Connections that change at a time because this card asks.
const AT_ONCE: usize = 16;

/// When the card looks whether it has too many connections, or too few, or a program wants another role.
#[derive(Default)]
pub(super) struct Balance {
    /// When it is looked at next
    due: Nanos,
    /// Looks in a row that found no connection to ask for
    empty_looks: u32,
    /// Whether the card had too many connections when it looked, and whether some could come back
    had: [bool; 2],
    /// None comes back before: the card may be crowded again in a moment
    back_from: Nanos,
}

impl Balance {
    /// There is one more connection that may be asked for, from then on.
    pub(super) fn look_at(&mut self, then: Nanos) {
        (self.due, self.empty_looks) = (self.due.min(then + EVERY), 0);
    }
}

impl<E: EndpointHost> Roles<E> {
    /// How many connections the card has too many, and for how many that have left it there is room again.
    fn excess(&self, connections: u32, away: bool) -> [u32; 2] {
        let threshold = self.identity.threshold;
        let room = revert_threshold(threshold).saturating_sub(connections);
        [connections.saturating_sub(threshold), if away { room } else { 0 }]
    }

    /// When the balance is to be looked at, with so many connections on the card; `away`: some have left it.
    pub(in crate::host) fn balance_due(&self, connections: u32, away: bool) -> Option<Nanos> {
        let has = self.excess(connections, away).map(|n| n > 0);
        let due = if has == self.balance.had { self.balance.due } else { 0 };
        Some(due).filter(|due| *due < Nanos::MAX && !self.ends.is_empty())
    }

    /// Asks for some of the connections of which there are too many, that may come back, or that their
    /// programs want to be something else.
    pub(in crate::host) fn balance(&mut self, turn: &mut Turn<'_, E>, endpoints: &mut Endpoints<E>) {
        let excess = self.excess(turn.nic.connection_count(), !endpoints.is_empty());
        let has = excess.map(|n| n > 0);
        if has != self.balance.had {
            (self.balance.had, self.balance.back_from) = (has, turn.now + AGAIN);
            self.balance.look_at(turn.now);
        }
        if turn.now < self.balance.due {
            return;
        }
        let rounds = self.ends.all().filter(|end| end.rounds.is_asking()).count();
        let pause = (EVERY << self.balance.empty_looks).min(SELDOM);
        let (mut found, mut count, mut next) = ([Qpn::default(); AT_ONCE], 0, Nanos::MAX);
        for rank in 0..3 {
            let most = if rank == 0 { AT_ONCE } else { AT_ONCE.min((excess[0] + excess[1]) as usize) };
            for end in self.ends.all().filter(|end| self.rank(end, has) == Some(rank)) {
                let from = match self.may_change(turn, endpoints, end) {
                    true if rank > 0 && has[1] => end.rounds.not_before.max(self.balance.back_from),
                    true => end.rounds.not_before,
                    false => turn.now + if rank == 0 { pause.min(AGAIN) } else { pause },
                };
                if from > turn.now {
                    next = next.min(from);
                } else if let Some(place) = found.get_mut(count).filter(|_| count + rounds < most) {
                    (*place, count) = (end.qpn, count + 1);
                }
            }
            if count > 0 {
                break;
            }
        }
        let Balance { due, empty_looks, .. } = &mut self.balance;
        *due = if count + rounds > 0 { turn.now + EVERY } else { next };
        *empty_looks = if count > 0 { 0 } else { (*empty_looks + 1).min(LONGEST_PAUSE) };
        for qpn in found.into_iter().take(count) {
            self.ask(&mut HostEnd { turn, endpoints, qpn });
        }
    }

    /// The program has this preference from now on. False: the peer's card has no StaR, or another version
    /// of it, the end takes from an SRQ or speaks StRoM's dialect, or had no preference when it was
    /// connected.
    pub fn set_preference(
        &mut self,
        turn: &mut Turn<'_, E>,
        endpoints: &mut Endpoints<E>,
        qpn: Qpn,
        preference: Preference,
    ) -> bool {
        if self.ends.get(qpn).is_none_or(|end| !self.can_change(end)) {
            return false;
        }
        let Some(end) = self.ends.get_mut(qpn) else { return false };
        (end.preference, end.has_stated) = (preference, true);
        end.note_reached();
        (end.rounds.not_before, end.rounds.ignore_until) = (turn.now, turn.now);
        self.balance.look_at(turn.now);
        let asks = |end: &End| self.rank(end, [false; 2]) == Some(0) && self.may_change(turn, endpoints, end);
        if self.ends.get(qpn).is_some_and(asks) {
            self.ask(&mut HostEnd { turn, endpoints, qpn });
        }
        true
    }

    /// How soon the peer of an end is asked, if that is to change: first what programs want; then, of a card
    /// that has too many connections or room for more, plain ones, as those that it keeps as SF need room at
    /// their peers.
    fn rank(&self, end: &End, [has_too_many, has_room]: [bool; 2]) -> Option<u8> {
        /* one whose peer does not begin may yet, whatever comes of the round */
        if !end.rounds.is_idle() && !end.rounds.gives_up {
            return None;
        }
        match (end.preference, end.role()) {
            (Preference::Auto, None) => has_too_many.then_some(1),
            (Preference::Auto, Some(Role::Stateful)) => has_too_many.then_some(2),
            (Preference::Auto, Some(Role::Stateless)) => has_room.then_some(1),
            _ => (end.has_stated && self.can_change(end)).then_some(0),
        }
    }
}
