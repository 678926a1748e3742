//! Connections of which one card keeps nothing: what programs see of them is what they see of others.

use std::net::UdpSocket;

use crate::common::wire as settings;
use crate::common::*;
use starverbs_core::mr::WindowType;
use starverbs_core::qp::QpAttrMask;
use starverbs_core::wire::IcrcHeader;
use starverbs_core::{
    Access, Cqe, Gid, Psn, QpState, QpType, SendFlags, SendOp, Sge, WcFlags, WcOpcode, WcStatus,
};
use starverbs_settings::{Settings, StarPreference};
use starverbs_star::token::{SlotArea, Token};
use starverbs_star::wire::{Crc, Opt, Prefix, Ptype, StarHead, StarHeader, fill_checksum};
use starverbs_verbs::{
    Cq, MemoryRange, Mw, MwBind, Pd, Qp, QpAttr, QpInit, RecvWr, Rereg, SendWr, Settled, Srq,
};

/// Two cards, the first stateless.
fn pair() -> [Node; 2] {
    pair_on(&settings())
}

fn pair_on(wire: &Settings) -> [Node; 2] {
    let with = |star| Node::new(&Settings { star, ..wire.clone() });
    [with(StarPreference::Stateless), with(StarPreference::Stateful)]
}

/// Two connected queue pairs, the first stateless.
pub(crate) fn connected(nodes: &[Node; 2]) -> [Qp; 2] {
    let [a, b] = nodes;
    let qps = [a.qp(QpType::Rc), b.qp(QpType::Rc)];
    connect(a, &qps[0], b, &qps[1]);
    let role = |qp: &Qp| qp.star().unwrap().role;
    wait_for("an agreement", || {
        nodes.iter().for_each(|node| assert_eq!(node.cq.poll(&mut [Cqe::default()]).unwrap(), 0));
        qps.iter().all(|qp| role(qp) != Settled::Waiting)
    });
    assert_eq!(qps.each_ref().map(role), [Settled::Stateless, Settled::Stateful]);
    qps
}

#[test]
fn messages_go_both_ways() {
    let nodes = pair();
    let qps = connected(&nodes);
    messages(&nodes, &qps);
    let info = qps[0].star().unwrap();
    assert!(info.card_bytes == 0 && info.host_bytes > 0, "{info:?}");
}

/// Messages from each end to the other.
pub(crate) fn messages(nodes: &[Node; 2], qps: &[Qp; 2]) {
    for round in 0..20u8 {
        for from in 0..2 {
            let to = 1 - from;
            let data: Vec<u8> = (0..6000).map(|n| (n as u8).wrapping_add(round)).collect();
            nodes[from].fill(0, &data);
            nodes[to].post_recv(&qps[to], 1, 8192, 8000).unwrap();
            post(&qps[from], &send(2, &[nodes[from].sge(0, 6000)])).unwrap();
            let got = nodes[to].completions(1)[0];
            assert_eq!((got.wr_id, got.status, got.byte_len), (1, WcStatus::Success, 6000));
            assert_eq!(nodes[to].bytes(8192, 6000), data);
            let sent = nodes[from].completions(1)[0];
            assert_eq!((sent.wr_id, sent.status), (2, WcStatus::Success));
        }
    }
}

/// What a card owes for a message leaves with what the program answers: a message each way is a call of each
/// end, and five packets: data and its answer, and the answer's WQE, completion and acknowledge.
#[test]
fn an_answer_takes_what_is_owed_along() {
    const ROUNDS: u64 = 100;
    let wire = Settings { progress_thread: false, ..settings() };
    let nodes = pair_on(&wire);
    let qps = connected(&nodes);
    let receive = |at: usize| nodes[at].post_recv(&qps[at], 1, 0, 64).unwrap();
    /* the sender is polled only where nothing has come: it may have left its doorbell for that */
    let receives = |at: usize| {
        wait_for("a message", || {
            let next = |at: usize| {
                let mut cqe = [Cqe::default()];
                (nodes[at].cq.poll(&mut cqe).unwrap() == 1).then_some(cqe[0].opcode)
            };
            (0..4).any(|_| next(at) == Some(WcOpcode::Recv)) || next(1 - at) == Some(WcOpcode::Recv)
        });
    };
    let round = || {
        for from in [1, 0] {
            post_inline(&qps[from], &send(2, &[]), &[7; 64]).unwrap();
            receives(1 - from);
            receive(1 - from);
        }
    };
    (0..2).for_each(receive);
    (0..20).for_each(|_| round());
    let sums = || ["tx_packets", "tx_syscalls"].map(|name| counters(wire.port, name).iter().sum::<u64>());
    let before = sums();
    (0..ROUNDS).for_each(|_| round());
    let [packets, calls] = std::array::from_fn(|i| sums()[i] - before[i]);
    /* a loaded host may repeat some */
    assert!(packets <= ROUNDS * 11 / 2, "{packets} packets");
    assert!(calls <= ROUNDS * 9 / 4, "{calls} system calls sent {packets} packets");
}

