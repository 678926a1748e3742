//! A stream: the WQEs of one queue, executed and completed in order, and what may go on at once.
//!
//! SL keeps nothing, so a packet that is lost and repeated lands behind those that left after it; no sequence
//! numbers hold them back there. So order is made here, by what leaves when. A program sees the data of SENDs
//! and READs with their completion, and these are made in order; so they may all be under way together.
//! WRITEs are seen when they land: they are under way with WRITEs alone, and SL's card does their packets in
//! the order of their numbers, as it does those of a SEND that begins alone; a very long WRITE begins when
//! all before it are done. One into memory registered with IBV_ACCESS_RELAXED_ORDERING need not wait for what
//! it does not overlap. Atomics are under way with atomics alone: SL's card does those of SF in the order of
//! their slots, and those of SL are done here.

use starverbs_core::env::Host;
use starverbs_core::{Nanos, SendOp, WcStatus};

use super::places::Places;
use crate::registry::RuleRef;

/// Bytes of an atomic's result.
pub(super) const RESULT: u32 = 8;

/// WQEs of a stream that may be under way, at most.
pub(super) const OPS: u32 = 256;

/// Of what kind a WQE is where order is concerned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum OrderClass {
    #[default]
    Send,
    Write,
    Read,
    Atomic,
    /// Of SL alone
    Rpc,
    /// RPC WRITE, of SL alone
    Stream,
    /// Needs no packet
    Own,
}

impl OrderClass {
    pub(super) fn of(op: SendOp) -> Self {
        match op {
            SendOp::Send | SendOp::SendImm | SendOp::SendInv => OrderClass::Send,
            SendOp::Write | SendOp::WriteImm | SendOp::AtomicWrite => OrderClass::Write,
            SendOp::Read => OrderClass::Read,
            SendOp::CmpSwap | SendOp::FetchAdd => OrderClass::Atomic,
            SendOp::Rpc => OrderClass::Rpc,
            SendOp::RpcWrite => OrderClass::Stream,
            SendOp::LocalInv | SendOp::BindMw | SendOp::Flush | SendOp::Malformed => OrderClass::Own,
        }
    }
}

/// How the result of an atomic of SL goes to SL's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Carry {
    /// In pieces: no other is under way
    #[default]
    Alone,
    /// In a packet of its own
    Own,
    /// One before it goes to the same place, and is not done: it waits
    Owed,
    /// One behind it goes to the same place, and that packet is under way: what is there in the end is the
    /// last's
    Later,
}

/// A WQE under way.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WqeProgress {
    pub(super) class: OrderClass,
    /// A WRITE that may land before what is before it
    pub(super) relaxed: bool,
    /// A WRITE or SEND of SF whose packets SL's card does in their turn, once
    pub(super) in_turn: bool,
    /// A SEND whose last packet's answer stands for all: the others ask for none when they leave first
    pub(super) quiet: bool,
    /// A SEND of SL whose data comes without being asked for
    pub(super) eager: bool,
    /// All its packets have left once
    pub(super) all: bool,
    /// Transmissions without an answer of packets that write to SL's memory and have one
    pub(super) copies: u32,
    /// None of these left later
    pub(super) copied: Nanos,
    /// Its last packet carries SL's completion
    pub(super) carries: bool,
    /// That packet waits until all others are where they belong: bytes of the message before it. 0: it does
    /// not wait
    pub(super) held: u32,
    /// It takes a receive WQE: SL's of this sequence; SL's WQE has one of ours under its own index
    pub(super) recv: Option<u32>,
    /// Not so: how it ends
    pub(super) status: WcStatus,
    /// Bytes of its message
    pub(super) length: u32,
    /// Its packets without an answer
    pub(super) left: u32,
    /// Where SL's memory is that one rule opens: WRITE, READ and atomics of SF, its SENDs to one place; the
    /// result of an atomic of SL
    pub(super) base: u64,
    pub(super) rule: RuleRef,
    /// Atomics: the value before
    pub(super) value: u64,
    /// Atomics of SL
    pub(super) carry: Carry,
    /// Atomics of SF: their number. What has turns: that of its first packet. RPC WRITEs: bytes that their
    /// kernel has done with. What comes without being asked for: the PSN of its first packet
    pub(super) number: u32,
    /// Not complete before. Of one that has not begun: it waits for a receive WQE since then
    pub(super) until: Nanos,
    /// What leaves now, and is answered, shows that none of its copies is under way; 0: nothing is to be
    /// shown
    pub(super) probe: Nanos,
    /// One is under way; nobody waits for its answer longer than for the copies
    pub(super) probed: bool,
}

impl WqeProgress {
    /// Whether it touches some of these bytes of SL's memory.
    fn overlaps(&self, addr: u64, len: u32) -> bool {
        let (mine, theirs) = (self.base.wrapping_sub(addr), addr.wrapping_sub(self.base));
        mine < u64::from(len) || theirs < u64::from(self.length)
    }
}

