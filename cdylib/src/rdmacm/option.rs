//! Options of an id: rdma_set_option(3), and enhanced connection establishment (rdma_set_local_ece(3)).
//!
//! Owns their check. It must not know what they do.

use super::connect::ece_in;
use super::event;
use super::id::{IdHandle, IdStage, PathAttr};
use super::resolve;
use crate::edge::{self, Errno};
use crate::handle::given;
use core::ffi::{c_int, c_void};
use starverbs_abi as abi;
use starverbs_core::Mtu;

/// The value of an option, EINVAL unless it has that length.
///
/// # Safety
/// `value` is NULL or names `length` bytes.
unsafe fn value<T: Copy>(value: *const c_void, length: usize) -> Result<T, Errno> {
    if value.is_null() || length != size_of::<T>() {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller's terms, and a length that fits.
    Ok(unsafe { value.cast::<T>().read_unaligned() })
}

/// Options of RDMA_OPTION_ID.
///
/// # Safety
/// As of `value`.
unsafe fn set_id(id: &IdHandle, name: c_int, at: *const c_void, length: usize) -> Result<(), Errno> {
    let mut state = id.state();
    // SAFETY: the caller's terms.
    unsafe {
        match name as u32 {
            abi::RDMA_OPTION_ID_TOS => state.options.tos = Some(value(at, length)?),
            abi::RDMA_OPTION_ID_REUSEADDR => {
                let reuse = value::<c_int>(at, length)? != 0;
                if !matches!(state.stage, IdStage::Idle | IdStage::Bound) && reuse {
                    return Err(libc::EINVAL);
                }
                state.options.reuse_addr = reuse;
            }
            abi::RDMA_OPTION_ID_AFONLY => {
                let only = value::<c_int>(at, length)? != 0;
                if state.stage != IdStage::Idle {
                    return Err(libc::EINVAL);
                }
                state.options.v6_only = Some(only);
            }
            abi::RDMA_OPTION_ID_ACK_TIMEOUT => {
                let timeout: u8 = value(at, length)?;
                let kind = (*id.public()).qp_type;
                if timeout > 31 || !matches!(kind, abi::IBV_QPT_RC | abi::IBV_QPT_XRC_SEND) {
                    return Err(libc::EINVAL);
                }
                state.options.ack_timeout = Some(timeout);
            }
            _ => return Err(libc::ENOSYS),
        }
    }
    Ok(())
}

/// RDMA_OPTION_IB_PATH: the first path that goes both ways, in place of rdma_resolve_route.
///
/// # Safety
/// As of `value`.
unsafe fn set_path(id: &IdHandle, at: *const c_void, length: usize) -> Result<(), Errno> {
    const WANTED: u32 =
        abi::IBV_PATH_FLAG_GMP | abi::IBV_PATH_FLAG_PRIMARY | abi::IBV_PATH_FLAG_BIDIRECTIONAL;
    let each = size_of::<abi::ibv_path_data>();
    if at.is_null() || length == 0 || !length.is_multiple_of(each) {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller's terms; so many structs lie there, aligned or not.
    let mut paths =
        (0..length / each).map(|i| unsafe { at.cast::<abi::ibv_path_data>().add(i).read_unaligned() });
    let path = paths.find(|path| path.flags & WANTED == WANTED).ok_or(libc::EINVAL)?.path;
    let mut state = id.state();
    if state.stage != IdStage::AddrResolved {
        return Err(libc::EINVAL);
    }
    let mtu = Mtu::from_code(u32::from(path.mtu & 0x3f)).ok_or(libc::EINVAL)?;
    let hop_limit = u32::from_be(path.flowlabel_hoplimit) as u8;
    resolve::take_way(id, &mut state, PathAttr { mtu, traffic_class: path.tclass, hop_limit });
    Ok(())
}

/// rdma_set_option(3).
pub(crate) unsafe extern "C" fn set_option(
    id: *mut abi::rdma_cm_id,
    level: c_int,
    name: c_int,
    at: *mut c_void,
    length: usize,
) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms.
        unsafe {
            let handle = IdHandle::of(id)?;
            match (level as u32, name as u32) {
                (abi::RDMA_OPTION_ID, _) => set_id(handle, name, at, length),
                (abi::RDMA_OPTION_IB, abi::RDMA_OPTION_IB_PATH) => {
                    set_path(handle, at, length)?;
                    event::complete(handle)
                }
                _ => Err(libc::ENOSYS),
            }
        }
    })
}

/// rdma_set_local_ece(3): for a queue pair that is not the id's.
pub(crate) unsafe extern "C" fn set_local_ece(id: *mut abi::rdma_cm_id, ece: *mut abi::ibv_ece) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms.
        let (handle, ece) = unsafe { (IdHandle::of(id)?, ece.as_ref().ok_or(libc::EINVAL)?) };
        if !handle.qp().is_null() || ece.vendor_id == 0 || ece.comp_mask != 0 {
            return Err(libc::EINVAL);
        }
        handle.state().local_ece = ece_in(ece);
        Ok(())
    })
}

/// rdma_get_remote_ece(3): all zero if the peer has none.
pub(crate) unsafe extern "C" fn get_remote_ece(id: *mut abi::rdma_cm_id, ece: *mut abi::ibv_ece) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms.
        let (handle, to) = unsafe { (IdHandle::of(id)?, given(ece)?) };
        if !handle.qp().is_null() {
            return Err(libc::EINVAL);
        }
        let ece = handle.state().remote_ece;
        // SAFETY: the call's terms.
        unsafe { to.write(abi::ibv_ece { vendor_id: ece.vendor_id, options: ece.options, comp_mask: 0 }) };
        Ok(())
    })
}
