//! Reader slots: from where other processes use this one's memory, so that it can wait for the end of that.
//!
//! A reader owns its slot as long as it holds the lock on the byte of the file with its number: the kernel
//! takes that away however the reader ends. Only who may look into the exporter gets at the file: its
//! descriptor is not handed out.

use std::fs::File;
use std::time::Duration;

use memmap2::{MmapOptions, MmapRaw};
use nix::fcntl::{FcntlArg, fcntl};
use starverbs_backend::ParentOnly;
use starverbs_backend::sealed::{self, SIZE_STAYS};
use starverbs_rings::ReaderSlot;

use super::file::{self, FileAt, FileIdentity, OTHER};
use crate::error::{Result, VerbsError};

/// Readers of a card's memory at once.
const SLOTS: usize = 64;
/// How long to sleep between two looks at a slot in use: some copies of a page.
const NAP: Duration = Duration::from_micros(20);

/// A slot, alone in its cache line.
#[repr(C, align(64))]
struct PaddedSlot {
    slot: ReaderSlot,
}

/// All slots, in a mapping of their file. Whoever has them mapped by a file description keeps its locks, with
/// or without a descriptor.
fn all(map: &MmapRaw) -> &[PaddedSlot; SLOTS] {
    // SAFETY: the mapping is page-aligned, as long as the slots, and lives as long as the reference; the
    // file's seals keep its pages. Every byte pattern is valid for atomics, whoever writes it.
    unsafe { &*map.as_ptr().cast::<[PaddedSlot; SLOTS]>() }
}

/// The slots of a card's readers, as the card has them.
pub(super) struct Readers {
    slots: ParentOnly,
    file: File,
    is: FileIdentity,
}

impl Readers {
    /// All free.
    pub(super) fn create() -> Result<Readers> {
        let (map, file) = sealed::create_ours(c"starverbs", size_of::<[PaddedSlot; SLOTS]>(), SIZE_STAYS)?;
        Ok(Readers { slots: map, is: FileIdentity::of(&file)?, file })
    }

    /// Another descriptor of the file.
    pub(super) fn share(&self) -> Option<File> {
        self.file.try_clone().ok()
    }

    pub(super) fn file(&self) -> Result<FileAt> {
        FileAt::of(&self.file)
    }

    /// Waits until everybody who was using memory has stopped, or died.
    pub(super) fn wait(&self) {
        let slots = all(&self.slots).iter().map(|place| &place.slot);
        ReaderSlot::wait_for_all(slots, |number| {
            let taken = self.is_taken(number);
            if taken {
                std::thread::sleep(NAP);
            }
            taken
        });
    }

    /// Whether a slot's reader lives. Yes, if nobody can tell as the program closed what it did not open.
    fn is_taken(&self, number: usize) -> bool {
        if FileIdentity::of(&self.file).ok() != Some(self.is) {
            return true;
        }
        let mut lock = byte(number);
        let asked = fcntl(&self.file, FcntlArg::F_OFD_GETLK(&mut lock));
        asked.is_err() || i32::from(lock.l_type) != libc::F_UNLCK
    }
}

/// The lock of slot `number`.
fn byte(number: usize) -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: number as libc::off_t,
        l_len: 1,
        l_pid: 0,
    }
}

/// This process's slot at an exporter. Its mapping has the file description that has the slot's lock, so that
/// the lock goes when the process does, whatever becomes of descriptors.
pub(super) struct ExporterSlot {
    slots: ParentOnly,
    number: usize,
}

impl ExporterSlot {
    /// Takes any free slot. `file` is a file description of nobody else's.
    ///
    /// # Errors
    /// EINVAL: it is something else; ENOMEM: all are taken.
    pub(super) fn join(file: &File) -> Result<ExporterSlot> {
        if file::check(file, SIZE_STAYS)? != size_of::<[PaddedSlot; SLOTS]>() {
            return Err(OTHER);
        }
        let slots = ParentOnly::new(MmapOptions::new().len(size_of::<[PaddedSlot; SLOTS]>()).map_raw(file)?)?;
        let lock = |number: &usize| fcntl(file, FcntlArg::F_OFD_SETLK(&byte(*number))).is_ok();
        let number = (0..SLOTS).find(lock).ok_or(VerbsError::NoMemory("importers of a context"))?;
        let reader = ExporterSlot { slots, number };
        /* the slot of one that died while it read */
        reader.slot().reset();
        Ok(reader)
    }

    /// Runs `copy` while the exporter waits for its end. `None`: it failed, or this is a forked child.
    #[inline]
    pub(super) fn read<T>(&mut self, copy: impl FnOnce() -> Option<T>) -> Option<T> {
        if !self.slots.is_ours() {
            return None;
        }
        self.slot().enter();
        let done = copy();
        self.slot().leave();
        done
    }

    fn slot(&self) -> &ReaderSlot {
        &all(&self.slots)[self.number].slot
    }
}

#[cfg(test)]
impl ExporterSlot {
    /// As if this process was killed in the middle of a copy.
    pub(super) fn die(self) {
        self.slot().enter();
    }

    /// How often the slot was used, twice.
    pub(super) fn uses(&self) -> u32 {
        self.slot().uses()
    }
}
