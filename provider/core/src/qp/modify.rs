//! The state machine of `ibv_modify_qp` as one table.
//!
//! A row is a transition of a transport: what must be given, what may be given. Source: the tables
//! of man ibv_modify_qp(3), and IBTA vol. 1, 11.2.5.2 (table 91 and following) for what is optional
//! and for SQD and SQE. Reaching RESET and ERR is allowed from everywhere, with the state alone.
//! The module decides; it changes nothing.

use super::{PathMig, QpAttr, QpAttrMask as M};
use crate::error::NicError;
use crate::types::{QPN_MASK, QpState, QpType};

use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
use QpType::{Rc, Uc, Ud, XrcRecv, XrcSend};

/// Mandatory and optional attributes of a transition, beside the state itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TransitionRule {
    /// Transport of the QP
    pub qp_type: QpType,
    /// State before
    pub from: QpState,
    /// State after
    pub to: QpState,
    /// Must be given
    pub required: M,
    /// May be given
    pub optional: M,
}

const NONE: M = M::empty();

const fn rule(qp_type: QpType, from: QpState, to: QpState, required: M, optional: M) -> TransitionRule {
    TransitionRule { qp_type, from, to, required, optional }
}

const ADDRESS: M = M::AV.union(M::PATH_MTU).union(M::DEST_QPN).union(M::RQ_PSN);
const BIRTH: M = M::PKEY_INDEX.union(M::PORT);
const RIGHTS: M = M::ACCESS_FLAGS.union(M::PATH_MIG_STATE);
const UD_LATER: M = M::CUR_STATE.union(M::QKEY);
const UC_LATER: M = M::CUR_STATE.union(RIGHTS);
const RC_LATER: M = UC_LATER.union(M::MIN_RNR_TIMER);
const RC_RTR: M = ADDRESS.union(M::MAX_DEST_RD_ATOMIC).union(M::MIN_RNR_TIMER);
const RC_RETRY: M = M::TIMEOUT.union(M::RETRY_CNT).union(M::RNR_RETRY).union(M::MAX_QP_RD_ATOMIC);
const XRC_RTR: M = M::MAX_DEST_RD_ATOMIC.union(M::MIN_RNR_TIMER).union(M::ACCESS_FLAGS).union(M::PKEY_INDEX);
const XRC_RTS: M = RC_LATER.union(RC_RETRY).difference(M::TIMEOUT);
const RC_DRAINED: M = RC_RETRY
    .union(RIGHTS)
    .union(M::AV)
    .union(M::PORT)
    .union(M::PKEY_INDEX)
    .union(M::MAX_DEST_RD_ATOMIC)
    .union(M::MIN_RNR_TIMER);

/// All transitions but those to RESET and ERR. Alternate paths are not offered, so ALT_PATH is in no row.
/// XRC is as RC, but for what only one of its ends has: the other may be given it all the same, as programs
/// do (perftest).
pub const RULES: [TransitionRule; 30] = [
    rule(Rc, Reset, Init, BIRTH.union(M::ACCESS_FLAGS), NONE),
    rule(Uc, Reset, Init, BIRTH.union(M::ACCESS_FLAGS), NONE),
    rule(Ud, Reset, Init, BIRTH.union(M::QKEY), NONE),
    rule(Rc, Init, Init, NONE, BIRTH.union(M::ACCESS_FLAGS)),
    rule(Uc, Init, Init, NONE, BIRTH.union(M::ACCESS_FLAGS)),
    rule(Ud, Init, Init, NONE, BIRTH.union(M::QKEY)),
    rule(Rc, Init, Rtr, RC_RTR, M::ACCESS_FLAGS.union(M::PKEY_INDEX)),
    rule(Uc, Init, Rtr, ADDRESS, M::ACCESS_FLAGS.union(M::PKEY_INDEX)),
    rule(Ud, Init, Rtr, NONE, M::QKEY.union(M::PKEY_INDEX)),
    rule(Rc, Rtr, Rts, RC_RETRY.union(M::SQ_PSN), RC_LATER),
    rule(Uc, Rtr, Rts, M::SQ_PSN, UC_LATER),
    rule(Ud, Rtr, Rts, M::SQ_PSN, UD_LATER),
    rule(Rc, Rts, Rts, NONE, RC_LATER),
    rule(Uc, Rts, Rts, NONE, UC_LATER),
    rule(Ud, Rts, Rts, NONE, UD_LATER),
    rule(Rc, Rts, Sqd, NONE, M::EN_SQD_ASYNC_NOTIFY),
    rule(Uc, Rts, Sqd, NONE, M::EN_SQD_ASYNC_NOTIFY),
    rule(Ud, Rts, Sqd, NONE, M::EN_SQD_ASYNC_NOTIFY),
    rule(Rc, Sqd, Rts, NONE, RC_LATER),
    rule(Uc, Sqd, Rts, NONE, UC_LATER),
    rule(Ud, Sqd, Rts, NONE, UD_LATER),
    rule(Rc, Sqd, Sqd, NONE, RC_DRAINED),
    rule(Uc, Sqd, Sqd, NONE, RIGHTS.union(M::AV).union(M::PKEY_INDEX)),
    rule(Ud, Sqd, Sqd, NONE, M::QKEY.union(M::PKEY_INDEX)),
    rule(XrcSend, Init, Rtr, ADDRESS, XRC_RTR),
    rule(XrcRecv, Init, Rtr, RC_RTR, M::ACCESS_FLAGS.union(M::PKEY_INDEX)),
    rule(XrcSend, Rtr, Rts, RC_RETRY.union(M::SQ_PSN), UC_LATER),
    rule(XrcRecv, Rtr, Rts, M::TIMEOUT.union(M::SQ_PSN), XRC_RTS),
    rule(Uc, Sqe, Rts, NONE, M::CUR_STATE.union(M::ACCESS_FLAGS)),
    rule(Ud, Sqe, Rts, NONE, UD_LATER),
];

