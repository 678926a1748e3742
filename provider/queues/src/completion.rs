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

/// Status of a completion. Values as `enum ibv_wc_status`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum WcStatus {
    #[default]
    Success = 0,
    LocLenErr = 1,
    LocQpOpErr = 2,
    LocEecOpErr = 3,
    LocProtErr = 4,
    WrFlushErr = 5,
    MwBindErr = 6,
    BadRespErr = 7,
    LocAccessErr = 8,
    RemInvReqErr = 9,
    RemAccessErr = 10,
    RemOpErr = 11,
    RetryExcErr = 12,
    RnrRetryExcErr = 13,
    LocRddViolErr = 14,
    RemInvRdReqErr = 15,
    RemAbortErr = 16,
    InvEecnErr = 17,
    InvEecStateErr = 18,
    FatalErr = 19,
    RespTimeoutErr = 20,
    GeneralErr = 21,
    TmErr = 22,
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
#[allow(missing_docs)]
pub enum WcOpcode {
    #[default]
    Send = 0,
    RdmaWrite = 1,
    RdmaRead = 2,
    CompSwap = 3,
    FetchAdd = 4,
    BindMw = 5,
    LocalInv = 6,
    Flush = 8,
    AtomicWrite = 9,
    Recv = 128,
    RecvRdmaWithImm = 129,
    TmAdd = 130,
    TmDel = 131,
    TmSync = 132,
    TmRecv = 133,
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

    /// The tag of a message and the sender's word, if this is of a match.
    pub fn tag(&self) -> Option<(u64, u32)> {
        let tag = u64::from(self.src_qp) << 32 | u64::from(self.vendor_err);
        let app_ctx = if self.flags.contains(WcFlags::WITH_IMM) { 0 } else { self.imm };
        self.flags.contains(WcFlags::TM_MATCH).then_some((tag, app_ctx))
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
