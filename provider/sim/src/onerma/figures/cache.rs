//! Figures 8 and 9: a key-value cache that clients look things up in by READs, and one of its replicas that
//! fails.

use starverbs_onerma::{Class, Status};

use super::Figure;
use super::load::{FigureLoad, Read, quantile};
use crate::Rng;
use crate::onerma::SimRegion;
use crate::onerma::client::served_region;

/// Ten hosts, as in the paper; more clients than servers.
const CLIENTS: usize = 8;
const SERVERS: usize = 2;
/// What a GET reads: where the value is, then the value.
const BUCKET: u64 = 64;
const VALUE: u64 = 4096;
/// Nanoseconds before anything is measured.
const WARM: u64 = 100_000;
/// When a replica fails in figure 9.
const FAILS: u64 = 200_000;

/// A GET that has ended.
struct Ended {
    server: usize,
    begun: u64,
    at: u64,
}

/// The clients, each of which knows which servers there are.
struct Cache {
    load: FigureLoad,
    regions: Vec<SimRegion>,
    rng: Rng,
    /// Of each client: the servers that have not failed it
    alive: Vec<Vec<usize>>,
    ended: Vec<Ended>,
    /// When READs failed
    failed: Vec<u64>,
}

impl Cache {
    fn new(seed: u64) -> Self {
        let mut load = FigureLoad::new((CLIENTS + SERVERS) as u16, CLIENTS, VALUE, seed);
        let regions = (0..SERVERS).map(|at| served_region(&mut load.net, CLIENTS + at, VALUE)).collect();
        let alive = vec![(0..SERVERS).collect(); CLIENTS];
        Cache { load, regions, rng: Rng::new(seed), alive, ended: Vec::new(), failed: Vec::new() }
    }

    /// A client reads from one of the servers that it knows; the GET has begun at some time.
    fn look_up(&mut self, client: usize, begun: u64) {
        let server = self.rng.pick(&self.alive[client]);
        self.read(Read { client, target: CLIENTS + server, size: BUCKET, begun });
    }

    fn read(&mut self, read: Read) {
        self.load.read(Class::High, read, &self.regions[read.target - CLIENTS]);
    }

    fn on_end(&mut self, read: Read, status: Status) {
        let (server, now) = (read.target - CLIENTS, self.load.net.now());
        if status != Status::Ok {
            self.failed.push(now);
            self.alive[read.client].retain(|alive| *alive != server);
            self.look_up(read.client, read.begun);
        } else if read.size == BUCKET {
            self.read(Read { size: VALUE, ..read });
        } else {
            self.ended.push(Ended { server, begun: read.begun, at: now });
        }
    }

    /// So many Gb/s of values from each server, until a time and to the end of what was begun; the second
    /// server fails at a time.
    fn run(&mut self, gbits: f64, until: u64, fails: u64) {
        let mean = VALUE as f64 * 8.0 * CLIENTS as f64 / (gbits * SERVERS as f64);
        let (mut begun, mut ended) = (0, Vec::new());
        for client in 0..CLIENTS {
            let wait = self.rng.wait(mean);
            self.load.arrive_in(client, wait);
        }
        while self.load.net.now() < until || self.ended.len() < begun {
            if let Some(client) = self.load.step(&mut ended)
                && self.load.net.now() < until
            {
                begun += 1;
                self.look_up(client, self.load.net.now());
                let wait = self.rng.wait(mean);
                self.load.arrive_in(client, wait);
            }
            if self.load.net.now() >= fails {
                /* a region that is closed already stays so */
                let _ = self.load.net.hosts[CLIENTS + 1].card.close_region(self.regions[1].id);
            }
            ended.drain(..).for_each(|(read, status)| self.on_end(read, status));
        }
    }
}

