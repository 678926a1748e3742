//! libfabric's providers under fi_pingpong: reliable datagram endpoints, one message in flight.

use std::process::Command;

use crate::case::{Metric, Setup};
use crate::child::{self, Ready};
use crate::error::{BenchError, Result};

/// Runs the ping-pong over `provider` at the size of `metric`: microseconds one way, or GB/s.
///
/// # Errors
/// As [`crate::case::Case::run`].
pub(crate) fn run(setup: &Setup, provider: &str, metric: Metric, iters: u64) -> Result<f64> {
    let path = child::require("fi_pingpong", "libfabric-bin")?;
    let port = child::free_tcp_port()?.to_string();
    let side = |port_flag: &str| {
        let mut side = Command::new(&path);
        side.args(["-p", provider, "-e", "rdm", port_flag, &port]);
        side.args(["-I", &iters.to_string(), "-S", &metric.bytes().to_string()]);
        side
    };
    let mut client = side("-P");
    client.arg("127.0.0.1");
    let ready = Ready::Tcp(port.parse().unwrap_or(0));
    let output = child::run_pair(side("-B"), client, ready, setup.cpus, setup.limit)?;
    parse(metric, &output.stdout).ok_or_else(|| BenchError::Parse {
        what: "fi_pingpong".to_owned(),
        tail: child::tail_of(&output.stdout),
    })
}

/// The line below the heading: bytes, sent, acknowledged, total, time, MB/s (10^6), microseconds one way,
/// rate.
fn parse(metric: Metric, text: &str) -> Option<f64> {
    let line = text.lines().skip_while(|line| !line.starts_with("bytes")).nth(1)?;
    let micros: f64 = line.split_whitespace().nth(6)?.parse().ok()?;
    if micros <= 0.0 {
        return None;
    }
    match metric {
        Metric::Latency8B | Metric::Latency64B => Some(micros),
        Metric::Rate8B | Metric::Rate64B => None,
        Metric::Stream64K | Metric::Stream1M => Some(metric.bytes() as f64 / micros / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec\n\
1m      2k      =2k      3.9g        0.82s   5141.77     200.00       0.00\n";

    #[test]
    fn time_and_bandwidth_come_from_the_time_of_one_transfer() {
        assert_eq!(parse(Metric::Latency8B, TABLE), Some(200.0));
        let figure = parse(Metric::Stream1M, TABLE).unwrap();
        assert!((figure - 5.242_88).abs() < 1e-9, "{figure}");
        assert_eq!(parse(Metric::Stream1M, "no provider\n"), None);
    }
}
