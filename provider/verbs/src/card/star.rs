//! What a program may ask of its connections' StaR: what they were to be, what they are, what that costs.

use starverbs_core::qp::QpAttr;
use starverbs_core::{QpState, Qpn};
use starverbs_settings::StarWish;
use starverbs_star::card::bytes_of;
use starverbs_star::control::{Role, Wish};
use starverbs_star::negotiate::Outcome;

use super::Shard;
use crate::star::StarHost;

/// What a queue pair has become.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Settled {
    /// Nothing yet: it was not connected, or the peer has not answered
    #[default]
    Waiting = 0,
    /// Plain RoCEv2
    Plain = 1,
    /// StaR: this card keeps nothing of it
    Stateless = 2,
    /// StaR: this card keeps all of it
    Stateful = 3,
}

/// StaR of one queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StarInfo {
    /// What the program wants it to be
    pub wish: Wish,
    /// What it is
    pub role: Settled,
    /// What the card keeps of it now, bytes
    pub card_bytes: u64,
    /// What the library keeps of it in host memory because the card does not, bytes
    pub library_bytes: u64,
}

impl Shard {
    /// StaR of the queue pair, whose program wants `wish`. `None`: it was made without.
    pub(crate) fn star_of(&self, qpn: Qpn, wish: Option<Wish>) -> StarInfo {
        let role = wish.map_or(Settled::Plain, |_| self.role_of(qpn));
        let wish = wish.unwrap_or(Wish::Off);
        let library_bytes = self.star.as_ref().map_or(0, |star| star.library().bytes(qpn)) as u64;
        let card_bytes = bytes_of(&self.nic, qpn) as u64;
        StarInfo { wish, role, card_bytes, library_bytes }
    }

    /// What a queue pair is, for people: `-` of those that never asked.
    pub(crate) fn star_word(&self, qpn: Qpn) -> &'static str {
        let asked = |star: &StarHost| star.outcome(qpn).is_some() || self.nic.is_held(qpn);
        if !self.star.as_deref().is_some_and(asked) {
            return "-";
        }
        match self.role_of(qpn) {
            Settled::Waiting => "waiting",
            Settled::Plain => "plain",
            Settled::Stateless => "stateless",
            Settled::Stateful => "stateful",
        }
    }

    fn role_of(&self, qpn: Qpn) -> Settled {
        match self.star.as_ref().and_then(|star| star.outcome(qpn)) {
            Some(Outcome::Plain) => Settled::Plain,
            Some(Outcome::Star { role: Role::Stateless, .. }) => Settled::Stateless,
            Some(Outcome::Star { role: Role::Stateful, .. }) => Settled::Stateful,
            /* the peer is not asked, or the QP is not connected */
            None if self.nic.is_held(qpn) => Settled::Waiting,
            None => match self.nic.query_qp(qpn) {
                Ok(attr) if is_connected(&attr) => Settled::Plain,
                _ => Settled::Waiting,
            },
        }
    }
}

/// Whether it is an end of a connection, in ERR perhaps: from INIT it may come there without a peer.
fn is_connected(attr: &QpAttr) -> bool {
    !matches!(attr.state, QpState::Reset | QpState::Init) && attr.dest_qpn != 0
}

/// The setting in the card's words.
pub(crate) fn wish_of(setting: StarWish) -> Wish {
    match setting {
        StarWish::Off => Wish::Off,
        StarWish::Auto => Wish::Auto,
        StarWish::Stateless => Wish::Stateless,
        StarWish::Stateful => Wish::Stateful,
    }
}
