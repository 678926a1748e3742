//! Frames that the connected peer did not send, or should not have: each is dropped, and counted once in the
//! counter that docs/counters.md names for it, and the connection goes on. docs/security.md says what is
//! beyond that.

use crate::common::pair::{PAGE, Pair};
use starverbs_core::mr::MrAttr;
use starverbs_core::qp::RecvSource;
use starverbs_core::wire::headers::{CREDITS_NONE, NakCode, Syndrome};
use starverbs_core::wire::{HeaderBuf, PKEY_DEFAULT, code};
use starverbs_core::{
    Access, Counters, FrameMeta, Gid, NicConfig, Psn, QPN_BLOCK, QpState, QpType, Qpn, SendOp, WcStatus,
};
use starverbs_sim::{Faults, Net, Setup, SimCq, SimHost, SimRq, SimSq};

/// Hands host 1 a frame as from host 0; gives the counters that it changed, beside those of what came.
fn inject(p: &mut Pair, meta: Option<FrameMeta>, frame: &[u8]) -> Vec<(&'static str, u64)> {
    let meta = meta.unwrap_or_else(|| from_peer(p));
    let before = counters(&p.net.hosts[1]);
    let now = p.net.now();
    let host = &mut p.net.hosts[1];
    host.nic.handle_frame(&mut host.env, now, &meta, frame);
    let after = counters(&p.net.hosts[1]);
    let changed = Counters::NAMES.iter().zip(before.iter().zip(after)).filter(|(_, (a, b))| **a != *b);
    changed.map(|(name, (a, b))| (*name, b - a)).filter(|(name, _)| *name != "rx_packets").collect()
}

fn from_peer(p: &Pair) -> FrameMeta {
    FrameMeta { src: p.net.hosts[0].gid, dst: p.net.hosts[1].gid, ..FrameMeta::default() }
}

fn counters(host: &SimHost) -> Vec<u64> {
    host.nic.counters().values().to_vec()
}

fn bth(opcode: u8, qpn: Qpn, psn: u32) -> HeaderBuf {
    HeaderBuf::bth(opcode, qpn, Psn::new(psn), true, false, 0, PKEY_DEFAULT)
}

fn send_only(qpn: Qpn, psn: u32) -> Vec<u8> {
    [&*bth(code::RC_SEND_ONLY, qpn, psn), &[7; 8]].concat()
}

