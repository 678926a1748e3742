//! The way out: DREQ, DREP, timewait (IBTA 12.9.7), and what becomes of a connection that the program drops.

use starverbs_core::Nanos;

use super::conn::State;
use super::{Cm, CmError, ConnEvent};
use crate::params::{SidrAnswer, sidr};
use crate::reason;
use crate::wire::message::{self, AnsweredMessage, Ids};
use crate::wire::{Mad, fields};

impl Cm {
    /// Releases an established connection: sends the DREQ. One that is released already, or being so, is left
    /// alone.
    ///
    /// # Errors
    /// `State`: there never was a connection.
    pub fn disconnect(&mut self, now: Nanos, id: u32) -> Result<(), CmError> {
        let conn = self.conns.get(&id).ok_or(CmError::State)?;
        match conn.state {
            State::Established | State::RepSent => {
                self.part(now, id);
                Ok(())
            }
            State::DreqSent | State::Timewait | State::Dead => Ok(()),
            _ => Err(CmError::State),
        }
    }

    /// Sends the DREQ.
    pub(super) fn part(&mut self, now: Nanos, id: u32) {
        let transaction = self.new_transaction();
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.ids.transaction = transaction;
        let mad = message::dreq(conn.ids, conn.remote_qpn);
        self.send_until_answered(now, id, State::DreqSent, mad);
    }

    pub(super) fn on_dreq(&mut self, now: Nanos, id: u32, mad: &Mad) {
        let Some(conn) = self.conns.get(&id) else { return };
        if mad.get32(fields::dreq::REMOTE_QPN) != conn.qpn {
            return;
        }
        let drep = message::drep(Ids { transaction: mad.transaction(), ..conn.ids });
        match conn.state {
            State::Established | State::RepSent | State::RepRcvd | State::DreqSent => {
                self.send(id, drep);
                self.enter_timewait(now, id);
                self.notify(id, ConnEvent::Disconnected { timed_out: false });
            }
            /* the DREP was lost */
            State::Timewait | State::Dead => self.send(id, drep),
            _ => {}
        }
    }

    pub(super) fn on_drep(&mut self, now: Nanos, id: u32) {
        if self.conns.get(&id).is_some_and(|conn| conn.state == State::DreqSent) {
            self.enter_timewait(now, id);
            self.notify(id, ConnEvent::Disconnected { timed_out: false });
        }
    }

    /// The program has released the connection: it gets no more events of it. The peer learns
    /// of it: what is established is released, what waits for an answer refused.
    pub fn release(&mut self, now: Nanos, id: u32) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.released = true;
        let ids = conn.ids;
        match conn.state {
            State::ReqSent => self.withdraw(id),
            State::ReqRcvd | State::RepRcvd => {
                let answered = conn.state.asked().unwrap_or(AnsweredMessage::Other);
                let rej = message::rej(ids, answered, reason::CONSUMER, None, &[]);
                self.answer_last(id, now, State::Answered, rej);
            }
            State::RepSent => {
                let guid = self.config.guid;
                let rej = message::rej(ids, AnsweredMessage::Other, reason::TIMEOUT, Some(guid), &[]);
                self.answer_last(id, now, State::Answered, rej);
            }
            State::Established => self.part(now, id),
            State::SidrReqRcvd => {
                /* it waits for an answer, so that it can be given one */
                let _ = self.answer(now, id, &SidrAnswer::refusal(sidr::REJECT));
            }
            State::SidrReqSent => self.enter(id, State::Dead),
            State::DreqSent | State::Timewait | State::Answered | State::SidrAnswered | State::Dead => {}
        }
        self.forget_if_released(id);
    }

    /// Releases all connections, as when the process is about to go.
    pub fn release_all(&mut self, now: Nanos) {
        let ids: alloc::vec::Vec<u32> = self.conns.keys().copied().collect();
        for id in ids {
            self.release(now, id);
        }
    }
}
