//! The wire, and time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet};

use starverbs_core::relay::{LinkId, Relay};
use starverbs_core::wire::{IcrcHeader, Packet};
use starverbs_core::{FrameMeta, Nanos, NicConfig, PdId, QpType, Qpn};
use starverbs_star::wire::StarHeader;

use crate::host::{Setup, SimHost};
use crate::rng::Rng;
use crate::star::{StarCard, StarFrame};

mod carry;
mod star;

/// What the wire does to frames. Probabilities are per frame, times in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    /// Lost on the way
    pub loss: f64,
    /// Delivered twice
    pub duplicate: f64,
    /// Held back by up to [`Faults::late`]
    pub reorder: f64,
    /// Changed in one bit, so that the ICRC drops it
    pub corrupt: f64,
    /// Least delay
    pub delay: Nanos,
    /// Random delay on top; frames do not overtake each other by it
    pub jitter: Nanos,
    /// Longest hold-up of a reordered frame
    pub late: Nanos,
    /// Time that a host takes over each frame it receives
    pub service: Nanos,
    /// Frames that wait for a host at most, as in a socket's buffer; more are lost
    pub queue: u64,
}

impl Default for Faults {
    fn default() -> Self {
        Faults {
            loss: 0.0,
            duplicate: 0.0,
            reorder: 0.0,
            corrupt: 0.0,
            delay: 2_000,
            jitter: 0,
            late: 100_000,
            service: 0,
            queue: u64::MAX,
        }
    }
}

/// What the wire did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// Frames that hosts sent
    pub sent: u64,
    /// Lost on purpose
    pub lost: u64,
    /// Delivered twice on purpose
    pub duplicated: u64,
    /// Held back on purpose
    pub reordered: u64,
    /// Changed on purpose and dropped by their ICRC
    pub corrupted: u64,
    /// Lost because too many waited for their host
    pub overrun: u64,
    /// For nobody
    pub stray: u64,
    /// That somebody on the wire sent
    pub forged: u64,
    /// Lost because the link was cut
    pub cut: u64,
    /// On the wire when their host went away, or thrown away by [`Net::purge`]
    pub purged: u64,
    /// Frames delivered
    pub delivered: u64,
}

/// Sees frames: the host that sends one, and its bytes.
pub type Tap = Box<dyn FnMut(usize, &[u8])>;

/// Sees each StaR frame as it leaves, and may have another one arrive so many nanoseconds later, on
/// its own path.
pub type Forger = Box<dyn FnMut(&StarFrame) -> Option<(Nanos, StarFrame)>>;

struct Flight {
    from: usize,
    to: usize,
    meta: FrameMeta,
    bytes: Vec<u8>,
    /// Between which ports, if it is StaR's
    star: Option<IcrcHeader>,
    /// What it still has to pass, until it has arrived: time that its host takes over it, and frames that
    /// may wait there
    queue: Option<(Nanos, u64)>,
}

/// An XRC domain that several hosts share, as one of them knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SharedDomain {
    /// The host's index
    pub host: usize,
    /// The domain on its card
    pub pd: PdId,
}

/// A QP of a host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpAt {
    /// Index of the host
    pub host: usize,
    /// Its number there
    pub qpn: Qpn,
}

