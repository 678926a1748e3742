//! The verbs of memory that is more than a registered buffer: regions changed, null, on demand or over a
//! dma-buf, device memory, and handles of others.
//!
//! Owns the handle of device memory. It must not know where memory is.

use crate::context::ContextHandle;
use crate::edge::{self, Errno};
use crate::handle::{errno, given};
use crate::pd_mr::{MrHandle, PdHandle, rights};
use core::ffi::{c_int, c_uint, c_void};
use starverbs_abi as abi;
use starverbs_core::types::Sge;
use starverbs_verbs::{Advice, Dm, MemoryRange, Mr, Pd, Rereg};

/// ibv_rereg_mr(3): 0, or which of two ways it failed, with errno. The old region is valid after both, which
/// programs may rely on after the first alone: after IBV_REREG_MR_ERR_CMD they must not use it.
pub(crate) unsafe extern "C" fn rereg_mr(
    mr: *mut abi::ibv_mr,
    flags: c_int,
    pd: *mut abi::ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    edge::value(abi::IBV_REREG_MR_ERR_CMD, || {
        let (flags, access) = (flags as c_uint, access as c_uint);
        // SAFETY: the verb's terms.
        let Some(change) = (unsafe { checked(mr, flags, pd, addr, length, access) }) else {
            edge::set_errno(libc::EINVAL);
            return abi::IBV_REREG_MR_ERR_INPUT;
        };
        // SAFETY: the verb's terms.
        match unsafe { change_region(mr, change, access) } {
            Ok(()) => 0,
            Err(errno) => {
                edge::set_errno(errno);
                abi::IBV_REREG_MR_ERR_CMD
            }
        }
    })
}

/// What a call of ibv_rereg_mr changes; the access flags are still to be looked at.
#[derive(Clone, Copy)]
struct ReregChange {
    range: Option<(*mut c_void, usize)>,
    pd: Option<*mut abi::ibv_pd>,
    access: bool,
}

/// What libibverbs itself checks of a call of ibv_rereg_mr.
unsafe fn checked(
    mr: *mut abi::ibv_mr,
    flags: c_uint,
    pd: *mut abi::ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_uint,
) -> Option<ReregChange> {
    let has = |flag| flags & flag != 0;
    // SAFETY: the caller's terms.
    let user = unsafe { MrHandle::obj(mr) }.is_ok_and(Mr::is_user);
    let change = ReregChange {
        range: has(abi::IBV_REREG_MR_CHANGE_TRANSLATION).then_some((addr, length)),
        pd: has(abi::IBV_REREG_MR_CHANGE_PD).then_some(pd),
        access: has(abi::IBV_REREG_MR_CHANGE_ACCESS),
    };
    let known = flags != 0 && flags & !abi::IBV_REREG_MR_FLAGS_SUPPORTED == 0;
    let nowhere = change.range.is_some() && (addr.is_null() || length == 0);
    let nobody = change.pd.is_some() && pd.is_null();
    let stray = access != 0 && !change.access;
    (user && known && !nowhere && !nobody && !stray).then_some(change)
}

unsafe fn change_region(mr: *mut abi::ibv_mr, change: ReregChange, access: c_uint) -> Result<(), Errno> {
    // SAFETY: the caller's terms.
    let obj = unsafe { MrHandle::obj(mr)? };
    let pd: Option<&Pd> = match change.pd {
        // SAFETY: the caller's terms.
        Some(pd) => Some(unsafe { PdHandle::obj(pd)? }),
        None => None,
    };
    let access = if change.access { Some(rights(access)?) } else { None };
    let range = change.range.map(|(addr, length)| MemoryRange { addr: addr as u64, length: length as u64 });
    // SAFETY: what is registered is the program's affair (ibv_rereg_mr(3)).
    unsafe { obj.rereg(&Rereg { range, pd, access }) }.map_err(errno)?;
    // SAFETY: the caller's terms; the program does not use the struct meanwhile.
    unsafe {
        if let Some(pd) = change.pd {
            (*mr).pd = pd;
        }
        if let Some((addr, length)) = change.range {
            (*mr).addr = addr;
            (*mr).length = length;
        }
    }
    Ok(())
}

/// ibv_alloc_null_mr(3), through the context's table.
pub(crate) unsafe extern "C" fn alloc_null_mr(pd: *mut abi::ibv_pd) -> *mut abi::ibv_mr {
    edge::object(|| {
        // SAFETY: the verb's terms.
        let obj = Mr::null(unsafe { PdHandle::obj(pd)? }).map_err(errno)?;
        // SAFETY: `pd` is alive, as above.
        Ok(unsafe { MrHandle::make_nowhere(pd, obj) })
    })
}

