//! Memory regions.
//!
//! Registering looks at the memory as pinning would, so that an address that is not there is refused
//! now and not met on the data path. Nothing is locked in memory. On-demand regions are looked at when
//! packets come instead: the kernel copies for them, and finds out what is there.
//!
//! Owns what kinds of regions there are and which rights they take. It must not know what a key means.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use starverbs_core::mr::{Backing, MrAttr};
use starverbs_core::{Access, Sge};

use crate::context::Context;
use crate::device::{Command, CommandReply, Device};
use crate::dm::{Dm, DmHold};
use crate::error::{Result, VerbsError};
use crate::memory::{self, Mapping};
use crate::pd::Pd;
use crate::share::{ExportedBytes, FileBytes, Foreign, ImportTable, Tag};

/// IBV_ACCESS_OPTIONAL_RANGE: hints that a device may pass over (ibv_reg_mr(3)).
const OPTIONAL: u32 = 0x3ff0_0000;

/// A memory region. Clones are the same region.
#[derive(Clone)]
pub struct Mr(Arc<MrInner>);

struct MrInner {
    ctx: Context,
    key: u32,
    state: Mutex<Registration>,
    gone: AtomicBool,
}

/// What a registration is about.
struct Registration {
    kind: MrKind,
    /// As the card has it
    attr: MrAttr,
    /// Keeps the domain
    pd: Pd,
}

/// What lies under a region.
enum MrKind {
    /// Memory of the program
    User,
    /// Nothing: ibv_alloc_null_mr(3)
    Null,
    /// Device memory, held until the region ends
    Device { _hold: DmHold },
    /// A mapped descriptor, unmapped when the region ends
    Mapped { _map: Mapping },
    /// Another handle's
    Imported,
    /// Another process's
    Foreign(Tag),
}

/// Regions of another process that this card opens, as it has them.
pub(crate) type MrImports = ImportTable<MrAttr>;

/// Memory of the process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryRange {
    /// Address of the first byte
    pub addr: u64,
    /// Length in bytes
    pub length: u64,
}

/// Changes of a region: `None` stays as it is.
#[derive(Clone, Copy, Default)]
pub struct Rereg<'a> {
    /// IBV_REREG_MR_CHANGE_TRANSLATION: the new memory
    pub range: Option<MemoryRange>,
    /// IBV_REREG_MR_CHANGE_PD: the new domain
    pub pd: Option<&'a Pd>,
    /// IBV_REREG_MR_CHANGE_ACCESS: the new rights
    pub access: Option<Access>,
}

/// `enum ibv_advise_mr_advice`
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Advice {
    /// Pages present, to be read
    Prefetch,
    /// Pages present, to be written
    PrefetchWrite,
    /// Pages that are present known to the device: it knows them
    PrefetchNoFault,
}

impl Mr {
    /// `ibv_reg_mr_iova2`: peers and SGEs know the first byte as `iova`, or as 0 with ZERO_BASED. With
    /// ON_DEMAND the memory need not be there yet; address 0 and length 2^64 - 1 then are all there ever is.
    ///
    /// # Safety
    /// As long as the region is there, until [`Mr::dereg`] or the end of its last clone, its bytes are the
    /// program's to give away: the card reads them at any time and, with rights to write, changes them,
    /// as do peers by its key. So the memory stays (with ON_DEMAND: what comes in its place is given
    /// away, too), and no reference promises that nobody writes to it, or reads it.
    ///
    /// # Errors
    /// EINVAL: unknown or inconsistent rights, a range that wraps or has no bytes; EFAULT: memory not mapped,
    /// or not with these rights; ENOMEM; EOPNOTSUPP: on-demand paging where the kernel's copies are
    /// forbidden; EIO in a forked child.
    pub unsafe fn reg(pd: &Pd, addr: u64, length: u64, iova: u64, access: Access) -> Result<Mr> {
        check_access(access)?;
        let attr = user_attr(pd, addr, length, iova, access)?;
        Mr::new(pd, MrKind::User, attr)
    }

    /// `ibv_alloc_null_mr`: whatever is written is dropped, whatever is read is 0. For local use.
    ///
    /// # Errors
    /// ENOMEM; EIO in a forked child.
    pub fn null(pd: &Pd) -> Result<Mr> {
        let access = Access::LOCAL_WRITE;
        let (addr, length) = (memory::NULL, memory::SPAN);
        let attr = MrAttr { pd: pd.id(), addr, length, access, ..MrAttr::default() };
        Mr::new(pd, MrKind::Null, attr)
    }

