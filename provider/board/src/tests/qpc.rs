//! QP contexts in the host's memory.

use starverbs_settings::{QpcPolicy, QpcSpec, Settings};

use super::*;

/// Where a client has its memory for contexts, and log2 of those that it holds.
const CONTEXTS: usize = 0xf_0000;
const CONTEXTS_LOG: u32 = 4;

/// Settings of a board with room for one context.
fn with_one(policy: QpcPolicy) -> Settings {
    let time = Duration::from_micros(1);
    Settings { qpc_cache: Some(QpcSpec { entries: 1, miss: time, fetch: time, policy }), ..settings() }
}

/// A client that has given the board memory for contexts.
fn with_memory(paths: &[PathBuf]) -> Raw {
    let mut raw = Raw::connect(&paths[0]);
    raw.write(REG_QPC_MEMORY, &(BASE + CONTEXTS as u64).to_le_bytes()).unwrap();
    raw.write(REG_QPC_MEMORY_LOG, &CONTEXTS_LOG.to_le_bytes()).unwrap();
    raw.enable();
    raw
}

/// What a client's messages have a board with room for one context count: reads and writes of memory, those
/// of contexts aside, and what is malformed.
fn counted(policy: QpcPolicy, has_memory: bool) -> [u64; 3] {
    let mut counted = [0; 3];
    let board = with_board_of(&with_one(policy), 1, |paths| {
        let mut raw = if has_memory { with_memory(paths) } else { Raw::open(&paths[0]) };
        let TwoQps { key, mut a, mut b } = two_qps(&mut raw);
        for n in 0..50 {
            exchange(&mut raw, key, &mut a, &mut b, n);
        }
        /* the board counts at the end of a turn */
        raw.settle().unwrap();
        let fetched = raw.counter(COUNTER_QPC_MISSES) + raw.counter(COUNTER_QPC_PREFETCHED);
        let evicted = raw.counter(COUNTER_QPC_EVICTED);
        assert!(fetched > 20 && evicted > 20, "{policy:?}: {fetched} fetched, {evicted} evicted");
        counted = [COUNTER_DMA_READS, COUNTER_DMA_WRITES, COUNTER_MALFORMED].map(|of| raw.counter(of));
        if has_memory {
            counted[0] -= fetched;
            /* and one for each queue pair, when it was made */
            counted[1] -= evicted + 2;
        }
    });
    /* on a machine with other work an ACK may be late, and a message is read again to be sent again */
    counted[0] -= board.card.nic.counters().retransmitted.get();
    counted
}

/// B60: a fetch is a read of the host's memory, and what makes room a write, under each policy.
#[test]
fn contexts_are_read_and_written_in_the_hosts_memory() {
    for policy in [QpcPolicy::Fcfs, QpcPolicy::NonBlocking, QpcPolicy::LatencyHiding] {
        assert_eq!(counted(policy, true), [50, 50, 0], "{policy:?}");
        assert_eq!(counted(policy, false), [50, 50, 0], "{policy:?}: without that memory");
    }
}

/// B60: a context that the driver changed is noticed when it is read.
#[test]
fn a_context_that_the_host_changed_is_counted() {
    with_board_of(&with_one(QpcPolicy::NonBlocking), 1, |paths| {
        let mut raw = with_memory(paths);
        let TwoQps { key, mut a, mut b } = two_qps(&mut raw);
        exchange(&mut raw, key, &mut a, &mut b, 1);
        assert_eq!(raw.counter(COUNTER_MALFORMED), 0);
        /* of the two one is not on chip */
        raw.put(CONTEXTS, &[0xff; 2 * QPC_BYTES as usize]);
        exchange(&mut raw, key, &mut a, &mut b, 2);
        assert!(raw.counter(COUNTER_MALFORMED) > 0);
    });
}

/// B60: the memory is the client's again after a reset.
#[test]
fn the_hosts_memory_is_the_boards_until_a_reset() {
    let board = with_board_of(&with_one(QpcPolicy::Fcfs), 1, |paths| {
        let mut raw = with_memory(paths);
        two_qps(&mut raw);
        assert_eq!(raw.register(REG_QPC_PLACEMENT), QPC_IN_HOST);
        raw.write(REG_CONTROL, &CTRL_RESET.to_le_bytes()).unwrap();
        assert_eq!((raw.register(REG_QPC_PLACEMENT), raw.register(REG_QPC_MEMORY)), (QPC_IN_BOARD, 0));
        raw.enable();
        let TwoQps { key, mut a, mut b } = two_qps(&mut raw);
        for n in 0..10 {
            exchange(&mut raw, key, &mut a, &mut b, n);
        }
        let all = (QPC_BYTES << CONTEXTS_LOG) as usize;
        assert_eq!(raw.bytes(CONTEXTS, all), vec![0; all]);
    });
    assert!(board.card.env.memories[0].contexts.is_none());
}
