//! Where an address lies in which memory file: what the verbs ask before they hand memory to a peer.
//!
//! `starverbs_shared_at` gives 0, and the descriptor and the offset of the one memory file that all of a
//! range is mapped from and that is sealed against shrinking; -1 if there is no such file. The descriptor
//! stays this library's. What is not the arena's is asked of the next library that has the call.

use core::ffi::{c_int, c_void};

use super::interpose;
use crate::{arena, next};

/// The arena's descriptor, and the offset of a range that is in use.
fn arena_at(start: usize, len: usize) -> Option<(c_int, u64)> {
    let span = start..start.checked_add(len)?;
    if len == 0 || arena::inside(&span) != span || !arena::is_live() {
        return None;
    }
    arena::books().with(|books| {
        let file = arena::file(books)?;
        books.space.is_shared(&span).then(|| (file, arena::offset(start) as u64))
    })
}

interpose! {
    /// Which memory file a range is mapped from, and where: see this module
    [starverbs_shared_at] (at: *const c_void, len: usize, fd: *mut c_int, offset: *mut u64) -> c_int {
        if let Some((file, place)) = arena_at(at as usize, len) {
            *fd = file;
            *offset = place;
            return 0;
        }
        next::starverbs_shared_at().map_or(-1, |next| next(at, len, fd, offset))
    }
}
