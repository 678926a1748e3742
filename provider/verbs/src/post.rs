//! Posting: work requests into a QP's rings, one doorbell for what was posted together.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicPtr, Ordering};

use starverbs_core::{AvId, QpType, SendFlags, SendOp, SendWqe, Sge};
use starverbs_rings::{RecvProducer, SendProducer, WorkRings, prefetch};

use crate::device::Doorbell;
use crate::error::{Result, VerbsError};
use crate::qp::QpInner;

/// `struct ibv_send_wr`, one of its list. Binds are made with [`crate::Mw::bind_wr`].
#[derive(Clone, Copy, Debug)]
pub struct SendWr<'a> {
    /// The program's cookie
    pub wr_id: u64,
    /// What to do
    pub op: SendOp,
    /// [`SendFlags`]; with INLINE the SGEs are read now, and their keys are not looked at:
    /// [`SendPoster::push_inline`]
    pub flags: SendFlags,
    /// Immediate data, in network order. SEND with invalidate: the peer's key to invalidate. FLUSH: the word
    /// of its header ([`starverbs_core::wire::headers::Feth::word`])
    pub imm: u32,
    /// Local memory
    pub sges: &'a [Sge],
    /// RDMA and atomics: the peer's address
    pub remote_addr: u64,
    /// RDMA and atomics: the peer's key. LOCAL_INV: our key to invalidate
    pub rkey: u32,
    /// Atomics: what to compare with, or to add. FLUSH: bytes
    pub compare_add: u64,
    /// Atomics: what to swap in
    pub swap: u64,
    /// UD: where to
    pub ah: AvId,
    /// UD: destination QPN. XRC: number of the peer's SRQ
    pub remote_qpn: u32,
    /// UD: Q_Key
    pub qkey: u32,
}

impl SendWr<'_> {
    /// Whether its data is read when it is posted.
    #[inline]
    fn is_inline(&self) -> bool {
        self.flags.contains(SendFlags::INLINE) && self.op.has_data()
    }

    /// The fixed part of its WQE. INLINE follows from how the data is added.
    #[inline]
    pub fn wqe(&self) -> SendWqe {
        SendWqe {
            wr_id: self.wr_id,
            remote_addr: self.remote_addr,
            compare_add: self.compare_add,
            swap: self.swap,
            rkey: self.rkey,
            imm: self.imm,
            length: 0,
            remote_qpn: self.remote_qpn,
            qkey: self.qkey,
            av: self.ah,
            op: self.op,
            flags: self.flags.difference(SendFlags::INLINE),
            ..SendWqe::default()
        }
    }
}

/// `struct ibv_recv_wr`, one of its list.
#[derive(Clone, Copy, Debug)]
pub struct RecvWr<'a> {
    /// The program's cookie
    pub wr_id: u64,
    /// Where to put what arrives
    pub sges: &'a [Sge],
}

/// What READs and atomics bring goes to memory that the program names.
pub(crate) const INLINE_ANSWER: VerbsError =
    VerbsError::Invalid("inline data for an operation that brings data");
/// Its op-code is an RPC WRITE there.
pub(crate) const NO_FLUSH: VerbsError = VerbsError::Unsupported("FLUSH on a queue pair of StRoM's dialect");

/// The lines of a QP that its next post looks at, kept in the handle so that they are fetched side by side:
/// each of them is found through the one before otherwise, and with very many QPs none is in the CPU's
/// caches.
/// A hint: where another handle posted meanwhile, a line is fetched that nobody needs.
pub(crate) struct PostLines {
    rings: *const u8,
    slot: AtomicPtr<u8>,
}

// SAFETY: addresses for a hint to the caches; nothing is read or written through them.
unsafe impl Send for PostLines {}
// SAFETY: as above.
unsafe impl Sync for PostLines {}

impl PostLines {
    pub(crate) fn new(rings: &WorkRings) -> Self {
        PostLines { rings: rings.post_lines(), slot: AtomicPtr::default() }
    }

    #[inline]
    pub(crate) fn fetch(&self) {
        /* the card's line of the indices, too: a queue that is short, or full, is looked at there */
        (0..3).for_each(|line| prefetch(self.rings.wrapping_add(64 * line)));
        /* and the WQE with its first SGEs: the lock behind waits until its lines are written */
        let slot = self.slot.load(Ordering::Relaxed);
        prefetch(slot);
        prefetch(slot.wrapping_add(64));
    }
}

impl Clone for PostLines {
    fn clone(&self) -> Self {
        PostLines { rings: self.rings, slot: AtomicPtr::default() }
    }
}

/// A QP's send queue, locked. Dropping it rings the doorbell for all that was pushed.
pub struct SendPoster<'a> {
    qp: &'a QpInner,
    lines: &'a PostLines,
    producer: Option<SendProducer<'a>>,
}

impl<'a> SendPoster<'a> {
    #[inline]
    pub(crate) fn new(qp: &'a QpInner, lines: &'a PostLines) -> Self {
        SendPoster { qp, lines, producer: Some(qp.rings.send_producer()) }
    }

