//! Checks the output of programs: that results are there, complete and possible.

use std::time::Duration;

/// What perftest says when its samples of the CPU's frequency do not agree, as on a busy machine. It ends
/// without a report then, and the card has no part in that.
pub const UNCALIBRATED: &str = "Correlation coefficient r^2";
/// What perftest says when its second connection by the connection manager came before its server listened
/// for it: the two are not in step there (create_rdma_cm_connection: the handshake comes before rdma_listen).
/// An invalid service ID is what any CM answers then, to a REQ (REJ reason 8) or a SIDR_REQ (status 1).
/// perftest 4.5 would try again, but with the ids and the event channel that it has just destroyed.
pub const EARLY: [&str; 2] =
    ["Event: RDMA_CM_EVENT_REJECTED; error: 8.", "Event: RDMA_CM_EVENT_UNREACHABLE; error: 1."];
/// Tries at that. From the second one on the client is held back, more each time.
pub const HASTES: u32 = 10;
/// How long a client that was too early is watched.
pub const HELD: Duration = Duration::from_secs(5);
/// Tries at a machine too busy to measure: in the guest three in a row were.
pub const CALIBRATIONS: u32 = 10;

/// What a client's output must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// perftest's latency table with at least so many rows.
    Latency(usize),
    /// perftest's bandwidth table with at least so many rows.
    Bandwidth(usize),
    /// The two result lines of the ibv_*_pingpong programs.
    PingPong,
    /// The one word of ibv_xsrq_pingpong.
    Success,
    /// A line with these words.
    Line(&'static str),
}

impl Expect {
    /// A remark with the (last) figure that the program printed, or what is wrong.
    pub fn check(self, output: &str) -> Result<String, String> {
        match self {
            Expect::Latency(rows) => {
                let last = table(output, rows)?;
                // Iterations: 9 columns, the 5th is the median. By duration: 4 columns, the 3rd is the mean.
                let figure = if last.len() >= 9 { ordered(&last)? } else { last[2] };
                Ok(format!("{figure:.2} us"))
            }
            Expect::Bandwidth(rows) => {
                let last = table(output, rows)?;
                let (average, rate) = (last[3], last.get(4).copied().unwrap_or(0.0));
                if rate > 0.0 {
                    Ok(format!("{average:.0} MiB/s, {rate:.3} M/s"))
                } else {
                    Err("rate is 0".to_owned())
                }
            }
            Expect::PingPong => ping_pong(output),
            Expect::Success if output.lines().any(|line| line == "success") => Ok("success".to_owned()),
            Expect::Line(words) if output.lines().any(|line| line.contains(words)) => Ok(String::new()),
            Expect::Line(words) => Err(format!("does not say {words:?}")),
            Expect::Success => Err("does not say that it succeeded".to_owned()),
        }
    }
}

/// The last row of perftest's table; every row must have only positive, finite figures.
fn table(output: &str, rows: usize) -> Result<Vec<f64>, String> {
    let header = output.find("#bytes").ok_or("no table")?;
    let mut found = Vec::new();
    for line in output[header..].lines().skip(1) {
        let row: Option<Vec<f64>> = line.split_ascii_whitespace().map(|word| word.parse().ok()).collect();
        let Some(row) = row.filter(|row| row.len() >= 4) else { continue };
        // perftest computes the spread (column 7 of latencies) in an int, whose overflow makes it no number,
        // and rounds bandwidths of small messages to 0.
        let mut figures = row.iter().enumerate().filter(|(i, _)| *i != 6).map(|(_, x)| *x);
        let possible = row[0] > 0.0 && row[1] > 0.0 && figures.all(|x| x.is_finite() && x >= 0.0);
        if !possible {
            return Err(format!("impossible figures: {line}"));
        }
        found.push(row);
    }
    if found.len() < rows {
        return Err(format!("{} rows of results instead of {rows}", found.len()));
    }
    found.pop().ok_or_else(|| "no results".to_owned())
}

fn ordered(row: &[f64]) -> Result<f64, String> {
    let (min, max, typical) = (row[2], row[3], row[4]);
    if min <= typical && typical <= max {
        Ok(typical)
    } else {
        Err(format!("min {min}, median {typical}, max {max}"))
    }
}

fn ping_pong(output: &str) -> Result<String, String> {
    if let Some(line) = output.lines().find(|line| line.contains("invalid data")) {
        return Err(line.to_owned());
    }
    let figure = |unit: &str| {
        let line = output.lines().find(|line| line.ends_with(unit))?;
        line.split(" = ").nth(1)?.split(' ').next()?.parse::<f64>().ok().filter(|x| x.is_finite() && *x > 0.0)
    };
    figure("Mbit/sec").ok_or("no line with Mbit/sec")?;
    let microseconds = figure("usec/iter").ok_or("no line with usec/iter")?;
    Ok(format!("{microseconds:.2} us/iter"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BANDWIDTH: &str = "---\n #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   \
                             MsgRate[Mpps]\n \
                             65536      5000             5000.10            4990.20\t\t   0.079843\n---\n";
    const LATENCY: &str = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    \
                           t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] \n \
                           2       1000          2.10           9.93         2.41  2.50   0.34  3.01  9.93   \
                           \n";

    #[test]
    fn tables_are_read() {
        assert_eq!(Expect::Bandwidth(1).check(BANDWIDTH).unwrap(), "4990 MiB/s, 0.080 M/s");
        assert_eq!(Expect::Latency(1).check(LATENCY).unwrap(), "2.41 us");
    }

    #[test]
    fn missing_or_impossible_results_are_noticed() {
        assert!(Expect::Bandwidth(2).check(BANDWIDTH).is_err());
        assert!(Expect::Bandwidth(1).check("Couldn't connect").is_err());
        assert!(Expect::Bandwidth(1).check(&BANDWIDTH.replace("0.079843", "0.000000")).is_err());
        assert!(Expect::Bandwidth(1).check(&BANDWIDTH.replace("4990.20", "inf")).is_err());
        assert!(Expect::Latency(1).check(&LATENCY.replace("2.10", "12.10")).is_err());
        assert!(Expect::Latency(1).check(&LATENCY.replace("2.50", "nan")).is_err());
        assert!(Expect::Latency(1).check(&LATENCY.replace("0.34", "-nan")).is_ok());
    }

    #[test]
    fn ping_pong_needs_both_lines_and_good_data() {
        let good =
            "8192000 bytes in 0.01 seconds = 7011.02 Mbit/sec\n1000 iters in 0.01 seconds = 9.35 usec/iter\n";
        assert_eq!(Expect::PingPong.check(good).unwrap(), "9.35 us/iter");
        assert!(Expect::PingPong.check("8192000 bytes in 0.01 seconds = 7011.02 Mbit/sec\n").is_err());
        assert!(Expect::PingPong.check(&format!("invalid data in page 0\n{good}")).is_err());
    }
}
