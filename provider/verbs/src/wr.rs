//! Work requests built in place: `ibv_wr_start` to `ibv_wr_complete` (ibv_wr_post(3)).
//!
//! A batch holds the send queue's lock and fills slots of the ring; the card sees nothing before it is
//! complete, and then gets one doorbell. Owns the rule that a failure is reported at the end, and that then
//! nothing is posted.

use starverbs_core::{AvId, QpType, SendFlags, SendOp, SendWqe, Sge};
use starverbs_rings::SendProducer;

use crate::device::Doorbell;
use crate::error::{Result, VerbsError};
use crate::post::{INLINE_ANSWER, NO_FLUSH, offered};
use crate::qp::QpInner;

/// RPCs, for which there is no `IBV_QP_EX_WITH_*`: queue pairs of StRoM's dialect have them, and no FLUSH.
const RPC: u64 = 1 << 63;

/// What an `IBV_QP_EX_WITH_*` flag stands for.
const fn flag(op: SendOp) -> u64 {
    match op {
        SendOp::Write => 1,
        SendOp::WriteImm => 1 << 1,
        SendOp::Send => 1 << 2,
        SendOp::SendImm => 1 << 3,
        SendOp::Read => 1 << 4,
        SendOp::CmpSwap => 1 << 5,
        SendOp::FetchAdd => 1 << 6,
        SendOp::LocalInv => 1 << 7,
        SendOp::BindMw => 1 << 8,
        SendOp::SendInv => 1 << 9,
        SendOp::Flush => 1 << 11,
        SendOp::AtomicWrite => 1 << 12,
        SendOp::Rpc | SendOp::RpcWrite => RPC,
        SendOp::Malformed => 0,
    }
}

/// The operations that a QP of this type may be made for, as `IBV_QP_EX_WITH_*` flags.
pub fn send_ops_offered(qp_type: QpType) -> u64 {
    let ops = (0..32).filter_map(SendOp::from_code);
    ops.filter(|op| offered(qp_type, *op)).fold(0, |flags, op| flags | flag(op))
}

const UNADDRESSED: VerbsError = VerbsError::Invalid("a work request without its address or SRQ number");
const DATALESS: VerbsError = VerbsError::Invalid("data for an operation that has none");

/// Work requests in the making, with the send queue locked. Dropping it forgets them.
pub struct SendBatch<'a> {
    qp: &'a QpInner,
    producer: SendProducer<'a>,
    ops: u64,
    /// The first thing that went wrong.
    error: Option<VerbsError>,
    /// What the last work request asks for.
    op: SendOp,
    /// The last work request needs an address, or the number of an XRC SRQ, and has none yet.
    unaddressed: bool,
}

impl<'a> SendBatch<'a> {
    #[inline]
    pub(crate) fn new(qp: &'a QpInner, ops: u64) -> Self {
        let producer = qp.rings.send_producer();
        let error = match qp.pd.context().device() {
            Err(error) => Some(error),
            Ok(_) if !qp.may_send() => Some(VerbsError::Invalid("the QP is not ready to send")),
            Ok(_) => None,
        };
        let ops = if qp.speaks_rpc() { (ops | RPC) & !flag(SendOp::Flush) } else { ops };
        SendBatch { qp, producer, ops, error, op: SendOp::default(), unaddressed: false }
    }

    /// Begins a work request; of its flags, INLINE follows from the data.
    #[inline]
    pub fn begin(&mut self, wqe: SendWqe) {
        if self.error.is_some() {
            return;
        }
        if self.unaddressed {
            return self.fail(UNADDRESSED);
        }
        if self.ops & flag(wqe.op) == 0 {
            let error = self.refusal(wqe.op);
            return self.fail(error);
        }
        if wqe.op.is_rpc()
            && let Err(error) = self.qp.admit_rpc()
        {
            return self.fail(error);
        }
        let xrc = self.qp.qp_type == QpType::XrcSend && !wqe.op.is_local();
        self.unaddressed = xrc || self.qp.qp_type == QpType::Ud;
        self.op = wqe.op;
        let flags = wqe.flags.difference(SendFlags::INLINE);
        if let Err(error) = self.producer.begin(SendWqe { flags, ..wqe }) {
            self.fail(error.into());
        }
    }

