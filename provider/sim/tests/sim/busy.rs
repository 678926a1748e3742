//! Hosts that get no CPU for a while: a peer that is merely busy is not given up, and a card that did not run
//! itself blames nobody.

use crate::common::drive::drive;
use crate::common::for_seeds;
use crate::common::pair::Pair;
use crate::common::program::Shape;
use starverbs_core::{Mtu, Nanos, NicConfig, QpType, SendOp, WcStatus};
use starverbs_sim::{Faults, Net, Rng, Setup};

const MS: Nanos = 1_000_000;
/// Little patience: 4.2 ms, and a few retries, of which each may take 1.375 times that.
const TIMEOUT: u8 = 10;
const STEPS: usize = 300_000;

/// How a seed's hosts sleep.
struct Naps {
    /// Longest time asleep
    asleep: Nanos,
    /// Longest time awake
    awake: Nanos,
    /// All of them at once
    together: bool,
}

/// Runs a program of all operations over two hosts that sleep now and then; it looks at every completion
/// itself.
fn run(seed: u64, retries: u8, naps: &Naps, faults: Faults) {
    let mut rng = Rng::new(seed);
    let mut net = Net::new(2, NicConfig::default(), faults, seed);
    let shape = Shape {
        setup: Setup { mtu: Mtu::M1024, timeout: TIMEOUT, retry_cnt: retries, ..Setup::default() },
        sq_slots: 16,
        rq_slots: 8,
        ops: 30,
        kinds: vec![SendOp::Write, SendOp::Send, SendOp::Read, SendOp::CmpSwap, SendOp::FetchAdd],
    };
    let mut wake = [0; 2];
    drive(&mut net, &mut rng, &shape, STEPS, |net, rng| {
        for host in 0..2 {
            if net.now() < wake[host] {
                continue;
            }
            let both = if naps.together { 0..2 } else { host..host + 1 };
            let (time, until) = (rng.below(naps.asleep), rng.below(naps.awake));
            for host in both {
                net.sleep(host, time);
                wake[host] = net.now() + time + until;
            }
        }
    });
}

/// The peer sleeps for longer than all retries take at their shortest, and wakes up before they take their
/// longest.
#[test]
fn a_busy_peer_is_not_given_up() {
    for_seeds("a_busy_peer_is_not_given_up", 300, |seed| {
        run(seed, 3, &Naps { asleep: 22 * MS, awake: 20 * MS, together: false }, Faults::default());
    });
}

/// A machine that stops for seconds, and loses frames: each retry has its time.
#[test]
fn time_in_which_nobody_ran_does_not_count() {
    for_seeds("time_in_which_nobody_ran_does_not_count", 300, |seed| {
        let faults = Faults { loss: 0.1, ..Faults::default() };
        run(seed, 7, &Naps { asleep: 5_000 * MS, awake: 5 * MS, together: true }, faults);
    });
}

/// How long a requester whose peer is gone waits, in timeouts of 1 ms (code 8) to 1 s (18).
#[test]
fn a_dead_peer_is_noticed_in_time() {
    for (timeout, retries) in [(8, 7), (12, 7), (14, 0), (14, 1), (14, 7), (18, 0), (18, 5), (18, 7)] {
        let setup = Setup { timeout, retry_cnt: retries, ..Setup::default() };
        let mut pair = Pair::of(QpType::Rc, &setup);
        /* the path has a round trip */
        let sge = pair.sge(0, 64);
        pair.post(pair.wqe(1, SendOp::Write), &[sge]);
        pair.run();
        assert_eq!(pair.polled(0).len(), 1);
        pair.net.faults.loss = 1.0;
        let began = pair.net.now();
        pair.post(pair.wqe(2, SendOp::Write), &[sge]);
        while pair.cq[0].is_empty() {
            assert!(pair.net.step(), "timeout {timeout}, {retries} retries: nothing is going to happen");
        }
        let (took, least) = (pair.net.now() - began, (4096 << timeout) * (u64::from(retries) + 1));
        assert_eq!(pair.polled(0).last(), Some(&(2, WcStatus::RetryExcErr)));
        assert!(
            took >= least && 2 * took <= 3 * least,
            "timeout {timeout}, {retries} retries: {took} ns of {least}"
        );
    }
}
