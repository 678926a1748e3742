//! What SL gets of its WQEs: that they are stored (EA), and their completions (CQEP), repeated until it
//! answers.

use starverbs_core::env::Host;
use starverbs_core::room::Room;
use starverbs_core::{Nanos, NicError, Psn, Seg, WcOpcode};

use super::messages::ONE_BEFORE;
use super::places::Places;
use super::rare::{Rare, RareBox};
use super::window::Of;
use super::{CardCtx, Ended, Stateful};
use crate::env::StarEnv;
use crate::form::{Form, Upto};
use crate::message::CqeMsg;
use crate::registry::{Claim, RuleRegistry, SendCtx};
use crate::ring::{CQE_SLOT, slot};
use crate::wire::{Opt, Ptype, Queue, StarHeader};

/// Silence of SL after which an end that is to be destroyed does not wait for its EAs any more, ns.
const LINGER: Nanos = 250_000_000;

/// CQEPs of a queue that may be under way.
const UNDER_WAY: u8 = 128;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum CqepState {
    /// SL has it, or there is none
    #[default]
    Done,
    Waiting,
    Flight,
}

/// What an EA acknowledges.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Acked {
    /// Nothing that was sent
    Unknown,
    /// A CQEP that had an EA: one of the two was duplicated
    Duplicate,
    /// A CQEP; and when that was sent, if once
    New(Option<Nanos>),
}

/// A completion that SL may not have.
#[derive(Clone, Copy, Default)]
struct Pending {
    message: CqeMsg,
    state: CqepState,
    tries: u8,
    sent: Nanos,
    /// It may not leave before
    after: Nanos,
}

/// Completions of one of SL's queues. A slot belongs to a sequence, as in SL's memory.
pub(super) struct Completions {
    all: Places<Pending>,
    /// Oldest that SL may not have
    una: Psn,
    /// First that never left
    fresh: Psn,
    /// Behind the newest
    end: Psn,
    /// With those that are lost [`UNDER_WAY`] at most
    flight: u8,
    /// To be sent again
    lost: u8,
    /// Slots: a power of two, of which this is the logarithm
    depth_log: u8,
}

impl Completions {
    /// Of a queue of `depth` WQEs, a power of two.
    pub(super) fn new(depth: u32) -> Self {
        let (all, start) = (Places::new(), Psn::default());
        let depth_log = depth.ilog2() as u8;
        Completions { all, una: start, fresh: start, end: start, flight: 0, lost: 0, depth_log }
    }

    /// WQEs of the queue.
    #[inline]
    pub(super) fn depth(&self) -> u32 {
        1 << self.depth_log
    }
    /// Bytes of SL's memory that their slots take.
    #[inline]
    fn slot_bytes(&self) -> u64 {
        CQE_SLOT << self.depth_log
    }
    /// The place of the next will be used soon.
    #[inline]
    pub(super) fn expect(&self, env: &impl Host) {
        self.all.expect(env, self.end.get());
    }
    pub(super) fn bytes(&self) -> usize {
        self.all.bytes()
    }

    /// For how many there is to be room: of all WQEs from `oldest` to `newest`.
    fn span(&self, oldest: Psn, newest: Psn) -> (Psn, u32) {
        let first = if self.is_acked() { oldest } else { self.una };
        let count = newest.since(first).max(0) as u32 + 1;
        (first, count.min(self.depth()))
    }

    /// Bytes of memory that [`make_room`](Completions::make_room) takes more.
    #[inline]
    pub(super) fn growth(&self, oldest: Psn, newest: Psn) -> usize {
        let (_, count) = self.span(oldest, newest);
        self.all.growth(count, self.depth())
    }

    /// There is room for the completions of all WQEs from `oldest`, the first that has none, to `newest`.
    /// `Exhausted`: no memory.
    pub(super) fn make_room(&mut self, oldest: Psn, newest: Psn) -> Result<(), NicError> {
        let (first, count) = self.span(oldest, newest);
        self.all.make_room(first.get(), count, self.depth())
    }

