//! Completion queues and shared receive queues while they change: moderated events, new sizes under traffic,
//! overruns.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::*;
use starverbs_core::{QpState, QpType, SendOp, WcStatus};
use starverbs_verbs::{
    Cq, CqInit, Moderation, Qp, QpInit, RecvWr, SendWr, Srq, VerbsError, VerbsEvent, kind,
};

fn post(qp: &Qp, wr: &SendWr<'_>) {
    let mut poster = qp.post_send();
    poster.push(wr).unwrap();
    poster.ring();
}

fn readable(fd: RawFd) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd.
    unsafe { libc::poll(&mut poll, 1, 0) == 1 }
}

/// Two connected QPs, and a WRITE from the first to the second that takes `wr_id`.
fn writing(a: &Node, b: &Node, send_cq: &Cq) -> (Qp, Qp) {
    let qa = Qp::create(&a.pd, &QpInit { send_cq, recv_cq: send_cq, ..a.init(QpType::Rc, None) }).unwrap();
    let qb = b.qp(QpType::Rc);
    connect(a, &qa, b, &qb);
    (qa, qb)
}

fn write(qp: &Qp, a: &Node, b: &Node, wr_id: u64) {
    let sges = [a.sge(0, 64)];
    post(qp, &SendWr { op: SendOp::Write, remote_addr: b.addr(0), rkey: b.mr.rkey(), ..send(wr_id, &sges) });
}

#[test]
fn an_event_waits_for_as_many_completions_as_asked() {
    let (a, b) = Node::pair();
    let (qa, _qb) = writing(&a, &b, &a.cq);
    a.cq.moderate(Moderation { count: 4, period: 0 }).unwrap();
    for round in 0..3 {
        a.cq.req_notify(false).unwrap();
        for wr_id in 0..3 {
            write(&qa, &a, &b, wr_id);
            a.completions(1);
            assert!(!readable(a.channel.fd()), "round {round}, completion {wr_id}");
        }
        write(&qa, &a, &b, 3);
        a.completions(1);
        /* a board tells of a completion when that can be seen already */
        wait_for("the event", || readable(a.channel.fd()));
        assert_eq!(a.channel.get_event().unwrap(), 77);
        assert!(!readable(a.channel.fd()), "one event");
    }
}

#[test]
fn an_event_waits_no_longer_than_its_period() {
    let (a, b) = Node::pair();
    let (qa, _qb) = writing(&a, &b, &a.cq);
    for moderation in [Moderation { count: 100, period: 3000 }, Moderation { count: 0, period: 3000 }] {
        a.cq.moderate(moderation).unwrap();
        a.cq.req_notify(false).unwrap();
        write(&qa, &a, &b, 1);
        wait_for("the event", || readable(a.channel.fd()));
        assert_eq!(a.channel.get_event().unwrap(), 77);
        a.completions(1);
    }
}

/// Many that wait at once, for longer and shorter: each raises one event. One that ends meanwhile makes room
/// for another.
#[test]
fn many_queues_wait_each_for_its_own_time() {
    let (a, b) = Node::pair();
    let new = |cookie| Cq::create(&a.ctx, 16, Some(&a.channel), cookie).unwrap();
    for round in 0..2 {
        let cqs: Vec<Cq> = (0..20).map(new).collect();
        let qps: Vec<_> = cqs.iter().map(|cq| writing(&a, &b, cq)).collect();
        for (at, (cq, (qa, _))) in cqs.iter().zip(&qps).enumerate() {
            let period = 2000 + (at as u16 * 7 + round) % 20 * 1000;
            cq.moderate(Moderation { count: 100, period }).unwrap();
            cq.req_notify(false).unwrap();
            write(qa, &a, &b, 1);
        }
        let mut cookies: Vec<u64> = Vec::new();
        while cookies.len() < cqs.len() {
            wait_for("the events", || readable(a.channel.fd()));
            cookies.push(a.channel.get_event().unwrap());
        }
        cookies.sort_unstable();
        assert!(cookies.into_iter().eq(0..20), "each once");
    }
}

