//! XRC on a wire: messages go to the SRQ that they name, whichever QP brings them (IBTA annex A14).

use crate::common::{all_rights, any_bytes, any_faults, any_size, for_seeds};
use starverbs_core::wire::headers::Feth;
use starverbs_core::{
    AsyncEvent, FlushLevel, Mtu, NicConfig, NicError, PdId, Placement, QpState, QpType, Qpn, SendOp, SendWqe,
    Sge, SrqId, WcFlags, WcOpcode, WcStatus,
};
use starverbs_sim::{Faults, Net, QpAt, Recv, Rng, Send, Setup, SimCq, SimHost, SimRq, SimSq};

const ROOM: u32 = 200_000;

/// An SRQ of the receiving host, in a protection domain of its own.
struct Shared {
    id: SrqId,
    rq: SimRq,
    cq: SimCq,
    pd: PdId,
    /// Where its receives go, by wr_id
    buffers: Vec<Sge>,
}

/// Host 0 sends over two connections, host 1 has one domain and two SRQs.
struct Xrc {
    net: Net,
    domain: PdId,
    sq: [SimSq; 2],
    cq: SimCq,
    sends: [Qpn; 2],
    recvs: [Qpn; 2],
    srqs: [Shared; 2],
}

/// A buffer of host `host` in protection domain `pd`.
fn region(host: &mut SimHost, pd: PdId, len: u32) -> Sge {
    host.region_in(pd, len, all_rights())
}

impl Xrc {
    fn new(faults: Faults, seed: u64, setup: &Setup) -> Self {
        let mut net = Net::new(2, NicConfig::default(), faults, seed);
        let cq = SimCq::new(256);
        let domain = net.hosts[1].nic.alloc_pd().expect("a PD");
        let sq = [(); 2].map(|()| SimSq::new(64));
        let (mut sends, mut recvs) = ([0; 2], [0; 2]);
        for i in 0..2 {
            sends[i] = net.hosts[0].xrc_initiator(&sq[i], &cq);
            recvs[i] = net.hosts[1].xrc_target(domain);
            net.connect(
                QpType::XrcSend,
                QpAt { host: 0, qpn: sends[i] },
                QpAt { host: 1, qpn: recvs[i] },
                setup,
            );
        }
        let host = &mut net.hosts[1];
        let srqs = [1, 3].map(|pieces| {
            let (rq, cq) = (SimRq::new(256, pieces), SimCq::new(256));
            let pd = host.nic.alloc_pd().expect("a PD");
            let id = host.nic.create_xrc_srq(pd, domain, rq.clone(), cq.clone(), 0).expect("an SRQ");
            Shared { id, rq, cq, pd, buffers: vec![] }
        });
        Xrc { net, domain, sq, cq, sends, recvs, srqs }
    }

    fn post(&mut self, qp: usize, wqe: SendWqe, sges: &[Sge]) {
        self.sq[qp].post(Send { wqe, sges: sges.to_vec(), inline: None }).expect("there is room");
        self.net.doorbell(0, self.sends[qp]);
    }

    fn post_recv(&mut self, srq: usize) {
        let srq = &mut self.srqs[srq];
        let sge = region(&mut self.net.hosts[1], srq.pd, ROOM);
        srq.rq.post(Recv { wr_id: srq.buffers.len() as u64, sges: vec![sge] }).expect("there is room");
        srq.buffers.push(sge);
    }
}

/// SENDs to either SRQ over either connection, WRITEs, READs and FLUSHes of memory of either's domain between
/// them.
fn traffic(seed: u64) {
    let mut rng = Rng::new(seed);
    let faults = any_faults(&mut rng);
    let mut x = Xrc::new(faults, seed, &Setup { timeout: 20, ..Setup::default() });
    let mut sent: Vec<(usize, usize, u32, Vec<u8>)> = Vec::new();
    let mut checks = Vec::new();
    let mut want = [0, 0];
    for n in 0..24u32 {
        let (qp, to) = (rng.below(2) as usize, rng.below(2) as usize);
        let len = any_size(&mut rng, 1024);
        let data = any_bytes(&mut rng, len);
        let pd = x.net.hosts[0].pd;
        let from = region(&mut x.net.hosts[0], pd, len.max(8));
        let from = Sge { len, ..from };
        let wqe = SendWqe { wr_id: u64::from(n), remote_qpn: x.srqs[to].id.0, imm: n, ..SendWqe::default() };
        if rng.chance(0.5) {
            x.net.hosts[0].env.memory.write(from.addr, &data);
            let op = if rng.chance(0.5) { SendOp::SendImm } else { SendOp::Send };
            x.post_recv(to);
            x.post(qp, SendWqe { op, ..wqe }, &[from]);
            sent.push((qp, to, if op == SendOp::SendImm { n } else { u32::MAX }, data));
        } else {
            let op = rng.pick(&[SendOp::Write, SendOp::Read, SendOp::AtomicWrite, SendOp::Flush]);
            let len = match op {
                SendOp::AtomicWrite => 8,
                SendOp::Flush => 0,
                _ => len,
            };
            let (from, data) = (Sge { len, ..from }, any_bytes(&mut rng, len));
            let there = region(&mut x.net.hosts[1], x.srqs[to].pd, len);
            let write = op != SendOp::Read;
            let at = usize::from(!write);
            let wqe = SendWqe { imm: Feth::word(Placement::GLOBAL, FlushLevel::Mr), ..wqe };
            let source = if write { from } else { there };
            x.net.hosts[at].env.memory.write(source.addr, &data);
            let wqe = SendWqe { op, remote_addr: there.addr, rkey: there.lkey, ..wqe };
            x.post(qp, wqe, &[from]);
            checks.push((1 - at, if write { there } else { from }, data));
        }
        want[qp] += 1;
        for _ in 0..rng.below(20) {
            x.net.step();
        }
    }
    assert!(x.net.run_until_idle(300_000), "it ends");
    let mut done = [0, 0];
    while let Some((cqe, _)) = x.cq.poll() {
        assert_eq!(cqe.status, WcStatus::Success, "{cqe:?}");
        done[usize::from(cqe.qpn == x.sends[1])] += 1;
    }
    assert_eq!(done, want);
    for (at, sge, data) in checks {
        assert_eq!(x.net.hosts[at].env.memory.read(sge.addr, data.len()), data);
    }
    for (to, srq) in x.srqs.iter().enumerate() {
        while let Some((cqe, _)) = srq.cq.poll() {
            assert_eq!((cqe.status, cqe.opcode), (WcStatus::Success, WcOpcode::Recv));
            let qp = usize::from(cqe.qpn == x.recvs[1]);
            let first = sent.iter().position(|(q, t, ..)| (*q, *t) == (qp, to)).expect("it was sent");
            let (_, _, imm, data) = sent.remove(first);
            assert_eq!(cqe.flags.contains(WcFlags::WITH_IMM), imm != u32::MAX);
            assert!(imm == u32::MAX || imm == cqe.imm);
            let place = srq.buffers[cqe.wr_id as usize];
            assert_eq!(cqe.byte_len as usize, data.len());
            assert_eq!(x.net.hosts[1].env.memory.read(place.addr, data.len()), data);
        }
    }
    assert!(sent.is_empty(), "all messages arrived");
    for host in &x.net.hosts {
        assert_eq!(host.env.events, []);
        assert!(host.env.memory.gaps_intact());
    }
}