    /// WQE `seq` ended so; all before it of the queue have ended. Its CQEP leaves `after` that time. There
    /// must be room.
    pub(super) fn push(&mut self, seq: Psn, message: CqeMsg, after: Nanos) {
        let at = seq.get();
        if self.is_acked() {
            /* any number of completions may have gone with their data meanwhile */
            (self.una, self.fresh) = (seq, seq);
        }
        self.end = seq.plus(1);
        /* a turn back SL has all, or it would not have posted this WQE: an EA was lost */
        while self.end.since(self.una) > self.depth() as i32 {
            self.settle(self.una.get());
            self.una = self.una.plus(1);
        }
        debug_assert!(self.end.since(self.una) <= self.all.len() as i32, "room was made");
        self.settle(at);
        self.all[at] = Pending { message, state: CqepState::Waiting, tries: 0, sent: 0, after };
        self.pass();
    }

    fn settle(&mut self, at: u32) {
        let pending = &mut self.all[at];
        match pending.state {
            CqepState::Flight => self.flight -= 1,
            CqepState::Waiting if pending.tries > 0 => self.lost -= 1,
            _ => {}
        }
        pending.state = CqepState::Done;
    }

    fn pass(&mut self) {
        while self.una != self.end && self.all[self.una.get()].state == CqepState::Done {
            self.una = self.una.plus(1);
        }
        if self.fresh.before(self.una) {
            self.fresh = self.una;
        }
    }

    /// Whether none was sent that SL has not answered.
    pub(super) fn is_idle(&self) -> bool {
        self.flight == 0 && self.lost == 0
    }

    /// Whether neither the WQE before this one nor a later one had a CQEP.
    fn lacks(&self, next: Psn) -> bool {
        self.end.before(next)
    }

    /// Whether none waits to be sent.
    pub(super) fn has_sent_all(&self) -> bool {
        self.fresh == self.end && self.lost == 0
    }

    /// Whether all CQEPs have an EA.
    pub(super) fn is_acked(&self) -> bool {
        self.una == self.end
    }

    /// An EA came.
    pub(super) fn on_ack(&mut self, seq: Psn) -> Acked {
        let past = self.una.since(seq);
        if past > 0 {
            return if past as u32 <= self.depth() { Acked::Duplicate } else { Acked::Unknown };
        }
        if !seq.before(self.end) {
            return Acked::Unknown;
        }
        let Pending { state, tries, sent, .. } = self.all[seq.get()];
        match (tries, state) {
            (0, _) => return Acked::Unknown,
            (_, CqepState::Done) => return Acked::Duplicate,
            _ => self.settle(seq.get()),
        }
        self.pass();
        Acked::New((tries == 1).then_some(sent))
    }

    pub(super) fn range(&self) -> impl Iterator<Item = Psn> + use<> {
        let una = self.una;
        (0..self.end.since(una).max(0) as u32).map(move |n| una.plus(n))
    }

    /// The next to send.
    fn next(&mut self, now: Nanos) -> Option<Psn> {
        if self.flight >= UNDER_WAY {
            return None;
        }
        if self.lost > 0 {
            let lost = |seq: &Psn| {
                let pending = &self.all[seq.get()];
                pending.state == CqepState::Waiting && pending.tries > 0
            };
            return self.range().find(lost);
        }
        while self.fresh != self.end {
            let pending = &self.all[self.fresh.get()];
            if pending.state == CqepState::Waiting {
                return (pending.after <= now).then_some(self.fresh);
            }
            self.fresh = self.fresh.plus(1);
        }
        None
    }

    fn sent(&mut self, seq: Psn, now: Nanos) -> &CqeMsg {
        let pending = &mut self.all[seq.get()];
        if pending.tries > 0 {
            self.lost -= 1;
        } else {
            self.fresh = seq.plus(1);
        }
        self.flight += 1;
        (pending.state, pending.sent) = (CqepState::Flight, now);
        pending.tries = pending.tries.saturating_add(1);
        &pending.message
    }

    /// Those sent at or before `then` are to be sent again. Gives most tries of any.
    pub(super) fn expire(&mut self, then: Nanos) -> u8 {
        let mut tries = 0;
        for seq in self.range() {
            let pending = &mut self.all[seq.get()];
            if pending.state == CqepState::Flight && pending.sent <= then {
                pending.state = CqepState::Waiting;
                tries = tries.max(pending.tries);
                self.flight -= 1;
                self.lost += 1;
            }
        }
        tries
    }

