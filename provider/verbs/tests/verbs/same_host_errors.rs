//! Connected queue pairs of one host: requests that fail or are refused, and peers in error or gone.

use std::cell::RefCell;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::*;
use starverbs_core::{Access, Cqe, QpState, QpType, SendFlags, SendOp, Sge, WcStatus};
use starverbs_settings::{LinkTrust, Settings};
use starverbs_verbs::{Qp, QpInit, SendWr};

/// What a mistake gives: the requester's statuses, the receives' and the events.
fn mistake(pair: Pair, make: &dyn Fn(&Pair)) -> (Vec<WcStatus>, Vec<WcStatus>, QpState, QpState) {
    pair.b.post_recv(&pair.qb, 1, 0, 16).unwrap();
    make(&pair);
    let sent = pair.a.completions(2).iter().map(|cqe| cqe.status).collect();
    if pair.qb.state() != QpState::Err {
        to_err(&pair.qb);
    }
    let got = pair.b.completions(1).iter().map(|cqe| cqe.status).collect();
    (sent, got, pair.qa.state(), pair.qb.state())
}

#[test]
fn mistakes_end_as_on_the_wire() {
    type Make = Box<dyn Fn(&Pair)>;
    let twice = |pair: &Pair, wr: &SendWr<'_>| {
        let mut poster = pair.qa.post_send();
        poster.push(wr).unwrap();
        poster.push(&SendWr { wr_id: 2, ..*wr }).unwrap();
        poster.ring();
    };
    let cases: Vec<(&str, Make)> = vec![
        ("a SEND that is too long", Box::new(move |p| twice(p, &send(1, &[p.a.sge(0, 17)])))),
        (
            "a wrong key",
            Box::new(move |p| {
                let sges = [p.a.sge(0, 8)];
                twice(p, &SendWr { rkey: 0x5555, ..p.wr(SendOp::Write, &sges, 0) });
            }),
        ),
        (
            "beyond the region",
            Box::new(move |p| {
                let sges = [p.a.sge(0, 8)];
                twice(p, &p.wr(SendOp::Read, &sges, BUF - 4));
            }),
        ),
        (
            "a WRITE with immediate beyond the region",
            Box::new(move |p| {
                let sges = [p.a.sge(0, 8)];
                twice(p, &p.wr(SendOp::WriteImm, &sges, BUF - 4));
            }),
        ),
        (
            "an atomic that is not aligned",
            Box::new(move |p| {
                let sges = [p.a.sge(0, 8)];
                let odd = 1 - p.b.addr(0) as usize % 2;
                twice(p, &SendWr { compare_add: 1, ..p.wr(SendOp::FetchAdd, &sges, odd) });
            }),
        ),
        (
            "an own key that is wrong",
            Box::new(move |p| {
                twice(p, &send(1, &[Sge { addr: 64, len: 8, lkey: 0x7777 }]));
            }),
        ),
        (
            "a key of too few rights",
            Box::new(move |p| {
                let mr = p.b.reg(0, 4096, Access::LOCAL_WRITE | Access::REMOTE_READ);
                let sges = [p.a.sge(0, 8)];
                twice(p, &SendWr { rkey: mr.rkey(), ..p.wr(SendOp::Write, &sges, 0) });
                wait_for("the error", || p.qa.state() == QpState::Err);
            }),
        ),
    ];
    for (what, make) in &cases {
        assert_eq!(mistake(Pair::new(&local()), make), mistake(Pair::new(&wire()), make), "{what}");
    }
}

/// What is refused is never seen as done, not even for the moment between its execution and its answer: the
/// sender looks all the while.
#[test]
fn a_long_message_without_a_receive_is_not_done() {
    let pair = Pair::new(&local());
    let (a, b) = (&pair.a, &pair.b);
    let sges = [a.sge(0, 16 << 10)];
    let mut cqes = [Cqe::default()];
    for round in 0..100 {
        post(&pair.qa, &send(round, &sges)).unwrap();
        for _ in 0..4000 {
            assert_eq!(a.cq.poll(&mut cqes).unwrap(), 0, "round {round}");
        }
        b.post_recv(&pair.qb, round, 0, BUF).unwrap();
        assert_eq!((a.completions(1)[0].status, b.completions(1)[0].wr_id), (WcStatus::Success, round));
    }
    assert!(pair.count("rcvd_rnr") > 0);
}

