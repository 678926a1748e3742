//! Every kind of transfer between two cards, with the bytes and completions that must come of it.

use crate::common::*;
use starverbs_core::{Cqe, Gid, QPN_MULTICAST, QpType, SendFlags, SendOp, WcFlags, WcOpcode, WcStatus};
use starverbs_settings::Settings;
use starverbs_verbs::{Ah, AhAttr, BYTES_OF_A_TURN, Qp, QpInit, RecvWr, SendWr, Srq};

#[test]
fn rc_messages_arrive_in_order_with_their_bytes() {
    let (a, b) = Node::pair();
    rc_messages(&a, &b);
}

/// Messages of many sizes from one node to another.
pub(crate) fn rc_messages(a: &Node, b: &Node) {
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(a, &qa, b, &qb);
    for round in 0..50u64 {
        let len = [1, 64, 1024, 1025, 9000][round as usize % 5];
        let text: Vec<u8> = (0..len).map(|i| (i as u64 * 7 + round) as u8).collect();
        a.fill(0, &text);
        b.post_recv(&qb, round, 100, 10_000).unwrap();
        let half = len / 2;
        let sges = [a.sge(0, half), a.sge(half, len - half)];
        post(&qa, &send(1000 + round, &sges)).unwrap();
        let got = b.completions(1)[0];
        assert_eq!((got.wr_id, got.status, got.byte_len), (round, WcStatus::Success, len as u32));
        assert_eq!((got.opcode, got.qpn), (WcOpcode::Recv, qb.number()));
        assert_eq!(b.bytes(100, len), text);
        let sent = a.completions(1)[0];
        assert_eq!((sent.wr_id, sent.status, sent.opcode), (1000 + round, WcStatus::Success, WcOpcode::Send));
    }
}

#[test]
fn inline_data_is_taken_at_posting() {
    let (a, b) = Node::pair();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    /* nothing is posted at the receiver yet, so that the message waits for it (RNR) */
    let mut said = *b"inline message";
    post_inline(&qa, &SendWr { op: SendOp::SendImm, imm: 0x0102_0304, ..send(1, &[]) }, &said).unwrap();
    said.fill(0);
    b.post_recv(&qb, 5, 0, 64).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    let got = b.completions(1)[0];
    assert!(got.flags.contains(WcFlags::WITH_IMM));
    assert_eq!((got.imm, got.byte_len), (0x0102_0304, 14));
    assert_eq!(b.bytes(0, 14), b"inline message");
}

#[test]
fn a_target_that_never_calls_is_written_and_read() {
    let (a, b) = Node::pair();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    let text: Vec<u8> = (0..20_000).map(|i| (i * 31) as u8).collect();
    a.fill(0, &text);
    let (out, back) = ([a.sge(0, 20_000)], [a.sge(30_000, 20_000)]);
    let remote = |op, sges| SendWr { op, remote_addr: b.addr(5), rkey: b.mr.rkey(), ..send(2, sges) };
    post(&qa, &remote(SendOp::Write, &out)).unwrap();
    post(&qa, &remote(SendOp::Read, &back)).unwrap();
    let done = a.completions(2);
    assert_eq!(done[0].opcode, WcOpcode::RdmaWrite);
    assert_eq!(
        (done[1].opcode, done[1].status, done[1].byte_len),
        (WcOpcode::RdmaRead, WcStatus::Success, 20_000)
    );
    assert_eq!(b.bytes(5, 20_000), text);
    assert_eq!(a.bytes(30_000, 20_000), text);
}

#[test]
fn atomics_add_and_swap_at_the_target() {
    let (a, b) = Node::pair();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    let cell = (8 - b.addr(0) as usize % 8) % 8;
    b.fill(cell, &40u64.to_ne_bytes());
    let into = [a.sge(0, 8)];
    let base = SendWr { remote_addr: b.addr(cell), rkey: b.mr.rkey(), ..send(1, &into) };
    post(&qa, &SendWr { op: SendOp::FetchAdd, compare_add: 2, ..base }).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    assert_eq!((a.word(0), b.word(cell)), (40, 42));
    let swap = SendWr { op: SendOp::CmpSwap, compare_add: 42, swap: 7, ..base };
    post(&qa, &swap).unwrap();
    post(&qa, &swap).unwrap();
    assert!(a.completions(2).iter().all(|cqe| cqe.opcode == WcOpcode::CompSwap));
    assert_eq!((a.word(0), b.word(cell)), (7, 7), "the second finds 7 and leaves it");
}

