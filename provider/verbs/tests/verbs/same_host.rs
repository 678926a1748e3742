//! Connected queue pairs of one host: through shared memory, with what the wire would have given.

use std::cell::RefCell;

use crate::common::*;
use starverbs_core::rng::SplitMix64;
use starverbs_core::types::QPN_BLOCK_SHIFT;
use starverbs_core::{Cqe, QpType, SendFlags, SendOp, WcOpcode, WcStatus};
use starverbs_settings::{LinkMode, LinkTrust, Settings};
use starverbs_verbs::{Qp, QpInit, RecvWr, SendWr, Srq, VerbsEvent};

#[test]
fn every_operation_goes_without_a_packet() {
    let pair = Pair::new(&local());
    let (a, b) = (&pair.a, &pair.b);
    let packets = pair.count("tx_packets");
    a.fill(0, b"eight by");
    let short = [a.sge(0, 8)];
    let back = [a.sge(4096, 8)];
    b.post_recv(&pair.qb, 7, 1000, 64).unwrap();
    b.post_recv(&pair.qb, 8, 2000, 64).unwrap();
    let cases = [
        pair.wr(SendOp::Send, &short, 0),
        SendWr { imm: 77, ..pair.wr(SendOp::WriteImm, &short, 64) },
        pair.wr(SendOp::Write, &short, 128),
        pair.wr(SendOp::Read, &back, 128),
    ];
    for wr in &cases {
        post(&pair.qa, wr).unwrap();
        let done = a.completions(1)[0];
        assert_eq!((done.status, done.wr_id), (WcStatus::Success, 1), "{:?}", wr.op);
    }
    let received = b.completions(2);
    assert_eq!((received[0].wr_id, received[0].byte_len, received[0].opcode), (7, 8, WcOpcode::Recv));
    assert_eq!((received[1].wr_id, received[1].imm), (8, 77));
    for at in [1000, 64, 128] {
        assert_eq!(b.bytes(at, 8), b"eight by", "at {at}");
    }
    assert_eq!(a.bytes(4096, 8), b"eight by");
    let cell = (8 - b.addr(3000) as usize % 8) % 8 + 3000;
    b.fill(cell, &40u64.to_ne_bytes());
    let add = SendWr { compare_add: 2, ..pair.wr(SendOp::FetchAdd, &back, cell) };
    let swap = SendWr { compare_add: 42, swap: 9, ..pair.wr(SendOp::CmpSwap, &back, cell) };
    for (wr, before) in [(add, 40), (swap, 42)] {
        post(&pair.qa, &wr).unwrap();
        assert_eq!(a.completions(1)[0].status, WcStatus::Success);
        assert_eq!(a.word(4096), before);
    }
    assert_eq!(b.word(cell), 9);
    assert_eq!(pair.count("tx_packets"), packets);
    assert!(pair.count("local_requests") > 0);
}

#[test]
fn long_messages_of_many_pieces_arrive_whole() {
    const LEN: usize = 60_000;
    let pair = Pair::new(&local());
    let (a, b) = (&pair.a, &pair.b);
    let data: Vec<u8> = (0..LEN).map(|n| ((n * 31) >> 3) as u8).collect();
    a.fill(0, &data);
    let pieces = [a.sge(0, 17), a.sge(17, LEN - 17)];
    for round in 0..40 {
        b.fill(0, &vec![0; LEN]);
        let mut poster = pair.qb.post_recv();
        poster.push(&RecvWr { wr_id: 1, sges: &[b.sge(0, 30_001), b.sge(30_001, BUF - 30_001)] }).unwrap();
        poster.ring();
        post(&pair.qa, &send(1, &pieces)).unwrap();
        assert_eq!(b.completions(1)[0].byte_len as usize, LEN);
        assert_eq!(a.completions(1)[0].status, WcStatus::Success);
        assert!(b.bytes(0, LEN) == data, "SEND {round}");
        b.fill(0, &vec![0; LEN]);
        post(&pair.qa, &pair.wr(SendOp::Write, &pieces, 0)).unwrap();
        assert_eq!(a.completions(1)[0].status, WcStatus::Success);
        assert!(b.bytes(0, LEN) == data, "WRITE {round}");
        a.fill(0, &vec![0; LEN]);
        post(&pair.qa, &pair.wr(SendOp::Read, &pieces, 0)).unwrap();
        assert_eq!(a.completions(1)[0].status, WcStatus::Success);
        assert!(a.bytes(0, LEN) == data, "READ {round}");
    }
}

