//! Atomics, from the standard library or, under `cfg(loom)`, from loom; and a stand-in that lets
//! loom watch who touches a slot.

#[cfg(not(loom))]
pub(crate) use std::{
    hint::spin_loop,
    sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence},
    thread::yield_now,
};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU8, Ordering, fence};

/* what shared memory consists of */
#[cfg(loom)]
pub(crate) use crash::{AtomicU32, AtomicU64};

#[cfg(loom)]
#[path = "crash.rs"]
pub mod crash;

/// What was stored before comes before what is loaded behind, of who has just changed an atomic by one
/// instruction that reads and writes. On x86 that is a fence already: this one keeps the compiler to the
/// order.
#[inline]
pub(crate) fn fence_behind_change() {
    #[cfg(all(target_arch = "x86_64", not(loom), not(miri)))]
    core::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(not(all(target_arch = "x86_64", not(loom), not(miri))))]
    fence(Ordering::SeqCst);
}

/// One cell a slot, touched whenever the slot is: loom then reports two sides in one slot.
/// Nothing at all without loom.
pub(crate) struct LoomCells {
    #[cfg(loom)]
    cells: Vec<loom::cell::UnsafeCell<()>>,
}

#[cfg(not(loom))]
impl LoomCells {
    pub(crate) fn new(_slots: u32) -> Self {
        LoomCells {}
    }
    #[inline]
    pub(crate) fn read(&self, _slot: u32) {}
    #[inline]
    pub(crate) fn write(&self, _slot: u32) {}
}

#[cfg(loom)]
impl LoomCells {
    pub(crate) fn new(slots: u32) -> Self {
        LoomCells { cells: (0..slots).map(|_| loom::cell::UnsafeCell::new(())).collect() }
    }
    pub(crate) fn read(&self, slot: u32) {
        self.cells[slot as usize].with(|_| ());
    }
    pub(crate) fn write(&self, slot: u32) {
        self.cells[slot as usize].with_mut(|_| ());
    }
}
