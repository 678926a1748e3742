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
struct MrHandle {
    ibv: abi::ibv_mr,
    obj: Mr,
}

/// ibv_alloc_pd(3).
pub(crate) unsafe extern "C" fn alloc_pd(context: *mut abi::ibv_context) -> *mut abi::ibv_pd {
    edge::object(|| {
        // SAFETY: the verb's terms.
        let obj = Pd::alloc(unsafe { ContextHandle::obj(context)? }).map_err(errno)?;
        let ibv = abi::ibv_pd { context, handle: obj.id().0 };
        // SAFETY: `context` is alive, as above.
        unsafe { ContextHandle::retain(context) };
        Ok(Box::into_raw(Box::new(PdHandle { ibv, obj })).cast())
    })
}

/// ibv_dealloc_pd(3): EBUSY while objects use it.
pub(crate) unsafe extern "C" fn dealloc_pd(pd: *mut abi::ibv_pd) -> c_int {
    edge::int(|| {
        // SAFETY: the verb's terms.
        unsafe { PdHandle::obj(pd)? }.dealloc().map_err(errno)?;
        // SAFETY: the program gives the handle up, and it was made with Box::into_raw.
        let handle = unsafe { Box::from_raw(pd.cast::<PdHandle>()) };
        // SAFETY: the handle held a reference.
        unsafe { ContextHandle::release(handle.ibv.context) };
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
    // A device may ignore every flag of the optional range (ibv_reg_mr(3)); those this one has no name for go first.
    let optional = !(abi::IB_UVERBS_ACCESS_OPTIONAL_FIRST - 1)
        & (2 * abi::IB_UVERBS_ACCESS_OPTIONAL_LAST - 1)
        & !abi::IBV_ACCESS_RELAXED_ORDERING;
    let access = Access::from_bits(access & !optional).ok_or(libc::EINVAL)?;
    // SAFETY: the caller's terms.
    let obj = unsafe { PdHandle::obj(pd)? };
    let obj = Mr::reg(obj, addr as u64, length as u64, iova, access).map_err(errno)?;
    // SAFETY: an ibv_mr is numbers and pointers: zero is valid.
    let mut ibv: abi::ibv_mr = unsafe { zeroed() };
    // SAFETY: `pd` is alive, as above.
    ibv.context = unsafe { (*pd).context };
    ibv.pd = pd;
    ibv.addr = addr;
    ibv.length = length;
    ibv.lkey = obj.lkey();
    ibv.rkey = obj.rkey();
    ibv.handle = ibv.lkey;
    // SAFETY: the protection domain keeps its context alive.
    unsafe { ContextHandle::retain(ibv.context) };
    Ok(Box::into_raw(Box::new(MrHandle { ibv, obj })).cast())
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

/// ibv_reg_dmabuf_mr(3): memory of other devices is not offered.
pub(crate) unsafe extern "C" fn reg_dmabuf_mr(
    _pd: *mut abi::ibv_pd,
    _offset: u64,
    _length: usize,
    _iova: u64,
    _fd: c_int,
    _access: c_int,
) -> *mut abi::ibv_mr {
    edge::object(|| Err(libc::EOPNOTSUPP))
}

/// ibv_rereg_mr(3): not offered; the region stays as it was.
pub(crate) unsafe extern "C" fn rereg_mr(
    _mr: *mut abi::ibv_mr,
    _flags: c_int,
    _pd: *mut abi::ibv_pd,
    _addr: *mut c_void,
    _length: usize,
    _access: c_int,
) -> c_int {
    edge::set_errno(libc::EOPNOTSUPP);
    abi::IBV_REREG_MR_ERR_INPUT
}

/// ibv_dereg_mr(3).
pub(crate) unsafe extern "C" fn dereg_mr(mr: *mut abi::ibv_mr) -> c_int {
    edge::int(|| {
        let handle = given(mr)?.as_ptr().cast::<MrHandle>();
        // SAFETY: the verb's terms; the struct is the first field of its handle.
        unsafe { &(*handle).obj }.dereg().map_err(errno)?;
        // SAFETY: the program gives the handle up, and it was made with Box::into_raw.
        let handle = unsafe { Box::from_raw(handle) };
        // SAFETY: the handle held a reference.
        unsafe { ContextHandle::release(handle.ibv.context) };
        Ok(())
    })
}
