//! The packets under way to SL: which of them SL has, which are to be sent again (docs/star.md, "Loss
//! recovery").
//!
//! A PSN is a place in a ring, and in its lowest bits which transmission of its packet it is: SL sends it
//! back as it is, so that an answer says what it answers. A packet is in flight, lost, or done; of RD and GD
//! alike it is done when its answer has come. When the answer to a transmission comes, those of its kind made
//! [`LATE`] before it, or well before it in time, and still unanswered are taken for lost, as RFC 8985 does;
//! RD and GD have lanes of their own ([`lane`](crate::wire::lane)), and pass each other. Silence alone shows
//! no loss: after a timeout two packets leave as tail-loss probes, and the answers to them show what is lost.

use alloc::boxed::Box;

use starverbs_core::nic::PACKET_OVERHEAD;
use starverbs_core::room::filled;
use starverbs_core::{Nanos, NicError, Psn};

use crate::registry::RuleRef;

/// The lowest bits of a PSN, which number the transmissions of a packet: this many, then from 0 on again.
const COPIES: u32 = 4;
/// Tail-loss probes after a timeout.
const TAIL_PROBES: u32 = 2;
/// Transmissions by which a packet may be overtaken without being taken for lost.
const LATE: u32 = 3;
/// Transmission numbers begin anew here.
const REBASE: u32 = 1 << 30;
/// Fewest packets that may be under way.
const LEAST: u32 = 4;
/// Places that are used at first. A connection that never has more under way touches no more memory.
const FEW: u32 = 16;

/// Whose WQE a packet is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Of {
    /// SF's own send queue
    #[default]
    Local,
    /// SL's send queue, as SF keeps it
    Remote,
}

/// What a packet does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Kind {
    /// RD: brings data
    #[default]
    Put,
    /// GD: gets data
    Get,
    /// GD that does an atomic
    Atomic,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum State {
    #[default]
    Done,
    Flight,
    Lost,
}

/// A packet under way.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Entry {
    pub(super) of: Of,
    pub(super) kind: Kind,
    /// The last of its WQE
    pub(super) last: bool,
    pub(super) state: State,
    pub(super) tries: u8,
    /// Bytes that it brings or asks for
    pub(super) len: u16,
    /// Its WQE
    pub(super) wqe: u32,
    /// Bytes of the WQE before it
    pub(super) offset: u32,
    /// In SL's memory
    pub(super) addr: u64,
    /// By which it may go there
    pub(super) rule: RuleRef,
    pub(super) order: u32,
    pub(super) sent: Nanos,
    /// When it was sent the time before
    pub(super) before: Nanos,
    /// One bit each: transmissions without an answer
    pub(super) waiting: u8,
    /// One of them was forgotten, as its number came round
    pub(super) lapped: bool,
}

/// Of a packet's PSNs the one of its first transmission.
fn base(psn: Psn) -> Psn {
    Psn::new(psn.get() & !(COPIES - 1))
}

/// Which transmission a PSN is of.
fn copy(psn: Psn) -> u32 {
    psn.get() & (COPIES - 1)
}

impl Entry {
    /// Whether it brings nothing, and shows only that what left before it is not under way.
    pub(super) fn is_probe(&self) -> bool {
        self.kind == Kind::Put && self.len == 0
    }

    /// Among which packets it keeps its place: 0 with what brings data, 1 with what gets some.
    fn lane(&self) -> usize {
        usize::from(self.kind != Kind::Put)
    }

    /// Transmissions without an answer, which may still be under way.
    pub(super) fn copies(&self) -> u32 {
        self.waiting.count_ones() + u32::from(self.lapped)
    }

    /// The number of the last transmission.
    fn copy(&self) -> u32 {
        u32::from(self.tries.wrapping_sub(1)) & (COPIES - 1)
    }

    /// What it takes of the way to SL: its bytes, there or back, and what goes with each packet.
    pub(super) fn cost(&self) -> u32 {
        u32::from(self.len) + PACKET_OVERHEAD
    }

    /// Whether it is in flight, although what left well behind it in its lane, of this order and at that
    /// time, has its answer.
    fn is_overtaken(&self, (order, sent): (u32, Nanos), disorder: Nanos) -> bool {
        let late = self.order + LATE <= order || self.sent + disorder < sent;
        self.state == State::Flight && late
    }

