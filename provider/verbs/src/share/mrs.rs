//! A card's table of memory regions in a memory file: the card writes it, other processes of the host may
//! read it.

use std::fs::File;
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use memmap2::{MmapMut, MmapOptions};
use starverbs_backend::ParentOnly;
use starverbs_backend::sealed::{self, ONLY_OURS};
use starverbs_core::mr::{Backing, KEY_BITS, MAX_MR, MrEntry, Storage};
use starverbs_core::{Access, NicError, PdId};
use starverbs_rings::{Incarnation, budget};

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
    /// Entries so far
    entries: AtomicU32,
}

/// An entry as others read it: the words of core's [`MrEntry`].
#[repr(C, align(64))]
struct Words {
    incarnation: Incarnation,
    key: AtomicU32,
    pd: AtomicU32,
    qpn: AtomicU32,
    addr: AtomicU64,
    length: AtomicU64,
    iova: AtomicU64,
    access: AtomicU32,
    backing: [AtomicU32; 5],
}

const _: () = {
    assert!(size_of::<Words>() == size_of::<MrEntry>());
    assert!(offset_of!(Words, incarnation) == offset_of!(MrEntry, incarnation));
    assert!(offset_of!(Words, key) == offset_of!(MrEntry, key));
    assert!(offset_of!(Words, pd) == offset_of!(MrEntry, pd));
    assert!(offset_of!(Words, qpn) == offset_of!(MrEntry, qpn));
    assert!(offset_of!(Words, addr) == offset_of!(MrEntry, addr));
    assert!(offset_of!(Words, length) == offset_of!(MrEntry, length));
    assert!(offset_of!(Words, iova) == offset_of!(MrEntry, iova));
    assert!(offset_of!(Words, access) == offset_of!(MrEntry, access));
    assert!(offset_of!(Words, backing) == offset_of!(MrEntry, backing));
};

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
        self.head().entries.store(to as u32, Ordering::Release);
        Ok(())
    }

    fn put(&mut self, slot: usize, entry: MrEntry) {
        if slot >= self.entries {
            return;
        }
        // SAFETY: an entry of the mapping, by the look above; nobody has a reference to it as `self` is
        // mutable. Every byte pattern is valid for atomics.
        let words = unsafe { &*self.first().add(slot).cast::<Words>() };
        if words.key.swap(0, Ordering::Relaxed) != 0 {
            words.incarnation.end();
        }
        if entry.key == 0 {
            return;
        }
        words.incarnation.begin(|| {
            words.pd.store(entry.pd.0, Ordering::Relaxed);
            words.qpn.store(entry.qpn, Ordering::Relaxed);
            words.addr.store(entry.addr, Ordering::Relaxed);
            words.length.store(entry.length, Ordering::Relaxed);
            words.iova.store(entry.iova, Ordering::Relaxed);
            words.access.store(entry.access.bits(), Ordering::Relaxed);
            for (word, value) in words.backing.iter().zip(entry.backing.0) {
                word.store(value, Ordering::Relaxed);
            }
            words.key.store(entry.key, Ordering::Relaxed);
        });
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

    fn words(&self, slot: u32) -> Option<&Words> {
        let head = self.head();
        let entries = (head.entries.load(Ordering::Relaxed) as usize).min(self.capacity);
        fence(Ordering::Acquire);
        if slot as usize >= entries {
            return None;
        }
        // SAFETY: it lies in the mapping, by the looks above; the rest as of `head`.
        Some(unsafe { &*self.map.as_ptr().add(size_of::<Head>()).cast::<Words>().add(slot as usize) })
    }

    /// What a key opens; nothing in a forked child.
    pub(super) fn find(&self, key: u32) -> Option<(MrTag, MrEntry)> {
        if !self.map.is_ours() {
            return None;
        }
        let slot = (key >> KEY_BITS) ^ self.head().mask.load(Ordering::Relaxed);
        let words = self.words(slot)?;
        let (incarnation, entry) = words.incarnation.read(|| {
            let same = words.key.load(Ordering::Relaxed) == key && key != 0;
            same.then(|| MrEntry {
                incarnation: 0,
                key,
                pd: PdId(words.pd.load(Ordering::Relaxed)),
                qpn: words.qpn.load(Ordering::Relaxed),
                addr: words.addr.load(Ordering::Relaxed),
                length: words.length.load(Ordering::Relaxed),
                iova: words.iova.load(Ordering::Relaxed),
                access: Access::from_bits_retain(words.access.load(Ordering::Relaxed)),
                backing: Backing(words.backing.each_ref().map(|word| word.load(Ordering::Relaxed))),
            })
        })?;
        Some((MrTag { slot, incarnation }, entry))
    }

    /// Whether a key still opens what it did. Who asks from a reader's slot may use it until the slot's end.
    pub(super) fn is_valid(&self, tag: MrTag) -> bool {
        let still = |words: &Words| words.incarnation.is(tag.incarnation);
        self.map.is_ours() && self.words(tag.slot).is_some_and(still)
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
