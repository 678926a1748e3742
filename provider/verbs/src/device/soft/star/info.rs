//! What a queue pair has become, and what that costs.

use starverbs_core::qp::QpAttr;
use starverbs_core::{QpState, Qpn};
use starverbs_star::card::bytes_of;
use starverbs_star::control::{Preference, Role};
use starverbs_star::negotiate::Outcome;

use super::StarHost;
use crate::device::soft::Shard;
use crate::star::{Settled, StarInfo};

impl Shard {
    /// StaR of the queue pair, whose program wants `preference`. `None`: it was made without.
    pub(crate) fn star_of(&self, qpn: Qpn, preference: Option<Preference>) -> StarInfo {
        let role = preference.map_or(Settled::Plain, |_| self.role_of(qpn));
        let preference = preference.unwrap_or(Preference::Off);
        let host_bytes = self.star.as_ref().map_or(0, |star| star.endpoints().bytes(qpn)) as u64;
        let card_bytes = bytes_of(&self.nic, qpn) as u64;
        StarInfo { preference, role, card_bytes, host_bytes }
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
