//! One host: a card and what the card needs.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use starverbs_core::env::{self, Dma, Port};
use starverbs_core::mr::{MrAttr, Plain};
use starverbs_core::qp::{QpAttr, QpAttrMask as M, QpInit, RecvSource};
use starverbs_core::relay::{LinkError, LinkId, Relay};
use starverbs_core::{
    Access, AsyncEvent, Av, Counters, Env, FrameMeta, Gid, Mtu, Nanos, Nic, NicConfig, NicError, PdId, Psn,
    QpState, QpType, Qpn, Seg, Sge, SrqId,
};
use starverbs_star::control::Preference;

use crate::memory::{Memory, READ, WRITE};
use crate::queues::{SimCq, SimRq, SimSq};
use crate::star::StarFrame;
use crate::star::StarPort;
use crate::watch::{EventLog, Touch};

/// A frame that waits for the port's flush.
pub(crate) struct Queued {
    pub(crate) to: Av,
    /// The header and what was copied at once
    bytes: Vec<u8>,
    /// What is gathered when it leaves
    payload: Vec<Seg>,
    pad: u8,
}

/// What the card of a host works on.
pub struct SimEnv {
    /// The host's memory
    pub memory: Memory,
    /// What the program would learn from ibv_get_async_event
    pub events: Vec<AsyncEvent>,
    /// Frames the port takes between flushes
    pub port: usize,
    /// The host's address
    pub gid: Gid,
    /// Where memory went away under its regions, as it may with on-demand paging
    pub gone: core::ops::Range<u64>,
    /// XRC: the domain that it shares with other hosts, which have the links of their numbers
    pub domain: Option<PdId>,
    /// Those hosts, and how many messages to each are under way
    pub peers: BTreeMap<u32, usize>,
    /// Messages to another card that may be under way, beside those that are due
    pub link_room: usize,
    pub(crate) relays: Vec<(u32, Vec<u8>)>,
    out: Vec<Queued>,
    /// What it has of StaR
    pub star: StarPort,
    /// What the card does with memory is written down, if somebody wants to know
    pub(crate) watch: Option<Box<EventLog>>,
}

impl SimEnv {
    fn touch(&mut self, touch: impl FnOnce() -> Touch) {
        if let Some(watch) = &mut self.watch {
            watch.touches.push(touch());
        }
    }

    pub(crate) fn absent(&self, addr: u64) -> bool {
        self.gone.contains(&addr)
    }

    /// Takes the frames out of the port; payloads are read now, as a socket would.
    pub(crate) fn flush(&mut self) -> Vec<(Av, Vec<u8>)> {
        let mut frames = Vec::with_capacity(self.out.len());
        self.take_frames(|to, bytes| frames.push((to, bytes)));
        frames
    }

    /// The same one by one.
    pub(crate) fn take_frames(&mut self, mut each: impl FnMut(Av, Vec<u8>)) {
        let memory = &self.memory;
        for Queued { to, mut bytes, payload, pad } in self.out.drain(..) {
            for s in payload {
                memory.check(s.addr, s.len as usize, READ);
                bytes.extend_from_slice(memory.read(s.addr, s.len as usize));
            }
            bytes.resize(bytes.len() + usize::from(pad), 0);
            each(to, bytes);
        }
    }
}

impl Env for SimEnv {
    type Congestion = starverbs_core::congestion::AnyWindow;
    type Engine = Box<starverbs_star::stateful::Stateful<SimEnv>>;
    type Sq = SimSq;
    type Rq = SimRq;
    type Cq = SimCq;
    type Stats = Rc<Counters>;
}

impl Dma for SimEnv {
    type Mrs = Plain;
    fn dma_write(&mut self, addr: u64, data: &[u8]) -> bool {
        let there = !self.absent(addr);
        if there {
            self.memory.check(addr, data.len(), WRITE);
            self.memory.write(addr, data);
            self.touch(|| Touch::Write(Seg { addr, len: data.len() as u32 }));
        }
        there
    }

    fn dma_fetch_add(&mut self, addr: u64, add: u64) -> Option<u64> {
        if self.absent(addr) {
            return None;
        }
        self.memory.check(addr, 8, WRITE);
        let before = self.memory.word(addr);
        self.memory.set_word(addr, before.wrapping_add(add));
        Some(before)
    }

    fn dma_compare_swap(&mut self, addr: u64, compare: u64, swap: u64) -> Option<u64> {
        if self.absent(addr) {
            return None;
        }
        self.memory.check(addr, 8, WRITE);
        let before = self.memory.word(addr);
        if before == compare {
            self.memory.set_word(addr, swap);
        }
        Some(before)
    }

