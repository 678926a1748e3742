//! ibv_wr_post(3): work requests built by functions of the extended queue pair, between ibv_wr_start and
//! ibv_wr_complete.
//!
//! Owns those functions and where a batch waits between them. It must not know rings or rules of posting.

use crate::ah::AhHandle;
use crate::edge;
use crate::handle::{quiet, zeroed};
use crate::mw;
use crate::post;
use crate::qp::QpHandle;
use core::cell::UnsafeCell;
use core::ffi::{c_int, c_void};
use core::ptr::slice_from_raw_parts;
use starverbs_abi as abi;
use starverbs_core::types::{FlushLevel, Placement, SendOp, SendWqe, Sge};
use starverbs_core::wire::headers::Feth;
use starverbs_verbs::{SendBatch, VerbsError};

/// A queue pair with send operations.
pub(crate) type QpExHandle = QpHandle<abi::newer::ibv_qp_ex, Building>;

/// What an extended queue pair keeps between calls.
pub(crate) struct Building {
    /// The batch from ibv_wr_start to its end. Touched only by who holds the lock that is in it.
    batch: UnsafeCell<Option<SendBatch<'static>>>,
    /// The operations that the program asked for.
    ops: u64,
}

impl Building {
    /// Nothing begun.
    pub(crate) fn new(ops: u64) -> Self {
        Building { batch: UnsafeCell::new(None), ops }
    }

    /// Drops a batch that a program left behind.
    ///
    /// # Safety
    /// Nobody uses the queue pair any more.
    pub(crate) unsafe fn forget(&self) {
        // SAFETY: the caller's terms.
        unsafe { *self.batch.get() = None };
    }
}

/// The public struct of an extended queue pair around that of a plain one. All functions are there, whatever
/// was asked for: one that may not be used makes ibv_wr_complete fail.
pub(crate) fn functions(base: abi::ibv_qp) -> abi::newer::ibv_qp_ex {
    // SAFETY: numbers, pointers and optional functions: zero is valid.
    let mut qp: abi::ibv_qp_ex = unsafe { zeroed() };
    qp.qp_base = base;
    qp.wr_start = Some(wr_start);
    qp.wr_complete = Some(wr_complete);
    qp.wr_abort = Some(wr_abort);
    qp.wr_send = Some(wr_send);
    qp.wr_send_imm = Some(wr_send_imm);
    qp.wr_send_inv = Some(wr_send_inv);
    qp.wr_send_tso = Some(wr_send_tso);
    qp.wr_rdma_write = Some(wr_rdma_write);
    qp.wr_rdma_write_imm = Some(wr_rdma_write_imm);
    qp.wr_rdma_read = Some(wr_rdma_read);
    qp.wr_atomic_cmp_swp = Some(wr_atomic_cmp_swp);
    qp.wr_atomic_fetch_add = Some(wr_atomic_fetch_add);
    qp.wr_atomic_write = Some(wr_atomic_write);
    qp.wr_bind_mw = Some(wr_bind_mw);
    qp.wr_local_inv = Some(wr_local_inv);
    qp.wr_set_sge = Some(wr_set_sge);
    qp.wr_set_sge_list = Some(wr_set_sge_list);
    qp.wr_set_inline_data = Some(wr_set_inline_data);
    qp.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    qp.wr_set_ud_addr = Some(wr_set_ud_addr);
    qp.wr_set_xrc_srqn = Some(wr_set_xrc_srqn);
    abi::newer::ibv_qp_ex { older: qp, wr_flush: Some(wr_flush) }
}

/// The handle around an extended queue pair.
fn handle(qp: *mut abi::ibv_qp_ex) -> *mut QpExHandle {
    qp.wrapping_byte_sub(core::mem::offset_of!(QpExHandle, ibv)).cast()
}

