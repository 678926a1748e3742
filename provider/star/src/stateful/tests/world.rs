//! Both ends of a connection on a wire that loses, repeats and delays: SF's half, SL's real card, and a plain
//! SL host.
//!
//! No plan of tools/soak takes its place: the tests look into the stream, the registry and the packets of one
//! half, hold back packets, and send what no SL host sends. What programs see is tested there, by the oracle.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::vec::Vec;

use starverbs_core::congestion::{Aimd, WindowLimits};
use starverbs_core::engine::{TakenRecv, TransmitStatus};
use starverbs_core::env::{self, Dma, Env, Port};
use starverbs_core::mr::{MemoryRule, MrAttr, Plain};
use starverbs_core::rng::Rng;
use starverbs_core::{AsyncEvent, Av, FrameMeta, Gid, Seg, SendFlags, SendWqe};

use super::super::*;
use super::queues::{Cq, Rq, Slot, Sq};
use crate::answers::Answers;
use crate::bounds::Bounds;
use crate::control::{Control, MAX_CONTROL};
use crate::env::{SlEvent, StarDest, StarSource};
use crate::form::Form;
use crate::message::{CQE_BODY, CqeMsg, MAX_WQE, encode_recv, encode_send};
use crate::ring::{CQE_SLOT, REPLAY_SLOT, Stamp, slot};
use crate::stateless;
use crate::token::{CardSecret, SlotArea, Token};
use crate::wire::{CardHalf, Opt, Prefix, Ptype, StarHead, StarHeader, StarPacket};

pub(super) const SF: Gid = Gid::from_ipv4([10, 0, 0, 1]);
pub(super) const SL: Gid = Gid::from_ipv4([10, 0, 0, 2]);
pub(super) const SF_QPN: Qpn = 0x11;
const SL_QPN: Qpn = 0x22;
pub(super) const EPOCH: u32 = 0x0007_0301;
pub(super) const SL_KEY: u32 = 77;
pub(super) const SL_PD: PdId = PdId(9);
const MS: Nanos = 1_000_000;

pub(super) struct Host {
    base: u64,
    pub(super) memory: Vec<u8>,
    /// Where its card has written, in this order
    pub(super) writes: Vec<u64>,
    pub(super) out: Vec<(u16, Vec<u8>)>,
    pub(super) events: Vec<AsyncEvent>,
    news: Vec<SlEvent>,
    /// What stateful ends may keep, and what one keeps
    pub(super) most: usize,
    pub(super) kept: Cell<usize>,
}

impl Host {
    fn new(base: u64) -> Self {
        let (events, news) = (Vec::new(), Vec::new());
        let (memory, writes, out, kept) = (Vec::new(), Vec::new(), Vec::new(), Cell::default());
        Host { base, memory, writes, out, events, news, most: usize::MAX, kept }
    }
    pub(super) fn alloc(&mut self, len: usize) -> u64 {
        let at = self.memory.len().next_multiple_of(64);
        self.memory.resize(at + len, 0xa5);
        self.base + at as u64
    }
    pub(super) fn read(&self, addr: u64, len: usize) -> &[u8] {
        let at = (addr - self.base) as usize;
        &self.memory[at..at + len]
    }
    pub(super) fn word(&self, addr: u64) -> u64 {
        u64::from_ne_bytes(self.read(addr, 8).try_into().unwrap())
    }
    pub(super) fn put(&mut self, addr: u64, data: &[u8]) {
        let at = (addr - self.base) as usize;
        self.memory[at..at + data.len()].copy_from_slice(data);
    }
}

impl Env for Host {
    type Congestion = Aimd;
    type Engine = core::convert::Infallible;
    type Sq = Sq;
    type Rq = Rq;
    type Cq = Cq;
    type Stats = Rc<Counters>;
}

impl Dma for Host {
    type Mrs = Plain;
    fn dma_write(&mut self, addr: u64, data: &[u8]) -> bool {
        self.writes.push(addr);
        self.put(addr, data);
        true
    }

    fn dma_copy(&mut self, from: u64, to: &mut [u8]) -> bool {
        to.copy_from_slice(self.read(from, to.len()));
        true
    }

