//! Which end keeps the state (III-C1), so that both always agree.
//!
//! Each end whose QP is ready sends its preference and what the choice depends on (Offer). The choice is a
//! function of both offers, which do not change while they are repeated, so both ends choose the same. An
//! Offer is answered with the choice (Accept, or Plain), an Accept with Confirm.
//!
//! Silence alone makes the connection plain RC only where the peer never sent a message: then it cannot have
//! our Accept. So no end becomes plain while the other may count on StaR, unless that one is silent for
//! longer than the program's patience. A plain request settles what was not settled.
//!
//! Messages of a card that has restarted since may be under way. So what the peer last said of its boot and
//! ports counts, also when the roles are settled.
//!
//! Messages in, messages out; it must not know how they travel.

use alloc::vec::Vec;

use starverbs_core::{Gid, Nanos, Qpn};

use super::channel::timeout;
use super::control::{Control, Preference, Role, Terms};
use super::form::VERSION;

/// A QP of another card.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerQp {
    /// The card's address
    pub gid: Gid,
    /// The QP's number there
    pub qpn: Qpn,
}

/// Offers without an answer before the peer is taken for a card without StaR: half a second, as a process of
/// a busy host may not get a CPU for long (an eighth of a second was too little beside twelve busy processes
/// on two CPUs). Peers without StaR are remembered, so a program pays it once a peer.
pub const TRIES: u32 = 13;
/// Offers without an answer of a peer that has answered before, until it is taken for gone, which plain
/// requests find out. About two seconds.
const LAST_TRIES: u32 = 32;
/// Beyond how many connections a card wants peers to keep them, as the paper's board (V-A).
pub const THRESHOLD: u32 = 120;
/// Peers that are remembered as plain, and as many as having StaR.
const PLAIN_PEERS: usize = 256;

/// What `mine` becomes against `theirs`; of equals the one whose address `is_lower` keeps the state. `None`:
/// plain RoCEv2, as one end has no StaR, both insist on the same role, or there is no need.
pub fn choose(mine: &Terms, theirs: &Terms, is_lower: bool) -> Option<Role> {
    match (mine.preference, theirs.preference) {
        (Preference::Off, _) | (_, Preference::Off) => None,
        (Preference::Auto, Preference::Auto) => by_count(mine, theirs, is_lower),
        (Preference::Stateless, Preference::Stateless) | (Preference::Stateful, Preference::Stateful) => None,
        (Preference::Stateless, _) | (_, Preference::Stateful) => Some(Role::Stateless),
        (Preference::Stateful, _) | (_, Preference::Stateless) => Some(Role::Stateful),
    }
}

/// If either has too many connections, who has fewer keeps the state.
fn by_count(mine: &Terms, theirs: &Terms, is_lower: bool) -> Option<Role> {
    let crowded = |terms: &Terms| terms.stateful > terms.threshold;
    if !crowded(mine) && !crowded(theirs) {
        return None;
    }
    let keeps = mine.stateful < theirs.stateful || mine.stateful == theirs.stateful && is_lower;
    Some(if keeps { Role::Stateful } else { Role::Stateless })
}

/// How a negotiation ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Plain RoCEv2
    Plain,
    /// An end of a StaR connection
    Star {
        /// What we are
        role: Role,
        /// Boot ID of the peer's card
        boot: u64,
        /// UDP ports of its stateless half and of its stateful one
        ports: [u16; 2],
    },
}

/// One connection's negotiation.
#[derive(Clone, Debug)]
pub struct Negotiation {
    mine: Terms,
    /// This end's address is lower than its peer's
    is_lower: bool,
    /// The outcome of which the peer has an Accept
    accepted: Option<Outcome>,
    settled: Option<Outcome>,
    /// The peer has sent a message
    answered: bool,
    /// The peer's card has another version of the protocol
    foreign: bool,
    /// The peer's card is known to have StaR
    known: bool,
    tries: u32,
    /// Offers since the last message of the peer
    silent: u32,
    /// So many of them until the peer of an end that has accepted is gone
    patience: u32,
    due: Nanos,
}

