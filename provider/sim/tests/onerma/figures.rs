//! Figures: closed forms, and that two runs give the same.

use starverbs_sim::onerma::figures::FIGURES;
use starverbs_sim::rnic::Report;

fn run(name: &str) -> Report {
    FIGURES.iter().find(|figure| figure.name == name).expect("a figure").carry_out()
}

fn near(value: f64, expected: f64, percent: f64) {
    assert!((value / expected - 1.0).abs() < percent / 100.0, "{value} is not {expected}");
}

/// A slot has 4 KB each 5 us of a READ, and each 9.35 us of a WRITE; the link carries 4096 of 4206 bytes.
#[test]
fn slots_are_worth_their_round_trips_until_the_link_is_full() {
    let report = run("1rma-11b");
    let value = |series, slots| report.value(series, slots).expect("a point");
    for slots in [1, 4, 10] {
        near(value("READ", slots), f64::from(slots) * 4.096 * 8.0 / 5.0, 1.0);
        near(value("WRITE", slots), f64::from(slots) * 4.096 * 8.0 / 9.35, 1.0);
    }
    near(value("READ", 24), 100.0 * 4096.0 / 4206.0, 0.5);
}

#[test]
fn the_ramp_is_the_same_each_time() {
    let [one, other] = [run("1rma-15a"), run("1rma-15a")].map(|report| report.csv());
    assert_eq!(one, other);
    assert!(one.lines().count() > 30);
}

/// A READ of 64 B takes 4.4 us on idle links, and probes are 0.2 us apart.
#[test]
fn a_new_key_costs_a_round_trip_and_the_time_until_the_client_has_it() {
    let report = run("1rma-14");
    for series in ["by its owner", "by REKEY from a third host"] {
        for told in [0, 5, 40] {
            near(report.value(series, told).expect("a point"), 4.6 + f64::from(told), 1.0);
        }
    }
}

#[test]
fn a_replica_that_fails_answers_nothing_and_the_other_one_all() {
    let report = run("1rma-9");
    let value = |series, at| report.value(series, at).expect("a point");
    near(value("R2, mean", 200), value("R1, mean", 200), 10.0);
    for at in (260..=400).step_by(20) {
        assert_eq!((value("R2, mean", at), value("READs that failed", at)), (0.0, 0.0), "at {at} us");
        near(value("GETs a us", at), 2.0 * 35.0 / 8.0 / 4.096, 20.0);
    }
    assert!(value("READs that failed", 220) > 0.0, "it was in use");
}
