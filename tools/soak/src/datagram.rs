//! UD queue pairs and multicast groups: what arrives is whole, and was sent here.

use std::collections::VecDeque;

use starverbs_core::qp::RecvSource;
use starverbs_core::{
    Av, AvId, Cqe, Gid, QPN_MULTICAST, QpState, QpType, Qpn, SendFlags, SendOp, SendWqe, WcFlags, WcOpcode,
    WcStatus,
};
use starverbs_sim::{READ, Recv, Send, Setup, SimRq, SimSq, WRITE, any_bytes, get, put};

use crate::conn::{RecvWr, spoil};
use crate::pool::Pieces;
use crate::post::RECV;
use crate::world::{Who, World};

/// Room at the front of a receive for the network header.
const GRH: u32 = 40;
const GROUP: Gid = Gid::from_ipv4([239, 1, 2, 3]);
/// Q_Keys of nobody
const WRONG: u32 = 0x0bad;

/// A send that is not known to be done.
struct Pending {
    seq: u64,
    signaled: bool,
    bad: bool,
    pieces: Pieces,
    op: SendOp,
}

/// A datagram that was sent.
struct Datagram {
    to: Option<(usize, Qpn)>,
    data: Vec<u8>,
    imm: Option<u32>,
    solicited: bool,
    /// Its Q_Key is the right one, and it was not flushed
    good: bool,
    /// How often it reached each station
    came: Vec<u32>,
}

/// A UD queue pair.
pub(crate) struct Station {
    host: usize,
    qpn: Qpn,
    sq: SimSq,
    rq: SimRq,
    cq: usize,
    /// Member of the group
    member: bool,
    avs: Vec<AvId>,
    group: AvId,
    left: u32,
    next: u64,
    sends: VecDeque<Pending>,
    sent: Vec<Datagram>,
    recvs: VecDeque<RecvWr>,
    recv_id: u64,
    failed: bool,
}

impl World {
    pub(crate) fn make_stations(&mut self) {
        for (s, at) in self.plan.datagrams.clone().into_iter().enumerate() {
            let (slots, cq) = (1 << self.rng.below(5), self.rng.below(2) as usize);
            let mut station = Station {
                host: at,
                qpn: 0,
                sq: SimSq::new(slots),
                rq: SimRq::new(self.rng.pick(&[1, 4, 64]), 4),
                cq,
                member: self.rng.chance(0.6),
                avs: vec![],
                group: AvId::default(),
                left: self.rng.below(u64::from(self.plan.datagram_ops) + 1) as u32,
                next: 0,
                sends: VecDeque::new(),
                sent: vec![],
                recvs: VecDeque::new(),
                recv_id: 0,
                failed: false,
            };
            self.bring_up(s, &mut station);
            self.stations.push(station);
        }
    }

    fn bring_up(&mut self, s: usize, station: &mut Station) {
        let (cq, now) = (&self.sites[station.host].cqs[station.cq], self.net.now());
        let host = &mut self.net.hosts[station.host];
        let source = RecvSource::Own(station.rq.clone());
        station.qpn = host.qp(QpType::Ud, &station.sq, source, [cq, cq], false);
        host.to_rts_ud(station.qpn, &Setup::default(), now);
        if station.member {
            host.attach(station.qpn, GROUP).expect("room in the group");
        }
        let av = |dgid: Gid| Av { dgid, sgid: host.gid, hop_limit: 64, ..Av::default() };
        let addresses: Vec<Av> =
            (0..self.plan.hosts as u8).map(|id| av(Gid::from_ipv4([10, 0, 0, id + 1]))).collect();
        let group = av(GROUP);
        let mut make = |av| host.nic.create_av(host.pd, av).expect("an AV");
        station.avs = addresses.into_iter().map(&mut make).collect();
        station.group = make(group);
        self.who.insert((station.host, station.qpn), Who::Station(s));
    }

    pub(crate) fn restart_stations(&mut self, at: usize) {
        let mut stations = std::mem::take(&mut self.stations);
        for (s, station) in stations.iter_mut().enumerate().filter(|(_, s)| s.host == at) {
            (station.sq, station.rq) = (SimSq::new(station.sq_slots()), SimRq::new(4, 4));
            station.sends.clear();
            station.recvs.clear();
            station.failed = false;
            self.bring_up(s, station);
        }
        self.stations = stations;
    }

