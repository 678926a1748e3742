//! UC and UD on a hostile wire: what arrives is whole, and what is lost is lost cleanly.

#![allow(clippy::needless_range_loop)] /* hosts, ends and address vectors share their numbers */

use crate::common::{all_rights, any_bytes, any_faults, any_size, for_seeds, get, is_clean, put, scattered};
use starverbs_core::qp::RecvSource;
use starverbs_core::{
    Access, AvId, Mtu, NicConfig, QpState, QpType, Qpn, SendFlags, SendOp, SendWqe, Sge, WcFlags, WcOpcode,
    WcStatus,
};
use starverbs_sim::{Net, QpAt, Recv, Rng, Send, Setup, SimCq, SimRq, SimSq};

const STEPS: usize = 500_000;

/// A message that was posted.
struct Sent {
    wqe: SendWqe,
    data: Vec<u8>,
    arrived: u32,
}

/// One QP with its queues.
struct Endpoint {
    host: usize,
    qpn: Qpn,
    sq: SimSq,
    rq: SimRq,
    cq: SimCq,
    sent: Vec<Sent>,
    completed: usize,
    buffers: Vec<Vec<Sge>>,
    /// Messages of the peer up to here are out of the question, on a wire that keeps order
    passed: usize,
}

impl Endpoint {
    fn new(net: &mut Net, rng: &mut Rng, host: usize, qp_type: QpType) -> Self {
        let (sq, rq, cq) = (SimSq::new(1 << rng.below(6)), SimRq::new(256, 4), SimCq::new(4096));
        let qpn = net.hosts[host].qp(qp_type, &sq, RecvSource::Own(rq.clone()), [&cq, &cq], true);
        Endpoint { host, qpn, sq, rq, cq, sent: vec![], completed: 0, buffers: vec![], passed: 0 }
    }

    fn post_recv(&mut self, net: &mut Net, rng: &mut Rng, room: u32) {
        if self.rq.is_full() {
            return;
        }
        let sges = scattered(&mut net.hosts[self.host], rng, room, 4, Access::LOCAL_WRITE);
        self.rq.post(Recv { wr_id: self.buffers.len() as u64, sges: sges.clone() }).expect("there is room");
        self.buffers.push(sges);
    }

    fn post_send(&mut self, net: &mut Net, rng: &mut Rng, mut wqe: SendWqe, len: u32) {
        let data = any_bytes(rng, len);
        let sges = scattered(&mut net.hosts[self.host], rng, len, 4, Access::empty());
        put(&mut net.hosts[self.host], &sges, &data);
        wqe.wr_id = self.sent.len() as u64;
        wqe.imm = rng.bits() as u32;
        wqe.flags.set(SendFlags::SOLICITED, rng.chance(0.5));
        self.sq.post(Send { wqe, sges, inline: None }).expect("there is room");
        self.sent.push(Sent { wqe, data, arrived: 0 });
        net.doorbell(self.host, self.qpn);
    }

    /// Send completions come in order, all successful.
    fn sent_one(&mut self, cqe: &starverbs_core::Cqe) {
        let s = &self.sent[self.completed];
        assert_eq!(
            (cqe.status, cqe.wr_id, cqe.opcode),
            (WcStatus::Success, s.wqe.wr_id, s.wqe.op.wc_opcode())
        );
        self.completed += 1;
    }
}

fn any_uc_wqe(net: &mut Net, rng: &mut Rng, to: usize, len: u32) -> SendWqe {
    let op = rng.pick(&[SendOp::Send, SendOp::SendImm, SendOp::Write, SendOp::WriteImm]);
    let mut wqe = SendWqe { op, ..SendWqe::default() };
    if matches!(op, SendOp::Write | SendOp::WriteImm) {
        (wqe.remote_addr, wqe.rkey) = net.hosts[to].region(u64::from(len.max(1)), all_rights());
    }
    wqe
}

