//! StaR's workloads (section V-A): each connection's client sends a call of three SENDs, and the server
//! answers with one.
//!
//! `calls`: the server replies at once, and the client calls again. `rounds`: the server replies to all when
//! it has all calls, as a parameter server does. With groups (ScalaRDMA) a connection begins a call only
//! while its group has the time slot. Over UC and UD, messages say of which call they are, and a client makes
//! a call again that is not answered in time; the server takes one once, and replies as often as it is asked.

use std::collections::VecDeque;

use super::card::CardId;
use super::events::{EventQueue, Picos};
use super::host::{DoorbellBatch, Verb};
use super::load::Measure;
use super::params::{Params, WorkloadKind};

/// How often the time to the next try of a call doubles.
const LONGEST: u32 = 10;
/// How often each group has a slot while calls are measured. (Rounds wait for all groups, and are many.)
const TURNS: u64 = 10;
/// Bits of a message's number in its call.
const PIECES: u32 = 4;

/// What programs ask of time.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wake {
    /// A program rings a doorbell
    Doorbell(u16),
    /// The time slot of a group of connections ends
    Slot,
    /// A client looks whether a call is answered, of this number
    Retry(u16, u16),
}

/// What the first message of a call carries: the connection and the call.
fn tag(qpn: usize, call: u16) -> u32 {
    (qpn as u32) << 20 | u32::from(call) << PIECES
}

/// Connection, call, and which of its messages.
fn read_tag(tag: u32) -> (usize, u16, u16) {
    ((tag >> 20) as usize, (tag >> PIECES) as u16, (tag & ((1 << PIECES) - 1)) as u16)
}

/// Groups of so many of the connections; 0: one of all.
fn groups(connections: usize, group: usize) -> usize {
    if group == 0 { 1 } else { connections.div_ceil(group) }
}

/// A connection, by the server's QPN.
struct Connection {
    client: CardId,
    client_qpn: u32,
    /// SENDs of the call under way that the server has
    received: u16,
    /// Over UC and UD: the call that these are of, and which they are, a bit each
    met: u16,
    pieces: u16,
    /// The call under way is not answered, and how often it was made again
    open: bool,
    repeats: u32,
    began: Picos,
    begun: u64,
    /// It would call, and its group has not the slot
    waits: bool,
    /// Its client is busy until then
    free_at: Picos,
}

/// What was counted, for the checks at the end.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CallsTally {
    /// Calls begun, replies that clients have
    pub(super) calls: u64,
    pub(super) answered: u64,
    /// SENDs that the server has, replies that it posted
    pub(super) requests: u64,
    pub(super) replies: u64,
    /// Doorbells rung at the server and at clients; of the server's, those of RECVs
    pub(super) server_doorbells: u64,
    pub(super) client_doorbells: u64,
    pub(super) receive_doorbells: u64,
    /// Completions of SENDs that the server saw, and that clients saw
    pub(super) server_sent: u64,
    pub(super) client_sent: u64,
    /// Calls that were made again
    pub(super) repeated: u64,
    sends_posted: u64,
}

impl CallsTally {
    /// SENDs of both sides.
    pub(super) fn messages(&self) -> u64 {
        self.sends_posted
    }
}

pub(super) struct Calls {
    connections: Vec<Connection>,
    /// Of each client, the server's QPN of each of its QPs
    server_qpns: Vec<Vec<u32>>,
    /// When each of the server's processes is free, and how long all of them were busy
    processes: Vec<Picos>,
    busy: Picos,
    /// On their way to the card: first the server's processes, then the connections' clients
    ringing: Vec<VecDeque<DoorbellBatch>>,
    rounds: bool,
    /// Calls of each connection (rounds)
    calls_each: u64,
    /// Calls complete in this round
    complete: usize,
    /// Connections of a group; 0: no groups
    group: usize,
    /// Which group has the slot
    active: usize,
    pub(super) measure: Measure,
    pub(super) tally: CallsTally,
}

impl Calls {
    /// `ends`: of each of the server's QPs the client and its QP.
    pub(super) fn new(params: &Params, ends: &[(CardId, u32)]) -> Calls {
        let mut server_qpns = vec![Vec::new(); usize::from(params.clients) + 1];
        for (qpn, (client, _)) in ends.iter().enumerate() {
            server_qpns[usize::from(*client)].push(qpn as u32);
        }
        let connection = |&(client, client_qpn)| Connection {
            client,
            client_qpn,
            received: 0,
            met: 0,
            pieces: 0,
            open: false,
            repeats: 0,
            began: 0,
            begun: 0,
            waits: false,
            free_at: 0,
        };
        let mut measure = Measure::new(ends.len() as u64, params.least_messages / 10);
        let groups = groups(ends.len(), params.group as usize) as u64;
        if groups > 1 && params.kind == WorkloadKind::Calls {
            measure = measure.of_turns(groups * params.slot, TURNS);
        }
        Calls {
            connections: ends.iter().map(connection).collect(),
            server_qpns,
            processes: vec![0; params.processes.into()],
            busy: 0,
            ringing: vec![VecDeque::new(); usize::from(params.processes) + ends.len()],
            rounds: params.kind == WorkloadKind::Rounds,
            calls_each: (measure.warm + measure.wanted).div_ceil(ends.len().max(1) as u64),
            complete: 0,
            group: params.group as usize,
            active: 0,
            measure,
            tally: CallsTally::default(),
        }
    }

