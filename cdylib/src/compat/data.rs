//! The data path of IBVERBS_1.0: the functions of an old context's table.
//!
//! A work request is put in today's layout on the stack, one after the other: nothing is allocated.

use super::forward;
use super::layout::{OldAh, OldCq, OldQp, OldRecvWr, OldSendWr, OldSrq};
use crate::edge::Errno;
use crate::handle::zeroed;
use crate::post::WorkRequest;
use crate::{cq, poll, post};
use core::ffi::c_int;
use starverbs_abi as abi;
use starverbs_core::types::QpType;
use starverbs_verbs::{RecvWr, SendWr};

forward! {
    /// ibv_poll_cq(3): completions have kept their layout.
    poll_cq(OldCq, entries: c_int, out: *mut abi::ibv_wc) => poll::poll_cq;
    /// ibv_req_notify_cq(3)
    req_notify_cq(OldCq, solicited_only: c_int) => cq::req_notify_cq;
    /// ibv_post_send(3)
    post_send(OldQp, first: *mut OldSendWr, bad: *mut *mut OldSendWr) => post::post_send;
    /// ibv_post_recv(3)
    post_recv(OldQp, first: *mut OldRecvWr, bad: *mut *mut OldRecvWr) => post::post_recv;
    /// ibv_post_srq_recv(3)
    post_srq_recv(OldSrq, first: *mut OldRecvWr, bad: *mut *mut OldRecvWr) => post::post_srq_recv;
}

impl WorkRequest for OldSendWr {
    type Wr<'a> = SendWr<'a>;

    #[inline]
    unsafe fn next(at: *mut Self) -> *mut Self {
        // SAFETY: the caller's terms.
        unsafe { (*at).next }
    }

    #[inline]
    unsafe fn read<'a>(at: *mut Self, kind: QpType) -> Result<SendWr<'a>, Errno> {
        // SAFETY: numbers, pointers and unions of them: zero is valid.
        let mut today: abi::ibv_send_wr = unsafe { zeroed() };
        // SAFETY: the caller's terms; what the operation gives no meaning is copied and not looked at.
        unsafe {
            today.wr_id = (*at).wr_id;
            today.sg_list = (*at).sg_list;
            today.num_sge = (*at).num_sge;
            today.opcode = (*at).opcode;
            today.send_flags = (*at).send_flags;
            today.__bindgen_anon_1.imm_data = (*at).imm_data;
            today.wr = (*at).wr;
            if kind == QpType::Ud {
                today.wr.ud.ah = OldAh::real(today.wr.ud.ah.cast());
            }
            abi::ibv_send_wr::read(&mut today, kind)
        }
    }
}

impl WorkRequest for OldRecvWr {
    type Wr<'a> = RecvWr<'a>;

    #[inline]
    unsafe fn next(at: *mut Self) -> *mut Self {
        // SAFETY: the caller's terms.
        unsafe { (*at).next }
    }

    #[inline]
    unsafe fn read<'a>(at: *mut Self, kind: QpType) -> Result<RecvWr<'a>, Errno> {
        let next = core::ptr::null_mut();
        // SAFETY: the caller's terms.
        unsafe {
            let (wr_id, sg_list, num_sge) = ((*at).wr_id, (*at).sg_list, (*at).num_sge);
            abi::ibv_recv_wr::read(&mut abi::ibv_recv_wr { wr_id, next, sg_list, num_sge }, kind)
        }
    }
}
