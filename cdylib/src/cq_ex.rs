//! ibv_create_cq_ex(3): completion queues that are read in place, one completion at a time.
//!
//! Owns the functions of the extended public struct. It must not know more of a completion than its fields.

use crate::cq::{self, CqAttr, CqHandle};
use crate::edge::{self, Errno};
use crate::handle::{beginning, given};
use crate::poll;
use core::ffi::{c_int, c_uint};
use core::mem::offset_of;
use starverbs_abi as abi;
use starverbs_core::types::{Cqe, Nanos, TagMatch};

/// Fields with the time of a completion.
const STAMPS: u64 =
    (abi::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | abi::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK) as u64;
/// The fields a program may ask for. VLANs and flow tags are not offered.
const FIELDS: u64 = (abi::IBV_WC_STANDARD_FLAGS | abi::IBV_WC_EX_WITH_TM_INFO) as u64 | STAMPS;
/// The promises a program may make.
const FLAGS: u32 = abi::IBV_CREATE_CQ_ATTR_SINGLE_THREADED | abi::IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;

fn checked(attr: &abi::ibv_cq_init_attr_ex) -> Result<CqAttr, Errno> {
    let mask = attr.comp_mask;
    if mask & !(abi::IBV_CQ_INIT_ATTR_MASK_FLAGS | abi::IBV_CQ_INIT_ATTR_MASK_PD) != 0 {
        return Err(libc::EINVAL);
    }
    let flags = if mask & abi::IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 { attr.flags } else { 0 };
    if flags & !FLAGS != 0 || attr.wc_flags & !FIELDS != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let parent = mask & abi::IBV_CQ_INIT_ATTR_MASK_PD != 0;
    if parent && attr.parent_domain.is_null() {
        return Err(libc::EINVAL);
    }
    Ok(CqAttr {
        cqe: attr.cqe,
        cq_context: attr.cq_context,
        channel: attr.channel,
        comp_vector: attr.comp_vector,
        single_threaded: flags & abi::IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0,
        ignore_overrun: flags & abi::IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN != 0,
        stamped: attr.wc_flags & STAMPS != 0,
        parent: if parent { attr.parent_domain } else { core::ptr::null_mut() },
    })
}

/// The attributes that a program's struct reaches to: its last ones came later.
///
/// # Safety
/// `attr` names a struct with every field that its mask names.
unsafe fn reached(attr: *const abi::ibv_cq_init_attr_ex) -> abi::ibv_cq_init_attr_ex {
    // SAFETY: the caller's terms.
    unsafe {
        let mask = (*attr).comp_mask;
        let room = if mask & abi::IBV_CQ_INIT_ATTR_MASK_PD != 0 {
            size_of::<abi::ibv_cq_init_attr_ex>()
        } else if mask & abi::IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 {
            offset_of!(abi::ibv_cq_init_attr_ex, parent_domain)
        } else {
            offset_of!(abi::ibv_cq_init_attr_ex, flags)
        };
        beginning(attr, room)
    }
}

/// ibv_create_cq_ex(3), through the context's table.
pub(crate) unsafe extern "C" fn create_cq_ex(
    context: *mut abi::ibv_context,
    attr: *mut abi::ibv_cq_init_attr_ex,
) -> *mut abi::ibv_cq_ex {
    edge::object(|| {
        let attr = given(attr)?.as_ptr();
        // SAFETY: the verb's terms.
        let handle = unsafe { cq::create(context, &checked(&reached(attr))?)? };
        // SAFETY: the handle was just made and is not shared yet.
        let ibv = unsafe { &mut (*handle).ibv };
        ibv.start_poll = Some(start_poll);
        ibv.next_poll = Some(next_poll);
        ibv.end_poll = Some(end_poll);
        ibv.read_opcode = Some(read_opcode);
        ibv.read_vendor_err = Some(read_vendor_err);
        ibv.read_wc_flags = Some(read_wc_flags);
        ibv.read_byte_len = Some(read_byte_len);
        ibv.read_imm_data = Some(read_imm_data);
        ibv.read_qp_num = Some(read_qp_num);
        ibv.read_src_qp = Some(read_src_qp);
        ibv.read_slid = Some(read_slid);
        ibv.read_sl = Some(read_sl);
        ibv.read_dlid_path_bits = Some(read_dlid_path_bits);
        ibv.read_completion_ts = Some(read_completion_ts);
        ibv.read_completion_wallclock_ns = Some(read_completion_wallclock_ns);
        ibv.read_tm_info = Some(read_tm_info);
        Ok(handle.cast())
    })
}

/// Moves to the next completion: ENOENT when there is none.
///
/// # Safety
/// `cq` comes from `create_cq_ex`, is alive, and this thread polls it.
unsafe fn advance(cq: *mut abi::ibv_cq_ex) -> c_int {
    edge::status(|| {
        let handle = cq.cast::<CqHandle>();
        let mut next = (Cqe::default(), 0);
        // SAFETY: the caller's terms.
        let polled =
            unsafe { &(*handle).obj }.poll_stamped(1, |cqe, at| next = (*cqe, at)).map_err(|e| e.errno())?;
        if polled == 0 {
            return Err(libc::ENOENT);
        }
        // SAFETY: the caller's terms: no other thread reads or writes the current completion.
        unsafe {
            (*handle).ibv.wr_id = next.0.wr_id;
            (*handle).ibv.status = next.0.status as abi::ibv_wc_status;
            *(*handle).current.get() = next;
        }
        Ok(())
    })
}

