//! A card: the paper's units as pipeline stages of one cycle each, around the core's [`Qpc`].
//!
//! Sending: doorbell -> descriptor fetch -> WQEs -> request generation -> out. Receiving: in -> responder ->
//! answer. A stage takes one item a cycle, waits for its resource (an index, the window) and is woken by who
//! frees it.

mod receive;
mod send;
mod translate;

use std::collections::VecDeque;

use starverbs_core::qpc::{
    CachedContext, ConfigError, ContextPlacement, Qpc, RequestChannel, RequesterUnit, SendRing, UnitResponse,
};

use self::translate::Translations;
use super::calls::Wake;
use super::dma::DmaEngine;
use super::events::{EventQueue, Picos};
use super::fabric::{Fabric, FabricPacket};
use super::host::DoorbellBatch;
use super::load::Load;
use super::params::Params;

/// Number of a card; 0 is the server's.
pub(super) type CardId = u16;

/// What happens.
#[derive(Clone, Copy, Debug)]
pub(super) enum CardEvent {
    /// A stage of a card has its cycle
    Stage(CardId, Stage),
    /// A DMA read brought its data
    ReadDone(CardId),
    /// The board's memory brought a context
    BoardDone(CardId),
    /// A DMA write is in memory
    WriteDone(CardId),
    /// A packet is there
    Arrive(CardId),
    /// What programs ask of time
    Program(Wake),
}

impl From<Wake> for CardEvent {
    fn from(wake: Wake) -> CardEvent {
        CardEvent::Program(wake)
    }
}

/// The stages, and the engines that work in turns.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stage {
    /// Takes doorbells, asks for SQ addresses
    Doorbell,
    /// Asks for the descriptors
    Fetch,
    /// Takes descriptors, asks for contexts
    Descriptor,
    /// Has descriptor and context, asks for the data
    Prepare,
    /// Makes requests; takes responses
    Requester,
    /// Hands packets to the wire
    Out,
    /// Distinguishes requests from responses
    In,
    /// Carries out requests
    Responder,
    /// The QPC module's cycle
    Qpc,
    /// DMA reads
    Read,
    /// DMA writes
    Write,
    /// Reads of the board's memory
    Board,
}

const STAGES: usize = Stage::Board as usize + 1;
const NEVER: Picos = Picos::MAX;

/// What an access for a packet that arrived is for: a request counts up the PSN that is expected, others do
/// not.
const REQUEST: u16 = 0;
const OTHER: u16 = 1;

/// What of a context the simulator needs: its numbers, so that each message proves that order was kept and no
/// change lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct QpState {
    pub(super) send_psn: u32,
    pub(super) expected_psn: u32,
    ring: u16,
    ring_wqes: u16,
}

impl CachedContext for QpState {
    fn access(&mut self, channel: RequestChannel, wqes: u16) {
        match channel {
            RequestChannel::Sq => self.ring = (self.ring + wqes) % self.ring_wqes,
            RequestChannel::Tx => self.send_psn += 1,
            RequestChannel::Rx if wqes == REQUEST => self.expected_psn += 1,
            RequestChannel::Rx => {}
        }
    }
    fn send_ring(&self) -> SendRing {
        SendRing { address: 0, offset: self.ring }
    }
}

/// A work request, as the card knows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wqe {
    pub(super) qpn: u32,
    pub(super) signaled: bool,
}

/// Why a DMA read is made.
pub(super) enum Read {
    Context(u32),
    Wqes(DoorbellBatch),
    Payload,
    /// The data of a READ that a peer asked for
    Answer(FabricPacket),
    /// The RECV for a SEND of a peer
    Receive(FabricPacket),
    /// An entry of MPT and MTT
    Translation,
}

/// Why a DMA write is made.
pub(super) enum Write {
    Context,
    Payload,
    /// A completion of this QP
    Completion(u32),
    /// A completion of a RECV of this QP
    Received(u32),
}

