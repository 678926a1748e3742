//! What the device says of itself: attributes, port, GID table.
//!
//! Owns the limits that the objects check against. Needs the host's addresses, but no open card.

use starverbs_backend::HostAddr;
use starverbs_backend::host;
use starverbs_core::{CardLimits, Gid, MAX_GROUP_QPS, Mtu};
use starverbs_queues::board::{CAP_MULTICAST, CAP_XRC, DeviceReply};
use starverbs_settings::Settings;

use crate::allowance;
use crate::dm::MAX_DM;
use crate::error::{Result, VerbsError};
use crate::memory;

/// Name of the device.
pub fn device_name() -> &'static str {
    "star0"
}

/// Attributes of the device without opening it.
///
/// # Errors
/// Wrong settings, or a host without addresses.
pub fn device_attr() -> Result<DeviceAttr> {
    Ok(DeviceInfo::new(&Settings::load()?)?.attr)
}

/// All that the device says of itself, without opening it.
#[derive(Clone, Debug)]
pub struct Description {
    /// The device
    pub attr: DeviceAttr,
    /// Its one port
    pub port: PortAttr,
    /// The port's GID table
    pub gids: Vec<GidEntry>,
}

/// Describes the device as a program would find it that opened it now.
///
/// # Errors
/// As [`device_attr`].
pub fn describe() -> Result<Description> {
    let info = DeviceInfo::new(&Settings::load()?)?;
    Ok(Description { gids: info.gid_table(), attr: info.attr, port: info.port })
}

/// Most WQEs of a queue, where there is memory for them.
pub const MAX_QP_WR: u32 = 1 << 20;
/// Most SGEs of a WQE.
pub const MAX_SGE: u32 = 32;
const _: () = assert!(MAX_SGE as usize <= starverbs_core::nic::MAX_SGE);
/// Most inline bytes of a WQE.
pub const MAX_INLINE: u32 = 4096;
/// Most CQEs of a completion queue, where there is memory for them.
pub const MAX_CQE: u32 = 1 << 22;
/// Most completion queues.
const MAX_CQ: u32 = 1 << 20;
/// One of so many parts of the memory may be one queue of requests with an SGE each, or of completions.
const QUEUE_SHARE: u64 = 4;
/// What a request takes in both queues of a QP, and a completion.
const WR_BYTES: u64 = 192;
const CQE_BYTES: u64 = 64;
/// What a completion queue takes of a usual depth, 128.
const CQ_BYTES: u64 = 10 << 10;
/// A card takes this before anything is made.
const CARD_BYTES: u64 = 4 << 20;
/// Entries of the GID table, most of them empty: an address handle's index is a byte.
pub(crate) const GID_TBL_LEN: u32 = 256;
const _: () = assert!(GID_TBL_LEN as usize >= starverbs_backend::MAX_ADDRS);
/// Longest message, bytes.
pub const MAX_MSG: u32 = 1 << 30;
/// Most READs and atomics outstanding, either way.
pub const MAX_RD_ATOM: u32 = 128;
/// The one P_Key: full member of the default partition.
pub const PKEY: u16 = 0xffff;
/// This card has no IEEE OUI. Test-suites refuse 0; nobody can be assigned this one, a group
/// address.
const NO_OUI: u32 = 0xff_ffff;

/// IBV_DEVICE_BAD_PKEY_CNTR, IBV_DEVICE_BAD_QKEY_CNTR, IBV_DEVICE_UD_AV_PORT_ENFORCE,
/// IBV_DEVICE_CURR_QP_STATE_MOD, IBV_DEVICE_PORT_ACTIVE_EVENT;
/// IBV_DEVICE_SYS_IMAGE_GUID, IBV_DEVICE_RC_RNR_NAK_GEN, IBV_DEVICE_SRQ_RESIZE;
/// IBV_DEVICE_MEM_WINDOW, IBV_DEVICE_XRC, IBV_DEVICE_MEM_MGT_EXTENSIONS, IBV_DEVICE_MEM_WINDOW_TYPE_2B;
/// IB_UVERBS_DEVICE_FLUSH_GLOBAL, IB_UVERBS_DEVICE_ATOMIC_WRITE
const CAP_FLAGS: u64 = 1 << 1
    | 1 << 2
    | 1 << 6
    | 1 << 7
    | 1 << 10
    | 1 << 11
    | 1 << 12
    | 1 << 13
    | 1 << 17
    | 1 << 20
    | 1 << 21
    | 1 << 24
    | 1 << 38
    | 1 << 40;
