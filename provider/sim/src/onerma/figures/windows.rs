//! Figure 16: what solicitation and NACKs are worth while nothing controls congestion.

use starverbs_onerma::{CardConfig, Completion, OneRmaOp, Status};

use super::Figure;
use crate::onerma::client::{Process, RemoteRegion, served_region};
use crate::onerma::{OneRmaNet, StepReport, Wire};

const WARM: u64 = 200_000;
const TIME: u64 = 2_000_000;
/// Nanoseconds from one command to the next: 100 Gb/s in 4 KB.
const PERIOD: f64 = 4096.0 * 8.0 / 100.0;

/// What became of commands at a fixed rate.
#[derive(Clone, Copy, Default)]
struct Outcome {
    good: u64,
    shed: u64,
    late: u64,
    nacked: u64,
    /// Sum of the total delays of what was good, ns
    delay: u64,
}

impl Outcome {
    fn count(&mut self, end: &Completion) {
        match end.status {
            Status::Ok => {
                self.good += 1;
                self.delay += u64::from(end.total_delay);
            }
            Status::DispatchTimeout => self.shed += 1,
            Status::Timeout => self.late += 1,
            Status::Nack => self.nacked += 1,
            other => panic!("no command ends so: {other:?}"),
        }
    }

    fn gbits(&self) -> f64 {
        self.good as f64 * 4096.0 * 8.0 / TIME as f64
    }

    fn percent(&self, of: u64) -> f64 {
        100.0 * of as f64 / (self.good + self.shed + self.late + self.nacked).max(1) as f64
    }
}

/// So many clients READ 4 KB from one server, each at 100 Gb/s whatever becomes of it.
fn greedy(clients: u16, config: CardConfig, wire: Wire) -> Outcome {
    let mut net = OneRmaNet::new(clients + 1, config, wire, 16);
    let server = usize::from(clients);
    let target = served_region(&mut net, server, 4096);
    let mut processes: Vec<Process> =
        (0..server).map(|host| Process::new(&mut net, host, 7, config.slots)).collect();
    let mut issued = vec![0_u64; server];
    for host in 0..server {
        /* clients are not in step */
        net.wake_at((PERIOD * host as f64 / f64::from(clients)) as u64, host as u64);
    }
    let mut outcome = Outcome::default();
    while net.now() < WARM + TIME {
        match net.step().expect("there is always something to do") {
            StepReport::Woke(host) => {
                let host = host as usize;
                processes[host].issue(
                    &mut net,
                    OneRmaOp::Read,
                    RemoteRegion { host: server, region: &target },
                    4096,
                );
                issued[host] += 1;
                let phase = PERIOD * host as f64 / f64::from(clients);
                net.wake_at((phase + PERIOD * issued[host] as f64) as u64, host as u64);
            }
            StepReport::Completed(host) if host < server => {
                while let Some(end) = processes[host].poll(&net) {
                    if net.now() >= WARM {
                        outcome.count(&end);
                    }
                }
            }
            _ => {}
        }
    }
    outcome
}

fn of_window(kilobytes: u32) -> CardConfig {
    CardConfig { window: kilobytes << 10, slots: 512, inbound: 60_000, ..CardConfig::default() }
}

fn with_jitter(tenths: u32) -> Wire {
    Wire { jitter: u64::from(tenths) * 100, ..Wire::paper() }
}

/// Tenths of a microsecond that the request and the answer are each delayed by at most.
const JITTER: &[u32] = &[1, 5, 10, 20, 30, 40, 60, 80, 100, 150];

pub(super) const GOODPUT: Figure = Figure {
    name: "1rma-16a",
    title: "1RMA, figure 16(a): goodput by jitter and window, one client at 100 Gb/s",
    x: "jitter of each way, at most, tenths of a us",
    y: "Gb/s",
    note: "4 KB READs at a fixed rate of 100 Gb/s, no congestion control, nothing tried again; RTT 5 \
           us, dispatch timeout 2 and timeout 4 round trips. Each packet is late by chance, by anything \
           up to the axis' value; the paper does not say how its jitter is distributed. No more than 97 \
           Gb/s fit the link with headers.",
    values: JITTER,
    series: &["48 KB", "64 KB", "96 KB"],
    run: |figure| {
        let line = |window| {
            let goodput = |jitter: &u32| greedy(1, of_window(window), with_jitter(*jitter)).gbits();
            figure.values.iter().map(goodput).collect()
        };
        [48, 64, 96].map(line).into()
    },
};

pub(super) const SHED: Figure = Figure {
    name: "1rma-16b",
    title: "1RMA, figure 16(b): what is shed by jitter, a window of 64 KB",
    x: "jitter of each way, at most, tenths of a us",
    y: "% of commands",
    note: "The runs of 16(a).",
    values: JITTER,
    series: &["DISPATCH_TIMEOUT", "TIMEOUT"],
    run: |figure| {
        let mut lines = vec![Vec::new(); 2];
        for jitter in figure.values {
            let outcome = greedy(1, of_window(64), with_jitter(*jitter));
            lines[0].push(outcome.percent(outcome.shed));
            lines[1].push(outcome.percent(outcome.late));
        }
        lines
    },
};

/// Thresholds, KB.
const THRESHOLDS: &[u32] = &[16, 32, 48, 62, 80, 100, 125, 150, 175, 200, 250, 400, 1000, 100_000];

fn two_clients(window: u32, threshold: u32) -> Outcome {
    greedy(2, CardConfig { nack_threshold: threshold * 1000, ..of_window(window) }, Wire::paper())
}

pub(super) const NACKS: Figure = Figure {
    name: "1rma-16cd",
    title: "1RMA, figure 16(c) and (d): goodput by NACK threshold, two clients at twice the server's link",
    x: "threshold, KB",
    y: "Gb/s, both clients",
    note: "Two clients, each at 100 Gb/s whatever becomes of it. 100,000 KB is as good as none. The \
           paper does not give the window of this figure: with 64 KB each the two windows bound the \
           server's queue to 6 us, and nothing collapses without NACKs; with 256 KB each answers come \
           after their timeout.",
    values: THRESHOLDS,
    series: &["windows of 64 KB", "windows of 256 KB"],
    run: |figure| {
        let line =
            |window| figure.values.iter().map(|threshold| two_clients(window, *threshold).gbits()).collect();
        vec![line(64), line(256)]
    },
};

pub(super) const NACK_LATENCY: Figure = Figure {
    name: "1rma-16d",
    title: "1RMA, figure 16(d): what NACK thresholds cost, two clients with windows of 256 KB",
    x: "threshold, KB",
    y: "mean delay of READs, us; NACKs, tenths of a percent",
    note: "The runs of 16(c) and (d). A READ that is refused is not tried again here, so that what the \
           paper counts as higher latency shows as refusals.",
    values: THRESHOLDS,
    series: &["delay of what succeeds", "refused"],
    run: |figure| {
        let mut lines = vec![Vec::new(); 2];
        for threshold in figure.values {
            let outcome = two_clients(256, *threshold);
            lines[0].push(outcome.delay as f64 / outcome.good.max(1) as f64 / 1e3);
            lines[1].push(outcome.percent(outcome.nacked) * 10.0);
        }
        lines
    },
};