#[test]
fn less_moderation_tells_at_once() {
    let (a, b) = Node::pair();
    let (qa, _qb) = writing(&a, &b, &a.cq);
    a.cq.moderate(Moderation { count: 100, period: u16::MAX }).unwrap();
    a.cq.req_notify(false).unwrap();
    write(&qa, &a, &b, 1);
    a.completions(1);
    a.cq.moderate(Moderation::default()).unwrap();
    assert!(readable(a.channel.fd()));
    a.channel.get_event().unwrap();
    a.cq.req_notify(false).unwrap();
    write(&qa, &a, &b, 2);
    a.completions(1);
    assert!(readable(a.channel.fd()), "every completion");
}

/// A queue that ends while it holds an event back leaves nothing behind.
#[test]
fn a_queue_ends_with_an_event_held_back() {
    let (a, b) = Node::pair();
    let cq = Cq::create(&a.ctx, 16, Some(&a.channel), 5).unwrap();
    let (qa, _qb) = writing(&a, &b, &cq);
    cq.moderate(Moderation { count: 9, period: 1 }).unwrap();
    cq.req_notify(false).unwrap();
    write(&qa, &a, &b, 1);
    poll(&cq, 1);
    qa.destroy().unwrap();
    cq.destroy().unwrap();
    assert!(!readable(a.channel.fd()));
}

#[test]
fn a_queue_is_resized_under_traffic() {
    const WRITES: u64 = 2000;
    let (a, b) = Node::pair();
    let (qa, _qb) = writing(&a, &b, &a.cq);
    let done = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            for size in [16, 4096, 64, 1000, 17].into_iter().cycle() {
                if done.load(Ordering::Relaxed) {
                    break;
                }
                a.cq.resize(size).unwrap();
                assert!(a.cq.depth() >= size);
                std::thread::yield_now();
            }
        });
        let (mut posted, mut polled) = (0, 0);
        while polled < WRITES {
            while posted < WRITES && posted - polled < 8 {
                write(&qa, &a, &b, posted);
                posted += 1;
            }
            for cqe in a.completions(1) {
                assert_eq!((cqe.wr_id, cqe.status), (polled, WcStatus::Success));
                polled += 1;
            }
        }
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_shared_receive_queue_is_resized_under_traffic() {
    const MESSAGES: u64 = 2000;
    let (a, b) = Node::pair();
    let srq = Srq::create(&b.pd, 16, 1, 0, 1).unwrap();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp_with_srq(&srq));
    connect(&a, &qa, &b, &qb);
    let done = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            for size in [1, 64, 16, 256, 32].into_iter().cycle() {
                if done.load(Ordering::Relaxed) {
                    break;
                }
                match srq.modify(Some(size), None) {
                    Ok(()) => assert_eq!(srq.query().unwrap().max_wr, size),
                    Err(error) => {
                        assert!(matches!(error, VerbsError::Invalid(_)), "more are posted: {error}")
                    }
                }
                std::thread::yield_now();
            }
        });
        let (mut room, mut posted, mut sent, mut got, mut acked) = (true, 0, 0, 0, 0);
        while got < MESSAGES || acked < MESSAGES {
            while room && posted < MESSAGES {
                room = srq.post(&RecvWr { wr_id: posted, sges: &[b.sge(0, 64)] }).is_ok();
                posted += u64::from(room);
            }
            while sent < MESSAGES && sent < posted && sent - acked < 8 {
                post(&qa, &send(sent, &[a.sge(0, 8)]));
                sent += 1;
            }
            let mut out = [starverbs_core::Cqe::default(); 8];
            acked += a.cq.poll(&mut out).unwrap() as u64;
            let received = b.cq.poll(&mut out).unwrap();
            for cqe in &out[..received] {
                assert_eq!((cqe.wr_id, cqe.status), (got, WcStatus::Success), "each once, in order");
                got += 1;
            }
            room = true;
        }
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn sizes_and_limits_that_cannot_be() {
    let (_a, b) = Node::pair();
    let srq = Srq::create(&b.pd, 8, 1, 0, 1).unwrap();
    let post = |wr_id| srq.post(&RecvWr { wr_id, sges: &[b.sge(0, 8)] });
    for wr_id in 0..8 {
        post(wr_id).unwrap();
    }
    let refused = |max_wr, limit| matches!(srq.modify(max_wr, limit), Err(VerbsError::Invalid(_)));
    assert!(refused(Some(0), None) && refused(Some(u32::MAX), None) && refused(Some(4), None));
    assert!(refused(None, Some(9)) && refused(Some(16), Some(17)));
    assert_eq!(srq.query().unwrap().max_wr, 8, "nothing has changed");
    srq.modify(Some(16), Some(12)).unwrap();
    assert_eq!((srq.query().unwrap().max_wr, srq.query().unwrap().limit), (16, 12));
    assert!(refused(Some(8), None), "below the limit");
    for wr_id in 8..16 {
        post(wr_id).unwrap();
    }
    assert!(post(16).is_err());
}

