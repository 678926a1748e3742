//! Protection domains.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use starverbs_core::{PdId, Sge};

use crate::context::Context;
use crate::error::{Result, VerbsError};
use crate::mr::{self, Advice};

/// A protection domain. Clones are the same domain.
#[derive(Clone)]
pub struct Pd(Arc<PdInner>);

struct PdInner {
    ctx: Context,
    id: PdId,
    /// Made by another handle, which ends it
    imported: bool,
    gone: AtomicBool,
}

impl Pd {
    /// `ibv_alloc_pd`
    ///
    /// # Errors
    /// ENOMEM: too many; EIO in a forked child.
    pub fn alloc(ctx: &Context) -> Result<Pd> {
        let id = ctx.card()?.with(|shard, _| shard.alloc_pd(ctx.events()))?;
        Ok(Pd::new(ctx, id, false))
    }

    /// `ibv_import_pd`: a domain of this context by its number. Dropping it (`ibv_unimport_pd`) leaves the domain.
    ///
    /// # Errors
    /// EINVAL: no such domain in this context; EIO in a forked child.
    pub fn import(ctx: &Context, id: PdId) -> Result<Pd> {
        if ctx.card()?.with(|shard, _| shard.has_pd(id, ctx.events())) {
            return Ok(Pd::new(ctx, id, true));
        }
        Err(VerbsError::Invalid("handle of a protection domain"))
    }

    fn new(ctx: &Context, id: PdId, imported: bool) -> Pd {
        Pd(Arc::new(PdInner { ctx: ctx.clone(), id, imported, gone: AtomicBool::new(false) }))
    }

    /// `ibv_dealloc_pd`
    ///
    /// # Errors
    /// EBUSY while MRs, memory windows, QPs, SRQs or AHs live in it.
    pub fn dealloc(&self) -> Result<()> {
        let card = self.0.ctx.card()?;
        if self.0.gone.load(Ordering::Acquire) {
            return Err(VerbsError::Invalid("protection domain is gone"));
        }
        card.with(|shard, _| shard.dealloc_pd(self.0.id))?;
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

    /// Its handle on the card.
    pub fn id(&self) -> PdId {
        self.0.id
    }

    /// The context it was made in.
    pub fn context(&self) -> &Context {
        &self.0.ctx
    }
}

impl Drop for PdInner {
    fn drop(&mut self) {
        if !*self.gone.get_mut()
            && !self.imported
            && let Some(card) = self.ctx.card_if_ours()
        {
            /* busy: what lives in it was leaked, and so is it */
            let _ = card.with(|shard, _| shard.dealloc_pd(self.id));
        }
    }
}
