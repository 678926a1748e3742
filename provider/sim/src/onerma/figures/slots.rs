//! Figure 11: what a process gets, by what it offers and by its slots.

use starverbs_onerma::{CardConfig, OneRmaOp, Status};

use super::Figure;
use crate::Rng;
use crate::onerma::client::{Process, RemoteRegion, served_region};
use crate::onerma::{OneRmaNet, StepReport, Wire};

/// Nanoseconds before anything is counted, and of what is.
const WARM: u64 = 100_000;
const TIME: u64 = 1_000_000;

pub(super) const OFFERED: Figure = Figure {
    name: "1rma-11a",
    title: "1RMA, figure 11(a): bandwidth by offered load, one client and one server",
    x: "offered, Gb/s",
    y: "Gb/s",
    note: "Commands of 4 KB, Poisson arrivals, 256 slots, a window of 93.75 KB (one and a half \
           bandwidth-delay products; the paper does not give it), no congestion control. What fails is \
           not offered again. A WRITE holds the window for two round trips, so that it cannot go beyond \
           93.75 KB in 9.7 us, 79 Gb/s.",
    values: &[10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 100, 110],
    series: &["READ", "WRITE"],
    run: |figure| {
        let line = |op| figure.values.iter().map(|offered| offered_load(op, f64::from(*offered))).collect();
        vec![line(OneRmaOp::Read), line(OneRmaOp::Write)]
    },
};

/// Gigabits a second that succeed of those that are offered.
fn offered_load(op: OneRmaOp, gbits: f64) -> f64 {
    let mut net = OneRmaNet::new(2, CardConfig::default(), Wire::paper(), 11);
    let target = served_region(&mut net, 1, 4096);
    let mut process = Process::new(&mut net, 0, 7, 256);
    let (mut rng, mut bytes) = (Rng::new(11), 0_u64);
    let mean = 4096.0 * 8.0 / gbits;
    let mut next = 0.0;
    net.wake_at(0, 0);
    while let Some(report) = net.step() {
        if net.now() >= WARM + TIME {
            break;
        }
        match report {
            StepReport::Woke(_) => {
                process.issue(&mut net, op, RemoteRegion { host: 1, region: &target }, 4096);
                next += rng.wait(mean);
                net.wake_at(next as u64, 0);
            }
            StepReport::Completed(_) => {
                while let Some(end) = process.poll(&net) {
                    let counts = end.status == Status::Ok && net.now() >= WARM;
                    bytes += if counts { 4096 } else { 0 };
                }
            }
            StepReport::Nothing => {}
        }
    }
    bytes as f64 * 8.0 / TIME as f64
}

pub(super) const SLOTS: Figure = Figure {
    name: "1rma-11b",
    title: "1RMA, figure 11(b): bandwidth by command slots, one client and one server",
    x: "slots",
    y: "Gb/s",
    note: "Each slot gets its next command of 4 KB when its last one has completed. A READ takes 5 us, \
           so that a slot is worth 6.55 Gb/s.",
    values: &[1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24],
    series: &["READ", "WRITE"],
    run: |figure| {
        let line = |op| figure.values.iter().map(|slots| closed_loop(op, *slots as u16)).collect();
        vec![line(OneRmaOp::Read), line(OneRmaOp::Write)]
    },
};

/// Gigabits a second with all slots in use.
fn closed_loop(op: OneRmaOp, slots: u16) -> f64 {
    let mut net = OneRmaNet::new(2, CardConfig::default(), Wire::paper(), 11);
    let target = served_region(&mut net, 1, 4096);
    let mut process = Process::new(&mut net, 0, 7, slots);
    while process.issue(&mut net, op, RemoteRegion { host: 1, region: &target }, 4096).is_some() {}
    let mut bytes = 0_u64;
    while net.now() < WARM + TIME {
        if net.step() == Some(StepReport::Completed(0)) {
            while let Some(end) = process.poll(&net) {
                bytes += if end.status == Status::Ok && net.now() >= WARM { 4096 } else { 0 };
            }
            while process.issue(&mut net, op, RemoteRegion { host: 1, region: &target }, 4096).is_some() {}
        }
    }
    bytes as f64 * 8.0 / TIME as f64
}
