//! Figure 15: how fast congestion control gets to the link's rate, and to a fair share of it.

use starverbs_onerma::congestion::CongestionSettings;
use starverbs_onerma::{CardConfig, OneRmaOp};

use super::Figure;
use crate::onerma::client::{Client, RemoteRegion, served_region};
use crate::onerma::{OneRmaNet, StepReport, Wire};

/// When the second transfer begins, ns.
const SECOND: u64 = 400_000;

/// What one client does with two servers.
struct Course {
    /// Gb/s of commands issued to each server, in each round trip of 5 us
    rates: [Vec<f64>; 2],
    /// The window of the first server at the end of each of them
    windows: Vec<f64>,
    /// Longest issue delay in each of them, us
    delays: Vec<f64>,
    /// Completions that were not OK
    failures: u64,
}

/// Nanoseconds of a step: a round trip.
const STEP: u64 = 5_000;

/// 4 MB READs from one server from 0 on, and from a second one from `second` on.
fn course(settings: CongestionSettings, second: u64, steps: usize) -> Course {
    let mut net = OneRmaNet::new(3, CardConfig::default(), Wire::paper(), 15);
    let targets = [1, 2].map(|host| served_region(&mut net, host, 4 << 20));
    let gids = [1, 2].map(|host: usize| net.hosts[host].gid);
    let mut client = Client::new(&mut net, 0, 7, 128, settings);
    let mut course =
        Course { rates: [Vec::new(), Vec::new()], windows: Vec::new(), delays: Vec::new(), failures: 0 };
    client.read(&mut net, RemoteRegion { host: 1, region: &targets[0] }, 4 << 20, 0);
    client.drive(&mut net, 0);
    net.wake_at(second, 1);
    let (mut before, mut longest) = ([0; 2], 0);
    while course.delays.len() < steps {
        let report = net.step().expect("there is always something to do");
        if net.now() >= STEP * (course.delays.len() as u64 + 1) {
            for (server, gid) in gids.iter().enumerate() {
                let issued = client.issued.get(gid).copied().unwrap_or(0);
                course.rates[server].push((issued - before[server]) as f64 * 8.0 / STEP as f64);
                before[server] = issued;
            }
            let executor = client.executor();
            let remote = executor.remote(&gids[0], OneRmaOp::Read);
            course.windows.push(remote.map_or(0.0, |remote| remote.limit(executor.local_window())));
            course.delays.push(f64::from(longest) / 1e3);
            longest = 0;
        }
        if report == StepReport::Woke(1) {
            client.read(&mut net, RemoteRegion { host: 2, region: &targets[1] }, 4 << 20, 1);
        }
        while let Some(finished) = client.poll(&net) {
            longest = longest.max(client.last.map_or(0, |end| end.issue_delay));
            if let Some(finished) = finished {
                let server = finished.token as usize;
                client.read(
                    &mut net,
                    RemoteRegion { host: server + 1, region: &targets[server] },
                    4 << 20,
                    finished.token,
                );
            }
        }
        client.drive(&mut net, 0);
    }
    course.failures = client.failures;
    course
}

pub(super) const RAMP: Figure = Figure {
    name: "1rma-15a",
    title: "1RMA, figure 15(a): from nothing to the link's rate, one client and one server",
    x: "time, us",
    y: "Gb/s issued; operations; failures",
    note: "4 MB READs. The first window is 13 operations (the paper does not give it; 0.25 a round trip \
           from 1 would take 56 of them). Issued in each 5 us; a command of 4 KB with its headers takes \
           103% of its bytes' time.",
    values: &[5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60, 70, 80, 90, 100],
    series: &["issued, Gb/s", "window, operations", "failures"],
    run: |figure| {
        let course = course(CongestionSettings::default(), 1_000_000_000, 20);
        let of = |line: &[f64]| figure.values.iter().map(|at| line[*at as usize / 5 - 1]).collect();
        let failures = vec![course.failures as f64; figure.values.len()];
        vec![of(&course.rates[0]), of(&course.windows), failures]
    },
};

/// The axis of 15(b) to (d): round trips of 5 us since the second transfer began.
const SINCE: &[u32] = &[1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 40, 60, 80, 100, 150, 200];

/// What happens from the second transfer on, and to its 400th round trip.
fn shared(settings: CongestionSettings) -> Course {
    let steps = (SECOND / STEP) as usize;
    let mut course = course(settings, SECOND, steps + 400);
    course.rates.iter_mut().chain([&mut course.delays]).for_each(|line| drop(line.drain(..steps)));
    course
}

/// The settings of 15(b) and (c).
fn both() -> [CongestionSettings; 2] {
    [CongestionSettings::default(), CongestionSettings { separate: false, ..CongestionSettings::default() }]
}

/// The first transfer's share of both, in percent, in each round trip.
fn shares(course: &Course) -> Vec<f64> {
    let [first, second] = &course.rates;
    first.iter().zip(second).map(|(one, other)| 100.0 * one / (one + other).max(1e-9)).collect()
}

pub(super) const SHARE: Figure = Figure {
    name: "1rma-15bc",
    title: "1RMA, figure 15(b) and (c): the first transfer's share after a second one began",
    x: "round trips (5 us) since the second began",
    y: "% of what is issued",
    note: "One client, two servers; 4 MB READs, from the second server from 400 us on, through one \
           executor: the window of local congestion is one for both. 50% is fair. `total_delay alone` \
           is 15(c): congestion at the host is not told from congestion elsewhere, and each server has \
           its window.",
    values: SINCE,
    series: &["both delays", "total_delay alone"],
    run: |_| {
        let line = |settings| {
            let shares = shares(&shared(settings));
            SINCE.iter().map(|since| shares[*since as usize - 1]).collect()
        };
        both().map(line).into()
    },
};

pub(super) const FAIR: Figure = Figure {
    name: "1rma-15",
    title: "1RMA, figure 15: round trips until both transfers have their fair share",
    x: "within so many percent of a half",
    y: "round trips (5 us)",
    note: "Of the runs of 15(b) and (c): from which round trip on the mean share of each ten is fair, \
           of 400; 400 means never.",
    values: &[5, 10, 15, 20],
    series: &["both delays", "total_delay alone"],
    run: |figure| {
        let line = |settings| {
            let shares = shares(&shared(settings));
            let means: Vec<f64> = shares.windows(10).map(|ten| ten.iter().sum::<f64>() / 10.0).collect();
            let settled = |percent: &u32| {
                let fair = |mean: &f64| (mean - 50.0).abs() <= f64::from(*percent) / 2.0;
                means
                    .iter()
                    .rposition(|mean| !fair(mean))
                    .map_or(1.0, |last| if last + 1 == means.len() { 400.0 } else { last as f64 + 2.0 })
            };
            figure.values.iter().map(settled).collect()
        };
        both().map(line).into()
    },
};

pub(super) const DELAY: Figure = Figure {
    name: "1rma-15d",
    title: "1RMA, figure 15(d): issue delay after a second transfer began",
    x: "round trips (5 us) since the second began",
    y: "us, the longest of a round trip",
    note: "Of the runs of 15(b) and (c).",
    values: SINCE,
    series: &["both delays", "total_delay alone"],
    run: |_| {
        let line = |settings| {
            let delays = shared(settings).delays;
            SINCE.iter().map(|since| delays[*since as usize - 1]).collect()
        };
        both().map(line).into()
    },
};