/// A SEND and a WRITE of the peer's still work.
fn still_works(p: &mut Pair) {
    p.post_recv(100, 64);
    let sge = p.sge(0, 8);
    p.post(p.wqe(1, SendOp::Send), &[sge]);
    p.post(p.wqe(2, SendOp::Write), &[sge]);
    p.run();
    assert_eq!(p.polled(0), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    assert_eq!(p.polled(1), [(100, WcStatus::Success)]);
    assert_eq!(p.states(), [QpState::Rts; 2]);
    assert_eq!(p.events(1), []);
}

#[test]
fn each_is_dropped_and_counted_by_its_name() {
    let [own, foreign] = [0, 1].map(|_| Pair::rc().qpn[1]);
    let unknown = |p: &Pair| FrameMeta { src: Gid::from_ipv4([10, 0, 9, 9]), ..from_peer(p) };
    let good = send_only(own, 0);
    let changed = |at: usize, to: u8| {
        let mut frame = good.clone();
        frame[at] = to;
        frame
    };
    let cases: [(&str, Vec<u8>); 14] = [
        ("drop_no_qp", send_only(foreign ^ 1, 0)),
        ("drop_no_qp", send_only(foreign ^ QPN_BLOCK, 0)),
        ("drop_malformed", good[..11].to_vec()),
        ("drop_malformed", good[..good.len() - 1].to_vec()),
        ("drop_malformed", bth(code::RC_WRITE_ONLY, own, 0).to_vec()),
        ("drop_malformed", [&*bth(code::RC_SEND_ONLY, own, 0), &[0; 4100]].concat()),
        ("drop_malformed", [&*bth(code::RC_ACK, own, 0), &[0; 8]].concat()),
        (
            "drop_malformed",
            [&*HeaderBuf::bth(code::RC_SEND_ONLY, own, Psn::new(0), true, false, 3, PKEY_DEFAULT)].concat(),
        ),
        ("drop_malformed", changed(1, 0x41)),
        ("drop_opcode", changed(0, 0x1f)),
        ("drop_opcode", changed(0, 0xfe)),
        ("drop_opcode", changed(0, code::UC_SEND_ONLY)),
        ("drop_pkey", changed(3, 0xfe)),
        ("drop_pkey", changed(2, 0)),
    ];
    for (name, frame) in cases {
        let mut p = Pair::rc();
        p.post_recv(9, 64);
        assert_eq!(inject(&mut p, None, &frame), [(name, 1)], "{frame:x?}");
        assert_eq!(p.polled(1), []);
        assert_eq!(p.states(), [QpState::Rts; 2]);
    }
    let mut p = Pair::rc();
    let meta = unknown(&p);
    for opcode in [code::RC_SEND_ONLY, code::RC_ACK, code::RC_WRITE_FIRST, code::CNP] {
        let frame = [&*bth(opcode, own, 0), &[0; 16]].concat();
        let frame = if opcode == code::RC_ACK { frame[..16].to_vec() } else { frame };
        assert_eq!(inject(&mut p, Some(meta), &frame), [("drop_source", 1)], "{opcode:x}");
    }
    still_works(&mut p);
}

/// The ICRC is the port's to check; here the peer's own frames from long ago, and from the future.
#[test]
fn stale_requests_and_answers_without_requests() {
    let mut p = Pair::rc();
    still_works(&mut p);
    let qpn = p.qpn[1];
    for psn in [0, 1, 0x00ff_0000, 0x0080_0002] {
        assert_eq!(inject(&mut p, None, &send_only(qpn, psn)), [("duplicate_request", 1)]);
    }
    p.run();
    let ack = Syndrome::Ack { credits: CREDITS_NONE };
    for psn in [0, 1, 5, 0x007f_ffff] {
        let frame = bth(code::RC_ACK, qpn, psn).aeth(ack, 0);
        assert_eq!(inject(&mut p, None, &frame), [("drop_stale_response", 1)], "nothing is outstanding");
        let frame = bth(code::RC_ACK, qpn, psn).aeth(Syndrome::Nak(NakCode::RemoteAccess), 0);
        assert_eq!(inject(&mut p, None, &frame), [("drop_stale_response", 1)]);
        let frame = [&*bth(code::RC_READ_RESPONSE_ONLY, qpn, psn).aeth(ack, 0), &[0; 64]].concat();
        assert_eq!(inject(&mut p, None, &frame), [("drop_stale_response", 1)]);
        let frame = bth(code::RC_ATOMIC_ACK, qpn, psn).aeth(ack, 0).atomic_ack(1);
        assert_eq!(inject(&mut p, None, &frame), [("drop_stale_response", 1)]);
    }
    let probe = bth(code::PROBE_ANSWER, qpn, 1).deth(0, 5);
    assert_eq!(inject(&mut p, None, &probe), [("drop_stale_response", 1)], "no probe is under way");
    let nobody = FrameMeta { src: Gid::from_ipv4([10, 0, 9, 9]), ..from_peer(&p) };
    assert_eq!(inject(&mut p, Some(nobody), &probe), [("drop_stale_response", 1)], "no path");
    still_works(&mut p);
}

/// Something is outstanding, but not that: an ACK for what was not sent yet, and one for what is long done.
#[test]
fn acknowledges_for_the_future_complete_nothing() {
    let mut p = Pair::rc();
    still_works(&mut p);
    p.net.faults.loss = 1.0;
    let sge = p.sge(0, 8);
    p.post(p.wqe(3, SendOp::Write), &[sge]);
    p.net.step();
    let (qpn, meta) = (p.qpn[0], FrameMeta { src: p.net.hosts[1].gid, ..FrameMeta::default() });
    let ack = Syndrome::Ack { credits: CREDITS_NONE };
    for psn in [3, 4, 1000, 0x007f_0000, 1, 0x00ff_ffff] {
        let now = p.net.now();
        let host = &mut p.net.hosts[0];
        let before = host.nic.counters().drop_stale_response.get();
        host.nic.handle_frame(&mut host.env, now, &meta, &bth(code::RC_ACK, qpn, psn).aeth(ack, 0));
        assert_eq!(host.nic.counters().drop_stale_response.get(), before + 1, "PSN {psn}");
    }
    assert_eq!(p.polled(0), []);
    p.net.faults.loss = 0.0;
    p.run();
    assert_eq!(p.polled(0), [(3, WcStatus::Success)]);
}

/// A request ahead of the expected one is answered by one NAK, however many there are.
#[test]
fn requests_ahead_are_refused_once() {
    let mut p = Pair::rc();
    let qpn = p.qpn[1];
    let first = inject(&mut p, None, &send_only(qpn, 5));
    assert_eq!(first, [("out_of_sequence", 1), ("sent_nak_seq", 1)]);
    for psn in 6..500 {
        assert_eq!(inject(&mut p, None, &send_only(qpn, psn)), [("out_of_sequence", 1)]);
    }
    let sent = p.net.tally.sent;
    p.run();
    assert_eq!(p.net.tally.sent - sent, 1);
    still_works(&mut p);
}

/// A request comes again, and there is a receive now, before the card could say that there was none: it does
/// not say so behind it, where that would name the next request.
#[test]
fn a_nak_that_did_not_leave_in_time_is_not_sent() {
    let mut p = Pair::rc();
    let frame = send_only(p.qpn[1], 0);
    assert_eq!(inject(&mut p, None, &frame), [("sent_rnr", 1)]);
    p.post_recv(9, 64);
    inject(&mut p, None, &frame);
    p.run();
    assert_eq!(p.polled(1), [(9, WcStatus::Success)]);
    let counters = p.net.hosts[0].nic.counters();
    assert_eq!((counters.rx_packets.get(), counters.rcvd_rnr.get()), (1, 0), "an ACK came");
}

/// NAKs for what is outstanding cost repetitions, of which there is a bound; the connection goes on.
#[test]
fn a_flood_of_naks_costs_no_more_than_one_at_a_time() {
    let mut p = Pair::rc();
    p.net.faults.loss = 1.0;
    let sge = p.sge(0, 8);
    for wr_id in 1..=10 {
        p.post(p.wqe(wr_id, SendOp::Write), &[sge]);
    }
    p.net.step();
    let (qpn, meta) = (p.qpn[0], FrameMeta { src: p.net.hosts[1].gid, ..FrameMeta::default() });
    let sent = p.net.hosts[0].nic.counters().retransmitted.get();
    let now = p.net.now();
    for _ in 0..10_000 {
        let host = &mut p.net.hosts[0];
        let nak = bth(code::RC_ACK, qpn, 0).aeth(Syndrome::Nak(NakCode::SequenceError), 0);
        host.nic.handle_frame(&mut host.env, now, &meta, &nak);
        host.nic.poll_transmit(&mut host.env, now, true);
    }
    let host = &p.net.hosts[0];
    assert_eq!(host.nic.counters().rcvd_nak_seq.get(), 10_000);
    let again = host.nic.counters().retransmitted.get() - sent;
    assert!(again <= 20, "{again} packets were sent again");
    p.net.faults.loss = 0.0;
    p.run();
    assert_eq!(p.polled(0), (1..=10).map(|wr_id| (wr_id, WcStatus::Success)).collect::<Vec<_>>());
}

#[test]
fn a_flood_of_congestion_notifications_is_counted() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let mut p = Pair::of(qp_type, &Setup::default());
        let cnp = bth(code::CNP, p.qpn[1], 0).reserved();
        for _ in 0..10_000 {
            assert_eq!(inject(&mut p, None, &cnp), [("rx_cnp", 1)]);
        }
        assert_eq!(p.net.tally.sent, 0);
        still_works(&mut p);
    }
}