#[test]
fn who_never_posts_a_receive_is_given_up() {
    let pair = Pair::new(&local());
    let (c, d) = (pair.a.qp(QpType::Rc), pair.b.qp(QpType::Rc));
    for (qp, peer, number) in [(&c, &pair.b, d.number()), (&d, &pair.a, c.number())] {
        to_init(qp);
        to_rtr(qp, way_to(peer), number);
        to_rts_with(qp, 14, 7, 2);
    }
    post(&c, &send(1, &[pair.a.sge(0, 4)])).unwrap();
    assert_eq!(pair.a.completions(1)[0].status, WcStatus::RnrRetryExcErr);
    assert_eq!(pair.count("rnr_retry_exceeded"), 1);
}

/// What stands behind a message that fails is not executed, though it was posted with it.
#[test]
fn what_is_behind_a_message_that_fails_is_not_executed() {
    for settings in [local(), wire()] {
        let pair = Pair::new(&settings);
        let (c, d) = (pair.a.qp(QpType::Rc), pair.b.qp(QpType::Rc));
        for (qp, peer, number) in [(&c, &pair.b, d.number()), (&d, &pair.a, c.number())] {
            to_init(qp);
            to_rtr(qp, way_to(peer), number);
            to_rts_with(qp, 14, 7, 1);
        }
        pair.a.fill(0, b"written!");
        let sges = [pair.a.sge(0, 8)];
        let mut poster = c.post_send();
        poster.push(&send(1, &sges)).unwrap();
        for at in [100, 200] {
            poster.push(&SendWr { wr_id: 2, ..pair.wr(SendOp::Write, &sges, at) }).unwrap();
        }
        poster.ring();
        let done: Vec<_> = pair.a.completions(3).iter().map(|cqe| cqe.status).collect();
        assert_eq!(done, [WcStatus::RnrRetryExcErr, WcStatus::WrFlushErr, WcStatus::WrFlushErr]);
        for at in [100, 200] {
            assert_eq!(pair.b.bytes(at, 8), [0; 8], "a WRITE behind it");
        }
    }
}

/// A SEND with a fence has what the READ before it has brought.
#[test]
fn a_fence_waits_for_what_is_read() {
    const LEN: usize = 40_000;
    for trust in [LinkTrust::None, LinkTrust::User] {
        let pair = Pair::new(&Settings { link_trust: trust, ..local() });
        let (a, b) = (&pair.a, &pair.b);
        for round in 1..=20_u8 {
            b.fill(0, &[round; LEN]);
            b.post_recv(&pair.qb, 7, 0, LEN).unwrap();
            let sges = [a.sge(0, LEN)];
            let mut poster = pair.qa.post_send();
            poster.push(&pair.wr(SendOp::Read, &sges, 0)).unwrap();
            let flags = SendFlags::SIGNALED | SendFlags::FENCE;
            poster.push(&SendWr { flags, ..send(2, &sges) }).unwrap();
            poster.ring();
            assert_eq!(b.completions(1)[0].status, WcStatus::Success);
            assert!(a.completions(2).iter().all(|cqe| cqe.status == WcStatus::Success));
            assert!(b.bytes(0, LEN).iter().all(|byte| *byte == round), "round {round}, {trust:?}");
        }
    }
}

