//! The simulated cards against closed forms, and against themselves.

use std::ops::ControlFlow;

use starverbs_sim::figures;
use starverbs_sim::rnic::{
    DEFAULT_PARAMS, Metric, PAPERS, PLANS, Params, Plan, PlanError, Report, RunError, RunResult, Settings,
    Statements, Verdict, run,
};

fn outcome(settings: &[(&str, toml::Value)]) -> RunResult {
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

/// Two QPs in turn, and room for the translation of one page: that of the ring and that of the data miss.
#[test]
fn addresses_are_translated() {
    let miss = 500.0 + bus(16.0);
    let settings = [("workload.qps", 2.into()), ("card.mtt_entries", 1.into())];
    within(0.001, "two misses", alone("write", &settings), hit() + 2.0 * miss);
    let rate = |entries: i64| {
        let settings = [
            ("workload.qps", 1000.into()),
            ("card.mtt_entries", entries.into()),
            ("card.mtt_in_turn", true.into()),
        ];
        outcome(&settings).rate
    };
    // of each doorbell the ring, and the data of its first message
    within(0.01, "in turn", rate(100), 5.5e9 / (2.0 * miss));
    assert!(rate(2000) > 60e6, "room for all");
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
                assert!(row.source.is_some() == row.paper.is_some(), "{row:?}");
            }
        } else {
            // its models and settings are known; nothing is run
            let ended = plan.carry_out(DEFAULT_PARAMS, 1, |_| ControlFlow::Break(()));
            assert!(matches!(ended, Err(PlanError::Run { error: RunError::Ended, .. })), "{name}");
        }
    }
    assert!(Plan::read("title = 'x'").is_err());
}

#[test]
fn shipped_statements_ask_for_what_the_plans_draw() {
    let plans: Vec<(&str, Plan)> =
        PLANS.iter().map(|(name, text)| (*name, Plan::read(text).unwrap())).collect();
    let lines = |plan: &'_ Plan| plan.series.iter().map(|series| series.name.clone()).collect::<Vec<_>>();
    let lines: Vec<Vec<String>> = plans.iter().map(|(_, plan)| lines(plan)).collect();
    let of_plans = plans.iter().zip(&lines).map(|((name, plan), lines)| {
        (*name, lines.iter().map(String::as_str).collect(), plan.x.values.as_slice())
    });
    let of_code = figures().map(|figure| (figure.name, figure.series.to_vec(), figure.values));
    let figures: Vec<(&str, Vec<&str>, &[u32])> = of_plans.chain(of_code).collect();
    for (name, _, text) in PAPERS {
        let statements = Statements::read(text).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(statements.unknown(&figures), None, "{name}");
        assert!(statements.statement.len() > 10, "{name}");
    }
}

const SAID: &str = r#"
    bounds = "none"
    [[statement]]
    section = "1"
    text = "a falls"
    check = [{ what = "ratio", of = [["small", "a", 400]], over = [["small", "a", 10]], at_most = 0.8 }]
    [[statement]]
    section = "2"
    text = "a does not"
    [[statement.check]]
    what = "less"
    of = [["small", "a", "last"]]
    less = ["small", "a", "greatest"]
    at_least = 0.0
    [[statement]]
    section = "3"
    text = "nobody knows"
    unasked = "why"
"#;

#[test]
fn whether_a_statement_holds_is_computed() {
    let plan = Plan::read(SMALL).unwrap();
    let finished = plan.carry_out(DEFAULT_PARAMS, 1, |_| ControlFlow::Continue(())).unwrap();
    let reports = [Report::new("small", &finished)];
    let (a, statements) = (|x| reports[0].value("a", x).unwrap(), Statements::read(SAID).unwrap());
    let verdicts: Vec<Verdict> =
        statements.statement.iter().map(|statement| statement.judge(&reports).unwrap()).collect();
    assert_eq!(verdicts[0], Verdict::Asked { values: vec![a(400) / a(10)], holds: true });
    assert_eq!(verdicts[1], Verdict::Asked { values: vec![a(1000) - a(10)], holds: false });
    assert_eq!(verdicts[2], Verdict::Unasked);
    let (table, counts) = statements.table(&reports);
    assert_eq!((counts, table.lines().count()), ([1, 1, 1], 5));
    assert_eq!(statements.statement[0].judge(&[]), None, "its figure is not there");
    let wrong = SAID.replace("unasked = \"why\"", "");
    assert!(matches!(Statements::read(&wrong), Err(PlanError::Plan(_))), "neither asked nor unasked");
}

#[test]
fn a_point_of_the_paper_says_where_it_is_from() {
    let with = |point: &str| {
        let text = SMALL.replace("paper = [{ x = 400, y = 70.0, text = \"1\" }]", point);
        Plan::read(&text).map(|_| ())
    };
    assert!(with("paper = [{ x = 400, y = 70.0, derived = \"1 + 1\" }]").is_ok());
    assert!(matches!(with("paper = [{ x = 400, y = 70.0 }]"), Err(PlanError::Plan(_))));
    assert!(matches!(with("paper = [{ x = 401, y = 70.0, text = \"1\" }]"), Err(PlanError::Plan(_))));
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
    paper = [{ x = 400, y = 70.0, text = "1" }]
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
                    ("qpc.writes_clean", (cap % 2 == 0).into()),
                    ("card.mtt_entries", (cap - 1).into()),
                ];
                outcome(&settings);
            }
        }
    }
}
