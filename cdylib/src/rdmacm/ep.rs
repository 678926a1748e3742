//! Endpoints: an id, its addresses and its queue pair in one call (rdma_create_ep(3), rdma_get_request(3)).
//!
//! Owns the order of the calls that make one up. It must not know what they do.

use super::event;
use super::id::{self, EndpointAttr, IdHandle};
use super::{device, option, qp, resolve};
use crate::edge::{self, Errno};
use crate::handle::given;
use core::ffi::c_int;
use core::ptr::null_mut;
use starverbs_abi as abi;

/// Time to resolve an address, or a route, ms. (Neither takes any.)
const TIMEOUT: c_int = 2000;

/// What a call of this library returned: 0, or -1 with errno.
fn done(result: c_int) -> Result<(), Errno> {
    if result == 0 { Ok(()) } else { Err(device::last_errno()) }
}

/// Gives a new id what `res` says.
///
/// # Safety
/// On the terms of rdma_create_ep(3).
unsafe fn equip(
    id: *mut abi::rdma_cm_id,
    res: &abi::rdma_addrinfo,
    pd: *mut abi::ibv_pd,
    init: *mut abi::ibv_qp_init_attr,
) -> Result<(), Errno> {
    // SAFETY: the caller's terms; the id is alive.
    unsafe {
        let handle = IdHandle::of(id)?;
        if res.ai_flags as u32 & abi::RAI_PASSIVE != 0 {
            done(resolve::bind_addr(id, res.ai_src_addr.cast()))?;
            if let Some(init) = init.as_mut() {
                init.qp_type = (*id).qp_type;
                handle.state().endpoint = Some(EndpointAttr { pd, init: *init });
            }
            return Ok(());
        }
        done(resolve::resolve_addr(id, res.ai_src_addr.cast(), res.ai_dst_addr.cast(), TIMEOUT))?;
        if res.ai_route_len > 0 {
            let (level, name) = (abi::RDMA_OPTION_IB as c_int, abi::RDMA_OPTION_IB_PATH as c_int);
            done(option::set_option(id, level, name, res.ai_route, res.ai_route_len))?;
        } else {
            done(resolve::resolve_route(id, TIMEOUT))?;
        }
        if let Some(init) = init.as_mut() {
            init.qp_type = (*id).qp_type;
            done(qp::create_qp(id, pd, init))?;
        }
        if res.ai_connect_len > 0 && !res.ai_connect.is_null() {
            let data = core::slice::from_raw_parts(res.ai_connect.cast::<u8>(), res.ai_connect_len);
            handle.state().connect_data = data.to_vec();
        }
    }
    Ok(())
}

/// rdma_create_ep(3).
pub(crate) unsafe extern "C" fn create_ep(
    to: *mut *mut abi::rdma_cm_id,
    res: *mut abi::rdma_addrinfo,
    pd: *mut abi::ibv_pd,
    init: *mut abi::ibv_qp_init_attr,
) -> c_int {
    edge::minus_one(|| {
        let to = given(to)?;
        // SAFETY: the call's terms.
        unsafe {
            let res = res.as_ref().ok_or(libc::EINVAL)?;
            let space = id::port_space(res.ai_port_space as u32)?;
            let qp_type = res.ai_qp_type as abi::ibv_qp_type;
            let id = IdHandle::make(null_mut(), None, null_mut(), space, qp_type)?;
            if let Err(error) = equip(id, res, pd, init) {
                destroy_ep(id);
                return Err(error);
            }
            to.write(id);
        }
        Ok(())
    })
}

/// rdma_destroy_ep(3).
pub(crate) unsafe extern "C" fn destroy_ep(id: *mut abi::rdma_cm_id) {
    // SAFETY: the call's terms.
    unsafe {
        qp::destroy_qp(id);
        qp::destroy_srq(id);
        id::destroy_id(id);
    }
}

/// rdma_get_request(3).
pub(crate) unsafe extern "C" fn get_request(
    listen: *mut abi::rdma_cm_id,
    to: *mut *mut abi::rdma_cm_id,
) -> c_int {
    edge::minus_one(|| {
        let to = given(to)?;
        // SAFETY: the call's terms.
        unsafe {
            let listener = IdHandle::of(listen)?;
            if !listener.is_sync() {
                return Err(libc::EINVAL);
            }
            listener.shared.ours()?;
            event::forget(listener);
            let queue = listener.shared.queue();
            let news = event::next(&queue)?;
            if (*news).event != abi::RDMA_CM_EVENT_CONNECT_REQUEST {
                let status = (*news).status.abs();
                event::ack_cm_event(news);
                return Err(if status == 0 { libc::EINVAL } else { status });
            }
            let id = (*news).id;
            let endpoint = listener.state().endpoint;
            if let Some(EndpointAttr { pd, mut init }) = endpoint {
                init.qp_type = (*id).qp_type;
                if let Err(error) = qp::create(IdHandle::of(id)?, &mut qp::extended(&init, pd)) {
                    event::ack_cm_event(news);
                    id::destroy_id(id);
                    return Err(error);
                }
            }
            (*id).event = news;
            to.write(id);
        }
        Ok(())
    })
}
