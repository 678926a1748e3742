//! Hosts that get no CPU for a while: a peer that is merely busy is not given up, and a card that did not run itself blames
//! nobody.

mod common;
#[path = "common/rc.rs"]
mod program;

use common::for_seeds;
use program::{Conn, Shape};
use starverbs_core::{Mtu, Nanos, NicConfig, SendOp};
use starverbs_sim::{Faults, Net, Rng, Setup, SimCq};

const MS: Nanos = 1_000_000;
/// Little patience: 4.2 ms, and 3 retries. The IBTA lets a card take up to four times that.
const TIMEOUT: u8 = 10;
const RETRIES: u8 = 3;
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

/// Runs a program of all operations over two hosts that sleep now and then; it looks at every completion itself.
fn run(seed: u64, naps: &Naps, faults: Faults) {
    let mut rng = Rng::new(seed);
    let mut net = Net::new(2, NicConfig::default(), faults, seed);
    let cqs = [SimCq::new(4096), SimCq::new(4096)];
    let shape = Shape {
        setup: Setup { mtu: Mtu::M1024, timeout: TIMEOUT, retry_cnt: RETRIES, ..Setup::default() },
        sq_slots: 16,
        rq_slots: 8,
        ops: 30,
        kinds: vec![SendOp::Write, SendOp::Send, SendOp::Read, SendOp::CmpSwap, SendOp::FetchAdd],
    };
    let mut conns: Vec<Conn> =
        (0..2).map(|_| Conn::new(&mut net, &mut rng, &cqs, [None, None], &shape)).collect();
    let mut wake = [0; 2];
    for _ in 0..STEPS {
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
        let mut acted = false;
        for conn in &mut conns {
            acted |= conn.act(&mut net, &mut rng, false);
        }
        let happened = net.step();
        let mut polled = false;
        for (host, cq) in cqs.iter().enumerate() {
            while let Some((cqe, solicited)) = cq.poll() {
                polled = true;
                assert!(conns.iter_mut().any(|c| c.complete(&net, host, &cqe, solicited, &[])));
            }
        }
        if happened || polled || acted {
            continue;
        }
        /* Who sleeps may have something to send yet. */
        (0..2).for_each(|host| net.sleep(host, 0));
        if !net.step() && !conns.iter_mut().any(|c| c.act(&mut net, &mut rng, true)) {
            return conns.iter().for_each(|c| c.finish(&net));
        }
    }
    panic!("no end after {STEPS} steps");
}

/// The peer sleeps for longer than all retries take at their shortest, and wakes up before they take their longest.
#[test]
fn a_busy_peer_is_not_given_up() {
    for_seeds("a_busy_peer_is_not_given_up", 300, |seed| {
        run(seed, &Naps { asleep: 55 * MS, awake: 20 * MS, together: false }, Faults::default());
    });
}

/// A machine that stops for seconds, and loses frames: each retry has its time.
#[test]
fn time_in_which_nobody_ran_does_not_count() {
    for_seeds("time_in_which_nobody_ran_does_not_count", 300, |seed| {
        let faults = Faults { loss: 0.3, ..Faults::default() };
        run(seed, &Naps { asleep: 5_000 * MS, awake: 5 * MS, together: true }, faults);
    });
}
