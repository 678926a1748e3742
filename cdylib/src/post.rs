//! Posting: C's lists of work requests, one after the other into the rings, one doorbell for the list.
//!
//! Owns the walk over the list and `*bad_wr`. It must not allocate or look anything up.

use crate::ah::AhHandle;
use crate::edge::{self, Errno};
use crate::handle::quiet;
use crate::mw;
use crate::qp::QpHandle;
use crate::srq::SrqHandle;
use core::ffi::c_int;
use starverbs_abi as abi;
use starverbs_core::types::{AvId, QpType, SendFlags, SendOp, Sge};
use starverbs_verbs::{RecvWr, SendWr};

// The card reads the program's scatter/gather list where it lies.
const _: () = assert!(size_of::<Sge>() == size_of::<abi::ibv_sge>());
const _: () = assert!(align_of::<Sge>() == align_of::<abi::ibv_sge>());
const _: () = assert!(core::mem::offset_of!(Sge, len) == core::mem::offset_of!(abi::ibv_sge, length));
const _: () = assert!(core::mem::offset_of!(Sge, lkey) == core::mem::offset_of!(abi::ibv_sge, lkey));

/// A work request's scatter/gather list.
///
/// # Safety
/// `list` holds `count` elements, or `count` is 0.
#[inline]
pub(crate) unsafe fn sges<'a>(list: *const abi::ibv_sge, count: c_int) -> Result<&'a [Sge], Errno> {
    let Ok(count) = usize::try_from(count) else { return Err(libc::EINVAL) };
    if count == 0 {
        return Ok(&[]);
    }
    if list.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller vouches for the array; the layouts are equal, as asserted above.
    Ok(unsafe { core::slice::from_raw_parts(list.cast(), count) })
}

/// The flags of a send work request. EINVAL: one that the card does not offer, which may not be given then
/// (IBV_SEND_IP_CSUM: ibv_post_send(3)).
#[inline]
pub(crate) fn send_flags(flags: u32) -> Result<SendFlags, Errno> {
    u8::try_from(flags).ok().and_then(SendFlags::from_bits).ok_or(libc::EINVAL)
}

/// A send work request in the card's words. Only those members of its unions are read that its op-code gives
/// a meaning.
///
/// # Safety
/// `wr` is a work request on the terms of ibv_post_send(3).
#[inline]
unsafe fn send_wr<'a>(wr: *const abi::ibv_send_wr, datagram: bool) -> Result<SendWr<'a>, Errno> {
    // SAFETY: the caller vouches for the request, and so for the members that its op-code names.
    unsafe {
        let op = SendOp::from_code((*wr).opcode).ok_or(libc::EOPNOTSUPP)?;
        if op == SendOp::BindMw {
            return bind(wr);
        }
        // A work request has no room for what is to be flushed and how: only ibv_wr_flush can say.
        if op == SendOp::Flush {
            return Err(libc::EOPNOTSUPP);
        }
        let mut to = SendWr {
            wr_id: (*wr).wr_id,
            op,
            flags: send_flags((*wr).send_flags)?,
            imm: 0,
            sges: sges((*wr).sg_list, (*wr).num_sge)?,
            remote_addr: 0,
            rkey: 0,
            compare_add: 0,
            swap: 0,
            ah: AvId(0),
            remote_qpn: 0,
            qkey: 0,
        };
        if op.has_imm() {
            to.imm = (*wr).__bindgen_anon_1.imm_data;
        } else if op == SendOp::SendInv {
            to.imm = (*wr).__bindgen_anon_1.invalidate_rkey;
        } else if op == SendOp::LocalInv {
            to.rkey = (*wr).__bindgen_anon_1.invalidate_rkey;
            return Ok(to);
        }
        let target = &raw const (*wr).wr;
        if datagram {
            to.ah = AhHandle::id((*target).ud.ah)?;
            to.remote_qpn = (*target).ud.remote_qpn;
            to.qkey = (*target).ud.remote_qkey;
        } else if op.is_atomic() {
            to.remote_addr = (*target).atomic.remote_addr;
            to.rkey = (*target).atomic.rkey;
            to.compare_add = (*target).atomic.compare_add;
            to.swap = (*target).atomic.swap;
        } else if !matches!(op, SendOp::Send | SendOp::SendImm | SendOp::SendInv) {
            to.remote_addr = (*target).rdma.remote_addr;
            to.rkey = (*target).rdma.rkey;
        }
        Ok(to)
    }
}

