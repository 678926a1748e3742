//! Protection domains, and what refines them: parent domains and thread domains.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use starverbs_core::{PdId, Sge};
use starverbs_rings::ProgramMemory;

use crate::context::Context;
use crate::error::{Result, VerbsError};
use crate::mr::{self, Advice};

/// A protection domain, or a parent domain of one. Clones are the same domain.
#[derive(Clone)]
pub struct Pd(Arc<PdInner>);

struct PdInner {
    ctx: Context,
    id: PdId,
    /// Made by another handle, which ends it
    imported: bool,
    gone: AtomicBool,
    /// Parent domains of this domain.
    parents: AtomicU32,
    parent: Option<Parent>,
}

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
        let id = ctx.card()?.with(|shard, _| shard.alloc_pd(ctx.events()))?;
        Ok(Pd::new(ctx, id, false, None))
    }

    /// `ibv_import_pd`: a domain of this context by its number. Dropping it (`ibv_unimport_pd`) leaves the domain.
    ///
    /// # Errors
    /// EINVAL: no such domain in this context; EIO in a forked child.
    pub fn import(ctx: &Context, id: PdId) -> Result<Pd> {
        if ctx.card()?.with(|shard, _| shard.has_pd(id, ctx.events())) {
            return Ok(Pd::new(ctx, id, true, None));
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
        Ok(Pd::new(&of.0.ctx, of.0.id, false, Some(Parent { of: of.clone(), td: td.cloned(), memory })))
    }

    fn new(ctx: &Context, id: PdId, imported: bool, parent: Option<Parent>) -> Pd {
        let (gone, parents) = (AtomicBool::new(false), AtomicU32::new(0));
        Pd(Arc::new(PdInner { ctx: ctx.clone(), id, imported, gone, parents, parent }))
    }

    /// `ibv_dealloc_pd`
    ///
    /// # Errors
    /// EBUSY while MRs, memory windows, QPs, SRQs, AHs or parent domains live in it; of a parent domain, while anybody
    /// holds on to it.
    pub fn dealloc(&self) -> Result<()> {
        let card = self.0.ctx.card()?;
        if self.0.gone.load(Ordering::Acquire) {
            return Err(VerbsError::Invalid("protection domain is gone"));
        }
        match &self.0.parent {
            Some(_) if Arc::strong_count(&self.0) > 1 => return Err(VerbsError::Busy("objects made in it")),
            Some(parent) => parent.release(),
            None if self.0.parents.load(Ordering::Acquire) > 0 => {
                return Err(VerbsError::Busy("parent domains"));
            }
            None => card.with(|shard, _| shard.dealloc_pd(self.0.id))?,
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

    /// Its handle on the card; a parent domain has that of its protection domain.
    pub fn id(&self) -> PdId {
        self.0.id
    }

    /// The context it was made in.
    pub fn context(&self) -> &Context {
        &self.0.ctx
    }

    /// Whether it is a parent domain.
    pub(crate) fn is_parent(&self) -> bool {
        self.0.parent.is_some()
    }

    /// Where rings of objects made in it lie, if the program has its own memory for them.
    pub(crate) fn memory(&self) -> ProgramMemory {
        self.0.parent.as_ref().and_then(|parent| parent.memory.clone())
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

impl Drop for PdInner {
    fn drop(&mut self) {
        if *self.gone.get_mut() || self.imported {
            return;
        }
        match &self.parent {
            Some(parent) => parent.release(),
            None => {
                if let Some(card) = self.ctx.card_if_ours() {
                    /* busy: what lives in it was leaked, and so is it */
                    let _ = card.with(|shard, _| shard.dealloc_pd(self.id));
                }
            }
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
