//! Memory that the program and the board share: queues, commands, events.
//!
//! It comes in memory files, which the board maps as this process does, at DMA addresses above those that
//! stand for the program's own addresses; or from the kernel, which has its own addresses for it. Owns who
//! has which piece of it. Pieces go back here when their object ends; files and the kernel's memory stay
//! until the device is closed.

use std::alloc::Layout;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memmap2::MmapRaw;
use starverbs_backend::{Listed, sealed};
use starverbs_rings::{AllocResult, Memory, Resource};
use starverbs_vfio::VfioClient;

use super::chardev::{self, CharDev};
use crate::error::{Result, VerbsError};

/// The program's own addresses end here; those of queue memory begin.
pub(super) const PROGRAM_END: u64 = 1 << 47;
/// Bytes of the first file; the next ones are larger, so that few are needed.
const FIRST: usize = 4 << 20;
/// Files grow up to so many doublings of that.
const MOST: u32 = 6;
/// The same of the kernel's memory, which is accounted like locked memory and lies in one piece.
const FIRST_OF_KERNEL: usize = 256 << 10;
const MOST_OF_KERNEL: u32 = 3;
/// Pieces are whole cache lines.
const LINE: usize = 64;

/// The connection to the board, which all who ask it something share. `None`: it is closed.
pub(super) type SharedClient = Arc<Mutex<Option<Connection>>>;

/// A client whose socket no forked child keeps: the board sees when the program ends.
pub(super) struct Connection {
    /* first: the list must not have the number when it is another's */
    _listed: Listed,
    pub(super) client: VfioClient,
}

impl Connection {
    pub(super) fn new(client: VfioClient) -> Connection {
        Connection { _listed: Listed::new(client.as_fd().as_raw_fd()), client }
    }
}

/// Where memory comes from.
#[derive(Clone)]
pub(super) enum BoardMemory {
    /// Memory files, which the board at a socket maps
    Files(SharedClient),
    /// The kernel
    Kernel(Arc<CharDev>),
}

/// The memory.
pub(crate) struct Heap {
    source: BoardMemory,
    chunks: Mutex<Vec<Chunk>>,
    /// The next DMA address that nothing has had
    next: AtomicU64,
}

/// One file, or piece of the kernel's memory.
struct Chunk {
    map: MmapRaw,
    _file: Option<File>,
    /// DMA address of its first byte
    address: u64,
    /// Free pieces, by offset: (offset, bytes), none next to another
    free: Vec<(usize, usize)>,
    /// Pieces in use: (offset, bytes)
    used: Vec<(usize, usize)>,
}

/// A piece of memory, which goes back when this is dropped.
pub(crate) struct Piece {
    heap: Arc<Heap>,
    pub(super) at: NonNull<u8>,
}

// SAFETY: plain shared memory, of which whoever has the piece uses atomics.
unsafe impl Send for Piece {}
// SAFETY: as above.
unsafe impl Sync for Piece {}

impl Chunk {
    fn take(&mut self, bytes: usize) -> Option<NonNull<u8>> {
        let at = self.free.iter().position(|(_, free)| *free >= bytes)?;
        self.used.try_reserve(1).ok()?;
        let (offset, free) = self.free[at];
        if free == bytes {
            self.free.remove(at);
        } else {
            self.free[at] = (offset + bytes, free - bytes);
        }
        self.used.push((offset, bytes));
        NonNull::new(self.map.as_mut_ptr().wrapping_add(offset))
    }

    fn give(&mut self, offset: usize) {
        let Some(at) = self.used.iter().position(|(used, _)| *used == offset) else { return };
        let (offset, mut bytes) = self.used.swap_remove(at);
        let next = self.free.partition_point(|(free, _)| *free < offset);
        if self.free.get(next).is_some_and(|(free, _)| *free == offset + bytes) {
            bytes += self.free.remove(next).1;
        }
        match next.checked_sub(1).map(|before| &mut self.free[before]) {
            Some((before, len)) if *before + *len == offset => *len += bytes,
            _ => self.free.insert(next, (offset, bytes)),
        }
    }

    /// Where a pointer lies in it.
    fn offset_of(&self, at: u64) -> Option<usize> {
        let offset = usize::try_from(at.checked_sub(self.map.as_ptr() as u64)?).ok()?;
        (offset < self.map.len()).then_some(offset)
    }
}

impl Heap {
    pub(super) fn new(source: BoardMemory) -> Heap {
        Heap { source, chunks: Mutex::default(), next: AtomicU64::new(PROGRAM_END) }
    }

    fn chunks(&self) -> MutexGuard<'_, Vec<Chunk>> {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Zeroed memory, aligned to a cache line.
    fn take(&self, bytes: usize) -> Result<NonNull<u8>> {
        let bytes = bytes.max(1).checked_next_multiple_of(LINE).ok_or(NO_MEMORY)?;
        let mut chunks = self.chunks();
        let found = chunks.iter_mut().find_map(|chunk| chunk.take(bytes));
        let at = match found {
            Some(at) => at,
            None => {
                let chunk = self.new_chunk(&chunks, bytes)?;
                chunks.push(chunk);
                chunks.last_mut().and_then(|chunk| chunk.take(bytes)).ok_or(NO_MEMORY)?
            }
        };
        drop(chunks);
        // SAFETY: a piece of a chunk, of this size, which nobody else has.
        unsafe { at.write_bytes(0, bytes) };
        Ok(at)
    }