/// Runs `step` on the batch, if there is one.
///
/// # Safety
/// `qp` is an extended queue pair, and this thread called `wr_start`, so that it holds the lock that guards
/// the batch.
#[inline]
unsafe fn with(qp: *mut abi::ibv_qp_ex, step: impl FnOnce(&mut SendBatch<'static>)) {
    edge::value((), || {
        // SAFETY: the caller's terms.
        if let Some(batch) = unsafe { &mut *(*handle(qp)).more.batch.get() } {
            step(batch);
        }
    });
}

/// Begins a work request with the `wr_id` and `wr_flags` that the program has set.
///
/// # Safety
/// As of `with`.
#[inline]
pub(crate) unsafe fn begin(qp: *mut abi::ibv_qp_ex, op: SendOp, wqe: SendWqe) {
    // SAFETY: the caller's terms; the program writes the two fields before it calls.
    unsafe {
        let (wr_id, flags) = ((*qp).wr_id, post::send_flags((*qp).wr_flags));
        with(qp, |batch| match flags {
            Ok(flags) => batch.begin(SendWqe { wr_id, op, flags, ..wqe }),
            Err(_) => batch.fail(VerbsError::Invalid("flags of a work request")),
        });
    }
}

/// ibv_wr_start: takes the send queue's lock.
unsafe extern "C" fn wr_start(qp: *mut abi::ibv_qp_ex) {
    edge::value((), || {
        // SAFETY: the verb's terms: the queue pair is alive. The batch borrows it for as long as it is alive:
        // `destroy_qp` drops the batch first. The lock, taken first, keeps others from the cell.
        unsafe {
            let handle = handle(qp);
            let obj: &'static starverbs_verbs::Qp = &(*handle).obj;
            let batch = obj.start((*handle).more.ops);
            *(*handle).more.batch.get() = Some(batch);
        }
    });
}

/// ibv_wr_complete: 0, or the errno value of the first failure since ibv_wr_start; then nothing is posted.
unsafe extern "C" fn wr_complete(qp: *mut abi::ibv_qp_ex) -> c_int {
    edge::int(|| {
        // SAFETY: the verb's terms: this thread called `wr_start`.
        let batch = unsafe { (*(*handle(qp)).more.batch.get()).take() };
        batch.ok_or(libc::EINVAL)?.complete().map_err(quiet)
    })
}

/// ibv_wr_abort: forgets everything since ibv_wr_start.
unsafe extern "C" fn wr_abort(qp: *mut abi::ibv_qp_ex) {
    edge::value((), || {
        // SAFETY: as in `wr_complete`.
        drop(unsafe { (*(*handle(qp)).more.batch.get()).take() });
    });
}

/// Builders: what follows `qp` in C's argument list, the op-code, and the fields of the WQE.
macro_rules! builders {
    ($($name:ident($($arg:ident: $kind:ty),*) => $op:ident { $($field:ident: $value:expr),* };)*) => { $(
        unsafe extern "C" fn $name(qp: *mut abi::ibv_qp_ex, $($arg: $kind),*) {
            // SAFETY: the verb's terms: between start and complete of this thread.
            unsafe { begin(qp, SendOp::$op, SendWqe { $($field: $value,)* ..SendWqe::default() }) };
        }
    )* };
}

builders! {
    wr_send() => Send {};
    wr_send_imm(imm: u32) => SendImm { imm: imm };
    wr_rdma_write(rkey: u32, addr: u64) => Write { rkey: rkey, remote_addr: addr };
    wr_rdma_write_imm(rkey: u32, addr: u64, imm: u32) => WriteImm { rkey: rkey, remote_addr: addr, imm: imm };
    wr_rdma_read(rkey: u32, addr: u64) => Read { rkey: rkey, remote_addr: addr };
    wr_atomic_cmp_swp(rkey: u32, addr: u64, compare: u64, swap: u64) =>
        CmpSwap { rkey: rkey, remote_addr: addr, compare_add: compare, swap: swap };
    wr_atomic_fetch_add(rkey: u32, addr: u64, add: u64) =>
        FetchAdd { rkey: rkey, remote_addr: addr, compare_add: add };
    wr_send_inv(rkey: u32) => SendInv { imm: rkey };
    wr_local_inv(rkey: u32) => LocalInv { rkey: rkey };
}

/// ibv_wr_send_tso: segments of an Ethernet frame, of which the card has none.
unsafe extern "C" fn wr_send_tso(qp: *mut abi::ibv_qp_ex, _: *mut c_void, _: u16, _: u16) {
    // SAFETY: the verb's terms: between start and complete of this thread.
    unsafe { with(qp, |batch| batch.fail(VerbsError::Unsupported("TSO"))) };
}

/// ibv_wr_atomic_write: takes the eight bytes now.
unsafe extern "C" fn wr_atomic_write(qp: *mut abi::ibv_qp_ex, rkey: u32, addr: u64, from: *const c_void) {
    let wqe = SendWqe { rkey, remote_addr: addr, ..SendWqe::default() };
    // SAFETY: the verb's terms: between start and complete of this thread; eight bytes.
    unsafe {
        begin(qp, SendOp::AtomicWrite, wqe);
        with(qp, |batch| batch.set_inline(core::iter::once(slice_from_raw_parts(from.cast(), 8))));
    }
}

/// ibv_wr_flush, of later releases.
unsafe extern "C" fn wr_flush(
    qp: *mut abi::ibv_qp_ex,
    rkey: u32,
    addr: u64,
    length: usize,
    placement: u8,
    level: u8,
) {
    let word = Placement::from_bits(placement)
        .filter(|placement| !placement.is_empty())
        .zip(FlushLevel::from_code(level.into()))
        .map(|(placement, level)| Feth::word(placement, level));
    // SAFETY: the verb's terms: between start and complete of this thread.
    unsafe {
        match (word, u32::try_from(length)) {
            (Some(imm), Ok(bytes)) => {
                let wqe =
                    SendWqe { rkey, remote_addr: addr, compare_add: bytes.into(), imm, ..SendWqe::default() };
                begin(qp, SendOp::Flush, wqe);
            }
            _ => with(qp, |batch| batch.fail(VerbsError::Invalid("type, level or length of a FLUSH"))),
        }
    }
}

/// ibv_wr_bind_mw.
unsafe extern "C" fn wr_bind_mw(
    qp: *mut abi::ibv_qp_ex,
    mw: *mut abi::ibv_mw,
    rkey: u32,
    bind: *const abi::ibv_mw_bind_info,
) {
    // SAFETY: the verb's terms: between start and complete of this thread; window, bind and region are NULL
    // or alive.
    unsafe {
        let wr = match bind.as_ref() {
            Some(bind) => mw::bind_wr(mw, 0, 0, rkey, bind),
            None => Err(libc::EINVAL),
        };
        match wr {
            Ok(wr) => begin(qp, wr.op, wr.wqe()),
            Err(_) => with(qp, |batch| batch.fail(VerbsError::Invalid("bind of a memory window"))),
        }
    }
}

/// ibv_wr_set_xrc_srqn.
unsafe extern "C" fn wr_set_xrc_srqn(qp: *mut abi::ibv_qp_ex, srqn: u32) {
    // SAFETY: the verb's terms: between start and complete of this thread.
    unsafe { with(qp, |batch| batch.set_xrc_srqn(srqn)) };
}

/// ibv_wr_set_sge.
unsafe extern "C" fn wr_set_sge(qp: *mut abi::ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: the verb's terms: between start and complete of this thread.
    unsafe { with(qp, |batch| batch.set_sges(&[Sge { addr, len: length, lkey }])) };
}

/// ibv_wr_set_sge_list.
unsafe extern "C" fn wr_set_sge_list(qp: *mut abi::ibv_qp_ex, count: usize, list: *const abi::ibv_sge) {
    // SAFETY: the verb's terms: between start and complete of this thread; an array of `count` elements.
    unsafe {
        with(qp, |batch| match post::sges(list, c_int::try_from(count).unwrap_or(-1)) {
            Ok(sges) => batch.set_sges(sges),
            Err(_) => batch.fail(VerbsError::Invalid("SGE list")),
        });
    }
}

/// ibv_wr_set_inline_data.
unsafe extern "C" fn wr_set_inline_data(qp: *mut abi::ibv_qp_ex, addr: *mut c_void, length: usize) {
    let piece = slice_from_raw_parts(addr.cast_const().cast(), length);
    // SAFETY: the verb's terms: between start and complete of this thread; the program vouches for the data.
    unsafe { with(qp, |batch| batch.set_inline(core::iter::once(piece))) };
}

/// ibv_wr_set_inline_data_list.
unsafe extern "C" fn wr_set_inline_data_list(
    qp: *mut abi::ibv_qp_ex,
    count: usize,
    list: *const abi::ibv_data_buf,
) {
    // SAFETY: the verb's terms: between start and complete of this thread; an array of `count` elements, and
    // the program vouches for the data.
    unsafe {
        with(qp, |batch| {
            if count > 0 && list.is_null() {
                return batch.fail(VerbsError::Invalid("list of inline data"));
            }
            let pieces: &[abi::ibv_data_buf] =
                if count == 0 { &[] } else { core::slice::from_raw_parts(list, count) };
            let bytes = |piece: &abi::ibv_data_buf| {
                slice_from_raw_parts(piece.addr.cast_const().cast(), piece.length)
            };
            batch.set_inline(pieces.iter().map(bytes));
        });
    }
}

/// ibv_wr_set_ud_addr.
unsafe extern "C" fn wr_set_ud_addr(qp: *mut abi::ibv_qp_ex, ah: *mut abi::ibv_ah, qpn: u32, qkey: u32) {
    // SAFETY: the verb's terms: between start and complete of this thread; `ah` is NULL or alive.
    unsafe {
        with(qp, |batch| match AhHandle::id(ah) {
            Ok(ah) => batch.set_ud_addr(ah, qpn, qkey),
            Err(_) => batch.fail(VerbsError::Invalid("address handle")),
        });
    }
}
