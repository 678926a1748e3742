//! The simulated cards against closed forms, and against themselves.

use std::ops::ControlFlow;

use starverbs_sim::rnic::{
    DEFAULT_PARAMS, Metric, Outcome, PLANS, Params, Plan, PlanError, Report, RunError, Settings, run,
};

fn outcome(settings: &[(&str, toml::Value)]) -> Outcome {
    let short = ("workload.least_messages", toml::Value::from(10_000));
    let settings = settings.iter().chain([&short]);
    let settings: Settings = settings.map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    let params = Params::read(DEFAULT_PARAMS, &[&settings]).unwrap();
    run(&params, |_| ControlFlow::Continue(())).unwrap()
}

fn within(share: f64, what: &str, here: f64, form: f64) {
    assert!((here / form - 1.0).abs() < share, "{what}: {here} here, {form} by the closed form");
}

/// Nanoseconds that `bytes` take on PCIe.
fn bus(bytes: f64) -> f64 {
    (bytes + 32.0) * 0.0625
}

/// One process, one QP.
const ALONE: [(&str, i64); 2] = [("host.processes", 1), ("workload.qps", 1)];

fn alone(op: &str, more: &[(&str, toml::Value)]) -> f64 {
    let mut settings: Vec<(&str, toml::Value)> =
        ALONE.iter().map(|(name, value)| (*name, (*value).into())).collect();
    settings.extend([("workload.kind", "latency".into()), ("workload.op", op.into())]);
    settings.extend(more.iter().cloned());
    outcome(&settings).latency * 1e9
}

/// Software, WQE, data, wire both ways, completion, and a cycle a stage: 6 from the doorbell to the DMA
/// engine (with 3 of address translation), 6 for the context and to the DMA engine, 2 out, 4 at the client, 2
/// in, 5 of the completion. With READ the 3 of the data's translation are the client's.
fn hit() -> f64 {
    let software = 90.0 + 90.0;
    let wqe = 500.0 + bus(32.0);
    let data = 500.0 + bus(64.0);
    let wire = 2.0 * 1000.0 + 64.0 * 0.080;
    let completion = 250.0 + bus(12.0);
    software + wqe + data + wire + completion + 25.0
}

#[test]
fn a_single_hit() {
    within(0.001, "write", alone("write", &[]), hit());
    // its completion waits for the data before it in the write engine, less the 2 cycles that it comes later
    within(0.001, "read", alone("read", &[]), hit() + bus(64.0) - 2.0);
}

/// Two QPs in turn, of two clients, and a cache of one: each message misses at the server.
#[test]
fn a_single_miss() {
    // with the cycles to the DMA engine and back
    let fetch = 500.0 + bus(256.0) + 2.0;
    let two = |policy: &str, entries: i64| {
        let settings =
            [("workload.qps", 2.into()), ("qpc.entries", entries.into()), ("qpc.policy", policy.into())];
        alone("write", &settings)
    };
    within(0.001, "all hit", two("non-blocking", 2), hit());
    within(0.001, "one after the other", two("non-blocking", 1), hit() + fetch);
    within(0.001, "first come", two("fcfs", 1), hit() + fetch);
    // the context comes while the WQE does, and is larger
    within(0.001, "hidden", two("latency-hiding", 1), hit() + bus(256.0) - bus(32.0) + 1.0);
}

#[test]
fn the_window_bounds() {
    let rate =
        |window: i64| outcome(&[("card.window_packets", window.into()), ("workload.qps", 200.into())]).rate;
    // from the requester to the client and back: the wire, and 8 stages
    let round_trip = (2.0 * 1000.0 + 64.0 * 0.080 + 8.0) * 1e-9;
    for window in [10, 50, 100] {
        within(0.01, "window", rate(window), window as f64 / round_trip);
    }
}

/// Nor does it need a full window: of two requests the second goes so many cycles later.
#[test]
fn the_requesters_cycles_bound() {
    for cycles in [15, 40] {
        let settings = [
            ("card.request_cycles", cycles.into()),
            ("card.window_packets", 300.into()),
            ("workload.qps", 200.into()),
        ];
        within(0.01, "request", outcome(&settings).rate, 1e9 / cycles as f64);
    }
}

