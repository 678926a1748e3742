//! The StaR paper's two workloads on the UDP wire, streams of SENDs, WRITEs and READs, and the latency of one
//! connection: StaR against RC, from one connection to ten thousand, on a card with room for all contexts and
//! on a QPC-limited one.
//!
//! Owns these measurements and their page; `aims` says which aims hold. programs/star.c does the work.

mod aims;

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

const CONNECTIONS: [u32; 5] = [1, 16, 100, 1_000, 10_000];
/// Contexts that the server's card has room for, in all settings but the first: the paper's board.
const ROOM: u32 = 120;
/// What a context costs that is not there: PCIe's time, on a card that hides it behind other work, and on one
/// where all that comes behind waits, as the paper's board does; and one that is as long beside this card's
/// own time for a message, half a microsecond to two, as PCIe's is beside the board's: 80 ns at 10 Gb/s.
const MISSES: [Option<&str>; 4] = [None, Some("1us"), Some("1us,policy=fcfs"), Some("10us,policy=fcfs")];
/// With streams: on a card with room for all, and on the one that is most like the paper's board.
const STREAM_MISSES: [Option<&str>; 2] = [None, MISSES[3]];

/// What is measured of a workload.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    /// Calls, which are answered: rate and latency
    Calls,
    /// Messages one way: rate
    Stream,
    /// Calls of one connection; StaR's take so much longer than RC's, by aim: latency
    Latency(f64),
}

/// One thing that the program does.
#[derive(Debug)]
struct Workload {
    name: &'static str,
    title: &'static str,
    /// Of the program
    args: &'static [&'static str],
    kind: Kind,
    misses: &'static [Option<&'static str>],
    connections: &'static [u32],
}

impl Workload {
    /// Calls of all numbers of connections.
    const fn calls(name: &'static str, title: &'static str, args: &'static [&'static str]) -> Self {
        Workload { name, title, args, kind: Kind::Calls, misses: &MISSES, connections: &CONNECTIONS }
    }

    /// A stream over all numbers of connections.
    const fn stream(name: &'static str, title: &'static str, args: &'static [&'static str]) -> Self {
        let (kind, misses) = (Kind::Stream, &STREAM_MISSES);
        Workload { name, title, args, kind, misses, connections: &CONNECTIONS }
    }

    /// Calls of one connection, of one SEND each way.
    const fn one(name: &'static str, title: &'static str, args: &'static [&'static str], most: f64) -> Self {
        let kind = Kind::Latency(most);
        Workload { name, title, args, kind, misses: &[None], connections: &[1] }
    }

    /// Whether this column, of rates or of latencies, says something of it.
    fn has(&self, column: &str) -> bool {
        match self.kind {
            Kind::Calls => true,
            Kind::Stream => column == CALLS,
            Kind::Latency(_) => column == MEDIAN,
        }
    }

    /// What that column counts.
    fn unit(&self, column: &str) -> &'static str {
        match self.kind {
            _ if column == MEDIAN => "median, us",
            Kind::Stream => "messages a second",
            _ => "calls a second",
        }
    }
}

static WORKLOADS: [Workload; 7] = [
    Workload::calls("rpc", "RPC", &[]),
    Workload::calls("ml", "Training, with a barrier", &["-b"]),
    Workload::stream("send", "SEND", &["-o", "send", "-m", "64"]),
    Workload::stream("write", "WRITE", &["-o", "write", "-m", "64"]),
    Workload::stream("read", "READ", &["-o", "read", "-m", "64"]),
    Workload::one("inline", "64 B, inline", &["-u", "1", "-m", "64"], 1.3),
    Workload::one("long", "8 KiB, above the MTU", &["-u", "1", "-m", "8192"], 2.2),
];
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
/// Calls, or messages of a stream, under way at once.
const UNDER_WAY: u32 = 256;
/// The longest that one run may take.
const LIMIT: Duration = Duration::from_secs(60);
/// No further round begins that would end after this.
const ALL: Duration = Duration::from_secs(9 * 60);

/// One point of the figures.
#[derive(Debug, Clone, Copy)]
struct Point {
    workload: &'static Workload,
    miss: Option<&'static str>,
    connections: u32,
    transport: &'static str,
}

