//! One run: a server's card, the clients' cards, a switch; until what was wanted is measured and all is quiet again.

use std::ops::ControlFlow;

use starverbs_core::qpc::{ConfigError, OnChip, Placement, QpcCounters};
use thiserror::Error;

use super::card::{Card, CardId, Event, World, channel};
use super::events::EventQueue;
use super::fabric::Fabric;
use super::host::Hosts;
use super::params::{Op, Params};

/// What a run showed.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Messages a second
    pub rate: f64,
    /// Mean latency in seconds, from before the post to after the poll
    pub latency: f64,
    /// The latency that 99 of 100 messages do not exceed, in seconds
    pub latency_p99: f64,
    /// Bytes on the server's chip for connections
    pub on_chip: OnChip,
    /// Counters of the server's QPC module
    pub server: QpcCounters,
    /// Share of time in which the server's DMA read engine was busy
    pub read_busy: f64,
    /// Messages in all
    pub messages: u64,
    /// Events in all
    pub events: u64,
    /// Virtual time of the run in seconds
    pub virtual_time: f64,
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

/// Runs the simulation. `progress` is told now and then how much is done (0 to 1), and may end it.
pub fn run(params: &Params, mut progress: impl FnMut(f64) -> ControlFlow<()>) -> Result<Outcome, RunError> {
    let mut cards = make_cards(params)?;
    let mut events = EventQueue::default();
    let mut fabric = Fabric::new(cards.len());
    let mut hosts = Hosts::new(params);
    hosts.start(&mut events, params);
    while let Some(event) = events.pop() {
        if events.taken() % (1 << 20) == 0 && progress(hosts.measure.share()).is_break() {
            return Err(RunError::Ended);
        }
        let mut world = World { events: &mut events, fabric: &mut fabric, hosts: &mut hosts, params };
        handle(event, &mut cards, &mut world);
    }
    check(&cards, &fabric, &hosts, params).map_err(RunError::Unsound)?;
    Ok(outcome(&cards[0], &mut hosts, &events))
}

fn handle(event: Event, cards: &mut [Card], world: &mut World<'_>) {
    let at = |id: CardId| usize::from(id);
    match event {
        Event::Stage(id, stage) => cards[at(id)].stage(stage, world),
        Event::ReadDone(id) => cards[at(id)].read_done(world),
        Event::BoardDone(id) => cards[at(id)].board_done(world),
        Event::WriteDone(id) => cards[at(id)].write_done(world),
        Event::Arrive(id) => {
            if let Some(packet) = world.fabric.receive(id) {
                cards[at(id)].arrive(packet, world);
            }
        }
        Event::Doorbell(process) => {
            if let Some(batch) = world.hosts.rung(process) {
                cards[0].doorbell(batch, world);
            }
        }
    }
}

/// The server's QP `qpn` leads to client `(k + k / 10) mod clients`, k its number within its process: neighbours lead to
/// different clients, and each client has QPs of all batch sizes.
fn make_cards(params: &Params) -> Result<Vec<Card>, ConfigError> {
    let clients = usize::from(params.clients);
    let share = (params.qps / u32::from(params.processes)).max(1);
    let mut server = Vec::new();
    let mut peers = vec![Vec::new(); clients];
    for qpn in 0..params.qps {
        let k = qpn % share;
        let client = (k + k / 10) as usize % clients;
        server.push((client as CardId + 1, peers[client].len() as u32));
        peers[client].push((0, qpn));
    }
    let mut cards = vec![Card::new(0, params.entries, server, params)?];
    for (client, peers) in peers.into_iter().enumerate() {
        cards.push(Card::new(client as CardId + 1, params.client_entries, peers, params)?);
    }
    Ok(cards)
}

fn outcome(server: &Card, hosts: &mut Hosts, events: &EventQueue<Event>) -> Outcome {
    let rate = hosts.measure.rate();
    let latencies = &mut hosts.measure.latencies;
    latencies.sort_unstable();
    let count = latencies.len().max(1);
    let seconds = |picos: f64| picos * 1e-12;
    Outcome {
        rate,
        latency: seconds(latencies.iter().map(|picos| *picos as f64).sum::<f64>() / count as f64),
        latency_p99: seconds(latencies.get(count * 99 / 100).map_or(0.0, |picos| *picos as f64)),
        on_chip: server.qpc.config().on_chip(),
        server: *server.qpc.counters(),
        read_busy: server.reads.busy as f64 / events.now().max(1) as f64,
        messages: hosts.posted,
        events: events.taken(),
        virtual_time: seconds(events.now() as f64),
    }
}

