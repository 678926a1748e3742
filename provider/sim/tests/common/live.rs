//! Two hosts whose RC connections run, on the wire of RoCEv2 and on that of StaR, and whose ends settle anew
//! what they are.

use std::collections::BTreeMap;
use std::rc::Rc;

use starverbs_core::mr::Rule;
use starverbs_core::nic::Handover;
use starverbs_core::nic::released::Released;
use starverbs_core::qp::{QpAttr, QpAttrMask};
use starverbs_core::{Counters, FrameMeta, Nanos, QpState, Qpn, SendQueue, WcStatus};
use starverbs_sim::{Faults, Host, Net, Rng, SimCq, SimEnv, StarFrame};
use starverbs_star::bounds::Bounds;
use starverbs_star::card::{Queues, StarInit};
use starverbs_star::channel::Channel;
use starverbs_star::control::{Control, MAX_CONTROL, Role, Setup as StarSetup, Wish};
use starverbs_star::datagram;
use starverbs_star::homing::{self, Came, Done, Half, Homing};
use starverbs_star::library::{Patience, SlInit, SlQp, SlState};
use starverbs_star::negotiate::{Beginning, Negotiation, Outcome, THRESHOLD, Terms};
use starverbs_star::quiesce::Resting;
use starverbs_star::renew::{Card, Renewal, Renewed, answer, is_new, suits};
use starverbs_star::ring::{CQE_SLOT, REPLAY_SLOT};
use starverbs_star::stateful;
use starverbs_star::stateless::{self, Peer, is_later};
use starverbs_star::wire::{Packet, Prefix, Queue, Side};

use crate::program::Conn;

/// What epochs tell of a host's card.
const LIVES: [u16; 2] = [0x51ed, 0x1234];
/// Slots of each kind.
const SLOTS: u32 = 16;

/// One end of a connection, as its host's library has it.
#[derive(Default)]
pub(crate) struct Edge {
    pub(crate) qpn: Qpn,
    peer: Qpn,
    round: Option<Renewal>,
    /// The way back, if it is on it
    homing: Option<Homing>,
    /// How often it came back
    pub(crate) returns: u32,
    last: u16,
    settled: Option<Negotiation>,
    sl: Option<(SlQp<SimEnv>, Released<SimEnv>)>,
    began: bool,
    /// The last epoch that it was a stateful end in
    served: Option<u32>,
    beginning: Beginning,
    /// When it is looked whether the peer of a stateful end begins
    looks: Nanos,
    pub(crate) gone: bool,
}

impl Edge {
    pub(crate) fn role(&self) -> Option<Role> {
        match self.settled.as_ref().and_then(Negotiation::outcome) {
            Some(Outcome::Star { role, .. }) => Some(role),
            _ => None,
        }
    }
    /// Waits for its peer to begin.
    fn waits(&self) -> bool {
        self.role() == Some(Role::Stateful) && !self.began && !self.gone
    }
    pub(crate) fn lasts(&self) -> bool {
        self.round.is_some() || self.homing.is_some()
    }
    /// Whether it is an end of StaR that has begun, and its peer, too.
    fn is_star(&self) -> bool {
        let heard = self.sl.as_ref().is_none_or(|(sl, _)| sl.state() == SlState::Ready);
        self.role().is_some() && self.began && heard && !self.gone
    }
}

/// A stateless end that may come back.
struct Stateless<'a> {
    host: &'a mut Host,
    bounds: &'a mut Bounds,
    sl: &'a mut Option<(SlQp<SimEnv>, Released<SimEnv>)>,
    now: Nanos,
}

