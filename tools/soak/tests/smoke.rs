//! Some runs of the soak, and that they were as hostile as they are meant to be.

use starverbs_sim::Rng;
use starverbs_soak::{Plan, Summary, World, run};

/// Each is a few milliseconds; `make soak` makes more of them. What is rarest, a request for another
/// connection's window, is in one of 200.
const RUNS: std::ops::Range<u64> = 2_400..3_000;

#[test]
fn cards_keep_their_promises_on_a_hostile_network() {
    let mut all = Summary::default();
    for seed in RUNS {
        match run(seed, false) {
            Ok(one) => all.merge(&one),
            Err(broken) => panic!("seed {seed}: {}\n{}", broken.what, broken.plan),
        }
    }
    let frames = ["lost", "duplicated", "reordered", "corrupted", "overran a queue", "into a cut link"];
    let befell = ["Cut", "Nap", "Kill", "Restart", "Drain"];
    let ended = ["Success", "WrFlushErr", "LocProtErr", "RemAccessErr", "RemInvReqErr", "RetryExcErr"];
    let kinds = ["Send", "Write", "WriteImm", "Read", "CmpSwap", "FetchAdd", "Flush", "SendInv", "LocalInv"];
    let happened = frames.map(|name| ("frames", name)).into_iter();
    let happened = happened.chain(befell.map(|name| ("befell", name)));
    let happened = happened.chain(ended.map(|name| ("requests completed", name)));
    let happened = happened.chain(kinds.map(|name| ("requests", name)));
    let star = ["Rd", "Gd"].map(|name| ("packets looked at", name)).into_iter();
    let star = star.chain(["Foreign", "Revoked", "Others"].map(|name| ("faults of requests", name)));
    let answers =
        ["Ok", "NoKernel", "BadParam", "NotFound", "Retries", "Access", "Overflow", "with immediate"];
    let seen = [
        "begun",
        "ended",
        "packets of streams",
        "packets for shuffle",
        "packets for HyperLogLog",
        "streams that broke off",
        "that no kernel saw",
        "whose kernel went away",
        "with StaR",
        "packets of streams with StaR",
    ];
    let sends = ["begun", "ended", "writes", "waits for room", "whose queue pair was gone"];
    let sends = sends.iter().chain(&["whose kernel went away"]).map(|name| ("send kernels", *name));
    let streams = ["Ok", "Overflow"].map(|name| ("shuffle answers", name)).into_iter();
    let streams = streams.chain([("HyperLogLog answers", "Ok"), ("partitions", "looked at")]).chain(sends);
    let strom = answers.map(|name| ("answers", name)).into_iter().chain(seen.map(|name| ("rpcs", name)));
    let strom = strom.chain(["NoKernel", "NoTarget"].map(|name| ("faults of requests", name)));
    let strom = strom.chain([("befell", "Unload"), ("requests completed", "LocQpOpErr")]);
    let strom = strom.chain([("rpcs", "by windows")]).chain(streams);
    let ended = ["Ok", "Nack", "Timeout", "DispatchTimeout", "RemoteAuthenticationFailure", "RemoteAccess"];
    let befell = ["Restart", "Reopen", "Rekey", "Dark", "attacks"];
    let packets = ["late", "copies", "forged", "rekeys"];
    let onerma = ended.map(|name| ("1RMA operations", name)).into_iter();
    let onerma = onerma.chain(befell.map(|name| ("1RMA befell", name)));
    let onerma = onerma.chain(packets.map(|name| ("1RMA packets", name)));
    let happened = happened.chain(star).chain(strom).chain(onerma);
    for (group, name) in happened {
        assert!(all.of(group, name) > 0, "no run had {group}: {name}\n{all}");
    }
}

/// The same seed is the same run.
#[test]
fn runs_repeat() {
    for seed in 0..10 {
        let once = || run(seed, false).map_err(|broken| broken.what);
        assert_eq!(once(), once(), "seed {seed}");
    }
}

/// Plays what a seed was before connections could be of StRoM's dialect.
fn play_without_strom(seed: u64) {
    let plan = Plan::new(&mut Rng::new(seed)).without_strom();
    World::new(seed, plan, false).run();
}

/// Plays what a seed was before kernels used windows.
fn play_without_kernel_windows(seed: u64) {
    let plan = Plan::new(&mut Rng::new(seed)).without_kernel_windows();
    World::new(seed, plan, false).run();
}

/// A program invalidated its window while flushed requests of its peer for it were under way.
#[test]
fn a_window_with_requests_under_way_is_not_invalidated() {
    play_without_strom(30_347_888);
}

/// What StaR was found to do wrong since, in runs with StRoM.
#[test]
fn what_broke_star_of_late_holds() {
    for seed in [80_790, 400_113_379] {
        eprintln!("seed {seed}");
        play_without_kernel_windows(seed);
    }
}

/// What StaR was found to do wrong: docs/faults.md says what each run showed.
#[test]
fn what_broke_star_holds() {
    for seed in [
        825, 976, 2_214, 2_934, 60_000_196, 60_011_909, 61_026_670, 62_001_010, 63_006_128, 64_023_615,
        64_051_137, 70_000_007, 70_089_613, 70_117_080, 80_010_290,
    ] {
        eprintln!("seed {seed}");
        play_without_strom(seed);
    }
}
