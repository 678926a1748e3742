//! A program's parameters of a QP: attributes, masks, capabilities. Numbers as in verbs.h.

pub mod modify;

use bitflags::bitflags;

use crate::types::{Access, Av, Mtu, PdId, Psn, QpState, QpType, Qpn, SrqId};

bitflags! {
    /// Which attributes a modify carries: `enum ibv_qp_attr_mask`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct QpAttrMask: u32 {
        /// [`QpAttr::state`]
        const STATE = 1 << 0;
        /// [`QpAttr::cur_state`]
        const CUR_STATE = 1 << 1;
        /// [`QpAttr::en_sqd_async_notify`]
        const EN_SQD_ASYNC_NOTIFY = 1 << 2;
        /// [`QpAttr::access`]
        const ACCESS_FLAGS = 1 << 3;
        /// [`QpAttr::pkey_index`]
        const PKEY_INDEX = 1 << 4;
        /// [`QpAttr::port_num`]
        const PORT = 1 << 5;
        /// [`QpAttr::qkey`]
        const QKEY = 1 << 6;
        /// [`QpAttr::av`]
        const AV = 1 << 7;
        /// [`QpAttr::path_mtu`]
        const PATH_MTU = 1 << 8;
        /// [`QpAttr::timeout`]
        const TIMEOUT = 1 << 9;
        /// [`QpAttr::retry_cnt`]
        const RETRY_CNT = 1 << 10;
        /// [`QpAttr::rnr_retry`]
        const RNR_RETRY = 1 << 11;
        /// [`QpAttr::rq_psn`]
        const RQ_PSN = 1 << 12;
        /// [`QpAttr::max_rd_atomic`]
        const MAX_QP_RD_ATOMIC = 1 << 13;
        /// The alternate path: refused, the card has none
        const ALT_PATH = 1 << 14;
        /// [`QpAttr::min_rnr_timer`]
        const MIN_RNR_TIMER = 1 << 15;
        /// [`QpAttr::sq_psn`]
        const SQ_PSN = 1 << 16;
        /// [`QpAttr::max_dest_rd_atomic`]
        const MAX_DEST_RD_ATOMIC = 1 << 17;
        /// [`QpAttr::path_mig`]
        const PATH_MIG_STATE = 1 << 18;
        /// Depths of the queues: refused, rings do not grow
        const CAP = 1 << 19;
        /// [`QpAttr::dest_qpn`]
        const DEST_QPN = 1 << 20;
        /// Rate of a raw packet QP: refused
        const RATE_LIMIT = 1 << 25;
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
    /// The host's name for it: see [`EventOwner`]
    pub cookie: u64,
}

/// The owner of a QP or SRQ, to which a host delivers its events.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EventOwner {
    /// Protection domain it was made in
    pub pd: PdId,
    /// What the host called it
    pub cookie: u64,
}
