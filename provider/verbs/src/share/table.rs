//! The table behind a `cmd_fd`: its layout in shared memory.
//!
//! Every word is an atomic, as other processes write what they like. An exporter reads nothing but desks from it. Importers
//! check what they read.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use memmap2::{MmapOptions, MmapRaw};

use crate::error::{Result, VerbsError};

/// "SVSHARE" and the layout's version.
const MAGIC: u64 = u64::from_le_bytes(*b"SVSHARE1");
/// Objects of a context that stand in its table at once; more cannot be imported.
pub(super) const ENTRIES: usize = 1 << 16;
/// Importers of a context at once.
pub(super) const DESKS: usize = 64;
/// What the memory file must promise: nobody takes pages away under those who have it mapped.
const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// The whole table. Zero bytes are a valid one.
#[repr(C)]
struct Layout {
    magic: AtomicU64,
    /// Where the exporter's memory holds the token
    token_at: AtomicU64,
    token: AtomicU64,
    /// Not 0: the context is closed
    closed: AtomicU32,
    /// Entries that were ever used
    entries: AtomicU32,
    /// Desks that were ever used
    desks: AtomicU32,
    desk: [Desk; DESKS],
    entry: [Entry; ENTRIES],
}

/// An importer's place, which it has as long as it holds the lock on the byte of the file with the desk's number.
#[repr(C, align(64))]
pub(super) struct Desk {
    /// Odd while it uses something
    pub(super) uses: AtomicU32,
}

/// An object.
#[repr(C, align(64))]
pub(super) struct Entry {
    /// Odd: the object exists. Changes whenever it does.
    turn: AtomicU32,
    kind: AtomicU32,
    handle: AtomicU32,
    pd: AtomicU32,
    addr: AtomicU64,
    length: AtomicU64,
    iova: AtomicU64,
    access: AtomicU32,
}

/// What an entry is about.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u32)]
pub(crate) enum Kind {
    /// A protection domain
    Pd = 1,
    /// A memory region
    Mr,
    /// Device memory
    Dm,
}

/// An object as its exporter describes it; of a protection domain the rest is 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Item {
    /// Handle of a region's protection domain
    pub(crate) pd: u32,
    /// First byte in the exporter's memory, marks and all
    pub(crate) addr: u64,
    /// Bytes
    pub(crate) length: u64,
    /// Address by which peers know the first byte
    pub(crate) iova: u64,
    /// Rights of a region
    pub(crate) access: u32,
}

/// One life of one object: no other has the same.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Tag {
    entry: u32,
    turn: u32,
}

/// An object that stood in the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) tag: Tag,
    pub(crate) item: Item,
}

/// A mapped table.
pub(super) struct Table(MmapRaw);

