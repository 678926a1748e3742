//! Many queue pairs: what a message costs as they grow to a hundred thousand, on the wire and on one host,
//! with the prefetch pass and without; a million of them; what a QPC-limited card does to real programs, by
//! policy; and how fast the simulator is.
//!
//! Owns these measurements and their page. programs/many.c and perftest do the work.

mod events;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use starverbs_charts::{Bar, Panel, bars};

use crate::case::Setup;
use crate::child::{self, Ready};
use crate::error::{BenchError, Result};
use crate::machine::Machine;
use crate::perftest::{Link, library_dir, on_card, require_same_host, same_host};
use crate::report::{Table, write_file};
use crate::round::progress;
use crate::samples::{Samples, beside, cell, reported};

/// Queue pairs of a process, or pairs of them where one process has both ends.
const QPS: [u32; 4] = [1, 1_000, 10_000, 100_000];
/// Pairs of queue pairs that are a million, created, used and destroyed.
const HALF_A_MILLION: u32 = 500_000;
/// The ways that a message may take, as tables name them.
const LINKS: [(Link, &str); 2] = [(Link::Udp, "wire"), (Link::Local, "same host")];
/// How much of the rate with fewer queue pairs is to be left: with so many, of that with so many.
const FLAT: [(u32, u32, f64); 2] = [(1_000, 1, 0.6), (100_000, 1_000, 0.7)];
/// Messages under way at once.
const UNDER_WAY: u32 = 256;
/// The same of long messages, and what is long.
const LONG_UNDER_WAY: u32 = 16;
const SEVERAL_KB: usize = 4 << 10;
/// The same for a QPC-limited card, and its queue pairs.
const LIMITED_UNDER_WAY: u32 = 128;
const LIMITED_QPS: u32 = 1_000;
/// Messages of a run of perftest, and how many are under way.
const WRITE_BW_MESSAGES: u32 = 300_000;
const WRITE_BW_UNDER_WAY: u32 = 5_000;
/// What a context costs that is not there: PCIe's time, and one that is long beside the card's own time for a
/// message, as PCIe's is beside a chip's.
const MISSES: [&str; 2] = ["500ns", "5us"];
/// Names of the rows, entries and policies.
const CARDS: [(&str, u32, &str, &str); 4] = [
    ("room for all", 2_000, "fcfs", "#b8b8b8"),
    ("FCFS", 300, "fcfs", "#2e6da4"),
    ("non-blocking", 300, "non-blocking", "#e5a39a"),
    ("latency-hiding", 300, "latency-hiding", "#c0392b"),
];
const LIMIT: Duration = Duration::from_secs(60);
/// No further round begins that would end after this.
const ALL: Duration = Duration::from_secs(10 * 60);

/// Where the programs are.
struct Tools {
    lib: PathBuf,
    many: PathBuf,
    starverbs: PathBuf,
}

impl Tools {
    /// Compiles the program as any other that uses verbs.
    fn ready(dist: &Path) -> Result<Tools> {
        let lib = library_dir(dist)?;
        let many = child::compiled("many", &lib)?;
        Ok(Tools { lib, many, starverbs: dist.join("bin/starverbs") })
    }

    /// Runs it.
    fn many(&self, link: Link, args: &[&str], settings: &[(&str, &str)]) -> Result<ManyRun> {
        let mut command = Command::new(&self.many);
        put_on(&mut command, &self.lib, link);
        command.args(args).envs(settings.iter().copied());
        let output = child::run_one(command, LIMIT)?;
        if link != Link::Udp {
            require_same_host("many", &output)?;
        }
        let run = ManyRun::parse(&output.stdout);
        run.ok_or_else(|| BenchError::Parse { what: "many".into(), tail: child::tail_of(&output.stdout) })
    }

    /// `ib_write_bw` of 64 B over so many queue pairs: millions of messages a second.
    fn write_bw(&self, link: Link, qps: u32, cache: Option<&str>) -> Result<f64> {
        let path = child::require("ib_write_bw", "perftest")?;
        let port = child::free_tcp_port()?;
        let side = || {
            let mut side = Command::new(&path);
            put_on(&mut side, &self.lib, link);
            side.envs(cache.map(|cache| ("STARVERBS_QPC_CACHE", cache)));
            side.args(["-F", "-p", &port.to_string(), "-s", "64", "-q", &qps.to_string()]);
            /* as many messages in all, and about as many under way, whatever the queue pairs; the peak takes
             * perftest a time that is quadratic in the messages, most of a minute here */
            let (each, depth) = (WRITE_BW_MESSAGES / qps, (WRITE_BW_UNDER_WAY / qps).clamp(5, 128));
            side.args(["-n", &each.to_string(), "-t", &depth.to_string(), "--noPeak"]);
            side
        };
        let mut client = side();
        client.arg("127.0.0.1");
        let output = child::run_pair(side(), client, Ready::Tcp(port), (None, None), LIMIT)?;
        let line = output.stdout.lines().find(|line| line.trim_start().starts_with("64 "));
        line.and_then(|line| line.split_whitespace().nth(4)?.parse().ok()).ok_or_else(|| BenchError::Parse {
            what: "ib_write_bw".into(),
            tail: child::tail_of(&output.stdout),
        })
    }
}

