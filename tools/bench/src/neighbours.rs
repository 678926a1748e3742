//! READs of a queue pair beside others whose peer was killed.
//!
//! Owns this measurement and its page. programs/neighbours.c does the work.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use starverbs_charts::{Bar, Panel, bars};

use crate::child;
use crate::error::{BenchError, Result};
use crate::machine::Machine;
use crate::perftest::{library_dir, on_card};
use crate::report::{Table, write_file};
use crate::round::progress;
use crate::samples::{Samples, cell, reported};

/// What the dead queue pairs were asked for: the row, and the program's arguments.
const CASES: [(&str, &[&str]); 5] = [
    ("one, a READ of 64 KiB, timeout 14", &["-r", "-c", "14"]),
    ("one, a READ of 64 KiB, timeout 18", &["-r", "-c", "18"]),
    ("one, 32 READs of 64 KiB, no timeout", &["-r", "-b", "32", "-c", "0"]),
    ("eight, 8 WRITEs of 64 KiB each, timeout 14", &["-q", "8", "-b", "8", "-c", "14"]),
    ("a hundred, 8 WRITEs of 4 KiB each, timeout 18", &["-q", "100", "-b", "8", "-l", "4096", "-c", "18"]),
];
/// What the program prints, in its order.
const COLUMNS: [&str; 8] =
    ["median", "p99", "longest", "median beside", "p99 beside", "longest beside", "late", "reads"];
const GROUP: &str = "neighbours";
const LIMIT: Duration = Duration::from_secs(120);
/// No further round begins that would end after this.
const ALL: Duration = Duration::from_secs(6 * 60);

/// Measures in rounds, one at least and no more than `rounds` or than end in time, and writes `out`.md and
/// `out`.svg.
///
/// # Errors
/// Where nothing can be measured, or the files cannot be written.
pub(crate) fn run(out: &Path, dist: &Path, rounds: u32, quick: bool) -> Result<()> {
    let machine = Machine::read(false, quick);
    let lib = library_dir(dist)?;
    let program = child::compiled("neighbours", &lib)?;
    let seconds = if quick { "0.5" } else { "3" };
    let (samples, done) = Samples::gather(rounds, ALL, |samples| {
        for (name, args) in CASES {
            progress(name);
            if let Some(values) = reported(name, measure(&program, &lib, args, seconds)) {
                let values: Vec<(&'static str, f64)> = COLUMNS.into_iter().zip(values).collect();
                samples.add(GROUP, name, &values);
            }
        }
    });
    let _ = fs::remove_file(&program);
    let text = page(&machine, &samples, done);
    println!("{text}");
    write_file(out, "md", &text)?;
    write_file(out, "svg", &bars(&panels(&samples)))
}

fn measure(program: &PathBuf, lib: &Path, args: &[&str], seconds: &str) -> Result<[f64; 8]> {
    let mut command = Command::new(program);
    on_card(&mut command, lib);
    command.args(args).args(["-t", seconds]);
    let output = child::run_one(command, LIMIT)?;
    let numbers: Vec<f64> = output.stdout.split_whitespace().filter_map(|w| w.parse().ok()).collect();
    numbers
        .try_into()
        .map_err(|_| BenchError::Parse { what: "neighbours".into(), tail: child::tail_of(&output.stdout) })
}

fn table(samples: &Samples) -> String {
    let heading = [
        "dead queue pairs",
        "p99 before, us",
        "longest",
        "p99 beside, us",
        "longest",
        "READs beyond 2 x p99",
        "of",
    ];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    for (name, _) in CASES {
        let of = |column| cell(samples.median(GROUP, name, column));
        let columns = ["p99", "longest", "p99 beside", "longest beside", "late", "reads"];
        rows.push([vec![name.to_owned()], columns.map(of).to_vec()].concat());
    }
    Table(rows).markdown()
}

fn page(machine: &Machine, samples: &Samples, rounds: u32) -> String {
    format!(
        "# Beside queue pairs whose peer is gone\n\nWritten by `make bench-neighbours` (tools/bench, \
         src/neighbours.rs); do not edit.\n\n![bars](bench-neighbours.svg)\n\n\
         {}. Medians of {rounds} rounds.\n{}\n{}\n\
         READs of 4 KiB, one after the other for three seconds, to one process of this host, before and \
         after another process of it is killed, to which the same process has queue pairs with requests \
         under way (`tools/bench/programs/neighbours.c`). Both go to one address, so they share a path. \
         Until its first timeout (1 ms or four round trips) a dead queue pair may hold the path's window; \
         behind it, it has one packet in flight, which the window does not count.\n",
        machine.described(),
        machine.warning(),
        table(samples),
    )
}

fn panels(samples: &Samples) -> Vec<Panel> {
    let bars = CASES.iter().flat_map(|(name, _)| {
        let bar = |column, said: &str, fill| {
            let value = samples.median(GROUP, name, column)?;
            Some(Bar { label: format!("{name}: {said}"), value, fill })
        };
        [bar("p99", "before", "#b8b8b8"), bar("p99 beside", "beside", "#c0392b")]
    });
    let title = "99th percentile of a 4 KiB READ, us".to_owned();
    vec![Panel { title, less_is_better: true, bars: bars.flatten().collect() }]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_case_is_a_row() {
        let mut samples = Samples::default();
        samples.add(GROUP, CASES[0].0, &[("p99", 120.0), ("p99 beside", 130.0), ("late", 2.0)]);
        let table = table(&samples);
        assert!(table.contains("120") && table.contains("130"), "{table}");
        assert_eq!(table.lines().count(), 2 + CASES.len());
        assert_eq!(panels(&samples)[0].bars.len(), 2);
    }
}