    fn dma_fetch_add(&mut self, addr: u64, add: u64) -> Option<u64> {
        let before = self.word(addr);
        self.put(addr, &before.wrapping_add(add).to_ne_bytes());
        Some(before)
    }

    fn dma_compare_swap(&mut self, addr: u64, compare: u64, swap: u64) -> Option<u64> {
        let before = self.word(addr);
        if before == compare {
            self.put(addr, &swap.to_ne_bytes());
        }
        Some(before)
    }

    fn dma_store(&mut self, addr: u64, bytes: [u8; 8]) -> bool {
        self.put(addr, &bytes);
        true
    }

    fn dma_fence(&mut self) {}

    fn begin_payload(&mut self) {}

    fn dma_read(&mut self, from: Seg) -> Option<Seg> {
        Some(from)
    }
}

impl Port for Host {
    fn send_frame(&mut self, _: &Av, _: &[u8], _: &[Seg], _: u8, _: bool) {
        panic!("no RoCEv2 here");
    }

    fn can_send(&self) -> bool {
        self.out.len() < 64
    }

    fn is_own(&self, _: &Gid) -> bool {
        false
    }
}

impl env::Host for Host {
    fn event(&mut self, event: AsyncEvent) {
        self.events.push(event);
    }
}

impl StarEnv for Host {
    fn can_send_star(&self) -> bool {
        self.can_send()
    }
    fn send_star(&mut self, to: StarDest<'_>, head: &StarHead, data: &[u8], payload: &[Seg], _: bool) {
        let mut frame = head.bytes().to_vec();
        frame.extend_from_slice(data);
        for seg in payload {
            frame.extend_from_slice(self.read(seg.addr, seg.len as usize));
        }
        self.out.push((to.port, frame));
    }
    fn star_load(&mut self, addr: u64) -> Option<[u8; 8]> {
        Some(self.word(addr).to_ne_bytes())
    }
    fn may_keep(&self, _: &Sq, bytes: usize) -> bool {
        let fits = bytes <= self.most;
        if fits {
            self.kept.set(bytes);
        }
        fits
    }
    fn star_event(&mut self, event: SlEvent) {
        self.news.push(event);
    }
}

struct NoSrq;

impl SharedReceives for NoSrq {
    fn take(&mut self, _: Qpn, _: &mut [Sge]) -> Option<TakenRecv> {
        None
    }
}

/// What the wire does, in percent.
#[derive(Clone, Copy)]
pub(super) struct Faults {
    pub(super) loss: u64,
    pub(super) repeat: u64,
    pub(super) late: u64,
    /// By how much those are at most, ns: less than the wire's own order allows, by default
    pub(super) late_by: u64,
}

impl Default for Faults {
    fn default() -> Faults {
        Faults { loss: 0, repeat: 0, late: 0, late_by: 90_000 }
    }
}

/// One of SL's queues at its host.
#[derive(Default)]
pub(super) struct HostQueue {
    wqes: Vec<(Opt, Vec<u8>, bool, Nanos)>,
    next: u32,
    pub(super) done: Vec<(u32, CqeMsg)>,
}

pub(super) struct World {
    pub(super) sf: Host,
    pub(super) sl: Host,
    pub(super) conn: Stateful<Host>,
    pub(super) mrs: MrTable,
    pub(super) registry: RuleRegistry,
    pub(super) path: Path<Aimd>,
    pub(super) stats: Rc<Counters>,
    /// What SL's card owes
    answers: Answers,
    pub(super) now: Nanos,
    pub(super) faults: Faults,
    pub(super) rng: Rng,
    pub(super) cut: bool,
    /// Nothing comes to SF
    pub(super) deaf: bool,
    /// Before this SL's card does nothing with what comes
    pub(super) held: Nanos,
    /// Packets that left for SL's stateless half: kind, address
    pub(super) seen: Vec<(Ptype, u64)>,
    /// How often SL's card was built: for each packet anew
    pub(super) cards: u64,
    /// Times that SF asked which rules there are
    pub(super) inquiries: u32,
    /// The SL host's sum has one rule more than SF's card knows
    pub(super) has_more_rules: bool,
    wire: BTreeMap<(Nanos, u64), (Gid, u16, Vec<u8>)>,
    count: u64,
    pub(super) sq: Sq,
    rq: Rq,
    pub(super) scq: Cq,
    pub(super) rcq: Cq,
    pub(super) sf_key: u32,
    pub(super) lib: [HostQueue; 2],
    setup: Setup,
    secret: CardSecret,
}