/// What the program prints.
struct ManyRun {
    /// Millions of messages a second
    rate: f64,
    /// CPU time of one, us
    cpu: f64,
    /// Its time, us: the median, and the first percentile
    typical: f64,
    least: f64,
    /// Seconds to create and connect
    setup: f64,
    /// Acknowledges a message
    acks: f64,
    /// Bytes of the process for each of its queue pairs
    bytes: f64,
    /// Seconds to destroy all
    destroy: f64,
}

impl ManyRun {
    fn parse(text: &str) -> Option<ManyRun> {
        let numbers: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [rate, cpu, typical, least, _, setup, acks, bytes, destroy] = numbers.try_into().ok()?;
        Some(ManyRun { rate, cpu, typical, least, setup, acks, bytes, destroy })
    }
}

/// Puts a program on the card, on the wire or within the host.
fn put_on(command: &mut Command, lib: &Path, link: Link) {
    on_card(command, lib);
    if link != Link::Udp {
        same_host(command);
    }
}

/// Millions of WRITEs of `bytes` a second over `qps` queue pairs between two processes, one after the other
/// in an order that is shuffled.
///
/// # Errors
/// As [`crate::case::Case::run`].
pub(crate) fn message_rate(setup: &Setup, qps: u32, link: Link, bytes: usize, iters: u64) -> Result<f64> {
    let lib = library_dir(&setup.dist)?;
    let program = child::compiled("many", &lib)?;
    let mut command = Command::new(&program);
    put_on(&mut command, &lib, link);
    let under_way = if bytes > SEVERAL_KB { LONG_UNDER_WAY } else { UNDER_WAY };
    command.args(["-q", &qps.to_string(), "-w", &under_way.to_string(), "-b", &bytes.to_string()]);
    command.args(["-n", &iters.to_string(), "-t", &LIMIT.as_secs().to_string()]);
    if let (Some(server), Some(client)) = setup.cpus {
        command.args(["-c", &format!("{server},{client}")]);
    }
    /* to create and connect so many takes a while */
    let output = child::run_one(command, LIMIT);
    /* the program is ours alone; that it stays behind harms nobody */
    let _ = fs::remove_file(&program);
    let output = output?;
    if link != Link::Udp {
        require_same_host("many", &output)?;
    }
    let rate = output.stdout.split_whitespace().next().and_then(|rate| rate.parse().ok());
    rate.ok_or_else(|| BenchError::Parse { what: "many".into(), tail: child::tail_of(&output.stdout) })
}

const SCALE: &str = "scale";
const MILLION: &str = "million";
/// Rows of [`SCALE`]: as a program finds the card, and variants.
const PLAIN: &str = "plain";
const NO_PREFETCH: &str = "no prefetch";
const LISTS: &str = "lists";
const VARIANTS: [(Link, &str, &str); 3] =
    [(Link::Udp, "wire", NO_PREFETCH), (Link::Udp, "wire", LISTS), (Link::Local, "same host", LISTS)];

/// Of so many queue pairs on a link, a row's name.
fn row_of(link: &str, kind: &str, qps: u32) -> String {
    format!("{link}, {kind}, {qps}")
}

/// Measures a row of [`SCALE`]: two processes, then one thread that is both ends.
fn measure(samples: &mut Samples, tools: &Tools, at: (Link, &str, &str), qps: u32, seconds: &str) {
    let (link, name, kind) = at;
    let row = row_of(name, kind, qps);
    progress(&row);
    let (qps, under_way) = (&qps.to_string(), &UNDER_WAY.to_string());
    let mut args = vec!["-q", qps, "-w", under_way, "-t", seconds];
    if kind == LISTS {
        args.push("-p");
    }
    let prefetch = ("STARVERBS_QPC_PREFETCH", if kind == NO_PREFETCH { "off" } else { "on" });
    if let Some(run) = reported(&row, tools.many(link, &args, &[prefetch])) {
        samples.add(SCALE, &row, &[("rate", run.rate), ("setup", run.setup), ("acks", run.acks)]);
    }
    /* within the host it is the card's thread by which so many connections agree on shared memory */
    let thread = if link == Link::Udp { "off" } else { "on" };
    args.push("-l");
    if let Some(run) =
        reported(&row, tools.many(link, &args, &[prefetch, ("STARVERBS_PROGRESS_THREAD", thread)]))
    {
        samples.add(SCALE, &row, &[("cpu", run.cpu), ("bytes", run.bytes)]);
    }
}

