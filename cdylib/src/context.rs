//! An open device: `ibv_context` inside its `verbs_context`, and the tables of functions that inlines of verbs.h call.
//!
//! Owns the handle's life: the program's reference and one of every object made from it, so that an object that outlives
//! ibv_close_device still finds the tables it calls through. It must not know what the objects do.

use crate::edge::{self, Errno};
use crate::handle::{Live, complain, given, zeroed};
use crate::{cq, cq_ex, device, domain, poll, post, qp, query, srq};
use core::ffi::{c_int, c_void};
use core::mem::offset_of;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicUsize, Ordering};
use starverbs_abi as abi;
use starverbs_verbs::Context;

/// An open device as the program sees it, and what stands behind it.
#[repr(C)]
pub(crate) struct ContextHandle {
    verbs: abi::verbs_context,
    obj: Context,
    /// Handles that may get async events.
    pub(crate) live: Live,
    /// The program's reference, and one for each object made from the context.
    refs: AtomicUsize,
}

impl ContextHandle {
    /// The handle around a context.
    ///
    /// # Safety
    /// `context` comes from `open_device` and is alive.
    pub(crate) unsafe fn of<'a>(context: *mut abi::ibv_context) -> &'a ContextHandle {
        let handle =
            context.wrapping_byte_sub(offset_of!(abi::verbs_context, context)).cast::<ContextHandle>();
        // SAFETY: the caller vouches for the context, which is a field of a ContextHandle at that offset. The program
        // only reads the fields in front.
        unsafe { &*handle }
    }

    /// The card's side of a context, or EINVAL for NULL.
    ///
    /// # Safety
    /// `context` is NULL, or as in `of`.
    pub(crate) unsafe fn obj<'a>(context: *mut abi::ibv_context) -> Result<&'a Context, Errno> {
        // SAFETY: the caller's terms.
        given(context).map(|c| unsafe { &ContextHandle::of(c.as_ptr()).obj })
    }

    /// Counts an object that points to the context.
    ///
    /// # Safety
    /// As in `of`.
    pub(crate) unsafe fn retain(context: *mut abi::ibv_context) {
        // SAFETY: the caller's terms.
        unsafe { ContextHandle::of(context) }.refs.fetch_add(1, Ordering::Relaxed);
    }

    /// Gives a reference back; the last one frees the handle.
    ///
    /// # Safety
    /// As in `of`, and the reference is not used again.
    pub(crate) unsafe fn release(context: *mut abi::ibv_context) {
        // SAFETY: the caller's terms.
        if unsafe { ContextHandle::of(context) }.refs.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        let handle =
            context.wrapping_byte_sub(offset_of!(abi::verbs_context, context)).cast::<ContextHandle>();
        // SAFETY: the last reference is gone, and the handle was made with Box::into_raw.
        let handle = unsafe { Box::from_raw(handle) };
        let cmd_fd = handle.verbs.context.cmd_fd;
        drop(handle);
        if cmd_fd >= 0 {
            // SAFETY: `open_device` opened it, and nothing else closes it.
            unsafe { libc::close(cmd_fd) };
        }
    }
}

/// ibv_open_device(3).
pub(crate) unsafe extern "C" fn open_device(device: *mut abi::ibv_device) -> *mut abi::ibv_context {
    edge::object(|| {
        if given(device)?.as_ptr() != device::star0() {
            return Err(libc::ENODEV);
        }
        let obj = Context::open().map_err(complain)?;
        let verbs = tables(&obj);
        let handle = Box::new(ContextHandle { verbs, obj, live: Live::default(), refs: AtomicUsize::new(1) });
        let handle = NonNull::from(Box::leak(handle)).as_ptr();
        // SAFETY: the box was just made and is not shared yet.
        Ok(unsafe { &raw mut (*handle).verbs.context })
    })
}

/// ibv_close_device(3): the card stops working for the context's objects; the program may free their memory.
pub(crate) unsafe extern "C" fn close_device(context: *mut abi::ibv_context) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the verb's terms.
        unsafe { ContextHandle::obj(context)? }.close();
        // SAFETY: the program gives its reference up.
        unsafe { ContextHandle::release(context) };
        Ok(())
    })
}

/// ibv_import_device(3): a card lives in its process and cannot be imported.
pub(crate) unsafe extern "C" fn import_device(_cmd_fd: c_int) -> *mut abi::ibv_context {
    edge::object(|| Err(libc::EOPNOTSUPP))
}

/// The public structs of a new context. Extended functions that stay NULL are those the card does not offer: the inlines
/// of verbs.h answer EOPNOTSUPP for them.
fn tables(obj: &Context) -> abi::verbs_context {
    // SAFETY: a verbs_context is numbers, pointers, optional functions and pthread fields: zero is valid.
    let mut verbs: abi::verbs_context = unsafe { zeroed() };
    verbs.sz = size_of::<abi::verbs_context>();
    verbs.query_port = Some(query::query_port);
    verbs.query_device_ex = Some(query::query_device_ex);
    verbs.create_cq_ex = Some(cq_ex::create_cq_ex);
    verbs.modify_cq = Some(cq::modify_cq);
    verbs.query_rt_values = Some(query::query_rt_values);
    verbs.alloc_td = Some(domain::alloc_td);
    verbs.dealloc_td = Some(domain::dealloc_td);
    verbs.alloc_parent_domain = Some(domain::alloc_parent_domain);
    verbs.create_srq_ex = Some(srq::create_srq_ex);
    verbs.get_srq_num = Some(srq::get_srq_num);
    verbs.create_qp_ex = Some(qp::create_qp_ex);
    verbs.close_xrcd = Some(close_xrcd);

    let context = &mut verbs.context;
    context.device = device::star0();
    context.abi_compat = abi::VERBS_ABI_IS_EXTENDED.cast::<c_void>();
    context.async_fd = obj.async_fd();
    // Programs hand this descriptor around without looking inside, so it only has to be a valid one.
    // SAFETY: a constant path and flags.
    context.cmd_fd = unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    context.num_comp_vectors = std::thread::available_parallelism().map_or(1, |n| n.get() as c_int);
    context.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    context.ops.poll_cq = Some(poll::poll_cq);
    context.ops.req_notify_cq = Some(cq::req_notify_cq);
    context.ops.post_send = Some(post::post_send);
    context.ops.post_recv = Some(post::post_recv);
    context.ops.post_srq_recv = Some(post::post_srq_recv);
    context.ops.alloc_mw = Some(alloc_mw);
    context.ops.bind_mw = Some(bind_mw);
    context.ops.dealloc_mw = Some(dealloc_mw);
    verbs
}

unsafe extern "C" fn close_xrcd(_xrcd: *mut abi::ibv_xrcd) -> c_int {
    libc::EOPNOTSUPP
}

unsafe extern "C" fn alloc_mw(_pd: *mut abi::ibv_pd, _kind: abi::ibv_mw_type) -> *mut abi::ibv_mw {
    edge::object(|| Err(libc::EOPNOTSUPP))
}

unsafe extern "C" fn bind_mw(
    _qp: *mut abi::ibv_qp,
    _mw: *mut abi::ibv_mw,
    _bind: *mut abi::ibv_mw_bind,
) -> c_int {
    libc::EOPNOTSUPP
}

unsafe extern "C" fn dealloc_mw(_mw: *mut abi::ibv_mw) -> c_int {
    libc::EOPNOTSUPP
}
