//! Queue pairs: create, modify, query, destroy.
//!
//! Owns their handle. It must not know the state machine; posting is next door in `post`.

use crate::context::ContextHandle;
use crate::cq::CqHandle;
use crate::edge::{self, Errno};
use crate::handle::{beginning, cookie, errno, given, wait_for_acks, zeroed};
use crate::pd_mr::PdHandle;
use crate::qp_attr::{attr_in, attr_out, cap, check_create_flags, create_flags, qp_type};
use crate::query::put_prefix;
use crate::srq::SrqHandle;
use crate::stardv::qp::{CREATE_FLAGS, RPC, flagged};
use crate::wr::{self, Building, QpExHandle};
use crate::xrcd;
use core::ffi::{c_int, c_void};
use core::mem::{MaybeUninit, offset_of};
use core::sync::atomic::{AtomicU32, Ordering};
use starverbs_abi as abi;
use starverbs_core::types::Gid;
use starverbs_verbs::{Preference, Qp, QpInit, Xrcd, send_ops_offered};

/// A queue pair. The public struct comes last, as it is longer for a queue pair with the send operations of
/// ibv_wr_post(3): `QpHandle<abi::ibv_qp_ex, _>`. What posting looks at, the context with the verb's address
/// and what stands before it, is one cache line.
#[repr(C, align(64))]
pub(crate) struct QpHandle<P = abi::ibv_qp, X = ()> {
    pub(crate) obj: Qp,
    /// Events that ibv_get_async_event returned.
    pub(crate) delivered: AtomicU32,
    sq_sig_all: bool,
    /// It is a [`QpExHandle`].
    extended: bool,
    pub(crate) ibv: P,
    pub(crate) more: X,
}

const _: () = assert!(offset_of!(QpHandle, ibv) == offset_of!(QpExHandle, ibv));

impl QpHandle {
    /// The handle around a queue pair.
    ///
    /// # Safety
    /// `qp` comes from `create`.
    #[inline]
    pub(crate) unsafe fn of(qp: *mut abi::ibv_qp) -> *mut QpHandle {
        qp.wrapping_byte_sub(offset_of!(QpHandle, ibv)).cast()
    }

    /// The card's side of a queue pair, or EINVAL for NULL.
    ///
    /// # Safety
    /// `qp` is NULL, or comes from `create` and is alive.
    #[inline]
    pub(crate) unsafe fn obj<'a>(qp: *mut abi::ibv_qp) -> Result<&'a Qp, Errno> {
        // SAFETY: the caller's terms.
        given(qp).map(|q| unsafe { &(*Self::of(q.as_ptr())).obj })
    }

    /// Writes a new handle's public struct in place, and gives its address to C.
    fn publish<P, X>(place: Box<MaybeUninit<QpHandle<P, X>>>, whole: QpHandle<P, X>) -> *mut abi::ibv_qp {
        let handle = Box::into_raw(Box::write(place, whole));
        // SAFETY: just written; both kinds of public struct begin with an ibv_qp.
        unsafe { &raw mut (*handle).ibv }.cast()
    }
}

/// The public struct of a queue pair, without the objects that it uses.
fn ibv_qp(
    context: *mut abi::ibv_context,
    obj: &Qp,
    kind: abi::ibv_qp_type,
    qp_context: *mut c_void,
) -> abi::ibv_qp {
    // SAFETY: an ibv_qp is numbers, pointers and pthread fields: zero is valid.
    let mut ibv: abi::ibv_qp = unsafe { zeroed() };
    ibv.context = context;
    ibv.qp_context = qp_context;
    ibv.qp_num = obj.number();
    ibv.handle = ibv.qp_num;
    ibv.state = abi::IBV_QPS_RESET;
    ibv.qp_type = kind;
    ibv.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    ibv.cond = libc::PTHREAD_COND_INITIALIZER;
    ibv
}

