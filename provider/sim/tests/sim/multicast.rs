//! Multicast: datagrams reach every QP that is attached to the group, those alone, and nothing answers them.

use crate::common::{any_bytes, any_faults, for_seeds, is_clean};
use starverbs_core::qp::{QpInit, RecvSource};
use starverbs_core::wire::{HeaderBuf, PKEY_DEFAULT, code};
use starverbs_core::{
    Access, AvId, Cqe, FrameMeta, Gid, MAX_GROUP_QPS, NicConfig, NicError, Psn, QPN_MULTICAST, QpState,
    QpType, Qpn, SendOp, SendWqe, Sge, WcFlags, WcStatus,
};
use starverbs_sim::{Faults, Net, QpAt, Recv, Rng, Send, Setup, SimCq, SimRq, SimSq};

const GRH: u32 = 40;
const SIZE: u32 = 64;
const STEPS: usize = 100_000;
const GROUP: Gid = Gid::from_ipv4([224, 1, 2, 3]);
const OTHER: Gid = Gid::from_ipv4([239, 9, 9, 9]);

/// A UD QP with one buffer for all that it receives.
struct Member {
    host: usize,
    qpn: Qpn,
    sq: SimSq,
    rq: SimRq,
    cq: SimCq,
    buffer: (u64, u32),
}

impl Member {
    fn new(net: &mut Net, host: usize) -> Member {
        Member::with(net, host, false, &Setup::default())
    }

    fn with(net: &mut Net, host: usize, block_own_multicast: bool, setup: &Setup) -> Member {
        let (sq, rq, cq) = (SimSq::new(64), SimRq::new(64, 1), SimCq::new(256));
        let h = &mut net.hosts[host];
        let init = QpInit {
            qp_type: QpType::Ud,
            pd: h.pd,
            sq: sq.clone(),
            rq: RecvSource::Own(rq.clone()),
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            sq_sig_all: false,
            block_own_multicast,
            cookie: 0,
        };
        let qpn = h.nic.create_qp(init).expect("QPNs are left");
        h.to_rts_ud(qpn, setup, 0);
        let buffer = h.region(u64::from(GRH + SIZE), Access::LOCAL_WRITE);
        let member = Member { host, qpn, sq, rq, cq, buffer };
        member.post_recvs(64);
        member
    }

    fn attached(net: &mut Net, host: usize, group: Gid) -> Member {
        let member = Member::new(net, host);
        net.hosts[host].attach(member.qpn, group).expect("room in the group");
        member
    }

    fn post_recvs(&self, count: u64) {
        let sge = Sge { addr: self.buffer.0, len: GRH + SIZE, lkey: self.buffer.1 };
        for wr_id in 0..count {
            let _ = self.rq.post(Recv { wr_id, sges: vec![sge] });
        }
    }

    /// Sends `data` to a group.
    fn send(&self, net: &mut Net, group: Gid, qkey: u32, data: &[u8]) {
        let host = &mut net.hosts[self.host];
        let av: AvId = host.nic.create_av(host.pd, host.av(group)).expect("an AV");
        let (addr, lkey) = host.region(u64::from(SIZE), Access::empty());
        host.env.memory.write(addr, data);
        let op = SendOp::SendImm;
        let wqe = SendWqe { op, av, imm: 7, remote_qpn: QPN_MULTICAST, qkey, ..SendWqe::default() };
        let sges = vec![Sge { addr, len: data.len() as u32, lkey }];
        self.sq.post(Send { wqe, sges, inline: None }).expect("there is room");
        net.doorbell(self.host, self.qpn);
    }

    fn received(&self) -> Vec<Cqe> {
        std::iter::from_fn(|| self.cq.poll()).map(|(cqe, _)| cqe).collect()
    }
}

fn quiet(hosts: u8) -> Net {
    Net::new(hosts, NicConfig::default(), Faults::default(), 1)
}

const QKEY: u32 = 0x1111_1111;