/// Of those what every board takes: no resizing of SRQs.
const BOARD_FLAGS: u64 = CAP_FLAGS & !(1 << 13 | DEVICE_XRC);
/// IBV_DEVICE_XRC
const DEVICE_XRC: u64 = 1 << 20;
/// IBV_PORT_CM_SUP, IBV_PORT_IP_BASED_GIDS
const PORT_CAP_FLAGS: u32 = 1 << 16 | 1 << 26;

/// `struct ibv_device_attr` and what the extended query adds. Numbers as in verbs.h.
#[derive(Clone, Debug)]
pub struct DeviceAttr {
    /// Version of this library
    pub fw_ver: &'static str,
    /// Host byte order
    pub node_guid: u64,
    /// Host byte order
    pub sys_image_guid: u64,
    /// Bytes of a memory region
    pub max_mr_size: u64,
    /// Page sizes, a bit each
    pub page_size_cap: u64,
    /// IEEE OUI
    pub vendor_id: u32,
    /// Always 0
    pub vendor_part_id: u32,
    /// Always 0
    pub hw_ver: u32,
    /// Queue pairs
    pub max_qp: u32,
    /// WQEs of a send or receive queue
    pub max_qp_wr: u32,
    /// `enum ibv_device_cap_flags`, with the extended query's above bit 31
    pub device_cap_flags: u64,
    /// SGEs of a WQE
    pub max_sge: u32,
    /// SGEs of a READ
    pub max_sge_rd: u32,
    /// Completion queues
    pub max_cq: u32,
    /// Entries of a completion queue
    pub max_cqe: u32,
    /// Memory regions
    pub max_mr: u32,
    /// Protection domains
    pub max_pd: u32,
    /// READs and atomics under way at a QP as responder
    pub max_qp_rd_atom: u32,
    /// The same at all QPs
    pub max_res_rd_atom: u32,
    /// READs and atomics under way at a QP as requester
    pub max_qp_init_rd_atom: u32,
    /// Memory windows
    pub max_mw: u32,
    /// Multicast groups
    pub max_mcast_grp: u32,
    /// QPs in a multicast group
    pub max_mcast_qp_attach: u32,
    /// QPs in all multicast groups
    pub max_total_mcast_qp_attach: u32,
    /// Address handles
    pub max_ah: u32,
    /// Shared receive queues
    pub max_srq: u32,
    /// WQEs of an SRQ
    pub max_srq_wr: u32,
    /// SGEs of a WQE of an SRQ
    pub max_srq_sge: u32,
    /// Entries of the P_Key table
    pub max_pkeys: u16,
    /// `enum ibv_atomic_cap`: 1 is IBV_ATOMIC_HCA
    pub atomic_cap: u32,
    /// 4.096 us x 2^this at most, from a request's arrival to its ACK
    pub local_ca_ack_delay: u8,
    /// Physical ports, always 1
    pub phys_port_cnt: u8,
    /// Inline bytes of a send
    pub max_inline: u32,
    /// Of the clock that stamps completions
    pub hca_core_clock_khz: u64,
    /// Bits of a stamp that count
    pub timestamp_mask: u64,
    /// Bytes of device memory
    pub max_dm_size: u64,
    /// SRQs may match tags (`struct ibv_tm_caps`)
    pub tags: bool,
    /// What on-demand paging offers
    pub odp: OdpCaps,
}

/// `struct ibv_odp_caps` and that of XRC. Bits as in verbs.h.
#[derive(Clone, Copy, Debug, Default)]
pub struct OdpCaps {
    /// `enum ibv_odp_general_caps`
    pub general: u64,
    /// Operations of RC: `enum ibv_odp_transport_cap_bits`
    pub rc: u32,
    /// Operations of UC
    pub uc: u32,
    /// Operations of UD
    pub ud: u32,
    /// Operations of XRC
    pub xrc: u32,
}