/// A handle of a receiving XRC queue pair, which has no objects that it uses, in place.
///
/// # Safety
/// `context` is alive.
unsafe fn xrc_handle(
    mut place: Box<MaybeUninit<QpHandle>>,
    context: *mut abi::ibv_context,
    qp_context: *mut c_void,
    obj: Qp,
) -> *mut abi::ibv_qp {
    let name = cookie(place.as_mut_ptr());
    let mut ibv = ibv_qp(context, &obj, abi::IBV_QPT_XRC_RECV, qp_context);
    ibv.state = obj.state() as abi::ibv_qp_state;
    // SAFETY: the caller's terms.
    unsafe {
        ContextHandle::of(context).live.add(name);
        ContextHandle::retain(context);
    }
    let delivered = AtomicU32::new(0);
    QpHandle::publish(place, QpHandle { obj, delivered, sq_sig_all: false, extended: false, ibv, more: () })
}

/// Makes a receiving XRC queue pair, on the terms of ibv_create_qp_ex(3).
unsafe fn create_xrc_recv(
    context: *mut abi::ibv_context,
    init: &mut abi::ibv_qp_init_attr_ex,
) -> Result<*mut abi::ibv_qp, Errno> {
    if init.comp_mask & abi::IBV_QP_INIT_ATTR_XRCD == 0 {
        return Err(libc::EINVAL);
    }
    let mut place = Box::<QpHandle>::new_uninit();
    let name = cookie(place.as_mut_ptr());
    // SAFETY: the verb's terms.
    let (domain, card) = unsafe { (xrcd::obj(init.xrcd)?, ContextHandle::obj(context)?) };
    // SAFETY: `context` is alive, as above.
    unsafe { ContextHandle::of(context).live.make_room()? };
    let obj = domain.create_qp(card, name).map_err(errno)?;
    init.cap = cap(&obj.caps());
    // SAFETY: `context` is alive, as above.
    Ok(unsafe { xrc_handle(place, context, init.qp_context, obj) })
}

/// Another handle of a receiving XRC queue pair, which other processes of its domain may have, for
/// ibv_open_qp(3).
///
/// # Safety
/// `context` is NULL or alive.
pub(crate) unsafe fn open_xrc_recv(
    context: *mut abi::ibv_context,
    qp_context: *mut c_void,
    domain: &Xrcd,
    qpn: u32,
) -> Result<*mut abi::ibv_qp, Errno> {
    let mut place = Box::<QpHandle>::new_uninit();
    let name = cookie(place.as_mut_ptr());
    // SAFETY: the caller's terms.
    let card = unsafe { ContextHandle::obj(context)? };
    // SAFETY: `context` is alive, as above.
    unsafe { ContextHandle::of(context).live.make_room()? };
    let obj = domain.open_qp(card, qpn, name).map_err(errno)?;
    // SAFETY: `context` is alive, as above.
    Ok(unsafe { xrc_handle(place, context, qp_context, obj) })
}

/// What ibv_create_qp_ex(3) may ask for beyond ibv_create_qp(3).
#[derive(Default)]
struct Extra {
    /// `IBV_QP_EX_WITH_*`: the queue pair has the functions of ibv_wr_post(3)
    ops: Option<u64>,
    /// IBV_QP_CREATE_BLOCK_SELF_MCAST_LB
    block_own_multicast: bool,
    /// Which end is to keep the connection
    star: Option<Preference>,
    /// It speaks StRoM's dialect
    rpc: bool,
}

