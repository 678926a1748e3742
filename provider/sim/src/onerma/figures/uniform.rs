//! Figures 10 and 13: forty hosts, each of which reads from any other.

use starverbs_onerma::Class;

use super::Figure;
use super::in_order::{Turns, latencies};
use super::load::{FigureLoad, Read, quantile};
use crate::Rng;
use crate::onerma::client::served_region;

/// Hosts of the paper's testbed.
const HOSTS: usize = 40;
/// Nanoseconds before anything is measured.
const WARM: u64 = 100_000;
const SMALL: u64 = 4096;
/// 200 KB: 90% of the bytes are theirs, if 15% of the READs are.
const LARGE: u64 = 200_000;
const LARGE_SHARE: f64 = 0.15;

/// What the hosts read.
#[derive(Clone, Copy, PartialEq)]
enum Sizes {
    Small,
    Both,
}

impl Sizes {
    fn mean(self) -> f64 {
        match self {
            Sizes::Small => SMALL as f64,
            Sizes::Both => SMALL as f64 * (1.0 - LARGE_SHARE) + LARGE as f64 * LARGE_SHARE,
        }
    }

    /// How long is measured, ns: so that there are thousands of READs.
    fn time(self) -> u64 {
        if self == Sizes::Small { 200_000 } else { 800_000 }
    }
}

/// The READs of all hosts at so many Gb/s each, in the order in which they begin.
fn reads(sizes: Sizes, gbits: f64) -> Vec<Read> {
    let mut rng = Rng::new(10);
    let mean = sizes.mean() * 8.0 / gbits;
    let mut all = Vec::new();
    for client in 0..HOSTS {
        let mut at = rng.wait(mean);
        while at < (WARM + sizes.time()) as f64 {
            let other = rng.below(HOSTS as u64 - 1) as usize;
            let target = other + usize::from(other >= client);
            let large = sizes == Sizes::Both && rng.chance(LARGE_SHARE);
            let size = if large { LARGE } else { SMALL };
            all.push(Read { client, target, size, begun: at as u64 });
            at += rng.wait(mean);
        }
    }
    all.sort_by_key(|read| read.begun);
    all
}

/// Median and 99th percentile of the small READs' slowdown, from each one's latency, ns.
fn slowdowns<'a>(ended: impl Iterator<Item = (&'a Read, f64)>) -> [f64; 2] {
    let idle = 5_000.0;
    let measured = ended.filter(|(read, _)| read.size == SMALL && read.begun >= WARM);
    let mut measured: Vec<f64> = measured.map(|(_, latency)| latency / idle).collect();
    measured.sort_by(f64::total_cmp);
    [quantile(&measured, 0.5), quantile(&measured, 0.99)]
}

/// The same READs through 1RMA's cards and executors; large ones in this class.
fn on_cards(reads: &[Read], large: Class) -> [f64; 2] {
    let mut load = FigureLoad::new(HOSTS as u16, HOSTS, LARGE, 10);
    let regions: Vec<_> = (0..HOSTS).map(|host| served_region(&mut load.net, host, LARGE)).collect();
    let mut next = reads.iter().peekable();
    let (mut ended, mut latencies) = (Vec::new(), Vec::new());
    load.arrive_in(0, reads[0].begun as f64);
    while latencies.len() < reads.len() {
        if load.step(&mut ended).is_some() {
            while let Some(read) = next.next_if(|read| read.begun <= load.net.now()) {
                let class = if read.size == LARGE { large } else { Class::High };
                load.read(class, *read, &regions[read.target]);
            }
            if let Some(read) = next.peek() {
                load.arrive_in(0, (read.begun - load.net.now()) as f64);
            }
        }
        let now = load.net.now();
        latencies.extend(ended.drain(..).map(|(read, _)| (read, (now - read.begun) as f64)));
    }
    slowdowns(latencies.iter().map(|(read, latency)| (read, *latency)))
}

fn modelled(reads: &[Read], turns: Turns) -> [f64; 2] {
    slowdowns(reads.iter().zip(latencies(reads, HOSTS, turns)))
}

/// A line for each of the values of `of`, at each load.
fn lines<const N: usize>(figure: &Figure, of: impl Fn(f64) -> [f64; N]) -> Vec<Vec<f64>> {
    let points: Vec<_> = figure.values.iter().map(|load| of(f64::from(*load))).collect();
    (0..N).map(|line| points.iter().map(|point| point[line]).collect()).collect()
}

pub(super) const SLOWDOWN: Figure = Figure {
    name: "1rma-10",
    title: "1RMA, figure 10: READs of 4 KB among 40 hosts, slowdown",
    x: "offered by each host, Gb/s",
    y: "latency, by that of an idle fabric",
    note: "Each host reads 4 KB from any other, Poisson arrivals. RC is a model of connections on the same \
           links: answers in order, nothing is lost, cards and hosts take no time.",
    values: &[10, 20, 30, 40, 50, 60, 70, 80, 90],
    series: &["1RMA, median", "1RMA, 99%", "RC (model), median", "RC (model), 99%"],
    run: |figure| {
        lines(figure, |gbits| {
            let reads = reads(Sizes::Small, gbits);
            let ([median, tail], [rc_median, rc_tail]) =
                (on_cards(&reads, Class::High), modelled(&reads, Turns::Connections));
            [median, tail, rc_median, rc_tail]
        })
    },
};

pub(super) const HEAVY: Figure = Figure {
    name: "1rma-13",
    title: "1RMA, figure 13: READs of 4 KB beside READs of 200 KB among 40 hosts, slowdown",
    x: "offered by each host, Gb/s",
    y: "latency of 4 KB READs, by that of an idle fabric",
    note: "15% of the READs are of 200 KB; they have 90% of the bytes. With two classes those are in the low \
           one. RC is a model on the same links, in two bounds: cards take turns between connections, \
           packet by packet, or answer one READ after the other. Nothing is lost, cards and hosts take no \
           time.",
    values: &[10, 20, 30, 40, 50, 60, 70],
    series: &[
        "1RMA, median",
        "1RMA, 99%",
        "1RMA, two classes, median",
        "1RMA, two classes, 99%",
        "RC in turns (model), median",
        "RC in turns (model), 99%",
        "RC one by one (model), median",
        "RC one by one (model), 99%",
    ],
    run: |figure| {
        lines(figure, |gbits| -> [f64; 8] {
            let reads = reads(Sizes::Both, gbits);
            let all = [
                on_cards(&reads, Class::High),
                on_cards(&reads, Class::Low),
                modelled(&reads, Turns::Connections),
                modelled(&reads, Turns::None),
            ];
            std::array::from_fn(|line| all[line / 2][line % 2])
        })
    },
};
