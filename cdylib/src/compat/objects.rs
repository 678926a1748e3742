//! The objects of IBVERBS_1.0: made around today's, queried, changed and ended.

use super::layout::{
    CqFields, MrFields, OldAh, OldChannel, OldContext, OldCq, OldMr, OldPd, OldQp, OldSrq, PdFields,
    PdObjectFields, QpFields, SrqFields,
};
use super::{Old, end, forward};
use crate::handle::zeroed;
use crate::{ah, cq, pd_mr, qp, srq};
use core::ffi::{c_int, c_void};
use core::ptr::null_mut;
use starverbs_abi as abi;

/// ibv_alloc_pd(3) at IBVERBS_1.0.
pub(crate) unsafe extern "C" fn alloc_pd(context: *mut OldContext) -> *mut OldPd {
    let public = PdFields { context, handle: 0 };
    // SAFETY: the verb's terms.
    unsafe {
        Old::make(public, |_| pd_mr::alloc_pd(Old::real(context)), |public, real| public.handle = real.handle)
    }
}

/// The context of a domain with which an object was made: not NULL.
///
/// # Safety
/// `pd` is alive.
unsafe fn context(pd: *mut OldPd) -> *mut OldContext {
    // SAFETY: the caller's terms.
    unsafe { (*pd).public.context }
}