/// A program that posts more requests than a channel has places, and does not poll while its peer executes
/// them: another queue pair's completion, whose request stood there first, is not lost.
#[test]
fn who_posts_without_polling_loses_no_completion() {
    const MANY: usize = 600;
    let pair = Pair::polled(&Settings { progress_thread: false, ..local() }, QpType::Rc);
    let (a, b) = (&pair.a, &pair.b);
    let deep = |node: &Node| {
        let init = QpInit { max_send_wr: MANY as u32, ..node.init(QpType::Rc, None) };
        Qp::create(&node.pd, &init).unwrap()
    };
    let (qc, qd) = (deep(a), deep(b));
    connect(a, &qc, b, &qd);
    wait_for("the agreement", || {
        for node in [a, b] {
            assert_eq!(node.cq.poll(&mut [Cqe::default()]).unwrap(), 0);
        }
        pair.count("local_qps") == 4
    });
    let sges = [a.sge(0, 8)];
    b.post_recv(&pair.qb, 7, 0, 8).unwrap();
    post(&pair.qa, &send(1, &sges)).unwrap();
    assert_eq!(b.completions(1)[0].wr_id, 7);
    let (mut posted, mut received) = (0, 0);
    let mut serve = || {
        while posted < MANY && posted - received < 16 {
            b.post_recv(&qd, 8, 0, 8).unwrap();
            posted += 1;
        }
        received += b.cq.poll(&mut [Cqe::default(); 16]).unwrap();
    };
    for n in 1..=MANY {
        let flags = if n == MANY { SendFlags::SIGNALED } else { SendFlags::empty() };
        post(&qc, &SendWr { wr_id: 2, flags, ..send(2, &sges) }).unwrap();
        serve();
    }
    let mut done = vec![];
    wait_for("all", || {
        let mut out = [Cqe::default(); 8];
        let got = a.cq.poll(&mut out).unwrap();
        done.extend(out[..got].iter().map(|cqe| (cqe.wr_id, cqe.status)));
        serve();
        done.len() == 2
    });
    assert_eq!(done, [(1, WcStatus::Success), (2, WcStatus::Success)]);
}

#[test]
fn a_message_waits_for_its_receive_and_what_is_behind_waits_too() {
    let pair = Pair::new(&local());
    let (a, b) = (&pair.a, &pair.b);
    a.fill(0, b"late");
    post(&pair.qa, &send(1, &[a.sge(0, 4)])).unwrap();
    let sges = [a.sge(0, 4)];
    post(&pair.qa, &SendWr { wr_id: 2, ..pair.wr(SendOp::Write, &sges, 500) }).unwrap();
    wait_for("an RNR NAK", || {
        a.cq.poll(&mut []).unwrap();
        assert_eq!(a.cq.poll(&mut [Default::default()]).unwrap(), 0);
        pair.count("rcvd_rnr") > 0
    });
    assert_eq!(b.bytes(500, 4), [0; 4], "the WRITE stands behind the SEND");
    b.post_recv(&pair.qb, 9, 100, 64).unwrap();
    assert_eq!(b.completions(1)[0].wr_id, 9);
    assert_eq!(a.completions(2).iter().map(|cqe| cqe.wr_id).collect::<Vec<_>>(), [1, 2]);
    assert_eq!((b.bytes(100, 4), b.bytes(500, 4)), (b"late".to_vec(), b"late".to_vec()));
}

#[test]
fn a_peer_that_wants_packets_gets_them() {
    let of = local();
    let (a, b) = (Node::new(&of), Node::new(&Settings { link: LinkMode::Udp, ..of.clone() }));
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    a.fill(0, b"by packet");
    b.post_recv(&qb, 1, 0, 64).unwrap();
    post(&qa, &send(1, &[a.sge(0, 9)])).unwrap();
    assert_eq!((b.completions(1)[0].byte_len, b.bytes(0, 9)), (9, b"by packet".to_vec()));
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    assert!(counters(of.port, "local_qps").iter().all(|count| *count == 0));
}