/// The message that a receive completion is about; it must be one that was sent, whole.
fn check_uc(
    net: &Net,
    at: usize,
    ends: &mut [Endpoint; 2],
    cqe: &starverbs_core::Cqe,
    solicited: bool,
    ordered: bool,
) {
    let (len, wr) = (cqe.byte_len as usize, cqe.wr_id as usize);
    let buffer = ends[at].buffers[wr].clone();
    let bytes = if cqe.opcode == WcOpcode::Recv { get(&net.hosts[at], &buffer, len) } else { vec![] };
    let from = if ordered { ends[at].passed } else { 0 };
    let found = ends[1 - at].sent.iter_mut().enumerate().skip(from).find(|(_, s)| {
        let op = s.wqe.op;
        let imm =
            op.has_imm() == cqe.flags.contains(WcFlags::WITH_IMM) && (!op.has_imm() || s.wqe.imm == cqe.imm);
        let same = match cqe.opcode {
            WcOpcode::Recv => matches!(op, SendOp::Send | SendOp::SendImm) && s.data == bytes,
            _ => {
                op == SendOp::WriteImm
                    && s.data.len() == len
                    && net.hosts[at].env.memory.read(s.wqe.remote_addr, len) == s.data
            }
        };
        imm && same && s.wqe.flags.contains(SendFlags::SOLICITED) == solicited
    });
    let Some((index, s)) = found else { panic!("a message of {len} bytes that nobody sent: {cqe:?}") };
    s.arrived += 1;
    ends[at].passed = index + 1;
}

fn uc(seed: u64) {
    let mut rng = Rng::new(seed);
    let faults = any_faults(&mut rng);
    let ordered = faults.reorder + faults.duplicate == 0.0;
    let cfg = NicConfig { window: rng.pick(&[16 << 10, 512 << 10]), ..NicConfig::default() };
    let mut net = Net::new(2, cfg, faults, seed);
    let mtu = rng.pick(&[Mtu::M256, Mtu::M1024, Mtu::M4096]);
    let setup = Setup { mtu, psn: rng.pick(&[0, 0xff_fffe]), ..Setup::default() };
    let mut ends = [0, 1].map(|host| Endpoint::new(&mut net, &mut rng, host, QpType::Uc));
    net.connect(QpType::Uc, QpAt { host: 0, qpn: ends[0].qpn }, QpAt { host: 1, qpn: ends[1].qpn }, &setup);
    let starved = rng.chance(0.3);
    let mut left = rng.within(1, 60);
    for _ in 0..STEPS {
        for at in 0..2 {
            let (chance, most) = if starved { (0.1, 2) } else { (1.0, 200) };
            while ends[at].rq_len() < most && rng.chance(chance) {
                ends[at].post_recv(&mut net, &mut rng, 8 * 4096);
            }
            if left > 0 && !ends[at].sq.is_full() && rng.chance(0.5) {
                let len = any_size(&mut rng, mtu.bytes()).min(8 * 4096);
                let wqe = any_uc_wqe(&mut net, &mut rng, 1 - at, len);
                ends[at].post_send(&mut net, &mut rng, wqe, len);
                left -= 1;
            }
        }
        let idle = !net.step();
        for at in 0..2 {
            while let Some((cqe, solicited)) = ends[at].cq.poll() {
                assert_eq!(cqe.status, WcStatus::Success, "{cqe:?}");
                match cqe.opcode {
                    WcOpcode::Recv | WcOpcode::RecvRdmaWithImm => {
                        check_uc(&net, at, &mut ends, &cqe, solicited, ordered);
                    }
                    _ => ends[at].sent_one(&cqe),
                }
            }
        }
        if idle && left == 0 {
            break;
        }
    }
    for end in &ends {
        assert_eq!(end.completed, end.sent.len(), "all sends complete, arrived or not");
        assert_eq!(net.hosts[end.host].state(end.qpn), QpState::Rts);
        assert!(net.hosts[end.host].env.memory.gaps_intact());
        for s in &end.sent {
            assert!(!ordered || s.arrived <= 1, "no message came twice");
            let lossless = is_clean(&net.faults) && !starved;
            assert!(!lossless || !s.wqe.op.takes_recv() || s.arrived == 1, "a clean wire loses nothing");
        }
    }
}