/// Makes a queue pair, on the terms of ibv_create_qp(3), and says in `init.cap` what was granted.
unsafe fn create(
    pd: *mut abi::ibv_pd,
    init: *mut abi::ibv_qp_init_attr,
    extra: Extra,
) -> Result<*mut abi::ibv_qp, Errno> {
    let ops = extra.ops;
    let init = given(init)?.as_ptr();
    // SAFETY: the verb's terms: everything that the attributes point to is NULL or alive.
    let (asked, card, send_cq, recv_cq, srq, context) = unsafe {
        let asked = init.read();
        let srq = if asked.srq.is_null() { None } else { Some(SrqHandle::obj(asked.srq)?) };
        let send_cq = CqHandle::obj(asked.send_cq)?;
        // One that only sends needs none.
        let sends = asked.qp_type == abi::IBV_QPT_XRC_SEND && asked.recv_cq.is_null();
        let recv_cq = if sends { send_cq } else { CqHandle::obj(asked.recv_cq)? };
        (asked, PdHandle::obj(pd)?, send_cq, recv_cq, srq, (*pd).context)
    };
    if asked.qp_type == abi::IBV_QPT_XRC_RECV {
        return Err(libc::EINVAL);
    }
    let qp_type = qp_type(asked.qp_type)?;
    if ops.is_some_and(|ops| ops & !send_ops_offered(qp_type) != 0) {
        return Err(libc::EOPNOTSUPP);
    }
    let mut place = match ops {
        None => HandleMemory::Plain(Box::new_uninit()),
        Some(ops) => HandleMemory::Extended(Box::new_uninit(), ops),
    };
    let name = place.cookie();
    let wanted = QpInit {
        qp_type,
        send_cq,
        recv_cq,
        srq,
        max_send_wr: asked.cap.max_send_wr,
        max_recv_wr: if srq.is_some() { 0 } else { asked.cap.max_recv_wr },
        max_send_sge: asked.cap.max_send_sge,
        max_recv_sge: if srq.is_some() { 0 } else { asked.cap.max_recv_sge },
        max_inline: asked.cap.max_inline_data,
        sq_sig_all: asked.sq_sig_all != 0,
        block_own_multicast: extra.block_own_multicast,
        star: extra.star,
        rpc: extra.rpc,
        cookie: name,
    };
    // SAFETY: the protection domain keeps its context alive.
    unsafe { ContextHandle::of(context).live.make_room()? };
    let obj = Qp::create(card, &wanted).map_err(errno)?;

    let mut ibv = ibv_qp(context, &obj, asked.qp_type, asked.qp_context);
    ibv.pd = pd;
    ibv.send_cq = asked.send_cq;
    ibv.recv_cq = asked.recv_cq;
    ibv.srq = asked.srq;
    let granted = cap(&obj.caps());
    // SAFETY: the caller's struct, on the verb's terms; the protection domain keeps its context alive.
    unsafe {
        (*init).cap = granted;
        ContextHandle::of(context).live.add(name);
        ContextHandle::retain(context);
    }
    let (delivered, sq_sig_all) = (AtomicU32::new(0), wanted.sq_sig_all);
    Ok(match place {
        HandleMemory::Plain(place) => {
            QpHandle::publish(place, QpHandle { obj, delivered, sq_sig_all, extended: false, ibv, more: () })
        }
        HandleMemory::Extended(place, ops) => {
            let (ibv, more) = (wr::functions(ibv), Building::new(ops));
            QpHandle::publish(place, QpHandle { obj, delivered, sq_sig_all, extended: true, ibv, more })
        }
    })
}

/// Memory for a handle: events name it before it is filled.
enum HandleMemory {
    Plain(Box<MaybeUninit<QpHandle>>),
    Extended(Box<MaybeUninit<QpExHandle>>, u64),
}

impl HandleMemory {
    fn cookie(&mut self) -> u64 {
        match self {
            HandleMemory::Plain(place) => cookie(place.as_mut_ptr()),
            HandleMemory::Extended(place, _) => cookie(place.as_mut_ptr()),
        }
    }
}

/// ibv_create_qp(3).
pub(crate) unsafe extern "C" fn create_qp(
    pd: *mut abi::ibv_pd,
    init: *mut abi::ibv_qp_init_attr,
) -> *mut abi::ibv_qp {
    // SAFETY: the verb's terms.
    edge::object(|| unsafe { create(pd, init, Extra::default()) })
}