/// SF's program answers a message: the completion of that message comes first, its answer waits for the data
/// behind it, and leaves though none comes.
#[test]
fn an_answer_to_a_completion_waits_for_data() {
    let wire = Settings { progress_thread: false, ..settings() };
    let nodes = pair_on(&wire);
    let qps = connected(&nodes);
    nodes[1].post_recv(&qps[1], 1, 0, 64).unwrap();
    post_inline(&qps[0], &send(2, &[]), &[7; 64]).unwrap();
    let poll = |at: usize| nodes[at].cq.poll(&mut [Cqe::default()]).unwrap();
    wait_for("the message", || poll(1) == 1 || poll(0) > 0);
    /* behind this SF has sent its completion */
    (0..8).for_each(|_| assert_eq!(poll(1), 0));
    wait_for("the completion", || poll(0) == 1);
    let sent = || counters(wire.port, "tx_packets")[0];
    let before = sent();
    assert_eq!((poll(0), sent() - before), (0, 0), "it did not wait");
    wait_for("the answer", || poll(0) == 0 && sent() - before == 1);
}

/// A receive that takes the last place leaves behind the answer that makes room for it: SF would drop it, and
/// get it again only when SL's time has come.
#[test]
fn receives_do_not_outrun_the_answers_before_them() {
    let wire = Settings { progress_thread: false, ..settings() };
    let nodes = pair_on(&wire);
    let qps = connected(&nodes);
    let [a, b] = &nodes;
    let receive = || a.post_recv(&qps[0], 1, 0, 64);
    /* as many as the queue takes; then each that is done makes room for another */
    while receive().is_ok() {}
    let message = || post_inline(&qps[1], &send(2, &[]), &[7; 64]).unwrap();
    (0..8).for_each(|_| message());
    let (mut came, mut done) = (0, 0);
    wait_for("the messages", || {
        let mut cqes = [Cqe::default(); 4];
        let got = a.cq.poll(&mut cqes).unwrap();
        (0..got).for_each(|_| receive().unwrap());
        came += got;
        let sent = b.cq.poll(&mut cqes).unwrap();
        (0..sent.min(2000 - done)).for_each(|_| message());
        done += sent;
        came >= 2000
    });
    let again = counters(wire.port, "star_wqep_again")[0];
    assert!(again <= 100, "{again} WQEs were sent again for {came} messages");
}

#[test]
fn reads_writes_and_atomics_of_either_end() {
    let nodes = pair();
    let qps = connected(&nodes);
    one_sided(&nodes, &qps);
}

/// One-sided operations from each end on the other.
pub(crate) fn one_sided(nodes: &[Node; 2], qps: &[Qp; 2]) {
    for from in 0..2 {
        let to = 1 - from;
        nodes[from].fill(0, &[from as u8 + 5; 9000]);
        nodes[to].fill(16384, &7u64.to_ne_bytes());
        let (here, there) = (&nodes[from], &nodes[to]);
        let rkey = there.mr.rkey();
        let sges = [here.sge(0, 9000)];
        let write = SendWr { op: SendOp::Write, remote_addr: there.addr(20_000), rkey, ..send(1, &sges) };
        post(&qps[from], &write).unwrap();
        let sges = [here.sge(30_000, 9000)];
        let read = SendWr { op: SendOp::Read, remote_addr: there.addr(20_000), rkey, ..send(2, &sges) };
        post(&qps[from], &read).unwrap();
        let sges = [here.sge(40_000, 8)];
        let add = SendWr {
            op: SendOp::FetchAdd,
            remote_addr: there.addr(16384),
            rkey,
            compare_add: 5,
            ..send(3, &sges)
        };
        post(&qps[from], &add).unwrap();
        let done: Vec<_> = here.completions(3).iter().map(|cqe| (cqe.wr_id, cqe.status)).collect();
        assert_eq!(done, [1, 2, 3].map(|id| (id, WcStatus::Success)));
        assert_eq!(here.bytes(30_000, 9000), vec![from as u8 + 5; 9000]);
        assert_eq!((here.word(40_000), there.word(16384)), (7, 12));
    }
}

