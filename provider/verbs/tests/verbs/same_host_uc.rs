//! Queue pairs of UC on one host, through shared memory: what is lost is lost as on the wire, and nobody
//! waits for long.

use crate::common::*;
use starverbs_core::mr::WindowType;
use starverbs_core::qp::QpAttrMask;
use starverbs_core::{Access, Cqe, QpState, QpType, SendFlags, SendOp, Sge, WcStatus};
use starverbs_settings::Settings;
use starverbs_verbs::{Mw, MwBind, QpAttr, SendWr};

fn pair() -> Pair {
    Pair::of(&local(), QpType::Uc)
}

#[test]
fn every_operation_goes_without_a_packet() {
    let pair = pair();
    let (a, b, packets) = (&pair.a, &pair.b, pair.count("tx_packets"));
    for (round, len) in [1, 16, 17, 5000, 30_000].into_iter().enumerate() {
        let data: Vec<u8> = (0..len).map(|n| ((n * 7) >> round) as u8).collect();
        a.fill(0, &data);
        let sges = [a.sge(0, len)];
        b.post_recv(&pair.qb, 1, 0, len).unwrap();
        b.post_recv(&pair.qb, 2, 0, 0).unwrap();
        post(&pair.qa, &send(1, &sges)).unwrap();
        post(&pair.qa, &SendWr { imm: 9, ..pair.wr(SendOp::WriteImm, &sges, 30_000) }).unwrap();
        assert!(a.completions(2).iter().all(|cqe| cqe.status == WcStatus::Success));
        let got = b.completions(2);
        assert_eq!([got[0].byte_len, got[1].byte_len, got[1].imm], [len as u32, len as u32, 9]);
        assert!(b.bytes(0, len) == data && b.bytes(30_000, len) == data);
        b.fill(0, &[0; 60_000]);
        post(&pair.qa, &pair.wr(SendOp::Write, &sges, 100)).unwrap();
        assert_eq!(a.completions(1)[0].status, WcStatus::Success);
        assert!(b.bytes(100, len) == data);
    }
    assert_eq!((pair.count("tx_packets"), pair.count("drop_no_recv")), (packets, 0));
}

/// What a mistake led to.
#[derive(PartialEq, Debug)]
struct Outcome {
    sent: Vec<WcStatus>,
    received: Vec<(u64, WcStatus)>,
    states: [QpState; 2],
    lost: bool,
}

/// What a mistake leads to, with a good message behind it.
fn mistake(pair: &Pair, make: &dyn Fn(&Pair)) -> Outcome {
    let (a, b) = (&pair.a, &pair.b);
    (1..=2).for_each(|id| b.post_recv(&pair.qb, id, 0, 20_000).unwrap());
    make(pair);
    post(&pair.qa, &send(2, &[a.sge(0, 8)])).unwrap();
    let sent = a.completions(2).iter().map(|cqe| cqe.status).collect();
    let before = pair.qa.state();
    if before == QpState::Sqe {
        let rts = QpAttr { state: QpState::Rts, ..QpAttr::default() };
        pair.qa.modify(&rts, QpAttrMask::STATE).unwrap();
        post(&pair.qa, &send(3, &[a.sge(0, 8)])).unwrap();
        assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    }
    let received = b.completions(1).iter().map(|cqe| (cqe.wr_id, cqe.status)).collect();
    Outcome { sent, received, states: [before, pair.qb.state()], lost: pair.count("drop_no_recv") > 0 }
}

