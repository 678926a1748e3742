//! An open device: `ibv_context` inside its `verbs_context`, and the tables of functions that inlines of
//! verbs.h call.
//!
//! Owns the handle's life: the program's reference and one of every object made from it, so that an object
//! that outlives ibv_close_device still finds the tables it calls through. It must not know what the objects
//! do.

use crate::edge::{self, Errno};
use crate::handle::{LiveHandles, complain, errno, given, zeroed};
use crate::{cq, cq_ex, device, domain, memory, mw, poll, post, qp, query, srq, tags, xrcd};
use core::ffi::{c_int, c_void};
use core::mem::offset_of;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicUsize, Ordering};
use starverbs_abi as abi;
use starverbs_verbs::Context;
use std::collections::HashMap;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

/// An open device as the program sees it, and the object behind it.
#[repr(C)]
pub(crate) struct ContextHandle {
    verbs: abi::verbs_context,
    obj: Context,
    /// Handles that may get async events; imported contexts share them, as they share the events.
    pub(crate) live: Arc<LiveHandles>,
    /// The program's reference, and one for each object made from the context.
    refs: AtomicUsize,
    /// The descriptor that it was imported by
    _fd: Option<OwnedFd>,
}

impl ContextHandle {
    /// The handle of an open context. `cmd_fd` is the context's own, or goes with the handle as `fd`.
    fn make(
        obj: Context,
        live: Arc<LiveHandles>,
        cmd_fd: c_int,
        fd: Option<OwnedFd>,
    ) -> *mut abi::ibv_context {
        let verbs = tables(&obj, cmd_fd);
        let handle = Box::new(ContextHandle { verbs, obj, live, refs: AtomicUsize::new(1), _fd: fd });
        let handle = NonNull::from(Box::leak(handle)).as_ptr();
        // SAFETY: the box was just made and is not shared yet.
        unsafe { &raw mut (*handle).verbs.context }
    }

    /// The handle around a context.
    ///
    /// # Safety
    /// `context` comes from `open_device` and is alive.
    pub(crate) unsafe fn of<'a>(context: *mut abi::ibv_context) -> &'a ContextHandle {
        let handle =
            context.wrapping_byte_sub(offset_of!(abi::verbs_context, context)).cast::<ContextHandle>();
        // SAFETY: the caller vouches for the context, which is a field of a ContextHandle at that offset. The
        // program only reads the fields in front.
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
        drop(unsafe { Box::from_raw(handle) });
    }
}

/// ibv_open_device(3).
pub(crate) unsafe extern "C" fn open_device(device: *mut abi::ibv_device) -> *mut abi::ibv_context {
    edge::object(|| {
        if given(device)?.as_ptr() != device::star0() {
            return Err(libc::ENODEV);
        }
        let obj = Context::open().map_err(complain)?;
        let fd = obj.command_fd();
        let opened = Opened { obj: obj.clone(), live: Arc::default() };
        let context = ContextHandle::make(obj, Arc::clone(&opened.live), fd, None);
        if let Some(file) = file_of(fd) {
            opened_contexts().insert(file, opened);
        }
        Ok(context)
    })
}

/// What an import of a context needs.
struct Opened {
    obj: Context,
    live: Arc<LiveHandles>,
}

/// A file: device and inode.
type File = (u64, u64);

/// The open contexts of this process, imported ones as well, by the file behind their `cmd_fd`.
fn opened_contexts() -> std::sync::MutexGuard<'static, HashMap<File, Opened>> {
    static ALL: std::sync::LazyLock<Mutex<HashMap<File, Opened>>> = std::sync::LazyLock::new(Mutex::default);
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes a closed context out. In a forked child, an import of its parent's may be there instead.
fn forget(file: File, closed: &Context) {
    let mut opened = opened_contexts();
    if opened.get(&file).is_some_and(|known| known.obj.same(closed)) {
        opened.remove(&file);
    }
}

