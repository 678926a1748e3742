//! XRC domains, and the QPs that are opened in them.
//!
//! Owns their handle. It must not know what a domain is on the card.

use crate::context::ContextHandle;
use crate::edge::{self, Errno};
use crate::handle::{errno, given};
use crate::qp;
use core::ffi::c_int;
use starverbs_abi as abi;
use starverbs_verbs::Xrcd;

/// An XRC domain.
#[repr(C)]
struct XrcdHandle {
    ibv: abi::ibv_xrcd,
    obj: Xrcd,
}

/// The card's side of an XRC domain, or EINVAL for NULL.
///
/// # Safety
/// `xrcd` is NULL, or comes from `open_xrcd` and is alive.
pub(crate) unsafe fn obj<'a>(xrcd: *mut abi::ibv_xrcd) -> Result<&'a Xrcd, Errno> {
    // SAFETY: the caller's terms; the struct is the first field of its handle.
    given(xrcd).map(|x| unsafe { &(*x.as_ptr().cast::<XrcdHandle>()).obj })
}

/// ibv_open_xrcd(3), through the context's table.
pub(crate) unsafe extern "C" fn open_xrcd(
    context: *mut abi::ibv_context,
    init: *mut abi::ibv_xrcd_init_attr,
) -> *mut abi::ibv_xrcd {
    edge::object(|| {
        // SAFETY: NULL or a struct of the caller's, on the verb's terms.
        let init = unsafe { init.as_ref() }.ok_or(libc::EINVAL)?;
        let needed = abi::IBV_XRCD_INIT_ATTR_FD | abi::IBV_XRCD_INIT_ATTR_OFLAGS;
        if init.comp_mask & needed != needed || init.comp_mask & !needed != 0 {
            return Err(libc::EINVAL);
        }
        if init.oflags & !(libc::O_CREAT | libc::O_EXCL) != 0 {
            return Err(libc::EINVAL);
        }
        let file = (init.fd != -1).then_some(init.fd);
        let (create, exclusive) = (init.oflags & libc::O_CREAT != 0, init.oflags & libc::O_EXCL != 0);
        // SAFETY: the verb's terms.
        let card = unsafe { ContextHandle::obj(context)? };
        let obj = Xrcd::open(card, file, create, exclusive).map_err(errno)?;
        // SAFETY: `context` is alive, as above.
        unsafe { ContextHandle::retain(context) };
        Ok(Box::into_raw(Box::new(XrcdHandle { ibv: abi::ibv_xrcd { context }, obj })).cast())
    })
}

/// ibv_close_xrcd(3), through the context's table.
pub(crate) unsafe extern "C" fn close_xrcd(xrcd: *mut abi::ibv_xrcd) -> c_int {
    edge::int(|| {
        // SAFETY: the verb's terms.
        unsafe { obj(xrcd)? }.close().map_err(errno)?;
        // SAFETY: the program gives the handle up, and it was made with Box::into_raw.
        let handle = unsafe { Box::from_raw(xrcd.cast::<XrcdHandle>()) };
        // SAFETY: the handle held a reference.
        unsafe { ContextHandle::release(handle.ibv.context) };
        Ok(())
    })
}

/// ibv_open_qp(3), through the context's table: EINVAL if the domain has no such QP.
pub(crate) unsafe extern "C" fn open_qp(
    context: *mut abi::ibv_context,
    attr: *mut abi::ibv_qp_open_attr,
) -> *mut abi::ibv_qp {
    edge::object(|| {
        // SAFETY: NULL or a struct of the caller's, on the verb's terms.
        let attr = unsafe { attr.as_ref() }.ok_or(libc::EINVAL)?;
        let needed = abi::IBV_QP_OPEN_ATTR_NUM | abi::IBV_QP_OPEN_ATTR_XRCD | abi::IBV_QP_OPEN_ATTR_TYPE;
        if attr.comp_mask & needed != needed || attr.comp_mask >= abi::IBV_QP_OPEN_ATTR_RESERVED {
            return Err(libc::EINVAL);
        }
        if attr.qp_type != abi::IBV_QPT_XRC_RECV {
            return Err(libc::EINVAL);
        }
        let own = attr.comp_mask & abi::IBV_QP_OPEN_ATTR_CONTEXT != 0;
        let qp_context = if own { attr.qp_context } else { core::ptr::null_mut() };
        // SAFETY: the verb's terms.
        unsafe { qp::open_xrc_recv(context, qp_context, obj(attr.xrcd)?, attr.qp_num) }
    })
}
