//! Completion channels, async events and their acknowledgement.
//!
//! Owns the channel's handle and the count of events delivered per object (`Live` says why under a lock). It
//! must not know when an event arises.

use crate::context::ContextHandle;
use crate::cq::CqHandle;
use crate::edge;
use crate::handle::{LiveHandles, ack, errno, given};
use crate::qp::QpHandle;
use crate::srq::SrqHandle;
use core::cell::UnsafeCell;
use core::ffi::{c_int, c_uint, c_void};
use core::mem::offset_of;
use core::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use starverbs_abi as abi;
use starverbs_verbs::{CompChannel, VerbsEvent};

/// A completion channel.
#[repr(C)]
pub(crate) struct ChannelHandle {
    ibv: UnsafeCell<abi::ibv_comp_channel>,
    pub(crate) obj: CompChannel,
    /// The channel's completion queues.
    pub(crate) live: LiveHandles,
}

impl ChannelHandle {
    /// The handle of a channel, `None` for NULL.
    ///
    /// # Safety
    /// `channel` is NULL, or comes from `create_comp_channel` and is alive.
    pub(crate) unsafe fn of<'a>(channel: *mut abi::ibv_comp_channel) -> Option<&'a ChannelHandle> {
        // SAFETY: the caller's terms; the struct is the first field of its handle.
        unsafe { channel.cast::<ChannelHandle>().as_ref() }
    }

    /// Counts the channel's completion queues, in the public field.
    pub(crate) fn used(&self, queues: i32) {
        // SAFETY: the field is an aligned int inside a cell, and this library changes it here only.
        unsafe { AtomicI32::from_ptr(&raw mut (*self.ibv.get()).refcnt) }.fetch_add(queues, Ordering::AcqRel);
    }
}

/// ibv_create_comp_channel(3).
pub(crate) unsafe extern "C" fn create_comp_channel(
    context: *mut abi::ibv_context,
) -> *mut abi::ibv_comp_channel {
    edge::object(|| {
        // SAFETY: the verb's terms.
        let obj = CompChannel::create(unsafe { ContextHandle::obj(context)? }).map_err(errno)?;
        let ibv = UnsafeCell::new(abi::ibv_comp_channel { context, fd: obj.fd(), refcnt: 0 });
        // SAFETY: `context` is alive, as above.
        unsafe { ContextHandle::retain(context) };
        Ok(Box::into_raw(Box::new(ChannelHandle { ibv, obj, live: LiveHandles::default() })).cast())
    })
}

/// ibv_destroy_comp_channel(3): EBUSY while completion queues use it.
pub(crate) unsafe extern "C" fn destroy_comp_channel(channel: *mut abi::ibv_comp_channel) -> c_int {
    edge::int(|| {
        // SAFETY: the verb's terms.
        let handle = unsafe { ChannelHandle::of(channel) }.ok_or(libc::EINVAL)?;
        handle.obj.destroy().map_err(errno)?;
        // SAFETY: the program gives the handle up, and it was made with Box::into_raw.
        let handle = unsafe { Box::from_raw(channel.cast::<ChannelHandle>()) };
        // SAFETY: the handle held a reference.
        unsafe { ContextHandle::release(handle.ibv.into_inner().context) };
        Ok(())
    })
}

/// ibv_get_cq_event(3): 0, or -1 with errno.
pub(crate) unsafe extern "C" fn get_cq_event(
    channel: *mut abi::ibv_comp_channel,
    cq: *mut *mut abi::ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    edge::minus_one(|| {
        let (to, to_context) = (given(cq)?, given(cq_context)?);
        // SAFETY: the verb's terms.
        let handle = unsafe { ChannelHandle::of(channel) }.ok_or(libc::EINVAL)?;
        loop {
            let name = handle.obj.get_event().map_err(errno)?;
            let found = core::ptr::with_exposed_provenance_mut::<CqHandle>(name as usize);
            let counted = handle.live.with(name, || {
                // SAFETY: a listed completion queue is alive while the list is locked; the places are the
                // caller's.
                unsafe {
                    (*found).comp_delivered.fetch_add(1, Ordering::AcqRel);
                    to.write(found.cast());
                    to_context.write((*found).ibv.cq_context);
                }
            });
            if counted {
                return Ok(());
            }
        }
    })
}

/// ibv_ack_cq_events(3).
pub(crate) unsafe extern "C" fn ack_cq_events(cq: *mut abi::ibv_cq, events: c_uint) {
    if !cq.is_null() {
        // SAFETY: the verb's terms: destroy waits for this ack, so the queue is alive.
        unsafe {
            ack(&raw mut (*cq).mutex, &raw mut (*cq).cond, &raw mut (*cq).comp_events_completed, events)
        };
    }
}

