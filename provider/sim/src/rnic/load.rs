//! What the hosts do: [`Hosts`] post, wait and post again; [`Calls`] are answered by the server.

use super::calls::Calls;
use super::card::{CardEvent, CardId};
use super::events::{EventQueue, Picos};
use super::host::{DoorbellBatch, Hosts};
use super::params::Params;

/// What a run measures: from message (or call) `warm` to message `warm + wanted`.
#[derive(Default)]
pub(super) struct Measure {
    pub(super) warm: u64,
    pub(super) wanted: u64,
    /// How long it must have run before it measures, and how long it must measure
    warm_time: Picos,
    least_time: Picos,
    from: Picos,
    until: Picos,
    /// Latencies (ps) of those measured
    pub(super) latencies: Vec<Picos>,
    done: u64,
    counted: u64,
}

impl Measure {
    /// A first round of all QPs brings the caches to their state, and two, or `least` messages, are measured.
    pub(super) fn new(round: u64, least: u64) -> Measure {
        Measure { warm: round.max(least / 5), wanted: (2 * round).max(least), ..Measure::default() }
    }

    /// The same of something that comes again after this time: one of it first, and so many are measured.
    pub(super) fn of_turns(self, turn: Picos, turns: u64) -> Measure {
        Measure { warm_time: turn, least_time: turns * turn, ..self }
    }

    /// Whether all that was wanted is measured; nothing new is posted then.
    pub(super) fn is_full(&self) -> bool {
        self.done >= self.warm + self.wanted && self.until.saturating_sub(self.from) >= self.least_time
    }
    /// Messages a second.
    pub(super) fn rate(&self) -> f64 {
        self.counted as f64 / (self.until.saturating_sub(self.from).max(1) as f64 * 1e-12)
    }
    /// How much of the run is done, 0 to 1.
    pub(super) fn share(&self) -> f64 {
        (self.done as f64 / (self.warm + self.wanted).max(1) as f64).min(1.0)
    }

    pub(super) fn take(&mut self, messages: u16, now: Picos, latency: Picos) {
        let (before, full) = (self.done, self.is_full());
        self.done += u64::from(messages);
        if before < self.warm || now < self.warm_time {
            self.from = now;
        } else if !full {
            self.counted += u64::from(messages);
            self.until = now;
            self.latencies.push(latency);
        }
    }
}

/// The hosts of a run.
pub(super) enum Load {
    /// The server's processes post (csRNA)
    Posts(Hosts),
    /// The clients call, the server replies (StaR)
    Calls(Calls),
}

impl Load {
    pub(super) fn start(&mut self, events: &mut EventQueue<CardEvent>, params: &Params) {
        match self {
            Load::Posts(hosts) => hosts.start(events, params),
            Load::Calls(calls) => calls.start(events, params),
        }
    }

    /// Doorbell `number` reaches its card now.
    pub(super) fn rung(&mut self, number: u16) -> Option<(CardId, DoorbellBatch)> {
        match self {
            Load::Posts(hosts) => hosts.rung(number).map(|batch| (0, batch)),
            Load::Calls(calls) => calls.rung(number),
        }
    }

    /// The completion of a post of `qpn` is in memory.
    pub(super) fn completed(
        &mut self,
        card: CardId,
        qpn: u32,
        events: &mut EventQueue<CardEvent>,
        params: &Params,
    ) {
        match self {
            Load::Posts(hosts) => hosts.completed(qpn, events, params),
            Load::Calls(calls) => calls.completed(card),
        }
    }

    /// The completion of a RECV of `qpn` is in memory.
    pub(super) fn received(
        &mut self,
        card: CardId,
        qpn: u32,
        events: &mut EventQueue<CardEvent>,
        params: &Params,
    ) {
        if let Load::Calls(calls) = self {
            calls.received(card, qpn, 0, events, params);
        }
    }

    /// A time slot of a group ends.
    pub(super) fn next_slot(&mut self, events: &mut EventQueue<CardEvent>, params: &Params) {
        if let Load::Calls(calls) = self {
            calls.next_slot(events, params);
        }
    }

    pub(super) fn measure(&mut self) -> &mut Measure {
        match self {
            Load::Posts(hosts) => &mut hosts.measure,
            Load::Calls(calls) => &mut calls.measure,
        }
    }

    /// Share of so much time in which the server's processes were busy.
    pub(super) fn cpu(&self, time: Picos) -> f64 {
        match self {
            Load::Posts(hosts) => hosts.cpu(time),
            Load::Calls(calls) => calls.cpu(time),
        }
    }

    /// Messages that were posted.
    pub(super) fn posted(&self) -> u64 {
        match self {
            Load::Posts(hosts) => hosts.posted,
            Load::Calls(calls) => calls.tally.messages(),
        }
    }
}
