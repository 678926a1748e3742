//! The structs of libibverbs 1.0's verbs.h that differ from today's.
//!
//! Owns their layout, which C programs of the time have compiled in. It must not know behaviour.

use super::Old;
use core::ffi::{c_int, c_uint, c_void};
use starverbs_abi as abi;

/// `struct ibv_device`: drivers' fields only.
#[repr(C)]
pub(crate) struct OldDevice {
    pub(super) drivers: [usize; 5],
}

pub(crate) type OldContext = Old<ContextFields, abi::ibv_context>;
pub(crate) type OldPd = Old<PdFields, abi::ibv_pd>;
pub(crate) type OldMr = Old<MrFields, abi::ibv_mr>;
pub(crate) type OldAh = Old<PdObjectFields, abi::ibv_ah>;
pub(crate) type OldChannel = Old<ChannelFields, abi::ibv_comp_channel>;
pub(crate) type OldCq = Old<CqFields, abi::ibv_cq>;
pub(crate) type OldSrq = Old<SrqFields, abi::ibv_srq>;
pub(crate) type OldQp = Old<QpFields, abi::ibv_qp>;

/// `struct ibv_context`
#[repr(C)]
pub(crate) struct ContextFields {
    pub(super) device: *const OldDevice,
    pub(super) ops: Ops,
    pub(super) cmd_fd: c_int,
    pub(super) async_fd: c_int,
    pub(super) num_comp_vectors: c_int,
}

/// A driver's function that programs do not call themselves.
type Unused = *const c_void;

/// `struct ibv_context_ops`. Its named functions are those that inlines of verbs.h called.
#[repr(C)]
pub(crate) struct Ops {
    /// query_device to create_cq
    pub(super) unused_1: [Unused; 7],
    pub(super) poll_cq: unsafe extern "C" fn(*mut OldCq, c_int, *mut abi::ibv_wc) -> c_int,
    pub(super) req_notify_cq: unsafe extern "C" fn(*mut OldCq, c_int) -> c_int,
    /// cq_event to destroy_srq
    pub(super) unused_2: [Unused; 7],
    pub(super) post_srq_recv: unsafe extern "C" fn(*mut OldSrq, *mut OldRecvWr, *mut *mut OldRecvWr) -> c_int,
    /// create_qp to destroy_qp
    pub(super) unused_3: [Unused; 4],
    pub(super) post_send: unsafe extern "C" fn(*mut OldQp, *mut OldSendWr, *mut *mut OldSendWr) -> c_int,
    pub(super) post_recv: unsafe extern "C" fn(*mut OldQp, *mut OldRecvWr, *mut *mut OldRecvWr) -> c_int,
    /// create_ah to detach_mcast
    pub(super) unused_4: [Unused; 4],
}

/// `struct ibv_pd`
#[repr(C)]
pub(crate) struct PdFields {
    pub(super) context: *mut OldContext,
    pub(super) handle: u32,
}

/// `struct ibv_ah`
#[repr(C)]
pub(crate) struct PdObjectFields {
    pub(super) context: *mut OldContext,
    pub(super) pd: *mut OldPd,
    pub(super) handle: u32,
}

/// `struct ibv_mr`: without address and length.
#[repr(C)]
pub(crate) struct MrFields {
    pub(super) context: *mut OldContext,
    pub(super) pd: *mut OldPd,
    pub(super) handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// `struct ibv_comp_channel`
#[repr(C)]
pub(crate) struct ChannelFields {
    pub(super) fd: c_int,
}

/// `struct ibv_cq`: without its channel.
#[repr(C)]
pub(crate) struct CqFields {
    pub(super) context: *mut OldContext,
    pub(super) cq_context: *mut c_void,
    pub(super) handle: u32,
    pub(super) cqe: c_int,
    pub(super) mutex: libc::pthread_mutex_t,
    pub(super) cond: libc::pthread_cond_t,
    pub(super) comp_events_completed: u32,
    pub(super) async_events_completed: u32,
}

/// `struct ibv_srq`
#[repr(C)]
pub(crate) struct SrqFields {
    pub(super) context: *mut OldContext,
    pub(super) srq_context: *mut c_void,
    pub(super) pd: *mut OldPd,
    pub(super) handle: u32,
    pub(super) mutex: libc::pthread_mutex_t,
    pub(super) cond: libc::pthread_cond_t,
    pub(super) events_completed: u32,
}

/// `struct ibv_qp`
#[repr(C)]
pub(crate) struct QpFields {
    pub(super) context: *mut OldContext,
    pub(super) qp_context: *mut c_void,
    pub(super) pd: *mut OldPd,
    pub(super) send_cq: *mut OldCq,
    pub(super) recv_cq: *mut OldCq,
    pub(super) srq: *mut OldSrq,
    pub(super) handle: u32,
    pub(super) qp_num: u32,
    pub(super) state: abi::ibv_qp_state,
    pub(super) qp_type: abi::ibv_qp_type,
    pub(super) mutex: libc::pthread_mutex_t,
    pub(super) cond: libc::pthread_cond_t,
    pub(super) events_completed: u32,
}

/// `struct ibv_send_wr`: `next` comes first, and it ends with the operation. In `wr.ud` lies an [`OldAh`].
#[repr(C)]
pub(crate) struct OldSendWr {
    pub(super) next: *mut OldSendWr,
    pub(super) wr_id: u64,
    pub(super) sg_list: *mut abi::ibv_sge,
    pub(super) num_sge: c_int,
    pub(super) opcode: abi::ibv_wr_opcode,
    pub(super) send_flags: c_uint,
    pub(super) imm_data: u32,
    pub(super) wr: abi::ibv_send_wr__bindgen_ty_2,
}

/// `struct ibv_recv_wr`: `next` comes first.
#[repr(C)]
pub(crate) struct OldRecvWr {
    pub(super) next: *mut OldRecvWr,
    pub(super) wr_id: u64,
    pub(super) sg_list: *mut abi::ibv_sge,
    pub(super) num_sge: c_int,
}
