//! Doorbell pages of a function, one for each context, in one memory file that clients map.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::MmapRaw;
use nix::fcntl::{FallocateFlags, fallocate};
use starverbs_backend::sealed;

use crate::dma::Errno;

/// Contexts.
pub(crate) const CONTEXTS: usize = 256;
/// Bytes of a page.
const PAGE_BYTES: usize = 64 << 10;
/// Cells of a page.
pub(crate) const CELLS: usize = PAGE_BYTES / 8;
/// The cell that takes doorbells of csRNA's form, and is no queue's.
pub(crate) const MESSAGE_CELL: usize = CELLS - 1;
/// Bytes of all pages.
pub(crate) const DOORBELL_BYTES: usize = CONTEXTS * PAGE_BYTES;

/// The pages.
pub(crate) struct Doorbells {
    map: MmapRaw,
    file: File,
}

impl Doorbells {
    /// # Errors
    /// No memory file.
    pub(crate) fn new() -> io::Result<Doorbells> {
        let (map, file) = sealed::create(c"starverbs-doorbells", DOORBELL_BYTES, sealed::SIZE_STAYS)?;
        Ok(Doorbells { map, file })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// A cell of a context's page.
    ///
    /// # Panics
    /// There is no such page or cell.
    pub(crate) fn cell(&self, context: u16, at: usize) -> &AtomicU64 {
        assert!(usize::from(context) < CONTEXTS && at < CELLS, "a cell behind the pages");
        self.word(usize::from(context) * CELLS + at)
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at < DOORBELL_BYTES / 8, "a word behind the pages");
        // SAFETY: inside the mapping, which lives as long as this; pages are aligned.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().cast::<u64>().add(at)) }
    }

    /// Makes a context's page all zero.
    pub(crate) fn clear(&self, context: u16) {
        let first = usize::from(context) * PAGE_BYTES;
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        /* a hole takes no memory; where there are none zeroes will do */
        if fallocate(&self.file, hole, first as i64, PAGE_BYTES as i64).is_err() {
            (0..CELLS).for_each(|at| self.cell(context, at).store(0, Ordering::Relaxed));
        }
    }

    /// Reads the pages as a region; behind them are zeroes.
    pub(crate) fn read(&self, offset: u64, to: &mut [u8]) {
        for (n, byte) in to.iter_mut().enumerate() {
            let at = usize::try_from(offset.saturating_add(n as u64)).ok().filter(|at| *at < DOORBELL_BYTES);
            *byte = at.map_or(0, |at| self.word(at / 8).load(Ordering::Relaxed).to_le_bytes()[at % 8]);
        }
    }

    /// Writes cells, for who has not mapped them. EINVAL: they are not written as wholes.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        let Range { start, end } = span(offset, bytes.len()).ok_or(libc::EINVAL)?;
        if !start.is_multiple_of(8) || !end.is_multiple_of(8) || end > DOORBELL_BYTES {
            return Err(libc::EINVAL);
        }
        for (n, cell) in bytes.chunks_exact(8).enumerate() {
            let value = cell.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
            self.word(start / 8 + n).store(value, Ordering::Release);
        }
        Ok(())
    }
}

/// The context and the word of a write that is a doorbell of csRNA's form.
pub(crate) fn message_of(offset: u64, bytes: &[u8]) -> Option<(u16, u64)> {
    let at = usize::try_from(offset).ok().filter(|at| *at < DOORBELL_BYTES)?;
    let (context, at) = (at / PAGE_BYTES, at % PAGE_BYTES);
    let word = bytes.try_into().ok().map(u64::from_le_bytes)?;
    (at == MESSAGE_CELL * 8).then_some((context as u16, word))
}

fn span(offset: u64, len: usize) -> Option<Range<usize>> {
    let start = usize::try_from(offset).ok()?;
    Some(start..start.checked_add(len)?)
}