    fn dma_store(&mut self, addr: u64, bytes: [u8; 8]) -> bool {
        self.dma_write(addr, &bytes)
    }

    fn dma_copy(&mut self, from: u64, to: &mut [u8]) -> bool {
        let there = !self.absent(from);
        if there {
            self.touch(|| Touch::Read(Seg { addr: from, len: to.len() as u32 }));
            if let Some(change) = self.watch.as_mut().and_then(|watch| watch.before_read.as_mut()) {
                change(&mut self.memory);
            }
            self.memory.check(from, to.len(), READ);
            to.copy_from_slice(self.memory.read(from, to.len()));
        }
        there
    }

    fn dma_fence(&mut self) {}

    fn begin_payload(&mut self) {}

    fn dma_read(&mut self, from: Seg) -> Option<Seg> {
        if self.absent(from.addr) {
            return None;
        }
        self.memory.check(from.addr, from.len as usize, READ);
        Some(from)
    }
}

impl Port for SimEnv {
    fn send_frame(&mut self, to: &Av, header: &[u8], payload: &[Seg], pad: u8, volatile: bool) {
        let len: usize = payload.iter().map(|s| s.len as usize).sum();
        assert!((header.len() + len + usize::from(pad)).is_multiple_of(4), "a frame is whole words");
        self.touch(|| Touch::Frame(payload.to_vec()));
        let mut bytes = Vec::with_capacity(header.len() + len + usize::from(pad));
        bytes.extend_from_slice(header);
        let payload = if volatile {
            for s in payload {
                bytes.extend_from_slice(self.memory.read(s.addr, s.len as usize));
            }
            Vec::new()
        } else {
            payload.to_vec()
        };
        self.out.push(Queued { to: *to, bytes, payload, pad });
    }

    fn can_send(&self) -> bool {
        self.out.len() + self.star.waiting() < self.port
    }

    fn is_own(&self, source: &Gid) -> bool {
        *source == self.gid
    }
}

impl env::Host for SimEnv {
    fn event(&mut self, event: AsyncEvent) {
        self.events.push(event);
    }

    fn link(&mut self, domain: PdId, block: u16) -> Result<LinkId, LinkError> {
        /* the block of host n is n + 1 */
        let host = u32::from(block).wrapping_sub(1);
        let there = self.domain == Some(domain) && self.peers.contains_key(&host);
        if there { Ok(LinkId(host)) } else { Err(LinkError::Gone) }
    }

    fn relay(&mut self, link: LinkId, message: &Relay<'_>) -> bool {
        let room = self.link_room;
        let Some(under_way) = self.peers.get_mut(&link.0).filter(|n| message.is_due() || **n < room) else {
            return false;
        };
        *under_way += 1;
        let (head, data) = message.encode();
        self.relays.push((link.0, [&head[..], data].concat()));
        true
    }
}

/// A host with its card.
pub struct SimHost {
    /// Its address
    pub gid: Gid,
    /// The card
    pub nic: Nic<SimEnv>,
    /// What the card works on
    pub env: SimEnv,
    /// The protection domain of everything that the helpers here make
    pub pd: PdId,
    /// What the helpers here registered, and its keys
    pub regions: Vec<(u32, MrAttr)>,
    /// Multicast groups that it has joined on the wire
    pub groups: Vec<Gid>,
    /// Who serves the ends of StaR connections, where the card has StaR
    pub star: Option<Box<starverbs_star::host::Ends<SimEnv>>>,
    /// What its clock showed last
    pub(crate) now: Nanos,
    pub(crate) preferences: BTreeMap<Qpn, Preference>,
    /// Frames that came and that the card has not taken yet
    pub(crate) came: VecDeque<(FrameMeta, Vec<u8>)>,
    /// StaR's, in an order of their own
    pub(crate) star_came: VecDeque<StarFrame>,
    /// Doorbells that wait until the card runs
    pub(crate) doorbells: Vec<Qpn>,
}

/// How two QPs are connected.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Path MTU
    pub mtu: Mtu,
    /// Local ACK timeout code
    pub timeout: u8,
    /// Transport retries
    pub retry_cnt: u8,
    /// RNR retries
    pub rnr_retry: u8,
    /// RNR NAK timer code
    pub min_rnr_timer: u8,
    /// READs and atomics outstanding, both ways
    pub rd_atomic: u8,
    /// First PSN, both ways
    pub psn: u32,
    /// UD: Q_Key
    pub qkey: u32,
    /// Rights of the QPs
    pub access: Access,
}