/// Every doorbell, message, packet, completion and byte is accounted for, and all is quiet.
fn check(cards: &[Card], fabric: &Fabric, hosts: &Hosts, params: &Params) -> Result<(), String> {
    let equal = |what: &str, counts: &[u64]| match counts.windows(2).all(|pair| pair[0] == pair[1]) {
        true => Ok(()),
        false => Err(format!("{what}: {counts:?}")),
    };
    for card in cards {
        if let Some(left) = card.leftovers() {
            return Err(format!("card {}: {left}", card.id));
        }
        check_card(card, params).map_err(|what| format!("card {}: {what}", card.id))?;
    }
    let (server, clients) = (&cards[0].tally, &cards[1..]);
    let sum = |of: fn(&Card) -> u64| clients.iter().map(of).sum::<u64>();
    equal("doorbells: rung, taken", &[hosts.doorbells, server.doorbells])?;
    let carried_out = sum(|card| card.tally.carried_out);
    equal(
        "messages: posted, announced, fetched, sent, carried out, answered",
        &[hosts.posted, server.announced, server.wqes, server.sent, carried_out, server.acked],
    )?;
    equal(
        "messages: posted, by QP",
        &[hosts.posted, cards[0].acked.iter().map(|psn| u64::from(*psn)).sum()],
    )?;
    equal("completions: wanted, written, seen", &[hosts.doorbells, server.completions, hosts.completions])?;
    equal("packets: sent, received", &[2 * hosts.posted, fabric.sent, fabric.received])?;
    let payload = hosts.posted * u64::from(params.bytes);
    equal("bytes on the wire: wanted, sent, received", &[payload, fabric.sent_bytes, fabric.received_bytes])?;
    let (from, to) = match params.op {
        Op::Write => (cards[0].reads.bytes[channel::DATA], sum(|card| card.writes.bytes[channel::DATA])),
        Op::Read => (sum(|card| card.reads.bytes[channel::DATA]), cards[0].writes.bytes[channel::DATA]),
    };
    equal("bytes of data: wanted, read, written", &[payload, from, to])?;
    let wqes = hosts.posted * u64::from(params.wqe_bytes);
    equal("bytes of WQEs: posted, read", &[wqes, cards[0].reads.bytes[channel::DESCRIPTOR]])?;
    let cqes = hosts.completions * u64::from(params.cqe_bytes);
    equal("bytes of CQEs: seen, written", &[cqes, cards[0].writes.bytes[channel::COMPLETION]])
}

fn check_card(card: &Card, params: &Params) -> Result<(), String> {
    let (tally, counters) = (&card.tally, card.qpc.counters());
    if tally.out_of_order > 0 {
        return Err(format!("{} messages came out of order", tally.out_of_order));
    }
    let asked: u64 = tally.asked.iter().sum();
    let answered = counters.hits + counters.misses + counters.waited + counters.ring_reads;
    if asked != answered {
        return Err(format!("{asked} contexts were asked for, {answered} given"));
    }
    let fetched = counters.misses + counters.prefetched;
    let written = counters.evicted + counters.bypassed;
    if (tally.fetches, tally.write_backs) != (fetched, written) {
        return Err(format!("contexts: {fetched} missed, {} fetched; {written} went", tally.fetches));
    }
    let bytes = |contexts: u64| contexts * u64::from(params.qpc_bytes);
    let wanted = match params.placement {
        Placement::Host => [bytes(fetched), bytes(written), 0],
        Placement::Board => [0, 0, bytes(fetched)],
    };
    let moved = [
        card.reads.bytes[channel::CACHE],
        card.writes.bytes[channel::CACHE],
        card.board.bytes[channel::CACHE],
    ];
    if moved != wanted {
        return Err(format!("bytes of contexts: {wanted:?} wanted, {moved:?} moved"));
    }
    Ok(())
}