/// Hosts on a wire.
pub struct Net {
    /// The hosts
    pub hosts: Vec<SimHost>,
    /// What the wire does; may change during a run
    pub faults: Faults,
    /// What the wire did
    pub tally: Tally,
    /// Print each frame and its fate (SIM_TRACE)
    pub trace: bool,
    /// Hosts of which nothing comes through to StaR's ports, as where somebody lets RoCEv2's alone pass
    pub star_cut: Vec<usize>,
    /// Sees each frame that a host sends, and the host
    pub tap: Option<Tap>,
    /// StaR packets for a stateless half that asked for its host's memory or wrote there, as they left: the
    /// sender, and their bytes; kept where somebody takes them out
    pub star_sent: Option<Vec<(usize, StarHeader)>>,
    /// Completions that went with data: by whom, of which connection and queue, and which
    carried: HashSet<(usize, Qpn, u32, u8, u32)>,
    /// Somebody on the wire who sends StaR frames of his own
    pub forger: Option<Forger>,
    /// What each host's card is
    cfgs: Vec<NicConfig>,
    /// What each host's card was seeded with
    seeds: Vec<u64>,
    /// Links with other faults than [`Net::faults`], by (from, to)
    links: Vec<Option<Faults>>,
    /// Until when each link carries nothing
    cuts: Vec<Nanos>,
    now: Nanos,
    rng: Rng,
    /// When a frame arrives, or its host is through with it, and order; the frame is in `flights` by its
    /// order
    wire: BinaryHeap<Reverse<(Nanos, u64)>>,
    flights: std::collections::BTreeMap<u64, Flight>,
    order: u64,
    /// Messages between cards, by arrival time and order: from, to
    relays: std::collections::BTreeMap<(Nanos, u64), (usize, usize, Vec<u8>)>,
    /// Hosts that were killed
    dead: Vec<bool>,
    /// When the last frame that was not reordered arrives, by (from, to)
    lanes: Vec<Nanos>,
    /// When each host is done with the frames that it has
    busy: Vec<Nanos>,
    /// Until when each host gets no CPU
    asleep: Vec<Nanos>,
    /// What the card of each host has of StaR
    stars: Vec<Option<StarCard>>,
    /// By how much each host's clock is ahead of the time
    ahead: Vec<i64>,
}

impl Net {
    /// `n` hosts; `seed` decides everything that is left to chance.
    pub fn new(n: u8, cfg: NicConfig, faults: Faults, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let seeds: Vec<u64> = (0..n).map(|_| rng.bits()).collect();
        let hosts = (0..n).zip(&seeds).map(|(id, seed)| SimHost::new(id, cfg, *seed)).collect();
        let links = usize::from(n) * usize::from(n);
        Net {
            hosts,
            cfgs: vec![cfg; usize::from(n)],
            seeds,
            links: vec![None; links],
            cuts: vec![0; links],
            faults,
            tally: Tally::default(),
            trace: std::env::var_os("SIM_TRACE").is_some(),
            tap: None,
            star_cut: Vec::new(),
            star_sent: None,
            carried: HashSet::new(),
            forger: None,
            now: 1_000,
            rng,
            wire: BinaryHeap::new(),
            flights: Default::default(),
            order: 0,
            lanes: vec![0; links],
            relays: Default::default(),
            dead: vec![false; usize::from(n)],
            busy: vec![0; usize::from(n)],
            asleep: vec![0; usize::from(n)],
            stars: vec![None; usize::from(n)],
            ahead: vec![0; usize::from(n)],
        }
    }

    /// The time, ns.
    pub fn now(&self) -> Nanos {
        self.now
    }

    /// The clock of `host` jumps: forwards as after a suspension of the machine, backwards as it never
    /// should. It does not go below 1.
    pub fn jump(&mut self, host: usize, by: i64) {
        self.ahead[host] = self.ahead[host].saturating_add(by);
    }

    /// What the clock of `host` shows.
    fn clock(&self, host: usize) -> Nanos {
        self.now.saturating_add_signed(self.ahead[host]).max(1)
    }

    /// When the timers of `host` are due, by the time.
    fn timer(&self, host: usize) -> Option<Nanos> {
        let h = &self.hosts[host];
        let star = h.star.as_ref().and_then(|star| star.next_deadline(h.nic.connection_count()));
        let deadline = [h.nic.next_deadline(), star].into_iter().flatten().min()?;
        Some(deadline.saturating_add_signed(self.ahead[host].saturating_neg()).max(self.asleep[host]))
    }

    /// Connects two RESET QPs to each other, up to RTS. With XRC_SEND, `b` is the receiving end.
    pub fn connect(&mut self, qp_type: QpType, a: QpAt, b: QpAt, setup: &Setup) {
        let other = if qp_type == QpType::XrcSend { QpType::XrcRecv } else { qp_type };
        for (x, y, kind) in [(a, b, qp_type), (b, a, other)] {
            let dgid = self.hosts[y.host].gid;
            let now = self.clock(x.host);
            let host = &mut self.hosts[x.host];
            host.to_init(x.qpn, false, setup, now);
            host.to_rts(x.qpn, kind, dgid, y.qpn, setup, now);
        }
    }

