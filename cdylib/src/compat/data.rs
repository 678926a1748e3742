//! The data path of IBVERBS_1.0: the functions of an old context's table.
//!
//! A work request is put in today's layout on the stack, one after the other: nothing is allocated.

use super::layout::{OldAh, OldCq, OldQp, OldRecvWr, OldSendWr, OldSrq};
use super::{Old, forward};
use crate::handle::zeroed;
use crate::{cq, poll, post};
use core::ffi::c_int;
use starverbs_abi as abi;

forward! {
    /// ibv_poll_cq(3): completions have kept their layout.
    poll_cq(OldCq, entries: c_int, out: *mut abi::ibv_wc) => poll::poll_cq;
    /// ibv_req_notify_cq(3)
    req_notify_cq(OldCq, solicited_only: c_int) => cq::req_notify_cq;
}

/// A send work request in today's layout.
///
/// # Safety
/// `from` is a work request on the terms of ibv_post_send(3).
#[inline]
unsafe fn send_wr(from: *const OldSendWr, datagram: bool) -> abi::ibv_send_wr {
    // SAFETY: numbers, pointers and unions of them: zero is valid.
    let mut to: abi::ibv_send_wr = unsafe { zeroed() };
    // SAFETY: the caller's terms; what the operation gives no meaning is copied and not looked at.
    unsafe {
        to.wr_id = (*from).wr_id;
        to.sg_list = (*from).sg_list;
        to.num_sge = (*from).num_sge;
        to.opcode = (*from).opcode;
        to.send_flags = (*from).send_flags;
        to.__bindgen_anon_1.imm_data = (*from).imm_data;
        to.wr = (*from).wr;
        if datagram {
            to.wr.ud.ah = OldAh::real(to.wr.ud.ah.cast());
        }
    }
    to
}

/// A receive work request in today's layout.
///
/// # Safety
/// `from` is a work request on the terms of ibv_post_recv(3).
#[inline]
unsafe fn recv_wr(from: *const OldRecvWr) -> abi::ibv_recv_wr {
    // SAFETY: the caller's terms.
    let (wr_id, sg_list, num_sge) = unsafe { ((*from).wr_id, (*from).sg_list, (*from).num_sge) };
    abi::ibv_recv_wr { wr_id, next: core::ptr::null_mut(), sg_list, num_sge }
}

/// ibv_post_send(3)
pub(super) unsafe extern "C" fn post_send(
    qp: *mut OldQp,
    first: *mut OldSendWr,
    bad: *mut *mut OldSendWr,
) -> c_int {
    // SAFETY: the verb's terms.
    unsafe {
        post::send_list(
            Old::real(qp),
            first,
            bad,
            |wr| (*wr).next,
            |wr, kind| {
                let datagram = kind == abi::IBV_QPT_UD;
                post::send_wr(&send_wr(wr, datagram), datagram)
            },
        )
    }
}

/// ibv_post_recv(3)
pub(super) unsafe extern "C" fn post_recv(
    qp: *mut OldQp,
    first: *mut OldRecvWr,
    bad: *mut *mut OldRecvWr,
) -> c_int {
    // SAFETY: the verb's terms.
    unsafe { post::recv_list(Old::real(qp), first, bad, |wr| (*wr).next, |wr| post::recv_wr(&recv_wr(wr))) }
}

/// ibv_post_srq_recv(3)
pub(super) unsafe extern "C" fn post_srq_recv(
    srq: *mut OldSrq,
    first: *mut OldRecvWr,
    bad: *mut *mut OldRecvWr,
) -> c_int {
    // SAFETY: the verb's terms.
    unsafe {
        post::srq_recv_list(Old::real(srq), first, bad, |wr| (*wr).next, |wr| post::recv_wr(&recv_wr(wr)))
    }
}
