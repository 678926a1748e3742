//! A figure as rows, CSV, and a table beside the paper's points.

use std::fmt::Write as _;

use serde::Serialize;

use super::plan::{Finished, Metric, PaperPoint};
use super::run::RunResult;

/// One point.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The line
    pub series: String,
    /// Where on the axis
    pub x: u32,
    /// What came out
    pub here: f64,
    /// What the paper shows there
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paper: Option<f64>,
    /// `here / paper`
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// Where the paper's point is from
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Whether that is the paper's text
    #[serde(skip)]
    pub is_text: bool,
}

/// A figure.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Its name: of the plan's file
    pub name: String,
    /// What it shows
    pub title: String,
    /// Of the axis
    pub x: String,
    /// Of what is drawn
    pub y: String,
    /// Where it differs from the paper, and why
    pub note: String,
    /// All points
    pub rows: Vec<Row>,
    #[serde(skip)]
    details: Vec<Option<RunResult>>,
    /// Whether the upward axis of a picture begins at 0
    #[serde(skip)]
    pub zero_based: bool,
}

impl Report {
    /// The figure `name` of a plan that was carried out.
    pub fn new(name: &str, finished: &Finished) -> Report {
        let plan = &finished.plan;
        let mut rows = Vec::new();
        for (series, values) in plan.series.iter().zip(&finished.values) {
            for (&x, &here) in plan.x.values.iter().zip(values) {
                let point = series.paper.iter().find(|point| point.x == x);
                let paper = point.map(|point| point.y);
                rows.push(Row {
                    series: series.name.clone(),
                    x,
                    here,
                    paper,
                    ratio: paper.filter(|paper| *paper > 0.0).map(|paper| here / paper),
                    source: point.map(PaperPoint::source),
                    is_text: point.is_some_and(PaperPoint::is_text),
                });
            }
        }
        let relative = plan.relative_to.as_deref().zip(plan.x.values.last());
        let relative = relative.map(|(name, last)| format!("relative to {name} at {last} {}", plan.x.label));
        let y = match plan.metric {
            Metric::Rate if plan.normalise => "message rate, relative to the greatest",
            Metric::Rate => "message rate (Mop/s)",
            Metric::Latency => "latency (us)",
            Metric::OnChip => "on-chip memory for connections (MB)",
        };
        Report {
            name: name.to_owned(),
            title: plan.title.clone(),
            x: plan.x.label.clone(),
            y: match relative {
                Some(relative) if plan.metric == Metric::Latency => format!("latency, {relative}"),
                Some(relative) => format!("throughput, {relative}"),
                None => y.to_owned(),
            },
            note: plan.note.clone(),
            rows,
            details: finished.outcomes.iter().flatten().cloned().collect(),
            zero_based: plan.metric != Metric::Latency || plan.relative_to.is_some(),
        }
    }

    /// A figure of points: series, x, y. `texts` are its name, its title, its axes' and its note.
    pub(crate) fn of_points(texts: [&str; 5], points: Vec<(String, u32, f64)>) -> Report {
        let [name, title, x, y, note] = texts.map(str::to_owned);
        let row = |(series, x, here)| Row {
            series,
            x,
            here,
            paper: None,
            ratio: None,
            source: None,
            is_text: false,
        };
        let rows = points.into_iter().map(row).collect();
        Report { name, title, x, y, note, rows, details: Vec::new(), zero_based: true }
    }

    /// One line a point, with what the run counted.
    pub fn csv(&self) -> String {
        if self.details.is_empty() {
            let line = |Row { series, x, here, .. }: &Row| format!("\"{series}\",{x},{here:.4}\n");
            return format!("series,x,here\n{}", self.rows.iter().map(line).collect::<String>());
        }
        let mut text = String::from(
            "series,x,here,paper,ratio,rate_mops,latency_us,latency_p99_us,hits,misses,waited,ring_reads,\
             prefetched,prefetch_dropped,evicted,read_engine_busy,messages,events,lost,repeated,cpu\n",
        );
        for (row, outcome) in self.rows.iter().zip(&self.details) {
            let optional = |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.4}"));
            let Row { series, x, here, paper, ratio, .. } = row;
            let _ = write!(text, "\"{series}\",{x},{here:.4},{},{}", optional(*paper), optional(*ratio));
            match outcome {
                Some(outcome) => csv_details(&mut text, outcome),
                None => text.push_str(&",".repeat(16)),
            }
            text.push('\n');
        }
        text
    }

    /// Those points that the paper has, as a Markdown table.
    pub fn table(&self) -> String {
        let mut text =
            format!("| series | {} | paper | here | ratio | from |\n|---|---|---|---|---|---|\n", self.x);
        for Row { series, x, here, paper, ratio, source, .. } in &self.rows {
            if let (Some(paper), Some(source)) = (paper, source) {
                let ratio = ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
                let (paper, here) = (short(*paper), short(*here));
                let _ = writeln!(text, "| {series} | {x} | {paper} | {here} | {ratio} | {source} |");
            }
        }
        text
    }

    /// What is drawn of a series at x.
    pub fn value(&self, series: &str, x: u32) -> Option<f64> {
        self.rows.iter().find(|row| row.series == series && row.x == x).map(|row| row.here)
    }

    /// All that is drawn of a series.
    pub fn values(&self, series: &str) -> impl Iterator<Item = f64> {
        self.rows.iter().filter(move |row| row.series == series).map(|row| row.here)
    }

    /// The share of time in which the server's processes were busy at x.
    pub fn cpu(&self, series: &str, x: u32) -> Option<f64> {
        let at = self.rows.iter().position(|row| row.series == series && row.x == x)?;
        self.details.get(at)?.as_ref().map(|outcome| outcome.cpu)
    }

    /// Events of all runs.
    pub fn events(&self) -> u64 {
        self.details.iter().flatten().map(|outcome| outcome.events).sum()
    }
}

fn csv_details(text: &mut String, outcome: &RunResult) {
    let RunResult {
        rate,
        latency,
        latency_p99,
        server,
        read_busy,
        messages,
        events,
        lost,
        repeated,
        cpu,
        ..
    } = outcome;
    let _ = write!(
        text,
        ",{:.4},{:.4},{:.4},{},{},{},{},{},{},{},{read_busy:.4},{messages},{events},{lost},{repeated},\
         {cpu:.4}",
        rate / 1e6,
        latency * 1e6,
        latency_p99 * 1e6,
        server.hits,
        server.misses,
        server.waited,
        server.ring_reads,
        server.prefetched,
        server.prefetch_dropped,
        server.evicted,
    );
}

/// Three significant digits.
pub(super) fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 0.1 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}
