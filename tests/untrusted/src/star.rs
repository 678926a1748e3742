//! StaR packets: what a stateless card, its host, and a stateful end do with any at all, whose checksums
//! are right.
//!
//! Host 0 is stateless, host 1 stateful, and a connection between them has work. The input says which packets
//! come between the honest ones. Both hosts' memory is watched: what is not registered is neither read nor
//! written, whatever a packet says. A packet to the stateless card is answered by one at most, so nobody is
//! flooded by what others send in his name.

use std::rc::Rc;

use starverbs_core::congestion::{AnyWindow, WindowLimits};
use starverbs_core::engine::{EngineRpc, TakenRecv, TransmitStatus};
use starverbs_core::mr::{MemoryRule, MrAttr, MrTable};
use starverbs_core::nic::Path;
use starverbs_core::{
    Access, Counters, FrameMeta, Mtu, NicConfig, PdId, Qpn, SendFlags, SendOp, SendWqe, Sge,
};
use starverbs_sim::{Faults, Net, READ, Recv, Send, SimCq, SimEnv, SimHost, SimRq, SimSq, StarFrame, WRITE};
use starverbs_star::answers::Answers;
use starverbs_star::bounds::Bounds;
use starverbs_star::channel::ControlChannel;
use starverbs_star::control::Setup;
use starverbs_star::endpoint::{Patience, SlInit, SlQp};
use starverbs_star::env::StarSource;
use starverbs_star::form::Form;
use starverbs_star::registry::{RuleRegistry, SlPeer};
use starverbs_star::stateful::{self, Local, SharedReceives, Silence, Start, Stateful};
use starverbs_star::stateless::{self, SfPeer};
use starverbs_star::token::{CardSecret, SlotArea, Token};
use starverbs_star::wire::{CardHalf, HEADER_LEN, OVERHEAD, Prefix, Ptype, StarPacket};

use crate::bytes::Bytes;

const LIMITS: WindowLimits = WindowLimits { max: 1 << 20, delay_target: None };

const SL: usize = 0;
const SF: usize = 1;
const QPNS: [Qpn; 2] = [0x1001, 0x2001];
const EPOCH: u32 = 0x1234_0001;
const LEN: u32 = 2048;
/// Packets of one input; more is not looked at.
const MOST: usize = 300;
const ALL: Access = Access::from_bits_truncate(15);

struct World {
    net: Net,
    sl: SlQp<SimEnv>,
    sf: Stateful<SimEnv>,
    bounds: Bounds,
    secret: CardSecret,
    token: Token,
    registry: RuleRegistry,
    path: Path<AnyWindow>,
    mrs: MrTable,
    stats: [Rc<Counters>; 2],
    sqs: [SimSq; 2],
    rqs: [SimRq; 2],
    cqs: [SimCq; 2],
    /// What is registered, of each host
    open: [Sge; 2],
    now: u64,
}

struct NoSrq;

impl SharedReceives for NoSrq {
    fn take(&mut self, _: Qpn, _: &mut [Sge]) -> Option<TakenRecv> {
        None
    }
}

fn card_of<'a>(
    host: &'a mut SimHost,
    (mrs, registry, path): (&'a mut MrTable, &'a mut RuleRegistry, &'a mut Path<AnyWindow>),
    srqs: &'a mut NoSrq,
    stats: &'a Counters,
    now: u64,
) -> stateful::CardCtx<'a, SimEnv> {
    stateful::CardCtx { env: &mut host.env, mrs, registry, srqs, path, rpc: EngineRpc::default(), stats, now }
}

/// `len` bytes that the card may touch.
fn own(host: &mut SimHost, len: u64) -> u64 {
    let at = host.env.memory.alloc(len);
    host.env.memory.allow(at, len, READ | WRITE);
    at
}

