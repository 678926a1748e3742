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
                let last = LastRun { figure, iters: self.iters, elapsed: start.elapsed() };
                self.iters = last.next(self.case.metric, effort.seconds);
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

/// What a run says of the next one's length.
struct LastRun {
    figure: f64,
    iters: u64,
    /// With what starting the programs took
    elapsed: Duration,
}

impl LastRun {
    /// Messages that take `seconds`. A rate is of all messages. A latency is a median, which says nothing
    /// about a busy machine's pauses: a run by it alone would last for minutes.
    fn next(&self, metric: Metric, seconds: f64) -> u64 {
        let by_figure = metric.messages_in(seconds, self.figure);
        if !metric.smaller_is_better() {
            return by_figure;
        }
        let busy = self.elapsed.saturating_sub(START_UP).max(Duration::from_millis(1)).as_secs_f64();
        let affordable = (self.iters as f64 * (SLACK * seconds / busy)) as u64;
        by_figure.min(affordable.max(MIN_MESSAGES))
    }
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
    fn a_latency_whose_run_was_slow_is_followed_by_a_shorter_one() {
        let next = |millis| {
            let elapsed = Duration::from_millis(millis);
            LastRun { figure: 1.0, iters: 1_000, elapsed }.next(Metric::Latency8B, 1.0)
        };
        assert_eq!((next(10_300), next(3_600_000)), (200, MIN_MESSAGES));
        assert_eq!(next(200), Metric::Latency8B.messages_in(1.0, 1.0));
    }

    /// `ib_write_bw` sleeps for a second before its first message, and to connect 100,000 queue pairs takes
    /// longer.
    #[test]
    fn a_long_start_leaves_a_stream_its_messages() {
        let last = LastRun { figure: 20.0, iters: 200, elapsed: Duration::from_millis(1_400) };
        assert_eq!(last.next(Metric::Stream1M, 0.5), Metric::Stream1M.messages_in(0.5, 20.0));
    }

    #[test]
    fn the_median_does_not_follow_an_outlier() {
        assert_eq!(median(&[3.0, 1.0, 900.0]), Some(3.0));
        assert_eq!(median(&[1.0, 2.0]), Some(1.5));
        assert_eq!(median(&[]), None);
    }
}
