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

/// Messages of the shortest run that still says something.
const MIN_MESSAGES: u64 = 100;
/// What starting two programs takes of a run's time.
const START_UP: Duration = Duration::from_millis(300);
/// How much longer than planned a run may last on a busy machine.
const SLACK: f64 = 2.0;

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

struct CaseState {
    case: Case,
    figure: Figure,
    iters: u64,
    failures: usize,
    left_out: bool,
}

/// Runs all cases: a short uncounted round that settles how many messages each needs, then the counted ones.
pub(crate) fn run(cases: Vec<Case>, setup: &Setup, effort: Effort) -> Vec<Figure> {
    let start = Instant::now();
    let mut states: Vec<CaseState> = cases.into_iter().map(CaseState::new).collect();
    'rounds: for round in 0..=effort.rounds {
        milestone(&stage(round, effort));
        for state in &mut states {
            // The first round is for all; a later one may end anywhere, since medians need no equal counts.
            if round > 1 && start.elapsed() > effort.budget {
                eprintln!("time is up in {}", stage(round, effort));
                break 'rounds;
            }
            if !state.left_out {
                state.measure(setup, effort, round);
            }
        }
    }
    clear_line();
    states.into_iter().map(|state| state.figure).collect()
}

impl CaseState {
    fn new(case: Case) -> Self {
        let Case { part, row, metric, .. } = case;
        let figure = Figure { part, row, metric, samples: Vec::new(), problem: None };
        Self { case, figure, iters: metric.pilot(), failures: 0, left_out: false }
    }

    fn measure(&mut self, setup: &Setup, effort: Effort, round: usize) {
        let stage =
            if round == 0 { "warm-up".to_owned() } else { format!("round {round}/{}", effort.rounds) };
        progress(&format!("{stage}: {}: {}", self.case.row, self.case.metric.title()));
        let start = Instant::now();
        match self.case.run(setup, self.iters) {
            Ok(figure) => {
                let metric = self.case.metric;
                let by_figure = metric.messages_in(effort.seconds, figure);
                self.iters = by_figure.min(affordable(self.iters, effort.seconds, start.elapsed()));
                if round > 0 {
                    self.figure.samples.push(figure);
                }
            }
            Err(error) => {
                self.iters = (self.iters / 4).max(MIN_MESSAGES);
                self.failed(&error);
            }
        }
    }

    fn failed(&mut self, error: &BenchError) {
        self.failures += 1;
        self.left_out = error.is_skip() || self.failures >= MAX_FAILURES;
        let text = error.to_string();
        // A missing tool is reported once, not once per column.
        if !error.is_skip() {
            clear_line();
            eprintln!("{}, {}: {text}", self.case.row, self.case.metric.title());
        }
        self.figure.problem = Some(text);
    }
}

/// Messages that a next run can have where `iters` took `elapsed`: a median says nothing about a busy
/// machine's pauses, which would make a run by the median alone last for minutes.
fn affordable(iters: u64, seconds: f64, elapsed: Duration) -> u64 {
    let busy = elapsed.saturating_sub(START_UP).max(Duration::from_millis(1)).as_secs_f64();
    ((iters as f64 * (SLACK * seconds / busy)) as u64).max(MIN_MESSAGES)
}

fn stage(round: usize, effort: Effort) -> String {
    if round == 0 { "warm-up".to_owned() } else { format!("round {round}/{}", effort.rounds) }
}

/// Writes the progress to a log, which has no line to replace.
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
    fn a_run_that_was_slow_is_followed_by_a_shorter_one() {
        assert_eq!(affordable(1_000, 1.0, Duration::from_millis(10_300)), 200);
        assert_eq!(affordable(1_000, 1.0, Duration::from_secs(3_600)), MIN_MESSAGES);
        assert!(affordable(1_000, 1.0, Duration::from_millis(200)) > 1_000_000);
    }

    #[test]
    fn the_median_does_not_follow_an_outlier() {
        assert_eq!(median(&[3.0, 1.0, 900.0]), Some(3.0));
        assert_eq!(median(&[1.0, 2.0]), Some(1.5));
        assert_eq!(median(&[]), None);
    }
}