pub(super) const REGION: usize = 1 << 18;

macro_rules! card {
    ($w:expr) => {
        CardCtx {
            env: &mut $w.sf,
            mrs: &mut $w.mrs,
            registry: &mut $w.registry,
            srqs: &mut NoSrq,
            path: &mut $w.path,
            rpc: EngineRpc::default(),
            stats: &$w.stats,
            now: $w.now,
        }
    };
}

fn packet_of_sl(frame: &[u8]) -> StarPacket<'_> {
    StarPacket::parse(CardHalf::Stateful, frame).expect("SL sends good packets")
}

impl World {
    /// With 32 packets under way at most.
    pub(super) fn new(seed: u64, tune: impl FnOnce(&mut Local<Host>, &mut Setup)) -> Self {
        World::with_window(seed, 32, tune)
    }

    /// With so many.
    pub(super) fn with_window(
        seed: u64,
        window: u32,
        tune: impl FnOnce(&mut Local<Host>, &mut Setup),
    ) -> Self {
        let (mut sf, mut sl) = (Host::new(0x1000_0000), Host::new(0x2000_0000));
        let (mut mrs, mut registry, stats) =
            (MrTable::default(), RuleRegistry::default(), Rc::<Counters>::default());
        let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let (addr, pd) = (sf.alloc(REGION), PdId(1));
        let length = REGION as u64;
        let sf_key = mrs
            .register(MrAttr { pd, addr, length, iova: addr, access: all, ..MrAttr::default() }, seed)
            .unwrap();
        let theirs = sl.alloc(REGION);
        let mut setup = Setup {
            boot: 5,
            pd: SL_PD,
            mtu: Mtu::M1024,
            sq_depth: 16,
            rq_depth: 32,
            srq: false,
            token: Token::NONE,
            replay_slots: 4,
            access: all,
            max_rd_atomic: 4,
            rnr_retry: 7,
            min_rnr_timer: 1,
        };
        let (sq, rq) = (Sq::new(), Rq::default());
        let (scq, rcq) = (Cq::default(), Cq::default());
        let mut local = Local {
            qpn: SF_QPN,
            pd,
            sq: sq.clone(),
            rq: Some(rq.clone()),
            send_cq: scq.clone(),
            recv_cq: rcq.clone(),
            patience: Silence::of(500 * MS),
            access: all,
            max_msg_log: 20,
            mtu: Mtu::M1024,
            max_recv_sge: 4,
            sig_all: true,
            max_rd_atomic: 4,
            min_rnr_timer: 1,
            rnr_retry: 7,
            form: Form::default(),
        };
        tune(&mut local, &mut setup);
        let len = SlotArea::len_for(setup.slot_bytes());
        let area = SlotArea::new(sl.alloc(len as usize), len).unwrap();
        let secret = CardSecret::new([seed, 1]);
        setup.token = secret.token(&SF, Prefix { qpn: SL_QPN, epoch: EPOCH }, area);
        sl.put(area.gate(), &setup.token.mac.to_ne_bytes());
        stamp(&mut sl, setup.send_ring(), setup.sq_depth);
        stamp(&mut sl, setup.recv_ring(), setup.rq_depth);
        let stamps = (0..setup.replay_slots).map(|n| Stamp::before(EPOCH, n, setup.replay_slots));
        for (n, stamp) in stamps.chain([Stamp::before(EPOCH, 0, 1)]).enumerate() {
            sl.put(setup.replay() + n as u64 * REPLAY_SLOT, &stamp.word().to_ne_bytes());
        }
        let av = Av { dgid: SL, sgid: SF, ..Av::default() };
        let peer = SlPeer { av, port: 4793, control_port: 4794, qpn: SL_QPN, epoch: EPOCH };
        let (env, mrs_of, srqs) = (&mut sf, &mut mrs, &mut NoSrq);
        let mut path = Path::new(&SL, &WindowLimits { max: 1 << 20, delay_target: None });
        let registry_of = &mut registry;
        let (path_of, rpc) = (&mut path, EngineRpc::default());
        let mut lent = CardCtx {
            env,
            mrs: mrs_of,
            registry: registry_of,
            srqs,
            path: path_of,
            rpc,
            stats: &stats,
            now: 1,
        };
        let start = Start { first_send: 0, setup, peer, channel: ControlChannel::new(), window };
        let mut conn = Stateful::new(&mut lent, local, start).unwrap();
        conn.open();
        let rule = MemoryRule {
            key: SL_KEY,
            pd: SL_PD,
            qpn: 0,
            addr: theirs,
            len: REGION as u64,
            iova: theirs,
            access: all,
        };
        registry.add(conn.conn(), rule).unwrap();
        let mut answers = Answers::default();
        if seed.is_multiple_of(2) {
            /* its card keeps what comes before its turn */
            answers.begin();
        }
        World {
            sf,
            sl,
            conn,
            mrs,
            registry,
            path,
            answers,
            stats,
            now: 1,
            faults: Faults::default(),
            rng: Rng::new([seed, 3]),
            cut: false,
            deaf: false,
            held: 0,
            seen: Vec::new(),
            cards: 0,
            inquiries: 0,
            has_more_rules: false,
            wire: BTreeMap::new(),
            count: 0,
            sq,
            rq,
            scq,
            rcq,
            sf_key,
            secret,
            lib: Default::default(),
            setup,
        }
    }

