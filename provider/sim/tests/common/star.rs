//! Connections whose first end is stateless: host 0 is SL, with its card and library; host 1 is SF. They meet
//! on a wire of their own, and their programs are those of RC (`common/rc.rs`), so that what is asked of RC
//! is asked of StaR.

use std::collections::BTreeMap;
use std::rc::Rc;

use starverbs_core::congestion::Aimd;
use starverbs_core::engine::Turn;
use starverbs_core::env::RecvQueue;
use starverbs_core::mr::Rule;
use starverbs_core::mr::{MrAttr, MrTable};
use starverbs_core::nic::Path;
use starverbs_core::rtt::RttBounds;
use starverbs_core::wire::IcrcHeader;
use starverbs_core::{Access, Counters, FrameMeta, Gid, Mtu, Nanos, PdId, Psn, Qpn, Sge};
use starverbs_sim::{Faults, Net, Rng, SimCq, SimEnv, SimRq, StarFrame};
use starverbs_star::bounds::Bounds;
use starverbs_star::card::{Queues, StarInit};
use starverbs_star::channel::Channel;
use starverbs_star::control::{Control, MAX_CONTROL, Setup as StarSetup, Sum};
use starverbs_star::library::{Patience, SlInit, SlQp};
use starverbs_star::registry::Registry;
use starverbs_star::ring::{CQE_SLOT, REPLAY_SLOT};
use starverbs_star::seal::{Ends, Seal, SealError};
use starverbs_star::stateful::{self, Local, SharedReceives, Stateful, Waits};
use starverbs_star::stateless::{self, Peer};
use starverbs_star::wire::{CRC_LEN, Crc, Packet, Ptype, Queue, Side, fill_checksum};

use crate::program::Conn;

/// The life of SL's card that epochs tell.
const LIFE: u16 = 0x51ed;
/// The stateless host
pub(crate) const SL: usize = 0;
/// The stateful host
pub(crate) const SF: usize = 1;

/// What the ends of connections are made with.
#[derive(Clone, Copy)]
pub(crate) struct Star {
    pub(crate) mtu: Mtu,
    pub(crate) rq_depth: u32,
    pub(crate) replay_slots: u32,
    pub(crate) rd_atomic: u8,
    pub(crate) window: u32,
}

/// One connection.
struct Pair {
    sl: SlQp<SimEnv>,
    sf: Option<Stateful<SimEnv>>,
    local: Option<Local<SimEnv>>,
    qpns: [Qpn; 2],
}

/// The SRQ of SF, if there is one.
struct Shared<'a>(Option<&'a SimRq>, PdId);

impl SharedReceives for Shared<'_> {
    fn take(&mut self, _: Qpn, sges: &mut [Sge]) -> Option<(u64, usize, PdId)> {
        self.0?.take(sges).map(|(wr_id, n)| (wr_id, n, self.1))
    }
}

/// What became of a frame on the wire.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Whole,
    Hurt,
    /// Nobody of the ends sent it
    Forged,
}

/// Two hosts, their cards, and the wire between them.
pub(crate) struct World {
    /// Hosts and what programs do; its own wire stays empty
    pub(crate) net: Net,
    pub(crate) rng: Rng,
    pub(crate) faults: Faults,
    pub(crate) conns: Vec<Conn>,
    pairs: Vec<Pair>,
    bounds: Bounds,
    registry: Registry,
    path: Path<Aimd>,
    mrs: MrTable,
    srqs: [Option<SimRq>; 2],
    pub(crate) stats: [Rc<Counters>; 2],
    /// Regions of each host that the cards know of
    known: [usize; 2],
    wire: BTreeMap<(Nanos, u64), (StarFrame, Fate)>,
    lanes: [Nanos; 2],
    order: u64,
    pub(crate) now: Nanos,
    /// Hosts whose process ended. That of SL was started anew: it has the same memory, and another life.
    pub(crate) gone: [bool; 2],
    /// SF's ends are QPs of its card, rather than engines alone
    pub(crate) nic: bool,
    /// Somebody on the wire who says what the ends did not
    pub(crate) forger: Option<Forger>,
}

