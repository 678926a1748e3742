//! The allocator of this library's own bookkeeping: glibc's, by the names that nobody stands for.

#[cfg(not(test))]
use core::alloc::{GlobalAlloc, Layout};

/// glibc's malloc.
#[cfg(not(test))]
pub(crate) struct Glibc;

// SAFETY: glibc's blocks are aligned to 16 bytes, or as memalign is told.
#[cfg(not(test))]
unsafe impl GlobalAlloc for Glibc {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: any size and any power of two.
        unsafe {
            match layout.align() {
                0..=16 => crate::next::__libc_malloc(layout.size()).cast(),
                align => crate::next::__libc_memalign(align, layout.size()).cast(),
            }
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, _: Layout) {
        // SAFETY: it comes from alloc.
        unsafe { crate::next::__libc_free(block.cast()) }
    }
}
