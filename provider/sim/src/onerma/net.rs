//! Hosts at one switch. A link has a rate both ways; the switch queues before each host's link. The wire
//! loses, repeats, delays, and changes packets as a seed decides.

use starverbs_core::Gid;
use starverbs_onerma::{CardConfig, Transmit};

use super::host::{OneRmaHost, SentPacket};
use crate::rng::Rng;
use crate::rnic::{EventQueue, Picos};

/// Picoseconds of a nanosecond.
const NS: Picos = 1000;
/// Ethernet's preamble, header, check sequence and gap, IPv4 and UDP.
const AROUND: u64 = 8 + 14 + 4 + 12 + 20 + 8;

/// What links are like.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Wire {
    /// Gigabits a second of each link, each way
    pub gbits: f64,
    /// From one card to another with nothing on the way but the time that bytes take, ns
    pub delay: u64,
    /// Bytes that the switch holds for one host; what comes then is lost
    pub buffer: u64,
    /// The most that a packet is delayed beyond that, ns; each as long as chance has it
    pub jitter: u64,
}

impl Wire {
    /// The paper's: 100 Gb/s, and 5 us for a READ of 4 KB on idle links.
    pub const fn paper() -> Self {
        /* two ways, a request twice on a link (about 9 ns each), an answer twice (336 ns each) */
        Wire { gbits: 100.0, delay: 2155, buffer: 4 << 20, jitter: 0 }
    }
}

/// What a hostile wire does, each with a probability.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct OneRmaFaults {
    /// A packet is lost
    pub loss: f64,
    /// A packet comes twice, the second time after up to 50 us
    pub repeat: f64,
    /// A packet is late by up to 20 us
    pub late: f64,
    /// A bit of a packet is another one
    pub change: f64,
}

enum NetEvent {
    /// A packet is at the switch
    Switch(SentPacket),
    /// A packet is at its host
    Arrive(usize, SentPacket),
    /// A host's link takes another packet
    Free(usize),
    /// A card's deadline may be due
    Timer(usize),
    /// A program wanted to be woken
    Wake(u64),
}

/// What happened in a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StepReport {
    /// Nothing that a program sees
    Nothing,
    /// A host has completions
    Completed(usize),
    /// The time of this wake-up
    Woke(u64),
}

struct OneRmaLink {
    busy_until: Picos,
    /// A `Free` is on its way
    waits: bool,
    /// Packets that the card sent by itself
    queue: std::collections::VecDeque<SentPacket>,
    /// The time of the earliest `Timer`
    timer: Option<Picos>,
    /// Until when the switch sends to this host what it holds
    port_until: Picos,
}

/// Hosts, and the wire between them.
pub struct OneRmaNet {
    /// The hosts
    pub hosts: Vec<OneRmaHost>,
    /// What the wire does
    pub faults: OneRmaFaults,
    /// Packets that the switch had no room for
    pub dropped: u64,
    /// All that was sent, if it is kept: for who replays it
    pub tape: Option<Vec<SentPacket>>,
    /// A packet that is to be lost: so many leave before it
    hold: Option<u64>,
    wire: Wire,
    links: Vec<OneRmaLink>,
    events: EventQueue<NetEvent>,
    rng: Rng,
}

impl OneRmaNet {
    /// So many hosts with such cards.
    pub fn new(hosts: u16, config: CardConfig, wire: Wire, seed: u64) -> Self {
        let link = |_| OneRmaLink {
            busy_until: 0,
            waits: false,
            queue: Default::default(),
            timer: None,
            port_until: 0,
        };
        OneRmaNet {
            hosts: (0..hosts).map(|number| OneRmaHost::new(number, config)).collect(),
            faults: OneRmaFaults::default(),
            dropped: 0,
            tape: None,
            hold: None,
            wire,
            links: (0..hosts).map(link).collect(),
            events: EventQueue::default(),
            rng: Rng::new(seed),
        }
    }

    /// Nanoseconds since the beginning.
    pub fn now(&self) -> u64 {
        self.events.now() / NS
    }

    /// Wakes a program at a time, with this word.
    pub fn wake_at(&mut self, at: u64, word: u64) {
        self.events.push(at * NS, NetEvent::Wake(word));
    }

    /// A program has asked the card of a host for something: the card sends what it can.
    pub fn pump(&mut self, at: usize) {
        let now = self.events.now();
        loop {
            let (host, link) = (&mut self.hosts[at], &mut self.links[at]);
            link.queue.extend(host.env.out.drain(..));
            if link.busy_until > now {
                if !link.waits && (!link.queue.is_empty() || host.card.has_work()) {
                    link.waits = true;
                    self.events.push(link.busy_until, NetEvent::Free(at));
                }
                break;
            }
            if let Some(packet) = link.queue.pop_front() {
                self.links[at].busy_until = now + self.time_of(&packet);
                self.leave(at, packet);
            } else if host.card.poll_transmit(&mut host.env, now / NS) == Transmit::Done {
                break;
            }
        }
        self.set_timer(at);
    }

