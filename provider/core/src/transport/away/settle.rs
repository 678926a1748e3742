//! What other cards say of the messages that were passed on to them: that they are in memory, or are not, or
//! nothing more.

use super::{Abroad, Away, PENDING, What};
use crate::env::Env;
use crate::relay::{LinkId, Outcome};
use crate::transport::{Answer, Ctx, Responder, enter_error};
use crate::types::{PdId, Psn, QpState};
use crate::wire::headers::{NakCode, Syndrome};

impl Away {
    /// Whether it waits for something on `link`.
    fn uses(&self, link: LinkId) -> bool {
        self.loan.is_some_and(|loan| loan.link == link)
            || self.write.is_some_and(|(_, to)| to == link)
            || self.asking.is_some_and(|(_, to)| to == link)
            || self.pending.iter().any(|p| p.link == link)
    }
}

impl Responder {
    /// Whether the QP, which is in `domain`, waits for something on `link`.
    pub(crate) fn depends_on(&self, abroad: &Abroad, domain: PdId, link: LinkId) -> bool {
        let reads = |answer: &Answer| {
            let to = answer.far().and_then(|far| abroad.reach(domain, far));
            to.is_some_and(|(_, to)| to == link)
        };
        self.away.as_ref().is_some_and(|away| away.uses(link)) || self.out.iter().any(reads)
    }
}

impl<E: Env> Ctx<'_, E> {
    /// The other card says what became of a message, and what an atomic `found`.
    pub(crate) fn confirmed(&mut self, link: LinkId, serial: u32, outcome: Outcome, found: u64) {
        let Some(away) = &mut self.qp.resp.away else { return };
        if away.loan.is_some_and(|loan| loan.serial == serial && loan.link == link) {
            if outcome != Outcome::Success {
                away.loan = None;
                self.fail_abroad(outcome);
            }
            return;
        }
        if away.write == Some((serial, link)) && outcome != Outcome::Success {
            return self.fail_abroad(outcome);
        }
        let Some(at) = away.pending.iter().position(|p| p.serial == serial && p.link == link) else { return };
        let psn = away.pending[at].psn;
        let is_result = away.pending[at].what == What::Atomic && !away.pending[at].done;
        match outcome {
            Outcome::Success => {}
            Outcome::ReceivedInError => return self.received_in_error(at),
            _ => return self.fail_from(psn, outcome),
        }
        if is_result {
            self.keep_result(psn, found);
        }
        self.done(at);
    }

    /// The message `at` that place among those that wait is confirmed.
    pub(super) fn done(&mut self, at: usize) {
        let Some(away) = &mut self.qp.resp.away else { return };
        let full = away.pending.len() == PENDING;
        away.pending[at].done = true;
        while away.pending.front().is_some_and(|p| p.done) {
            away.pending.pop_front();
        }
        self.released();
        if full {
            self.awaited(true);
        }
    }

    /// Messages were confirmed: ACKs and answers that waited for it go out.
    pub(super) fn released(&mut self) {
        if self.connected() {
            self.owe_ack();
        }
        if self.qp.resp.owes_answer() {
            self.ready();
        }
    }

    /// The message that has `psn` counts as not received, and so does what came behind it.
    pub(super) fn fail_from(&mut self, psn: Psn, outcome: Outcome) {
        let resp = &mut self.qp.resp;
        let Some(away) = &mut resp.away else { return };
        let at = away.pending.iter().position(|p| !p.psn.before(psn));
        if let Some(failed) = at.and_then(|at| away.pending.get(at)) {
            resp.msn = failed.msn;
        }
        away.pending.truncate(at.unwrap_or(away.pending.len()));
        resp.epsn = psn;
        self.drop_answers_from(psn);
        self.fail_abroad(outcome);
    }

    /// The message at that place among those that wait is received, and what came behind it is not: its
    /// receive failed, so this end goes to ERR without a NAK (class J).
    fn received_in_error(&mut self, at: usize) {
        let resp = &mut self.qp.resp;
        let Some(away) = &mut resp.away else { return };
        let Some(last) = away.pending.get(at) else { return };
        let end = last.psn.plus(1);
        (resp.epsn, resp.msn) = (end, last.msn.wrapping_add(1) & 0x00ff_ffff);
        away.pending.truncate(at + 1);
        self.drop_answers_from(end);
        if self.connected() {
            enter_error(self, QpState::Err);
        }
        self.done(at);
        self.owe_ack();
    }

    fn fail_abroad(&mut self, outcome: Outcome) {
        let code = match outcome {
            Outcome::Success => return,
            Outcome::Invalid => NakCode::InvalidRequest,
            Outcome::Access => NakCode::RemoteAccess,
            Outcome::Operation | Outcome::ReceivedInError => NakCode::RemoteOperation,
        };
        if self.connected() {
            if code == NakCode::RemoteAccess { self.violate() } else { self.refuse(code) }
        } else if self.qp.state == QpState::Err && self.qp.resp.nak.is_some() {
            /* it failed for what came later, and has not said so yet */
            self.owe_nak(Syndrome::Nak(code));
        }
        self.released();
    }

    /// The other card is gone: what it has not confirmed fails, and what it has not brought.
    pub(crate) fn cut(&mut self, link: LinkId) {
        let (domain, abroad) = (self.qp.pd, &self.sh.abroad);
        let resp = &mut self.qp.resp;
        let Some(away) = &mut resp.away else { return };
        away.asking.take_if(|(_, to)| *to == link);
        let under_way = away.loan.take_if(|loan| loan.link == link).is_some()
            | away.write.take_if(|(_, to)| *to == link).is_some();
        /* of a repeated answer the first may have arrived: nothing more is said */
        let (mut unread, mut dropped) = (None, false);
        resp.out.retain(|answer| {
            let from = answer.far().and_then(|far| abroad.reach(domain, far));
            let of_it = from.is_some_and(|(_, from)| from == link);
            let again = matches!(answer, Answer::Read { again: true, .. });
            if of_it && !again && unread.is_none() {
                unread = Some(answer.psn());
            }
            dropped |= of_it && again;
            !(of_it && again)
        });
        let unconfirmed = away.pending.iter().find(|p| p.link == link).map(|p| p.psn);
        let first = match (unconfirmed, unread) {
            (Some(one), Some(other)) => Some(if one.before(other) { one } else { other }),
            (one, other) => one.or(other),
        };
        match first {
            Some(psn) => self.fail_from(psn, Outcome::Invalid),
            None if under_way => self.fail_abroad(Outcome::Invalid),
            None if dropped => self.released(),
            None => {}
        }
    }
}
