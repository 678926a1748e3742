//! What the registers say of the board's QP contexts, of which it has room on chip for some
//! (`STARVERBS_QPC_CACHE`), as a card of csRNA's has. The core keeps them (`starverbs_core::qpc`).

use starverbs_core::ContextCache;
use starverbs_core::qpc::Policy;
use starverbs_queues::board::{
    COUNTER_QPC_EVICTED, COUNTER_QPC_HITS, COUNTER_QPC_MISSES, COUNTER_QPC_PREFETCHED, COUNTER_QPC_WAITED,
    QPC_IN_BOARD, QPC_POLICY_FCFS, QPC_POLICY_LATENCY_HIDING, QPC_POLICY_NON_BLOCKING, REG_QPC_ENTRIES,
    REG_QPC_PLACEMENT, REG_QPC_POLICY,
};

use crate::broken;
use crate::stats::Stats;

/// The cache of all functions, and what it counts.
#[derive(Clone)]
pub(crate) struct QpcRegisters {
    cache: Option<ContextCache>,
    stats: Stats,
}

impl QpcRegisters {
    /// `cache`: `None`: all contexts have room on chip.
    pub(crate) fn new(cache: Option<ContextCache>, stats: Stats) -> QpcRegisters {
        QpcRegisters { cache, stats }
    }

    /// The register at `at`, if it is one of these.
    pub(crate) fn register(&self, at: u32) -> Option<u32> {
        match at {
            REG_QPC_ENTRIES => Some(self.cache.map_or(0, |cache| cache.entries)),
            REG_QPC_POLICY if broken::rule(58) => Some(u32::MAX),
            REG_QPC_POLICY => Some(match self.cache.map(|cache| cache.policy) {
                Some(Policy::Fcfs) | None => QPC_POLICY_FCFS,
                Some(Policy::NonBlocking) => QPC_POLICY_NON_BLOCKING,
                Some(Policy::LatencyHiding) => QPC_POLICY_LATENCY_HIDING,
            }),
            REG_QPC_PLACEMENT => Some(QPC_IN_BOARD),
            _ => None,
        }
    }

    /// The counter `which`, if it is one of these.
    pub(crate) fn counter(&self, which: u32) -> Option<u64> {
        let counter = match which {
            COUNTER_QPC_HITS => &self.stats.qpc_hits,
            COUNTER_QPC_MISSES => &self.stats.qpc_misses,
            COUNTER_QPC_WAITED => &self.stats.qpc_waited,
            COUNTER_QPC_PREFETCHED => &self.stats.qpc_prefetched,
            COUNTER_QPC_EVICTED => &self.stats.qpc_evicted,
            _ => return None,
        };
        Some(counter.get())
    }
}
