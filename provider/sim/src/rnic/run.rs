//! One run: a server's card, the clients' cards, a switch; until what was wanted is measured and all is quiet
//! again.

use std::ops::ControlFlow;

use starverbs_core::qpc::{ConfigError, OnChip, QpcCounters};
use thiserror::Error;

use super::calls::{Calls, Wake};
use super::card::{CardEvent, CardId, Rnic, World};
use super::check;
use super::events::{EventQueue, Picos};
use super::fabric::Fabric;
use super::host::Hosts;
use super::load::{Load, Measure};
use super::params::Params;

/// What a run showed.
#[derive(Clone, Debug)]
pub struct RunResult {
    /// Messages a second
    pub rate: f64,
    /// Mean latency in seconds, from before the post to after the poll
    pub latency: f64,
    /// The latency that 99 of 100 messages do not exceed, in seconds
    pub latency_p99: f64,
    /// Bytes on the server's chip for connections
    pub on_chip: OnChip,
    /// Counters of the server's QPC module; where the core's transport runs, hits and misses of all cards
    pub server: QpcCounters,
    /// Share of time in which the server's DMA read engine was busy
    pub read_busy: f64,
    /// Share of time in which the server's processes were busy
    pub cpu: f64,
    /// Messages in all
    pub messages: u64,
    /// Events in all
    pub events: u64,
    /// Virtual time of the run in seconds
    pub virtual_time: f64,
    /// Packets that were lost, or dropped for want of room
    pub lost: u64,
    /// Packets that the transport sent again
    pub repeated: u64,
}

/// Why a run has no outcome.
#[derive(Debug, Error)]
pub enum RunError {
    /// The cards cannot be made
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// Something was lost, left over, or came in the wrong order
    #[error("the run does not add up: {0}")]
    Unsound(String),
    /// The caller ended it
    #[error("the run was ended")]
    Ended,
}

/// Runs the simulation. `progress` gets now and then how much is done (0 to 1), and may end it.
pub fn run(params: &Params, mut progress: impl FnMut(f64) -> ControlFlow<()>) -> Result<RunResult, RunError> {
    if params.core {
        return super::transport::run(params, progress);
    }
    let ends = ends(params);
    let mut hosts = match params.is_calls() {
        true => Load::Calls(Calls::new(params, &ends)),
        false => Load::Posts(Hosts::new(params)),
    };
    let mut cards = make_cards(ends, params)?;
    let mut events = EventQueue::default();
    let mut fabric = Fabric::new(cards.len());
    hosts.start(&mut events, params);
    while let Some(event) = events.pop() {
        if events.taken() % (1 << 20) == 0 && progress(hosts.measure().share()).is_break() {
            return Err(RunError::Ended);
        }
        let mut world = World { events: &mut events, fabric: &mut fabric, hosts: &mut hosts, params };
        handle(event, &mut cards, &mut world);
    }
    check::check(&cards, &fabric, &hosts, params).map_err(RunError::Unsound)?;
    Ok(outcome(&cards[0], &mut hosts, &events))
}

fn handle(event: CardEvent, cards: &mut [Rnic], world: &mut World<'_>) {
    let at = |id: CardId| usize::from(id);
    match event {
        CardEvent::Stage(id, stage) => cards[at(id)].stage(stage, world),
        CardEvent::ReadDone(id) => cards[at(id)].read_done(world),
        CardEvent::BoardDone(id) => cards[at(id)].board_done(world),
        CardEvent::WriteDone(id) => cards[at(id)].write_done(world),
        CardEvent::Arrive(id) => {
            if let Some(packet) = world.fabric.receive(id) {
                cards[at(id)].arrive(packet, world);
            }
        }
        CardEvent::Program(Wake::Doorbell(number)) => {
            if let Some((id, batch)) = world.hosts.rung(number) {
                cards[at(id)].doorbell(batch, world);
            }
        }
        CardEvent::Program(Wake::Slot) => world.hosts.next_slot(world.events, world.params),
        /* nothing is lost here */
        CardEvent::Program(Wake::Retry(..)) => {}
    }
}

/// The server's QP `qpn` leads to client `(k + k / 10) mod clients`, k its number within its process:
/// neighbours lead to different clients, and each client has QPs of all batch sizes. Of each the client, and
/// the QP there.
pub(super) fn ends(params: &Params) -> Vec<(CardId, u32)> {
    let clients = usize::from(params.clients);
    let share = (params.qps / u32::from(params.processes)).max(1);
    let mut next = vec![0; clients];
    let end = |qpn| {
        let k = qpn % share;
        let client = (k + k / 10) as usize % clients;
        next[client] += 1;
        (client as CardId + 1, next[client] - 1)
    };
    (0..params.qps).map(end).collect()
}

fn make_cards(ends: Vec<(CardId, u32)>, params: &Params) -> Result<Vec<Rnic>, ConfigError> {
    let mut clients = vec![Vec::new(); params.clients.into()];
    for (qpn, (client, _)) in ends.iter().enumerate() {
        clients[usize::from(*client) - 1].push((0, qpn as u32));
    }
    let mut cards = vec![Rnic::new(0, params.entries, ends, params)?];
    for (client, peers) in clients.into_iter().enumerate() {
        cards.push(Rnic::new(client as CardId + 1, params.client_entries, peers, params)?);
    }
    Ok(cards)
}

fn outcome(server: &Rnic, hosts: &mut Load, events: &EventQueue<CardEvent>) -> RunResult {
    let messages = hosts.posted();
    let busy = server.reads.busy as f64 / events.now().max(1) as f64;
    RunResult {
        server: *server.qpc.counters(),
        cpu: hosts.cpu(events.now()),
        messages,
        ..RunResult::of(hosts.measure(), server.qpc.config().on_chip(), busy, events.taken(), events.now())
    }
}

impl RunResult {
    /// What was measured, of so many events in so much time; the server's DMA read engine was busy for that
    /// share of it.
    pub(super) fn of(
        measure: &mut Measure,
        on_chip: OnChip,
        read_busy: f64,
        events: u64,
        time: Picos,
    ) -> RunResult {
        let rate = measure.rate();
        let latencies = &mut measure.latencies;
        latencies.sort_unstable();
        let count = latencies.len().max(1);
        let seconds = |picos: f64| picos * 1e-12;
        RunResult {
            rate,
            latency: seconds(latencies.iter().map(|picos| *picos as f64).sum::<f64>() / count as f64),
            latency_p99: seconds(latencies.get(count * 99 / 100).map_or(0.0, |picos| *picos as f64)),
            on_chip,
            server: QpcCounters::default(),
            read_busy,
            cpu: 0.0,
            messages: 0,
            events,
            virtual_time: seconds(time as f64),
            lost: 0,
            repeated: 0,
        }
    }
}
