//! The core's transport on a card's units: what the server's and the clients' cards say to each other is
//! decided by the code that real programs run (RC and StaR: queue pairs, timers, security registry, headers),
//! and how long it takes by the units of [`card`].
//!
//! A packet passes: input -> (context) -> the core -> (memory) -> output -> switch -> link. The core answers
//! at once; what it puts on the wire waits for the memory that it brings or answers for. StaR's packets of
//! one turn of a card to one half of another share a frame, if the plan has them packed. The connections are
//! made on the quiet wire of [`Net`](crate::Net), before time is counted.

mod card;
mod frame;
mod setup;

use std::ops::ControlFlow;

use starverbs_core::Nanos;
use starverbs_core::qpc::QpcCounters;

use self::card::{ContextWaiter, Units};
use self::frame::{CardFrame, Flight, share};
use self::setup::Testbed;
use super::calls::{Calls, Wake};
use super::card::CardId;
use super::events::{EventQueue, Picos};
use super::host::{DoorbellBatch, Verb};
use super::params::Params;
use super::run::{RunError, RunResult, ends};
use crate::Rng;

/// What happens.
enum Event {
    /// A program rings a doorbell, or a group's slot ends
    Program(Wake),
    /// The context of a doorbell is there
    Asked(CardId, DoorbellBatch),
    /// Its WQEs are, too
    Fetched(CardId, DoorbellBatch),
    /// A packet is at its card
    Arrive(Box<Flight>),
    /// Its context is there
    Known(Box<Flight>),
    /// The RECV that it uses is, too
    Handle(Box<Flight>),
    /// The unit that gives contexts can give the next
    Serve(CardId),
    /// The WQEs that a frame has are read, and what they carry is next
    Gather(Box<Flight>),
    /// A packet is ready for the wire
    Leave(Box<Flight>),
    /// The card's wire takes it
    Out(Box<Flight>),
    /// A completion is in memory: of a RECV, with what its message carries, or of a SEND
    Seen(CardId, u32, Verb, u32),
    /// The core's next timer
    Timer(CardId),
}

impl From<Wake> for Event {
    fn from(wake: Wake) -> Event {
        Event::Program(wake)
    }
}

/// What became of packets.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    sent: u64,
    received: u64,
    /// Lost on the wire
    lost: u64,
    /// That found the card's buffer full
    dropped: u64,
    checked: u64,
}

struct World<'a> {
    params: &'a Params,
    bed: Testbed,
    units: Vec<Units>,
    /// When each output of the switch is free
    outputs: Vec<Picos>,
    /// When the core's timer of each card is set
    timers: Vec<Picos>,
    events: EventQueue<Event>,
    calls: Calls,
    tally: Tally,
    rng: Rng,
    /// Room for what a card has to send
    frames: Vec<CardFrame>,
}

/// Runs calls over the core's transport.
pub(super) fn run(
    params: &Params,
    mut progress: impl FnMut(f64) -> ControlFlow<()>,
) -> Result<RunResult, RunError> {
    let ends = ends(params);
    let bed = setup::make(params, &ends).map_err(RunError::Unsound)?;
    let cards = bed.hosts.len();
    let entries = |card| if card == 0 { params.entries } else { params.client_entries };
    let mut world = World {
        params,
        units: (0..cards).map(|card| Units::new(entries(card))).collect(),
        outputs: vec![0; cards],
        timers: vec![Picos::MAX; cards],
        events: EventQueue::default(),
        calls: Calls::new(params, &ends),
        tally: Tally::default(),
        rng: Rng::new(params.seed),
        frames: Vec::new(),
        bed,
    };
    world.calls.start(&mut world.events, params);
    (0..cards).for_each(|card| world.set_timer(card as CardId));
    while !world.is_over() {
        let Some(event) = world.events.pop() else { break };
        if world.events.taken().is_multiple_of(1 << 16) && progress(world.calls.measure.share()).is_break() {
            return Err(RunError::Ended);
        }
        world.handle(event);
    }
    world.check().map_err(RunError::Unsound)?;
    Ok(world.outcome())
}