/// `struct ibv_port_attr`. Numbers as in verbs.h.
#[derive(Clone, Copy, Debug)]
pub struct PortAttr {
    /// `enum ibv_port_state`: 4 is ACTIVE
    pub state: u32,
    /// Largest MTU that the card has
    pub max_mtu: Mtu,
    /// Largest MTU that fits the network
    pub active_mtu: Mtu,
    /// Entries of the GID table
    pub gid_tbl_len: u32,
    /// `enum ibv_port_cap_flags`
    pub port_cap_flags: u32,
    /// Bytes of a message
    pub max_msg_sz: u32,
    /// Packets with a wrong P_Key: not counted
    pub bad_pkey_cntr: u32,
    /// Packets with a wrong Q_Key: not counted
    pub qkey_viol_cntr: u32,
    /// Entries of the P_Key table
    pub pkey_tbl_len: u16,
    /// RoCE has no LIDs: 0
    pub lid: u16,
    /// RoCE has no subnet manager: 0
    pub sm_lid: u16,
    /// RoCE has no LIDs: 0
    pub lmc: u8,
    /// Virtual lanes: `VLCap` (IBTA 14.2.5.6), 1 is VL0 alone
    pub max_vl_num: u8,
    /// RoCE has no subnet manager: 0
    pub sm_sl: u8,
    /// RoCE has no subnet manager: 0
    pub subnet_timeout: u8,
    /// RoCE has no subnet manager: 0
    pub init_type_reply: u8,
    /// Lanes: 1 is 1X, 2 is 4X, 16 is 2X
    pub active_width: u8,
    /// Of a lane, Gb/s: 1 is 2.5, 2 is 5, 8 is 10, 32 is 25, 64 is 50, 128 is 100
    pub active_speed: u8,
    /// 5 is LinkUp
    pub phys_state: u8,
    /// 2 is Ethernet
    pub link_layer: u8,
    /// Always IBV_QPF_GRH_REQUIRED
    pub flags: u8,
    /// `enum ibv_port_cap_flags2`
    pub port_cap_flags2: u16,
}

/// One entry of the GID table: `struct ibv_gid_entry`.
#[derive(Clone, Debug)]
pub struct GidEntry {
    /// The GID
    pub gid: Gid,
    /// Its index
    pub index: u32,
    /// Index of its network interface
    pub ifindex: u32,
    /// IBV_GID_TYPE_SYSFS_ROCE_V2 (1)
    pub gid_type: u32,
    /// Name of its network interface
    pub netdev: String,
}

/// The device as settings and host make it.
#[derive(Clone, Debug)]
pub(crate) struct DeviceInfo {
    pub(crate) attr: DeviceAttr,
    pub(crate) limits: CardLimits,
    /// Memory that queues and tables may take, bytes
    pub(crate) memory: u64,
    pub(crate) port: PortAttr,
    pub(crate) addrs: Vec<HostAddr>,
    /// Largest path MTU between processes of this host
    local_mtu: Mtu,
}

impl DeviceInfo {
    pub(crate) fn new(settings: &Settings) -> Result<Self> {
        let addrs = host::addresses(settings)?;
        let guid = host::guid(&addrs);
        let port = port_attr(active_mtu(settings, &addrs), link_speed(&addrs));
        let memory = allowance::bytes(settings);
        let limits = CardLimits::fitting(memory.saturating_sub(CARD_BYTES));
        let attr = attr(guid, starverbs_backend::max_groups(&addrs), &limits, memory);
        Ok(DeviceInfo { attr, limits, memory, port, addrs, local_mtu: mtu_cap(settings) })
    }

