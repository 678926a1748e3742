//! The report: one table with ratios to the floor, the aims, and the files.
//!
//! Owns how figures are shown. It must not know how they came about.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde::Serialize;
use starverbs_charts::{Bar, Panel, bars, short};

use crate::case::{BOARD_ROWS, FLOOR_ROW, Metric, Part, READ_ROW};
use crate::error::{BenchError, Result};
use crate::machine::Machine;
use crate::round::Figure;
use crate::scale::Scale;

/// Writes one of the files that a page is made of, `out` with another ending.
///
/// # Errors
/// It cannot be written.
pub(crate) fn write_file(out: &Path, ending: &str, text: &str) -> Result<()> {
    fs::write(out.with_extension(ending), text).map_err(|e| BenchError::from_io("write", &e))
}

/// Writes `out`.json.
///
/// # Errors
/// It cannot be written.
pub(crate) fn write_json(out: &Path, report: &impl Serialize) -> Result<()> {
    let json = serde_json::to_string_pretty(report)
        .map_err(|e| BenchError::Os { what: "JSON", message: e.to_string() })?;
    write_file(out, "json", &(json + "\n"))
}

/// Latency above the floor that the card aims at.
const LATENCY_AIM: f64 = 1.3;
/// Share of the bare stream that the card aims at.
const STREAM_AIM: f64 = 0.7;
/// Of the emulated board, by the card in software, where there is a processor for each of the three.
const BOARD_LATENCY_AIM: f64 = 2.0;
const BOARD_STREAM_AIM: f64 = 0.7;
const BOARD_CPUS: usize = 4;
const BOARD_NOTE: &str =
    "The board's aims are for four processors, as both programs and both functions poll; here they share";
/// Bytes per idle QP beside its rings that the card aims at.
const QP_BYTES_AIM: f64 = 1024.0;
/// Load average above which other work spoils the figures.
pub(crate) const BUSY: f64 = 0.5;
pub(crate) const BUSY_WARNING: &str = "The machine was busy with other work: read these figures with care.\n";
/// CPU milliseconds per second that count as none.
const IDLE_AIM: f64 = 0.1;

/// Everything that one run found.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    machine: Machine,
    floor: &'static str,
    figures: Vec<Figure>,
    #[serde(skip_serializing_if = "Option::is_none")]
    scale: Option<Scale>,
}

/// A table of text whose columns are made equally wide.
pub(crate) struct Table(pub(crate) Vec<Vec<String>>);

impl Table {
    /// In Markdown.
    pub(crate) fn markdown(&self) -> String {
        let columns = self.0.first().map_or(0, Vec::len);
        let width = |column: usize| {
            self.0
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for (index, row) in self.0.iter().enumerate() {
            for (column, width) in widths.iter().enumerate() {
                let cell = row.get(column).map_or("", String::as_str);
                let _ = if column == 0 {
                    write!(text, "| {cell:<width$} ")
                } else {
                    write!(text, "| {cell:>width$} ")
                };
            }
            text.push_str("|\n");
            if index == 0 {
                for (column, width) in widths.iter().enumerate() {
                    let _ = write!(text, "|{}{}", "-".repeat(width + 1), if column == 0 { "-" } else { ":" });
                }
                text.push_str("|\n");
            }
        }
        text
    }
}

impl Report {
    /// A report of one run.
    pub(crate) fn new(machine: Machine, figures: Vec<Figure>, scale: Option<Scale>) -> Self {
        Self { machine, floor: FLOOR_ROW, figures, scale }
    }

    /// What the terminal shows.
    pub(crate) fn terminal(&self) -> String {
        self.body()
    }

    /// Writes `out`.md, .json and .svg.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub(crate) fn write(&self, out: &Path) -> Result<()> {
        let image = out.with_extension("svg");
        let name = image.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let markdown = format!(
            "# Speed\n\nWritten by `make bench` (tools/bench); do not edit. The samples are in \
             [{json}]({json}).\n\n\
             ![bars]({name})\n\n{body}",
            json = name.replace(".svg", ".json"),
            body = self.body(),
        );
        write_file(out, "md", &markdown)?;
        write_json(out, self)?;
        write_file(out, "svg", &picture(&self.figures))
    }

