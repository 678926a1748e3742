//! `struct ibv_qp_attr` and `struct ibv_qp_init_attr` in the card's words, and back.
//!
//! Owns that translation. It must not know which transition needs which attribute: the card's table does.

use crate::ah::{ah_attr_in, ah_attr_out};
use crate::edge::Errno;
use crate::handle::zeroed;
use crate::stardv::qp::CREATE_FLAGS;
use core::ffi::c_int;
use starverbs_abi as abi;
use starverbs_core::qp::{PathMig, QpAttrMask};
use starverbs_core::types::{Access, Mtu, Psn, QPN_MASK, QpState, QpType};
use starverbs_verbs::{QpAttr, QpCaps};

/// The transport of `enum ibv_qp_type`; EOPNOTSUPP for those the card does not offer.
pub(crate) fn qp_type(code: abi::ibv_qp_type) -> Result<QpType, Errno> {
    match code {
        abi::IBV_QPT_RC => Ok(QpType::Rc),
        abi::IBV_QPT_UC => Ok(QpType::Uc),
        abi::IBV_QPT_UD => Ok(QpType::Ud),
        abi::IBV_QPT_XRC_SEND => Ok(QpType::XrcSend),
        abi::IBV_QPT_XRC_RECV => Ok(QpType::XrcRecv),
        abi::IBV_QPT_RAW_PACKET | abi::IBV_QPT_DRIVER => Err(libc::EOPNOTSUPP),
        _ => Err(libc::EINVAL),
    }
}

/// Copies the attributes that are the same numbers in both structs.
macro_rules! same_numbers {
    ($from:expr => $to:expr) => {
        same_numbers!(@ $from => $to; qkey, pkey_index, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer,
            port_num, timeout, retry_cnt, rnr_retry)
    };
    (@ $from:expr => $to:expr; $($field:ident),+) => { $($to.$field = $from.$field;)+ };
}

/// The attributes that `mask` names. Fields it does not name may hold anything: numbers are taken along, and
/// nobody looks at them.
pub(crate) fn attr_in(from: &abi::ibv_qp_attr, mask: c_int) -> Result<(QpAttr, QpAttrMask), Errno> {
    let mask = QpAttrMask::from_bits(mask as u32).ok_or(libc::EINVAL)?;
    let has = |bit| mask.contains(bit);
    let mut to = QpAttr::default();
    if has(QpAttrMask::STATE) {
        to.state = QpState::from_code(from.qp_state).ok_or(libc::EINVAL)?;
    }
    if has(QpAttrMask::CUR_STATE) {
        to.cur_state = QpState::from_code(from.cur_qp_state).ok_or(libc::EINVAL)?;
    }
    if has(QpAttrMask::PATH_MTU) {
        to.path_mtu = Mtu::from_code(from.path_mtu).ok_or(libc::EINVAL)?;
    }
    if has(QpAttrMask::ACCESS_FLAGS) {
        to.access = Access::from_bits(from.qp_access_flags).ok_or(libc::EINVAL)?;
    }
    if has(QpAttrMask::DEST_QPN) {
        to.dest_qpn = Some(from.dest_qp_num).filter(|&n| n <= QPN_MASK).ok_or(libc::EINVAL)?;
    }
    if has(QpAttrMask::AV) {
        to.av = ah_attr_in(&from.ah_attr);
    }
    if has(QpAttrMask::PATH_MIG_STATE) {
        to.path_mig = PathMig::from_code(from.path_mig_state).ok_or(libc::EINVAL)?;
    }
    same_numbers!(from => to);
    to.rq_psn = Psn::new(from.rq_psn);
    to.sq_psn = Psn::new(from.sq_psn);
    to.en_sqd_async_notify = from.en_sqd_async_notify != 0;
    Ok((to, mask))
}

/// Whether `IBV_QP_CREATE_*` flags make sense for a QP, for ibv_create_qp_ex(3): EINVAL for flags that are
/// none, and for multicast's on a transport without it. Which of them the card offers is said elsewhere: not
/// those of Ethernet frames (SCATTER_FCS, CVLAN_STRIPPING), of a PCI bus (PCI_WRITE_END_PADDING), or of
/// another QP's number, as nobody would receive under it without flow steering (SOURCE_QPN).
pub(crate) fn check_create_flags(init: &abi::ibv_qp_init_attr_ex) -> Result<(), Errno> {
    let known = abi::IBV_QP_CREATE_BLOCK_SELF_MCAST_LB
        | abi::IBV_QP_CREATE_SCATTER_FCS
        | abi::IBV_QP_CREATE_CVLAN_STRIPPING
        | abi::IBV_QP_CREATE_SOURCE_QPN
        | abi::IBV_QP_CREATE_PCI_WRITE_END_PADDING
        | CREATE_FLAGS;
    let flags = create_flags(init);
    let multicast = flags & abi::IBV_QP_CREATE_BLOCK_SELF_MCAST_LB != 0;
    if flags & !known != 0 || (multicast && init.qp_type != abi::IBV_QPT_UD) {
        return Err(libc::EINVAL);
    }
    Ok(())
}

/// The `IBV_QP_CREATE_*` flags, if any are given.
pub(crate) fn create_flags(init: &abi::ibv_qp_init_attr_ex) -> u32 {
    if init.comp_mask & abi::IBV_QP_INIT_ATTR_CREATE_FLAGS != 0 { init.create_flags } else { 0 }
}

/// A QP's capabilities in C's words.
pub(crate) fn cap(from: &QpCaps) -> abi::ibv_qp_cap {
    abi::ibv_qp_cap {
        max_send_wr: from.max_send_wr,
        max_recv_wr: from.max_recv_wr,
        max_send_sge: from.max_send_sge,
        max_recv_sge: from.max_recv_sge,
        max_inline_data: from.max_inline,
    }
}