#[test]
fn who_comes_late_is_waited_for() {
    let of = local();
    let (a, b) = (Node::new(&of), Node::new(&of));
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    to_init(&qa);
    to_rtr(&qa, way_to(&b), qb.number());
    to_rts(&qa);
    to_init(&qb);
    b.post_recv(&qb, 1, 0, 64).unwrap();
    to_rtr(&qb, way_to(&a), qa.number());
    post(&qa, &send(1, &[a.sge(0, 9)])).unwrap();
    assert_eq!(b.completions(1)[0].byte_len, 9);
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    let event = b.ctx.get_async_event().unwrap();
    let established = starverbs_verbs::kind::COMM_EST;
    assert!(matches!(event, VerbsEvent::Qp { kind, .. } if kind == established), "{event:?}");
}

#[test]
fn a_shared_receive_queue_serves_and_counts() {
    let of = local();
    let (a, b) = (Node::new(&of), Node::new(&of));
    let srq = Srq::create(&b.pd, 16, 1, 2, 5).unwrap();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp_with_srq(&srq));
    connect(&a, &qa, &b, &qb);
    for id in 0..3 {
        srq.post(&RecvWr { wr_id: id, sges: &[b.sge(100 * id as usize, 100)] }).unwrap();
    }
    for round in 0..2 {
        post(&qa, &send(round, &[a.sge(0, 8)])).unwrap();
        assert_eq!(b.completions(1)[0].wr_id, round);
        assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    }
    let event = b.ctx.get_async_event().unwrap();
    assert!(matches!(event, VerbsEvent::Srq { cookie: 5, .. }), "{event:?}: one is left, fewer than two");
    to_err(&qb);
    let event = b.ctx.get_async_event().unwrap();
    assert!(matches!(event, VerbsEvent::Qp { .. }), "{event:?}: the last WQE was reached");
}

/// Operations of many queue pairs in turn, with a plain model beside them.
#[test]
fn memory_is_what_a_model_says() {
    const QPS: usize = 8;
    const CELL: usize = 4096;
    let of = local();
    let (a, b) = (Node::new(&of), Node::new(&of));
    let pairs: Vec<(Qp, Qp)> = (0..QPS).map(|_| (a.qp(QpType::Rc), b.qp(QpType::Rc))).collect();
    pairs.iter().for_each(|(qa, qb)| connect(&a, qa, &b, qb));
    let rng = RefCell::new(SplitMix64::new(1));
    let draw = |below: usize| rng.borrow_mut().below(below as u64) as usize;
    let mut model = vec![0u8; QPS * CELL];
    for round in 0..400 {
        for (at, (qa, _)) in pairs.iter().enumerate() {
            let (from, len) = (draw(CELL), draw(CELL));
            let len = len.min(CELL - from);
            let data: Vec<u8> = (0..len).map(|_| draw(256) as u8).collect();
            a.fill(at * CELL, &data);
            let (put, got) = ([a.sge(at * CELL, len)], [a.sge((QPS + at % 4) * CELL, len)]);
            let to = at * CELL + from;
            let wr = |op, sges| SendWr {
                op,
                flags: SendFlags::empty(),
                remote_addr: b.addr(to),
                rkey: b.mr.rkey(),
                ..send(1, sges)
            };
            post(qa, &wr(SendOp::Write, &put)).unwrap();
            let read = SendWr { flags: SendFlags::SIGNALED, ..wr(SendOp::Read, &got) };
            post(qa, &read).unwrap();
            assert_eq!(a.completions(1)[0].status, WcStatus::Success);
            model[to..to + len].copy_from_slice(&data);
            assert!(a.bytes((QPS + at % 4) * CELL, len) == data, "READ behind WRITE, round {round}");
        }
    }
    assert!(b.bytes(0, QPS * CELL) == model);
    assert_eq!(counters(of.port, "local_qps"), [QPS as u64, QPS as u64]);
}

