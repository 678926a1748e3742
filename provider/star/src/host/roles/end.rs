//! An end in a round: a QP of the card, plain or a stateful end, or a stateless one, which the host has.

use starverbs_core::Qpn;

use crate::card::{stateful, stateful_mut};
use crate::control::Role;
use crate::negotiate::Outcome;
use crate::round::{QuiescePoint, RoundEnd};

use super::super::endpoints::{Endpoints, StatefulCard};
use super::super::{EndpointHost, Turn};
use super::{End, Roles};

/// An end, wherever it is.
pub(super) struct HostEnd<'a, 't, E: EndpointHost> {
    pub(super) turn: &'a mut Turn<'t, E>,
    pub(super) endpoints: &'a mut Endpoints<E>,
    pub(super) qpn: Qpn,
}

impl<E: EndpointHost> HostEnd<'_, '_, E> {
    /// Whether the end is StaR's, and SF has not begun, as far as it knows.
    pub(super) fn has_not_begun(&self, end: &End) -> bool {
        let nic = &self.turn.nic;
        match (end.role(), stateful(nic, self.qpn)) {
            (Some(Role::Stateless), _) => self.endpoints.is_beginning(self.qpn),
            /* before SL has said all that it begins with, it may not know of this end */
            (Some(Role::Stateful), Some(sf)) => !sf.is_open(),
            (Some(Role::Stateful), None) => end.waits_for_peer() && nic.is_held(self.qpn),
            (None, _) => false,
        }
    }
}

impl<E: EndpointHost> RoundEnd for HostEnd<'_, '_, E> {
    fn quiesce(&mut self) -> bool {
        let HostEnd { turn, endpoints, qpn } = self;
        let stateless = endpoints.with_qp(turn, *qpn, |qp, _| qp.quiesce());
        let on_card = || match stateful_mut(turn.nic, *qpn) {
            Some(end) => end.quiesce(),
            /* a stateful end that waits for its peer has begun nothing */
            None => turn.nic.is_held(*qpn) || turn.nic.quiesce_qp(*qpn),
        };
        stateless.unwrap_or_else(on_card)
    }

    fn is_drained(&self) -> bool {
        self.turn.nic.has_nothing_under_way(self.qpn)
    }

    fn hold(&mut self) -> Option<QuiescePoint> {
        let nic = &mut self.turn.nic;
        if let Some(end) = stateful_mut(nic, self.qpn) {
            return end.quiesce_point();
        }
        (nic.is_held(self.qpn) || nic.hold_quiesced(self.qpn)).then(QuiescePoint::default)
    }

    fn change(&mut self, point: Option<QuiescePoint>, to: Outcome) -> Option<bool> {
        let qpn = self.qpn;
        if let Outcome::Star { boot, ports, .. } = to {
            let held = self.turn.nic.hold_quiesced(qpn);
            let sf = StatefulCard { boot, port: ports[1] };
            return (held && self.endpoints.begin(self.turn, qpn, sf).is_ok()).then_some(true);
        }
        if point.is_none() && !(self.endpoints.is_beginning(qpn) && self.quiesce()) {
            return None;
        }
        self.endpoints.revert(self.turn, qpn, point.unwrap_or_default())
    }

    fn settle(&mut self, star: bool) {
        let Turn { nic, env, now } = &mut *self.turn;
        if !star {
            nic.resume_qp(env, self.qpn, *now);
        } else if let Some(end) = stateful_mut(nic, self.qpn) {
            end.resume();
            nic.handle_doorbell(env, self.qpn, *now);
        } else {
            self.endpoints.with_qp(self.turn, self.qpn, |qp, _| qp.resume());
        }
    }
}

impl<E: EndpointHost> Roles<E> {
    /// Whether the roles of a connection may ever change, once they are settled: not if its end takes from an
    /// SRQ or speaks StRoM's dialect, or its peer's card has no StaR, or another version of the protocol.
    pub(super) fn can_change(&self, end: &End) -> bool {
        let settled = end.negotiation.outcome().is_some();
        let heard = end.negotiation.has_answer() || self.plain.has_star(&end.av.dgid);
        !end.has_fixed_role && !end.negotiation.is_foreign() && (heard || !settled)
    }

    /// Whether that may be now: both ends have begun as what they are, and it is not ending.
    pub(super) fn may_change(&self, turn: &Turn<'_, E>, all: &Endpoints<E>, end: &End) -> bool {
        let may = match end.role() {
            Some(Role::Stateless) => all.has_begun(end.qpn),
            Some(Role::Stateful) => {
                stateful(turn.nic, end.qpn).is_some_and(|sf| sf.is_open() && sf.may_quiesce())
            }
            None => end.is_plain() && turn.nic.may_quiesce(end.qpn),
        };
        may && self.can_change(end)
    }
}