/// Measures everything once. What fails is reported and left out.
fn round(samples: &mut Samples, tools: &Tools, seconds: f64) {
    let seconds = &seconds.to_string();
    for qps in QPS {
        for (link, name) in LINKS {
            measure(samples, tools, (link, name, PLAIN), qps, seconds);
        }
        for variant in VARIANTS {
            measure(samples, tools, variant, qps, seconds);
        }
    }
    for (link, name) in LINKS {
        for qps in [1, LIMITED_QPS] {
            let row = row_of(name, "ib_write_bw", qps);
            progress(&row);
            if let Some(rate) = reported(&row, tools.write_bw(link, qps, None)) {
                samples.add(SCALE, &row, &[("perftest", rate)]);
            }
        }
    }
    limited(samples, tools, seconds);
    events::measure(samples, &tools.starverbs);
}

/// A million queue pairs in one process, once.
fn million(samples: &mut Samples, tools: &Tools) {
    for (link, name) in LINKS {
        progress(&format!("a million, {name}"));
        let (qps, under_way) = (&HALF_A_MILLION.to_string(), &UNDER_WAY.to_string());
        let args = ["-l", "-q", qps, "-w", under_way, "-t", "2"];
        /* of a usual depth so many would take all of a smaller machine's memory */
        if let Some(run) = reported(name, tools.many(link, &args, &[("STARVERBS_MEMORY", "32G")])) {
            let ManyRun { cpu, setup, bytes, destroy, .. } = run;
            let row = [("cpu", cpu), ("setup", setup), ("bytes", bytes), ("destroy", destroy)];
            samples.add(MILLION, name, &row);
        }
    }
}

/// A QPC-limited card.
fn limited(samples: &mut Samples, tools: &Tools, seconds: &str) {
    for miss in MISSES {
        for (name, entries, policy, _) in CARDS {
            progress(&format!("a miss of {miss}, {name}"));
            let cache = format!("{entries},miss={miss},policy={policy}");
            let setting = [("STARVERBS_QPC_CACHE", cache.as_str())];
            let qps = &LIMITED_QPS.to_string();
            let args = |under_way| ["-q", qps, "-t", seconds, "-w", under_way];
            if let Some(run) = reported(name, tools.many(Link::Udp, &args("1"), &setting)) {
                samples.add(miss, name, &[("typical", run.typical), ("least", run.least)]);
            }
            let many = tools.many(Link::Udp, &args(&LIMITED_UNDER_WAY.to_string()), &setting);
            if let Some(run) = reported(name, many) {
                samples.add(miss, name, &[("rate", run.rate)]);
            }
            if let Some(rate) = reported(name, tools.write_bw(Link::Udp, LIMITED_QPS, Some(&cache))) {
                samples.add(miss, name, &[("perftest", rate)]);
            }
        }
    }
}

/// Measures in rounds, one at least and no more than `rounds` or than end in time, and writes `out`.md and
/// `out`.svg.
///
/// # Errors
/// Where nothing can be measured, or the files cannot be written.
pub(crate) fn run(out: &Path, dist: &Path, rounds: u32, quick: bool) -> Result<()> {
    let machine = Machine::read(false, quick);
    let tools = Tools::ready(dist)?;
    let seconds = if quick { 0.2 } else { 0.6 };
    let (mut samples, done) = Samples::gather(rounds, ALL, |samples| round(samples, &tools, seconds));
    million(&mut samples, &tools);
    /* the program is ours alone; that it stays behind harms nobody */
    let _ = fs::remove_file(&tools.many);
    let text = page(&machine, &samples, done);
    println!("{text}");
    write_file(out, "md", &text)?;
    write_file(out, "svg", &bars(&panels(&samples)))
}

