//! What releases after 44 added to `<infiniband/verbs.h>` and `<rdma/rdma_cma.h>`, as far as the card has it.
//! Programs that were built with their headers load the same library.

#![allow(missing_docs, non_camel_case_types)]

use crate::ibv_qp_ex as older;

pub const IBV_WC_FLUSH: crate::ibv_wc_opcode = 8;
pub const IBV_WR_FLUSH: crate::ibv_wr_opcode = 14;
pub const IBV_ACCESS_FLUSH_GLOBAL: u32 = 1 << 8;
pub const IBV_ACCESS_FLUSH_PERSISTENT: u32 = 1 << 9;
pub const IBV_QP_EX_WITH_FLUSH: u64 = 1 << 11;
pub const RDMA_CM_EVENT_ADDRINFO_RESOLVED: crate::rdma_cm_event_type = 16;
pub const RDMA_CM_EVENT_ADDRINFO_ERROR: crate::rdma_cm_event_type = 17;
pub const RDMA_CM_EVENT_USER: crate::rdma_cm_event_type = 18;
pub const RAI_SA: u32 = 0x10;
pub const RAI_DNS: u32 = 0x20;

/// `struct ibv_qp_ex`. The library makes it, so that it may be longer than a program knows.
#[repr(C)]
pub struct ibv_qp_ex {
    pub older: older,
    pub wr_flush: Option<
        unsafe extern "C" fn(
            qp: *mut older,
            rkey: u32,
            remote_addr: u64,
            len: usize,
            placement_type: u8,
            selectivity_level: u8,
        ),
    >,
}

/* `wr_atomic_write`, the last function of release 44, stands directly before it. */
const _: () = {
    let last = core::mem::offset_of!(older, wr_atomic_write) + size_of::<usize>();
    assert!(core::mem::offset_of!(ibv_qp_ex, wr_flush) == last);
};

/// `param` of `struct rdma_cm_event`.
#[repr(C)]
#[derive(Clone, Copy)]
pub union rdma_cm_event_param {
    pub older: crate::rdma_cm_event__bindgen_ty_1,
    pub arg: u64,
}

/* It is no larger than it was. */
const _: () = {
    assert!(size_of::<rdma_cm_event_param>() == size_of::<crate::rdma_cm_event__bindgen_ty_1>());
    assert!(align_of::<rdma_cm_event_param>() == align_of::<crate::rdma_cm_event__bindgen_ty_1>());
};
