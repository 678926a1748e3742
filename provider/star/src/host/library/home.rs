//! A stateless end goes back to its card, while its connection runs.

use starverbs_core::{Nanos, Qpn};

use crate::homing::{Came, Done, Half};

use super::super::{Host, Turn};
use super::Library;

/// A stateless end that may go home.
pub(in crate::host) struct Stateless<'a, 't, E: Host> {
    pub(in crate::host) library: &'a mut Library<E>,
    pub(in crate::host) turn: &'a mut Turn<'t, E>,
    pub(in crate::host) qpn: Qpn,
}

impl<E: Host> Half for Stateless<'_, '_, E> {
    fn rest(&mut self) -> bool {
        let at = self.library.places.get(self.qpn);
        let end = at.and_then(|at| self.library.ends.get_mut(at as usize));
        end.is_some_and(|end| end.qp.rest())
    }

    fn resume(&mut self) {
        let Some(at) = self.library.places.get(self.qpn) else { return };
        if let Some(end) = self.library.ends.get_mut(at as usize) {
            end.qp.resume(self.turn.env, self.turn.now);
            self.library.settle(self.turn, at);
        }
    }

    fn halt(&mut self) -> Option<Done> {
        None
    }

    fn go_home(&mut self, done: Done) -> Came {
        match self.library.places.get(self.qpn) {
            Some(at) => self.library.go_home(self.turn, at, done),
            None => Came::Never,
        }
    }

    fn is_beginning(&self) -> bool {
        self.library.is_beginning(self.qpn)
    }

    /* the stateful end asks itself these */
    fn settle(&mut self) {}
    fn is_settled(&self) -> bool {
        false
    }
    fn waits(&self) -> Option<Option<Nanos>> {
        None
    }
}

impl<E: Host> Library<E> {
    /// The QP at `at` is the card's again, if all that SF has done is complete here.
    fn go_home(&mut self, turn: &mut Turn<'_, E>, at: u32, done: Done) -> Came {
        /* windows that it changes are changed first */
        self.settle(turn, at);
        let Some(end) = self.ends.get_mut(at as usize) else { return Came::Never };
        match end.qp.has_ended_at(turn.env, turn.now, done) {
            None => return Came::Never,
            Some(true) if end.chore.is_none() => {}
            Some(_) => {
                self.settle(turn, at);
                return Came::Later;
            }
        }
        let Ok(places) = turn.nic.prepare_return(&end.released) else { return Came::Never };
        let Ok((came_back, first_send)) = end.qp.go_home() else {
            turn.nic.forget_places(places);
            return Came::Never;
        };
        let Some(released) = self.take_out(turn, at) else { return Came::Never };
        let (srq, qpn) = (released.srq(), released.qpn);
        if let Err(error) = turn.nic.readmit_running(turn.env, released, places, first_send, turn.now) {
            super::super::roles::fail(turn, qpn, error);
        }
        self.follow_memory(turn);
        if let Some(srq) = srq.filter(|_| came_back > 0) {
            /* what came back there may be for others */
            self.ring_srq(turn, srq);
        }
        Came::Home
    }
}