/// The row for a transition; `None` where there is no way.
pub fn transition(qp_type: QpType, from: QpState, to: QpState) -> Option<TransitionRule> {
    if matches!(to, Reset | Err) {
        return Some(rule(qp_type, from, to, NONE, NONE));
    }
    let row = |t: QpType| RULES.iter().find(|r| r.qp_type == t && r.from == from && r.to == to).copied();
    row(qp_type).or_else(|| if qp_type.is_xrc() { row(Rc) } else { None })
}

/// Whether a QP of `qp_type` may go from `from` to `to` with the attributes of `mask`. `Invalid`:
/// there is no such transition, a required attribute is missing, or one is given that it does not
/// allow (man: "no change to the QP is made").
pub fn check(qp_type: QpType, from: QpState, to: QpState, mask: M) -> Result<(), NicError> {
    let rule = transition(qp_type, from, to).ok_or(NicError::Invalid)?;
    let given = mask.difference(M::STATE);
    let allowed = rule.required | rule.optional;
    let fits = given.contains(rule.required) && allowed.contains(given);
    fits.then_some(()).ok_or(NicError::Invalid)
}

/// Whether the values that `mask` names lie in their ranges. `max_rd_atomic` is the card's limit on
/// READs and atomics outstanding, either way. The port is 1, the P_Key table has one entry, and there is no
/// alternate path to migrate to.
pub fn check_values(attr: &QpAttr, mask: M, max_rd_atomic: u8) -> Result<(), NicError> {
    let range = |bit, ok: bool| !mask.contains(bit) || ok;
    let good = range(M::PORT, attr.port_num == 1)
        && range(M::PKEY_INDEX, attr.pkey_index == 0)
        && range(M::AV, attr.av.sl <= 15 && attr.av.flow_label < 1 << 20)
        && range(M::TIMEOUT, attr.timeout <= 31)
        && range(M::RETRY_CNT, attr.retry_cnt <= 7)
        && range(M::RNR_RETRY, attr.rnr_retry <= 7)
        && range(M::MIN_RNR_TIMER, attr.min_rnr_timer <= 31)
        && range(M::DEST_QPN, attr.dest_qpn <= QPN_MASK)
        && range(M::PATH_MIG_STATE, attr.path_mig == PathMig::Migrated)
        && range(M::MAX_QP_RD_ATOMIC, attr.max_rd_atomic <= max_rd_atomic)
        && range(M::MAX_DEST_RD_ATOMIC, attr.max_dest_rd_atomic <= max_rd_atomic)
        && !mask.intersects(M::ALT_PATH | M::CAP | M::RATE_LIMIT);
    good.then_some(()).ok_or(NicError::Invalid)
}

#[cfg(test)]
#[path = "modify_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "modify_spec_tests.rs"]
mod spec_tests;
