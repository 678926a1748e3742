//! Scale: memory of an idle RC QP, time to create and connect many, CPU time of an idle open device.
//!
//! Owns these measurements and their children, which are this program once more with the card's library.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::case::Setup;
use crate::child;
use crate::error::{BenchError, Result};
use crate::perftest;
use crate::round::{median, progress};
use crate::verbs::Device;

/// QPs that are created and connected, half of them to the other half.
const QPS: usize = 10_000;
/// Depths of both queues: two, so that what grows with the rings can be told from what does not.
const DEPTHS: [u32; 2] = [16, 64];

/// What the scale measurements gave; a missing figure has its reason in `problems`.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Scale {
    /// QPs that were created and connected.
    pub(crate) qps: usize,
    /// Seconds to create and connect them, median of the runs.
    pub(crate) connect_seconds: Option<f64>,
    /// Seconds to destroy them.
    pub(crate) destroy_seconds: Option<f64>,
    /// Bytes of memory per connected QP at each depth: (depth, bytes).
    pub(crate) bytes_at_depth: Vec<(u32, f64)>,
    /// Bytes per QP that do not grow with the depth of its rings.
    pub(crate) bytes_beside_rings: Option<f64>,
    /// CPU time of a process that opened the device, connected two QPs and slept: milliseconds per second.
    pub(crate) idle_ms_per_second: Option<f64>,
    /// Context switches of that process per second.
    pub(crate) idle_switches_per_second: Option<f64>,
    /// What went wrong.
    pub(crate) problems: Vec<String>,
}

/// What a child is to do.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Child {
    /// QPs to connect.
    #[arg(long, default_value_t = 0)]
    pub(crate) qps: usize,
    /// Depth of their queues.
    #[arg(long, default_value_t = 16)]
    pub(crate) depth: u32,
    /// Seconds to sleep.
    #[arg(long, default_value_t = 0)]
    pub(crate) seconds: u64,
}

/// Runs all measurements, `runs` times where time is measured.
pub(crate) fn run(setup: &Setup, runs: usize, idle_seconds: u64) -> Scale {
    let mut scale = Scale { qps: QPS, ..Scale::default() };
    if let Err(error) = scale.connect(setup, runs) {
        scale.problems.push(format!("{QPS} QPs: {error}"));
    }
    if let Err(error) = scale.idle(setup, idle_seconds) {
        scale.problems.push(format!("idle device: {error}"));
    }
    scale
}

impl Scale {
    fn connect(&mut self, setup: &Setup, runs: usize) -> Result<()> {
        let (mut connect, mut destroy) = (Vec::new(), Vec::new());
        for depth in DEPTHS {
            let mut bytes = Vec::new();
            for run in 1..=runs {
                progress(&format!("scale: {QPS} QPs of depth {depth}, run {run}/{runs}"));
                let args = ["--qps", &QPS.to_string(), "--depth", &depth.to_string()];
                let [seconds, per_qp, destroyed] = start(setup, "scale-connect", &args)?;
                bytes.push(per_qp);
                if depth == DEPTHS[0] {
                    connect.push(seconds);
                    destroy.push(destroyed);
                }
            }
            self.bytes_at_depth.extend(median(&bytes).map(|bytes| (depth, bytes)));
        }
        self.connect_seconds = median(&connect);
        self.destroy_seconds = median(&destroy);
        self.bytes_beside_rings = beside_rings(&self.bytes_at_depth);
        Ok(())
    }

    fn idle(&mut self, setup: &Setup, seconds: u64) -> Result<()> {
        progress(&format!("scale: an idle open device for {seconds} s"));
        let [millis, switches, _] = start(setup, "scale-idle", &["--seconds", &seconds.to_string()])?;
        self.idle_ms_per_second = Some(millis / seconds as f64);
        self.idle_switches_per_second = Some(switches / seconds as f64);
        Ok(())
    }
}

/// Extends the line through both depths to a depth of nothing.
fn beside_rings(at_depth: &[(u32, f64)]) -> Option<f64> {
    let [(shallow, few), (deep, many)] = at_depth else { return None };
    let slope = (many - few) / f64::from(deep.checked_sub(*shallow)?);
    Some(few - slope.max(0.0) * f64::from(*shallow))
}

