//! What programs ask of a queue pair that is a stateless end.

use starverbs_core::qp::modify::{check, check_values};
use starverbs_core::qp::{QpAttr, QpAttrMask};
use starverbs_core::{NicError, QpState, QpType, Qpn, SrqId, WcStatus};

use crate::endpoint::SlState;

use super::super::{EndpointHost, Turn};
use super::endpoint::{patience_of, setup_of};
use super::{Endpoint, Endpoints};

impl<E: EndpointHost> Endpoints<E> {
    /// `ibv_query_qp`; `None`: it is none of these.
    pub fn query(&self, qpn: Qpn) -> Option<QpAttr> {
        self.end(qpn).map(now)
    }

    /// `ibv_modify_qp`; `None`: it is none of these. SQD is refused, as of all ends of StaR connections.
    pub fn modify(
        &mut self,
        turn: &mut Turn<'_, E>,
        qpn: Qpn,
        attr: &QpAttr,
        mask: QpAttrMask,
    ) -> Option<Result<(), NicError>> {
        let at = self.places.get(qpn)?;
        Some(self.modify_at(turn, at, attr, mask))
    }

    fn modify_at(
        &mut self,
        turn: &mut Turn<'_, E>,
        at: u32,
        attr: &QpAttr,
        mask: QpAttrMask,
    ) -> Result<(), NicError> {
        let end = self.ends.get_mut(at as usize).ok_or(NicError::NotFound)?;
        let from = now(end).state;
        if mask.contains(QpAttrMask::CUR_STATE) && attr.cur_state != from {
            return Err(NicError::Invalid);
        }
        let to = if mask.contains(QpAttrMask::STATE) { attr.state } else { from };
        if to == QpState::Sqd {
            return Err(NicError::Invalid);
        }
        check(QpType::Rc, from, to, mask)?;
        check_values(attr, mask, turn.nic.config().max_rd_atomic)?;
        match to {
            QpState::Reset => return self.reset(turn, at),
            QpState::Err => {
                end.released.attr.state = to;
                end.qp.enter_error(turn.env, turn.now, WcStatus::WrFlushErr);
            }
            _ => {
                merge(&mut end.released.attr, attr, mask);
                end.released.attr.state = to;
                let attr = &end.released.attr;
                let (setup, patience) = (setup_of(attr, *end.qp.setup()), patience_of(attr));
                end.qp.set(turn.env, turn.now, setup, patience);
                end.qp.handle_doorbell(turn.now);
            }
        }
        self.settle(turn, at);
        Ok(())
    }

    /// An SRQ has another ring.
    pub fn replace_srq_ring(&mut self, turn: &mut Turn<'_, E>, srq: SrqId) {
        for (_, end) in self.ends.iter_mut().filter(|(_, end)| end.released.srq() == Some(srq)) {
            if let Some(ring) = turn.nic.srq_ring(srq).cloned() {
                end.qp.replace_rq(ring);
            }
        }
    }

    /// Receives were posted to an SRQ that was found empty.
    pub fn ring_srq(&mut self, turn: &mut Turn<'_, E>, srq: SrqId) {
        let mut place = self.by_srq.partition_point(|(of, _)| *of < srq.0);
        while let Some((_, at)) = self.by_srq.get(place).copied().filter(|(of, _)| *of == srq.0) {
            place += 1;
            if let Some(end) = self.ends.get_mut(at as usize) {
                end.qp.handle_doorbell(turn.now);
                self.settle(turn, at);
            }
        }
    }

    /// An end has begun that takes from an SRQ. There must be room.
    pub(super) fn join_srq(&mut self, srq: SrqId, at: u32) {
        let of = (srq.0, at);
        let place = self.by_srq.binary_search(&of).unwrap_or_else(|place| place);
        self.by_srq.insert(place, of);
    }

    /// It ends.
    pub(super) fn leave_srq(&mut self, srq: SrqId, at: u32) {
        if let Ok(place) = self.by_srq.binary_search(&(srq.0, at)) {
            self.by_srq.remove(place);
        }
    }

    /// What the host keeps of a queue pair because the card does not, bytes.
    pub fn bytes(&self, qpn: Qpn) -> usize {
        self.end(qpn).map_or(0, Endpoint::bytes)
    }
}

/// Its attributes, and the state that it has come to.
fn now<E: EndpointHost>(end: &Endpoint<E>) -> QpAttr {
    let mut attr = end.released.attr;
    if end.qp.state() == SlState::Error {
        attr.state = QpState::Err;
    }
    QpAttr { cur_state: attr.state, ..attr }
}

/// Takes over what may change from RTR on.
fn merge(to: &mut QpAttr, from: &QpAttr, mask: QpAttrMask) {
    macro_rules! take {
        ($($bit:ident => $field:ident;)+) => {
            $(if mask.contains(QpAttrMask::$bit) { to.$field = from.$field; })+
        };
    }
    take! {
        ACCESS_FLAGS => access;
        TIMEOUT => timeout;
        RETRY_CNT => retry_cnt;
        RNR_RETRY => rnr_retry;
        SQ_PSN => sq_psn;
        MAX_QP_RD_ATOMIC => max_rd_atomic;
        MIN_RNR_TIMER => min_rnr_timer;
    }
}
