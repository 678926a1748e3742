//! Attributes as a board's commands have them (`starverbs_queues::board`): for who asks, and for the board.

use starverbs_queues::board::{self, Address, Region};

use crate::mr::MrAttr;
use crate::qp::{PathMig, QpAttr, QpAttrMask};
use crate::types::{Access, Av, Gid, Mtu, PdId, Psn, QpState};

/// A path.
pub fn address(av: &Av) -> Address {
    Address {
        dgid: av.dgid.0,
        sgid: av.sgid.0,
        flow_label: av.flow_label,
        dlid: av.dlid,
        sgid_index: av.sgid_index,
        hop_limit: av.hop_limit,
        traffic_class: av.traffic_class,
        sl: av.sl,
        static_rate: av.static_rate,
        src_path_bits: av.src_path_bits,
    }
}

/// The same, decoded. Nothing of it is checked.
pub fn decode_address(address: &Address) -> Av {
    Av {
        dgid: Gid(address.dgid),
        sgid: Gid(address.sgid),
        sgid_index: address.sgid_index,
        hop_limit: address.hop_limit,
        traffic_class: address.traffic_class,
        sl: address.sl,
        flow_label: address.flow_label,
        dlid: address.dlid,
        static_rate: address.static_rate,
        src_path_bits: address.src_path_bits,
    }
}

/// Attributes of a queue pair.
pub fn attr(from: &QpAttr) -> board::QpAttr {
    board::QpAttr {
        state: from.state as u8,
        cur_state: from.cur_state as u8,
        path_mtu: from.path_mtu as u8,
        path_mig: from.path_mig as u8,
        qkey: from.qkey,
        rq_psn: from.rq_psn.get(),
        sq_psn: from.sq_psn.get(),
        dest_qpn: from.dest_qpn,
        access: from.access.bits(),
        pkey_index: from.pkey_index,
        port_num: from.port_num,
        max_rd_atomic: from.max_rd_atomic,
        max_dest_rd_atomic: from.max_dest_rd_atomic,
        min_rnr_timer: from.min_rnr_timer,
        timeout: from.timeout,
        retry_cnt: from.retry_cnt,
        rnr_retry: from.rnr_retry,
        en_sqd_async_notify: from.en_sqd_async_notify.into(),
        sq_draining: from.sq_draining.into(),
        reserved: 0,
        address: address(&from.av),
    }
}

/// The same, decoded; those that `mask` does not name are not looked at. `None`: a state, an MTU or a
/// migration state that there is not.
pub fn decode_attr(from: &board::QpAttr, mask: QpAttrMask) -> Option<QpAttr> {
    fn named<T: Default>(decoded: Option<T>, named: bool) -> Option<T> {
        if named { decoded } else { Some(decoded.unwrap_or_default()) }
    }
    let state = |code: u8| QpState::from_code(code.into());
    let path_mtu = Mtu::from_code(from.path_mtu.into());
    let path_mig = PathMig::from_code(from.path_mig.into());
    Some(QpAttr {
        state: named(state(from.state), mask.contains(QpAttrMask::STATE))?,
        cur_state: named(state(from.cur_state), mask.contains(QpAttrMask::CUR_STATE))?,
        path_mtu: named(path_mtu, mask.contains(QpAttrMask::PATH_MTU))?,
        path_mig: named(path_mig, mask.contains(QpAttrMask::PATH_MIG_STATE))?,
        qkey: from.qkey,
        rq_psn: Psn::new(from.rq_psn),
        sq_psn: Psn::new(from.sq_psn),
        dest_qpn: from.dest_qpn,
        access: Access::from_bits_truncate(from.access),
        av: decode_address(&from.address),
        pkey_index: from.pkey_index,
        port_num: from.port_num,
        max_rd_atomic: from.max_rd_atomic,
        max_dest_rd_atomic: from.max_dest_rd_atomic,
        min_rnr_timer: from.min_rnr_timer,
        timeout: from.timeout,
        retry_cnt: from.retry_cnt,
        rnr_retry: from.rnr_retry,
        en_sqd_async_notify: from.en_sqd_async_notify != 0,
        sq_draining: from.sq_draining != 0,
    })
}

/// A memory region, without pieces.
pub fn region(key: u32, attr: &MrAttr) -> Region {
    let MrAttr { pd, addr, length, iova, access, .. } = *attr;
    Region { key, pd: pd.0, access: access.bits(), addr, length, iova, ..Region::default() }
}

/// The same, decoded.
pub fn decode_region(from: &Region) -> MrAttr {
    let Region { pd, access, addr, length, iova, .. } = *from;
    let access = Access::from_bits_truncate(access);
    MrAttr { pd: PdId(pd), addr, length, iova, access, ..MrAttr::default() }
}
