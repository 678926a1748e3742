//! Protection domains and memory regions.
//!
//! Owns the handles of both. It must not know what a key means.

use crate::context::ContextHandle;
use crate::edge::{self, Errno};
use crate::handle::{errno, given, zeroed};
use core::ffi::{c_int, c_uint, c_void};
use starverbs_abi as abi;
use starverbs_core::types::Access;
use starverbs_verbs::{Mr, Pd};

/// A protection domain.
#[repr(C)]
pub(crate) struct PdHandle {
    pub(crate) ibv: abi::ibv_pd,
    pub(crate) obj: Pd,
}

impl PdHandle {
    /// The handle of a new domain.
    ///
    /// # Safety
    /// `context` is alive.
    pub(crate) unsafe fn make(context: *mut abi::ibv_context, obj: Pd) -> *mut abi::ibv_pd {
        let ibv = abi::ibv_pd { context, handle: obj.handle() };
        // SAFETY: the caller's terms.
        unsafe { ContextHandle::retain(context) };
        Box::into_raw(Box::new(PdHandle { ibv, obj })).cast()
    }

    /// Frees the handle.
    ///
    /// # Safety
    /// `pd` comes from `make`, and the program gives it up.
    pub(crate) unsafe fn free(pd: *mut abi::ibv_pd) {
        // SAFETY: made with Box::into_raw.
        let handle = unsafe { Box::from_raw(pd.cast::<PdHandle>()) };
        // SAFETY: the handle held a reference.
        unsafe { ContextHandle::release(handle.ibv.context) };
    }

    /// The card's side of a protection domain, or EINVAL for NULL.
    ///
    /// # Safety
    /// `pd` is NULL, or comes from `alloc_pd` and is alive.
    pub(crate) unsafe fn obj<'a>(pd: *mut abi::ibv_pd) -> Result<&'a Pd, Errno> {
        // SAFETY: the caller's terms; the struct is the first field of its handle.
        given(pd).map(|p| unsafe { &(*p.as_ptr().cast::<PdHandle>()).obj })
    }
}

/// A memory region.
#[repr(C)]
pub(crate) struct MrHandle {
    pub(crate) ibv: abi::ibv_mr,
    pub(crate) obj: Mr,
}

impl MrHandle {
    /// The handle of a new region. `addr` is what the program gave, or NULL.
    ///
    /// # Safety
    /// `pd` comes from `alloc_pd` and is alive.
    pub(crate) unsafe fn make(pd: *mut abi::ibv_pd, addr: *mut c_void, obj: Mr) -> *mut abi::ibv_mr {
        // SAFETY: an ibv_mr is numbers and pointers: zero is valid.
        let mut ibv: abi::ibv_mr = unsafe { zeroed() };
        // SAFETY: the caller's terms.
        ibv.context = unsafe { (*pd).context };
        ibv.pd = pd;
        ibv.addr = addr;
        ibv.length = obj.length() as usize;
        ibv.lkey = obj.lkey();
        ibv.rkey = obj.rkey();
        ibv.handle = ibv.lkey;
        // SAFETY: the protection domain keeps its context alive.
        unsafe { ContextHandle::retain(ibv.context) };
        Box::into_raw(Box::new(MrHandle { ibv, obj })).cast()
    }

    /// The handle of a new region that has no address in the program.
    ///
    /// # Safety
    /// As of `make`.
    pub(crate) unsafe fn make_nowhere(pd: *mut abi::ibv_pd, obj: Mr) -> *mut abi::ibv_mr {
        // SAFETY: the caller's terms.
        unsafe { MrHandle::make(pd, core::ptr::null_mut(), obj) }
    }

    /// Frees the handle.
    ///
    /// # Safety
    /// `mr` comes from `make`, and the program gives it up.
    pub(crate) unsafe fn free(mr: *mut abi::ibv_mr) {
        // SAFETY: made with Box::into_raw.
        let handle = unsafe { Box::from_raw(mr.cast::<MrHandle>()) };
        // SAFETY: the handle held a reference.
        unsafe { ContextHandle::release(handle.ibv.context) };
    }

