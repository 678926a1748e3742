//! A QPC-limited card (`STARVERBS_QPC_CACHE`): work that misses its QP context waits in real time.
//!
//! The card decides which work that is (`core::nic`, its `contexts`). Nobody sleeps for a context: the card
//! is run again by the program's next poll, by its thread, and here by a caller that would otherwise sleep
//! longer than the fetch takes.

use std::hint;

use starverbs_core::Nanos;

use super::back_pressure::Who;
use super::{Shard, Soft};
use crate::clock;

/// A wait too short to sleep through.
const SHORT: Nanos = 20_000;
/// Longest stay of a caller that spins through such waits, one after the other.
const STAY: Nanos = 500_000;

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
            shard.transmit(now);
            self.finish(shard, now);
            drop(guard);
            self.serve_doorbells();
            hint::spin_loop();
        }
    }
}
