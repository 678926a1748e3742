//! Figure 12: 64 bytes beside one large operation.

use starverbs_onerma::congestion::CongestionSettings;
use starverbs_onerma::{CardConfig, Class};

use super::Figure;
use crate::Rng;
use crate::onerma::client::{Client, RemoteRegion, served_region};
use crate::onerma::{OneRmaNet, StepReport, Wire};

/// Small operations that are measured.
const SMALL: u64 = 200;

pub(super) const BESIDE: Figure = Figure {
    name: "1rma-12",
    title: "1RMA, figure 12: 64 B READs beside one large READ, slowdown",
    x: "large operation, KB",
    y: "latency, by that of an idle link",
    note: "64 B, 10,000 a second, Poisson; one large READ outstanding, the next when it ends. Both \
           through one executor (READs of up to 4 KB take turns); with two classes the large one is in \
           the low one. RC is a model: one connection answers in order, so that a small READ waits for \
           the rest of the large one's time on the link.",
    values: &[4, 16, 64, 256, 1024, 4096],
    series: &["1RMA, mean", "1RMA, 99%", "1RMA, two classes, mean", "RC (model), mean", "RC (model), 99%"],
    run: |figure| {
        let mut lines = vec![Vec::new(); 5];
        let idle = beside(0, Class::High).0;
        for size in figure.values {
            let (mean, tail) = beside(u64::from(*size) << 10, Class::High);
            let (classes, _) = beside(u64::from(*size) << 10, Class::Low);
            let (rc_mean, rc_tail) = in_order(f64::from(*size) * 1024.0, idle);
            let all = [mean, tail, classes, rc_mean, rc_tail];
            lines.iter_mut().zip(all).for_each(|(line, value)| line.push(value / idle));
        }
        lines
    },
};

/// Mean and 99th percentile of the small operations' latency, ns; the large one has this class.
fn beside(large: u64, class: Class) -> (f64, f64) {
    let mut net = OneRmaNet::new(2, CardConfig::default(), Wire::paper(), 12);
    let target = served_region(&mut net, 1, 4 << 20);
    let mut client = Client::new(&mut net, 0, 7, 64, CongestionSettings::default());
    let mut rng = Rng::new(12);
    let (mut begun, mut latencies) = (Vec::new(), Vec::new());
    if large > 0 {
        client.read_in(class, &mut net, RemoteRegion { host: 1, region: &target }, large, u64::MAX);
    }
    client.drive(&mut net, 1);
    net.wake_at(100_000, 0);
    while (latencies.len() as u64) < SMALL {
        match net.step().expect("there is always something to do") {
            StepReport::Woke(0) => {
                client.read(&mut net, RemoteRegion { host: 1, region: &target }, 64, begun.len() as u64);
                begun.push(net.now());
                net.wake_at(net.now() + rng.wait(100_000.0) as u64, 0);
            }
            StepReport::Completed(_) => {
                while let Some(finished) = client.poll(&net) {
                    match finished.map(|finished| finished.token) {
                        Some(u64::MAX) => client.read_in(
                            class,
                            &mut net,
                            RemoteRegion { host: 1, region: &target },
                            large,
                            u64::MAX,
                        ),
                        Some(token) => latencies.push((net.now() - begun[token as usize]) as f64),
                        None => {}
                    }
                }
            }
            _ => {}
        }
        client.drive(&mut net, 1);
    }
    latencies.sort_by(f64::total_cmp);
    (latencies.iter().sum::<f64>() / latencies.len() as f64, latencies[latencies.len() * 99 / 100])
}

/// The same of one connection that answers in order: the large READ takes a round trip and its bytes' time,
/// and is followed by the next one; the small one comes at any moment of that.
fn in_order(large: f64, idle: f64) -> (f64, f64) {
    let whole = idle + large * 8.0 / 100.0;
    let waits = (0..1000).map(|at| (whole * (1.0 - f64::from(at) / 1000.0)).max(idle));
    let mut waits: Vec<f64> = waits.collect();
    waits.sort_by(f64::total_cmp);
    (waits.iter().sum::<f64>() / waits.len() as f64, waits[990])
}
