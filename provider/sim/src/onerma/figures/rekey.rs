//! Figure 14: how long a client is without a region whose key changes.

use starverbs_onerma::{CardConfig, OneRmaOp, RegionKey, Status};

use super::Figure;
use crate::onerma::client::{Process, RemoteRegion, served_region};
use crate::onerma::{OneRmaNet, StepReport, Wire};

/// Between two probes, ns.
const PROBE: u64 = 200;
/// When the key changes, and when the run ends.
const CHANGE: u64 = 50_000;
const END: u64 = 200_000;
const NEXT: RegionKey = RegionKey(*b"the next key ...");

/// Who changes the key.
#[derive(Clone, Copy, PartialEq)]
enum By {
    /// The region's owner, at its card
    Owner,
    /// A process at a third host, by REKEY
    Operation,
}

/// What wakes.
const PROBES: u64 = 0;
const CHANGES: u64 = 1;
const TOLD: u64 = 2;

/// The longest time between two probes that end with OK, us; the client has the next key so many microseconds
/// after its first failure.
fn outage(by: By, told_after: u32) -> f64 {
    let mut net = OneRmaNet::new(3, CardConfig::default(), Wire::paper(), 14);
    let region = served_region(&mut net, 1, 4096);
    let mut client = Process::new(&mut net, 0, 7, 64);
    let mut third = Process::new(&mut net, 2, 8, 1);
    third.fill(&mut net, &NEXT.0);
    let (mut failed, mut last, mut longest) = (false, 0, 0);
    net.wake_at(0, PROBES);
    net.wake_at(CHANGE, CHANGES);
    while net.now() < END {
        match net.step().expect("there is a probe to come") {
            StepReport::Woke(PROBES) => {
                client.issue(&mut net, OneRmaOp::Read, RemoteRegion { host: 1, region: &region }, 64);
                net.wake_at(net.now() + PROBE, PROBES);
            }
            StepReport::Woke(TOLD) => client.key = NEXT,
            StepReport::Woke(_) if by == By::Owner => {
                net.hosts[1].card.rekey_region(region.id, NEXT).expect("the region is open");
            }
            StepReport::Woke(_) => {
                _ = third.issue(&mut net, OneRmaOp::Rekey, RemoteRegion { host: 1, region: &region }, 16)
            }
            StepReport::Completed(0) => {
                while let Some(end) = client.poll(&net) {
                    if end.status == Status::Ok {
                        longest = longest.max(net.now() - last);
                        last = net.now();
                    } else if !failed {
                        failed = true;
                        net.wake_at(net.now() + u64::from(told_after) * 1000, TOLD);
                    }
                }
            }
            _ => {}
        }
    }
    longest as f64 / 1e3
}

pub(super) const OUTAGE: Figure = Figure {
    name: "1rma-14",
    title: "1RMA, figure 14: how long a client that probes a region is without it when its key changes",
    x: "from the first failure until the client has the next key, us",
    y: "us between two probes that succeed",
    note: "READs of 64 B, one each 200 ns. 0: the client was given the next key before. Changing a key takes \
           the card no time here; the 27 us of the paper are its driver's. RC is a model of what no \
           connected queue pair can do without: the failure, REQ and REP of a new connection, and the first \
           READ on it, a round trip each; hosts take no time.",
    values: &[0, 5, 10, 20, 40],
    series: &["by its owner", "by REKEY from a third host", "RC, a new connection (model)"],
    run: |figure| {
        let line = |by| figure.values.iter().map(|told| outage(by, *told)).collect();
        let round_trip = outage(By::Owner, 0);
        let model = figure.values.iter().map(|told| 3.0 * round_trip + f64::from(*told)).collect();
        vec![line(By::Owner), line(By::Operation), model]
    },
};