/// Slots of sends without completions come free, and what is behind them goes on.
#[test]
fn sends_without_completions_do_not_stall() {
    let nodes = pair();
    let qps = connected(&nodes);
    let [a, b] = &nodes;
    let slots = qps[0].caps().max_send_wr;
    for round in 0..3 {
        for n in 0..slots {
            b.post_recv(&qps[1], 0, 0, 64).unwrap();
            let last = n + 1 == slots;
            let flags = if last { SendFlags::SIGNALED } else { SendFlags::empty() };
            post(&qps[0], &SendWr { flags, ..send(u64::from(n), &[a.sge(0, 64)]) }).unwrap();
        }
        assert_eq!(b.completions(slots as usize).len(), slots as usize, "{round}");
        assert_eq!(a.completions(1)[0].wr_id, u64::from(slots - 1));
    }
    /* most of them come free by themselves */
    for _ in 0..slots {
        b.post_recv(&qps[1], 0, 0, 64).unwrap();
        post(&qps[0], &SendWr { flags: SendFlags::empty(), ..send(0, &[a.sge(0, 64)]) }).unwrap();
    }
    b.completions(slots as usize);
    wait_for("room", || {
        b.post_recv(&qps[1], 0, 0, 64).unwrap();
        a.cq.poll(&mut [Cqe::default()]).unwrap();
        post(&qps[0], &SendWr { flags: SendFlags::empty(), ..send(0, &[a.sge(0, 64)]) }).is_ok()
    });
}

#[test]
fn memory_that_is_given_back_is_reached_no_more() {
    let nodes = pair();
    given_back(&nodes);
    let counters = nodes[0].ctx.counters().unwrap();
    assert_eq!(counters.star_refused.get(), 0, "it is SF's card that refuses");
}

/// The stateless end gives memory back, and the stateful one reaches it no more.
pub(crate) fn given_back(nodes: &[Node; 2]) {
    let qps = connected(nodes);
    nodes[1].fill(0, &[9; 64]);
    let [a, b] = nodes;
    let late = a.reg(4096, 4096, all_access());
    let write = |qp: &Qp, id| {
        let sges = [b.sge(0, 64)];
        let (op, remote_addr, rkey) = (SendOp::Write, a.addr(4096), late.rkey());
        post(qp, &SendWr { op, remote_addr, rkey, ..send(id, &sges) }).unwrap();
    };
    write(&qps[1], 1);
    assert_eq!(b.completions(1)[0].status, WcStatus::Success, "SF was notified");
    assert_eq!(a.bytes(4096, 64), [9; 64]);
    let other = connected(nodes);
    late.dereg().unwrap();
    write(&other[1], 2);
    assert_eq!(b.completions(1)[0].status, WcStatus::RemAccessErr);
    drop(qps);
}

