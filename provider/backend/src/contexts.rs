//! What the settings say of a card with room for few QP contexts, in the core's words.

use std::time::Duration;

use starverbs_core::qpc::Policy;
use starverbs_core::{ContextCache, Nanos};
use starverbs_settings::{QpcPolicy, QpcSpec};

/// The cache that `STARVERBS_QPC_CACHE` asks for.
pub fn context_cache(spec: QpcSpec) -> ContextCache {
    let policy = match spec.policy {
        QpcPolicy::Fcfs => Policy::Fcfs,
        QpcPolicy::NonBlocking => Policy::NonBlocking,
        QpcPolicy::LatencyHiding => Policy::LatencyHiding,
    };
    let ns = |time: Duration| time.as_nanos() as Nanos;
    ContextCache { entries: spec.entries, policy, miss: ns(spec.miss), fetch: ns(spec.fetch) }
}
