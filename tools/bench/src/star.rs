//! The StaR paper's two workloads on the UDP wire: StaR against RC, from one connection to ten thousand, on a
//! card with room for all contexts and on a QPC-limited one.
//!
//! Owns these measurements and their page. programs/star.c does the work.

use std::collections::BTreeMap;
use std::fmt::Write as _;
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

const CONNECTIONS: [u32; 5] = [1, 10, 100, 1_000, 10_000];
/// Contexts that the server's card has room for, in all settings but the first: the paper's board.
const ROOM: u32 = 120;
/// What a context costs that is not there: PCIe's time, on a card that hides it behind other work, and on one
/// where all that comes behind waits, as the paper's board does; and one that is as long beside this card's
/// own time for a message, half a microsecond to two, as PCIe's is beside the board's: 80 ns at 10 Gb/s.
const MISSES: [Option<&str>; 4] = [None, Some("1us"), Some("1us,policy=fcfs"), Some("10us,policy=fcfs")];
/// Name of a workload, title, arguments of the program.
const WORKLOADS: [(&str, &str, &[&str]); 2] =
    [("rpc", "RPC", &[]), ("ml", "Training, with a barrier", &["-b"])];
const RC: &str = "RC";
const STAR: &str = "StaR";
const TRANSPORTS: [(&str, &str); 2] = [(RC, "#2e6da4"), (STAR, "#c0392b")];
/// Columns of the page and of the CSV, each a line of the program's output.
const FIGURES: [&str; 10] =
    [CALLS, MEDIAN, P99, SERVER_CPU, CLIENT_CPU, SETUP, MEMORY, CARD, LIBRARY, MISSED];
const CALLS: &str = "calls_per_second";
const MEDIAN: &str = "median_us";
const P99: &str = "p99_us";
const SERVER_CPU: &str = "server_cpu_us";
const CLIENT_CPU: &str = "client_cpu_us";
const SETUP: &str = "setup_seconds";
const MEMORY: &str = "server_bytes";
const CARD: &str = "card_bytes";
const LIBRARY: &str = "library_bytes";
const MISSED: &str = "misses";
/// Calls under way at once.
const UNDER_WAY: u32 = 256;
/// The longest that one run may take.
const LIMIT: Duration = Duration::from_secs(60);
/// No further round begins that would end after this.
const ALL: Duration = Duration::from_secs(8 * 60);

/// One point of the figures.
#[derive(Debug, Clone, Copy)]
struct Point {
    workload: usize,
    miss: Option<&'static str>,
    connections: u32,
    transport: &'static str,
}

impl Point {
    /// All of them; RC and StaR side by side, so that both meet the machine in the same mood.
    fn all() -> impl Iterator<Item = Point> {
        let each = |workload, miss, connections, transport| Point { workload, miss, connections, transport };
        MISSES.into_iter().flat_map(move |miss| {
            (0..WORKLOADS.len()).flat_map(move |workload| {
                CONNECTIONS.into_iter().flat_map(move |connections| {
                    TRANSPORTS.map(|(transport, _)| each(workload, miss, connections, transport))
                })
            })
        })
    }

    /// Where the samples keep it.
    fn place(self) -> (&'static str, String) {
        let miss = self.miss.unwrap_or("none");
        (WORKLOADS[self.workload].0, format!("{miss} {} {}", self.connections, self.transport))
    }

    fn of(self, samples: &Samples, column: &'static str) -> Option<f64> {
        let (table, row) = self.place();
        samples.median(table, &row, column)
    }
}

/// What the program is run with.
struct Tools {
    lib: PathBuf,
    star: PathBuf,
}

impl Tools {
    /// Runs the program; gives its lines by name.
    fn run(&self, point: Point, seconds: f64) -> Result<BTreeMap<String, f64>> {
        let mut command = Command::new(&self.star);
        on_card(&mut command, &self.lib);
        command.args(WORKLOADS[point.workload].2);
        command.args(["-n", &point.connections.to_string(), "-w", &UNDER_WAY.to_string()]);
        command.args(["-t", &seconds.to_string()]);
        if let Some(miss) = point.miss {
            command.args(["-s", &format!("STARVERBS_QPC_CACHE={ROOM},miss={miss}")]);
        }
        if point.transport == STAR {
            command.args(["-s", "STARVERBS_STAR=stateless", "-c", "STARVERBS_STAR=stateful"]);
        }
        let output = child::run_one(command, LIMIT)?;
        let lines = parsed(&output.stdout);
        let stateless = lines.get("stateless").copied();
        let wanted = if point.transport == STAR { point.connections } else { 0 };
        if stateless == Some(f64::from(wanted)) {
            Ok(lines)
        } else {
            let tail =
                format!("{wanted} connections should be stateless: {}", child::tail_of(&output.stdout));
            Err(BenchError::Parse { what: "star".into(), tail })
        }
    }
}

/// Lines of a name and a number.
fn parsed(text: &str) -> BTreeMap<String, f64> {
    let line = |line: &str| {
        let (name, number) = line.split_once(' ')?;
        Some((name.to_owned(), number.parse().ok()?))
    };
    text.lines().filter_map(line).collect()
}

