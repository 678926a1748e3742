//! The words every room shares: numbers on the wire, work requests and completions.
//!
//! Numeric values of the enums are those of `<infiniband/verbs.h>`, so that the C edge casts
//! instead of translating; the edge's tests hold the two against each other.

use bitflags::bitflags;

mod placement;

pub use placement::{FlushLevel, Placement};

/// Nanoseconds since an origin that the caller chooses; never goes back.
pub type Nanos = u64;

/// A queue pair number: 24 bits, 0 and 1 reserved (IBTA 10.2.4).
pub type Qpn = u32;

/// Largest QPN.
pub const QPN_MASK: u32 = 0x00ff_ffff;
/// The multicast "destination QPN" (IBTA 9.2.6).
pub const QPN_MULTICAST: u32 = 0x00ff_ffff;
/// QPNs are given out in blocks of this many; a process owns whole blocks.
pub const QPN_BLOCK: u32 = 1 << QPN_BLOCK_SHIFT;
/// log2 of [`QPN_BLOCK`].
pub const QPN_BLOCK_SHIFT: u32 = 12;

/// A packet sequence number: 24 bits, compared modulo 2^24 (IBTA 9.7.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub struct Psn(u32);

impl Psn {
    /// The low 24 bits of `v`.
    pub const fn new(v: u32) -> Self {
        Psn(v & QPN_MASK)
    }
    /// The number, 0..2^24.
    pub const fn get(self) -> u32 {
        self.0
    }
    /// The PSN `n` packets later.
    #[must_use]
    pub const fn plus(self, n: u32) -> Self {
        Psn::new(self.0.wrapping_add(n))
    }
    /// Signed distance from `earlier` to `self`, in -2^23..2^23.
    pub const fn since(self, earlier: Psn) -> i32 {
        (((self.0.wrapping_sub(earlier.0)) << 8) as i32) >> 8
    }
    /// Whether `self` comes before `other`.
    pub const fn before(self, other: Psn) -> bool {
        self.since(other) < 0
    }
}

/// A GID: an IPv6 address, or an IPv4 address in its mapped form (RoCEv2 annex A17).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Hash)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// `::ffff:a.b.c.d`
    pub const fn from_ipv4(a: [u8; 4]) -> Self {
        Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a[0], a[1], a[2], a[3]])
    }
    /// The IPv4 address if this is a mapped one.
    #[inline]
    pub fn ipv4(&self) -> Option<[u8; 4]> {
        let whole = u128::from_be_bytes(self.0);
        (whole >> 32 == 0xffff).then_some((whole as u32).to_be_bytes())
    }
    /// Whether it is a multicast group's: 224.0.0.0/4 in its mapped form, or ff00::/8.
    #[inline]
    pub fn is_multicast(&self) -> bool {
        self.0[0] == 0xff || matches!(self.ipv4(), Some([224..=239, ..]))
    }
}

/// Path MTU: payload bytes a packet may carry. Values as `enum ibv_mtu`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
#[repr(u8)]
pub enum Mtu {
    /// 256 B
    M256 = 1,
    /// 512 B
    M512 = 2,
    /// 1024 B
    #[default]
    M1024 = 3,
    /// 2048 B
    M2048 = 4,
    /// 4096 B
    M4096 = 5,
}

impl Mtu {
    /// Payload bytes.
    pub const fn bytes(self) -> u32 {
        128 << (self as u32)
    }
    /// From `enum ibv_mtu`.
    pub const fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            1 => Mtu::M256,
            2 => Mtu::M512,
            3 => Mtu::M1024,
            4 => Mtu::M2048,
            5 => Mtu::M4096,
            _ => return None,
        })
    }
    /// The largest path MTU whose packets, with all headers, fit a link MTU of `link` bytes.
    pub fn fitting(link: u32) -> Self {
        /* IPv6 40 + UDP 8 + BTH 12 + the longest extension (RETH 16 + ImmDt 4, AtomicETH 28) + pad 3 + ICRC 4 */
        let room = link.saturating_sub(96);
        [Mtu::M4096, Mtu::M2048, Mtu::M1024, Mtu::M512]
            .into_iter()
            .find(|m| m.bytes() <= room)
            .unwrap_or(Mtu::M256)
    }
}