/// A queue pair in each state that takes nothing.
#[test]
fn frames_to_queue_pairs_that_take_none() {
    for qp_type in [QpType::Rc, QpType::Uc, QpType::Ud] {
        for state in [QpState::Reset, QpState::Init, QpState::Err] {
            let mut net = Net::new(2, NicConfig::default(), Faults::default(), 1);
            let (setup, cq) = (Setup::default(), SimCq::new(4));
            let host = &mut net.hosts[1];
            let own = RecvSource::Own(SimRq::new(4, 1));
            let qpn = host.qp(qp_type, &SimSq::new(4), own, [&cq, &cq], true);
            let ud = qp_type == QpType::Ud;
            if state != QpState::Reset {
                host.to_init(qpn, ud, &setup, 0);
            }
            if state == QpState::Err {
                let peer = Gid::from_ipv4([10, 0, 0, 1]);
                if !ud {
                    host.to_rts(qpn, qp_type, peer, 5, &setup, 0);
                }
                host.to_state(qpn, QpState::Err, 0).expect("ERR is always possible");
            }
            let meta = FrameMeta { src: net.hosts[0].gid, dst: net.hosts[1].gid, ..FrameMeta::default() };
            let frame = match qp_type {
                QpType::Rc => send_only(qpn, 0),
                QpType::Uc => bth(code::UC_SEND_ONLY, qpn, 0).to_vec(),
                _ => bth(code::UD_SEND_ONLY, qpn, 0).deth(setup.qkey, 5).to_vec(),
            };
            let host = &mut net.hosts[1];
            host.nic.handle_frame(&mut host.env, 1, &meta, &frame);
            assert_eq!(host.nic.counters().drop_state.get(), 1, "{qp_type:?} {state:?}");
            if qp_type == QpType::Rc {
                let answer = bth(code::RC_ACK, qpn, 0).aeth(Syndrome::Ack { credits: CREDITS_NONE }, 0);
                host.nic.handle_frame(&mut host.env, 1, &meta, &answer);
                assert_eq!(host.nic.counters().drop_state.get(), 2, "{state:?}");
            }
            assert!(!host.nic.poll_transmit(&mut host.env, 1, true) && net.tally.sent == 0);
        }
    }
}