#[test]
fn members_get_a_copy_each_and_others_nothing() {
    let mut net = quiet(4);
    let sender = Member::new(&mut net, 0);
    let members = [1, 1, 2].map(|host| Member::attached(&mut net, host, GROUP));
    let others = [Member::attached(&mut net, 2, OTHER), Member::new(&mut net, 3)];
    sender.send(&mut net, GROUP, QKEY, b"to all");
    assert!(net.run_until_idle(STEPS));
    for member in &members {
        let [cqe] = member.received()[..] else { panic!("one copy each") };
        assert_eq!((cqe.status, cqe.byte_len, cqe.src_qp), (WcStatus::Success, GRH + 6, sender.qpn));
        assert_eq!((cqe.flags, cqe.imm), (WcFlags::GRH | WcFlags::WITH_IMM, 7));
        let host = &net.hosts[member.host];
        let bytes = host.env.memory.read(member.buffer.0, GRH as usize + 6);
        assert_eq!((&bytes[32..36], &bytes[36..40]), (&[10, 0, 0, 1][..], &[224, 1, 2, 3][..]), "GRH");
        assert_eq!(&bytes[40..], b"to all");
    }
    assert!(others.iter().all(|other| other.received().is_empty()));
    assert_eq!(net.hosts[1].nic.counters().rx_multicast.get(), 2);
    assert_eq!(net.tally.sent, 1, "one frame for all, and no probe behind it");
}

#[test]
fn who_sends_to_its_own_group_gets_a_copy_unless_it_will_not() {
    let mut net = quiet(2);
    let setup = Setup::default();
    let [willing, unwilling] = [false, true].map(|block| Member::with(&mut net, 0, block, &setup));
    let far = Member::with(&mut net, 1, true, &setup);
    for member in [&willing, &unwilling, &far] {
        net.hosts[member.host].attach(member.qpn, GROUP).expect("room");
    }
    for (from, copies) in [(&willing, [1, 1, 1]), (&unwilling, [1, 0, 1])] {
        from.send(&mut net, GROUP, QKEY, b"echo");
        assert!(net.run_until_idle(STEPS));
        let got = [&willing, &unwilling, &far].map(|member| member.received().len());
        assert_eq!(got, copies, "sent by {:#x}", from.qpn);
    }
    /* The same number on another host is another QP. */
    let meta = FrameMeta { src: net.hosts[1].gid, dst: GROUP, ..FrameMeta::default() };
    let header =
        HeaderBuf::bth(code::UD_SEND_ONLY, QPN_MULTICAST, Psn::new(0), false, false, 0, PKEY_DEFAULT)
            .deth(QKEY, unwilling.qpn);
    let host = &mut net.hosts[0];
    host.nic.handle_frame(&mut host.env, 0, &meta, &header);
    assert_eq!(unwilling.received().len(), 1);
}

#[test]
fn who_has_left_gets_nothing_and_the_last_one_leaves_the_wire() {
    let mut net = quiet(2);
    let sender = Member::new(&mut net, 0);
    let members = [(); 2].map(|()| Member::attached(&mut net, 1, GROUP));
    net.hosts[1].attach(members[0].qpn, GROUP).expect("a second time changes nothing");
    assert_eq!(net.hosts[1].groups, [GROUP]);
    for (left, copies) in [(0, [0, 1]), (1, [0, 0])] {
        net.hosts[1].detach(members[left].qpn, GROUP).expect("it is attached");
        assert_eq!(net.hosts[1].detach(members[left].qpn, GROUP), Err(NicError::Invalid));
        sender.send(&mut net, GROUP, QKEY, b"who");
        assert!(net.run_until_idle(STEPS));
        assert_eq!([0, 1].map(|at| members[at].received().len()), copies);
    }
    assert!(net.hosts[1].groups.is_empty());
    assert_eq!(net.tally.stray, 1, "the second datagram was for nobody");
}

