//! Figures 5 and 12: latency, throughput and message rate of WRITE and READ.

use starverbs_kernels::hll;

use super::{HUNDRED, Params, TEN, US, streams};
use crate::Figure;
use crate::rnic::Picos;
use crate::strom::pair::{Pair, PairStep};
use crate::strom::program::ProgramRegion;

/// Requests that a program has under way at most.
const DEPTH: u64 = 256;
/// Bytes of a run at least, and its messages at least and at most.
const TRAFFIC: u64 = 2 << 20;
const MESSAGES: (u64, u64) = (8, 2000);
/// READs and round trips that are timed.
const ROUNDS: u32 = 4;

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Write,
    Read,
    /// RPC WRITE to the HyperLogLog kernel, which sends the bytes on to memory
    Stream,
}

/// Mean latency, ps: of READ until its bytes are known, of WRITE half of a ping-pong's round trip (6.1).
pub(super) fn latency(params: &'static Params, verb: Verb, bytes: u32) -> Picos {
    let mut pair = Pair::new(params);
    let pages = [0, 1].map(|at| pair.region(at, bytes));
    let mut time = 0;
    for _ in 0..ROUNDS {
        if verb == Verb::Read {
            pair.read(0, time, pages[0], pages[1]);
            time = pair.until(0, pages[0].last());
            continue;
        }
        for at in [0, 1] {
            pair.write(at, time, pages[at], pages[1 - at]);
            time = pair.until(1 - at, pages[1 - at].last());
        }
    }
    pair.check();
    let ways = if verb == Verb::Read { ROUNDS } else { 2 * ROUNDS };
    time / u64::from(ways)
}

fn post(pair: &mut Pair, verb: Verb, [own, other]: [ProgramRegion; 2]) {
    let now = pair.now();
    match verb {
        Verb::Write => pair.write(0, now, own, other),
        Verb::Read => pair.read(0, now, own, other),
        Verb::Stream => pair.stream(now, streams::OP, own),
    }
}

/// Messages a second, as many at a time as the card takes, when the first quarter is through.
pub(super) fn rate(params: &'static Params, verb: Verb, bytes: u32) -> f64 {
    let count = (TRAFFIC / u64::from(bytes)).clamp(MESSAGES.0, MESSAGES.1);
    let mut pair = Pair::new(params);
    let pages = [0, 1].map(|at| pair.region(at, bytes));
    if verb == Verb::Stream {
        let memory = pair.region(1, count as u32 * bytes);
        streams::sketch(&mut pair, memory);
    }
    let to = usize::from(verb != Verb::Read);
    let before = pair.completed[0];
    let (mut posted, mut left, mut begun) = (0, count * u64::from(bytes), 0);
    while left > 0 {
        while posted < count && posted - (pair.completed[0] - before) < DEPTH {
            post(&mut pair, verb, pages);
            posted += 1;
        }
        if let PairStep::Written(at, seg) = pair.step().expect("messages come")
            && at == to
        {
            left -= u64::from(seg.len);
            if begun == 0 && left <= (count - count / 4) * u64::from(bytes) {
                begun = pair.now();
            }
        }
    }
    let time = pair.now() - begun;
    pair.settle(before + count);
    if verb == Verb::Stream {
        let items = streams::estimate(&mut pair, hll::Params::default()).items.get();
        assert_eq!(items, count * u64::from(bytes) / 4, "the kernel counted all");
    }
    pair.check();
    (count - count / 4) as f64 * 1e12 / time as f64
}

/// The same in gigabits of payload a second.
pub(super) fn gbits(params: &'static Params, verb: Verb, bytes: u32) -> f64 {
    rate(params, verb, bytes) * f64::from(bytes) * 8.0 / 1e9
}

fn latencies(params: &'static Params, figure: &Figure) -> Vec<Vec<f64>> {
    let line = |verb| figure.values.iter().map(|bytes| latency(params, verb, *bytes) as f64 / US).collect();
    [Verb::Write, Verb::Read].map(line).into()
}

fn throughputs(params: &'static Params, figure: &Figure) -> Vec<Vec<f64>> {
    let line = |verb| figure.values.iter().map(|bytes| gbits(params, verb, *bytes)).collect();
    [Verb::Write, Verb::Read].map(line).into()
}

