//! A card's queue pair while the roles of its connection change: one of plain RoCEv2, or a stateful end.

use starverbs_core::transport::patience;
use starverbs_core::{Nanos, Qpn};

use super::card::{CardEnv, Turn, stateful_mut};
use super::homing::{Came, Done, Half};
use super::renew::Requests;

/// The requests of one QP of a card.
pub struct Resting<'a, 't, E: CardEnv> {
    /// The card
    pub turn: &'a mut Turn<'t, E>,
    /// The QP
    pub qpn: Qpn,
}

impl<E: CardEnv> Requests for Resting<'_, '_, E> {
    fn rest(&mut self) -> bool {
        self.turn.nic.quiesce_qp(self.qpn)
    }

    fn are_done(&self) -> bool {
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

/// The stateful end of a connection that may become one of plain RoCEv2; if it waits for its peer to begin,
/// nothing of it has begun either.
impl<E: CardEnv> Half for Resting<'_, '_, E> {
    fn rest(&mut self) -> bool {
        let waits = self.turn.nic.is_held(self.qpn);
        stateful_mut(self.turn.nic, self.qpn).map_or(waits, |end| end.come_to_rest())
    }

    fn resume(&mut self) {
        let Turn { nic, env, now } = &mut *self.turn;
        if let Some(end) = stateful_mut(nic, self.qpn) {
            end.resume();
            nic.handle_doorbell(env, self.qpn, *now);
        }
    }

    fn halt(&mut self) -> Option<Done> {
        let waits = self.turn.nic.is_held(self.qpn);
        match stateful_mut(self.turn.nic, self.qpn) {
            Some(end) => end.halt(),
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