/// Transport of a QP. Values as `enum ibv_qp_type`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum QpType {
    /// Reliable connection
    Rc = 2,
    /// Unreliable connection
    Uc = 3,
    /// Unreliable datagram
    Ud = 4,
    /// Extended reliable connection, the end that asks
    XrcSend = 9,
    /// Extended reliable connection, the end that answers
    XrcRecv = 10,
}

impl QpType {
    /// Whether packets are acknowledged and repeated.
    #[inline]
    pub const fn is_reliable(self) -> bool {
        matches!(self, QpType::Rc | QpType::XrcSend | QpType::XrcRecv)
    }
    /// Whether it is an end of an extended reliable connection (annex A14).
    #[inline]
    pub const fn is_xrc(self) -> bool {
        matches!(self, QpType::XrcSend | QpType::XrcRecv)
    }
}

/// State of a QP. Values as `enum ibv_qp_state`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
#[repr(u8)]
pub enum QpState {
    /// Reset
    #[default]
    Reset = 0,
    /// Initialised: receives may be posted
    Init = 1,
    /// Ready to receive
    Rtr = 2,
    /// Ready to send
    Rts = 3,
    /// Send queue drained (or draining)
    Sqd = 4,
    /// Send queue error (UC, UD)
    Sqe = 5,
    /// Error: everything is flushed
    Err = 6,
}

impl QpState {
    /// From `enum ibv_qp_state`.
    pub const fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            0 => QpState::Reset,
            1 => QpState::Init,
            2 => QpState::Rtr,
            3 => QpState::Rts,
            4 => QpState::Sqd,
            5 => QpState::Sqe,
            6 => QpState::Err,
            _ => return None,
        })
    }
}

/// What a send work request asks for. Values as `enum ibv_wr_opcode`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum SendOp {
    /// RDMA WRITE
    Write = 0,
    /// RDMA WRITE with immediate
    WriteImm = 1,
    /// SEND
    #[default]
    Send = 2,
    /// SEND with immediate
    SendImm = 3,
    /// RDMA READ
    Read = 4,
    /// Compare and swap
    CmpSwap = 5,
    /// Fetch and add
    FetchAdd = 6,
    /// Unbind a memory window of this card
    LocalInv = 7,
    /// Bind a memory window
    BindMw = 8,
    /// SEND that unbinds a memory window of the peer
    SendInv = 9,
    /// Make what was written before visible, or persistent, before the answer
    Flush = 14,
    /// Write eight bytes at once
    AtomicWrite = 15,
}

impl SendOp {
    /// From `enum ibv_wr_opcode`; `None` for those this card does not offer.
    pub const fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            0 => SendOp::Write,
            1 => SendOp::WriteImm,
            2 => SendOp::Send,
            3 => SendOp::SendImm,
            4 => SendOp::Read,
            5 => SendOp::CmpSwap,
            6 => SendOp::FetchAdd,
            7 => SendOp::LocalInv,
            8 => SendOp::BindMw,
            9 => SendOp::SendInv,
            14 => SendOp::Flush,
            15 => SendOp::AtomicWrite,
            _ => return None,
        })
    }
    /// Whether only an answer of its own completes it; such are outstanding in limited numbers (IBTA 9.4.4, A19).
    pub const fn is_answered(self) -> bool {
        self.brings_data() || matches!(self, SendOp::Flush | SendOp::AtomicWrite)
    }
    /// Whether the answer carries data (READ, atomics).
    pub const fn brings_data(self) -> bool {
        matches!(self, SendOp::Read | SendOp::CmpSwap | SendOp::FetchAdd)
    }
    /// Whether it has SGEs or inline bytes.
    pub const fn has_data(self) -> bool {
        !self.is_local() && !matches!(self, SendOp::Flush)
    }
    /// Whether the card does it by itself, without a packet.
    pub const fn is_local(self) -> bool {
        matches!(self, SendOp::LocalInv | SendOp::BindMw)
    }
    /// Whether it is an atomic.
    pub const fn is_atomic(self) -> bool {
        matches!(self, SendOp::CmpSwap | SendOp::FetchAdd)
    }
    /// Whether it carries immediate data.
    pub const fn has_imm(self) -> bool {
        matches!(self, SendOp::WriteImm | SendOp::SendImm)
    }
    /// Whether the message consumes a receive WQE at the peer.
    pub const fn takes_recv(self) -> bool {
        matches!(self, SendOp::Send | SendOp::SendImm | SendOp::SendInv | SendOp::WriteImm)
    }
    /// The completion's op-code.
    pub const fn wc_opcode(self) -> WcOpcode {
        match self {
            SendOp::Write | SendOp::WriteImm => WcOpcode::RdmaWrite,
            SendOp::Send | SendOp::SendImm | SendOp::SendInv => WcOpcode::Send,
            SendOp::Read => WcOpcode::RdmaRead,
            SendOp::CmpSwap => WcOpcode::CompSwap,
            SendOp::FetchAdd => WcOpcode::FetchAdd,
            SendOp::LocalInv => WcOpcode::LocalInv,
            SendOp::BindMw => WcOpcode::BindMw,
            SendOp::Flush => WcOpcode::Flush,
            SendOp::AtomicWrite => WcOpcode::AtomicWrite,
        }
    }
}