#[test]
fn datagrams_with_a_wrong_key_or_no_room() {
    let mut net = Net::new(2, NicConfig::default(), Faults::default(), 1);
    let (setup, cq, rq) = (Setup::default(), SimCq::new(4), SimRq::new(4, 1));
    let host = &mut net.hosts[1];
    let qpn = host.qp(QpType::Ud, &SimSq::new(4), RecvSource::Own(rq.clone()), [&cq, &cq], true);
    host.to_rts_ud(qpn, &setup, 0);
    let meta = FrameMeta { src: Gid::from_ipv4([10, 0, 0, 1]), dst: host.gid, ..FrameMeta::default() };
    let datagram = |qkey, len| [&*bth(code::UD_SEND_ONLY, qpn, 0).deth(qkey, 5), &vec![1; len][..]].concat();
    let mut give = |qkey, len| host.nic.handle_frame(&mut host.env, 0, &meta, &datagram(qkey, len));
    give(setup.qkey ^ 1, 8);
    give(setup.qkey, 8);
    /* as long as UDP allows: the length of what it would be in IPv4 does not fit there */
    give(setup.qkey, 65_480);
    let c = host.nic.counters();
    assert_eq!((c.drop_qkey.get(), c.drop_no_recv.get(), c.drop_malformed.get()), (1, 1, 1));
    assert!(cq.is_empty());
}

/// An UD datagram longer than any path MTU, with all the room that it wants.
#[test]
fn datagrams_longer_than_any_path_are_dropped() {
    let mut net = Net::new(2, NicConfig::default(), Faults::default(), 1);
    let (setup, cq, rq) = (Setup::default(), SimCq::new(4), SimRq::new(4, 1));
    let host = &mut net.hosts[1];
    let qpn = host.qp(QpType::Ud, &SimSq::new(4), RecvSource::Own(rq.clone()), [&cq, &cq], true);
    host.to_rts_ud(qpn, &setup, 0);
    let (addr, lkey) = host.region(1 << 17, Access::LOCAL_WRITE);
    let sge = starverbs_core::Sge { addr, len: 1 << 17, lkey };
    rq.post(starverbs_sim::Recv { wr_id: 1, sges: vec![sge] }).expect("there is room");
    let meta = FrameMeta { src: Gid::from_ipv4([10, 0, 0, 1]), dst: host.gid, ..FrameMeta::default() };
    let frame = [&*bth(code::UD_SEND_ONLY, qpn, 0).deth(setup.qkey, 5), &vec![1; 65_480][..]].concat();
    host.nic.handle_frame(&mut host.env, 0, &meta, &frame);
    assert!(cq.is_empty());
    assert_eq!(host.nic.counters().drop_malformed.get(), 1);
}

