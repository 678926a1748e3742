//! 1RMA's direct verbs: stardv_onerma_open(3), stardv_onerma_create_region(3), stardv_onerma_post(3).
//!
//! Owns the layout of their structs and C's numbers. It must not know what a card does with them.

use super::give;
use crate::context::ContextHandle;
use crate::edge::{self, Errno};
use crate::handle::{beginning, errno, given, quiet};
use core::ffi::c_int;
use starverbs_abi as abi;
use starverbs_core::Gid;
use starverbs_verbs::onerma::{
    Class, DerivedKey, Finished, OneRmaOp, Onerma, RegionId, RegionKey, Rights, Transfer,
    derive_key as derive, derive_peer_key as derive_peer,
};
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// `struct stardv_onerma_attr`: new fields at the end.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct OneRmaAttr {
    comp_mask: u64,
    gid_index: u32,
    slots: u32,
    pid: u32,
    reserved: u32,
}

/// `struct stardv_onerma_region_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RegionAttr {
    comp_mask: u64,
    addr: *mut u8,
    length: u64,
    rights: u32,
    key: [u8; 16],
    reserved: u32,
}

/// `struct stardv_onerma_wr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Wr {
    comp_mask: u64,
    wr_id: u64,
    op: u32,
    low_priority: u32,
    remote: [u8; 16],
    remote_offset: u64,
    local_offset: u64,
    length: u64,
    remote_region: u32,
    local_region: u32,
    key: [u8; 16],
}

/// `struct stardv_onerma_wc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Wc {
    wr_id: u64,
    status: u32,
    issue_delay: u32,
    total_delay: u32,
    reserved: u32,
}

/// `struct stardv_onerma_counters`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct OnermaCounters {
    comp_mask: u64,
    received: u64,
    malformed: u64,
    late: u64,
    copies: u64,
    forged: u64,
    auth_failures: u64,
    nacks: u64,
    access_failures: u64,
    rekeys: u64,
    transfer_timeouts: u64,
    completed: u64,
    lost_completions: u64,
    unsent: u64,
    foreign: u64,
}

/* As released: programs were built with these. */
#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<OneRmaAttr>() == 24);
    assert!(size_of::<RegionAttr>() == 48);
    assert!(size_of::<Wr>() == 88);
    assert!(size_of::<Wc>() == 24);
    assert!(size_of::<OnermaCounters>() == 120);
};