pub(super) const LATENCY: Figure = Figure {
    name: "1rma-8",
    title: "1RMA, figure 8: GETs of a key-value cache, eight clients and two servers",
    x: "offered to each server, Gb/s of values",
    y: "us; Gb/s",
    note: "A GET reads 64 B (where the value is), then 4 KB; from either server, Poisson arrivals. How many \
           of the ten hosts are servers, and how long values are, the paper does not say. With the 64 B \
           and headers, 93.6 Gb/s of values fill a server's link.",
    values: &[10, 20, 30, 40, 50, 60, 70, 80, 90],
    series: &["median, us", "99%, us", "served by each server, Gb/s"],
    run: |figure| {
        let mut lines = vec![Vec::new(); 3];
        for gbits in figure.values {
            let (mut cache, until) = (Cache::new(8), WARM + 400_000);
            cache.run(f64::from(*gbits), until, u64::MAX);
            let measured = cache.ended.iter().filter(|get| get.begun >= WARM);
            let mut latencies: Vec<f64> = measured.map(|get| (get.at - get.begun) as f64 / 1e3).collect();
            latencies.sort_by(f64::total_cmp);
            let served = cache.ended.iter().filter(|get| (WARM..until).contains(&get.at)).count() as f64;
            let rate = served * VALUE as f64 * 8.0 / (until - WARM) as f64 / SERVERS as f64;
            let all = [quantile(&latencies, 0.5), quantile(&latencies, 0.99), rate];
            lines.iter_mut().zip(all).for_each(|(line, value)| line.push(value));
        }
        lines
    },
};

/// Width of a point of figure 9, ns.
const BIN: u64 = 20_000;
/// Runs of it, each with another seed.
const RUNS: u64 = 10;

pub(super) const REPLICA: Figure = Figure {
    name: "1rma-9",
    title: "1RMA, figure 9: the cache of figure 8, whose second server fails after 200 us",
    x: "time, us",
    y: "us; GETs a us; READs",
    note: "35 Gb/s of values from each server; means of ten runs and 20 us each. The server's process fails, \
           its card lives: its regions are closed, READs fail at once, and are repeated at the other \
           server, where all later ones go. A GET counts from its first READ, for the server that answered \
           it; 0: it answered none. The longest time in which no GET ended is of the 200 us from the \
           failure on.",
    values: &[120, 140, 160, 180, 200, 220, 240, 260, 280, 300, 320, 340, 360, 380, 400],
    series: &["R1, mean", "R2, mean", "GETs a us", "READs that failed", "longest without a GET, us"],
    run: |figure| {
        let mut runs: Vec<_> = (0..RUNS).map(Cache::new).collect();
        for cache in &mut runs {
            cache.run(35.0, 500_000, FAILS);
            cache.ended.sort_by_key(|get| get.at);
        }
        let within = |at: u64, end: u32| (u64::from(end) * 1000 - BIN..u64::from(end) * 1000).contains(&at);
        let gets =
            |end: u32| runs.iter().flat_map(|cache| &cache.ended).filter(move |get| within(get.at, end));
        let mean = |server: usize| {
            let of = |end: &u32| {
                let (sum, count) = gets(*end)
                    .filter(|get| get.server == server)
                    .fold((0, 0), |(sum, count), get| (sum + get.at - get.begun, count + 1));
                sum as f64 / 1e3 / f64::from(count.max(1))
            };
            figure.values.iter().map(of).collect()
        };
        let rate = |end: &u32| gets(*end).count() as f64 * 1e3 / (BIN * RUNS) as f64;
        let failed = |end: &u32| {
            let all = runs.iter().flat_map(|cache| &cache.failed);
            all.filter(|at| within(**at, *end)).count() as f64 / RUNS as f64
        };
        let pairs = runs.iter().flat_map(|cache| cache.ended.windows(2));
        let gaps = pairs.filter(|two| (FAILS..2 * FAILS).contains(&two[1].at));
        let longest = gaps.map(|two| two[1].at - two[0].at).max().unwrap_or(u64::MAX);
        vec![
            mean(0),
            mean(1),
            figure.values.iter().map(rate).collect(),
            figure.values.iter().map(failed).collect(),
            vec![longest as f64 / 1e3; figure.values.len()],
        ]
    },
};
