//! Shared receive queues.
//!
//! Owns their handle. It must not know which QPs take from them.

use crate::context::ContextHandle;
use crate::cq::CqHandle;
use crate::edge::{self, Errno};
use crate::handle::{beginning, cookie, errno, given, wait_for_acks, zeroed};
use crate::pd_mr::PdHandle;
use crate::tags;
use crate::xrcd;
use core::ffi::{c_int, c_void};
use core::mem::offset_of;
use core::sync::atomic::{AtomicU32, Ordering};
use starverbs_abi as abi;
use starverbs_verbs::{Cq, Srq, Xrcd};

/// A shared receive queue.
#[repr(C)]
pub(crate) struct SrqHandle {
    ibv: abi::ibv_srq,
    obj: Srq,
    /// Events that ibv_get_async_event returned.
    pub(crate) delivered: AtomicU32,
}

impl SrqHandle {
    /// The card's side of a shared receive queue, or EINVAL for NULL.
    ///
    /// # Safety
    /// `srq` is NULL, or comes from `create` and is alive.
    #[inline]
    pub(crate) unsafe fn obj<'a>(srq: *mut abi::ibv_srq) -> Result<&'a Srq, Errno> {
        // SAFETY: the caller's terms; the struct is the first field of its handle.
        given(srq).map(|s| unsafe { &(*s.as_ptr().cast::<SrqHandle>()).obj })
    }
}

/// What a shared receive queue is for.
enum SrqType<'a> {
    Basic,
    Xrc(&'a Xrcd, &'a Cq),
    /// So many tags
    Tagged(&'a Cq, u32),
}

/// Makes a shared receive queue, on the terms of ibv_create_srq(3), and says in `attr` what was granted.
unsafe fn create(
    pd: *mut abi::ibv_pd,
    kind: SrqType<'_>,
    srq_context: *mut c_void,
    attr: &mut abi::ibv_srq_attr,
) -> Result<*mut abi::ibv_srq, Errno> {
    // SAFETY: the verb's terms.
    let card = unsafe { PdHandle::obj(pd)? };
    // SAFETY: `pd` is alive, as above.
    let context = unsafe { (*pd).context };
    let mut place = Box::<SrqHandle>::new_uninit();
    let name = cookie(place.as_mut_ptr());
    // The limit is not looked at on creation (ibv_create_srq(3)).
    // SAFETY: the protection domain keeps its context alive.
    unsafe { ContextHandle::of(context).live.make_room()? };
    let made = match kind {
        SrqType::Basic => Srq::create(card, attr.max_wr, attr.max_sge, 0, name),
        SrqType::Xrc(xrcd, cq) => Srq::create_xrc(card, xrcd, cq, attr.max_wr, attr.max_sge, name),
        SrqType::Tagged(cq, tags) => Srq::create_tagged(card, cq, tags, attr.max_wr, attr.max_sge, name),
    };
    let obj = made.map_err(errno)?;
    let granted = obj.query().map_err(errno)?;
    (attr.max_wr, attr.max_sge) = (granted.max_wr, granted.max_sge);

    // SAFETY: an ibv_srq is numbers, pointers and pthread fields: zero is valid.
    let mut ibv: abi::ibv_srq = unsafe { zeroed() };
    ibv.context = context;
    ibv.srq_context = srq_context;
    ibv.pd = pd;
    ibv.handle = obj.number();
    ibv.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    ibv.cond = libc::PTHREAD_COND_INITIALIZER;
    place.write(SrqHandle { ibv, obj, delivered: AtomicU32::new(0) });
    // SAFETY: the protection domain keeps its context alive.
    unsafe {
        ContextHandle::of(context).live.add(name);
        ContextHandle::retain(context);
    }
    // SAFETY: written above.
    Ok(Box::into_raw(unsafe { place.assume_init() }).cast())
}

/// ibv_create_srq(3).
pub(crate) unsafe extern "C" fn create_srq(
    pd: *mut abi::ibv_pd,
    init: *mut abi::ibv_srq_init_attr,
) -> *mut abi::ibv_srq {
    edge::object(|| {
        // SAFETY: NULL or a struct of the caller's, on the verb's terms.
        let init = unsafe { init.as_mut() }.ok_or(libc::EINVAL)?;
        // SAFETY: the verb's terms.
        unsafe { create(pd, SrqType::Basic, init.srq_context, &mut init.attr) }
    })
}

