//! StaR's testbed in the simulator: calls and rounds against closed forms. Each run checks that all adds up.

use std::ops::ControlFlow;

use starverbs_sim::rnic::{DEFAULT_PARAMS, ParamError, Params, RunResult, Settings, run};
use starverbs_star::carried::CARRIED_LEN;
use starverbs_star::message::CQE_LEN;
use starverbs_star::wire::OVERHEAD;

fn outcome(models: &[&str], settings: &[(&str, toml::Value)]) -> RunResult {
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

/// RoCEv2's frames with their headers, preamble and gap.
const ROCE: f64 = 82.0;
/// StaR's for the stateless side, by the wire format of `starverbs_star`: Ethernet's, IP's and UDP's share as
/// RoCEv2's, without BTH and ICRC.
const STAR: f64 = ROCE - 16.0 + OVERHEAD as f64;
/// Bytes before each completion in an RDCS: address and length.
const BUNDLED: f64 = 12.0;

#[test]
fn the_wire_bounds() {
    let at = |models: &[&str], qps: i64| outcome(models, &[("workload.qps", qps.into())]).rate;
    // to the server: three SENDs and the ACK of the reply
    let rdma = 3.0 * (ROCE + 32.0) + ROCE + 4.0;
    within(0.01, "RDMA", at(&["connectx-3"], 100), 1e9 / (rdma * 0.8));
    within(0.01, "RDMA on FPGA", at(&["fpga-10g"], 100), 1e9 / (rdma * 0.8));
    // four EA, three RD, a GD, four CQEP
    let star = 4.0 * STAR + 3.0 * (STAR + 32.0) + STAR + 4.0 * (STAR + CQE_LEN as f64);
    within(0.01, "StaR", at(&["fpga-10g", "star"], 100), 1e9 / (star * 0.8));
    within(0.04, "StaR, whose calls fall together", at(&["fpga-10g", "star"], 400), 1e9 / (star * 0.8));
    // an RDCS of three SENDs, an EA, a CQEP
    let packed = STAR + 3.0 * (BUNDLED + CARRIED_LEN as f64 + 32.0) + STAR + STAR + CQE_LEN as f64;
    let settings = [("workload.qps", 100.into()), ("star.form", "packed".into())];
    let outcome = outcome(&["fpga-10g", "star"], &settings);
    within(0.01, "packed", outcome.rate, 1e9 / (packed * 0.8));
    // three polls, and a post each of RECVs and of the reply, by 16 processes
    within(0.05, "CPU", outcome.cpu, outcome.rate * 5.0 * 90e-9 / 16.0);
}

fn on_core(models: &[&str], settings: &[(&str, toml::Value)]) -> RunResult {
    let settings: Vec<_> = settings.iter().cloned().chain([("card.stack", "rc".into())]).collect();
    outcome(models, &settings)
}

/// RC of the core on the units of a card, and csRNA's units: two programs, one rate.
#[test]
fn the_cores_rc_is_as_fast_as_the_units() {
    for qps in [8, 100, 200, 400] {
        let settings = [("workload.qps", qps.into())];
        let (core, units) = (on_core(&["fpga-10g"], &settings), outcome(&["fpga-10g"], &settings));
        within(0.015, "calls", core.rate, units.rate);
        within(0.06, "latency", core.latency, units.latency);
        assert_eq!((core.lost, units.lost), (0, 0));
    }
}

/// What is lost is sent again, by the core's timers, or over UC and UD by the client; no call is lost.
#[test]
fn losses_cost_time_and_no_calls() {
    let settings = |loss: i64| {
        [
            ("workload.qps", 20.into()),
            ("net.loss_ppm", loss.into()),
            ("workload.least_messages", 5_000.into()),
        ]
    };
    for (stack, form) in
        [("star", "paper"), ("star", "packed"), ("rc", "paper"), ("uc", "paper"), ("ud", "paper")]
    {
        let at = |loss| {
            let stack = [("card.stack", stack.into()), ("star.form", form.into())];
            outcome(&["fpga-10g"], &[&settings(loss)[..], &stack[..]].concat())
        };
        let (quiet, lossy) = (at(0), at(20_000));
        assert!(lossy.lost > 20 && lossy.repeated >= lossy.lost / 4, "{stack}: {lossy:?}");
        assert!(lossy.rate < 0.95 * quiet.rate, "{stack}: {} of {}", lossy.rate, quiet.rate);
        assert_eq!((quiet.lost, quiet.messages > 0), (0, true), "{stack}");
    }
}

/// A stateless server waits for no context, so that it needs no room for packets that do.
#[test]
fn a_card_that_waits_for_contexts_needs_room() {
    let at = |stack: &str| {
        let settings = [
            ("workload.qps", 300.into()),
            ("card.buffer_packets", 64.into()),
            ("card.stack", stack.into()),
            ("workload.least_messages", 3_000.into()),
        ];
        outcome(&["fpga-10g"], &settings)
    };
    let (star, rc) = (at("star"), at("rc"));
    assert_eq!(star.lost, 0);
    assert!(rc.lost > 100 && rc.repeated > 100, "{rc:?}");
}

/// With one client, whose card has room for 120 contexts, StaR misses there.
#[test]
fn a_clients_card_may_miss() {
    let at = |qps: i64| {
        outcome(&["fpga-10g", "star"], &[("workload.qps", qps.into()), ("host.clients", 1.into())])
    };
    let (few, many) = (at(100), at(160));
    assert!(few.server.misses <= 100 && many.server.misses > 1000);
    assert!(many.rate < 0.5 * few.rate);
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
fn the_security_check_costs_no_throughput_and_clients_alone_ask_for_contexts() {
    let at = |check: bool| {
        let settings = [("workload.qps", 300.into()), ("star.security_check", check.into())];
        outcome(&["fpga-10g", "star"], &settings)
    };
    let (with, without) = (at(true), at(false));
    within(0.01, "with the check", with.rate, without.rate);
    assert_eq!(with.server.misses, 300, "the clients' cards ask, once each; the stateless one has none");
}

/// Calls of groups are measured for ten turns of all: a run that is shorter than a slot shows one group.
#[test]
fn a_longer_run_of_groups_shows_the_same() {
    let at = |messages: i64| {
        let settings = [
            ("workload.qps", 400.into()),
            ("host.slot_ns", 1_000_000.into()),
            ("workload.least_messages", messages.into()),
        ];
        outcome(&["connectx-3", "scalardma"], &settings)
    };
    let (short, long) = (at(1_000), at(1_000_000));
    assert!(short.virtual_time > 20e-3 && long.virtual_time > 1.5 * short.virtual_time, "20 slots, and more");
    within(0.02, "calls", short.rate, long.rate);
}

#[test]
fn groups_and_rounds_of_odd_sizes_add_up() {
    for (qps, group, slot, sends) in
        [(1, 0, 20_000, 1), (7, 3, 1_000, 3), (50, 49, 20_000, 10), (9, 1, 300, 2)]
    {
        for kind in ["calls", "rounds"] {
            for (models, form) in [
                (&["fpga-10g", "star"][..], "paper"),
                (&["fpga-10g", "star"], "packed"),
                (&["fpga-10g"], "paper"),
                (&["connectx-3"], "paper"),
            ] {
                let settings = [
                    ("star.form", form.into()),
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
    for name in ["net.loss_ppm", "card.buffer_packets"] {
        let set = Settings::from([(name.to_owned(), 5.into())]);
        let params = Params::read_models(DEFAULT_PARAMS, &[], &[&set]);
        assert!(matches!(params, Err(ParamError::Value(_))), "the units send nothing again");
    }
    assert!(matches!(read(&["testbed-10g"], "workload.kind", "rate"), Err(ParamError::Value(_))));
}
