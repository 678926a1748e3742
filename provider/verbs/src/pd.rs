//! Protection domains, and what refines them: parent domains and thread domains.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use starverbs_core::strom::RpcOutcome;
use starverbs_core::{PdId, Sge};
use starverbs_kernels::Builtin;
use starverbs_rings::ProgramMemory;

use crate::context::Context;
use crate::device::{AnsweredBy, Command, Device, KernelCommand};
use crate::error::{Result, VerbsError};
use crate::modules;
use crate::mr::{self, Advice};
use crate::share::{ImportTable, ObjectKind, Tag};

/// Most bytes of a request's parameters.
const MAX_PARAMS: usize = 4096;
const GONE: VerbsError = VerbsError::Invalid("protection domain is gone");

/// A protection domain, or a parent domain of one. Clones are the same domain.
#[derive(Clone)]
pub struct Pd(Arc<PdInner>);

struct PdInner {
    ctx: Context,
    id: PdId,
    state: Arc<DomainState>,
    origin: HandleOrigin,
}

/// What all handles of one domain share. Numbers on the card are used again, a domain's state is not.
#[derive(Default)]
struct DomainState {
    gone: AtomicBool,
    /// Parent domains of this domain
    parents: AtomicU32,
}

/// A context's domains by handle.
#[derive(Default)]
pub(crate) struct Domains(Mutex<HashMap<u32, Weak<DomainState>>>);

impl Domains {
    fn all(&self) -> std::sync::MutexGuard<'_, HashMap<u32, Weak<DomainState>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where a handle of a domain comes from.
enum HandleOrigin {
    /// Made with it
    Own,
    /// Made by another handle, which ends it
    Import,
    /// A domain of another process; this card has one that stands for it
    Foreign(Foreign),
    /// A parent domain
    Parent(Parent),
}

/// A domain of another process.
struct Foreign {
    handle: u32,
    tag: Tag,
}

/// This card's domains that stand for those of another process.
pub(crate) type PdImports = ImportTable<PdId>;

/// What makes a domain a parent domain.
struct Parent {
    of: Pd,
    td: Option<Td>,
    memory: ProgramMemory,
}

impl Pd {
    /// Has RPCs of an op-code, on queue pairs of this domain, answered by a kernel (StRoM).
    ///
    /// # Errors
    /// EBUSY: the op-code has one; ENOMEM: the card has as many as it may; EOPNOTSUPP: it has none; EIO in a
    /// forked child.
    pub fn load_kernel(&self, op: u64, kernel: Builtin) -> Result<()> {
        self.answer_with(op, AnsweredBy::Builtin(kernel), false)
    }

    /// As [`Pd::load_kernel`], by a kernel that is a WebAssembly module (docs/strom.md). With `replace` it
    /// takes the place of the kernel that the op-code has, if it has one, at once: no RPC finds none.
    ///
    /// # Errors
    /// As of `load_kernel`. EINVAL: the module is no kernel, and the log says why. EOPNOTSUPP: nothing here
    /// runs modules.
    pub fn load_module(&self, op: u64, module: &[u8], replace: bool) -> Result<()> {
        self.context().device()?;
        self.answer_with(op, AnsweredBy::Module(modules::load(module, op)?), replace)
    }

    /// Leaves RPCs of an op-code to the program: they take receives, whose immediate data is the low half of
    /// the op-code.
    ///
    /// # Errors
    /// As of [`Pd::load_kernel`].
    pub fn leave_to_program(&self, op: u64) -> Result<()> {
        self.answer_with(op, AnsweredBy::Program, false)
    }

    fn answer_with(&self, op: u64, by: AnsweredBy, replace: bool) -> Result<()> {
        let load = KernelCommand::Load { pd: self.id(), op, by, replace };
        self.context().device()?.control(Command::Kernel(load)).map(|_| ())
    }

    /// Has the kernel of an op-code answer a request of this program's own, without a queue pair: `params`
    /// are its parameters. Gives how it ended, and the bytes of the answer, at the front of `answer`; of
    /// OVERFLOW how many there would have been. It reaches the domain's regions, and writes those with
    /// `LOCAL_WRITE`.
    ///
    /// # Errors
    /// EINVAL: more than 4096 bytes; ENOMEM; EOPNOTSUPP: the card has no kernels; EIO in a forked child.
    pub fn call_kernel(&self, op: u64, params: &[u8], answer: &mut [u8]) -> Result<RpcOutcome> {
        if params.len() > MAX_PARAMS {
            return Err(VerbsError::Invalid("parameters of a kernel"));
        }
        let mut ended = RpcOutcome::default();
        let call = KernelCommand::Call { pd: self.id(), op, params, answer, ended: &mut ended };
        self.context().device()?.control(Command::Kernel(call))?;
        Ok(ended)
    }