impl Negotiation {
    /// Begins at `now`, when the QP can receive. An end that wants plain RoCEv2 has it at once.
    pub fn new(mine: Terms, is_lower: bool, now: Nanos) -> Self {
        let settled = (mine.preference == Preference::Off).then_some(Outcome::Plain);
        Negotiation {
            mine,
            is_lower,
            accepted: None,
            settled,
            answered: false,
            foreign: false,
            known: false,
            tries: 0,
            silent: 0,
            patience: LAST_TRIES,
            due: now,
        }
    }

    /// What the ends have become since, while their connection ran.
    pub fn settle(&mut self, outcome: Outcome) {
        (self.answered, self.settled) = (true, Some(outcome));
    }

    /// Whether this end's address is lower than its peer's.
    pub fn is_lower(&self) -> bool {
        self.is_lower
    }

    /// How it ended; `None`: it has not.
    pub fn outcome(&self) -> Option<Outcome> {
        self.settled
    }

    /// Whether the peer has sent a message: if not, it may be remembered as plain.
    pub fn has_answer(&self) -> bool {
        self.answered
    }

    /// The peer has said in a round which version of the protocol its card has.
    pub fn note_version(&mut self, version: u8) {
        self.foreign = version != VERSION;
    }

    /// Whether that is another one: the connection is plain, and stays so.
    pub fn is_foreign(&self) -> bool {
        self.foreign
    }

    /// Whether this end has sent an Offer, so that silence means something.
    pub fn has_offered(&self) -> bool {
        self.tries > 0
    }

    /// The peer's card has StaR, as other connections show: silence is loss, and takes longer to count.
    pub fn trust(&mut self) {
        self.known = true;
    }

    /// The program's patience; `None`: for ever. An end that has accepted asks for so long, as the peer may
    /// count on the outcome.
    pub fn set_patience(&mut self, silence: Option<Nanos>) {
        /* the first six come after shorter times */
        let offers = silence.map(|silence| silence.div_ceil(timeout(u32::MAX)) + 6);
        self.patience =
            offers.map_or(u32::MAX, |offers| u32::try_from(offers).unwrap_or(u32::MAX).max(LAST_TRIES));
    }

    /// Whether no offer more is worth it.
    pub fn gave_up(&self) -> bool {
        let most = match self.accepted {
            Some(_) => self.patience,
            None if self.answered || self.known => LAST_TRIES,
            None => TRIES,
        };
        self.silent >= most
    }

    /// When [`Negotiation::poll`] has something to do.
    pub fn deadline(&self) -> Option<Nanos> {
        self.settled.is_none().then_some(self.due)
    }

    /// The offer, if it is time for it; or silence has lasted for long enough.
    pub fn poll(&mut self, now: Nanos) -> Option<Control> {
        if self.settled.is_some() || now < self.due {
            return None;
        }
        if self.gave_up() {
            self.settled = Some(Outcome::Plain);
            return None;
        }
        self.due = now + timeout(self.tries);
        self.tries = self.tries.saturating_add(1);
        self.silent = self.silent.saturating_add(1);
        Some(self.offer())
    }

    /// The Offer of this end. A peer that has settled on plain RC answers Plain.
    pub fn offer(&self) -> Control {
        Control::Offer { terms: self.mine, version: VERSION }
    }

    /// A message of the peer; gives the answer.
    pub fn handle(&mut self, message: &Control) -> Option<Control> {
        (self.answered, self.silent) = (true, 0);
        match *message {
            Control::Offer { terms, version } => {
                let foreign = version != VERSION;
                /* an Offer can be forged: who sends it keeps a connection that runs from no change */
                if self.settled.is_none() || !foreign {
                    self.foreign = foreign;
                }
                /* as if it had no StaR, whatever was settled with the card of before */
                if foreign {
                    self.plain();
                    return Some(Control::Plain);
                }
                Some(self.offered(&terms))
            }
            Control::Accept { role, boot, ports } => {
                let mine = role.other();
                let agreed = Outcome::Star { role: mine, boot, ports };
                match self.settled {
                    None => self.settled = Some(agreed),
                    /* they got Plain, and it was lost */
                    Some(Outcome::Plain) => return Some(Control::Plain),
                    Some(Outcome::Star { role, .. }) if role == mine => self.settled = Some(agreed),
                    Some(Outcome::Star { .. }) => {}
                }
                Some(Control::Confirm { role: mine })
            }
            Control::Confirm { role } => {
                if let (None, Some(Outcome::Star { role: mine, .. })) = (self.settled, self.accepted)
                    && mine == role.other()
                {
                    self.settled = self.accepted;
                }
                None
            }
            Control::Plain => {
                self.plain();
                None
            }
            _ => None,
        }
    }