/// Whether every extension that a program asks for is offered, for ibv_create_qp_ex(3); the send operations,
/// if any.
fn extensions(init: &abi::ibv_qp_init_attr_ex) -> Result<Option<u64>, Errno> {
    let mask = init.comp_mask;
    if mask & !(2 * abi::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS - 1) != 0 {
        return Err(libc::EINVAL);
    }
    let sends = abi::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    // A queue pair that sends has no use for an XRC domain, and none against it.
    let offered =
        abi::IBV_QP_INIT_ATTR_XRCD | abi::IBV_QP_INIT_ATTR_PD | abi::IBV_QP_INIT_ATTR_CREATE_FLAGS | sends;
    let flags = abi::IBV_QP_CREATE_BLOCK_SELF_MCAST_LB | CREATE_FLAGS;
    if mask & !offered != 0 || create_flags(init) & !flags != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    if mask & abi::IBV_QP_INIT_ATTR_PD == 0 && init.qp_type != abi::IBV_QPT_XRC_RECV {
        return Err(libc::EINVAL);
    }
    Ok((mask & sends != 0).then_some(init.send_ops_flags))
}

/// The attributes that a program's struct reaches to: it may end before the first that came later.
///
/// # Safety
/// `init` names a struct with every field that its mask names.
unsafe fn reached(init: *const abi::ibv_qp_init_attr_ex) -> abi::ibv_qp_init_attr_ex {
    // SAFETY: the caller's terms; of the later fields only those of send operations are used.
    unsafe {
        let later = (*init).comp_mask & abi::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0;
        let first = offset_of!(abi::ibv_qp_init_attr_ex, max_tso_header);
        beginning(init, if later { size_of::<abi::ibv_qp_init_attr_ex>() } else { first })
    }
}

/// ibv_create_qp_ex(3), through the context's table.
pub(crate) unsafe extern "C" fn create_qp_ex(
    context: *mut abi::ibv_context,
    init: *mut abi::ibv_qp_init_attr_ex,
) -> *mut abi::ibv_qp {
    // SAFETY: the verb's terms.
    edge::object(|| unsafe { create_ex(context, init, None) })
}

/// Makes a queue pair with extensions. `star` is what is asked for beside the attributes, whose flags may ask
/// for the same.
///
/// # Safety
/// As ibv_create_qp_ex(3) has it.
pub(crate) unsafe fn create_ex(
    context: *mut abi::ibv_context,
    init: *mut abi::ibv_qp_init_attr_ex,
    star: Option<Preference>,
) -> Result<*mut abi::ibv_qp, Errno> {
    // SAFETY: NULL or a struct of the caller's, on the caller's terms.
    let mut asked = unsafe { reached(given(init)?.as_ptr()) };
    check_create_flags(&asked)?;
    let ops = extensions(&asked)?;
    let flagged = flagged(&asked)?;
    if flagged.is_some() && star.is_some() && flagged != star {
        return Err(libc::EINVAL);
    }
    let star = star.or(flagged);
    if asked.qp_type == abi::IBV_QPT_XRC_RECV {
        if ops.is_some() {
            return Err(libc::EINVAL);
        }
        if !matches!(star, None | Some(Preference::Off)) || create_flags(&asked) & RPC != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        // SAFETY: as above.
        unsafe {
            let made = create_xrc_recv(context, &mut asked)?;
            (*init).cap = asked.cap;
            return Ok(made);
        }
    }
    let block_own_multicast = create_flags(&asked) & abi::IBV_QP_CREATE_BLOCK_SELF_MCAST_LB != 0;
    let rpc = create_flags(&asked) & RPC != 0;
    let extra = Extra { ops, block_own_multicast, star, rpc };
    // SAFETY: the verb's terms; the plain struct is the beginning of the extended one.
    unsafe { create(asked.pd, init.cast(), extra) }
}

/// ibv_qp_to_qp_ex(3): NULL unless the QP was made with send operations.
pub(crate) unsafe extern "C" fn qp_to_qp_ex(qp: *mut abi::ibv_qp) -> *mut abi::ibv_qp_ex {
    // SAFETY: the verb's terms.
    if !qp.is_null() && unsafe { (*QpHandle::of(qp)).extended } { qp.cast() } else { core::ptr::null_mut() }
}

