//! Contexts of a function: B47 to B49.

use std::sync::atomic::Ordering;

use starverbs_queues::board::*;
use starverbs_queues::{SendOp, WcStatus};
use zerocopy::IntoBytes;

use crate::bench::{Bench, Pair};
use crate::fault::{Tested, expect};
use crate::qp::{TwoQps, data, request};
use crate::raw::{BASE, CONTEXT_BYTES, RawDriver};

const EINVAL: u32 = libc::EINVAL as u32;
fn init(vector: u32) -> OpenContext {
    OpenContext { events: BASE + CONTEXT_BYTES as u64, events_log: 4, vector }
}

pub(super) fn open(bench: &mut Bench) -> Tested {
    let mut raw = bench.open()?;
    let good = init(0);
    for (init, errno) in [
        (OpenContext { vector: raw.register(REG_VECTORS)?, ..good }, libc::EINVAL),
        (OpenContext { events: good.events + 8, ..good }, libc::EINVAL),
        (OpenContext { events_log: 13, ..good }, libc::EINVAL),
        (OpenContext { events: 0, ..good }, libc::EFAULT),
    ] {
        let done = raw.command::<NumberReply>(OP_OPEN_CONTEXT, init.as_bytes())?.map(drop);
        expect(&format!("status of opening {init:x?}"), done, Err(errno as u32))?;
    }
    let context = raw.open_context(0)?;
    let done = raw.command::<NumberReply>(OP_OPEN_CONTEXT, good.as_bytes())?.map(drop);
    expect("status of opening one from there", done, Err(libc::EPERM as u32))?;
    expect("status of closing one", raw.object(OP_CLOSE_CONTEXT, context.into())?, Err(libc::EPERM as u32))?;
    /* queues, a page and events of its own */
    let TwoQps { key, mut a, mut b } = raw.two_qps()?;
    for n in 0..8 {
        raw.exchange(key, &mut a, &mut b, n)?;
    }
    raw.enter(0);
    let TwoQps { key, a: mut x, b: mut y } = raw.two_qps()?;
    expect("cells of a second context's queues", [a.cell, b.cell], [x.cell, y.cell])?;
    raw.exchange(key, &mut x, &mut y, 8)?;
    raw.enter(context);
    raw.context = raw.register(REG_CONTEXTS)? as u16;
    expect("status of a command of no context", raw.object(OP_QUERY_GID, 0)?, Err(libc::ENXIO as u32))
}

pub(super) fn apart(bench: &mut Bench) -> Tested {
    let Pair { mut raw, pd, key, mut a, mut b, .. } = bench.pair()?;
    raw.open_context(0)?;
    for (op, number) in [(OP_DEALLOC_PD, pd), (OP_QUERY_MR, key), (OP_DEREG_MR, key), (OP_QUERY_QP, a.qpn)] {
        let done = raw.object(op, number)?;
        expect(&format!("status of command {op:#x} on another context's object"), done, Err(EINVAL))?;
    }
    let done = raw.command::<NumberReply>(OP_REG_MR, RawDriver::region(pd, 0, 8).as_bytes())?.map(drop);
    expect("status of a region in another context's domain", done, Err(EINVAL))?;
    let own = raw.number(OP_ALLOC_PD, &[])?.number;
    let region = raw.number(OP_REG_MR, RawDriver::region(own, 0, crate::raw::BYTES).as_bytes())?.number;
    raw.enter(0);
    raw.exchange(key, &mut a, &mut b, 1)?;
    raw.put_send(&mut a, request(SendOp::Send, 2), data(0, 8, region));
    raw.doorbell(&a)?;
    expect("completion with another context's key", raw.completion()?.status, WcStatus::LocProtErr)
}

pub(super) fn close(bench: &mut Bench) -> Tested {
    let Pair { mut raw, pd, key, mut a, mut b, .. } = bench.pair()?;
    let context = raw.open_context(0)?;
    let TwoQps { key: own_key, a: mut x, .. } = raw.two_qps()?;
    /* a message under way, for which there is no receive */
    raw.put_send(&mut x, request(SendOp::Send, 1), data(0, 8, own_key));
    raw.doorbell(&x)?;
    let begin = raw.at(0);
    raw.enter(0);
    expect("status of closing the first", raw.object(OP_CLOSE_CONTEXT, 0)?, Err(EINVAL))?;
    raw.close_context(context)?;
    raw.put(begin, &vec![0x55; CONTEXT_BYTES]);
    expect("status of closing it again", raw.object(OP_CLOSE_CONTEXT, context.into())?, Err(EINVAL))?;
    expect("status of a QP of the closed context", raw.object(OP_QUERY_QP, x.qpn)?, Err(EINVAL))?;
    raw.exchange(key, &mut a, &mut b, 3)?;
    let touched = raw.bytes(begin, CONTEXT_BYTES).iter().position(|byte| *byte != 0x55);
    expect("a byte of its queues that was written", touched, None)?;
    raw.context = context;
    let value = raw.cell(x.cell)?.load(Ordering::Acquire);
    expect("a cell of its page", value, 0)?;
    expect("status of a command of it", raw.object(OP_QUERY_GID, 0)?, Err(libc::ENXIO as u32))?;
    raw.context = 0;
    expect("status of the first context's domain", raw.object(OP_DEALLOC_PD, pd)?, Err(libc::EBUSY as u32))
}