    /// An address of SF's, and of SL's, region.
    pub(super) fn ours(&self, offset: u64) -> u64 {
        self.sf.base + offset
    }
    pub(super) fn theirs(&self, offset: u64) -> u64 {
        self.sl.base + offset
    }

    pub(super) fn sge(&self, addr: u64, len: u32) -> Sge {
        let lkey = if addr >= self.sl.base { SL_KEY } else { self.sf_key };
        Sge { addr, len, lkey }
    }

    /// SF's program posts.
    pub(super) fn post(&mut self, wqe: SendWqe, sges: &[Sge], inline: bool) {
        let length = sges.iter().map(|sge| sge.len).sum();
        let mut wqe = SendWqe { length, ..wqe };
        wqe.flags.set(SendFlags::INLINE, inline);
        self.post_any(wqe, sges);
    }

    /// The same, whatever the WQE says of its length.
    pub(super) fn post_any(&mut self, wqe: SendWqe, sges: &[Sge]) {
        let mut wqe = SendWqe { num_sge: sges.len() as u16, ..wqe };
        let first = sges.first().map_or(Seg::default(), |sge| Seg { addr: sge.addr, len: sge.len });
        let index = self.sq.posted();
        wqe.wr_id = index.into();
        self.sq.post(Slot { wqe, sges: sges.to_vec(), inline: first });
        self.conn.handle_doorbell(&mut card!(self));
    }

    /// Whether the short way takes an answer with this data, `psn` and `addr` beyond that to the first packet
    /// under way.
    pub(super) fn read_short(&mut self, psn: u32, addr: u64, data: &[u8]) -> bool {
        let (_, _, frame) = self.wire.values().next().expect("a packet under way");
        let StarHeader { psn: first, addr: at, .. } =
            StarPacket::parse(CardHalf::Stateless, frame).unwrap().header;
        self.conn.read_short(&mut card!(self), (first.plus(psn), at + addr), data)
    }

    pub(super) fn post_recv(&mut self, wr_id: u64, sges: &[Sge]) {
        self.rq.0.borrow_mut().push_back((wr_id, sges.to_vec()));
        self.conn.handle_doorbell(&mut card!(self));
    }