impl World<'_> {
    /// The core's time.
    fn clock(&self) -> Nanos {
        self.bed.begun + self.events.now() / 1000
    }

    /// All calls are answered. Timers of connections that live go on for ever.
    fn is_over(&self) -> bool {
        self.calls.is_idle() && self.tally.sent == self.tally.received + self.tally.lost + self.tally.dropped
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Program(Wake::Doorbell(number)) => {
                if let Some((card, batch)) = self.calls.rung(number) {
                    self.ring(card, batch);
                }
            }
            Event::Program(Wake::Slot) => self.calls.next_slot(&mut self.events, self.params),
            Event::Program(Wake::Retry(qpn, call)) => {
                self.calls.look(qpn, call, &mut self.events, self.params);
            }
            Event::Fetched(card, batch) => {
                let now = self.clock();
                self.bed.ring(card, batch.qpn, now);
                self.follow(card);
            }
            Event::Asked(card, batch) => {
                let ready = self.events.now() + self.params.translate;
                let bytes = u32::from(batch.wqes) * self.params.wqe_bytes;
                let reads = &mut self.units[usize::from(card)].reads;
                let at = reads.take(ready, bytes, &self.params.bus_read) + self.params.cycle;
                self.events.push(at, Event::Fetched(card, batch));
            }
            Event::Serve(card) => {
                self.units[usize::from(card)].serving = false;
                self.serve(card);
            }
            Event::Arrive(flight) => self.arrive(flight),
            Event::Known(flight) => {
                let (now, params) = (self.events.now(), self.params);
                let reads = &mut self.units[usize::from(flight.to)].reads;
                let receives = 0..flight.frame.memory.receives;
                let read = |_| reads.take(now, params.recv_wqe_bytes, &params.bus_read);
                let at = receives.map(read).last().unwrap_or(now);
                self.events.push(at, Event::Handle(flight));
            }
            Event::Handle(flight) => {
                let card = flight.to;
                self.units[usize::from(card)].waiting -= 1;
                self.tally.received += 1;
                self.take(*flight);
                self.follow(card);
            }
            Event::Gather(flight) => self.gather(flight),
            Event::Leave(flight) => self.leave(flight),
            Event::Out(flight) => self.carry(flight),
            Event::Seen(card, end, Verb::Recv, tag) => {
                self.bed.repost(card, end);
                self.calls.received(card, end, tag, &mut self.events, self.params);
            }
            Event::Seen(card, _, Verb::Send, _) => self.calls.completed(card),
            Event::Timer(card) if self.timers[usize::from(card)] <= self.events.now() => {
                self.timers[usize::from(card)] = Picos::MAX;
                let now = self.clock();
                self.bed.run_timers(card, now);
                self.follow(card);
            }
            Event::Timer(_) => {}
        }
    }

    /// A program posts and rings: the card reads the WQEs, and its context first, if it has one.
    fn ring(&mut self, card: CardId, batch: DoorbellBatch) {
        self.bed.post(card, batch);
        if self.keeps_state(card) {
            self.ask(card, batch.qpn, ContextWaiter::Doorbell(batch));
        } else {
            /* its WQEs leave as packets, whose bytes are read when they do */
            let at = self.events.now() + self.params.cycle;
            self.events.push(at, Event::Fetched(card, batch));
        }
    }

    /// Whether a card has contexts.
    fn keeps_state(&self, card: CardId) -> bool {
        !(self.params.star && card == 0)
    }

    /// A frame is at its card, which has its packets one by one.
    fn arrive(&mut self, mut flight: Box<Flight>) {
        let (from, to) = (flight.from, flight.to);
        let more = std::mem::take(&mut flight.more);
        self.take_in(flight);
        for frame in more {
            self.take_in(Box::new(Flight { from, to, frame, more: Vec::new() }));
        }
    }

    fn take_in(&mut self, flight: Box<Flight>) {
        let card = flight.to;
        let units = &mut self.units[usize::from(card)];
        if self.params.buffer > 0 && units.waiting >= self.params.buffer {
            self.tally.dropped += 1;
            return;
        }
        units.waiting += 1;
        match self.bed.end_of(card, &flight.frame) {
            Some(end) if self.keeps_state(card) => self.ask(card, end, ContextWaiter::Packet(flight)),
            _ => {
                let units = &mut self.units[usize::from(card)];
                let at = units.input(self.events.now(), self.params);
                self.events.push(at, Event::Handle(flight));
            }
        }
    }

    /// Asks for a context: doorbells and packets have a channel each, and these their turns.
    fn ask(&mut self, card: CardId, end: u32, job: ContextWaiter) {
        self.units[usize::from(card)].ask(end, job);
        self.serve(card);
    }

    fn serve(&mut self, card: CardId) {
        let now = self.events.now();
        let Some(served) = self.units[usize::from(card)].serve(now, self.params) else { return };
        let event = match served.job {
            ContextWaiter::Doorbell(batch) => Event::Asked(card, batch),
            ContextWaiter::Packet(flight) => Event::Known(flight),
        };
        self.events.push(served.there, event);
        self.events.push(served.next, Event::Serve(card));
    }

    /// The core has a packet; what it brings goes to memory.
    fn take(&mut self, flight: Flight) {
        let now = self.clock();
        let Flight { to, frame, .. } = flight;
        let at = self.events.now() + self.params.translate;
        for bytes in frame.memory.writes.all() {
            self.units[usize::from(to)].writes.take(at, *bytes, &self.params.bus_write);
        }
        self.bed.take(to, frame.packet, now);
    }

    /// What follows on a card from what it was given: packets, completions, its next timer.
    fn follow(&mut self, card: CardId) {
        let (now, clock) = (self.events.now(), self.clock());
        let mut frames = std::mem::take(&mut self.frames);
        self.bed.drain(card, clock, &mut frames);
        if self.params.shares_frames {
            for flight in share(card, frames.drain(..), |frame| self.bed.card_of(frame)) {
                self.send(Box::new(flight));
            }
        } else {
            for frame in frames.drain(..) {
                if let Some(to) = self.bed.card_of(&frame) {
                    self.send(Box::new(Flight { to, from: card, frame, more: Vec::new() }));
                }
            }
        }
        self.frames = frames;
        let units = &mut self.units[usize::from(card)];
        while let Some((end, verb, tag)) = self.bed.poll(card) {
            let at = if self.params.star && card == 0 {
                /* the CQE came in a packet, which was answered when it was in memory */
                units.writes.done.max(now)
            } else {
                let ready = now + self.params.translate + self.params.cq_context;
                units.writes.take(ready, self.params.cqe_bytes, &self.params.bus_write)
            };
            self.events.push(at, Event::Seen(card, end, verb, tag));
        }
        self.set_timer(card);
    }

    fn set_timer(&mut self, card: CardId) {
        let Some(due) = self.bed.next_deadline(card) else { return };
        let at = (due.saturating_sub(self.bed.begun) * 1000).max(self.events.now() + 1000);
        let set = &mut self.timers[usize::from(card)];
        if at < *set {
            *set = at;
            self.events.push(at, Event::Timer(card));
        }
    }

    /// A frame waits until memory has given or taken what its packets say.
    fn send(&mut self, flight: Box<Flight>) {
        let (now, params) = (self.events.now(), self.params);
        self.tally.sent += flight.packets();
        let units = &mut self.units[usize::from(flight.from)];
        let (mut at, mut gathers) = (now, false);
        for memory in flight.frames().map(|frame| &frame.memory) {
            for bytes in memory.reads.all() {
                at = at.max(units.reads.take(now + params.translate, *bytes, &params.bus_read));
            }
            if memory.follows_writes {
                at = at.max(units.writes.done);
            }
            gathers |= !memory.gathers.all().is_empty();
        }
        if gathers {
            self.events.push(at, Event::Gather(flight));
        } else {
            self.check_and_leave(at, flight);
        }
    }

    /// What its packets carry is read, now that it is known where.
    fn gather(&mut self, flight: Box<Flight>) {
        let (now, params) = (self.events.now(), self.params);
        let reads = &mut self.units[usize::from(flight.from)].reads;
        let carried = flight.frames().flat_map(|frame| frame.memory.gathers.all());
        let read = carried.map(|bytes| reads.take(now + params.translate, *bytes, &params.bus_read)).last();
        self.check_and_leave(read.unwrap_or(now), flight);
    }

    /// The security check, at `at`, and the way to the wire.
    fn check_and_leave(&mut self, at: Picos, flight: Box<Flight>) {
        let guiding = flight.frames().filter(|frame| frame.is_guiding()).count() as u64;
        let checked = if self.params.security_check { guiding } else { 0 };
        self.tally.checked += checked;
        let at = at + checked * self.params.check_delay + self.params.cycle;
        self.events.push(at, Event::Leave(flight));
    }

    /// The card's wire takes one packet at a time.
    fn leave(&mut self, flight: Box<Flight>) {
        let units = &mut self.units[usize::from(flight.from)];
        let at = units.out_free_at.max(self.events.now());
        let busy = self.params.card_out.busy(flight.beside_header());
        units.out_free_at = at + busy.max(self.params.cycle);
        self.events.push(at, Event::Out(flight));
    }

    /// As does the switch's.
    fn carry(&mut self, flight: Box<Flight>) {
        let (now, params) = (self.events.now(), self.params);
        let bytes = flight.beside_header();
        if self.rng.chance(params.loss) {
            self.tally.lost += flight.packets();
            return;
        }
        let output = &mut self.outputs[usize::from(flight.to)];
        *output = (*output).max(now + params.switch.latency) + params.switch.busy(bytes);
        self.events.push(*output + params.link, Event::Arrive(flight));
    }

    /// All calls were answered, and nothing that StaR's server must not have was there.
    fn check(&self) -> Result<(), String> {
        let Tally { sent, received, lost, dropped, checked } = self.tally;
        let tally = &self.calls.tally;
        let unreliable = self.params.retry > 0;
        let replies = if unreliable { tally.answered } else { tally.replies };
        let sums = [
            ("calls: begun, replies, answered", [tally.calls, replies, tally.answered]),
            ("packets: sent, received, and so", [sent, received + lost + dropped, sent]),
        ];
        for (what, counts) in sums {
            if counts.iter().any(|count| *count != counts[0]) {
                return Err(format!("{what}: {counts:?}"));
            }
        }
        if !unreliable && tally.requests != tally.calls * u64::from(self.params.sends) {
            return Err(format!("{} requests of {} calls", tally.requests, tally.calls));
        }
        if self.params.star && self.params.security_check && checked == 0 {
            return Err("no packet was checked".to_owned());
        }
        self.bed.check()
    }

    fn outcome(&mut self) -> RunResult {
        let on_chip = self.params.server_config().on_chip();
        let busy = self.units[0].reads.busy as f64 / self.events.now().max(1) as f64;
        let (events, time) = (self.events.taken(), self.events.now());
        let mut server = QpcCounters::default();
        let clients = self.units.iter();
        clients.for_each(|units| {
            (server.hits, server.misses) = (server.hits + units.hits, server.misses + units.misses)
        });
        RunResult {
            server,
            cpu: self.calls.cpu(time),
            messages: self.calls.tally.messages(),
            lost: self.tally.lost + self.tally.dropped,
            repeated: self.bed.repeated() + self.calls.tally.repeated,
            ..RunResult::of(&mut self.calls.measure, on_chip, busy, events, time)
        }
    }
}
