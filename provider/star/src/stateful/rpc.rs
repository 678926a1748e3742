//! RPCs of SL (StRoM): their parameters are fetched as a SEND's data is, a kernel of this card runs, and its
//! answer stands in our send queue, as a WRITE to SL's memory.
//!
//! One is executed as a WRITE is: when all before it is done, and before anything behind it begins. SL's
//! WQE is stored once, so its kernel runs once. The core has the kernels; streams are not carried.

use starverbs_core::strom::{ReplyHead, TARGET_LEN};
use starverbs_core::transport::PeerSite;
use starverbs_core::{Nanos, Psn, QpId, SendFlags, SendOp, SendWqe, WcStatus};

use super::begin::Begin;
use super::stream::{OrderClass, WqeProgress};
use super::{CardCtx, Stateful};
use crate::env::StarEnv;

/// Too many kernels are at work: one is asked again after this, ns.
const AGAIN: Nanos = 20_000;

/// Calls [`EngineRpc`](starverbs_core::engine::EngineRpc) with what a kernel works with.
macro_rules! with_peer {
    ($end:ident, $card:ident, $method:ident $(, $of:expr)*) => {{
        let (access, max_msg) = ($end.local.access, $end.local.max_msg);
        let qp = QpId { pd: $end.local.pd, qpn: $end.local.qpn };
        let (env, mrs, stats, sq) = (&mut *$card.env, &*$card.mrs, $card.stats, &$end.local.sq);
        let mut peer = PeerSite { env, mrs, stats, sq, qp, access, max_msg };
        $card.rpc.$method(&mut peer $(, $of)*)
    }};
}

impl<E: StarEnv> Stateful<E> {
    /// Whether an RPC of SL is under way: nothing begins behind it.
    pub(super) fn is_at_rpc(&self) -> bool {
        self.streams[1].oldest().is_some_and(|op| op.class == OrderClass::Rpc)
    }

    /// Whether our program answers an RPC: it is a SEND with immediate data then.
    pub(super) fn is_for_program(&self, card: &CardCtx<'_, E>, wqe: &SendWqe) -> bool {
        let qp = QpId { pd: self.local.pd, qpn: self.local.qpn };
        wqe.op == SendOp::Rpc && card.rpc.is_programs(qp, wqe.remote_addr)
    }

    /// Why an RPC is none, whoever is to answer it: of one that is fetched the head is not looked at.
    pub(super) fn rpc_error(&self, seq: Psn, wqe: &SendWqe) -> Option<WcStatus> {
        let inline = wqe.flags.contains(SendFlags::INLINE);
        if wqe.length > self.mtu {
            Some(WcStatus::LocLenErr)
        } else if (wqe.length as usize) < TARGET_LEN
            || inline && ReplyHead::decode(self.sends.inline(seq)).is_none()
        {
            Some(WcStatus::RemInvReqErr)
        } else {
            None
        }
    }

    /// RPC `seq` of SL begins: its parameters are here, or are fetched.
    pub(super) fn begin_rpc(&mut self, card: &mut CardCtx<'_, E>, seq: Psn, wqe: &SendWqe) -> Begin {
        if self.streams[1].under_way() > 0 {
            return Begin::Wait;
        }
        if let Some(status) = self.rpc_error(seq, wqe) {
            return Begin::failed(OrderClass::Rpc, status);
        }
        let inline = wqe.flags.contains(SendFlags::INLINE);
        card.rpc.expect(wqe.length as usize);
        if inline && card.rpc.put(0, self.sends.inline(seq)).is_none() {
            return Begin::failed(OrderClass::Rpc, WcStatus::RemInvReqErr);
        }
        self.rpc_at = 0;
        Begin::Go(WqeProgress {
            class: OrderClass::Rpc,
            length: wqe.length,
            all: inline,
            ..WqeProgress::default()
        })
    }

    /// The parameters of SL's oldest WQE are here: its kernel begins, or has a turn. `None`: it is not done.
    pub(super) fn rpc_turn(&mut self, card: &mut CardCtx<'_, E>, index: u32) -> Option<WcStatus> {
        let wqe = self.sends.get(Psn::new(index)).copied().unwrap_or_default();
        if self.rpc_at == 0 {
            match with_peer!(self, card, begin, wqe.remote_addr) {
                Some(true) => {}
                Some(false) => {
                    self.arm(card.now + AGAIN);
                    return None;
                }
                None => return Some(WcStatus::RemInvReqErr),
            }
        } else if card.now < self.rpc_at {
            /* another timer was earlier */
            self.arm(self.rpc_at);
            return None;
        }
        let Some(after) = with_peer!(self, card, turn) else { return Some(WcStatus::Success) };
        self.rpc_at = card.now + after;
        self.arm(self.rpc_at);
        None
    }
}
