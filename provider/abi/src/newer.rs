//! What releases after 44 added to `<infiniband/verbs.h>`, as far as the card has it. Programs that were built with
//! their headers load the same library.

#![allow(missing_docs, non_camel_case_types)]

use crate::ibv_qp_ex as older;

pub const IBV_WC_FLUSH: crate::ibv_wc_opcode = 8;
pub const IBV_WR_FLUSH: crate::ibv_wr_opcode = 14;
pub const IBV_ACCESS_FLUSH_GLOBAL: u32 = 1 << 8;
pub const IBV_ACCESS_FLUSH_PERSISTENT: u32 = 1 << 9;
pub const IBV_QP_EX_WITH_FLUSH: u64 = 1 << 11;

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
