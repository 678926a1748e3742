//! The packets under way to SL: which of them SL has, which are to be sent again (hole 9).
//!
//! A PSN is a place in a ring. A packet is in flight, lost, or done; of RD and GD alike it is done when its answer has come.
//! Each transmission has a number; when the answer to one comes that was made but once, those made [`LATE`] before it and still
//! unanswered are taken for lost, as RFC 8985 does by time.

use alloc::boxed::Box;

use crate::error::NicError;
use crate::room::filled;
use crate::star::registry::RuleRef;
use crate::types::{Nanos, Psn};

/// Transmissions by which a packet may be overtaken without being taken for lost.
const LATE: u32 = 3;
/// Transmission numbers begin anew here.
const REBASE: u32 = 1 << 30;
/// Fewest packets that losses let be under way.
const LEAST: u32 = 4;

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
}

impl Entry {
    /// Whether it was sent more than once.
    pub(super) fn repeated(&self) -> bool {
        self.tries > 1
    }
}

/// All packets under way of a connection.
pub(super) struct Window {
    ring: Box<[Entry]>,
    una: Psn,
    next: Psn,
    order: u32,
    newest: u32,
    flight: u32,
    lost: u32,
    /// Packets that may be in flight; cut by losses
    limit: u32,
    /// Answers since `limit` last grew
    grown: u32,
    /// Losses of packets before this one have cut `limit` already
    cut: Psn,
}

impl Window {
    /// Room for so many packets, a power of two. `Exhausted`: no memory.
    pub(super) fn new(packets: u32, first: Psn) -> Result<Self, NicError> {
        let packets = packets.clamp(LEAST, 1 << 16).next_power_of_two();
        Ok(Window {
            ring: filled(packets as usize)?,
            una: first,
            next: first,
            order: 0,
            newest: 0,
            flight: 0,
            lost: 0,
            limit: packets,
            grown: 0,
            cut: first,
        })
    }

    fn place(&self, psn: Psn) -> usize {
        psn.get() as usize & (self.ring.len() - 1)
    }