    fn offered(&mut self, theirs: &Terms) -> Control {
        let role = match (self.settled, choose(&self.mine, theirs, self.is_lower)) {
            (Some(Outcome::Star { role, .. }), _) => Some(role),
            (Some(Outcome::Plain), _) => None,
            (None, role) => role,
        };
        match role {
            Some(role) => {
                self.accepted = Some(Outcome::Star { role, boot: theirs.boot, ports: theirs.ports });
                self.settled = self.settled.and(self.accepted);
                Control::Accept { role, boot: self.mine.boot, ports: self.mine.ports }
            }
            None => {
                self.plain();
                Control::Plain
            }
        }
    }

    /// A plain RoCEv2 request came for the QP: the peer has settled. So has this end, unless it has already.
    pub fn plain(&mut self) {
        if self.settled.is_none() {
            self.settled = Some(Outcome::Plain);
        }
    }
}

/// The wait of a stateful end for its peer to begin. If the peer is gone, requests must find that out.
#[derive(Clone, Copy, Debug, Default)]
pub struct Beginning {
    since: Option<Nanos>,
    /// The peer was asked what it is, by an Offer
    asked: bool,
}

impl Beginning {
    /// Time between two looks, ns.
    pub const LOOK: Nanos = 250_000_000;
    /// Requests wait for so long at least until the peer is gone.
    const LEAST: Nanos = 2_000_000_000;

    /// Whether requests have waited for longer than `patience`; `None`: no wait is too long.
    pub fn is_overdue(&mut self, now: Nanos, waits: bool, patience: Option<Nanos>) -> bool {
        self.since = self.since.filter(|_| waits).or(waits.then_some(now));
        let waited = self.since.map_or(0, |since| now.saturating_sub(since));
        self.asked |= waited > 0;
        patience.is_some_and(|patience| waited >= patience.max(Self::LEAST))
    }

    /// Whether a Plain of the peer answers an Offer of this wait: what its queue pair was before it began
    /// anew may have answered one before.
    pub fn has_asked(&self) -> bool {
        self.asked
    }
}

/// Addresses that never sent a StaR message, so that the program that found it out does not wait for them
/// again for a while: another one finds out by itself. And addresses that have StaR, so that none of many
/// connections at once is plain because some messages were lost.
#[derive(Debug, Default)]
pub struct PlainPeers {
    /// The program, the address, and until when
    plain: Vec<(u64, Gid, Nanos)>,
    with_star: Vec<Gid>,
}

impl PlainPeers {
    /// A peer never sent a StaR message in a negotiation of this program: to that it is plain until then. One
    /// that has StaR is not, but if an end gave up, that is forgotten.
    pub fn note_plain(&mut self, program: u64, gid: Gid, gave_up: bool, until: Nanos) {
        if self.has_star(&gid) {
            if gave_up {
                self.with_star.retain(|known| *known != gid);
            }
            return;
        }
        self.plain.retain(|(of, known, _)| (*of, *known) != (program, gid));
        remember(&mut self.plain, (program, gid, until));
    }

    /// It has StaR.
    pub fn note_star(&mut self, gid: &Gid) {
        self.plain.retain(|(_, known, _)| known != gid);
        if !self.has_star(gid) {
            remember(&mut self.with_star, *gid);
        }
    }

    /// Whether this program knows it to be plain.
    pub fn is_plain(&self, program: u64, gid: &Gid, now: Nanos) -> bool {
        self.plain.iter().any(|(of, known, until)| *of == program && known == gid && now < *until)
    }

    /// Whether it is known to have StaR.
    pub fn has_star(&self, gid: &Gid) -> bool {
        self.with_star.contains(gid)
    }
}

/// What was known longest is forgotten when there is too much; without memory nothing new is known.
fn remember<T>(known: &mut Vec<T>, new: T) {
    if known.len() >= PLAIN_PEERS {
        known.remove(0);
    }
    if known.try_reserve(1).is_ok() {
        known.push(new);
    }
}

#[cfg(test)]
#[path = "negotiate_tests.rs"]
mod tests;
