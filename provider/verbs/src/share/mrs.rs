//! A card's table of memory regions in a memory file: the card writes it, other processes of the host may
//! read it.

use std::fs::File;
use std::mem::{offset_of, transmute};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use memmap2::{MmapMut, MmapOptions};
use starverbs_backend::ParentOnly;
use starverbs_backend::sealed::{self, ONLY_OURS};
use starverbs_core::mr::{Backing, KEY_BITS, MAX_MR, MrEntry, Storage};
use starverbs_core::{Access, NicError, PdId, Qpn};
use starverbs_rings::{TableEntry, TableLength, budget};

use super::file::{self, FileAt, OTHER};
use crate::error::Result;

/// "SVMRS" and the layout's version.
const MAGIC: u64 = u64::from_le_bytes(*b"SVMRS\0\0\x02");

/// The header before the entries.
#[repr(C, align(64))]
struct Head {
    magic: AtomicU64,
    /// By which the slot of a key is found
    mask: AtomicU32,
    entries: TableLength,
}

/// An entry as others read it: its incarnation, its key, and the rest of core's [`MrEntry`].
type Entry = TableEntry<7>;

/* what the words are, between processes: who changes it changes the magic number, too */
const _: () = {
    assert!(size_of::<Entry>() == size_of::<MrEntry>());
    assert!(offset_of!(MrEntry, incarnation) == 0 && offset_of!(MrEntry, key) == 4);
    assert!(offset_of!(MrEntry, pd) == 8 && offset_of!(MrEntry, qpn) == 12);
    assert!(offset_of!(MrEntry, addr) == 16 && offset_of!(MrEntry, length) == 24);
    assert!(offset_of!(MrEntry, iova) == 32 && offset_of!(MrEntry, access) == 40);
    assert!(offset_of!(MrEntry, backing) == 44);
};

/// An entry as words, of which the first has incarnation and key.
fn to_words(entry: MrEntry) -> [u64; 8] {
    // SAFETY: of one length, and fields that leave no gap, as the next function says.
    unsafe { transmute(entry) }
}

/// The entry of a key that opens these words.
fn of_words(key: u32, words: [u64; 7]) -> MrEntry {
    const FIELDS: usize = 2 * size_of::<u32>()
        + size_of::<PdId>()
        + size_of::<Qpn>()
        + 3 * size_of::<u64>()
        + size_of::<Access>()
        + size_of::<Backing>();
    const { assert!(FIELDS == size_of::<MrEntry>()) };
    let mut all = [0; 8];
    all[1..].copy_from_slice(&words);
    // SAFETY: of one length; all fields are integers, of which any bytes are valid.
    MrEntry { key, ..unsafe { transmute::<[u64; 8], MrEntry>(all) } }
}

/// One incarnation of one key: no other has the same.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct MrTag {
    slot: u32,
    incarnation: u32,
}

/// The card's table.
pub(crate) struct MrMemory {
    map: ParentOnly,
    /// Whose pages are taken as the table grows; `None`: memory of this process alone
    file: Option<File>,
    /// Entries so far, and at most
    entries: usize,
    capacity: usize,
}

impl MrMemory {
    /// Room for the table of a card with so many keys, and for those that rest; the file is for others to
    /// map. No file: the host has no memory files, or none with the seals (Linux 5.1).
    ///
    /// # Errors
    /// ENOMEM
    pub(super) fn create(keys: u32) -> Result<MrMemory> {
        let capacity = (keys as usize / 4 * 5 + 4096).min(MAX_MR);
        let len = size_of::<Head>() + capacity * size_of::<MrEntry>();
        let (map, file) = match sealed::create_ours(c"starverbs", len, ONLY_OURS) {
            Ok((map, file)) => (map, Some(file)),
            Err(_) => (ParentOnly::new(MmapMut::map_anon(len)?.into())?, None),
        };
        let memory = MrMemory { map, file, entries: 0, capacity };
        memory.head().magic.store(MAGIC, Ordering::Release);
        Ok(memory)
    }

    /// Where others find it.
    pub(super) fn file(&self) -> Option<FileAt> {
        FileAt::of(self.file.as_ref()?).ok()
    }

    fn head(&self) -> &Head {
        // SAFETY: the mapping is page-aligned, longer than a Head, and lives as long as `self`; the file's
        // seals keep its pages. Every byte pattern is a valid Head of atomics.
        unsafe { &*self.map.as_ptr().cast::<Head>() }
    }

    fn first(&self) -> *mut MrEntry {
        // SAFETY: the entries follow the head in the mapping.
        unsafe { self.map.as_mut_ptr().add(size_of::<Head>()).cast() }
    }