    /// When something is due: an answer to what was sent, after `timeout`, or a completion to be sent.
    pub(super) fn due(&self, timeout: Nanos) -> Option<Nanos> {
        let due = self.range().filter_map(|seq| {
            let pending = &self.all[seq.get()];
            match pending.state {
                CqepState::Flight => Some(pending.sent + timeout),
                CqepState::Waiting if pending.after > 0 => Some(pending.after),
                _ => None,
            }
        });
        due.min()
    }

    /// SL is gone: no CQEP leaves any more.
    pub(super) fn forget(&mut self) {
        for at in 0..self.all.len() {
            self.settle(at);
        }
        self.pass();
    }
}

/// EAs owed for WQEPs. One that finds no room is not sent, and SL repeats the WQEP.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct OwedAcks(u8);

impl OwedAcks {
    /// For all WQEs that are here with all before them
    const ALL: u8 = 1;
    /// Sends are among them
    const SENDS: u8 = 2;
    /// For one WQE each ([`Rare::acks`](super::rare::Rare::acks))
    const SINGLE: u8 = 4;

    /// A cumulative EA is owed, once for all that one leaves for.
    pub(super) fn push_all(&mut self, queue: Queue) {
        self.0 |= OwedAcks::ALL | if queue == Queue::Send { OwedAcks::SENDS } else { 0 };
    }
    /// Whether an EA is owed.
    pub(super) fn is_owed(self) -> bool {
        self.0 != 0
    }
    /// Whether an EA is owed for receives alone, to which no program answers.
    #[inline]
    fn is_of_recvs(self) -> bool {
        self.0 == OwedAcks::ALL
    }
    /// What leaves says how far all WQEs are stored.
    fn clear_all(&mut self) {
        self.0 &= OwedAcks::SINGLE;
    }
    /// One is owed for one WQE. There are `most` at most.
    #[cold]
    pub(super) fn push(&mut self, rare: &mut RareBox, most: usize, opt: Opt, seq: Psn) {
        let Ok(Rare { acks, .. }) = rare.make() else { return };
        if acks.len() < most && acks.try_reserve(1).is_ok() {
            acks.push_in_room((opt, seq));
            self.0 |= OwedAcks::SINGLE;
        }
    }
    /// The first of those for one WQE.
    #[inline]
    fn pop(&mut self, rare: &mut RareBox) -> Option<(Opt, Psn)> {
        if self.0 & OwedAcks::SINGLE == 0 {
            return None;
        }
        let acks = &mut rare.get_mut()?.acks;
        let first = acks.pop_front();
        if acks.is_empty() {
            self.0 &= !OwedAcks::SINGLE;
        }
        first
    }
}

impl<E: StarEnv> Stateful<E> {
    /// Header of an EA or CQEP. Each has how far SL's WQEs are stored.
    fn event(&mut self, ptype: Ptype, opt: Opt, seq: Psn, len: u16) -> StarHeader {
        let addr = self.stored_word();
        let (qpn, ack) = (self.local.qpn, ptype == Ptype::Cqep);
        StarHeader { ptype, opt, migrate: false, ack, qpn, epoch: 0, psn: seq, addr, len }
    }

    /// How far SL's WQEs are stored, for a packet that leaves now; 0 in the paper's packets.
    pub(super) fn stored_word(&mut self) -> u64 {
        if self.local.form == Form::Paper {
            return 0;
        }
        self.owed_acks.clear_all();
        Upto { sends: self.sends.stored(), recvs: self.recvs.stored() }.word()
    }

    /// EAs for one WQE each that may be owed: for each WQE that SL may have under way, up to some; of packed
    /// WQEs only those out of order have EAs of their own.
    pub(super) fn most_acks(&self) -> usize {
        let wqes: u32 = self.completions.iter().map(Completions::depth).sum();
        wqes.min(if self.local.form == Form::Paper { 1024 } else { 16 }) as usize
    }

    /// Where in SL's memory the completion of WQE `seq` of a queue goes.
    pub(super) fn completion_slot(&self, registry: &RuleRegistry, queue: Queue, seq: Psn) -> u64 {
        let [sends, recvs] = &self.completions;
        let first = registry.first_slot(self.conn);
        match queue {
            Queue::Send => slot(first, sends.depth(), seq.get(), CQE_SLOT),
            Queue::Recv => slot(first.wrapping_add(sends.slot_bytes()), recvs.depth(), seq.get(), CQE_SLOT),
        }
    }

