//! The forked child's copy of its parent's arena.
//!
//! The child has no mapping of it, only the memory file: what it inherits is read into private memory at the
//! same addresses.

use core::ffi::c_int;
use std::io;

use crate::arena::{self, Books};
use crate::ranges::{Span, overlap};
use crate::system::{self, READ_WRITE};

/// Puts private memory where the arena was, with what the file holds.
///
/// # Errors
/// What the system says; some of it may be in place.
pub(crate) fn copy(books: &Books, file: c_int, protections: &[(Span, c_int)]) -> io::Result<()> {
    for span in books.space.inherited(&books.reached()) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: nothing is mapped there.
        unsafe { system::map(&span, READ_WRITE, flags, None)? };
        for part in books.space.wiped.gaps(&span) {
            fill(&part, file)?;
        }
        for (odd, protection) in protections {
            let part = overlap(odd, &span);
            if !part.is_empty() {
                // SAFETY: made above.
                unsafe { system::protect(&part, *protection)? };
            }
        }
    }
    Ok(())
}

/// Reads what data the file has for a range. Holes are left: new memory is zero.
fn fill(span: &Span, file: c_int) -> io::Result<()> {
    let base = arena::span().start;
    let mut at = span.start;
    while at < span.end {
        let data = match system::seek(file, arena::offset(at), libc::SEEK_DATA) {
            Ok(offset) => base + offset,
            // No data from there on.
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => return Ok(()),
            Err(error) => return Err(error),
        };
        if data >= span.end {
            return Ok(());
        }
        let hole = base + system::seek(file, arena::offset(data), libc::SEEK_HOLE)?;
        let part = data..hole.min(span.end);
        // SAFETY: private memory of this child's, which nobody has yet.
        unsafe { system::fill(&part, file, arena::offset(part.start))? };
        at = part.end;
    }
    Ok(())
}