    /// The card's side of a region, or EINVAL for NULL.
    ///
    /// # Safety
    /// `mr` is NULL, or comes from `make` and is alive.
    pub(crate) unsafe fn obj<'a>(mr: *mut abi::ibv_mr) -> Result<&'a Mr, Errno> {
        // SAFETY: the caller's terms; the struct is the first field of its handle.
        given(mr).map(|m| unsafe { &(*m.as_ptr().cast::<MrHandle>()).obj })
    }
}

/// The rights in a verb's flags. A device may ignore every flag of the optional range (ibv_reg_mr(3)); those
/// this one has no name for go first.
pub(crate) fn rights(access: c_uint) -> Result<Access, Errno> {
    let optional = !(abi::IB_UVERBS_ACCESS_OPTIONAL_FIRST - 1)
        & (2 * abi::IB_UVERBS_ACCESS_OPTIONAL_LAST - 1)
        & !abi::IBV_ACCESS_RELAXED_ORDERING;
    Access::from_bits(access & !optional).ok_or(libc::EINVAL)
}

/// ibv_alloc_pd(3).
pub(crate) unsafe extern "C" fn alloc_pd(context: *mut abi::ibv_context) -> *mut abi::ibv_pd {
    edge::object(|| {
        // SAFETY: the verb's terms.
        let obj = Pd::alloc(unsafe { ContextHandle::obj(context)? }).map_err(errno)?;
        // SAFETY: `context` is alive, as above.
        Ok(unsafe { PdHandle::make(context, obj) })
    })
}

/// ibv_dealloc_pd(3): EBUSY while objects use it.
pub(crate) unsafe extern "C" fn dealloc_pd(pd: *mut abi::ibv_pd) -> c_int {
    edge::int(|| {
        // SAFETY: the verb's terms.
        unsafe { PdHandle::obj(pd)? }.dealloc().map_err(errno)?;
        // SAFETY: the program gives the handle up.
        unsafe { PdHandle::free(pd) };
        Ok(())
    })
}

/// Registers memory, on the terms of the verbs below.
unsafe fn register(
    pd: *mut abi::ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> Result<*mut abi::ibv_mr, Errno> {
    let access = rights(access)?;
    // SAFETY: the caller's terms.
    let obj = unsafe { PdHandle::obj(pd)? };
    // SAFETY: what is registered is the program's affair (ibv_reg_mr(3)).
    let obj = unsafe { Mr::reg(obj, addr as u64, length as u64, iova, access) }.map_err(errno)?;
    // SAFETY: `pd` is alive, as above.
    Ok(unsafe { MrHandle::make(pd, addr, obj) })
}

/// ibv_reg_mr(3) as a symbol.
pub(crate) unsafe extern "C" fn reg_mr(
    pd: *mut abi::ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut abi::ibv_mr {
    // SAFETY: the verb's terms.
    edge::object(|| unsafe { register(pd, addr, length, addr as u64, access as c_uint) })
}

/// ibv_reg_mr_iova(3) as a symbol.
pub(crate) unsafe extern "C" fn reg_mr_iova(
    pd: *mut abi::ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut abi::ibv_mr {
    // SAFETY: the verb's terms.
    edge::object(|| unsafe { register(pd, addr, length, iova, access as c_uint) })
}

/// ibv_reg_mr_iova2: what the inlines call when optional access flags may be set.
pub(crate) unsafe extern "C" fn reg_mr_iova2(
    pd: *mut abi::ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut abi::ibv_mr {
    // SAFETY: the verb's terms.
    edge::object(|| unsafe { register(pd, addr, length, iova, access) })
}

/// ibv_dereg_mr(3).
pub(crate) unsafe extern "C" fn dereg_mr(mr: *mut abi::ibv_mr) -> c_int {
    edge::int(|| {
        // SAFETY: the verb's terms.
        unsafe { MrHandle::obj(mr)? }.dereg().map_err(errno)?;
        // SAFETY: the program gives the handle up.
        unsafe { MrHandle::free(mr) };
        Ok(())
    })
}