bitflags! {
    /// Flags of a send work request. Values as `enum ibv_send_flags`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct SendFlags: u8 {
        /// Wait for earlier READs and atomics of the same QP
        const FENCE = 1;
        /// Make a completion
        const SIGNALED = 2;
        /// Ask for an event at the receiver
        const SOLICITED = 4;
        /// Data was copied into the WQE at posting
        const INLINE = 8;
    }

    /// Access rights of QPs and MRs. Values as `enum ibv_access_flags`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Access: u32 {
        /// The card may write on behalf of its owner (receives, READ data)
        const LOCAL_WRITE = 1;
        /// Peers may WRITE
        const REMOTE_WRITE = 2;
        /// Peers may READ
        const REMOTE_READ = 4;
        /// Peers may do atomics
        const REMOTE_ATOMIC = 8;
        /// Memory windows may be bound
        const MW_BIND = 1 << 4;
        /// Addresses of the MR start at 0
        const ZERO_BASED = 1 << 5;
        /// On-demand paging
        const ON_DEMAND = 1 << 6;
        /// Huge pages
        const HUGETLB = 1 << 7;
        /// Peers may FLUSH to make what was written visible to all
        const FLUSH_GLOBAL = 1 << 8;
        /// Peers may FLUSH to make what was written persistent
        const FLUSH_PERSISTENT = 1 << 9;
        /// Relaxed ordering is welcome
        const RELAXED_ORDERING = 1 << 20;
    }

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

/// One piece of local memory in a work request: `struct ibv_sge`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Sge {
    /// Virtual address
    pub addr: u64,
    /// Bytes
    pub len: u32,
    /// Key of the MR that covers it
    pub lkey: u32,
}

/// One piece of host memory that the card has checked: what DMA sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seg {
    /// Host virtual address
    pub addr: u64,
    /// Bytes
    pub len: u32,
}

/// Fixed part of a send WQE; the SGEs or inline bytes stand behind it in the ring's slot.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct SendWqe {
    /// The program's cookie
    pub wr_id: u64,
    /// RDMA and atomics: remote virtual address. Bind: the window's first byte, as the MR counts.
    pub remote_addr: u64,
    /// Atomics: compare value, or the number to add. Bind, FLUSH: bytes.
    pub compare_add: u64,
    /// Atomics: swap value
    pub swap: u64,
    /// RDMA and atomics: the peer's key. Bind: the window's new key. LOCAL_INV: what to unbind.
    pub rkey: u32,
    /// Immediate data, in the byte order in which it was given (network order). SEND with invalidate:
    /// the peer's window. Bind: the MR's key. FLUSH: the word of its header (`wire::headers::Feth`).
    pub imm: u32,
    /// Sum of the SGEs' lengths, or of the inline bytes
    pub length: u32,
    /// UD: destination QPN. XRC: number of the peer's SRQ. Bind: a key of the window.
    pub remote_qpn: u32,
    /// UD: Q_Key. Bind: [`Access`] bits.
    pub qkey: u32,
    /// UD: address vector
    pub av: AvId,
    /// What to do
    pub op: SendOp,
    /// [`SendFlags`] bits
    pub flags: SendFlags,
    /// SGEs behind the header (0 when inline)
    pub num_sge: u16,
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

