//! UCX on one host, over TCP on the loopback interface or over memory: ucx_perftest.

use std::process::Command;

use crate::case::{Metric, Setup};
use crate::child::{self, Ready};
use crate::error::{BenchError, Result};

/// Messages before the counted ones, at most: ucx_perftest's own default.
const WARM_UP: u64 = 10_000;

/// A test of ucx_perftest.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Test {
    transports: &'static str,
    name: &'static str,
    args: &'static [&'static str],
}

impl Test {
    /// A test over these transports (`UCX_TLS`).
    pub(crate) const fn over(transports: &'static str, name: &'static str) -> Self {
        Self { transports, name, args: &[] }
    }

    /// A test of the transport layer alone, without the protocols above, which wants these arguments.
    pub(crate) const fn below(name: &'static str, args: &'static [&'static str]) -> Self {
        Self { transports: "all", name, args }
    }
}

/// Runs one test at the size of `metric`: microseconds, millions of messages per second or GB/s.
///
/// # Errors
/// As [`crate::case::Case::run`].
pub(crate) fn run(setup: &Setup, test: Test, metric: Metric, iters: u64) -> Result<f64> {
    let path = child::require("ucx_perftest", "ucx-utils")?;
    let port = child::free_tcp_port()?;
    let side = || {
        let mut side = Command::new(&path);
        side.env("UCX_TLS", test.transports).env("UCX_NET_DEVICES", "lo").args(["-p", &port.to_string()]);
        side
    };
    let mut client = side();
    client.args(["-f", "-t", test.name, "-s", &metric.bytes().to_string(), "-n", &iters.to_string()]);
    client.args(["-w", &iters.min(WARM_UP).to_string()]).args(test.args).arg("127.0.0.1");
    let output = child::run_pair(side(), client, Ready::Tcp(port), setup.cpus, setup.limit)?;
    parse(metric, &output.stdout).ok_or_else(|| BenchError::Parse {
        what: "ucx_perftest".to_owned(),
        tail: child::tail_of(&output.stdout),
    })
}

/// The last line: iterations; time at the 50th percentile, average, overall; MiB/s average, overall; messages
/// per second average, overall.
fn parse(metric: Metric, text: &str) -> Option<f64> {
    let line = text.lines().rfind(|line| !line.trim().is_empty())?;
    let figures: Vec<f64> =
        line.split_whitespace().map(str::parse).collect::<std::result::Result<_, _>>().ok()?;
    let figure = |index: usize| figures.get(index).copied().filter(|f| *f > 0.0);
    match metric {
        Metric::Latency8B | Metric::Latency64B => figure(1),
        Metric::Rate8B | Metric::Rate64B => Some(figure(7)? / 1e6),
        Metric::Stream64K | Metric::Stream1M => Some(figure(5)? * f64::from(1 << 20) / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
|     Test     | # iterations | 50.0%ile | average | overall |  average |  overall |  average  |  overall  \
|\n\
+--------------+--------------+----------+---------+---------+----------+----------+-----------+\
-----------+\n\
                       50000      3.880     4.047     4.050        2.00       1000.00      247087      \
                       250000\n";

    #[test]
    fn each_metric_reads_its_own_column() {
        assert_eq!(parse(Metric::Latency8B, TABLE), Some(3.88));
        assert_eq!(parse(Metric::Rate8B, TABLE), Some(0.25));
        let figure = parse(Metric::Stream1M, TABLE).unwrap();
        assert!((figure - 1.048_576).abs() < 1e-9, "{figure}");
    }

    #[test]
    fn a_table_without_figures_is_no_figure() {
        assert_eq!(parse(Metric::Latency8B, "| Test |\n+------+\n"), None);
    }
}