impl Default for Setup {
    fn default() -> Self {
        let remote = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        Setup {
            mtu: Mtu::M1024,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 1,
            rd_atomic: 16,
            psn: 0,
            qkey: 0x1111_1111,
            access: Access::LOCAL_WRITE | remote | Access::FLUSH_GLOBAL,
        }
    }
}

impl SimHost {
    /// Host number `id`, 10.0.0.`id + 1`, with one block of QPNs.
    pub fn new(id: u8, cfg: NicConfig, seed: u64) -> Self {
        let mut nic = Nic::new(cfg, Rc::new(Counters::default()), [seed, 0], Plain::default());
        nic.add_block(u16::from(id) + 1).expect("a fresh card takes a block");
        let pd = nic.alloc_pd().expect("a fresh card gives a PD");
        let memory = Memory::new(0x10_0000_0000 * (u64::from(id) + 1));
        let gid = Gid::from_ipv4([10, 0, 0, id + 1]);
        let env = SimEnv {
            memory,
            events: Vec::new(),
            port: 64,
            gid,
            gone: 0..0,
            out: Vec::new(),
            domain: None,
            peers: BTreeMap::new(),
            link_room: 64,
            relays: Vec::new(),
            star: StarPort::default(),
            watch: None,
        };
        SimHost {
            gid,
            nic,
            env,
            pd,
            regions: Vec::new(),
            groups: Vec::new(),
            star: None,
            now: 1,
            preferences: BTreeMap::new(),
            came: VecDeque::new(),
            star_came: VecDeque::new(),
            doorbells: Vec::new(),
        }
    }

    /// Allocates `len` bytes and registers them; gives address and key.
    pub fn region(&mut self, len: u64, access: Access) -> (u64, u32) {
        self.region_of(self.pd, len, access)
    }

    fn region_of(&mut self, pd: PdId, length: u64, access: Access) -> (u64, u32) {
        let addr = self.env.memory.alloc(length);
        let attr = MrAttr { pd, addr, length, iova: addr, access, ..MrAttr::default() };
        let key = self.nic.reg_mr(attr).expect("a good registration");
        self.follow_memory();
        self.regions.push((key, attr));
        (addr, key)
    }

    /// The card gets what came, as far as it takes it.
    pub(crate) fn take_frames(&mut self, now: Nanos) {
        while self.nic.takes_frames()
            && let Some((meta, bytes)) = self.came.pop_front()
        {
            self.nic.offer_frame(&mut self.env, now, &meta, &bytes);
        }
        while self.nic.takes_frames()
            && let Some(frame) = self.star_came.pop_front()
        {
            self.take_star(now, &frame);
        }
    }

    /// As [`region`](Self::region), in another protection domain: `len` bytes of at least one that are
    /// registered.
    pub fn region_in(&mut self, pd: PdId, len: u32, access: Access) -> Sge {
        let (addr, lkey) = self.region_of(pd, u64::from(len.max(1)), access);
        Sge { addr, len, lkey }
    }

    /// An XRC target QP of `domain` in RESET. It gives no completions of its own: those are the named SRQ's.
    pub fn xrc_target(&mut self, domain: PdId) -> Qpn {
        let (usual, unused) = (std::mem::replace(&mut self.pd, domain), SimCq::new(1));
        let named = RecvSource::Xrc(SrqId(u32::MAX));
        let qpn = self.qp(QpType::XrcRecv, &SimSq::new(1), named, [&unused, &unused], false);
        self.pd = usual;
        qpn
    }

    /// An XRC initiator QP in RESET, all of whose requests are signaled.
    pub fn xrc_initiator(&mut self, sq: &SimSq, cq: &SimCq) -> Qpn {
        self.qp(QpType::XrcSend, sq, RecvSource::Own(SimRq::new(1, 1)), [cq, cq], true)
    }

    /// A QP in RESET.
    pub fn qp(
        &mut self,
        qp_type: QpType,
        sq: &SimSq,
        rq: RecvSource<SimRq>,
        cqs: [&SimCq; 2],
        all: bool,
    ) -> Qpn {
        let init = QpInit {
            qp_type,
            pd: self.pd,
            sq: sq.clone(),
            rq,
            send_cq: cqs[0].clone(),
            recv_cq: cqs[1].clone(),
            sq_sig_all: all,
            block_own_multicast: false,
            cookie: 0,
        };
        self.nic.create_qp(init).expect("QPNs are left")
    }

