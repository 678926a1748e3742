//! StRoM's direct verbs: stardv_post_rpc(3), stardv_wr_rpc(3), stardv_load_kernel(3).
//!
//! Owns the layout of a work request. It must not know what kernels do.

use crate::edge::{self, Errno};
use crate::handle::{beginning, errno, given, quiet};
use crate::pd_mr::PdHandle;
use crate::post::{send_flags, sges};
use crate::qp::QpHandle;
use crate::wr::begin;
use core::ffi::{c_int, c_uint, c_void};
use core::mem::offset_of;
use starverbs_abi as abi;
use starverbs_core::strom::{ReplyRecord, RpcOutcome};
use starverbs_core::types::{AvId, SendOp, SendWqe};
use starverbs_verbs::{Builtin, SendWr};

/// `struct stardv_rpc_wr`: new fields at the end.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct StardvRpcWr {
    comp_mask: u64,
    wr_id: u64,
    op: u64,
    sg_list: *const abi::ibv_sge,
    num_sge: c_int,
    send_flags: c_uint,
}

/* As released: programs were built with it. */
#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(offset_of!(StardvRpcWr, sg_list) == 24);
    assert!(size_of::<StardvRpcWr>() == 40);
};

/// Posts a request. EOPNOTSUPP: something that a later release has.
///
/// # Safety
/// The verb's terms: `wr` is NULL or names `inlen` bytes; the queue pair is NULL or alive.
unsafe fn post(qp: *mut abi::ibv_qp, wr: *const StardvRpcWr, inlen: u32, op: SendOp) -> Result<(), Errno> {
    let needed = offset_of!(StardvRpcWr, send_flags) + size_of::<c_uint>();
    if wr.is_null() || (inlen as usize) < needed {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller's terms.
    let (obj, wr) = unsafe { (QpHandle::obj(qp)?, beginning(wr, inlen as usize)) };
    if wr.comp_mask != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let request = SendWr {
        wr_id: wr.wr_id,
        op,
        flags: send_flags(wr.send_flags)?,
        imm: 0,
        // SAFETY: the caller's terms.
        sges: unsafe { sges(wr.sg_list, wr.num_sge)? },
        remote_addr: wr.op,
        rkey: 0,
        compare_add: 0,
        swap: 0,
        ah: AvId(0),
        remote_qpn: 0,
        qkey: 0,
    };
    let mut poster = obj.post_send();
    // SAFETY: the verb's terms: inline bytes are readable while the program waits.
    let posted = unsafe { poster.push_inline(&request) }.map_err(quiet);
    poster.ring();
    posted
}

/// stardv_post_rpc(3).
pub(crate) unsafe extern "C" fn post_rpc(qp: *mut abi::ibv_qp, wr: *const StardvRpcWr, inlen: u32) -> c_int {
    // SAFETY: the verb's terms.
    edge::int(|| unsafe { post(qp, wr, inlen, SendOp::Rpc) })
}

/// stardv_post_rpc_write(3).
pub(crate) unsafe extern "C" fn post_rpc_write(
    qp: *mut abi::ibv_qp,
    wr: *const StardvRpcWr,
    inlen: u32,
) -> c_int {
    // SAFETY: the verb's terms.
    edge::int(|| unsafe { post(qp, wr, inlen, SendOp::RpcWrite) })
}

/// stardv_wr_rpc(3): between ibv_wr_start and ibv_wr_complete; the data is set as for ibv_wr_send.
pub(crate) unsafe extern "C" fn wr_rpc(qp: *mut abi::ibv_qp_ex, op: u64) {
    // SAFETY: the verb's terms: between start and complete of this thread.
    unsafe { begin(qp, SendOp::Rpc, SendWqe { remote_addr: op, ..SendWqe::default() }) };
}

/// stardv_wr_rpc_write(3).
pub(crate) unsafe extern "C" fn wr_rpc_write(qp: *mut abi::ibv_qp_ex, op: u64) {
    // SAFETY: the verb's terms: between start and complete of this thread.
    unsafe { begin(qp, SendOp::RpcWrite, SendWqe { remote_addr: op, ..SendWqe::default() }) };
}

/// `STARDV_KERNEL_PROGRAM`.
const PROGRAM: u32 = 0;

/// stardv_load_kernel(3).
pub(crate) unsafe extern "C" fn load_kernel(pd: *mut abi::ibv_pd, op: u64, kernel: u32) -> c_int {
    edge::int(|| {
        given(pd)?;
        // SAFETY: the verb's terms.
        let pd = unsafe { PdHandle::obj(pd)? };
        if kernel == PROGRAM {
            return pd.leave_to_program(op).map_err(errno);
        }
        let kernel = Builtin::from_code(kernel).ok_or(libc::EOPNOTSUPP)?;
        pd.load_kernel(op, kernel).map_err(errno)
    })
}

/// `enum stardv_module_flags`: the module takes the place of the kernel that the op-code has.
const REPLACE: u32 = 1;

/// stardv_load_module(3).
pub(crate) unsafe extern "C" fn load_module(
    pd: *mut abi::ibv_pd,
    op: u64,
    module: *const c_void,
    len: usize,
    flags: u32,
) -> c_int {
    edge::int(|| {
        given(pd)?;
        if module.is_null() || len > isize::MAX as usize || flags & !REPLACE != 0 {
            return Err(libc::EINVAL);
        }
        // SAFETY: the verb's terms: `len` bytes that can be read.
        let module = unsafe { std::slice::from_raw_parts(module.cast::<u8>(), len) };
        // SAFETY: the verb's terms.
        unsafe { PdHandle::obj(pd)? }.load_module(op, module, flags & REPLACE != 0).map_err(errno)
    })
}

/// stardv_call_kernel(3).
pub(crate) unsafe extern "C" fn call_kernel(
    pd: *mut abi::ibv_pd,
    op: u64,
    params: *const c_void,
    len: usize,
    answer: *mut c_void,
    room: usize,
    record: *mut ReplyRecord,
) -> c_int {
    edge::int(|| {
        given(pd)?;
        let bytes = |first: bool, len: usize| len == 0 || (!first && len <= isize::MAX as usize);
        if record.is_null() || !bytes(params.is_null(), len) || !bytes(answer.is_null(), room) {
            return Err(libc::EINVAL);
        }
        // SAFETY: the verb's terms: `len` bytes that can be read, `room` that are the program's to write.
        let (params, answer) = unsafe { (bytes_of(params.cast(), len), room_of(answer.cast(), room)) };
        // SAFETY: the verb's terms.
        let pd = unsafe { PdHandle::obj(pd)? };
        let RpcOutcome { code, len } = pd.call_kernel(op, params, answer).map_err(errno)?;
        // SAFETY: as above: a record of the program's.
        unsafe { record.write(ReplyRecord::new(op, len, code)) };
        Ok(())
    })
}

/// Bytes that may be none, and then anywhere.
///
/// # Safety
/// [first, first + len) can be read, and nobody changes it.
unsafe fn bytes_of<'a>(first: *const u8, len: usize) -> &'a [u8] {
    // SAFETY: the caller's terms.
    if len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(first, len) } }
}

/// As [`bytes_of`], to be written.
///
/// # Safety
/// [first, first + len) is the caller's alone.
unsafe fn room_of<'a>(first: *mut u8, len: usize) -> &'a mut [u8] {
    // SAFETY: the caller's terms.
    if len == 0 { &mut [] } else { unsafe { std::slice::from_raw_parts_mut(first, len) } }
}

/// stardv_unload_kernel(3).
pub(crate) unsafe extern "C" fn unload_kernel(pd: *mut abi::ibv_pd, op: u64) -> c_int {
    edge::int(|| {
        given(pd)?;
        // SAFETY: the verb's terms.
        unsafe { PdHandle::obj(pd)? }.unload_kernel(op).map_err(errno)
    })
}