impl Point {
    /// All of them; RC and StaR side by side, so that both meet the machine in the same mood.
    fn all() -> impl Iterator<Item = Point> {
        MISSES.into_iter().flat_map(|miss| {
            let measured = WORKLOADS.iter().filter(move |workload| workload.misses.contains(&miss));
            measured.flat_map(move |workload| {
                workload.connections.iter().flat_map(move |&connections| {
                    TRANSPORTS.map(|(transport, _)| Point { workload, miss, connections, transport })
                })
            })
        })
    }

    /// Where the samples keep it.
    fn place(self) -> (&'static str, String) {
        let miss = self.miss.unwrap_or("none");
        (self.workload.name, format!("{miss} {} {}", self.connections, self.transport))
    }

    fn of(self, samples: &Samples, column: &'static str) -> Option<f64> {
        let (table, row) = self.place();
        samples.median(table, &row, column)
    }

    /// StaR's figure by RC's.
    fn ratio(self, samples: &Samples, column: &'static str) -> Option<f64> {
        let of = |transport| Point { transport, ..self }.of(samples, column);
        of(RC).filter(|base| *base > 0.0).and_then(|base| Some(of(STAR)? / base))
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
        command.args(point.workload.args);
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
    /* five rounds of 144 runs end in time */
    let seconds = if quick { 0.1 } else { 0.35 };
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

fn speed_table(samples: &Samples, workload: &'static Workload, miss: Option<&'static str>) -> String {
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
fn fall(samples: &Samples, workload: &'static Workload, miss: Option<&'static str>) -> String {
    let rate = |connections, transport| Point { workload, miss, connections, transport }.of(samples, CALLS);
    let (few, most) = (CONNECTIONS[2], CONNECTIONS[CONNECTIONS.len() - 1]);
    let each = TRANSPORTS.iter().filter_map(|(transport, _)| {
        let by = rate(most, transport)? / rate(few, transport)?;
        Some(format!("{transport} {:.0} %", by * 100.0))
    });
    let each: Vec<String> = each.collect();
    format!("Of its rate with {few} connections, with {most} there is left: {}.\n", each.join(", "))
}

/// The workloads that are streams, in the order of the columns.
fn streams() -> impl Iterator<Item = &'static Workload> {
    WORKLOADS.iter().filter(|workload| workload.kind == Kind::Stream)
}

fn stream_table(samples: &Samples, miss: Option<&'static str>) -> String {
    let headings = ["connections", "SEND/s, RC", STAR, "WRITE/s, RC", STAR, "READ/s, RC", STAR];
    table(&headings, |connections| {
        let point = |workload| Point { workload, miss, connections, transport: RC };
        streams().flat_map(|workload| pair(samples, point(workload), CALLS)).collect()
    })
}

fn latency_table(samples: &Samples) -> String {
    let headings = ["one SEND each way", "median, us, RC", STAR, "p99, us, RC", STAR];
    let mut rows = vec![headings.map(str::to_owned).to_vec()];
    for workload in WORKLOADS.iter().filter(|workload| matches!(workload.kind, Kind::Latency(_))) {
        let point = Point { workload, miss: None, connections: 1, transport: RC };
        let mut row = vec![workload.title.to_owned()];
        row.extend([MEDIAN, P99].into_iter().flat_map(|column| pair(samples, point, column)));
        rows.push(row);
    }
    Table(rows).markdown()
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
        let point = Point { workload: &WORKLOADS[0], miss: None, connections, transport: RC };
        let columns = [SERVER_CPU, CLIENT_CPU, CARD, LIBRARY, MEMORY, SETUP];
        columns.into_iter().flat_map(|column| pair(samples, point, column)).collect()
    })
}

