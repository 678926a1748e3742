//! Two hosts with a connection of each kind between them. Host 1 is the one that is watched.

mod programs;

use std::collections::BTreeMap;

use starverbs_core::mr::WindowType;
use starverbs_core::qp::RecvSource;
use starverbs_core::wire::Packet;
use starverbs_core::{AvId, Mtu, NicConfig, PdId, Psn, QpType, Qpn, SrqId};
use starverbs_sim::{Faults, Net, QpAt, Setup, SimCq, SimRq, SimSq};

use super::Mode;
use super::forge::{Frame, behind, dest_qpn};
use super::memory::{all_rights, guard, limited, named_srq};
use super::watch::{Acknowledged, Sent};
use crate::bytes::Bytes;

/// Path MTU.
pub(crate) const MTU: usize = 256;
/// First PSN, both ways: they wrap soon.
pub(crate) const FIRST: u32 = 0x00ff_fff0;
const PAGE: u64 = 8192;
/// Longest message of the programs here.
const LONGEST: u32 = 1500;
const SLOTS: u32 = 16;

const UC: usize = 1;
const UD: usize = 2;
const XRC_IN: usize = 3;
const XRC_OUT: usize = 4;
const SRQ: usize = 5;
const TAG: usize = 6;
/// Connections.
pub(crate) const LANES: usize = 7;

/// One connection, as host 1 has it.
pub(crate) struct Lane {
    pub(crate) qp_type: QpType,
    pub(crate) qpn: Qpn,
    pub(crate) peer: Qpn,
    pub(crate) sq: SimSq,
    pub(crate) peer_sq: SimSq,
    pub(crate) rq: SimRq,
    pub(crate) peer_rq: SimRq,
    /// Sends complete here; receives too, unless an SRQ says otherwise
    pub(crate) cq: SimCq,
    pub(crate) peer_cq: SimCq,
    /// Sends that have not completed, oldest first
    pub(crate) sent: std::collections::VecDeque<Sent>,
    /// Behind the last send, counted from `FIRST`
    pub(crate) end: u32,
    pub(crate) acked: Acknowledged,
    /// Honest sends of the peer, and how many came to an end
    pub(crate) honest: u64,
    pub(crate) honest_done: u64,
    /// The program of host 1 took the QP out of its state
    pub(crate) disturbed: bool,
}

/// The hosts, and what the oracle knows of them.
pub(crate) struct World {
    pub(crate) mode: Mode,
    pub(crate) net: Net,
    pub(crate) lanes: Vec<Lane>,
    pub(crate) setup: Setup,
    /// Everything of host 1 that peers may use, and of host 0
    pub(crate) page: [(u64, u32); 2],
    /// Memory of host 1 that must stay as it is
    pub(crate) guarded: Vec<(u64, u64)>,
    /// Keys of it and others that open nothing to peers
    keys: Vec<(u64, u32)>,
    window: u32,
    av: AvId,
    srqs: [SrqId; 3],
    /// Host 0's XRC domain with an SRQ in it, for what host 1 asks of it
    peer_srq: (PdId, SrqId),
    pub(crate) shared_cqs: [SimCq; 2],
    /// Receives that are posted: room by wr_id
    pub(crate) recvs: BTreeMap<u64, u64>,
    pub(crate) next_id: u64,
    pub(crate) injected: u64,
    pub(crate) posts: u64,
}