    /// Address of SL's slots of atomics, and behind them that of turns.
    pub(super) fn replay(&self, registry: &RuleRegistry) -> u64 {
        let slots = self.completions.iter().map(Completions::slot_bytes).sum();
        registry.first_slot(self.conn).wrapping_add(slots)
    }

    /// SL asks how far its sends are, as not all are signaled, or our end is about to go: the last that is
    /// done gets a CQEP, and the last that is here once that is done.
    pub fn report(&mut self) {
        if self.ended != Ended::Not || self.quiesced {
            return;
        }
        let una = Psn::new(self.streams[Of::Remote as usize].una);
        let completions = &mut self.completions[Queue::Send as usize];
        let before = una.plus(ONE_BEFORE);
        /* beside those that are here, which have room for theirs */
        let kept = (0..completions.depth()).rev().find(|n| self.sends.get(una.plus(*n)).is_some());
        let newest = kept.map_or(before, |n| una.plus(n));
        if completions.lacks(una) && completions.make_room(before, newest).is_ok() {
            completions.push(before, CqeMsg::default(), 0);
        }
        let here = (0..completions.depth()).take_while(|n| self.sends.get(una.plus(*n)).is_some());
        self.report_at = una.plus(here.count() as u32);
    }

    /// Whether SL lacks completions of what has succeeded here, and is there to take them. Our program may
    /// end now, and nobody else would repeat them.
    pub fn owes(&self, now: Nanos) -> bool {
        let acked = self.completions.iter().all(Completions::is_acked);
        !acked && now.saturating_sub(self.last_inbound) < LINGER
    }

    /// Receives of SL came to an end that has nothing to send, and waits for no answer: their EA leaves at
    /// once. Else it may go with what is sent next.
    #[inline]
    pub(super) fn ack_recvs(&mut self, card: &mut CardCtx<'_, E>) {
        let alone = self.owed_acks.is_of_recvs()
            && self.window.is_empty()
            && !self.has_new(Of::Local)
            && self.completions.iter().all(Completions::has_sent_all);
        if alone && card.env.can_send_star() {
            self.send_ack(card);
        }
    }

    /// Sends an EA if one is owed.
    pub(super) fn send_ack(&mut self, card: &mut CardCtx<'_, E>) -> bool {
        let (opt, seq) = match self.owed_acks.pop(&mut self.rare) {
            Some(one) => one,
            None if self.owed_acks.is_owed() => (Opt::Send, self.sends.stored().plus(ONE_BEFORE)),
            None => return false,
        };
        let header = self.event(Ptype::Ea, opt, seq, 0);
        let ctx = SendCtx { env: &mut *card.env, stats: card.stats, now: card.now };
        card.registry.send(ctx, self.conn, &Claim::None, header, &[], &[]);
        true
    }