/// A bind of a window of type 2; one of type 1 is bound with ibv_bind_mw(3).
///
/// # Safety
/// As in `send_wr`.
#[cold]
unsafe fn bind<'a>(wr: *const abi::ibv_send_wr) -> Result<SendWr<'a>, Errno> {
    // SAFETY: the caller vouches for the members of a bind.
    unsafe {
        let bind = &raw const (*wr).__bindgen_anon_2.bind_mw;
        let (mw, rkey, info) = ((*bind).mw, (*bind).rkey, (*bind).bind_info);
        if mw.is_null() || (*mw).type_ != abi::IBV_MW_TYPE_2 {
            return Err(libc::EINVAL);
        }
        mw::bind_wr(mw, (*wr).wr_id, (*wr).send_flags, rkey, &info)
    }
}

/// Names `wr` in `bad`.
///
/// # Safety
/// `bad` is NULL or a place.
#[inline]
unsafe fn name_bad<W>(bad: *mut *mut W, wr: *mut W) {
    if !bad.is_null() {
        // SAFETY: the caller's terms.
        unsafe { bad.write(wr) };
    }
}

/// Walks a list from `first`, posting each request; stops at the first that fails and names it in `bad`.
///
/// # Safety
/// The list is linked by `next` and ends with NULL; `bad` is NULL or a place.
#[inline]
pub(crate) unsafe fn walk<W>(
    first: *mut W,
    bad: *mut *mut W,
    next: impl Fn(*mut W) -> *mut W,
    mut post: impl FnMut(*mut W) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let mut wr = first;
    while !wr.is_null() {
        if let Err(errno) = post(wr) {
            // SAFETY: the caller's terms.
            unsafe { name_bad(bad, wr) };
            return Err(errno);
        }
        wr = next(wr);
    }
    Ok(())
}

/// A work request as a program lays it out: that of today's verbs.h, or of libibverbs 1.0's.
pub(crate) trait WorkRequest: Sized {
    /// What the card takes.
    type Wr<'a>;

    /// The next in the list, or NULL.
    ///
    /// # Safety
    /// `at` is a work request on the terms of the verb that posts it.
    unsafe fn next(at: *mut Self) -> *mut Self;

    /// This one in the card's words, for a type of queue pair if it is to be sent.
    ///
    /// # Safety
    /// As in `next`; what is read is used before the verb returns.
    unsafe fn read<'a>(at: *mut Self, kind: QpType) -> Result<Self::Wr<'a>, Errno>;
}

impl WorkRequest for abi::ibv_send_wr {
    type Wr<'a> = SendWr<'a>;

    #[inline]
    unsafe fn next(at: *mut Self) -> *mut Self {
        // SAFETY: the caller's terms.
        unsafe { (*at).next }
    }

    #[inline]
    unsafe fn read<'a>(at: *mut Self, kind: QpType) -> Result<SendWr<'a>, Errno> {
        // SAFETY: the caller's terms.
        unsafe {
            let mut to = send_wr(at, kind == QpType::Ud)?;
            if kind == QpType::XrcSend && !to.op.is_local() {
                to.remote_qpn = (*at).qp_type.xrc.remote_srqn;
            }
            Ok(to)
        }
    }
}

impl WorkRequest for abi::ibv_recv_wr {
    type Wr<'a> = RecvWr<'a>;

    #[inline]
    unsafe fn next(at: *mut Self) -> *mut Self {
        // SAFETY: the caller's terms.
        unsafe { (*at).next }
    }

    #[inline]
    unsafe fn read<'a>(at: *mut Self, _kind: QpType) -> Result<RecvWr<'a>, Errno> {
        // SAFETY: the caller's terms.
        unsafe { Ok(RecvWr { wr_id: (*at).wr_id, sges: sges((*at).sg_list, (*at).num_sge)? }) }
    }
}

/// ibv_post_send(3), through the context's table.
pub(crate) unsafe extern "C" fn post_send<W>(qp: *mut abi::ibv_qp, first: *mut W, bad: *mut *mut W) -> c_int
where
    W: for<'a> WorkRequest<Wr<'a> = SendWr<'a>>,
{
    edge::int(|| {
        // SAFETY: the verb's terms.
        let obj = unsafe { QpHandle::obj(qp)? };
        // Not of the public struct, which lies in a cache line that posting needs for nothing else.
        let kind = obj.qp_type();
        let mut poster = obj.post_send();
        // SAFETY: a list and a place on the verb's terms; each request is read while the program waits.
        let posted = unsafe {
            walk(first, bad, |wr| W::next(wr), |wr| poster.push_inline(&W::read(wr, kind)?).map_err(quiet))
        };
        // The requests before a bad one are posted, so the doorbell rings in any case.
        poster.ring();
        posted
    })
}