impl Half for Stateless<'_> {
    fn rest(&mut self) -> bool {
        self.sl.as_mut().is_some_and(|(sl, _)| sl.rest())
    }
    fn resume(&mut self) {
        if let Some((sl, _)) = self.sl {
            sl.resume(&mut self.host.env, self.now);
        }
    }
    fn halt(&mut self) -> Option<Done> {
        None
    }
    fn go_home(&mut self, done: Done) -> Came {
        let Some((sl, released)) = self.sl else { return Came::Never };
        match sl.has_ended_at(&mut self.host.env, self.now, done) {
            None => return Came::Never,
            Some(false) => return Came::Later,
            Some(true) => {}
        }
        let places = self.host.nic.prepare_return(released).expect("memory");
        let (_, first) = sl.go_home().expect("memory");
        let StarSetup { send_ring, recv_ring, replay, sq_depth, .. } = *sl.setup();
        self.bounds.remove_slots(send_ring, u64::from(sq_depth) * CQE_SLOT);
        self.bounds.remove_slots(recv_ring, u64::from(SLOTS) * CQE_SLOT);
        self.bounds.remove_slots(replay, u64::from(SLOTS) * REPLAY_SLOT);
        let Some((sl, released)) = self.sl.take() else { return Came::Never };
        let (_, parting) = sl.close(self.now, true);
        assert!(parting.is_none(), "nothing is left to be said");
        let Host { nic, env, .. } = &mut *self.host;
        nic.readmit_running(env, released, places, first, self.now).expect("memory");
        Came::Home
    }
    fn is_beginning(&self) -> bool {
        false
    }
    fn settle(&mut self) {}
    fn is_settled(&self) -> bool {
        false
    }
    fn waits(&self) -> Option<Option<Nanos>> {
        None
    }
}

fn is_stateless(outcome: Outcome) -> bool {
    matches!(outcome, Outcome::Star { role: Role::Stateless, .. })
}

/// The hosts.
pub(crate) struct Live {
    pub(crate) net: Net,
    pub(crate) rng: Rng,
    pub(crate) conns: Vec<Conn>,
    /// By connection and host
    pub(crate) sides: Vec<[Edge; 2]>,
    cqs: [SimCq; 2],
    /// Connections that each host's card says to have
    pub(crate) counts: [u32; 2],
    bounds: [Bounds; 2],
    pub(crate) stats: [Rc<Counters>; 2],
    wire: BTreeMap<(Nanos, u64), StarFrame>,
    lanes: [Nanos; 2],
    order: u64,
    epochs: u32,
}

impl Live {
    /// `conns` of `net` run; their memory is all there.
    pub(crate) fn new(mut net: Net, rng: Rng, conns: Vec<Conn>, cqs: [SimCq; 2], counts: [u32; 2]) -> Self {
        let mut bounds = [Bounds::new(), Bounds::new()];
        net.of_star = Some(Vec::new());
        for (host, bounds) in net.hosts.iter_mut().zip(&mut bounds) {
            host.env.star.listened = Some(Vec::new());
            for (_, attr) in &host.regions {
                bounds.add(attr.addr, attr.length, attr.access).expect("memory");
            }
        }
        let side = |conn: &Conn, at: usize| Edge {
            qpn: conn.ends[at].qpn,
            peer: conn.ends[1 - at].qpn,
            ..Edge::default()
        };
        let sides = conns.iter().map(|conn| [side(conn, 0), side(conn, 1)]).collect();
        let stats = Default::default();
        let (wire, lanes, order, epochs) = (BTreeMap::new(), [0; 2], 0, 0);
        Live { net, rng, conns, sides, cqs, counts, bounds, stats, wire, lanes, order, epochs }
    }

    fn terms(&self, at: usize, host: usize) -> Terms {
        let gid = self.net.hosts[host].gid;
        let (stateful, qpn) = (self.counts[host], self.sides[at][host].qpn);
        Terms { wish: Wish::Auto, stateful, threshold: THRESHOLD, gid, qpn }
    }

    fn card(&self, host: usize) -> Card {
        let ports = self.net.hosts[host].env.star.ports;
        Card { boot: host as u64 + 70, ports, patience: Patience::of(14, 7).time }
    }

    /// The card of `host` would be rid of a connection.
    pub(crate) fn ask(&mut self, at: usize, host: usize) {
        let (mine, card, now) = (self.terms(at, host), self.card(host), self.net.now());
        let side = &mut self.sides[at][host];
        if side.round.is_none() && side.role().is_none() && !side.gone {
            side.last += 1;
            side.round = Some(Renewal::ask(side.last, mine, card, now));
        }
    }