#[test]
fn messages_reach_the_queue_that_they_name() {
    for_seeds("messages_reach_the_queue_that_they_name", 600, traffic);
}

/// An SRQ that is not there, not XRC's, or of another domain is an invalid request.
#[test]
fn queues_that_may_not_be_named() {
    for case in 0..3 {
        let mut x = Xrc::new(Faults::default(), 1, &Setup::default());
        let host = &mut x.net.hosts[1];
        let (pd, rq, cq) = (host.pd, SimRq::new(4, 1), SimCq::new(4));
        let number = match case {
            0 => 0xff_ffff,
            1 => host.nic.create_srq(pd, rq, 0, 0).expect("an SRQ").0,
            _ => {
                let other = host.nic.alloc_pd().expect("a PD");
                host.nic.create_xrc_srq(pd, other, rq, cq, 0).expect("an SRQ").0
            }
        };
        x.post(0, SendWqe { remote_qpn: number, ..SendWqe::default() }, &[]);
        assert!(x.net.run_until_idle(100_000), "it ends");
        assert_eq!(x.cq.poll().map(|(c, _)| c.status), Some(WcStatus::RemInvReqErr));
        assert_eq!(x.net.hosts[1].state(x.recvs[0]), QpState::Err);
        assert_eq!(x.net.hosts[1].env.events, [AsyncEvent::QpReqErr(x.recvs[0])]);
    }
}

/// A key opens memory only to requests that name an SRQ of its protection domain.
#[test]
fn keys_belong_to_the_queue_that_is_named() {
    let mut x = Xrc::new(Faults::default(), 1, &Setup::default());
    let there = region(&mut x.net.hosts[1], x.srqs[0].pd, 64);
    let pd = x.net.hosts[0].pd;
    let from = region(&mut x.net.hosts[0], pd, 64);
    let wqe = SendWqe { op: SendOp::Write, remote_addr: there.addr, rkey: there.lkey, ..SendWqe::default() };
    for (srq, status) in [(0, WcStatus::Success), (1, WcStatus::RemAccessErr)] {
        x.post(0, SendWqe { remote_qpn: x.srqs[srq].id.0, ..wqe }, &[from]);
        assert!(x.net.run_until_idle(100_000), "it ends");
        assert_eq!(x.cq.poll().map(|(c, _)| c.status), Some(status));
    }
}

/// A domain stays while a QP or an SRQ is in it; a message that was begun is flushed into its SRQ's CQ.
#[test]
fn ends() {
    let mut x = Xrc::new(Faults::default(), 1, &Setup { mtu: Mtu::M256, ..Setup::default() });
    x.post_recv(0);
    let pd = x.net.hosts[0].pd;
    let from = region(&mut x.net.hosts[0], pd, ROOM);
    x.post(0, SendWqe { remote_qpn: x.srqs[0].id.0, ..SendWqe::default() }, &[from]);
    /* the window is smaller than the message */
    x.net.step();
    let (now, host) = (x.net.now(), &mut x.net.hosts[1]);
    host.to_state(x.recvs[0], QpState::Err, now).expect("to ERR");
    assert_eq!(x.srqs[0].cq.poll().map(|(c, _)| (c.status, c.qpn)), Some((WcStatus::WrFlushErr, x.recvs[0])));
    for qpn in x.recvs {
        host.nic.destroy_qp(&mut host.env, qpn).expect("it exists");
    }
    assert_eq!(host.nic.dealloc_pd(x.domain), Err(NicError::Busy));
    for srq in &x.srqs {
        host.nic.destroy_srq(srq.id).expect("it exists");
    }
    assert_eq!(host.nic.dealloc_pd(x.domain), Ok(()));
}
