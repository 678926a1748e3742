//! End-to-end credits: a responder's ACKs give how many receives are posted, and its requester begins no
//! more messages than find one (IBTA 9.7.7.2). It spares RNR NAKs where a program posts receives slowly.
//!
//! The limit is kept as the send queue's index behind the last WQE that may begin, not as a message number.
//! WQEs that take no receive count as if they did, so it is never beyond the credits; one message may
//! always begin when nothing is under way (9.7.7.2.5), so nothing waits for ever.

use super::Ctx;
use crate::env::{Env, RecvQueue};
use crate::qp::RecvSource;
use crate::types::{QpType, SendWqe};
use crate::wire::headers::{CREDITS_NONE, Syndrome, credit_code, credits_of};

/// An ACK without credits.
const ACK: Syndrome = Syndrome::Ack { credits: CREDITS_NONE };

impl<E: Env> Ctx<'_, E> {
    /// Credits in this end's ACKs.
    #[inline]
    pub(super) fn ack_syndrome(&self) -> Syndrome {
        if self.sh.cfg.credits { self.posted_receives() } else { ACK }
    }

    /// Only of receives that no other QP can take (9.7.7.2.2), and by RC.
    #[cold]
    fn posted_receives(&self) -> Syndrome {
        match &self.qp.rq {
            RecvSource::Own(rq) if self.qp.qp_type == QpType::Rc => {
                Syndrome::Ack { credits: credit_code(rq.len()) }
            }
            _ => ACK,
        }
    }

    /// An ACK had credits `code`; what it acknowledges is done. A late ACK gives less than is known.
    #[cold]
    pub(super) fn note_credits(&mut self, code: u8) {
        let req = &mut self.qp.req;
        let first = !req.counted;
        req.counted = code != CREDITS_NONE;
        req.alone &= req.counted;
        let limit = req.una.wrapping_add(credits_of(code));
        if first || limit.wrapping_sub(req.credit_limit) as i32 > 0 {
            req.credit_limit = limit;
        }
        self.ready();
    }

    /// Whether WQE `next`, which is to begin, must wait as no receive may be posted for it. If it need not
    /// only because nothing is under way, its first packet goes alone.
    #[cold]
    pub(super) fn lacks_credit(&mut self, wqe: &SendWqe) -> bool {
        let req = &mut self.qp.req;
        let beyond = req.next.wrapping_sub(req.credit_limit) as i32 >= 0;
        req.alone = wqe.op.takes_recv() && beyond;
        req.alone && req.una != req.next
    }

    /// Whether what is behind the first packet of WQE `next` must wait for that to be acknowledged.
    #[cold]
    pub(super) fn waits_for_first(&self) -> bool {
        let req = &self.qp.req;
        req.offset > 0 && req.una_psn == req.track[req.slot(req.next)].first
    }
}
