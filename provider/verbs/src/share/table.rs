//! What stands behind a `cmd_fd`: the layout of its two files in shared memory.
//!
//! The table itself says which objects there are. Its seals let nobody but the exporter write it, whoever has
//! the descriptor. The desks are importers' to write. Only who may look into the exporter gets at them: they
//! have no descriptor that is handed out, and the table says where among the exporter's they are. Every word
//! is an atomic, as others write it at any time. Importers check what they read.

use std::fs::{File, Metadata};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use memmap2::{MmapOptions, MmapRaw};
use starverbs_rings::{Incarnation, ReaderSlot};

use crate::error::{Result, VerbsError};

/// "SVSHARE" and the layout's version.
const MAGIC: u64 = u64::from_le_bytes(*b"SVSHARE2");
/// Objects of a context that stand in its table at once; more cannot be imported.
pub(super) const ENTRIES: usize = 1 << 16;
/// Importers of a context at once that use its memory.
pub(super) const DESKS: usize = 64;
/// What both files must promise: nobody takes pages away under those who have them mapped.
const SIZE_STAYS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
/// And the table: nobody writes it but by a mapping that was there before, the exporter's.
const ONLY_OURS: i32 = SIZE_STAYS | libc::F_SEAL_FUTURE_WRITE;

/// The whole table. Zero bytes are a valid one.
#[repr(C)]
struct Layout {
    magic: AtomicU64,
    /// Where the exporter's memory holds the token
    token_at: AtomicU64,
    token: AtomicU64,
    /// The desks: device, inode, and the exporter's descriptor
    desks_dev: AtomicU64,
    desks_ino: AtomicU64,
    desks_fd: AtomicU32,
    /// Not 0: the context is closed
    closed: AtomicU32,
    /// Entries that were ever used
    entries: AtomicU32,
    entry: [Entry; ENTRIES],
}

/// An importer's place, which it has as long as it holds the lock on the byte of the desks' file with its
/// number.
#[repr(C, align(64))]
pub(super) struct Desk {
    /// From where it uses something
    pub(super) slot: ReaderSlot,
}

/// An object.
#[repr(C, align(64))]
pub(super) struct Entry {
    incarnation: Incarnation,
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

/// Where an exporter keeps what importers need to reach its memory.
pub(super) struct Whereabouts {
    /// A number that its memory holds, and where
    pub(super) token: u64,
    pub(super) token_at: u64,
    /// The desks, and its descriptor of them
    pub(super) desks: Identity,
    pub(super) desks_fd: u32,
}

/// Which file: device and inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Identity(u64, u64);

impl Identity {
    pub(super) fn of(file: &File) -> Result<Identity> {
        Ok(Identity::from(&file.metadata()?))
    }
}

impl From<&Metadata> for Identity {
    fn from(about: &Metadata) -> Identity {
        Identity(about.dev(), about.ino())
    }
}

/// A memory file of `len` bytes, to be sealed.
fn memory_file(len: usize) -> Result<File> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: a constant name; the call makes a new descriptor.
    let fd = unsafe { libc::memfd_create(c"starverbs".as_ptr(), flags) };
    if fd < 0 {
        return Err(VerbsError::last_os());
    }
    // SAFETY: the descriptor is new and nobody else's.
    let file = unsafe { File::from_raw_fd(fd) };
    /* it counts against the limit on files (RLIMIT_FSIZE) */
    starverbs_backend::without_signals(|| file.set_len(len as u64))?;
    Ok(file)
}

fn seal(file: &File, seals: i32) -> Result<()> {
    // SAFETY: takes numbers.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
        return Err(VerbsError::last_os());
    }
    Ok(())
}

/// EINVAL unless it is a memory file of that length with those seals.
fn check(file: &File, len: usize, seals: i32) -> Result<()> {
    // SAFETY: takes and gives numbers.
    let has = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if has < 0 || has & seals != seals || file.metadata()?.len() != len as u64 {
        return Err(OTHER);
    }
    Ok(())
}

const OTHER: VerbsError = VerbsError::Invalid("the descriptor of something else");

/// The desks, mapped. Whoever has them mapped by a file description keeps its locks, with or without a
/// descriptor.
pub(super) struct Desks(MmapRaw);

impl Desks {
    /// New ones, all free.
    pub(super) fn create() -> Result<(Desks, File)> {
        let file = memory_file(size_of::<[Desk; DESKS]>())?;
        seal(&file, SIZE_STAYS)?;
        Ok((Desks::map(&file)?, file))
    }

    /// Those of a file; EINVAL if it has none.
    pub(super) fn open(file: &File) -> Result<Desks> {
        check(file, size_of::<[Desk; DESKS]>(), SIZE_STAYS)?;
        Desks::map(file)
    }

    fn map(file: &File) -> Result<Desks> {
        Ok(Desks(MmapOptions::new().len(size_of::<[Desk; DESKS]>()).map_raw(file)?))
    }

    /// Forked children shall not have them.
    pub(super) fn keep_from_children(&self) -> Result<()> {
        // SAFETY: the whole mapping is ours; what changes is what a fork does.
        let kept = unsafe { libc::madvise(self.0.as_mut_ptr().cast(), self.0.len(), libc::MADV_DONTFORK) };
        if kept == 0 { Ok(()) } else { Err(VerbsError::last_os()) }
    }

    pub(super) fn all(&self) -> &[Desk; DESKS] {
        // SAFETY: the mapping is page-aligned, as long as the desks, and lives as long as `self`; the file's
        // seals keep its pages. Every byte pattern is valid for atomics, whoever writes it.
        unsafe { &*self.0.as_ptr().cast::<[Desk; DESKS]>() }
    }
}