    /// The card of `host` would have a connection of StaR be one of plain RoCEv2 again.
    pub(crate) fn ask_back(&mut self, at: usize, host: usize) {
        let (mine, now) = (self.terms(at, host), self.net.now());
        let side = &mut self.sides[at][host];
        if side.homing.is_none()
            && side.is_star()
            && let Some(role) = side.role()
        {
            side.last += 1;
            side.homing = Some(Homing::ask(side.last, role, mine, now));
        }
    }

    /// Something was posted to the shared receive queue of `host`, or came back there.
    pub(crate) fn ring_srq(&mut self, host: usize) {
        let now = self.net.now();
        for side in self.sides.iter_mut().map(|sides| &mut sides[host]) {
            if let Some((sl, _)) = &mut side.sl {
                sl.handle_doorbell(&mut self.net.hosts[host].env, now);
            }
        }
    }

    /// Calls with the way back that an end is on, and what it is; then sees whether that is over.
    fn with_homing<R>(
        &mut self,
        at: usize,
        host: usize,
        call: impl FnOnce(&mut Homing, &mut dyn Half) -> R,
    ) -> Option<R> {
        let now = self.net.now();
        let Live { net, sides, bounds, .. } = self;
        let side = &mut sides[at][host];
        let homing = side.homing.as_mut()?;
        let (h, bounds) = (&mut net.hosts[host], &mut bounds[host]);
        let done = if side.settled.as_ref().and_then(Negotiation::outcome).is_some_and(is_stateless) {
            call(homing, &mut Stateless { host: h, bounds, sl: &mut side.sl, now })
        } else {
            call(homing, &mut Resting { turn: &mut h.turn(now), qpn: side.qpn })
        };
        if let Some(outcome) = homing.outcome() {
            side.homing = None;
            if outcome == homing::Outcome::Home {
                side.returns += 1;
                (side.settled, side.began, side.beginning) = (None, false, Beginning::default());
                self.ring_srq(host);
            }
        }
        Some(done)
    }

    /// What a peer says on the way back, if it is that.
    fn hear_of_home(&mut self, at: usize, host: usize, said: &Renewed) -> bool {
        let (mine, now) = (self.terms(at, host), self.net.now());
        let theirs = self.terms(at, 1 - host);
        let side = &mut self.sides[at][host];
        let homing = side.homing.as_ref().map(Homing::round);
        if homing == Some(said.round) {
            let answer = self.with_homing(at, host, |homing, half| homing.handle(now, &said.message, half));
            if let Some(answer) = answer.flatten() {
                self.say(at, host, &answer);
            }
            return true;
        }
        match said.message {
            Control::Renew { .. } if homing.is_some() && is_new(said.round, side.last) => {
                self.with_homing(at, host, |homing, half| homing.peer_is_home(half));
                return false;
            }
            Control::Return { .. } if is_new(said.round, side.last) && side.is_star() => {
                side.last = said.round;
                self.with_homing(at, host, |homing, half| homing.stay(half));
                let side = &mut self.sides[at][host];
                let Some(role) = side.role().filter(|role| homing::suits(*role, &mine, &theirs)) else {
                    return true;
                };
                side.homing = Some(Homing::ask(said.round, role, mine, now));
                let asked = self.with_homing(at, host, |homing, half| {
                    let asked = Homing::asked(said.round, role, mine, now, half);
                    let rests = asked.is_some();
                    if let Some(asked) = asked {
                        *homing = asked;
                    }
                    rests
                });
                if asked == Some(false) {
                    self.sides[at][host].homing = None;
                }
                return true;
            }
            Control::Return { .. } | Control::Halted(_) | Control::Home | Control::Stay => {}
            _ => return false,
        }
        if let Some(answer) = homing::answer(said, self.sides[at][host].role().is_some()) {
            self.say(at, host, &answer);
        }
        true
    }