    /// The program of `host` rings the doorbell of `qpn`.
    pub fn doorbell(&mut self, host: usize, qpn: Qpn) {
        let now = self.clock(host);
        let h = &mut self.hosts[host];
        if h.with_star(now, |star, turn| star.endpoints.ring(turn, qpn)) != Some(true) {
            h.nic.handle_doorbell(&mut h.env, qpn, now);
        }
        self.launch_star(host);
    }

    /// The program of `host` leaves the doorbell of `qpn` until its card runs next
    /// ([`starverbs_core::coalesce`]).
    pub fn doorbell_later(&mut self, host: usize, qpn: Qpn) {
        self.hosts[host].doorbells.push(qpn);
    }

    fn ring_those_left(&mut self, host: usize) {
        for qpn in std::mem::take(&mut self.hosts[host].doorbells) {
            self.doorbell(host, qpn);
        }
    }

    /// Sends all that cards want to send, then moves the time on to the next thing that happens and
    /// lets it happen. False: nothing is going to happen.
    pub fn step(&mut self) -> bool {
        self.transmit();
        let Some(next) = self.next() else { return false };
        self.now = self.now.max(next);
        for host in 0..self.hosts.len() {
            self.hosts[host].now = self.clock(host);
        }
        self.deliver_relays();
        while let Some(Reverse((at, order))) = self.wire.peek().copied()
            && at <= self.now
        {
            self.wire.pop();
            if self.arrived(at, order) {
                continue;
            }
            match self.flights.get(&order).map(|flight| self.asleep[flight.to]) {
                Some(until) if until > self.now => self.wire.push(Reverse((until, order))),
                _ => self.deliver(order),
            }
        }
        for host in 0..self.hosts.len() {
            if self.asleep[host] <= self.now && !self.dead[host] {
                self.look_at_timers(host);
            }
        }
        true
    }

    /// When the next thing happens, if nobody does anything before.
    fn next(&self) -> Option<Nanos> {
        let arrival = self.wire.peek().map(|Reverse((at, _))| *at);
        let timer =
            (0..self.hosts.len()).filter(|host| !self.dead[*host]).filter_map(|host| self.timer(host)).min();
        let relayed = self.relays.first_key_value().map(|((at, _), _)| *at);
        /* a host that wakes up may have something to send, without a timer */
        let woken = self.asleep.iter().copied().filter(|until| *until > self.now).min();
        [arrival, timer, relayed, woken].into_iter().flatten().min()
    }

    /// The time goes on to `until`, before which nothing happens.
    fn wait(&mut self, until: Nanos) {
        self.now = self.now.max(until);
    }

    /// What happens in `time` happens, and it is over.
    pub fn run_for(&mut self, time: Nanos) {
        let end = self.now + time;
        self.transmit();
        while self.next().is_some_and(|next| next <= end) {
            self.step();
            self.transmit();
        }
        self.wait(end);
    }

    /// `host` gets no CPU for `time`: it sends nothing, takes no frames and looks at no timer. It finds all
    /// of that when it wakes up, the frames first.
    pub fn sleep(&mut self, host: usize, time: Nanos) {
        self.transmit();
        let before = std::mem::replace(&mut self.asleep[host], self.now + time);
        self.wake_frames(host, before);
    }

    /// Frames from `from` to `to` have `faults` from now on.
    pub fn set_link(&mut self, from: usize, to: usize, faults: Faults) {
        let link = self.link(from, to);
        self.links[link] = Some(faults);
    }

    /// The link from `from` to `to` carries nothing for `time`. What is on it arrives.
    pub fn cut(&mut self, from: usize, to: usize, time: Nanos) {
        let link = self.link(from, to);
        self.cuts[link] = self.cuts[link].max(self.now + time);
    }

    /// Throws away what is on the wire between two hosts, either way, and what their cards did not take yet.
    pub fn purge(&mut self, a: usize, b: usize) {
        let before = self.flights.len();
        self.flights.retain(|_, f| (f.from, f.to) != (a, b) && (f.from, f.to) != (b, a));
        self.tally.purged += (before - self.flights.len()) as u64;
        for (to, from) in [(a, b), (b, a)] {
            let gid = self.hosts[from].gid;
            let SimHost { came, star_came, .. } = &mut self.hosts[to];
            let before = came.len() + star_came.len();
            came.retain(|(meta, _)| meta.src != gid);
            star_came.retain(|frame| frame.path.src != gid);
            self.tally.purged += (before - came.len() - star_came.len()) as u64;
        }
    }