/// How many of each class are under way: [`OPS`] at most.
#[derive(Clone, Copy, Debug, Default)]
struct ClassCounts {
    /// Of all kinds, those whose completion travels by itself, or that have none
    plain: u16,
    writes: u16,
    /// Of those in their turn
    in_turn: u16,
    reads: u16,
    atomics: u16,
}

/// The WQEs of one queue.
pub(super) struct WqeStream {
    ops: Places<WqeProgress>,
    /// Oldest WQE that is not complete
    pub(super) una: u32,
    /// WQE whose packets are leaving, or the first that has not begun
    pub(super) next: u32,
    /// Bytes of `next` that have left
    pub(super) offset: u32,
    /// Whether `next` has begun
    pub(super) begun: bool,
    /// No WQE begins any more
    pub(super) stopped: bool,
    /// `next`, which has not begun, waits for a receive WQE
    lacks_recv: bool,
    /// Under way at most: a power of two, of which this is the logarithm
    depth_log: u8,
    counts: ClassCounts,
    /// WQEs whose last packet waits, and one that is not behind the oldest of them
    held: u16,
    first_held: u32,
}

impl WqeStream {
    /// One of a queue of `depth` WQEs, a power of two, that begins with WQE `first`.
    pub(super) fn new(first: u32, depth: u32) -> Self {
        WqeStream {
            ops: Places::new(),
            una: first,
            next: first,
            offset: 0,
            begun: false,
            stopped: false,
            lacks_recv: false,
            depth_log: depth.min(OPS).ilog2() as u8,
            counts: ClassCounts::default(),
            held: 0,
            first_held: first,
        }
    }

    /// Bytes of memory that it takes.
    pub(super) fn bytes(&self) -> usize {
        self.ops.bytes()
    }

    /// WQEs that may be under way.
    pub(super) fn depth(&self) -> u32 {
        1 << self.depth_log
    }

    /// WQE `index`, which is under way.
    pub(super) fn op(&mut self, index: u32) -> &mut WqeProgress {
        &mut self.ops[index]
    }

    /// As `op`, to read.
    pub(super) fn get(&self, index: u32) -> &WqeProgress {
        &self.ops[index]
    }

    /// The oldest WQE under way. `None`: there is none.
    pub(super) fn oldest(&self) -> Option<&WqeProgress> {
        (self.under_way() > 0).then(|| self.get(self.una))
    }

    /// Whether this WQE is under way.
    pub(super) fn holds(&self, index: u32) -> bool {
        index.wrapping_sub(self.una) < self.under_way()
    }

    /// WQEs under way, the one that is leaving among them.
    pub(super) fn under_way(&self) -> u32 {
        self.next.wrapping_sub(self.una) + u32::from(self.begun)
    }

    /// The place of WQE `index` will be used soon.
    #[inline]
    pub(super) fn expect(&self, env: &impl Host, index: u32) {
        self.ops.expect(env, index);
    }

    /// Whether something may leave of those that have begun, beside the packets of `next`.
    #[inline]
    pub(super) fn has_waiting(&self) -> bool {
        let waits = || self.held > 0 || self.counts.atomics > 0 || self.get(self.una).probe != 0;
        !self.is_idle() && waits()
    }

