//! Two hosts with a connection of each kind between them. Host 1 is the one that is watched.

use std::collections::BTreeMap;

use starverbs_core::mr::{MrAttr, WindowType};
use starverbs_core::nic::{TagChange, TagOp};
use starverbs_core::qp::{QpAttr, QpAttrMask, RecvSource};
use starverbs_core::tags::{MAX_TAG_SGE, TaggedBuffer};
use starverbs_core::wire::Packet;
use starverbs_core::{
    Access, AvId, Mtu, NicConfig, PdId, Psn, QpState, QpType, Qpn, SendFlags, SendOp, SendWqe, Sge, SrqId,
};
use starverbs_sim::{Faults, Net, Recv, Send, Setup, SimCq, SimRq, SimSq};

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

/// The hosts, and what the judge knows of them.
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
    /// `how`: which rights the queue pairs have, and how many READs and the like they take, where peers break rules.
    pub(crate) fn new(mode: Mode, how: u8) -> World {
        let cfg = NicConfig { mtu: Mtu::M1024, max_msg: 1 << 20, ..NicConfig::default() };
        let mut net = Net::new(2, cfg, Faults::default(), 7);
        let setup = Setup {
            mtu: Mtu::M256,
            timeout: 10,
            retry_cnt: 2,
            rnr_retry: if mode == Mode::Stranger { 7 } else { 2 },
            rd_atomic: 3,
            psn: FIRST,
            access: all_rights(),
            ..Setup::default()
        };
        let setup = if mode == Mode::Stranger { setup } else { limited(setup, how) };
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
        if self.mode == Mode::Stranger {
            assert_eq!(self.drops(), before + 1, "a stranger's frame is dropped, and counted once");
        }
    }

    /// The program of host 1 posts a send.
    pub(crate) fn post_send(&mut self, lane: usize, bytes: &mut Bytes<'_>) {
        let (op, flags, len) = (bytes.byte(), bytes.byte(), u32::from(bytes.half()) % LONGEST);
        if matches!(lane, XRC_IN | TAG) || self.lanes[lane].sq.is_full() || self.lanes[lane].disturbed {
            return;
        }
        let honest = self.mode == Mode::Stranger;
        let ops: &[SendOp] = match lane {
            UC => &[SendOp::Write, SendOp::Send, SendOp::SendImm],
            UD => &[SendOp::Send, SendOp::SendImm],
            XRC_OUT => &[SendOp::Write, SendOp::Read, SendOp::FetchAdd],
            _ if honest => &[SendOp::Write, SendOp::Send, SendOp::Read, SendOp::FetchAdd, SendOp::CmpSwap],
            _ => &[
                SendOp::Write,
                SendOp::Send,
                SendOp::Read,
                SendOp::FetchAdd,
                SendOp::CmpSwap,
                SendOp::WriteImm,
                SendOp::Flush,
                SendOp::AtomicWrite,
                SendOp::BindMw,
                SendOp::LocalInv,
            ],
        };
        let op = ops[usize::from(op) % ops.len()];
        let len = match op {
            _ if lane == UD => len % 1024,
            SendOp::FetchAdd | SendOp::CmpSwap | SendOp::AtomicWrite => 8,
            SendOp::Flush | SendOp::BindMw | SendOp::LocalInv => 0,
            _ => len,
        };
        let wqe = self.request(lane, op, flags);
        let sges =
            if len == 0 { vec![] } else { vec![Sge { addr: self.page[1].0, len, lkey: self.page[1].1 }] };
        self.feed_peer(lane);
        let packets = match op {
            SendOp::BindMw | SendOp::LocalInv => 0,
            _ => len.div_ceil(MTU as u32).max(1),
        };
        let lane = &mut self.lanes[lane];
        lane.end += packets;
        lane.sent.push_back(Sent { wr_id: wqe.wr_id, op, end: lane.end, packets });
        lane.sq.post(Send { wqe, sges, inline: None }).expect("there is room");
        let qpn = lane.qpn;
        self.posts += 1;
        self.net.doorbell(1, qpn);
    }

    fn request(&mut self, lane: usize, op: SendOp, flags: u8) -> SendWqe {
        let wr_id = self.id();
        let mut wqe = SendWqe {
            wr_id,
            op,
            remote_addr: self.page[0].0,
            rkey: self.page[0].1,
            flags: SendFlags::from_bits_truncate(flags & 5),
            ..SendWqe::default()
        };
        match op {
            SendOp::BindMw => {
                wqe.remote_qpn = self.window;
                wqe.rkey = self.window;
                wqe.imm = self.page[1].1;
                wqe.remote_addr = self.page[1].0 + 1024;
                wqe.compare_add = 1024;
                wqe.qkey = (Access::REMOTE_WRITE | Access::REMOTE_READ).bits();
            }
            SendOp::LocalInv => wqe.rkey = self.window,
            SendOp::Flush => (wqe.imm, wqe.compare_add) = (1, 8),
            _ => {}
        }
        if lane == XRC_OUT {
            wqe.remote_qpn = self.peer_srq.1.0;
        }
        if lane == UD {
            (wqe.av, wqe.remote_qpn, wqe.qkey) = (self.av, self.lanes[UD].peer, self.setup.qkey);
        }
        wqe
    }

    /// The honest peer has receives for what host 1 sends.
    fn feed_peer(&mut self, lane: usize) {
        let sge = Sge { addr: self.page[0].0 + 4096, len: 4096, lkey: self.page[0].1 };
        while !self.lanes[lane].peer_rq.is_full() {
            self.lanes[lane].peer_rq.post(Recv { wr_id: 0, sges: vec![sge] }).expect("there is room");
        }
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// The program of host 1 posts a receive.
    pub(crate) fn post_recv(&mut self, lane: usize, bytes: &mut Bytes<'_>) {
        let len = if self.mode == Mode::Stranger { 2048 } else { u32::from(bytes.half()) % 2048 };
        let sge = Sge { addr: self.page[1].0 + 2048, len, lkey: self.page[1].1 };
        let wr_id = self.id();
        if lane == TAG && bytes.byte() & 1 == 0 {
            let mut sges = [Sge::default(); MAX_TAG_SGE];
            sges[0] = sge;
            let buffer = TaggedBuffer { wr_id, tag: u64::from(bytes.byte() & 3), mask: 3, sges, num_sge: 1 };
            let seen = (bytes.byte() & 1 == 0).then_some(u32::from(bytes.byte()));
            let op = TagOp { wr_id: 0, change: TagChange::Add(buffer), seen, signaled: false };
            if self.net.hosts[1].nic.change_tags(self.srqs[2], &op).is_ok() {
                self.recvs.insert(wr_id, u64::from(len));
            }
            return;
        }
        if !self.lanes[lane].disturbed && self.lanes[lane].rq.post(Recv { wr_id, sges: vec![sge] }).is_ok() {
            self.recvs.insert(wr_id, u64::from(len));
            self.posts += 1;
        }
    }

    /// The honest peer sends something, for which there is a receive if it needs one.
    pub(crate) fn honest_send(&mut self, lane: usize, bytes: &mut Bytes<'_>) {
        let (op, len) = (bytes.byte(), u32::from(bytes.half()) % LONGEST);
        if matches!(lane, XRC_OUT | TAG | UD) || self.lanes[lane].peer_sq.is_full() {
            return;
        }
        let ops: &[SendOp] = match lane {
            UC => &[SendOp::Write, SendOp::Send],
            _ => &[SendOp::Write, SendOp::Send, SendOp::Read, SendOp::FetchAdd],
        };
        let op = ops[usize::from(op) % ops.len()];
        if op == SendOp::Send {
            self.post_recv(lane, &mut Bytes(&[0xff, 0x07, 1]));
        }
        let len = if op == SendOp::FetchAdd { 8 } else { len };
        let wqe = SendWqe {
            wr_id: self.id(),
            op,
            remote_addr: self.page[1].0,
            rkey: self.page[1].1,
            remote_qpn: self.srqs[1].0,
            ..SendWqe::default()
        };
        let sge = Sge { addr: self.page[0].0, len, lkey: self.page[0].1 };
        let lane = &mut self.lanes[lane];
        lane.peer_sq.post(Send { wqe, sges: vec![sge], inline: None }).expect("there is room");
        lane.honest += 1;
        let peer = lane.peer;
        self.posts += 1;
        self.net.doorbell(0, peer);
    }

    /// The program of host 1 takes a QP to another state, or through RESET back to RTS.
    pub(crate) fn change_state(&mut self, lane: usize, bytes: &mut Bytes<'_>) {
        let to = bytes.pick(&[QpState::Err, QpState::Reset, QpState::Init, QpState::Sqd, QpState::Rts]);
        if self.mode == Mode::Stranger {
            return;
        }
        let (now, qpn, ud) = (self.net.now(), self.lanes[lane].qpn, lane == UD);
        let host = &mut self.net.hosts[1];
        if matches!(to, QpState::Err | QpState::Sqd) {
            let _ = host.to_state(qpn, to, now);
        } else {
            host.to_state(qpn, QpState::Reset, now).expect("RESET is always possible");
            if to == QpState::Init {
                let setup = self.setup;
                host.to_init(qpn, ud, &setup, now);
            }
            let lane = &mut self.lanes[lane];
            lane.sent.clear();
            (lane.end, lane.acked) = (0, Acknowledged::default());
        }
        self.lanes[lane].disturbed = !matches!(to, QpState::Err | QpState::Rts);
        if to == QpState::Rts {
            self.bring_up(lane, false);
        }
    }

    /// The program of host 1 registers memory anew, or takes rights from a QP.
    pub(crate) fn change_memory(&mut self, bytes: &mut Bytes<'_>) {
        let which = bytes.byte();
        if self.mode == Mode::Stranger {
            return;
        }
        let (now, qpn) = (self.net.now(), self.lanes[usize::from(which >> 4) % LANES].qpn);
        let host = &mut self.net.hosts[1];
        let access = if which & 1 == 0 { all_rights() } else { Access::empty() };
        if which & 2 == 0 {
            let _ = host.modify(qpn, &QpAttr { access, ..QpAttr::default() }, QpAttrMask::ACCESS_FLAGS, now);
        } else if which & 4 == 0 {
            let (addr, key) = self.page[1];
            if host.nic.dereg_mr(key).is_ok() {
                let attr = MrAttr { pd: host.pd, addr, length: PAGE, iova: addr, access: all_rights() };
                let fresh = host.nic.reg_mr(attr).expect("a good registration");
                self.keys.push((addr, key));
                self.page[1].1 = fresh;
            }
        } else {
            host.env.gone = if which & 8 == 0 { 0..0 } else { self.page[1].0 + 4096..self.page[1].0 + PAGE };
        }
    }

    /// Frames that host 1 dropped, by its counters.
    pub(crate) fn drops(&self) -> u64 {
        let counters = self.net.hosts[1].nic.counters();
        let named = starverbs_core::Counters::NAMES.iter().zip(counters.values());
        named.filter(|(name, _)| name.starts_with("drop_")).map(|(_, value)| value).sum()
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
        self.net.connect(QpType::Rc, (0, pair[0].0), (1, pair[1].0), &setup);
        pair
    }
}