impl Table {
    /// A new one, in a memory file of its own.
    pub(super) fn create(token: u64, token_at: u64) -> Result<(Table, File)> {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: a constant name; the call makes a new descriptor.
        let fd = unsafe { libc::memfd_create(c"starverbs".as_ptr(), flags) };
        if fd < 0 {
            return Err(VerbsError::last_os());
        }
        // SAFETY: the descriptor is new and nobody else's.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(size_of::<Layout>() as u64)?;
        // SAFETY: takes numbers.
        if unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, SEALS) } < 0 {
            return Err(VerbsError::last_os());
        }
        let table = Table::map(&file)?;
        let all = table.all();
        all.token.store(token, Ordering::Relaxed);
        all.token_at.store(token_at, Ordering::Relaxed);
        all.magic.store(MAGIC, Ordering::Release);
        Ok((table, file))
    }

    /// The table in a file; EINVAL if it has none.
    pub(super) fn open(file: &File) -> Result<Table> {
        const OTHER: VerbsError = VerbsError::Invalid("the descriptor of something else");
        // SAFETY: takes and gives numbers.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & SEALS != SEALS || file.metadata()?.len() != size_of::<Layout>() as u64 {
            return Err(OTHER);
        }
        let table = Table::map(file)?;
        if table.all().magic.load(Ordering::Acquire) == MAGIC { Ok(table) } else { Err(OTHER) }
    }

    fn map(file: &File) -> Result<Table> {
        Ok(Table(MmapOptions::new().len(size_of::<Layout>()).map_raw(file)?))
    }

    fn all(&self) -> &Layout {
        // SAFETY: the mapping is page-aligned, as long as a Layout, and lives as long as `self`; the file's seals keep
        // its pages. Every byte pattern is a valid Layout of atomics, whoever writes it.
        unsafe { &*self.0.as_ptr().cast::<Layout>() }
    }

    /// Puts an object into entry `index`, which has none.
    pub(super) fn put(&self, index: u32, kind: Kind, handle: u32, item: &Item) {
        let all = self.all();
        let Some(entry) = all.entry.get(index as usize) else { return };
        entry.kind.store(kind as u32, Ordering::Relaxed);
        entry.handle.store(handle, Ordering::Relaxed);
        entry.pd.store(item.pd, Ordering::Relaxed);
        entry.addr.store(item.addr, Ordering::Relaxed);
        entry.length.store(item.length, Ordering::Relaxed);
        entry.iova.store(item.iova, Ordering::Relaxed);
        entry.access.store(item.access, Ordering::Relaxed);
        let turn = entry.turn.load(Ordering::Relaxed);
        entry.turn.store(turn.wrapping_add(1) | 1, Ordering::Release);
        all.entries.fetch_max(index + 1, Ordering::Release);
    }

    /// Takes the object out of entry `index`. Who looks from now on does not find it; some may have looked before.
    pub(super) fn take(&self, index: u32) {
        let Some(entry) = self.all().entry.get(index as usize) else { return };
        let turn = entry.turn.load(Ordering::Relaxed);
        entry.turn.store((turn | 1).wrapping_add(1), Ordering::SeqCst);
    }

    /// Takes everything out for ever.
    pub(super) fn close(&self) {
        self.all().closed.store(1, Ordering::SeqCst);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.all().closed.load(Ordering::SeqCst) != 0
    }

    /// The object of this kind and handle.
    pub(super) fn find(&self, kind: Kind, handle: u32) -> Option<Found> {
        let all = self.all();
        let used = (all.entries.load(Ordering::Acquire) as usize).min(ENTRIES);
        let mut entries = (0..).zip(&all.entry[..used]);
        entries.find_map(|(index, entry)| entry.read(index, kind, handle))
    }

    /// Whether that life of an object goes on.
    pub(super) fn stands(&self, tag: Tag) -> bool {
        let entry = self.all().entry.get(tag.entry as usize);
        !self.is_closed() && entry.is_some_and(|entry| entry.turn.load(Ordering::SeqCst) == tag.turn)
    }

    /// The desks that were ever used.
    pub(super) fn desks(&self) -> &[Desk] {
        let used = self.all().desks.load(Ordering::SeqCst) as usize;
        &self.all().desk[..used.min(DESKS)]
    }

    /// A desk, used from now on.
    pub(super) fn desk(&self, number: usize) -> &Desk {
        self.all().desks.fetch_max(number as u32 + 1, Ordering::SeqCst);
        &self.all().desk[number]
    }

    /// A number that the exporter keeps in its memory, and where.
    pub(super) fn token(&self) -> (u64, u64) {
        (self.all().token.load(Ordering::Relaxed), self.all().token_at.load(Ordering::Relaxed))
    }
}

impl Entry {
    /// What it describes, unless that is another object, none, or changing.
    fn read(&self, index: u32, kind: Kind, handle: u32) -> Option<Found> {
        let turn = self.turn.load(Ordering::Acquire);
        let same =
            self.kind.load(Ordering::Relaxed) == kind as u32 && self.handle.load(Ordering::Relaxed) == handle;
        if turn & 1 == 0 || !same {
            return None;
        }
        let item = Item {
            pd: self.pd.load(Ordering::Relaxed),
            addr: self.addr.load(Ordering::Relaxed),
            length: self.length.load(Ordering::Relaxed),
            iova: self.iova.load(Ordering::Relaxed),
            access: self.access.load(Ordering::Relaxed),
        };
        /* the words above before the second look at the turn */
        fence(Ordering::Acquire);
        let found = Found { tag: Tag { entry: index, turn }, item };
        (self.turn.load(Ordering::Relaxed) == turn).then_some(found)
    }
}
