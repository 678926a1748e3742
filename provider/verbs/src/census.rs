//! What a program may ask of its card's counters (stardv_query_counters(3)): the page's cells, and the queue pairs of one context.
//!
//! Owns the counting of queue pairs by state. It must not know how the numbers reach a program.

use starverbs_core::{Counters, QpState};

use crate::context::Context;
use crate::error::Result;

/// Queue pairs of a context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// All of them
    pub qps: u64,
    /// In RTS
    pub rts: u64,
    /// In ERR
    pub err: u64,
}

impl Context {
    /// The counters of the card, which the contexts of the process share. Reading disturbs nobody.
    ///
    /// # Errors
    /// EIO in a forked child.
    pub fn counters(&self) -> Result<&Counters> {
        Ok(&self.card()?.stats)
    }

    /// Whether the card has room for few QP contexts, so that its `qpc_` counters count.
    ///
    /// # Errors
    /// EIO in a forked child.
    pub fn has_few_contexts(&self) -> Result<bool> {
        Ok(self.card()?.settings.qpc_cache.is_some())
    }

    /// Counts the queue pairs of this context; holds the card for as long as that takes.
    ///
    /// # Errors
    /// EIO in a forked child.
    pub fn census(&self) -> Result<Census> {
        Ok(self.card()?.with(|shard, _| {
            let mut census = Census::default();
            for qpn in shard.qps_told(self.events()) {
                let state = shard.query_qp(qpn).map(|attr| attr.state);
                census.qps += 1;
                census.rts += u64::from(state == Ok(QpState::Rts));
                census.err += u64::from(state == Ok(QpState::Err));
            }
            census
        }))
    }
}