/// A peer in error refuses all that it is asked for, so much in a turn. What it had refused before it is
/// asked anew says nothing of requests that have the same numbers: nobody has executed one.
#[test]
fn what_was_refused_before_is_no_answer_to_what_begins_anew() {
    const MANY: usize = 128;
    let pair = Pair::polled(&Settings { progress_thread: false, ..local() }, QpType::Rc);
    let (a, b) = (&pair.a, &pair.b);
    let qp = |node: &Node| {
        let init = QpInit { max_send_wr: MANY as u32, ..node.init(QpType::Rc, None) };
        Qp::create(&node.pd, &init).unwrap()
    };
    let (qc, qd) = (qp(a), qp(b));
    connect(a, &qc, b, &qd);
    let done = RefCell::new(vec![]);
    let poll = |node: &Node| {
        let mut out = [Cqe::default(); 16];
        let got = node.cq.poll(&mut out).unwrap();
        done.borrow_mut().extend(out[..got].iter().map(|cqe| cqe.status));
    };
    wait_for("the agreement", || {
        [a, b].into_iter().for_each(poll);
        pair.count("local_qps") == 4
    });
    to_err(&qd);
    let mut poster = qc.post_send();
    (0..MANY).for_each(|n| poster.push(&send(n as u64, &[a.sge(0, 8)])).unwrap());
    poster.ring();
    wait_for("the end", || {
        /* it refuses some, is looked at, and asked anew while it refuses the rest */
        poll(b);
        (0..64).for_each(|_| poll(a));
        std::thread::sleep(Duration::from_millis(3));
        (0..64).for_each(|_| poll(a));
        done.borrow().len() == MANY
    });
    let mut wanted = vec![WcStatus::WrFlushErr; MANY];
    wanted[0] = WcStatus::RetryExcErr;
    assert_eq!(*done.borrow(), wanted);
}

/// A READ so long that its answer waits for room is of its connection alone: not of the queue pair in error,
/// nor of the next connection that it has.
#[test]
fn the_answer_to_a_read_ends_with_its_connection() {
    const LEN: usize = 4 << 20;
    let settings = Settings { progress_thread: false, link_trust: LinkTrust::None, ..local() };
    for anew in [false, true] {
        let pair = Pair::polled(&settings, QpType::Rc);
        let (a, b) = (&pair.a, &pair.b);
        let (from, to) = (memory(LEN), memory(LEN));
        let ours = reg(&a.pd, to, all_access()).unwrap();
        let theirs = reg(&b.pd, from, all_access()).unwrap();
        let sges = [Sge { addr: to.as_ptr() as u64, len: LEN as u32, lkey: ours.lkey() }];
        let target = SendWr { remote_addr: from.as_ptr() as u64, rkey: theirs.rkey(), ..send(1, &sges) };
        post(&pair.qa, &SendWr { op: SendOp::Read, ..target }).unwrap();
        let mut cqes = [Cqe::default(); 4];
        for _ in 0..64 {
            assert_eq!(b.cq.poll(&mut cqes).unwrap(), 0);
        }
        if anew {
            let qc = a.qp(QpType::Rc);
            theirs.dereg().unwrap();
            reconnect(a, &qc, b, &pair.qb);
        } else {
            to_err(&pair.qb);
            from.iter().for_each(|byte| byte.store(7, Ordering::Relaxed));
        }
        let mut done = vec![];
        wait_for("the end of the READ", || {
            for node in [b, a] {
                let got = node.cq.poll(&mut cqes).unwrap();
                done.extend(cqes[..got].iter().map(|cqe| cqe.status));
            }
            !done.is_empty()
        });
        assert_eq!(done, [WcStatus::RetryExcErr], "{anew}");
        assert!(to.iter().all(|byte| byte.load(Ordering::Relaxed) != 7), "memory of a queue pair in error");
        assert_eq!(pair.qb.state(), if anew { QpState::Rts } else { QpState::Err });
    }
}

#[test]
fn a_peer_that_goes_is_missed_after_a_while() {
    for whole in [false, true] {
        let Pair { a, b, qa, qb, .. } = Pair::new(&local());
        qb.destroy().unwrap();
        if whole {
            drop((b, qb));
        }
        post(&qa, &send(1, &[a.sge(0, 4)])).unwrap();
        assert_eq!(a.completions(1)[0].status, WcStatus::RetryExcErr, "the card, too: {whole}");
        assert_eq!(qa.state(), QpState::Err);
    }
}
