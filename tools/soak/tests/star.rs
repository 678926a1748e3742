//! Connections of StaR, by name: plans whose trouble is of one kind, played with many seeds, and that it was
//! there. The oracle says what must hold.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use starverbs_core::ContextCache;
use starverbs_core::qpc::Policy;
use starverbs_sim::{Faults, Rng, STAR_OPS};
use starverbs_soak::{Chaos, ConnPlan, Plan, ROOMY, StarPlan, Summary, Transport, World, any_conn, any_link};
use starverbs_star::control::Preference;

const MS: u64 = 1_000_000;
/// Longer than any program here waits for a peer, ns.
const LONG: u64 = 600_000 * MS;
/// Roles that programs want: the first end keeps nothing, or nobody minds.
const STAR: [Preference; 2] = [Preference::Stateless, Preference::Stateful];
const ANY: [Preference; 2] = [Preference::Auto; 2];
/// The hosts of the ends.
const SL: usize = 0;
const SF: usize = 1;
/// All that goes wrong on a wire, at once.
const WORST: Faults = Faults {
    loss: 0.2,
    duplicate: 0.2,
    reorder: 0.2,
    corrupt: 0.02,
    delay: 2_000,
    jitter: 500,
    late: 100_000,
    service: 0,
    queue: u64::MAX,
};

/// Plays `runs` seeds, or as many as SIM_RUNS says, or SIM_SEED alone, which
/// SIM_TRACE has printed. What happened, in all.
fn play(name: &str, runs: u64, plan: impl Fn(&mut Rng) -> Plan) -> Summary {
    let var = |key| std::env::var(key).ok().and_then(|value| value.parse::<u64>().ok());
    let one = var("SIM_SEED");
    let trace = std::env::var_os("SIM_TRACE").is_some();
    let seeds = one.map_or(0..var("SIM_RUNS").unwrap_or(runs), |seed| seed..seed + 1);
    let mut all = Summary::default();
    for seed in seeds {
        let run = || {
            let mut world = World::new(seed, plan(&mut Rng::new(seed)), trace);
            world.run();
            world.summary
        };
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(summary) => all.merge(&summary),
            Err(panic) => {
                eprintln!("{name}: seed {seed} broke; again with SIM_SEED={seed}");
                resume_unwind(panic);
            }
        }
    }
    all
}

