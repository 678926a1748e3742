//! A stateless end reverts to RC while its connection runs: its QP goes back to the card.

use starverbs_core::{Nanos, Qpn};

use crate::endpoint::Left;
use crate::revert::{QuiescePoint, RevertStep, StarEnd};

use super::super::{EndpointHost, Turn};
use super::Endpoints;

/// A stateless end that may revert.
pub(in crate::host) struct Stateless<'a, 't, E: EndpointHost> {
    pub(in crate::host) endpoints: &'a mut Endpoints<E>,
    pub(in crate::host) turn: &'a mut Turn<'t, E>,
    pub(in crate::host) qpn: Qpn,
}

impl<E: EndpointHost> StarEnd for Stateless<'_, '_, E> {
    fn quiesce(&mut self) -> bool {
        let at = self.endpoints.places.get(self.qpn);
        let end = at.and_then(|at| self.endpoints.ends.get_mut(at as usize));
        end.is_some_and(|end| end.qp.quiesce())
    }

    fn resume(&mut self) {
        let Some(at) = self.endpoints.places.get(self.qpn) else { return };
        if let Some(end) = self.endpoints.ends.get_mut(at as usize) {
            end.qp.resume(self.turn.env, self.turn.now);
            self.endpoints.settle(self.turn, at);
        }
    }

    fn quiesce_point(&mut self) -> Option<QuiescePoint> {
        None
    }

    fn revert(&mut self, point: QuiescePoint) -> RevertStep {
        match self.endpoints.places.get(self.qpn) {
            Some(at) => self.endpoints.revert(self.turn, at, point),
            None => RevertStep::Impossible,
        }
    }

    fn is_beginning(&self) -> bool {
        self.endpoints.is_beginning(self.qpn)
    }

    /* of the stateful end alone */
    fn settle(&mut self) {}
    fn is_settled(&self) -> bool {
        false
    }
    fn waits(&self) -> Option<Option<Nanos>> {
        None
    }
}

impl<E: EndpointHost> Endpoints<E> {
    /// The QP at `at` is the card's again, if all that SF has done is complete here.
    fn revert(&mut self, turn: &mut Turn<'_, E>, at: u32, point: QuiescePoint) -> RevertStep {
        /* its window operations come first */
        self.settle(turn, at);
        let Some(end) = self.ends.get_mut(at as usize) else { return RevertStep::Impossible };
        match end.qp.has_reached(turn.env, turn.now, point) {
            None => return RevertStep::Impossible,
            Some(true) if end.window_op.is_none() => {}
            Some(_) => {
                self.settle(turn, at);
                return RevertStep::Pending;
            }
        }
        let Ok(places) = turn.nic.prepare_return(&end.released) else { return RevertStep::Impossible };
        let Ok(Left { recvs, first_send }) = end.qp.revert() else {
            turn.nic.forget_places(places);
            return RevertStep::Impossible;
        };
        let Some(released) = self.take_out(turn, at) else { return RevertStep::Impossible };
        let (srq, qpn) = (released.srq(), released.qpn);
        if let Err(error) = turn.nic.readmit_running(turn.env, released, places, first_send, turn.now) {
            super::super::roles::fail(turn, qpn, error);
        }
        self.follow_memory(turn);
        if let Some(srq) = srq.filter(|_| recvs > 0) {
            /* receives that came back there may be for others */
            self.ring_srq(turn, srq);
        }
        RevertStep::Reverted
    }
}
