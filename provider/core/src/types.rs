//! The words every room shares: numbers on the wire, work requests and completions.
//!
//! Numeric values of the enums are those of `<infiniband/verbs.h>`, so that the C edge casts
//! instead of translating; the edge's tests hold the two against each other.

use bitflags::bitflags;

mod placement;

pub use placement::{FlushLevel, Placement};
pub use starverbs_queues::{
    AvId, Cqe, SendFlags, SendOp, SendWqe, Sge, TagMatch, WcFlags, WcOpcode, WcStatus,
};

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
    /// The mapped form of an IPv4 address, `::ffff:a.b.c.d`.
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
        /* IPv6 40 + UDP 8 + BTH 12 + the longest extension (RETH 16 + ImmDt 4, AtomicETH 28) + pad 3 +
         * ICRC 4 */
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
    /// Reset: nothing is posted, sent or taken
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

bitflags! {
    /// Access rights of QPs and MRs. Values as `enum ibv_access_flags`.
    #[repr(transparent)]
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
}

/// One piece of host memory that the card has checked: what DMA sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seg {
    /// Host virtual address
    pub addr: u64,
    /// Length, bytes
    pub len: u32,
}

/// Handle of a protection domain.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Hash)]
#[repr(transparent)]
pub struct PdId(pub u32);

/// A QP for checks of memory keys: its number, with the protection domain that counts for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpId {
    /// Protection domain: the QP's own, or that of the SRQ that an XRC request names
    pub pd: PdId,
    /// Number of the QP; 0: none
    pub qpn: Qpn,
}

/// Handle of a shared receive queue of this card.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
#[repr(transparent)]
pub struct SrqId(pub u32);

/// Where a frame goes: `struct ibv_ah_attr` with its GRH resolved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Av {
    /// GID of the destination
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
    /// IBV_EVENT_QP_FATAL: a fault that no completion reports
    QpFatal(Qpn),
    /// IBV_EVENT_QP_REQ_ERR: the responder saw an invalid request
    QpReqErr(Qpn),
    /// IBV_EVENT_QP_ACCESS_ERR: the responder saw an access violation
    QpAccessErr(Qpn),
    /// IBV_EVENT_COMM_EST: first packet in RTR
    CommEst(Qpn),
    /// IBV_EVENT_SQ_DRAINED: in SQD, all that was begun is acknowledged
    SqDrained(Qpn),
    /// IBV_EVENT_QP_LAST_WQE_REACHED: in ERR, it takes no more WQEs of its SRQ
    LastWqeReached(Qpn),
    /// IBV_EVENT_SRQ_LIMIT_REACHED: fewer receives are left than the armed limit
    SrqLimit(SrqId),
    /// Not for programs: datagrams wait at queue pair 1, or its timer is due
    Mads,
    /// Not for programs: an RPC fails, as the peer's queue pair does not speak StRoM's dialect
    PeerLacksDialect(Qpn),
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
