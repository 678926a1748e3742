//! The port's large buffers: memory of which pages that nothing touches cost nothing, or an error where there is none.

use std::alloc::{Layout, alloc_zeroed};

use crate::BackendError;

/// So many zero bytes.
///
/// # Errors
/// `NoMemory`
pub(crate) fn zeroed(bytes: usize) -> Result<Box<[u8]>, BackendError> {
    let layout = Layout::array::<u8>(bytes).map_err(|_| BackendError::NoMemory)?;
    if bytes == 0 {
        return Ok(Box::default());
    }
    // SAFETY: the layout has a size.
    let at = unsafe { alloc_zeroed(layout) };
    if at.is_null() {
        return Err(BackendError::NoMemory);
    }
    // SAFETY: new memory of this size, all of it zero, from the allocator that a box gives it back to with the same layout.
    Ok(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(at, bytes)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zero_or_refused() {
        assert!(zeroed(0).is_ok_and(|none| none.is_empty()));
        assert!(zeroed(100_000).is_ok_and(|all| all.len() == 100_000 && all.iter().all(|byte| *byte == 0)));
        assert!(zeroed(isize::MAX as usize).is_err());
    }
}
