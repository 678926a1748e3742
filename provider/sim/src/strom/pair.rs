//! Two cards, and what passes their units.
//!
//! A command of a program: store -> bus -> card. A packet: (payload from memory over the bus) -> data path,
//! held for its ICRC -> stages -> MAC -> wire -> MAC -> held for its ICRC -> data path -> stages, then the
//! core has it. What the core writes goes over the bus; what a kernel reads does, and the kernel waits.

use starverbs_core::wire::Packet;
use starverbs_core::{Av, FrameMeta, Nanos, Seg, WcStatus};

use super::params::Params;
use super::setup::{KernelPeer, connect};
use super::units::{Span, Unit};
use crate::Send;
use crate::rnic::{EventQueue, Picos};
use crate::watch::Touch;

/// Frames that a card holds that have not left.
const PORT: usize = 64;

/// What happens.
enum PairEvent {
    /// A command is in the card
    Ring(usize, Box<Send>),
    /// The stack has a packet, all of which has come then
    Packet(usize, Box<(FrameMeta, Vec<u8>)>, Span),
    /// A frame has left a card
    Left(usize),
    /// Bytes are in memory
    Written(usize, Seg),
    /// The core's next timer
    Timer(usize),
}

/// What a step was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PairStep {
    /// Nothing that a program sees
    Nothing,
    /// These bytes of a host's memory have changed
    Written(usize, Seg),
}

fn meta(to: &Av) -> FrameMeta {
    let Av { sgid, dgid, traffic_class, hop_limit, .. } = *to;
    FrameMeta { src: sgid, dst: dgid, traffic_class, hop_limit }
}

/// Units of a card.
#[derive(Clone, Copy, Debug, Default)]
struct Units {
    /// The program's stores
    stores: Unit,
    /// The bus, from memory and to it
    reads: Unit,
    writes: Unit,
    /// The data path, out and in
    out: Unit,
    inward: Unit,
    wire: Unit,
    /// Frames that have not left
    queued: usize,
    /// The core has more, for which there was no room
    more: bool,
    /// When the core's timer is set
    timer: Option<Picos>,
}

/// Two cards with a connection, and a wire between them.
pub struct Pair {
    /// What they are like
    pub params: &'static Params,
    pub(super) ends: [KernelPeer; 2],
    units: [Units; 2],
    events: EventQueue<PairEvent>,
    begun: Nanos,
    /// Requests of each host that were completed
    pub(super) completed: [u64; 2],
}

impl Pair {
    /// Two idle cards, connected.
    pub fn new(params: &'static Params) -> Pair {
        let (ends, begun) = connect();
        Pair {
            params,
            ends,
            units: Default::default(),
            events: EventQueue::default(),
            begun,
            completed: [0; 2],
        }
    }

    /// Picoseconds since the beginning.
    pub fn now(&self) -> Picos {
        self.events.now()
    }

    /// The core's time.
    fn clock(&self) -> Nanos {
        self.begun + self.events.now() / 1000
    }

    /// Moves the time on to the next thing that happens. `None`: nothing will.
    pub fn step(&mut self) -> Option<PairStep> {
        match self.events.pop()? {
            PairEvent::Written(at, seg) => return Some(PairStep::Written(at, seg)),
            PairEvent::Ring(at, send) => {
                let (now, clock) = (self.now(), self.clock());
                let KernelPeer { host, sq, qpn, .. } = &mut self.ends[at];
                sq.post(*send).expect("programs have no more under way than fits the queue");
                host.nic.handle_doorbell(&mut host.env, *qpn, clock);
                self.follow(at, Span::at(now));
            }
            PairEvent::Packet(at, frame, span) => self.take(at, *frame, span),
            PairEvent::Left(at) => {
                let now = self.now();
                self.units[at].queued -= 1;
                if self.units[at].more {
                    self.follow(at, Span::at(now));
                }
            }
            PairEvent::Timer(at) => {
                let (now, clock) = (self.now(), self.clock());
                if self.units[at].timer.is_some_and(|timer| timer <= now) {
                    self.units[at].timer = None;
                    let host = &mut self.ends[at].host;
                    host.nic.handle_timeout(&mut host.env, clock);
                    self.follow(at, Span::at(now));
                }
            }
        }
        Some(PairStep::Nothing)
    }

    /// A command of a program, which begins its store at `time`. The store is on the bus while the next one
    /// waits for its turn.
    pub(super) fn command(&mut self, at: usize, time: Picos, send: Send) {
        let own = send.inline.map_or(0, |seg| seg.len);
        let (params, begin) = (self.params, Span::at(time.max(self.now())));
        let stored = self.units[at].stores.pass(begin, params.stores(own));
        self.events.push(stored.last - params.store + params.write, PairEvent::Ring(at, Box::new(send)));
    }