impl World {
    /// Hosts as `net` has them.
    pub(crate) fn new(mut net: Net, faults: Faults, rng: Rng, srqs: [Option<SimRq>; 2]) -> Self {
        net.hosts[SF].env.star.ports = [6_000, 6_001];
        World {
            net,
            rng,
            faults,
            conns: Vec::new(),
            pairs: Vec::new(),
            bounds: Bounds::new(),
            registry: Registry::default(),
            path: Path::new(&Gid::default(), 1 << 20),
            mrs: MrTable::default(),
            srqs,
            stats: Default::default(),
            known: [0; 2],
            wire: BTreeMap::new(),
            lanes: [0; 2],
            order: 0,
            now: 1_000,
            gone: [false; 2],
            nic: false,
            forger: None,
        }
    }

    /// Both hosts have a key.
    pub(crate) fn seal(&mut self) {
        for (host, salt) in self.net.hosts.iter_mut().zip(1..) {
            host.env.star.seal = Some(Seal::new(&[0x5a; 32], [salt; 16]));
        }
    }

    /// Regions that were registered since go to the cards: SF's to its table, SL's to the bounds and to all
    /// SFs.
    pub(crate) fn learn(&mut self) {
        let regions = if self.nic { &[][..] } else { &self.net.hosts[SF].regions[self.known[SF]..] };
        for (key, attr) in regions {
            self.mrs.import(*key, *attr).expect("a key of its own");
        }
        self.known[SF] = self.net.hosts[SF].regions.len();
        let fresh = self.net.hosts[SL].regions[self.known[SL]..].to_vec();
        self.known[SL] += fresh.len();
        for (key, attr) in fresh {
            self.bounds.add(attr.addr, attr.length, attr.access).expect("memory");
            for pair in &mut self.pairs {
                pair.sl.tell(&mut self.net.hosts[SL].env, self.now, Control::Rule(rule(key, &attr)));
            }
        }
    }

    /// Makes the ends of a connection of programs, and lets SL begin.
    pub(crate) fn connect(&mut self, mut conn: Conn, cqs: &[SimCq; 2], star: &Star) {
        let qpns = [conn.ends[SL].qpn, conn.ends[SF].qpn];
        let host = &mut self.net.hosts[SL];
        let end = &mut conn.ends[SL];
        end.signal_enough();
        let sq_depth = starverbs_core::env::SendQueue::slots(&end.sq);
        let mut slots = |len: u64| {
            let at = host.env.memory.alloc(len);
            self.bounds.add_slots(at, len).expect("memory");
            at
        };
        let setup = StarSetup {
            boot: 77,
            pd: host.pd,
            mtu: star.mtu,
            sq_depth,
            rq_depth: star.rq_depth,
            srq: self.srqs[SL].is_some(),
            send_ring: slots(u64::from(sq_depth) * CQE_SLOT),
            recv_ring: slots(u64::from(star.rq_depth) * CQE_SLOT),
            replay: slots(u64::from(star.replay_slots) * REPLAY_SLOT),
            replay_slots: star.replay_slots,
            access: Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
            max_rd_atomic: star.rd_atomic,
            rnr_retry: 7,
            min_rnr_timer: 1,
        };
        let sl = SlQp::new(SlInit {
            qpn: qpns[SL],
            sq: end.sq.clone(),
            first_send: 0,
            rq: end.rq.clone(),
            send_cq: cqs[SL].clone(),
            recv_cq: cqs[SL].clone(),
            sq_sig_all: false,
            setup,
            inline_key: 0,
            patience: Patience::of(15, 7),
            keepalive: 50_000_000,
            rules: Default::default(),
            stats: self.stats[SL].clone(),
        });
        let end = &conn.ends[SF];
        if self.nic {
            self.net.hosts[SF].nic.hold_qp(end.qpn).expect("a fresh QP");
        }
        let local = Local {
            qpn: qpns[SF],
            pd: self.net.hosts[SF].pd,
            sq: end.sq.clone(),
            first_send: 0,
            rq: self.srqs[SF].is_none().then(|| end.rq.clone()),
            max_recv_sge: 4,
            send_cq: cqs[SF].clone(),
            recv_cq: cqs[SF].clone(),
            sig_all: false,
            access: Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
            mtu: star.mtu,
            max_msg: 1 << 30,
            max_rd_atomic: star.rd_atomic,
            min_rnr_timer: 1,
            rnr_retry: 7,
            waits: Waits {
                patience: 1 << 30,
                keepalive: 50_000_000,
                rtt: RttBounds { lifetime: 4 * self.faults.late, ..RttBounds::default() },
                ..Waits::default()
            },
            window: star.window,
        };
        let mut pair = Pair { sl: sl.expect("a good set-up"), sf: None, local: Some(local), qpns };
        let (host, dgid) = (&self.net.hosts[SL], self.net.hosts[SF].gid);
        let [_, port] = self.net.hosts[SF].env.star.ports;
        let epoch = u32::from(LIFE) << 16 | self.pairs.len() as u32;
        let peer = Peer { av: host.av(dgid), port, qpn: qpns[SF], epoch };
        let regions: Vec<_> = host.regions[..self.known[SL]].to_vec();
        let rules = regions.iter().map(|(key, attr)| rule(*key, attr));
        /* others have told, or are about to: SF asks for all if it does not know them yet */
        let known = (!self.pairs.is_empty() && self.rng.chance(0.5)).then(|| {
            let mut sum = Sum::default();
            rules.clone().for_each(|rule| sum.add(&rule));
            sum
        });
        pair.sl.start(&mut self.net.hosts[SL].env, self.now, peer, known, rules);
        self.pairs.push(pair);
        self.conns.push(conn);
    }

