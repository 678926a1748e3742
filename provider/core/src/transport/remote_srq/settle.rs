//! Outcomes of forwarded messages: confirmed, failed, or lost with the other card.

use super::{ForwardedKind, Forwarding, PENDING, RemoteSrqs};
use crate::env::Env;
use crate::relay::{LinkId, RelayOutcome};
use crate::transport::{Ctx, OwedResponse, Responder, enter_error};
use crate::types::{PdId, Psn, QpState};
use crate::wire::headers::{NakCode, Syndrome};

impl Forwarding {
    /// Whether it waits for `link`.
    fn uses(&self, link: LinkId) -> bool {
        self.lease.is_some_and(|lease| lease.link == link)
            || self.write.is_some_and(|(_, to)| to == link)
            || self.fetching.is_some_and(|(_, to)| to == link)
            || self.pending.iter().any(|p| p.link == link)
    }
}

impl Responder {
    /// Whether the QP, which is in `domain`, waits for `link`.
    pub(crate) fn depends_on(&self, remote_srqs: &RemoteSrqs, domain: PdId, link: LinkId) -> bool {
        let reads = |answer: &OwedResponse| {
            let to = answer.remote_srq().and_then(|remote| remote_srqs.reach(domain, remote));
            to.is_some_and(|(_, to)| to == link)
        };
        self.fwd.as_ref().is_some_and(|fwd| fwd.uses(link)) || self.out.iter().any(reads)
    }
}

impl<E: Env> Ctx<'_, E> {
    /// The other card's outcome of a message, and what an atomic `found`.
    pub(crate) fn on_done(&mut self, link: LinkId, serial: u32, outcome: RelayOutcome, found: u64) {
        let Some(fwd) = &mut self.qp.resp.fwd else { return };
        if fwd.lease.is_some_and(|lease| lease.serial == serial && lease.link == link) {
            if outcome != RelayOutcome::Success {
                fwd.lease = None;
                self.fail_under_way(outcome);
            }
            return;
        }
        if fwd.write == Some((serial, link)) && outcome != RelayOutcome::Success {
            return self.fail_under_way(outcome);
        }
        let Some(at) = fwd.pending.iter().position(|p| p.serial == serial && p.link == link) else { return };
        let psn = fwd.pending[at].psn;
        let is_result = fwd.pending[at].kind == ForwardedKind::Atomic && !fwd.pending[at].done;
        match outcome {
            RelayOutcome::Success => {}
            RelayOutcome::ReceivedInError => return self.received_in_error(at),
            _ => return self.fail_from(psn, outcome),
        }
        if is_result {
            self.keep_result(psn, found);
        }
        self.done(at);
    }

    /// The pending message `at` is confirmed.
    pub(super) fn done(&mut self, at: usize) {
        let Some(fwd) = &mut self.qp.resp.fwd else { return };
        let full = fwd.pending.len() == PENDING;
        fwd.pending[at].done = true;
        while fwd.pending.front().is_some_and(|p| p.done) {
            fwd.pending.pop_front();
        }
        self.released();
        if full {
            self.resume_deferred(true);
        }
    }

    /// Messages were confirmed: ACKs and answers that waited for it are sent.
    pub(super) fn released(&mut self) {
        if self.connected() {
            self.owe_ack();
        }
        if self.qp.resp.owes_answer() {
            self.ready();
        }
    }

    /// The message that has `psn`, and all behind it, count as not received.
    pub(super) fn fail_from(&mut self, psn: Psn, outcome: RelayOutcome) {
        let resp = &mut self.qp.resp;
        let Some(fwd) = &mut resp.fwd else { return };
        let at = fwd.pending.iter().position(|p| !p.psn.before(psn));
        if let Some(failed) = at.and_then(|at| fwd.pending.get(at)) {
            resp.msn = failed.msn;
        }
        fwd.pending.truncate(at.unwrap_or(fwd.pending.len()));
        resp.epsn = psn;
        self.drop_answers_from(psn);
        self.fail_forwarded(outcome);
    }

    /// The pending message `at` is received, those behind it are not: its receive failed, so this end goes to
    /// ERR without a NAK (class J).
    fn received_in_error(&mut self, at: usize) {
        let resp = &mut self.qp.resp;
        let Some(fwd) = &mut resp.fwd else { return };
        let Some(last) = fwd.pending.get(at) else { return };
        let end = last.psn.plus(1);
        (resp.epsn, resp.msn) = (end, last.msn.wrapping_add(1) & 0x00ff_ffff);
        fwd.pending.truncate(at + 1);
        self.drop_answers_from(end);
        if self.connected() {
            enter_error(self, QpState::Err);
        }
        self.done(at);
        self.owe_ack();
    }

    /// The message of which the next packet is expected fails, with that packet: a NAK for one that was never
    /// sent is none to the requester.
    fn fail_under_way(&mut self, outcome: RelayOutcome) {
        let resp = &mut self.qp.resp;
        let Some(fwd) = &mut resp.fwd else { return };
        if fwd.waits_at(resp.epsn) {
            return self.fail_forwarded(outcome);
        }
        fwd.failed = Some(outcome);
    }

    /// The expected packet, or the one that `epsn` went back to, is answered with the failure.
    pub(super) fn fail_forwarded(&mut self, outcome: RelayOutcome) {
        let code = match outcome {
            RelayOutcome::Success => return,
            RelayOutcome::Invalid => NakCode::InvalidRequest,
            RelayOutcome::Access => NakCode::RemoteAccess,
            RelayOutcome::Operation | RelayOutcome::ReceivedInError => NakCode::RemoteOperation,
        };
        if self.connected() {
            if code == NakCode::RemoteAccess { self.violate() } else { self.refuse(code) }
        } else if self.qp.state == QpState::Err && self.qp.resp.nak.is_some() {
            /* it failed for a later request, and the NAK is not sent yet */
            self.owe_nak(Syndrome::Nak(code));
        }
        self.released();
    }

    /// The other card is gone: what it has not confirmed fails, and so do READs whose bytes it has not sent.
    pub(crate) fn peer_lost(&mut self, link: LinkId) {
        let (domain, remote_srqs) = (self.qp.pd, &self.sh.remote_srqs);
        let resp = &mut self.qp.resp;
        let Some(fwd) = &mut resp.fwd else { return };
        fwd.fetching.take_if(|(_, to)| *to == link);
        let under_way = fwd.lease.take_if(|lease| lease.link == link).is_some()
            | fwd.write.take_if(|(_, to)| *to == link).is_some();
        /* the first answer may have arrived: a repeated one is dropped in silence */
        let (mut unread, mut dropped) = (None, false);
        resp.out.retain(|answer| {
            let from = answer.remote_srq().and_then(|remote| remote_srqs.reach(domain, remote));
            let of_it = from.is_some_and(|(_, from)| from == link);
            let again = matches!(answer, OwedResponse::Read { again: true, .. });
            if of_it && !again && unread.is_none() {
                unread = Some(answer.psn());
            }
            dropped |= of_it && again;
            !(of_it && again)
        });
        let unconfirmed = fwd.pending.iter().find(|p| p.link == link).map(|p| p.psn);
        let first = match (unconfirmed, unread) {
            (Some(one), Some(other)) => Some(if one.before(other) { one } else { other }),
            (one, other) => one.or(other),
        };
        match first {
            Some(psn) => self.fail_from(psn, RelayOutcome::Invalid),
            None if under_way => self.fail_under_way(RelayOutcome::Invalid),
            None if dropped => self.released(),
            None => {}
        }
    }
}