    /// Why an operation is none of the QP's.
    #[cold]
    fn refusal(&self, op: SendOp) -> VerbsError {
        match op {
            SendOp::Flush if self.qp.speaks_rpc() => NO_FLUSH,
            _ => VerbsError::Invalid("an operation that the QP was not made for"),
        }
    }

    /// `ibv_wr_set_sge_list`: local memory of the last work request.
    #[inline]
    pub fn set_sges(&mut self, sges: &[Sge]) {
        if !self.op.has_data() {
            self.fail(DATALESS);
        }
        if self.error.is_none()
            && let Err(error) = self.producer.set_sges(sges)
        {
            self.fail(error.into());
        }
    }

    /// `ibv_wr_set_inline_data_list`: takes the data of the last work request now, from pieces of memory.
    ///
    /// # Safety
    /// Each piece with a length other than 0 must be readable memory.
    #[inline]
    pub unsafe fn set_inline(&mut self, pieces: impl Iterator<Item = *const [u8]> + Clone) {
        if self.error.is_some() {
            return;
        }
        if self.op.brings_data() {
            return self.fail(INLINE_ANSWER);
        }
        if !self.op.has_data() {
            return self.fail(DATALESS);
        }
        // SAFETY: the caller's terms.
        if let Err(error) = unsafe { self.producer.set_inline(pieces) } {
            self.fail(error.into());
        }
    }

    /// `ibv_wr_set_ud_addr`: where the last work request goes.
    #[inline]
    pub fn set_ud_addr(&mut self, ah: AvId, remote_qpn: u32, qkey: u32) {
        if self.qp.qp_type != QpType::Ud {
            return self.fail(VerbsError::Invalid("an address on a connected QP"));
        }
        match self.producer.set_address(ah, remote_qpn, qkey) {
            Ok(()) => self.unaddressed = false,
            Err(_) => self.fail(VerbsError::Invalid("an address for a work request that was not begun")),
        }
    }

    /// `ibv_wr_set_xrc_srqn`: which SRQ of the peer's XRC domain the last work request is for.
    #[inline]
    pub fn set_xrc_srqn(&mut self, srqn: u32) {
        if self.qp.qp_type != QpType::XrcSend {
            return self.fail(VerbsError::Invalid("an SRQ number on a QP that is not XRC"));
        }
        match self.producer.set_srqn(srqn) {
            Ok(()) => self.unaddressed = false,
            Err(_) => self.fail(VerbsError::Invalid("an SRQ number for a work request that was not begun")),
        }
    }

    /// Records that a work request cannot be built: the whole batch fails.
    #[cold]
    pub fn fail(&mut self, error: VerbsError) {
        self.error.get_or_insert(error);
    }

    /// `ibv_wr_complete`: posts the work requests, and rings the doorbell once.
    ///
    /// # Errors
    /// The first failure since the start; nothing is posted then. ENOMEM: the queue is full. EINVAL: the QP
    /// cannot send yet, was not made for an operation, too many SGEs or inline bytes, a datagram without
    /// address. EOPNOTSUPP: an operation that the card, or the QP's dialect, does not have. EIO in a forked
    /// child.
    #[inline]
    pub fn complete(mut self) -> Result<()> {
        if self.unaddressed {
            self.fail(UNADDRESSED);
        }
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        let qp = self.qp;
        let small = qp.posts_small(&self.producer);
        if self.producer.publish() > 0 {
            drop(self);
            qp.pd.context().device()?.doorbell(Doorbell::Sends { qp, small });
        }
        Ok(())
    }
}

impl Drop for SendBatch<'_> {
    #[inline]
    fn drop(&mut self) {
        self.producer.abort();
    }
}