    /// ibv_attach_mcast(3): also joins the group on the simulated wire.
    pub fn attach(&mut self, qpn: Qpn, group: Gid) -> Result<(), NicError> {
        let SimHost { nic, groups, .. } = self;
        nic.attach_multicast(qpn, group, || {
            groups.push(group);
            Ok(())
        })
    }

    /// ibv_detach_mcast(3): leaves the group with its last QP.
    pub fn detach(&mut self, qpn: Qpn, group: Gid) -> Result<(), NicError> {
        let SimHost { nic, groups, .. } = self;
        nic.detach_multicast(qpn, &group, || groups.retain(|gid| *gid != group))
    }

    /// ibv_modify_qp(3), for ends of StaR as well.
    pub fn modify(&mut self, qpn: Qpn, attr: &QpAttr, mask: M, now: Nanos) -> Result<(), NicError> {
        let done = self.with_star(now, |star, turn| star.endpoints.modify(turn, qpn, attr, mask));
        done.flatten().unwrap_or_else(|| self.nic.modify_qp(&mut self.env, qpn, attr, mask, now))?;
        if mask.contains(M::STATE) {
            self.moved(qpn, attr.state, now);
        }
        Ok(())
    }

    /// To a state, with no other attributes.
    pub fn to_state(&mut self, qpn: Qpn, state: QpState, now: Nanos) -> Result<(), NicError> {
        self.modify(qpn, &QpAttr { state, ..QpAttr::default() }, M::STATE, now)
    }

    /// To INIT.
    pub fn to_init(&mut self, qpn: Qpn, ud: bool, setup: &Setup, now: Nanos) {
        let access = setup.access;
        let attr =
            QpAttr { state: QpState::Init, port_num: 1, access, qkey: setup.qkey, ..QpAttr::default() };
        let mask = M::STATE | M::PKEY_INDEX | M::PORT | if ud { M::QKEY } else { M::ACCESS_FLAGS };
        self.modify(qpn, &attr, mask, now).expect("RESET to INIT");
    }

    /// A connected QP of type `kind` from INIT to RTS towards `peer` at `dgid`.
    pub fn to_rts(&mut self, qpn: Qpn, kind: QpType, dgid: Gid, peer: Qpn, setup: &Setup, now: Nanos) {
        let attr = QpAttr {
            path_mtu: setup.mtu,
            rq_psn: Psn::new(setup.psn),
            sq_psn: Psn::new(setup.psn),
            dest_qpn: peer,
            av: self.av(dgid),
            max_rd_atomic: setup.rd_atomic,
            max_dest_rd_atomic: setup.rd_atomic,
            min_rnr_timer: setup.min_rnr_timer,
            timeout: setup.timeout,
            retry_cnt: setup.retry_cnt,
            rnr_retry: setup.rnr_retry,
            ..QpAttr::default()
        };
        let mut mask = M::STATE | M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN;
        if matches!(kind, QpType::Rc | QpType::XrcRecv) {
            mask |= M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
        }
        self.modify(qpn, &QpAttr { state: QpState::Rtr, ..attr }, mask, now).expect("INIT to RTR");
        let mut mask = M::STATE | M::SQ_PSN;
        if kind == QpType::XrcRecv {
            mask |= M::TIMEOUT;
        }
        if matches!(kind, QpType::Rc | QpType::XrcSend) {
            mask |= M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC;
        }
        self.modify(qpn, &QpAttr { state: QpState::Rts, ..attr }, mask, now).expect("RTR to RTS");
    }

    /// A UD QP from RESET to RTS.
    pub fn to_rts_ud(&mut self, qpn: Qpn, setup: &Setup, now: Nanos) {
        self.to_init(qpn, true, setup, now);
        self.to_state(qpn, QpState::Rtr, now).expect("INIT to RTR");
        let attr = QpAttr { state: QpState::Rts, sq_psn: Psn::new(setup.psn), ..QpAttr::default() };
        self.modify(qpn, &attr, M::STATE | M::SQ_PSN, now).expect("RTR to RTS");
    }

    /// An address vector from here to `dgid`.
    pub fn av(&self, dgid: Gid) -> Av {
        Av { dgid, sgid: self.gid, hop_limit: 64, ..Av::default() }
    }

    /// State of a QP that exists.
    pub fn state(&self, qpn: Qpn) -> QpState {
        let stateless = self.star.as_ref().and_then(|star| star.endpoints.query(qpn));
        stateless.map(|attr| attr.state).or_else(|| self.nic.qp_state(qpn)).expect("the QP exists")
    }
}
