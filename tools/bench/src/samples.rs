//! Figures of several rounds, kept by table, row and column, and how a page shows one and two of them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use starverbs_charts::short;

use crate::error::Result;
use crate::round::{clear_line, median};

/// A figure's place: table, row, column.
type Place = (&'static str, String, &'static str);

/// What the rounds gave.
#[derive(Debug, Default)]
pub(crate) struct Samples(BTreeMap<Place, Vec<f64>>);

impl Samples {
    /// What rounds give, one at least and no more than `rounds` or than end in `time`; and how many there
    /// were.
    pub(crate) fn gather(rounds: u32, time: Duration, round: impl Fn(&mut Samples)) -> (Samples, u32) {
        let (mut samples, began, mut done) = (Samples::default(), Instant::now(), 0);
        while done < rounds && (done == 0 || began.elapsed() / done * (done + 1) < time) {
            round(&mut samples);
            done += 1;
            eprintln!("round {done} of {rounds}");
        }
        (samples, done)
    }

    /// Keeps what one round gave for a row.
    pub(crate) fn add(&mut self, table: &'static str, row: &str, figures: &[(&'static str, f64)]) {
        for (column, figure) in figures {
            self.0.entry((table, row.to_owned(), column)).or_default().push(*figure);
        }
    }

    /// The median of the rounds; none where none gave a figure.
    pub(crate) fn median(&self, table: &'static str, row: &str, column: &'static str) -> Option<f64> {
        median(self.0.get(&(table, row.to_owned(), column))?)
    }
}

/// What came out; a failure is reported and left out.
pub(crate) fn reported<T>(what: &str, result: Result<T>) -> Option<T> {
    clear_line();
    result.inspect_err(|error| eprintln!("{what}: {error}")).ok()
}

/// A figure; a dash where there is none.
pub(crate) fn cell(figure: Option<f64>) -> String {
    figure.map_or("-".to_owned(), short)
}

/// A figure, and its ratio to another that is not 0.
pub(crate) fn beside(figure: Option<f64>, base: Option<f64>) -> String {
    match (figure, base) {
        (Some(figure), Some(base)) if base != 0.0 => format!("{} ({:.2}x)", short(figure), figure / base),
        (figure, _) => cell(figure),
    }
}
