//! The packets under way to SL: which of them SL has, which are to be sent again (docs/star.md, "Loss
//! recovery").
//!
//! A PSN is a place in a ring, and in its lowest bits which transmission of its packet it is: SL sends it
//! back as it is, so that an answer shows what it answers. A packet is in flight, lost (`loss`), or done: its
//! answer has come. RD and GD have lanes of their own ([`lane`](crate::wire::lane)), and pass each other.

use starverbs_core::env::Host;
use starverbs_core::nic::PACKET_OVERHEAD;
use starverbs_core::{Nanos, Psn};

use super::messages::ONE_BEFORE;
use super::places::Places;
use crate::registry::RuleRef;
use crate::wire::PSN_STEP;

mod loss;

/// The lowest bits of a PSN number the transmissions of a packet: this many, then from 0 on again.
const COPIES: u32 = PSN_STEP;
/// Transmission numbers begin anew here.
const REBASE: u32 = 1 << 30;
/// Fewest packets that may be under way.
const LEAST: u32 = 4;
/// Fewest places, once there are any: what is known of a packet that was answered stays for a while.
const PLACES: u32 = 2;
/// And most, as u16 counts them.
const MOST: u32 = 1 << 15;
/// Packets among which those of one WQE are looked for that did not leave: others may have left between them.
const LOOKED_AT: usize = 256;

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
pub(super) enum PacketState {
    #[default]
    Done,
    Flight,
    /// SL's card keeps it until those before it are there
    Kept,
    Lost,
}

/// A packet under way; a line of the CPU's caches.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
pub(super) struct InFlight {
    pub(super) of: Of,
    pub(super) kind: Kind,
    /// The last of its WQE
    pub(super) last: bool,
    pub(super) state: PacketState,
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
    /// It asked for no answer when it left first, or is behind such that did
    pub(super) quiet: bool,
    /// It did not leave at first: what it would have asked for was on its way
    pub(super) eager: bool,
}

const _: () = assert!(size_of::<InFlight>() == 64);

/// Which packet a PSN is of: its number among all of the connection, and so its place.
fn number(psn: Psn) -> u32 {
    psn.get() / COPIES
}

/// Of a packet's PSNs the one of its first transmission.
fn base(psn: Psn) -> Psn {
    Psn::new(psn.get() & !(COPIES - 1))
}

/// Which transmission a PSN is of.
fn copy(psn: Psn) -> u32 {
    psn.get() & (COPIES - 1)
}

impl InFlight {
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
pub(super) struct AnsweredPacket {
    pub(super) entry: InFlight,
    /// When that transmission was made, if it was the last
    pub(super) sent: Option<Nanos>,
    /// What had left so much later, in its lane, was answered before it
    pub(super) overtaken: Nanos,
}

impl AnsweredPacket {
    /// No copy that may still be under way left later than this.
    pub(super) fn copied(&self) -> Nanos {
        if self.sent.is_some() { self.entry.before } else { self.entry.sent }
    }
}

/// What the answer to the oldest packet says, which left once: when, and as of [`AnsweredPacket`].
pub(super) struct FirstAnswer {
    pub(super) sent: Nanos,
    pub(super) overtaken: Nanos,
}

/// Packets that stay in order on their way, and so do their answers.
#[derive(Clone, Copy, Default)]
struct PacketLane {
    /// Transmissions so far
    order: u32,
    /// The last of those that have an answer
    newest: u32,
    /// When that was made
    newest_sent: Nanos,
}

impl PacketLane {
    /// The last transmission that has an answer, and when it was made.
    fn newest(&self) -> (u32, Nanos) {
        (self.newest, self.newest_sent)
    }
}

/// All packets under way of a connection.
pub(super) struct PacketWindow {
    ring: Places<InFlight>,
    una: Psn,
    next: Psn,
    flight: u16,
    lost: u16,
    /// Those that SL's card keeps
    kept: u16,
    /// Of those that are lost, tail-loss probes
    tail_probes: u16,
    /// Packets at most: a power of two, of which this is the logarithm
    most_log: u8,
    /// What the packets in flight cost
    bytes: u32,
    /// Lanes of which something was answered since it was last looked for lost packets
    answered: [bool; 2],
    lanes: [PacketLane; 2],
    /// All packets of a lane before this one are done
    first: [Psn; 2],
    /// Last timeout
    probed_at: Nanos,
}

impl PacketWindow {
    /// For so many packets at most, a power of two.
    pub(super) fn new(packets: u32) -> Self {
        PacketWindow {
            ring: Places::new(),
            una: Psn::default(),
            next: Psn::default(),
            flight: 0,
            lost: 0,
            kept: 0,
            tail_probes: 0,
            most_log: packets.clamp(LEAST, MOST).next_power_of_two().ilog2() as u8,
            bytes: 0,
            answered: [false; 2],
            lanes: Default::default(),
            first: Default::default(),
            probed_at: 0,
        }
    }

    /// Bytes of memory that it takes.
    pub(super) fn bytes(&self) -> usize {
        self.ring.bytes()
    }