    /// The transmission of this number has its answer. False: it had one.
    fn on_ack(&mut self, copy: u32) -> bool {
        let bit = 1 << copy;
        let acked = self.waiting & bit != 0;
        self.waiting &= !bit;
        acked
    }
}

/// What an answer was to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answered {
    pub(super) entry: Entry,
    /// When that transmission was made, if it was the last
    pub(super) sent: Option<Nanos>,
    /// What had left so much later, in its lane, was answered before it
    pub(super) overtaken: Nanos,
}

impl Answered {
    /// No copy that may still be under way left later than this.
    pub(super) fn copied(&self) -> Nanos {
        if self.sent.is_some() { self.entry.before } else { self.entry.sent }
    }
}

/// Packets that stay in order on their way, and so do their answers.
#[derive(Clone, Copy, Default)]
struct Lane {
    /// Transmissions so far
    order: u32,
    /// The last of those that have an answer, and when it was made
    newest: (u32, Nanos),
    /// All of its packets before this one are done
    first: Psn,
}

/// All packets under way of a connection.
pub(super) struct Window {
    ring: Box<[Entry]>,
    /// Places that are used, the first ones: a power of two. All others are as at first
    used: u32,
    una: Psn,
    next: Psn,
    lanes: [Lane; 2],
    flight: u32,
    /// What the packets in flight cost
    bytes: u32,
    lost: u32,
    /// Of those, tail-loss probes
    tail_probes: u32,
    /// Last timeout
    probed_at: Nanos,
}

impl Window {
    /// Room for so many packets, a power of two. `Exhausted`: no memory.
    pub(super) fn new(packets: u32) -> Result<Self, NicError> {
        let packets = packets.clamp(LEAST, 1 << 16).next_power_of_two();
        Ok(Window {
            ring: filled(packets as usize)?,
            used: packets.min(FEW),
            una: Psn::default(),
            next: Psn::default(),
            lanes: Default::default(),
            flight: 0,
            bytes: 0,
            lost: 0,
            tail_probes: 0,
            probed_at: 0,
        })
    }

    fn place(&self, psn: Psn) -> usize {
        ((psn.get() / COPIES) & (self.used - 1)) as usize
    }