    /// The core gets a packet. A kernel has it a step later.
    fn take(&mut self, at: usize, (meta, bytes): (FrameMeta, Vec<u8>), span: Span) {
        let clock = self.clock();
        let is_rpc = Packet::parse_rpc(&bytes).is_ok();
        let host = &mut self.ends[at].host;
        host.now = clock;
        host.came.push_back((meta, bytes));
        host.take_frames(clock);
        let step = if is_rpc { self.params.stage * self.params.cycle } else { 0 };
        self.follow(at, span.after(step));
    }

    /// What follows on a card from what it got, whose bytes are there at `span`: memory, frames, completions,
    /// its next timer.
    fn follow(&mut self, at: usize, span: Span) {
        let clock = self.clock();
        let frames = self.drain(at, clock);
        let mut frames = frames.into_iter();
        let watch = self.ends[at].host.env.watch.as_mut();
        let touches = watch.map(|watch| std::mem::take(&mut watch.touches)).unwrap_or_default();
        /* frames say that what came before them is done: a write, when it is on the bus */
        let (mut there, mut done) = (span, span.last);
        for touch in touches {
            match touch {
                Touch::Read(seg) => there = self.kernel_reads(at, there, &seg),
                Touch::Write(seg) if self.ends[at].is_on_card(&seg) => {}
                Touch::Write(seg) => {
                    let on_bus = self.units[at].writes.pass(there, self.params.bus(seg.len)).last;
                    self.events.push(on_bus + self.params.write, PairEvent::Written(at, seg));
                    done = on_bus;
                }
                Touch::Frame(payload) => {
                    let (meta, bytes) = frames.next().expect("a frame for each that was written down");
                    self.send(at, done.max(there.last), &payload, meta, bytes);
                }
            }
        }
        while let Some((cqe, _)) = self.ends[at].cq.poll() {
            assert_eq!(cqe.status, WcStatus::Success, "all requests succeed");
            self.completed[at] += 1;
        }
        self.set_timer(at);
    }

    /// A kernel waits for what it reads, and takes its next step.
    fn kernel_reads(&mut self, at: usize, there: Span, seg: &Seg) -> Span {
        if self.ends[at].is_on_card(seg) {
            return there;
        }
        let asked = Span::at(there.last);
        let read = self.units[at].reads.pass(asked, self.params.bus(seg.len)).after(self.params.read);
        Span::at(read.last).after(self.params.stage * self.params.cycle)
    }

    /// All that the core sends, as far as the card has room.
    fn drain(&mut self, at: usize, clock: Nanos) -> Vec<(FrameMeta, Vec<u8>)> {
        let (host, units) = (&mut self.ends[at].host, &mut self.units[at]);
        let mut frames = Vec::new();
        units.more = false;
        for acks in [false, true] {
            loop {
                host.env.port = PORT.saturating_sub(units.queued + frames.len());
                let more = host.nic.poll_transmit(&mut host.env, clock, acks);
                let before = frames.len();
                frames.extend(host.env.flush().into_iter().map(|(to, bytes)| (meta(&to), bytes)));
                units.more |= more && frames.len() == before;
                if !more || frames.len() == before {
                    break;
                }
            }
        }
        frames
    }

    /// A frame that may begin at `time` passes the units to the other card's stack.
    fn send(&mut self, at: usize, time: Picos, payload: &[Seg], meta: FrameMeta, bytes: Vec<u8>) {
        let (params, end) = (self.params, &self.ends[at]);
        let mut span = Span::at(time);
        let fetched: u32 = payload.iter().filter(|seg| !end.is_on_card(seg)).map(|seg| seg.len).sum();
        let units = &mut self.units[at];
        units.queued += 1;
        if fetched > 0 {
            span = units.reads.pass(span, params.bus(fetched)).after(params.read);
        }
        let path = params.path(bytes.len());
        let ready = units.out.pass(span, path).stored().after(params.through());
        let wire = units.wire.pass(ready.after(params.mac[0]), params.wire(bytes.len()));
        self.events.push(wire.last, PairEvent::Left(at));
        let came = wire.stored().after(params.cable + params.mac[1]);
        let span = self.units[1 - at].inward.pass(came, path).after(params.through());
        self.events.push(span.first, PairEvent::Packet(1 - at, Box::new((meta, bytes)), span));
    }

    fn set_timer(&mut self, at: usize) {
        let Some(due) = self.ends[at].host.nic.next_deadline() else { return };
        let due = (due.saturating_sub(self.begun) * 1000).max(self.now() + 1000);
        if self.units[at].timer.is_none_or(|timer| due < timer) {
            self.units[at].timer = Some(due);
            self.events.push(due, PairEvent::Timer(at));
        }
    }

    /// Panics unless each packet went once and came: nothing else is in the paper's figures.
    pub(super) fn check(&self) {
        for end in &self.ends {
            let counters = end.host.nic.counters();
            let odd = [&counters.retransmitted, &counters.sent_rnr, &counters.window_cuts];
            assert!(odd.iter().all(|counter| counter.get() == 0), "nothing is sent twice or refused");
        }
    }
}