    /// The program of `host` rings the doorbell of `qpn`.
    pub(crate) fn doorbell(&mut self, host: usize, qpn: Qpn) {
        let (at, now) = (self.find(host, qpn), self.net.now());
        match &mut self.sides[at][host].sl {
            Some((sl, _)) => sl.handle_doorbell(&mut self.net.hosts[host].env, now),
            None => self.net.doorbell(host, qpn),
        }
    }

    fn find(&self, host: usize, qpn: Qpn) -> usize {
        self.sides.iter().position(|sides| sides[host].qpn == qpn).expect("a QP of this host")
    }

    /// Does what is to be done now, then moves the time on to the next thing that happens. False: nothing is
    /// going to happen.
    pub(crate) fn step(&mut self) -> bool {
        self.talk();
        self.transmit();
        let due = |side: &Edge| {
            let sl = side.sl.as_ref().and_then(|(sl, _)| sl.next_deadline());
            let looks = side.waits().then_some(side.looks);
            let looks = looks.or_else(|| side.homing.as_ref().and_then(Homing::deadline));
            [side.round.as_ref().and_then(Renewal::deadline), sl, looks].into_iter().flatten().min()
        };
        let timers = self.sides.iter().flatten().filter_map(due).min();
        let arrival = self.wire.first_key_value().map(|((at, _), _)| *at);
        let own = [timers, arrival].into_iter().flatten().min();
        match (self.net.next(), own) {
            (None, None) => return false,
            (Some(next), own) if own.is_none_or(|own| next <= own) => _ = self.net.step(),
            (_, Some(own)) => {
                self.net.wait(own);
                self.look();
            }
            _ => {}
        }
        true
    }

    /// What is due here, now.
    fn look(&mut self) {
        let now = self.net.now();
        while let Some(((at, _), _)) = self.wire.first_key_value()
            && *at <= now
            && let Some((_, frame)) = self.wire.pop_first()
        {
            self.deliver(&frame);
        }
        for (at, host) in self.all() {
            if let Some((sl, _)) = &mut self.sides[at][host].sl
                && sl.next_deadline().is_some_and(|due| due <= now)
            {
                sl.handle_timeout(&mut self.net.hosts[host].env, now);
            }
            self.look_for_peer(at, host);
        }
    }

    fn look_for_peer(&mut self, at: usize, host: usize) {
        let (now, h) = (self.net.now(), &mut self.net.hosts[host]);
        let side = &mut self.sides[at][host];
        if !side.waits() || side.looks > now {
            return;
        }
        side.looks = now + Beginning::LOOK;
        let waits = h.nic.has_posts(side.qpn);
        if side.beginning.is_overdue(now, waits, Patience::of(14, 7).time)
            && let Some(negotiation) = &mut side.settled
        {
            negotiation.abandon();
            h.nic.resume_qp(&mut h.env, side.qpn, now);
        }
    }

    fn all(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        (0..self.sides.len()).flat_map(|at| [(at, 0), (at, 1)])
    }

    /// Rounds go on: what has come, and what is due.
    fn talk(&mut self) {
        for host in 0..2 {
            let heard = self.net.hosts[host].env.star.listened.as_mut().map(std::mem::take);
            for (to, bytes) in heard.unwrap_or_default() {
                let at = self.find(host, to);
                let said = Renewed::decode(&bytes).expect("all messages are of rounds");
                if !self.sides[at][host].gone {
                    self.hear(at, host, &said);
                }
            }
        }
        for (at, host) in self.all() {
            self.renew(at, host, None);
            let now = self.net.now();
            let said = self.with_homing(at, host, |homing, half| homing.poll(now, half));
            if let Some(said) = said.flatten() {
                self.say(at, host, &said);
            }
        }
    }

