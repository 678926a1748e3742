//! The passive side: REQ comes, REP goes, RTU comes (IBTA 12.9.6).

use alloc::boxed::Box;

use starverbs_core::Nanos;

use super::conn::{Conn, State};
use super::{Cm, CmError, CmPath, ConnEvent, RemoteKey};
use crate::params::{ACCEPT_PRIVATE, Accept, Request};
use crate::reason;
use crate::wire::message::{self, AnsweredMessage, BadReq, Ids};
use crate::wire::{Mad, fields};

impl Cm {
    pub(super) fn on_req(&mut self, now: Nanos, path: CmPath, mad: &Mad) {
        let ids = Ids { local: 0, remote: mad.get32(fields::LOCAL_ID), transaction: mad.transaction() };
        let key = (path.remote, ids.remote, false);
        if let Some(id) = self.by_request.get(&key).copied() {
            return self.on_duplicate_req(id, path, ids);
        }
        if let Err(reason) = self.admit(now, path, mad, ids, key) {
            let mut rej = message::rej(ids, AnsweredMessage::Req, reason, None, &[]);
            if reason == reason::INVALID_PATH_MTU {
                message::propose_mtu(&mut rej, (self.mtu)(&path.remote));
            }
            self.send_over(path, rej);
        }
    }

    /// A new connection for a REQ, or the reason why not.
    fn admit(&mut self, now: Nanos, path: CmPath, mad: &Mad, ids: Ids, key: RemoteKey) -> Result<(), u16> {
        let service = mad.get(fields::req::SERVICE_ID);
        let listener = self.listener(service, path.local).ok_or(reason::INVALID_SERVICE_ID)?;
        let (listener, room) = (listener.id, listener.waiting < listener.backlog);
        let request = message::request(mad, path.remote, path.local).map_err(|bad| match bad {
            BadReq::Transport => reason::INVALID_TRANSPORT,
            BadReq::Header => reason::UNSUPPORTED,
        })?;
        if request.path_mtu > (self.mtu)(&path.remote) {
            return Err(reason::INVALID_PATH_MTU);
        }
        self.refuse_stale(now, path, &request)?;
        let id = if room && (self.room)() { self.new_id().ok() } else { None }.ok_or(reason::NO_RESOURCES)?;
        let path = CmPath { traffic_class: request.traffic_class, hop_limit: request.hop_limit, ..path };
        let mut conn = Conn::new(State::ReqRcvd, Ids { local: id, ..ids }, path);
        conn.remote_qpn = request.qp.qpn;
        conn.ack_timeout = request.ack_timeout;
        conn.response_timeout = mad.get8(fields::req::LOCAL_RESPONSE_TIMEOUT);
        conn.max_retries = mad.get8(fields::req::MAX_CM_RETRIES);
        (conn.service, conn.listener, conn.request) = (service, Some(listener), Some(key));
        self.take_in(id, conn);
        self.notify(id, ConnEvent::Request { listener, request: Box::new(request) });
        Ok(())
    }

    /// A queue pair that is connected asks anew: what is known of it is of an earlier incarnation (IBTA
    /// 12.4.1, 12.9.8.3.1). The request is refused, the old connection released.
    fn refuse_stale(&mut self, now: Nanos, path: CmPath, request: &Request) -> Result<(), u16> {
        let Some(old) = self.by_qpn.get(&(path.remote, request.qp.qpn)).copied() else { return Ok(()) };
        self.part(now, old);
        Err(reason::STALE_CONNECTION)
    }

    fn on_duplicate_req(&mut self, id: u32, path: CmPath, ids: Ids) {
        let Some(conn) = self.conns.get(&id) else { return };
        let same = conn.ids.transaction == ids.transaction;
        match conn.state {
            State::ReqRcvd if same => {
                let mra = message::mra(conn.ids, AnsweredMessage::Req);
                self.send(id, mra);
            }
            State::RepSent | State::Answered if same => self.send_again(id),
            State::Established if same => {}
            _ => {
                let stale = reason::STALE_CONNECTION;
                self.send_over(path, message::rej(ids, AnsweredMessage::Req, stale, None, &[]));
            }
        }
    }

    /// Accepts a request: sends the REP.
    ///
    /// # Errors
    /// `State`: there is none; `Invalid`.
    pub fn accept(&mut self, now: Nanos, id: u32, accept: &Accept) -> Result<(), CmError> {
        let conn =
            self.conns.get_mut(&id).filter(|conn| conn.state == State::ReqRcvd).ok_or(CmError::State)?;
        if accept.private_data.len() > ACCEPT_PRIVATE || accept.rnr_retry_count > 7 {
            return Err(CmError::Invalid);
        }
        conn.qpn = accept.qp.qpn;
        let mad = message::rep(conn.ids, self.config.guid, accept);
        self.send_until_answered(now, id, State::RepSent, mad);
        Ok(())
    }

    /// The program has the request, or the question: it counts no more among those that wait for it (listen's
    /// backlog). How many it keeps unanswered is bounded by [`MAX_CONNS`](super::MAX_CONNS) alone.
    pub fn taken(&mut self, id: u32) {
        self.leave_backlog(id);
    }

    pub(super) fn on_rtu(&mut self, id: u32) {
        if self.conns.get(&id).is_some_and(|conn| conn.state == State::RepSent) {
            self.enter(id, State::Established);
            self.notify(id, ConnEvent::Established);
        }
    }

    /// Data came, so that the peer is ready though its RTU was not seen.
    ///
    /// # Errors
    /// `Established`; `State`: nothing was accepted.
    pub fn communication_established(&mut self, id: u32) -> Result<(), CmError> {
        match self.conns.get(&id).map(|conn| conn.state) {
            Some(State::RepSent) => {
                self.on_rtu(id);
                Ok(())
            }
            Some(State::Established) => Err(CmError::Established),
            _ => Err(CmError::State),
        }
    }
}