#[test]
fn two_qps_share_a_receive_queue_and_its_limit_is_told() {
    let (a, b) = Node::pair();
    let srq = Srq::create(&b.pd, 8, 1, 0, 1234).unwrap();
    let (q1, q2) = (a.qp(QpType::Rc), a.qp(QpType::Rc));
    let (p1, p2) = (b.qp_with_srq(&srq), b.qp_with_srq(&srq));
    connect(&a, &q1, &b, &p1);
    connect(&a, &q2, &b, &p2);
    for id in 0..4 {
        srq.post(&RecvWr { wr_id: id, sges: &[b.sge(id as usize * 100, 100)] }).unwrap();
    }
    srq.modify(None, Some(3)).unwrap();
    assert_eq!(srq.query().unwrap().limit, 3);
    for qp in [&q1, &q2] {
        post(qp, &send(1, &[a.sge(0, 10)])).unwrap();
        a.completions(1);
    }
    let got = b.completions(2);
    assert_eq!(got.iter().map(|cqe| cqe.wr_id).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(got.iter().map(|cqe| cqe.qpn).collect::<Vec<_>>(), [p1.number(), p2.number()]);
    /* connections established, perhaps; then the limit */
    loop {
        if let starverbs_verbs::VerbsEvent::Srq { kind, cookie } = b.ctx.get_async_event().unwrap() {
            assert_eq!((kind, cookie), (starverbs_verbs::kind::SRQ_LIMIT_REACHED, 1234));
            break;
        }
    }
    assert_eq!(srq.query().unwrap().limit, 0);
}

#[test]
fn datagrams_bring_their_source_and_a_grh() {
    let (a, b) = Node::pair();
    let (qa, qb) = (a.qp(QpType::Ud), b.qp(QpType::Ud));
    ud_ready(&qa);
    ud_ready(&qb);
    let ah = Ah::create(&a.pd, &way_to(&b)).unwrap();
    a.fill(0, b"datagram");
    b.post_recv(&qb, 1, 0, 100).unwrap();
    b.post_recv(&qb, 2, 200, 100).unwrap();
    let sges = [a.sge(0, 8)];
    let wr = |qkey| SendWr { ah: ah.id(), remote_qpn: qb.number(), qkey, ..send(9, &sges) };
    post(&qa, &wr(QKEY + 1)).unwrap();
    post(&qa, &wr(QKEY)).unwrap();
    assert!(a.completions(2).iter().all(|cqe| cqe.status == WcStatus::Success));
    let got = b.completions(1)[0];
    assert_eq!((got.wr_id, got.byte_len, got.src_qp), (1, 48, qa.number()), "the wrong Q_Key was dropped");
    assert!(got.flags.contains(WcFlags::GRH));
    assert_eq!(b.bytes(40, 8), b"datagram");
    ah.destroy().unwrap();
}

#[test]
fn packets_of_long_messages_share_system_calls() {
    const LEN: usize = 60_000;
    let settings = wire();
    let (a, b) = (Node::new(&settings), Node::new(&settings));
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    let sges = [a.sge(0, LEN)];
    let sums = || ["tx_packets", "tx_syscalls"].map(|name| counters(settings.port, name).iter().sum::<u64>());
    let before = sums();
    for _ in 0..50 {
        let wr = SendWr { op: SendOp::Write, remote_addr: b.addr(0), rkey: b.mr.rkey(), ..send(1, &sges) };
        (0..4).for_each(|_| post(&qa, &wr).unwrap());
        a.completions(4);
    }
    let [packets, calls] = std::array::from_fn(|i| sums()[i] - before[i]);
    assert!(packets >= 200 * (LEN as u64 / 1024), "{packets} packets");
    assert!(calls * 8 <= packets, "{calls} system calls sent {packets} packets, ACKs and all");
}

/// Queue pairs between two cards that are run by their polls alone.
fn crowd(count: usize) -> (Settings, Node, Node, Vec<(Qp, Qp)>) {
    let settings = Settings { progress_thread: false, ..wire() };
    let (a, b) = (Node::new(&settings), Node::new(&settings));
    let pair = |_| {
        let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
        connect(&a, &qa, &b, &qb);
        (qa, qb)
    };
    let qps = (0..count).map(pair).collect();
    (settings, a, b, qps)
}

/// Polls both cards until `count` WRITEs of the first are done.
fn await_writes(a: &Node, b: &Node, count: usize) {
    let mut done = 0;
    wait_for("the writes", || {
        let mut out = [Cqe::default(); 32];
        b.cq.poll(&mut out).unwrap();
        let got = a.cq.poll(&mut out).unwrap();
        assert!(out[..got].iter().all(|cqe| cqe.status == WcStatus::Success), "{out:?}");
        done += got;
        done == count
    });
}

/// An 8-byte WRITE from `a` to `b`.
fn write_word(a: &Node, qp: &Qp, b: &Node) {
    let sges = [a.sge(0, 8)];
    post(qp, &SendWr { op: SendOp::Write, remote_addr: b.addr(0), rkey: b.mr.rkey(), ..send(1, &sges) })
        .unwrap();
}

#[test]
fn small_messages_of_many_queue_pairs_share_system_calls() {
    const QPS: usize = 60;
    let (settings, a, b, qps) = crowd(QPS);
    let round = || {
        qps.iter().for_each(|(qa, _)| write_word(&a, qa, &b));
        await_writes(&a, &b, QPS);
    };
    /* the kernel learns whose frames are whose */
    (0..20).for_each(|_| round());
    let sums = || ["tx_packets", "tx_syscalls"].map(|name| counters(settings.port, name)[0]);
    let before = sums();
    (0..20).for_each(|_| round());
    let [packets, calls] = std::array::from_fn(|i| sums()[i] - before[i]);
    assert!(packets >= 20 * QPS as u64, "{packets} packets");
    /* sixteen of a round leave at once: nothing is in flight yet */
    assert!(calls * 2 <= packets, "{calls} system calls sent {packets} packets");
}

#[test]
fn a_coalesced_doorbell_rings_when_the_other_queue_pairs_are_gone() {
    let (_, a, b, mut qps) = crowd(33);
    let (last, _held) = qps.pop().unwrap();
    qps.iter().for_each(|(qa, _)| write_word(&a, qa, &b));
    write_word(&a, &last, &b);
    /* no ACK and no timer of theirs has the card run any more */
    drop(qps);
    await_writes(&a, &b, 1);
}

#[test]
fn many_threads_post_and_poll_on_one_card() {
    const THREADS: usize = 4;
    const EACH: u64 = 500;
    let (a, b) = Node::pair();
    let qps: Vec<_> = (0..THREADS)
        .map(|_| {
            let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
            connect(&a, &qa, &b, &qb);
            let cq = starverbs_verbs::Cq::create(&a.ctx, 64, None, 0).unwrap();
            drop(qa);
            let init = starverbs_verbs::QpInit { send_cq: &cq, recv_cq: &cq, ..a.init(QpType::Rc, None) };
            let qa = starverbs_verbs::Qp::create(&a.pd, &init).unwrap();
            let qb = {
                drop(qb);
                b.qp(QpType::Rc)
            };
            connect(&a, &qa, &b, &qb);
            (qa, qb, cq)
        })
        .collect();
    let cell = (8 - b.addr(0) as usize % 8) % 8;
    std::thread::scope(|scope| {
        for (thread, (qa, _, cq)) in qps.iter().enumerate() {
            let (a, b) = (&a, &b);
            scope.spawn(move || {
                let into = [a.sge(thread * 8, 8)];
                for id in 0..EACH {
                    let wr = SendWr {
                        op: SendOp::FetchAdd,
                        remote_addr: b.addr(cell),
                        rkey: b.mr.rkey(),
                        compare_add: 1,
                        ..send(id, &into)
                    };
                    post(qa, &wr).unwrap();
                    let cqe = poll(cq, 1)[0];
                    assert_eq!((cqe.wr_id, cqe.status), (id, WcStatus::Success));
                }
            });
        }
    });
    assert_eq!(b.word(cell), THREADS as u64 * EACH);
}

/// More than one turn sends, and nothing that comes makes the card run again: what is left goes by itself,
/// while the program is elsewhere.
#[test]
fn what_one_turn_could_not_send_goes_without_a_call() {
    /* few enough bytes for each to be copied to the batch, and so many that a turn cannot send the half of
     * them */
    const EACH: usize = 500;
    const MANY: u32 = 2 * (BYTES_OF_A_TURN / EACH) as u32;
    let settings = settings();
    let a = Node::new(&settings);
    let init = QpInit { max_send_wr: MANY, ..a.init(QpType::Ud, None) };
    let qa = Qp::create(&a.pd, &init).unwrap();
    ud_ready(&qa);
    /* a group without members: nobody answers, and nothing is paced */
    let dgid = Gid::from_ipv4([239, 71, 9, 9]);
    let to = AhAttr { dgid, is_global: true, port: 1, ..AhAttr::default() };
    let ah = Ah::create(&a.pd, &to).unwrap();
    let sges = [a.sge(0, EACH)];
    let mut poster = qa.post_send();
    for _ in 0..MANY {
        let wr = SendWr { ah: ah.id(), remote_qpn: QPN_MULTICAST, qkey: QKEY, ..send(0, &sges) };
        poster.push(&SendWr { flags: SendFlags::empty(), ..wr }).unwrap();
    }
    poster.ring();
    let sent = || counters(settings.port, "tx_packets")[0];
    println!("{} sent at once", sent());
    wait_for("the rest", || sent() >= u64::from(MANY));
}
