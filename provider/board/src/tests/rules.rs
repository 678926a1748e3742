//! The conformance runner against this board.

use starverbs_rules::{BenchOptions, RULES, RuleResult, Wire, run};
use starverbs_settings::{QpcPolicy, QpcSpec, Settings};

use super::*;

/// The rules that do not end as they should: their numbers, and how they end.
fn broken(options: &BenchOptions, wanted: impl Fn(u32) -> bool) -> Vec<(u32, RuleResult)> {
    let mut broken = Vec::new();
    run(
        options,
        |rule| wanted(rule.number),
        |rule, outcome| {
            if *outcome != RuleResult::Passed && rule.is_tested() {
                broken.push((rule.number, outcome.clone()));
            }
        },
    );
    broken
}

#[test]
fn a_board_passes_all_rules_that_can_be_tested() {
    let settings = settings();
    let wire = Some(Wire { address: "127.0.0.2".parse().unwrap(), port: settings.port });
    with_board_of(&settings, 2, |paths| {
        let options = BenchOptions { sockets: paths.to_vec(), patience: Duration::from_secs(60), wire };
        assert_eq!(broken(&options, |_| true), []);
        /* without the second function and the wire, these cannot be */
        let alone = BenchOptions { sockets: paths[..1].to_vec(), wire: None, ..options };
        let left = broken(&alone, |number| [1, 14, 27].contains(&number));
        assert!(
            matches!(left[..], [(14, RuleResult::NotTested(_)), (27, RuleResult::NotTested(_))]),
            "{left:?}"
        );
    });
}

/// B58: rules are kept with room for one context, under each policy.
#[test]
fn a_board_with_room_for_one_context_passes_all_rules() {
    for policy in [QpcPolicy::Fcfs, QpcPolicy::NonBlocking, QpcPolicy::LatencyHiding] {
        let time = Duration::from_micros(1);
        let qpc_cache = Some(QpcSpec { entries: 1, miss: time, fetch: time, policy });
        let settings = Settings { qpc_cache, ..settings() };
        let wire = Some(Wire { address: "127.0.0.2".parse().unwrap(), port: settings.port });
        let board = with_board_of(&settings, 2, |paths| {
            let options = BenchOptions { sockets: paths.to_vec(), patience: Duration::from_secs(60), wire };
            assert_eq!(broken(&options, |_| true), [], "{policy:?}");
        });
        let counters = board.card.nic.counters();
        let [misses, evicted] = [&counters.qpc_misses, &counters.qpc_evicted].map(|counter| counter.get());
        assert!(misses > 100 && evicted > 100, "{policy:?}: {misses} misses, {evicted} evicted");
        assert_eq!(counters.qpc_prefetched.get() > 0, policy == QpcPolicy::LatencyHiding, "{policy:?}");
    }
}

/// For each rule that the runner tests, a board that breaks it.
#[test]
fn the_runner_finds_the_rule_that_is_broken() {
    let settings = settings();
    let wire = Some(Wire { address: "127.0.0.2".parse().unwrap(), port: settings.port });
    for rule in RULES.iter().filter(|rule| rule.is_tested()) {
        crate::broken::set(rule.number);
        with_board_of(&settings, 2, |paths| {
            // A breakage of silence takes the whole of it.
            let options =
                BenchOptions { sockets: paths.to_vec(), patience: Duration::from_millis(500), wire };
            let found = broken(&options, |number| number == rule.number);
            assert!(matches!(found[..], [(_, RuleResult::Failed { .. })]), "B{} passes", rule.number);
            println!("B{}: {:?}", rule.number, found[0].1);
        });
    }
    crate::broken::set(0);
}

/// docs/board.md and the runner have the same rules.
#[test]
fn the_runner_has_the_documents_rules() {
    let text =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/board.md")).unwrap();
    let numbers = text.split("\n- **B").skip(1).map(|rule| rule.split("**").next().unwrap().parse().unwrap());
    let numbers: Vec<u32> = numbers.collect();
    let runner: Vec<u32> = RULES.iter().map(|rule| rule.number).collect();
    assert_eq!(runner, numbers, "add the rule to provider/rules/src/rules.rs, tested or with its reason");
}