    /// `host` ends without a word and comes up with a new card and empty memory, at the same address. As the
    /// card's seed is the old one, so are its QPNs and keys if all is made in the same order. Frames stay
    /// on the wire.
    pub fn restart(&mut self, host: usize) {
        self.hosts[host] = SimHost::new(host as u8, self.cfgs[host], self.seeds[host]);
        let before = std::mem::replace(&mut self.asleep[host], 0);
        self.wake_frames(host, before);
        self.hosts[host].now = self.clock(host);
        self.reopen_star(host);
    }

    /// The host begins anew, as [`restart`](Self::restart) has it, with another card.
    pub fn replace_card(&mut self, host: usize, cfg: NicConfig) {
        self.cfgs[host] = cfg;
        self.restart(host);
    }

    /// Frames on the wire.
    pub fn in_flight(&self) -> usize {
        self.flights.len()
    }

    fn link(&self, from: usize, to: usize) -> usize {
        from * self.hosts.len() + to
    }

    /// Steps until nothing happens any more, at most `limit` times; whether that was enough.
    pub fn run_until_idle(&mut self, limit: usize) -> bool {
        (0..limit).any(|_| !self.step())
    }

    /// All hosts stand still for `time` and then look at their timers before they look at what came
    /// meanwhile: programs that were stopped, a machine that was suspended.
    pub fn suspend(&mut self, time: Nanos) {
        self.transmit();
        self.now += time;
        (0..self.hosts.len()).for_each(|host| self.look_at_timers(host));
    }

    fn look_at_timers(&mut self, host: usize) {
        let now = self.clock(host);
        if self.hosts[host].nic.next_deadline().is_some_and(|deadline| deadline <= now) {
            self.ring_those_left(host);
        }
        let h = &mut self.hosts[host];
        h.nic.handle_timeout(&mut h.env, now);
        h.with_star(now, |star, turn| star.poll(turn));
        self.launch_star(host);
    }

    /// Sends all that cards want to send; the time stands still.
    pub fn transmit(&mut self) {
        for from in 0..self.hosts.len() {
            if self.asleep[from] > self.now || self.dead[from] {
                continue;
            }
            let now = self.clock(from);
            self.hosts[from].take_frames(now);
            for acks in [false, true] {
                loop {
                    let h = &mut self.hosts[from];
                    let more = h.nic.poll_transmit(&mut h.env, now, acks);
                    let frames = h.env.flush();
                    let stuck = more && frames.is_empty();
                    for (to, bytes) in frames {
                        self.launch(from, &to, bytes);
                    }
                    let came = self.launch_star(from);
                    let stuck = stuck && !came;
                    assert!(!stuck, "the card has more left, but an empty port got nothing");
                    if !more {
                        break;
                    }
                }
            }
            self.transmit_star(from, now);
        }
        self.take_relays();
    }

    /// Puts on their way what cards have for each other.
    fn take_relays(&mut self) {
        for from in 0..self.hosts.len() {
            for (to, bytes) in std::mem::take(&mut self.hosts[from].env.relays) {
                self.order += 1;
                let lane = |(_, (f, t, _)): &(_, &(usize, usize, _))| (*f, *t) == (from, to as usize);
                let last = self.relays.iter().filter(lane).map(|((at, _), _)| *at).max().unwrap_or(0);
                let at = last.max(self.now + 1_000 + self.rng.below(self.faults.jitter + 1));
                self.relays.insert((at, self.order), (from, to as usize, bytes));
            }
        }
    }

    /// What has come from other cards; those who sleep get it when they wake up.
    fn deliver_relays(&mut self) {
        while let Some(((at, order), _)) = self.relays.first_key_value()
            && *at <= self.now
        {
            let key = (*at, *order);
            let Some((from, to, bytes)) = self.relays.remove(&key) else { return };
            if self.asleep[to] > self.now {
                self.relays.insert((self.asleep[to], key.1), (from, to, bytes));
                continue;
            }
            if let Some(under_way) = self.hosts[from].env.peers.get_mut(&(to as u32)) {
                *under_way = under_way.saturating_sub(1);
            }
            let now = self.clock(to);
            let h = &mut self.hosts[to];
            if self.dead[to] || !h.env.peers.contains_key(&(from as u32)) {
                continue;
            }
            let (Some(message), Some(domain)) = (Relay::decode(&bytes), h.env.domain) else { continue };
            h.nic.handle_relay(&mut h.env, now, LinkId(from as u32), domain, &message);
        }
    }

