//! The forked child's copy of its parent's arena.
//!
//! The child has no mapping of it, only the memory file: what it inherits is read into private memory at the
//! same addresses.

use core::ffi::c_int;
use std::io;

use crate::arena::{self, Books};
use crate::maps;
use crate::ranges::{Span, overlap};
use crate::system::{self, READ_WRITE};

/// Bytes of a huge page, or a multiple of it.
const HUGE: usize = 2 << 20;

/// What a child gets. Made before the fork: in the child an allocation might be mapped where the arena was.
pub(crate) struct Legacy {
    /// Where it has memory
    mapped: Vec<Span>,
    /// Where that holds what the parent's does
    filled: Vec<Span>,
    /// Where it is not to be read and written, but else
    protections: Vec<(Span, c_int)>,
}

impl Legacy {
    /// Nothing.
    pub(crate) const fn none() -> Legacy {
        Legacy { mapped: Vec::new(), filled: Vec::new(), protections: Vec::new() }
    }

    /// What this process has now.
    pub(crate) fn of(books: &Books) -> Legacy {
        let mapped = books.space.inherited(&books.reached());
        let filled = mapped.iter().flat_map(|span| books.space.wiped.gaps(span)).collect();
        let odd = maps::odd_protections(&books.reached());
        let parts = |(odd, protection): &(Span, c_int)| {
            let parts = mapped.iter().map(|span| overlap(span, odd)).filter(|part| !part.is_empty());
            parts.map(|part| (part, *protection)).collect::<Vec<_>>()
        };
        Legacy { protections: odd.iter().flat_map(parts).collect(), mapped, filled }
    }

    /// Puts private memory where the arena was, with what the file holds. Allocates nothing.
    ///
    /// # Errors
    /// What the system says; some of it may be in place.
    pub(crate) fn copy(&self, file: c_int) -> io::Result<()> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        for span in &self.mapped {
            // SAFETY: the arena's place. Something is mapped there only where another thread of the parent
            // was about to give a range back.
            unsafe { system::map(span, READ_WRITE, flags, None)? };
        }
        self.filled.iter().try_for_each(|span| fill(span, file))?;
        for (span, protection) in &self.protections {
            // SAFETY: made above.
            unsafe { system::protect(span, *protection)? };
        }
        Ok(())
    }
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
        let huge = part.start.next_multiple_of(HUGE)..part.end / HUGE * HUGE;
        if huge.start < huge.end {
            // All of it is written at once: as huge pages, where the host has them, in half the time.
            // SAFETY: as below.
            let _ = unsafe { system::advise(&huge, libc::MADV_HUGEPAGE) };
        }
        // SAFETY: private memory of this child's, which nobody has yet.
        unsafe { system::fill(&part, file, arena::offset(part.start))? };
        at = part.end;
    }
    Ok(())
}