    fn body(&self) -> String {
        let mut text = self.heading();
        if !self.figures.is_empty() {
            text.push_str("\n## Beside the bare sockets and other stacks\n\n");
            text.push_str(&self.table().markdown());
            text.push_str(NOTES);
            text.push_str("\n## Spread\n\nSmallest and largest of the rounds.\n\n");
            text.push_str(&self.spread().markdown());
        }
        if let Some(scale) = &self.scale {
            text.push_str("\n## Scale\n\n");
            text.push_str(&scale_table(scale).markdown());
        }
        let aims = self.aims();
        if aims.len() > 1 {
            text.push_str("\n## Aims\n\n");
            text.push_str(&Table(aims).markdown());
            if self.machine.cpus < BOARD_CPUS {
                let _ = writeln!(text, "\n{BOARD_NOTE} {}.", self.machine.cpus);
            }
        }
        let problems = self.problems();
        if !problems.is_empty() {
            text.push_str("\n## Not measured\n\n");
            for problem in problems {
                let _ = writeln!(text, "- {problem}");
            }
        }
        text
    }

    fn heading(&self) -> String {
        let m = &self.machine;
        let packages: Vec<String> =
            m.packages.iter().map(|(name, version)| format!("{name} {version}")).collect();
        let rounds = self.figures.iter().map(|figure| figure.samples.len()).max().unwrap_or(0);
        let warning = if m.load > BUSY { BUSY_WARNING } else { "" };
        format!(
            "{cpu}, {cpus} processors, Linux {kernel}; load {load:.2} at the start{pinned}{quick}.\n\
             Medians of {rounds} interleaved rounds{with}{packages}.\n{warning}",
            cpu = m.cpu,
            cpus = m.cpus,
            kernel = m.kernel,
            load = m.load,
            pinned = if m.pinned { "; pinned" } else { "" },
            quick = if m.quick { "; quick run" } else { "" },
            with = if packages.is_empty() { "" } else { "; " },
            packages = packages.join(", "),
        )
    }