/// Bytes of `struct ibv_qp_attr` that every program has. Its last field came later, and is read and written
/// only where a mask names it; no mask that is offered does.
const QP_ATTR: usize = offset_of!(abi::ibv_qp_attr, rate_limit);

/// ibv_modify_qp(3).
pub(crate) unsafe extern "C" fn modify_qp(
    qp: *mut abi::ibv_qp,
    attr: *mut abi::ibv_qp_attr,
    mask: c_int,
) -> c_int {
    edge::int(|| {
        // SAFETY: a struct of the caller's, on the verb's terms; an ibv_qp_attr is numbers: zero is valid.
        let from = unsafe { beginning(given(attr)?.as_ptr(), QP_ATTR) };
        // SAFETY: the verb's terms.
        let obj = unsafe { QpHandle::obj(qp)? };
        let (attr, mask) = attr_in(&from, mask)?;
        obj.modify(&attr, mask).map_err(errno)?;
        if mask.contains(starverbs_core::qp::QpAttrMask::STATE) {
            // SAFETY: `qp` is alive, as above.
            unsafe { (*qp).state = attr.state as abi::ibv_qp_state };
        }
        Ok(())
    })
}

/// ibv_query_qp(3): every attribute, whatever the mask says, as the man page allows.
pub(crate) unsafe extern "C" fn query_qp(
    qp: *mut abi::ibv_qp,
    attr: *mut abi::ibv_qp_attr,
    _mask: c_int,
    init: *mut abi::ibv_qp_init_attr,
) -> c_int {
    edge::int(|| {
        let to = given(attr)?.as_ptr();
        // SAFETY: the verb's terms.
        let obj = unsafe { QpHandle::obj(qp)? };
        let now = attr_out(&obj.query().map_err(errno)?, &obj.caps());
        // SAFETY: `qp` is alive, as above, and the places are the caller's.
        unsafe {
            (*qp).state = now.qp_state;
            if !init.is_null() {
                init.write(abi::ibv_qp_init_attr {
                    qp_context: (*qp).qp_context,
                    send_cq: (*qp).send_cq,
                    recv_cq: (*qp).recv_cq,
                    srq: (*qp).srq,
                    cap: now.cap,
                    qp_type: (*qp).qp_type,
                    sq_sig_all: c_int::from((*QpHandle::of(qp)).sq_sig_all),
                });
            }
            put_prefix(&now, to, QP_ATTR);
        }
        Ok(())
    })
}

/// ibv_query_qp_data_in_order(3): 0, no promise.
pub(crate) unsafe extern "C" fn query_qp_data_in_order(
    _qp: *mut abi::ibv_qp,
    _op: abi::ibv_wr_opcode,
    _flags: u32,
) -> c_int {
    0
}

/// ibv_query_ece(3): there are no enhanced connection options.
pub(crate) unsafe extern "C" fn query_ece(_qp: *mut abi::ibv_qp, ece: *mut abi::ibv_ece) -> c_int {
    if !ece.is_null() {
        // SAFETY: the caller's struct, on the verb's terms; libibverbs clears it before it looks for a
        // provider.
        unsafe { ece.write(abi::ibv_ece { vendor_id: 0, options: 0, comp_mask: 0 }) };
    }
    edge::refuse(libc::EOPNOTSUPP)
}

/// ibv_set_ece(3).
pub(crate) unsafe extern "C" fn set_ece(_qp: *mut abi::ibv_qp, _ece: *mut abi::ibv_ece) -> c_int {
    edge::refuse(libc::EOPNOTSUPP)
}

/// The address of a multicast group, or EINVAL for NULL.
///
/// # Safety
/// `gid` is NULL, or points to a GID.
unsafe fn group(gid: *const abi::ibv_gid) -> Result<Gid, Errno> {
    // SAFETY: the caller's terms; every member of the union is 16 plain bytes.
    unsafe { gid.as_ref() }.map(|gid| Gid(unsafe { gid.raw })).ok_or(libc::EINVAL)
}