    pub(crate) fn act_stations(&mut self, eager: bool) -> bool {
        let mut any = false;
        for s in 0..self.stations.len() {
            while !self.stations[s].rq.is_full() && (eager || self.rng.chance(self.plan.feed / 2.0)) {
                self.feed_station(s);
                any = true;
            }
            let mut posted = false;
            while self.stations[s].left > 0
                && !self.stations[s].sq.is_full()
                && (eager || self.rng.chance(self.plan.act / 2.0))
            {
                self.post_datagram(s);
                posted = true;
            }
            if posted {
                let station = &self.stations[s];
                self.net.doorbell(station.host, station.qpn);
            }
            any |= posted | self.recover(s, eager);
        }
        any
    }

    fn feed_station(&mut self, s: usize) {
        let station = &mut self.stations[s];
        let (host, pool) = (&mut self.net.hosts[station.host], &mut self.sites[station.host].pool);
        let most = self.plan.mtu.bytes() + GRH;
        let room = if self.rng.chance(0.1) { self.rng.below(u64::from(most)) as u32 } else { most };
        let pieces = pool.scatter(host, &mut self.rng, room, 4, WRITE);
        let id = station.recv_id | RECV;
        station.recv_id += 1;
        station.rq.post(Recv { wr_id: id, sges: pieces.clone() }).expect("there is room");
        station.recvs.push_back(RecvWr { id, pieces, bad: false });
    }

    fn post_datagram(&mut self, s: usize) {
        let to = self.rng.below(self.stations.len() as u64) as usize;
        let (target, count) = ((self.stations[to].host, self.stations[to].qpn), self.stations.len());
        let group = self.rng.chance(0.3);
        let rng = &mut self.rng;
        let station = &mut self.stations[s];
        let most = u64::from(self.plan.mtu.bytes());
        let mut data = match rng.below(4) {
            0 => vec![],
            1 => any_bytes(rng, most as u32),
            _ => {
                let len = rng.within(8, most) as u32;
                any_bytes(rng, len)
            }
        };
        if data.len() >= 8 {
            let name = (s as u64) << 32 | station.sent.len() as u64;
            data[..8].copy_from_slice(&name.to_be_bytes());
        }
        let wrong = rng.chance(0.1);
        let op = rng.pick(&[SendOp::Send, SendOp::SendImm]);
        let mut wqe = SendWqe {
            wr_id: station.next,
            op,
            av: if group { station.group } else { station.avs[target.0] },
            remote_qpn: if group { QPN_MULTICAST } else { target.1 },
            qkey: if wrong { WRONG } else { Setup::default().qkey },
            imm: rng.bits() as u32,
            ..SendWqe::default()
        };
        wqe.flags.set(SendFlags::SIGNALED, rng.chance(0.5));
        wqe.flags.set(SendFlags::SOLICITED, rng.chance(0.3));
        let (host, pool) = (&mut self.net.hosts[station.host], &mut self.sites[station.host].pool);
        let pieces = pool.scatter(host, rng, data.len() as u32, 3, READ);
        put(host, &pieces, &data);
        let mut sges = pieces.clone();
        let bad = rng.chance(0.02) && spoil(&mut sges);
        station.sq.post(Send { wqe, sges, inline: None }).expect("there is room");
        let signaled = wqe.flags.contains(SendFlags::SIGNALED);
        station.sends.push_back(Pending { seq: station.next, signaled, bad, pieces, op });
        station.sent.push(Datagram {
            to: (!group).then_some(target),
            data,
            imm: op.has_imm().then_some(wqe.imm),
            solicited: wqe.flags.contains(SendFlags::SOLICITED),
            good: !wrong && !bad,
            came: vec![0; count],
        });
        station.next += 1;
        station.left -= 1;
        self.say(|| format!("station {s} posts {wqe:?} to {target:?} bad {bad}"));
        self.summary.add("requests", if group { "multicast" } else { "datagram" }, 1);
    }

