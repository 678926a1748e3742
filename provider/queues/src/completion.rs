//! Completions: what became of a work request.

use core::mem::{offset_of, size_of};

use bitflags::bitflags;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes, try_transmute};

/// Flags of a completion. Values as `enum ibv_wc_flags`. Bits that are none are passed over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct WcFlags(u8);

bitflags! {
    impl WcFlags: u8 {
        /// The first 40 bytes of the buffer are a GRH (UD)
        const GRH = 1;
        /// `imm` holds immediate data
        const WITH_IMM = 2;
        /// `imm` holds an invalidated rkey, in host order
        const WITH_INV = 8;
        /// Tag matching: the program should report how many unexpected messages it has seen
        const TM_SYNC_REQ = 16;
        /// The message matched a tag
        const TM_MATCH = 32;
        /// All of its data is there
        const TM_DATA_VALID = 64;
    }
}

/// Status of a completion (IBTA 11.6.2). Values as `enum ibv_wc_status`. Those of reliable datagrams (RD, EE
/// context) do not occur here.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(u8)]
pub enum WcStatus {
    /// The work request is done
    #[default]
    Success = 0,
    /// The message is longer than the receive's buffers, or than the QP allows
    LocLenErr = 1,
    /// The QP cannot execute the WQE
    LocQpOpErr = 2,
    /// The EE context cannot execute the WQE
    LocEecOpErr = 3,
    /// A key or right does not allow the access to an SGE
    LocProtErr = 4,
    /// The QP was in ERR, or went there, before the WQE was done
    WrFlushErr = 5,
    /// The window could not be bound
    MwBindErr = 6,
    /// The responder answered with an unexpected op-code
    BadRespErr = 7,
    /// An incoming WRITE with immediate lacked the rights
    LocAccessErr = 8,
    /// The responder found the request invalid
    RemInvReqErr = 9,
    /// The responder refused the access to its memory
    RemAccessErr = 10,
    /// The responder failed to execute the request
    RemOpErr = 11,
    /// No answer after all transport retries
    RetryExcErr = 12,
    /// No receive at the responder after all RNR retries
    RnrRetryExcErr = 13,
    /// The QP and its EE context have different RDDs
    LocRddViolErr = 14,
    /// The responder found the RD message invalid
    RemInvRdReqErr = 15,
    /// The responder aborted the operation
    RemAbortErr = 16,
    /// There is no such EE context
    InvEecnErr = 17,
    /// The EE context's state does not allow it
    InvEecStateErr = 18,
    /// The device or its driver failed
    FatalErr = 19,
    /// The response timed out
    RespTimeoutErr = 20,
    /// An error that no other status names
    GeneralErr = 21,
    /// Tag matching failed
    TmErr = 22,
    /// The software is to finish the rendezvous
    TmRndvIncomplete = 23,
}

impl WcStatus {
    /// From `enum ibv_wc_status`.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::try_read_from_bytes(&[code]).ok()
    }
}

/// Op-code of a completion. Values as `enum ibv_wc_opcode`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(u8)]
pub enum WcOpcode {
    /// SEND, with immediate or invalidate too
    #[default]
    Send = 0,
    /// RDMA WRITE, with immediate too
    RdmaWrite = 1,
    /// RDMA READ
    RdmaRead = 2,
    /// Compare and swap
    CompSwap = 3,
    /// Fetch and add
    FetchAdd = 4,
    /// Memory window bound
    BindMw = 5,
    /// Key invalidated by its own side
    LocalInv = 6,
    /// FLUSH (IBTA annex A19)
    Flush = 8,
    /// ATOMIC WRITE (IBTA annex A19)
    AtomicWrite = 9,
    /// Receive: of a SEND
    Recv = 128,
    /// Receive: of an RDMA WRITE with immediate
    RecvRdmaWithImm = 129,
    /// Tag matching: entry added to the list
    TmAdd = 130,
    /// Tag matching: entry removed from the list
    TmDel = 131,
    /// Tag matching: count of unexpected messages stored
    TmSync = 132,
    /// Tag matching: message received into an entry's buffers
    TmRecv = 133,
    /// Tag matching: message without a tag received
    TmNoTag = 134,
}

