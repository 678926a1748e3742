//! Contexts that come and go: killed at any moment, all that there may be, in use for long.

use std::path::Path;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};
use starverbs_core::rng::SplitMix64;
use starverbs_queues::board::*;

use super::pair::{ALL, Pair, region};
use super::raw::{Device, Map, Tested};

/// Microseconds after which the latest are killed.
const LATEST: u64 = 40_000;

/// Starts `count` processes that use the device, and kills each at a moment of its own.
pub(crate) fn run(path: &Path, count: u32, seed: u64) -> Tested<String> {
    let mut random = SplitMix64::new(seed);
    let steps = Map::anonymous(4096, true).map_err(|e| e.to_string())?;
    let mut farthest = [0_u32; STEPS as usize + 1];
    for _ in 0..count {
        steps.store(0, 0);
        let moment = random.below(LATEST);
        let child = child(|| use_up(path, &steps))?;
        std::thread::sleep(Duration::from_micros(moment));
        let _ = kill(child, Signal::SIGKILL);
        let _ = waitpid(child, None);
        farthest[steps.load(0).min(STEPS) as usize] += 1;
    }
    Ok(format!("{count} opens; killed after step 0 to {STEPS}: {farthest:?}"))
}

/// A child that does this until it is killed.
fn child(work: impl FnOnce()) -> Tested<Pid> {
    // SAFETY: this process has one thread.
    match unsafe { fork() }.map_err(|e| e.to_string())? {
        ForkResult::Child => {
            work();
            std::process::exit(0)
        }
        ForkResult::Parent { child } => Ok(child),
    }
}

/// Steps of what a killed process does.
const STEPS: u64 = 5;

/// Opens, makes one of each, sends, makes and ends regions until it is killed.
fn use_up(path: &Path, steps: &Map) {
    let Ok(device) = Device::open(path) else { return };
    steps.store(0, 1);
    drop(device);
    let Ok(mut pair) = Pair::new(path) else { return };
    steps.store(0, 2);
    let mut number = 0;
    while pair.exchange(number).is_ok() && churn(&pair).is_ok() {
        number += 1;
        steps.store(0, (2 + number).min(STEPS));
    }
}

/// Makes a region and a piece of queue memory, and ends both.
fn churn(pair: &Pair) -> Tested {
    const BYTES: usize = 0x8_0000;
    let memory = Map::anonymous(BYTES, false).map_err(|e| e.to_string())?;
    let key = pair.device.make(OP_REG_MR, &region(pair.pd, memory.address(), BYTES as u64, ALL))?.number;
    let piece = pair.device.queue_memory(8192).map_err(|e| e.to_string())?;
    let mapped = pair.device.map(piece, 8192).map_err(|e| e.to_string())?;
    mapped.store(0, 1);
    pair.device.free_queue_memory(piece).map_err(|e| e.to_string())?;
    match pair.device.object(OP_DEREG_MR, key)? {
        0 => Ok(()),
        errno => Err(format!("DEREG_MR: errno {errno}")),
    }
}

/// Opens as many contexts as there are.
pub(crate) fn fill(path: &Path) -> Tested<String> {
    let mut open = Vec::new();
    loop {
        match Device::open(path) {
            Ok(device) => open.push(device),
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => break,
            Err(error) => return Err(format!("{} are open, then: {error}", open.len())),
        }
    }
    Ok(open.len().to_string())
}

/// Uses the device until the board has gone, which is an error as of any other call; or until it is killed.
pub(crate) fn load(path: &Path) -> Tested<String> {
    let mut pair = Pair::new(path)?;
    let mut number = 0;
    loop {
        pair.exchange(number)?;
        if number % 16 == 0 {
            churn(&pair)?;
        }
        number += 1;
    }
}
