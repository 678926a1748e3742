//! Queue pairs and shared receive queues of an id, and the completion queues that come with them.
//!
//! Owns who made which of them: what the library made it ends. It must not know which attributes a transition
//! takes.

use super::attr;
use super::device::{self, last_errno, made};
use super::id::IdHandle;
use super::multicast;
use crate::edge::{self, Errno};
use crate::handle::{beginning, given, zeroed};
use crate::{cq, events, qp as verbs, srq};
use core::ffi::c_int;
use core::mem::offset_of;
use core::ptr::null_mut;
use starverbs_abi as abi;

/// A verb's int result.
fn done(result: c_int) -> Result<(), Errno> {
    if result == 0 { Ok(()) } else { Err(result) }
}

/// Brings the id's queue pair to a state.
///
/// # Safety
/// The queue pair is alive.
unsafe fn to_state(id: &IdHandle, to: abi::ibv_qp_state) -> Result<(), Errno> {
    let qp = given(id.qp())?.as_ptr();
    // SAFETY: the caller's terms.
    unsafe {
        let (mut attr, mask) = attr::attributes(&id.state(), (*qp).qp_type, to)?;
        done(verbs::modify_qp(qp, &mut attr, mask))
    }
}

/// Brings the id's queue pair from INIT to RTS, towards its peer.
///
/// # Safety
/// As `to_error`.
pub(super) unsafe fn to_rts(id: &IdHandle) -> Result<(), Errno> {
    let _held = id.hold_qp();
    // SAFETY: the caller's terms.
    unsafe {
        // Once more, with the rights that the connection gives.
        to_state(id, abi::IBV_QPS_INIT)?;
        to_state(id, abi::IBV_QPS_RTR)?;
        to_state(id, abi::IBV_QPS_RTS)
    }
}

/// Brings the id's queue pair, if it has one, to ERR.
///
/// # Safety
/// The queue pair is alive, unless a call of this library ends it meanwhile.
pub(super) unsafe fn to_error(id: &IdHandle) {
    // SAFETY: an ibv_qp_attr is numbers: zero is valid.
    let mut attr: abi::ibv_qp_attr = unsafe { zeroed() };
    attr.qp_state = abi::IBV_QPS_ERR;
    let _held = id.hold_qp();
    if !id.qp().is_null() {
        // SAFETY: the caller's terms.
        unsafe { verbs::modify_qp(id.qp(), &mut attr, abi::IBV_QP_STATE as c_int) };
    }
}

/// Whether the id has a queue pair, for the threads of events.
pub(super) fn is_there(id: &IdHandle) -> bool {
    let _held = id.hold_qp();
    !id.qp().is_null()
}

/// A completion queue of the id's own, and its channel.
type Own = (*mut abi::ibv_comp_channel, *mut abi::ibv_cq);

/// # Safety
/// The id is bound.
unsafe fn create_cq(id: &IdHandle, entries: u32) -> Result<Own, Errno> {
    let public = id.public();
    // SAFETY: the caller's terms.
    unsafe {
        let context = (*public).verbs;
        let channel = made(events::create_comp_channel(context))?;
        let entries = c_int::try_from(entries.max(1)).map_err(|_| libc::EINVAL)?;
        let queue = cq::create_cq(context, entries, public.cast(), channel, 0);
        made(queue).map(|queue| (channel, queue)).inspect_err(|_| {
            events::destroy_comp_channel(channel);
        })
    }
}

/// The id's own completion queue for sends or for receives, made now if there is none.
///
/// # Safety
/// The id is bound.
unsafe fn own_cq(
    id: &IdHandle,
    (channel, queue): (&mut *mut abi::ibv_comp_channel, &mut *mut abi::ibv_cq),
    entries: u32,
) -> Result<*mut abi::ibv_cq, Errno> {
    if queue.is_null() {
        // SAFETY: the caller's terms.
        (*channel, *queue) = unsafe { create_cq(id, entries)? };
    }
    Ok(*queue)
}

/// The protection domain to make something in: the id's own unless the program says another.
///
/// # Errors
/// EINVAL: it is another device's.
///
/// # Safety
/// The id is bound; `pd` is NULL or alive if it `is_said`.
unsafe fn pd_for(id: &IdHandle, is_said: bool, pd: *mut abi::ibv_pd) -> Result<*mut abi::ibv_pd, Errno> {
    let public = id.public();
    // SAFETY: the caller's terms.
    unsafe {
        if !is_said || pd.is_null() {
            return Ok((*public).pd);
        }
        if (*pd).context == (*public).verbs { Ok(pd) } else { Err(libc::EINVAL) }
    }
}