impl World {
    /// `how`: which rights the queue pairs have, and how many READs and the like they take, where peers break
    /// rules.
    pub(crate) fn new(mode: Mode, how: u8) -> World {
        let cfg = NicConfig { mtu: Mtu::M1024, max_msg: 1 << 20, ..NicConfig::default() };
        let mut net = Net::new(2, cfg, Faults::default(), 7);
        let setup = Setup {
            mtu: Mtu::M256,
            timeout: 10,
            retry_cnt: 2,
            rnr_retry: if mode == Mode::Unconnected { 7 } else { 2 },
            rd_atomic: 3,
            psn: FIRST,
            access: all_rights(),
            ..Setup::default()
        };
        let setup = if mode == Mode::Unconnected { setup } else { limited(setup, how) };
        let page = [0, 1].map(|at| net.hosts[at].region(PAGE, all_rights()));
        let (guarded, keys) = guard(&mut net, page[1]);
        let shared_cqs = [SimCq::new(4096), SimCq::new(4096)];
        let host = &mut net.hosts[1];
        let pd = host.pd;
        let [plain, named, tagged] = [(); 3].map(|()| SimRq::new(64, 2));
        let domain = host.nic.alloc_pd().expect("a PD");
        let srqs = [
            host.nic.create_srq(pd, plain.clone(), 0, 0),
            host.nic.create_xrc_srq(pd, domain, named.clone(), shared_cqs[0].clone(), 0),
            host.nic.create_tag_srq(pd, tagged.clone(), shared_cqs[1].clone(), 16, 0),
        ]
        .map(|srq| srq.expect("an SRQ"));
        let window = host.nic.alloc_mw(pd, WindowType::Two).expect("a window");
        let dgid = net.hosts[0].gid;
        let av = net.hosts[1].av(dgid);
        let av = net.hosts[1].nic.create_av(pd, av).expect("an AV");
        let peer_srq = named_srq(&mut net);
        let mut world = World {
            mode,
            net,
            lanes: Vec::new(),
            setup,
            page,
            guarded,
            keys,
            window,
            av,
            srqs,
            peer_srq,
            shared_cqs,
            recvs: BTreeMap::new(),
            next_id: 1,
            injected: 0,
            posts: 0,
        };
        for lane in 0..LANES {
            let rq = [plain.clone(), named.clone(), tagged.clone()];
            world.connect(lane, rq, domain);
        }
        if mode == Mode::Silent {
            world.net.faults.loss = 1.0;
        }
        world
    }

    fn connect(&mut self, lane: usize, [plain, named, tagged]: [SimRq; 3], domain: PdId) {
        let (mine, theirs) = match lane {
            UC => (QpType::Uc, QpType::Uc),
            UD => (QpType::Ud, QpType::Ud),
            XRC_IN => (QpType::XrcRecv, QpType::XrcSend),
            XRC_OUT => (QpType::XrcSend, QpType::XrcRecv),
            _ => (QpType::Rc, QpType::Rc),
        };
        let own = SimRq::new(SLOTS as usize, 2);
        let (rq, source) = match lane {
            XRC_IN => (named, RecvSource::Xrc(SrqId(u32::MAX))),
            SRQ => (plain, RecvSource::Shared(self.srqs[0])),
            TAG => (tagged, RecvSource::Shared(self.srqs[2])),
            _ => (own.clone(), RecvSource::Own(own)),
        };
        let (sq, peer_sq) = (SimSq::new(SLOTS), SimSq::new(SLOTS));
        let (cq, peer_cq) = (SimCq::new(4096), SimCq::new(4096));
        let peer_rq = SimRq::new(64, 1);
        let host = &mut self.net.hosts[1];
        let usual = host.pd;
        if lane == XRC_IN {
            host.pd = domain;
        }
        let qpn = host.qp(mine, &sq, source, [&cq, &cq], true);
        host.pd = usual;
        let host = &mut self.net.hosts[0];
        let source = match theirs {
            QpType::XrcRecv => RecvSource::Xrc(SrqId(u32::MAX)),
            _ => RecvSource::Own(peer_rq.clone()),
        };
        let usual = host.pd;
        if lane == XRC_OUT {
            host.pd = self.peer_srq.0;
        }
        let peer = host.qp(theirs, &peer_sq, source, [&peer_cq, &peer_cq], true);
        host.pd = usual;
        self.lanes.push(Lane {
            qp_type: mine,
            qpn,
            peer,
            sq,
            peer_sq,
            rq,
            peer_rq,
            cq,
            peer_cq,
            sent: Default::default(),
            end: 0,
            acked: Acknowledged::default(),
            honest: 0,
            honest_done: 0,
            disturbed: false,
        });
        self.bring_up(lane, true);
    }

    /// Host 1's QP of a lane goes from RESET to RTS; with `both`, so does the peer's.
    fn bring_up(&mut self, lane: usize, both: bool) {
        let (now, setup) = (self.net.now(), self.setup);
        let Lane { qp_type, qpn, peer, .. } = self.lanes[lane];
        let other = match qp_type {
            QpType::XrcRecv => QpType::XrcSend,
            QpType::XrcSend => QpType::XrcRecv,
            same => same,
        };
        for (at, own, its, kind) in [(1, qpn, peer, qp_type), (0, peer, qpn, other)] {
            if at == 0 && !both {
                continue;
            }
            let dgid = self.net.hosts[1 - at].gid;
            let host = &mut self.net.hosts[at];
            if kind == QpType::Ud {
                host.to_rts_ud(own, &setup, now);
            } else {
                host.to_init(own, false, &setup, now);
                host.to_rts(own, kind, dgid, its, &setup, now);
            }
        }
    }

    pub(crate) fn qpn(&self, lane: usize) -> Qpn {
        self.lanes[lane].qpn
    }