    /// Messages between cards that are on their way, or about to be.
    pub fn relays_under_way(&self) -> usize {
        self.relays.len() + self.hosts.iter().map(|host| host.env.relays.len()).sum::<usize>()
    }

    /// `to` gets these bytes at once as a message from the card of `from`, whatever they are. False: they are
    /// no message.
    pub fn relay(&mut self, from: usize, to: usize, bytes: &[u8]) -> bool {
        let now = self.clock(to);
        let h = &mut self.hosts[to];
        let linked = h.env.peers.contains_key(&(from as u32));
        let (Some(message), Some(domain), true) = (Relay::decode(bytes), h.env.domain, linked) else {
            return false;
        };
        h.nic.handle_relay(&mut h.env, now, LinkId(from as u32), domain, &message);
        true
    }

    /// `hosts` share an XRC domain.
    pub fn share(&mut self, hosts: &[SharedDomain]) {
        for SharedDomain { host: at, pd: domain } in hosts {
            let others = hosts.iter().map(|other| other.host as u32).filter(|other| *other != *at as u32);
            let h = &mut self.hosts[*at];
            h.nic.share_domain(*domain, *at as u16 + 1).expect("its own block");
            h.env.domain = Some(*domain);
            h.env.peers = others.map(|other| (other, 0)).collect();
        }
    }

    /// A host ends at once. What it has sent to other cards arrives, and then that it is gone.
    pub fn kill(&mut self, host: usize) {
        self.transmit();
        self.dead[host] = true;
        for at in self
            .relays
            .iter()
            .filter(|(_, (from, ..))| *from == host)
            .map(|(key, _)| *key)
            .collect::<Vec<_>>()
        {
            let Some((_, to, bytes)) = self.relays.remove(&at) else { continue };
            let h = &mut self.hosts[to];
            if let (Some(message), Some(domain)) = (Relay::decode(&bytes), h.env.domain) {
                h.nic.handle_relay(&mut h.env, self.now, LinkId(host as u32), domain, &message);
            }
        }
        for (at, h) in self.hosts.iter_mut().enumerate().filter(|(at, _)| *at != host) {
            if h.env.peers.remove(&(host as u32)).is_some() && !self.dead[at] {
                h.nic.handle_unlink(&mut h.env, self.now, LinkId(host as u32));
            }
        }
    }

    fn deliver(&mut self, order: u64) {
        let Some(flight) = self.flights.remove(&order) else { return };
        self.tally.delivered += 1;
        self.trace_any(flight.to, "came", &flight.bytes, flight.star.as_ref());
        if self.dead[flight.to] {
            return;
        }
        self.ring_those_left(flight.to);
        let now = self.clock(flight.to);
        let h = &mut self.hosts[flight.to];
        if let Some(path) = flight.star {
            h.star_came.push_back(StarFrame { path, bytes: flight.bytes });
            h.take_frames(now);
            /* who runs a card flushes before any program has its turn */
            self.launch_star(flight.to);
            return;
        }
        h.came.push_back((flight.meta, flight.bytes));
        h.take_frames(now);
    }

    fn trace_frame(&self, host: usize, what: &str, bytes: &[u8]) {
        if !self.trace {
            return;
        }
        match Packet::parse(bytes) {
            Ok(p) => eprintln!(
                "{:>12} host {host} {what} {:?}{}{} to {} psn {} {:?} len {} {:?}",
                self.now,
                p.op().kind,
                if p.op().is_first() { " first" } else { "" },
                if p.op().is_last() { " last" } else { "" },
                p.bth().dest_qpn(),
                p.bth().psn().get(),
                if p.bth().ack_req() { "ask" } else { "" },
                p.reth().map_or(p.payload().len(), |r| r.dma_len() as usize),
                p.aeth().and_then(|a| a.syndrome()),
            ),
            Err(e) => eprintln!("{:>12} host {host} {what} {e}", self.now),
        }
    }
}
