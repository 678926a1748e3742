//! What is measured: one case gives one figure.
//!
//! Owns the list of cases and how each is run once. It must not know how often, in which order, or how the
//! figures are shown.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde::Serialize;

use crate::child::{self, Cpu, Ready};
use crate::error::{BenchError, Result};
use crate::floor::{Batching, ROCE_OVERHEAD};
use crate::perftest::{Link, Program};
use crate::ucx::Test;
use crate::{fabric, many, perftest, ucx, valkey};

/// Payload of one packet at the largest path MTU.
pub(crate) const SEGMENT: usize = 4096;

/// What a figure says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Metric {
    /// One-way time of 8 B, in microseconds (a READ: both ways).
    Latency8B,
    /// The same of 64 B.
    Latency64B,
    /// Messages of 8 B, in millions per second.
    Rate8B,
    /// Requests of 64 B, in millions per second.
    Rate64B,
    /// Payload at 64 KiB messages, in GB/s (10^9 bytes).
    Stream64K,
    /// Payload at 1 MiB messages, in GB/s (10^9 bytes).
    Stream1M,
}

impl Metric {
    /// Those of the main table, in its order.
    pub(crate) const ALL: [Self; 4] = [Self::Latency8B, Self::Rate8B, Self::Stream64K, Self::Stream1M];

    /// Bytes of one message.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Latency8B | Self::Rate8B => 8,
            Self::Latency64B | Self::Rate64B => 64,
            Self::Stream64K => 64 << 10,
            Self::Stream1M => 1 << 20,
        }
    }

    /// The heading of its column.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Latency8B => "8 B latency, us",
            Self::Latency64B => "64 B latency, us",
            Self::Rate8B => "8 B rate, M/s",
            Self::Rate64B => "64 B rate, M/s",
            Self::Stream64K => "64 KiB, GB/s",
            Self::Stream1M => "1 MiB, GB/s",
        }
    }

    /// Whether a smaller figure is the better one.
    pub(crate) fn smaller_is_better(self) -> bool {
        matches!(self, Self::Latency8B | Self::Latency64B)
    }

    /// Seconds that one message took, by a figure of this metric.
    fn seconds_per_message(self, figure: f64) -> f64 {
        match self {
            Self::Latency8B | Self::Latency64B => 2.0 * figure * 1e-6,
            Self::Rate8B | Self::Rate64B => 1e-6 / figure,
            Self::Stream64K | Self::Stream1M => self.bytes() as f64 / (figure * 1e9),
        }
    }

    /// Messages that fill `seconds` at the pace of `figure`.
    pub(crate) fn messages_in(self, seconds: f64, figure: f64) -> u64 {
        let messages = seconds / self.seconds_per_message(figure);
        if messages.is_finite() { (messages as u64).clamp(100, 10_000_000) } else { 100 }
    }

    /// Messages of the first, uncounted run: enough of them that the figure is not that of the first ones.
    pub(crate) fn pilot(self) -> u64 {
        match self {
            Self::Latency8B | Self::Latency64B => 2_000,
            Self::Rate8B | Self::Rate64B => 20_000,
            Self::Stream64K => 20_000,
            Self::Stream1M => 2_000,
        }
    }
}

/// Which part of the run a case belongs to (`--only`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Part {
    /// Bare sockets.
    Floor,
    /// perftest on the card.
    Card,
    /// perftest on an emulated board, of which each end has a function.
    Board,
    /// UCX over TCP.
    Ucx,
    /// libfabric's tcp and udp providers.
    Fabric,
    /// Memory per QP, time to connect many, CPU time of an idle device.
    Scale,
}

