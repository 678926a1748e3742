//! perftest's programs on the card, over its UDP wire or between two processes of one host.
//!
//! Owns their command lines, their environment and the reading of their tables.

use std::path::Path;
use std::process::Command;

use crate::board::Board;
use crate::case::{Metric, Setup};
use crate::child::{self, Ready};
use crate::error::{BenchError, Result};

/// What carries the queue pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Link {
    /// Shared memory; a run that falls back to packets is a failure.
    Local,
    /// The same, and the programs' buffers are memory that both map (`STARVERBS_SHARE=malloc`).
    Mapped,
    /// The same as [`Link::Local`], and long copies name the peer's process (`STARVERBS_LINK_TRUST=trace`).
    Traced,
    /// Packets.
    Udp,
    /// An emulated board's, of which each end has a function.
    Board,
}

/// What the library says of a queue pair that was to use shared memory and cannot (`STARVERBS_LINK=local`,
/// `STARVERBS_LOG=warn`).
const FELL_BACK: &str = "gets packets";

/// The longest list of requests that is posted at once: perftest wants whole lists.
const LIST: u64 = 16;

/// One of perftest's programs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Program {
    name: &'static str,
    args: &'static [&'static str],
    link: Link,
    /// Preferences of StaR, of the server and of the client
    star: Option<[&'static str; 2]>,
}

impl Program {
    /// The program `name` with further arguments.
    pub(crate) const fn new(name: &'static str, args: &'static [&'static str], link: Link) -> Self {
        Self { name, args, link, star: None }
    }

    /// The same over StaR.
    pub(crate) const fn with_star(self, server: &'static str, client: &'static str) -> Self {
        Self { star: Some([server, client]), ..self }
    }
}

/// Runs one program at the size of `metric`: microseconds, millions of messages per second or GB/s.
///
/// # Errors
/// As [`crate::case::Case::run`].
pub(crate) fn run(setup: &Setup, program: Program, metric: Metric, iters: u64) -> Result<f64> {
    let path = child::require(program.name, "perftest")?;
    let lib = library_dir(&setup.dist)?;
    let port = child::free_tcp_port()?;
    let iters = iters.next_multiple_of(LIST);
    let board = if program.link == Link::Board { Some(Board::start(&setup.dist)?) } else { None };
    let side = |end: usize| {
        let mut side = Command::new(&path);
        on_card(&mut side, &lib);
        match program.link {
            Link::Udp | Link::Board => {}
            Link::Local => same_host(&mut side),
            Link::Traced => {
                same_host(&mut side);
                side.env("STARVERBS_LINK_TRUST", "trace");
            }
            Link::Mapped => {
                same_host(&mut side);
                side.env("STARVERBS_SHARE", "malloc").env("LD_PRELOAD", lib.join("libstarverbs-share.so"));
            }
        }
        side.envs(program.star.map(|star| ("STARVERBS_STAR", star[end])));
        side.envs(board.iter().map(|board| ("STARVERBS_DEVICE", board.device(end))));
        side.args([
            "-F",
            "-p",
            &port.to_string(),
            "-s",
            &metric.bytes().to_string(),
            "-n",
            &iters.to_string(),
        ]);
        side.args(program.args);
        side
    };
    let mut client = side(1);
    client.arg("127.0.0.1");
    let output = child::run_pair(side(0), client, Ready::Tcp(port), setup.cpus, setup.limit)?;
    require_same_host(program.name, &output)?;
    parse(metric, &output.stdout).ok_or_else(|| BenchError::Parse {
        what: program.name.to_owned(),
        tail: child::tail_of(&output.stdout),
    })
}

/// Whether a program that was to use shared memory has.
///
/// # Errors
/// [`BenchError::Failed`]: it says that it could not.
pub(crate) fn require_same_host(program: &str, output: &child::Output) -> Result<()> {
    if !output.stderr.contains(FELL_BACK) {
        return Ok(());
    }
    Err(BenchError::Failed {
        what: program.to_owned(),
        status: "not over shared memory".to_owned(),
        tail: child::tail_of(&output.stderr),
    })
}

/// Has a program use shared memory, and say so if it cannot.
pub(crate) fn same_host(command: &mut Command) {
    command.env("STARVERBS_LINK", "local").env("STARVERBS_LOG", "warn");
}

/// The folder of the built library.
///
/// # Errors
/// [`BenchError::NotBuilt`].
pub(crate) fn library_dir(dist: &Path) -> Result<std::path::PathBuf> {
    let lib = dist.join("lib");
    if !lib.join("libibverbs.so.1").exists() {
        return Err(BenchError::NotBuilt { path: lib.join("libibverbs.so.1").display().to_string() });
    }
    lib.canonicalize().map_err(|e| BenchError::from_io("canonicalize", &e))
}

/// Puts a program on the card, over the wire even where both ends share a host, with the address and the
/// segment size of the bare streams: on loopback the path MTU is 4096, whatever the host's other interfaces
/// allow.
pub(crate) fn on_card(command: &mut Command, lib: &Path) {
    command.env("LD_LIBRARY_PATH", lib).env("STARVERBS_LINK", "udp").env("STARVERBS_ADDRS", "127.0.0.1");
}

/// Reads the line of figures: the first that begins with the size, below the heading.
fn parse(metric: Metric, text: &str) -> Option<f64> {
    let size = metric.bytes().to_string();
    let figures = text
        .lines()
        .skip_while(|line| !line.trim_start().starts_with("#bytes"))
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .find(|fields| fields.first() == Some(&size.as_str()))?;
    let figure = |index: usize| figures.get(index)?.parse::<f64>().ok().filter(|f| *f > 0.0);
    match metric {
        // bytes, iterations, t_min, t_max, t_typical: perftest's name for the median.
        Metric::Latency8B | Metric::Latency64B => figure(4),
        // bytes, iterations, BW peak, BW average [MiB/s], MsgRate [Mpps]
        Metric::Rate8B | Metric::Rate64B => figure(4),
        Metric::Stream64K | Metric::Stream1M => Some(figure(3)? * f64::from(1 << 20) / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATENCY: &str = "\
 local address: LID 0000 QPN 0x0011 PSN 0x8\n\
---------------------------------------------------------------------------------------\n\
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% \
 percentile[usec]   99.9% percentile[usec] \n\
 8       1000          3.24           32.11        4.56     \t       4.70        \t1.10   \t\t8.01    \
 \t\t32.11  \n";
    const BANDWIDTH: &str = "\
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n\
 65536      1000             2500.00            2000.00 \t\t   0.032000\n";

    #[test]
    fn the_median_latency_is_read() {
        assert_eq!(parse(Metric::Latency8B, LATENCY), Some(4.56));
    }

    #[test]
    fn bandwidth_is_turned_from_mebibytes() {
        let figure = parse(Metric::Stream64K, BANDWIDTH).unwrap();
        assert!((figure - 2.097_152).abs() < 1e-9, "{figure}");
    }

    #[test]
    fn another_size_or_no_table_is_no_figure() {
        assert_eq!(parse(Metric::Rate8B, BANDWIDTH), None);
        assert_eq!(parse(Metric::Rate8B, "8 1 2 3 4"), None);
        assert_eq!(parse(Metric::Rate8B, ""), None);
    }
}
