//! How much memory the queues and tables of this process may take.
//!
//! One count and one limit for all of them, as they share one process. Rings are refused that would exceed
//! the limit. Who allocates all else that belongs to the card may count it here too, and refuse what is new
//! once nothing is left. A limit below what the machine has makes the call fail that asks for too much, where
//! the kernel would end the process. It must not know where a limit comes from.

use core::sync::atomic::{AtomicUsize, Ordering};

static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);
static USED: AtomicUsize = AtomicUsize::new(0);

/// From now on, so many bytes are the most. What is there already stays.
pub fn set_limit(bytes: usize) {
    LIMIT.store(bytes, Ordering::Relaxed);
}

/// Bytes that are counted.
pub fn used() -> usize {
    USED.load(Ordering::Relaxed)
}

/// Whether something new may be made.
pub fn has_room() -> bool {
    used() < LIMIT.load(Ordering::Relaxed)
}

/// Counts bytes, if the limit allows.
#[must_use]
pub fn take(bytes: usize) -> bool {
    let limit = LIMIT.load(Ordering::Relaxed);
    let sum = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= limit);
    USED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum).is_ok()
}

/// Counts bytes that are there in any case.
#[inline]
pub fn add(bytes: usize) {
    USED.fetch_add(bytes, Ordering::Relaxed);
}

/// Bytes that were counted are free again.
#[inline]
pub fn give(bytes: usize) {
    USED.fetch_sub(bytes, Ordering::Relaxed);
}