    /// Bytes of memory that it takes.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.ring)
    }

    /// Packets from the oldest unanswered one to the newest.
    fn span(&self) -> u32 {
        self.next.since(self.una) as u32
    }

    /// Whether one more packet may go.
    pub(super) fn has_room(&self) -> bool {
        self.span() < self.ring.len() as u32 && self.flight < self.limit
    }

    /// Whether nothing is under way.
    pub(super) fn is_empty(&self) -> bool {
        self.una == self.next
    }

    /// Adds a packet that leaves now; gives its PSN. There must be room.
    pub(super) fn push(&mut self, entry: Entry, now: Nanos) -> Psn {
        debug_assert!(self.span() < self.ring.len() as u32, "the caller looks for room first");
        let psn = self.next;
        let at = self.place(psn);
        self.ring[at] = Entry { state: State::Flight, tries: 0, ..entry };
        self.next = psn.plus(1);
        self.flight += 1;
        self.note_sent(at, now);
        psn
    }

    fn note_sent(&mut self, at: usize, now: Nanos) {
        if self.order >= REBASE {
            self.rebase();
        }
        self.order += 1;
        let entry = &mut self.ring[at];
        entry.order = self.order;
        entry.sent = now;
        entry.tries = entry.tries.saturating_add(1);
    }

    #[cold]
    fn rebase(&mut self) {
        let base = self.order - 4 * self.ring.len() as u32;
        for entry in &mut self.ring {
            entry.order = entry.order.saturating_sub(base);
        }
        self.newest = self.newest.saturating_sub(base);
        self.order -= base;
    }

    /// The unanswered packet that has this PSN.
    pub(super) fn get(&self, psn: Psn) -> Option<&Entry> {
        let known = !psn.before(self.una) && psn.before(self.next);
        let entry = &self.ring[self.place(psn)];
        (known && entry.state != State::Done).then_some(entry)
    }

    /// The answer to a packet came; gives what it was. `None`: it answers nothing under way.
    pub(super) fn done(&mut self, psn: Psn) -> Option<Entry> {
        let entry = *self.get(psn)?;
        self.settle(psn);
        if entry.tries == 1 {
            self.newest = self.newest.max(entry.order);
        }
        self.grow();
        self.pass();
        Some(entry)
    }

    fn settle(&mut self, psn: Psn) {
        let at = self.place(psn);
        match self.ring[at].state {
            State::Flight => self.flight -= 1,
            State::Lost => self.lost -= 1,
            State::Done => {}
        }
        self.ring[at].state = State::Done;
    }

    fn pass(&mut self) {
        while self.una != self.next && self.ring[self.place(self.una)].state == State::Done {
            self.una = self.una.plus(1);
        }
    }

    fn grow(&mut self) {
        self.grown += 1;
        if self.grown >= self.limit {
            self.grown = 0;
            self.limit = (self.limit + 1).min(self.ring.len() as u32);
        }
    }

    /// A packet's answer came too early to be of use: it is to be asked for again.
    pub(super) fn refuse(&mut self, psn: Psn) {
        self.lose(psn);
    }

    fn lose(&mut self, psn: Psn) -> bool {
        let at = self.place(psn);
        let was = self.ring[at].state == State::Flight;
        if was {
            self.ring[at].state = State::Lost;
            self.flight -= 1;
            self.lost += 1;
        }
        was
    }

    fn each(&self) -> impl Iterator<Item = Psn> + use<> {
        let una = self.una;
        (0..self.span()).map(move |n| una.plus(n))
    }

    /// Declares lost what was overtaken. Gives how many.
    pub(super) fn infer(&mut self) -> u32 {
        let oldest = &self.ring[self.place(self.una)];
        if self.is_empty() || oldest.state != State::Flight && self.lost == 0 {
            return 0;
        }
        self.lose_all(|entry, newest| entry.order + LATE <= newest)
    }

    /// Declares lost what was sent at or before `then`. Gives how many.
    pub(super) fn expire(&mut self, then: Nanos) -> u32 {
        self.lose_all(|entry, _| entry.sent <= then)
    }

    fn lose_all(&mut self, is_lost: impl Fn(&Entry, u32) -> bool) -> u32 {
        let mut lost = 0;
        for psn in self.each() {
            if is_lost(&self.ring[self.place(psn)], self.newest) && self.lose(psn) {
                lost += 1;
                self.cut_for(psn);
            }
        }
        lost
    }

    /// Halves what may be in flight, once for all that was under way.
    fn cut_for(&mut self, psn: Psn) {
        if !psn.before(self.cut) {
            self.cut = self.next;
            self.limit = (self.limit / 2).max(LEAST);
            self.grown = 0;
        }
    }

    /// When the oldest transmission still in flight was made.
    pub(super) fn oldest(&self) -> Option<Nanos> {
        let sent = self.each().filter_map(|psn| {
            let entry = &self.ring[self.place(psn)];
            (entry.state == State::Flight).then_some(entry.sent)
        });
        sent.min()
    }

    /// How often the packet that was sent most often was sent.
    pub(super) fn most_tries(&self) -> u8 {
        let tries = self.each().map(|psn| &self.ring[self.place(psn)]).filter(|e| e.state != State::Done);
        tries.map(|entry| entry.tries).max().unwrap_or(0)
    }

    /// The first packet to be sent again of those that `may` go now.
    pub(super) fn next_lost(&self, may: impl Fn(&Entry) -> bool) -> Option<(Psn, Entry)> {
        if self.lost == 0 || self.flight >= self.limit {
            return None;
        }
        self.each().find_map(|psn| {
            let entry = &self.ring[self.place(psn)];
            (entry.state == State::Lost && may(entry)).then_some((psn, *entry))
        })
    }

    /// A lost packet leaves again.
    pub(super) fn sent_again(&mut self, psn: Psn, now: Nanos) {
        let at = self.place(psn);
        if self.ring[at].state == State::Lost {
            self.ring[at].state = State::Flight;
            self.lost -= 1;
            self.flight += 1;
            self.note_sent(at, now);
        }
    }

    /// Answers to these packets are waited for no more.
    pub(super) fn forget(&mut self, which: impl Fn(&Entry) -> bool) {
        for psn in self.each() {
            if which(&self.ring[self.place(psn)]) {
                self.settle(psn);
            }
        }
        self.pass();
    }
}

#[cfg(test)]
#[path = "window_tests.rs"]
mod tests;