    fn hear(&mut self, at: usize, host: usize, said: &Renewed) {
        if self.hear_of_home(at, host, said) {
            return;
        }
        let (mine, card, now) = (self.terms(at, host), self.card(host), self.net.now());
        let peer = (self.net.hosts[1 - host].gid, self.sides[at][host].peer);
        let side = &mut self.sides[at][host];
        if let Control::Renew { wish, stateful, threshold } = said.message
            && side.round.is_none()
            && side.role().is_none()
            && is_new(said.round, side.last)
            && suits(&mine, &Terms { wish, stateful, threshold, gid: peer.0, qpn: peer.1 })
        {
            side.last = said.round;
            let h = &mut self.net.hosts[host];
            let mut requests = Resting { turn: &mut h.turn(now), qpn: side.qpn };
            side.round = Renewal::asked(said.round, mine, card, now, &mut requests);
        }
        if side.round.as_ref().is_some_and(|round| round.round() == said.round) {
            return self.renew(at, host, Some(&said.message));
        }
        let of_last = side.settled.as_mut().filter(|_| said.round == side.last);
        if let Some(answer) = answer(said, peer, of_last) {
            self.say(at, host, &answer);
        }
    }

    fn renew(&mut self, at: usize, host: usize, said: Option<&Control>) {
        let now = self.net.now();
        let peer = self.net.hosts[1 - host].gid;
        let side = &mut self.sides[at][host];
        let Some(round) = &mut side.round else { return };
        let h = &mut self.net.hosts[host];
        let mut requests = Resting { turn: &mut h.turn(now), qpn: side.qpn };
        let said = match said {
            Some(said) => round.handle(now, (peer, side.peer), said, &mut requests),
            None => round.poll(now, &mut requests),
        };
        self.end_round(at, host);
        if let Some(said) = said {
            self.say(at, host, &said);
        }
        if self.sides[at][host].role() == Some(Role::Stateless) && !self.sides[at][host].began {
            self.begin_stateless(at, host);
        }
    }

    fn end_round(&mut self, at: usize, host: usize) {
        let side = &mut self.sides[at][host];
        if let Some(round) = side.round.take_if(|round| round.outcome().is_some())
            && round.outcome() != Some(Outcome::Plain)
        {
            side.settled = Some(round.into_negotiation());
        }
    }

    fn say(&mut self, at: usize, host: usize, said: &Renewed) {
        let mut room = [0; MAX_CONTROL];
        let len = said.encode(&mut room).expect("it fits");
        let side = &self.sides[at][host];
        let av = self.net.hosts[host].av(self.net.hosts[1 - host].gid);
        datagram::send(&mut self.net.hosts[host].env, (side.qpn, side.peer), &av, &room[..len]);
    }

    fn begin_stateless(&mut self, at: usize, host: usize) {
        let (qpn, peer) = (self.sides[at][host].qpn, self.sides[at][host].peer);
        let now = self.net.now();
        let end = &mut self.conns[at].ends[host];
        let (sq, rq, srq) = (end.sq.clone(), end.rq.clone(), end.shared);
        let h = &mut self.net.hosts[host];
        let Handover { attr, owner, first_send, .. } = h.nic.handover(qpn).expect("a QP of this card");
        let bounds = &mut self.bounds[host];
        let mut slots = |len: u64| {
            let at = h.env.memory.alloc(len);
            bounds.add_slots(at, len).expect("memory");
            at
        };
        let sq_depth = sq.slots();
        let setup = StarSetup {
            boot: host as u64 + 70,
            pd: owner.pd,
            mtu: attr.path_mtu,
            sq_depth,
            rq_depth: SLOTS,
            srq,
            send_ring: slots(u64::from(sq_depth) * CQE_SLOT),
            recv_ring: slots(u64::from(SLOTS) * CQE_SLOT),
            replay: slots(u64::from(SLOTS) * REPLAY_SLOT),
            replay_slots: SLOTS,
            access: attr.access,
            max_rd_atomic: attr.max_rd_atomic,
            rnr_retry: attr.rnr_retry,
            min_rnr_timer: attr.min_rnr_timer,
        };
        let mut sl = SlQp::new(SlInit {
            qpn,
            sq,
            first_send,
            rq,
            send_cq: self.cqs[host].clone(),
            recv_cq: self.cqs[host].clone(),
            sq_sig_all: false,
            setup,
            inline_key: 0,
            patience: Patience::of(attr.timeout, attr.retry_cnt),
            keepalive: 50_000_000,
            rules: Default::default(),
            stats: self.stats[host].clone(),
        })
        .expect("a good set-up");
        let released = h.nic.release_qp(&mut h.env, qpn).expect("it rests");
        end.left = true;
        self.epochs += 1;
        let epoch = u32::from(LIVES[host]) << 16 | self.epochs;
        let [_, port] = h.env.star.ports;
        let rules = h.regions.iter().map(|(key, attr)| Rule {
            key: *key,
            pd: attr.pd,
            qpn: 0,
            addr: attr.addr,
            len: attr.length,
            iova: attr.iova,
            access: attr.access,
        });
        sl.start(&mut h.env, now, Peer { av: attr.av, port, qpn: peer, epoch }, None, rules);
        let side = &mut self.sides[at][host];
        (side.sl, side.began) = (Some((sl, released)), true);
    }

