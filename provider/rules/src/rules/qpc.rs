//! B58, B60: QP contexts, of which the board may have room for few, and where the others are.

use starverbs_queues::board::*;
use zerocopy::IntoBytes;

use crate::bench::{Bench, Pair, pair};
use crate::fault::{RuleFault, Tested, ensure, expect};
use crate::raw::{BASE, BYTES, QP_BYTES, QPS, RawDriver};

const EINVAL: u32 = libc::EINVAL as u32;
const EFAULT: u32 = libc::EFAULT as u32;
const ENOMEM: u32 = libc::ENOMEM as u32;
/// Where the host's memory for contexts lies, and log2 of those that it holds.
const CONTEXTS: usize = 0xf_0000;
const CONTEXTS_LOG: u32 = 1;

/// Messages of a pair: more than one request for each context, whatever is on chip.
const MESSAGES: u64 = 16;

pub(super) fn contexts(bench: &mut Bench) -> Tested {
    let Pair { mut raw, key, mut a, mut b, .. } = bench.pair()?;
    let entries = raw.register(REG_QPC_ENTRIES)?;
    let policy = raw.register(REG_QPC_POLICY)?;
    ensure(policy <= QPC_POLICY_LATENCY_HIDING, "QPC_POLICY_* in REG_QPC_POLICY", policy)?;
    let placement = raw.register(REG_QPC_PLACEMENT)?;
    ensure(placement <= QPC_IN_BOARD, "QPC_IN_* in REG_QPC_PLACEMENT", placement)?;
    let requests = |raw: &mut crate::RawDriver| -> Tested<u64> {
        Ok(raw.counter(COUNTER_QPC_HITS)? + raw.counter(COUNTER_QPC_MISSES)?)
    };
    let before = requests(&mut raw)?;
    for n in 0..MESSAGES {
        let (from, to) = if n % 2 == 0 { (&mut a, &mut b) } else { (&mut b, &mut a) };
        raw.exchange(key, from, to, n)?;
    }
    let counted = requests(&mut raw)? - before;
    if entries == 0 {
        return expect("requests for contexts of a board with room for all", counted, 0);
    }
    ensure(counted >= MESSAGES, &format!("requests for contexts of {MESSAGES} messages, or more"), counted)
}

/// Enables the board with memory for contexts; gives `REG_ERROR`, 0 if it is enabled.
fn enable(raw: &mut RawDriver, memory: u64, log: u32) -> Tested<u32> {
    raw.write(REG_ERROR, &[0; 4])?;
    raw.write(REG_QPC_MEMORY, &memory.to_le_bytes())?;
    raw.write(REG_QPC_MEMORY_LOG, &log.to_le_bytes())?;
    match raw.enable() {
        Ok(()) => Ok(0),
        Err(_) => raw.register(REG_ERROR),
    }
}

pub(super) fn in_host(bench: &mut Bench) -> Tested {
    let mut raw = bench.connect()?;
    if raw.long(REG_CAPS)? & CAP_QPC_HOST == 0 {
        return Err(RuleFault::Skipped("the board has no CAP_QPC_HOST".to_owned()));
    }
    expect("REG_QPC_PLACEMENT without memory", raw.register(REG_QPC_PLACEMENT)?, QPC_IN_BOARD)?;
    let memory = BASE + CONTEXTS as u64;
    let end = BASE + BYTES as u64;
    for (memory, log, errno) in
        [(memory + 8, 0, EINVAL), (memory, 25, EINVAL), (end, 0, EFAULT), (end - 256, 1, EFAULT)]
    {
        let what = format!("REG_ERROR of 2^{log} contexts at {memory:#x}");
        expect(&what, enable(&mut raw, memory, log)?, errno)?;
    }
    expect("REG_ERROR of memory for contexts", enable(&mut raw, memory, CONTEXTS_LOG)?, 0)?;
    expect("REG_QPC_PLACEMENT with memory", raw.register(REG_QPC_PLACEMENT)?, QPC_IN_HOST)?;
    ensure(
        raw.write(REG_QPC_MEMORY, &[0; 8]).is_err(),
        "EBUSY while it is enabled",
        "a write that is taken",
    )?;
    places(&mut pair(raw)?)
}

/// Contexts are written when they are made, read and written as they go and come, and each has a place.
fn places(pair: &mut Pair) -> Tested {
    let Pair { raw, pd, cq, .. } = pair;
    for place in 0..1 << CONTEXTS_LOG {
        let image = raw.bytes(CONTEXTS + place * QPC_BYTES as usize, QPC_BYTES as usize);
        ensure(image.iter().any(|byte| *byte != 0), "a context in the host's memory", "zeroes")?;
    }
    let third = RawDriver::create_qp(*pd, *cq, QPS + 2 * QP_BYTES);
    let refused = raw.command::<NumberReply>(OP_CREATE_QP, third.as_bytes())?.err();
    expect("status of a queue pair without a place", refused, Some(ENOMEM))?;
    moves(pair)?;
    pair.raw.done(OP_DESTROY_QP, pair.a.qpn)?;
    pair.raw.number(OP_CREATE_QP, third.as_bytes()).map(drop)
}

fn moves(pair: &mut Pair) -> Tested {
    let count = |raw: &mut RawDriver| -> Tested<[u64; 2]> {
        /* what began has ended, and is counted, after some turns */
        raw.settle()?;
        let dma = raw.counter(COUNTER_DMA_READS)? + raw.counter(COUNTER_DMA_WRITES)?;
        let fetched = raw.counter(COUNTER_QPC_MISSES)? + raw.counter(COUNTER_QPC_PREFETCHED)?;
        Ok([dma, fetched])
    };
    let (before, malformed) = (count(&mut pair.raw)?, pair.raw.counter(COUNTER_MALFORMED)?);
    for n in 0..MESSAGES {
        let Pair { raw, key, a, b, .. } = &mut *pair;
        let (from, to) = if n % 2 == 0 { (a, b) } else { (b, a) };
        raw.exchange(*key, from, to, n)?;
    }
    let after = count(&mut pair.raw)?;
    let [pieces, fetched] = [0, 1].map(|n| after[n] - before[n]);
    /* a message is one read and one write, and what is sent again is read again. Of what makes room some may
     * be of queue pairs that have ended, whose contexts nobody writes */
    let least = 2 * MESSAGES + fetched;
    ensure(pieces >= least, &format!("{least} pieces of memory read and written, or more"), pieces)?;
    expect("COUNTER_MALFORMED", pair.raw.counter(COUNTER_MALFORMED)?, malformed)
}