    /// What a board of this process takes, in the place of what the card in software would.
    pub(crate) fn limit_to_board(&mut self, board: &DeviceReply, caps: u64, mtu: Mtu) {
        let attr = &mut self.attr;
        (attr.node_guid, attr.sys_image_guid) = (board.guid, board.guid);
        attr.tags = false;
        attr.device_cap_flags = BOARD_FLAGS | if caps & CAP_XRC != 0 { DEVICE_XRC } else { 0 };
        attr.max_qp = board.max_qp;
        attr.max_qp_wr = board.max_qp_wr.min(MAX_QP_WR);
        attr.max_sge = board.max_sge.min(MAX_SGE);
        attr.max_sge_rd = attr.max_sge;
        attr.max_cq = board.max_cq;
        attr.max_cqe = board.max_cqe.min(MAX_CQE);
        attr.max_mr = board.max_mr;
        attr.max_pd = board.max_pd;
        attr.max_mw = board.max_mw;
        attr.max_ah = board.max_ah;
        attr.max_srq = board.max_srq;
        attr.max_srq_wr = attr.max_qp_wr;
        attr.max_srq_sge = attr.max_sge;
        attr.max_inline = board.max_inline.min(MAX_INLINE);
        attr.max_qp_rd_atom = board.max_rd_atomic.min(MAX_RD_ATOM);
        attr.max_qp_init_rd_atom = attr.max_qp_rd_atom;
        attr.max_res_rd_atom = attr.max_qp.saturating_mul(attr.max_qp_rd_atom);
        let groups = caps & CAP_MULTICAST != 0;
        attr.max_mcast_grp = if groups { board.max_groups } else { 0 };
        attr.max_mcast_qp_attach = if groups { board.max_group_qps } else { 0 };
        attr.max_total_mcast_qp_attach = attr.max_mcast_grp.saturating_mul(attr.max_mcast_qp_attach);
        self.port.active_mtu = mtu;
    }

    /// Largest path MTU towards `dgid`: the port's, or, to an address of this host, what its loopback
    /// carries, unless the setting MTU says less.
    pub(crate) fn path_mtu(&self, dgid: &Gid) -> Mtu {
        let local = self.addrs.iter().any(|addr| addr.gid == *dgid);
        if local { self.local_mtu } else { self.port.active_mtu }
    }

    /// The GID table's addresses, for people.
    pub(crate) fn addresses(&self) -> String {
        let all: Vec<_> = self.addrs.iter().map(|addr| host::ip_of(addr.gid).to_string()).collect();
        all.join(" ")
    }

    /// EINVAL unless `port` is 1.
    pub(crate) fn port(&self, port: u8) -> Result<&PortAttr> {
        if port == 1 { Ok(&self.port) } else { Err(VerbsError::Invalid("port number")) }
    }

    /// EINVAL past the table's end, ENODATA where it is empty.
    pub(crate) fn gid(&self, index: u32) -> Result<GidEntry> {
        if index >= GID_TBL_LEN {
            return Err(VerbsError::Invalid("GID index"));
        }
        self.addrs.get(index as usize).map(|addr| entry(index, addr)).ok_or(VerbsError::NoData)
    }

    pub(crate) fn gid_table(&self) -> Vec<GidEntry> {
        (0u32..).zip(&self.addrs).map(|(index, addr)| entry(index, addr)).collect()
    }
}

fn entry(index: u32, addr: &HostAddr) -> GidEntry {
    GidEntry { gid: addr.gid, index, ifindex: addr.ifindex, gid_type: 1, netdev: addr.name.clone() }
}

/// The largest that fits every real interface; loopback decides only where there is nothing else.
fn active_mtu(settings: &Settings, addrs: &[HostAddr]) -> Mtu {
    let real = addrs.iter().filter(|addr| !addr.loopback).map(|addr| addr.link_mtu).min();
    let fits = real.map_or(Mtu::M4096, Mtu::fitting);
    mtu_cap(settings).min(fits)
}

/// Mb/s of the slowest real interface that has a speed.
fn link_speed(addrs: &[HostAddr]) -> Option<u32> {
    let real = addrs.iter().filter(|addr| !addr.loopback);
    real.filter_map(|addr| host::link_speed(&addr.name)).min()
}

/// Lanes and their speed, in the codes of `struct ibv_port_attr`, that are no slower than so many Mb/s.
/// Without a speed, as memory has none: 100 Gb/s.
fn width_and_speed(mbps: Option<u32>) -> (u8, u8) {
    const LADDER: [(u32, u8, u8); 8] = [
        (2500, 1, 1),
        (10_000, 1, 8),
        (20_000, 2, 2),
        (25_000, 1, 32),
        (40_000, 2, 8),
        (50_000, 16, 32),
        (100_000, 2, 32),
        (200_000, 2, 64),
    ];
    let step = LADDER.iter().find(|(most, ..)| mbps.unwrap_or(100_000) <= *most);
    step.map_or((2, 128), |(_, width, speed)| (*width, *speed))
}

