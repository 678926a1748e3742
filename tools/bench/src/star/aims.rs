//! What is aimed at: StaR's rates and latencies beside RC's, with room for all contexts, and whether that
//! holds.
//!
//! Owns the aims. It must not know how a figure is measured.

use super::{CALLS, Kind, MEDIAN, Point, RC, ROOM, WORKLOADS, Workload};
use crate::samples::Samples;

/// From so many connections to so many StaR's rate is at least so much of RC's.
const RATES: [(u32, u32, f64); 2] = [(1, 1_000, 0.9), (10_000, 10_000, 1.0)];
/// The same where the server's card has room for [`ROOM`] contexts: the paper's order, in which StaR is ahead
/// of RC from there on.
const BEYOND_ROOM: (u32, u32, f64) = (ROOM, 10_000, 1.0);

/// A row: a ratio, with how many connections it was measured, and whether it is as aimed at.
fn row(claim: String, aim: String, measured: Option<(f64, u32, bool)>) -> Vec<String> {
    let (figure, verdict) = match measured {
        Some((ratio, count, holds)) => {
            (format!("{ratio:.2}x, with {count}"), if holds { "yes" } else { "no" })
        }
        None => ("-".to_owned(), "not measured"),
    };
    vec![claim, aim, figure, verdict.to_owned()]
}

/// A row on rates. Of several numbers of connections the worst decides, and all must have been measured.
fn rate(
    samples: &Samples,
    workload: &'static Workload,
    miss: Option<&'static str>,
    (few, many, least): (u32, u32, f64),
) -> Vec<String> {
    let ratio = |connections| {
        let rate = Point { workload, miss, connections, transport: RC }.ratio(samples, CALLS);
        Some((rate?, connections))
    };
    let counts = workload.connections.iter().copied().filter(|count| (few..=many).contains(count));
    let all: Option<Vec<(f64, u32)>> = counts.map(ratio).collect();
    let worst = all.and_then(|all| all.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)));
    let measured = worst.map(|(ratio, count)| (ratio, count, ratio >= least));
    let range = match miss {
        Some(miss) => format!("more than {ROOM} connections, misses of {miss}"),
        None if few == many => format!("{many} connections"),
        None => format!("{few} to {many} connections"),
    };
    let claim = format!("{}: rate by RC's, {range}", workload.title);
    row(claim, format!("at least {least:.1}x"), measured)
}

/// The table's rows, its heading first.
pub(super) fn rows(samples: &Samples) -> Vec<Vec<String>> {
    let mut rows = vec![["claim", "aim", "measured", "holds"].map(str::to_owned).to_vec()];
    for workload in &WORKLOADS {
        if let Kind::Latency(most) = workload.kind {
            let one = Point { workload, miss: None, connections: 1, transport: RC };
            let measured = one.ratio(samples, MEDIAN).map(|ratio| (ratio, 1, ratio <= most));
            let claim = format!("{}: latency by RC's, one connection", workload.title);
            rows.push(row(claim, format!("at most {most:.1}x"), measured));
        } else {
            rows.extend(RATES.map(|aim| rate(samples, workload, None, aim)));
        }
    }
    for workload in &WORKLOADS {
        let misses = workload.misses.iter().filter(|miss| miss.is_some());
        rows.extend(misses.map(|&miss| rate(samples, workload, miss, BEYOND_ROOM)));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::super::STAR;
    use super::*;

    /// Figures and verdicts where StaR has this rate beside RC's with so many connections, and takes so much
    /// longer.
    fn verdicts(rate: impl Fn(u32) -> Option<f64>, longer: f64) -> Vec<(String, String)> {
        let mut samples = Samples::default();
        for point in Point::all() {
            let Some(rate) = rate(point.connections) else { continue };
            let is_star = point.transport == STAR;
            let (calls, median) = if is_star { (100.0 * rate, 10.0 * longer) } else { (100.0, 10.0) };
            let (table, row) = point.place();
            samples.add(table, &row, &[(CALLS, calls), (MEDIAN, median)]);
        }
        let rows = rows(&samples).split_off(1);
        rows.into_iter().map(|row| (row[2].clone(), row[3].clone())).collect()
    }

    #[test]
    fn the_worst_decides() {
        let good = verdicts(|connections| Some(if connections == 16 { 0.91 } else { 1.5 }), 1.25);
        assert_eq!(good.len(), 2 * 5 + 2 + 2 * 3 + 3);
        assert!(good.iter().all(|(_, holds)| holds == "yes"), "{good:?}");
        assert_eq!(good[0].0, "0.91x, with 16");

        let bad = verdicts(|connections| Some(if connections == 16 { 0.89 } else { 0.99 }), 2.0);
        assert_eq!(bad[0], ("0.89x, with 16".to_owned(), "no".to_owned()));
        assert_eq!(bad[1], ("0.99x, with 10000".to_owned(), "no".to_owned()));
        assert_eq!((&*bad[10].1, &*bad[11].1), ("no", "yes"), "latency, inline and above the MTU");
        assert_eq!(bad[12], ("0.99x, with 1000".to_owned(), "no".to_owned()), "with room for few");
    }

    #[test]
    fn what_was_not_measured_does_not_hold() {
        let some = verdicts(|connections| (connections != 100).then_some(1.0), 1.0);
        assert_eq!((&*some[0].0, &*some[0].1), ("-", "not measured"));
        assert_eq!(some[1].1, "yes");
        assert!(verdicts(|_| None, 1.0).iter().all(|(_, holds)| holds == "not measured"));
    }
}