impl World {
    fn new() -> World {
        let mut net = Net::new(2, NicConfig::default(), Faults::default(), 7);
        let (sqs, rqs) = ([0; 2].map(|_| SimSq::new(4)), [0; 2].map(|_| SimRq::new(4, 2)));
        let cqs = [0; 2].map(|_| SimCq::new(4096));
        let stats: [Rc<Counters>; 2] = Default::default();
        let (mut bounds, mut mrs, mut registry) =
            (Bounds::new(), MrTable::default(), RuleRegistry::default());
        let mut open = [Sge::default(); 2];
        for (at, host) in net.hosts.iter_mut().enumerate() {
            host.env.memory.watch();
            let addr = own(host, LEN.into());
            open[at] = Sge { addr, len: LEN, lkey: 7 + at as u32 };
            /* nobody's: a wild address may hit it, and must not */
            host.env.memory.alloc(LEN.into());
        }
        let pd = net.hosts[SF].pd;
        let attr = |at: usize| MrAttr {
            pd,
            addr: open[at].addr,
            length: LEN.into(),
            iova: open[at].addr,
            access: ALL,
            ..MrAttr::default()
        };
        bounds.add(open[SL].addr, LEN.into(), ALL).expect("memory");
        mrs.import(open[SF].lkey, attr(SF)).expect("a key of its own");
        let mut setup = Setup {
            boot: 1,
            pd: host_pd(),
            mtu: Mtu::M256,
            sq_depth: 4,
            rq_depth: 4,
            srq: false,
            token: Token::NONE,
            replay_slots: 2,
            access: ALL,
            max_rd_atomic: 2,
            rnr_retry: 7,
            min_rnr_timer: 1,
        };
        let len = SlotArea::len_for(setup.slot_bytes());
        let area = SlotArea::new(own(&mut net.hosts[SL], len), len).expect("an area");
        let secret = CardSecret::new([7, 8]);
        let prefix = Prefix { qpn: QPNS[SL], epoch: EPOCH };
        setup.token = secret.token(&net.hosts[SF].gid, prefix, area);
        let mut sl = SlQp::new(SlInit {
            qpn: QPNS[SL],
            sq: sqs[SL].clone(),
            first_send: 0,
            rq: rqs[SL].clone(),
            send_cq: cqs[SL].clone(),
            recv_cq: cqs[SL].clone(),
            sq_sig_all: false,
            setup,
            inline_key: 0,
            patience: Patience::of(12, 7),
            keepalive: 100_000_000,
            stats: stats[SL].clone(),
            rules: Default::default(),
            form: Form::default(),
            dialect: false,
        })
        .expect("a good set-up");
        let local = Local {
            qpn: QPNS[SF],
            pd,
            sq: sqs[SF].clone(),
            rq: Some(rqs[SF].clone()),
            max_recv_sge: 2,
            send_cq: cqs[SF].clone(),
            recv_cq: cqs[SF].clone(),
            sig_all: false,
            access: ALL,
            mtu: Mtu::M256,
            max_msg_log: 20,
            max_rd_atomic: 2,
            min_rnr_timer: 1,
            rnr_retry: 7,
            patience: Silence::of(100_000_000),
            form: Form::default(),
        };
        let avs = [net.hosts[SL].av(net.hosts[SF].gid), net.hosts[SF].av(net.hosts[SL].gid)];
        let [port, control_port] = net.hosts[SL].env.star.ports;
        let peer = SlPeer { av: avs[SF], port, control_port, qpn: QPNS[SL], epoch: EPOCH };
        let mut channel = ControlChannel::new();
        channel.accept();
        let mut none = NoSrq;
        let mut path = Path::new(&net.hosts[SL].gid, &LIMITS);
        let mut card =
            card_of(&mut net.hosts[SF], (&mut mrs, &mut registry, &mut path), &mut none, &stats[SF], 1);
        let start = Start { first_send: 0, setup, peer, channel, window: 16 };
        let sf = Stateful::new(&mut card, local, start).expect("a good set-up");
        let MrAttr { addr, length: len, iova, access, .. } = attr(SL);
        let rule = MemoryRule { key: open[SL].lkey, pd: host_pd(), qpn: 0, addr, len, iova, access };
        let peer = SfPeer { av: avs[SL], port: control_port, qpn: QPNS[SF], epoch: EPOCH };
        sl.start(&mut net.hosts[SL].env, 1, peer, None, [rule].into_iter());
        let mut world = World {
            net,
            sl,
            sf,
            bounds,
            secret,
            token: setup.token,
            registry,
            path,
            mrs,
            stats,
            sqs,
            rqs,
            cqs,
            open,
            now: 1,
        };
        world.settle();
        assert!(world.sf.is_open(), "both ends talk");
        world
    }