/// The XRC domain to make something in: the library's own unless the program says another.
fn xrcd_for(is_said: bool, xrcd: *mut abi::ibv_xrcd) -> Result<*mut abi::ibv_xrcd, Errno> {
    if is_said && !xrcd.is_null() { Ok(xrcd) } else { device::default_xrcd() }
}

/// Attributes of a program, whose struct may end at byte `first`, in front of the fields that came later,
/// unless it has those.
///
/// # Safety
/// As said; any bytes are a valid `T`.
unsafe fn said<T>(init: *const T, has_later: bool, first: usize) -> T {
    // SAFETY: the caller's terms.
    unsafe { beginning(init, if has_later { size_of::<T>() } else { first }) }
}

/// Ends the completion queues that were made for the id's queue pair or shared receive queue.
///
/// # Safety
/// Neither is left.
unsafe fn destroy_cqs(id: &IdHandle) {
    let public = id.public();
    // SAFETY: made by `create_cq`; the caller's terms.
    unsafe {
        for (channel, queue) in [
            (&mut (*public).recv_cq_channel, &mut (*public).recv_cq),
            (&mut (*public).send_cq_channel, &mut (*public).send_cq),
        ] {
            // One that the program made has no channel here.
            if !channel.is_null() {
                cq::destroy_cq(*queue);
                events::destroy_comp_channel(*channel);
            }
            (*queue, *channel) = (null_mut(), null_mut());
        }
    }
}

/// Makes those completion queues that the program did not give.
///
/// # Safety
/// The id is bound.
unsafe fn add_cqs(id: &IdHandle, init: &mut abi::ibv_qp_init_attr_ex) -> Result<(), Errno> {
    let public = id.public();
    // SAFETY: the caller's terms.
    unsafe {
        if init.qp_type == abi::IBV_QPT_XRC_RECV {
            return Ok(());
        }
        if init.send_cq.is_null() {
            let own = (&mut (*public).send_cq_channel, &mut (*public).send_cq);
            init.send_cq = own_cq(id, own, init.cap.max_send_wr)?;
        }
        if init.recv_cq.is_null() && init.qp_type != abi::IBV_QPT_XRC_SEND {
            let own = (&mut (*public).recv_cq_channel, &mut (*public).recv_cq);
            init.recv_cq = own_cq(id, own, init.cap.max_recv_wr)?;
        }
        if init.srq.is_null() && init.qp_type != abi::IBV_QPT_XRC_SEND {
            init.srq = (*public).srq;
        }
    }
    Ok(())
}

/// Makes the id's queue pair, ready for receives, one for datagrams for sends, too.
///
/// # Errors
/// EINVAL: the id is not bound, has one, or is for another transport; and those of ibv_create_qp_ex(3).
///
/// # Safety
/// The attributes' objects are NULL or alive.
pub(super) unsafe fn create(id: &IdHandle, init: &mut abi::ibv_qp_init_attr_ex) -> Result<(), Errno> {
    let device = id.device()?;
    let public = id.public();
    if !id.qp().is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller's terms.
    unsafe {
        init.pd = pd_for(id, init.comp_mask & abi::IBV_QP_INIT_ATTR_PD != 0, init.pd)?;
        init.comp_mask |= abi::IBV_QP_INIT_ATTR_PD;
        if init.qp_type == abi::IBV_QPT_XRC_RECV {
            init.xrcd = xrcd_for(init.comp_mask & abi::IBV_QP_INIT_ATTR_XRCD != 0, init.xrcd)?;
            init.comp_mask |= abi::IBV_QP_INIT_ATTR_XRCD;
        }
        let built = add_cqs(id, init).and_then(|()| made(verbs::create_qp_ex(device.context, init)));
        let qp = built.inspect_err(|_| drop_cqs(id))?;
        {
            let _held = id.hold_qp();
            (*public).qp = qp;
        }
        let ready = if init.qp_type == abi::IBV_QPT_UD {
            to_state(id, abi::IBV_QPS_INIT)
                .and_then(|()| to_state(id, abi::IBV_QPS_RTR))
                .and_then(|()| to_state(id, abi::IBV_QPS_RTS))
        } else {
            to_state(id, abi::IBV_QPS_INIT)
        };
        if let Err(error) = ready {
            destroy(id);
            return Err(error);
        }
        (*public).pd = init.pd;
        (*public).qp_type = init.qp_type;
    }
    Ok(())
}