/// Channels of the engines, in the order in which they take turns.
pub(super) mod channel {
    pub(in crate::rnic) const CACHE: usize = 0;
    pub(in crate::rnic) const DATA: usize = 1;
    /// Of the reads: WQEs
    pub(in crate::rnic) const DESCRIPTOR: usize = 2;
    /// Of the writes: CQEs
    pub(in crate::rnic) const COMPLETION: usize = 2;
    /// Of the reads: entries of MPT and MTT
    pub(in crate::rnic) const TRANSLATION: usize = 3;
}

/// What a card counts, for the checks at the end.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CardTally {
    pub(super) doorbells: u64,
    pub(super) announced: u64,
    pub(super) wqes: u64,
    pub(super) sent: u64,
    pub(super) acked: u64,
    pub(super) carried_out: u64,
    pub(super) completions: u64,
    pub(super) fetches: u64,
    pub(super) write_backs: u64,
    /// Contexts that went and were in memory as they are
    pub(super) clean: u64,
    pub(super) asked: [u64; 3],
    /// Messages whose number was not the one expected
    pub(super) out_of_order: u64,
}

/// What lies around a card.
pub(super) struct World<'a> {
    pub(super) events: &'a mut EventQueue<CardEvent>,
    pub(super) fabric: &'a mut Fabric,
    pub(super) hosts: &'a mut Load,
    pub(super) params: &'a Params,
}

impl World<'_> {
    fn now(&self) -> Picos {
        self.events.now()
    }
}

pub(super) struct Rnic {
    pub(super) id: CardId,
    pub(super) qpc: Qpc<QpState>,
    /// Contexts in memory
    contexts: Vec<QpState>,
    /// Of each QP the card and QPN at the other end
    peers: Vec<(CardId, u32)>,
    /// When each stage is due
    due: [Picos; STAGES],
    doorbells: VecDeque<DoorbellBatch>,
    sq: RequesterUnit<DoorbellBatch>,
    tx: RequesterUnit<Wqe>,
    rx: RequesterUnit<FabricPacket>,
    sq_answers: VecDeque<UnitResponse<QpState>>,
    tx_answers: VecDeque<UnitResponse<QpState>>,
    rx_answers: VecDeque<UnitResponse<QpState>>,
    wqes: VecDeque<Wqe>,
    /// Descriptors that are there or on their way
    descriptors: u32,
    /// Requests that wait for their data, or for the window
    prepared: VecDeque<FabricPacket>,
    /// Data that came for them
    payloads: u32,
    responses: VecDeque<FabricPacket>,
    /// Requests under way
    window: u32,
    /// The next request goes no earlier
    next_request: Picos,
    out: VecDeque<FabricPacket>,
    /// When the wire has taken the last packet
    out_free_at: Picos,
    arrived: VecDeque<FabricPacket>,
    pub(super) reads: DmaEngine<Read, 4>,
    translations: Translations,
    pub(super) writes: DmaEngine<Write, 3>,
    pub(super) board: DmaEngine<u32, 1>,
    /// Of each QP the next number that a response may have
    pub(super) acked: Vec<u32>,
    pub(super) tally: CardTally,
}

impl Rnic {
    pub(super) fn new(
        id: CardId,
        entries: u32,
        peers: Vec<(CardId, u32)>,
        params: &Params,
    ) -> Result<Rnic, ConfigError> {
        let qps = peers.len() as u32;
        Ok(Rnic {
            id,
            qpc: Qpc::new(params.config(entries, qps))?,
            contexts: vec![QpState { ring_wqes: params.ring_wqes, ..QpState::default() }; qps as usize],
            acked: vec![0; qps as usize],
            peers,
            due: [NEVER; STAGES],
            doorbells: VecDeque::new(),
            sq: RequesterUnit::new(params.ooo_cap),
            tx: RequesterUnit::new(params.ooo_cap),
            rx: RequesterUnit::new(params.ooo_cap),
            sq_answers: VecDeque::new(),
            tx_answers: VecDeque::new(),
            rx_answers: VecDeque::new(),
            wqes: VecDeque::new(),
            descriptors: 0,
            prepared: VecDeque::new(),
            payloads: 0,
            responses: VecDeque::new(),
            window: 0,
            next_request: 0,
            out: VecDeque::new(),
            out_free_at: 0,
            arrived: VecDeque::new(),
            reads: DmaEngine::new(),
            translations: Translations::default(),
            writes: DmaEngine::new(),
            board: DmaEngine::new(),
            tally: CardTally::default(),
        })
    }