/// Its keys stay: the stateful end goes by what the region is from when the call returns.
#[test]
fn a_region_that_is_changed_is_known_as_it_is() {
    let nodes = pair();
    let qps = connected(&nodes);
    nodes[1].fill(0, &[9; 64]);
    let [a, b] = &nodes;
    let late = a.reg(4096, 64, all_access());
    let write = |id, at| {
        let sges = [b.sge(0, 64)];
        let (op, remote_addr, rkey) = (SendOp::Write, a.addr(at), late.rkey());
        post(&qps[1], &SendWr { op, remote_addr, rkey, ..send(id, &sges) }).unwrap();
        b.completions(1)[0].status
    };
    for turn in 0..20 {
        let at = 4096 + 64 * turn;
        let change = Rereg { range: Some(MemoryRange { addr: a.addr(at), length: 64 }), ..Rereg::default() };
        // SAFETY: the range lies in the node's buffer.
        unsafe { late.rereg(&change) }.unwrap();
        assert_eq!(write(turn as u64, at), WcStatus::Success, "change {turn}");
        assert_eq!(a.bytes(at, 64), [9; 64]);
    }
    assert_eq!(write(99, 4096), WcStatus::RemAccessErr, "where it was");
    assert_eq!(a.ctx.counters().unwrap().star_refused.get(), 0, "it is SF's card that refuses");
}

/// A stateful end that nobody runs any more holds nobody up who gives memory back.
#[test]
fn memory_is_given_back_though_nobody_answers() {
    let wire = settings();
    let a = Node::new(&Settings { star: StarPreference::Stateless, ..wire.clone() });
    let b = Node::new(&Settings { star: StarPreference::Stateful, progress_thread: false, ..wire });
    let qps = [a.qp(QpType::Rc), b.qp(QpType::Rc)];
    connect(&a, &qps[0], &b, &qps[1]);
    b.post_recv(&qps[1], 1, 0, 64).unwrap();
    post(&qps[0], &send(2, &[a.sge(0, 64)])).unwrap();
    assert_eq!(b.completions(1)[0].status, WcStatus::Success);
    wait_for("the end of the send", || {
        b.cq.poll(&mut [Cqe::default()]).unwrap();
        a.cq.poll(&mut [Cqe::default()]).unwrap() == 1
    });
    assert_eq!(qps[0].star().unwrap().role, Settled::Stateless);
    a.mr.dereg().unwrap();
    assert_eq!(a.mr.dereg().unwrap_err().errno(), libc::EINVAL);
}

/// The other end of a connection is reset before it has a message of it: the connections beside it go on.
#[test]
fn one_that_nobody_answers_holds_no_other_up() {
    let wire = settings();
    let a = Node::new(&Settings { star: StarPreference::Stateless, ..wire.clone() });
    let b = Node::new(&Settings { star: StarPreference::Stateful, progress_thread: false, ..wire });
    let [dead, live] = [(), ()].map(|()| [a.qp(QpType::Rc), b.qp(QpType::Rc)]);
    let turn = || b.cq.poll(&mut [Cqe::default()]).unwrap();
    connect(&a, &dead[0], &b, &dead[1]);
    wait_for("an agreement", || {
        /* b is not run again once that is known */
        dead[0].star().unwrap().role == Settled::Stateless || turn() > 0
    });
    dead[1].modify(&QpAttr { state: QpState::Reset, ..QpAttr::default() }, QpAttrMask::STATE).unwrap();
    connect(&a, &live[0], &b, &live[1]);
    b.post_recv(&live[1], 1, 0, 64).unwrap();
    post(&live[0], &send(2, &[a.sge(0, 64)])).unwrap();
    assert_eq!(b.completions(1)[0].status, WcStatus::Success);
    wait_for("the end of the send", || {
        turn();
        a.cq.poll(&mut [Cqe::default()]).unwrap() == 1
    });
    assert_eq!(live[0].star().unwrap().role, Settled::Stateless);
}

