//! Protection domains, and what refines them: parent domains and thread domains.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use starverbs_core::{PdId, Sge};
use starverbs_rings::ProgramMemory;

use crate::card::Card;
use crate::context::Context;
use crate::error::{Result, VerbsError};
use crate::mr::{self, Advice};
use crate::share::{Item, Kept, Kind, Tag};

/// A protection domain, or a parent domain of one. Clones are the same domain.
#[derive(Clone)]
pub struct Pd(Arc<PdInner>);

struct PdInner {
    ctx: Context,
    id: PdId,
    gone: AtomicBool,
    /// Parent domains of this domain.
    parents: AtomicU32,
    origin: Origin,
}

/// Where a handle of a domain comes from.
enum Origin {
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
pub(crate) type PdImports = Kept<PdId>;

/// What makes a domain a parent domain.
struct Parent {
    of: Pd,
    td: Option<Td>,
    memory: ProgramMemory,
}

impl Pd {
    /// `ibv_alloc_pd`
    ///
    /// # Errors
    /// ENOMEM: too many; EIO in a forked child.
    pub fn alloc(ctx: &Context) -> Result<Pd> {
        let id = ctx.card()?.with(|shard, _| {
            let id = shard.alloc_pd(ctx.events())?;
            if let Some(exports) = ctx.exports() {
                exports.publish(Kind::Pd, id.0, &Item::default());
            }
            Ok::<_, VerbsError>(id)
        })?;
        Ok(Pd::new(ctx, id, Origin::Own))
    }

    /// `ibv_import_pd`: a domain of this context by its handle. Dropping it (`ibv_unimport_pd`) leaves the domain. In
    /// a context of another process, what is made in it is this process's own.
    ///
    /// # Errors
    /// EINVAL: no such domain in this context; ENODEV: the other process is gone; EIO in a forked child.
    pub fn import(ctx: &Context, handle: u32) -> Result<Pd> {
        let card = ctx.card()?;
        if let Some(imported) = ctx.imported() {
            let tag = imported.from.find(Kind::Pd, handle)?.tag;
            let make = || card.with(|shard, _| shard.alloc_pd(ctx.events()));
            let id = imported.pds.join(tag, make)?;
            return Ok(Pd::new(ctx, id, Origin::Foreign(Foreign { handle, tag })));
        }
        if card.with(|shard, _| shard.has_pd(PdId(handle), ctx.events())) {
            return Ok(Pd::new(ctx, PdId(handle), Origin::Import));
        }
        Err(VerbsError::Invalid("handle of a protection domain"))
    }

    /// `ibv_alloc_parent_domain`: the same domain for the card. Rings of objects made in it lie in `memory`.
    ///
    /// # Errors
    /// EINVAL: `of` is a parent domain itself, or is gone; EIO in a forked child.
    pub fn parent_of(of: &Pd, td: Option<&Td>, memory: ProgramMemory) -> Result<Pd> {
        of.0.ctx.card()?;
        if of.is_parent() || of.0.gone.load(Ordering::Acquire) {
            return Err(VerbsError::Invalid("no protection domain that can have a parent"));
        }
        of.0.parents.fetch_add(1, Ordering::AcqRel);
        if let Some(td) = td {
            td.0.users.fetch_add(1, Ordering::AcqRel);
        }
        let parent = Parent { of: of.clone(), td: td.cloned(), memory };
        Ok(Pd::new(&of.0.ctx, of.0.id, Origin::Parent(parent)))
    }

    fn new(ctx: &Context, id: PdId, origin: Origin) -> Pd {
        let (gone, parents) = (AtomicBool::new(false), AtomicU32::new(0));
        Pd(Arc::new(PdInner { ctx: ctx.clone(), id, gone, parents, origin }))
    }