    /// Takes the pages of entries up to `to`: none shall be missing when the card writes there.
    fn take_pages(&self, to: usize) -> bool {
        let Some(file) = &self.file else { return true };
        let from = size_of::<Head>() + self.entries * size_of::<MrEntry>();
        let len = (to - self.entries) * size_of::<MrEntry>();
        // SAFETY: takes numbers.
        unsafe { libc::fallocate(file.as_raw_fd(), 0, from as libc::off_t, len as libc::off_t) == 0 }
    }
}

impl Storage for MrMemory {
    fn set_mask(&mut self, mask: u32) {
        self.head().mask.store(mask, Ordering::Relaxed);
    }

    #[inline]
    fn entries(&self) -> &[MrEntry] {
        // SAFETY: so many lie in the mapping, all of them zeroed or written by `put`, which is the only
        // writer there is: others may read the file, and its seals let nobody else write. `put` wants `self`
        // mutable.
        unsafe { std::slice::from_raw_parts(self.first(), self.entries) }
    }

    fn grow(&mut self, to: usize) -> std::result::Result<(), NicError> {
        let bytes = to.saturating_sub(self.entries) * size_of::<MrEntry>();
        if to > self.capacity || !budget::take(bytes) {
            return Err(NicError::Exhausted);
        }
        if !self.take_pages(to) {
            budget::give(bytes);
            return Err(NicError::Exhausted);
        }
        self.entries = to;
        self.head().entries.grow(to as u32);
        Ok(())
    }

    fn put(&mut self, slot: usize, entry: MrEntry) {
        if slot >= self.entries {
            return;
        }
        // SAFETY: an entry of the mapping, by the look above; nobody has a reference to it as `self` is
        // mutable. Every byte pattern is valid for atomics.
        let place = unsafe { &*self.first().add(slot).cast::<Entry>() };
        let [_, words @ ..] = to_words(entry);
        place.put(entry.key, words);
    }
}

impl Drop for MrMemory {
    fn drop(&mut self) {
        budget::give(self.entries * size_of::<MrEntry>());
    }
}

/// Another card's table.
pub(super) struct PeerMrs {
    map: ParentOnly,
    /// Entries that fit into it
    capacity: usize,
}

impl PeerMrs {
    /// The table in a file.
    ///
    /// # Errors
    /// EINVAL: it is something else.
    pub(super) fn open(file: &File) -> Result<PeerMrs> {
        let len = file::check(file, ONLY_OURS)?;
        let bytes = len.checked_sub(size_of::<Head>()).ok_or(OTHER)?;
        let map = ParentOnly::new(MmapOptions::new().len(len).map_raw_read_only(file)?)?;
        let mrs = PeerMrs { map, capacity: bytes / size_of::<MrEntry>() };
        let known = mrs.head().magic.load(Ordering::Relaxed) == MAGIC;
        /* loads from pages that one may not write must be relaxed; fences order them, here and below */
        fence(Ordering::Acquire);
        if known { Ok(mrs) } else { Err(OTHER) }
    }

    fn head(&self) -> &Head {
        // SAFETY: as of `MrMemory::head`. Nothing but relaxed loads is done there, which pages that may not
        // be written allow.
        unsafe { &*self.map.as_ptr().cast::<Head>() }
    }

    fn entry(&self, slot: u32) -> Option<&Entry> {
        if slot as usize >= self.capacity || !self.head().entries.has(slot) {
            return None;
        }
        // SAFETY: it lies in the mapping, by the look above; the rest as of `head`.
        Some(unsafe { &*self.map.as_ptr().add(size_of::<Head>()).cast::<Entry>().add(slot as usize) })
    }

    /// What a key opens; nothing in a forked child.
    pub(super) fn find(&self, key: u32) -> Option<(MrTag, MrEntry)> {
        if !self.map.is_ours() {
            return None;
        }
        let slot = (key >> KEY_BITS) ^ self.head().mask.load(Ordering::Relaxed);
        let (incarnation, words) = self.entry(slot)?.find(key)?;
        Some((MrTag { slot, incarnation }, of_words(key, words)))
    }

    /// Whether a key still opens what it did. Who asks from a reader's slot may use it until the slot's end.
    pub(super) fn is_valid(&self, tag: MrTag) -> bool {
        let still = |entry: &Entry| entry.is(tag.incarnation);
        self.map.is_ours() && self.entry(tag.slot).is_some_and(still)
    }
}

#[cfg(any(test, feature = "fuzzing"))]
impl MrMemory {
    /// The file as others open it.
    pub(super) fn open(&self) -> Option<File> {
        let path = format!("/proc/self/fd/{}", self.file.as_ref()?.as_raw_fd());
        File::open(path).ok()
    }
}

#[cfg(feature = "fuzzing")]
impl MrMemory {
    /// Overwrites all that follows the magic.
    pub(super) fn scribble(&mut self, bytes: &[u8]) {
        super::file::scribble(&self.map, bytes);
    }
}