/// A struct that the program hands in, of which the release knows all.
///
/// # Safety
/// `from` is NULL or names `inlen` bytes, of which all-zero ones are a valid `T`.
unsafe fn taken<T>(from: *const T, inlen: u32) -> Result<T, Errno> {
    if from.is_null() || (inlen as usize) < size_of::<T>() {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller's terms.
    Ok(unsafe { beginning(from, inlen as usize) })
}

/// Nothing is asked for that a later release has.
fn known(comp_mask: u64, reserved: u32) -> Result<(), Errno> {
    if comp_mask == 0 && reserved == 0 { Ok(()) } else { Err(libc::EOPNOTSUPP) }
}

/// The card behind a handle.
///
/// # Safety
/// `onerma` is NULL, or of [`open`] and not closed.
unsafe fn obj<'a>(onerma: *mut Onerma) -> Result<&'a Onerma, Errno> {
    // SAFETY: the caller's terms; a card is used by shared reference alone.
    given(onerma).map(|onerma| unsafe { onerma.as_ref() })
}

/// A key of 16 bytes.
///
/// # Safety
/// `key` is NULL or names them.
unsafe fn key_of(key: *const [u8; 16]) -> Result<[u8; 16], Errno> {
    // SAFETY: the caller's terms.
    given(key.cast_mut()).map(|key| unsafe { key.read() })
}

fn op_of(op: u32) -> Result<OneRmaOp, Errno> {
    u8::try_from(op).ok().and_then(OneRmaOp::from_code).ok_or(libc::EINVAL)
}

/// stardv_onerma_open(3).
pub(crate) unsafe extern "C" fn open(
    context: *mut abi::ibv_context,
    attr: *const OneRmaAttr,
    inlen: u32,
) -> *mut Onerma {
    edge::object(|| {
        // SAFETY: the verb's terms.
        let (context, attr) = unsafe { (ContextHandle::obj(context)?, taken(attr, inlen)?) };
        known(attr.comp_mask, attr.reserved)?;
        let onerma = Onerma::open(context, attr.gid_index, attr.slots, attr.pid).map_err(errno)?;
        Ok(Box::into_raw(Box::new(onerma)))
    })
}

/// stardv_onerma_close(3).
pub(crate) unsafe extern "C" fn close(onerma: *mut Onerma) -> c_int {
    edge::int(|| {
        let onerma = given(onerma)?;
        // SAFETY: the verb's terms: of `open`, and nobody uses it any more.
        drop(unsafe { Box::from_raw(onerma.as_ptr()) });
        Ok(())
    })
}

/// stardv_onerma_create_region(3).
pub(crate) unsafe extern "C" fn create_region(
    onerma: *mut Onerma,
    attr: *const RegionAttr,
    inlen: u32,
    region: *mut u32,
) -> c_int {
    edge::int(|| {
        // SAFETY: the verb's terms.
        let (onerma, attr) = unsafe { (obj(onerma)?, taken(attr, inlen)?) };
        let region = given(region)?;
        known(attr.comp_mask, attr.reserved)?;
        let rights = u8::try_from(attr.rights).ok().and_then(Rights::from_bits).ok_or(libc::EINVAL)?;
        let len = usize::try_from(attr.length).map_err(|_| libc::EINVAL)?;
        let ends = attr.addr.addr().checked_add(len).is_some();
        if attr.addr.is_null() || len == 0 || !ends {
            return Err(libc::EINVAL);
        }
        // SAFETY: the verb's terms: the program has the memory until the region is destroyed.
        let id = unsafe { onerma.open_region(attr.addr, len, rights, RegionKey(attr.key)) };
        // SAFETY: the verb's terms.
        unsafe { region.write(id.map_err(errno)?.0) };
        Ok(())
    })
}

/// stardv_onerma_destroy_region(3).
pub(crate) unsafe extern "C" fn destroy_region(onerma: *mut Onerma, region: u32) -> c_int {
    // SAFETY: the verb's terms.
    edge::int(|| unsafe { obj(onerma)? }.close_region(RegionId(region)).map_err(errno))
}

/// stardv_onerma_set_key(3).
pub(crate) unsafe extern "C" fn set_key(onerma: *mut Onerma, region: u32, key: *const [u8; 16]) -> c_int {
    edge::int(|| {
        // SAFETY: the verb's terms.
        let (onerma, key) = unsafe { (obj(onerma)?, key_of(key)?) };
        onerma.rekey_region(RegionId(region), RegionKey(key)).map_err(errno)
    })
}

/// stardv_onerma_derive_key(3).
pub(crate) unsafe extern "C" fn derive_key(
    region_key: *const [u8; 16],
    initiator: *const [u8; 16],
    pid: u32,
    op: u32,
    key: *mut [u8; 16],
) -> c_int {
    edge::int(|| {
        // SAFETY: the verb's terms; a GID has 16 bytes, too.
        let (region, initiator) = unsafe { (key_of(region_key)?, key_of(initiator)?) };
        let derived = derive(&RegionKey(region), Gid(initiator), pid, op_of(op)?);
        // SAFETY: the verb's terms.
        unsafe { given(key)?.write(derived.0) };
        Ok(())
    })
}

/// stardv_onerma_derive_peer_key(3).
pub(crate) unsafe extern "C" fn derive_peer_key(
    socket: c_int,
    region_key: *const [u8; 16],
    initiator: *const [u8; 16],
    op: u32,
    key: *mut [u8; 16],
    pid: *mut u32,
) -> c_int {
    edge::int(|| {
        // SAFETY: the verb's terms; a GID has 16 bytes, too.
        let (region, initiator) = unsafe { (key_of(region_key)?, key_of(initiator)?) };
        let (key, pid, op) = (given(key)?, given(pid)?, op_of(op)?);
        if socket < 0 {
            return Err(libc::EBADF);
        }
        // SAFETY: a number that is no descriptor of the program's is answered with EBADF; one that is stays
        // open by the verb's terms.
        let socket = unsafe { BorrowedFd::borrow_raw(socket) };
        let derived = derive_peer(socket, &RegionKey(region), Gid(initiator), op).map_err(errno)?;
        // SAFETY: the verb's terms.
        unsafe {
            key.write(derived.key.0);
            pid.write(derived.pid);
        }
        Ok(())
    })
}

/// stardv_onerma_post(3).
pub(crate) unsafe extern "C" fn post(onerma: *mut Onerma, wr: *const Wr, inlen: u32) -> c_int {
    edge::int(|| {
        // SAFETY: the verb's terms.
        let (onerma, wr) = unsafe { (obj(onerma)?, taken(wr, inlen)?) };
        known(wr.comp_mask, 0)?;
        let class = u8::try_from(wr.low_priority).ok().and_then(Class::from_code).ok_or(libc::EINVAL)?;
        let transfer = Transfer {
            op: op_of(wr.op)?,
            class,
            len: wr.length,
            remote: Gid(wr.remote),
            region: RegionId(wr.remote_region),
            offset: wr.remote_offset,
            local: RegionId(wr.local_region),
            local_offset: wr.local_offset,
            key: DerivedKey(wr.key),
            token: wr.wr_id,
        };
        onerma.post(transfer).map_err(quiet)
    })
}

/// stardv_onerma_poll(3).
pub(crate) unsafe extern "C" fn poll(
    onerma: *mut Onerma,
    max: c_int,
    wc: *mut Wc,
    timeout_ms: c_int,
    entry_size: u32,
) -> c_int {
    let fill = || -> Result<c_int, Errno> {
        let (max, room) = (usize::try_from(max).map_err(|_| libc::EINVAL)?, entry_size as usize);
        let misplaced = room < size_of::<Wc>() || !room.is_multiple_of(align_of::<Wc>());
        if misplaced || (wc.is_null() && max > 0) || timeout_ms < -1 {
            return Err(libc::EINVAL);
        }
        let limit = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        // SAFETY: the verb's terms.
        let onerma = unsafe { obj(onerma)? };
        let mut at = 0;
        let taken = onerma.poll(max, limit, |finished| {
            let Finished { token: wr_id, status, issue_delay, total_delay } = finished;
            let one = Wc { wr_id, status: status as u32, issue_delay, total_delay, reserved: 0 };
            // SAFETY: the verb's terms: `max` entries of `entry_size` bytes, and no more are taken.
            unsafe { give(&one, wc.wrapping_byte_add(at * room), room) };
            at += 1;
        });
        taken.map(|taken| taken as c_int).map_err(quiet)
    };
    edge::value(-libc::EFAULT, || edge::kept(|| fill().unwrap_or_else(|errno: Errno| -errno)))
}

/// stardv_onerma_query_counters(3).
pub(crate) unsafe extern "C" fn query_counters(
    onerma: *mut Onerma,
    counters: *mut OnermaCounters,
    outlen: u32,
) -> c_int {
    edge::int(|| {
        if counters.is_null() || (outlen as usize) < size_of::<u64>() {
            return Err(libc::EINVAL);
        }
        // SAFETY: the verb's terms.
        let (of, [unsent, foreign, ..]) = unsafe { obj(onerma)? }.counts().map_err(errno)?;
        let answer = OnermaCounters {
            comp_mask: 0,
            received: of.received,
            malformed: of.malformed,
            late: of.late,
            copies: of.copies,
            forged: of.forged,
            auth_failures: of.auth_failures,
            nacks: of.nacks,
            access_failures: of.access_failures,
            rekeys: of.rekeys,
            transfer_timeouts: of.transfer_timeouts,
            completed: of.completed,
            lost_completions: of.lost_completions,
            unsent,
            foreign,
        };
        // SAFETY: the verb's terms: the program has `outlen` bytes.
        unsafe { give(&answer, counters, outlen as usize) };
        Ok(())
    })
}