    /// Unloads the kernel of an op-code, whatever it is in the middle of.
    ///
    /// # Errors
    /// EINVAL: there is none; as for loading.
    pub fn unload_kernel(&self, op: u64) -> Result<()> {
        let unload = KernelCommand::Unload { pd: self.id(), op };
        self.context().device()?.control(Command::Kernel(unload)).map(|_| ())
    }

    /// `ibv_alloc_pd`: makes a protection domain.
    ///
    /// # Errors
    /// ENOMEM: too many; EIO in a forked child.
    pub fn alloc(ctx: &Context) -> Result<Pd> {
        let device = ctx.device()?;
        let id = PdId(device.control(Command::AllocPd { events: ctx.events() })?.number()?);
        if let Some(exports) = ctx.exports() {
            exports.publish_pd(id.0);
        }
        let pd = Pd::new(ctx, id, Arc::default(), HandleOrigin::Own);
        let mut domains = ctx.domains().all();
        let room = domains.try_reserve(1).map_err(|_| VerbsError::NoMemory("protection domains"));
        if room.is_ok() {
            domains.insert(id.0, Arc::downgrade(&pd.0.state));
        }
        drop(domains);
        room.map(|()| pd)
    }

    /// `ibv_import_pd`: a domain of this context by its handle. Dropping it (`ibv_unimport_pd`) leaves the
    /// domain. In a context of another process, what is made in it is this process's own.
    ///
    /// # Errors
    /// EINVAL: no such domain in this context; ENODEV: the other process is gone; EIO in a forked child.
    pub fn import(ctx: &Context, handle: u32) -> Result<Pd> {
        let device = ctx.device()?;
        if let Some(imported) = ctx.imported() {
            let (tag, _) = imported.from.find(ObjectKind::Pd, handle)?;
            let make = || Ok(PdId(device.control(Command::AllocPd { events: ctx.events() })?.number()?));
            let id = imported.pds.join(tag, make)?;
            return Ok(Pd::new(ctx, id, Arc::default(), HandleOrigin::Foreign(Foreign { handle, tag })));
        }
        let state = ctx.domains().all().get(&handle).and_then(Weak::upgrade);
        let state = state.ok_or(VerbsError::Invalid("handle of a protection domain"))?;
        Ok(Pd::new(ctx, PdId(handle), state, HandleOrigin::Import))
    }

    /// `ibv_alloc_parent_domain`: the same domain for the card. Rings of objects made in it lie in `memory`.
    ///
    /// # Errors
    /// EINVAL: `of` is a parent domain itself, or is gone; EIO in a forked child.
    pub fn parent_of(of: &Pd, td: Option<&Td>, memory: ProgramMemory) -> Result<Pd> {
        of.0.ctx.device()?;
        if of.is_parent() || !of.0.state.join() {
            return Err(VerbsError::Invalid("no protection domain that can have a parent"));
        }
        if let Some(td) = td {
            td.0.users.fetch_add(1, Ordering::AcqRel);
        }
        let parent = Parent { of: of.clone(), td: td.cloned(), memory };
        Ok(Pd::new(&of.0.ctx, of.0.id, Arc::default(), HandleOrigin::Parent(parent)))
    }

    fn new(ctx: &Context, id: PdId, state: Arc<DomainState>, origin: HandleOrigin) -> Pd {
        Pd(Arc::new(PdInner { ctx: ctx.clone(), id, state, origin }))
    }

    /// `ibv_dealloc_pd`: ends a protection domain.
    ///
    /// # Errors
    /// EBUSY while MRs, memory windows, QPs, SRQs, AHs or parent domains live in it; of a parent domain,
    /// while anybody holds on to it; EOPNOTSUPP: a domain of another process.
    pub fn dealloc(&self) -> Result<()> {
        let device = self.0.ctx.device()?;
        match &self.0.origin {
            HandleOrigin::Parent(_) if self.0.state.gone.load(Ordering::Acquire) => Err(GONE),
            HandleOrigin::Parent(_) if Arc::strong_count(&self.0) > 1 => {
                Err(VerbsError::Busy("objects made in it"))
            }
            HandleOrigin::Parent(parent) => {
                parent.release();
                self.0.state.gone.store(true, Ordering::Release);
                Ok(())
            }
            HandleOrigin::Foreign(_) => Err(VerbsError::Unsupported("ending another process's domain")),
            HandleOrigin::Own | HandleOrigin::Import => self.0.end(device),
        }
    }

    /// `ibv_advise_mr`: pages of on-demand regions come in now. `flush`: before this returns.
    ///
    /// # Errors
    /// EINVAL: no SGEs, or a region that is not on demand; EFAULT: an unknown key, bytes outside the region,
    /// or memory that is not there or not with these rights; EPERM: a region of another domain, or one to
    /// be written without the right; EIO in a forked child.
    pub fn advise_mr(&self, advice: Advice, flush: bool, sges: &[Sge]) -> Result<()> {
        mr::advise(self, advice, flush, sges)
    }