/// Measures in rounds, one at least and no more than `rounds` or than end in time, and writes `out`.md,
/// `out`.csv and `out`.svg.
///
/// # Errors
/// Where nothing can be measured, or the files cannot be written.
pub(crate) fn run(out: &Path, dist: &Path, rounds: u32, quick: bool) -> Result<()> {
    let machine = Machine::read(false, quick);
    let lib = library_dir(dist)?;
    let tools = Tools { star: child::compiled("star", &lib)?, lib };
    let seconds = if quick { 0.2 } else { 0.6 };
    let (samples, done) = Samples::gather(rounds, ALL, |samples| round(samples, &tools, seconds));
    /* the program is ours alone; that it stays behind harms nobody */
    let _ = fs::remove_file(&tools.star);
    let text = page(&machine, &samples, done);
    println!("{text}");
    write_file(out, "md", &text)?;
    write_file(out, "csv", &csv(&samples))?;
    write_file(out, "svg", &bars(&panels(&samples)))
}

/// Measures everything once. What fails is reported and left out.
fn round(samples: &mut Samples, tools: &Tools, seconds: f64) {
    for point in Point::all() {
        let (table, row) = point.place();
        progress(&format!("{table}, {row}"));
        let Some(lines) = reported(&format!("{table}, {row}"), tools.run(point, seconds)) else { continue };
        for figure in FIGURES {
            if let Some(value) = lines.get(figure) {
                samples.add(table, &row, &[(figure, *value)]);
            }
        }
    }
}

/// RC's figure and StaR's beside it.
fn pair(samples: &Samples, point: Point, column: &'static str) -> [String; 2] {
    let of = |transport| Point { transport, ..point }.of(samples, column);
    [cell(of(RC)), beside(of(STAR), of(RC))]
}

fn table(headings: &[&str], row: impl Fn(u32) -> Vec<String>) -> String {
    let mut rows = vec![headings.iter().map(|&heading| heading.to_owned()).collect::<Vec<_>>()];
    for connections in CONNECTIONS {
        let mut cells = vec![connections.to_string()];
        cells.extend(row(connections));
        rows.push(cells);
    }
    Table(rows).markdown()
}

fn speed_table(samples: &Samples, workload: usize, miss: Option<&'static str>) -> String {
    let mut headings = vec!["connections", "calls/s, RC", STAR, "median, us, RC", STAR, "p99, us, RC", STAR];
    let mut columns = vec![CALLS, MEDIAN, P99];
    if miss.is_some() {
        headings.extend(["misses a call, RC", STAR]);
        columns.push(MISSED);
    }
    table(&headings, |connections| {
        let point = Point { workload, miss, connections, transport: RC };
        columns.iter().flat_map(|column| pair(samples, point, column)).collect()
    })
}

/// Ratio of the rates with the most connections to those with as many as there is room for.
fn fall(samples: &Samples, workload: usize, miss: Option<&'static str>) -> String {
    let rate = |connections, transport| Point { workload, miss, connections, transport }.of(samples, CALLS);
    let (few, most) = (CONNECTIONS[2], CONNECTIONS[CONNECTIONS.len() - 1]);
    let each = TRANSPORTS.iter().filter_map(|(transport, _)| {
        let by = rate(most, transport)? / rate(few, transport)?;
        Some(format!("{transport} {:.0} %", by * 100.0))
    });
    let each: Vec<String> = each.collect();
    format!("Of its rate with {few} connections, with {most} there is left: {}.\n", each.join(", "))
}

fn cost_table(samples: &Samples) -> String {
    let headings = [
        "connections",
        "server's CPU, us, RC",
        STAR,
        "client's CPU, us, RC",
        STAR,
        "card's state, B, RC",
        STAR,
        "library's, B, RC",
        STAR,
        "server's memory, B, RC",
        STAR,
        "set-up, s, RC",
        STAR,
    ];
    table(&headings, |connections| {
        let point = Point { workload: 0, miss: None, connections, transport: RC };
        let columns = [SERVER_CPU, CLIENT_CPU, CARD, LIBRARY, MEMORY, SETUP];
        columns.into_iter().flat_map(|column| pair(samples, point, column)).collect()
    })
}