#[test]
fn a_window_of_a_stateless_end_is_bound_used_and_invalidated() {
    let nodes = pair();
    let qps = connected(&nodes);
    nodes[1].fill(0, &[7; 64]);
    let [a, b] = &nodes;
    let mr = a.reg(0, 4096, Access::LOCAL_WRITE | Access::MW_BIND);
    let mw = Mw::alloc(&a.pd, WindowType::Two).unwrap();
    let bind = MwBind { mr: mr.lkey(), addr: a.addr(64), length: 64, access: Access::REMOTE_WRITE };
    let bound = |rkey| {
        post(&qps[0], &mw.bind_wr(1, SendFlags::SIGNALED, rkey, &bind)).unwrap();
        let done = a.completions(1)[0];
        assert_eq!((done.wr_id, done.status, done.opcode), (1, WcStatus::Success, WcOpcode::BindMw));
    };
    let rkey = mw.rkey() ^ 1;
    bound(rkey);
    assert_eq!(mr.dereg().unwrap_err().errno(), libc::EBUSY);
    let sges = [b.sge(0, 64)];
    let write = |rkey| SendWr { op: SendOp::Write, remote_addr: a.addr(64), rkey, ..send(2, &sges) };
    post(&qps[1], &write(rkey)).unwrap();
    assert_eq!(b.completions(1)[0].status, WcStatus::Success);
    assert_eq!(a.bytes(64, 64), [7; 64]);

    a.post_recv(&qps[0], 3, 1024, 64).unwrap();
    post(&qps[1], &SendWr { op: SendOp::SendInv, imm: rkey, ..send(4, &sges) }).unwrap();
    let done = a.completions(1)[0];
    assert_eq!((done.wr_id, done.opcode, done.flags, done.imm), (3, WcOpcode::Recv, WcFlags::WITH_INV, rkey));
    assert_eq!(b.completions(1)[0].status, WcStatus::Success);
    bound(rkey ^ 3);
    let inv = SendWr { op: SendOp::LocalInv, rkey: rkey ^ 3, sges: &[], ..send(5, &[]) };
    post(&qps[0], &inv).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    post(&qps[1], &write(rkey ^ 3)).unwrap();
    assert_eq!(b.completions(1)[0].status, WcStatus::RemAccessErr);
    mr.dereg().unwrap();
    mw.dealloc().unwrap();
}

#[test]
fn a_stateless_end_is_reset_and_connected_anew() {
    let nodes = pair();
    let qps = connected(&nodes);
    let [a, b] = &nodes;
    let attr = qps[0].query().unwrap();
    assert_eq!((attr.state, attr.dest_qpn), (QpState::Rts, qps[1].number()));
    let to = |state| QpAttr { state, ..QpAttr::default() };
    let refused = qps[0].modify(&to(QpState::Sqd), QpAttrMask::STATE);
    assert_eq!(refused.unwrap_err().errno(), libc::EINVAL);
    for qp in &qps {
        qp.modify(&to(QpState::Reset), QpAttrMask::STATE).unwrap();
        assert_eq!(qp.state(), QpState::Reset);
    }
    connect(a, &qps[0], b, &qps[1]);
    b.post_recv(&qps[1], 1, 0, 64).unwrap();
    post(&qps[0], &send(2, &[a.sge(0, 64)])).unwrap();
    assert_eq!((b.completions(1)[0].wr_id, a.completions(1)[0].wr_id), (1, 2));
    wait_for("the role", || qps[0].star().unwrap().role == Settled::Stateless);
}

/// ERR flushes what is posted, in order, and what is posted later.
#[test]
fn a_stateless_end_in_error_flushes() {
    let nodes = pair();
    let qps = connected(&nodes);
    let [a, _] = &nodes;
    for id in 0..4 {
        a.post_recv(&qps[0], id, 0, 64).unwrap();
    }
    /* nobody has a receive for it */
    post(&qps[0], &send(10, &[a.sge(0, 64)])).unwrap();
    to_err(&qps[0]);
    assert_eq!(qps[0].state(), QpState::Err);
    let mut ids: Vec<_> = a.completions(5).iter().map(|cqe| (cqe.status, cqe.wr_id)).collect();
    ids.sort_by_key(|(_, id)| *id);
    assert_eq!(ids, [0, 1, 2, 3, 10].map(|id| (WcStatus::WrFlushErr, id)));
    a.post_recv(&qps[0], 20, 0, 64).unwrap();
    post(&qps[0], &send(21, &[a.sge(0, 64)])).unwrap();
    let late: Vec<_> = a.completions(2).iter().map(|cqe| cqe.status).collect();
    assert_eq!(late, [WcStatus::WrFlushErr; 2]);
}

