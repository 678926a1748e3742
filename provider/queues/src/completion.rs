//! Completions: what became of a work request.

use bitflags::bitflags;

bitflags! {
    /// Flags of a completion. Values as `enum ibv_wc_flags`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct WcFlags: u8 {
        /// The first 40 bytes of the buffer are a GRH (UD)
        const GRH = 1;
        /// `imm` holds immediate data
        const WITH_IMM = 2;
        /// `imm` holds an invalidated rkey, in host order
        const WITH_INV = 8;
        /// Tag matching: the program should say how many unexpected messages it has seen
        const TM_SYNC_REQ = 16;
        /// The message matched a tag
        const TM_MATCH = 32;
        /// All of its data is there
        const TM_DATA_VALID = 64;
    }
}

/// Status of a completion. Values as `enum ibv_wc_status`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
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
    pub const fn from_code(code: u8) -> Option<Self> {
        use WcStatus as S;
        Some(match code {
            0 => S::Success,
            1 => S::LocLenErr,
            2 => S::LocQpOpErr,
            3 => S::LocEecOpErr,
            4 => S::LocProtErr,
            5 => S::WrFlushErr,
            6 => S::MwBindErr,
            7 => S::BadRespErr,
            8 => S::LocAccessErr,
            9 => S::RemInvReqErr,
            10 => S::RemAccessErr,
            11 => S::RemOpErr,
            12 => S::RetryExcErr,
            13 => S::RnrRetryExcErr,
            14 => S::LocRddViolErr,
            15 => S::RemInvRdReqErr,
            16 => S::RemAbortErr,
            17 => S::InvEecnErr,
            18 => S::InvEecStateErr,
            19 => S::FatalErr,
            20 => S::RespTimeoutErr,
            21 => S::GeneralErr,
            22 => S::TmErr,
            23 => S::TmRndvIncomplete,
            _ => return None,
        })
    }
}

/// Op-code of a completion. Values as `enum ibv_wc_opcode`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
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
    pub const fn from_code(code: u8) -> Option<Self> {
        use WcOpcode as O;
        Some(match code {
            0 => O::Send,
            1 => O::RdmaWrite,
            2 => O::RdmaRead,
            3 => O::CompSwap,
            4 => O::FetchAdd,
            5 => O::BindMw,
            6 => O::LocalInv,
            8 => O::Flush,
            9 => O::AtomicWrite,
            128 => O::Recv,
            129 => O::RecvRdmaWithImm,
            130 => O::TmAdd,
            131 => O::TmDel,
            132 => O::TmSync,
            133 => O::TmRecv,
            134 => O::TmNoTag,
            _ => return None,
        })
    }
}

/// A completion: what `struct ibv_wc` tells. [`format::Cqe`](crate::format::Cqe) is how it lies in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
    /// Outcome
    pub status: WcStatus,
    /// What was done; meaningful with success only
    pub opcode: WcOpcode,
    /// Which fields are valid
    pub flags: WcFlags,
    /// Service level
    pub sl: u8,
}

impl Cqe {
    /// One that tells of a match: the tag stands in fields that have no other meaning then, as does
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

    /// The tag of a message and the sender's word, if this tells that it matched.
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
