//! What StRoM's kernels save over READs, on the UDP wire: GET of a key-value store, traversal of a list, and
//! a consistent read; and what of that the paper says.
//!
//! Owns these measurements and their page. programs/strom.c does the work.

use std::collections::BTreeMap;
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
use crate::samples::{Samples, beside, cell, reported};

/// Bytes of values and objects.
const SIZES: [u32; 4] = [64, 256, 1024, 4096];
/// Elements of the list up to the one that is looked for.
const HOPS: [u32; 5] = [1, 2, 4, 8, 16];
const MEDIAN: &str = "median";
const P99: &str = "p99";
const GROUP: &str = "strom";
const LIMIT: Duration = Duration::from_secs(120);
/// No further round begins that would end after this.
const ALL: Duration = Duration::from_secs(6 * 60);
const READ: &str = "#b8b8b8";
const SOFTWARE: &str = "#2e6da4";
const STROM: &str = "#c0392b";

/// One thing done in several ways: title, what its numbers count, these, and its ways: the program's name,
/// ours, and the colour. The first is what others are held against.
struct Part {
    title: &'static str,
    counts: &'static str,
    numbers: &'static [u32],
    ways: &'static [(&'static str, &'static str, &'static str)],
}

const PARTS: [Part; 3] = [
    Part {
        title: "GET of a key-value store",
        counts: "bytes of the value",
        numbers: &SIZES,
        ways: &[
            ("get.reads", "two READs", SOFTWARE),
            ("get.rpc", "RPC", STROM),
            ("get.read", "one READ, where the value's place is known", READ),
        ],
    },
    Part {
        title: "Traversal of a list",
        counts: "elements to the value, of 64 B",
        numbers: &HOPS,
        ways: &[("list.reads", "READs", SOFTWARE), ("list.rpc", "RPC", STROM)],
    },
    Part {
        title: "Consistent read",
        counts: "bytes of the object",
        numbers: &SIZES,
        ways: &[
            ("check.read", "READ, not checked", READ),
            ("check.software", "READ, checked by the requester", SOFTWARE),
            ("check.rpc", "RPC", STROM),
        ],
    },
];

/// Measures in rounds, one at least and no more than `rounds` or than end in time, and writes `out`.md and
/// `out`.svg.
///
/// # Errors
/// Where nothing can be measured, or the files cannot be written.
pub(crate) fn run(out: &Path, dist: &Path, rounds: u32, quick: bool) -> Result<()> {
    let machine = Machine::read(false, quick);
    let lib = library_dir(dist)?;
    let program = child::compiled("strom", &lib)?;
    let seconds = if quick { "0.05" } else { "0.5" };
    let (samples, done) = Samples::gather(rounds, ALL, |samples| {
        progress("GET, traversal, consistent read");
        for (name, value) in reported("strom", measure(&program, &lib, seconds)).into_iter().flatten() {
            match name.strip_suffix(".p99") {
                Some(name) => samples.add(GROUP, name, &[(P99, value)]),
                None => samples.add(GROUP, &name, &[(MEDIAN, value)]),
            }
        }
    });
    /* the program is ours alone; that it stays behind harms nobody */
    let _ = fs::remove_file(&program);
    let text = page(&machine, &samples, done);
    println!("{text}");
    write_file(out, "md", &text)?;
    write_file(out, "svg", &bars(&panels(&samples)))
}

/// Runs the program; gives its lines by name: all of them.
fn measure(program: &PathBuf, lib: &Path, seconds: &str) -> Result<BTreeMap<String, f64>> {
    let mut command = Command::new(program);
    on_card(&mut command, lib);
    command.args(["-t", seconds]);
    let output = child::run_one(command, LIMIT)?;
    let line = |line: &str| {
        let (name, number) = line.split_once(' ')?;
        Some((name.to_owned(), number.parse().ok()?))
    };
    let lines: BTreeMap<String, f64> = output.stdout.lines().filter_map(line).collect();
    let wanted: usize = PARTS.iter().map(|part| 2 * part.ways.len() * part.numbers.len()).sum();
    if lines.len() == wanted {
        Ok(lines)
    } else {
        Err(BenchError::Parse { what: "strom".into(), tail: child::tail_of(&output.stdout) })
    }
}