/// ibv_attach_mcast(3). Ethernet has no LIDs: whatever `lid` is, the GID alone counts.
pub(crate) unsafe extern "C" fn attach_mcast(
    qp: *mut abi::ibv_qp,
    gid: *const abi::ibv_gid,
    _lid: u16,
) -> c_int {
    // SAFETY: the verb's terms.
    edge::int(|| unsafe { QpHandle::obj(qp)?.attach_mcast(group(gid)?).map_err(errno) })
}

/// ibv_detach_mcast(3).
pub(crate) unsafe extern "C" fn detach_mcast(
    qp: *mut abi::ibv_qp,
    gid: *const abi::ibv_gid,
    _lid: u16,
) -> c_int {
    // SAFETY: the verb's terms.
    edge::int(|| unsafe { QpHandle::obj(qp)?.detach_mcast(group(gid)?).map_err(errno) })
}

/// ibv_destroy_qp(3): waits until every event of it is acknowledged.
pub(crate) unsafe extern "C" fn destroy_qp(qp: *mut abi::ibv_qp) -> c_int {
    edge::int(|| {
        // SAFETY: the verb's terms.
        let obj = unsafe { QpHandle::obj(qp)? };
        // SAFETY: `qp` is alive, as above.
        let name = cookie(unsafe { QpHandle::of(qp) });
        // SAFETY: `qp` is alive, as above.
        let shareable = unsafe { (*qp).qp_type } == abi::IBV_QPT_XRC_RECV;
        if shareable { obj.close(name) } else { obj.destroy() }.map_err(errno)?;
        // SAFETY: `qp` is alive, as above.
        let handle = unsafe { QpHandle::of(qp) };
        // SAFETY: the handle and its context are alive until the box is dropped; once it is off the list no
        // event is counted for it any more.
        unsafe {
            let context = (*handle).ibv.context;
            ContextHandle::of(context).live.remove(cookie(handle));
            let delivered = (*handle).delivered.load(Ordering::Acquire);
            wait_for_acks(
                &raw mut (*qp).mutex,
                &raw mut (*qp).cond,
                &raw mut (*qp).events_completed,
                delivered,
            );
            if (*handle).extended {
                let handle = handle.cast::<QpExHandle>();
                (*handle).more.forget();
                drop(Box::from_raw(handle));
            } else {
                drop(Box::from_raw(handle));
            }
            ContextHandle::release(context);
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_that_are_not_offered_are_refused() {
        // SAFETY: numbers and pointers: zero is valid.
        let mut init: abi::ibv_qp_init_attr_ex = unsafe { zeroed() };
        assert_eq!(extensions(&init), Err(libc::EINVAL));
        init.comp_mask = abi::IBV_QP_INIT_ATTR_PD | abi::IBV_QP_INIT_ATTR_CREATE_FLAGS;
        assert_eq!(extensions(&init), Ok(None));
        init.create_flags = abi::IBV_QP_CREATE_SCATTER_FCS;
        assert_eq!(extensions(&init), Err(libc::EOPNOTSUPP));
        init.create_flags = abi::IBV_QP_CREATE_BLOCK_SELF_MCAST_LB;
        assert_eq!(extensions(&init), Ok(None));
        init.comp_mask = abi::IBV_QP_INIT_ATTR_PD | abi::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        init.send_ops_flags = u64::from(abi::IBV_QP_EX_WITH_SEND);
        assert_eq!(extensions(&init), Ok(Some(u64::from(abi::IBV_QP_EX_WITH_SEND))));
        init.comp_mask = 1 << 20;
        assert_eq!(extensions(&init), Err(libc::EINVAL));
    }

    /// See the test of this name in starverbs-verbs: 160 bytes are `struct ibv_qp`.
    #[test]
    fn an_idle_qp_stays_small() {
        assert!(size_of::<QpHandle>() <= 192, "{}", size_of::<QpHandle>());
    }
}