/// A process has one channel for all of its blocks of numbers.
#[test]
fn queue_pairs_of_many_blocks_share_a_channel() {
    const BLOCK: usize = 1 << QPN_BLOCK_SHIFT;
    const BLOCKS: usize = 6;
    let settings = local();
    let (a, b) = (Node::new(&settings), Node::new(&settings));
    let all: Vec<Qp> = (0..BLOCKS * BLOCK).map(|_| b.qp(QpType::Rc)).collect();
    let peers: Vec<&Qp> = all.iter().step_by(BLOCK).collect();
    let ours: Vec<Qp> = peers.iter().map(|_| a.qp(QpType::Rc)).collect();
    for (qa, qb) in ours.iter().zip(&peers) {
        connect(&a, qa, &b, qb);
    }
    let count = || counters(settings.port, "local_qps").iter().sum::<u64>();
    wait_for("the agreements", || count() == 2 * BLOCKS as u64);
    for (qa, qb) in ours.iter().zip(&peers) {
        b.post_recv(qb, 7, 0, 64).unwrap();
        post(qa, &send(1, &[a.sge(0, 8)])).unwrap();
        assert_eq!((a.completions(1)[0].status, b.completions(1)[0].wr_id), (WcStatus::Success, 7));
    }
}

/// A peer that answers a message has executed it: our request completes before its message is received.
#[test]
fn a_request_completes_before_the_peer_s_message_is_received() {
    /* no thread: nothing is taken but in these polls */
    let polled = Settings { progress_thread: false, ..local() };
    let rings = Settings { link_trust: LinkTrust::None, ..polled.clone() };
    for settings in [rings, polled] {
        let pair = Pair::polled(&settings, QpType::Rc);
        let (a, b) = (&pair.a, &pair.b);
        let word = (8 - b.addr(0) as usize % 8) % 8;
        for op in [SendOp::Send, SendOp::Write, SendOp::Read, SendOp::FetchAdd] {
            for answer in [8, 1000, 40_000] {
                a.post_recv(&pair.qa, 2, 0, BUF).unwrap();
                b.post_recv(&pair.qb, 3, 0, BUF).unwrap();
                let sges = [a.sge(0, 8)];
                let executed = || pair.count("local_executed") + pair.count("local_direct");
                let before = executed();
                post(&pair.qa, &pair.wr(op, &sges, word)).unwrap();
                if op.takes_recv() {
                    assert_eq!(b.completions(1)[0].wr_id, 3);
                } else {
                    wait_for("the request", || {
                        assert_eq!(b.cq.poll(&mut [Default::default()]).unwrap(), 0);
                        executed() > before
                    });
                }
                post(&pair.qb, &send(4, &[b.sge(0, answer)])).unwrap();
                let done: Vec<_> = a.completions(2).iter().map(|cqe| cqe.wr_id).collect();
                assert_eq!(done, [1, 2], "{op:?}, answered with {answer} bytes");
                assert_eq!(b.completions(1)[0].wr_id, 4);
                if !op.takes_recv() {
                    post(&pair.qa, &send(1, &sges)).unwrap();
                    assert_eq!(b.completions(1)[0].wr_id, 3);
                    assert_eq!(a.completions(1)[0].wr_id, 1);
                }
            }
        }
    }
}

/// A thread that serves requests in a row does not sleep between all of them. On a busy host it may.
#[test]
fn a_thread_stays_for_what_comes_soon() {
    const COUNT: u64 = 200;
    let pair = Pair::new(&local());
    let (a, b) = (&pair.a, &pair.b);
    let word = (8 - b.addr(0) as usize % 8) % 8;
    let sges = [a.sge(0, 8)];
    let add = SendWr { compare_add: 1, ..pair.wr(SendOp::FetchAdd, &sges, word) };
    let mut before = 0;
    wait_for("fewer turns than requests", || {
        let turns = pair.count("thread_runs");
        for _ in 0..COUNT {
            post(&pair.qa, &add).unwrap();
            assert_eq!(a.completions(1)[0].status, WcStatus::Success);
            assert_eq!(a.word(0), before);
            before += 1;
        }
        assert_eq!(pair.count("local_executed"), before, "all were the target's work");
        pair.count("thread_runs") - turns < COUNT
    });
}
