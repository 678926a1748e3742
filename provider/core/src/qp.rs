//! A program's parameters of a QP: attributes, masks, capabilities. Numbers as in verbs.h.

pub mod modify;

use bitflags::bitflags;

use crate::types::{Access, Av, Mtu, PdId, Psn, QpState, QpType, Qpn, SrqId};

bitflags! {
    /// Which attributes a modify carries: `enum ibv_qp_attr_mask`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct QpAttrMask: u32 {
        #[allow(missing_docs)] const STATE = 1 << 0;
        #[allow(missing_docs)] const CUR_STATE = 1 << 1;
        #[allow(missing_docs)] const EN_SQD_ASYNC_NOTIFY = 1 << 2;
        #[allow(missing_docs)] const ACCESS_FLAGS = 1 << 3;
        #[allow(missing_docs)] const PKEY_INDEX = 1 << 4;
        #[allow(missing_docs)] const PORT = 1 << 5;
        #[allow(missing_docs)] const QKEY = 1 << 6;
        #[allow(missing_docs)] const AV = 1 << 7;
        #[allow(missing_docs)] const PATH_MTU = 1 << 8;
        #[allow(missing_docs)] const TIMEOUT = 1 << 9;
        #[allow(missing_docs)] const RETRY_CNT = 1 << 10;
        #[allow(missing_docs)] const RNR_RETRY = 1 << 11;
        #[allow(missing_docs)] const RQ_PSN = 1 << 12;
        #[allow(missing_docs)] const MAX_QP_RD_ATOMIC = 1 << 13;
        #[allow(missing_docs)] const ALT_PATH = 1 << 14;
        #[allow(missing_docs)] const MIN_RNR_TIMER = 1 << 15;
        #[allow(missing_docs)] const SQ_PSN = 1 << 16;
        #[allow(missing_docs)] const MAX_DEST_RD_ATOMIC = 1 << 17;
        #[allow(missing_docs)] const PATH_MIG_STATE = 1 << 18;
        #[allow(missing_docs)] const CAP = 1 << 19;
        #[allow(missing_docs)] const DEST_QPN = 1 << 20;
        #[allow(missing_docs)] const RATE_LIMIT = 1 << 25;
    }
}

/// State of path migration. Values as `enum ibv_mig_state`. The card has no alternate paths, so that a QP is
/// always as if it had migrated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum PathMig {
    /// There is no other path to go to
    #[default]
    Migrated = 0,
    /// An alternate path is to be loaded
    Rearm = 1,
    /// An alternate path is ready
    Armed = 2,
}

impl PathMig {
    /// From `enum ibv_mig_state`.
    pub const fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            0 => PathMig::Migrated,
            1 => PathMig::Rearm,
            2 => PathMig::Armed,
            _ => return None,
        })
    }
}

/// Attributes of a QP: `struct ibv_qp_attr`, with its address in the words of `A`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpAttr<A = Av> {
    /// State to go to, or (query) to be in
    pub state: QpState,
    /// State the program believes the QP is in
    pub cur_state: QpState,
    /// Path MTU
    pub path_mtu: Mtu,
    /// UD: Q_Key
    pub qkey: u32,
    /// Expected PSN of the first request from the peer
    pub rq_psn: Psn,
    /// PSN of our first request
    pub sq_psn: Psn,
    /// Peer's QPN
    pub dest_qpn: Qpn,
    /// What the peer may do: REMOTE_WRITE, REMOTE_READ, REMOTE_ATOMIC
    pub access: Access,
    /// Path to the peer
    pub av: A,
    /// Index into the P_Key table
    pub pkey_index: u16,
    /// READs and atomics outstanding as requester
    pub max_rd_atomic: u8,
    /// READs and atomics accepted as responder
    pub max_dest_rd_atomic: u8,
    /// RNR NAK timer code, 0..=31 (IBTA table 45)
    pub min_rnr_timer: u8,
    /// Number of the port
    pub port_num: u8,
    /// Local ACK timeout code, 0..=31: 4.096 us x 2^timeout, 0 is for ever
    pub timeout: u8,
    /// Transport retries, 0..=7
    pub retry_cnt: u8,
    /// RNR retries, 0..=7; 7 is for ever
    pub rnr_retry: u8,
    /// Path migration
    pub path_mig: PathMig,
    /// SQD: an event when drained
    pub en_sqd_async_notify: bool,
    /// Whether the send queue is draining (query)
    pub sq_draining: bool,
}

impl<A> QpAttr<A> {
    /// The same attributes with an address in other words.
    pub fn map_address<B>(self, map: impl FnOnce(A) -> B) -> QpAttr<B> {
        QpAttr {
            av: map(self.av),
            state: self.state,
            cur_state: self.cur_state,
            path_mtu: self.path_mtu,
            qkey: self.qkey,
            rq_psn: self.rq_psn,
            sq_psn: self.sq_psn,
            dest_qpn: self.dest_qpn,
            access: self.access,
            pkey_index: self.pkey_index,
            max_rd_atomic: self.max_rd_atomic,
            max_dest_rd_atomic: self.max_dest_rd_atomic,
            min_rnr_timer: self.min_rnr_timer,
            port_num: self.port_num,
            timeout: self.timeout,
            retry_cnt: self.retry_cnt,
            rnr_retry: self.rnr_retry,
            path_mig: self.path_mig,
            en_sqd_async_notify: self.en_sqd_async_notify,
            sq_draining: self.sq_draining,
        }
    }
}

/// Where a QP's receives come from.
pub enum RecvSource<Rq> {
    /// A queue of its own
    Own(Rq),
    /// A shared one
    Shared(SrqId),
    /// XRC: the one that the last request named; before the first, none that exists
    Xrc(SrqId),
}

/// What a QP is made of.
pub struct QpInit<Sq, Rq, Cq> {
    /// Transport of the QP
    pub qp_type: QpType,
    /// Protection domain. Of an XRC_RECV QP the one that stands for its XRC domain: the SRQs that its
    /// requests may name are those of that domain, and keys are checked against theirs.
    pub pd: PdId,
    /// Send queue
    pub sq: Sq,
    /// Receive queue
    pub rq: RecvSource<Rq>,
    /// Completions of sends
    pub send_cq: Cq,
    /// Completions of receives
    pub recv_cq: Cq,
    /// Whether every send makes a completion
    pub sq_sig_all: bool,
    /// Attached to a multicast group, it gets no copy of what it sends there itself
    pub block_own_multicast: bool,
    /// The host's name for it: see [`Owner`]
    pub cookie: u64,
}

/// The owner of a QP or SRQ, to which a host delivers its events.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner {
    /// Protection domain it was made in
    pub pd: PdId,
    /// What the host called it
    pub cookie: u64,
}