    fn transmit(&mut self) {
        loop {
            let now = self.net.now();
            for (at, host) in self.all() {
                if let Some((sl, _)) = &mut self.sides[at][host].sl {
                    sl.poll_transmit(&mut self.net.hosts[host].env, now);
                }
            }
            self.net.transmit();
            let frames = self.net.of_star.as_mut().map(std::mem::take).unwrap_or_default();
            if frames.is_empty() {
                return;
            }
            frames.into_iter().for_each(|frame| self.launch(frame));
        }
    }

    /// A frame of StaR leaves; the wire does to it what it does.
    fn launch(&mut self, frame: StarFrame) {
        let Faults { loss, duplicate, reorder, delay, jitter, late, .. } = self.net.faults;
        let from = usize::from(frame.path.src == self.net.hosts[1].gid);
        if self.rng.chance(loss) {
            return;
        }
        for _ in 0..1 + u32::from(self.rng.chance(duplicate)) {
            let arrives = self.net.now() + delay + self.rng.below(jitter + 1);
            let at = if self.rng.chance(reorder) {
                arrives + self.rng.below(late)
            } else {
                self.lanes[from] = self.lanes[from].max(arrives);
                self.lanes[from]
            };
            self.order += 1;
            self.wire.insert((at, self.order), frame.clone());
        }
    }

    fn deliver(&mut self, frame: &StarFrame) {
        let (path, now) = (&frame.path, self.net.now());
        let host = usize::from(path.dst == self.net.hosts[1].gid);
        let [stateless, _] = self.net.hosts[host].env.star.ports;
        let side = if path.dport == stateless { Side::Stateless } else { Side::Stateful };
        let packet = Packet::open(side, path, &frame.bytes).expect("a good packet");
        if side == Side::Stateless {
            return self.serve(host, frame, &packet);
        }
        let at = self.find(host, packet.header.qpn);
        if self.sides[at][host].gone {
            return;
        }
        if packet.header.migrate {
            let h = &mut self.net.hosts[host];
            if let Some((sl, _)) = &mut self.sides[at][host].sl {
                return sl.handle_control(&mut h.env, now, &path.src, &packet);
            }
            self.begin_stateful(at, host, &packet);
        }
        let h = &mut self.net.hosts[host];
        h.turn(now).handle_stateful(&path.src, &packet);
    }

    fn serve(&mut self, host: usize, frame: &StarFrame, packet: &Packet<'_>) {
        let Some(Prefix { qpn, epoch }) = packet.prefix else { return };
        let at = self.find(host, qpn);
        let here = self.sides[at][host].sl.as_ref().is_some_and(|(sl, _)| sl.peer().epoch == epoch);
        if !here {
            return;
        }
        let env = &mut self.net.hosts[host].env;
        let meta = FrameMeta { src: frame.path.src, dst: frame.path.dst, ..FrameMeta::default() };
        let (bounds, stats) = (Some(&self.bounds[host]), &*self.stats[host]);
        let card = stateless::Card { bounds, slots: None, life: LIVES[host], stats };
        stateless::handle(&card, env, (&meta, frame.path.sport), packet);
        let now = self.net.now();
        for event in std::mem::take(&mut self.net.hosts[host].env.star.events) {
            let at = self.find(host, event.qpn);
            if let Some((sl, _)) = &mut self.sides[at][host].sl {
                sl.handle_event(&mut self.net.hosts[host].env, now, &event);
            }
        }
    }

