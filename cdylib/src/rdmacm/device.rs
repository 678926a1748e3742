//! What all ids of a process share: the open device, a protection domain and an XRC domain of their own.
//!
//! Owns them. They are made when first needed and stay as long as the process, as rdma_get_devices(3) says; a
//! forked child has its own. It must not know any id.

use crate::edge::{self, Errno};
use crate::handle::errno;
use crate::{context, device, pd_mr, reserve, xrcd};
use core::ffi::c_int;
use starverbs_abi as abi;
use starverbs_verbs::Context;
use starverbs_verbs::cm::Agent;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The device as ids use it.
#[derive(Clone)]
pub(super) struct IdDevice {
    pub(super) context: *mut abi::ibv_context,
    /// The default protection domain
    pub(super) pd: *mut abi::ibv_pd,
    xrcd: *mut abi::ibv_xrcd,
    pub(super) agent: Agent,
    process: u32,
}

// SAFETY: the pointers name handles that live as long as the process and may be used from every thread.
unsafe impl Send for IdDevice {}

fn shared() -> MutexGuard<'static, Option<IdDevice>> {
    static DEVICE: Mutex<Option<IdDevice>> = Mutex::new(None);
    DEVICE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The errno value that a verb of pointers has just set.
pub(super) fn last_errno() -> Errno {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// What a verb returned, or the errno value that it set.
pub(super) fn made<T>(object: *mut T) -> Result<*mut T, Errno> {
    if object.is_null() { Err(last_errno()) } else { Ok(object) }
}

/// The device, opened at the first call.
///
/// # Errors
/// Those of ibv_open_device(3); ENODEV: it cannot be had.
pub(super) fn open() -> Result<IdDevice, Errno> {
    let mut shared = shared();
    if let Some(known) = shared.as_ref().filter(|known| known.process == std::process::id()) {
        return Ok(known.clone());
    }
    // SAFETY: the device is the library's own; the context lives as long as the process from here on.
    let new = unsafe {
        let context = made(context::open_device(device::star0())).map_err(|_| libc::ENODEV)?;
        let agent = Agent::of(context::ContextHandle::obj(context)?).map_err(errno)?;
        agent.ask_for_room(reserve::has_room).map_err(errno)?;
        let pd = made(pd_mr::alloc_pd(context))?;
        IdDevice { context, pd, xrcd: core::ptr::null_mut(), agent, process: std::process::id() }
    };
    // Of a parent process nothing may be ended here.
    core::mem::forget(shared.replace(new.clone()));
    Ok(new)
}

/// Runs after all that the program does at its exit.
#[used]
#[unsafe(link_section = ".fini_array")]
static LEAVE: extern "C" fn() = leave;

/// The process ends: its peers are notified of what it did not end itself, as they are where a kernel closes
/// its files.
extern "C" fn leave() {
    let _nothing_to_be_done = std::panic::catch_unwind(|| {
        let agent =
            shared().as_ref().filter(|known| known.process == std::process::id()).map(|d| d.agent.clone());
        if let Some(agent) = agent {
            agent.leave();
        }
    });
}

/// The calling thread is about to wait for an event: the card's own thread takes over, if the card is open.
pub(super) fn about_to_sleep() {
    let known = shared().as_ref().filter(|known| known.process == std::process::id()).cloned();
    if let Some(Ok(card)) = known.as_ref().map(IdDevice::card) {
        card.about_to_sleep();
    }
}

/// The default XRC domain, made at the first call.
pub(super) fn default_xrcd() -> Result<*mut abi::ibv_xrcd, Errno> {
    let known = open()?;
    let mut shared = shared();
    let device = shared.as_mut().ok_or(libc::ENODEV)?;
    if device.xrcd.is_null() {
        let mut init = abi::ibv_xrcd_init_attr {
            comp_mask: abi::IBV_XRCD_INIT_ATTR_FD | abi::IBV_XRCD_INIT_ATTR_OFLAGS,
            fd: -1,
            oflags: libc::O_CREAT,
        };
        // SAFETY: the context lives as long as the process.
        device.xrcd = made(unsafe { xrcd::open_xrcd(known.context, &mut init) })?;
    }
    Ok(device.xrcd)
}

impl IdDevice {
    /// The card's side of the context.
    pub(super) fn card(&self) -> Result<&Context, Errno> {
        // SAFETY: the context lives as long as the process.
        unsafe { context::ContextHandle::obj(self.context) }
    }
}

/// rdma_get_devices(3).
pub(crate) unsafe extern "C" fn get_devices(num_devices: *mut c_int) -> *mut *mut abi::ibv_context {
    // SAFETY: the call's terms.
    edge::object(|| unsafe { device::list_of(open()?.context, num_devices) })
}

/// rdma_free_devices(3): frees the list; the devices stay open.
pub(crate) unsafe extern "C" fn free_devices(list: *mut *mut abi::ibv_context) {
    // SAFETY: the list came from `get_devices`, or is NULL.
    unsafe { libc::free(list.cast()) };
}
