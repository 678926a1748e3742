//! Protection domains.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use starverbs_core::PdId;

use crate::context::Context;
use crate::error::{Result, VerbsError};

/// A protection domain. Clones are the same domain.
#[derive(Clone)]
pub struct Pd(Arc<PdInner>);

struct PdInner {
    ctx: Context,
    id: PdId,
    gone: AtomicBool,
}

impl Pd {
    /// `ibv_alloc_pd`
    ///
    /// # Errors
    /// ENOMEM: too many; EIO in a forked child.
    pub fn alloc(ctx: &Context) -> Result<Pd> {
        let id = ctx.card()?.with(|shard, _| shard.alloc_pd(ctx.events()))?;
        Ok(Pd(Arc::new(PdInner { ctx: ctx.clone(), id, gone: AtomicBool::new(false) })))
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
            && let Some(card) = self.ctx.card_if_ours()
        {
            /* busy: what lives in it was leaked, and so is it */
            let _ = card.with(|shard, _| shard.dealloc_pd(self.id));
        }
    }
}