fn page(machine: &Machine, samples: &Samples, rounds: u32) -> String {
    let mut text = format!(
        "# StaR against RC\n\nWritten by `make bench-star` (tools/bench, src/star.rs); do not \
         edit.\n\n![bars](bench-star.svg)\n\n\
         {}. Medians of {rounds} interleaved rounds; all figures are in\n\
         [bench-star.csv](bench-star.csv).\n{}\n",
        machine.described(),
        machine.warning(),
    );
    let _ = writeln!(
        text,
        "A call is three SENDs of 32 B to the server and one of 32 B back. RPC: a connection calls again \
         when its answer came, {UNDER_WAY} connections at once, in a shuffled order. Training: the server \
         answers when all connections' SENDs have come. One server, one process that is all clients, UDP on \
         127.0.0.1 (`tools/bench/programs/star.c`). StaR: `STARVERBS_STAR=stateless` at the server, \
         `stateful` at the clients. In brackets by RC. A miss of 1 us is PCIe's time. By default the card \
         hides it behind other work (latency-hiding); with fcfs all that comes behind waits, as on the \
         paper's board. One of 10 us is to this card, which takes half a microsecond to two for a message, \
         about what PCIe's is to that board, which takes 80 ns at 10 Gb/s."
    );
    for miss in MISSES {
        let _ = match miss {
            None => write!(text, "\n## Room for all contexts\n"),
            Some(miss) => write!(
                text,
                "\n## Room for {ROOM} at the server, a miss costs \
                 {miss}\n\n`STARVERBS_QPC_CACHE={ROOM},miss={miss}`, for RC and for StaR.\n"
            ),
        };
        for (workload, (_, title, _)) in WORKLOADS.iter().enumerate() {
            let (speed, fall) = (speed_table(samples, workload, miss), fall(samples, workload, miss));
            let _ = write!(text, "\n### {title}\n\n{speed}\n{fall}");
        }
    }
    let _ = write!(
        text,
        "\n## What it costs\n\n{}\nRPC with room for all contexts. CPU time of a message (four in a call), \
         system calls included; both ends poll without a break, so that it is more than the work where they \
         wait for each other. The server's card keeps, and its library keeps because the card does not, what \
         `stardv_query_qp` says of a connection, beside the queues; its memory is what the process grew by \
         for a connection with them.\n",
        cost_table(samples),
    );
    text
}

fn csv(samples: &Samples) -> String {
    let mut text = format!("workload,miss,connections,transport,{}\n", FIGURES.join(","));
    for point in Point::all() {
        let (workload, miss) = (WORKLOADS[point.workload].0, point.miss.unwrap_or("none").replace(',', " "));
        let _ = write!(text, "{workload},{miss},{},{}", point.connections, point.transport);
        for figure in FIGURES {
            let value = point.of(samples, figure).map_or(String::new(), |value| format!("{value:.3}"));
            let _ = write!(text, ",{value}");
        }
        text.push('\n');
    }
    text
}

fn panels(samples: &Samples) -> Vec<Panel> {
    let panel = |workload: usize, miss: Option<&'static str>, column, what: &str, less_is_better| {
        let bars = CONNECTIONS.into_iter().flat_map(|connections| {
            TRANSPORTS.into_iter().filter_map(move |(transport, fill)| {
                let value = Point { workload, miss, connections, transport }.of(samples, column)?;
                Some(Bar { label: format!("{connections}, {transport}"), value, fill })
            })
        });
        let miss = miss
            .map_or("room for all contexts".to_owned(), |miss| format!("room for {ROOM}, a miss of {miss}"));
        Panel {
            title: format!("{}, {miss}: {what}", WORKLOADS[workload].1),
            less_is_better,
            bars: bars.collect(),
        }
    };
    let kinds = [(CALLS, "calls a second", false), (MEDIAN, "median, us", true)];
    kinds
        .into_iter()
        .flat_map(|(column, what, less)| {
            MISSES.into_iter().flat_map(move |miss| (0..2).map(move |w| (w, miss, column, what, less)))
        })
        .map(|(workload, miss, column, what, less)| panel(workload, miss, column, what, less))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Samples {
        let mut samples = Samples::default();
        for point in Point::all().filter(|point| point.connections == 1_000) {
            let (table, row) = point.place();
            let calls = if point.transport == STAR { 30.0 } else { 20.0 };
            samples.add(table, &row, &[(CALLS, calls), (MEDIAN, 4.0)]);
        }
        samples
    }

    #[test]
    fn lines_of_names_and_numbers_are_read_and_others_are_not() {
        let lines = parsed("calls_per_second 12.5\nnothing\nmedian_us 3\nname word\n");
        assert_eq!(lines.len(), 2);
        assert_eq!(lines["calls_per_second"], 12.5);
    }

    #[test]
    fn star_stands_beside_rc_and_what_was_not_measured_is_left_out() {
        let samples = samples();
        let table = speed_table(&samples, 1, Some("1us"));
        assert!(table.contains("30.0 (1.50x)") && table.contains("misses a call"), "{table}");
        assert_eq!(table.lines().count(), 2 + CONNECTIONS.len());
        let bars: usize = panels(&samples).iter().map(|panel| panel.bars.len()).sum();
        assert_eq!(bars, 2 * MISSES.len() * WORKLOADS.len() * TRANSPORTS.len());
    }

    #[test]
    fn the_csv_has_a_line_for_each_point_and_a_field_for_each_figure() {
        let text = csv(&samples());
        assert_eq!(text.lines().count(), 1 + Point::all().count());
        assert!(text.lines().all(|line| line.split(',').count() == 4 + FIGURES.len()), "{text}");
        assert!(text.contains("rpc,none,1000,StaR,30.000,4.000,,"), "{text}");
    }
}
