//! What a message costs: by the counters, and by what crosses the bus, which is in the record.

use std::fs::{self, File};

use super::*;

/// Bytes of a message: one piece of memory at either end.
const LEN: usize = 64;
/// A batch.
const BATCH: usize = 16;

/// What a run of messages cost.
#[derive(Debug, Default, PartialEq, Eq)]
struct Cost {
    doorbells: u64,
    /// WQEs fetched, and the reads that it took
    sends: (u64, usize),
    recvs: (u64, usize),
    /// CQEs, and the writes
    cqes: (u64, usize),
    /// Pieces of data read and written, and the same on the bus
    data_reads: (u64, usize),
    data_writes: (u64, usize),
    /// Reads of programs' index lines and of the word that says how many CQEs were taken
    index_reads: usize,
    /// Writes of the board's index lines
    index_writes: usize,
}

/// Posts `count` requests and rings once; gives what the counters say of them.
fn post(raw: &mut Raw, op: SendOp, count: usize) -> [u64; 6] {
    let TwoQps { key, mut a, mut b } = two_qps(raw);
    let which = [
        COUNTER_DOORBELLS,
        COUNTER_SEND_FETCHES,
        COUNTER_RECV_FETCHES,
        COUNTER_CQE_WRITES,
        COUNTER_DMA_READS,
        COUNTER_DMA_WRITES,
    ];
    let before = which.map(|which| raw.counter(which));
    let takes_recv = op == SendOp::Send;
    for n in 0..count {
        if takes_recv {
            raw.post_recv(&mut b, n as u64, data(4096 + LEN * n, LEN as u32, key));
        }
        let remote_addr = BASE + (DATA + 8192 + LEN * n) as u64;
        let wqe = SendWqe { remote_addr, rkey: key, ..request(op, 100 + n as u64) };
        raw.put_send(&mut a, wqe, data(LEN * n, LEN as u32, key));
    }
    raw.doorbell(&a);
    for _ in 0..count * if takes_recv { 2 } else { 1 } {
        assert_eq!(raw.completion().status, WcStatus::Success);
    }
    /* the board counts at the end of a turn; to wait for that takes doorbells */
    let doorbells = raw.counter(COUNTER_DOORBELLS);
    raw.settle().unwrap();
    let after = [doorbells].into_iter().chain(which[1..].iter().map(|which| raw.counter(*which)));
    let counted: Vec<u64> = after.zip(before).map(|(after, before)| after - before).collect();
    counted.try_into().unwrap()
}

/// Counts what stands in a record behind the first doorbell.
fn count_lines(text: &str, cost: &mut Cost) {
    let lines = text.lines().skip_while(|line| !line.starts_with("bell"));
    for line in lines {
        let words: Vec<&str> = line.split(' ').collect();
        let [kind @ ("dma-read" | "dma-write"), _, address, ..] = words[..] else { continue };
        let at = usize::from_str_radix(address, 16).unwrap() - BASE as usize;
        if at < EVENTS {
            /* a command, by which the driver settles */
            continue;
        }
        let in_qp = at.wrapping_sub(QPS) % QP_BYTES;
        *match (kind, at) {
            ("dma-read", DATA..) => &mut cost.data_reads.1,
            ("dma-write", DATA..) => &mut cost.data_writes.1,
            ("dma-read", QPS..) if in_qp >= SENDS => &mut cost.sends.1,
            ("dma-read", QPS..) if in_qp >= RECVS => &mut cost.recvs.1,
            ("dma-write", QPS..) if in_qp < RECVS => &mut cost.index_writes,
            ("dma-write", CQ..) if at < CQ + (32 << CQ_LOG) => &mut cost.cqes.1,
            ("dma-read", _) => &mut cost.index_reads,
            _ => panic!("{line}"),
        } += 1;
    }
}

/// What `messages` of `op` cost, with one doorbell. A machine that is busy has the board send a message
/// again, which reads it again: then it is tried anew.
fn cost(op: SendOp, messages: usize) -> Cost {
    for _ in 0..20 {
        let settings = settings();
        let name = format!("starverbs-counted-{}-{}", std::process::id(), settings.port);
        let path = std::env::temp_dir().join(name);
        let (mut counted, record) = ([0; 6], File::create_new(&path).unwrap());
        let board = with_board_recorded(&settings, 1, record, |paths| {
            counted = post(&mut Raw::open(&paths[0]), op, messages);
        });
        let text = fs::read_to_string(&path).unwrap();
        fs::remove_file(&path).unwrap();
        if board.card.nic.counters().retransmitted.get() == 0 {
            let [doorbells, sends, recvs, cqes, reads, writes] = counted;
            let mut cost = Cost { doorbells, ..Cost::default() };
            count_lines(&text, &mut cost);
            (cost.sends.0, cost.recvs.0, cost.cqes.0) = (sends, recvs, cqes);
            (cost.data_reads.0, cost.data_writes.0) = (reads, writes);
            return cost;
        }
    }
    panic!("something is sent again each time");
}

/// B15, B20, B22, B23, B29: one doorbell and one read of send WQEs for all of a batch; for each message its
/// data once at either end, a receive WQE, its CQEs, and the board's index lines.
#[test]
fn a_message_costs_what_the_document_says() {
    for messages in [1, BATCH] {
        let n = messages as u64;
        let each = (n, messages);
        for (op, recvs, cqes) in [
            (SendOp::Send, each, (2 * n, 2 * messages)),
            (SendOp::Write, (0, 0), each),
            (SendOp::Read, (0, 0), each),
        ] {
            let found = cost(op, messages);
            let Cost { index_reads, index_writes, .. } = found;
            let wanted = Cost {
                doorbells: 1,
                sends: (n, 1),
                recvs,
                cqes,
                data_reads: each,
                data_writes: each,
                index_reads,
                index_writes,
            };
            assert_eq!(found, wanted, "{messages} of {op:?}");
            /* the receiver looks whether a receive is posted, and says that it took it; WQEs are released */
            assert!(index_reads <= recvs.1 && index_writes <= cqes.1, "{messages} of {op:?}: {found:?}");
        }
    }
}