/// Ends the completion queues, unless a shared receive queue uses them.
///
/// # Safety
/// The id has no queue pair.
unsafe fn drop_cqs(id: &IdHandle) {
    // SAFETY: a field of the public struct; the caller's terms.
    unsafe {
        if (*id.public()).srq.is_null() {
            destroy_cqs(id);
        }
    }
}

/// Ends the id's queue pair, which leaves its multicast groups, and what was made for it.
///
/// # Safety
/// It is alive, and the program gives it up.
pub(super) unsafe fn destroy(id: &IdHandle) {
    let held = id.hold_qp();
    multicast::detach_all(id);
    // SAFETY: the caller's terms. Destroying may wait for whoever is to acknowledge an event: nothing is
    // held.
    unsafe {
        let qp = core::mem::replace(&mut (*id.public()).qp, null_mut());
        drop(held);
        verbs::destroy_qp(qp);
        drop_cqs(id);
    }
}

/// Attributes of ibv_create_qp(3) as those of ibv_create_qp_ex(3).
pub(super) fn extended(init: &abi::ibv_qp_init_attr, pd: *mut abi::ibv_pd) -> abi::ibv_qp_init_attr_ex {
    // SAFETY: numbers and pointers: zero is valid.
    let mut to: abi::ibv_qp_init_attr_ex = unsafe { zeroed() };
    to.qp_context = init.qp_context;
    (to.send_cq, to.recv_cq, to.srq) = (init.send_cq, init.recv_cq, init.srq);
    (to.cap, to.qp_type, to.sq_sig_all) = (init.cap, init.qp_type, init.sq_sig_all);
    (to.comp_mask, to.pd) = (abi::IBV_QP_INIT_ATTR_PD, pd);
    to
}

/// rdma_create_qp(3).
pub(crate) unsafe extern "C" fn create_qp(
    id: *mut abi::rdma_cm_id,
    pd: *mut abi::ibv_pd,
    init: *mut abi::ibv_qp_init_attr,
) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms.
        unsafe {
            let (handle, init) = (IdHandle::of(id)?, init.as_mut().ok_or(libc::EINVAL)?);
            let mut asked = extended(init, pd);
            create(handle, &mut asked)?;
            init.cap = asked.cap;
        }
        Ok(())
    })
}

/// rdma_create_qp_ex: as rdma_create_qp(3), with the attributes of ibv_create_qp_ex(3).
pub(crate) unsafe extern "C" fn create_qp_ex(
    id: *mut abi::rdma_cm_id,
    init: *mut abi::ibv_qp_init_attr_ex,
) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms; the attributes may end before those that came later, of which only those
        // of send operations are used.
        unsafe {
            let (handle, init) = (IdHandle::of(id)?, given(init)?.as_ptr());
            let later = (*init).comp_mask & abi::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0;
            let mut asked = said(init, later, offset_of!(abi::ibv_qp_init_attr_ex, max_tso_header));
            create(handle, &mut asked)?;
            (*init).cap = asked.cap;
        }
        Ok(())
    })
}

/// rdma_destroy_qp(3).
pub(crate) unsafe extern "C" fn destroy_qp(id: *mut abi::rdma_cm_id) {
    edge::value((), || {
        // SAFETY: the call's terms.
        unsafe {
            if let Ok(handle) = IdHandle::of(id)
                && !handle.qp().is_null()
            {
                destroy(handle);
            }
        }
    });
}

/// rdma_init_qp_attr(3): the state that is asked for is in `attr`.
pub(crate) unsafe extern "C" fn init_qp_attr(
    id: *mut abi::rdma_cm_id,
    attr: *mut abi::ibv_qp_attr,
    mask: *mut c_int,
) -> c_int {
    edge::minus_one(|| {
        let (to, to_mask) = (given(attr)?.as_ptr(), given(mask)?.as_ptr());
        // SAFETY: the call's terms; a program's struct may end before the last field, which came later.
        unsafe {
            let handle = IdHandle::of(id)?;
            handle.device()?;
            let (found, found_mask) =
                attr::attributes(&handle.state(), (*handle.public()).qp_type, (*to).qp_state)?;
            crate::query::put_prefix(&found, to, offset_of!(abi::ibv_qp_attr, rate_limit));
            to_mask.write(found_mask);
        }
        Ok(())
    })
}

