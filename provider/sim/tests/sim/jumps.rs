//! Clocks that jump: a virtual machine that is moved or suspended, a hypervisor whose clock is not as
//! monotonic as it should be. Nothing fails for it that is not lost by the wire as well, no arithmetic goes
//! below zero, and a peer that is silent is still given up in time.

use crate::common::drive::drive;
use crate::common::program::Shape;
use crate::common::{any_faults, for_seeds};
use starverbs_core::{NicConfig, QpState, QpType, SendOp, WcStatus};
use starverbs_sim::{Faults, Net, Rng, Setup};

const MS: i64 = 1_000_000;
const HOUR: i64 = 3_600_000 * MS;
const STEPS: usize = 1_000_000;

/// A jump: hours, seconds or less forwards, less backwards.
fn any_jump(rng: &mut Rng) -> i64 {
    match rng.below(6) {
        0 => HOUR + rng.below(100 * HOUR as u64) as i64,
        1 => rng.below(10_000 * MS as u64) as i64,
        2 => rng.below(5 * MS as u64) as i64,
        3 => -(rng.below(200 * MS as u64) as i64),
        4 => -(rng.below(5 * MS as u64) as i64),
        _ => -(rng.below(10_000) as i64),
    }
}

fn run(seed: u64, faults: Faults) {
    let mut rng = Rng::new(seed);
    let mut net = Net::new(2, NicConfig::default(), faults, seed);
    let shape = Shape {
        /* a jump to the deadline is a retry, and another one before the answer is there is the next */
        setup: Setup { timeout: 14, retry_cnt: 4, ..Setup::default() },
        sq_slots: 16,
        rq_slots: 16,
        ops: 60,
        kinds: vec![SendOp::Send, SendOp::Write, SendOp::Read, SendOp::FetchAdd],
    };
    drive(&mut net, &mut rng, &shape, STEPS, |net, rng| {
        for host in 0..2 {
            if rng.chance(0.02) {
                net.jump(host, any_jump(rng));
            }
        }
    });
}

#[test]
fn jumps_fail_nothing() {
    for_seeds("jumps_fail_nothing", 400, |seed| run(seed, Faults::default()));
}

/// Each retry has its time although the clock makes some of them seem long ago.
#[test]
fn nor_do_they_on_a_wire_that_loses_little() {
    for_seeds("nor_do_they_on_a_wire_that_loses_little", 400, |seed| {
        let mut faults = any_faults(&mut Rng::new(seed));
        faults.loss = faults.loss.min(0.01);
        faults.corrupt = faults.corrupt.min(0.01);
        run(seed, faults);
    });
}

/// Nobody answers any more: the requester still finds out, and flushes what is behind.
#[test]
fn a_dead_peer_is_given_up_all_the_same() {
    for_seeds("a_dead_peer_is_given_up_all_the_same", 200, |seed| {
        let mut rng = Rng::new(seed);
        let setup = Setup { timeout: 10, retry_cnt: 3, ..Setup::default() };
        let mut p = crate::common::pair::Pair::of(QpType::Rc, &setup);
        p.net.jump(0, rng.below(HOUR as u64) as i64);
        p.net.faults.loss = 1.0;
        let sge = p.sge(0, 8);
        for wr_id in 0..3 {
            p.post(p.wqe(wr_id, SendOp::Write), &[sge]);
        }
        let mut steps = 0;
        while p.net.step() {
            if rng.chance(0.3) {
                let by = any_jump(&mut rng);
                p.net.jump(0, by);
            }
            steps += 1;
            assert!(steps < 100_000, "it tries for ever");
        }
        let flushed = |wr_id| (wr_id, WcStatus::WrFlushErr);
        assert_eq!(p.polled(0), [(0, WcStatus::RetryExcErr), flushed(1), flushed(2)]);
        assert_eq!(p.states(), [QpState::Err, QpState::Rts]);
    });
}
