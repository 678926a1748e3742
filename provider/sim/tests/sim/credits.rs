//! End-to-end credits (IBTA 9.7.7.2): a peer that gets credits sends no more than find a receive.

use std::cell::RefCell;
use std::rc::Rc;

use starverbs_core::wire::opcode::PacketKind;
use starverbs_core::wire::packet::Packet;
use starverbs_core::{NicConfig, QpState, QpType, SendOp, WcStatus};
use starverbs_sim::{QpAt, Setup};

use crate::common::pair::Pair;

/// A pair whose host 1 gives credits, if `credits`.
fn pair_with(credits: bool) -> Pair {
    Pair::against(QpType::Rc, &Setup::default(), NicConfig { credits, ..NicConfig::default() })
}

/// Sends 12 messages to who posts one receive after another, each when the one before was used; gives how
/// many RNR NAKs it took.
fn slow_receiver(credits: bool) -> u64 {
    let mut p = pair_with(credits);
    let sge = p.sge(0, 64);
    p.post_recv(0, 64);
    p.post(p.wqe(0, SendOp::Send), &[sge]);
    p.run();
    let (mut received, mut sent) = (p.polled(1), p.polled(0));
    p.post_recv(1, 64);
    for n in 1..12 {
        p.post(p.wqe(n, SendOp::Send), &[sge]);
    }
    while received.len() < 12 {
        assert!(p.net.step(), "it goes on");
        sent.extend(p.polled(0));
        for got in p.polled(1) {
            received.push(got);
            p.post_recv(received.len() as u64, 64);
        }
    }
    p.run();
    sent.extend(p.polled(0));
    let all: Vec<_> = (0..12).map(|n| (n, WcStatus::Success)).collect();
    assert_eq!((sent, received), (all.clone(), all));
    p.net.hosts[0].nic.counters().rcvd_rnr.get()
}

/// The receive is posted when the one before is used, so that who sends one message a receive never sends in
/// vain.
#[test]
fn with_credits_a_sender_waits_instead_of_being_refused() {
    assert_eq!(slow_receiver(true), 0);
    assert!(slow_receiver(false) > 0, "without credits it tries");
}

/// Without a credit the first packet of one message goes, and what is behind it waits until that was taken.
#[test]
fn without_a_credit_one_packet_goes_alone() {
    for credits in [true, false] {
        let mut p = pair_with(credits);
        let sge = p.sge(0, 8);
        p.post_recv(0, 64);
        p.post(p.wqe(0, SendOp::Send), &[sge]);
        p.run();
        assert_eq!((p.polled(0).len(), p.polled(1).len()), (1, 1));
        let packets = Rc::new(RefCell::new(0));
        let count = Rc::clone(&packets);
        p.net.tap = Some(Box::new(move |from, bytes| {
            let send = Packet::parse(bytes).is_ok_and(|packet| packet.op().kind == PacketKind::Send);
            *count.borrow_mut() += u32::from(from == 0 && send);
        }));
        let long = p.sge(0, 4000);
        p.post(p.wqe(1, SendOp::Send), &[long]);
        p.post(p.wqe(2, SendOp::Send), &[sge]);
        while p.net.hosts[0].nic.counters().rcvd_rnr.get() == 0 {
            assert!(p.net.step(), "it goes on");
        }
        let expected = if credits { 1 } else { 5 };
        assert_eq!(*packets.borrow(), expected, "four packets and one");
        p.post_recv(1, 4000);
        p.post_recv(2, 64);
        p.run();
        let ok = WcStatus::Success;
        assert_eq!((p.polled(0), p.polled(1)), (vec![(1, ok), (2, ok)], vec![(1, ok), (2, ok)]));
    }
}

/// What takes no receive needs no credit.
#[test]
fn writes_and_reads_need_no_credit() {
    let mut p = pair_with(true);
    let sge = p.sge(0, 8);
    p.post_recv(0, 64);
    p.post(p.wqe(0, SendOp::Send), &[sge]);
    p.run();
    for (n, op) in [(1, SendOp::Write), (2, SendOp::Read), (3, SendOp::Write), (4, SendOp::FetchAdd)] {
        p.post(p.wqe(n, op), &[sge]);
    }
    p.run();
    let all: Vec<_> = (0..5).map(|n| (n, WcStatus::Success)).collect();
    assert_eq!(p.polled(0), all);
    assert_eq!(p.net.hosts[0].nic.counters().rcvd_rnr.get(), 0);
}

/// A connection begins without knowledge of the peer's receives, also after RESET.
#[test]
fn reset_forgets_credits() {
    let mut p = pair_with(true);
    let sge = p.sge(0, 8);
    p.post_recv(0, 64);
    p.post(p.wqe(0, SendOp::Send), &[sge]);
    p.run();
    let now = p.net.now();
    for at in 0..2 {
        p.net.hosts[at].to_state(p.qpn[at], QpState::Reset, now).expect("any state to RESET");
    }
    p.polled(0);
    p.polled(1);
    p.net.connect(
        QpType::Rc,
        QpAt { host: 0, qpn: p.qpn[0] },
        QpAt { host: 1, qpn: p.qpn[1] },
        &Setup::default(),
    );
    let sent = p.net.tally.sent;
    for n in 0..3 {
        p.post_recv(n, 64);
        p.post(p.wqe(n, SendOp::Send), &[sge]);
    }
    while p.net.tally.sent == sent {
        assert!(p.net.step(), "it goes on");
    }
    assert_eq!(p.net.tally.sent - sent, 3, "none waits");
    p.run();
    assert_eq!(p.polled(1).len(), 3);
}