    /// Sends a CQEP if one is to be sent.
    pub(super) fn send_completion(&mut self, card: &mut CardCtx<'_, E>) -> bool {
        if self.silent || self.completions.iter().all(Completions::has_sent_all) {
            return false;
        }
        for queue in [Queue::Recv, Queue::Send] {
            let Some(seq) = self.completions[queue as usize].next(card.now) else { continue };
            self.asks(card.now);
            let completions = &mut self.completions[queue as usize];
            let message = *completions.sent(seq, card.now);
            let message = CqeMsg { slot: self.completion_slot(card.registry, queue, seq), ..message };
            let bytes = message.encode();
            let opt = match (queue, message.opcode) {
                (Queue::Recv, _) => Opt::Recv,
                (_, WcOpcode::RdmaWrite) => Opt::Write,
                (_, WcOpcode::RdmaRead | WcOpcode::CompSwap | WcOpcode::FetchAdd) => Opt::Read,
                _ => Opt::Send,
            };
            let header = self.event(Ptype::Cqep, opt, seq, bytes.len() as u16);
            let claim = Claim::Slot(Seg { addr: message.slot, len: CQE_SLOT as u32 });
            let ctx = SendCtx { env: &mut *card.env, stats: card.stats, now: card.now };
            card.registry.send(ctx, self.conn, &claim, header, &bytes, &[]);
            self.arm(card.now + self.timeout(card));
            return true;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    /// With all its places, from the first WQE on.
    fn of_four() -> Completions {
        let mut all = Completions::new(4);
        assert_eq!((all.bytes(), all.on_ack(Psn::new(0))), (0, Acked::Unknown));
        all.make_room(Psn::new(0), Psn::new(3)).unwrap();
        all
    }

    #[test]
    fn each_is_sent_until_it_is_acked_and_slots_come_round() {
        let mut all = of_four();
        let mut seq = Psn::new(0);
        for turn in 0..50u32 {
            /* every third is not signalled */
            let acked: Vec<Psn> = (0..4).filter(|n| (turn * 4 + n) % 3 != 0).map(|n| seq.plus(n)).collect();
            for seq in &acked {
                all.push(*seq, CqeMsg { byte_len: seq.get(), ..CqeMsg::default() }, 0);
            }
            for expected in &acked {
                assert_eq!(all.next(1), Some(*expected));
                assert_eq!(all.sent(*expected, 1).byte_len, expected.get());
            }
            assert_eq!((all.next(1), all.flight), (None, acked.len() as u8));
            assert_eq!((all.on_ack(acked[1]), all.on_ack(acked[1])), (Acked::New(Some(1)), Acked::Duplicate));
            assert_eq!(all.on_ack(seq.plus(4)), Acked::Unknown, "it was never sent");
            assert_eq!(all.expire(1), 1);
            assert_eq!(all.next(2), Some(acked[0]));
            all.sent(acked[0], 2);
            assert_eq!(all.on_ack(acked[0]), Acked::New(None), "which of the two came is not known");
            for seq in &acked {
                all.on_ack(*seq);
            }
            assert_eq!((all.flight, all.lost, all.next(3)), (0, 0, None));
            seq = seq.plus(4);
        }
    }

    /// A program may answer a message of SL, and that takes the EA along.
    #[test]
    fn an_ea_is_of_receives_until_a_send_comes() {
        let (mut owed, mut rare) = (OwedAcks::default(), RareBox::default());
        assert!(!owed.is_of_recvs());
        for (queue, alone) in [(Queue::Recv, true), (Queue::Send, false), (Queue::Recv, false)] {
            owed.push_all(queue);
            assert_eq!((owed.is_of_recvs(), owed.is_owed()), (alone, true));
        }
        owed.clear_all();
        owed.push_all(Queue::Recv);
        assert!(owed.is_of_recvs());
        owed.push(&mut rare, 1, Opt::Recv, Psn::new(2));
        owed.push(&mut rare, 1, Opt::Recv, Psn::new(3));
        assert!(!owed.is_of_recvs(), "one has an EA of its own");
        owed.clear_all();
        assert_eq!((owed.pop(&mut rare), owed.is_owed()), (Some((Opt::Recv, Psn::new(2))), false));
    }

    /// An EA was lost, and no completion takes the slot in the next turn, as its WQE is not signalled.
    #[test]
    fn what_is_a_turn_back_is_forgotten() {
        let mut all = of_four();
        for n in 0..2000u32 {
            /* slots 0, 3, 2, 1, 0: each is skipped for three turns */
            let seq = Psn::new(5 * n);
            all.push(seq, CqeMsg::default(), 0);
            assert_eq!(all.next(1), Some(seq));
            all.sent(seq, 1);
            assert!(all.flight <= 1 && all.range().count() <= 4);
        }
    }

    #[test]
    fn a_wqe_without_a_completion_leaves_none_behind() {
        let mut all = of_four();
        all.push(Psn::new(0), CqeMsg::default(), 0);
        all.sent(Psn::new(0), 1);
        all.expire(1);
        /* its EA was lost: SL has it, and went on; 4, in the same slot, is not signalled */
        all.push(Psn::new(5), CqeMsg::default(), 0);
        assert_eq!(all.next(2), Some(Psn::new(5)));
        all.sent(Psn::new(5), 2);
        assert_eq!((all.next(3), all.lost), (None, 0));
    }

    #[test]
    fn an_error_waits_for_its_time() {
        let mut all = of_four();
        all.push(Psn::new(2), CqeMsg::default(), 100);
        assert_eq!((all.next(99), all.due(7)), (None, Some(100)));
        assert_eq!(all.next(100), Some(Psn::new(2)));
        all.forget();
        assert_eq!((all.next(100), all.due(7)), (None, None));
    }
}
