//! Device memory: memory of the card, which here is memory of its process that the program cannot see.
//!
//! Owns the process's count of it. A forked child shares what its parent allocated, and may allocate more: no
//! card is needed until it is registered. That of another process may be had by its handle.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use slab::Slab;
use starverbs_rings::budget;

use crate::context::Context;
use crate::device::Command;
use crate::error::{Result, VerbsError};
use crate::memory::{Mapping, Zeroes};
use crate::share::{ExportedBytes, FileBytes, Foreign, ObjectKind};

/// Most device memory of a process, bytes.
pub const MAX_DM: u64 = 16 << 20;
/// Offsets and lengths of copies are multiples of this, as on cards.
const WORD: u64 = 4;
/// Largest alignment that may be asked for, log2.
const MAX_ALIGN: u32 = 24;

/// Bytes that are allocated.
static USED: AtomicU64 = AtomicU64::new(0);
/// What is alive, by handle.
static ALL: Mutex<Slab<Weak<DmInner>>> = Mutex::new(Slab::new());

/// A piece of device memory. Clones are the same piece.
#[derive(Clone)]
pub struct Dm(Arc<DmInner>);

struct DmInner {
    ctx: Context,
    handle: u32,
    place: DmMemory,
    /// Regions registered over it
    regions: AtomicU32,
    gone: AtomicBool,
}

/// Where it is.
enum DmMemory {
    Here { memory: Zeroes, length: u64 },
    Foreign(Foreign),
}

impl Dm {
    /// `ibv_alloc_dm`: `length` bytes of zeroes at a multiple of 2^`log_align`.
    ///
    /// # Errors
    /// EINVAL: no bytes, or too large an alignment; ENOMEM: more than [`MAX_DM`] in all.
    pub fn alloc(ctx: &Context, length: u64, log_align: u32) -> Result<Dm> {
        if length == 0 || log_align > MAX_ALIGN {
            return Err(VerbsError::Invalid("length or alignment of device memory"));
        }
        let add = |used: u64| used.checked_add(length).filter(|sum| *sum <= MAX_DM);
        USED.fetch_update(Ordering::AcqRel, Ordering::Acquire, add)
            .map_err(|_| VerbsError::NoMemory("device memory"))?;
        if !budget::take(length as usize) {
            USED.fetch_sub(length, Ordering::AcqRel);
            return Err(VerbsError::NoMemory("device memory"));
        }
        let memory = Mapping::zeroes(length, 1 << log_align).inspect_err(|_| give_back(length))?;
        let start = memory.start;
        /* no handle is 0: programs take that for none */
        let place = all().insert(Weak::new());
        let handle = place as u32 + 1;
        let dm = Dm::new(ctx, handle, DmMemory::Here { memory, length });
        if let Some(listed) = all().get_mut(place) {
            *listed = Arc::downgrade(&dm.0);
        }
        if let Some(exports) = ctx.exports() {
            exports.publish_dm(handle, ExportedBytes { addr: start, length });
        }
        Ok(dm)
    }

    fn new(ctx: &Context, handle: u32, place: DmMemory) -> Dm {
        let (regions, gone) = (AtomicU32::new(0), AtomicBool::new(false));
        Dm(Arc::new(DmInner { ctx: ctx.clone(), handle, place, regions, gone }))
    }

    /// `ibv_import_dm`: the same piece, in a context that was imported from its own.
    ///
    /// # Errors
    /// EINVAL: no such handle in this context. Of another process's: ENODEV: it is gone; EPERM: the system
    /// does not let this process reach its memory.
    pub fn import(ctx: &Context, handle: u32) -> Result<Dm> {
        if let Some(imported) = ctx.imported() {
            let (tag, bytes) = imported.from.find(ObjectKind::Dm, handle)?;
            let memory = Foreign::new(&imported.from, tag, bytes)?;
            return Ok(Dm::new(ctx, handle, DmMemory::Foreign(memory)));
        }
        let found = all().get(handle.wrapping_sub(1) as usize).and_then(Weak::upgrade).map(Dm);
        let ours = found.filter(|dm| dm.0.ctx.same(ctx) && !dm.0.gone.load(Ordering::Acquire));
        ours.ok_or(VerbsError::Invalid("handle of device memory"))
    }

    /// `ibv_free_dm`: frees device memory.
    ///
    /// # Errors
    /// EBUSY while regions are registered over it; EINVAL when it is gone already; EOPNOTSUPP: of another
    /// process.
    pub fn free(&self) -> Result<()> {
        if matches!(self.0.place, DmMemory::Foreign(_)) {
            return Err(VerbsError::Unsupported("ending another process's device memory"));
        }
        if self.0.regions.load(Ordering::Acquire) > 0 {
            return Err(VerbsError::Busy("memory regions"));
        }
        if self.0.gone.swap(true, Ordering::AcqRel) {
            return Err(VerbsError::Invalid("device memory is gone"));
        }
        self.0.withdraw();
        Ok(())
    }

    /// Its name for `import`.
    pub fn handle(&self) -> u32 {
        self.0.handle
    }

