//! Where rings get their memory: the process's allocator, or one of the program's own.
//!
//! Owns the rule that memory goes back to where it came from, that it is zeroed, and that what the process
//! gives is counted ([`budget`]). It must not know what lies in it.

use core::ptr::NonNull;
use std::alloc::{GlobalAlloc as _, Layout, System};
use std::sync::Arc;

use crate::budget;

/// Which object a ring belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resource {
    /// A queue pair
    Qp = 1,
    /// A completion queue
    Cq = 2,
    /// A shared receive queue
    Srq = 3,
}

/// What an allocator of the program answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AllocResult {
    /// Memory of the size and alignment asked for
    At(NonNull<u8>),
    /// The process's allocator shall give it
    UseDefault,
    /// There is none
    Failed,
}

/// An allocator of the program's own (ibv_alloc_parent_domain(3)). It is called when rings are made, grow and
/// end, never on the data path.
///
/// # Safety
/// Memory that `alloc` gives must be writable, of the layout's size, and left alone by others until `free`
/// gets it.
pub unsafe trait Memory: Send + Sync {
    /// Memory for a ring.
    fn alloc(&self, layout: Layout, resource: Resource) -> AllocResult;

    /// Takes memory back.
    ///
    /// # Safety
    /// `at` comes from `alloc` with the same `resource`, and is not used any more.
    unsafe fn free(&self, at: NonNull<u8>, resource: Resource);
}

/// A program's allocator, where there is one.
pub type ProgramMemory = Option<Arc<dyn Memory>>;

/// Zeroed memory from `from`, which becomes `None` if the process's allocator gave it.
pub(crate) fn take(from: &mut ProgramMemory, layout: Layout, resource: Resource) -> Option<NonNull<u8>> {
    let answer = from.as_ref().map_or(AllocResult::UseDefault, |memory| memory.alloc(layout, resource));
    match answer {
        AllocResult::Failed => None,
        AllocResult::UseDefault => {
            *from = None;
            if !budget::take(layout.size()) {
                return None;
            }
            /* not the library's own allocator, which has a reserve: a ring is as large as the program asks
             * for */
            // SAFETY: no ring's layout has size 0.
            let at = NonNull::new(unsafe { System.alloc_zeroed(layout) });
            if at.is_none() {
                budget::give(layout.size());
            }
            at
        }
        AllocResult::At(at) => {
            let aligned = at.addr().get().is_multiple_of(layout.align());
            if aligned {
                // SAFETY: the allocator vouches for the size.
                unsafe { at.write_bytes(0, layout.size()) };
                return Some(at);
            }
            // SAFETY: just given, and not used.
            unsafe { give(from, at, layout, resource) };
            None
        }
    }
}

/// Gives memory back.
///
/// # Safety
/// `at` comes from `take` with the same layout and resource, which left `from` as it is now, and is not used
/// any more.
pub(crate) unsafe fn give(from: &ProgramMemory, at: NonNull<u8>, layout: Layout, resource: Resource) {
    match from {
        // SAFETY: the caller's terms.
        Some(memory) => unsafe { memory.free(at, resource) },
        None => {
            // SAFETY: the caller's terms.
            unsafe { System.dealloc(at.as_ptr(), layout) };
            budget::give(layout.size());
        }
    }
}
