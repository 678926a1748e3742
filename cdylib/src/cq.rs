//! Completion queues.
//!
//! Owns the handle, which has the extended public struct even where a plain one was asked for: the plain one
//! is its beginning. It must not know how completions get there.

use crate::context::ContextHandle;
use crate::edge::{self, Errno};
use crate::events::ChannelHandle;
use crate::handle::{cookie, errno, given, wait_for_acks, zeroed};
use crate::pd_mr::PdHandle;
use core::cell::UnsafeCell;
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicU32, Ordering};
use starverbs_abi as abi;
use starverbs_core::types::{Cqe, Nanos};
use starverbs_verbs::{Cq, CqInit, Moderation};

/// A completion queue.
#[repr(C)]
pub(crate) struct CqHandle {
    pub(crate) ibv: abi::ibv_cq_ex,
    pub(crate) obj: Cq,
    /// Events that ibv_get_cq_event returned.
    pub(crate) comp_delivered: AtomicU32,
    /// Events that ibv_get_async_event returned.
    pub(crate) async_delivered: AtomicU32,
    /// The completion that ibv_start_poll or ibv_next_poll stopped at, and its stamp.
    pub(crate) current: UnsafeCell<(Cqe, Nanos)>,
    /// Held from ibv_start_poll to ibv_end_poll.
    pub(crate) polling: UnsafeCell<libc::pthread_mutex_t>,
    /// The program promised that one thread at a time uses the queue.
    pub(crate) single_threaded: bool,
}

impl CqHandle {
    /// The card's side of a completion queue, or EINVAL for NULL.
    ///
    /// # Safety
    /// `cq` is NULL, or comes from `create` and is alive.
    #[inline]
    pub(crate) unsafe fn obj<'a>(cq: *mut abi::ibv_cq) -> Result<&'a Cq, Errno> {
        // SAFETY: the caller's terms; the struct is the first field of its handle.
        given(cq).map(|c| unsafe { &(*c.as_ptr().cast::<CqHandle>()).obj })
    }
}

/// What a create verb asks for.
pub(crate) struct CqAttr {
    pub(crate) cqe: u32,
    pub(crate) cq_context: *mut c_void,
    pub(crate) channel: *mut abi::ibv_comp_channel,
    pub(crate) comp_vector: u32,
    pub(crate) single_threaded: bool,
    pub(crate) ignore_overrun: bool,
    pub(crate) stamped: bool,
    pub(crate) parent: *mut abi::ibv_pd,
}

/// Makes a completion queue, on the terms of ibv_create_cq(3).
pub(crate) unsafe fn create(context: *mut abi::ibv_context, wanted: &CqAttr) -> Result<*mut CqHandle, Errno> {
    // SAFETY: the verb's terms.
    let card = unsafe { ContextHandle::obj(context)? };
    // SAFETY: `context` is alive, as above.
    let vectors = unsafe { (*context).num_comp_vectors };
    if wanted.cqe == 0 || wanted.comp_vector >= vectors.unsigned_abs() {
        return Err(libc::EINVAL);
    }
    // SAFETY: NULL or a live channel, on the verb's terms.
    let channel = unsafe { ChannelHandle::of(wanted.channel) };
    let mut place = Box::<CqHandle>::new_uninit();
    let name = cookie(place.as_mut_ptr());
    let init = CqInit {
        cqe: wanted.cqe,
        channel: channel.map(|c| &c.obj),
        cookie: name,
        stamped: wanted.stamped,
        ignore_overrun: wanted.ignore_overrun,
        // SAFETY: NULL or a live domain, on the verb's terms.
        parent: if wanted.parent.is_null() { None } else { Some(unsafe { PdHandle::obj(wanted.parent)? }) },
    };
    // SAFETY: `context` is alive, as above.
    unsafe { ContextHandle::of(context).live.make_room()? };
    if let Some(channel) = channel {
        channel.live.make_room()?;
    }
    let obj = Cq::create_ex(card, &init).map_err(errno)?;

    // SAFETY: an ibv_cq_ex is numbers, pointers, optional functions and pthread fields: zero is valid.
    let mut ibv: abi::ibv_cq_ex = unsafe { zeroed() };
    ibv.context = context;
    ibv.channel = wanted.channel;
    ibv.cq_context = wanted.cq_context;
    ibv.cqe = c_int::try_from(obj.depth()).unwrap_or(c_int::MAX);
    ibv.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    ibv.cond = libc::PTHREAD_COND_INITIALIZER;
    place.write(CqHandle {
        ibv,
        obj,
        comp_delivered: AtomicU32::new(0),
        async_delivered: AtomicU32::new(0),
        current: UnsafeCell::new(Default::default()),
        polling: UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER),
        single_threaded: wanted.single_threaded,
    });
    // SAFETY: written just now.
    let handle = Box::into_raw(unsafe { place.assume_init() });
    if let Some(channel) = channel {
        channel.live.add(name);
        channel.used(1);
    }
    // SAFETY: `context` is alive, as above.
    unsafe {
        ContextHandle::of(context).live.add(name);
        ContextHandle::retain(context);
    }
    Ok(handle)
}

