//! Two processes of one host: perftest over shared memory, beside the same over the wire, what UCX and
//! libfabric do over shared memory, and the floor under all of them.
//!
//! Owns the rows, their aims and the page. It must not know how a case is run.

use std::cmp::Ordering;
use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;
use starverbs_charts::{Bar, Panel, bars, short};

use crate::case::{Case, CaseKind, Metric, Part, Setup};
use crate::error::Result;
use crate::machine::Machine;
use crate::perftest::{Link, Program};
use crate::report::{Table, colour, problems_of, write_file, write_json};
use crate::round::{self, Effort, Figure};
use crate::ucx::Test;

/// A program, as it is called over shared memory and over the wire.
#[derive(Debug, Clone, Copy)]
struct Ours {
    row: &'static str,
    wire: &'static str,
    what: What,
    link: Link,
}

/// What a row measures.
#[derive(Debug, Clone, Copy)]
enum What {
    /// A program of perftest, and its arguments.
    Perftest(&'static str, &'static [&'static str]),
    /// WRITEs over so many queue pairs.
    Many(u32),
    /// Requests to a Valkey server.
    Valkey(&'static str),
}

/// `ours!("ib_send_lat")`, or with one option and its value, or over another link than [`Link::Local`].
macro_rules! ours {
    ($name:literal) => {
        Ours {
            row: $name,
            wire: concat!($name, ", wire"),
            what: What::Perftest($name, &[]),
            link: Link::Local,
        }
    };
    ($name:literal, $link:ident, $how:literal) => {
        Ours {
            row: concat!($name, ", ", $how),
            wire: concat!($name, ", wire"),
            what: What::Perftest($name, &[]),
            link: Link::$link,
        }
    };
    ($name:literal, $args:literal, $($arg:literal),+) => {
        Ours {
            row: concat!($name, " ", $args),
            wire: concat!($name, " ", $args, ", wire"),
            what: What::Perftest($name, &[$($arg),+]),
            link: Link::Local,
        }
    };
}

impl Ours {
    fn kind(self, link: Link) -> CaseKind {
        match self.what {
            What::Perftest(name, args) => CaseKind::Perftest(Program::new(name, args, link)),
            What::Many(qps) => CaseKind::Many(qps, link),
            What::Valkey(request) => CaseKind::Valkey(request, Some(link)),
        }
    }
}

/// What a row is to reach.
#[derive(Debug, Clone, Copy)]
enum Aim {
    /// So many times the peer's latency at most, or its throughput at least.
    Ratio(f64),
    /// A rate, whatever the peer's.
    Rate(f64),
    /// The peer stands there to compare.
    None,
}

/// What a row is compared with.
#[derive(Debug, Clone, Copy)]
struct Comparison {
    row: &'static str,
    part: Part,
    kind: CaseKind,
}

const fn ucx(row: &'static str, test: Test) -> Comparison {
    Comparison { row, part: Part::Ucx, kind: CaseKind::Ucx(test) }
}

const POSIX: &str = "posix,self";
const UCX_TAG_LAT: Comparison = ucx("UCX posix, tag_lat", Test::over(POSIX, "tag_lat"));
const UCX_PUT_LAT: Comparison =
    ucx("UCX posix, put_lat", Test::below("put_lat", &["-x", "posix", "-d", "memory", "-D", "short"]));
const UCX_GET: Comparison = ucx("UCX posix, ucp_get", Test::over(POSIX, "ucp_get"));
const UCX_FADD: Comparison = ucx("UCX posix, ucp_fadd", Test::over(POSIX, "ucp_fadd"));
const UCX_TAG_BW: Comparison = ucx("UCX posix, tag_bw", Test::over(POSIX, "tag_bw"));
const UCX_CMA: Comparison = ucx("UCX cma, tag_bw", Test::over("posix,cma,self", "tag_bw"));
const FABRIC: Comparison =
    Comparison { row: "libfabric shm, ping-pong", part: Part::Fabric, kind: CaseKind::Fabric("shm") };
const PWRITE: Comparison = Comparison {
    row: "one pwrite to /proc/PID/mem",
    part: Part::Floor,
    kind: CaseKind::SameHost("floor-pwrite"),
};
const EVENTFD: Comparison =
    Comparison { row: "eventfd round trip", part: Part::Floor, kind: CaseKind::SameHost("floor-eventfd") };
const MEMCPY: Comparison = Comparison { row: "memcpy", part: Part::Floor, kind: CaseKind::Memcpy };

/// As many queue pairs as no CPU's caches hold, and itself with one.
const MANY: Ours = Ours {
    row: "WRITE, 100,000 queue pairs",
    wire: "WRITE, 100,000 queue pairs, wire",
    what: What::Many(100_000),
    link: Link::Local,
};
const ONE: Comparison =
    Comparison { row: "WRITE, 1 queue pair", part: Part::Card, kind: CaseKind::Many(1, Link::Local) };

const VALKEY_SET: Ours =
    Ours { row: "Valkey, SET", wire: "Valkey, SET, wire", what: What::Valkey("SET"), link: Link::Local };
const VALKEY_GET: Ours =
    Ours { row: "Valkey, GET", wire: "Valkey, GET, wire", what: What::Valkey("GET"), link: Link::Local };
const TCP_SET: Comparison =
    Comparison { row: "Valkey, SET, TCP", part: Part::Floor, kind: CaseKind::Valkey("SET", None) };
const TCP_GET: Comparison =
    Comparison { row: "Valkey, GET, TCP", part: Part::Floor, kind: CaseKind::Valkey("GET", None) };

/// A program, a size, and what it is compared with.
type Row = (Ours, Metric, &'static [(Comparison, Aim)]);

const LARGE: &[(Comparison, Aim)] = &[(UCX_CMA, Aim::Ratio(1.0)), (UCX_TAG_BW, Aim::None)];
const COPIED: &[(Comparison, Aim)] = &[(MEMCPY, Aim::Ratio(0.9))];
const CMA: &[(Comparison, Aim)] = &[(UCX_CMA, Aim::Ratio(1.0))];

const ROWS: [Row; 34] = [
    (ours!("ib_send_lat"), Metric::Latency8B, &[(UCX_TAG_LAT, Aim::Ratio(2.0)), (FABRIC, Aim::None)]),
    (ours!("ib_send_lat"), Metric::Latency64B, &[(UCX_TAG_LAT, Aim::Ratio(2.0)), (FABRIC, Aim::None)]),
    (ours!("ib_send_lat", "-c UD", "-c", "UD"), Metric::Latency8B, &[(FABRIC, Aim::None)]),
    (ours!("ib_send_lat", "-c UC", "-c", "UC"), Metric::Latency8B, &[(FABRIC, Aim::None)]),
    (ours!("ib_write_lat"), Metric::Latency8B, &[(PWRITE, Aim::Ratio(1.3))]),
    (ours!("ib_read_lat"), Metric::Latency8B, &[(PWRITE, Aim::None)]),
    (ours!("ib_atomic_lat"), Metric::Latency8B, &[(EVENTFD, Aim::None)]),
    (ours!("ib_write_lat", Mapped, "mapped"), Metric::Latency8B, &[(UCX_PUT_LAT, Aim::Ratio(2.0))]),
    (ours!("ib_read_lat", Mapped, "mapped"), Metric::Latency8B, &[(UCX_GET, Aim::Ratio(1.2))]),
    (ours!("ib_atomic_lat", Mapped, "mapped"), Metric::Latency8B, &[(UCX_FADD, Aim::Ratio(1.2))]),
    (ours!("ib_send_lat", "-e", "-e"), Metric::Latency8B, &[(EVENTFD, Aim::Ratio(1.5))]),
    (ours!("ib_send_bw"), Metric::Rate8B, &[(UCX_TAG_BW, Aim::Rate(10.0))]),
    (ours!("ib_send_bw", "-l 16", "-l", "16"), Metric::Rate8B, &[(UCX_TAG_BW, Aim::Rate(20.0))]),
    (ours!("ib_send_bw", "-c UD", "-c", "UD"), Metric::Rate8B, &[(UCX_TAG_BW, Aim::None)]),
    (MANY, Metric::Rate8B, &[(ONE, Aim::Rate(4.0))]),
    (MANY, Metric::Stream64K, &[(ONE, Aim::Ratio(0.95))]),
    (VALKEY_SET, Metric::Rate64B, &[(TCP_SET, Aim::Ratio(1.5))]),
    (VALKEY_GET, Metric::Rate64B, &[(TCP_GET, Aim::Ratio(1.5))]),
    (ours!("ib_send_bw"), Metric::Stream64K, LARGE),
    (ours!("ib_write_bw"), Metric::Stream64K, LARGE),
    (ours!("ib_read_bw"), Metric::Stream64K, LARGE),
    (ours!("ib_send_bw"), Metric::Stream1M, LARGE),
    (ours!("ib_write_bw"), Metric::Stream1M, LARGE),
    (ours!("ib_read_bw"), Metric::Stream1M, LARGE),
    (ours!("ib_write_bw", Traced, "traced"), Metric::Stream64K, CMA),
    (ours!("ib_read_bw", Traced, "traced"), Metric::Stream64K, CMA),
    (ours!("ib_write_bw", Traced, "traced"), Metric::Stream1M, CMA),
    (ours!("ib_read_bw", Traced, "traced"), Metric::Stream1M, CMA),
    (ours!("ib_send_bw", Mapped, "mapped"), Metric::Stream64K, COPIED),
    (ours!("ib_write_bw", Mapped, "mapped"), Metric::Stream64K, COPIED),
    (ours!("ib_read_bw", Mapped, "mapped"), Metric::Stream64K, COPIED),
    (ours!("ib_send_bw", Mapped, "mapped"), Metric::Stream1M, COPIED),
    (ours!("ib_write_bw", Mapped, "mapped"), Metric::Stream1M, COPIED),
    (ours!("ib_read_bw", Mapped, "mapped"), Metric::Stream1M, COPIED),
];

/// The columns of the picture.
const METRICS: [Metric; 6] = [
    Metric::Latency8B,
    Metric::Latency64B,
    Metric::Rate8B,
    Metric::Rate64B,
    Metric::Stream64K,
    Metric::Stream1M,
];

/// Every case once: a row over shared memory, over the wire, and what it is compared with.
fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    let mut add = |part, row, metric, kind| {
        if !cases.iter().any(|case| (case.row, case.metric) == (row, metric)) {
            cases.push(Case { part, row, metric, kind });
        }
    };
    for (ours, metric, peers) in ROWS {
        for (row, link) in [(ours.row, ours.link), (ours.wire, Link::Udp)] {
            add(Part::Card, row, metric, ours.kind(link));
        }
        for (peer, _) in peers {
            add(peer.part, peer.row, metric, peer.kind);
        }
    }
    cases
}

/// Measures everything in rounds and writes `out`.md, .json and .svg.
///
/// # Errors
/// A file that cannot be written.
pub(crate) fn run(out: &Path, setup: &Setup, effort: Effort, quick: bool) -> Result<()> {
    let machine = Machine::read(true, quick);
    let figures = round::run(cases(), setup, effort);
    let report = LocalReport { machine, figures };
    println!("{}", report.body());
    report.write(out)
}

/// Everything that one run found.
#[derive(Debug, Serialize)]
struct LocalReport {
    machine: Machine,
    figures: Vec<Figure>,
}

/// One line of the table.
struct TableRow {
    /// By what factor the peer is better.
    behind: Option<f64>,
    cells: Vec<String>,
}

impl LocalReport {
    fn write(&self, out: &Path) -> Result<()> {
        let markdown = format!(
            "# Two processes of one host\n\nWritten by `make bench-local` (tools/bench, src/local.rs); do \
             not edit. The samples are in [bench-local.json](bench-local.json).\n\n\
             ![bars](bench-local.svg)\n\n{}",
            self.body()
        );
        write_file(out, "md", &markdown)?;
        write_json(out, self)?;
        write_file(out, "svg", &bars(&self.panels()))
    }

    fn body(&self) -> String {
        let rounds = self.figures.iter().map(|figure| figure.samples.len()).max().unwrap_or(0);
        let packages: Vec<String> =
            self.machine.packages.iter().map(|(name, version)| format!("{name} {version}")).collect();
        let mut text = format!(
            "{}; pinned to two of them{}. Medians of {rounds} interleaved rounds; {}.\n{}\n{}{NOTES}",
            self.machine.described(),
            if self.machine.quick { "; quick run" } else { "" },
            packages.join(", "),
            self.machine.warning(),
            self.table(),
        );
        text.push_str("\n## Spread\n\nSmallest and largest of the rounds.\n\n");
        text.push_str(&self.spread());
        let problems = problems_of(&self.figures);
        if !problems.is_empty() {
            text.push_str("\n## Not measured, or not in every round\n\n");
            for problem in problems {
                let _ = writeln!(text, "- {problem}");
            }
        }
        text
    }

    fn median(&self, row: &str, metric: Metric) -> Option<f64> {
        self.figures.iter().find(|figure| figure.row == row && figure.metric == metric)?.median()
    }

    /// Worst first; lines without a ratio are the last.
    fn table(&self) -> String {
        let mut lines: Vec<TableRow> = ROWS
            .into_iter()
            .flat_map(|(ours, metric, peers)| peers.iter().map(move |peer| (ours, metric, peer)))
            .map(|(ours, metric, &(peer, aim))| self.line(ours, metric, peer, aim))
            .collect();
        lines.sort_by(|a, b| b.behind.partial_cmp(&a.behind).unwrap_or(Ordering::Equal));
        let heading =
            ["program", "shared memory", "wire", "gain", "beside", "its figure", "ratio", "aim", "met"];
        let mut rows = vec![heading.map(str::to_owned).to_vec()];
        rows.extend(lines.into_iter().map(|line| line.cells));
        Table(rows).markdown()
    }

    fn line(&self, ours: Ours, metric: Metric, peer: Comparison, aim: Aim) -> TableRow {
        let (local, wire) = (self.median(ours.row, metric), self.median(ours.wire, metric));
        let other = self.median(peer.row, metric);
        let better_than = |other: Option<f64>| {
            let (local, other) = (local?, other?);
            Some(if metric.smaller_is_better() { other / local } else { local / other })
        };
        let ratio = local.zip(other).map(|(local, other)| local / other);
        let cell = |figure: Option<f64>| figure.map_or("skipped".to_owned(), short);
        let times = |ratio: Option<f64>| ratio.map_or(String::new(), |ratio| format!("{}x", short(ratio)));
        let cells = vec![
            format!("{}, {}", ours.row, metric.title()),
            cell(local),
            cell(wire),
            times(better_than(wire)),
            peer.row.to_owned(),
            cell(other),
            times(ratio),
            aim.text(metric),
            aim.is_met(metric, local, ratio).map_or("", |met| if met { "yes" } else { "no" }).to_owned(),
        ];
        TableRow { behind: better_than(other).map(|by| 1.0 / by), cells }
    }

    fn spread(&self) -> String {
        let mut rows = vec![vec![String::new(), "smallest".to_owned(), "largest".to_owned()]];
        for figure in &self.figures {
            let end = |of: fn(f64, f64) -> f64| figure.samples.iter().copied().reduce(of);
            let cell = |figure: Option<f64>| figure.map_or("skipped".to_owned(), short);
            let name = format!("{}, {}", figure.row, figure.metric.title());
            rows.push(vec![name, cell(end(f64::min)), cell(end(f64::max))]);
        }
        Table(rows).markdown()
    }

    fn panels(&self) -> Vec<Panel> {
        let bar = |figure: &Figure| {
            let value = figure.median()?;
            Some(Bar { label: figure.row.to_owned(), value, fill: colour(figure.part) })
        };
        let panel = |metric: Metric| Panel {
            title: metric.title().to_owned(),
            less_is_better: metric.smaller_is_better(),
            bars: self.figures.iter().filter(|figure| figure.metric == metric).filter_map(bar).collect(),
        };
        METRICS.map(panel).into()
    }
}

impl Aim {
    fn text(self, metric: Metric) -> String {
        let bound = if metric.smaller_is_better() { "at most" } else { "at least" };
        match self {
            Self::Ratio(ratio) => format!("{bound} {ratio} x"),
            Self::Rate(rate) => format!("{bound} {rate} M/s"),
            Self::None => String::new(),
        }
    }

    fn is_met(self, metric: Metric, figure: Option<f64>, ratio: Option<f64>) -> Option<bool> {
        match self {
            Self::Ratio(bound) if metric.smaller_is_better() => Some(ratio? <= bound),
            Self::Ratio(bound) => Some(ratio? >= bound),
            Self::Rate(bound) => Some(figure? >= bound),
            Self::None => None,
        }
    }
}

/// What the table's reader must know.
const NOTES: &str = "
Latencies are one way (half the round trip); those of ib_read_lat, ib_atomic_lat, ucp_get and ucp_fadd are
the whole operation. GB are 10^9 bytes. The ratio is the program's figure over shared memory by that of what
stands beside it; worst first. The gain is over the same program on the wire (`STARVERBS_LINK=udp`), which is
UDP on loopback, path MTU 4096. A program that was to use shared memory (`STARVERBS_LINK=local`) and did not
has no figure. A run has the messages of half a second, by the figure of the run before it.

perftest's buffers are private memory, but in the rows that say mapped: there `STARVERBS_SHARE=malloc` has
them lie in memory that both processes map, as UCX's do in put_lat, ucp_get and ucp_fadd, where the whole
operation is a load or a store. Rows that say traced are with `STARVERBS_LINK_TRUST=trace`. UD makes
frames, which go through memory. The pwrite goes to a descriptor of /proc/self/mem that the target opened
and handed over; its figure is the call alone, while the target reads the word. memcpy copies from one
buffer to another of one process, always the same two. Rows that say queue pairs are WRITEs over each of
them in turn, in an order that is shuffled once (programs/many.c), 256 of 8 B under way or 16 of 64 KiB.
Rows of Valkey are requests of 64 B on 50 connections, one under way on each, of a client of our own
(programs/valkey.c), which polls, at a server that sleeps; its own TCP stands beside it. fi_pingpong keeps
one message in flight. The eventfd round trip is between two processes that sleep, halved, beside
`ib_send_lat -e`.
";

#[cfg(test)]
mod tests {
    use super::*;

    fn report(figures: &[(&'static str, Metric, f64)]) -> LocalReport {
        let figure = |&(row, metric, sample): &(&'static str, Metric, f64)| Figure {
            part: Part::Card,
            row,
            metric,
            samples: vec![sample],
            problem: None,
        };
        LocalReport { machine: Machine::read(true, true), figures: figures.iter().map(figure).collect() }
    }

    #[test]
    fn no_case_is_measured_twice() {
        let cases = cases();
        for (at, case) in cases.iter().enumerate() {
            let twin = cases[..at].iter().find(|other| (other.row, other.metric) == (case.row, case.metric));
            assert!(twin.is_none(), "{case:?}");
        }
    }

    #[test]
    fn the_worst_line_is_the_first_and_one_without_a_peer_the_last() {
        let table = report(&[
            ("ib_send_lat", Metric::Latency8B, 0.3),
            ("ib_send_lat, wire", Metric::Latency8B, 6.0),
            (UCX_TAG_LAT.row, Metric::Latency8B, 0.1),
            ("ib_send_bw", Metric::Rate8B, 5.0),
            (UCX_TAG_BW.row, Metric::Rate8B, 40.0),
            ("ib_read_lat", Metric::Latency8B, 1.0),
        ])
        .table();
        let lines: Vec<&str> = table.lines().skip(2).collect();
        assert!(lines[0].contains("ib_send_bw, 8 B rate") && lines[0].contains("at least 10 M/s"), "{table}");
        assert!(
            lines[1].contains("3.00x") && lines[1].contains("20.0x") && lines[1].contains("no"),
            "{table}"
        );
        assert!(lines[2..].iter().all(|line| line.contains("skipped")), "{table}");
    }

    #[test]
    fn an_aim_is_a_bound_on_the_ratio_or_on_the_figure() {
        assert_eq!(Aim::Ratio(2.0).is_met(Metric::Latency8B, Some(0.3), Some(3.0)), Some(false));
        assert_eq!(Aim::Ratio(0.9).is_met(Metric::Stream1M, Some(12.0), Some(0.95)), Some(true));
        assert_eq!(Aim::Rate(10.0).is_met(Metric::Rate8B, Some(12.0), None), Some(true));
        assert_eq!(Aim::None.is_met(Metric::Rate8B, Some(12.0), Some(1.0)), None);
    }
}