#[test]
fn what_a_stateless_end_uses_is_busy_until_it_ends() {
    let nodes = pair();
    let [a, b] = &nodes;
    let pd = Pd::alloc(&a.ctx).unwrap();
    let cq = Cq::create(&a.ctx, 16, None, 0).unwrap();
    let srq = Srq::create(&pd, 16, 1, 0, 0).unwrap();
    let init = QpInit { send_cq: &cq, recv_cq: &cq, srq: Some(&srq), ..a.init(QpType::Rc, None) };
    let qp = Qp::create(&pd, &init).unwrap();
    let peer = b.qp(QpType::Rc);
    connect(a, &qp, b, &peer);
    wait_for("the role", || qp.star().unwrap().role == Settled::Stateless);
    let busy = |result: starverbs_verbs::Result<()>| result.unwrap_err().errno() == libc::EBUSY;
    assert!(busy(pd.dealloc()) && busy(cq.destroy()) && busy(srq.destroy()));
    qp.destroy().unwrap();
    assert!(qp.query().is_err() && qp.destroy().is_err());
    srq.destroy().unwrap();
    cq.destroy().unwrap();
    pd.dealloc().unwrap();
}

/// Receives of an SRQ are taken as SF wants them, also when they are posted late; and few of them are told
/// of.
#[test]
fn a_stateless_end_takes_from_a_shared_receive_queue() {
    let nodes = pair();
    let [a, b] = &nodes;
    let srq = Srq::create(&a.pd, 64, 1, 0, 99).unwrap();
    let qps: Vec<[Qp; 2]> = (0..3).map(|_| [a.qp_with_srq(&srq), b.qp(QpType::Rc)]).collect();
    for [qp, peer] in &qps {
        connect(a, qp, b, peer);
    }
    for round in 0..10u64 {
        for (n, [_, peer]) in qps.iter().enumerate() {
            post(peer, &send(n as u64, &[b.sge(0, 64)])).unwrap();
        }
        for n in 0..3 {
            srq.post(&RecvWr { wr_id: round * 3 + n, sges: &[a.sge(0, 64)] }).unwrap();
        }
        assert!(a.completions(3).iter().all(|cqe| cqe.status == WcStatus::Success));
        assert!(b.completions(3).iter().all(|cqe| cqe.status == WcStatus::Success));
    }
}

/// What is lost comes again, in both directions.
#[test]
fn loss_changes_nothing() {
    let wire = settings();
    let fault = starverbs_settings::FaultSpec { loss: 0.05, ..Default::default() };
    let with = |star| Node::new(&Settings { star, fault: fault.clone(), ..wire.clone() });
    let nodes = [with(StarPreference::Stateless), with(StarPreference::Stateful)];
    let qps = connected(&nodes);
    for round in 0..100u8 {
        for from in 0..2 {
            let to = 1 - from;
            nodes[from].fill(0, &[round; 9000]);
            nodes[to].post_recv(&qps[to], 1, 16_384, 9000).unwrap();
            post(&qps[from], &send(2, &[nodes[from].sge(0, 9000)])).unwrap();
            assert_eq!(nodes[to].completions(1)[0].status, WcStatus::Success);
            assert_eq!(nodes[to].bytes(16_384, 9000), [round; 9000]);
            assert_eq!(nodes[from].completions(1)[0].status, WcStatus::Success);
        }
    }
}

/// Packets and bytes are counted at both ends, by their kinds, and a request that no rule allows at the end
/// that refuses it.
#[test]
fn both_ends_count_what_they_send_and_get() {
    let nodes = pair();
    let qps = connected(&nodes);
    let [a, b] = &nodes;
    a.post_recv(&qps[0], 1, 0, 9000).unwrap();
    b.post_recv(&qps[1], 1, 0, 9000).unwrap();
    for (node, qp) in nodes.iter().zip(&qps) {
        /* in two pieces: the data of one follows its WQE, and is not asked for */
        post(qp, &send(2, &[node.sge(16_384, 4000), node.sge(20_384, 5000)])).unwrap();
    }
    for node in &nodes {
        assert!(node.completions(2).iter().all(|cqe| cqe.status == WcStatus::Success));
    }
    let [sl, sf] = [a, b].map(|node| node.ctx.counters().unwrap());
    for c in [sl, sf] {
        assert!(c.rx_bytes.get() >= 9000 && c.tx_bytes.get() >= 9000 && c.rx_packets.get() > 0);
    }
    for (got, sent) in [(&sl.star_rd, &sf.star_sent_rd), (&sl.star_gd, &sf.star_sent_gd)] {
        assert!(got.get() > 0 && got.get() <= sent.get());
    }
    assert!(sf.star_sent_cqep.get() >= 2 && sf.star_rcvd_wqep.get() >= 2);
    assert_eq!(
        [&sl.star_sent_rd, &sl.star_sent_gd, &sl.star_sent_cqep, &sl.star_rcvd_wqep].map(|c| c.get()),
        [0; 4]
    );
    let sges = [b.sge(0, 8)];
    let guessed =
        SendWr { op: SendOp::Write, remote_addr: a.addr(0), rkey: a.mr.rkey() ^ 0x55, ..send(3, &sges) };
    post(&qps[1], &guessed).unwrap();
    assert_eq!(b.completions(1)[0].status, WcStatus::RemAccessErr);
    assert_eq!((sf.star_rejects.get(), sl.star_rejects.get(), sl.star_refused.get()), (1, 0, 0));
}