/// ibv_create_cq(3).
pub(crate) unsafe extern "C" fn create_cq(
    context: *mut abi::ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut abi::ibv_comp_channel,
    comp_vector: c_int,
) -> *mut abi::ibv_cq {
    edge::object(|| {
        let cqe = u32::try_from(cqe).map_err(|_| libc::EINVAL)?;
        let comp_vector = u32::try_from(comp_vector).map_err(|_| libc::EINVAL)?;
        let wanted = CqAttr {
            cqe,
            cq_context,
            channel,
            comp_vector,
            single_threaded: false,
            ignore_overrun: false,
            stamped: false,
            parent: core::ptr::null_mut(),
        };
        // SAFETY: the verb's terms.
        Ok(unsafe { create(context, &wanted)? }.cast())
    })
}

/// ibv_resize_cq(3).
pub(crate) unsafe extern "C" fn resize_cq(cq: *mut abi::ibv_cq, cqe: c_int) -> c_int {
    edge::int(|| {
        let cqe = u32::try_from(cqe).ok().filter(|&n| n > 0).ok_or(libc::EINVAL)?;
        // SAFETY: the verb's terms.
        let obj = unsafe { CqHandle::obj(cq)? };
        obj.resize(cqe).map_err(errno)?;
        // SAFETY: `cq` is alive, as above.
        unsafe { (*cq).cqe = c_int::try_from(obj.depth()).unwrap_or(c_int::MAX) };
        Ok(())
    })
}

/// ibv_modify_cq(3): event moderation.
pub(crate) unsafe extern "C" fn modify_cq(cq: *mut abi::ibv_cq, attr: *mut abi::ibv_modify_cq_attr) -> c_int {
    edge::int(|| {
        // SAFETY: the verb's terms.
        let obj = unsafe { CqHandle::obj(cq)? };
        // SAFETY: NULL or a struct of the caller's, on the verb's terms.
        let attr = unsafe { attr.as_ref() }.ok_or(libc::EINVAL)?;
        if attr.attr_mask & !abi::IBV_CQ_ATTR_MODERATE != 0 {
            return Err(libc::EINVAL);
        }
        if attr.attr_mask == 0 {
            return Ok(());
        }
        let wanted = Moderation { count: attr.moderate.cq_count, period: attr.moderate.cq_period };
        obj.moderate(wanted).map_err(errno)
    })
}

/// ibv_req_notify_cq(3), through the context's table.
pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut abi::ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the verb's terms.
    edge::int(|| unsafe { CqHandle::obj(cq)? }.req_notify(solicited_only != 0).map_err(errno))
}

/// ibv_destroy_cq(3): EBUSY while QPs use it; waits until every event of it is acknowledged.
pub(crate) unsafe extern "C" fn destroy_cq(cq: *mut abi::ibv_cq) -> c_int {
    edge::int(|| {
        // SAFETY: the verb's terms.
        unsafe { CqHandle::obj(cq)? }.destroy().map_err(errno)?;
        let handle = cq.cast::<CqHandle>();
        // SAFETY: the handle is alive until the box below is dropped, and so are the context and the channel
        // it names. Once it is off the lists no event is counted for it any more.
        unsafe {
            let context = (*handle).ibv.context;
            let channel = ChannelHandle::of((*handle).ibv.channel);
            ContextHandle::of(context).live.remove(cookie(handle));
            if let Some(channel) = channel {
                channel.live.remove(cookie(handle));
                channel.used(-1);
            }
            let (mutex, cond) = (&raw mut (*handle).ibv.mutex, &raw mut (*handle).ibv.cond);
            let delivered = (*handle).comp_delivered.load(Ordering::Acquire);
            wait_for_acks(mutex, cond, &raw mut (*handle).ibv.comp_events_completed, delivered);
            let delivered = (*handle).async_delivered.load(Ordering::Acquire);
            wait_for_acks(mutex, cond, &raw mut (*handle).ibv.async_events_completed, delivered);
            drop(Box::from_raw(handle));
            ContextHandle::release(context);
        }
        Ok(())
    })
}