/// What the setting MTU allows.
fn mtu_cap(settings: &Settings) -> Mtu {
    [Mtu::M256, Mtu::M512, Mtu::M1024, Mtu::M2048]
        .into_iter()
        .find(|mtu| settings.mtu.is_some_and(|bytes| u32::from(bytes) == mtu.bytes()))
        .unwrap_or(Mtu::M4096)
}

/// Entries of the longest queue of such: a power of two.
fn longest(most: u32, each: u64, memory: u64) -> u32 {
    let fits = memory / QUEUE_SHARE / each;
    u32::try_from(fits.max(1)).map_or(most, |fits| most.min(1 << fits.ilog2()))
}

fn attr(guid: u64, groups: u32, limits: &CardLimits, memory: u64) -> DeviceAttr {
    let max_qp_wr = longest(MAX_QP_WR, WR_BYTES, memory);
    let max_cq =
        u32::try_from(memory.saturating_sub(CARD_BYTES) / CQ_BYTES).map_or(MAX_CQ, |n| n.clamp(1, MAX_CQ));
    DeviceAttr {
        fw_ver: env!("CARGO_PKG_VERSION"),
        node_guid: guid,
        sys_image_guid: guid,
        max_mr_size: u64::MAX,
        page_size_cap: 0xffff_f000,
        vendor_id: NO_OUI,
        vendor_part_id: 0,
        hw_ver: 0,
        max_qp: limits.qps,
        max_qp_wr,
        device_cap_flags: CAP_FLAGS,
        max_sge: MAX_SGE,
        max_sge_rd: MAX_SGE,
        max_cq,
        max_cqe: longest(MAX_CQE, CQE_BYTES, memory),
        max_mr: limits.mrs,
        max_pd: limits.pds,
        max_qp_rd_atom: MAX_RD_ATOM,
        max_res_rd_atom: limits.qps * MAX_RD_ATOM,
        max_qp_init_rd_atom: MAX_RD_ATOM,
        max_mw: limits.windows,
        max_mcast_grp: groups,
        max_mcast_qp_attach: MAX_GROUP_QPS as u32,
        max_total_mcast_qp_attach: groups * MAX_GROUP_QPS as u32,
        max_ah: limits.avs,
        max_srq: limits.srqs,
        max_srq_wr: max_qp_wr,
        max_srq_sge: MAX_SGE,
        max_pkeys: 1,
        atomic_cap: 1,
        local_ca_ack_delay: 15,
        phys_port_cnt: 1,
        max_inline: MAX_INLINE,
        hca_core_clock_khz: 1_000_000,
        timestamp_mask: u64::MAX,
        max_dm_size: MAX_DM,
        tags: true,
        odp: odp_caps(),
    }
}

/// Memory of its own process is there for the card when the process has it, for all that it does.
fn odp_caps() -> OdpCaps {
    /// IBV_ODP_SUPPORT_SEND, RECV, SRQ_RECV
    const MESSAGES: u32 = 1 | 1 << 1 | 1 << 5;
    /// IBV_ODP_SUPPORT_WRITE
    const WRITE: u32 = 1 << 2;
    /// IBV_ODP_SUPPORT_READ, ATOMIC, FLUSH, ATOMIC_WRITE
    const ANSWERS: u32 = 1 << 3 | 1 << 4 | 1 << 6 | 1 << 7;
    if !memory::safe_copies_work() {
        return OdpCaps::default();
    }
    let rc = MESSAGES | WRITE | ANSWERS;
    let xrc = if CAP_FLAGS & DEVICE_XRC != 0 { rc } else { 0 };
    /* IBV_ODP_SUPPORT, IBV_ODP_SUPPORT_IMPLICIT */
    OdpCaps { general: 3, rc, uc: MESSAGES | WRITE, ud: MESSAGES, xrc }
}

