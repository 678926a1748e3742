//! Direct verbs: the calls of `infiniband/stardv.h`, which the verbs API has no word for.
//!
//! Owns the layout of that header's structs and the rules by which they grow (stardv(7)). It must not know
//! what is counted.

use crate::context::ContextHandle;
use crate::device;
use crate::edge::{self, Errno};
use crate::handle::errno;
use core::ffi::{c_char, c_int};
use core::mem::offset_of;
use starverbs_abi as abi;
use starverbs_core::Counters;

pub(crate) mod onerma;
pub(crate) mod qp;
pub(crate) mod rpc;

/// `enum stardv_counters_mask`.
const CARD: u64 = 1 << 0;
const QPC: u64 = 1 << 1;
const CONTEXT: u64 = 1 << 2;

/// `struct stardv_counters`: new groups at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StardvCounters {
    comp_mask: u64,
    card: OfCard,
    qpc: OfQpc,
    context: OfContext,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct OfCard {
    tx_packets: u64,
    tx_bytes: u64,
    rx_packets: u64,
    rx_bytes: u64,
    retransmitted: u64,
    timeouts: u64,
    completions: u64,
    error_completions: u64,
    qps: u64,
    mrs: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct OfQpc {
    hits: u64,
    misses: u64,
    waited: u64,
    pending: u64,
    pending_peak: u64,
    prefetched: u64,
    prefetch_dropped: u64,
    evicted: u64,
    ring_reads: u64,
    wait_ns: u64,
    on_chip: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct OfContext {
    qps: u64,
    qps_rts: u64,
    qps_err: u64,
}

/* As released: programs were built with these. */
const _: () = {
    assert!(offset_of!(StardvCounters, card) == 8);
    assert!(offset_of!(StardvCounters, qpc) == 88);
    assert!(offset_of!(StardvCounters, context) == 176);
    assert!(size_of::<StardvCounters>() == 200);
};

/// `struct stardv_counter`.
#[repr(C)]
pub(crate) struct StardvCounter {
    name: *const c_char,
    help: *const c_char,
    value: u64,
}

fn of_card(from: &Counters) -> OfCard {
    OfCard {
        tx_packets: from.tx_packets.get(),
        tx_bytes: from.tx_bytes.get(),
        rx_packets: from.rx_packets.get(),
        rx_bytes: from.rx_bytes.get(),
        retransmitted: from.retransmitted.get(),
        timeouts: from.timeouts.get(),
        completions: from.completions.get(),
        error_completions: from.error_completions.get(),
        qps: from.qps.get(),
        mrs: from.mrs.get(),
    }
}

fn of_qpc(from: &Counters) -> OfQpc {
    OfQpc {
        hits: from.qpc_hits.get(),
        misses: from.qpc_misses.get(),
        waited: from.qpc_waited.get(),
        pending: from.qpc_pending.get(),
        pending_peak: from.qpc_pending_peak.get(),
        prefetched: from.qpc_prefetched.get(),
        prefetch_dropped: from.qpc_prefetch_dropped.get(),
        evicted: from.qpc_evicted.get(),
        ring_reads: from.qpc_ring_reads.get(),
        wait_ns: from.qpc_wait_ns.get(),
        on_chip: from.qpc_on_chip.get(),
    }
}

/// stardv_is_supported(3): the library has one device, which all of this file is of.
pub(crate) unsafe extern "C" fn is_supported(device: *mut abi::ibv_device) -> bool {
    edge::value(false, || !device.is_null() && device == device::star0())
}

/// stardv_query_counters(3).
pub(crate) unsafe extern "C" fn query_counters(
    context: *mut abi::ibv_context,
    counters: *mut StardvCounters,
    outlen: u32,
) -> c_int {
    edge::int(|| {
        let room = outlen as usize;
        if counters.is_null() || room < offset_of!(StardvCounters, card) {
            return Err(libc::EINVAL);
        }
        // SAFETY: the verb's terms: `outlen` bytes, of which the mask is the first field.
        let wanted = unsafe { (&raw const (*counters).comp_mask).read() };
        // SAFETY: as above.
        let answer = unsafe { answer(context, wanted, room)? };
        // SAFETY: as above: the program has `room` bytes.
        unsafe { give(&answer, counters, room) };
        Ok(())
    })
}

/// Writes the answer to a struct of `room` bytes, which another release may have made: what this one does not
/// know of them is zero.
///
/// # Safety
/// `to` names `room` bytes. A `T` has no padding.
unsafe fn give<T>(answer: &T, to: *mut T, room: usize) {
    let known = room.min(size_of::<T>());
    // SAFETY: the caller's terms.
    unsafe {
        to.cast::<u8>().write_bytes(0, room);
        core::ptr::copy_nonoverlapping((&raw const *answer).cast::<u8>(), to.cast(), known);
    }
}

/// The groups of `wanted` that there are, and that a struct of `room` bytes has whole.
///
/// # Safety
/// `context` is NULL, or a context that is open.
unsafe fn answer(context: *mut abi::ibv_context, wanted: u64, room: usize) -> Result<StardvCounters, Errno> {
    // SAFETY: the caller's terms.
    let context = unsafe { ContextHandle::obj(context)? };
    let counters = context.counters().map_err(errno)?;
    let mut answer = StardvCounters::default();
    let mut give = |group: u64, end: usize| {
        let given = wanted & group != 0 && end <= room;
        answer.comp_mask |= if given { group } else { 0 };
        given
    };
    let card = give(CARD, offset_of!(StardvCounters, qpc));
    let qpc = context.is_qpc_limited().map_err(errno)? && give(QPC, offset_of!(StardvCounters, context));
    let census = give(CONTEXT, size_of::<StardvCounters>());
    if card {
        answer.card = of_card(counters);
    }
    if qpc {
        answer.qpc = of_qpc(counters);
    }
    if census {
        let census = context.census().map_err(errno)?;
        answer.context = OfContext { qps: census.qps, qps_rts: census.rts, qps_err: census.err };
    }
    Ok(answer)
}

/// stardv_list_counters(3): how many there are, of which the first `max` are written, `entry_size` bytes
/// each.
pub(crate) unsafe extern "C" fn list_counters(
    context: *mut abi::ibv_context,
    list: *mut StardvCounter,
    max: usize,
    flags: u32,
    entry_size: usize,
) -> isize {
    let fill = || -> Result<isize, Errno> {
        let room = size_of::<StardvCounter>();
        let misplaced = entry_size < room || !entry_size.is_multiple_of(align_of::<StardvCounter>());
        if flags != 0 || misplaced || (list.is_null() && max > 0) {
            return Err(libc::EINVAL);
        }
        // SAFETY: the verb's terms.
        let context = unsafe { ContextHandle::obj(context)? };
        let values = context.counters().map_err(errno)?.values();
        let texts = Counters::C_NAMES.iter().zip(Counters::C_HELP);
        for (at, ((name, help), value)) in texts.zip(values).enumerate().take(max) {
            let entry = StardvCounter { name: name.as_ptr(), help: help.as_ptr(), value };
            let to = list.wrapping_byte_add(at * entry_size);
            // SAFETY: the verb's terms: `max` entries of `entry_size` bytes, at least as many as are written;
            // what a later header has behind them is zero.
            unsafe {
                to.cast::<u8>().write_bytes(0, entry_size);
                to.write(entry);
            }
        }
        Ok(isize::try_from(values.len()).unwrap_or(isize::MAX))
    };
    let failed = |errno: Errno| -isize::try_from(errno).unwrap_or(1);
    edge::value(failed(libc::EFAULT), || fill().unwrap_or_else(failed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_device_is_supported() {
        // SAFETY: pointers are compared alone.
        unsafe {
            assert!(is_supported(device::star0()));
            assert!(!is_supported(core::ptr::null_mut()));
            assert!(!is_supported(core::ptr::dangling_mut()));
        }
    }

    #[test]
    fn every_counter_has_its_texts() {
        assert_eq!(Counters::C_NAMES.len(), Counters::NAMES.len());
        for (at, name) in Counters::NAMES.iter().enumerate() {
            assert_eq!(Counters::C_NAMES[at].to_str(), Ok(*name));
            assert_eq!(Counters::C_HELP[at].to_str(), Ok(Counters::HELP[at].trim()));
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let mut counters = StardvCounters::default();
        // SAFETY: the pointers are NULL or places of the sizes given.
        unsafe {
            assert_eq!(query_counters(core::ptr::null_mut(), &mut counters, 200), libc::EINVAL);
            assert_eq!(query_counters(core::ptr::null_mut(), core::ptr::null_mut(), 200), libc::EINVAL);
            let (context, list) = (core::ptr::null_mut(), core::ptr::null_mut());
            assert_eq!(list_counters(context, list, 0, 0, 24), -(libc::EINVAL as isize));
        }
    }
}
