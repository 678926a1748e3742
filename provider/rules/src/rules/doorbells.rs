//! Doorbell cells: B15, B17, B18; doorbells that are messages: B59.

use starverbs_queues::board::*;
use starverbs_queues::{SendOp, WcStatus};

use crate::bench::{Bench, Pair};
use crate::fault::{RuleFault, Tested, expect};
use crate::qp::{RawQp, SLOTS, data, request};
use crate::raw::{RawDriver, SETTLED};

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

/// Sends a doorbell of csRNA's form.
fn tell(raw: &mut RawDriver, message: DoorbellMessage) -> Tested {
    let last = u64::from(raw.register(REG_CELLS)?) - 1;
    let word = message.to_word().to_le_bytes();
    Ok(raw.link.client()?.write(BAR_DOORBELLS, last * u64::from(CELL_BYTES), &word)?)
}

/// That of `count` WQEs of a queue pair, behind `before`.
fn of(qp: &RawQp, before: u32, count: u16) -> DoorbellMessage {
    DoorbellMessage { op: DOORBELL_SEND, offset: before as u16, count, qpn: qp.qpn }
}

pub(super) fn messages(bench: &mut Bench) -> Tested {
    let mut pair = bench.pair()?;
    if pair.raw.long(REG_CAPS)? & CAP_DOORBELL_OPS == 0 {
        return Err(RuleFault::Skipped("the board has no CAP_DOORBELL_OPS".to_owned()));
    }
    pair.exchange(1)?;
    let Pair { raw, key, a, b, .. } = &mut pair;
    const BATCH: u16 = 16;
    let before = raw.counter(COUNTER_DOORBELLS)?;
    let posted = a.sends;
    for n in 0..u64::from(BATCH) {
        raw.post_recv(b, n, data(4096 + 64 * n as usize, 64, *key));
        raw.put_send(a, request(SendOp::Send, u64::from(BATCH) + n), data(0, 64, *key));
    }
    /* in two, each of which is one doorbell */
    tell(raw, of(a, posted, 1))?;
    tell(raw, of(a, posted + 1, BATCH - 1))?;
    for _ in 0..2 * BATCH {
        expect("status of a message of a batch", raw.completion()?.status, WcStatus::Success)?;
    }
    expect("doorbells of a batch in two", raw.counter(COUNTER_DOORBELLS)? - before, 2)?;
    refused(raw, a)?;
    /* receives need none, and one that says so is no fault */
    let malformed = raw.counter(COUNTER_MALFORMED)?;
    tell(raw, DoorbellMessage { op: DOORBELL_RECV, ..of(a, 0, 0) })?;
    expect("COUNTER_MALFORMED", raw.counter(COUNTER_MALFORMED)?, malformed)?;
    pair.exchange(2)
}

/// What is no doorbell of csRNA's form is counted.
fn refused(raw: &mut RawDriver, a: &RawQp) -> Tested {
    let end = a.sends;
    let wrong = [
        of(a, end + 1, 1),
        of(a, end.wrapping_sub(1), 1),
        of(a, end, SLOTS as u16 + 1),
        DoorbellMessage { op: 0, ..of(a, end, 1) },
        DoorbellMessage { op: u8::MAX, ..of(a, end, 1) },
        DoorbellMessage { qpn: 0xff_ffff, ..of(a, end, 1) },
    ];
    for message in wrong {
        let before = raw.counter(COUNTER_MALFORMED)?;
        tell(raw, message)?;
        let counted = raw.counter(COUNTER_MALFORMED)? - before;
        expect(&format!("COUNTER_MALFORMED for {message:?}"), counted, 1)?;
    }
    expect("a completion", raw.poll(), None)
}