/// How a case is run.
#[derive(Debug, Clone, Copy)]
pub(crate) enum CaseKind {
    /// Ping-pong of datagrams with so many bytes beside the payload.
    Pingpong(usize),
    /// Stream of datagrams of (payload, bytes beside it).
    Stream(usize, usize, Batching),
    /// A program of perftest.
    Perftest(Program),
    /// A test of ucx_perftest.
    Ucx(Test),
    /// A provider of libfabric under fi_pingpong.
    Fabric(&'static str),
    /// Requests of this kind to a Valkey server; `None`: over TCP.
    Valkey(&'static str, Option<Link>),
    /// WRITEs over so many queue pairs of two processes (programs/many.c), over shared memory or the wire.
    Many(u32, Link),
    /// Two processes of this host, by this subcommand, of which one hands descriptors to the other.
    SameHost(&'static str),
    /// Copies inside one process.
    Memcpy,
}

/// One figure to be measured.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    /// The part it belongs to.
    pub(crate) part: Part,
    /// The row of the table.
    pub(crate) row: &'static str,
    /// The column of the table.
    pub(crate) metric: Metric,
    /// How it is run.
    pub(crate) kind: CaseKind,
}

/// What all cases need to know.
#[derive(Debug, Clone)]
pub(crate) struct Setup {
    /// The folder with lib/libibverbs.so.1.
    pub(crate) dist: PathBuf,
    /// Processors of server and client.
    pub(crate) cpus: (Cpu, Cpu),
    /// The longest that one client may run.
    pub(crate) limit: Duration,
}

impl Case {
    /// Measures once with `iters` messages.
    ///
    /// # Errors
    /// A tool that is missing, fails, does not end, or prints no figure.
    pub(crate) fn run(&self, setup: &Setup, iters: u64) -> Result<f64> {
        let bytes = self.metric.bytes();
        match self.kind {
            CaseKind::Pingpong(overhead) => {
                floor(setup, "floor-pingpong", bytes + overhead, iters, Batching::Mmsg, Ready::Udp)
            }
            CaseKind::Stream(payload, overhead, batching) => {
                let datagrams = iters * bytes.div_ceil(payload) as u64;
                let size = payload + overhead;
                let rate = floor(setup, "floor-stream", size, datagrams, batching, Ready::Udp)?;
                Ok(match self.metric {
                    Metric::Rate8B | Metric::Rate64B => rate / 1e6,
                    _ => rate * payload as f64 / 1e9,
                })
            }
            CaseKind::Perftest(program) => perftest::run(setup, program, self.metric, iters),
            CaseKind::Ucx(test) => ucx::run(setup, test, self.metric, iters),
            CaseKind::Valkey(request, link) => valkey::run(setup, request, link, iters),
            CaseKind::Many(qps, link) => many::message_rate(setup, qps, link, bytes, iters)
                .map(|rate| if self.metric == Metric::Rate8B { rate } else { rate * bytes as f64 / 1e3 }),
            CaseKind::Fabric(provider) => fabric::run(setup, provider, self.metric, iters),
            CaseKind::SameHost(command) => floor(setup, command, bytes, iters, Batching::Gso, Ready::Unix),
            CaseKind::Memcpy => {
                let mut copy = floor_side("floor-memcpy", bytes, iters, Batching::Gso)?;
                copy.args(["--port", "0", "--peer", "0"]);
                number("floor-memcpy", &child::run_one_on(copy, setup.cpus.1, setup.limit)?.stdout)
            }
        }
    }
}

/// Starts this program twice as the two ends of a floor measurement.
fn floor(
    setup: &Setup,
    command: &str,
    bytes: usize,
    iters: u64,
    batching: Batching,
    ready: fn(u16) -> Ready,
) -> Result<f64> {
    let (server_port, client_port) = (child::free_udp_port()?, child::free_udp_port()?);
    let side = |port: u16, peer: u16| -> Result<Command> {
        let mut side = floor_side(command, bytes, iters, batching)?;
        side.args(["--port", &port.to_string(), "--peer", &peer.to_string()]);
        Ok(side)
    };
    let mut client = side(client_port, server_port)?;
    client.arg("--client");
    let server = side(server_port, client_port)?;
    let output = child::run_pair(server, client, ready(server_port), setup.cpus, setup.limit)?;
    number(command, &output.stdout)
}

fn floor_side(command: &str, bytes: usize, iters: u64, batching: Batching) -> Result<Command> {
    let exe = std::env::current_exe().map_err(|e| BenchError::from_io("current_exe", &e))?;
    let batching = match batching {
        Batching::Gso => "gso",
        Batching::Mmsg => "mmsg",
    };
    let mut side = Command::new(exe);
    side.args([
        command,
        "--bytes",
        &bytes.to_string(),
        "--iters",
        &iters.to_string(),
        "--batching",
        batching,
    ]);
    Ok(side)
}

fn number(command: &str, stdout: &str) -> Result<f64> {
    let tail = || child::tail_of(stdout);
    stdout.trim().parse().map_err(|_| BenchError::Parse { what: command.to_owned(), tail: tail() })
}

/// The row that ratios are taken against: what the wire itself demands and nothing more.
pub(crate) const FLOOR_ROW: &str = "bare UDP, RoCEv2 sizes";

/// Every case, those of one metric side by side so that they meet the machine in the same mood.
pub(crate) fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    for metric in Metric::ALL {
        let mut add = |part, row, kind| cases.push(Case { part, row, metric, kind });
        floor_cases(metric, &mut add);
        card_cases(metric, &mut add);
        let test = if metric == Metric::Latency8B { "tag_lat" } else { "tag_bw" };
        add(Part::Ucx, "UCX over TCP, tag", CaseKind::Ucx(Test::over("tcp,self", test)));
        // fi_pingpong has one message in flight, which is no message rate.
        if metric != Metric::Rate8B {
            add(Part::Fabric, "libfabric tcp, ping-pong", CaseKind::Fabric("tcp"));
            add(Part::Fabric, "libfabric udp;ofi_rxd, ping-pong", CaseKind::Fabric("udp;ofi_rxd"));
        }
    }
    cases
}

fn floor_cases(metric: Metric, add: &mut impl FnMut(Part, &'static str, CaseKind)) {
    let both = [("bare UDP", 0), (FLOOR_ROW, ROCE_OVERHEAD)];
    for (row, overhead) in both {
        let kind = match metric {
            Metric::Latency8B | Metric::Latency64B => CaseKind::Pingpong(overhead),
            Metric::Rate8B | Metric::Rate64B => CaseKind::Stream(metric.bytes(), overhead, Batching::Gso),
            Metric::Stream64K | Metric::Stream1M => CaseKind::Stream(SEGMENT, overhead, Batching::Gso),
        };
        // The stream of segments does not know how long a message is: 64 KiB and 1 MiB have one floor.
        add(Part::Floor, row, kind);
    }
    let one_by_one = match metric {
        Metric::Latency8B | Metric::Latency64B => return,
        Metric::Rate8B | Metric::Rate64B => metric.bytes(),
        Metric::Stream64K | Metric::Stream1M => SEGMENT,
    };
    add(
        Part::Floor,
        "bare UDP, sendmmsg, no GSO",
        CaseKind::Stream(one_by_one, ROCE_OVERHEAD, Batching::Mmsg),
    );
}

fn card_cases(metric: Metric, add: &mut impl FnMut(Part, &'static str, CaseKind)) {
    let programs = if metric == Metric::Latency8B {
        ["ib_send_lat", "ib_write_lat", "ib_read_lat"]
    } else {
        ["ib_send_bw", "ib_write_bw", "ib_read_bw"]
    };
    for (row, program) in ["starverbs SEND", "starverbs WRITE", READ_ROW].into_iter().zip(programs) {
        add(Part::Card, row, CaseKind::Perftest(Program::new(program, &[], Link::Udp)));
    }
    for ((row, _), program) in BOARD_ROWS.into_iter().zip(programs) {
        add(Part::Board, row, CaseKind::Perftest(Program::new(program, &[], Link::Board)));
    }
}

/// Rows of the board, and those of the card in software that do the same.
pub(crate) const BOARD_ROWS: [(&str, &str); 3] =
    [("board SEND", "starverbs SEND"), ("board WRITE", "starverbs WRITE"), ("board READ", READ_ROW)];

/// The row whose latency is a whole round trip.
pub(crate) const READ_ROW: &str = "starverbs READ";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_has_a_floor_and_a_card() {
        for metric in Metric::ALL {
            let of = |part| all().into_iter().filter(|c| c.metric == metric && c.part == part).count();
            assert!(of(Part::Floor) >= 2, "{metric:?}");
            assert_eq!((of(Part::Card), of(Part::Board)), (3, 3), "{metric:?}");
        }
    }

    #[test]
    fn messages_follow_the_pace_and_stay_bounded() {
        assert_eq!(Metric::Rate8B.messages_in(1.0, 2.0), 2_000_000);
        assert_eq!(Metric::Latency8B.messages_in(1.0, 5.0), 100_000);
        assert_eq!(Metric::Stream1M.messages_in(1.0, 0.0), 100);
        assert_eq!(Metric::Rate8B.messages_in(1.0, f64::INFINITY), 100);
    }
}
