//! Attributes of an id's queue pair, state by state (rdma_init_qp_attr(3), IBTA volume 1, 12.9).
//!
//! Owns which attributes a connection gives for each transition. It must not change a queue pair.

use super::address;
use super::device;
use super::id::IdState;
use crate::edge::Errno;
use crate::handle::zeroed;
use core::ffi::c_int;
use starverbs_abi as abi;
use starverbs_core::types::Gid;

/// How long packets live on the way, an exponent of 4.096 us: what Linux takes for Ethernet, which has nobody
/// to ask.
pub(super) const PACKET_LIFE_TIME: u8 = 16;
/// Routers on the way, at most.
const HOP_LIMIT: u8 = 64;

/// The local ACK timeout for a peer that takes so long for an ACK (IBTA 12.7.34): twice the packet's life
/// time, and the delay, both exponents.
pub(super) fn ack_timeout(ack_delay: u8) -> u8 {
    let way = PACKET_LIFE_TIME + 1;
    let (long, short) = (way.max(ack_delay), way.min(ack_delay));
    (long + u8::from(long - short <= 1)).min(31)
}

/// The index of this side's GID.
fn sgid_index(state: &IdState) -> u8 {
    let gid: Option<Gid> = state.local.map(|local| address::gid(local.ip()));
    let table = || device::open().and_then(|d| d.card().map(|card| card.gid_table())).ok();
    gid.and_then(|gid| table()?.into_iter().find(|entry| entry.gid == gid))
        .and_then(|entry| u8::try_from(entry.index).ok())
        .unwrap_or(0)
}

/// The address of this GID, as seen from the id's.
pub(super) fn address_of(state: &IdState, dgid: Gid) -> abi::ibv_ah_attr {
    // SAFETY: an ibv_ah_attr is numbers: zero is valid.
    let mut to: abi::ibv_ah_attr = unsafe { zeroed() };
    to.is_global = 1;
    to.port_num = 1;
    to.grh.dgid = abi::ibv_gid { raw: dgid.0 };
    to.grh.sgid_index = sgid_index(state);
    to.grh.hop_limit = state.way.map(|way| way.hop_limit).filter(|&hops| hops > 0).unwrap_or(HOP_LIMIT);
    to.grh.traffic_class = traffic_class(state);
    to
}

/// The address of the other side.
pub(super) fn address(state: &IdState) -> abi::ibv_ah_attr {
    address_of(state, state.remote.map(|remote| address::gid(remote.ip())).unwrap_or_default())
}

/// IP type of service: the program's, or the peer's.
pub(super) fn traffic_class(state: &IdState) -> u8 {
    state.options.tos.or(state.way.map(|way| way.traffic_class)).unwrap_or(0)
}

/// The attributes that bring a queue pair of this transport to `to`, and their mask.
///
/// # Errors
/// EINVAL: no connection has such a state, or the peer has not said what it needs.
pub(super) fn attributes(
    state: &IdState,
    qp_type: abi::ibv_qp_type,
    to: abi::ibv_qp_state,
) -> Result<(abi::ibv_qp_attr, c_int), Errno> {
    // SAFETY: an ibv_qp_attr is numbers: zero is valid.
    let mut attr: abi::ibv_qp_attr = unsafe { zeroed() };
    attr.qp_state = to;
    let more = match (to, qp_type) {
        (abi::IBV_QPS_INIT, _) => init(state, qp_type, &mut attr),
        (abi::IBV_QPS_RTR, abi::IBV_QPT_UD) => 0,
        (abi::IBV_QPS_RTS, abi::IBV_QPT_UD) => {
            attr.sq_psn = state.psn.get();
            abi::IBV_QP_SQ_PSN
        }
        (abi::IBV_QPS_RTR, _) => rtr(state, qp_type, &mut attr)?,
        (abi::IBV_QPS_RTS, _) => rts(state, qp_type, &mut attr)?,
        _ => return Err(libc::EINVAL),
    };
    Ok((attr, (abi::IBV_QP_STATE | more) as c_int))
}

fn init(state: &IdState, qp_type: abi::ibv_qp_type, attr: &mut abi::ibv_qp_attr) -> u32 {
    attr.port_num = 1;
    let mask = abi::IBV_QP_PKEY_INDEX | abi::IBV_QP_PORT;
    if qp_type == abi::IBV_QPT_UD {
        attr.qkey = abi::RDMA_UDP_QKEY;
        return mask | abi::IBV_QP_QKEY;
    }
    // Before there is a connection the peer has no rights.
    if state.conn.is_some() {
        attr.qp_access_flags = abi::IBV_ACCESS_REMOTE_WRITE;
        if state.responder_resources > 0 {
            attr.qp_access_flags |= abi::IBV_ACCESS_REMOTE_READ | abi::IBV_ACCESS_REMOTE_ATOMIC;
        }
    }
    mask | abi::IBV_QP_ACCESS_FLAGS
}

fn rtr(state: &IdState, qp_type: abi::ibv_qp_type, attr: &mut abi::ibv_qp_attr) -> Result<u32, Errno> {
    let (peer, way) = (state.peer.ok_or(libc::EINVAL)?, state.way.ok_or(libc::EINVAL)?);
    attr.ah_attr = address(state);
    attr.path_mtu = way.mtu as abi::ibv_mtu;
    attr.dest_qp_num = peer.qp.qpn;
    // The PSN that a side names is where the other begins (IBTA 12.7.31).
    attr.rq_psn = state.psn.get();
    let mask = abi::IBV_QP_AV | abi::IBV_QP_PATH_MTU | abi::IBV_QP_DEST_QPN | abi::IBV_QP_RQ_PSN;
    if !matches!(qp_type, abi::IBV_QPT_RC | abi::IBV_QPT_XRC_RECV) {
        return Ok(mask);
    }
    attr.max_dest_rd_atomic = state.responder_resources;
    // rdma_connect(3): 655 ms
    attr.min_rnr_timer = 0;
    Ok(mask | abi::IBV_QP_MAX_DEST_RD_ATOMIC | abi::IBV_QP_MIN_RNR_TIMER)
}

fn rts(state: &IdState, qp_type: abi::ibv_qp_type, attr: &mut abi::ibv_qp_attr) -> Result<u32, Errno> {
    let peer = state.peer.ok_or(libc::EINVAL)?;
    attr.sq_psn = peer.qp.psn.get();
    let mut mask = abi::IBV_QP_SQ_PSN;
    if matches!(qp_type, abi::IBV_QPT_RC | abi::IBV_QPT_XRC_SEND) {
        attr.retry_cnt = peer.retry;
        attr.rnr_retry = peer.rnr_retry;
        attr.max_rd_atomic = state.initiator_depth;
        mask |= abi::IBV_QP_RETRY_CNT | abi::IBV_QP_RNR_RETRY | abi::IBV_QP_MAX_QP_RD_ATOMIC;
    }
    if qp_type != abi::IBV_QPT_UC {
        attr.timeout = state.options.ack_timeout.unwrap_or(peer.ack_timeout);
        mask |= abi::IBV_QP_TIMEOUT;
    }
    Ok(mask)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// IBTA 12.7.34 by way of what Linux makes of it.
    #[test]
    fn timeouts_cover_the_way_and_the_delay() {
        assert_eq!(ack_timeout(0), 17);
        assert_eq!(ack_timeout(15), 17);
        assert_eq!((ack_timeout(16), ack_timeout(17)), (18, 18));
        assert_eq!((ack_timeout(18), ack_timeout(19), ack_timeout(31)), (19, 19, 31));
    }
}
