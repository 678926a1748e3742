//! A stateless end goes back to the card while its connection runs.

use starverbs_core::Qpn;

use crate::endpoint::SlQp;
use crate::round::QuiescePoint;

use super::super::{EndpointHost, Turn};
use super::Endpoints;

impl<E: EndpointHost> Endpoints<E> {
    /// Calls it, and does what follows. `None`: it is none of these.
    pub(in crate::host) fn with_qp<R>(
        &mut self,
        turn: &mut Turn<'_, E>,
        qpn: Qpn,
        call: impl FnOnce(&mut SlQp<E>, &mut Turn<'_, E>) -> R,
    ) -> Option<R> {
        let at = self.places.get(qpn)?;
        let done = call(&mut self.ends.get_mut(at as usize)?.qp, turn);
        self.settle(turn, at);
        Some(done)
    }

    /// The QP is the card's again. False: something that SF has done is not complete here; `None`: it cannot.
    pub(in crate::host) fn revert(
        &mut self,
        turn: &mut Turn<'_, E>,
        qpn: Qpn,
        point: QuiescePoint,
    ) -> Option<bool> {
        let at = self.places.get(qpn)?;
        let end = self.ends.get_mut(at as usize)?;
        if !end.qp.has_reached(turn.env, turn.now, point)? {
            /* its window operations come first */
            self.settle(turn, at);
            return Some(false);
        }
        let places = turn.nic.prepare_return(&end.released).ok()?;
        let Ok(first_send) = end.qp.revert() else {
            turn.nic.forget_places(places);
            return None;
        };
        let released = self.take_out(turn, at)?;
        if let Err(error) = turn.nic.readmit_running(turn.env, released, places, first_send, turn.now) {
            super::super::roles::fail(turn, qpn, error);
        }
        self.follow_memory(turn);
        Some(true)
    }
}
