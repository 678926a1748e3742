//! Many queue pairs: what a message costs as they grow to a hundred thousand, with the prefetch pass and
//! without; what a QPC-limited card does to real programs, by policy; and how fast the simulator is.
//!
//! Owns these measurements and their page. programs/many.c and perftest do the work.

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
/// Messages under way at once.
const UNDER_WAY: u32 = 256;
/// The same of long messages, and what is long.
const LONG_UNDER_WAY: u32 = 16;
const SEVERAL_KB: usize = 4 << 10;
/// The same for a QPC-limited card, and its queue pairs.
const LIMITED_UNDER_WAY: u32 = 128;
const LIMITED_QPS: u32 = 1_000;
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
/// The simulator's experiment: quick, and with all units at work.
const PLAN: &str = "csrna-8c";
const LIMIT: Duration = Duration::from_secs(60);
/// No further round begins that would end after this.
const ALL: Duration = Duration::from_secs(8 * 60);

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

    /// Runs it; gives what it prints: rate, CPU time, median, 1st and 99th percentile, seconds of the set-up.
    fn many(&self, args: &[&str], settings: &[(&str, &str)]) -> Result<[f64; 6]> {
        let mut command = Command::new(&self.many);
        on_card(&mut command, &self.lib);
        command.args(args).envs(settings.iter().copied());
        let output = child::run_one(command, LIMIT)?;
        let numbers: Vec<f64> = output.stdout.split_whitespace().filter_map(|w| w.parse().ok()).collect();
        numbers
            .try_into()
            .map_err(|_| BenchError::Parse { what: "many".into(), tail: child::tail_of(&output.stdout) })
    }

    /// `ib_write_bw` of 64 B over all queue pairs: millions of messages a second.
    fn write_bw(&self, cache: &str) -> Result<f64> {
        let path = child::require("ib_write_bw", "perftest")?;
        let port = child::free_tcp_port()?;
        let side = || {
            let mut side = Command::new(&path);
            on_card(&mut side, &self.lib);
            side.env("STARVERBS_QPC_CACHE", cache);
            side.args(["-F", "-p", &port.to_string(), "-s", "64", "-q", &LIMITED_QPS.to_string()]);
            /* the peak takes perftest a time that is quadratic in the messages, most of a minute here */
            side.args(["-n", "300", "-t", "5", "--noPeak"]);
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

    /// The simulator's events a second, in millions: "N events in S s, M M/s".
    fn events(&self) -> Result<f64> {
        let mut command = Command::new(&self.starverbs);
        command.args(["sim", PLAN, "--time"]);
        let output = child::run_one(command, LIMIT)?;
        let words: Vec<&str> = output.stderr.split_whitespace().collect();
        let at = words.iter().position(|word| *word == "M/s");
        at.and_then(|at| words.get(at.checked_sub(1)?)?.parse().ok()).ok_or_else(|| BenchError::Parse {
            what: "starverbs sim".into(),
            tail: child::tail_of(&output.stderr),
        })
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
    on_card(&mut command, &lib);
    if link != Link::Udp {
        same_host(&mut command);
    }
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
const SIM: &str = "sim";

/// Measures everything once. What fails is reported and left out.
fn round(samples: &mut Samples, tools: &Tools, seconds: f64) {
    let seconds = &seconds.to_string();
    for qps in QPS {
        for prefetch in ["on", "off"] {
            progress(&format!("{qps} queue pairs, prefetch {prefetch}"));
            let (qps, under_way) = (&qps.to_string(), &UNDER_WAY.to_string());
            let row = format!("{qps} {prefetch}");
            let args = ["-q", qps, "-w", under_way, "-t", seconds];
            let setting = ("STARVERBS_QPC_PREFETCH", prefetch);
            if let Some([rate, .., setup]) = reported(&row, tools.many(&args, &[setting])) {
                samples.add(SCALE, &row, &[("rate", rate), ("setup", setup)]);
            }
            let one_thread = [setting, ("STARVERBS_PROGRESS_THREAD", "off")];
            let args = [&["-l"][..], &args].concat();
            if let Some([_, cpu, ..]) = reported(&row, tools.many(&args, &one_thread)) {
                samples.add(SCALE, &row, &[("cpu", cpu)]);
            }
        }
    }
    for miss in MISSES {
        for (name, entries, policy, _) in CARDS {
            progress(&format!("a miss of {miss}, {name}"));
            let cache = format!("{entries},miss={miss},policy={policy}");
            let setting = [("STARVERBS_QPC_CACHE", cache.as_str())];
            let qps = &LIMITED_QPS.to_string();
            let args = |under_way| ["-q", qps, "-t", seconds, "-w", under_way];
            if let Some([_, _, typical, least, ..]) = reported(name, tools.many(&args("1"), &setting)) {
                samples.add(miss, name, &[("typical", typical), ("least", least)]);
            }
            if let Some([rate, ..]) =
                reported(name, tools.many(&args(&LIMITED_UNDER_WAY.to_string()), &setting))
            {
                samples.add(miss, name, &[("rate", rate)]);
            }
            if let Some(rate) = reported(name, tools.write_bw(&cache)) {
                samples.add(miss, name, &[("perftest", rate)]);
            }
        }
    }
    progress("the simulator");
    if let Some(events) = reported(SIM, tools.events()) {
        samples.add(SIM, PLAN, &[("events", events)]);
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
    let (samples, done) = Samples::gather(rounds, ALL, |samples| round(samples, &tools, seconds));
    /* the program is ours alone; that it stays behind harms nobody */
    let _ = fs::remove_file(&tools.many);
    let text = page(&machine, &samples, done);
    println!("{text}");
    write_file(out, "md", &text)?;
    write_file(out, "svg", &bars(&panels(&samples)))
}

fn scale_table(samples: &Samples) -> String {
    let heading =
        ["queue pairs", "CPU time, us", "without prefetch", "rate, M/s", "without prefetch", "set-up, s"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    for qps in QPS {
        let of = |prefetch: &str, column| samples.median(SCALE, &format!("{qps} {prefetch}"), column);
        rows.push(vec![
            qps.to_string(),
            cell(of("on", "cpu")),
            beside(of("off", "cpu"), of("on", "cpu")),
            cell(of("on", "rate")),
            beside(of("off", "rate"), of("on", "rate")),
            cell(of("on", "setup")),
        ]);
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
        scale_table(samples),
    );
    let _ = write!(
        text,
        "8 B WRITEs on RC queue pairs in turn, in a shuffled order, {UNDER_WAY} under way in all \
         (`tools/bench/programs/many.c`). CPU time is what a message takes at both ends and in the kernel, \
         measured in one thread that is both: other work on the machine hardly changes it. The rate is that \
         of two processes, with as many queue pairs each; the set-up is to create and connect them. Without \
         prefetch: `STARVERBS_QPC_PREFETCH=off`; in brackets by the column before.\n\n## Room for 300\n\n"
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
         ## The simulator\n\n{} million events a second (`starverbs sim {PLAN} --time`).\n",
        cell(samples.median(SIM, PLAN, "events")),
    );
    text
}

fn panels(samples: &Samples) -> Vec<Panel> {
    let bars = |rows: Vec<(String, Option<f64>, &'static str)>| -> Vec<Bar> {
        let bar = |(label, value, fill): (String, Option<f64>, _)| Some(Bar { label, value: value?, fill });
        rows.into_iter().filter_map(bar).collect()
    };
    let scale = |column| {
        let row = |qps: u32, (prefetch, said, fill): (&str, &str, _)| {
            (format!("{qps}, {said}"), samples.median(SCALE, &format!("{qps} {prefetch}"), column), fill)
        };
        let both = [("on", "prefetch", "#c0392b"), ("off", "without", "#e5a39a")];
        bars(QPS.into_iter().flat_map(|qps| both.map(|kind| row(qps, kind))).collect())
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
        for cpu in [2.0, 1.0, 9.0] {
            samples.add(SCALE, "1000 on", &[("cpu", cpu)]);
        }
        samples.add(SCALE, "1000 off", &[("cpu", 3.0)]);
        samples.add("5us", "FCFS", &[("rate", 0.5)]);
        assert_eq!(samples.median(SCALE, "1000 on", "cpu"), Some(2.0));
        let table = scale_table(&samples);
        assert!(table.contains("3.00 (1.50x)") && table.lines().count() == 2 + QPS.len(), "{table}");
        assert!(limited_table(&samples, "5us").contains("0.50"), "no base, no ratio");
        let panels = panels(&samples);
        assert_eq!(panels.iter().map(|panel| panel.bars.len()).sum::<usize>(), 3);
    }
}
