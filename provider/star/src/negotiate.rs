//! Which end keeps the state (III-C1), so that both always agree.
//!
//! Each end whose QP is ready says what it would be and what the choice depends on (Offer). The choice is a
//! function of both offers, whose contents do not change while they are repeated, and gives both ends the
//! same answer. Who has an offer answers with the choice (Accept, or Plain); who has that answer knows, and
//! says so (Confirm, or Accept to whoever still asks).
//!
//! Silence alone makes the connection plain RoCEv2 only where nothing was ever heard of the peer: then it
//! cannot have heard that we accept. So no end becomes plain that the other may think is not, unless that is
//! silent for longer than the program bears it; and a plain request settles whatever was not settled.
//!
//! Messages in, messages out; it must not know how they travel.

use alloc::vec::Vec;

use starverbs_core::{Gid, Nanos, Qpn};

use super::channel::timeout;
use super::control::{Control, Role, Wish};
use super::form::VERSION;

/// Offers without any answer before the peer is taken for a card without StaR: silence of half a second, as a
/// process of a busy host may not have the CPU for long (an eighth of a second was too little beside twelve
/// busy processes on two CPUs). Peers without StaR are remembered, so a program pays it once a peer.
pub const TRIES: u32 = 13;
/// Offers without an answer of a peer that has spoken before, until it is taken for one that is gone: as
/// plain RoCEv2 would, requests find that out. About two seconds.
const LAST_TRIES: u32 = 32;
/// From how many stateful connections on a card wants no more of them, as the paper's board (V-A).
pub const THRESHOLD: u32 = 120;
/// Peers that are remembered as plain, and as many that are not.
const PLAIN_PEERS: usize = 256;

/// What an end's offer says, and who it is. It does not change while it is repeated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Terms {
    /// What the program wants
    pub wish: Wish,
    /// Connections whose state the card keeps
    pub stateful: u32,
    /// Beyond how many it wants another end to keep them
    pub threshold: u32,
    /// Address
    pub gid: Gid,
    /// QPN
    pub qpn: Qpn,
}

/// What `mine` becomes against `theirs`. `None`: plain RoCEv2, as one end has no StaR, both insist on the
/// same role, or there is no need.
pub fn choose(mine: &Terms, theirs: &Terms) -> Option<Role> {
    match (mine.wish, theirs.wish) {
        (Wish::Off, _) | (_, Wish::Off) => None,
        (Wish::Auto, Wish::Auto) => by_count(mine, theirs),
        (Wish::Stateless, Wish::Stateless) | (Wish::Stateful, Wish::Stateful) => None,
        (Wish::Stateless, _) | (_, Wish::Stateful) => Some(Role::Stateless),
        (Wish::Stateful, _) | (_, Wish::Stateless) => Some(Role::Stateful),
    }
}

/// If either has too many connections, who has fewer keeps the state; of equals the lower address.
fn by_count(mine: &Terms, theirs: &Terms) -> Option<Role> {
    let crowded = |terms: &Terms| terms.stateful > terms.threshold;
    if !crowded(mine) && !crowded(theirs) {
        return None;
    }
    let rank = |terms: &Terms| (terms.stateful, terms.gid, terms.qpn);
    Some(if rank(mine) < rank(theirs) { Role::Stateful } else { Role::Stateless })
}

/// How a negotiation ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Plain RoCEv2
    Plain,
    /// StaR
    Star {
        /// What we are
        role: Role,
        /// Which life of the peer's card
        boot: u64,
        /// UDP ports of its stateless half and of its stateful one
        ports: [u16; 2],
    },
}

/// One connection's negotiation.
#[derive(Clone, Debug)]
pub struct Negotiation {
    mine: Terms,
    boot: u64,
    ports: [u16; 2],
    /// What we said that we become, and to whom
    accepted: Option<Outcome>,
    settled: Option<Outcome>,
    /// The peer has spoken
    heard: bool,
    /// The peer's card is known to speak StaR
    known: bool,
    tries: u32,
    /// Offers since the peer's card last spoke
    silent: u32,
    /// So many of them are in vain until a peer that has spoken is gone
    patience: u32,
    /// Of those, so many at least before an end gives up that has accepted
    borne: u32,
    due: Nanos,
}