/// Starts this program as a child on the card; gives the three numbers it prints.
fn start(setup: &Setup, command: &str, args: &[&str]) -> Result<[f64; 3]> {
    let lib = perftest::library_dir(&setup.dist)?;
    let exe = std::env::current_exe().map_err(|e| BenchError::from_io("current_exe", &e))?;
    let mut child = Command::new(exe);
    perftest::on_card(&mut child, &lib);
    child.arg(command).args(args);
    let output = child::run_one(child, setup.limit)?;
    let numbers: Vec<f64> = output.stdout.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    numbers
        .try_into()
        .map_err(|_| BenchError::Parse { what: command.to_owned(), tail: child::tail_of(&output.stdout) })
}

/// The child that connects: prints seconds, bytes per QP, seconds to destroy.
pub(crate) fn connect_child(child: &Child) -> Result<()> {
    let device = Device::open()?;
    // The first pair pays for what every process pays once: buffers, sockets, threads.
    let first = (device.create_qp(child.depth)?, device.create_qp(child.depth)?);
    device.connect(&first.0, &first.1)?;
    device.connect(&first.1, &first.0)?;
    let mut qps = Vec::with_capacity(child.qps);
    let before = memory()?;
    let start = Instant::now();
    for _ in 0..child.qps {
        qps.push(device.create_qp(child.depth)?);
    }
    for pair in qps.chunks_exact(2) {
        device.connect(&pair[0], &pair[1])?;
        device.connect(&pair[1], &pair[0])?;
    }
    let seconds = start.elapsed().as_secs_f64();
    let bytes = memory()?.saturating_sub(before) as f64 / child.qps.max(1) as f64;
    let start = Instant::now();
    for qp in qps {
        device.destroy(qp)?;
    }
    println!("{seconds} {bytes} {}", start.elapsed().as_secs_f64());
    Ok(())
}

/// The child that idles: prints CPU milliseconds, context switches, and the seconds slept.
pub(crate) fn idle_child(child: &Child) -> Result<()> {
    let device = Device::open()?;
    let pair = (device.create_qp(child.depth)?, device.create_qp(child.depth)?);
    device.connect(&pair.0, &pair.1)?;
    device.connect(&pair.1, &pair.0)?;
    thread::sleep(Duration::from_millis(200));
    let before = usage()?;
    thread::sleep(Duration::from_secs(child.seconds));
    let after = usage()?;
    // The measuring thread itself wakes once.
    println!("{} {} {}", (after.0 - before.0) * 1e3, (after.1 - before.1).max(1) - 1, child.seconds);
    Ok(())
}

/// CPU seconds and context switches of this process, all its threads together.
fn usage() -> Result<(f64, i64)> {
    // SAFETY: all-zero is a valid rusage, and the call fills it.
    let (rc, usage) = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        (libc::getrusage(libc::RUSAGE_SELF, &raw mut usage), usage)
    };
    if rc != 0 {
        return Err(BenchError::os("getrusage"));
    }
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    Ok((seconds(usage.ru_utime) + seconds(usage.ru_stime), usage.ru_nvcsw + usage.ru_nivcsw))
}

/// Memory of this process in bytes, shared pages by their share (Pss, proc(5)).
fn memory() -> Result<u64> {
    let text =
        fs::read_to_string("/proc/self/smaps_rollup").map_err(|e| BenchError::from_io("smaps_rollup", &e))?;
    text.lines()
        .find_map(|line| line.strip_prefix("Pss:")?.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok())
        .map(|kib| kib * 1024)
        .ok_or(BenchError::Os { what: "smaps_rollup", message: "no Pss".to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_grow_with_the_rings_is_told_apart() {
        assert_eq!(beside_rings(&[(16, 2_600.0), (64, 8_600.0)]), Some(600.0));
        // Rings that no page backs yet, or noise, never count as less than nothing.
        assert_eq!(beside_rings(&[(16, 900.0), (64, 880.0)]), Some(900.0));
        assert_eq!(beside_rings(&[(16, 900.0)]), None);
    }

    #[test]
    fn memory_is_seen_to_grow() {
        let before = memory().unwrap();
        let block = vec![1u8; 8 << 20];
        let after = memory().unwrap();
        assert!(after >= before + (block.len() as u64) / 2, "{before} {after}");
    }
}