    /// `ibv_reg_dm_mr`: bytes of device memory, known from 0 on.
    ///
    /// # Errors
    /// EINVAL: rights without ZERO_BASED or that device memory does not take, bytes beyond its end; ENOMEM;
    /// EOPNOTSUPP: atomics on another process's; EIO in a forked child.
    pub fn device(pd: &Pd, dm: &Dm, offset: u64, length: u64, access: Access) -> Result<Mr> {
        check_access(access)?;
        let wrong = Access::ON_DEMAND | Access::HUGETLB;
        if !access.contains(Access::ZERO_BASED) || access.intersects(wrong) {
            return Err(VerbsError::Invalid("access flags of device memory"));
        }
        if dm.is_foreign() && access.contains(Access::REMOTE_ATOMIC) {
            return Err(VerbsError::Unsupported("atomics on another process's device memory"));
        }
        let (hold, addr) = dm.hold(pd.context(), offset, length)?;
        let backing = dm.file_bytes(addr).map_or_else(Backing::default, FileBytes::backing);
        let attr = MrAttr { pd: pd.id(), addr, length, iova: 0, access, backing };
        Mr::new(pd, MrKind::Device { _hold: hold }, attr)
    }

    /// `ibv_reg_dmabuf_mr`: bytes of a dma-buf, or of whatever else a descriptor maps.
    ///
    /// # Errors
    /// EINVAL: rights, a range beyond the buffer's end, or an `iova` with another offset in its page; EBADF;
    /// EACCES: the descriptor does not give these rights; EOPNOTSUPP: it cannot be mapped; ENOMEM; EIO in
    /// a forked child.
    pub fn of_fd(pd: &Pd, fd: i32, offset: u64, length: u64, iova: u64, access: Access) -> Result<Mr> {
        check_access(access)?;
        let wrong = Access::ON_DEMAND | Access::HUGETLB | Access::MW_BIND | Access::ZERO_BASED;
        if access.intersects(wrong) || length == 0 || (iova ^ offset) & (memory::page() - 1) != 0 {
            return Err(VerbsError::Invalid("access flags, length or address of a dma-buf region"));
        }
        // SAFETY: moves the offset of a descriptor, which means nothing for a dma-buf.
        let size = unsafe { libc::lseek(fd, 0, libc::SEEK_END) };
        let size = u64::try_from(size).map_err(|_| not_mappable(VerbsError::last_os()))?;
        if offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(VerbsError::Invalid("range beyond the end of the buffer"));
        }
        let write = access.contains(Access::LOCAL_WRITE);
        let (map, addr) = Mapping::of_fd(fd, offset, length, write).map_err(not_mappable)?;
        let attr = MrAttr { pd: pd.id(), addr, length, iova, access, ..MrAttr::default() };
        Mr::new(pd, MrKind::Mapped { _map: map }, attr)
    }

    /// `ibv_import_mr`: a region of this domain by its handle, which is its lkey. Dropping it
    /// (`ibv_unimport_mr`) leaves the region. One of another process ends with it, or when it is changed:
    /// its keys then open nothing here. No memory window can be bound to it here, and no atomics reach
    /// it.
    ///
    /// # Errors
    /// EINVAL: no such region in this domain; EIO in a forked child. Of another process's: ENODEV: it is
    /// gone; EPERM: the system does not let this process reach its memory; ENOMEM: too many importers;
    /// EOPNOTSUPP: an on-demand or a null region; EBUSY: this card has a region of that key.
    pub fn import(pd: &Pd, handle: u32) -> Result<Mr> {
        const NONE: VerbsError = VerbsError::Invalid("handle of a memory region");
        let device = pd.context().device()?;
        let Some(imported) = pd.context().imported() else {
            let attr = device.control(Command::QueryMr { key: handle }).and_then(CommandReply::mr).ok();
            let attr = attr.filter(|attr| attr.pd == pd.id()).ok_or(NONE)?;
            return Ok(Mr::with_key(pd, handle, MrKind::Imported, attr));
        };
        let (tag, theirs) = imported.from.find_mr(handle)?;
        if !pd.stands_for(theirs.pd.0) {
            return Err(NONE);
        }
        let attr = imported.mrs.join(tag, || {
            let MrAttr { addr, length, iova, access, .. } = theirs;
            let memory = Foreign::new(&imported.from, tag, ExportedBytes { addr, length })?;
            let access = Access::from_bits(access.bits()).ok_or(NONE)?;
            let attr = MrAttr { pd: pd.id(), length, iova, access, ..MrAttr::default() };
            device.control(Command::ImportMr { key: handle, attr, memory })?.mr()
        })?;
        Ok(Mr::with_key(pd, handle, MrKind::Foreign(tag), attr))
    }

    fn new(pd: &Pd, kind: MrKind, attr: MrAttr) -> Result<Mr> {
        let key = pd.context().device()?.control(Command::RegMr { attr })?.number()?;
        Ok(Mr::with_key(pd, key, kind, attr))
    }

    fn with_key(pd: &Pd, key: u32, kind: MrKind, attr: MrAttr) -> Mr {
        let state = Mutex::new(Registration { kind, attr, pd: pd.clone() });
        Mr(Arc::new(MrInner { ctx: pd.context().clone(), key, state, gone: AtomicBool::new(false) }))
    }

    /// Whether `ibv_rereg_mr` may be called with it: memory of the program, registered through this handle.
    pub fn is_user(&self) -> bool {
        matches!(self.state().kind, MrKind::User)
    }

    /// `ibv_rereg_mr`: the keys stay, and open something else from the next packet on.
    ///
    /// # Safety
    /// As of [`Mr::reg`], for the region as it becomes.
    ///
    /// # Errors
    /// Those of [`Mr::reg`], and EINVAL for a region that is not of the program's memory or a domain of
    /// another card. The region stays as it was.
    pub unsafe fn rereg(&self, change: &Rereg<'_>) -> Result<()> {
        let device = self.0.ctx.device()?;
        let mut state = self.state();
        if !matches!(state.kind, MrKind::User) || self.0.gone.load(Ordering::Acquire) {
            return Err(VerbsError::Invalid("not a region of the program's memory"));
        }
        let pd = change.pd.unwrap_or(&state.pd).clone();
        if pd.context().device()?.id() != device.id() {
            return Err(VerbsError::Invalid("a protection domain of another device"));
        }
        let access = change.access.unwrap_or(state.attr.access);
        check_access(access)?;
        let implicit = is_implicit(&state.attr);
        let (addr, length, iova) = match change.range {
            Some(MemoryRange { addr, length }) => (addr, length, addr),
            None if implicit => (0, u64::MAX, 0),
            None => (memory::plain(state.attr.addr), state.attr.length, state.attr.iova),
        };
        let attr = user_attr(&pd, addr, length, iova, access)?;
        device.control(Command::ReregMr { key: self.0.key, attr })?;
        state.attr = attr;
        state.pd = pd;
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, Registration> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes; 2^64 - 1 for regions over everything.
    pub fn length(&self) -> u64 {
        let attr = self.state().attr;
        if attr.length == memory::SPAN { u64::MAX } else { attr.length }
    }

    /// Key for SGEs.
    pub fn lkey(&self) -> u32 {
        self.0.key
    }

    /// Key for peers. They cannot have a null region.
    pub fn rkey(&self) -> u32 {
        if matches!(self.state().kind, MrKind::Null) { 0 } else { self.0.key }
    }

    /// `ibv_dereg_mr`. No packet touches the memory afterwards, and no other process: it waits for their
    /// copies that are under way.
    ///
    /// # Errors
    /// EBUSY while memory windows are bound to it; EINVAL when it is gone already; EOPNOTSUPP: a region of
    /// another process; EIO in a forked child.
    pub fn dereg(&self) -> Result<()> {
        let device = self.0.ctx.device()?;
        if matches!(self.state().kind, MrKind::Foreign(_)) {
            return Err(VerbsError::Unsupported("ending another process's region"));
        }
        if self.0.gone.swap(true, Ordering::AcqRel) {
            return Err(VerbsError::Invalid("memory region is gone"));
        }
        let ended = device.control(Command::DeregMr { key: self.0.key }).map(|_| ());
        match ended {
            Ok(()) => self.state().kind = MrKind::User,
            Err(_) => self.0.gone.store(false, Ordering::Release),
        }
        ended
    }
}

