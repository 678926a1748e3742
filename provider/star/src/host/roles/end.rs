//! An end in a round: a QP of the card, plain or a stateful end, or a stateless one, which the host has.

use starverbs_core::Qpn;

use crate::card::{stateful, stateful_mut};
use crate::control::Role;
use crate::negotiate::Outcome;
use crate::round::{QuiescePoint, RoundEnd};

use super::super::endpoints::{Endpoints, StatefulCard};
use super::super::{EndpointHost, Turn};
use super::End;

/// An end, wherever it is.
pub(super) struct HostEnd<'a, 't, E: EndpointHost> {
    pub(super) turn: &'a mut Turn<'t, E>,
    pub(super) endpoints: &'a mut Endpoints<E>,
    pub(super) qpn: Qpn,
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

    fn drained_at(&self) -> Option<QuiescePoint> {
        let nic = &self.turn.nic;
        let attr = nic.query_qp(self.qpn).ok().filter(|_| nic.has_nothing_under_way(self.qpn))?;
        Some(QuiescePoint { sends: attr.sq_psn, recvs: attr.rq_psn })
    }

    fn hold(&mut self, peer_point: Option<QuiescePoint>) -> Option<QuiescePoint> {
        if let Some(end) = stateful_mut(self.turn.nic, self.qpn) {
            return end.quiesce_point();
        }
        if self.turn.nic.is_held(self.qpn) {
            return Some(QuiescePoint::default());
        }
        let QuiescePoint { sends, recvs } = self.drained_at()?;
        let point = Some(QuiescePoint { sends: recvs, recvs: sends });
        point.filter(|_| peer_point == point && self.turn.nic.hold_quiesced(self.qpn))
    }

    fn change(&mut self, point: Option<QuiescePoint>, to: Outcome) -> Option<bool> {
        let qpn = self.qpn;
        if let Outcome::Star { boot, ports, .. } = to {
            if self.drained_at() != point {
                return Some(false);
            }
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

/// Whether an end takes from a queue of its own.
pub(super) fn has_own_receives<E: EndpointHost>(turn: &Turn<'_, E>, all: &Endpoints<E>, qpn: Qpn) -> bool {
    let on_card = || turn.nic.handover(qpn).is_ok_and(|of| of.rq.is_some());
    all.takes_from_srq(qpn).map_or_else(on_card, |shared| !shared)
}

/// Whether both ends of a connection have begun as what they are; false: SL has, and SF may not know.
/// `None`: that may not change now, as it takes from an SRQ or speaks StRoM's dialect, its peer's card has
/// another version of the protocol, or an atomic is under way, or it is ending.
pub(super) fn may_change<E: EndpointHost>(turn: &Turn<'_, E>, all: &Endpoints<E>, end: &End) -> Option<bool> {
    let (nic, qpn) = (&turn.nic, end.qpn);
    let may = match (end.role(), stateful(nic, qpn)) {
        (None, _) => end.is_plain() && nic.may_quiesce(qpn),
        (Some(Role::Stateless), _) if all.is_beginning(qpn) => return Some(false),
        (Some(Role::Stateless), _) => all.may_quiesce(qpn),
        /* before SL has said all that it begins with, it may not know of this end */
        (_, Some(sf)) if !sf.is_open() => return Some(false),
        (_, Some(sf)) => sf.may_quiesce() && !nic.speaks_strom(qpn),
        (_, None) => return (end.may_begin && nic.is_held(qpn)).then_some(false),
    };
    (may && !end.negotiation.is_foreign() && has_own_receives(turn, all, qpn)).then_some(true)
}
