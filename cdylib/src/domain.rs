//! Thread domains and parent domains: ibv_alloc_td(3), ibv_alloc_parent_domain(3).
//!
//! Owns the handle of a thread domain and the calls of a program's allocator. A parent domain is a protection
//! domain with the handle of one; `pd_mr` ends both. It must not know what lies in the memory.

use crate::context::ContextHandle;
use crate::edge::{self, Errno};
use crate::handle::{beginning, errno, given};
use crate::pd_mr::PdHandle;
use core::alloc::Layout;
use core::ffi::{c_int, c_void};
use core::mem::offset_of;
use core::ptr::NonNull;
use starverbs_abi as abi;
use starverbs_verbs::{AllocResult, Memory, Pd, ProgramMemory, Resource, Td};
use std::sync::Arc;

/// IBV_ALLOCATOR_USE_DEFAULT
const USE_DEFAULT: *mut c_void = core::ptr::without_provenance_mut(usize::MAX);

/// IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC, of later headers: buffers may lie outside a
/// confidential guest's memory. This device reaches the guest's own, so there is nothing to do.
const ALLOW_CC_UNPROTECTED: u32 = 1 << 2;

/// A thread domain.
#[repr(C)]
struct TdHandle {
    ibv: abi::ibv_td,
    obj: Td,
}

/// ibv_alloc_td(3), through the context's table.
pub(crate) unsafe extern "C" fn alloc_td(
    context: *mut abi::ibv_context,
    init: *mut abi::ibv_td_init_attr,
) -> *mut abi::ibv_td {
    edge::object(|| {
        // SAFETY: NULL or a struct of the caller's, on the verb's terms.
        if unsafe { init.as_ref() }.ok_or(libc::EINVAL)?.comp_mask != 0 {
            return Err(libc::EINVAL);
        }
        // SAFETY: the verb's terms.
        let obj = Td::alloc(unsafe { ContextHandle::obj(context)? }).map_err(errno)?;
        // SAFETY: `context` is alive, as above.
        unsafe { ContextHandle::retain(context) };
        Ok(Box::into_raw(Box::new(TdHandle { ibv: abi::ibv_td { context }, obj })).cast())
    })
}

/// ibv_dealloc_td(3), through the context's table: EBUSY while a parent domain names it.
pub(crate) unsafe extern "C" fn dealloc_td(td: *mut abi::ibv_td) -> c_int {
    edge::int(|| {
        let handle = given(td)?.as_ptr().cast::<TdHandle>();
        // SAFETY: the verb's terms; the struct is the first field of its handle.
        unsafe { &(*handle).obj }.dealloc().map_err(errno)?;
        // SAFETY: the program gives the handle up, and it was made with Box::into_raw.
        let handle = unsafe { Box::from_raw(handle) };
        // SAFETY: the handle held a reference.
        unsafe { ContextHandle::release(handle.ibv.context) };
        Ok(())
    })
}

type Alloc = unsafe extern "C" fn(*mut abi::ibv_pd, *mut c_void, usize, usize, u64) -> *mut c_void;
type Free = unsafe extern "C" fn(*mut abi::ibv_pd, *mut c_void, *mut c_void, u64);

/// A program's allocator. The resource type of its calls has no driver in its upper half
/// (RDMA_DRIVER_UNKNOWN), and in its lower half the number of a [`Resource`].
struct Allocator {
    alloc: Alloc,
    free: Free,
    /// The parent domain.
    pd: *mut abi::ibv_pd,
    /// The program's own.
    context: *mut c_void,
}

// SAFETY: the pointers are only handed back to the program, whose functions must serve every thread that uses
// objects of the domain.
unsafe impl Send for Allocator {}
// SAFETY: as above.
unsafe impl Sync for Allocator {}

// SAFETY: the program vouches for its memory (ibv_alloc_parent_domain(3)).
unsafe impl Memory for Allocator {
    fn alloc(&self, layout: Layout, resource: Resource) -> AllocResult {
        // SAFETY: the program's function, called on the terms of the man page.
        let at =
            unsafe { (self.alloc)(self.pd, self.context, layout.size(), layout.align(), resource as u64) };
        if at == USE_DEFAULT {
            return AllocResult::UseDefault;
        }
        NonNull::new(at.cast()).map_or(AllocResult::Failed, AllocResult::At)
    }

    unsafe fn free(&self, at: NonNull<u8>, resource: Resource) {
        // SAFETY: as above; the memory came from `alloc`.
        unsafe { (self.free)(self.pd, self.context, at.as_ptr().cast(), resource as u64) };
    }
}

/// The attributes that a program's struct reaches to: its last ones came later.
///
/// # Safety
/// `attr` names a struct with every field that its mask names.
unsafe fn reached(attr: *const abi::ibv_parent_domain_init_attr) -> abi::ibv_parent_domain_init_attr {
    // SAFETY: the caller's terms.
    unsafe {
        let room = if (*attr).comp_mask & abi::IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT != 0 {
            size_of::<abi::ibv_parent_domain_init_attr>()
        } else if (*attr).comp_mask & abi::IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS != 0 {
            offset_of!(abi::ibv_parent_domain_init_attr, pd_context)
        } else {
            offset_of!(abi::ibv_parent_domain_init_attr, alloc)
        };
        beginning(attr, room)
    }
}

/// What a program says of its memory; EINVAL: one function without the other, or a mask of unknown bits.
fn memory(attr: &abi::ibv_parent_domain_init_attr, pd: *mut abi::ibv_pd) -> Result<ProgramMemory, Errno> {
    let allocators = abi::IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS;
    let pd_context = abi::IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
    if attr.comp_mask & !(allocators | pd_context | ALLOW_CC_UNPROTECTED) != 0 {
        return Err(libc::EINVAL);
    }
    if attr.comp_mask & allocators == 0 {
        return Ok(None);
    }
    let (Some(alloc), Some(free)) = (attr.alloc, attr.free) else { return Err(libc::EINVAL) };
    let given = attr.comp_mask & pd_context != 0;
    let context = if given { attr.pd_context } else { core::ptr::null_mut() };
    Ok(Some(Arc::new(Allocator { alloc, free, pd, context })))
}

/// ibv_alloc_parent_domain(3), through the context's table.
pub(crate) unsafe extern "C" fn alloc_parent_domain(
    context: *mut abi::ibv_context,
    attr: *mut abi::ibv_parent_domain_init_attr,
) -> *mut abi::ibv_pd {
    edge::object(|| {
        given(context)?;
        // SAFETY: a struct of the caller's, on the verb's terms.
        let attr = unsafe { reached(given(attr)?.as_ptr()) };
        let mut place = Box::<PdHandle>::new_uninit();
        let memory = memory(&attr, place.as_mut_ptr().cast())?;
        // SAFETY: NULL or alive, on the verb's terms.
        let (of, td) = unsafe { (PdHandle::obj(attr.pd)?, attr.td.cast::<TdHandle>().as_ref()) };
        let obj = Pd::parent_of(of, td.map(|td| &td.obj), memory).map_err(errno)?;
        let ibv = abi::ibv_pd { context, handle: obj.handle() };
        place.write(PdHandle { ibv, obj });
        // SAFETY: `context` is alive, on the verb's terms.
        unsafe { ContextHandle::retain(context) };
        // SAFETY: written just now.
        Ok(Box::into_raw(unsafe { place.assume_init() }).cast())
    })
}
