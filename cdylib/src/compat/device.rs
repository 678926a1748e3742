//! The device list of IBVERBS_1.0, and contexts.

use super::layout::{ContextFields, OldContext, OldDevice, Ops};
use super::{Old, data, end, forward};
use crate::{context, device, edge, query};
use core::ffi::{c_char, c_int, c_void};
use core::mem::offset_of;
use core::ptr::null;
use starverbs_abi as abi;

/// The device. A program of 1.0 hands its address around and looks at nothing in it.
static DEVICE: OldDevice = OldDevice { drivers: [0; 5] };

/// Today's device behind the old one; NULL for anything else.
fn today(device: *mut OldDevice) -> *mut abi::ibv_device {
    if core::ptr::eq(device, &DEVICE) { device::star0() } else { core::ptr::null_mut() }
}

// Both generations' contexts begin with their device's address.
const _: () = assert!(offset_of!(abi::ibv_context, device) == 0);
const _: () = assert!(offset_of!(ContextFields, device) == 0);

/// Whether a context is one of these.
///
/// # Safety
/// `context` is NULL, or a live context of either generation.
pub(super) unsafe fn is_old(context: *mut c_void) -> bool {
    // SAFETY: the caller's terms.
    !context.is_null() && unsafe { context.cast::<*const OldDevice>().read() } == &raw const DEVICE
}

/// ibv_get_device_list(3) at IBVERBS_1.0.
pub(crate) unsafe extern "C" fn get_device_list(num_devices: *mut c_int) -> *mut *mut OldDevice {
    // SAFETY: the verb's terms.
    edge::object(|| unsafe { device::list_of((&raw const DEVICE).cast_mut(), num_devices) })
}

/// ibv_free_device_list(3) at IBVERBS_1.0.
pub(crate) unsafe extern "C" fn free_device_list(list: *mut *mut OldDevice) {
    // SAFETY: the verb's terms; lists of both generations are made alike.
    unsafe { device::free_device_list(list.cast()) };
}

/// ibv_get_device_name(3) at IBVERBS_1.0.
pub(crate) unsafe extern "C" fn get_device_name(device: *mut OldDevice) -> *const c_char {
    // SAFETY: NULL or today's device.
    unsafe { device::get_device_name(today(device)) }
}

/// ibv_get_device_guid(3) at IBVERBS_1.0.
pub(crate) unsafe extern "C" fn get_device_guid(device: *mut OldDevice) -> u64 {
    // SAFETY: NULL or today's device.
    unsafe { device::get_device_guid(today(device)) }
}

const OPS: Ops = Ops {
    unused_1: [null(); 7],
    poll_cq: data::poll_cq,
    req_notify_cq: data::req_notify_cq,
    unused_2: [null(); 7],
    post_srq_recv: data::post_srq_recv,
    unused_3: [null(); 4],
    post_send: data::post_send,
    post_recv: data::post_recv,
    unused_4: [null(); 4],
};

/// ibv_open_device(3) at IBVERBS_1.0.
pub(crate) unsafe extern "C" fn open_device(device: *mut OldDevice) -> *mut OldContext {
    let public =
        ContextFields { device: &raw const DEVICE, ops: OPS, cmd_fd: -1, async_fd: -1, num_comp_vectors: 0 };
    // SAFETY: NULL or today's device; what is opened is alive.
    unsafe {
        Old::make(
            public,
            |_| context::open_device(today(device)),
            |public, real| {
                public.cmd_fd = real.cmd_fd;
                public.async_fd = real.async_fd;
                public.num_comp_vectors = real.num_comp_vectors;
            },
        )
    }
}

end! {
    /// ibv_close_device(3) at IBVERBS_1.0.
    close_device(OldContext) => context::close_device;
}

forward! {
    /// ibv_query_device(3) at IBVERBS_1.0.
    query_device(OldContext, attr: *mut abi::ibv_device_attr) => query::query_device;
    /// ibv_query_port(3) at IBVERBS_1.0.
    query_port(OldContext, port: u8, attr: *mut abi::ibv_port_attr) => query::query_port_compat;
    /// ibv_query_gid(3) at IBVERBS_1.0.
    query_gid(OldContext, port: u8, index: c_int, gid: *mut abi::ibv_gid) => query::query_gid;
    /// ibv_query_pkey(3) at IBVERBS_1.0.
    query_pkey(OldContext, port: u8, index: c_int, pkey: *mut u16) => query::query_pkey;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_program_sees_the_device() {
        let mut count = 0;
        // SAFETY: the list is read within its two elements and freed once.
        unsafe {
            let list = get_device_list(&mut count);
            assert_eq!((count, (*list.add(1)).is_null()), (1, true));
            assert_eq!(get_device_name(*list), device::get_device_name(device::star0()));
            free_device_list(list);
            assert!(get_device_name(core::ptr::null_mut()).is_null());
            let mut context = [&raw const DEVICE];
            assert!(is_old(context.as_mut_ptr().cast()) && !is_old(core::ptr::null_mut()));
        }
    }
}