    fn time_of(&self, packet: &SentPacket) -> Picos {
        ((packet.bytes.len() as u64 + AROUND) as f64 * 8000.0 / self.wire.gbits) as Picos
    }

    fn set_timer(&mut self, at: usize) {
        let due = self.hosts[at].card.next_deadline().map(|due| due * NS);
        let link = &mut self.links[at];
        if let Some(due) = due
            && link.timer.is_none_or(|timer| due < timer)
        {
            link.timer = Some(due);
            self.events.push(due, NetEvent::Timer(at));
        }
    }

    /// A packet leaves a host's link, whatever becomes of it.
    fn leave(&mut self, at: usize, mut packet: SentPacket) {
        if let Some(tape) = &mut self.tape {
            tape.push(packet.clone());
        }
        let held = self.hold == Some(0);
        self.hold = self.hold.and_then(|left| left.checked_sub(1));
        if held || self.rng.chance(self.faults.loss) {
            return;
        }
        let jitter = if self.wire.jitter > 0 { self.rng.below(self.wire.jitter * NS) } else { 0 };
        let mut arrives = self.links[at].busy_until + self.wire.delay * NS / 2 + jitter;
        if self.rng.chance(self.faults.late) {
            arrives += self.rng.below(20_000 * NS);
        }
        if self.rng.chance(self.faults.repeat) {
            let again = arrives + self.rng.below(50_000 * NS);
            self.events.push(again, NetEvent::Switch(packet.clone()));
        }
        if self.rng.chance(self.faults.change) {
            let bit = self.rng.below(packet.bytes.len() as u64 * 8) as usize;
            packet.bytes[bit / 8] ^= 1 << (bit % 8);
        }
        self.events.push(arrives, NetEvent::Switch(packet));
    }

    /// Somebody on the path sends a packet of theirs.
    pub fn inject(&mut self, packet: SentPacket) {
        self.events.push(self.events.now(), NetEvent::Switch(packet));
    }

    /// The packet that leaves after so many others is lost.
    pub fn hold(&mut self, after: u64) {
        self.hold = Some(after);
    }

    /// Moves the time on until that packet has left.
    pub fn settle_until_held(&mut self) {
        while self.hold.is_some() && self.step().is_some() {}
    }

    fn host_of(&self, gid: &Gid) -> Option<usize> {
        let [10, 1, high, low] = gid.ipv4()? else { return None };
        let at = usize::from(u16::from_be_bytes([high, low]));
        (at < self.hosts.len()).then_some(at)
    }

    /// Moves the time on to the next event. `None`: nothing happens any more.
    pub fn step(&mut self) -> Option<StepReport> {
        let event = self.events.pop()?;
        let now = self.now();
        let at = match event {
            NetEvent::Wake(word) => return Some(StepReport::Woke(word)),
            NetEvent::Switch(packet) => {
                self.forward(packet);
                return Some(StepReport::Nothing);
            }
            NetEvent::Free(at) => {
                self.links[at].waits = false;
                at
            }
            NetEvent::Timer(at) => {
                self.links[at].timer = None;
                let OneRmaHost { card, env, .. } = &mut self.hosts[at];
                card.handle_timeout(env, now);
                at
            }
            NetEvent::Arrive(at, SentPacket { path, mut bytes, .. }) => {
                let OneRmaHost { card, env, .. } = &mut self.hosts[at];
                card.handle_packet(env, now, &path, &mut bytes);
                at
            }
        };
        self.pump(at);
        let completed = !self.hosts[at].env.completed.is_empty();
        self.hosts[at].env.completed.clear();
        Some(if completed { StepReport::Completed(at) } else { StepReport::Nothing })
    }

    fn forward(&mut self, mut packet: SentPacket) {
        let Some(to) = self.host_of(&packet.path.remote) else { return };
        let (now, time) = (self.events.now(), self.time_of(&packet));
        let link = &mut self.links[to];
        let begins = link.port_until.max(now);
        let held = (begins - now) as f64 * self.wire.gbits / 8000.0;
        if held > self.wire.buffer as f64 {
            self.dropped += 1;
            return;
        }
        link.port_until = begins + time;
        (packet.path.local, packet.path.remote) = (packet.path.remote, packet.path.local);
        self.events.push(begins + time + self.wire.delay * NS / 2, NetEvent::Arrive(to, packet));
    }

    /// Lets everything under way come to its end.
    pub fn settle(&mut self) {
        while self.step().is_some() {}
    }
}
