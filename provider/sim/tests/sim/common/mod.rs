//! What the simulated tests share: seeds, fault mixes, buffers.

pub(crate) mod drive;
pub(crate) mod pair;
pub(crate) mod program;
pub(crate) mod roles;
pub(crate) mod rpc;
pub(crate) mod shared;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use starverbs_core::{Access, Sge};
use starverbs_sim::{Faults, Rng, SimHost};
pub(crate) use starverbs_sim::{any_bytes, get, put};

/// All rights.
pub(crate) fn all_rights() -> Access {
    Access::LOCAL_WRITE
        | Access::REMOTE_WRITE
        | Access::REMOTE_READ
        | Access::REMOTE_ATOMIC
        | Access::FLUSH_GLOBAL
}

/// Runs `test` with `runs` seeds from SIM_BASE on (SIM_RUNS replaces the number), or with
/// SIM_SEED alone. A failure names its seed.
pub(crate) fn for_seeds(name: &str, runs: u64, test: fn(u64)) {
    let var = |k| std::env::var(k).ok().and_then(|v| v.parse::<u64>().ok());
    if let Some(seed) = var("SIM_SEED") {
        return test(seed);
    }
    let runs = var("SIM_RUNS").unwrap_or(runs);
    let base = var("SIM_BASE").unwrap_or(0);
    for seed in base..base.saturating_add(runs) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| test(seed))) {
            eprintln!("{name}: seed {seed} failed; again with SIM_SEED={seed}");
            resume_unwind(panic);
        }
    }
}

/// A wire as a seed has it: a third of them clean, the others with one trouble or all.
pub(crate) fn any_faults(rng: &mut Rng) -> Faults {
    let mut f = Faults { jitter: rng.pick(&[0, 500, 20_000]), ..Faults::default() };
    let some = |rng: &mut Rng| rng.pick(&[0.001, 0.01, 0.05, 0.2]);
    match rng.below(6) {
        0 | 1 => {}
        2 => f.loss = some(rng),
        3 => f.reorder = some(rng),
        4 => f.duplicate = some(rng),
        _ => {
            f.loss = some(rng);
            f.reorder = some(rng);
            f.duplicate = some(rng);
            f.corrupt = some(rng) / 2.0;
        }
    }
    f
}

/// Whether the wire delivers each frame once and in order.
pub(crate) fn is_clean(f: &Faults) -> bool {
    f.loss + f.reorder + f.duplicate + f.corrupt == 0.0
}

/// A message's size: now and then one of many packets.
pub(crate) fn any_size(rng: &mut Rng, mtu: u32) -> u32 {
    if rng.chance(0.01) { 60_000 + rng.below(90_000) as u32 } else { starverbs_sim::any_size(rng, mtu) }
}

/// `len` bytes of registered memory in up to `pieces` pieces, some of them empty.
pub(crate) fn scattered(
    host: &mut SimHost,
    rng: &mut Rng,
    len: u32,
    pieces: u64,
    access: Access,
) -> Vec<Sge> {
    let n = rng.within(1, pieces);
    let mut left = len;
    let mut sges = Vec::new();
    for i in 0..n {
        let part = if i + 1 == n { left } else { rng.below(u64::from(left) + 1) as u32 };
        let (addr, lkey) = host.region(u64::from(part.max(1)), access);
        sges.push(Sge { addr, len: part, lkey });
        left -= part;
    }
    if len == 0 && rng.chance(0.5) {
        sges.clear();
    }
    sges
}