impl Endpoint {
    fn rq_len(&self) -> u64 {
        u64::from(starverbs_core::RecvQueue::len(&self.rq))
    }
}

#[test]
fn uc_messages_are_whole_or_absent() {
    for_seeds("uc_messages_are_whole_or_absent", 400, uc);
}

const GRH: u32 = 40;

/// The GRH of a datagram: 20 bytes nothing, then an IPv4 header (RoCEv2 annex A17.4.5.1).
fn check_grh(net: &Net, at: usize, from: usize, grh: &[u8], len: usize) {
    assert_eq!(grh[20], 0x45);
    assert_eq!(grh[29], 17, "UDP");
    let words = grh[20..40].chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
    let sum: u32 = words.sum();
    assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff, "checksum of the IPv4 header");
    assert_eq!(grh[32..36], net.hosts[from].gid.0[12..]);
    assert_eq!(grh[36..40], net.hosts[at].gid.0[12..]);
    let total = usize::from(u16::from_be_bytes([grh[22], grh[23]]));
    assert!(total >= 20 + 8 + 12 + 8 + len, "the IPv4 length covers the datagram");
}

fn ud(seed: u64) {
    let mut rng = Rng::new(seed);
    let faults = any_faults(&mut rng);
    let mut net = Net::new(3, NicConfig { mtu: Mtu::M1024, ..NicConfig::default() }, faults, seed);
    let setup = Setup::default();
    let mut ends: Vec<Endpoint> =
        (0..3).map(|host| Endpoint::new(&mut net, &mut rng, host, QpType::Ud)).collect();
    let mut avs = vec![vec![AvId::default(); 3]; 3];
    for at in 0..3 {
        net.hosts[at].to_rts_ud(ends[at].qpn, &setup, 0);
        for to in 0..3 {
            let host = &mut net.hosts[at];
            let av = host.av(starverbs_core::Gid::from_ipv4([10, 0, 0, to as u8 + 1]));
            avs[at][to] = host.nic.create_av(host.pd, av).expect("an AV");
        }
    }
    let starved = rng.chance(0.3);
    let mut left = rng.within(1, 80);
    let mut dropped_on_purpose = 0;
    for _ in 0..STEPS {
        for at in 0..3 {
            while ends[at].rq_len() < if starved { rng.below(3) } else { 100 } {
                let room = if starved && rng.chance(0.3) { rng.below(1064) as u32 } else { 1024 + GRH };
                ends[at].post_recv(&mut net, &mut rng, room);
            }
            if left > 0 && !ends[at].sq.is_full() && rng.chance(0.5) {
                let to = rng.below(3) as usize;
                let wrong = rng.chance(0.1);
                dropped_on_purpose += u64::from(wrong);
                let wqe = SendWqe {
                    op: rng.pick(&[SendOp::Send, SendOp::SendImm]),
                    av: avs[at][to],
                    remote_qpn: ends[to].qpn,
                    qkey: if wrong { 0x0bad } else { setup.qkey },
                    ..SendWqe::default()
                };
                let len = any_size(&mut rng, 1024).min(1024);
                ends[at].post_send(&mut net, &mut rng, wqe, len);
                left -= 1;
            }
        }
        let idle = !net.step();
        for at in 0..3 {
            while let Some((cqe, solicited)) = ends[at].cq.poll() {
                assert_eq!(cqe.status, WcStatus::Success, "{cqe:?}");
                if cqe.opcode == WcOpcode::Recv {
                    check_ud(&net, at, &mut ends, &cqe, solicited, setup.qkey);
                } else {
                    ends[at].sent_one(&cqe);
                }
            }
        }
        if idle && left == 0 {
            break;
        }
    }
    for end in &ends {
        assert_eq!(end.completed, end.sent.len(), "all sends complete, arrived or not");
        assert!(net.hosts[end.host].env.memory.gaps_intact());
        for s in &end.sent {
            let lossless = is_clean(&net.faults) && !starved && s.wqe.qkey == setup.qkey;
            assert!(!lossless || s.arrived == 1, "a clean wire loses nothing");
            assert!(net.faults.duplicate > 0.0 || s.arrived <= 1, "no datagram came twice");
        }
    }
    if is_clean(&net.faults) {
        let qkeys: u64 = net.hosts.iter().map(|h| h.nic.counters().drop_qkey.get()).sum();
        assert_eq!(qkeys, dropped_on_purpose, "wrong Q_Keys are dropped and counted");
    }
}

