//! What is aimed at: StaR's rates and latencies beside RC's, with room for all contexts, and whether that
//! holds.
//!
//! Owns the aims. It must not know how a figure is measured.

use super::{CALLS, Kind, MEDIAN, Point, RC, WORKLOADS};
use crate::samples::Samples;

/// From so many connections to so many StaR's rate is at least so much of RC's.
const RATES: [(u32, u32, f64); 2] = [(1, 1_000, 0.9), (10_000, 10_000, 1.0)];

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

/// The table's rows, its heading first. Of several numbers of connections the worst decides, and all must
/// have been measured.
pub(super) fn rows(samples: &Samples) -> Vec<Vec<String>> {
    let mut rows = vec![["claim", "aim", "measured", "holds"].map(str::to_owned).to_vec()];
    for workload in &WORKLOADS {
        let title = workload.title;
        let ratio = |connections, column| {
            Point { workload, miss: None, connections, transport: RC }.ratio(samples, column)
        };
        if let Kind::Latency(most) = workload.kind {
            let measured = ratio(1, MEDIAN).map(|ratio| (ratio, 1, ratio <= most));
            let claim = format!("{title}: latency by RC's, one connection");
            rows.push(row(claim, format!("at most {most:.1}x"), measured));
            continue;
        }
        for (few, many, least) in RATES {
            let counts = workload.connections.iter().filter(|count| (few..=many).contains(*count));
            let all: Option<Vec<(f64, u32)>> =
                counts.map(|&count| Some((ratio(count, CALLS)?, count))).collect();
            let worst = all.and_then(|all| all.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)));
            let measured = worst.map(|(ratio, count)| (ratio, count, ratio >= least));
            let range = if few == many { many.to_string() } else { format!("{few} to {many}") };
            let claim = format!("{title}: rate by RC's, {range} connections");
            rows.push(row(claim, format!("at least {least:.1}x"), measured));
        }
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
        let good = verdicts(|connections| Some(if connections == 10 { 0.91 } else { 1.5 }), 1.25);
        assert_eq!(good.len(), 2 * 5 + 2);
        assert!(good.iter().all(|(_, holds)| holds == "yes"), "{good:?}");
        assert_eq!(good[0].0, "0.91x, with 10");

        let bad = verdicts(|connections| Some(if connections == 10 { 0.89 } else { 0.99 }), 2.0);
        assert_eq!(bad[0], ("0.89x, with 10".to_owned(), "no".to_owned()));
        assert_eq!(bad[1], ("0.99x, with 10000".to_owned(), "no".to_owned()));
        assert_eq!((&*bad[10].1, &*bad[11].1), ("no", "yes"), "latency, inline and above the MTU");
    }

    #[test]
    fn what_was_not_measured_does_not_hold() {
        let some = verdicts(|connections| (connections != 100).then_some(1.0), 1.0);
        assert_eq!((&*some[0].0, &*some[0].1), ("-", "not measured"));
        assert_eq!(some[1].1, "yes");
        assert!(verdicts(|_| None, 1.0).iter().all(|(_, holds)| holds == "not measured"));
    }
}