/// All attributes in C's words.
pub(crate) fn attr_out(from: &QpAttr, caps: &QpCaps) -> abi::ibv_qp_attr {
    // SAFETY: an ibv_qp_attr is numbers: zero is valid.
    let mut to: abi::ibv_qp_attr = unsafe { zeroed() };
    to.qp_state = from.state as abi::ibv_qp_state;
    to.cur_qp_state = from.cur_state as abi::ibv_qp_state;
    to.path_mtu = from.path_mtu as abi::ibv_mtu;
    to.path_mig_state = from.path_mig as abi::ibv_mig_state;
    same_numbers!(from => to);
    to.rq_psn = from.rq_psn.get();
    to.sq_psn = from.sq_psn.get();
    to.dest_qp_num = from.dest_qpn;
    to.qp_access_flags = from.access.bits();
    to.cap = cap(caps);
    to.ah_attr = ah_attr_out(&from.av);
    to.en_sqd_async_notify = u8::from(from.en_sqd_async_notify);
    to.sq_draining = u8::from(from.sq_draining);
    to
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zero() -> abi::ibv_qp_attr {
        // SAFETY: numbers: zero is valid.
        unsafe { zeroed() }
    }

    #[test]
    fn named_attributes_are_checked_and_others_are_not() {
        let mut attr = zero();
        attr.path_mtu = 99;
        attr.qp_state = abi::IBV_QPS_RTR;
        let (read, mask) = attr_in(&attr, abi::IBV_QP_STATE as c_int).expect("only the state is named");
        assert_eq!((read.state, mask), (QpState::Rtr, QpAttrMask::STATE));
        for (field, bit) in [
            ("path_mtu", abi::IBV_QP_PATH_MTU),
            ("qp_state", abi::IBV_QP_STATE),
            ("access", abi::IBV_QP_ACCESS_FLAGS),
            ("dest_qpn", abi::IBV_QP_DEST_QPN),
            ("mask", 1 << 30),
        ] {
            let mut attr = zero();
            (attr.path_mtu, attr.qp_state, attr.qp_access_flags, attr.dest_qp_num) = (6, 7, 1 << 15, 1 << 24);
            assert_eq!(attr_in(&attr, bit as c_int).err(), Some(libc::EINVAL), "{field}");
        }
    }

    #[test]
    fn creation_flags_that_make_no_sense_are_invalid() {
        // SAFETY: numbers and pointers: zero is valid.
        let mut init: abi::ibv_qp_init_attr_ex = unsafe { zeroed() };
        (init.qp_type, init.create_flags) = (abi::IBV_QPT_RC, abi::IBV_QP_CREATE_BLOCK_SELF_MCAST_LB);
        assert_eq!(check_create_flags(&init), Ok(()), "not said to be valid");
        init.comp_mask = abi::IBV_QP_INIT_ATTR_CREATE_FLAGS;
        assert_eq!(check_create_flags(&init), Err(libc::EINVAL));
        init.qp_type = abi::IBV_QPT_UD;
        assert_eq!(check_create_flags(&init), Ok(()));
        init.create_flags = abi::IBV_QP_CREATE_SOURCE_QPN;
        assert_eq!(check_create_flags(&init), Ok(()), "a flag, if none of this card's");
        init.create_flags = 1 << 20;
        assert_eq!(check_create_flags(&init), Err(libc::EINVAL));
    }

    #[test]
    fn attributes_survive_both_translations() {
        let mut attr = zero();
        attr.qp_state = abi::IBV_QPS_RTS;
        attr.path_mtu = abi::IBV_MTU_4096;
        (attr.rq_psn, attr.sq_psn, attr.dest_qp_num, attr.qkey) = (1, 2, 3, 4);
        (attr.max_rd_atomic, attr.max_dest_rd_atomic, attr.min_rnr_timer, attr.timeout) = (5, 6, 7, 8);
        (attr.retry_cnt, attr.rnr_retry, attr.port_num, attr.qp_access_flags) = (6, 7, 1, 0xf);
        attr.ah_attr.grh.dgid.raw = [9; 16];
        let named = abi::IBV_QP_STATE
            | abi::IBV_QP_PATH_MTU
            | abi::IBV_QP_ACCESS_FLAGS
            | abi::IBV_QP_DEST_QPN
            | abi::IBV_QP_AV;
        let (read, _) = attr_in(&attr, named as c_int).expect("all values are in range");
        let caps =
            QpCaps { max_send_wr: 16, max_recv_wr: 17, max_send_sge: 1, max_recv_sge: 2, max_inline: 64 };
        let back = attr_out(&read, &caps);
        assert_eq!((back.qp_state, back.path_mtu, back.qp_access_flags), (3, 5, 0xf));
        assert_eq!((back.rq_psn, back.sq_psn, back.dest_qp_num, back.qkey), (1, 2, 3, 4));
        assert_eq!(
            (back.max_rd_atomic, back.max_dest_rd_atomic, back.min_rnr_timer, back.timeout),
            (5, 6, 7, 8)
        );
        assert_eq!((back.retry_cnt, back.rnr_retry, back.port_num, back.cap.max_inline_data), (6, 7, 1, 64));
        // SAFETY: every member of the union is 16 plain bytes.
        assert_eq!(unsafe { back.ah_attr.grh.dgid.raw }[15], 9);
    }

    #[test]
    fn transports_that_are_not_offered_are_refused() {
        assert_eq!(qp_type(abi::IBV_QPT_RC), Ok(QpType::Rc));
        assert_eq!(qp_type(abi::IBV_QPT_RAW_PACKET), Err(libc::EOPNOTSUPP));
        assert_eq!(qp_type(77), Err(libc::EINVAL));
    }
}