    fn rows(&self) -> Vec<&'static str> {
        let mut rows = Vec::new();
        for part in [Part::Floor, Part::Card, Part::Board, Part::Ucx, Part::Fabric] {
            for figure in self.figures.iter().filter(|figure| figure.part == part) {
                if !rows.contains(&figure.row) {
                    rows.push(figure.row);
                }
            }
        }
        rows
    }

    fn figure(&self, row: &str, metric: Metric) -> Option<&Figure> {
        self.figures.iter().find(|figure| figure.row == row && figure.metric == metric)
    }

    fn median(&self, row: &str, metric: Metric) -> Option<f64> {
        self.figure(row, metric)?.median()
    }

    /// The figure by the floor; a READ's round trip by two ways.
    fn ratio(&self, row: &str, metric: Metric) -> Option<f64> {
        let is_read = row == READ_ROW || BOARD_ROWS.contains(&(row, READ_ROW));
        let ways = if is_read && metric == Metric::Latency8B { 2.0 } else { 1.0 };
        Some(self.median(row, metric)? / (self.median(FLOOR_ROW, metric)? * ways))
    }

    fn grid(&self, cell: impl Fn(&'static str, Metric) -> String) -> Table {
        let mut table = vec![vec![String::new()]];
        table[0].extend(Metric::ALL.iter().map(|metric| metric.title().to_owned()));
        for row in self.rows() {
            let mut line = vec![row.to_owned()];
            line.extend(Metric::ALL.iter().map(|&metric| cell(row, metric)));
            table.push(line);
        }
        Table(table)
    }

    fn table(&self) -> Table {
        self.grid(|row, metric| match (self.median(row, metric), self.ratio(row, metric)) {
            (Some(figure), Some(ratio)) => format!("{} ({ratio:.2}x)", short(figure)),
            (Some(figure), None) => short(figure),
            _ => self.absent(row, metric).to_owned(),
        })
    }

    fn spread(&self) -> Table {
        self.grid(|row, metric| {
            let samples = self.figure(row, metric).map_or(&[][..], |figure| &figure.samples);
            let smallest = samples.iter().copied().reduce(f64::min);
            let largest = samples.iter().copied().reduce(f64::max);
            match (smallest, largest) {
                (Some(smallest), Some(largest)) => format!("{} - {}", short(smallest), short(largest)),
                _ => self.absent(row, metric).to_owned(),
            }
        })
    }

    fn absent(&self, row: &str, metric: Metric) -> &'static str {
        if self.figure(row, metric).is_some() { "skipped" } else { "" }
    }

    fn aims(&self) -> Vec<Vec<String>> {
        let mut aims = vec![["aim", "measured", "met"].map(str::to_owned).to_vec()];
        let mut aim =
            |text: String, figure: Option<f64>, unit: &str, met: fn(f64, f64) -> bool, bound: f64| {
                if let Some(figure) = figure {
                    let verdict = if met(figure, bound) { "yes" } else { "no" };
                    aims.push(vec![text, format!("{}{unit}", short(figure)), verdict.to_owned()]);
                }
            };
        let below: fn(f64, f64) -> bool = |figure, bound| figure < bound;
        let at_least: fn(f64, f64) -> bool = |figure, bound| figure >= bound;
        for row in self.rows().into_iter().filter(|row| row.starts_with("starverbs")) {
            let latency = self.ratio(row, Metric::Latency8B);
            aim(format!("{row}: latency under {LATENCY_AIM} x the floor"), latency, " x", below, LATENCY_AIM);
            let stream = self.ratio(row, Metric::Stream1M);
            aim(
                format!("{row}: 1 MiB at least {STREAM_AIM} x the floor"),
                stream,
                " x",
                at_least,
                STREAM_AIM,
            );
            if let Some(ucx) = self.median("UCX over TCP, tag", Metric::Stream1M) {
                let ours = self.median(row, Metric::Stream1M);
                aim(format!("{row}: 1 MiB above UCX over TCP"), ours, " GB/s", at_least, ucx);
            }
        }
        for (board, card) in BOARD_ROWS {
            let ratio = |metric| Some(self.median(board, metric)? / self.median(card, metric)?);
            let text = format!("{board}: latency at most {BOARD_LATENCY_AIM} x the card in software");
            aim(text, ratio(Metric::Latency8B), " x", |ratio, most| ratio <= most, BOARD_LATENCY_AIM);
            let text = format!("{board}: 1 MiB at least {BOARD_STREAM_AIM} x the card in software");
            aim(text, ratio(Metric::Stream1M), " x", at_least, BOARD_STREAM_AIM);
        }
        if let Some(scale) = &self.scale {
            let text = format!("memory per idle RC QP beside its rings under {QP_BYTES_AIM} B");
            aim(text, scale.bytes_beside_rings, " B", below, QP_BYTES_AIM);
            let text = "CPU time of an idle open device: none".to_owned();
            aim(text, scale.idle_ms_per_second, " ms/s", below, IDLE_AIM);
        }
        aims
    }

    fn problems(&self) -> Vec<String> {
        let mut problems = problems_of(&self.figures);
        for problem in self.scale.iter().flat_map(|scale| &scale.problems) {
            if !problems.contains(problem) {
                problems.push(problem.clone());
            }
        }
        problems
    }
}

/// Why figures are missing; one reason for all columns of a row is said once.
pub(crate) fn problems_of(figures: &[Figure]) -> Vec<String> {
    let mut problems: Vec<String> = Vec::new();
    for figure in figures {
        let Some(reason) = &figure.problem else { continue };
        let problem = if reason.contains("(package ") || reason.contains("(make ") {
            format!("{}: {reason}", figure.row)
        } else {
            format!("{}, {}: {reason}", figure.row, figure.metric.title())
        };
        if !problems.contains(&problem) {
            problems.push(problem);
        }
    }
    problems
}

/// What the table's reader must know.
const NOTES: &str = "
In brackets: by the row \"bare UDP, RoCEv2 sizes\", whose datagrams have the payload and 16 B of BTH and ICRC.
Latency is one way (half the round trip); a READ's is the whole round trip, and its ratio is to two ways.
Streams of the bare sockets carry 4 KiB segments, whatever the message. GB are 10^9 bytes.
The card runs over its UDP wire between two processes, path MTU 4096 (`STARVERBS_LINK=udp \
STARVERBS_ADDRS=127.0.0.1`). Board: each end has a function of one emulated board, a process of its own \
(docs/board.md). fi_pingpong keeps one message in flight,
so that its GB/s are those of a ping-pong.
";