    /// A send that failed stops sends alone (IBTA 10.3.1.5): once all are flushed, they go on.
    fn recover(&mut self, s: usize, eager: bool) -> bool {
        let station = &mut self.stations[s];
        let sqe = self.net.hosts[station.host].state(station.qpn) == QpState::Sqe;
        if !sqe || !station.failed || !station.sends.is_empty() || !(eager || self.rng.chance(0.1)) {
            return false;
        }
        station.failed = false;
        let now = self.net.now();
        self.net.hosts[station.host].to_state(station.qpn, QpState::Rts, now).expect("SQE to RTS");
        self.summary.add("events", "SQE to RTS", 1);
        true
    }

    /// A datagram's send completion.
    pub(crate) fn datagram_sent(&mut self, s: usize, cqe: &Cqe) {
        let station = &mut self.stations[s];
        loop {
            let Some(p) = station.sends.pop_front() else { panic!("station {s}: {cqe:?} of nothing") };
            let mine = p.seq == cqe.wr_id;
            let expected = match (mine, station.failed) {
                (false, failed) => !p.signaled && !p.bad && !failed,
                (true, true) => cqe.status == WcStatus::WrFlushErr,
                (true, false) if p.bad => cqe.status == WcStatus::LocProtErr,
                (true, false) => {
                    cqe.status == WcStatus::Success && p.signaled && cqe.opcode == p.op.wc_opcode()
                }
            };
            assert!(
                expected,
                "station {s}: request {} has {cqe:?} (bad: {}, failed: {})",
                p.seq, p.bad, station.failed
            );
            station.failed |= mine && cqe.status != WcStatus::Success;
            let host = &mut self.net.hosts[station.host];
            self.sites[station.host].pool.give(host, &p.pieces);
            if mine {
                return;
            }
        }
    }

    /// A datagram came.
    pub(crate) fn datagram(&mut self, s: usize, cqe: &Cqe, solicited: bool) {
        let station = &mut self.stations[s];
        let (at, me) = (station.host, (station.host, station.qpn));
        let wr = station.recvs.pop_front().filter(|wr| wr.id == cqe.wr_id);
        let wr = wr.unwrap_or_else(|| panic!("station {s}: a receive that is not the next one: {cqe:?}"));
        assert_eq!((cqe.status, cqe.opcode), (WcStatus::Success, WcOpcode::Recv), "station {s}: {cqe:?}");
        assert!(cqe.flags.contains(WcFlags::GRH), "station {s}: {cqe:?}");
        let all = get(&self.net.hosts[at], &wr.pieces, cqe.byte_len as usize);
        let (grh, data) = all.split_at(GRH as usize);
        let imm = cqe.flags.contains(WcFlags::WITH_IMM).then_some(cqe.imm);
        let member = station.member;
        let from_host = usize::from(grh[35]).wrapping_sub(1);
        let group = grh[36..40] == GROUP.0[12..];
        let fits = |d: &Datagram| {
            let here = if group { d.to.is_none() && member } else { d.to == Some(me) };
            here && d.good && d.data == data && d.imm == imm && d.solicited == solicited && d.came[s] < 2
        };
        let mut found = None;
        for (n, from) in self.stations.iter().enumerate().filter(|(_, from)| from.host == from_host) {
            found = found.or(from.sent.iter().position(fits).map(|d| (n, d)));
        }
        let Some((n, d)) = found else { panic!("station {s}: a datagram that nobody sent here: {cqe:?}") };
        self.stations[n].sent[d].came[s] += 1;
        assert!(group || grh[36..40] == [10, 0, 0, at as u8 + 1], "station {s}: destination {grh:?}");
        self.sites[at].pool.give(&mut self.net.hosts[at], &wr.pieces);
        self.summary.add("datagrams arrived", if group { "multicast" } else { "unicast" }, 1);
    }

    pub(crate) fn finish_stations(&mut self) {
        for (s, station) in self.stations.iter_mut().enumerate() {
            let state = self.net.hosts[station.host].state(station.qpn);
            assert_eq!(state, QpState::Rts, "station {s}");
            assert!(
                !station.sends.iter().any(|p| p.signaled || p.bad),
                "station {s}: sends without completion"
            );
            assert_eq!((station.left, station.sq.outstanding()), (0, 0), "station {s}: sends are left");
        }
    }
}

impl Station {
    fn sq_slots(&self) -> u32 {
        starverbs_core::SendQueue::slots(&self.sq)
    }
}