impl Negotiation {
    /// Begins at `now`, when the QP can receive. An end that wants plain RoCEv2 has it at once.
    pub fn new(mine: Terms, boot: u64, ports: [u16; 2], now: Nanos) -> Self {
        let settled = (mine.wish == Wish::Off).then_some(Outcome::Plain);
        Negotiation {
            mine,
            boot,
            ports,
            accepted: None,
            settled,
            heard: false,
            known: false,
            tries: 0,
            silent: 0,
            patience: LAST_TRIES,
            borne: LAST_TRIES,
            due: now,
        }
    }

    /// As [`new`](Negotiation::new), of ends that both speak StaR and are connected already. Silence of less
    /// than `time` does not end the connection, as it would not end it otherwise; `None`: no silence does.
    pub fn of_speakers(mine: Terms, boot: u64, ports: [u16; 2], now: Nanos, time: Option<Nanos>) -> Self {
        let tries = |time: Nanos| u32::try_from(time / timeout(u32::MAX)).unwrap_or(u32::MAX);
        let patience = time.map_or(u32::MAX, |time| LAST_TRIES.saturating_add(tries(time)));
        Negotiation { known: true, patience, borne: patience, ..Negotiation::new(mine, boot, ports, now) }
    }

    /// One that has ended so.
    pub fn settled(mine: Terms, boot: u64, ports: [u16; 2], outcome: Outcome) -> Self {
        Negotiation { heard: true, settled: Some(outcome), ..Negotiation::new(mine, boot, ports, 0) }
    }

    /// How it ended; `None`: it has not.
    pub fn outcome(&self) -> Option<Outcome> {
        self.settled
    }

    /// Whether the peer has spoken StaR: if not, it may be remembered as plain.
    pub fn heard(&self) -> bool {
        self.heard
    }

    /// Whether this end has said what it would be, so that silence is an answer.
    pub fn has_offered(&self) -> bool {
        self.tries > 0
    }

    /// The peer's card has spoken of other connections: silence is loss, and asked into for longer.
    pub fn trust(&mut self) {
        self.known = true;
    }

    /// For how long the program bears silence of its peer; `None`: for ever. An end that has said what it
    /// becomes asks for so long, as the peer may go by it: then neither can send as the other believes.
    pub fn bear(&mut self, silence: Option<Nanos>) {
        /* the first six come after shorter times */
        let offers = silence.map(|silence| silence.div_ceil(timeout(u32::MAX)) + 6);
        self.borne =
            offers.map_or(u32::MAX, |offers| u32::try_from(offers).unwrap_or(u32::MAX).max(LAST_TRIES));
    }