    /// Bytes of memory that it takes.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.ring)
    }

    /// What the packets in flight cost.
    pub(super) fn in_flight(&self) -> u32 {
        self.bytes
    }

    /// Packets from the oldest unanswered one to the newest.
    fn span(&self) -> u32 {
        self.next.since(self.una) as u32 / COPIES
    }

    /// Whether one more packet may go.
    pub(super) fn has_room(&self) -> bool {
        self.span() < self.ring.len() as u32
    }

    /// Whether nothing is under way.
    pub(super) fn is_empty(&self) -> bool {
        self.una == self.next
    }

    /// Whether an answer is waited for, or a probe is to leave. A lost packet that waits for room asks for no
    /// answer.
    pub(super) fn asks(&self) -> bool {
        self.flight > 0 || self.tail_probes > 0
    }

    /// Adds a packet that leaves now; gives its PSN. There must be room.
    pub(super) fn push(&mut self, entry: Entry, now: Nanos) -> Psn {
        debug_assert!(self.has_room(), "the caller looks for room first");
        if self.span() == self.used {
            self.widen();
        }
        let psn = self.next;
        let at = self.place(psn);
        self.ring[at] = Entry { state: State::Flight, tries: 0, waiting: 0, lapped: false, ..entry };
        self.next = psn.plus(COPIES);
        self.note_sent(at, now);
        psn
    }

    /// All places are taken: twice as many are used from now on. There must be more.
    #[cold]
    fn widen(&mut self) {
        let before = self.used as usize;
        self.used *= 2;
        for psn in self.each() {
            let at = self.place(psn);
            if at >= before {
                self.ring[at] = core::mem::take(&mut self.ring[at - before]);
            }
        }
    }

    fn note_sent(&mut self, at: usize, now: Nanos) {
        let lane = self.ring[at].lane();
        if self.lanes[lane].order >= REBASE {
            self.rebase(lane);
        }
        let (entry, lane) = (&mut self.ring[at], &mut self.lanes[lane]);
        lane.order += 1;
        (entry.order, entry.before, entry.sent) = (lane.order, entry.sent, now);
        /* beyond the most that can be counted the number of the transmission still goes round */
        let next = entry.tries.checked_add(1);
        entry.tries = next.unwrap_or(u8::MAX - (COPIES as u8 - 1));
        let bit = 1 << entry.copy();
        entry.lapped |= entry.waiting & bit != 0;
        entry.waiting |= bit;
        self.flight += 1;
        self.bytes += entry.cost();
    }

    #[cold]
    fn rebase(&mut self, of: usize) {
        let lane = &mut self.lanes[of];
        let base = lane.order - 4 * self.ring.len() as u32;
        for entry in self.ring.iter_mut().filter(|entry| entry.lane() == of) {
            entry.order = entry.order.saturating_sub(base);
        }
        lane.newest.0 = lane.newest.0.saturating_sub(base);
        lane.order -= base;
    }

    /// The unanswered packet one of whose transmissions has this PSN.
    pub(super) fn get(&self, psn: Psn) -> Option<&Entry> {
        let known = !base(psn).before(self.una) && psn.before(self.next);
        let entry = &self.ring[self.place(psn)];
        (known && entry.state != State::Done).then_some(entry)
    }

    /// The answer to a packet came; gives what it was. `None`: it answers nothing under way.
    pub(super) fn done(&mut self, psn: Psn) -> Option<Answered> {
        self.get(psn)?;
        let at = self.place(psn);
        let (copy, entry) = (copy(psn), &mut self.ring[at]);
        let acked = entry.on_ack(copy);
        let last = acked && entry.copy() == copy;
        let entry = *entry;
        self.settle(at);
        let lane = &mut self.lanes[entry.lane()];
        let (_, newest) = lane.newest;
        let made = match entry.tries {
            _ if last => entry.sent,
            2 if acked => entry.before,
            _ => newest,
        };
        if last {
            lane.newest = lane.newest.max((entry.order, entry.sent));
        }
        self.pass();
        let overtaken = newest.saturating_sub(made);
        Some(Answered { entry, sent: last.then_some(entry.sent), overtaken })
    }

    /// When the last of the transmissions was made that brought data and have an answer.
    pub(super) fn newest_put(&self) -> Nanos {
        let [Lane { newest: (_, sent), .. }, _] = self.lanes;
        sent
    }

    /// The answer to another transmission of a packet that is done came; gives the packet. `None`: it answers
    /// nothing that is known.
    pub(super) fn done_again(&mut self, psn: Psn) -> Option<Entry> {
        let behind = self.next.since(base(psn));
        let at = self.place(psn);
        let known = behind > 0 && behind as u32 / COPIES <= self.used;
        let entry = &mut self.ring[at];
        (known && entry.state == State::Done && entry.on_ack(copy(psn))).then_some(*entry)
    }

    fn settle(&mut self, at: usize) {
        let entry = &mut self.ring[at];
        match entry.state {
            State::Flight => {
                self.flight -= 1;
                self.bytes -= entry.cost();
            }
            State::Lost => self.lost -= 1,
            State::Done => {}
        }
        entry.state = State::Done;
        self.tail_probes = self.tail_probes.min(self.lost);
    }

    fn pass(&mut self) {
        while self.una != self.next && self.ring[self.place(self.una)].state == State::Done {
            self.una = self.una.plus(COPIES);
        }
        /* one that has nothing under way is not left behind for so long that its place seems to lie ahead */
        for lane in &mut self.lanes {
            if lane.first.before(self.una) {
                lane.first = self.una;
            }
        }
    }

    /// A packet's answer came too early to be of use: it is to be asked for again.
    pub(super) fn refuse(&mut self, psn: Psn) {
        let at = self.place(psn);
        self.ring[at].on_ack(copy(psn));
        self.lose(at);
    }

    /// SL's card could not do yet what this transmission asks for, as something before it is not done. Of
    /// what left before it, that shows as much as an answer. The packet is to be sent again, unless it was.
    pub(super) fn refuse_early(&mut self, psn: Psn) {
        let at = self.place(psn);
        let entry = &mut self.ring[at];
        if entry.on_ack(copy(psn)) && entry.copy() == copy(psn) {
            let lane = &mut self.lanes[entry.lane()];
            lane.newest = lane.newest.max((entry.order, entry.sent));
            self.lose(at);
        }
    }

    fn lose(&mut self, at: usize) -> bool {
        let entry = &mut self.ring[at];
        let was = entry.state == State::Flight;
        if was {
            entry.state = State::Lost;
            self.flight -= 1;
            self.bytes -= entry.cost();
            self.lost += 1;
        }
        was
    }

    fn each(&self) -> impl Iterator<Item = Psn> + use<> {
        self.each_from(self.una)
    }

    fn each_from(&self, first: Psn) -> impl Iterator<Item = Psn> + use<> {
        let packets = self.next.since(first) as u32 / COPIES;
        (0..packets).map(move |n| first.plus(n * COPIES))
    }

    /// The first packet of a lane that is not done; looks at each once. `None`: there is none.
    fn oldest_of(&mut self, lane: usize) -> Option<usize> {
        let of = |entry: &Entry| entry.state != State::Done && entry.lane() == lane;
        let found = self.each_from(self.lanes[lane].first).find(|psn| of(&self.ring[self.place(*psn)]));
        self.lanes[lane].first = found.unwrap_or(self.next);
        found.map(|psn| self.place(psn))
    }

    /// Declares lost what was overtaken, by others or by so much time, in the lane of what was answered.
    /// Gives what the lost packets cost.
    pub(super) fn infer(&mut self, answered: &Entry, disorder: Nanos) -> u32 {
        let lane = answered.lane();
        let newest = self.lanes[lane].newest;
        let Some(at) = self.oldest_of(lane) else { return 0 };
        let oldest = &self.ring[at];
        /* one that left once left before all behind it */
        let first = oldest.state == State::Flight && oldest.tries == 1;
        if first && !oldest.is_overtaken(newest, disorder) {
            return 0;
        }
        let before = self.bytes;
        for psn in self.each_from(self.lanes[lane].first) {
            let at = self.place(psn);
            let entry = &self.ring[at];
            if entry.lane() == lane && entry.is_overtaken(newest, disorder) {
                self.lose(at);
            }
        }
        before - self.bytes
    }

    /// A timeout: nothing was answered that was sent at or before `then`. Makes the oldest of those tail-loss
    /// probes; gives how many.
    pub(super) fn expire(&mut self, then: Nanos, now: Nanos) -> u32 {
        if self.oldest().is_none_or(|oldest| oldest > then) {
            return 0;
        }
        /* those of before may wait for what is lost now */
        (self.probed_at, self.tail_probes) = (now, 0);
        for psn in self.each() {
            let at = self.place(psn);
            if self.tail_probes < TAIL_PROBES && self.ring[at].sent <= then && self.lose(at) {
                self.tail_probes += 1;
            }
        }
        self.tail_probes
    }

    /// Since when nothing was answered of what is in flight, and nothing was done about it.
    pub(super) fn oldest(&self) -> Option<Nanos> {
        let sent = self.each().filter_map(|psn| {
            let entry = &self.ring[self.place(psn)];
            (entry.state == State::Flight).then_some(entry.sent)
        });
        sent.min().map(|sent| sent.max(self.probed_at))
    }

    /// How often the packet that was sent most often was sent.
    pub(super) fn most_tries(&self) -> u8 {
        let tries = self.each().map(|psn| &self.ring[self.place(psn)]).filter(|e| e.state != State::Done);
        tries.map(|entry| entry.tries).max().unwrap_or(0)
    }

    /// The first packet to be sent again of those that `may` go now.
    pub(super) fn next_lost(&self, may: impl Fn(&Entry) -> bool) -> Option<(Psn, Entry)> {
        if self.lost == 0 {
            return None;
        }
        self.each().find_map(|psn| {
            let entry = &self.ring[self.place(psn)];
            (entry.state == State::Lost && may(entry)).then_some((psn, *entry))
        })
    }

    /// Whether the next lost packet leaves as a tail-loss probe, whatever else is in flight.
    pub(super) fn is_probing(&self) -> bool {
        self.tail_probes > 0
    }

    /// A lost packet leaves again, under the PSN that this gives.
    pub(super) fn sent_again(&mut self, psn: Psn, now: Nanos) -> Psn {
        let at = self.place(psn);
        if self.ring[at].state == State::Lost {
            self.ring[at].state = State::Flight;
            self.lost -= 1;
            self.tail_probes = self.tail_probes.saturating_sub(1);
            self.note_sent(at, now);
        }
        base(psn).plus(self.ring[at].copy())
    }

    /// Answers to these packets are waited for no more.
    pub(super) fn forget(&mut self, which: impl Fn(&Entry) -> bool) {
        for psn in self.each() {
            let at = self.place(psn);
            if which(&self.ring[at]) {
                self.settle(at);
            }
        }
        self.pass();
    }
}

#[cfg(test)]
#[path = "window_tests.rs"]
mod tests;
