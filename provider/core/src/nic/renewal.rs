//! Requests of a QP that rest, as the roles of its connection may change while it runs: of one of plain RoCEv2, and of a stateful end.

use super::Nic;
use super::star::Engine;
use crate::env::{Env, SendQueue};
use crate::star::homing::{Came, Done, Half};
use crate::star::renew::Requests;
use crate::transport::{Qp, Roles, patience};
use crate::types::{Nanos, QpState, Qpn, SendOp};

/// The requests of one QP of a card.
pub struct Resting<'a, E: Env> {
    /// The card
    pub nic: &'a mut Nic<E>,
    /// Its host
    pub env: &'a mut E,
    /// The QP
    pub qpn: Qpn,
    /// The time
    pub now: Nanos,
}

impl<E: Env> Qp<E> {
    /// Whether all requests that began are done.
    pub(super) fn has_nothing_under_way(&self) -> bool {
        let req = &self.req;
        req.next == req.una && req.fresh == req.una && !req.outstanding() && req.fault.is_none()
    }

    /// Whether StaR carries all that is posted and did not begin.
    fn has_carried_posts(&self) -> bool {
        let (next, posted) = (self.req.next, self.sq.posted());
        let waiting = (0..posted.wrapping_sub(next)).map(|n| self.sq.wqe(next.wrapping_add(n)).op);
        !waiting.into_iter().any(|op| matches!(op, SendOp::AtomicWrite | SendOp::Flush))
    }
}

impl<E: Env> Requests for Resting<'_, E> {
    fn rest(&mut self) -> bool {
        if !self.nic.suits_star(self.qpn) {
            return false;
        }
        let Some(qp) = self.nic.qps.get_mut(self.qpn) else { return false };
        let runs = matches!(qp.state, QpState::Rtr | QpState::Rts) && !qp.flags.star;
        if runs && qp.roles == Roles::Free {
            qp.roles = Roles::Rest;
        }
        runs && qp.roles == Roles::Rest
    }

    fn are_done(&self) -> bool {
        self.nic.qps.get(self.qpn).is_some_and(Qp::has_nothing_under_way)
    }

    fn hold(&mut self) -> bool {
        let ready = |qp: &Qp<E>| {
            let runs = matches!(qp.state, QpState::Rtr | QpState::Rts) && !qp.flags.star;
            qp.roles == Roles::Rest && runs && qp.has_carried_posts()
        };
        self.nic.qps.get(self.qpn).is_some_and(ready) && self.nic.hold_for_star(self.qpn).is_ok()
    }

    fn are_held(&self) -> bool {
        self.nic.waits_for_star(self.qpn)
    }

    fn resume(&mut self) {
        let Some(mut cx) = self.nic.context(self.env, self.qpn, self.now) else { return };
        cx.settle_plain();
    }
}

/// The stateful end of a connection that may become one of plain RoCEv2; if it waits for its peer to begin, nothing of it has begun either.
impl<E: Env> Half for Resting<'_, E> {
    fn rest(&mut self) -> bool {
        let waits = self.nic.waits_for_star(self.qpn);
        self.engine().map_or(waits, Engine::rest)
    }

    fn resume(&mut self) {
        if let Some(engine) = self.engine() {
            engine.resume();
            self.nic.handle_doorbell(self.env, self.qpn, self.now);
        }
    }

    fn halt(&mut self) -> Option<Done> {
        let waits = self.nic.waits_for_star(self.qpn);
        match self.engine() {
            Some(engine) => engine.halt(),
            None => waits.then(Done::default),
        }
    }

    fn go_home(&mut self, _: Done) -> Came {
        Came::Never
    }

    fn is_beginning(&self) -> bool {
        false
    }

    fn settle(&mut self) {
        if let Some(mut cx) = self.nic.context(self.env, self.qpn, self.now) {
            cx.settle_plain();
        }
    }

    fn is_settled(&self) -> bool {
        self.nic.qps.get(self.qpn).is_some_and(|qp| !qp.flags.star)
    }

    fn waits(&self) -> Option<Option<Nanos>> {
        let qp = self.nic.qps.get(self.qpn)?;
        let first = qp.star.as_ref().map_or(qp.req.next, Engine::next_send);
        (first != qp.sq.posted()).then(|| patience(qp.attr.timeout, qp.attr.retry_cnt))
    }
}

impl<E: Env> Resting<'_, E> {
    fn engine(&mut self) -> Option<&mut E::Star> {
        self.nic.qps.get_mut(self.qpn)?.star.as_mut()
    }
}