/// ibv_start_poll.
unsafe extern "C" fn start_poll(cq: *mut abi::ibv_cq_ex, attr: *mut abi::ibv_poll_cq_attr) -> c_int {
    // SAFETY: NULL or a struct, on the verb's terms.
    if unsafe { attr.as_ref() }.is_some_and(|a| a.comp_mask != 0) {
        return edge::refuse(libc::EINVAL);
    }
    let handle = cq.cast::<CqHandle>();
    // SAFETY: the verb's terms; the mutex keeps other threads out until `end_poll`, or is not needed.
    unsafe {
        if !(*handle).single_threaded {
            libc::pthread_mutex_lock((*handle).polling.get());
        }
        let failed = advance(cq);
        if failed != 0 {
            end_poll(cq);
        }
        failed
    }
}

/// ibv_next_poll.
unsafe extern "C" fn next_poll(cq: *mut abi::ibv_cq_ex) -> c_int {
    // SAFETY: the verb's terms: this thread started polling.
    unsafe { advance(cq) }
}

/// ibv_end_poll.
unsafe extern "C" fn end_poll(cq: *mut abi::ibv_cq_ex) {
    let handle = cq.cast::<CqHandle>();
    // SAFETY: the verb's terms: this thread locked the mutex in `start_poll`.
    unsafe {
        if !(*handle).single_threaded {
            libc::pthread_mutex_unlock((*handle).polling.get());
        }
    }
}

/// The completion that polling stopped at.
///
/// # Safety
/// `cq` comes from `create_cq_ex`, is alive, and this thread polls it.
unsafe fn current(cq: *mut abi::ibv_cq_ex) -> (Cqe, Nanos) {
    // SAFETY: the caller's terms.
    unsafe { *(*cq.cast::<CqHandle>()).current.get() }
}

macro_rules! readers {
    ($($(#[$doc:meta])* $name:ident -> $kind:ty = $read:expr;)*) => { $(
        $(#[$doc])*
        unsafe extern "C" fn $name(cq: *mut abi::ibv_cq_ex) -> $kind {
            let read: fn(Cqe, Nanos) -> $kind = $read;
            // SAFETY: the verb's terms: this thread polls the queue.
            let (cqe, stamp) = unsafe { current(cq) };
            read(cqe, stamp)
        }
    )* };
}

readers! {
    /// ibv_wc_read_opcode
    read_opcode -> abi::ibv_wc_opcode = |c, _| c.opcode as abi::ibv_wc_opcode;
    /// ibv_wc_read_vendor_err
    read_vendor_err -> u32 = |c, _| poll::vendor_err(&c);
    /// ibv_wc_read_byte_len
    read_byte_len -> u32 = |c, _| c.byte_len;
    /// ibv_wc_read_imm_data and ibv_wc_read_invalidated_rkey
    read_imm_data -> u32 = |c, _| c.imm;
    /// ibv_wc_read_qp_num
    read_qp_num -> u32 = |c, _| c.qpn;
    /// ibv_wc_read_src_qp
    read_src_qp -> u32 = |c, _| poll::src_qp(&c);
    /// ibv_wc_read_wc_flags
    read_wc_flags -> c_uint = |c, _| c_uint::from(c.flags.bits());
    /// ibv_wc_read_slid
    read_slid -> u32 = |_, _| 0;
    /// ibv_wc_read_sl
    read_sl -> u8 = |c, _| c.sl;
    /// ibv_wc_read_dlid_path_bits
    read_dlid_path_bits -> u8 = |_, _| 0;
    /// ibv_wc_read_completion_ts
    read_completion_ts -> u64 = |_, stamp| stamp;
    /// ibv_wc_read_completion_wallclock_ns
    read_completion_wallclock_ns -> u64 = |_, stamp| starverbs_verbs::wallclock(stamp);
}

/// ibv_wc_read_tm_info: zeros unless a tag was matched.
unsafe extern "C" fn read_tm_info(cq: *mut abi::ibv_cq_ex, info: *mut abi::ibv_wc_tm_info) {
    // SAFETY: the verb's terms: this thread polls the queue; a place for the answer.
    unsafe {
        let TagMatch { tag, app_ctx } = current(cq).0.tag().unwrap_or_default();
        info.write(abi::ibv_wc_tm_info { tag, priv_: app_ctx });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle::zeroed;

    fn wanted() -> abi::ibv_cq_init_attr_ex {
        // SAFETY: numbers and pointers: zero is valid.
        let mut attr: abi::ibv_cq_init_attr_ex = unsafe { zeroed() };
        attr.cqe = 16;
        attr.wc_flags = FIELDS;
        attr
    }

    #[test]
    fn what_is_not_offered_is_refused() {
        assert!(checked(&wanted()).is_ok_and(|w| w.cqe == 16 && !w.single_threaded));
        let mut attr = wanted();
        attr.wc_flags |= u64::from(abi::IBV_WC_EX_WITH_CVLAN);
        assert_eq!(checked(&attr).err(), Some(libc::EOPNOTSUPP));
        let mut attr = wanted();
        attr.comp_mask = abi::IBV_CQ_INIT_ATTR_MASK_FLAGS;
        attr.flags = abi::IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
        assert!(checked(&attr).is_ok_and(|w| w.single_threaded));
        attr.flags |= abi::IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
        assert!(checked(&attr).is_ok_and(|w| w.single_threaded && w.ignore_overrun && w.stamped));
        attr.flags |= 1 << 2;
        assert_eq!(checked(&attr).err(), Some(libc::EOPNOTSUPP));
        (attr.flags, attr.comp_mask) = (0, abi::IBV_CQ_INIT_ATTR_MASK_PD);
        assert_eq!(checked(&attr).err(), Some(libc::EINVAL));
        attr.comp_mask = 1 << 7;
        assert_eq!(checked(&attr).err(), Some(libc::EINVAL));
    }
}