    fn on_sf<R>(
        &mut self,
        call: impl FnOnce(&mut Stateful<SimEnv>, &mut stateful::CardCtx<'_, SimEnv>) -> R,
    ) -> R {
        let World { net, mrs, registry, path, stats, sf, now, .. } = self;
        let mut none = NoSrq;
        let mut card = card_of(&mut net.hosts[SF], (mrs, registry, path), &mut none, &stats[SF], *now);
        call(sf, &mut card)
    }

    /// What the ends have to say reaches the other at once, until they have no more; for some time at most.
    fn settle(&mut self) {
        for _ in 0..40 {
            let mut frames = self.speak();
            if frames.is_empty() {
                return;
            }
            for StarFrame { path, mut bytes } in frames.drain(..) {
                let to = usize::from(path.dst == self.net.hosts[SF].gid);
                let side = usize::from(path.dport != self.net.hosts[to].env.star.ports[0]);
                bytes.truncate(bytes.len() - 4);
                self.on_packet(to, [CardHalf::Stateless, CardHalf::Stateful][side], &bytes);
            }
        }
    }

    fn speak(&mut self) -> Vec<StarFrame> {
        let host = &mut self.net.hosts[SL];
        self.sl.poll_transmit(&mut host.env, self.now, host.nic.memory(), true);
        while self.on_sf(|sf, card| sf.transmit(card)) == TransmitStatus::More {}
        self.on_sf(|sf, card| sf.acknowledge(card));
        self.net.hosts.iter_mut().flat_map(|host| host.env.flush_star()).collect()
    }

    /// A packet without its CRC arrives.
    fn on_packet(&mut self, to: usize, side: CardHalf, bytes: &[u8]) {
        let Ok(packet) = StarPacket::parse(side, bytes) else { return };
        let (src, dst) = (self.net.hosts[1 - to].gid, self.net.hosts[to].gid);
        match (to, side) {
            (SL, CardHalf::Stateless) => {
                let (meta, stats) = (FrameMeta { src, dst, ..FrameMeta::default() }, &self.stats[SL]);
                let (bounds, secret) = (Some(&self.bounds), &self.secret);
                let card = stateless::StatelessCard { bounds, secret, stats };
                let env = &mut self.net.hosts[SL].env;
                let mut owed = Answers::default();
                stateless::handle(&card, &mut owed, env, StarSource { meta: &meta, port: 4794 }, &packet);
                owed.flush(env);
                /* of an RDCS each message has 12 bytes at least before what completes it */
                let messages = if packet.header.ptype == Ptype::Rdcs { packet.data.len() / 12 } else { 1 };
                assert!(env.star.events.len() <= messages, "one message is one event");
                for event in std::mem::take(&mut env.star.events) {
                    if event.qpn == QPNS[SL] {
                        self.sl.handle_event(env, self.now, &event);
                    }
                }
            }
            (SL, CardHalf::Stateful) => {
                self.sl.handle_control(&mut self.net.hosts[SL].env, self.now, &src, &packet)
            }
            (_, CardHalf::Stateful) => self.on_sf(|sf, card| sf.handle_packet(card, &src, &packet)),
            _ => {}
        }
    }

    /// Bytes of the input as a packet: its numbers are honest unless it says otherwise.
    fn forge(&self, input: &mut Bytes<'_>) -> (usize, CardHalf, Vec<u8>) {
        let how = input.byte();
        let (to, side) = match how & 3 {
            0 | 1 => (SL, CardHalf::Stateless),
            2 => (SF, CardHalf::Stateful),
            _ => (SL, CardHalf::Stateful),
        };
        let mut bytes = vec![0; HEADER_LEN];
        bytes[0] = input.byte();
        bytes[7] = input.byte() & 15;
        let addr = match how >> 2 & 3 {
            0 => self.open[SL].addr + u64::from(input.half() % 2100),
            1 => self.open[SL].addr.wrapping_add(u64::from(input.word())),
            2 => u64::from(input.word()) << 32 | u64::from(input.word()),
            _ => self.open[SL].addr - 64,
        };
        bytes[8..16].copy_from_slice(&addr.to_be_bytes());
        let migrate = bytes[0] & 2 != 0;
        let to_sl = if to == SL { QPNS[SL] } else { QPNS[SF] };
        let qpn = if migrate { to_sl } else { QPNS[SF] };
        bytes[1..4].copy_from_slice(&qpn.to_be_bytes()[1..]);
        if how & 0x40 == 0 {
            bytes[4] = EPOCH as u8;
        }
        if side == CardHalf::Stateless || migrate {
            let from = if side == CardHalf::Stateless { QPNS[SL] } else { QPNS[1 - to] };
            bytes.extend_from_slice(&(u64::from(from) << 32 | u64::from(EPOCH)).to_be_bytes());
        }
        if side == CardHalf::Stateless {
            /* what a peer may do that has a token, which nobody else has: seldom it is forged */
            let forged = u64::from(how & 0x30 == 0x30);
            let (count, token) = Token { mac: self.token.mac ^ forged, ..self.token }.encode();
            bytes[HEADER_LEN] = count;
            bytes.extend_from_slice(&token);
        }
        let data = input.half() as usize % 600;
        let data = input.take(data);
        let len = if how & 0x80 == 0 { data.len() as u16 } else { input.half() };
        bytes[16..18].copy_from_slice(&len.to_be_bytes());
        bytes.extend_from_slice(data);
        (to, side, bytes)
    }

    /// The programs post something.
    fn work(&mut self, how: u8) {
        let (at, op) = (usize::from(how & 1), [SendOp::Send, SendOp::Write, SendOp::Read, SendOp::FetchAdd]);
        let op = op[usize::from(how >> 1 & 3)];
        let (here, there) = (self.open[at], self.open[1 - at]);
        let len = if op == SendOp::FetchAdd { 8 } else { u32::from(how) * 5 };
        let wqe = SendWqe {
            op,
            flags: SendFlags::SIGNALED,
            remote_addr: there.addr,
            rkey: there.lkey,
            ..SendWqe::default()
        };
        _ = self.rqs[1 - at].post(Recv { wr_id: 0, sges: vec![there] });
        _ = self.sqs[at].post(Send { wqe, sges: vec![Sge { len, ..here }], inline: None });
        self.sl.handle_doorbell(self.now);
        self.on_sf(|sf, card| sf.handle_doorbell(card));
        self.cqs.iter().for_each(|cq| while cq.poll().is_some() {});
    }
}

/// The protection domain of SL's QP.
const fn host_pd() -> PdId {
    PdId(3)
}

/// Checks one input: packets between the honest ones.
pub fn check(input: &[u8]) {
    let mut world = World::new();
    let mut input = Bytes(input);
    for _ in 0..MOST {
        let Some(what) = input.next() else { break };
        match what % 8 {
            0 => world.work(what >> 3),
            1 => {
                world.now += u64::from(input.half()) << 10;
                world.sl.handle_timeout(&mut world.net.hosts[SL].env, world.now);
                world.on_sf(|sf, card| sf.handle_timeout(card));
            }
            2 => world.settle(),
            3 => _ = world.speak(),
            _ => {
                let (to, side, bytes) = world.forge(&mut input);
                world.on_packet(to, side, &bytes);
                if side == CardHalf::Stateless {
                    let answers = world.net.hosts[SL].env.flush_star();
                    let direct = answers.iter().filter(|frame| frame.bytes.len() <= 4096 + OVERHEAD);
                    assert!(direct.count() == answers.len(), "no answer is longer than a packet");
                }
            }
        }
    }
    world.settle();
    for host in &world.net.hosts {
        assert!(host.env.memory.gaps_intact(), "nobody wrote beside what is registered");
    }
}
