//! Attributes as the board's commands have them.

use starverbs_core::mr::MrAttr;
use starverbs_core::qp::{PathMig, QpAttr};
use starverbs_core::{Access, Av, Gid, Mtu, PdId, Psn, QpState};
use starverbs_queues::board::{self, Address, Region};

use crate::error::{Result, VerbsError};

/// What is wrong with a device that answers something else.
const BROKEN: VerbsError = VerbsError::Os(libc::EIO);

pub(super) fn address(av: &Av) -> Address {
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

fn av(address: &Address) -> Av {
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

pub(super) fn attr(from: &QpAttr) -> board::QpAttr {
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

/// EIO: a state or an MTU that there is not.
pub(super) fn decode_attr(from: &board::QpAttr) -> Result<QpAttr> {
    let state = |code: u8| QpState::from_code(code.into()).ok_or(BROKEN);
    Ok(QpAttr {
        state: state(from.state)?,
        cur_state: state(from.cur_state)?,
        path_mtu: Mtu::from_code(from.path_mtu.into()).ok_or(BROKEN)?,
        qkey: from.qkey,
        rq_psn: Psn::new(from.rq_psn),
        sq_psn: Psn::new(from.sq_psn),
        dest_qpn: from.dest_qpn,
        access: Access::from_bits_truncate(from.access),
        av: av(&from.address),
        pkey_index: from.pkey_index,
        port_num: from.port_num,
        max_rd_atomic: from.max_rd_atomic,
        max_dest_rd_atomic: from.max_dest_rd_atomic,
        min_rnr_timer: from.min_rnr_timer,
        timeout: from.timeout,
        retry_cnt: from.retry_cnt,
        rnr_retry: from.rnr_retry,
        path_mig: PathMig::from_code(from.path_mig.into()).ok_or(BROKEN)?,
        en_sqd_async_notify: from.en_sqd_async_notify != 0,
        sq_draining: from.sq_draining != 0,
    })
}

pub(super) fn region(key: u32, attr: &MrAttr) -> Region {
    let MrAttr { pd, addr, length, iova, access, .. } = *attr;
    Region { key, pd: pd.0, access: access.bits(), pieces: 0, addr, length, iova }
}

pub(super) fn decode_region(from: &Region) -> MrAttr {
    let Region { pd, access, addr, length, iova, .. } = *from;
    let access = Access::from_bits_truncate(access);
    MrAttr { pd: PdId(pd), addr, length, iova, access, ..MrAttr::default() }
}