    /// Whether no offer more is worth it.
    pub fn gave_up(&self) -> bool {
        let most = match self.accepted {
            Some(_) => self.borne,
            None if self.heard || self.known => self.patience,
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

    /// What this end would be, for a peer that may have settled otherwise: it says then that it is plain.
    pub fn offer(&self) -> Control {
        let Terms { wish, stateful, threshold, .. } = self.mine;
        Control::Offer { wish, stateful, threshold, boot: self.boot, ports: self.ports, version: VERSION }
    }

    /// A message of the connection's peer, whose address and QPN are `peer`; gives the answer.
    pub fn handle(&mut self, peer: (Gid, Qpn), message: &Control) -> Option<Control> {
        (self.heard, self.silent) = (true, 0);
        match *message {
            Control::Offer { wish, stateful, threshold, boot, ports, version } => {
                /* of another version: as if it had no StaR */
                let wish = if version == VERSION { wish } else { Wish::Off };
                let theirs = Terms { wish, stateful, threshold, gid: peer.0, qpn: peer.1 };
                Some(self.offered(&theirs, boot, ports))
            }
            Control::Accept { role, boot, ports } => {
                let mine = role.other();
                let agreed = Outcome::Star { role: mine, boot, ports };
                match self.settled {
                    None => self.settled = Some(agreed),
                    /* they were told, and the word was lost */
                    Some(Outcome::Plain) => return Some(Control::Plain),
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

    fn offered(&mut self, theirs: &Terms, boot: u64, ports: [u16; 2]) -> Control {
        let role = match (self.settled, choose(&self.mine, theirs)) {
            (Some(Outcome::Star { role, .. }), _) => Some(role),
            (Some(Outcome::Plain), _) => None,
            (None, role) => role,
        };
        match role {
            Some(role) => {
                self.accepted = Some(Outcome::Star { role, boot, ports });
                Control::Accept { role, boot: self.boot, ports: self.ports }
            }
            None => {
                self.plain();
                Control::Plain
            }
        }
    }

    /// What the peer was told that this end becomes; `None`: plain RoCEv2, or nothing yet.
    pub fn again(&self) -> Option<Control> {
        let Some(Outcome::Star { role, .. }) = self.settled else { return None };
        Some(Control::Accept { role, boot: self.boot, ports: self.ports })
    }

    /// What was settled is not to be, as the peer is gone: plain RoCEv2 finds that out.
    pub fn abandon(&mut self) {
        self.settled = Some(Outcome::Plain);
    }

    /// A plain RoCEv2 request came for the QP: the peer has settled. So has this end, unless it has already.
    pub fn plain(&mut self) {
        if self.settled.is_none() {
            self.settled = Some(Outcome::Plain);
        }
    }
}

/// The wait of a stateful end for its peer, which is to begin. The peer may be gone before it does, and then
/// requests must find that out.
#[derive(Clone, Copy, Debug, Default)]
pub struct Beginning {
    since: Option<Nanos>,
    /// The peer was asked what it is
    asked: bool,
}

impl Beginning {
    /// Time between two looks.
    pub const LOOK: Nanos = 250_000_000;
    /// Requests wait for so long at least until the peer is gone.
    const LEAST: Nanos = 2_000_000_000;

    /// Whether requests have waited for too long, if some wait now; `None`: no time is.
    pub fn is_overdue(&mut self, now: Nanos, waits: bool, patience: Option<Nanos>) -> bool {
        self.since = self.since.filter(|_| waits).or(waits.then_some(now));
        let waited = self.since.map_or(0, |since| now.saturating_sub(since));
        self.asked |= waited > 0;
        patience.is_some_and(|patience| waited >= patience.max(Self::LEAST))
    }
}

impl Beginning {
    /// Whether a peer that says that it is plain answers what it was asked: what it said of a life before is
    /// long past.
    pub fn has_asked(&self) -> bool {
        self.asked
    }
}

/// What is known of addresses: that nothing was ever heard of them, so that nobody waits for them again for a
/// while; or that they speak StaR, so that of many connections at once none is plain because some messages
/// were lost.
#[derive(Debug, Default)]
pub struct PlainPeers {
    plain: Vec<(Gid, Nanos)>,
    speaking: Vec<Gid>,
}

impl PlainPeers {
    /// A peer was silent, or plain, of which no negotiation ever heard: it is plain until then. One that
    /// speaks StaR is not, but when it let an end give up it is asked anew.
    pub fn note(&mut self, gid: Gid, gave_up: bool, until: Nanos) {
        if self.speaks(&gid) {
            if gave_up {
                self.speaking.retain(|known| *known != gid);
            }
            return;
        }
        self.plain.retain(|(known, _)| *known != gid);
        remember(&mut self.plain, (gid, until));
    }

    /// It speaks StaR.
    pub fn heard(&mut self, gid: &Gid) {
        self.plain.retain(|(known, _)| known != gid);
        if !self.speaks(gid) {
            remember(&mut self.speaking, *gid);
        }
    }

    /// Whether it is known to be plain.
    pub fn is_plain(&self, gid: &Gid, now: Nanos) -> bool {
        self.plain.iter().any(|(known, until)| known == gid && now < *until)
    }

    /// Whether it is known to speak StaR.
    pub fn speaks(&self, gid: &Gid) -> bool {
        self.speaking.contains(gid)
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