fn port_attr(active_mtu: Mtu, mbps: Option<u32>) -> PortAttr {
    let (active_width, active_speed) = width_and_speed(mbps);
    PortAttr {
        state: 4,
        max_mtu: Mtu::M4096,
        active_mtu,
        gid_tbl_len: GID_TBL_LEN,
        port_cap_flags: PORT_CAP_FLAGS,
        max_msg_sz: MAX_MSG,
        bad_pkey_cntr: 0,
        qkey_viol_cntr: 0,
        pkey_tbl_len: 1,
        lid: 0,
        sm_lid: 0,
        lmc: 0,
        max_vl_num: 1,
        sm_sl: 0,
        subnet_timeout: 0,
        init_type_reply: 0,
        active_width,
        active_speed,
        phys_state: 5,
        link_layer: 2,
        flags: 1,
        port_cap_flags2: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(loopback: bool, link_mtu: u32) -> HostAddr {
        HostAddr { gid: Gid::default(), ifindex: 1, link_mtu, name: "x0".to_owned(), loopback }
    }

    #[test]
    fn mtu_is_that_of_the_smallest_real_interface() {
        let mut settings = Settings::default();
        let (lo, jumbo, plain) = (addr(true, 65536), addr(false, 9000), addr(false, 1500));
        assert_eq!(active_mtu(&settings, std::slice::from_ref(&lo)), Mtu::M4096);
        assert_eq!(active_mtu(&settings, &[jumbo.clone(), lo.clone()]), Mtu::M4096);
        assert_eq!(active_mtu(&settings, &[jumbo, plain, lo.clone()]), Mtu::M1024);
        settings.mtu = Some(512);
        assert_eq!(active_mtu(&settings, &[lo]), Mtu::M512);
    }

    #[test]
    fn lanes_are_as_fast_as_the_link() {
        let gbps = |(width, speed): (u8, u8)| {
            let lanes =
                [(1, 1), (2, 4), (16, 2)].into_iter().find(|(code, _)| *code == width).map(|(_, n)| n);
            let each = [(1, 2.5), (2, 5.0), (8, 10.0), (32, 25.0), (64, 50.0), (128, 100.0)];
            each.into_iter().find(|(code, _)| *code == speed).map(|(_, g)| g * f64::from(lanes.unwrap_or(0)))
        };
        for (mbps, want) in [(10, 2.5), (1000, 2.5), (10_000, 10.0), (25_000, 25.0), (40_000, 40.0)] {
            assert_eq!(gbps(width_and_speed(Some(mbps))), Some(want));
        }
        for (mbps, want) in [(50_000, 50.0), (100_000, 100.0), (200_000, 200.0), (400_000, 400.0)] {
            assert_eq!(gbps(width_and_speed(Some(mbps))), Some(want));
        }
        assert_eq!(gbps(width_and_speed(None)), Some(100.0));
    }

    #[test]
    fn what_is_told_fits_the_memory() {
        let limits_of = |memory: u64| {
            let limits = CardLimits::fitting(memory - CARD_BYTES);
            attr(1, 0, &limits, memory)
        };
        let (much, some, little) = (limits_of(64 << 30), limits_of(8 << 30), limits_of(64 << 20));
        assert_eq!((much.max_qp, much.max_cq, much.max_mr), (1 << 20, 1 << 20, 1 << 20));
        assert_eq!((much.max_qp_wr, much.max_cqe), (MAX_QP_WR, MAX_CQE));
        assert_eq!((some.max_qp_wr, some.max_cqe), (MAX_QP_WR, MAX_CQE));
        assert!((300_000..400_000).contains(&some.max_qp) && some.max_mr == 1 << 20);
        assert_eq!((little.max_qp_wr, little.max_cqe), (1 << 16, 1 << 18));
        assert!((2000..3000).contains(&little.max_qp));
        assert_eq!(limits_of(CARD_BYTES).max_qp, 1, "always something");
    }

    /// `ibv_rc_pingpong -m 4096` between two processes of a host whose Ethernet has 1500 bytes.
    #[test]
    fn paths_within_the_host_carry_more_than_the_port() {
        let mut settings = Settings::default();
        let info = |settings: &Settings| {
            let addrs = vec![addr(false, 1500)];
            let port = port_attr(active_mtu(settings, &addrs), None);
            let (limits, memory) = (CardLimits::default(), u64::MAX);
            let attr = attr(1, 0, &limits, memory);
            DeviceInfo { attr, limits, memory, port, addrs, local_mtu: mtu_cap(settings) }
        };
        let (here, there) = (Gid::default(), Gid::from_ipv4([192, 0, 2, 9]));
        assert_eq!(info(&settings).path_mtu(&there), Mtu::M1024);
        assert_eq!(info(&settings).path_mtu(&here), Mtu::M4096);
        settings.mtu = Some(512);
        assert_eq!(info(&settings).path_mtu(&here), Mtu::M512);
    }
}