    /// Whether all of SF's ends have begun.
    pub(crate) fn begun(&self) -> bool {
        self.pairs.iter().all(|pair| pair.local.is_none())
    }

    /// When something is due at the ends of each connection.
    pub(crate) fn timers(&self) -> Vec<[Option<Nanos>; 2]> {
        let gone = self.gone;
        let of = |pair: &Pair| {
            let sl = pair.sl.next_deadline().filter(|_| !gone[SL]);
            [sl, pair.sf.as_ref().and_then(Stateful::next_deadline).filter(|_| !gone[SF])]
        };
        let card = self.net.hosts[SF].nic.next_deadline().filter(|_| self.nic && !gone[SF]);
        self.pairs.iter().map(of).chain([[None, card]]).collect()
    }

    /// Does what is to be done now, then moves the time on to the next thing that happens. False: nothing is
    /// going to happen.
    pub(crate) fn step(&mut self) -> bool {
        self.transmit();
        let timers = self.timers().into_iter().flatten();
        let arrival = self.wire.first_key_value().map(|((at, _), _)| *at);
        let Some(next) = timers.chain([arrival]).flatten().min() else { return false };
        self.now = self.now.max(next);
        while let Some(((at, _), _)) = self.wire.first_key_value()
            && *at <= self.now
            && let Some((_, (frame, fate))) = self.wire.pop_first()
        {
            self.deliver(&frame, fate);
        }
        self.look_at_timers();
        true
    }

    fn look_at_timers(&mut self) {
        let World { pairs, net, now, gone, .. } = self;
        for pair in pairs.iter_mut().filter(|_| !gone[SL]) {
            if pair.sl.next_deadline().is_some_and(|at| at <= *now) {
                pair.sl.handle_timeout(&mut net.hosts[SL].env, *now);
            }
        }
        if self.nic {
            let host = &mut self.net.hosts[SF];
            host.nic.handle_timeout(&mut host.env, self.now);
        }
        for at in 0..self.pairs.len() {
            let due = self.pairs[at].sf.as_ref().and_then(Stateful::next_deadline);
            if due.is_some_and(|due| due <= self.now) {
                self.on_sf(at, |sf, card| sf.handle_timeout(card));
            }
        }
    }

