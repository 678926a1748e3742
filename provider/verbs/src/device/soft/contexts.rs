//! A QPC-limited card (`STARVERBS_QPC_CACHE`): work that misses its QP context waits in real time.
//!
//! The card decides which work that is (`core::nic`, its `contexts`). Nobody sleeps for a context: the card
//! is run again by the program's next poll, by its thread, and here by a caller that would otherwise sleep
//! longer than the fetch takes.

use std::hint;
use std::time::Duration;

use starverbs_core::qpc::Policy;
use starverbs_core::{ContextCache, Nanos};
use starverbs_settings::{QpcPolicy, QpcSpec};

use super::back_pressure::Who;
use super::{Shard, Soft};
use crate::clock;

/// A wait too short to sleep through.
const SHORT: Nanos = 20_000;
/// Longest stay of a caller that spins through such waits, one after the other.
const STAY: Nanos = 500_000;

/// The cache that these settings ask for.
pub(super) fn context_cache(spec: QpcSpec) -> ContextCache {
    let policy = match spec.policy {
        QpcPolicy::Fcfs => Policy::Fcfs,
        QpcPolicy::NonBlocking => Policy::NonBlocking,
        QpcPolicy::LatencyHiding => Policy::LatencyHiding,
    };
    let ns = |time: Duration| time.as_nanos() as Nanos;
    ContextCache { entries: spec.entries, policy, miss: ns(spec.miss), fetch: ns(spec.fetch) }
}

impl Soft {
    /// Runs the card while it waits for contexts that arrive within [`SHORT`].
    #[cold]
    pub(super) fn await_contexts(&self) {
        let until = clock::now() + STAY;
        while let Some(mut guard) = self.try_lock() {
            let shard: &mut Shard = &mut guard;
            let now = clock::now();
            let soon = shard.nic.context_comes_before(now + SHORT);
            let out = shard.intake.waits_for_receives(&mut shard.nic, now, Who::Thread);
            if now > until || !(soon || shard.intake.is_held_back() && !out) {
                break;
            }
            if !out {
                shard.take_frames(now, || false);
            }
            shard.transmit(now, true);
            self.finish(shard, now);
            drop(guard);
            self.serve_doorbells();
            hint::spin_loop();
        }
    }
}
