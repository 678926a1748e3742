//! Rounds: every case once per round, so that a noisy moment hits all alike; medians over the rounds.
//!
//! Owns order, repetition and progress. It must not know how a case is run.

use std::io::Write;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::case::{Case, Metric, Part, Setup};
use crate::error::BenchError;

/// How often a case may fail before it is left out.
const MAX_FAILURES: usize = 2;

/// How much is measured.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Effort {
    /// Counted rounds.
    pub(crate) rounds: usize,
    /// Seconds that one case should measure for.
    pub(crate) seconds: f64,
    /// No new round begins after this much time.
    pub(crate) budget: Duration,
}

/// What the rounds gave for one case.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Figure {
    /// The part it belongs to.
    pub(crate) part: Part,
    /// The row of the table.
    pub(crate) row: &'static str,
    /// The column of the table.
    pub(crate) metric: Metric,
    /// One figure per round.
    pub(crate) samples: Vec<f64>,
    /// Why there are none, or fewer than rounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) problem: Option<String>,
}

impl Figure {
    /// The median of the samples.
    pub(crate) fn median(&self) -> Option<f64> {
        median(&self.samples)
    }
}

/// The median; of an even number of values the mean of the two in the middle.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

struct State {
    case: Case,
    figure: Figure,
    iters: u64,
    failures: usize,
    left_out: bool,
}

/// Runs all cases: a short uncounted round that settles how many messages each needs, then the counted ones.
pub(crate) fn run(cases: Vec<Case>, setup: &Setup, effort: Effort) -> Vec<Figure> {
    let start = Instant::now();
    let mut states: Vec<State> = cases.into_iter().map(State::new).collect();
    for round in 0..=effort.rounds {
        if round > 1 && start.elapsed() > effort.budget {
            eprintln!("time is up after {} of {} rounds", round - 1, effort.rounds);
            break;
        }
        milestone(&stage(round, effort));
        for state in &mut states {
            if !state.left_out {
                state.measure(setup, effort, round);
            }
        }
    }
    clear_line();
    states.into_iter().map(|state| state.figure).collect()
}

impl State {
    fn new(case: Case) -> Self {
        let Case { part, row, metric, .. } = case;
        let figure = Figure { part, row, metric, samples: Vec::new(), problem: None };
        Self { case, figure, iters: metric.pilot(), failures: 0, left_out: false }
    }

    fn measure(&mut self, setup: &Setup, effort: Effort, round: usize) {
        let stage =
            if round == 0 { "warm-up".to_owned() } else { format!("round {round}/{}", effort.rounds) };
        progress(&format!("{stage}: {}: {}", self.case.row, self.case.metric.title()));
        match self.case.run(setup, self.iters) {
            Ok(figure) => {
                self.iters = self.case.metric.messages_in(effort.seconds, figure);
                if round > 0 {
                    self.figure.samples.push(figure);
                }
            }
            Err(error) => self.failed(&error),
        }
    }

    fn failed(&mut self, error: &BenchError) {
        self.failures += 1;
        self.left_out = error.is_skip() || self.failures >= MAX_FAILURES;
        let text = error.to_string();
        // A missing tool is told once, not once per column.
        if !error.is_skip() {
            clear_line();
            eprintln!("{}, {}: {text}", self.case.row, self.case.metric.title());
        }
        self.figure.problem = Some(text);
    }
}

fn stage(round: usize, effort: Effort) -> String {
    if round == 0 { "warm-up".to_owned() } else { format!("round {round}/{}", effort.rounds) }
}

/// Tells a log, which has no line to replace, how far the run has come.
fn milestone(text: &str) {
    use std::io::IsTerminal;
    if !std::io::stderr().is_terminal() {
        eprintln!("{text}");
    }
}

/// Shows what is being done, on one line that the next one replaces.
pub(crate) fn progress(text: &str) {
    use std::io::IsTerminal;
    let mut out = std::io::stderr();
    if out.is_terminal() {
        let _ = write!(out, "\r\x1b[K{text}");
        let _ = out.flush();
    }
}

/// Leaves the line of [`progress`] empty.
pub(crate) fn clear_line() {
    progress("");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_does_not_follow_an_outlier() {
        assert_eq!(median(&[3.0, 1.0, 900.0]), Some(3.0));
        assert_eq!(median(&[1.0, 2.0]), Some(1.5));
        assert_eq!(median(&[]), None);
    }
}
