//! The active side: REQ, then REP, then RTU (IBTA 12.9.5).

use alloc::boxed::Box;

use starverbs_core::Nanos;

use super::conn::{Conn, State};
use super::{Cm, CmError, CmPath, ConnEvent};
use crate::params::{CONNECT_PRIVATE, Connect, REJECT_PRIVATE};
use crate::reason;
use crate::wire::message::{self, AnsweredMessage, Ids, Rejection};
use crate::wire::{Mad, fields, ip};

impl Cm {
    /// Asks a peer for a connection; gives its ID.
    ///
    /// # Errors
    /// `Invalid`, `Full`
    pub fn connect(&mut self, now: Nanos, connect: &Connect) -> Result<u32, CmError> {
        let fits = connect.private_data.len() <= CONNECT_PRIVATE
            && connect.local.is_ipv4() == connect.remote.is_ipv4()
            && connect.retry_count <= 7
            && connect.rnr_retry_count <= 7
            && connect.ack_timeout <= 31
            && !connect.space.is_datagram();
        if !fits {
            return Err(CmError::Invalid);
        }
        let local = self.new_id()?;
        let ids = Ids { local, remote: 0, transaction: self.new_transaction() };
        let path = CmPath {
            local: ip::gid_of(connect.local.ip()),
            remote: ip::gid_of(connect.remote.ip()),
            traffic_class: connect.traffic_class,
            hop_limit: connect.hop_limit,
        };
        let mut conn = Conn::new(State::ReqSent, ids, path);
        (conn.qpn, conn.ack_timeout) = (connect.qp.qpn, connect.ack_timeout);
        self.conns.insert(local, conn);
        let mad = message::req(ids, self.config.guid, connect);
        self.send_until_answered(now, local, State::ReqSent, mad);
        Ok(local)
    }

    /// The queue pair is ready: sends the RTU.
    ///
    /// # Errors
    /// `State`: no REP came.
    pub fn establish(&mut self, id: u32) -> Result<(), CmError> {
        let conn = self.conns.get(&id).filter(|conn| conn.state == State::RepRcvd).ok_or(CmError::State)?;
        let rtu = message::rtu(conn.ids);
        self.enter(id, State::Established);
        self.send(id, rtu);
        Ok(())
    }

    pub(super) fn on_rep(&mut self, id: u32, mad: &Mad) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let ids = conn.ids;
        match conn.state {
            State::ReqSent => {
                let response = message::response(mad);
                conn.ids.remote = mad.get32(fields::LOCAL_ID);
                conn.remote_qpn = response.qp.qpn;
                self.enter(id, State::RepRcvd);
                self.notify(id, ConnEvent::Response(Box::new(response)));
            }
            /* it comes again: the program needs time */
            State::RepRcvd => self.send(id, message::mra(ids, AnsweredMessage::Rep)),
            /* the RTU was lost */
            State::Established => self.send(id, message::rtu(ids)),
            _ => {}
        }
    }

    pub(super) fn on_mra(&mut self, now: Nanos, id: u32, mad: &Mad) {
        let Some(conn) = self.conns.get(&id) else { return };
        let awaited = match conn.state {
            State::ReqSent => AnsweredMessage::Req,
            State::RepSent => AnsweredMessage::Rep,
            _ => return,
        };
        if mad.get(fields::mra::MESSAGE) == awaited as u64 {
            self.wait_longer(now, id, mad.get8(fields::mra::SERVICE_TIMEOUT));
        }
    }

    /// Refuses a request, or a response, with a reason and private data.
    ///
    /// # Errors
    /// `State`: there is none that waits for an answer; `Invalid`: too much private data.
    pub fn reject(&mut self, now: Nanos, id: u32, reason: u16, private_data: &[u8]) -> Result<(), CmError> {
        let conn = self.conns.get(&id).ok_or(CmError::State)?;
        let answered = conn.state.asked().ok_or(CmError::State)?;
        if private_data.len() > REJECT_PRIVATE {
            return Err(CmError::Invalid);
        }
        let rej = message::rej(conn.ids, answered, reason, None, private_data);
        self.answer_last(id, now, State::Answered, rej);
        Ok(())
    }

    pub(super) fn on_rej(&mut self, now: Nanos, id: u32, mad: &Mad) {
        let Some(conn) = self.conns.get(&id) else { return };
        match conn.state {
            State::ReqSent | State::RepRcvd | State::ReqRcvd | State::RepSent => {
                let Rejection { reason, private_data } = message::rejected(mad);
                self.enter(id, State::Dead);
                self.notify(id, ConnEvent::Rejected { reason, private_data });
                self.forget_if_released(id);
            }
            /* the passive side did not see the RTU in time, or knows nothing of the connection */
            State::Established | State::DreqSent => {
                self.enter_timewait(now, id);
                self.notify(id, ConnEvent::Disconnected { timed_out: false });
            }
            _ => {}
        }
    }

    /// The program gives up a request of its own before it is answered.
    pub(super) fn withdraw(&mut self, id: u32) {
        let Some(conn) = self.conns.get(&id) else { return };
        let (ids, guid) = (conn.ids, self.config.guid);
        self.send(id, message::rej(ids, AnsweredMessage::Other, reason::TIMEOUT, Some(guid), &[]));
        self.enter(id, State::Dead);
        self.forget_if_released(id);
    }
}