    /// Whether none is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.under_way() == 0
    }

    /// Whether another may begin; makes a place for it. With none under way there is no room only if there is
    /// no memory.
    pub(super) fn has_room(&mut self) -> bool {
        let count = self.under_way();
        !self.stopped && count < self.depth() && self.ops.make_room(self.una, count + 1, self.depth()).is_ok()
    }

    fn count(&mut self, class: OrderClass) -> Option<&mut u16> {
        match class {
            OrderClass::Write => Some(&mut self.counts.writes),
            OrderClass::Read => Some(&mut self.counts.reads),
            OrderClass::Atomic => Some(&mut self.counts.atomics),
            OrderClass::Send | OrderClass::Rpc | OrderClass::Stream | OrderClass::Own => None,
        }
    }

    /// WQE `next` begins.
    pub(super) fn begin(&mut self, op: WqeProgress) {
        let next = self.next;
        *self.op(next) = op;
        if let Some(count) = self.count(op.class) {
            *count += 1;
        }
        self.counts.plain += u16::from(!op.carries);
        self.counts.in_turn += u16::from(op.in_turn);
        (self.begun, self.lacks_recv, self.offset) = (true, false, 0);
    }

    /// WQE `next`, which has a place, waits for a receive WQE. Gives since when; the first time `None`.
    pub(super) fn lack_recv(&mut self, now: Nanos) -> Option<Nanos> {
        let since = self.lacks_recv_since();
        if since.is_none() {
            let next = self.next;
            (self.lacks_recv, self.op(next).until) = (true, now);
        }
        since
    }

    /// Since when WQE `next` waits for a receive WQE. `None`: it does not.
    pub(super) fn lacks_recv_since(&self) -> Option<Nanos> {
        self.lacks_recv.then(|| self.get(self.next).until)
    }

    /// Whether WQE `next` waits for a receive WQE.
    #[inline]
    pub(super) fn lacks_recv(&self) -> bool {
        self.lacks_recv
    }

    /// WQE `next` waits for no receive WQE.
    pub(super) fn got_recv(&mut self) {
        self.lacks_recv = false;
    }

    /// WQE `next` begins, and leaves as one packet.
    pub(super) fn begin_whole(&mut self, op: WqeProgress) {
        self.begin(WqeProgress { left: 1, all: true, ..op });
        (self.begun, self.next) = (false, self.next.wrapping_add(1));
    }

    /// So many bytes of `next` have left in one packet more; the last of them if `all`.
    pub(super) fn advance(&mut self, len: u32, packets: u32, all: bool) {
        let next = self.next;
        self.offset += len;
        let op = self.op(next);
        op.left += packets;
        op.all = all;
        if all {
            (self.begun, self.offset) = (false, 0);
            self.next = next.wrapping_add(1);
        }
    }

    /// Bytes from `offset` on of WQE `index`, the newest under way, are to leave anew: so many packets of
    /// them are forgotten.
    pub(super) fn rewind(&mut self, index: u32, offset: u32, packets: u32) {
        debug_assert_eq!(self.next, index.wrapping_add(u32::from(!self.begun)), "it is the newest");
        let op = self.op(index);
        op.left -= packets;
        op.all = false;
        (self.next, self.begun, self.offset) = (index, true, offset);
    }

    /// Nothing more leaves of a WQE that has begun.
    pub(super) fn end_begun(&mut self) {
        if self.begun {
            self.advance(0, 0, true);
        }
    }

    /// The last packet of WQE `next`, from byte `offset` on, is left to [`held`](WqeStream::held).
    pub(super) fn hold(&mut self, offset: u32) {
        let next = self.next;
        self.op(next).held = offset;
        if self.held == 0 {
            self.first_held = next;
        }
        self.held += 1;
        self.advance(0, 1, true);
    }

    /// The oldest WQE whose last packet waits: SL's program sees none before it.
    pub(super) fn held(&mut self) -> Option<u32> {
        if self.held == 0 {
            return None;
        }
        if self.first_held.wrapping_sub(self.una) as i32 <= 0 {
            self.first_held = self.una;
        }
        while self.first_held != self.next && self.get(self.first_held).held == 0 {
            self.first_held = self.first_held.wrapping_add(1);
        }
        Some(self.first_held)
    }

    /// The last packet of this WQE waits no longer.
    pub(super) fn let_go(&mut self, index: u32) {
        let op = self.op(index);
        let was = core::mem::take(&mut op.held) > 0;
        self.held -= u16::from(was);
    }

    /// The oldest is complete.
    pub(super) fn retire(&mut self) {
        let una = self.una;
        self.let_go(una);
        let WqeProgress { class, carries, in_turn, .. } = *self.get(una);
        if let Some(count) = self.count(class) {
            *count -= 1;
        }
        self.counts.plain -= u16::from(!carries);
        self.counts.in_turn -= u16::from(in_turn);
        self.una = una.wrapping_add(1);
    }

    /// Whether SL sees by itself when each WQE under way is done: then another's completion may leave, too,
    /// as SL looks at its slots in order.
    pub(super) fn all_carry(&self) -> bool {
        self.counts.plain == 0
    }

    /// READs and atomics under way.
    pub(super) fn answered(&self) -> u32 {
        u32::from(self.counts.reads + self.counts.atomics)
    }

    /// Whether a WRITE or atomic is under way.
    pub(super) fn changes(&self) -> bool {
        self.counts.writes + self.counts.atomics > 0
    }

    /// Atomics under way.
    pub(super) fn atomics(&self) -> u32 {
        self.counts.atomics.into()
    }

    /// Whether an atomic may begin: all under way are atomics, too.
    pub(super) fn takes_atomic(&self) -> bool {
        self.under_way() == u32::from(self.counts.atomics)
    }

    /// Whether WQEs are under way whose packets go in their turn.
    #[inline]
    pub(super) fn has_turns(&self) -> bool {
        self.counts.in_turn > 0
    }

    /// Whether a WRITE that goes in its turn may begin: all under way do so, too.
    pub(super) fn takes_turn(&self) -> bool {
        self.under_way() == u32::from(self.counts.in_turn)
    }

    /// How the result of an atomic of SL is to go to this place, or to several. `None`: not now.
    pub(super) fn carry_to(&self, place: Option<u64>) -> Option<Carry> {
        let Some(place) = place else { return (self.under_way() == 0).then_some(Carry::Alone) };
        if self.any(|op| op.carry == Carry::Alone || op.base != place && op.overlaps(place, RESULT)) {
            return None;
        }
        let taken = self.any(|op| op.base == place);
        Some(if taken { Carry::Owed } else { Carry::Own })
    }

    /// If the first atomic whose result waits has its place to itself: the newest with the same place. Of one
    /// that is under way there a copy might come late, until it is over.
    pub(super) fn owed(&self) -> Option<u32> {
        if self.counts.atomics == 0 {
            return None;
        }
        let op = |n: u32| self.get(self.una.wrapping_add(n));
        let first = (0..self.under_way()).find(|n| op(*n).carry == Carry::Owed)?;
        let place = op(first).base;
        if (0..first).any(|n| op(n).base == place) {
            return None;
        }
        let waits = |n: &u32| op(*n).carry == Carry::Owed && op(*n).base == place;
        (first..self.under_way()).rev().find(waits).map(|n| self.una.wrapping_add(n))
    }

    /// A packet with the result of WQE `index` leaves: those before it with the same place need none.
    pub(super) fn carry(&mut self, index: u32) {
        let place = self.get(index).base;
        for at in self.before(index) {
            let op = self.op(at);
            if op.carry == Carry::Owed && op.base == place {
                op.carry = Carry::Later;
            }
        }
        self.op(index).carry = Carry::Own;
    }

    /// That packet has come, or failed, and those before it with it.
    pub(super) fn carried(&mut self, index: u32, status: WcStatus) {
        let WqeProgress { base: place, class, .. } = *self.get(index);
        if class != OrderClass::Atomic {
            return;
        }
        for at in self.before(index) {
            let op = self.op(at);
            if op.carry == Carry::Later && op.base == place {
                (op.carry, op.left, op.status) = (Carry::Own, 0, status);
            }
        }
    }

    /// WQEs under way before this one.
    fn before(&self, index: u32) -> impl Iterator<Item = u32> + use<> {
        let una = self.una;
        (0..index.wrapping_sub(una)).map(move |n| una.wrapping_add(n))
    }

    /// Whether a WRITE is under way to some of these bytes of SL's memory.
    pub(super) fn writes_to(&self, addr: u64, len: u32) -> bool {
        self.counts.writes > 0 && self.any(|op| op.class == OrderClass::Write && op.overlaps(addr, len))
    }

    /// Whether a WRITE here may not land before something under way has.
    pub(super) fn is_in_the_way(&self, addr: u64, len: u32) -> bool {
        self.any(|op| match op.class {
            OrderClass::Write => !op.relaxed || op.overlaps(addr, len),
            OrderClass::Atomic | OrderClass::Rpc | OrderClass::Stream | OrderClass::Own => true,
            OrderClass::Read => op.overlaps(addr, len),
            OrderClass::Send => false,
        })
    }

    /// Whether so many packets of WQEs that go in their turn are under way.
    pub(super) fn has_in_turn(&self, packets: u32) -> bool {
        let mut left = packets;
        self.any(|op| {
            left = left.saturating_sub(if op.in_turn { op.left } else { 0 });
            left == 0
        })
    }

    fn any(&self, mut is: impl FnMut(&WqeProgress) -> bool) -> bool {
        (0..self.under_way()).any(|n| is(self.get(self.una.wrapping_add(n))))
    }

    /// The first WQE whose data is not all where it belongs. `known`: that of before.
    pub(super) fn settled(&self, known: u32) -> u32 {
        let mut at = if (known.wrapping_sub(self.una) as i32) < 0 { self.una } else { known };
        while at != self.next {
            let op = self.get(at);
            if !op.all || op.left > 0 {
                break;
            }
            at = at.wrapping_add(1);
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_overlaps_is_in_the_way() {
        let mut stream = WqeStream::new(u32::MAX, 4);
        assert!(stream.has_room());
        stream.begin(WqeProgress {
            class: OrderClass::Write,
            relaxed: true,
            base: 100,
            length: 10,
            ..WqeProgress::default()
        });
        for (addr, len, overlaps) in
            [(90, 10, false), (90, 11, true), (109, 1, true), (110, 5, false), (105, 0, true)]
        {
            assert_eq!(stream.writes_to(addr, len), overlaps, "{addr} {len}");
            assert_eq!(stream.is_in_the_way(addr, len), overlaps);
        }
        stream.advance(10, 1, true);
        assert!(stream.settled(u32::MAX) == u32::MAX && stream.changes());
        stream.op(u32::MAX).left = 0;
        assert_eq!(stream.settled(u32::MAX), 0);
        stream.retire();
        assert!(!stream.changes() && stream.under_way() == 0);
    }
}