/// A completion: what `struct ibv_wc` tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Cqe {
    /// The work request's cookie
    pub wr_id: u64,
    /// Bytes moved (receives, READs, atomics)
    pub byte_len: u32,
    /// Immediate data in network order, valid with [`WcFlags::WITH_IMM`]; or a key: [`WcFlags::WITH_INV`]
    pub imm: u32,
    /// Local QP
    pub qpn: Qpn,
    /// UD receives: the sender's QPN. Matched tags: see [`Cqe::tag`].
    pub src_qp: Qpn,
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
    /// One that tells of a match: the tag stands in fields that have no other meaning then, as does `app_ctx`, unless
    /// the message has immediate data.
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

/// Handle of an address vector of this card.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
#[repr(transparent)]
pub struct AvId(pub u32);

/// Handle of a protection domain.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
#[repr(transparent)]
pub struct PdId(pub u32);

/// Handle of a shared receive queue of this card.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
#[repr(transparent)]
pub struct SrqId(pub u32);

/// Where a frame goes: `struct ibv_ah_attr` with its GRH resolved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Av {
    /// Destination
    pub dgid: Gid,
    /// Source: one of the port's own GIDs
    pub sgid: Gid,
    /// Its index in the port's table
    pub sgid_index: u8,
    /// IPv4 TTL or IPv6 hop limit; 0 is taken as 64
    pub hop_limit: u8,
    /// IPv4 TOS or IPv6 traffic class
    pub traffic_class: u8,
    /// Service level
    pub sl: u8,
    /// IPv6 flow label, 20 bits
    pub flow_label: u32,
    /// Kept for queries alone, as it means nothing on RoCE
    pub dlid: u16,
    /// As `dlid`
    pub static_rate: u8,
    /// As `dlid`
    pub src_path_bits: u8,
}

/// Something that a program learns through `ibv_get_async_event`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AsyncEvent {
    /// IBV_EVENT_QP_FATAL
    QpFatal(Qpn),
    /// IBV_EVENT_QP_REQ_ERR: the responder saw an invalid request
    QpReqErr(Qpn),
    /// IBV_EVENT_QP_ACCESS_ERR: the responder saw an access violation
    QpAccessErr(Qpn),
    /// IBV_EVENT_COMM_EST: first packet in RTR
    CommEst(Qpn),
    /// IBV_EVENT_SQ_DRAINED
    SqDrained(Qpn),
    /// IBV_EVENT_QP_LAST_WQE_REACHED
    LastWqeReached(Qpn),
    /// IBV_EVENT_SRQ_LIMIT_REACHED
    SrqLimit(SrqId),
    /// Not for programs: datagrams wait at queue pair 1, or its timer is due
    Mads,
}

/// What the port knows of a frame beside its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FrameMeta {
    /// Sender's address
    pub src: Gid,
    /// Address it was sent to
    pub dst: Gid,
    /// TOS or traffic class (ECN in the low two bits)
    pub traffic_class: u8,
    /// TTL or hop limit, 0 if not known
    pub hop_limit: u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn psn_compares_modulo() {
        let last = Psn::new(QPN_MASK);
        assert_eq!(last.plus(1), Psn::new(0));
        assert!(last.before(Psn::new(0)));
        assert_eq!(Psn::new(3).since(last), 4);
        assert_eq!(Psn::new(0).since(Psn::new(1)), -1);
    }

    #[test]
    fn groups_have_addresses_of_their_own() {
        let mut v6 = Gid([0; 16]);
        assert!(!v6.is_multicast());
        v6.0[0] = 0xff;
        assert!(v6.is_multicast());
        v6.0[0] = 0xfe;
        assert!(!v6.is_multicast());
        for (first, is) in [(223, false), (224, true), (239, true), (240, false)] {
            assert_eq!(Gid::from_ipv4([first, 1, 2, 3]).is_multicast(), is, "{first}.1.2.3");
        }
    }

    #[test]
    fn mtu_fits_links() {
        assert_eq!(Mtu::fitting(65536), Mtu::M4096);
        assert_eq!(Mtu::fitting(4200), Mtu::M4096);
        assert_eq!(Mtu::fitting(1500), Mtu::M1024);
        assert_eq!(Mtu::fitting(100), Mtu::M256);
    }
}