fn of(samples: &Samples, way: &str, number: u32, column: &'static str) -> Option<f64> {
    samples.median(GROUP, &format!("{way}.{number}"), column)
}

fn table(samples: &Samples, part: &Part) -> String {
    let mut heading = vec![part.counts.to_owned()];
    for (_, name, _) in part.ways {
        heading.extend([format!("{name}, us"), "p99".to_owned()]);
    }
    let mut rows = vec![heading];
    let first = part.ways[0].0;
    for number in part.numbers {
        let mut row = vec![number.to_string()];
        for (way, ..) in part.ways {
            let median = of(samples, way, *number, MEDIAN);
            let base = of(samples, first, *number, MEDIAN).filter(|_| *way != first);
            row.extend([beside(median, base), cell(of(samples, way, *number, P99))]);
        }
        rows.push(row);
    }
    Table(rows).markdown()
}

/// Something that the paper says, and what came out: a figure, and whether it is as said.
struct Claim {
    says: &'static str,
    ours: Option<String>,
    holds: Option<bool>,
}

/// Of two medians their ratio, how it is put, and whether that is as the paper says.
fn claim(
    says: &'static str,
    pair: Option<(f64, f64)>,
    put: impl Fn(f64, f64) -> String,
    holds: impl Fn(f64) -> bool,
) -> Claim {
    let pair = pair.filter(|(_, base)| *base > 0.0);
    Claim { says, ours: pair.map(|(a, b)| put(a, b)), holds: pair.map(|(a, b)| holds(a / b)) }
}

fn claims(samples: &Samples) -> Vec<Claim> {
    let median = |way: &str, number| of(samples, way, number, MEDIAN);
    let both = |a: Option<f64>, b: Option<f64>| Some((a?, b?));
    let (few, many) = (HOPS[0], HOPS[HOPS.len() - 1]);
    let (short, long) = (SIZES[0], SIZES[SIZES.len() - 1]);
    let grows = |way| both(median(way, many), median(way, few));
    let over = |way, size| both(median(way, size), median("check.read", size));
    let times = |a: f64, b: f64| format!("{:.2}x", a / b);
    let more = |a: f64, b: f64| format!("{:+.0} %", (a / b - 1.0) * 100.0);
    let reads = grows("list.reads").map_or(f64::INFINITY, |(a, b)| a / b);
    vec![
        claim(
            "A GET by RPC saves one of the two round trips that READs take (figure 8)",
            both(median("get.rpc", short), median("get.reads", short)),
            |a, b| format!("{a:.1} us instead of {b:.1}: {:.2}x", a / b),
            |ratio| ratio <= 0.75,
        ),
        claim(
            "It is one round trip, as a READ is",
            both(median("get.rpc", short), median("get.read", short)),
            times,
            |ratio| ratio <= 1.5,
        ),
        claim(
            "By READs a traversal takes a round trip an element (figure 7)",
            grows("list.reads"),
            |a, b| format!("{many} elements take {:.1}x what {few} takes", a / b),
            |ratio| ratio >= f64::from(many + 1) / f64::from(few + 1) / 1.5,
        ),
        claim(
            "By RPC it grows less than its list does (figure 7)",
            grows("list.rpc"),
            |a, b| format!("{many} elements take {:.1}x what {few} takes", a / b),
            move |ratio| ratio < reads / 2.0,
        ),
        claim(
            "On small objects a check costs next to nothing, in software (figure 9)",
            over("check.software", short),
            more,
            |ratio| ratio <= 1.1,
        ),
        claim("nor on the card (figure 9)", over("check.rpc", short), more, |ratio| ratio <= 1.1),
        claim(
            "On objects of 4 KiB the requester's check costs up to 40 % (figure 9)",
            over("check.software", long),
            more,
            |ratio| (1.1..=1.6).contains(&ratio),
        ),
        claim("and the card's less than 8 % (figure 9)", over("check.rpc", long), more, |ratio| ratio < 1.08),
    ]
}