/// ibv_post_recv(3), through the context's table.
pub(crate) unsafe extern "C" fn post_recv<W>(qp: *mut abi::ibv_qp, first: *mut W, bad: *mut *mut W) -> c_int
where
    W: for<'a> WorkRequest<Wr<'a> = RecvWr<'a>>,
{
    edge::int(|| {
        // SAFETY: the verb's terms.
        let obj = unsafe { QpHandle::obj(qp)? };
        // The type of queue pair matters to those who send.
        let kind = QpType::Rc;
        let mut poster = obj.post_recv();
        // SAFETY: as in `post_send`.
        let posted = unsafe {
            walk(first, bad, |wr| W::next(wr), |wr| poster.push(&W::read(wr, kind)?).map_err(quiet))
        };
        poster.ring();
        posted
    })
}

/// ibv_post_srq_recv(3), through the context's table.
pub(crate) unsafe extern "C" fn post_srq_recv<W>(
    srq: *mut abi::ibv_srq,
    first: *mut W,
    bad: *mut *mut W,
) -> c_int
where
    W: for<'a> WorkRequest<Wr<'a> = RecvWr<'a>>,
{
    edge::int(|| {
        // SAFETY: the verb's terms.
        let obj = unsafe { SrqHandle::obj(srq)? };
        // The type of queue pair matters to those who send.
        let kind = QpType::Rc;
        let posted = obj.post_list(|poster| {
            // SAFETY: as in `post_send`.
            unsafe {
                walk(first, bad, |wr| W::next(wr), |wr| poster.push(&W::read(wr, kind)?).map_err(quiet))
            }
        });
        posted.unwrap_or_else(|forked| {
            // SAFETY: a place, on the verb's terms.
            unsafe { name_bad(bad, first) };
            Err(quiet(forked))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle::zeroed;

    fn request(opcode: abi::ibv_wr_opcode) -> abi::ibv_send_wr {
        // SAFETY: numbers, pointers and unions of them: zero is valid.
        let mut wr: abi::ibv_send_wr = unsafe { zeroed() };
        wr.opcode = opcode;
        wr.wr_id = 7;
        wr.send_flags = abi::IBV_SEND_SIGNALED;
        wr
    }

    #[test]
    fn each_operation_reads_its_own_members() {
        let mut wr = request(abi::IBV_WR_ATOMIC_CMP_AND_SWP);
        wr.wr.atomic.remote_addr = 1;
        wr.wr.atomic.compare_add = 2;
        wr.wr.atomic.swap = 3;
        wr.wr.atomic.rkey = 4;
        // SAFETY: a complete request.
        let to = unsafe { send_wr(&wr, false) }.expect("an atomic");
        assert_eq!((to.remote_addr, to.compare_add, to.swap, to.rkey), (1, 2, 3, 4));

        let mut wr = request(abi::IBV_WR_RDMA_WRITE_WITH_IMM);
        wr.wr.rdma.remote_addr = 5;
        wr.wr.rdma.rkey = 6;
        wr.__bindgen_anon_1.imm_data = 8;
        // SAFETY: a complete request.
        let to = unsafe { send_wr(&wr, false) }.expect("a write");
        assert_eq!((to.remote_addr, to.rkey, to.imm, to.wr_id), (5, 6, 8, 7));
        assert_eq!((to.op, to.flags), (SendOp::WriteImm, SendFlags::SIGNALED));
    }

    #[test]
    fn bad_requests_are_refused() {
        // SAFETY: complete requests; the lists are never read.
        unsafe {
            assert_eq!(send_wr(&request(abi::IBV_WR_TSO), false).err(), Some(libc::EOPNOTSUPP));
            assert_eq!(send_wr(&request(abi::IBV_WR_SEND), true).err(), Some(libc::EINVAL));
            let mut wr = request(abi::IBV_WR_SEND);
            wr.num_sge = -1;
            assert_eq!(send_wr(&wr, false).err(), Some(libc::EINVAL));
            wr.num_sge = 1;
            assert_eq!(send_wr(&wr, false).err(), Some(libc::EINVAL));
        }
    }

    #[test]
    fn the_walk_stops_at_the_first_bad_request() {
        // SAFETY: numbers and pointers: zero is valid.
        let mut list: [abi::ibv_recv_wr; 3] = unsafe { [zeroed(), zeroed(), zeroed()] };
        let base = list.as_mut_ptr();
        let mut bad = core::ptr::null_mut();
        let mut posted = 0;
        // SAFETY: three elements, linked within the array.
        let result = unsafe {
            (*base).next = base.add(1);
            (*base.add(1)).next = base.add(2);
            walk(
                base,
                &mut bad,
                |wr| (*wr).next,
                |wr| {
                    if wr == base.add(1) {
                        return Err(libc::ENOMEM);
                    }
                    posted += 1;
                    Ok(())
                },
            )
        };
        // SAFETY: within the array.
        assert_eq!((result, bad, posted), (Err(libc::ENOMEM), unsafe { base.add(1) }, 1));
    }
}
