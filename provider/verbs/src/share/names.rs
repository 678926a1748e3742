//! The file of a `cmd_fd`: the names of a context's protection domains and device memory, and where its
//! process keeps what importers need to reach memory.
//!
//! Only the exporter writes it; whoever has the descriptor reads it, and checks what it reads. Handles are
//! places.

use std::fs::File;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use memmap2::MmapOptions;
use starverbs_backend::ParentOnly;
use starverbs_backend::sealed::{self, ONLY_OURS};
use starverbs_rings::Incarnation;

use super::file::{self, FileAt, FileIdentity, OTHER};
use super::mrs::MrTag;
use crate::error::Result;

/// "SVSHARE" and the layout's version.
const MAGIC: u64 = u64::from_le_bytes(*b"SVSHARE3");
/// Handles of protection domains, and of device memory, below which they can be imported.
pub(super) const NAMES: [usize; 2] = [1 << 16, 1 << 12];

/// The whole file. Zero bytes are a valid one.
#[repr(C)]
struct Layout {
    magic: AtomicU64,
    /// Where the exporter's memory holds the token
    token_at: AtomicU64,
    token: AtomicU64,
    /// The exporter's table of regions, and the slots of its readers
    mrs: FileRecord,
    readers: FileRecord,
    /// Not 0: the context is closed
    closed: AtomicU32,
    pds: [ExportName; NAMES[0]],
    dms: [ExportName; NAMES[1]],
}

/// A file of the exporter's: device, inode, and descriptor.
#[repr(C)]
struct FileRecord {
    dev: AtomicU64,
    ino: AtomicU64,
    fd: AtomicU32,
}

/// A protection domain, or device memory with its bytes.
#[repr(C, align(32))]
struct ExportName {
    incarnation: Incarnation,
    addr: AtomicU64,
    length: AtomicU64,
}

/// What a handle is of.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum ObjectKind {
    /// A protection domain
    Pd,
    /// Device memory
    Dm,
}

/// One incarnation of one object: no other has the same.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Tag {
    /// A name: kind, handle, incarnation
    Name(ObjectKind, u32, u32),
    /// A region's key
    Mr(MrTag),
}

/// Bytes of the exporter's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct ExportedBytes {
    /// The first one, marks and all
    pub(crate) addr: u64,
    /// How many
    pub(crate) length: u64,
}

/// Where an exporter keeps what importers need to reach its memory.
#[derive(Clone, Copy, Default)]
pub(super) struct Whereabouts {
    /// A number that its memory holds, and where
    pub(super) token: u64,
    pub(super) token_at: u64,
    /// Its table of regions
    pub(super) mrs: FileAt,
    /// The slots of its readers
    pub(super) readers: FileAt,
}

impl FileRecord {
    fn set(&self, at: FileAt) {
        self.dev.store(at.file.0, Ordering::Relaxed);
        self.ino.store(at.file.1, Ordering::Relaxed);
        self.fd.store(at.fd, Ordering::Relaxed);
    }

    fn get(&self) -> FileAt {
        let file = FileIdentity(self.dev.load(Ordering::Relaxed), self.ino.load(Ordering::Relaxed));
        FileAt { file, fd: self.fd.load(Ordering::Relaxed) }
    }
}

/// The names, mapped: the exporter's to write, importers' to read.
pub(super) struct Names(ParentOnly);

impl Names {
    /// None yet, in a memory file that nobody but this mapping can change.
    pub(super) fn create(about: &Whereabouts) -> Result<(Names, File)> {
        let (map, file) = sealed::create_ours(c"starverbs", size_of::<Layout>(), ONLY_OURS)?;
        let names = Names(map);
        let all = names.all();
        all.token.store(about.token, Ordering::Relaxed);
        all.token_at.store(about.token_at, Ordering::Relaxed);
        all.mrs.set(about.mrs);
        all.readers.set(about.readers);
        all.magic.store(MAGIC, Ordering::Release);
        Ok((names, file))
    }

    /// Those in a file; EINVAL if it has none.
    pub(super) fn open(file: &File) -> Result<Names> {
        if file::check(file, ONLY_OURS)? != size_of::<Layout>() {
            return Err(OTHER);
        }
        let map = MmapOptions::new().len(size_of::<Layout>()).map_raw_read_only(file)?;
        let names = Names(ParentOnly::new(map)?);
        let known = names.all().magic.load(Ordering::Relaxed) == MAGIC;
        /* loads from pages that one may not write must be relaxed; fences order them, here and below */
        fence(Ordering::Acquire);
        if known { Ok(names) } else { Err(OTHER) }
    }

    fn all(&self) -> &Layout {
        // SAFETY: the mapping is page-aligned, as long as a Layout, and lives as long as `self`; the file's
        // seals keep its pages. Every byte pattern is a valid Layout of atomics, whoever writes it.
        // Importers do nothing but relaxed loads, which pages that may not be written allow.
        unsafe { &*self.0.as_ptr().cast::<Layout>() }
    }

    fn name(&self, kind: ObjectKind, handle: u32) -> Option<&ExportName> {
        match kind {
            ObjectKind::Pd => self.all().pds.get(handle as usize),
            ObjectKind::Dm => self.all().dms.get(handle as usize),
        }
    }

    /// Lets others have an object whose handle is free; a handle that is too large is left out.
    pub(super) fn put(&self, kind: ObjectKind, handle: u32, bytes: ExportedBytes) {
        let Some(name) = self.name(kind, handle) else { return };
        name.incarnation.begin(|| {
            name.addr.store(bytes.addr, Ordering::Relaxed);
            name.length.store(bytes.length, Ordering::Relaxed);
        });
    }

    /// Takes an object away. Who looks from now on does not find it; some may have looked before.
    pub(super) fn take(&self, kind: ObjectKind, handle: u32) {
        if let Some(name) = self.name(kind, handle) {
            name.incarnation.end();
        }
    }

    /// Takes everything away for ever.
    pub(super) fn close(&self) {
        self.all().closed.store(1, Ordering::SeqCst);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.all().closed.load(Ordering::Relaxed) != 0
    }

    /// The object of this kind and handle.
    pub(super) fn find(&self, kind: ObjectKind, handle: u32) -> Option<(Tag, ExportedBytes)> {
        let name = self.name(kind, handle)?;
        let (incarnation, bytes) = name.incarnation.read(|| {
            let (addr, length) = (name.addr.load(Ordering::Relaxed), name.length.load(Ordering::Relaxed));
            Some(ExportedBytes { addr, length })
        })?;
        Some((Tag::Name(kind, handle, incarnation), bytes))
    }

    /// Whether that incarnation of a name is current.
    pub(super) fn is_valid(&self, kind: ObjectKind, handle: u32, incarnation: u32) -> bool {
        self.name(kind, handle).is_some_and(|name| name.incarnation.is(incarnation))
    }

    /// What the exporter says about itself.
    pub(super) fn whereabouts(&self) -> Whereabouts {
        let all = self.all();
        Whereabouts {
            token: all.token.load(Ordering::Relaxed),
            token_at: all.token_at.load(Ordering::Relaxed),
            mrs: all.mrs.get(),
            readers: all.readers.get(),
        }
    }
}

#[cfg(feature = "fuzzing")]
impl Names {
    /// Overwrites all that follows the magic.
    pub(super) fn scribble(&self, bytes: &[u8]) {
        file::scribble(&self.0, bytes);
    }
}