fn claims_table(samples: &Samples) -> String {
    let mut rows = vec![["the paper says", "ours", ""].map(str::to_owned).to_vec()];
    for Claim { says, ours, holds } in claims(samples) {
        let verdict = match holds {
            Some(true) => "holds",
            Some(false) => "does not hold",
            None => "not measured",
        };
        rows.push(vec![says.to_owned(), ours.unwrap_or_else(|| "-".to_owned()), verdict.to_owned()]);
    }
    Table(rows).markdown()
}

fn page(machine: &Machine, samples: &Samples, rounds: u32) -> String {
    let mut text = format!(
        "# StRoM: RPCs against READs\n\nWritten by `make bench-strom` (tools/bench, src/strom.rs); do not \
         edit.\n\n![bars](bench-strom.svg)\n\n{}. Medians of {rounds} rounds.\n{}\n{}\n\
         Two processes of this host, UDP on 127.0.0.1, both poll without a break; one request after the \
         other, from its post to the last byte of its answer (`tools/bench/programs/strom.c`). In \
         brackets by the first column. A kernel here is a program on the peer's CPU, in its card's turn: \
         where the paper's waits 1.5 us for PCIe, it waits for memory, and where the paper's CRC is a \
         circuit, it is code.\n",
        machine.described(),
        machine.warning(),
        claims_table(samples),
    );
    for part in &PARTS {
        text.push_str(&format!("\n## {}\n\n{}", part.title, table(samples, part)));
    }
    text
}

fn panels(samples: &Samples) -> Vec<Panel> {
    let panel = |part: &Part| {
        let bars = part.numbers.iter().flat_map(|number| {
            part.ways.iter().filter_map(move |(way, name, fill)| {
                let value = of(samples, way, *number, MEDIAN)?;
                Some(Bar { label: format!("{number}, {name}"), value, fill })
            })
        });
        let title = format!("{}, by {}: median, us", part.title, part.counts);
        Panel { title, less_is_better: true, bars: bars.collect() }
    };
    PARTS.iter().map(panel).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(rpc: f64) -> Samples {
        let mut samples = Samples::default();
        for part in &PARTS {
            for number in part.numbers {
                for (way, ..) in part.ways {
                    let reads = if *way == "list.reads" { f64::from(number + 1) } else { 2.0 };
                    let value = if way.ends_with("rpc") { rpc } else { 10.0 * reads };
                    samples.add(GROUP, &format!("{way}.{number}"), &[(MEDIAN, value), (P99, 99.0)]);
                }
            }
        }
        samples
    }

    #[test]
    fn each_way_is_a_column_and_each_number_a_row() {
        for part in &PARTS {
            let table = table(&samples(12.0), part);
            assert_eq!(table.lines().count(), 2 + part.numbers.len(), "{table}");
            assert!(table.contains("12.0 (0.60x)") && table.contains("99.0"), "{table}");
        }
        let bars: usize = panels(&samples(12.0)).iter().map(|panel| panel.bars.len()).sum();
        assert_eq!(bars, PARTS.iter().map(|part| part.ways.len() * part.numbers.len()).sum::<usize>());
    }

    #[test]
    fn claims_hold_or_do_not_or_were_not_measured() {
        let verdicts =
            |samples: Samples| claims(&samples).iter().map(|claim| claim.holds).collect::<Vec<_>>();
        let good = verdicts(samples(12.0));
        assert_eq!(good.iter().filter(|holds| **holds == Some(true)).count(), good.len() - 1, "{good:?}");
        let bad = verdicts(samples(30.0));
        assert_eq!((bad[0], bad[2], bad[7]), (Some(false), Some(true), Some(false)));
        assert!(verdicts(Samples::default()).iter().all(Option::is_none));
        assert!(claims_table(&Samples::default()).contains("not measured"));
    }
}