/// rdma_create_srq(3): an XRC queue for an id that receives by XRC.
pub(crate) unsafe extern "C" fn create_srq(
    id: *mut abi::rdma_cm_id,
    pd: *mut abi::ibv_pd,
    init: *mut abi::ibv_srq_init_attr,
) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms; numbers and pointers: zero is valid.
        unsafe {
            let (handle, init) = (IdHandle::of(id)?, init.as_mut().ok_or(libc::EINVAL)?);
            let mut asked: abi::ibv_srq_init_attr_ex = zeroed();
            (asked.srq_context, asked.attr) = (init.srq_context, init.attr);
            (asked.comp_mask, asked.pd) = (abi::IBV_SRQ_INIT_ATTR_PD, pd);
            if (*handle.public()).qp_type == abi::IBV_QPT_XRC_RECV {
                asked.comp_mask |= abi::IBV_SRQ_INIT_ATTR_TYPE;
                asked.srq_type = abi::IBV_SRQT_XRC;
            }
            add_srq(handle, &mut asked)?;
            init.attr = asked.attr;
        }
        Ok(())
    })
}

/// rdma_create_srq_ex: as rdma_create_srq(3), with the attributes of ibv_create_srq_ex(3). An XRC queue gets
/// the default domain and a completion queue if none is given.
pub(crate) unsafe extern "C" fn create_srq_ex(
    id: *mut abi::rdma_cm_id,
    init: *mut abi::ibv_srq_init_attr_ex,
) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms; the last field came later, and is there if it is named.
        unsafe {
            let (handle, init) = (IdHandle::of(id)?, given(init)?.as_ptr());
            let later = (*init).comp_mask & abi::IBV_SRQ_INIT_ATTR_TM != 0;
            let mut asked = said(init, later, offset_of!(abi::ibv_srq_init_attr_ex, tm_cap));
            add_srq(handle, &mut asked)?;
            (*init).attr = asked.attr;
        }
        Ok(())
    })
}

/// # Safety
/// The attributes' objects are NULL or alive.
unsafe fn add_srq(id: &IdHandle, init: &mut abi::ibv_srq_init_attr_ex) -> Result<(), Errno> {
    let device = id.device()?;
    let public = id.public();
    // SAFETY: the caller's terms.
    unsafe {
        if !(*public).srq.is_null() {
            return Err(libc::EINVAL);
        }
        init.pd = pd_for(id, init.comp_mask & abi::IBV_SRQ_INIT_ATTR_PD != 0, init.pd)?;
        init.comp_mask |= abi::IBV_SRQ_INIT_ATTR_PD;
        let xrc = init.comp_mask & abi::IBV_SRQ_INIT_ATTR_TYPE != 0 && init.srq_type == abi::IBV_SRQT_XRC;
        if xrc {
            init.xrcd = xrcd_for(init.comp_mask & abi::IBV_SRQ_INIT_ATTR_XRCD != 0, init.xrcd)?;
            init.comp_mask |= abi::IBV_SRQ_INIT_ATTR_XRCD;
        }
        if xrc && (init.comp_mask & abi::IBV_SRQ_INIT_ATTR_CQ == 0 || init.cq.is_null()) {
            let own = (&mut (*public).recv_cq_channel, &mut (*public).recv_cq);
            init.comp_mask |= abi::IBV_SRQ_INIT_ATTR_CQ;
            init.cq = own_cq(id, own, init.attr.max_wr)?;
        }
        let srq = srq::create_srq_ex(device.context, init);
        if srq.is_null() {
            let error = last_errno();
            if id.qp().is_null() {
                destroy_cqs(id);
            }
            return Err(error);
        }
        ((*public).srq, (*public).pd) = (srq, init.pd);
    }
    Ok(())
}

/// rdma_destroy_srq.
pub(crate) unsafe extern "C" fn destroy_srq(id: *mut abi::rdma_cm_id) {
    edge::value((), || {
        // SAFETY: the call's terms.
        unsafe {
            let Ok(handle) = IdHandle::of(id) else { return };
            let srq = core::mem::replace(&mut (*id).srq, null_mut());
            if !srq.is_null() {
                srq::destroy_srq(srq);
                if handle.qp().is_null() {
                    destroy_cqs(handle);
                }
            }
        }
    });
}
