//! ibv_copy_*_kern: addresses, queue pairs and path records as the kernel hands them to librdmacm, in
//! verbs.h's words.
//!
//! Owns the kernel's structs (rdma/ib_user_verbs.h, rdma/ib_user_sa.h), which `starverbs-abi` does not have.
//! It must not know any object.

use crate::handle::zeroed;
use core::ffi::c_int;
use core::mem::offset_of;
use starverbs_abi::{self as abi, ibv_sa_path_rec};

/// `struct ib_uverbs_ah_attr`, its route in front.
#[repr(C)]
pub(crate) struct KernelAhAttr {
    dgid: [u8; 16],
    flow_label: u32,
    sgid_index: u8,
    hop_limit: u8,
    traffic_class: u8,
    reserved_grh: u8,
    dlid: u16,
    sl: u8,
    src_path_bits: u8,
    static_rate: u8,
    is_global: u8,
    port_num: u8,
    reserved: u8,
}

/// `struct ib_uverbs_qp_attr`
#[repr(C)]
pub(crate) struct KernelQpAttr {
    qp_attr_mask: u32,
    qp_state: u32,
    cur_qp_state: u32,
    path_mtu: u32,
    path_mig_state: u32,
    qkey: u32,
    rq_psn: u32,
    sq_psn: u32,
    dest_qp_num: u32,
    qp_access_flags: u32,
    ah_attr: KernelAhAttr,
    alt_ah_attr: KernelAhAttr,
    cap: abi::ibv_qp_cap,
    pkey_index: u16,
    alt_pkey_index: u16,
    en_sqd_async_notify: u8,
    sq_draining: u8,
    max_rd_atomic: u8,
    max_dest_rd_atomic: u8,
    min_rnr_timer: u8,
    port_num: u8,
    timeout: u8,
    retry_cnt: u8,
    rnr_retry: u8,
    alt_port_num: u8,
    alt_timeout: u8,
    reserved: [u8; 5],
}

/// `struct ib_user_path_rec`; LIDs, flow label and P_Key in network byte order, here and there.
#[repr(C)]
pub(crate) struct KernelPathRec {
    dgid: [u8; 16],
    sgid: [u8; 16],
    dlid: u16,
    slid: u16,
    raw_traffic: u32,
    flow_label: u32,
    reversible: u32,
    mtu: u32,
    pkey: u16,
    hop_limit: u8,
    traffic_class: u8,
    numb_path: u8,
    sl: u8,
    mtu_selector: u8,
    rate_selector: u8,
    rate: u8,
    packet_life_time_selector: u8,
    packet_life_time: u8,
    preference: u8,
}

fn ah_attr(from: &KernelAhAttr) -> abi::ibv_ah_attr {
    // SAFETY: an ibv_ah_attr is numbers: zero is valid.
    let mut to: abi::ibv_ah_attr = unsafe { zeroed() };
    to.grh.dgid = abi::ibv_gid { raw: from.dgid };
    to.grh.flow_label = from.flow_label;
    to.grh.sgid_index = from.sgid_index;
    to.grh.hop_limit = from.hop_limit;
    to.grh.traffic_class = from.traffic_class;
    to.dlid = from.dlid;
    to.sl = from.sl;
    to.src_path_bits = from.src_path_bits;
    to.static_rate = from.static_rate;
    to.is_global = from.is_global;
    to.port_num = from.port_num;
    to
}

fn qp_attr(from: &KernelQpAttr) -> abi::ibv_qp_attr {
    abi::ibv_qp_attr {
        qp_state: from.qp_state,
        cur_qp_state: from.cur_qp_state,
        path_mtu: from.path_mtu,
        path_mig_state: from.path_mig_state,
        qkey: from.qkey,
        rq_psn: from.rq_psn,
        sq_psn: from.sq_psn,
        dest_qp_num: from.dest_qp_num,
        qp_access_flags: from.qp_access_flags,
        cap: from.cap,
        ah_attr: ah_attr(&from.ah_attr),
        alt_ah_attr: ah_attr(&from.alt_ah_attr),
        pkey_index: from.pkey_index,
        alt_pkey_index: from.alt_pkey_index,
        en_sqd_async_notify: from.en_sqd_async_notify,
        sq_draining: from.sq_draining,
        max_rd_atomic: from.max_rd_atomic,
        max_dest_rd_atomic: from.max_dest_rd_atomic,
        min_rnr_timer: from.min_rnr_timer,
        port_num: from.port_num,
        timeout: from.timeout,
        retry_cnt: from.retry_cnt,
        rnr_retry: from.rnr_retry,
        alt_port_num: from.alt_port_num,
        alt_timeout: from.alt_timeout,
        rate_limit: 0,
    }
}

/// ibv_copy_ah_attr_from_kern
pub(crate) unsafe extern "C" fn copy_ah_attr_from_kern(to: *mut abi::ibv_ah_attr, from: *const KernelAhAttr) {
    // SAFETY: the caller passes both structs.
    unsafe { to.write(ah_attr(&*from)) };
}

/// ibv_copy_qp_attr_from_kern: without `rate_limit`, which older programs have no room for.
pub(crate) unsafe extern "C" fn copy_qp_attr_from_kern(to: *mut abi::ibv_qp_attr, from: *const KernelQpAttr) {
    // SAFETY: the caller passes both structs, its own at least up to that field.
    unsafe {
        let room = offset_of!(abi::ibv_qp_attr, rate_limit);
        crate::query::put_prefix(&qp_attr(&*from), to, room);
    };
}

/// A path record with these fields of its own, and those that both kinds have alike from `$from`.
macro_rules! path_rec {
    ($from:expr => $to:ident { $($own:ident $(: $value:expr)?),+ $(,)? }) => {
        path_rec!(@ $from => $to { $($own $(: $value)?),+ } dlid, slid, flow_label, hop_limit, traffic_class,
            numb_path, pkey, sl, mtu_selector, rate_selector, rate, packet_life_time_selector,
            packet_life_time, preference)
    };
    (@ $from:expr => $to:ident { $($own:ident $(: $value:expr)?),+ } $($same:ident),+) => {
        $to { $($own $(: $value)?,)+ $($same: $from.$same),+ }
    };
}

/// ibv_copy_path_rec_from_kern
pub(crate) unsafe extern "C" fn copy_path_rec_from_kern(
    to: *mut ibv_sa_path_rec,
    from: *const KernelPathRec,
) {
    // SAFETY: the caller passes both structs.
    let from = unsafe { &*from };
    let rec = path_rec!(from => ibv_sa_path_rec {
        dgid: abi::ibv_gid { raw: from.dgid },
        sgid: abi::ibv_gid { raw: from.sgid },
        raw_traffic: from.raw_traffic as c_int,
        reversible: from.reversible as c_int,
        mtu: from.mtu as u8,
    });
    // SAFETY: as above.
    unsafe { to.write(rec) };
}

/// ibv_copy_path_rec_to_kern
pub(crate) unsafe extern "C" fn copy_path_rec_to_kern(to: *mut KernelPathRec, from: *const ibv_sa_path_rec) {
    // SAFETY: the caller passes both structs; every member of the unions is 16 plain bytes.
    let (from, dgid, sgid) = unsafe { (&*from, (*from).dgid.raw, (*from).sgid.raw) };
    let rec = path_rec!(from => KernelPathRec {
        dgid,
        sgid,
        raw_traffic: from.raw_traffic as u32,
        reversible: from.reversible as u32,
        mtu: u32::from(from.mtu),
    });
    // SAFETY: as above.
    unsafe { to.write(rec) };
}
