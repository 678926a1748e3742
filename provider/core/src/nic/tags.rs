//! SRQs that match tags: made, and their lists changed (ibv_post_srq_ops(3)). What is asked for is done at
//! once.

use alloc::boxed::Box;

use super::srq_lease::Revocable;
use super::{Nic, Srq};
use crate::env::{CompletionQueue, Env};
use crate::error::NicError;
use crate::tags::{TagList, TaggedBuffer};
use crate::types::{Cqe, PdId, SrqId, WcFlags, WcOpcode, WcStatus};

/// What an SRQ has beside its queue if it matches tags.
pub(crate) struct TagMatching<Cq> {
    /// Where everything completes
    pub(crate) cq: Cq,
    pub(crate) list: TagList,
}

/// A change of the list: `struct ibv_ops_wr`.
#[derive(Clone, Copy, Debug)]
pub struct TagOp {
    /// The program's cookie
    pub wr_id: u64,
    /// What to do
    pub change: TagChange,
    /// How many unexpected messages the program has seen, if it gives that
    pub seen: Option<u32>,
    /// Make a completion even if nothing went wrong
    pub signaled: bool,
}

/// What a [`TagOp`] does. Values of its completions as of `enum ibv_ops_wr_opcode`.
#[derive(Clone, Copy, Debug)]
pub enum TagChange {
    /// IBV_WR_TAG_ADD: a buffer for messages of one tag
    Add(TaggedBuffer),
    /// IBV_WR_TAG_DEL: by handle
    Remove(u32),
    /// IBV_WR_TAG_SYNC: the program has seen the unexpected messages so far
    Sync,
}

impl<E: Env> Nic<E> {
    /// A new SRQ that matches up to `max_tags` tags; all receives of its QPs complete in `cq`.
    pub fn create_tag_srq(
        &mut self,
        pd: PdId,
        rq: E::Rq,
        cq: E::Cq,
        max_tags: u32,
        cookie: u64,
    ) -> Result<SrqId, NicError> {
        let tags = Some(Box::new(TagMatching { cq, list: TagList::new(max_tags)? }));
        self.insert_srq(Srq { rq, pd, limit: 0, users: 0, cookie, xrc: None, revocable: Revocable::No, tags })
    }

    /// Changes a list; gives the handle of what was added. `Exhausted`: the list is full. `NotFound`: the SRQ
    /// matches no tags. The completion shows a buffer that is gone already.
    pub fn change_tags(&mut self, srq: SrqId, op: &TagOp) -> Result<u32, NicError> {
        let srq = self.shared.srqs.get_mut(srq.0 as usize).ok_or(NicError::NotFound)?;
        let TagMatching { cq, list } = srq.tags.as_deref_mut().ok_or(NicError::NotFound)?;
        if let Some(seen) = op.seen {
            list.report(seen);
        }
        let (handle, opcode, done) = match op.change {
            TagChange::Add(buffer) => (list.add(buffer).ok_or(NicError::Exhausted)?, WcOpcode::TmAdd, true),
            TagChange::Remove(handle) => (handle, WcOpcode::TmDel, list.remove(handle)),
            TagChange::Sync => (0, WcOpcode::TmSync, true),
        };
        if op.signaled || !done {
            let status = if done { WcStatus::Success } else { WcStatus::TmErr };
            let mut flags = WcFlags::empty();
            flags.set(WcFlags::TM_SYNC_REQ, !list.in_step());
            self.shared.stats.completions.inc();
            let cqe = Cqe { wr_id: op.wr_id, opcode, status, flags, ..Cqe::default() };
            if cq.push(&cqe, !done).is_err() {
                self.shared.stats.cq_overrun.inc();
            }
        }
        Ok(handle)
    }
}