fn scale_table(scale: &Scale) -> Table {
    let mut rows = vec![vec![String::new(), "measured".to_owned()]];
    let mut row = |name: String, value: Option<f64>, unit: &str| {
        rows.push(vec![name, value.map_or("skipped".to_owned(), |value| format!("{} {unit}", short(value)))]);
    };
    let qps = scale.qps;
    row(format!("create and connect {qps} RC QPs"), scale.connect_seconds, "s");
    row(format!("destroy {qps} RC QPs"), scale.destroy_seconds, "s");
    for &(depth, bytes) in &scale.bytes_at_depth {
        row(format!("memory per idle RC QP, both queues {depth} deep"), Some(bytes), "B");
    }
    row("memory per idle RC QP beside its rings".to_owned(), scale.bytes_beside_rings, "B");
    row("CPU time of an idle open device".to_owned(), scale.idle_ms_per_second, "ms/s");
    row("context switches of an idle open device".to_owned(), scale.idle_switches_per_second, "/s");
    Table(rows)
}

/// Bars of all figures, one panel a metric.
fn picture(figures: &[Figure]) -> String {
    let bar = |figure: &Figure| {
        let value = figure.median()?;
        Some(Bar { label: figure.row.to_owned(), value, fill: colour(figure.part) })
    };
    let panel = |metric: Metric| Panel {
        title: metric.title().to_owned(),
        less_is_better: metric.smaller_is_better(),
        bars: figures.iter().filter(|figure| figure.metric == metric).filter_map(bar).collect(),
    };
    bars(&Metric::ALL.map(panel))
}

pub(crate) fn colour(part: Part) -> &'static str {
    match part {
        Part::Floor => "#b8b8b8",
        Part::Card | Part::Scale => "#c0392b",
        Part::Board => "#e08e79",
        Part::Ucx => "#2e6da4",
        Part::Fabric => "#6aa56a",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(figures: Vec<Figure>) -> Report {
        let machine = Machine {
            cpu: "cpu".to_owned(),
            cpus: 2,
            kernel: "6.1".to_owned(),
            load: 0.0,
            pinned: false,
            quick: true,
            packages: Vec::new(),
        };
        Report::new(machine, figures, None)
    }

    fn figure(part: Part, row: &'static str, samples: &[f64], problem: Option<&str>) -> Figure {
        let problem = problem.map(str::to_owned);
        Figure { part, row, metric: Metric::Latency8B, samples: samples.to_vec(), problem }
    }

    #[test]
    fn ratios_are_to_the_floor_and_a_read_counts_two_ways() {
        let report = report(vec![
            figure(Part::Floor, FLOOR_ROW, &[2.0, 2.0, 90.0], None),
            figure(Part::Card, "starverbs SEND", &[3.0], None),
            figure(Part::Card, READ_ROW, &[6.0], None),
        ]);
        assert_eq!(report.ratio("starverbs SEND", Metric::Latency8B), Some(1.5));
        assert_eq!(report.ratio(READ_ROW, Metric::Latency8B), Some(1.5));
        assert!(report.body().contains("3.00 (1.50x)"));
        let aims = report.aims();
        assert!(aims.iter().any(|row| row[0].starts_with("starverbs SEND: latency") && row[2] == "no"));
    }

    #[test]
    fn a_missing_tool_is_a_skipped_row_with_its_package() {
        let reason = "ucx_perftest is not installed (package ucx-utils)";
        let body = report(vec![figure(Part::Ucx, "UCX over TCP, tag", &[], Some(reason))]).body();
        assert!(body.contains("skipped"), "{body}");
        assert!(
            body.contains("- UCX over TCP, tag: ucx_perftest is not installed (package ucx-utils)"),
            "{body}"
        );
    }

    #[test]
    fn columns_line_up() {
        let table = Table(vec![vec!["a".into(), "long".into()], vec!["bbb".into(), "1".into()]]).markdown();
        let widths: Vec<usize> = table.lines().map(str::len).collect();
        assert_eq!(widths, [widths[0]; 3], "{table}");
    }
}
