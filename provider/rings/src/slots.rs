//! The slots of a completion ring: of equal size, zeroed.

use core::ptr::NonNull;
use std::alloc::Layout;

use crate::memory::{self, ProgramMemory, Resource};
use crate::sync::LoomCells;

/// Alignment of the first slot: a cache line.
const LINE: usize = 64;

/// Raw slots. Who may touch which one is the rings' affair.
pub(crate) struct RawSlots {
    base: NonNull<u8>,
    layout: Layout,
    stride: usize,
    mask: u32,
    watch: LoomCells,
    memory: ProgramMemory,
}

// SAFETY: plain memory without thread affinity; the rings' protocols order the accesses.
unsafe impl Send for RawSlots {}
// SAFETY: as above.
unsafe impl Sync for RawSlots {}

impl RawSlots {
    /// At least `count` slots of `stride` bytes each, in the program's memory if it has its own; `None` if
    /// that is out of reach.
    pub(crate) fn new(count: u32, stride: usize, mut memory: ProgramMemory) -> Option<Self> {
        let count = count.max(1).checked_next_power_of_two()?;
        let bytes = stride.checked_mul(count as usize)?;
        let layout = Layout::from_size_align(bytes, LINE).ok()?;
        let base = memory::take(&mut memory, layout, Resource::Cq)?;
        Some(RawSlots { base, layout, stride, mask: count - 1, watch: LoomCells::new(count), memory })
    }

    /// How many there are.
    #[inline]
    pub(crate) fn count(&self) -> u32 {
        self.mask + 1
    }

    /// Whose memory it is.
    pub(crate) fn memory(&self) -> &ProgramMemory {
        &self.memory
    }

    /// Bytes of each.
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    /// First byte of the slot that index `index` falls on, to be read.
    #[inline]
    pub(crate) fn read(&self, index: u32) -> *const u8 {
        self.watch.read(index & self.mask);
        self.at(index)
    }

    /// First byte of the slot that index `index` falls on, to be written.
    #[inline]
    pub(crate) fn write(&self, index: u32) -> *mut u8 {
        self.watch.write(index & self.mask);
        self.at(index)
    }

    #[inline]
    fn at(&self, index: u32) -> *mut u8 {
        // SAFETY: the masked index is below the count, so the slot lies inside the allocation.
        unsafe { self.base.as_ptr().add((index & self.mask) as usize * self.stride) }
    }
}

impl Drop for RawSlots {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and freed here only.
        unsafe { memory::give(&self.memory, self.base, self.layout, Resource::Cq) }
    }
}