/// What a list has posted before one that fails is posted.
#[test]
fn a_shared_receive_queue_takes_a_list_up_to_what_fails() {
    let (a, b) = Node::pair();
    let srq = Srq::create(&b.pd, 2, 1, 0, 1).unwrap();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp_with_srq(&srq));
    connect(&a, &qa, &b, &qb);
    let sges = [b.sge(0, 8)];
    let wr = |wr_id| RecvWr { wr_id, sges: &sges };
    let posted = srq.post_list(|poster| (0..4).take_while(|wr_id| poster.push(&wr(*wr_id)).is_ok()).count());
    assert_eq!(posted.unwrap(), 2);
    for wr_id in 0..2 {
        post(&qa, &send(wr_id, &[a.sge(0, 8)]));
        assert_eq!(b.completions(1)[0].wr_id, wr_id);
    }
}

/// A completion that finds no room: the queue and the QP fail, and both contexts' owners get an event.
#[test]
fn an_overrun_is_reported() {
    let (a, b) = Node::pair();
    let cq = Cq::create(&a.ctx, 4, None, 5).unwrap();
    let (qa, _qb) = writing(&a, &b, &cq);
    for wr_id in 0..6 {
        write(&qa, &a, &b, wr_id);
    }
    let mut raised = Vec::new();
    while raised.len() < 2 {
        match a.ctx.get_async_event().unwrap() {
            VerbsEvent::Cq { kind, cookie } => raised.push((kind, cookie)),
            VerbsEvent::Qp { kind: kind::COMM_EST, .. } => {}
            VerbsEvent::Qp { kind, cookie } => raised.push((kind, cookie)),
            other => panic!("{other:?}"),
        }
    }
    raised.sort_unstable();
    assert_eq!(raised, [(kind::CQ_ERR, 5), (kind::QP_FATAL, 99)]);
    assert_eq!(qa.state(), QpState::Err);
    let held: Vec<u64> = poll(&cq, 4).iter().map(|cqe| cqe.wr_id).collect();
    assert_eq!(held, [0, 1, 2, 3]);
    assert!(matches!(cq.poll_with(1, |_| ()), Err(VerbsError::Overrun)));
}

#[test]
fn an_overrun_that_is_to_be_ignored_loses_completions_alone() {
    let (a, b) = Node::pair();
    let cq = Cq::create_ex(&a.ctx, &CqInit { cqe: 4, cookie: 5, ignore_overrun: true, ..CqInit::default() });
    let cq = cq.unwrap();
    let (qa, qb) = writing(&a, &b, &cq);
    b.post_recv(&qb, 9, 0, 64).unwrap();
    for wr_id in 0..6 {
        write(&qa, &a, &b, wr_id);
    }
    post(&qa, &send(6, &[a.sge(0, 8)]));
    assert_eq!(b.completions(1)[0].wr_id, 9);
    let held: Vec<u64> = poll(&cq, 4).iter().map(|cqe| cqe.wr_id).collect();
    assert_eq!(held, [0, 1, 2, 3]);
    assert_eq!(qa.state(), QpState::Rts);
}