    /// SL's program posts.
    pub(super) fn sl_post(&mut self, wqe: SendWqe, sges: &[Sge], inline: bool) -> u32 {
        let mut wqe = wqe;
        wqe.flags.set(SendFlags::INLINE, inline);
        let bytes = sges.first().map_or(Vec::new(), |s| self.sl.read(s.addr, s.len as usize).to_vec());
        let mut room = [0; MAX_WQE];
        let len = encode_send(&wqe, sges, &bytes, &mut room).unwrap();
        self.lib[0].wqes.push((Opt::of(wqe.op), room[..len].to_vec(), false, 0));
        self.lib[0].wqes.len() as u32 - 1
    }

    pub(super) fn sl_post_recv(&mut self, sges: &[Sge]) {
        let mut room = [0; MAX_WQE];
        let len = encode_recv(sges, &mut room).unwrap();
        self.lib[1].wqes.push((Opt::Recv, room[..len].to_vec(), false, 0));
    }

    /// WQEs of SL's queue that are not complete at the host.
    pub(super) fn sl_outstanding(&self, queue: usize) -> usize {
        self.lib[queue].wqes.len() - self.lib[queue].next as usize
    }

    /// SF's program takes its QP to ERR.
    pub(super) fn fail(&mut self) {
        self.conn.enter_error(&mut card!(self));
    }

    /// One packet on the wire.
    pub(super) fn throw(&mut self, to: Gid, port: u16, frame: Vec<u8>) {
        if self.cut || to == SF && self.deaf || self.rng.word() % 100 < self.faults.loss {
            return;
        }
        let copies = 1 + u64::from(self.rng.word() % 100 < self.faults.repeat);
        for _ in 0..copies {
            let late = self.rng.word() % 100 < self.faults.late;
            let delay = 5_000 + if late { self.rng.word() % self.faults.late_by } else { 0 };
            self.count += 1;
            let held = if to == SL { self.held } else { 0 };
            let at = held.max(self.now + delay);
            self.wire.insert((at, self.count), (to, port, frame.clone()));
        }
    }

    /// Time passes in which SF's card does nothing; then its timers come first.
    pub(super) fn stall(&mut self, until: Nanos) {
        self.now = until;
        self.conn.handle_timeout(&mut card!(self));
        self.drain();
    }

    /// Of what SF sends now the first packet is lost.
    pub(super) fn lose_first(&mut self) {
        self.leave();
        self.sf.out.remove(0);
        self.drain();
    }

    /// What SF sends now lies in its port. Gives the packets' lengths.
    pub(super) fn leave(&mut self) -> Vec<usize> {
        while matches!(self.conn.transmit(&mut card!(self)), TransmitStatus::More | TransmitStatus::PortFull)
        {
        }
        self.sf.out.iter().map(|(_, frame)| frame.len()).collect()
    }

    fn drain(&mut self) {
        for (port, frame) in std::mem::take(&mut self.sf.out) {
            if port == 4793 {
                let packet = StarPacket::parse(CardHalf::Stateless, &frame).expect("SF sends good packets");
                self.seen.push((packet.header.ptype, packet.header.addr));
            }
            self.throw(SL, port, frame);
        }
        for (port, frame) in std::mem::take(&mut self.sl.out) {
            self.throw(SF, port, frame);
        }
    }

    /// Everything that is due now, and then on to what is due next. False: nothing is.
    pub(super) fn step(&mut self) -> bool {
        self.step_to(Nanos::MAX)
    }