/// A FLUSH or ATOMIC WRITE "again" that was never allowed is not answered. (It took memory on the data path.)
#[test]
fn repeated_requests_need_the_right_too() {
    for access in [Access::LOCAL_WRITE, Access::LOCAL_WRITE | Access::REMOTE_READ] {
        let mut p = Pair::of(QpType::Rc, &Setup { access, ..Setup::default() });
        let (addr, key) = p.page[1];
        for frame in [
            bth(code::RC_FLUSH, p.qpn[1], 0x00ff_ffff).feth(1).reth(addr, key, 8).to_vec(),
            [&*bth(code::RC_ATOMIC_WRITE, p.qpn[1], 0x00ff_ffff).reth(addr, key, 8), &[1; 8]].concat(),
        ] {
            assert_eq!(inject(&mut p, None, &frame), [("duplicate_request", 1)]);
            p.run();
        }
        assert_eq!(p.net.tally.sent, 0, "nothing is answered");
        assert_eq!(p.states(), [QpState::Rts; 2]);
    }
}

/// A repeated READ so long that its last PSN is its first again.
#[test]
fn a_repeated_read_has_the_length_of_one() {
    let setup = Setup { mtu: starverbs_core::Mtu::M256, ..Setup::default() };
    let mut p = Pair::of(QpType::Rc, &setup);
    let addr = p.page[1].0;
    let host = &mut p.net.hosts[1];
    let attr = MrAttr {
        pd: host.pd,
        addr,
        length: 1 << 33,
        iova: addr,
        access: Access::REMOTE_READ,
        ..MrAttr::default()
    };
    let key = host.nic.reg_mr(attr).expect("a good registration");
    host.env.gone = addr + PAGE..addr + (1 << 33);
    let read = bth(code::RC_READ_REQUEST, p.qpn[1], 0x00ff_ffff).reth(addr, key, u32::MAX);
    assert_eq!(inject(&mut p, None, &read), [("duplicate_request", 1)]);
    p.run();
    assert_eq!(p.net.tally.sent, 0, "no byte of it is sent");
}

/// QPNs come in no order, each once, and one that was given back rests.
#[test]
fn queue_pair_numbers_do_not_follow_from_each_other() {
    let mut firsts = std::collections::BTreeSet::new();
    for seed in 0..200 {
        let mut host = SimHost::new(0, NicConfig::default(), seed);
        let cq = SimCq::new(1);
        let sq = SimSq::new(1);
        let mut make = || host.qp(QpType::Rc, &sq, RecvSource::Own(SimRq::new(1, 1)), [&cq, &cq], true);
        let numbers = [(); 64].map(|()| make());
        firsts.insert(numbers[0]);
        let follow = numbers.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count();
        assert!(follow <= 2, "{follow} of 63 follow their neighbour");
        host.nic.destroy_qp(&mut host.env, numbers[0]).expect("it exists");
        let next: Vec<Qpn> = (0..QPN_BLOCK - 64)
            .map(|_| host.qp(QpType::Rc, &sq, RecvSource::Own(SimRq::new(1, 1)), [&cq, &cq], true))
            .collect();
        assert!(!next.contains(&numbers[0]), "a number was given out again before all others were");
        if seed > 3 {
            continue;
        }
        assert_eq!(host.qp(QpType::Rc, &sq, RecvSource::Own(SimRq::new(1, 1)), [&cq, &cq], true), numbers[0]);
    }
    assert!(firsts.len() > 180, "{} first numbers of 200 cards", firsts.len());
}