    /// Adds a work request without inline data.
    ///
    /// # Errors
    /// ENOMEM: the queue is full. EINVAL: the QP cannot send yet, the op-code is not of its transport,
    /// too many SGEs, or inline data. EOPNOTSUPP: FLUSH on a QP of StRoM's dialect; an RPC, or RPC WRITE, of
    /// a stateful end of StaR. EIO in a forked child.
    #[inline]
    pub fn push(&mut self, wr: &SendWr<'_>) -> Result<()> {
        let producer = self.producer_for(wr.op)?;
        if wr.is_inline() {
            return Err(VerbsError::Invalid("inline data, which nobody vouches for"));
        }
        let sges = if wr.op.has_data() { wr.sges } else { &[] };
        Ok(producer.push(wr.wqe(), sges)?)
    }

    /// Adds a work request. With INLINE, its data is read now.
    ///
    /// # Safety
    /// With INLINE, each SGE with a length other than 0 is readable memory.
    ///
    /// # Errors
    /// Those of [`SendPoster::push`]. EINVAL: too many inline bytes, or inline data for an answer.
    #[inline]
    pub unsafe fn push_inline(&mut self, wr: &SendWr<'_>) -> Result<()> {
        if !wr.is_inline() {
            return self.push(wr);
        }
        let producer = self.producer_for(wr.op)?;
        if wr.op.brings_data() {
            return Err(INLINE_ANSWER);
        }
        // SAFETY: the caller's terms.
        Ok(unsafe { producer.push_inline(wr.wqe(), wr.sges) }?)
    }

    /// The queue, if this may be posted to it.
    #[inline]
    fn producer_for(&mut self, op: SendOp) -> Result<&mut SendProducer<'a>> {
        self.qp.pd.context().device()?;
        if !self.qp.may_send() {
            return Err(VerbsError::Invalid("the QP is not ready to send"));
        }
        if !offered(self.qp.qp_type, op) {
            if !(op.is_rpc() && self.qp.speaks_rpc()) {
                return Err(VerbsError::Invalid("op-code not of this transport"));
            }
            self.qp.admit_rpc()?;
        }
        if op == SendOp::Flush && self.qp.speaks_rpc() {
            return Err(NO_FLUSH);
        }
        match &mut self.producer {
            Some(producer) => Ok(producer),
            None => Err(VerbsError::Invalid("poster is used up")),
        }
    }

    /// Rings the doorbell for what was pushed.
    #[inline]
    pub fn ring(self) {
        /* its end would do the same, in a call */
        ManuallyDrop::new(self).publish();
    }

    #[inline(always)]
    fn publish(&mut self) {
        let Some(producer) = self.producer.take() else { return };
        let pushed = producer.pushed();
        let small = self.qp.posts_small(&producer);
        self.lines.slot.store(producer.next_slot().cast_mut(), Ordering::Relaxed);
        drop(producer);
        if pushed > 0
            && let Ok(device) = self.qp.pd.context().device()
        {
            device.doorbell(Doorbell::Sends { qp: self.qp, small });
        }
    }
}

impl Drop for SendPoster<'_> {
    fn drop(&mut self) {
        self.publish();
    }
}

/// A QP's receive queue, locked.
pub struct RecvPoster<'a> {
    qp: &'a QpInner,
    producer: Option<RecvProducer<'a>>,
}

impl<'a> RecvPoster<'a> {
    #[inline]
    pub(crate) fn new(qp: &'a QpInner) -> Self {
        RecvPoster { qp, producer: (qp.rings.recv_slots() > 0).then(|| qp.rings.recv_producer()) }
    }

    /// Adds a work request.
    ///
    /// # Errors
    /// ENOMEM: the queue is full. EINVAL: the QP is in RESET or receives from an SRQ, or too many SGEs.
    /// EIO in a forked child.
    #[inline]
    pub fn push(&mut self, wr: &RecvWr<'_>) -> Result<()> {
        self.qp.pd.context().device()?;
        if !self.qp.may_receive() {
            return Err(VerbsError::Invalid("the QP is in RESET"));
        }
        let Some(producer) = &mut self.producer else {
            return Err(VerbsError::Invalid("the QP receives from an SRQ, or never"));
        };
        Ok(producer.push(wr.wr_id, wr.sges)?)
    }

    /// Makes what was pushed visible to the card.
    #[inline]
    pub fn ring(self) {
        /* its end would do the same, in a call */
        ManuallyDrop::new(self).publish();
    }

    #[inline(always)]
    fn publish(&mut self) {
        if self.producer.take().is_none() {
            return;
        }
        /* a QP that ran dry may be in error, where late receives are flushed at the doorbell */
        if self.qp.rings.was_starved()
            && let Ok(device) = self.qp.pd.context().device()
        {
            device.doorbell(Doorbell::Receives(self.qp));
        }
    }
}

impl Drop for RecvPoster<'_> {
    fn drop(&mut self) {
        self.publish();
    }
}

/// IBTA 9.2.1 table 38: what each transport carries.
#[inline]
pub(crate) fn offered(qp_type: QpType, op: SendOp) -> bool {
    match qp_type {
        QpType::Rc => !op.is_rpc(),
        _ => offered_by_others(qp_type, op),
    }
}

/// The same of all but RC.
#[inline(never)]
fn offered_by_others(qp_type: QpType, op: SendOp) -> bool {
    match qp_type {
        QpType::Rc | QpType::XrcSend => !op.is_rpc(),
        QpType::XrcRecv => false,
        QpType::Uc => !op.is_answered() && !op.is_rpc() && op != SendOp::SendInv,
        QpType::Ud => matches!(op, SendOp::Send | SendOp::SendImm),
    }
}
