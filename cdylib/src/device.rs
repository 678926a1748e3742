//! The device list: one device, `star0`, that needs no hardware.
//!
//! Owns the `ibv_device`, which lives as long as the process. It must not open anything: listing devices has
//! no effect.

use crate::edge::{self, Errno};
use crate::handle::{complain, given, zeroed};
use core::ffi::{c_char, c_int};
use starverbs_abi as abi;
use std::sync::OnceLock;

/// The device, at an address that never changes.
struct Star0(abi::ibv_device);

// SAFETY: the struct is written once, before it is shared, and holds no pointers.
unsafe impl Send for Star0 {}
// SAFETY: as above.
unsafe impl Sync for Star0 {}

static DEVICE: OnceLock<Box<Star0>> = OnceLock::new();

fn put(field: &mut [c_char], text: &str) {
    let room = field.len() - 1;
    for (to, from) in field[..room].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

/// The one device.
pub(crate) fn star0() -> *mut abi::ibv_device {
    let device = DEVICE.get_or_init(|| {
        // SAFETY: an ibv_device is numbers, bytes and optional functions: zero is valid.
        let mut device: abi::ibv_device = unsafe { zeroed() };
        let name = starverbs_verbs::device_name();
        device.node_type = abi::IBV_NODE_CA;
        device.transport_type = abi::IBV_TRANSPORT_IB;
        put(&mut device.name, name);
        put(&mut device.dev_name, "uverbs0");
        put(&mut device.dev_path, "/sys/class/infiniband_verbs/uverbs0");
        put(&mut device.ibdev_path, &format!("/sys/class/infiniband/{name}"));
        Box::new(Star0(device))
    });
    (&raw const device.0).cast_mut()
}

/// A list of one device.
///
/// # Safety
/// `num_devices` is NULL or a place.
pub(crate) unsafe fn list_of<D>(device: *mut D, num_devices: *mut c_int) -> Result<*mut *mut D, Errno> {
    // SAFETY: calloc may be called with any sizes; the second element stays NULL and ends the list.
    let list: *mut *mut D = unsafe { libc::calloc(2, size_of::<usize>()) }.cast();
    if list.is_null() {
        return Err(libc::ENOMEM);
    }
    // SAFETY: the list has room for two; the rest is on the caller's terms.
    unsafe {
        list.write(device);
        if !num_devices.is_null() {
            num_devices.write(1);
        }
    }
    Ok(list)
}

/// ibv_get_device_list(3).
pub(crate) unsafe extern "C" fn get_device_list(num_devices: *mut c_int) -> *mut *mut abi::ibv_device {
    // SAFETY: the verb's terms.
    edge::object(|| unsafe { list_of(star0(), num_devices) })
}

/// ibv_free_device_list(3): frees the list; the device itself stays.
pub(crate) unsafe extern "C" fn free_device_list(list: *mut *mut abi::ibv_device) {
    // SAFETY: the list came from `get_device_list`, or is NULL.
    unsafe { libc::free(list.cast()) };
}

/// ibv_get_device_name(3).
pub(crate) unsafe extern "C" fn get_device_name(device: *mut abi::ibv_device) -> *const c_char {
    // SAFETY: a device pointer came from the list, on the verb's terms.
    given(device).map_or(core::ptr::null(), |d| unsafe { (&raw const (*d.as_ptr()).name).cast() })
}

/// ibv_get_device_guid(3): the node GUID in network byte order, 0 if it cannot be told.
pub(crate) unsafe extern "C" fn get_device_guid(_device: *mut abi::ibv_device) -> u64 {
    edge::value(0, || match starverbs_verbs::device_attr() {
        Ok(attr) => attr.node_guid.to_be(),
        Err(error) => {
            complain(error);
            0
        }
    })
}

/// ibv_get_device_index(3): -1, there is no kernel device that an index could name.
pub(crate) unsafe extern "C" fn get_device_index(_device: *mut abi::ibv_device) -> c_int {
    -1
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::ffi::CStr;

    #[test]
    fn the_list_holds_one_device_and_a_null() {
        let mut count = 0;
        // SAFETY: the list is read within its two elements and freed once.
        unsafe {
            let list = get_device_list(&mut count);
            assert_eq!(count, 1);
            assert_eq!(CStr::from_ptr(get_device_name(*list)).to_str(), Ok(starverbs_verbs::device_name()));
            assert_eq!((**list).node_type, abi::IBV_NODE_CA);
            assert!((*list.add(1)).is_null());
            assert_eq!(get_device_index(*list), -1);
            free_device_list(list);
            assert!(get_device_name(core::ptr::null_mut()).is_null());
        }
    }
}