#[test]
fn only_datagram_queues_join_only_groups_and_no_more_than_may() {
    let mut net = Net::new(1, NicConfig { max_groups: 2, ..NicConfig::default() }, Faults::default(), 1);
    let member = Member::new(&mut net, 0);
    let cq = SimCq::new(4);
    let host = &mut net.hosts[0];
    let rc = host.qp(QpType::Rc, &SimSq::new(4), RecvSource::Own(SimRq::new(4, 1)), [&cq, &cq], true);
    assert_eq!(host.attach(rc, GROUP), Err(NicError::Invalid));
    assert_eq!(host.attach(member.qpn, host.gid), Err(NicError::Invalid));
    assert_eq!(host.attach(member.qpn + 1000, GROUP), Err(NicError::NotFound));
    assert_eq!(host.detach(member.qpn, GROUP), Err(NicError::Invalid));
    let group = |n| Gid::from_ipv4([239, 0, 0, n]);
    assert_eq!([1, 2, 3].map(|n| host.attach(member.qpn, group(n)).is_ok()), [true, true, false]);
    assert_eq!(host.attach(member.qpn, group(3)), Err(NicError::Exhausted));
    let refused = host.nic.attach_multicast(member.qpn, group(3), || Err(NicError::Unsupported));
    assert_eq!(refused, Err(NicError::Exhausted), "the host is not asked");
    host.detach(member.qpn, group(1)).expect("attached");
    let refused = host.nic.attach_multicast(member.qpn, group(3), || Err(NicError::Unsupported));
    assert_eq!(refused, Err(NicError::Unsupported), "the host's refusal");
    assert_eq!(host.detach(member.qpn, group(3)), Err(NicError::Invalid), "changes nothing");
}

#[test]
fn a_group_takes_so_many_queue_pairs_and_no_more() {
    let mut net = quiet(1);
    let mut members: Vec<Member> = (0..MAX_GROUP_QPS + 1).map(|_| Member::new(&mut net, 0)).collect();
    let last = members.pop().expect("one too many");
    let host = &mut net.hosts[0];
    members.iter().for_each(|member| host.attach(member.qpn, GROUP).expect("room"));
    assert_eq!(host.attach(last.qpn, GROUP), Err(NicError::Exhausted));
    host.attach(last.qpn, OTHER).expect("another group has room");
}

#[test]
fn an_attached_queue_pair_stays() {
    let mut net = quiet(1);
    let member = Member::attached(&mut net, 0, GROUP);
    let host = &mut net.hosts[0];
    host.attach(member.qpn, OTHER).expect("room");
    assert_eq!(host.nic.destroy_qp(&mut host.env, member.qpn), Err(NicError::Busy));
    host.to_state(member.qpn, QpState::Reset, 0).expect("any state");
    assert_eq!(host.nic.destroy_qp(&mut host.env, member.qpn), Err(NicError::Busy), "attached all the same");
    let mut left = Vec::new();
    host.nic.detach_from_all(member.qpn, |gid| left.push(gid));
    assert_eq!(left, [GROUP, OTHER]);
    assert_eq!(host.nic.destroy_qp(&mut host.env, member.qpn), Ok(()));
}

#[test]
fn queue_keys_states_and_full_queues_are_each_ones_own() {
    let mut net = quiet(2);
    let sender = Member::new(&mut net, 0);
    let [good, full, asleep] = [(); 3].map(|()| Member::attached(&mut net, 1, GROUP));
    let wrong = Member::with(&mut net, 1, false, &Setup { qkey: 0xbad, ..Setup::default() });
    let host = &mut net.hosts[1];
    host.attach(wrong.qpn, GROUP).expect("room");
    host.to_state(asleep.qpn, QpState::Reset, 0).expect("any state");
    (0..64).for_each(|_| sender.send(&mut net, GROUP, QKEY, b"once"));
    assert!(net.run_until_idle(STEPS));
    assert_eq!(full.received().len(), 64);
    good.received();
    good.post_recvs(64);
    sender.send(&mut net, GROUP, QKEY, b"more");
    assert!(net.run_until_idle(STEPS));
    let got = [&good, &full, &asleep, &wrong].map(|member| member.received().len());
    assert_eq!(got, [1, 0, 0, 0]);
    let counters = net.hosts[1].nic.counters();
    assert_eq!(
        (counters.drop_qkey.get(), counters.drop_state.get(), counters.drop_no_recv.get()),
        (65, 65, 1)
    );
}