    /// One more file, which the board has mapped.
    fn new_chunk(&self, chunks: &[Chunk], bytes: usize) -> Result<Chunk> {
        let (first, most) = match &self.source {
            BoardMemory::Files(_) => (FIRST, MOST),
            BoardMemory::Kernel(_) => (FIRST_OF_KERNEL, MOST_OF_KERNEL),
        };
        let usual = first << (chunks.len() as u32).min(most);
        let len = bytes.max(usual).checked_next_multiple_of(first).ok_or(NO_MEMORY)?;
        let (map, file, address) = match &self.source {
            BoardMemory::Files(client) => {
                let address = self.reserve(len as u64);
                let (map, file) = sealed::create(c"starverbs-queues", len, sealed::SIZE_STAYS)?;
                let mut client = client.lock().unwrap_or_else(PoisonError::into_inner);
                let connection = client.as_mut().ok_or(VerbsError::Os(libc::EIO))?;
                connection.client.dma_map(file.as_fd(), 0, address, len as u64)?;
                (map, Some(file), address)
            }
            BoardMemory::Kernel(device) => {
                let (map, address) = device.queue_memory(len)?;
                (map, None, address)
            }
        };
        Ok(Chunk { map, _file: file, address, free: vec![(0, len)], used: Vec::new() })
    }

    /// The kernel's memory goes back; zeros are in its place.
    pub(super) fn forget(&self) {
        if let BoardMemory::Kernel(_) = self.source {
            self.chunks().iter().for_each(|chunk| chardev::forget(&chunk.map));
        }
    }

    /// DMA addresses for so many bytes, whole pages, that nothing else gets.
    pub(super) fn reserve(&self, len: u64) -> u64 {
        self.next.fetch_add(len, Ordering::Relaxed)
    }

    fn give(&self, at: NonNull<u8>) {
        let mut chunks = self.chunks();
        let owner = chunks.iter_mut().find_map(|chunk| Some((chunk.offset_of(at.as_ptr() as u64)?, chunk)));
        if let Some((offset, chunk)) = owner {
            chunk.give(offset);
        }
    }

    /// A piece of zeroed memory. ENOMEM, or EIO: the board is gone.
    pub(super) fn piece(self: &Arc<Self>, bytes: usize) -> Result<Piece> {
        Ok(Piece { heap: Arc::clone(self), at: self.take(bytes)? })
    }

    /// The DMA address of an address here. EINVAL: it is none of this memory.
    pub(super) fn address(&self, at: u64) -> Result<u64> {
        let chunks = self.chunks();
        let found = chunks.iter().find_map(|chunk| Some(chunk.address + chunk.offset_of(at)? as u64));
        found.ok_or(VerbsError::Invalid("queue memory that the board does not reach"))
    }
}

pub(super) const NO_MEMORY: VerbsError = VerbsError::NoMemory("queue memory");

impl Piece {
    /// Its DMA address.
    pub(super) fn address(&self) -> Result<u64> {
        self.heap.address(self.at.as_ptr() as u64)
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.heap.give(self.at);
    }
}

// SAFETY: pieces are of the size asked for, in a mapping that may be written and lives as long as the heap,
// and nobody else has them until they come back.
unsafe impl Memory for Heap {
    fn alloc(&self, layout: Layout, _: Resource) -> AllocResult {
        match self.take(layout.size()) {
            Ok(at) if layout.align() <= LINE => AllocResult::At(at),
            Ok(at) => {
                self.give(at);
                AllocResult::Failed
            }
            Err(_) => AllocResult::Failed,
        }
    }

    unsafe fn free(&self, at: NonNull<u8>, _: Resource) {
        self.give(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_come_back() {
        let (map, file) = sealed::create(c"test", 4096, sealed::SIZE_STAYS).unwrap();
        let free = vec![(0, 4096)];
        let mut chunk = Chunk { map, _file: Some(file), address: 0, free, used: Vec::new() };
        let taken: Vec<_> = (0..64).map(|_| chunk.take(64).unwrap()).collect();
        assert!(chunk.take(64).is_none() && chunk.free.is_empty());
        let mut offsets: Vec<_> =
            taken.iter().map(|at| chunk.offset_of(at.as_ptr() as u64).unwrap()).collect();
        offsets.sort_unstable();
        assert!(offsets.iter().enumerate().all(|(n, offset)| *offset == 64 * n), "each is its own");
        for step in [2, 1] {
            offsets.iter().step_by(step).for_each(|offset| chunk.give(*offset));
        }
        assert_eq!((chunk.free.as_slice(), chunk.used.len()), ([(0, 4096)].as_slice(), 0));
        assert!(chunk.take(4097).is_none() && chunk.take(4096).is_some());
    }
}
