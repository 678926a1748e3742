//! How many events a second `starverbs sim` simulates.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use super::LIMIT;
use crate::child;
use crate::error::{BenchError, Result};
use crate::round::progress;
use crate::samples::{Samples, cell, reported};

/// Experiments, one of each kind, and what runs there.
const PLANS: [(&str, &str); 3] = [
    ("csrna-8c", "csRNA's units"),
    ("star-12", "the core's StaR on units"),
    ("csrna-loss", "the core's RC on units"),
];
/// How many million events a second are to be simulated.
const LEAST: f64 = 10.0;
/// The table's rows.
const SIM: &str = "sim";

pub(super) fn measure(samples: &mut Samples, starverbs: &Path) {
    for (plan, _) in PLANS {
        progress(plan);
        if let Some(events) = reported(SIM, events(starverbs, plan)) {
            samples.add(SIM, plan, &[("events", events)]);
        }
    }
}

/// Millions of a plan: "N events in S s, M M/s".
fn events(starverbs: &Path, plan: &str) -> Result<f64> {
    let mut command = Command::new(starverbs);
    command.args(["sim", plan, "--time"]);
    let output = child::run_one(command, LIMIT)?;
    let words: Vec<&str> = output.stderr.split_whitespace().collect();
    let at = words.iter().position(|word| *word == "M/s");
    at.and_then(|at| words.get(at.checked_sub(1)?)?.parse().ok()).ok_or_else(|| BenchError::Parse {
        what: "starverbs sim".into(),
        tail: child::tail_of(&output.stderr),
    })
}

pub(super) fn table(samples: &Samples) -> String {
    let mut text = format!("| plan | what runs | M/s | at least {LEAST} |\n|---|---|---|---|\n");
    for (plan, what) in PLANS {
        let events = samples.median(SIM, plan, "events");
        let holds = events.map_or("-", |events| if events >= LEAST { "yes" } else { "no" });
        let _ = writeln!(text, "| {plan} | {what} | {} | {holds} |", cell(events));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_stands_beside_the_aim() {
        let mut samples = Samples::default();
        for (plan, events) in [("star-12", 9.9), ("csrna-8c", 10.0)] {
            samples.add(SIM, plan, &[("events", events)]);
        }
        let table = table(&samples);
        let verdicts: Vec<&str> = table.lines().skip(2).filter_map(|row| row.split(" | ").last()).collect();
        assert_eq!(verdicts, ["yes |", "no |", "- |"], "{table}");
    }
}
