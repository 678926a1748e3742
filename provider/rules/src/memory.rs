//! The driver's memory, which the board reads and writes: bytes are copied, words are atomics.

use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, AtomicU64};

use memmap2::{MmapOptions, MmapRaw};
use starverbs_backend::sealed;
use zerocopy::{FromBytes, Immutable, KnownLayout};

/// Memory in a file that the board maps.
pub struct MemoryFile {
    map: MmapRaw,
    file: std::fs::File,
}

impl MemoryFile {
    /// So many bytes, all zero.
    ///
    /// # Errors
    /// There are none.
    pub fn new(len: usize) -> std::io::Result<MemoryFile> {
        let (map, file) = sealed::create(c"starverbs-raw", len, sealed::SIZE_STAYS)?;
        Ok(MemoryFile { map, file })
    }

    /// The bytes of a memory file that this process made.
    ///
    /// # Errors
    /// It cannot be mapped.
    pub fn of(file: std::fs::File) -> std::io::Result<MemoryFile> {
        let len = usize::try_from(file.metadata()?.len()).map_err(std::io::Error::other)?;
        Ok(MemoryFile { map: MmapOptions::new().len(len).map_raw(&file)?, file })
    }

    /// The same memory, mapped once more.
    ///
    /// # Errors
    /// It cannot be mapped.
    pub fn again(&self) -> std::io::Result<MemoryFile> {
        let map = MmapOptions::new().len(self.map.len()).map_raw(&self.file)?;
        Ok(MemoryFile { map, file: self.file.try_clone()? })
    }

    /// Puts what another file has at `offset` in the place of `len` bytes of this mapping.
    ///
    /// # Errors
    /// It cannot be mapped.
    pub(crate) fn place(
        &self,
        at: usize,
        len: usize,
        file: BorrowedFd<'_>,
        offset: u64,
    ) -> std::io::Result<()> {
        let (to, protection) = (self.at(at, len, 4096), libc::PROT_READ | libc::PROT_WRITE);
        let (flags, fd) = (libc::MAP_SHARED | libc::MAP_FIXED, file.as_raw_fd());
        // SAFETY: in place of a part of a mapping that is ours alone, whose bytes are plain in either.
        let map = unsafe { libc::mmap(to.cast(), len, protection, flags, fd, offset as libc::off_t) };
        if map == libc::MAP_FAILED { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Where it lies in this process.
    pub(crate) fn address(&self) -> u64 {
        self.map.as_ptr().addr() as u64
    }

    /// Its file.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Where `len` bytes at `at` are.
    ///
    /// # Panics
    /// They are not all there, or not aligned to `align`.
    fn at(&self, at: usize, len: usize, align: usize) -> *mut u8 {
        let inside = at.checked_add(len).is_some_and(|end| end <= self.map.len());
        assert!(inside && at.is_multiple_of(align), "memory that the driver has not");
        self.map.as_mut_ptr().wrapping_add(at)
    }

    /// Writes memory.
    ///
    /// # Panics
    /// It is not all there: so for all of these.
    pub fn put(&self, at: usize, bytes: &[u8]) {
        let to = self.at(at, bytes.len(), 1);
        // SAFETY: inside the mapping, which may be written.
        unsafe { to.copy_from(bytes.as_ptr(), bytes.len()) };
    }

    /// Reads memory.
    pub fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let from = self.at(at, len, 1);
        // SAFETY: inside the mapping; `bytes` are ours.
        unsafe { bytes.as_mut_ptr().copy_from(from, len) };
        bytes
    }

    /// Reads memory as a struct.
    pub fn get<T: FromBytes + KnownLayout + Immutable>(&self, at: usize) -> T {
        match T::read_from_bytes(&self.bytes(at, size_of::<T>())) {
            Ok(value) => value,
            Err(_) => unreachable!("bytes of its size are a value"),
        }
    }

    /// A word of 32 bits.
    pub fn word(&self, at: usize) -> &AtomicU32 {
        let word = self.at(at, 4, 4);
        // SAFETY: aligned, inside the mapping, which lives as long as this.
        unsafe { AtomicU32::from_ptr(word.cast()) }
    }

    /// A word of 64 bits.
    pub fn quad(&self, at: usize) -> &AtomicU64 {
        let word = self.at(at, 8, 8);
        // SAFETY: aligned, inside the mapping, which lives as long as this.
        unsafe { AtomicU64::from_ptr(word.cast()) }
    }
}