#[test]
fn mistakes_end_as_on_the_wire() {
    type Make = Box<dyn Fn(&Pair)>;
    let of = |op, len, at, rkey: u32| {
        Box::new(move |p: &Pair| {
            let sges = [p.a.sge(0, len)];
            post(&p.qa, &SendWr { rkey: p.b.mr.rkey() ^ rkey, ..p.wr(op, &sges, at) }).unwrap();
        })
    };
    let bad = |sges: Vec<(usize, u32)>| {
        Box::new(move |p: &Pair| {
            let sges: Vec<Sge> = sges.iter().map(|(len, wrong)| wrong_key(p, *len, *wrong)).collect();
            post(&p.qa, &send(1, &sges)).unwrap();
        })
    };
    let cases: Vec<(&str, Make)> = vec![
        ("a SEND that is too long", of(SendOp::Send, 20_001, 0, 0)),
        ("one that is much too long", of(SendOp::Send, 60_000, 0, 0)),
        ("a wrong key", of(SendOp::Write, 8, 0, 0x55)),
        ("a wrong key of a long WRITE", of(SendOp::Write, 50_000, 0, 0x55)),
        ("beyond the region", of(SendOp::Write, 8, BUF - 4, 0)),
        ("a WRITE with immediate beyond the region", of(SendOp::WriteImm, 8, BUF - 4, 0)),
        ("an own key that is wrong", bad(vec![(8, 0x77)])),
        ("an own key that is wrong behind what was sent", bad(vec![(18_000, 0), (8, 0x77)])),
    ];
    for (what, make) in &cases {
        let [local, wire] = [local(), wire()].map(|settings| mistake(&Pair::of(&settings, QpType::Uc), make));
        assert_eq!(local, wire, "{what}");
    }
}

/// A piece of the first one's buffer, under a key that is wrong if that is not 0.
fn wrong_key(pair: &Pair, len: usize, wrong: u32) -> Sge {
    let sge = pair.a.sge(0, len);
    Sge { lkey: sge.lkey ^ wrong, ..sge }
}

#[test]
fn a_receive_that_comes_soon_is_waited_for() {
    let pair = pair();
    let (a, b) = (&pair.a, &pair.b);
    let mut late = 0;
    for round in 0..20 {
        a.fill(0, &[round; 8]);
        let before = pair.count("rcvd_rnr");
        post(&pair.qa, &send(1, &[a.sge(0, 8)])).unwrap();
        wait_for("the first try", || {
            assert!(a.cq.poll(&mut []).is_ok());
            pair.count("rcvd_rnr") > before || pair.count("drop_no_recv") > 0
        });
        b.post_recv(&pair.qb, 1, 0, 8).unwrap();
        assert_eq!(a.completions(1)[0].status, WcStatus::Success);
        if pair.count("drop_no_recv") > 0 {
            /* this process was off the CPU for longer than that */
            return;
        }
        assert_eq!((b.completions(1)[0].byte_len, b.bytes(0, 8)), (8, vec![round; 8]));
        late += 1;
    }
    assert_eq!(late, 20);
}

#[test]
fn who_never_posts_a_receive_loses_messages() {
    const MESSAGES: usize = 200;
    let pair = pair();
    let (a, b) = (&pair.a, &pair.b);
    for _ in 0..MESSAGES / 4 {
        (0..4).for_each(|_| post(&pair.qa, &send(1, &[a.sge(0, 8)])).unwrap());
        assert!(a.completions(4).iter().all(|cqe| cqe.status == WcStatus::Success));
    }
    assert_eq!(pair.count("drop_no_recv"), MESSAGES as u64);
    a.fill(0, b"the last");
    b.post_recv(&pair.qb, 1, 0, 8).unwrap();
    post(&pair.qa, &send(1, &[a.sge(0, 8)])).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    assert_eq!((b.completions(1)[0].wr_id, b.bytes(0, 8)), (1, b"the last".to_vec()));
    assert_eq!((pair.qa.state(), pair.qb.state()), (QpState::Rts, QpState::Rts));
}

