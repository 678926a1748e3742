//! The figures: what the paper says holds, but for what is known not to; and two runs are the same.

use std::fs;
use std::path::Path;

use starverbs_sim::rnic::{PAPERS, Report, Statements, Verdict};
use starverbs_sim::strom::figures::FIGURES;

fn run(name: &str) -> Report {
    FIGURES.iter().find(|figure| figure.name == name).expect("a figure").carry_out()
}

/// Sentences that do not hold; docs/figures/strom.md says why.
const DO_NOT: &[&str] = &[
    "using StRoM the latency can be reduced by around 5 us per lookup",
    "which is < 8%",
    "while the overhead from StRoM is minimal up to a failure rate of 50%",
    "at 100 G the shuffling kernel, which requires random access to the host memory, can no longer keep up \
     with the network",
];

/// The figures in docs/figures are those of the code; `make figures` writes them.
fn are_written(reports: &[Report]) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/figures");
    for report in reports {
        let written = fs::read_to_string(folder.join(format!("{}.csv", report.name)));
        assert_eq!(written.expect("a figure that is written"), report.csv(), "{}", report.name);
    }
}

#[test]
fn sentences_hold_and_figures_are_written() {
    let reports: Vec<Report> = FIGURES.iter().map(|figure| figure.carry_out()).collect();
    are_written(&reports);
    let (.., text) = PAPERS.iter().find(|(name, ..)| *name == "strom").expect("the paper");
    let statements = Statements::read(text).expect("statements");
    let judged = statements.statement.iter().filter_map(|statement| {
        match statement.judge(&reports).expect("its figures are there") {
            Verdict::Asked { holds, values } => Some((statement.text.as_str(), holds, values)),
            Verdict::Unasked => None,
        }
    });
    let judged: Vec<_> = judged.collect();
    let failed: Vec<_> = judged.iter().filter(|(_, holds, _)| !holds).collect();
    let texts: Vec<&str> = failed.iter().map(|(text, ..)| *text).collect();
    assert_eq!(texts, DO_NOT, "{failed:#?}");
    assert!(judged.len() > 7);
}

#[test]
fn figures_are_the_same_each_time() {
    for name in ["strom-5a", "strom-12c"] {
        let [one, other] = [run(name), run(name)].map(|report| report.csv());
        assert_eq!(one, other);
        assert!(one.lines().count() > 10);
    }
}