/// ibv_reg_dmabuf_mr(3).
pub(crate) unsafe extern "C" fn reg_dmabuf_mr(
    pd: *mut abi::ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut abi::ibv_mr {
    edge::object(|| {
        let access = rights(access as c_uint)?;
        // SAFETY: the verb's terms.
        let obj = unsafe { PdHandle::obj(pd)? };
        let obj = Mr::of_fd(obj, fd, offset, length as u64, iova, access).map_err(errno)?;
        // SAFETY: `pd` is alive, as above.
        Ok(unsafe { MrHandle::make_nowhere(pd, obj) })
    })
}

/// ibv_advise_mr(3), through the context's table.
pub(crate) unsafe extern "C" fn advise_mr(
    pd: *mut abi::ibv_pd,
    advice: abi::ib_uverbs_advise_mr_advice,
    flags: u32,
    sg_list: *mut abi::ibv_sge,
    num_sge: u32,
) -> c_int {
    edge::int(|| {
        let advice = match advice {
            abi::IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH => Advice::Prefetch,
            abi::IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE => Advice::PrefetchWrite,
            abi::IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT => Advice::PrefetchNoFault,
            _ => return Err(libc::EOPNOTSUPP),
        };
        if flags & !abi::IB_UVERBS_ADVISE_MR_FLAG_FLUSH != 0 {
            return Err(libc::EINVAL);
        }
        // SAFETY: the verb's terms.
        let obj = unsafe { PdHandle::obj(pd)? };
        if num_sge == 0 {
            return Err(libc::EINVAL);
        }
        // SAFETY: the verb's terms; the two structs are laid out alike.
        let sges =
            unsafe { core::slice::from_raw_parts(given(sg_list)?.as_ptr().cast::<Sge>(), num_sge as usize) };
        obj.advise_mr(advice, flags != 0, sges).map_err(errno)
    })
}

const _: () = assert!(size_of::<Sge>() == size_of::<abi::ibv_sge>());

/// Device memory.
#[repr(C)]
struct DmHandle {
    ibv: abi::ibv_dm,
    obj: Dm,
}

impl DmHandle {
    /// The handle of device memory.
    ///
    /// # Safety
    /// `context` is alive.
    unsafe fn make(context: *mut abi::ibv_context, obj: Dm) -> *mut abi::ibv_dm {
        let ibv = abi::ibv_dm {
            context,
            memcpy_to_dm: Some(memcpy_to_dm),
            memcpy_from_dm: Some(memcpy_from_dm),
            comp_mask: 0,
            handle: obj.handle(),
        };
        // SAFETY: the caller's terms.
        unsafe { ContextHandle::retain(context) };
        Box::into_raw(Box::new(DmHandle { ibv, obj })).cast()
    }

    /// The card's side of device memory, or EINVAL for NULL.
    ///
    /// # Safety
    /// `dm` is NULL, or comes from `make` and is alive.
    unsafe fn obj<'a>(dm: *mut abi::ibv_dm) -> Result<&'a Dm, Errno> {
        // SAFETY: the caller's terms; the struct is the first field of its handle.
        given(dm).map(|d| unsafe { &(*d.as_ptr().cast::<DmHandle>()).obj })
    }

    /// Frees the handle.
    ///
    /// # Safety
    /// `dm` comes from `make`, and the program gives it up.
    unsafe fn free(dm: *mut abi::ibv_dm) {
        // SAFETY: made with Box::into_raw.
        let handle = unsafe { Box::from_raw(dm.cast::<DmHandle>()) };
        // SAFETY: the handle held a reference.
        unsafe { ContextHandle::release(handle.ibv.context) };
    }
}

/// ibv_alloc_dm(3), through the context's table.
pub(crate) unsafe extern "C" fn alloc_dm(
    context: *mut abi::ibv_context,
    attr: *mut abi::ibv_alloc_dm_attr,
) -> *mut abi::ibv_dm {
    edge::object(|| {
        // SAFETY: the verb's terms.
        let attr = unsafe { given(attr)?.as_ref() };
        if attr.comp_mask != 0 {
            return Err(libc::EINVAL);
        }
        // SAFETY: the verb's terms.
        let obj = unsafe { ContextHandle::obj(context)? };
        let obj = Dm::alloc(obj, attr.length as u64, attr.log_align_req).map_err(errno)?;
        // SAFETY: `context` is alive, as above.
        Ok(unsafe { DmHandle::make(context, obj) })
    })
}

/// ibv_free_dm(3): EBUSY while regions are registered over it.
pub(crate) unsafe extern "C" fn free_dm(dm: *mut abi::ibv_dm) -> c_int {
    edge::int(|| {
        // SAFETY: the verb's terms.
        unsafe { DmHandle::obj(dm)? }.free().map_err(errno)?;
        // SAFETY: the program gives the handle up.
        unsafe { DmHandle::free(dm) };
        Ok(())
    })
}

/// ibv_reg_dm_mr(3), through the context's table.
pub(crate) unsafe extern "C" fn reg_dm_mr(
    pd: *mut abi::ibv_pd,
    dm: *mut abi::ibv_dm,
    offset: u64,
    length: usize,
    access: c_uint,
) -> *mut abi::ibv_mr {
    edge::object(|| {
        let access = rights(access)?;
        // SAFETY: the verb's terms.
        let (obj, dm) = unsafe { (PdHandle::obj(pd)?, DmHandle::obj(dm)?) };
        let obj = Mr::device(obj, dm, offset, length as u64, access).map_err(errno)?;
        // SAFETY: `pd` is alive, as above.
        Ok(unsafe { MrHandle::make_nowhere(pd, obj) })
    })
}

/// ibv_memcpy_to_dm(3), through the struct.
unsafe extern "C" fn memcpy_to_dm(
    dm: *mut abi::ibv_dm,
    offset: u64,
    from: *const c_void,
    length: usize,
) -> c_int {
    edge::int(|| {
        let from = given(from.cast_mut())?.as_ptr().cast::<u8>();
        // SAFETY: the verb's terms: `from` has `length` bytes.
        unsafe { DmHandle::obj(dm)?.copy_in(offset, from, length as u64) }.map_err(errno)
    })
}

/// ibv_memcpy_from_dm(3), through the struct.
unsafe extern "C" fn memcpy_from_dm(
    to: *mut c_void,
    dm: *mut abi::ibv_dm,
    offset: u64,
    length: usize,
) -> c_int {
    edge::int(|| {
        let to = given(to)?.as_ptr().cast::<u8>();
        // SAFETY: the verb's terms: `to` has room for `length` bytes.
        unsafe { DmHandle::obj(dm)?.copy_out(to, offset, length as u64) }.map_err(errno)
    })
}

/// A verb that makes one more handle of something that exists.
///
/// # Safety
/// `parent` is what `obj` and `make` take.
unsafe fn import<'a, P, T: 'a, O, H>(
    parent: *mut P,
    obj: unsafe fn(*mut P) -> Result<&'a T, Errno>,
    find: impl FnOnce(&T) -> starverbs_verbs::Result<O>,
    make: unsafe fn(*mut P, O) -> *mut H,
) -> *mut H {
    // SAFETY: the caller's terms, for both calls.
    edge::object(|| unsafe { Ok(make(parent, find(obj(parent)?).map_err(errno)?)) })
}

/// A verb that gives such a handle back: what it names stays.
///
/// # Safety
/// `handle` is NULL or what `free` takes.
unsafe fn unimport<H>(handle: *mut H, free: unsafe fn(*mut H)) {
    edge::value((), || {
        if !handle.is_null() {
            // SAFETY: the caller's terms.
            unsafe { free(handle) };
        }
    });
}

/// ibv_import_pd(3).
pub(crate) unsafe extern "C" fn import_pd(context: *mut abi::ibv_context, handle: u32) -> *mut abi::ibv_pd {
    // SAFETY: the verb's terms.
    unsafe { import(context, ContextHandle::obj, |obj| Pd::import(obj, handle), PdHandle::make) }
}

/// ibv_unimport_pd(3)
pub(crate) unsafe extern "C" fn unimport_pd(pd: *mut abi::ibv_pd) {
    // SAFETY: the verb's terms.
    unsafe { unimport(pd, PdHandle::free) }
}

/// ibv_import_mr(3): its address is NULL.
pub(crate) unsafe extern "C" fn import_mr(pd: *mut abi::ibv_pd, handle: u32) -> *mut abi::ibv_mr {
    // SAFETY: the verb's terms.
    unsafe { import(pd, PdHandle::obj, |obj| Mr::import(obj, handle), MrHandle::make_nowhere) }
}

/// ibv_unimport_mr(3)
pub(crate) unsafe extern "C" fn unimport_mr(mr: *mut abi::ibv_mr) {
    // SAFETY: the verb's terms.
    unsafe { unimport(mr, MrHandle::free) }
}

/// ibv_import_dm(3).
pub(crate) unsafe extern "C" fn import_dm(context: *mut abi::ibv_context, handle: u32) -> *mut abi::ibv_dm {
    // SAFETY: the verb's terms.
    unsafe { import(context, ContextHandle::obj, |obj| Dm::import(obj, handle), DmHandle::make) }
}

/// ibv_unimport_dm(3)
pub(crate) unsafe extern "C" fn unimport_dm(dm: *mut abi::ibv_dm) {
    // SAFETY: the verb's terms.
    unsafe { unimport(dm, DmHandle::free) }
}