/// The file behind a descriptor; `None` if there is none.
fn file_of(fd: c_int) -> Option<File> {
    // SAFETY: a stat is numbers: zero is valid.
    let mut stat: libc::stat = unsafe { zeroed() };
    // SAFETY: `stat` is a place for the answer.
    (unsafe { libc::fstat(fd, &mut stat) } == 0).then_some((stat.st_dev, stat.st_ino))
}

/// ibv_close_device(3): the card stops working for the context's objects; the program may free their memory.
pub(crate) unsafe extern "C" fn close_device(context: *mut abi::ibv_context) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the verb's terms.
        let obj = unsafe { ContextHandle::obj(context)? };
        obj.close();
        if !obj.is_open() {
            // SAFETY: as above.
            if let Some(file) = file_of(unsafe { (*context).cmd_fd }) {
                forget(file, obj);
            }
        }
        // SAFETY: the program gives its reference up.
        unsafe { ContextHandle::release(context) };
        Ok(())
    })
}

/// ibv_import_device(3): a context by a duplicate of its `cmd_fd`, which goes with the new handle. One that
/// this process has open already is that same context; else it is another process's, a parent's perhaps.
pub(crate) unsafe extern "C" fn import_device(cmd_fd: c_int) -> *mut abi::ibv_context {
    edge::object(|| {
        let file = file_of(cmd_fd).ok_or(libc::EBADF)?;
        let mut opened = opened_contexts();
        let (obj, live) = match opened.get(&file).filter(|known| known.obj.is_ours()) {
            Some(known) => (known.obj.import().map_err(errno)?, Arc::clone(&known.live)),
            None => {
                let obj = Context::import_from(cmd_fd).map_err(errno)?;
                let new = Opened { obj: obj.clone(), live: Arc::default() };
                let live = Arc::clone(&new.live);
                opened.insert(file, new);
                (obj, live)
            }
        };
        // SAFETY: the program gives the descriptor up, as the import succeeded.
        let fd = unsafe { OwnedFd::from_raw_fd(cmd_fd) };
        Ok(ContextHandle::make(obj, live, cmd_fd, Some(fd)))
    })
}

/// The public structs of a new context. Extended functions that stay NULL are those the card does not offer:
/// the inlines of verbs.h answer EOPNOTSUPP for them.
fn tables(obj: &Context, cmd_fd: c_int) -> abi::verbs_context {
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
    verbs.post_srq_ops = Some(tags::post_srq_ops);
    verbs.create_qp_ex = Some(qp::create_qp_ex);
    verbs.close_xrcd = Some(xrcd::close_xrcd);
    verbs.open_xrcd = Some(xrcd::open_xrcd);
    verbs.open_qp = Some(xrcd::open_qp);
    verbs.advise_mr = Some(memory::advise_mr);
    verbs.alloc_null_mr = Some(memory::alloc_null_mr);
    verbs.alloc_dm = Some(memory::alloc_dm);
    verbs.free_dm = Some(memory::free_dm);
    verbs.reg_dm_mr = Some(memory::reg_dm_mr);

    let context = &mut verbs.context;
    context.device = device::star0();
    context.abi_compat = abi::VERBS_ABI_IS_EXTENDED.cast::<c_void>();
    context.async_fd = obj.async_fd();
    context.cmd_fd = cmd_fd;
    context.num_comp_vectors = std::thread::available_parallelism().map_or(1, |n| n.get() as c_int);
    context.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    context.ops.poll_cq = Some(poll::poll_cq);
    context.ops.req_notify_cq = Some(cq::req_notify_cq);
    context.ops.post_send = Some(post::post_send);
    context.ops.post_recv = Some(post::post_recv);
    context.ops.post_srq_recv = Some(post::post_srq_recv);
    context.ops.alloc_mw = Some(mw::alloc_mw);
    context.ops.bind_mw = Some(mw::bind_mw);
    context.ops.dealloc_mw = Some(mw::dealloc_mw);
    verbs
}
