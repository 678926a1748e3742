//! Completion queues: B28 to B31.

use std::mem::size_of;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use starverbs_queues::board::*;
use starverbs_queues::{Cqe, SendFlags, SendOp, SendWqe, WcStatus};

use crate::bench::{Bench, Pair};
use crate::fault::{RuleFault, Tested, ensure, expect};
use crate::qp::{RawQp, data, request, state};
use crate::raw::{Basics, QP_BYTES, QPS, RaisedEvent, RawDriver, arm};

/// Where a small completion queue lies.
const SMALL: usize = 0x8000;

/// Two QPs that complete in a queue of their own at [`SMALL`].
fn on_small(
    bench: &mut Bench,
    log: u32,
    flags: u32,
    signal_all: bool,
) -> Tested<(RawDriver, u32, u32, [RawQp; 2])> {
    let mut raw = bench.open()?;
    let Basics { pd, key, .. } = raw.basics()?;
    let small = raw.cq(SMALL, log, flags)?.number;
    let flags = if signal_all { QP_SIGNAL_ALL } else { 0 };
    let mut made = Vec::new();
    for n in 0..2 {
        let create = RawDriver::create_qp(pd, small, QPS + n * QP_BYTES);
        made.push(raw.qp_of(n, &CreateQp { flags, ..create })?);
    }
    let [a, b] = [made[0], made[1]];
    raw.connect_qp(a, b.qpn)?;
    raw.connect_qp(b, a.qpn)?;
    Ok((raw, key, small, [a, b]))
}

/// Takes CQE `index` of the small queue.
fn take(raw: &mut RawDriver, log: u32, index: u32) -> Tested<Cqe> {
    let cqe = raw.wait("a completion", |raw| Ok(raw.cqe(SMALL, log, index)))?;
    raw.word(SMALL).store(index + 1, Ordering::Release);
    Ok(cqe)
}

pub(super) fn phase(bench: &mut Bench) -> Tested {
    const LOG: u32 = 1;
    let (mut raw, key, _, [mut a, mut b]) = on_small(bench, LOG, 0, true)?;
    let mut next = 0;
    for n in 1..100u64 {
        raw.post_recv(&mut b, n, data(4096, 8, key));
        raw.put_send(&mut a, request(SendOp::Send, n), data(0, 8, key));
        let (early, cell) = (raw.cqe(SMALL, LOG, next), raw.cell(a.cell)?);
        expect("a completion before there is any", early, None)?;
        let watched = [0, 1].map(|n| {
            let at = SMALL + 64 + ((next + n) & ((1 << LOG) - 1)) as usize * size_of::<Cqe>();
            (raw.quad(at), raw.quad(at + 24))
        });
        let posted = u64::from(a.sends);
        let wr_ids = watch(watched, || cell.store(posted, Ordering::Release), raw.patience)?;
        expect("wr_ids when the last words of their CQEs are stored", wr_ids, [n; 2])?;
        for _ in 0..2 {
            let cqe = take(&mut raw, LOG, next)?;
            expect("status", cqe.status, WcStatus::Success)?;
            next += 1;
        }
    }
    Ok(())
}

/// The first words of two CQEs as they are when their last words change, which `begin` brings about.
fn watch(
    cqes: [(&AtomicU64, &AtomicU64); 2],
    begin: impl FnOnce(),
    patience: std::time::Duration,
) -> Tested<[u64; 2]> {
    let before = cqes.map(|(_, last)| last.load(Ordering::Acquire));
    let (ready, begun) = (AtomicBool::new(false), std::time::Instant::now());
    std::thread::scope(|scope| {
        let looker = scope.spawn(|| {
            let mut seen = [None; 2];
            ready.store(true, Ordering::Release);
            while seen.contains(&None) && begun.elapsed() < patience {
                for (n, (first, last)) in cqes.iter().enumerate() {
                    if seen[n].is_none() && last.load(Ordering::Acquire) != before[n] {
                        seen[n] = Some(first.load(Ordering::Relaxed));
                    }
                }
            }
            seen
        });
        while !ready.load(Ordering::Acquire) {
            std::hint::spin_loop();
        }
        begin();
        match looker.join() {
            Ok([Some(one), Some(two)]) => Ok([one, two]),
            _ => Err(RuleFault::failed("two completions", format_args!("not both in {patience:?}"))),
        }
    })
}

pub(super) fn one_each(bench: &mut Bench) -> Tested {
    const LOG: u32 = 6;
    let (mut raw, key, _, [mut a, mut b]) = on_small(bench, LOG, 0, false)?;
    let before = raw.counter(COUNTER_CQE_WRITES)?;
    let unsignaled = |wr_id| SendWqe { flags: SendFlags::empty(), ..request(SendOp::Send, wr_id) };
    for n in 0..4 {
        raw.post_recv(&mut b, n, data(4096, 8, key));
        raw.put_send(&mut a, unsignaled(10 + n), data(0, 8, key));
    }
    raw.post_recv(&mut b, 4, data(4096, 8, key));
    raw.put_send(&mut a, request(SendOp::Send, 14), data(0, 8, key));
    raw.doorbell(&a)?;
    let mut came = Vec::new();
    for n in 0..6 {
        came.push(take(&mut raw, LOG, n)?.wr_id);
    }
    came.sort_unstable();
    expect("completions of five receives and one of five sends signaled", came, vec![0, 1, 2, 3, 4, 14])?;
    /* one that fails completes, signaled or not */
    raw.put_send(&mut a, unsignaled(20), data(0, 8, key ^ 0x55));
    raw.doorbell(&a)?;
    let cqe = take(&mut raw, LOG, 6)?;
    expect(
        "completion of an unsignaled send that fails",
        (cqe.wr_id, cqe.status),
        (20, WcStatus::LocProtErr),
    )?;
    raw.settle()?;
    expect("a completion beside these", raw.cqe(SMALL, LOG, 7), None)?;
    expect("CQEs counted", raw.counter(COUNTER_CQE_WRITES)? - before, 7)
}

