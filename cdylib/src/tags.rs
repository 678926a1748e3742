//! Tag matching: ibv_post_srq_ops(3), and what is offered of it.
//!
//! Owns the translation of a change of a list. It must not know what matches.

use crate::edge::{self, Errno};
use crate::handle::errno;
use crate::post::{sges, walk};
use crate::srq::SrqHandle;
use core::ffi::c_int;
use starverbs_abi as abi;
use starverbs_core::tags::{MAX_TAG_SGE, MAX_TAGS, TaggedBuffer};
use starverbs_core::wire::tags::MAX_RENDEZVOUS;
use starverbs_verbs::{TagChange, TagOp};

/// Changes of a list that may be under way. They are done at once, so that there is no limit but a C
/// program's.
pub(crate) const MAX_OPS: u32 = 1 << 16;

/// `struct ibv_tm_caps`.
pub(crate) fn caps() -> abi::ibv_tm_caps {
    abi::ibv_tm_caps {
        max_rndv_hdr_size: MAX_RENDEZVOUS,
        max_num_tags: MAX_TAGS,
        flags: abi::IBV_TM_CAP_RC,
        max_ops: MAX_OPS,
        max_sge: MAX_TAG_SGE as u32,
    }
}

/// A change in the card's words.
///
/// # Safety
/// `wr` is a work request on the terms of ibv_post_srq_ops(3).
unsafe fn op(wr: *const abi::ibv_ops_wr) -> Result<TagOp, Errno> {
    // SAFETY: the caller vouches for the request.
    let (wr, flags) = unsafe { (&*wr, (*wr).flags as u32) };
    if flags & !(abi::IBV_OPS_SIGNALED | abi::IBV_OPS_TM_SYNC) != 0 {
        return Err(libc::EINVAL);
    }
    let change = match wr.opcode {
        abi::IBV_WR_TAG_ADD => {
            let add = &wr.tm.add;
            // SAFETY: as above.
            let given = unsafe { sges(add.sg_list, add.num_sge)? };
            let mut buffer =
                TaggedBuffer { wr_id: add.recv_wr_id, tag: add.tag, mask: add.mask, ..Default::default() };
            buffer.sges.get_mut(..given.len()).ok_or(libc::EINVAL)?.copy_from_slice(given);
            buffer.num_sge = given.len() as u8;
            TagChange::Add(buffer)
        }
        abi::IBV_WR_TAG_DEL => TagChange::Remove(wr.tm.handle),
        abi::IBV_WR_TAG_SYNC => TagChange::Sync,
        _ => return Err(libc::EINVAL),
    };
    /* a SYNC is nothing else */
    let says = flags & abi::IBV_OPS_TM_SYNC != 0 || wr.opcode == abi::IBV_WR_TAG_SYNC;
    Ok(TagOp {
        wr_id: wr.wr_id,
        change,
        seen: says.then_some(wr.tm.unexpected_cnt),
        signaled: flags & abi::IBV_OPS_SIGNALED != 0,
    })
}

/// ibv_post_srq_ops(3), through the context's table.
pub(crate) unsafe extern "C" fn post_srq_ops(
    srq: *mut abi::ibv_srq,
    first: *mut abi::ibv_ops_wr,
    bad: *mut *mut abi::ibv_ops_wr,
) -> c_int {
    edge::int(|| {
        // SAFETY: the verb's terms.
        let obj = unsafe { SrqHandle::obj(srq)? };
        let post = |wr: *mut abi::ibv_ops_wr| {
            // SAFETY: a request of the caller's list, on the verb's terms; the handle of what is added is
            // ours to write.
            unsafe {
                let handle = obj.change_tags(&op(wr)?).map_err(errno)?;
                if (*wr).opcode == abi::IBV_WR_TAG_ADD {
                    (*wr).tm.handle = handle;
                }
            }
            Ok(())
        };
        // SAFETY: a list and a place on the verb's terms.
        unsafe { walk(first, bad, |wr| (*wr).next, post) }
    })
}