    /// Share of so much time in which the server's processes were busy.
    pub(super) fn cpu(&self, time: Picos) -> f64 {
        self.busy as f64 / (time.max(1) as f64 * self.processes.len() as f64)
    }

    /// All connections call.
    pub(super) fn start(&mut self, events: &mut EventQueue<impl From<Wake>>, params: &Params) {
        for qpn in 0..self.connections.len() {
            self.call(qpn, 0, events, params);
        }
        if self.groups() > 1 {
            events.push(params.slot, Wake::Slot.into());
        }
    }

    fn groups(&self) -> usize {
        groups(self.connections.len(), self.group)
    }

    fn has_slot(&self, qpn: usize) -> bool {
        self.group == 0 || qpn / self.group == self.active
    }

    fn is_over(&self) -> bool {
        let each = |connection: &Connection| connection.begun >= self.calls_each;
        if self.rounds { self.connections.iter().all(each) } else { self.measure.is_full() }
    }

    /// Whether all calls that are to be made are answered.
    pub(super) fn is_idle(&self) -> bool {
        self.is_over() && self.tally.calls == self.tally.answered
    }

    /// A time slot ends: the next group may call.
    pub(super) fn next_slot(&mut self, events: &mut EventQueue<impl From<Wake>>, params: &Params) {
        if self.is_over() {
            return;
        }
        self.active = (self.active + 1) % self.groups();
        let at = events.now() + params.regroup;
        self.processes.iter_mut().for_each(|free_at| *free_at = at.max(*free_at + params.regroup));
        self.busy += params.regroup * self.processes.len() as u64;
        let first = self.active * self.group;
        for qpn in first..(first + self.group).min(self.connections.len()) {
            if self.connections[qpn].waits {
                self.call(qpn, at, events, params);
            }
        }
        events.push(events.now() + params.slot, Wake::Slot.into());
    }

    /// The client of connection `qpn` calls, not before `at`, when it may.
    fn call(&mut self, qpn: usize, at: Picos, events: &mut EventQueue<impl From<Wake>>, params: &Params) {
        let may = self.has_slot(qpn);
        let connection = &mut self.connections[qpn];
        let ended = if self.rounds { connection.begun >= self.calls_each } else { self.measure.is_full() };
        connection.waits = !may && !ended;
        if ended || !may {
            return;
        }
        connection.begun += 1;
        (connection.open, connection.repeats) = (true, 0);
        connection.began = connection.free_at.max(at);
        self.tally.calls += 1;
        self.ask(qpn, at, events, params);
    }

    /// The client posts a call's SENDs, and rings.
    fn ask(&mut self, qpn: usize, at: Picos, events: &mut EventQueue<impl From<Wake>>, params: &Params) {
        let connection = &mut self.connections[qpn];
        let call = connection.begun as u16;
        connection.free_at = connection.free_at.max(at) + params.post;
        self.tally.client_doorbells += 1;
        self.tally.sends_posted += u64::from(params.sends);
        let (at, end) = (connection.free_at, connection.client_qpn);
        let wait = params.retry << connection.repeats.min(LONGEST);
        let batch = DoorbellBatch { qpn: end, wqes: params.sends, verb: Verb::Send, tag: tag(qpn, call) };
        self.ring(self.processes.len() + qpn, at, batch, events, params);
        if params.retry > 0 {
            events.push(at + wait, Wake::Retry(qpn as u16, call).into());
        }
    }

    /// A call is made again, if it is not answered.
    pub(super) fn look(
        &mut self,
        qpn: u16,
        call: u16,
        events: &mut EventQueue<impl From<Wake>>,
        params: &Params,
    ) {
        let connection = &mut self.connections[usize::from(qpn)];
        if connection.open && connection.begun as u16 == call {
            connection.repeats += 1;
            self.tally.repeated += 1;
            self.ask(qpn.into(), events.now(), events, params);
        }
    }

    fn ring(
        &mut self,
        number: usize,
        at: Picos,
        batch: DoorbellBatch,
        events: &mut EventQueue<impl From<Wake>>,
        params: &Params,
    ) {
        self.ringing[number].push_back(batch);
        events.push(at + params.doorbell, Wake::Doorbell(number as u16).into());
    }