/// ibv_reg_mr(3) at IBVERBS_1.0.
pub(crate) unsafe extern "C" fn reg_mr(
    pd: *mut OldPd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut OldMr {
    let public = MrFields { context: null_mut(), pd, handle: 0, lkey: 0, rkey: 0 };
    // SAFETY: the verb's terms.
    unsafe {
        Old::make(
            public,
            |_| pd_mr::reg_mr(Old::real(pd), addr, length, access),
            |public, real| {
                public.context = context(pd);
                (public.handle, public.lkey, public.rkey) = (real.handle, real.lkey, real.rkey);
            },
        )
    }
}

/// ibv_create_ah(3) at IBVERBS_1.0.
pub(crate) unsafe extern "C" fn create_ah(pd: *mut OldPd, attr: *mut abi::ibv_ah_attr) -> *mut OldAh {
    let public = PdObjectFields { context: null_mut(), pd, handle: 0 };
    // SAFETY: the verb's terms.
    unsafe {
        Old::make(
            public,
            |_| ah::create_ah(Old::real(pd), attr),
            |public, real| {
                public.context = context(pd);
                public.handle = real.handle;
            },
        )
    }
}

/// ibv_create_cq(3) at IBVERBS_1.0.
pub(crate) unsafe extern "C" fn create_cq(
    context: *mut OldContext,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut OldChannel,
    comp_vector: c_int,
) -> *mut OldCq {
    // SAFETY: numbers, pointers and pthread fields: zero is valid.
    let zero: CqFields = unsafe { zeroed() };
    let public = CqFields { context, cq_context, ..zero };
    // SAFETY: the verb's terms.
    unsafe {
        Old::make(
            public,
            |name| cq::create_cq(Old::real(context), cqe, name, Old::real(channel), comp_vector),
            |public, real| (public.handle, public.cqe) = (real.handle, real.cqe),
        )
    }
}

/// ibv_resize_cq(3) at IBVERBS_1.0.
pub(crate) unsafe extern "C" fn resize_cq(cq: *mut OldCq, cqe: c_int) -> c_int {
    // SAFETY: the verb's terms; NULL fails.
    unsafe {
        let real = Old::real(cq);
        let failed = cq::resize_cq(real, cqe);
        if failed == 0 {
            (*cq).public.cqe = (*real).cqe;
        }
        failed
    }
}

/// ibv_create_srq(3) at IBVERBS_1.0.
pub(crate) unsafe extern "C" fn create_srq(pd: *mut OldPd, init: *mut abi::ibv_srq_init_attr) -> *mut OldSrq {
    // SAFETY: numbers, pointers and pthread fields: zero is valid.
    let zero: SrqFields = unsafe { zeroed() };
    let public = SrqFields { pd, ..zero };
    // SAFETY: the verb's terms.
    unsafe {
        Old::make(
            public,
            |name| {
                let Some(init) = init.as_mut() else { return srq::create_srq(Old::real(pd), init) };
                let mut asked = abi::ibv_srq_init_attr { srq_context: name, ..*init };
                let made = srq::create_srq(Old::real(pd), &mut asked);
                init.attr = asked.attr;
                made
            },
            |public, real| {
                public.context = context(pd);
                public.srq_context = (*init).srq_context;
                public.handle = real.handle;
            },
        )
    }
}

/// ibv_create_qp(3) at IBVERBS_1.0. The objects that the attributes name are old ones.
pub(crate) unsafe extern "C" fn create_qp(pd: *mut OldPd, init: *mut abi::ibv_qp_init_attr) -> *mut OldQp {
    // SAFETY: numbers, pointers and pthread fields: zero is valid.
    let zero: QpFields = unsafe { zeroed() };
    let public = QpFields { pd, ..zero };
    // SAFETY: the verb's terms.
    unsafe {
        Old::make(
            public,
            |name| {
                let Some(init) = init.as_mut() else { return qp::create_qp(Old::real(pd), init) };
                let mut asked = *init;
                asked.qp_context = name;
                asked.send_cq = OldCq::real(init.send_cq.cast());
                asked.recv_cq = OldCq::real(init.recv_cq.cast());
                asked.srq = OldSrq::real(init.srq.cast());
                let made = qp::create_qp(Old::real(pd), &mut asked);
                init.cap = asked.cap;
                made
            },
            |public, real| {
                public.context = context(pd);
                public.qp_context = (*init).qp_context;
                (public.send_cq, public.recv_cq) = ((*init).send_cq.cast(), (*init).recv_cq.cast());
                public.srq = (*init).srq.cast();
                (public.handle, public.qp_num) = (real.handle, real.qp_num);
                (public.state, public.qp_type) = (real.state, real.qp_type);
            },
        )
    }
}

/// ibv_modify_qp(3) at IBVERBS_1.0.
pub(crate) unsafe extern "C" fn modify_qp(qp: *mut OldQp, attr: *mut abi::ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: the verb's terms; NULL fails.
    unsafe {
        let real = Old::real(qp);
        let failed = qp::modify_qp(real, attr, mask);
        if failed == 0 {
            (*qp).public.state = (*real).state;
        }
        failed
    }
}

/// ibv_query_qp(3) at IBVERBS_1.0.
pub(crate) unsafe extern "C" fn query_qp(
    qp: *mut OldQp,
    attr: *mut abi::ibv_qp_attr,
    mask: c_int,
    init: *mut abi::ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the verb's terms; NULL fails.
    unsafe {
        let real = Old::real(qp);
        let failed = qp::query_qp(real, attr, mask, init);
        if failed == 0 {
            let public = &mut (*qp).public;
            public.state = (*real).state;
            if let Some(init) = init.as_mut() {
                init.qp_context = public.qp_context;
                (init.send_cq, init.recv_cq) = (public.send_cq.cast(), public.recv_cq.cast());
                init.srq = public.srq.cast();
            }
        }
        failed
    }
}

end! {
    /// ibv_dealloc_pd(3) at IBVERBS_1.0.
    dealloc_pd(OldPd) => pd_mr::dealloc_pd;
    /// ibv_dereg_mr(3) at IBVERBS_1.0.
    dereg_mr(OldMr) => pd_mr::dereg_mr;
    /// ibv_destroy_ah(3) at IBVERBS_1.0.
    destroy_ah(OldAh) => ah::destroy_ah;
    /// ibv_destroy_cq(3) at IBVERBS_1.0.
    destroy_cq(OldCq) => cq::destroy_cq;
    /// ibv_destroy_srq(3) at IBVERBS_1.0.
    destroy_srq(OldSrq) => srq::destroy_srq;
    /// ibv_destroy_qp(3) at IBVERBS_1.0.
    destroy_qp(OldQp) => qp::destroy_qp;
}

forward! {
    /// ibv_modify_srq(3) at IBVERBS_1.0.
    modify_srq(OldSrq, attr: *mut abi::ibv_srq_attr, mask: c_int) => srq::modify_srq;
    /// ibv_query_srq(3) at IBVERBS_1.0.
    query_srq(OldSrq, attr: *mut abi::ibv_srq_attr) => srq::query_srq;
    /// ibv_attach_mcast(3) at IBVERBS_1.0.
    attach_mcast(OldQp, gid: *const abi::ibv_gid, lid: u16) => qp::attach_mcast;
    /// ibv_detach_mcast(3) at IBVERBS_1.0.
    detach_mcast(OldQp, gid: *const abi::ibv_gid, lid: u16) => qp::detach_mcast;
}