impl WcOpcode {
    /// From `enum ibv_wc_opcode`.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::try_read_from_bytes(&[code]).ok()
    }
}

/// A completion: what `struct ibv_wc` holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Cqe {
    /// The work request's cookie
    pub wr_id: u64,
    /// Bytes moved (receives, READs, atomics)
    pub byte_len: u32,
    /// Immediate data in network order, valid with [`WcFlags::WITH_IMM`]; or a key: [`WcFlags::WITH_INV`]
    pub imm: u32,
    /// Local QP
    pub qpn: u32,
    /// UD receives: the sender's QPN. Matched tags: see [`Cqe::tag`].
    pub src_qp: u32,
    /// More about an error; 0 otherwise. Matched tags: see [`Cqe::tag`].
    pub vendor_err: u32,
    /// Status of the work request
    pub status: WcStatus,
    /// What was done; meaningful with success only
    pub opcode: WcOpcode,
    /// Which fields are valid
    pub flags: WcFlags,
    /// Service level
    pub sl: u8,
}

const _: () = assert!(size_of::<Cqe>() == 32);

/// What a completion says of a message that matched a tag, as `struct ibv_wc_tm_info`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TagMatch {
    /// The message's tag
    pub tag: u64,
    /// The sender's word, which the tag matching header carries beside the tag; 0: the message has immediate
    /// data
    pub app_ctx: u32,
}

/// What a queue's memory holds where a [`Cqe`] should be.
pub type CqeWords = [u64; size_of::<Cqe>() / size_of::<u64>()];

impl Cqe {
    /// What was found in a queue's memory: an error, if its status or its operation is none.
    #[inline]
    pub fn decode(found: CqeWords) -> Cqe {
        try_transmute!(found).unwrap_or_else(|_| Self::malformed(found))
    }

    #[cold]
    fn malformed(mut found: CqeWords) -> Cqe {
        let bytes = found.as_mut_bytes();
        bytes[offset_of!(Cqe, status)] = WcStatus::GeneralErr as u8;
        bytes[offset_of!(Cqe, opcode)] = WcOpcode::default() as u8;
        let Cqe { wr_id, qpn, status, .. } = try_transmute!(found).unwrap_or_default();
        Cqe { wr_id, qpn, status, ..Cqe::default() }
    }

    /// One of a match: the tag stands in fields that have no other meaning then, as does
    /// `app_ctx`, unless the message has immediate data.
    pub fn matched(tag: u64, app_ctx: u32) -> Self {
        let (opcode, flags) = (WcOpcode::TmRecv, WcFlags::TM_MATCH);
        Cqe {
            opcode,
            flags,
            src_qp: (tag >> 32) as u32,
            vendor_err: tag as u32,
            imm: app_ctx,
            ..Cqe::default()
        }
    }

    /// What it says of a match, if it is of one.
    pub fn tag(&self) -> Option<TagMatch> {
        let tag = u64::from(self.src_qp) << 32 | u64::from(self.vendor_err);
        let app_ctx = if self.flags.contains(WcFlags::WITH_IMM) { 0 } else { self.imm };
        self.flags.contains(WcFlags::TM_MATCH).then_some(TagMatch { tag, app_ctx })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_their_numbers() {
        let statuses = (0..=u8::MAX).filter_map(|code| Some((code, WcStatus::from_code(code)?)));
        assert_eq!(statuses.map(|(code, status)| assert_eq!(status as u8, code)).count(), 24);
        let opcodes = (0..=u8::MAX).filter_map(|code| Some((code, WcOpcode::from_code(code)?)));
        assert_eq!(opcodes.map(|(code, opcode)| assert_eq!(opcode as u8, code)).count(), 16);
    }
}