/// Counts an event for the handle that it names, in the counter at offset `counter`. `None` if the handle has
/// gone.
///
/// # Safety
/// A handle listed in `live` has an AtomicU32 at that offset.
unsafe fn count<T>(live: &LiveHandles, cookie: u64, counter: usize) -> Option<*mut T> {
    let handle = core::ptr::with_exposed_provenance_mut::<T>(cookie as usize);
    // SAFETY: a listed handle is alive while the list is locked, and the caller vouches for the offset.
    let add = || unsafe {
        (*handle.byte_add(counter).cast::<AtomicU32>()).fetch_add(1, Ordering::AcqRel);
    };
    live.with(cookie, add).then_some(handle)
}

/// An event in C's words, counted for its object; `None` if the object has gone.
fn deliver(live: &LiveHandles, event: VerbsEvent) -> Option<abi::ibv_async_event> {
    type Element = abi::ibv_async_event__bindgen_ty_1;
    // SAFETY: the card gives back the cookie of the kind of handle that it was given for.
    let (event_type, element) = unsafe {
        match event {
            VerbsEvent::Qp { kind, cookie } => {
                let handle: *mut QpHandle = count(live, cookie, offset_of!(QpHandle, delivered))?;
                (kind, Element { qp: &raw mut (*handle).ibv })
            }
            VerbsEvent::Cq { kind, cookie } => {
                (kind, Element { cq: count(live, cookie, offset_of!(CqHandle, async_delivered))? })
            }
            VerbsEvent::Srq { kind, cookie } => {
                (kind, Element { srq: count(live, cookie, offset_of!(SrqHandle, delivered))? })
            }
            VerbsEvent::Port { kind, port } => (kind, Element { port_num: c_int::from(port) }),
            VerbsEvent::Device { kind } => (kind, Element { port_num: 0 }),
        }
    };
    Some(abi::ibv_async_event { element, event_type })
}

/// ibv_get_async_event(3): 0, or -1 with errno.
pub(crate) unsafe extern "C" fn get_async_event(
    context: *mut abi::ibv_context,
    event: *mut abi::ibv_async_event,
) -> c_int {
    edge::minus_one(|| {
        let to = given(event)?;
        // SAFETY: the verb's terms.
        let obj = unsafe { ContextHandle::obj(context)? };
        loop {
            let event = obj.get_async_event().map_err(errno)?;
            // SAFETY: `context` is alive, as above.
            if let Some(found) = deliver(unsafe { &ContextHandle::of(context).live }, event) {
                // SAFETY: the verb's terms.
                unsafe { to.write(found) };
                return Ok(());
            }
        }
    })
}

/// What an async event is about.
pub(crate) enum Subject {
    Cq,
    Qp,
    Srq,
    /// The device or a port.
    Device,
}

impl Subject {
    /// That of a type of event.
    pub(crate) fn of(event_type: abi::ibv_event_type) -> Subject {
        match event_type {
            abi::IBV_EVENT_CQ_ERR => Subject::Cq,
            abi::IBV_EVENT_QP_FATAL
            | abi::IBV_EVENT_QP_REQ_ERR
            | abi::IBV_EVENT_QP_ACCESS_ERR
            | abi::IBV_EVENT_COMM_EST
            | abi::IBV_EVENT_SQ_DRAINED
            | abi::IBV_EVENT_PATH_MIG
            | abi::IBV_EVENT_PATH_MIG_ERR
            | abi::IBV_EVENT_QP_LAST_WQE_REACHED => Subject::Qp,
            abi::IBV_EVENT_SRQ_ERR | abi::IBV_EVENT_SRQ_LIMIT_REACHED => Subject::Srq,
            _ => Subject::Device,
        }
    }
}

/// ibv_ack_async_event(3).
pub(crate) unsafe extern "C" fn ack_async_event(event: *mut abi::ibv_async_event) {
    // SAFETY: the verb's terms: the event is as ibv_get_async_event gave it, and destroy waits for this ack,
    // so the object that its type names is alive.
    unsafe {
        let Some(event) = event.as_ref() else { return };
        match Subject::of(event.event_type) {
            Subject::Cq => {
                let cq = event.element.cq;
                ack(&raw mut (*cq).mutex, &raw mut (*cq).cond, &raw mut (*cq).async_events_completed, 1);
            }
            Subject::Qp => {
                let qp = event.element.qp;
                ack(&raw mut (*qp).mutex, &raw mut (*qp).cond, &raw mut (*qp).events_completed, 1);
            }
            Subject::Srq => {
                let srq = event.element.srq;
                ack(&raw mut (*srq).mutex, &raw mut (*srq).cond, &raw mut (*srq).events_completed, 1);
            }
            Subject::Device => {}
        }
    }
}