/// Frames that a group's members must not take for theirs: whatever they are, nobody answers, no QP changes.
#[test]
fn multicast_is_never_answered() {
    let mut net = quiet(2);
    let setup = Setup::default();
    let cq = SimCq::new(16);
    let rc = [0, 1].map(|at| {
        let rq = RecvSource::Own(SimRq::new(4, 1));
        net.hosts[at].qp(QpType::Rc, &SimSq::new(4), rq, [&cq, &cq], true)
    });
    net.connect(QpType::Rc, QpAt { host: 0, qpn: rc[0] }, QpAt { host: 1, qpn: rc[1] }, &setup);
    let member = Member::attached(&mut net, 1, GROUP);
    let src = net.hosts[0].gid;
    let bth = |code, qpn| HeaderBuf::bth(code, qpn, Psn::new(0), true, false, 0, PKEY_DEFAULT);
    let frames = [
        bth(code::RC_SEND_ONLY, rc[1]),
        bth(code::RC_SEND_ONLY, QPN_MULTICAST),
        bth(code::RC_READ_REQUEST, rc[1]).reth(0, 0, 8),
        bth(code::PROBE, QPN_MULTICAST).deth(0, 9),
        bth(code::PROBE, member.qpn).deth(0, 9),
        bth(code::PROBE_ANSWER, member.qpn).deth(0, 9),
        bth(code::UD_SEND_ONLY, member.qpn).deth(QKEY, 9),
    ];
    let to_group = FrameMeta { src, dst: GROUP, ..FrameMeta::default() };
    let other = FrameMeta { src, dst: OTHER, ..FrameMeta::default() };
    let unicast = FrameMeta { src, dst: net.hosts[1].gid, ..FrameMeta::default() };
    let host = &mut net.hosts[1];
    for frame in &frames {
        host.nic.handle_frame(&mut host.env, 0, &to_group, frame);
    }
    let datagram = bth(code::UD_SEND_ONLY, QPN_MULTICAST).deth(QKEY, 9);
    host.nic.handle_frame(&mut host.env, 0, &other, &datagram);
    host.nic.handle_frame(&mut host.env, 0, &unicast, &datagram);
    assert_eq!(host.nic.counters().drop_multicast.get(), frames.len() as u64 + 2);
    assert!(net.run_until_idle(STEPS));
    assert_eq!(net.tally.sent, 0);
    assert!(member.received().is_empty() && cq.poll().is_none());
    assert_eq!(net.hosts[1].state(rc[1]), QpState::Rts);
}

/// Whatever the wire does, a copy is whole or absent, and one member's loss is not another's.
fn hostile(seed: u64) {
    let mut rng = Rng::new(seed);
    let faults = any_faults(&mut rng);
    let mut net = Net::new(3, NicConfig::default(), faults, seed);
    let members: Vec<Member> = (0..5).map(|at| Member::attached(&mut net, at % 3, GROUP)).collect();
    let mut sent = Vec::new();
    let mut got = vec![Vec::new(); members.len()];
    let receive = |net: &Net, got: &mut Vec<Vec<Vec<u8>>>| {
        for (member, got) in members.iter().zip(got) {
            for cqe in member.received() {
                assert_eq!(cqe.status, WcStatus::Success);
                let bytes = net.hosts[member.host].env.memory.read(member.buffer.0, cqe.byte_len as usize);
                got.push(bytes[GRH as usize..].to_vec());
                member.post_recvs(1);
            }
        }
    };
    for number in 0..rng.within(1, 20) as u8 {
        let mut data = any_bytes(&mut rng, SIZE);
        data[0] = number;
        members[rng.below(5) as usize].send(&mut net, GROUP, QKEY, &data);
        sent.push(data);
        while net.step() {
            receive(&net, &mut got);
        }
        receive(&net, &mut got);
    }
    for got in &got {
        assert!(got.iter().all(|data| sent.contains(data)), "whole or absent");
        assert!(!is_clean(&net.faults) || *got == sent, "a clean wire brings all, once");
    }
}

#[test]
fn copies_are_whole_or_absent() {
    for_seeds("copies_are_whole_or_absent", 300, hostile);
}
