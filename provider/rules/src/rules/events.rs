//! Events and interrupts: B32 to B34.

use std::mem::size_of;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use nix::sys::eventfd::{EfdFlags, EventFd};
use starverbs_queues::board::*;
use starverbs_queues::{SendOp, SendWqe, WcStatus};
use zerocopy::IntoBytes;

use crate::bench::{Bench, Pair, pair};
use crate::fault::{Tested, ensure, expect};
use crate::qp::{address, data, request};
use crate::raw::{BASE, COMMANDS, COMMANDS_LOG, EVENTS, QP_BYTES, QPS, RaisedEvent, RawDriver, arm};

/// `enum ibv_event_type`
const QP_ACCESS_ERR: u32 = 3;
/// See [`QP_ACCESS_ERR`].
const SRQ_LIMIT_REACHED: u32 = 15;

/// Entry `n` of an event queue of two: kind, number, reserved, and the number of the event.
fn entry(raw: &RawDriver, n: usize) -> [u32; 4] {
    let at = EVENTS + n * size_of::<Event>();
    let valid = raw.word(at + 12).load(Ordering::Acquire);
    [raw.get(at), raw.get(at + 4), raw.get(at + 8), valid]
}

pub(super) fn numbered(bench: &mut Bench) -> Tested {
    let mut raw = bench.connect()?;
    raw.set_queues(BASE + COMMANDS as u64, COMMANDS_LOG, BASE + EVENTS as u64, 1)?;
    raw.write(REG_CONTROL, &CTRL_ENABLE.to_le_bytes())?;
    let Pair { mut raw, key, cq_cell, mut a, mut b, .. } = pair(raw)?;
    let (mut times, mut taken) = (0, 0);
    /* two have room, two wait; then the first are taken, and so on */
    for round in 0..3u32 {
        for n in 0..4u32 {
            times += 1;
            raw.ring(cq_cell, arm(raw.taken, times, false))?;
            raw.settle()?;
            raw.exchange(key, &mut a, &mut b, u64::from(4 * round + n + 1))?;
            raw.settle()?;
        }
        for half in 0..2 {
            for n in 0..2 {
                let number = 4 * round + 2 * half + n + 1;
                let found = raw.wait(&format!("event {number}"), |raw| {
                    let found = entry(raw, ((number - 1) & 1) as usize);
                    Ok((found[3] == number).then_some(found))
                })?;
                expect("an event", (found[0], found[2]), (EVENT_COMPLETION, 0))?;
            }
            raw.settle()?;
            let last = entry(&raw, 1)[3];
            expect("the last event while there is no room for more", last, taken + 2)?;
            taken += 2;
            raw.ring(CELL_EVENTS, taken.into())?;
        }
    }
    expect("REG_ERROR", raw.register(REG_ERROR)?, 0)
}

pub(super) fn signal(bench: &mut Bench) -> Tested {
    let Pair { mut raw, key, cq_cell, mut a, mut b, .. } = bench.pair()?;
    let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
    let eventfd = OwnedFd::from(EventFd::from_flags(flags).map_err(std::io::Error::from)?);
    let given = [eventfd];
    raw.link.signal(&given)?;
    let read = || {
        let mut count = [0; size_of::<u64>()];
        nix::unistd::read(&given[0], &mut count).ok().map(|_| u64::from_le_bytes(count))
    };
    raw.exchange(key, &mut a, &mut b, 1)?;
    raw.settle()?;
    expect("an interrupt without an event", read(), None)?;
    for n in 0..8u32 {
        let before = raw.counter(COUNTER_INTERRUPTS)?;
        raw.ring(cq_cell, arm(raw.taken, n + 1, false))?;
        raw.exchange(key, &mut a, &mut b, u64::from(n) + 2)?;
        let count = raw.wait("an interrupt for an event", |_| Ok(read()))?;
        ensure(raw.event(n).is_some(), "the event, when its interrupt comes", "none")?;
        expect("interrupts of one event", count, 1)?;
        expect("COUNTER_INTERRUPTS", raw.counter(COUNTER_INTERRUPTS)? - before, 1)?;
    }
    Ok(())
}

pub(super) fn names(bench: &mut Bench) -> Tested {
    let Pair { mut raw, pd, key, cq, mut a, b, .. } = bench.pair()?;
    /* a key that the peer refuses */
    let write = SendWqe { remote_addr: address(0), rkey: key ^ 0x55, ..request(SendOp::Write, 1) };
    raw.put_send(&mut a, write, data(0, 8, key));
    raw.doorbell(&a)?;
    expect("status of a WRITE without a key", raw.completion()?.status, WcStatus::RemAccessErr)?;
    let refused = RaisedEvent { kind: QP_ACCESS_ERR, number: b.qpn };
    expect("the event of the QP that refused it", raw.wait_for_event(0)?, refused)?;
    /* an SRQ with fewer receives than its limit */
    let queues = RawDriver::create_qp(pd, cq, QPS + 2 * QP_BYTES).queues;
    let srq = raw.number(OP_CREATE_SRQ, CreateSrq { queues, pd, limit: 2 }.as_bytes())?;
    let with = CreateQp { srq: srq.number, ..RawDriver::create_qp(pd, cq, QPS + 3 * QP_BYTES) };
    let (mut from, to) = (raw.qp(pd, cq, 4)?, raw.qp_of(3, &with)?);
    raw.connect_qp(from, to.qpn)?;
    raw.connect_qp(to, from.qpn)?;
    let at = QPS + 2 * QP_BYTES;
    let mut shared = crate::RawQp { qpn: srq.number, cell: srq.cell, at, sends: 0, recvs: 0 };
    for n in 0..2 {
        raw.post_recv(&mut shared, n, data(4096, 8, key));
    }
    raw.put_send(&mut from, request(SendOp::Send, 5), data(0, 8, key));
    raw.doorbell(&from)?;
    let low = RaisedEvent { kind: SRQ_LIMIT_REACHED, number: srq.number };
    expect("the event of an SRQ", raw.wait_for_event(1)?, low)
}