/// A peer that is gone is not missed by a queue pair that is set anew, and what its card does by itself is
/// done.
#[test]
fn a_queue_pair_without_a_peer_goes_on() {
    let Pair { a, b, qa, qb, .. } = pair();
    drop((b, qb));
    wait_for("the end of the other card", || {
        post(&qa, &send(1, &[a.sge(0, 8)])).unwrap();
        assert_eq!(a.completions(1)[0].status, WcStatus::Success);
        let rts = QpAttr { state: QpState::Rts, access: all_access(), ..QpAttr::default() };
        qa.modify(&rts, QpAttrMask::STATE | QpAttrMask::ACCESS_FLAGS).is_ok()
    });
    for _ in 0..20 {
        (0..8).for_each(|_| post(&qa, &send(1, &[a.sge(0, 50_000)])).unwrap());
        assert!(a.completions(8).iter().all(|cqe| cqe.status == WcStatus::Success));
    }
    let mw = Mw::alloc(&a.pd, WindowType::Two).unwrap();
    let mr = a.reg(0, 64, Access::LOCAL_WRITE | Access::MW_BIND);
    let bind = MwBind { mr: mr.lkey(), addr: a.addr(0), length: 64, access: Access::REMOTE_WRITE };
    let [first, second, third] = [1, 2, 3].map(|change| mw.rkey() ^ change);
    let invalidate = SendWr { op: SendOp::LocalInv, rkey: first, ..send(3, &[]) };
    let bound = |key| mw.bind_wr(2, SendFlags::SIGNALED, key, &bind);
    let steps = [bound(first), invalidate, bound(second), bound(third)];
    let done = steps.map(|wr| {
        post(&qa, &wr).unwrap();
        a.completions(1)[0].status
    });
    let ok = WcStatus::Success;
    assert_eq!(done, [ok, ok, ok, WcStatus::MwBindErr], "bound, not bound any more, bound, bound twice");
    assert_eq!(qa.state(), QpState::Sqe);
}

/// The other end may begin a connection of its own with a queue pair that goes on.
#[test]
fn a_peer_that_connects_anew_is_understood() {
    let pair = pair();
    let (a, b) = (&pair.a, &pair.b);
    let both = |round: u8| {
        for (from, to, sender, taker) in [(a, b, &pair.qa, &pair.qb), (b, a, &pair.qb, &pair.qa)] {
            wait_for("a message", || {
                from.fill(0, &[round; 8]);
                let _ = to.post_recv(taker, 1, 100, 64);
                post(sender, &send(2, &[from.sge(0, 8)])).unwrap();
                from.completions(1);
                to.cq.poll(&mut [Cqe::default(); 4]).unwrap() > 0 && to.bytes(100, 8) == [round; 8]
            });
        }
    };
    both(1);
    pair.qb.modify(&QpAttr { state: QpState::Reset, ..QpAttr::default() }, QpAttrMask::STATE).unwrap();
    connect_uc_end(&pair.qb, a, &pair.qa);
    both(2);
}

#[test]
fn a_peer_that_goes_is_not_missed() {
    for whole in [false, true] {
        let Pair { a, b, qa, qb, .. } = pair();
        qb.destroy().unwrap();
        if whole {
            drop((b, qb));
        }
        for _ in 0..20 {
            (0..8).for_each(|_| post(&qa, &send(1, &[a.sge(0, 4000)])).unwrap());
            assert!(a.completions(8).iter().all(|cqe| cqe.status == WcStatus::Success), "{whole}");
        }
        assert_eq!(qa.state(), QpState::Rts);
    }
}

/// A peer that does not run is waited for once; of what it was asked for then, it takes what it has receives
/// for when it comes back.
#[test]
fn a_peer_that_is_silent_is_not_waited_for() {
    let pair = Pair::polled(&Settings { progress_thread: false, ..local() }, QpType::Uc);
    let (a, b) = (&pair.a, &pair.b);
    (0..2).for_each(|id| b.post_recv(&pair.qb, id, 0, 8000).unwrap());
    let sges = [a.sge(0, 8000)];
    for _ in 0..100 {
        (0..4).for_each(|_| post(&pair.qa, &send(1, &sges)).unwrap());
        assert!(a.completions(4).iter().all(|cqe| cqe.status == WcStatus::Success));
    }
    assert!(b.completions(2).iter().all(|cqe| cqe.byte_len == 8000));
    let mut out = [Cqe::default(); 4];
    wait_for("a message of now", || {
        let _ = post(&pair.qa, &SendWr { flags: SendFlags::empty(), ..send(9, &[a.sge(0, 9)]) });
        let _ = b.post_recv(&pair.qb, 7, 0, 8000);
        a.cq.poll(&mut out).unwrap();
        let got = b.cq.poll(&mut out).unwrap();
        out[..got].iter().any(|cqe| cqe.byte_len == 9)
    });
}