/// What many connections cost: nothing on the card of the stateless end, so much in its host; and memory that
/// is registered then has its rule sent once.
#[test]
fn many_connections_cost_the_stateless_card_nothing() {
    const CONNECTIONS: usize = 2_500;
    let nodes = pair();
    let [a, b] = &nodes;
    let of = |node: &Node| {
        let caps = QpInit { max_send_wr: 16, max_recv_wr: 16, ..node.init(QpType::Rc, None) };
        Qp::create(&node.pd, &caps).unwrap()
    };
    let qps: Vec<[Qp; 2]> = (0..CONNECTIONS).map(|_| [of(a), of(b)]).collect();
    for [qp, peer] in &qps {
        connect(a, qp, b, peer);
    }
    let role = |qp: &Qp| qp.star().unwrap().role;
    wait_for("roles", || qps.iter().all(|[qp, _]| role(qp) == Settled::Stateless));
    let talk = |lkey| {
        for (n, [qp, peer]) in qps.iter().enumerate() {
            b.post_recv(peer, n as u64, 0, 64).unwrap();
            post(qp, &send(n as u64, &[Sge { addr: a.addr(4096), len: 32, lkey }])).unwrap();
            if n % 100 == 99 {
                assert!(b.completions(100).iter().all(|cqe| cqe.status == WcStatus::Success));
                assert!(a.completions(100).iter().all(|cqe| cqe.status == WcStatus::Success));
            }
        }
    };
    /* what the stateless card has sent beside WQEs and answers, more or less what it counts just now */
    let said = || {
        let c = a.ctx.counters().unwrap();
        let answers = [&c.star_rd, &c.star_gd, &c.star_cqep, &c.star_stale];
        let wqes = c.star_wqep.get() + c.star_wqep_again.get();
        c.tx_packets.get() - wqes - answers.map(|c| c.get()).iter().sum::<u64>()
    };
    talk(a.mr.lkey());
    let before = said();
    assert!(before >= 2 * CONNECTIONS as u64, "each has a set-up: {before}");
    let rules = || b.ctx.counters().unwrap().star_rules.get();
    let rules_before = rules();
    let late = a.reg(4096, 4096, all_access());
    talk(late.lkey());
    let more = said().saturating_sub(before);
    assert!(more < CONNECTIONS as u64 / 2, "{more} messages for one region");
    assert_eq!(rules() - rules_before, 1);
    let info: Vec<_> = qps.iter().map(|[qp, _]| qp.star().unwrap()).collect();
    assert!(info.iter().all(|info| info.card_bytes == 0));
    let bytes = info[0].host_bytes;
    /* the terms of docs/counters.md; the QPs take four READs and atomics */
    let caps = qps[0][0].caps();
    let [send, recv] = [caps.max_send_wr, caps.max_recv_wr].map(|wqes| u64::from(wqes).next_power_of_two());
    let grows = 32 * send + (48 + 16 * u64::from(caps.max_recv_sge)) * recv + 16 * 4;
    let fixed = bytes - grows - 8 * (send.div_ceil(64) + recv.div_ceil(64));
    assert!((600..900).contains(&fixed), "{bytes} bytes, of them {fixed} that no queue explains");
    let counted = || {
        let c = a.ctx.counters().unwrap();
        let kept = [&c.star_stateless_qps, &c.star_host_bytes, &c.star_stateless_connection_bytes];
        kept.map(|gauge| gauge.get())
    };
    assert_eq!(counted(), [CONNECTIONS as u64, bytes * CONNECTIONS as u64, 0]);
    late.dereg().unwrap();
    drop(qps);
    assert_eq!(counted(), [0; 3]);
}

