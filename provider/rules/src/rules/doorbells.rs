//! Doorbell cells: B15, B17, B18.

use starverbs_queues::board::*;
use starverbs_queues::{SendOp, WcStatus};

use crate::bench::{Bench, Pair};
use crate::fault::{Tested, expect};
use crate::qp::{data, request};
use crate::raw::SETTLED;

pub(super) fn batch(bench: &mut Bench) -> Tested {
    let Pair { mut raw, key, mut a, mut b, .. } = bench.pair()?;
    const BATCH: u64 = 16;
    let before = raw.counter(COUNTER_DOORBELLS)?;
    for n in 0..BATCH {
        raw.post_recv(&mut b, n, data(4096 + 64 * n as usize, 64, key));
        raw.put_send(&mut a, request(SendOp::Send, BATCH + n), data(0, 64, key));
    }
    raw.doorbell(&a)?;
    let mut came = Vec::new();
    for _ in 0..2 * BATCH {
        let cqe = raw.completion()?;
        expect("status of a message of a batch", cqe.status, WcStatus::Success)?;
        came.push(cqe.wr_id);
    }
    came.sort_unstable();
    expect("what completed of a batch", came, (0..2 * BATCH).collect())?;
    expect("doorbells of a batch", raw.counter(COUNTER_DOORBELLS)? - before, 1)
}

pub(super) fn wild(bench: &mut Bench) -> Tested {
    let mut pair = bench.pair()?;
    pair.exchange(1)?;
    for wild in [u64::MAX, 66, 0, 1 << 31] {
        let before = pair.raw.counter(COUNTER_MALFORMED)?;
        pair.raw.ring(pair.a.cell, wild)?;
        pair.raw.wait(&format!("COUNTER_MALFORMED for an index of {wild:#x}"), |raw| {
            Ok((raw.counter(COUNTER_MALFORMED)? != before).then_some(()))
        })?;
    }
    pair.exchange(2)
}

pub(super) fn none(bench: &mut Bench) -> Tested {
    let mut pair = bench.pair()?;
    pair.exchange(1)?;
    let Pair { raw, a, b, .. } = &mut pair;
    raw.settle()?;
    let (before, malformed) = (raw.counter(COUNTER_DOORBELLS)?, raw.counter(COUNTER_MALFORMED)?);
    /* the value that is there, and a cell that no queue has */
    raw.doorbell(a)?;
    let free = raw.register(REG_CELLS)? - 1;
    raw.ring(free, 9)?;
    raw.settle()?;
    let rung = raw.counter(COUNTER_DOORBELLS)? - before;
    expect("doorbells beside those that the board must count", rung - SETTLED, 0)?;
    expect("COUNTER_MALFORMED", raw.counter(COUNTER_MALFORMED)?, malformed)?;
    expect("a completion", raw.poll(), None)?;
    raw.done(OP_QUERY_QP, b.qpn)?;
    pair.exchange(2)
}