#[test]
fn pcie_bounds() {
    let rate = |placement: &str, bytes: i64, qps: i64| {
        let settings = [
            ("qpc.placement", placement.into()),
            ("workload.bytes", bytes.into()),
            ("workload.qps", qps.into()),
            ("card.window_packets", 1000.into()),
        ];
        outcome(&settings).rate
    };
    for bytes in [256, 1024] {
        let message = bus(bytes as f64) + bus(5.5 * 32.0) / 5.5;
        within(0.01, "hits", rate("host", bytes, 300), 1e9 / message);
        within(0.01, "on board", rate("board", bytes, 1000), 1e9 / message);
        within(0.01, "in the host", rate("host", bytes, 1000), 1e9 / (message + bus(256.0) / 5.5));
    }
}

#[test]
fn first_come_first_served_is_bound_by_one_miss_at_a_time() {
    let rate = outcome(&[("qpc.policy", "fcfs".into()), ("workload.qps", 1000.into())]).rate;
    // the miss, the cycles to and from the DMA engine, and the hits of the doorbell's WQEs, one a cycle
    within(0.01, "FCFS", rate, 5.5 / ((500.0 + bus(256.0) + 9.0 + 5.5) * 1e-9));
}

#[test]
fn shipped_plans_are_sound() {
    for (name, text) in PLANS {
        let plan = Plan::read(text).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(!plan.series.is_empty() && !plan.x.values.is_empty(), "{name}");
        if plan.metric == Metric::OnChip {
            let finished = plan.carry_out(DEFAULT_PARAMS, 1, |_| ControlFlow::Continue(())).unwrap();
            for row in Report::new(name, &finished).rows {
                assert!(row.ratio.is_none_or(|ratio| (0.95..1.05).contains(&ratio)), "{row:?}");
            }
        } else {
            // its models and settings are known; nothing is run
            let ended = plan.carry_out(DEFAULT_PARAMS, 1, |_| ControlFlow::Break(()));
            assert!(matches!(ended, Err(PlanError::Run { error: RunError::Ended, .. })), "{name}");
        }
    }
    assert!(Plan::read("title = 'x'").is_err());
}

const SMALL: &str = r#"
    title = "small"
    metric = "rate"
    set = { "workload.least_messages" = 10000 }
    x = { label = "connections", set = "workload.qps", values = [10, 400, 1000] }
    [[series]]
    name = "a"
    set = { "qpc.policy" = "fcfs" }
    [[series]]
    name = "b"
    capacity = 500
    paper = [[400, 70.0]]
"#;

#[test]
fn two_runs_give_the_same_bytes_whatever_the_threads() {
    let bytes = |threads| {
        let plan = Plan::read(SMALL).unwrap();
        let finished = plan.carry_out(DEFAULT_PARAMS, threads, |_| ControlFlow::Continue(())).unwrap();
        let report = Report::new("small", &finished);
        (report.csv(), report.table())
    };
    let first = bytes(1);
    assert_eq!(first, bytes(2));
    assert_eq!(first.0.lines().count(), 7);
    assert!(first.0.contains("\"b\",1000,0.0000"), "nothing beyond the capacity: {}", first.0);
}

#[test]
fn a_run_can_be_ended_and_policies_and_sizes_of_all_kinds_add_up() {
    let params = Params::read(DEFAULT_PARAMS, &[]).unwrap();
    assert!(matches!(run(&params, |_| ControlFlow::Break(())), Err(RunError::Ended)));
    // small and odd sizes, where units wait for each other; `run` checks that all adds up
    for policy in ["fcfs", "non-blocking", "latency-hiding"] {
        for (entries, cap, window, qps, bytes) in
            [(1, 1, 1, 30, 0), (2, 3, 7, 61, 4096), (5, 2, 3, 1000, 1), (400, 256, 500, 350, 64)]
        {
            for op in ["write", "read"] {
                let settings = [
                    ("qpc.policy", policy.into()),
                    ("workload.op", op.into()),
                    ("qpc.entries", entries.into()),
                    ("qpc.client_entries", entries.into()),
                    ("qpc.ooo_cap", cap.into()),
                    ("card.window_packets", window.into()),
                    ("workload.qps", qps.into()),
                    ("workload.bytes", bytes.into()),
                ];
                outcome(&settings);
            }
        }
    }
}
