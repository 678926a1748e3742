//! B58: QP contexts, of which the board may have room for few.

use starverbs_queues::board::*;

use crate::bench::{Bench, Pair};
use crate::fault::{Tested, ensure, expect};

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
