//! Threads that share queue pairs, on a machine with more to do than CPUs: nothing is lost, and no peer that
//! merely waits for its CPU is given up.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::*;
use starverbs_core::{Cqe, QpType, SendOp, WcOpcode, WcStatus};
use starverbs_verbs::{Cq, Qp, SendWr, VerbsError};

/// 4.2 ms: about as long as a scheduler's slice.
const TIMEOUT: u8 = 10;
const RETRIES: u8 = 3;
const QPS: usize = 3;
const THREADS: usize = 4;
/// Messages of each thread
const EACH: u64 = 2000;

/// What the threads have seen.
#[derive(Default)]
struct Seen {
    sent: AtomicU64,
    received: AtomicU64,
    failed: AtomicBool,
}

/// Polls once, for whomever; each receive that was used is posted anew at its QP.
fn poll_once(node: &Node, cq: &Cq, qps: &[Qp], seen: &Seen) -> usize {
    let mut out = [Cqe::default(); 8];
    let got = cq.poll(&mut out).unwrap();
    for cqe in &out[..got] {
        if cqe.status != WcStatus::Success {
            seen.failed.store(true, Ordering::Relaxed);
            panic!("{cqe:?}");
        }
        if cqe.opcode == WcOpcode::Recv {
            let qp = qps.iter().find(|qp| qp.number() == cqe.qpn).unwrap();
            node.post_recv(qp, 0, 2048, 2048).unwrap();
            seen.received.fetch_add(1, Ordering::Relaxed);
        } else {
            seen.sent.fetch_add(1, Ordering::Relaxed);
        }
    }
    got
}

/// Posts on all QPs in turn, SENDs, WRITEs, READs and additions, and polls the CQ of all.
fn work(a: &Node, b: &Node, qps: &[Qp], cell: usize, thread: u64, seen: &Seen) {
    let (small, long) = ([a.sge(8 * thread as usize, 8)], [a.sge(4096, 6000)]);
    let base = SendWr { remote_addr: b.addr(cell), rkey: b.mr.rkey(), ..send(thread, &small) };
    let far = b.addr(4096);
    let wrs = [
        SendWr { op: SendOp::FetchAdd, compare_add: 1, ..base },
        SendWr { op: SendOp::Write, remote_addr: far, sges: &long, ..base },
        base,
        SendWr { op: SendOp::Read, remote_addr: far, sges: &long, ..base },
    ];
    for at in 0..EACH {
        let (qp, wr) = (&qps[(at + thread) as usize % QPS], &wrs[at as usize % wrs.len()]);
        while let Err(error) = post(qp, wr) {
            assert!(matches!(error, VerbsError::NoMemory(_)), "{error}");
            if seen.failed.load(Ordering::Relaxed) {
                return;
            }
            poll_once(a, &a.cq, &[], seen);
        }
    }
}

/// Threads that end queue pairs and make others, on a card that has hardly a number left: one's end takes
/// none of the completions of the other, which has its number by then.
#[test]
fn a_number_used_anew_keeps_its_completions() {
    /// Numbers of a block, less those that the threads use in turns
    const TAKEN: usize = 4096 - CHANGERS;
    const CHANGERS: usize = 3;
    const TURNS: u64 = 100_000;
    let node = Node::new(&settings());
    let _taken: Vec<Qp> = (0..TAKEN).map(|_| node.qp(QpType::Rc)).collect();
    let counts: [AtomicU64; CHANGERS] = Default::default();
    let turn = |me: usize, turn: u64| {
        let qp = node.qp(QpType::Rc);
        to_init(&qp);
        node.post_recv(&qp, me as u64, 0, 8).unwrap();
        to_err(&qp);
        let start = Instant::now();
        while counts[me].load(Ordering::Relaxed) < turn {
            let mut out = [Cqe::default(); 4];
            let got = node.cq.poll(&mut out).unwrap();
            for cqe in &out[..got] {
                counts[cqe.wr_id as usize].fetch_add(1, Ordering::Relaxed);
            }
            assert!(start.elapsed() < Duration::from_secs(30), "a completion of {:#x} is gone", qp.number());
        }
        qp.destroy().unwrap();
    };
    std::thread::scope(|scope| {
        for me in 0..CHANGERS {
            let turn = &turn;
            scope.spawn(move || (1..=TURNS).for_each(|at| turn(me, at)));
        }
    });
}

#[test]
fn a_busy_machine_fails_nothing() {
    let (a, b) = Node::pair();
    let (qas, qbs): (Vec<Qp>, Vec<Qp>) = (0..QPS).map(|_| (a.qp(QpType::Rc), b.qp(QpType::Rc))).unzip();
    for (qa, qb) in qas.iter().zip(&qbs) {
        for (me, peer) in [((&a, qa), (&b, qb)), ((&b, qb), (&a, qa))] {
            to_init(me.1);
            to_rtr(me.1, way_to(peer.0), peer.1.number());
        }
        to_rts_with(qa, TIMEOUT, RETRIES, 7);
        to_rts_with(qb, TIMEOUT, RETRIES, 7);
        (0..16).for_each(|_| b.post_recv(qb, 0, 2048, 2048).unwrap());
    }
    let cell = (8 - b.addr(0) as usize % 8) % 8;
    b.fill(cell, &[0; 8]);
    let (seen, over) = (Seen::default(), AtomicBool::new(false));
    let (all, quarter) = (THREADS as u64 * EACH, THREADS as u64 * EACH / 4);
    let done =
        || seen.sent.load(Ordering::Relaxed) == all && seen.received.load(Ordering::Relaxed) == quarter;
    let start = Instant::now();
    let (a, b) = (&a, &b);
    std::thread::scope(|scope| {
        for _ in 0..2 * std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) && !seen.failed.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        for thread in 0..THREADS as u64 {
            let (seen, qas) = (&seen, &qas);
            scope.spawn(move || work(a, b, qas, cell, thread, seen));
        }
        while !done() && !seen.failed.load(Ordering::Relaxed) && start.elapsed() < Duration::from_secs(60) {
            poll_once(a, &a.cq, &[], &seen);
            poll_once(b, &b.cq, &qbs, &seen);
        }
        over.store(true, Ordering::Relaxed);
    });
    assert!(
        done(),
        "{} of {all} sent, {} of {quarter} received",
        seen.sent.into_inner(),
        seen.received.into_inner()
    );
    assert_eq!(b.word(cell), quarter, "each addition happened once");
}