    /// `ibv_dealloc_pd`
    ///
    /// # Errors
    /// EBUSY while MRs, memory windows, QPs, SRQs, AHs or parent domains live in it; of a parent domain, while anybody
    /// holds on to it; EOPNOTSUPP: a domain of another process.
    pub fn dealloc(&self) -> Result<()> {
        let card = self.0.ctx.card()?;
        if self.0.gone.load(Ordering::Acquire) {
            return Err(VerbsError::Invalid("protection domain is gone"));
        }
        match &self.0.origin {
            Origin::Parent(_) if Arc::strong_count(&self.0) > 1 => {
                return Err(VerbsError::Busy("objects made in it"));
            }
            Origin::Parent(parent) => parent.release(),
            Origin::Foreign(_) => return Err(VerbsError::Unsupported("ending another process's domain")),
            _ if self.0.parents.load(Ordering::Acquire) > 0 => {
                return Err(VerbsError::Busy("parent domains"));
            }
            _ => self.0.end(card)?,
        }
        self.0.gone.store(true, Ordering::Release);
        Ok(())
    }

    /// `ibv_advise_mr`: pages of on-demand regions come in now. `flush`: before this returns.
    ///
    /// # Errors
    /// EINVAL: no SGEs, or a region that is not on demand; EFAULT: an unknown key, bytes outside the region, or memory
    /// that is not there or not with these rights; EPERM: a region of another domain, or one to be written without
    /// the right; EIO in a forked child.
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
            Origin::Foreign(foreign) => foreign.handle,
            Origin::Parent(parent) => parent.of.handle(),
            _ => self.0.id.0,
        }
    }

    /// Whether it is the domain of this handle in another process, and that domain still exists.
    pub(crate) fn stands_for(&self, handle: u32) -> bool {
        match (&self.0.origin, self.0.ctx.imported()) {
            (Origin::Parent(parent), _) => parent.of.stands_for(handle),
            (Origin::Foreign(foreign), Some(imported)) => {
                foreign.handle == handle && imported.from.stands(foreign.tag)
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
        matches!(self.0.origin, Origin::Parent(_))
    }

    /// Where rings of objects made in it lie, if the program has its own memory for them.
    pub(crate) fn memory(&self) -> ProgramMemory {
        match &self.0.origin {
            Origin::Parent(parent) => parent.memory.clone(),
            _ => None,
        }
    }
}

impl Parent {
    fn release(&self) {
        self.of.0.parents.fetch_sub(1, Ordering::AcqRel);
        if let Some(td) = &self.td {
            td.0.users.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl PdInner {
    /// Ends the card's domain, and takes it away from importers.
    fn end(&self, card: &Card) -> Result<()> {
        /* both under the card's lock: the next domain may get the number */
        card.with(|shard, _| {
            shard.dealloc_pd(self.id)?;
            if let Some(exports) = self.ctx.exports() {
                exports.revoke(Kind::Pd, self.id.0);
            }
            Ok(())
        })
    }
}

impl Drop for PdInner {
    fn drop(&mut self) {
        if *self.gone.get_mut() {
            return;
        }
        let card = self.ctx.card_if_ours();
        /* busy: what lives in a domain was leaked, and so is it */
        match (&self.origin, card) {
            (Origin::Parent(parent), _) => parent.release(),
            (Origin::Own, Some(card)) => {
                let _ = self.end(card);
            }
            (Origin::Foreign(foreign), Some(card)) => {
                let end = |id| {
                    let _ = card.with(|shard, _| shard.dealloc_pd(id));
                };
                if let Some(imported) = self.ctx.imported() {
                    imported.pds.leave(foreign.tag, end);
                }
            }
            _ => {}
        }
    }
}

/// A thread domain: a program's promise that one thread at a time uses what is made in it. The card's locks are taken all
/// the same: without contention they cost next to nothing. Clones are the same domain.
#[derive(Clone)]
pub struct Td(Arc<TdInner>);

struct TdInner {
    /// Parent domains that name it.
    users: AtomicU32,
}

impl Td {
    /// `ibv_alloc_td`
    ///
    /// # Errors
    /// EIO in a forked child.
    pub fn alloc(ctx: &Context) -> Result<Td> {
        ctx.card()?;
        Ok(Td(Arc::new(TdInner { users: AtomicU32::new(0) })))
    }

    /// `ibv_dealloc_td`
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
