//! One thing done in several ways: what a program of programs/ says of it, as tables, bars, and sentences of
//! a paper.
//!
//! The program's lines are a name, WAY.NUMBER or WAY.NUMBER.p99, and a figure. It must not know what is done.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use starverbs_charts::{Bar, Panel};

use crate::child;
use crate::error::{BenchError, Result};
use crate::perftest::{library_dir, on_card};
use crate::report::Table;
use crate::round::progress;
use crate::samples::{Samples, beside, cell, reported};

pub(crate) const MEDIAN: &str = "median";
pub(crate) const P99: &str = "p99";
const LIMIT: Duration = Duration::from_secs(120);
pub(crate) const PLAIN: &str = "#b8b8b8";
pub(crate) const SOFTWARE: &str = "#2e6da4";
pub(crate) const CARD: &str = "#c0392b";

/// One thing done in several ways: title, what its numbers count, these, and its ways: the program's name,
/// ours, and the colour. The first is what others are held against.
pub(crate) struct Part {
    pub(crate) title: &'static str,
    pub(crate) counts: &'static str,
    pub(crate) numbers: &'static [u32],
    pub(crate) ways: &'static [(&'static str, &'static str, &'static str)],
}

/// A program of programs/, and what it measures.
pub(crate) struct Program {
    pub(crate) name: &'static str,
    pub(crate) parts: &'static [Part],
    /// Names of other lines, with one figure each
    pub(crate) others: &'static [&'static str],
    /// The addresses that its processes have
    pub(crate) addrs: &'static str,
    /// `STARVERBS_LINK`: the wire, or memory where it can be
    pub(crate) link: &'static str,
}

impl Program {
    /// Runs it in rounds, one at least and no more than `rounds` or than end in `time`.
    ///
    /// # Errors
    /// It cannot be compiled.
    pub(crate) fn gather(
        &self,
        dist: &Path,
        rounds: u32,
        time: Duration,
        seconds: &str,
    ) -> Result<(Samples, u32)> {
        let lib = library_dir(dist)?;
        let program = child::compiled(self.name, &lib)?;
        let gathered = Samples::gather(rounds, time, |samples| {
            progress(self.name);
            let lines = reported(self.name, self.measure(&program, &lib, seconds));
            for (name, value) in lines.into_iter().flatten() {
                match name.strip_suffix(".p99") {
                    Some(name) => samples.add(self.name, name, &[(P99, value)]),
                    None => samples.add(self.name, &name, &[(MEDIAN, value)]),
                }
            }
        });
        /* the program is ours alone; that it stays behind harms nobody */
        let _ = fs::remove_file(&program);
        Ok(gathered)
    }

    /// Runs the program; gives its lines by name: all of them.
    fn measure(&self, program: &PathBuf, lib: &Path, seconds: &str) -> Result<BTreeMap<String, f64>> {
        let mut command = Command::new(program);
        on_card(&mut command, lib);
        command.env("STARVERBS_ADDRS", self.addrs).env("STARVERBS_LINK", self.link).args(["-t", seconds]);
        /* kernels as modules lie beside the libraries: `make modules` */
        command.env("KERNEL_MODULES", lib.with_file_name("modules"));
        let output = child::run_one(command, LIMIT)?;
        let line = |line: &str| {
            let (name, number) = line.split_once(' ')?;
            Some((name.to_owned(), number.parse().ok()?))
        };
        let lines: BTreeMap<String, f64> = output.stdout.lines().filter_map(line).collect();
        let wanted: usize = self.parts.iter().map(|part| 2 * part.ways.len() * part.numbers.len()).sum();
        if lines.len() == wanted + self.others.len() {
            Ok(lines)
        } else {
            Err(BenchError::Parse { what: self.name.into(), tail: child::tail_of(&output.stdout) })
        }
    }

    /// The median of the rounds.
    pub(crate) fn of(&self, samples: &Samples, way: &str, number: u32, column: &'static str) -> Option<f64> {
        samples.median(self.name, &format!("{way}.{number}"), column)
    }

    /// A part's table.
    pub(crate) fn table(&self, samples: &Samples, part: &Part) -> String {
        let mut heading = vec![part.counts.to_owned()];
        for (_, name, _) in part.ways {
            heading.extend([format!("{name}, us"), "p99".to_owned()]);
        }
        let mut rows = vec![heading];
        let first = part.ways[0].0;
        for number in part.numbers {
            let mut row = vec![number.to_string()];
            for (way, ..) in part.ways {
                let median = self.of(samples, way, *number, MEDIAN);
                let base = self.of(samples, first, *number, MEDIAN).filter(|_| *way != first);
                row.extend([beside(median, base), cell(self.of(samples, way, *number, P99))]);
            }
            rows.push(row);
        }
        Table(rows).markdown()
    }

    /// The tables of all parts.
    pub(crate) fn tables(&self, samples: &Samples) -> String {
        let table = |part: &Part| format!("\n## {}\n\n{}", part.title, self.table(samples, part));
        self.parts.iter().map(table).collect()
    }

    /// A panel of bars for each part.
    pub(crate) fn panels(&self, samples: &Samples) -> Vec<Panel> {
        let panel = |part: &Part| {
            let bars = part.numbers.iter().flat_map(|number| {
                part.ways.iter().filter_map(move |(way, name, fill)| {
                    let value = self.of(samples, way, *number, MEDIAN)?;
                    Some(Bar { label: format!("{number}, {name}"), value, fill })
                })
            });
            let title = format!("{}, by {}: median, us", part.title, part.counts);
            Panel { title, less_is_better: true, bars: bars.collect() }
        };
        self.parts.iter().map(panel).collect()
    }
}

/// Something that a paper says, and what came out: a figure, and whether it is as said.
pub(crate) struct Claim {
    pub(crate) says: &'static str,
    pub(crate) ours: Option<String>,
    pub(crate) holds: Option<bool>,
}

/// Of two medians their ratio, how it is put, and whether that is as the paper says.
pub(crate) fn claim(
    says: &'static str,
    pair: Option<(f64, f64)>,
    put: impl Fn(f64, f64) -> String,
    holds: impl Fn(f64) -> bool,
) -> Claim {
    let pair = pair.filter(|(_, base)| *base > 0.0);
    Claim { says, ours: pair.map(|(a, b)| put(a, b)), holds: pair.map(|(a, b)| holds(a / b)) }
}

/// Their table.
pub(crate) fn claims_table(claims: Vec<Claim>) -> String {
    let mut rows = vec![["what is said", "ours", ""].map(str::to_owned).to_vec()];
    for Claim { says, ours, holds } in claims {
        let verdict = match holds {
            Some(true) => "holds",
            Some(false) => "does not hold",
            None => "not measured",
        };
        rows.push(vec![says.to_owned(), ours.unwrap_or_else(|| "-".to_owned()), verdict.to_owned()]);
    }
    Table(rows).markdown()
}