fn page(machine: &Machine, samples: &Samples, rounds: u32) -> String {
    let mut text = format!(
        "# StaR against RC\n\nWritten by `make bench-star` (tools/bench, src/star.rs); do not \
         edit.\n\n![bars](bench-star.svg)\n\n\
         {}. Medians of {rounds} interleaved rounds; all figures are in\n\
         [bench-star.csv](bench-star.csv).\n{}\n\
         ## Aims\n\nWith room for all contexts, but where misses are named: there the server's card has room \
         for {ROOM}. Of several numbers of connections the worst decides.\n\n{}\n\
         ## What is measured\n\n",
        machine.described(),
        machine.warning(),
        Table(aims::rows(samples)).markdown(),
    );
    let _ = writeln!(
        text,
        "A call is three SENDs of 32 B to the server and one of 32 B back. RPC: a connection calls again \
         when its answer came, {UNDER_WAY} connections at once, in a shuffled order. Training: the server \
         answers when all connections' SENDs have come. Streams: the client's SENDs, WRITEs or READs of \
         64 B, all signaled, over all connections in turn, {UNDER_WAY} under way in all, 16 READs of a \
         connection at most; memory is registered without relaxed ordering. Latency: a call is one SEND \
         each way, from its post to its answer. The path MTU is 4096 for 8 KiB, 1024 for all else. One \
         server, one process that is all clients, on a CPU each, UDP on 127.0.0.1 \
         (`tools/bench/programs/star.c`). StaR: \
         `STARVERBS_STAR=stateless` at the server, `stateful` at the clients. In brackets by RC. A miss of \
         1 us is PCIe's time. By default the card hides it behind other work (latency-hiding); with fcfs \
         all that comes behind waits, as on the paper's board. One of 10 us is to this card, which takes \
         half a microsecond to two for a message, about what PCIe's is to that board, which takes 80 ns at \
         10 Gb/s."
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
        for workload in WORKLOADS.iter().filter(|workload| workload.kind == Kind::Calls) {
            let (speed, fall) = (speed_table(samples, workload, miss), fall(samples, workload, miss));
            let _ = write!(text, "\n### {}\n\n{speed}\n{fall}", workload.title);
        }
        if STREAM_MISSES.contains(&miss) {
            let _ = write!(text, "\n### Streams\n\n{}", stream_table(samples, miss));
        }
        if miss.is_none() {
            let _ = write!(text, "\n### Latency of one connection\n\n{}", latency_table(samples));
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
        let (workload, miss) = (point.workload.name, point.miss.unwrap_or("none").replace(',', " "));
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
    let panel = |workload: &'static Workload, miss: Option<&'static str>, column: &'static str| {
        let bars = workload.connections.iter().flat_map(|&connections| {
            TRANSPORTS.into_iter().filter_map(move |(transport, fill)| {
                let value = Point { workload, miss, connections, transport }.of(samples, column)?;
                Some(Bar { label: format!("{connections}, {transport}"), value, fill })
            })
        });
        let miss = miss
            .map_or("room for all contexts".to_owned(), |miss| format!("room for {ROOM}, a miss of {miss}"));
        let what = workload.unit(column);
        let title = format!("{}, {miss}: {what}", workload.title);
        Panel { title, less_is_better: column == MEDIAN, bars: bars.collect() }
    };
    let mut panels = Vec::new();
    for column in [CALLS, MEDIAN] {
        for miss in MISSES {
            for workload in &WORKLOADS {
                if workload.misses.contains(&miss) && workload.has(column) {
                    panels.push(panel(workload, miss, column));
                }
            }
        }
    }
    panels
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
        let table = speed_table(&samples, &WORKLOADS[1], Some("1us"));
        assert!(table.contains("30.0 (1.50x)") && table.contains("misses a call"), "{table}");
        assert_eq!(table.lines().count(), 2 + CONNECTIONS.len());
        let table = stream_table(&samples, None);
        assert_eq!(table.matches("30.0 (1.50x)").count(), streams().count(), "{table}");
        assert_eq!(latency_table(&samples).lines().count(), 4);
        let bars: usize = panels(&samples).iter().map(|panel| panel.bars.len()).sum();
        /* two workloads of calls have two panels a miss */
        let streams = STREAM_MISSES.len() * streams().count();
        assert_eq!(bars, TRANSPORTS.len() * (2 * 2 * MISSES.len() + streams));
    }

    #[test]
    fn the_csv_has_a_line_for_each_point_and_a_field_for_each_figure() {
        let text = csv(&samples());
        assert_eq!(text.lines().count(), 1 + Point::all().count());
        assert!(text.lines().all(|line| line.split(',').count() == 4 + FIGURES.len()), "{text}");
        assert!(text.contains("rpc,none,1000,StaR,30.000,4.000,,"), "{text}");
    }
}
