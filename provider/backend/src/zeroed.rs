//! The port's large buffers: memory of which pages that nothing touches cost nothing, or an error where there
//! is none.
//!
//! The kernel reads and writes parts of them by address. So all accesses here come from the one pointer that
//! the allocator gave, and no reference to all of the memory is ever made: it would end the addresses that
//! the kernel has.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::Range;
use std::ptr::NonNull;

use crate::BackendError;

/// Bytes, zero at first.
pub(crate) struct Zeroed {
    at: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory of its own; references to it follow the borrow of `self`.
unsafe impl Send for Zeroed {}
// SAFETY: as above.
unsafe impl Sync for Zeroed {}

impl Zeroed {
    /// So many.
    ///
    /// # Errors
    /// `NoMemory`, also for none.
    pub(crate) fn new(bytes: usize) -> Result<Self, BackendError> {
        let layout = Layout::array::<u8>(bytes).map_err(|_| BackendError::NoMemory)?;
        if bytes == 0 {
            return Err(BackendError::NoMemory);
        }
        // SAFETY: the layout has a size.
        let at = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(BackendError::NoMemory)?;
        Ok(Zeroed { at, layout })
    }

    /// Where `range` begins.
    ///
    /// # Panics
    /// It does not lie in the memory.
    #[inline]
    pub(crate) fn at(&self, range: Range<usize>) -> *mut u8 {
        assert!(range.start <= range.end && range.end <= self.layout.size(), "outside of the buffer");
        // SAFETY: inside the allocation, as just checked.
        unsafe { self.at.as_ptr().add(range.start) }
    }

    /// Bytes to read. As [`Zeroed::at`].
    #[inline]
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        // SAFETY: inside the allocation, initialised, and nobody writes there: `self` is borrowed, and
        // whoever lets the kernel write has it exclusively meanwhile.
        unsafe { std::slice::from_raw_parts(self.at(range.clone()), range.len()) }
    }

    /// Bytes to write. As [`Zeroed::at`].
    #[inline]
    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        // SAFETY: as in `bytes`; `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.at(range.clone()), range.len()) }
    }
}

impl Drop for Zeroed {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and freed here only.
        unsafe { dealloc(self.at.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zero() {
        let mut all = Zeroed::new(100_000).expect("memory");
        assert!(all.bytes(0..100_000).iter().all(|byte| *byte == 0));
        all.bytes_mut(99_999..100_000)[0] = 7;
        assert_eq!((all.bytes(99_998..100_000), all.bytes(100_000..100_000)), (&[0, 7][..], &[][..]));
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri stops where the machine has no such memory")]
    fn none_and_too_much_are_refused() {
        assert!(Zeroed::new(0).is_err());
        assert!(Zeroed::new(isize::MAX as usize).is_err());
    }

    #[test]
    #[should_panic(expected = "outside")]
    fn nothing_lies_behind_it() {
        Zeroed::new(10).expect("memory").bytes(9..11);
    }
}
