//! What a queue pair has become, and what that costs.

use starverbs_core::qp::QpAttr;
use starverbs_core::{Nic, QpState, Qpn};
use starverbs_star::card::bytes_of;
use starverbs_star::control::{Preference, Role};
use starverbs_star::negotiate::Outcome;

use super::{StarCard, StarHost};

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

impl Settled {
    /// That of its number.
    pub const fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            0 => Settled::Waiting,
            1 => Settled::Plain,
            2 => Settled::Stateless,
            3 => Settled::Stateful,
            _ => return None,
        })
    }
}

/// StaR of one queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StarInfo {
    /// What the program wants it to be
    pub preference: Preference,
    /// What it is
    pub role: Settled,
    /// What the card keeps of it now, bytes
    pub card_bytes: u64,
    /// What its host keeps of it because the card does not, bytes
    pub host_bytes: u64,
}

impl<E: StarCard> StarHost<E> {
    /// StaR of the queue pair, whose program wants `preference`. `None`: it was made without.
    pub fn info(&self, nic: &Nic<E>, qpn: Qpn, preference: Option<Preference>) -> StarInfo {
        let role = preference.map_or(Settled::Plain, |_| self.role_of(nic, qpn));
        let preference = preference.unwrap_or(Preference::Off);
        let host_bytes = self.0.as_ref().map_or(0, |star| star.ends.endpoints.bytes(qpn)) as u64;
        let card_bytes = bytes_of(nic, qpn) as u64;
        StarInfo { preference, role, card_bytes, host_bytes }
    }

    /// What a queue pair is, for people: `-` of those that never asked.
    pub fn word(&self, nic: &Nic<E>, qpn: Qpn) -> &'static str {
        if !self.is_open() || (self.outcome(qpn).is_none() && !nic.is_held(qpn)) {
            return "-";
        }
        match self.role_of(nic, qpn) {
            Settled::Waiting => "waiting",
            Settled::Plain => "plain",
            Settled::Stateless => "stateless",
            Settled::Stateful => "stateful",
        }
    }

    /// What was settled for a QP. `None`: nothing yet, or nobody was asked.
    fn outcome(&self, qpn: Qpn) -> Option<Outcome> {
        self.0.as_ref()?.ends.roles.outcome(qpn)
    }

    fn role_of(&self, nic: &Nic<E>, qpn: Qpn) -> Settled {
        match self.outcome(qpn) {
            Some(Outcome::Plain) => Settled::Plain,
            Some(Outcome::Star { role: Role::Stateless, .. }) => Settled::Stateless,
            Some(Outcome::Star { role: Role::Stateful, .. }) => Settled::Stateful,
            /* the peer is not asked, or the QP is not connected */
            None if nic.is_held(qpn) => Settled::Waiting,
            None => match nic.query_qp(qpn) {
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
