//! A card's queue pair while the roles of its connection change: plain RC, or a stateful end.

use starverbs_core::transport::patience;
use starverbs_core::{Nanos, Qpn};

use super::card::{CardEnv, Turn, stateful_mut};
use super::renegotiation::Requests;
use super::revert::{QuiescePoint, RevertStep, StarEnd};

/// The requests of one QP of a card.
pub struct CardQp<'a, 't, E: CardEnv> {
    /// The card
    pub turn: &'a mut Turn<'t, E>,
    /// The QP
    pub qpn: Qpn,
}

impl<E: CardEnv> Requests for CardQp<'_, '_, E> {
    fn quiesce(&mut self) -> bool {
        self.turn.nic.quiesce_qp(self.qpn)
    }

    fn are_drained(&self) -> bool {
        self.turn.nic.has_nothing_under_way(self.qpn)
    }

    fn hold(&mut self) -> bool {
        self.turn.nic.hold_quiesced(self.qpn)
    }

    fn are_held(&self) -> bool {
        self.turn.nic.is_held(self.qpn)
    }

    fn resume(&mut self) {
        let Turn { nic, env, now } = &mut *self.turn;
        nic.resume_qp(env, self.qpn, *now);
    }
}

/// A stateful end that may revert to RC. One that still waits for its peer has begun nothing.
impl<E: CardEnv> StarEnd for CardQp<'_, '_, E> {
    fn quiesce(&mut self) -> bool {
        let waits = self.turn.nic.is_held(self.qpn);
        stateful_mut(self.turn.nic, self.qpn).map_or(waits, |end| end.quiesce())
    }

    fn resume(&mut self) {
        let Turn { nic, env, now } = &mut *self.turn;
        if let Some(end) = stateful_mut(nic, self.qpn) {
            end.resume();
            nic.handle_doorbell(env, self.qpn, *now);
        }
    }

    fn quiesce_point(&mut self) -> Option<QuiescePoint> {
        let waits = self.turn.nic.is_held(self.qpn);
        match stateful_mut(self.turn.nic, self.qpn) {
            Some(end) => end.quiesce_point(),
            None => waits.then(QuiescePoint::default),
        }
    }

    fn revert(&mut self, _: QuiescePoint) -> RevertStep {
        RevertStep::Impossible
    }

    fn is_beginning(&self) -> bool {
        false
    }

    fn settle(&mut self) {
        Requests::resume(self);
    }

    fn is_settled(&self) -> bool {
        let (nic, qpn) = (&self.turn.nic, self.qpn);
        nic.qp_state(qpn).is_some() && !nic.is_held(qpn) && nic.engine(qpn).is_none()
    }

    fn waits(&self) -> Option<Option<Nanos>> {
        let waits = self.turn.nic.has_posts(self.qpn);
        let attr = self.turn.nic.query_qp(self.qpn).ok().filter(|_| waits)?;
        Some(patience(attr.timeout, attr.retry_cnt))
    }
}