    /// `ibv_memcpy_to_dm`: copies into device memory.
    ///
    /// # Errors
    /// EINVAL: not whole words; EFAULT: not all inside, or another process's that is gone.
    ///
    /// # Safety
    /// `from` has `len` readable bytes.
    pub unsafe fn copy_in(&self, offset: u64, from: *const u8, len: u64) -> Result<()> {
        whole_words(offset, len)?;
        if let DmMemory::Foreign(memory) = &self.0.place {
            memory.fits(len)?;
            // SAFETY: the caller's terms.
            let wrote = unsafe { memory.write_raw(offset, from, len as usize) };
            return wrote.then_some(()).ok_or(VerbsError::Fault);
        }
        let to = self.range(offset, len).ok_or(VerbsError::Fault)?;
        // SAFETY: the caller's terms, and `range` checked the other side. Peers may write there meanwhile:
        // bytes are copied, and nobody has references to them.
        unsafe { std::ptr::copy(from, to as *mut u8, len as usize) };
        Ok(())
    }

    /// `ibv_memcpy_from_dm`: copies out of device memory.
    ///
    /// # Errors
    /// As [`Dm::copy_in`].
    ///
    /// # Safety
    /// `to` has `len` writable bytes.
    pub unsafe fn copy_out(&self, to: *mut u8, offset: u64, len: u64) -> Result<()> {
        whole_words(offset, len)?;
        if let DmMemory::Foreign(memory) = &self.0.place {
            memory.fits(len)?;
            // SAFETY: the caller's terms.
            let read = unsafe { memory.read_raw(offset, to, len as usize) };
            return read.then_some(()).ok_or(VerbsError::Fault);
        }
        let from = self.range(offset, len).ok_or(VerbsError::Fault)?;
        // SAFETY: as in `copy_in`.
        unsafe { std::ptr::copy(from as *const u8, to, len as usize) };
        Ok(())
    }

    /// Address of bytes [offset, offset + len), if it has them here.
    pub(crate) fn range(&self, offset: u64, len: u64) -> Option<u64> {
        let DmMemory::Here { memory, length } = &self.0.place else { return None };
        let inside = offset.checked_add(len).is_some_and(|end| end <= *length);
        (inside && !self.0.gone.load(Ordering::Acquire)).then(|| memory.start + offset)
    }

    /// Where the byte at an address lies, for other processes.
    pub(crate) fn file_bytes(&self, addr: u64) -> Option<FileBytes> {
        let DmMemory::Here { memory, .. } = &self.0.place else { return None };
        memory.file_bytes(addr)
    }

    /// Whether it is another process's.
    pub(crate) fn is_foreign(&self) -> bool {
        matches!(self.0.place, DmMemory::Foreign(_))
    }

    /// Bytes [offset, offset + len) for a region on `ctx`'s card: the address by which the card knows them.
    /// It cannot be freed until the hold is dropped.
    pub(crate) fn hold(&self, ctx: &Context, offset: u64, len: u64) -> Result<(DmHold, u64)> {
        const OUTSIDE: VerbsError = VerbsError::Invalid("range of device memory");
        self.0.regions.fetch_add(1, Ordering::AcqRel);
        let mut hold = DmHold { dm: self.clone(), listed: None };
        let DmMemory::Foreign(memory) = &self.0.place else {
            let addr = self.range(offset, len).ok_or(OUTSIDE)?;
            return Ok((hold, addr));
        };
        let end = offset.checked_add(len).ok_or(OUTSIDE)?;
        memory.fits(end).map_err(|_| OUTSIDE)?;
        let first = ctx.device()?.control(Command::AddForeign { memory: memory.clone() })?.address()?;
        hold.listed = Some((ctx.clone(), first));
        Ok((hold, first + offset))
    }
}

/// A region's hold on device memory.
pub(crate) struct DmHold {
    dm: Dm,
    /// Another process's: where the card has it listed
    listed: Option<(Context, u64)>,
}

impl Drop for DmHold {
    fn drop(&mut self) {
        if let Some((ctx, first)) = &self.listed
            && let Some(device) = ctx.device_if_ours()
        {
            let _ = device.control(Command::RemoveForeign { addr: *first });
        }
        self.dm.0.regions.fetch_sub(1, Ordering::AcqRel);
    }
}

impl DmInner {
    /// Takes it away from importers.
    fn withdraw(&self) {
        if let (Some(exports), Some(device)) = (self.ctx.exports(), self.ctx.device_if_ours()) {
            exports.withdraw(ObjectKind::Dm, self.handle);
            let _ = device.control(Command::Quiesce);
        }
    }
}

impl Drop for DmInner {
    fn drop(&mut self) {
        if let DmMemory::Here { length, .. } = self.place {
            self.withdraw();
            all().remove(self.handle as usize - 1);
            give_back(length);
        }
    }
}

/// Copies are of whole words.
fn whole_words(offset: u64, len: u64) -> Result<()> {
    if offset.is_multiple_of(WORD) && len.is_multiple_of(WORD) {
        return Ok(());
    }
    Err(VerbsError::Invalid("device memory is copied in words of four bytes"))
}

fn give_back(length: u64) {
    budget::give(length as usize);
    USED.fetch_sub(length, Ordering::AcqRel);
}

fn all() -> MutexGuard<'static, Slab<Weak<DmInner>>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}