    /// The place of the oldest packet will be used soon.
    #[inline]
    pub(super) fn expect(&self, env: &impl Host) {
        self.ring.expect(env, number(self.una));
    }

    /// The places of the next packets will be used soon.
    #[inline]
    pub(super) fn expect_next(&self, env: &impl Host) {
        let next = number(self.next);
        (0..2).for_each(|n| self.ring.expect(env, next.wrapping_add(n)));
    }

    /// Whether the newest packet did not leave.
    pub(super) fn ends_eager(&self) -> bool {
        !self.is_empty() && self.ring[number(self.next.plus(ONE_BEFORE))].eager
    }

    /// What the packets in flight cost.
    pub(super) fn in_flight(&self) -> u32 {
        self.bytes
    }

    /// Packets from the oldest unanswered one to the newest.
    fn span(&self) -> u32 {
        self.next.since(self.una) as u32 / COPIES
    }

    /// Whether one more packet may go; makes a place for it. With nothing under way there is no room only if
    /// there is no memory.
    pub(super) fn has_room(&mut self) -> bool {
        let (span, most) = (self.span(), 1 << self.most_log);
        span < most && self.ring.make_room(number(self.una), (span + 1).max(PLACES), most).is_ok()
    }

    /// Whether nothing is under way.
    pub(super) fn is_empty(&self) -> bool {
        self.una == self.next
    }

    /// Whether packets are to be sent again.
    pub(super) fn has_lost(&self) -> bool {
        self.lost > 0
    }

    /// Whether an answer is waited for, or a probe is to leave. A lost packet that waits for room asks for no
    /// answer.
    pub(super) fn asks(&self) -> bool {
        self.flight > 0 || self.tail_probes > 0
    }

    /// Adds a packet that leaves now; gives its PSN. There must be room.
    pub(super) fn push(&mut self, entry: InFlight, now: Nanos) -> Psn {
        debug_assert!(self.span() < self.ring.len(), "the caller looks for room first");
        let (psn, of) = (self.next, entry.lane());
        let order = self.next_order(of);
        self.ring[number(psn)] = InFlight {
            state: PacketState::Flight,
            tries: 1,
            waiting: u8::from(!entry.eager),
            lapped: false,
            order,
            before: 0,
            sent: now,
            ..entry
        };
        self.next = psn.plus(COPIES);
        self.flight += 1;
        self.bytes += entry.cost();
        psn
    }

    /// The number of the transmission of a lane that is made now.
    fn next_order(&mut self, of: usize) -> u32 {
        if self.lanes[of].order >= REBASE {
            self.rebase(of);
        }
        let lane = &mut self.lanes[of];
        lane.order += 1;
        lane.order
    }

    fn note_sent(&mut self, at: u32, now: Nanos) {
        let order = self.next_order(self.ring[at].lane());
        let entry = &mut self.ring[at];
        (entry.order, entry.before, entry.sent) = (order, entry.sent, now);
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
        let base = lane.order - 4 * self.ring.len();
        for entry in self.ring.iter_mut().filter(|entry| entry.lane() == of) {
            entry.order = entry.order.saturating_sub(base);
        }
        lane.newest = lane.newest.saturating_sub(base);
        lane.order -= base;
    }

    /// The unanswered packet one of whose transmissions has this PSN.
    pub(super) fn get(&self, psn: Psn) -> Option<&InFlight> {
        let known = !base(psn).before(self.una) && psn.before(self.next);
        let entry = known.then(|| &self.ring[number(psn)])?;
        (entry.state != PacketState::Done).then_some(entry)
    }

    /// The answer to a packet came; gives what it was. `None`: it answers nothing under way.
    pub(super) fn done(&mut self, psn: Psn) -> Option<AnsweredPacket> {
        self.get(psn)?;
        let at = number(psn);
        let (copy, entry) = (copy(psn), &mut self.ring[at]);
        let acked = entry.on_ack(copy);
        /* where numbers have come round it may be an earlier one's answer */
        let last = acked && entry.copy() == copy && !entry.lapped;
        let entry = *entry;
        self.settle(at);
        let newest = self.lanes[entry.lane()].newest_sent;
        let made = match entry.tries {
            _ if last => entry.sent,
            2 if acked => entry.before,
            _ => newest,
        };
        if last {
            self.note_answered(entry.lane(), (entry.order, entry.sent));
        }
        self.pass();
        let overtaken = newest.saturating_sub(made);
        Some(AnsweredPacket { entry, sent: last.then_some(entry.sent), overtaken })
    }

    /// The oldest packet, if this is its PSN, and it left once and is not answered: SL's card does not keep
    /// it, nor has.
    #[inline]
    pub(super) fn first_once(&self, psn: Psn) -> Option<&InFlight> {
        let entry = (psn == self.una && psn != self.next).then(|| &self.ring[number(psn)])?;
        let once = (entry.tries, entry.waiting) == (1, 1);
        (entry.state == PacketState::Flight && once).then_some(entry)
    }