/// UDP ports of this process's sockets.
fn udp_ports() -> Vec<u16> {
    let files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let links = files.filter_map(|file| std::fs::read_link(file.path()).ok());
    let sockets: Vec<String> = links
        .filter_map(|to| Some(to.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    let table = std::fs::read_to_string("/proc/self/net/udp").unwrap();
    let port_of = |line: &str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let ours = sockets.iter().any(|socket| fields.get(9) == Some(&socket.as_str()));
        ours.then(|| u16::from_str_radix(fields[1].rsplit(':').next()?, 16).ok()).flatten()
    };
    table.lines().filter_map(port_of).collect()
}

/// A packet that writes to a program's memory, to the stateless half at `port` from a socket.
fn write_to(socket: &UdpSocket, port: u16, prefix: Prefix, addr: u64) -> std::io::Result<usize> {
    let data = [0xee; 64];
    let header = StarHeader {
        ptype: Ptype::Rd,
        opt: Opt::Write,
        migrate: false,
        ack: true,
        qpn: 0x77,
        epoch: 0,
        psn: Psn::new(0),
        addr,
        len: data.len() as u16,
    };
    let of = |at: std::net::SocketAddr| match at.ip() {
        std::net::IpAddr::V4(ip) => Gid::from_ipv4(ip.octets()),
        std::net::IpAddr::V6(_) => panic!("no IPv6 here"),
    };
    let own = socket.local_addr()?;
    let dst = Gid::from_ipv4([127, 0, 0, 1]);
    let path = IcrcHeader { src: of(own), dst, sport: own.port(), dport: port, ip_id: 0 };
    let slots = SlotArea::new(addr & !31, 64).expect("an area");
    let token = Token { slots, mac: 0x0123_4567_89ab_cdef };
    let mut frame = [StarHead::to_stateless(header, prefix, &token).bytes(), &data].concat();
    fill_checksum(&path, &mut frame);
    let mut crc = Crc::new();
    crc.update(&frame);
    frame.extend(crc.finish());
    socket.send_to(&frame, ("127.0.0.1", port))
}

/// Whoever is not the peer of a connection that there is neither writes to the stateless card's memory nor
/// gets anything from it.
#[test]
fn untrusted_peers_reach_nothing_through_a_stateless_card() {
    let others = udp_ports();
    let nodes = pair();
    let qps = connected(&nodes);
    let [a, b] = &nodes;
    let ports: Vec<u16> = udp_ports().into_iter().filter(|port| !others.contains(port)).collect();
    let untrusted = ["127.0.0.1:0", "127.0.0.2:0"].map(|at| UdpSocket::bind(at).unwrap());
    untrusted.iter().for_each(|socket| socket.set_nonblocking(true).unwrap());
    let drops = || a.ctx.counters().unwrap().star_drops.get();
    let before = a.bytes(0, 64);
    for (from, qpn) in [(0, qps[0].number()), (1, qps[0].number()), (0, qps[0].number() ^ 1)] {
        let known = drops();
        for port in &ports {
            let prefix = Prefix { qpn, epoch: 0x1234_5678 };
            write_to(&untrusted[from], *port, prefix, a.addr(0)).unwrap();
        }
        wait_for("an untrusted peer's packet", || drops() > known);
    }
    b.post_recv(&qps[1], 1, 0, 64).unwrap();
    post(&qps[0], &send(2, &[a.sge(0, 64)])).unwrap();
    assert_eq!([a, b].map(|node| node.completions(1)[0].status), [WcStatus::Success; 2]);
    assert_eq!(a.bytes(0, 64), before);
    let heard = untrusted.map(|socket| socket.recv(&mut [0; 2048]).map_err(|error| error.kind()));
    assert_eq!(heard, [Err(std::io::ErrorKind::WouldBlock); 2]);
}