/// Whether so much of it happened in ten runs, if there were enough to tell.
fn assert_often(all: &Summary, of: (&'static str, &str), in_ten: u64) {
    let count = all.of(of.0, of.1);
    assert!(
        all.runs < 50 || count * 10 >= in_ten * all.runs,
        "{of:?} {count} times in {} runs\n{all}",
        all.runs
    );
}

/// Nothing failed, and no card asked for what is not its own.
fn assert_clean(all: &Summary) {
    for name in ["error_completions", "retry_exceeded", "star_rejects", "star_refused", "star_bad"] {
        assert_eq!(all.of("cards", name), 0, "{name}\n{all}");
    }
}

/// Connections of two hosts whose ends have these preferences, with programs that make no mistakes and wait
/// for long.
fn conns(rng: &mut Rng, preferences: [Preference; 2], shared: bool) -> Vec<ConnPlan> {
    let count = rng.within(1, 3);
    (0..count).map(|_| conn(rng, preferences, shared)).collect()
}

fn conn(rng: &mut Rng, preferences: [Preference; 2], shared: bool) -> ConnPlan {
    let mut conn = any_conn(rng, 2, 60, false);
    conn.kind = Transport::Rc;
    conn.hosts = [SL, SF];
    conn.kinds.retain(|op| STAR_OPS.contains(op));
    if conn.kinds.is_empty() || rng.chance(0.5) {
        conn.kinds = STAR_OPS.to_vec();
    }
    (conn.setup.timeout, conn.setup.retry_cnt, conn.setup.rnr_retry) = (20, 7, 7);
    (conn.shared, conn.reconnects, conn.preferences) = ([shared; 2], 0, preferences);
    conn
}

/// Two hosts whose cards have StaR, and such connections.
fn star(rng: &mut Rng, link: Option<Faults>, preferences: [Preference; 2], shared: bool) -> Plan {
    let link = link.unwrap_or_else(|| any_link(rng));
    let conns = conns(rng, preferences, shared);
    let mut plan = Plan::of_two(rng, link, conns);
    plan.have_star(StarPlan::roomy());
    plan
}

/// Something befalls at some of the first `steps` steps.
fn befall(rng: &mut Rng, plan: &mut Plan, times: u64, steps: u64, what: impl Fn(&mut Rng, &Plan) -> Chaos) {
    for _ in 0..times {
        let one = (rng.below(steps) as usize, what(rng, plan));
        plan.chaos.push(one);
    }
}

/// Connections whose programs, and cards, change their minds about what they are.
fn to_and_fro(rng: &mut Rng, link: Option<Faults>, shared: bool) -> Plan {
    let mut plan = star(rng, link, ANY, shared);
    plan.conns.iter_mut().for_each(|conn| conn.ops = [rng.below(120) as u32, rng.below(120) as u32]);
    let preferences = [Preference::Stateless, Preference::Stateful, Preference::Off, Preference::Auto];
    befall(rng, &mut plan, 30, 1_500, |rng, plan| {
        let conn = rng.below(plan.conns.len() as u64) as usize;
        Chaos::Want((conn, rng.below(2) as usize), rng.pick(&preferences))
    });
    befall(rng, &mut plan, 6, 1_500, |rng, _| Chaos::Crowd(rng.below(2) as usize, rng.pick(&[0, 1, ROOMY])));
    plan
}

#[test]
fn star_is_exactly_once_and_in_order() {
    let all = play("star_is_exactly_once_and_in_order", 120, |rng| star(rng, None, STAR, false));
    assert_clean(&all);
    for op in ["Send", "Write", "WriteImm", "Read", "CmpSwap", "FetchAdd"] {
        assert_often(&all, ("requests", op), 10);
    }
    for ptype in ["Rd", "Gd"] {
        assert_often(&all, ("packets looked at", ptype), 50);
    }
}

#[test]
fn star_through_shared_receive_queues() {
    let all = play("star_through_shared_receive_queues", 100, |rng| star(rng, None, STAR, true));
    assert_clean(&all);
    assert_often(&all, ("receives completed", "Success"), 100);
}

#[test]
fn star_on_the_worst_wire() {
    let all = play("star_on_the_worst_wire", 60, |rng| star(rng, Some(WORST), STAR, false));
    assert_clean(&all);
    for fate in ["lost", "duplicated", "reordered", "corrupted"] {
        assert_often(&all, ("frames", fate), 50);
    }
}

/// One who reads the wire and sends what he likes.
fn forged(rng: &mut Rng, key: u8) -> Plan {
    let mut plan = star(rng, None, STAR, false);
    let cards = vec![Some(key); 2];
    plan.have_star(StarPlan { forged: true, cards, ..StarPlan::roomy() });
    plan
}

/// Under a key he changes nothing, and without a connection's token he reaches no memory.
#[test]
fn under_a_key_nobody_else_is_believed() {
    let all = play("under_a_key_nobody_else_is_believed", 120, |rng| forged(rng, 1));
    assert_often(&all, ("frames", "forged"), 50);
    assert_often(&all, ("cards", "star_foreign"), 20);
    assert_often(&all, ("cards", "star_drops"), 20);
    assert_often(&all, ("cards", "star_replayed"), 5);
}

/// Without one, he ends connections: the attack is one.
#[test]
fn without_a_key_whoever_reads_the_wire_ends_connections() {
    let breaks = |seed| {
        let mut world = World::new(seed, forged(&mut Rng::new(seed), 0), false);
        catch_unwind(AssertUnwindSafe(|| world.run())).is_err()
    };
    let ended = (0..20).filter(|seed| breaks(*seed)).count();
    assert!(ended >= 5, "{ended} of 20");
}

/// An end is taken to ERR by its program, in the middle: what is posted is flushed in order, and its peer's
/// requests end as if nobody were there.
#[test]
fn a_queue_pair_goes_to_error_and_its_peer_finds_out() {
    let all = play("a_queue_pair_goes_to_error_and_its_peer_finds_out", 120, |rng| {
        let mut plan = star(rng, None, STAR, false);
        let end = rng.below(2) as usize;
        befall(rng, &mut plan, 1, 400, |_, _| Chaos::Abandon((0, end), LONG));
        plan
    });
    assert_often(&all, ("requests completed", "WrFlushErr"), 20);
    assert_often(&all, ("requests completed", "RetryExcErr"), 2);
}

/// A host ends without a message. Whoever sends there gets an error; and nobody of before writes to the
/// memory that it has when it comes up again, which is where the old one was.
#[test]
fn a_host_that_is_gone_is_noticed_and_not_written_to() {
    for host in [SL, SF] {
        let all = play("a_host_that_is_gone_is_noticed_and_not_written_to", 100, |rng| {
            let mut plan = star(rng, None, STAR, false);
            befall(rng, &mut plan, 1, 400, |_, _| Chaos::Restart(host, LONG));
            plan
        });
        assert_often(&all, ("requests completed", "RetryExcErr"), 2);
    }
}

/// Connections of plain RoCEv2 become StaR's while they run, and plain again, as often as it comes, with
/// either end in either role.
#[test]
fn connections_go_to_and_fro_while_they_run() {
    let all = play("connections_go_to_and_fro_while_they_run", 120, |rng| to_and_fro(rng, None, false));
    assert_clean(&all);
    assert_often(&all, ("cards", "star_switches"), 20);
    assert_often(&all, ("cards", "star_returns"), 15);
}

/// Those of ends that take from shared receive queues stay what they are.
#[test]
fn connections_of_shared_receives_do_not_change() {
    let all = play("connections_of_shared_receives_do_not_change", 100, |rng| to_and_fro(rng, None, true));
    assert_clean(&all);
    assert_eq!((all.of("cards", "star_switches"), all.of("cards", "star_returns")), (0, 0), "{all}");
}

#[test]
fn the_worst_wire_changes_nothing() {
    let all = play("the_worst_wire_changes_nothing", 60, |rng| to_and_fro(rng, Some(WORST), false));
    assert_clean(&all);
    assert_often(&all, ("cards", "star_returns"), 5);
}

/// One end is destroyed, or goes to ERR, anywhere on the way there or back: its peer finds out.
#[test]
fn an_end_that_is_lost_on_the_way_is_noticed() {
    for destroyed in [true, false] {
        let all = play("an_end_that_is_lost_on_the_way_is_noticed", 100, |rng| {
            let mut plan = to_and_fro(rng, None, false);
            befall(rng, &mut plan, 1, 1_000, |rng, plan| {
                let of = (rng.below(plan.conns.len() as u64) as usize, rng.below(2) as usize);
                if destroyed { Chaos::Destroy(of, LONG) } else { Chaos::Abandon(of, LONG) }
            });
            plan
        });
        assert_often(&all, ("requests completed", "RetryExcErr"), 2);
        assert_often(&all, ("cards", "star_switches"), 10);
    }
}

/// Connections leave a QPC-limited card when it is crowded, also those that began as plain
/// ones, and come back when it has room.
#[test]
fn a_qpc_limited_card_sheds_connections_while_it_is_crowded() {
    let all = play("a_qpc_limited_card_sheds_connections_while_it_is_crowded", 100, |rng| {
        let mut plan = to_and_fro(rng, None, false);
        let policy = rng.pick(&[Policy::Fcfs, Policy::NonBlocking, Policy::LatencyHiding]);
        plan.ample = vec![SF];
        plan.contexts =
            Some(ContextCache { entries: 1, policy, miss: rng.pick(&[1, 500, 20_000]), fetch: 500 });
        plan
    });
    assert_often(&all, ("cards", "star_returns"), 10);
    assert_often(&all, ("cards", "qpc_evicted"), 10);
}

/// The card that keeps the connections has room for few contexts, on any wire.
#[test]
fn a_qpc_limited_card_keeps_connections() {
    let all = play("a_qpc_limited_card_keeps_connections", 100, |rng| {
        let mut plan = star(rng, None, STAR, false);
        let policy = rng.pick(&[Policy::Fcfs, Policy::NonBlocking, Policy::LatencyHiding]);
        plan.ample = vec![SL];
        plan.contexts = Some(ContextCache {
            entries: 1 + rng.below(3) as u32,
            policy,
            miss: rng.pick(&[1, 500, 20_000]),
            fetch: 500,
        });
        plan
    });
    assert_often(&all, ("cards", "star_rcvd_wqep"), 100);
    assert_often(&all, ("cards", "qpc_evicted"), 10);
}

/// StaR's ports are closed at times, to one end or to both, for shorter than programs bear.
#[test]
fn ports_that_are_closed_for_some_time_cost_nothing_but_time() {
    let all = play("ports_that_are_closed_for_some_time_cost_nothing_but_time", 100, |rng| {
        let mut plan = to_and_fro(rng, None, false);
        befall(rng, &mut plan, 10, 1_500, |rng, _| Chaos::Shut(rng.below(2) as usize, rng.below(1_000 * MS)));
        plan
    });
    assert_often(&all, ("cards", "star_returns"), 10);
    assert_often(&all, ("frames", "into a cut link"), 10);
}
