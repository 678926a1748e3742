//! Memory windows.
//!
//! Owns their handle and the rule by which a window of type 1 changes its key. It must not know what a key
//! means.

use crate::context::ContextHandle;
use crate::edge::{self, Errno};
use crate::handle::{errno, given};
use crate::pd_mr::PdHandle;
use crate::post;
use crate::qp::QpHandle;
use core::ffi::c_int;
use starverbs_abi as abi;
use starverbs_core::mr::WindowType;
use starverbs_core::types::Access;
use starverbs_verbs::{Mw, MwBind, SendWr};

/// A memory window.
#[repr(C)]
struct MwHandle {
    ibv: abi::ibv_mw,
    obj: Mw,
}

/// What a bind gives. Local rights are passed over: a window is for peers.
const RIGHTS: u32 = abi::IBV_ACCESS_REMOTE_WRITE
    | abi::IBV_ACCESS_REMOTE_READ
    | abi::IBV_ACCESS_REMOTE_ATOMIC
    | abi::newer::IBV_ACCESS_FLUSH_GLOBAL
    | abi::IBV_ACCESS_ZERO_BASED;

/// The card's side of a window, or EINVAL for NULL.
///
/// # Safety
/// `mw` is NULL, or comes from `alloc_mw` and is alive.
unsafe fn obj<'a>(mw: *mut abi::ibv_mw) -> Result<&'a Mw, Errno> {
    // SAFETY: the caller's terms; the struct is the first field of its handle.
    given(mw).map(|m| unsafe { &(*m.as_ptr().cast::<MwHandle>()).obj })
}

/// ibv_alloc_mw(3), through the context's table.
pub(crate) unsafe extern "C" fn alloc_mw(pd: *mut abi::ibv_pd, kind: abi::ibv_mw_type) -> *mut abi::ibv_mw {
    edge::object(|| {
        let kind_of = WindowType::from_code(kind).ok_or(libc::EINVAL)?;
        // SAFETY: the verb's terms.
        let obj = Mw::alloc(unsafe { PdHandle::obj(pd)? }, kind_of).map_err(errno)?;
        // SAFETY: `pd` is alive, as above.
        let context = unsafe { (*pd).context };
        let rkey = obj.rkey();
        let ibv = abi::ibv_mw { context, pd, rkey, handle: rkey, type_: kind };
        // SAFETY: the protection domain keeps its context alive.
        unsafe { ContextHandle::retain(context) };
        Ok(Box::into_raw(Box::new(MwHandle { ibv, obj })).cast())
    })
}

/// ibv_dealloc_mw(3), through the context's table.
pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut abi::ibv_mw) -> c_int {
    edge::int(|| {
        // SAFETY: the verb's terms.
        unsafe { obj(mw)? }.dealloc().map_err(errno)?;
        // SAFETY: the program gives the handle up, and it was made with Box::into_raw.
        let handle = unsafe { Box::from_raw(mw.cast::<MwHandle>()) };
        // SAFETY: the handle held a reference.
        unsafe { ContextHandle::release(handle.ibv.context) };
        Ok(())
    })
}

/// A bind in the card's words. EINVAL: unknown rights or flags, or bytes of no region.
///
/// # Safety
/// `mw` as in `obj`; the bind's region is NULL or alive.
pub(crate) unsafe fn bind_wr(
    mw: *mut abi::ibv_mw,
    wr_id: u64,
    flags: u32,
    rkey: u32,
    bind: &abi::ibv_mw_bind_info,
) -> Result<SendWr<'static>, Errno> {
    // SAFETY: the caller's terms.
    let obj = unsafe { obj(mw)? };
    let access = Access::from_bits(bind.mw_access_flags & RIGHTS).ok_or(libc::EINVAL)?;
    let nowhere = bind.mr.is_null() && (bind.addr != 0 || bind.length != 0);
    let unbinds = bind.mr.is_null() || bind.length == 0;
    if bind.mw_access_flags & !(RIGHTS | abi::IBV_ACCESS_LOCAL_WRITE) != 0
        || nowhere
        || (unbinds && obj.kind() == WindowType::Two)
    {
        return Err(libc::EINVAL);
    }
    // SAFETY: not NULL where it is read, so alive, on the caller's terms.
    let mr = if unbinds { 0 } else { unsafe { (*bind.mr).lkey } };
    let to = MwBind { mr, addr: bind.addr, length: bind.length, access };
    Ok(obj.bind_wr(wr_id, post::send_flags(flags)?, rkey, &to))
}

/// The next key of a window, as ibv_inc_rkey(3) makes it.
fn next_key(rkey: u32) -> u32 {
    (rkey & !0xff) | (rkey.wrapping_add(1) & 0xff)
}

/// ibv_bind_mw(3), through the context's table: windows of type 1.
pub(crate) unsafe extern "C" fn bind_mw(
    qp: *mut abi::ibv_qp,
    mw: *mut abi::ibv_mw,
    bind: *mut abi::ibv_mw_bind,
) -> c_int {
    edge::int(|| {
        // SAFETY: NULL or a struct of the caller's, on the verb's terms.
        let bind = unsafe { bind.as_ref() }.ok_or(libc::EINVAL)?;
        // SAFETY: the verb's terms.
        let (qp, kind) = unsafe { (QpHandle::obj(qp)?, obj(mw)?.kind()) };
        if kind != WindowType::One {
            return Err(libc::EINVAL);
        }
        // SAFETY: `mw` is alive, as above.
        let rkey = next_key(unsafe { (*mw).rkey });
        // SAFETY: the verb's terms.
        let wr = unsafe { bind_wr(mw, bind.wr_id, bind.send_flags, rkey, &bind.bind_info)? };
        let mut poster = qp.post_send();
        poster.push(&wr).map_err(errno)?;
        // SAFETY: `mw` is alive, as above; the program reads the new key after this call.
        unsafe { (*mw).rkey = rkey };
        poster.ring();
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_change_in_their_low_bits() {
        assert_eq!((next_key(0x1234_56fe), next_key(0x1234_56ff)), (0x1234_56ff, 0x1234_5600));
    }
}