    /// A stage's cycle, if it is still due now.
    pub(super) fn stage(&mut self, stage: Stage, world: &mut World<'_>) {
        if self.due[stage as usize] != world.now() {
            return;
        }
        self.due[stage as usize] = NEVER;
        match stage {
            Stage::Doorbell => self.take_doorbell(world),
            Stage::Fetch => self.fetch_descriptors(world),
            Stage::Descriptor => self.take_descriptor(world),
            Stage::Prepare => self.prepare(world),
            Stage::Requester => self.requester(world),
            Stage::Out => self.send_out(world),
            Stage::In => self.sort_in(world),
            Stage::Responder => self.responder(world),
            Stage::Qpc => self.cycle_qpc(world),
            Stage::Read => {
                let step = self.reads.step(world.now(), &world.params.bus_read);
                self.after(stage, &step, CardEvent::ReadDone(self.id), world);
            }
            Stage::Write => {
                let step = self.writes.step(world.now(), &world.params.bus_write);
                self.after(stage, &step, CardEvent::WriteDone(self.id), world);
            }
            Stage::Board => {
                let step = self.board.step(world.now(), &world.params.board);
                self.after(stage, &step, CardEvent::BoardDone(self.id), world);
            }
        }
    }

    fn after(&mut self, stage: Stage, step: &super::dma::DmaStep, done: CardEvent, world: &mut World<'_>) {
        if let Some(at) = step.done {
            world.events.push(at, done);
        }
        if let Some(at) = step.again {
            self.wake_at(stage, at, world);
        }
    }

    /// A stage has its cycle at `at`, or earlier if it is due earlier.
    fn wake_at(&mut self, stage: Stage, at: Picos, world: &mut World<'_>) {
        let due = &mut self.due[stage as usize];
        if at < *due {
            *due = at;
            world.events.push(at, CardEvent::Stage(self.id, stage));
        }
    }

    /// A stage has something to do, a cycle from now.
    fn wake(&mut self, stage: Stage, world: &mut World<'_>) {
        self.wake_at(stage, world.now() + world.params.cycle, world);
    }

    fn ask_qpc(&mut self, channel: RequestChannel, index: u8, qpn: u32, wqes: u16, world: &mut World<'_>) {
        self.tally.asked[channel as usize] += 1;
        let taken = self.qpc.handle_request(channel, index, qpn, wqes);
        debug_assert!(taken.is_ok(), "{taken:?}");
        self.wake(Stage::Qpc, world);
    }

    fn cycle_qpc(&mut self, world: &mut World<'_>) {
        self.qpc.cycle();
        while let Some((qpn, context)) = self.qpc.poll_write_back() {
            self.tally.write_backs += 1;
            let clean = self.contexts[qpn as usize] == context && world.params.keeps_clean;
            self.contexts[qpn as usize] = context;
            if clean {
                self.tally.clean += 1;
                continue;
            }
            // memory on the board takes them beside the reads
            if world.params.placement == ContextPlacement::Host {
                self.writes.ask(channel::CACHE, world.now(), world.params.qpc_bytes, Write::Context);
                self.wake(Stage::Write, world);
            }
        }
        while let Some(qpn) = self.qpc.poll_fetch() {
            self.tally.fetches += 1;
            if world.params.placement == ContextPlacement::Host {
                self.reads.ask(channel::CACHE, world.now(), world.params.qpc_bytes, Read::Context(qpn));
                self.wake(Stage::Read, world);
            } else {
                self.board.ask(0, world.now(), world.params.qpc_bytes, qpn);
                self.wake(Stage::Board, world);
            }
        }
        while let Some(response) = self.qpc.poll_response() {
            let (fifo, stage) = match response.channel {
                RequestChannel::Sq => (&mut self.sq_answers, Stage::Fetch),
                RequestChannel::Tx => (&mut self.tx_answers, Stage::Prepare),
                RequestChannel::Rx => (&mut self.rx_answers, Stage::Responder),
            };
            fifo.push_back(response);
            self.wake(stage, world);
        }
        if !self.qpc.is_idle() {
            self.wake(Stage::Qpc, world);
        }
    }