/// A mapped table: the exporter's to write, importers' to read.
pub(super) struct Table(MmapRaw);

impl Table {
    /// A new one, in a memory file that nobody but this mapping can change.
    pub(super) fn create(about: &Whereabouts) -> Result<(Table, File)> {
        let file = memory_file(size_of::<Layout>())?;
        let table = Table(MmapOptions::new().len(size_of::<Layout>()).map_raw(&file)?);
        seal(&file, ONLY_OURS)?;
        let all = table.all();
        all.token.store(about.token, Ordering::Relaxed);
        all.token_at.store(about.token_at, Ordering::Relaxed);
        all.desks_dev.store(about.desks.0, Ordering::Relaxed);
        all.desks_ino.store(about.desks.1, Ordering::Relaxed);
        all.desks_fd.store(about.desks_fd, Ordering::Relaxed);
        all.magic.store(MAGIC, Ordering::Release);
        Ok((table, file))
    }

    /// The table in a file; EINVAL if it has none.
    pub(super) fn open(file: &File) -> Result<Table> {
        check(file, size_of::<Layout>(), ONLY_OURS)?;
        let table = Table(MmapOptions::new().len(size_of::<Layout>()).map_raw_read_only(file)?);
        let known = table.all().magic.load(Ordering::Relaxed) == MAGIC;
        /* loads from pages that one may not write must be relaxed; fences order them, here and below */
        fence(Ordering::Acquire);
        if known { Ok(table) } else { Err(OTHER) }
    }

    fn all(&self) -> &Layout {
        // SAFETY: the mapping is page-aligned, as long as a Layout, and lives as long as `self`; the file's
        // seals keep its pages. Every byte pattern is a valid Layout of atomics, whoever writes it.
        // Importers do nothing but relaxed loads, which pages that may not be written allow.
        unsafe { &*self.0.as_ptr().cast::<Layout>() }
    }

    /// Puts an object into entry `index`, which has none.
    pub(super) fn put(&self, index: u32, kind: Kind, handle: u32, item: &Item) {
        let all = self.all();
        let Some(entry) = all.entry.get(index as usize) else { return };
        entry.incarnation.begin(|| {
            entry.kind.store(kind as u32, Ordering::Relaxed);
            entry.handle.store(handle, Ordering::Relaxed);
            entry.pd.store(item.pd, Ordering::Relaxed);
            entry.addr.store(item.addr, Ordering::Relaxed);
            entry.length.store(item.length, Ordering::Relaxed);
            entry.iova.store(item.iova, Ordering::Relaxed);
            entry.access.store(item.access, Ordering::Relaxed);
        });
        all.entries.fetch_max(index + 1, Ordering::Release);
    }

    /// Takes the object out of entry `index`. Who looks from now on does not find it; some may have looked
    /// before.
    pub(super) fn take(&self, index: u32) {
        let Some(entry) = self.all().entry.get(index as usize) else { return };
        entry.incarnation.end();
    }

    /// Takes everything out for ever.
    pub(super) fn close(&self) {
        self.all().closed.store(1, Ordering::SeqCst);
    }

    /// Writes bytes over all that stands behind the magic.
    #[cfg(feature = "fuzzing")]
    pub(super) fn scribble(&self, bytes: &[u8]) {
        let room = size_of::<Layout>() - size_of::<u64>();
        let words =
            bytes.chunks_exact(4).take(room / 4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
        for (at, word) in words.enumerate() {
            // SAFETY: `at` lies in the mapping, by `take`; every word of it is part of an atomic, and nobody
            // else has it.
            unsafe { self.0.as_mut_ptr().add(size_of::<u64>()).cast::<u32>().add(at).write_volatile(word) };
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.all().closed.load(Ordering::Relaxed) != 0
    }

    /// The object of this kind and handle.
    pub(super) fn find(&self, kind: Kind, handle: u32) -> Option<Found> {
        let all = self.all();
        let used = (all.entries.load(Ordering::Relaxed) as usize).min(ENTRIES);
        fence(Ordering::Acquire);
        let mut entries = (0..).zip(&all.entry[..used]);
        entries.find_map(|(index, entry)| entry.read(index, kind, handle))
    }

    /// Whether that life of an object goes on. Who asks at a desk may use it until he gets up.
    pub(super) fn stands(&self, tag: Tag) -> bool {
        let entry = self.all().entry.get(tag.entry as usize);
        !self.is_closed() && entry.is_some_and(|entry| entry.incarnation.is(tag.turn))
    }

    /// What the exporter says about itself.
    pub(super) fn whereabouts(&self) -> Whereabouts {
        let all = self.all();
        Whereabouts {
            token: all.token.load(Ordering::Relaxed),
            token_at: all.token_at.load(Ordering::Relaxed),
            desks: Identity(all.desks_dev.load(Ordering::Relaxed), all.desks_ino.load(Ordering::Relaxed)),
            desks_fd: all.desks_fd.load(Ordering::Relaxed),
        }
    }
}

impl Entry {
    /// What it describes, unless that is another object, none, or changing.
    fn read(&self, index: u32, kind: Kind, handle: u32) -> Option<Found> {
        let (turn, item) = self.incarnation.read(|| {
            let same = self.kind.load(Ordering::Relaxed) == kind as u32
                && self.handle.load(Ordering::Relaxed) == handle;
            same.then(|| Item {
                pd: self.pd.load(Ordering::Relaxed),
                addr: self.addr.load(Ordering::Relaxed),
                length: self.length.load(Ordering::Relaxed),
                iova: self.iova.load(Ordering::Relaxed),
                access: self.access.load(Ordering::Relaxed),
            })
        })?;
        Some(Found { tag: Tag { entry: index, turn }, item })
    }
}