    pub(crate) fn peer_qpn(&self, lane: usize) -> Qpn {
        self.lanes[lane].peer
    }

    pub(crate) fn datagram_qpn(&self) -> Qpn {
        self.lanes[UD].qpn
    }

    pub(crate) fn qpn_of(&self, frame: &[u8]) -> Option<Qpn> {
        dest_qpn(frame)
    }

    pub(crate) fn qkey(&self) -> u32 {
        self.setup.qkey
    }

    /// The PSN that a QP waits for: of requests, or of answers the oldest that may be outstanding.
    pub(crate) fn next_psn(&self, lane: usize, response: bool) -> Psn {
        let Ok(attr) = self.net.hosts[1].nic.query_qp(self.lanes[lane].qpn) else { return Psn::new(0) };
        if !response {
            return attr.rq_psn;
        }
        let done = self.lanes[lane].sent.front().map_or(self.lanes[lane].end, |sent| sent.end - sent.packets);
        Psn::new(FIRST).plus(done.max(self.lanes[lane].acked.upto))
    }

    /// An SRQ's number: the one that XRC requests may name, others, and none.
    pub(crate) fn srq(&self, which: u8) -> u32 {
        match which {
            0..=199 => self.srqs[1].0,
            200..=220 => self.srqs[0].0,
            221..=240 => self.srqs[2].0,
            other => u32::from(other),
        }
    }

    /// An address of host 1 and a key, more often than not a good pair.
    pub(crate) fn target(&self, bytes: &mut Bytes<'_>) -> (u64, u32) {
        let (which, offset) = (bytes.byte(), bytes.half());
        let (addr, key) = match which {
            0..=127 => self.page[1],
            128..=159 => (self.page[1].0, self.window),
            160..=191 => (self.page[1].0, bytes.word()),
            other => self.keys[usize::from(other) % self.keys.len()],
        };
        (addr.wrapping_add(offset as i16 as u64), key)
    }

    /// Memory of host 0, for a rendezvous.
    pub(crate) fn peer_target(&self, which: u8) -> (u64, u32) {
        (self.page[0].0 + u64::from(which), self.page[0].1)
    }

    /// Hands host 1 a frame.
    pub(crate) fn inject(&mut self, mut frame: Frame) {
        let (peer, own) = (self.net.hosts[0].gid, self.net.hosts[1].gid);
        frame.address(self, peer, own);
        self.injected += 1;
        let of = dest_qpn(&frame.bytes).and_then(|qpn| self.lanes.iter().position(|l| l.qpn == qpn));
        if let (Some(of), Ok(packet)) = (of, Packet::parse(&frame.bytes))
            && packet.op().kind.is_response()
            && let Some(at) =
                behind(packet.bth().psn(), Psn::new(FIRST)).filter(|at| *at < self.lanes[of].end)
        {
            self.lanes[of].acked.note(at, packet.op().kind);
        }
        let before = self.drops();
        let now = self.net.now();
        let host = &mut self.net.hosts[1];
        host.nic.handle_frame(&mut host.env, now, &frame.meta, &frame.bytes);
        if self.mode == Mode::Unconnected {
            assert_eq!(self.drops(), before + 1, "an unconnected peer's frame is dropped, and counted once");
        }
    }

    /// Frames that host 1 dropped, by its counters.
    pub(crate) fn drops(&self) -> u64 {
        let counters = self.net.hosts[1].nic.counters();
        let named = starverbs_core::Counters::NAMES.iter().zip(counters.values());
        named
            .filter(|(name, _)| name.starts_with("drop_") || **name == "star_drops")
            .map(|(_, value)| value)
            .sum()
    }

    /// Two fresh queue pairs, for the question whether the cards still work.
    pub(crate) fn fresh_pair(&mut self) -> [(Qpn, SimSq, SimRq, SimCq); 2] {
        let pair = [0, 1].map(|at| {
            let (sq, rq, cq) = (SimSq::new(4), SimRq::new(4, 1), SimCq::new(16));
            let host = &mut self.net.hosts[at];
            let qpn = host.qp(QpType::Rc, &sq, RecvSource::Own(rq.clone()), [&cq, &cq], true);
            (qpn, sq, rq, cq)
        });
        let setup = Setup { mtu: Mtu::M256, psn: FIRST, ..Setup::default() };
        self.net.connect(
            QpType::Rc,
            QpAt { host: 0, qpn: pair[0].0 },
            QpAt { host: 1, qpn: pair[1].0 },
            &setup,
        );
        pair
    }
}