impl MrInner {
    /// Gives an import back.
    fn give_back(&self, device: &Device, tag: Tag) {
        let Some(imported) = self.ctx.imported() else { return };
        imported.mrs.leave(tag, |attr| {
            let _ = device.control(Command::UnimportMr { key: self.key, addr: attr.addr });
        });
    }
}

impl Drop for MrInner {
    fn drop(&mut self) {
        if *self.gone.get_mut() {
            return;
        }
        let Some(device) = self.ctx.device_if_ours() else { return };
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match state.kind {
            MrKind::Imported => {}
            MrKind::Foreign(tag) => self.give_back(device, tag),
            _ => {
                let _ = device.control(Command::DeregMr { key: self.key });
            }
        }
    }
}

/// [`Pd::advise_mr`]
pub(crate) fn advise(pd: &Pd, advice: Advice, flush: bool, sges: &[Sge]) -> Result<()> {
    let device = pd.context().device()?;
    if sges.is_empty() {
        return Err(VerbsError::Invalid("no SGEs"));
    }
    let write = advice == Advice::PrefetchWrite;
    for sge in sges {
        let attr = device.control(Command::QueryMr { key: sge.lkey }).and_then(CommandReply::mr);
        let attr = attr.map_err(|_| VerbsError::Fault)?;
        if attr.pd != pd.id() || (write && !attr.access.contains(Access::LOCAL_WRITE)) {
            return Err(VerbsError::Os(libc::EPERM));
        }
        if !attr.access.contains(Access::ON_DEMAND) {
            return Err(VerbsError::Invalid("not an on-demand region"));
        }
        let offset = sge.addr.wrapping_sub(attr.iova);
        if offset.checked_add(u64::from(sge.len)).is_none_or(|end| end > attr.length) {
            return Err(VerbsError::Fault);
        }
        let start = memory::plain(attr.addr) + offset;
        let end = start + u64::from(sge.len);
        if advice == Advice::PrefetchNoFault || start == end {
            continue;
        }
        if flush { memory::prefetch(start, end, write)? } else { memory::will_need(start, end)? }
    }
    Ok(())
}