    /// As [`done`](PacketWindow::done), of that packet.
    #[inline]
    pub(super) fn done_first(&mut self) -> FirstAnswer {
        let at = number(self.una);
        let entry = &mut self.ring[at];
        entry.waiting = 0;
        let InFlight { order, sent, .. } = *entry;
        let lane = entry.lane();
        let newest = self.lanes[lane].newest_sent;
        self.settle(at);
        self.note_answered(lane, (order, sent));
        self.pass();
        FirstAnswer { sent, overtaken: newest.saturating_sub(sent) }
    }

    /// Of a lane the transmission of this number, which was made then, has its answer.
    fn note_answered(&mut self, of: usize, transmission: (u32, Nanos)) {
        let lane = &mut self.lanes[of];
        (lane.newest, lane.newest_sent) = lane.newest().max(transmission);
        self.answered[of] = true;
    }

    /// The first packet without an answer of those that bring data, if it left before this one.
    #[inline]
    pub(super) fn first_put_before(&mut self, psn: Psn) -> Option<Psn> {
        let at = self.oldest_of(0)?;
        let first = Psn::new(at.wrapping_mul(COPIES));
        first.before(base(psn)).then_some(first)
    }

    /// A packet is done, as what has its turn behind it is. Gives it.
    pub(super) fn done_by_turn(&mut self, psn: Psn) -> Option<InFlight> {
        let entry = *self.get(psn)?;
        self.settle(number(psn));
        self.pass();
        Some(entry)
    }

    /// When the last of the transmissions was made that brought data and have an answer.
    pub(super) fn newest_put(&self) -> Nanos {
        let [puts, _] = &self.lanes;
        puts.newest_sent
    }

    /// The answer to another transmission of a packet that is done came; gives the packet. `None`: it answers
    /// nothing that is known.
    pub(super) fn done_again(&mut self, psn: Psn) -> Option<InFlight> {
        let known = self.remembers(psn);
        let entry = known.then(|| &mut self.ring[number(psn)])?;
        (entry.state == PacketState::Done && entry.on_ack(copy(psn))).then_some(*entry)
    }

    /// Of the packets of WQE `wqe` of SL that did not leave, the first of which has this PSN, the one for
    /// these bytes. `None`: it is answered.
    pub(super) fn awaits(&self, first: Psn, wqe: u32, offset: u32) -> Option<(Psn, InFlight)> {
        let is_here = !first.before(self.una) && first.before(self.next);
        let first = if is_here { first } else { self.una };
        let packets = self.each_from(first).map(|psn| (psn, self.ring[number(psn)]));
        let mut packets = packets.take(LOOKED_AT).filter(|(_, entry)| entry.eager && entry.wqe == wqe);
        packets.find(|(_, entry)| entry.offset == offset && entry.state != PacketState::Done)
    }

    /// Whether a packet with this PSN brought data to that place, as far as is known.
    pub(super) fn has_put(&self, psn: Psn, addr: u64) -> bool {
        self.remembers(psn) && {
            let entry = &self.ring[number(psn)];
            entry.kind == Kind::Put && entry.addr == addr
        }
    }

    /// Whether the packet of this PSN has its place still.
    pub(super) fn remembers(&self, psn: Psn) -> bool {
        let behind = self.next.since(base(psn));
        behind > 0 && behind as u32 / COPIES <= self.ring.len()
    }

    fn settle(&mut self, at: u32) {
        let entry = &mut self.ring[at];
        match entry.state {
            PacketState::Flight => {
                self.flight -= 1;
                self.bytes -= entry.cost();
            }
            PacketState::Lost => self.lost -= 1,
            PacketState::Kept => self.kept -= 1,
            PacketState::Done => {}
        }
        entry.state = PacketState::Done;
        self.tail_probes = self.tail_probes.min(self.lost);
    }

    fn pass(&mut self) {
        while self.una != self.next && self.ring[number(self.una)].state == PacketState::Done {
            self.una = self.una.plus(COPIES);
        }
        /* one that has nothing under way is not left behind for so long that its place seems to lie ahead */
        for first in &mut self.first {
            if first.before(self.una) {
                *first = self.una;
            }
        }
    }

    fn each(&self) -> impl Iterator<Item = Psn> + use<> {
        self.each_from(self.una)
    }

    fn each_from(&self, first: Psn) -> impl Iterator<Item = Psn> + use<> {
        let packets = self.next.since(first) as u32 / COPIES;
        (0..packets).map(move |n| first.plus(n * COPIES))
    }

    /// Answers to these packets are waited for no more. Gives how many had none.
    pub(super) fn forget(&mut self, which: impl Fn(&InFlight) -> bool) -> u32 {
        let mut count = 0;
        for psn in self.each() {
            let at = number(psn);
            if which(&self.ring[at]) {
                count += u32::from(self.ring[at].state != PacketState::Done);
                self.settle(at);
            }
        }
        self.pass();
        count
    }
}

#[cfg(test)]
#[path = "window_tests.rs"]
mod tests;