    /// As `step`, but not beyond `end`.
    fn step_to(&mut self, end: Nanos) -> bool {
        while let Some(first) = self.wire.first_entry().filter(|first| first.key().0 <= self.now) {
            let (to, port, frame) = first.remove();
            if to == SF {
                /* what has come with it goes through the engine with it, but for messages */
                let mut behind = Vec::new();
                while let Some(next) = self.wire.first_entry().filter(|next| next.key().0 <= self.now)
                    && next.get().0 == SF
                    && !packet_of_sl(&next.get().2).header.migrate
                {
                    behind.push(next.remove().2);
                }
                let mut more = behind.iter().map(|frame| packet_of_sl(frame));
                self.conn.handle_packets(&mut card!(self), &SL, &packet_of_sl(&frame), || more.next());
            } else if port == 4793 {
                self.serve(&StarPacket::parse(CardHalf::Stateless, &frame).unwrap());
            } else {
                self.sum_up(&StarPacket::parse(CardHalf::Stateful, &frame).unwrap());
            }
            self.drain();
        }
        self.answers.flush(&mut self.sl);
        self.drain();
        if self.conn.next_deadline().is_some_and(|at| at <= self.now) {
            self.conn.handle_timeout(&mut card!(self));
        }
        self.host_turn();
        while matches!(self.conn.transmit(&mut card!(self)), TransmitStatus::More | TransmitStatus::PortFull)
        {
            self.drain();
        }
        self.conn.acknowledge(&mut card!(self));
        self.drain();
        let wire = self.wire.first_key_value().map(|((at, _), _)| *at);
        let wqe = self.lib.iter().flat_map(|q| &q.wqes).filter(|w| !w.2).map(|w| w.3).min();
        let next = [wire, wqe, self.conn.next_deadline()].into_iter().flatten().min();
        self.now = next.unwrap_or(self.now).max(self.now + 1).min(end);
        next.is_some()
    }

    /// A packet for SL's card, which is built for it from what SL's host has registered, and is no more
    /// behind it.
    fn serve(&mut self, packet: &StarPacket<'_>) {
        let mut bounds = Bounds::new();
        bounds.add(self.theirs(0), REGION as u64, self.setup.access).unwrap();
        let meta = FrameMeta { src: SF, dst: SL, ..FrameMeta::default() };
        let card =
            stateless::StatelessCard { bounds: Some(&bounds), secret: &self.secret, stats: &self.stats };
        self.cards += 1;
        stateless::handle(
            &card,
            &mut self.answers,
            &mut self.sl,
            StarSource { meta: &meta, port: 4794 },
            packet,
        );
        if self.rng.word().is_multiple_of(4) {
            self.answers.flush(&mut self.sl);
        }
    }

    /// The SL host answers a question with the sum of the rules that SF's card knows.
    fn sum_up(&mut self, packet: &StarPacket<'_>) {
        let (seq, from) = (packet.header.psn, Prefix { qpn: SL_QPN, epoch: EPOCH });
        let question = Control::decode(packet.data);
        if matches!(question, Some(Control::RuleQuery | Control::ResendRules)) {
            self.throw(SF, 4794, StarHead::control_ack(SF_QPN, from, seq).bytes().to_vec());
        }
        if question == Some(Control::RuleQuery) {
            self.inquiries += 1;
            let mut sum = self.registry.sum(self.conn.conn()).unwrap();
            sum.rules += u32::from(self.has_more_rules);
            self.send_control(self.inquiries - 1, Control::RuleSum(sum));
        }
    }

    /// A control message of the SL host.
    pub(super) fn send_control(&mut self, seq: u32, message: Control) {
        self.throw(SF, 4794, World::control(seq, message));
    }

    /// Its bytes.
    pub(super) fn control(seq: u32, message: Control) -> Vec<u8> {
        let mut room = [0; MAX_CONTROL];
        let len = message.encode(&mut room).unwrap();
        let from = Prefix { qpn: SL_QPN, epoch: EPOCH };
        let head = StarHead::control(SF_QPN, from, Psn::new(seq), len as u16);
        [head.bytes(), &room[..len]].concat()
    }