fn check_ud(
    net: &Net,
    at: usize,
    ends: &mut [Endpoint],
    cqe: &starverbs_core::Cqe,
    solicited: bool,
    qkey: u32,
) {
    assert!(cqe.flags.contains(WcFlags::GRH));
    assert_eq!(cqe.sl, 10, "UDP behind IPv4");
    let len = (cqe.byte_len - GRH) as usize;
    let all = get(&net.hosts[at], &ends[at].buffers[cqe.wr_id as usize], cqe.byte_len as usize);
    let (grh, bytes) = all.split_at(GRH as usize);
    let my_qpn = ends[at].qpn;
    let from = ends.iter().position(|e| e.qpn == cqe.src_qp).expect("the sender is one of us");
    check_grh(net, at, from, grh, len);
    let fits = |s: &Sent| {
        s.data == bytes
            && s.wqe.remote_qpn == my_qpn
            && s.wqe.qkey == qkey
            && s.wqe.op.has_imm() == cqe.flags.contains(WcFlags::WITH_IMM)
            && (!s.wqe.op.has_imm() || s.wqe.imm == cqe.imm)
            && s.wqe.flags.contains(SendFlags::SOLICITED) == solicited
    };
    /* Short datagrams look alike: of those, the one that came least often. */
    let found = ends[from].sent.iter_mut().filter(|s| fits(s)).min_by_key(|s| s.arrived);
    let Some(s) = found else { panic!("a datagram of {len} bytes that nobody sent here: {cqe:?}") };
    s.arrived += 1;
}

#[test]
fn ud_datagrams_are_whole_or_absent() {
    for_seeds("ud_datagrams_are_whole_or_absent", 400, ud);
}

/// A WRITE that ends beyond the region is dropped as a whole, though its first packets would fit (IBTA 9.4.3:
/// the length is that of the message).
#[test]
fn a_uc_write_beyond_its_region_writes_nothing() {
    let mut net = Net::new(2, NicConfig::default(), Default::default(), 1);
    let mut rng = Rng::new(1);
    let mut ends = [0, 1].map(|host| Endpoint::new(&mut net, &mut rng, host, QpType::Uc));
    let setup = Setup { mtu: Mtu::M256, ..Setup::default() };
    net.connect(QpType::Uc, QpAt { host: 0, qpn: ends[0].qpn }, QpAt { host: 1, qpn: ends[1].qpn }, &setup);
    let (remote_addr, rkey) = net.hosts[1].region(700, all_rights());
    let before = net.hosts[1].env.memory.read(remote_addr, 700).to_vec();
    let wqe = SendWqe { op: SendOp::Write, remote_addr, rkey, ..SendWqe::default() };
    ends[0].post_send(&mut net, &mut rng, wqe, 768);
    assert!(net.run_until_idle(1000), "it ends");
    assert!(net.hosts[1].env.memory.read(remote_addr, 700) == before, "the region is as it was");
    ends[0].post_send(&mut net, &mut rng, SendWqe { op: SendOp::Write, ..wqe }, 700);
    assert!(net.run_until_idle(1000), "it ends");
    assert!(net.hosts[1].env.memory.read(remote_addr, 700) == ends[0].sent[1].data, "the next one arrives");
}