/// ibv_create_srq_ex(3), through the context's table: basic queues, XRC's, and those that match tags.
pub(crate) unsafe extern "C" fn create_srq_ex(
    _context: *mut abi::ibv_context,
    init: *mut abi::ibv_srq_init_attr_ex,
) -> *mut abi::ibv_srq {
    edge::object(|| {
        let init = given(init)?.as_ptr();
        // SAFETY: a struct of the caller's, on the verb's terms; its last field came later, and is there if
        // it is named.
        let (asked, attr) = unsafe {
            let later = (*init).comp_mask & abi::IBV_SRQ_INIT_ATTR_TM != 0;
            let first = offset_of!(abi::ibv_srq_init_attr_ex, tm_cap);
            let room = if later { size_of::<abi::ibv_srq_init_attr_ex>() } else { first };
            (beginning(init, room), &mut (*init).attr)
        };
        let mask = asked.comp_mask;
        if mask & !(abi::IBV_SRQ_INIT_ATTR_RESERVED - 1) != 0 {
            return Err(libc::EINVAL);
        }
        let pd = mask & abi::IBV_SRQ_INIT_ATTR_PD != 0;
        if mask & abi::IBV_SRQ_INIT_ATTR_TYPE != 0 && asked.srq_type == abi::IBV_SRQT_XRC {
            let needed = abi::IBV_SRQ_INIT_ATTR_XRCD | abi::IBV_SRQ_INIT_ATTR_CQ;
            if mask & needed != needed || !pd {
                return Err(libc::EINVAL);
            }
            // SAFETY: the verb's terms.
            unsafe {
                let xrc = SrqType::Xrc(xrcd::obj(asked.xrcd)?, CqHandle::obj(asked.cq)?);
                return create(asked.pd, xrc, asked.srq_context, attr);
            }
        }
        if mask & abi::IBV_SRQ_INIT_ATTR_TYPE != 0 && asked.srq_type == abi::IBV_SRQT_TM {
            let needed = abi::IBV_SRQ_INIT_ATTR_TM | abi::IBV_SRQ_INIT_ATTR_CQ;
            if mask & needed != needed || !pd || asked.tm_cap.max_ops > tags::MAX_OPS {
                return Err(libc::EINVAL);
            }
            // SAFETY: the verb's terms.
            unsafe {
                let tagged = SrqType::Tagged(CqHandle::obj(asked.cq)?, asked.tm_cap.max_num_tags);
                return create(asked.pd, tagged, asked.srq_context, attr);
            }
        }
        let basic = mask & abi::IBV_SRQ_INIT_ATTR_TYPE == 0 || asked.srq_type == abi::IBV_SRQT_BASIC;
        /* a domain and a completion queue are of no use to it, and passed over, as elsewhere */
        if !basic || mask & abi::IBV_SRQ_INIT_ATTR_TM != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        if !pd {
            return Err(libc::EINVAL);
        }
        // SAFETY: the verb's terms.
        unsafe { create(asked.pd, SrqType::Basic, asked.srq_context, attr) }
    })
}

/// ibv_modify_srq(3).
pub(crate) unsafe extern "C" fn modify_srq(
    srq: *mut abi::ibv_srq,
    attr: *mut abi::ibv_srq_attr,
    mask: c_int,
) -> c_int {
    edge::int(|| {
        // SAFETY: NULL or a struct of the caller's, on the verb's terms.
        let attr = unsafe { attr.as_ref() }.ok_or(libc::EINVAL)?;
        let mask = mask as u32;
        if mask & !(abi::IBV_SRQ_MAX_WR | abi::IBV_SRQ_LIMIT) != 0 {
            return Err(libc::EINVAL);
        }
        let max_wr = (mask & abi::IBV_SRQ_MAX_WR != 0).then_some(attr.max_wr);
        let limit = (mask & abi::IBV_SRQ_LIMIT != 0).then_some(attr.srq_limit);
        // SAFETY: the verb's terms.
        unsafe { SrqHandle::obj(srq)? }.modify(max_wr, limit).map_err(errno)
    })
}

/// ibv_query_srq(3).
pub(crate) unsafe extern "C" fn query_srq(srq: *mut abi::ibv_srq, attr: *mut abi::ibv_srq_attr) -> c_int {
    edge::int(|| {
        let to = given(attr)?;
        // SAFETY: the verb's terms.
        let now = unsafe { SrqHandle::obj(srq)? }.query().map_err(errno)?;
        let attr = abi::ibv_srq_attr { max_wr: now.max_wr, max_sge: now.max_sge, srq_limit: now.limit };
        // SAFETY: the verb's terms.
        unsafe { to.write(attr) };
        Ok(())
    })
}

/// ibv_get_srq_num(3), through the context's table.
pub(crate) unsafe extern "C" fn get_srq_num(srq: *mut abi::ibv_srq, number: *mut u32) -> c_int {
    edge::int(|| {
        let to = given(number)?;
        // SAFETY: the verb's terms.
        unsafe { to.write(SrqHandle::obj(srq)?.number()) };
        Ok(())
    })
}

/// ibv_destroy_srq(3): EBUSY while QPs use it; waits until every event of it is acknowledged.
pub(crate) unsafe extern "C" fn destroy_srq(srq: *mut abi::ibv_srq) -> c_int {
    edge::int(|| {
        // SAFETY: the verb's terms.
        unsafe { SrqHandle::obj(srq)? }.destroy().map_err(errno)?;
        let handle = srq.cast::<SrqHandle>();
        // SAFETY: the handle and its context are alive until the box is dropped; once it is off the list no
        // event is counted for it any more.
        unsafe {
            let context = (*handle).ibv.context;
            ContextHandle::of(context).live.remove(cookie(handle));
            let ibv = &raw mut (*handle).ibv;
            let delivered = (*handle).delivered.load(Ordering::Acquire);
            wait_for_acks(
                &raw mut (*ibv).mutex,
                &raw mut (*ibv).cond,
                &raw mut (*ibv).events_completed,
                delivered,
            );
            drop(Box::from_raw(handle));
            ContextHandle::release(context);
        }
        Ok(())
    })
}
