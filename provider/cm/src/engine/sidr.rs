//! Service ID resolution: asking for a datagram queue pair, and telling (IBTA 12.11).

use alloc::boxed::Box;

use starverbs_core::Nanos;

use super::conn::{Conn, State};
use super::{Cause, Cm, CmError, CmPath, ConnEvent};
use crate::params::{ANSWER_PRIVATE, RESOLVE_PRIVATE, Resolve, SidrAnswer, sidr};
use crate::wire::message::{self, Ids, Resolution};
use crate::wire::{Mad, fields, ip};

impl Cm {
    /// Asks a peer for a datagram queue pair; gives the ID of the question.
    ///
    /// # Errors
    /// `Invalid`, `Full`
    pub fn resolve(&mut self, now: Nanos, resolve: &Resolve) -> Result<u32, CmError> {
        let fits = resolve.private_data.len() <= RESOLVE_PRIVATE
            && resolve.local.is_ipv4() == resolve.remote.is_ipv4()
            && resolve.space.is_datagram();
        if !fits {
            return Err(CmError::Invalid);
        }
        let local = self.new_id()?;
        let ids = Ids { local, remote: 0, transaction: self.new_transaction() };
        let path = CmPath {
            local: ip::gid_of(resolve.local.ip()),
            remote: ip::gid_of(resolve.remote.ip()),
            traffic_class: resolve.traffic_class,
            hop_limit: resolve.hop_limit,
        };
        self.conns.insert(local, Conn::new(State::SidrReqSent, ids, path));
        let mad = message::sidr_req(local, ids.transaction, resolve);
        self.send_until_answered(now, local, State::SidrReqSent, mad);
        Ok(local)
    }

    /// Answers a peer's question.
    ///
    /// # Errors
    /// `State`: it is none, or is answered; `Invalid`: too much private data.
    pub fn answer(&mut self, now: Nanos, id: u32, answer: &SidrAnswer) -> Result<(), CmError> {
        let asked = |conn: &&Conn| conn.state == State::SidrReqRcvd;
        let conn = self.conns.get(&id).filter(asked).ok_or(CmError::State)?;
        if answer.private_data.len() > ANSWER_PRIVATE {
            return Err(CmError::Invalid);
        }
        let mad = message::sidr_rep(conn.ids.remote, conn.ids.transaction, conn.service, answer);
        self.answer_last(id, now, State::SidrAnswered, mad);
        Ok(())
    }

    pub(super) fn on_sidr_req(&mut self, path: CmPath, mad: &Mad) {
        let (remote, transaction) = (mad.get32(fields::sidr_req::REQUEST_ID), mad.transaction());
        let key = (path.remote, remote, true);
        if let Some(id) = self.by_request.get(&key).copied() {
            let again = |conn: &Conn| conn.ids.transaction == transaction;
            if self.conns.get(&id).is_some_and(again) {
                return self.send_again(id);
            }
            /* another question under an ID that is used again: the first is over */
            self.by_request.remove(&key);
            if let Some(conn) = self.conns.get_mut(&id) {
                conn.request = None;
            }
        }
        let service = mad.get(fields::sidr_req::SERVICE_ID);
        let listener = self.listener(service, path.local).map(|l| (l.id, l.waiting < l.backlog));
        let refuse = |status| message::sidr_rep(remote, transaction, service, &SidrAnswer::refusal(status));
        let Some((listener, room)) = listener else {
            return self.send_over(path, refuse(sidr::UNSUPPORTED));
        };
        let Some(resolving) = message::resolving(mad, path.remote, path.local) else {
            return self.send_over(path, refuse(sidr::UNSUPPORTED));
        };
        let id = if room && (self.room)() { self.new_id().ok() } else { None };
        let Some(id) = id else { return self.send_over(path, refuse(sidr::REJECT)) };
        let ids = Ids { local: id, remote, transaction };
        let mut conn = Conn::new(State::SidrReqRcvd, ids, path);
        (conn.service, conn.listener, conn.request) = (service, Some(listener), Some(key));
        self.take_in(id, conn);
        self.notify(id, ConnEvent::Resolving { listener, resolving: Box::new(resolving) });
    }

    pub(super) fn on_sidr_rep(&mut self, path: CmPath, mad: &Mad) {
        let id = mad.get32(fields::sidr_rep::REQUEST_ID);
        let asked = |conn: &Conn| conn.state == State::SidrReqSent && conn.path.remote == path.remote;
        if !self.conns.get(&id).is_some_and(asked) {
            return;
        }
        let Resolution { status, resolved } = message::resolved(mad);
        self.enter(id, State::Dead);
        let event = match status {
            sidr::SUCCESS => ConnEvent::Resolved(Box::new(resolved)),
            status => ConnEvent::Unreachable(Cause::Status(status)),
        };
        self.notify(id, event);
        self.forget_if_released(id);
    }
}
