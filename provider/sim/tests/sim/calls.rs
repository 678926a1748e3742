//! StaR's testbed in the simulator: calls and rounds against closed forms. Each run checks that all adds up.

use std::ops::ControlFlow;

use starverbs_sim::rnic::{DEFAULT_PARAMS, Outcome, ParamError, Params, Settings, run};

fn outcome(models: &[&str], settings: &[(&str, toml::Value)]) -> Outcome {
    let defaults = [("workload.kind", "calls".into()), ("workload.least_messages", 20_000.into())];
    let settings: Settings =
        defaults.iter().chain(settings).map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    let models: Vec<&str> = ["testbed-10g"].iter().chain(models).copied().collect();
    let params = Params::read_models(DEFAULT_PARAMS, &models, &[&settings]).unwrap();
    run(&params, |_| ControlFlow::Continue(())).unwrap()
}

fn within(share: f64, what: &str, here: f64, form: f64) {
    assert!((here / form - 1.0).abs() < share, "{what}: {here} here, {form} by the closed form");
}

/// Frames with their headers, preamble and gap; StaR's header is 8 bytes longer than BTH.
const ROCE: f64 = 82.0;
const STAR: f64 = 90.0;

#[test]
fn the_wire_bounds() {
    let at = |models: &[&str], qps: i64| outcome(models, &[("workload.qps", qps.into())]).rate;
    // to the server: three SENDs and the ACK of the reply
    let rdma = 3.0 * (ROCE + 32.0) + ROCE + 4.0;
    within(0.01, "RDMA", at(&["connectx-3"], 100), 1e9 / (rdma * 0.8));
    within(0.01, "RDMA on FPGA", at(&["fpga-10g"], 100), 1e9 / (rdma * 0.8));
    // four EA, three RD, a GD, four CQEP
    let star = 4.0 * STAR + 3.0 * (STAR + 32.0) + STAR + 4.0 * (STAR + 20.0);
    within(0.01, "StaR", at(&["fpga-10g", "star"], 200), 1e9 / (star * 0.8));
    within(0.01, "StaR", at(&["fpga-10g", "star"], 400), 1e9 / (star * 0.8));
}

#[test]
fn one_miss_at_a_time_bounds() {
    let at = |kind: &str| {
        outcome(&["fpga-10g"], &[("workload.qps", 400.into()), ("workload.kind", kind.into())]).rate
    };
    // 256 B of context and 32 B of header at 64 Gb/s; the cycles to the DMA engine and back, and of the
    // accesses that hit
    let miss = 1500.0 + 288.0 * 0.125 + 2.0 * 6.4;
    within(0.01, "calls: one miss, five hits", at("calls"), 1e9 / (miss + 5.0 * 6.4));
    // some contexts of the last that called are there yet when the replies begin
    within(0.1, "rounds: two misses", at("rounds"), 1e9 / (2.0 * miss));
}

#[test]
fn latency_times_rate_is_the_number_of_calls_under_way() {
    for models in [&["fpga-10g", "star"][..], &["fpga-10g"], &["connectx-3"]] {
        for qps in [8i64, 400] {
            // long enough that those under way at its ends count for little
            let settings = [("workload.qps", qps.into()), ("workload.least_messages", 100_000.into())];
            let outcome = outcome(models, &settings);
            within(0.01, "Little's law", outcome.rate * outcome.latency, qps as f64);
        }
    }
}

#[test]
fn the_security_check_costs_no_throughput_and_the_stateless_side_asks_for_no_context() {
    let at = |check: bool| {
        let settings = [("workload.qps", 300.into()), ("star.security_check", check.into())];
        outcome(&["fpga-10g", "star"], &settings)
    };
    let (with, without) = (at(true), at(false));
    within(0.01, "with the check", with.rate, without.rate);
    assert_eq!((with.server.hits, with.server.misses, with.server.waited), (0, 0, 0));
}

#[test]
fn groups_and_rounds_of_odd_sizes_add_up() {
    for (qps, group, slot, sends) in
        [(1, 0, 20_000, 1), (7, 3, 1_000, 3), (50, 49, 20_000, 10), (9, 1, 300, 2)]
    {
        for kind in ["calls", "rounds"] {
            for models in [&["fpga-10g", "star"][..], &["fpga-10g"], &["connectx-3"]] {
                let settings = [
                    ("workload.qps", qps.into()),
                    ("workload.kind", kind.into()),
                    ("workload.sends", sends.into()),
                    ("workload.least_messages", 2_000.into()),
                    ("host.group", group.into()),
                    ("host.slot_ns", slot.into()),
                    ("qpc.entries", 2.into()),
                    ("card.window_packets", 5.into()),
                ];
                outcome(models, &settings);
            }
        }
    }
}

#[test]
fn unknown_models_and_impossible_loads_are_errors() {
    let read = |models: &[&str], name: &str, value: &str| {
        let set = Settings::from([(name.to_owned(), value.into())]);
        Params::read_models(DEFAULT_PARAMS, models, &[&set])
    };
    assert!(matches!(read(&["connectx-9"], "card.stack", "rdma"), Err(ParamError::UnknownModel(_))));
    assert!(matches!(read(&[], "card.stack", "star"), Err(ParamError::Value(_))), "StaR needs calls");
    assert!(matches!(read(&["testbed-10g"], "workload.kind", "rate"), Err(ParamError::Value(_))));
}