    /// Doorbell `number` reaches its card now.
    pub(super) fn rung(&mut self, number: u16) -> Option<(CardId, DoorbellBatch)> {
        let number = usize::from(number);
        let batch = self.ringing.get_mut(number)?.pop_front()?;
        let card = match number.checked_sub(self.processes.len()) {
            Some(qpn) => self.connections.get(qpn)?.client,
            None => 0,
        };
        Some((card, batch))
    }

    /// A SEND is complete: counted, nothing waits for it.
    pub(super) fn completed(&mut self, card: CardId) {
        *(if card == 0 { &mut self.tally.server_sent } else { &mut self.tally.client_sent }) += 1;
    }

    /// A message is in memory, with its completion.
    pub(super) fn received(
        &mut self,
        card: CardId,
        qpn: u32,
        tag: u32,
        events: &mut EventQueue<impl From<Wake>>,
        params: &Params,
    ) {
        if params.retry > 0 {
            return self.received_once(card, tag, events, params);
        }
        if card == 0 {
            self.on_request(qpn as usize, events, params);
        } else {
            let server_qpn = self.server_qpns[usize::from(card)][qpn as usize];
            self.on_reply(server_qpn as usize, events, params);
        }
    }

    /// The same over UC or UD, where others may be lost, and come again.
    fn received_once(
        &mut self,
        card: CardId,
        tag: u32,
        events: &mut EventQueue<impl From<Wake>>,
        params: &Params,
    ) {
        let (qpn, call, piece) = read_tag(tag);
        let connection = &mut self.connections[qpn];
        if card != 0 {
            if connection.open && connection.begun as u16 == call {
                connection.open = false;
                self.on_reply(qpn, events, params);
            }
            return;
        }
        if call.wrapping_sub(connection.met) as i16 > 0 {
            (connection.met, connection.pieces, connection.received) = (call, 0, 0);
        }
        if connection.met != call {
            return;
        }
        let all = (1 << params.sends) - 1;
        let (before, bit) = (connection.pieces, 1 << piece);
        connection.pieces |= bit;
        if before & bit == 0 {
            self.on_request(qpn, events, params);
        } else if before == all && piece + 1 == params.sends {
            /* it was answered, and the answer was lost */
            self.reply(qpn, events, params);
        }
    }

    fn on_request(&mut self, qpn: usize, events: &mut EventQueue<impl From<Wake>>, params: &Params) {
        self.tally.requests += 1;
        let number = qpn % self.processes.len();
        let free_at = &mut self.processes[number];
        *free_at = (*free_at).max(events.now()) + params.poll;
        self.busy += params.poll;
        let connection = &mut self.connections[qpn];
        connection.received += 1;
        if connection.received < params.sends {
            return;
        }
        connection.received = 0;
        if params.star {
            // the RECVs that take the place of those used travel to the client's card
            let batch = DoorbellBatch { qpn: qpn as u32, wqes: params.sends, verb: Verb::Recv, tag: 0 };
            self.tally.receive_doorbells += 1;
            self.post(number, batch, events, params);
        }
        if !self.rounds {
            return self.reply(qpn, events, params);
        }
        self.complete += 1;
        if self.complete == self.connections.len() {
            self.complete = 0;
            (0..self.connections.len()).for_each(|qpn| self.reply(qpn, events, params));
        }
    }

    /// The server replies.
    fn reply(&mut self, qpn: usize, events: &mut EventQueue<impl From<Wake>>, params: &Params) {
        self.tally.replies += 1;
        self.tally.sends_posted += 1;
        let tag = tag(qpn, self.connections[qpn].met);
        let batch = DoorbellBatch { qpn: qpn as u32, wqes: 1, verb: Verb::Send, tag };
        self.post(qpn % self.processes.len(), batch, events, params);
    }

    fn post(
        &mut self,
        number: usize,
        batch: DoorbellBatch,
        events: &mut EventQueue<impl From<Wake>>,
        params: &Params,
    ) {
        let free_at = &mut self.processes[number];
        *free_at = (*free_at).max(events.now()) + params.post;
        self.busy += params.post;
        let at = *free_at;
        self.tally.server_doorbells += 1;
        self.ring(number, at, batch, events, params);
    }

    fn on_reply(&mut self, qpn: usize, events: &mut EventQueue<impl From<Wake>>, params: &Params) {
        self.tally.answered += 1;
        let connection = &mut self.connections[qpn];
        connection.free_at = connection.free_at.max(events.now()) + params.poll;
        let (known, latency) = (connection.free_at, connection.free_at - connection.began);
        self.measure.take(1, known, latency);
        self.call(qpn, known, events, params);
    }
}