fn scale_table(samples: &Samples) -> String {
    let heading =
        ["queue pairs", "CPU time, us", "rate, M/s", "ACKs a message", "set-up, s", "bytes of a queue pair"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    let kinds = LINKS.map(|(_, link)| (link, PLAIN)).into_iter();
    let kinds = kinds.chain(VARIANTS.map(|(_, link, kind)| (link, kind)));
    for (link, kind) in kinds {
        for qps in QPS {
            let of = |kind, column| samples.median(SCALE, &row_of(link, kind, qps), column);
            let by = |column| match kind {
                PLAIN => cell(of(kind, column)),
                _ => beside(of(kind, column), of(PLAIN, column)),
            };
            let name = if kind == PLAIN { link.to_owned() } else { format!("{link}, {kind}") };
            let counted = [of(kind, "acks"), of(kind, "setup"), of(kind, "bytes")].map(cell);
            rows.push([vec![format!("{name}, {qps}"), by("cpu"), by("rate")], counted.to_vec()].concat());
        }
    }
    Table(rows).markdown()
}

/// What is left of the rate with more queue pairs, and what was aimed at.
fn flat_table(samples: &Samples) -> String {
    let mut rows = vec![["of the rate", "aim", "left", "holds"].map(str::to_owned).to_vec()];
    let mut row = |what: String, aim: f64, [many, few]: [Option<f64>; 2]| {
        let left = many.zip(few).map(|(many, few)| many / few);
        let holds = left.map_or("-", |left| if left >= aim { "yes" } else { "no" });
        rows.push(vec![what, aim.to_string(), cell(left), holds.to_owned()]);
    };
    for (_, link) in LINKS {
        for (kind, (many, few, aim)) in
            [PLAIN, LISTS].into_iter().flat_map(|kind| FLAT.map(|aim| (kind, aim)))
        {
            let rate = |qps| samples.median(SCALE, &row_of(link, kind, qps), "rate");
            let name = if kind == PLAIN { link.to_owned() } else { format!("{link}, {kind}") };
            row(format!("{name}: {many} of {few}"), aim, [rate(many), rate(few)]);
        }
        let rate = |qps| samples.median(SCALE, &row_of(link, "ib_write_bw", qps), "perftest");
        let name = format!("{link}: `ib_write_bw -s 64 -q {LIMITED_QPS}` of `-q 1`");
        row(name, FLAT[0].2, [rate(LIMITED_QPS), rate(1)]);
    }
    Table(rows).markdown()
}

fn million_table(samples: &Samples) -> String {
    let heading =
        ["a million", "to create and connect, s", "CPU time of a message, us", "bytes", "to destroy, s"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    for (_, link) in LINKS {
        let of = |column| cell(samples.median(MILLION, link, column));
        rows.push(vec![link.to_owned(), of("setup"), of("cpu"), of("bytes"), of("destroy")]);
    }
    Table(rows).markdown()
}

fn limited_table(samples: &Samples, miss: &'static str) -> String {
    let heading = [
        &format!("a miss of {miss}")[..],
        "rate, M/s",
        "`ib_write_bw -q 1000`, M/s",
        "latency, us, 1st percentile",
        "median",
    ];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    for (name, ..) in CARDS {
        let of =
            |column| beside(samples.median(miss, name, column), samples.median(miss, CARDS[0].0, column));
        rows.push(vec![name.to_owned(), of("rate"), of("perftest"), of("least"), of("typical")]);
    }
    Table(rows).markdown()
}

fn page(machine: &Machine, samples: &Samples, rounds: u32) -> String {
    let mut text = format!(
        "# Many queue pairs\n\nWritten by `make bench-qpc` (tools/bench, src/many.rs); do not \
         edit.\n\n![bars](bench-qpc.svg)\n\n\
         {}. Medians of {rounds} interleaved rounds.\n\
         {}\n## A hundred thousand of them\n\n{}\n",
        machine.described(),
        machine.warning(),
        flat_table(samples),
    );
    let _ = write!(
        text,
        "{}\n8 B WRITEs on RC queue pairs in turn, in a shuffled order, {UNDER_WAY} under way in all \
         (`tools/bench/programs/many.c`). CPU time is what a message takes at both ends and in the kernel, \
         measured in one thread that is both: other work on the machine hardly changes it. The rate is that \
         of two processes, with as many queue pairs each; the set-up is to create and connect them; bytes \
         are what the process with both ends has grown by, program and library. No prefetch: \
         `STARVERBS_QPC_PREFETCH=off`. Lists: csRNA's workload, (QPN mod 10) + 1 WRITEs a doorbell, of which \
         the last is signaled. In brackets by the row of the same link without that. `ib_write_bw` keeps 128 \
         WRITEs under way with one queue pair, and 5 on each of many.\n\n{}\n\
         Half a million pairs of queue pairs in one process, connected to each other, each used once and \
         then all in turn, then destroyed in another order than they were created in; one run, with \
         `STARVERBS_MEMORY=32G`, as the number of queue pairs is bounded by memory for queues of a usual \
         depth. On one host half a million connections agree on shared memory by the card's thread; without \
         it (`STARVERBS_PROGRESS_THREAD=off`) a program that connects them all before it polls gets packets. \
         [misses.md](misses.md) has what a message takes from memory.\n\n## Room for 300\n\n",
        scale_table(samples),
        million_table(samples),
    );
    for miss in MISSES {
        let _ = writeln!(text, "{}", limited_table(samples, miss));
    }
    let _ = write!(
        text,
        "{LIMITED_QPS} queue pairs between two processes, both with \
         `STARVERBS_QPC_CACHE=300,miss=...,policy=...`, or with 2000 entries (the first row, by which the \
         figures in brackets are). Rates with {LIMITED_UNDER_WAY} messages under way, of perftest with five \
         for each queue pair; latency is from post to completion with one under way, over all queue pairs in \
         turn, by `many`, as `ib_write_lat` has one queue pair alone. [sim.md](sim.md#on-the-software-card) \
         says why two misses.\n\n\
         ## The simulator\n\nMillion events a second (`starverbs sim PLAN --time`).\n\n{}",
        events::table(samples),
    );
    text
}

fn panels(samples: &Samples) -> Vec<Panel> {
    let bars = |rows: Vec<(String, Option<f64>, &'static str)>| -> Vec<Bar> {
        let bar = |(label, value, fill): (String, Option<f64>, _)| Some(Bar { label, value: value?, fill });
        rows.into_iter().filter_map(bar).collect()
    };
    let scale = |column| {
        let row = |qps: u32, (link, kind, said, fill): (&str, &str, &str, _)| {
            (format!("{qps}, {said}"), samples.median(SCALE, &row_of(link, kind, qps), column), fill)
        };
        let kinds = [
            ("wire", PLAIN, "wire", "#c0392b"),
            ("wire", NO_PREFETCH, NO_PREFETCH, "#e5a39a"),
            ("same host", PLAIN, "same host", "#2e6da4"),
        ];
        bars(QPS.into_iter().flat_map(|qps| kinds.map(|kind| row(qps, kind))).collect())
    };
    let limited = |column| {
        let row = |miss, (name, _, _, fill): (&'static str, u32, &str, _)| {
            (format!("{miss}, {name}"), samples.median(miss, name, column), fill)
        };
        bars(MISSES.into_iter().flat_map(|miss| CARDS.map(|card| row(miss, card))).collect())
    };
    let panel = |title: &str, less, bars| Panel { title: title.to_owned(), less_is_better: less, bars };
    vec![
        panel("CPU time of a message by queue pairs, both ends, us", true, scale("cpu")),
        panel("Rate by queue pairs, M/s", false, scale("rate")),
        panel("Rate with room for 300 of 1000 contexts, M/s", false, limited("rate")),
        panel("ib_write_bw -q 1000 with room for 300, M/s", false, limited("perftest")),
        panel("Latency with room for 300 of 1000 contexts, 1st percentile, us", true, limited("least")),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_stand_beside_their_base() {
        let mut samples = Samples::default();
        let of = |kind, qps| row_of("wire", kind, qps);
        for cpu in [2.0, 1.0, 9.0] {
            samples.add(SCALE, &of(PLAIN, 1000), &[("cpu", cpu), ("rate", 0.3)]);
        }
        samples.add(SCALE, &of(PLAIN, 1), &[("rate", 1.0)]);
        samples.add(SCALE, &of(NO_PREFETCH, 1000), &[("cpu", 3.0)]);
        samples.add("5us", "FCFS", &[("rate", 0.5)]);
        assert_eq!(samples.median(SCALE, &of(PLAIN, 1000), "cpu"), Some(2.0));
        let table = scale_table(&samples);
        assert!(table.contains("3.00 (1.50x)") && table.lines().count() == 2 + 5 * QPS.len(), "{table}");
        let table = flat_table(&samples);
        assert!(table.lines().any(|row| row.contains("1000 of 1 ") && row.contains("no")), "{table}");
        assert!(!table.contains("yes"), "{table}");
        assert!(limited_table(&samples, "5us").contains("0.50"), "no base, no ratio");
        let panels = panels(&samples);
        assert_eq!(panels.iter().map(|panel| panel.bars.len()).sum::<usize>(), 5);
    }
}