    /// Its number on the card; a parent domain has that of its protection domain.
    pub fn id(&self) -> PdId {
        self.0.id
    }

    /// Its handle for [`Pd::import`]: its number on the card that it was made on.
    pub fn handle(&self) -> u32 {
        match &self.0.origin {
            HandleOrigin::Foreign(foreign) => foreign.handle,
            HandleOrigin::Parent(parent) => parent.of.handle(),
            _ => self.0.id.0,
        }
    }

    /// Whether it is the domain of this handle in another process, and that domain still exists.
    pub(crate) fn stands_for(&self, handle: u32) -> bool {
        match (&self.0.origin, self.0.ctx.imported()) {
            (HandleOrigin::Parent(parent), _) => parent.of.stands_for(handle),
            (HandleOrigin::Foreign(foreign), Some(imported)) => {
                foreign.handle == handle && imported.from.is_valid(foreign.tag)
            }
            _ => false,
        }
    }

    /// The context it was made in.
    pub fn context(&self) -> &Context {
        &self.0.ctx
    }

    /// Whether it is a parent domain.
    pub(crate) fn is_parent(&self) -> bool {
        matches!(self.0.origin, HandleOrigin::Parent(_))
    }

    /// Where rings of objects made in it lie, if the program has its own memory for them.
    pub(crate) fn memory(&self) -> ProgramMemory {
        match &self.0.origin {
            HandleOrigin::Parent(parent) => parent.memory.clone(),
            _ => None,
        }
    }
}

impl DomainState {
    /// One more parent domain; false: it is gone.
    fn join(&self) -> bool {
        self.parents.fetch_add(1, Ordering::SeqCst);
        let there = !self.gone.load(Ordering::SeqCst);
        if !there {
            self.parents.fetch_sub(1, Ordering::SeqCst);
        }
        there
    }

    /// It ends, as far as it is here, unless parent domains are in the way.
    fn end(&self) -> Result<()> {
        if self.gone.swap(true, Ordering::SeqCst) {
            return Err(GONE);
        }
        /* a parent domain that comes from now on sees that it is gone */
        if self.parents.load(Ordering::SeqCst) > 0 {
            self.gone.store(false, Ordering::SeqCst);
            return Err(VerbsError::Busy("parent domains"));
        }
        Ok(())
    }
}

impl Parent {
    fn release(&self) {
        self.of.0.state.parents.fetch_sub(1, Ordering::AcqRel);
        if let Some(td) = &self.td {
            td.0.users.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl PdInner {
    /// Ends the device's domain, and takes it away from importers and other handles.
    fn end(&self, device: &Device) -> Result<()> {
        self.state.end()?;
        let mut ended = || {
            self.ctx.domains().all().remove(&self.id.0);
            if let Some(exports) = self.ctx.exports() {
                exports.withdraw(ObjectKind::Pd, self.id.0);
            }
        };
        let done = device.control(Command::DeallocPd { pd: self.id, ended: &mut ended });
        self.state.gone.store(done.is_ok(), Ordering::Release);
        done.map(|_| ())
    }
}

impl Drop for PdInner {
    fn drop(&mut self) {
        if self.state.gone.load(Ordering::Acquire) {
            return;
        }
        let device = self.ctx.device_if_ours();
        /* busy: what lives in a domain was leaked, and so is it */
        match (&self.origin, device) {
            (HandleOrigin::Parent(parent), _) => parent.release(),
            (HandleOrigin::Own, Some(device)) => {
                let _ = self.end(device);
            }
            (HandleOrigin::Foreign(foreign), Some(device)) => {
                let end = |pd| {
                    let _ = device.control(Command::DeallocPd { pd, ended: &mut || {} });
                };
                if let Some(imported) = self.ctx.imported() {
                    imported.pds.leave(foreign.tag, end);
                }
            }
            _ => {}
        }
    }
}

/// A thread domain: a program's promise that one thread at a time uses what is made in it. The card's locks
/// are taken all the same: without contention they cost next to nothing. Clones are the same domain.
#[derive(Clone)]
pub struct Td(Arc<TdInner>);

struct TdInner {
    /// Parent domains that name it.
    users: AtomicU32,
}

impl Td {
    /// `ibv_alloc_td`: makes a thread domain.
    ///
    /// # Errors
    /// EIO in a forked child.
    pub fn alloc(ctx: &Context) -> Result<Td> {
        ctx.device()?;
        Ok(Td(Arc::new(TdInner { users: AtomicU32::new(0) })))
    }

    /// `ibv_dealloc_td`: ends a thread domain.
    ///
    /// # Errors
    /// EBUSY while a parent domain names it.
    pub fn dealloc(&self) -> Result<()> {
        if self.0.users.load(Ordering::Acquire) > 0 {
            Err(VerbsError::Busy("parent domains"))
        } else {
            Ok(())
        }
    }
}