    fn on_context(&mut self, qpn: u32, world: &mut World<'_>) {
        let taken = self.qpc.handle_fetched(qpn, self.contexts[qpn as usize]);
        debug_assert!(taken.is_ok(), "{taken:?}");
        self.wake(Stage::Qpc, world);
    }

    pub(super) fn board_done(&mut self, world: &mut World<'_>) {
        if let Some(qpn) = self.board.done() {
            self.on_context(qpn, world);
        }
    }

    pub(super) fn read_done(&mut self, world: &mut World<'_>) {
        match self.reads.done() {
            Some(Read::Context(qpn)) => self.on_context(qpn, world),
            Some(Read::Wqes(batch)) => self.on_descriptors(batch, world),
            Some(Read::Payload) => {
                self.payloads += 1;
                self.wake(Stage::Requester, world);
            }
            Some(Read::Answer(packet)) => self.hand_out(packet, world),
            Some(Read::Receive(packet)) => self.place(packet, world),
            Some(Read::Translation) | None => {}
        }
    }

    pub(super) fn write_done(&mut self, world: &mut World<'_>) {
        match self.writes.done() {
            Some(Write::Completion(qpn)) => {
                self.tally.completions += 1;
                world.hosts.completed(self.id, qpn, world.events, world.params);
            }
            Some(Write::Received(qpn)) => {
                self.tally.completions += 1;
                world.hosts.received(self.id, qpn, world.events, world.params);
            }
            Some(Write::Context | Write::Payload) | None => {}
        }
    }

    fn hand_out(&mut self, packet: FabricPacket, world: &mut World<'_>) {
        self.out.push_back(packet);
        self.wake(Stage::Out, world);
    }

    fn send_out(&mut self, world: &mut World<'_>) {
        if world.now() < self.out_free_at {
            self.wake_at(Stage::Out, self.out_free_at, world);
        } else if let Some(packet) = self.out.pop_front() {
            let busy = world.params.card_out.busy(packet.on_wire(world.params));
            self.out_free_at = world.now() + busy;
            world.fabric.send(packet, world.now(), world.params, world.events);
            if !self.out.is_empty() {
                self.wake_at(Stage::Out, world.now() + busy.max(world.params.cycle), world);
            }
        }
    }

    /// What is left in it when all should be done.
    pub(super) fn leftovers(&self) -> Option<&'static str> {
        let waiting = [self.sq.in_flight(), self.tx.in_flight(), self.rx.in_flight()];
        match () {
            _ if waiting != [0; 3] => Some("a requester waits for a context"),
            _ if !self.qpc.is_idle() => Some("the QPC module is busy"),
            _ if self.window != 0 => Some("the window is not empty"),
            _ if !(self.doorbells.is_empty() && self.wqes.is_empty()) => Some("work requests are left"),
            _ if !(self.prepared.is_empty() && self.out.is_empty()) => Some("packets are left to be sent"),
            _ if !(self.arrived.is_empty() && self.responses.is_empty()) => Some("packets are left unread"),
            _ if self.payloads != 0 => Some("data was read for no packet"),
            _ if !(self.reads.is_idle() && self.writes.is_idle() && self.board.is_idle()) => {
                Some("DMA is under way")
            }
            _ => None,
        }
    }
}