    /// Calls the stateful end of a connection, if it has begun.
    fn on_sf<R>(
        &mut self,
        at: usize,
        call: impl FnOnce(&mut Stateful<SimEnv>, &mut stateful::Card<'_, SimEnv>) -> R,
    ) -> Option<R> {
        let World { net, mrs, registry, path, srqs, stats, pairs, now, gone, .. } = self;
        let host = &mut net.hosts[SF];
        let mut shared = Shared(srqs[SF].as_ref(), host.pd);
        let (env, srqs, stats, now) = (&mut host.env, &mut shared, &*stats[SF], *now);
        let mut card = stateful::Card { env, mrs, registry, srqs, path, stats, now };
        pairs[at].sf.as_mut().filter(|_| !gone[SF]).map(|sf| call(sf, &mut card))
    }

    /// SF's card sends.
    fn transmit_card(&mut self) {
        loop {
            let host = &mut self.net.hosts[SF];
            let more = host.nic.poll_transmit(&mut host.env, self.now, true);
            let frames = host.env.flush_star();
            assert!(!more || !frames.is_empty(), "more is left, but an empty port got nothing");
            frames.into_iter().for_each(|frame| self.launch(SF, frame));
            if !more {
                return;
            }
        }
    }

    fn transmit(&mut self) {
        if self.nic {
            self.transmit_card();
        }
        for at in 0..self.pairs.len() {
            loop {
                let env = &mut self.net.hosts[SL].env;
                let more = !self.gone[SL] && self.pairs[at].sl.poll_transmit(env, self.now);
                let frames = env.flush_star();
                assert!(!more || !frames.is_empty(), "more is left, but an empty port got nothing");
                frames.into_iter().for_each(|frame| self.launch(SL, frame));
                if !more {
                    break;
                }
            }
            loop {
                let turn = self.on_sf(at, |sf, card| sf.transmit(card)).unwrap_or(Turn::Idle);
                let idle = matches!(turn, Turn::Idle | Turn::Crowded);
                let frames = self.net.hosts[SF].env.flush_star();
                assert!(idle || !frames.is_empty(), "more is left, but an empty port got nothing");
                frames.into_iter().for_each(|frame| self.launch(SF, frame));
                if idle {
                    break;
                }
            }
        }
    }

    /// A frame leaves; the wire does to it what it does.
    fn launch(&mut self, from: usize, frame: StarFrame) {
        let f = self.faults;
        self.forge(&frame);
        if self.rng.chance(f.loss) {
            return;
        }
        let copies = 1 + u32::from(self.rng.chance(f.duplicate));
        for _ in 0..copies {
            let mut frame = frame.clone();
            let hurt = self.rng.chance(f.corrupt);
            if hurt {
                let bit = self.rng.below(frame.bytes.len() as u64 * 8) as usize;
                frame.bytes[bit / 8] ^= 1 << (bit % 8);
            }
            let arrives = self.now + f.delay + self.rng.below(f.jitter + 1);
            let at = if self.rng.chance(f.reorder) {
                arrives + self.rng.below(f.late)
            } else {
                self.lanes[from] = self.lanes[from].max(arrives);
                self.lanes[from]
            };
            self.put(at, frame, if hurt { Fate::Hurt } else { Fate::Whole });
        }
    }

    fn put(&mut self, at: Nanos, frame: StarFrame, fate: Fate) {
        self.order += 1;
        self.wire.insert((at, self.order), (frame, fate));
    }

    /// Somebody who reads the wire, and knows all but the key, adds to it when a control message passes.
    fn forge(&mut self, frame: &StarFrame) {
        let Some(forger) = &mut self.forger else { return };
        let Some(made) = forger.make(&mut self.rng, frame) else { return };
        let at = self.now + self.rng.below(2 * self.faults.delay + 1);
        self.put(at, made, Fate::Forged);
    }

    fn deliver(&mut self, frame: &StarFrame, fate: Fate) {
        let path = &frame.path;
        let to = usize::from(path.dst == self.net.hosts[SF].gid);
        let [stateless, stateful] = self.net.hosts[to].env.star.ports;
        assert!([stateless, stateful].contains(&path.dport), "frames go to ports that are there");
        let side = if path.dport == stateless { Side::Stateless } else { Side::Stateful };
        let packet = match Packet::open(side, path, &frame.bytes) {
            Ok(packet) if fate != Fate::Hurt => packet,
            Ok(_) => panic!("a changed frame was taken"),
            Err(_) if fate != Fate::Whole => return,
            Err(e) => panic!("{e}: {frame:?}"),
        };
        let mut room = [0; MAX_CONTROL];
        let Some(packet) = self.unseal(to, path, packet, &mut room) else { return };
        if self.net.trace {
            let control = Control::decode(packet.data).filter(|_| packet.header.migrate);
            eprintln!("{:>12} host {to} {side:?} {:?} {control:?}", self.now, packet.header);
        }
        match (to, side) {
            (SL, Side::Stateless) => self.serve(frame, &packet),
            (SL, Side::Stateful) if self.gone[SL] => {}
            (SL, Side::Stateful) => {
                let World { pairs, net, now, known, .. } = self;
                let pair = pairs.iter_mut().find(|pair| pair.qpns[SL] == packet.header.qpn);
                let pair = pair.expect("a QP of SL");
                let host = &mut net.hosts[SL];
                pair.sl.handle_control(&mut host.env, *now, &path.src, &packet);
                if pair.sl.must_tell() {
                    let rules = host.regions[..known[SL]].iter().map(|(key, attr)| rule(*key, attr));
                    pair.sl.tell_all(&mut host.env, *now, rules);
                }
            }
            (_, Side::Stateful) => self.meet(frame, &packet),
            (_, Side::Stateless) => panic!("SF has no stateless connections"),
        }
    }

    /// A packet as it was before it was sealed, if hosts seal. `None`: it is no message for this host.
    fn unseal<'a>(
        &mut self,
        to: usize,
        path: &IcrcHeader,
        packet: Packet<'a>,
        room: &'a mut [u8; MAX_CONTROL],
    ) -> Option<Packet<'a>> {
        let seal = self.net.hosts[to].env.star.seal.as_mut().filter(|_| packet.header.migrate);
        let Some(seal) = seal else { return Some(packet) };
        let opened = seal.open_packet(Ends { src: &path.src, dst: &path.dst }, &packet, room);
        match opened {
            Err(SealError::Foreign) => self.stats[to].star_foreign.inc(),
            Err(SealError::Replayed) => self.stats[to].star_replayed.inc(),
            Ok(_) => {}
        }
        opened.ok()
    }

    /// SL's card, which has nothing of before.
    fn serve(&mut self, frame: &StarFrame, packet: &Packet<'_>) {
        let env = &mut self.net.hosts[SL].env;
        let meta = FrameMeta { src: frame.path.src, dst: frame.path.dst, ..FrameMeta::default() };
        let life = LIFE + u16::from(self.gone[SL]);
        let card = stateless::Card { bounds: Some(&self.bounds), slots: None, life, stats: &self.stats[SL] };
        stateless::handle(&card, env, (&meta, frame.path.sport), packet);
        for event in std::mem::take(&mut env.star.events) {
            /* an event may be lost: what it told comes again, or is seen by who polls */
            if self.rng.chance(0.02) {
                continue;
            }
            let pair = self.pairs.iter_mut().find(|pair| pair.qpns[SL] == event.qpn);
            pair.expect("a QP of SL").sl.handle_event(env, self.now, &event);
        }
    }

    fn meet(&mut self, frame: &StarFrame, packet: &Packet<'_>) {
        let at = self.pairs.iter().position(|pair| pair.qpns[SF] == packet.header.qpn).expect("a QP of SF");
        if self.pairs[at].local.is_some() && !self.gone[SF] {
            let first = packet.header.ptype == Ptype::Wqep && packet.header.psn == Psn::new(0);
            let Some(Control::Setup(setup)) = Control::decode(packet.data).filter(|_| first) else { return };
            self.begin(at, frame, packet, setup);
        }
        if self.nic {
            let host = &mut self.net.hosts[SF];
            return host.turn(self.now).handle_stateful(&frame.path.src, packet);
        }
        self.on_sf(at, |sf, card| sf.handle_packet(card, &frame.path.src, packet));
    }

    fn begin(&mut self, at: usize, frame: &StarFrame, packet: &Packet<'_>, setup: StarSetup) {
        let World { net, mrs, registry, path, srqs, stats, pairs, now, nic, .. } = self;
        let [port, control_port] = net.hosts[SL].env.star.ports;
        let host = &mut net.hosts[SF];
        let prefix = packet.prefix.expect("control messages have one");
        let av = host.av(frame.path.src);
        let peer = stateful::Peer { av, port, control_port, qpn: prefix.qpn, epoch: prefix.epoch };
        let local = pairs[at].local.take().expect("it begins once");
        let mut channel = Channel::new();
        channel.took();
        if *nic {
            let Local { sq, rq, send_cq, recv_cq, window, waits, .. } = local;
            let queues = Queues { sq, rq, send_cq, recv_cq };
            let init = StarInit { queues, setup, peer, channel, window, lifetime: waits.rtt.lifetime };
            let begun = host.turn(*now).begin_stateful(local.qpn, init);
            return begun.expect("a QP that is ready");
        }
        let mut shared = Shared(srqs[SF].as_ref(), host.pd);
        let (env, srqs, stats, now) = (&mut host.env, &mut shared, &*stats[SF], *now);
        let mut card = stateful::Card { env, mrs, registry, srqs, path, stats, now };
        let sf = Stateful::new(&mut card, local, (setup, peer), channel);
        pairs[at].sf = Some(sf.expect("a good set-up"));
    }

    /// Whether the stateful end of a connection knows of the other.
    pub(crate) fn has_begun(&self, at: usize) -> bool {
        self.pairs[at].sf.is_some()
    }

    /// The program of `host` rings the doorbell of `qpn`.
    pub(crate) fn doorbell(&mut self, host: usize, qpn: Qpn) {
        let at = self.pairs.iter().position(|pair| pair.qpns[host] == qpn).expect("a QP");
        if self.gone[host] {
            return;
        }
        if host == SL {
            self.pairs[at].sl.handle_doorbell(&mut self.net.hosts[SL].env, self.now);
        } else {
            self.on_sf(at, |sf, card| sf.handle_doorbell(card));
        }
        if self.nic && host == SF {
            let host = &mut self.net.hosts[SF];
            host.nic.handle_doorbell(&mut host.env, qpn, self.now);
        }
    }

    /// SL's program polls: the library looks at its slots.
    pub(crate) fn look(&mut self) {
        for pair in self.pairs.iter_mut().filter(|_| !self.gone[SL]) {
            for queue in [Queue::Send, Queue::Recv] {
                pair.sl.complete(&mut self.net.hosts[SL].env, self.now, queue);
            }
        }
    }
}