/// The card's attributes of a region of the program's memory; checks the memory.
fn user_attr(pd: &Pd, addr: u64, length: u64, iova: u64, access: Access) -> Result<MrAttr> {
    let pd = pd.id();
    if length == 0 {
        return Err(VerbsError::Invalid("no bytes"));
    }
    let demand = access.contains(Access::ON_DEMAND);
    if demand && !memory::safe_copies_work() {
        return Err(VerbsError::Unsupported("on-demand paging"));
    }
    if demand && addr == 0 && length == u64::MAX {
        /* all pages huge, or known by other addresses: not with what is there by itself (ibv_reg_mr(3)) */
        if access.contains(Access::HUGETLB) || iova != 0 {
            return Err(VerbsError::Invalid("huge pages or an address with an implicit region"));
        }
        let (addr, length) = (memory::DEMAND, memory::SPAN);
        return Ok(MrAttr { pd, addr, length, iova, access, ..MrAttr::default() });
    }
    let end = addr.checked_add(length).ok_or(VerbsError::Invalid("range wraps"))?;
    let iova = if access.contains(Access::ZERO_BASED) { 0 } else { iova };
    iova.checked_add(length).ok_or(VerbsError::Invalid("range wraps"))?;
    if end > memory::SPAN {
        return Err(VerbsError::Fault);
    }
    if demand {
        let addr = memory::DEMAND | addr;
        return Ok(MrAttr { pd, addr, length, iova, access, ..MrAttr::default() });
    }
    memory::probe(addr, end, access.contains(Access::LOCAL_WRITE))?;
    let backing = FileBytes::of_program(addr, length).map_or_else(Backing::default, FileBytes::backing);
    Ok(MrAttr { pd, addr, length, iova, access, backing })
}

/// An implicit on-demand region: everything that the process has.
fn is_implicit(attr: &MrAttr) -> bool {
    attr.addr == memory::DEMAND && attr.length == memory::SPAN
}

/// ibv_reg_dmabuf_mr(3) knows EOPNOTSUPP for what cannot be had this way.
fn not_mappable(error: VerbsError) -> VerbsError {
    match error {
        VerbsError::Os(libc::ENODEV | libc::ESPIPE | libc::ENXIO) => {
            VerbsError::Unsupported("a descriptor that cannot be mapped")
        }
        other => other,
    }
}

/// Remote writes and atomics need the local right (IBTA 10.6.3.1). What a process has as memory is not known
/// to survive the loss of power, so that no region promises it.
fn check_access(access: Access) -> Result<()> {
    let known = Access::LOCAL_WRITE
        | Access::REMOTE_WRITE
        | Access::REMOTE_READ
        | Access::REMOTE_ATOMIC
        | Access::MW_BIND
        | Access::ZERO_BASED
        | Access::ON_DEMAND
        | Access::HUGETLB
        | Access::FLUSH_GLOBAL
        | Access::from_bits_retain(OPTIONAL);
    if access.contains(Access::FLUSH_PERSISTENT) {
        return Err(VerbsError::Unsupported("persistent memory"));
    }
    if !known.contains(access) {
        return Err(VerbsError::Invalid("unknown access flags"));
    }
    let writes = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    if access.intersects(writes) && !access.contains(Access::LOCAL_WRITE) {
        return Err(VerbsError::Invalid("remote write access without local write access"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remote_write_needs_local_write() {
        assert!(check_access(Access::REMOTE_READ).is_ok());
        assert!(check_access(Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::RELAXED_ORDERING).is_ok());
        assert!(check_access(Access::ON_DEMAND | Access::HUGETLB).is_ok());
        assert_eq!(check_access(Access::REMOTE_WRITE).unwrap_err().errno(), libc::EINVAL);
        assert_eq!(check_access(Access::REMOTE_ATOMIC).unwrap_err().errno(), libc::EINVAL);
        assert!(check_access(Access::FLUSH_GLOBAL).is_ok());
        assert_eq!(check_access(Access::FLUSH_PERSISTENT).unwrap_err().errno(), libc::EOPNOTSUPP);
        assert_eq!(check_access(Access::from_bits_retain(1 << 15)).unwrap_err().errno(), libc::EINVAL);
    }
}