pub(super) fn overrun(bench: &mut Bench) -> Tested {
    for flags in [0, CQ_IGNORE_OVERRUN] {
        let (mut raw, key, small, [mut a, mut b]) = on_small(bench, 1, flags, true)?;
        let before = raw.counter(COUNTER_CQE_WRITES)?;
        for n in 0..4 {
            raw.post_recv(&mut b, n, data(4096, 8, key));
            raw.put_send(&mut a, request(SendOp::Send, 10 + n), data(0, 8, key));
        }
        raw.doorbell(&a)?;
        if flags == 0 {
            let event = raw.wait_for_event(0)?;
            let wanted = RaisedEvent { kind: 0, number: small };
            expect("an event of a queue that overran", event, wanted)?;
            raw.wait("a QP in ERR behind it", |raw| {
                Ok((raw.state(a)? == state::ERR || raw.state(b)? == state::ERR).then_some(()))
            })?;
        } else {
            raw.wait("a QP that goes on", |raw| Ok((raw.released(&a) == 4).then_some(())))?;
            expect("an event of a queue that may overrun", raw.event(0), None)?;
            expect("the state of its QP", raw.state(a)?, state::RTS)?;
        }
        raw.settle()?;
        let written = raw.counter(COUNTER_CQE_WRITES)? - before;
        expect("CQEs written where two have room", written, 2)?;
        let again = (1..8).filter_map(|n| raw.event(n)).filter(|event| event.kind == 0).count();
        expect("more events of the overrun", again, 0)?;
        if flags == 0 {
            /* there is room, and requests to flush */
            raw.word(SMALL).store(2, Ordering::Release);
            for qp in [&mut a, &mut b] {
                raw.put_send(qp, request(SendOp::Send, 20), data(0, 8, key));
                raw.doorbell(qp)?;
            }
            raw.settle()?;
            let written = raw.counter(COUNTER_CQE_WRITES)? - before;
            expect("CQEs written to a queue that has overrun", written, 2)?;
        }
    }
    Ok(())
}

pub(super) fn armed(bench: &mut Bench) -> Tested {
    let Pair { mut raw, key, cq, cq_cell, mut a, mut b, .. } = bench.pair()?;
    let event = RaisedEvent { kind: EVENT_COMPLETION, number: cq };
    raw.exchange(key, &mut a, &mut b, 1)?;
    raw.settle()?;
    expect("an event that nobody asked for", raw.event(0), None)?;
    raw.ring(cq_cell, arm(raw.taken, 1, false))?;
    raw.settle()?;
    expect("an event before there is a completion", raw.event(0), None)?;
    raw.exchange(key, &mut a, &mut b, 2)?;
    expect("the event of an armed queue", raw.wait_for_event(0)?, event)?;
    raw.exchange(key, &mut a, &mut b, 3)?;
    raw.settle()?;
    expect("a second event of a queue that was armed once", raw.event(1), None)?;
    /* what came between the look and the arming raises it at once */
    raw.ring(cq_cell, arm(raw.taken - 1, 2, false))?;
    expect("the event of what was there already", raw.wait_for_event(1)?, event)?;
    raw.ring(cq_cell, arm(raw.taken, 3, true))?;
    raw.exchange(key, &mut a, &mut b, 4)?;
    raw.settle()?;
    expect("an event of what is not solicited", raw.event(2), None)?;
    raw.post_recv(&mut b, 5, data(4096, 8, key));
    let solicited = SendFlags::SIGNALED | SendFlags::SOLICITED;
    raw.put_send(&mut a, SendWqe { flags: solicited, ..request(SendOp::Send, 6) }, data(0, 8, key));
    raw.doorbell(&a)?;
    expect("the event of a solicited one", raw.wait_for_event(2)?, event)?;
    for _ in 0..2 {
        raw.completion()?;
    }
    /* of a failed one */
    raw.settle()?;
    raw.ring(cq_cell, arm(raw.taken, 4, true))?;
    raw.put_send(&mut a, request(SendOp::Send, 7), data(0, 8, key ^ 0x55));
    raw.doorbell(&a)?;
    ensure(raw.completion()?.status == WcStatus::LocProtErr, "LOC_PROT_ERR", "another status")?;
    expect("the event of a failed one", raw.wait_for_event(3)?, event)?;
    /* an index that the queue has not reached */
    raw.ring(cq_cell, arm(raw.taken + 1000, 5, false))?;
    raw.settle()?;
    expect("an event of what is far behind an index", raw.event(4), None)
}