    fn begin_stateful(&mut self, at: usize, host: usize, packet: &Packet<'_>) {
        let now = self.net.now();
        let first = packet.header.psn.get() == 0;
        let Some(Control::Setup(setup)) = Control::decode(packet.data).filter(|_| first) else { return };
        let (peer, from) = (self.net.hosts[1 - host].gid, packet.prefix.expect("control messages have one"));
        let side = &mut self.sides[at][host];
        let h = &mut self.net.hosts[host];
        if side.began || !h.nic.is_held(side.qpn) {
            return;
        }
        if side.served.is_some_and(|served| !is_later(from.epoch, served)) {
            return;
        }
        if let Some(round) = &mut side.round {
            let mut requests = Resting { turn: &mut h.turn(now), qpn: side.qpn };
            round.peer_began((peer, side.peer), &mut requests);
            self.end_round(at, host);
        }
        let side = &mut self.sides[at][host];
        let Some(Outcome::Star { role: Role::Stateful, ports: [port, control_port], .. }) =
            side.settled.as_ref().and_then(Negotiation::outcome)
        else {
            return;
        };
        let h = &mut self.net.hosts[host];
        let peer = stateful::Peer { av: h.av(peer), port, control_port, qpn: from.qpn, epoch: from.epoch };
        let mut channel = Channel::new();
        channel.took();
        let end = &self.conns[at].ends[host];
        let (sq, rq) = (end.sq.clone(), (!end.shared).then(|| end.rq.clone()));
        let cq = self.cqs[host].clone();
        let queues = Queues { sq, rq, send_cq: cq.clone(), recv_cq: cq };
        let lifetime = 4 * self.net.faults.late;
        let init = StarInit { queues, setup, peer, channel, window: 64, lifetime };
        h.turn(now).begin_stateful(side.qpn, init).expect("a QP that rests");
        (side.began, side.served) = (true, Some(from.epoch));
    }

    /// Programs poll: libraries look at their slots.
    pub(crate) fn poll_slots(&mut self) {
        let now = self.net.now();
        for (at, host) in self.all() {
            if let Some((sl, _)) = &mut self.sides[at][host].sl {
                for queue in [Queue::Send, Queue::Recv] {
                    sl.complete(&mut self.net.hosts[host].env, now, queue);
                }
            }
        }
    }

    /// The program of `host` destroys its end.
    pub(crate) fn destroy(&mut self, at: usize, host: usize) {
        let now = self.net.now();
        let h = &mut self.net.hosts[host];
        let side = &mut self.sides[at][host];
        (side.round, side.homing, side.gone) = (None, None, true);
        match side.sl.take() {
            /* the last word is lost: silence tells */
            Some((sl, released)) => {
                _ = sl.close(now, false);
                h.nic.end_released(&released);
            }
            None => h.nic.destroy_qp(&mut h.env, side.qpn).expect("it ends"),
        }
    }

    /// The program of `host` takes its end to ERR.
    pub(crate) fn fail(&mut self, at: usize, host: usize) {
        let now = self.net.now();
        let h = &mut self.net.hosts[host];
        let side = &mut self.sides[at][host];
        (side.round, side.homing) = (None, None);
        match &mut side.sl {
            Some((sl, _)) => sl.enter_error(&mut h.env, now, WcStatus::WrFlushErr),
            None => {
                let to = QpAttr { state: QpState::Err, ..QpAttr::default() };
                h.nic.modify_qp(&mut h.env, side.qpn, &to, QpAttrMask::STATE, now).expect("from any state");
                /* nothing begins any more */
                side.began = true;
            }
        }
    }

    /// Whether an end is in ERR.
    pub(crate) fn has_failed(&self, at: usize, host: usize) -> bool {
        let side = &self.sides[at][host];
        match &side.sl {
            Some((sl, _)) => sl.state() == SlState::Error,
            None => self.net.hosts[host].nic.qp_state(side.qpn) == Some(QpState::Err),
        }
    }
}
