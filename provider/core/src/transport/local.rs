//! WQEs that need no packet: a memory window is bound or unbound (IBTA 10.6.7.2, 10.8.3).
//!
//! They are done when the cursor first comes to them, behind everything that was posted before has been
//! sent, so that a later SEND may carry the new key; they complete in order, when all before is complete.

use super::{Ctx, SendPause};
use crate::env::Env;
use crate::mr::{WindowBind, WindowType};
use crate::types::{QpId, SendOp, SendWqe, WcStatus};

impl<E: Env> Ctx<'_, E> {
    /// WQE `next`, which is a local one. `new`: the cursor was never here; else it was rewound over it.
    pub(super) fn do_local(&mut self, wqe: &SendWqe, new: bool) -> SendPause {
        let done = !new
            || match wqe.op {
                SendOp::BindMw => self.bind(wqe),
                _ => self.sh.mrs.invalidate(wqe.rkey, QpId { pd: self.qp.pd, qpn: self.qp.qpn }).is_ok(),
            };
        if !done {
            /* It never began: what was before it completes, it does not. */
            self.qp.req.fresh = self.qp.req.next;
            return self.fail_wqe(WcStatus::MwBindErr);
        }
        self.qp.req.next = self.qp.req.next.wrapping_add(1);
        self.complete_local();
        self.drained();
        SendPause::Sent
    }

    fn bind(&mut self, wqe: &SendWqe) -> bool {
        let bound = self.sh.mrs.bind(&WindowBind::of(wqe, QpId { pd: self.qp.pd, qpn: self.qp.qpn }));
        self.qp.flags.windows |= bound == Ok(WindowType::Two);
        bound.is_ok()
    }
}