/// The link's bound, and what it is of `bytes` in packets of 1,024: the paper's dotted lines.
fn ideal(params: &Params, bytes: u32) -> f64 {
    let packets = u64::from(bytes.div_ceil(1024));
    let around = params.wire(12) * packets + 16 * params.byte;
    1e6 / (around + u64::from(bytes) * params.byte) as f64
}

fn rates(params: &'static Params, idle: &'static Params, figure: &Figure) -> Vec<Vec<f64>> {
    let line = |params: &'static Params, verb| {
        figure.values.iter().map(|bytes| rate(params, verb, *bytes) / 1e6).collect()
    };
    let ideal = figure.values.iter().map(|bytes| ideal(params, *bytes)).collect();
    vec![line(params, Verb::Write), line(params, Verb::Read), line(idle, Verb::Write), ideal]
}

/// The cards with programs whose commands take no time.
static TEN_FREE: Params = Params { store: 0, ..TEN };
static HUNDRED_FREE: Params = Params { store: 0, ..HUNDRED };

/// Payloads of latencies, of messages, and of streams, bytes.
const SHORT: &[u32] = &[64, 128, 256, 512, 1024];
const MESSAGE: &[u32] = &[64, 128, 256, 512, 1024, 2048, 4096];
const ANY: &[u32] = &[64, 256, 1024, 2048, 4096, 16_384, 65_536, 262_144, 1_048_576];
const VERBS: &[&str] = &["WRITE", "READ"];
const RATES: &[&str] = &["WRITE", "READ", "WRITE, commands take no time", "the link's bound"];

const LATENCY_NOTE: &str = "WRITE: half a ping-pong, until the program that looks at its memory knows; READ: \
     until its bytes are known. All runs are the same, so that there are no percentiles. Path MTU 1,024, the \
     most that IBTA has in Ethernet's 1,500 (the paper's packets carry 1,408).";
const THROUGHPUT_NOTE: &str = "256 requests under way at most, each a command of its own; READs 128.";
const RATE_NOTE: &str = "The link's bound counts all bytes of the packets, preamble and gap included. \
     Commands: a store of 32 bytes each 178 ns (7.1, see provider/sim/src/strom/params.rs). Where they take \
     no time, 64 packets wait for their payload at most, so that 64 bytes at 100 Gb/s are bound by PCIe's \
     latency.";

pub(super) const LATENCY_TEN: Figure = Figure {
    name: "strom-5a",
    title: "StRoM, figure 5(a): latency at 10 Gb/s",
    x: "payload, bytes",
    y: "us",
    note: LATENCY_NOTE,
    values: SHORT,
    series: VERBS,
    run: |figure| latencies(&TEN, figure),
};

pub(super) const THROUGHPUT_TEN: Figure = Figure {
    name: "strom-5b",
    title: "StRoM, figure 5(b): throughput at 10 Gb/s",
    x: "payload, bytes",
    y: "Gb/s of payload",
    note: THROUGHPUT_NOTE,
    values: ANY,
    series: VERBS,
    run: |figure| throughputs(&TEN, figure),
};

pub(super) const RATE_TEN: Figure = Figure {
    name: "strom-5c",
    title: "StRoM, figure 5(c): message rate at 10 Gb/s",
    x: "payload, bytes",
    y: "million messages a second",
    note: RATE_NOTE,
    values: MESSAGE,
    series: RATES,
    run: |figure| rates(&TEN, &TEN_FREE, figure),
};

pub(super) const LATENCY_HUNDRED: Figure = Figure {
    name: "strom-12a",
    title: "StRoM, figure 12(a): latency at 100 Gb/s",
    run: |figure| latencies(&HUNDRED, figure),
    ..LATENCY_TEN
};

pub(super) const THROUGHPUT_HUNDRED: Figure = Figure {
    name: "strom-12b",
    title: "StRoM, figure 12(b): throughput at 100 Gb/s",
    run: |figure| throughputs(&HUNDRED, figure),
    ..THROUGHPUT_TEN
};

pub(super) const RATE_HUNDRED: Figure = Figure {
    name: "strom-12c",
    title: "StRoM, figure 12(c): message rate at 100 Gb/s",
    run: |figure| rates(&HUNDRED, &HUNDRED_FREE, figure),
    ..RATE_TEN
};