/// Somebody on the wire, who has no key.
#[derive(Default)]
pub(crate) struct Forger {
    /// Frames with control messages that it has seen
    kept: Vec<StarFrame>,
    /// Frames that it sent
    pub(crate) made: u64,
}

impl Forger {
    /// A frame of its own, now that this one passes. Its checksums are right.
    fn make(&mut self, rng: &mut Rng, seen: &StarFrame) -> Option<StarFrame> {
        let control = seen.bytes[0] & 2 != 0;
        if control {
            self.kept.push(seen.clone());
        }
        if self.kept.is_empty() || !rng.chance(if control { 0.7 } else { 0.05 }) {
            return None;
        }
        self.made += 1;
        let old = rng.below(self.kept.len() as u64) as usize;
        let mut frame = self.kept[old].clone();
        let body = frame.bytes.len() - CRC_LEN;
        match rng.below(4) {
            /* as it was */
            0 => return Some(frame),
            /* changed */
            1 => frame.bytes[20 + rng.below(body as u64 - 20) as usize] ^= 1 << rng.below(8),
            /* as if it were the next, or an answer */
            2 => frame.bytes[7] = frame.bytes[7].wrapping_add(1),
            /* one that is not sealed */
            _ => {
                let says = rng.pick(&[
                    Control::Bye { why: 10 },
                    Control::Unrule { key: 1 },
                    Control::Want { upto: 9 },
                ]);
                let mut room = [0; MAX_CONTROL];
                let len = says.encode(&mut room).expect("it fits");
                frame.bytes.truncate(28);
                frame.bytes[0] = 0x13;
                frame.bytes[16..18].copy_from_slice(&(len as u16).to_be_bytes());
                frame.bytes[7] = rng.below(4) as u8;
                frame.bytes.extend_from_slice(&room[..len]);
                frame.bytes.extend([0; CRC_LEN]);
            }
        }
        let body = frame.bytes.len() - CRC_LEN;
        fill_checksum(&frame.path, &mut frame.bytes);
        let mut crc = Crc::new();
        crc.update(&frame.bytes[..body]);
        frame.bytes[body..].copy_from_slice(&crc.finish());
        Some(frame)
    }
}

/// What SF is told of a region.
fn rule(key: u32, attr: &MrAttr) -> Rule {
    let MrAttr { pd, addr, length: len, iova, access } = *attr;
    Rule { key, pd, qpn: 0, addr, len, iova, access }
}