    fn host_turn(&mut self) {
        for event in std::mem::take(&mut self.sl.news) {
            if let Some(upto) = event.upto {
                for (queue, upto) in self.lib.iter_mut().zip([upto.sends, upto.recvs]) {
                    queue.wqes.iter_mut().take(upto.get() as usize).for_each(|wqe| wqe.2 = true);
                }
            }
            let queue = &mut self.lib[event.queue as usize];
            /* one that tells of all may name none */
            if let crate::env::News::Stored(seq) = event.what
                && let Some(wqe) = queue.wqes.get_mut(seq.get() as usize)
            {
                wqe.2 = true;
            }
        }
        let depths = [self.setup.sq_depth, self.setup.rq_depth];
        for (n, base) in [self.setup.send_ring(), self.setup.recv_ring()].into_iter().enumerate() {
            let queue = &mut self.lib[n];
            for seq in queue.next..queue.wqes.len() as u32 {
                let at = slot(base, depths[n], seq, CQE_SLOT);
                let stamp = Stamp { epoch: EPOCH, seq }.word();
                if self.sl.word(at) != stamp {
                    break;
                }
                let body: [u8; CQE_BODY] = self.sl.read(at + 8, CQE_BODY).try_into().unwrap();
                queue.done.push((seq, CqeMsg::from_body(at, &body).unwrap()));
                queue.next = seq + 1;
            }
            let credit = queue.next + depths[n];
            let mut frames = Vec::new();
            for (seq, (opt, bytes, stored, at)) in queue.wqes.iter_mut().enumerate().take(credit as usize) {
                if !*stored && *at <= self.now {
                    *at = self.now + MS;
                    let header = StarHeader {
                        ptype: Ptype::Wqep,
                        opt: *opt,
                        migrate: false,
                        ack: true,
                        qpn: SF_QPN,
                        epoch: EPOCH as u8,
                        psn: Psn::new(seq as u32),
                        addr: 0,
                        len: bytes.len() as u16,
                    };
                    frames.push([StarHead::to_stateful(header).bytes(), bytes].concat());
                }
            }
            frames.into_iter().for_each(|frame| self.throw(SF, 4794, frame));
        }
    }

    /// A receive WQE of this sequence and so many SGEs comes to SF at once, as SL is none of ours.
    pub(super) fn receive_wqe(&mut self, seq: u32, sges: usize) {
        let sges: Vec<Sge> = (0..sges).map(|_| self.sge(self.sl.base, 1)).collect();
        let mut room = [0; MAX_WQE];
        let len = encode_recv(&sges, &mut room).unwrap();
        let header = StarHeader {
            ptype: Ptype::Wqep,
            opt: Opt::Recv,
            migrate: false,
            ack: true,
            qpn: SF_QPN,
            epoch: EPOCH as u8,
            psn: Psn::new(seq),
            addr: 0,
            len: len as u16,
        };
        let frame = [StarHead::to_stateful(header).bytes(), &room[..len]].concat();
        let packet = StarPacket::parse(CardHalf::Stateful, &frame).expect("a packet");
        self.conn.handle_packet(&mut card!(self), &SL, &packet);
    }

    /// The connection ends.
    pub(super) fn close(mut self) -> Host {
        self.conn.close(&mut card!(self));
        self.sf
    }

    /// A packet without data comes to SF at once.
    pub(super) fn receive(&mut self, header: StarHeader) {
        self.receive_from(&SL, StarHead::to_stateful(header).bytes());
    }

    /// These bytes come to SF from an address, at once.
    pub(super) fn receive_from(&mut self, source: &Gid, bytes: &[u8]) {
        let packet = StarPacket::parse(CardHalf::Stateful, bytes).expect("a packet");
        self.conn.handle_packet(&mut card!(self), source, &packet);
        self.drain();
    }

    /// Steps until `done`, for at most a minute of virtual time.
    pub(super) fn run(&mut self, mut done: impl FnMut(&mut World) -> bool) {
        let end = self.now + 60_000 * MS;
        while !done(self) {
            let more = self.step() && self.now < end;
            assert!(more || done(self), "it does not end: {}", self.now);
        }
    }

    /// Steps for so long, as far as there is anything to do.
    pub(super) fn pass(&mut self, time: Nanos) {
        let end = self.now + time;
        while self.now < end && self.step_to(end) {}
    }

    /// Status of each of SF's sends that is complete.
    pub(super) fn sends(&self) -> Vec<(u64, WcStatus)> {
        self.scq.0.borrow().iter().map(|cqe| (cqe.wr_id, cqe.status)).collect()
    }
}

/// Stamps a ring in SL's memory as its host does.
fn stamp(sl: &mut Host, ring: u64, depth: u32) {
    for index in 0..depth {
        let word = Stamp::before_psn(EPOCH, index, depth).word();
        sl.put(slot(ring, depth, index, CQE_SLOT), &word.to_ne_bytes());
    }
}
