//! What must hold at the end of a run: all is quiet, and every doorbell, message, packet, completion and byte
//! is accounted for.

use starverbs_core::qpc::ContextPlacement;

use super::calls::CallsTally;
use super::card::Rnic;
use super::card::channel::{CACHE, COMPLETION, DATA, DESCRIPTOR};
use super::fabric::Fabric;
use super::host::Hosts;
use super::load::Load;
use super::params::{Params, RnicOp};

/// Every doorbell, message, packet, completion and byte is accounted for, and all is quiet.
pub(super) fn check(cards: &[Rnic], fabric: &Fabric, hosts: &Load, params: &Params) -> Result<(), String> {
    for card in cards {
        if let Some(left) = card.leftovers() {
            return Err(format!("card {}: {left}", card.id));
        }
        check_card(card, params).map_err(|what| format!("card {}: {what}", card.id))?;
    }
    match hosts {
        Load::Posts(hosts) => check_posts(cards, fabric, hosts, params),
        Load::Calls(calls) => check_calls(cards, fabric, &calls.tally, params),
    }
}

fn equal(what: &str, counts: &[u64]) -> Result<(), String> {
    match counts.windows(2).all(|pair| pair[0] == pair[1]) {
        true => Ok(()),
        false => Err(format!("{what}: {counts:?}")),
    }
}

fn check_posts(cards: &[Rnic], fabric: &Fabric, hosts: &Hosts, params: &Params) -> Result<(), String> {
    let (server, clients) = (&cards[0].tally, &cards[1..]);
    let sum = |of: fn(&Rnic) -> u64| clients.iter().map(of).sum::<u64>();
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
        RnicOp::Write => (cards[0].reads.bytes[DATA], sum(|card| card.writes.bytes[DATA])),
        _ => (sum(|card| card.reads.bytes[DATA]), cards[0].writes.bytes[DATA]),
    };
    equal("bytes of data: wanted, read, written", &[payload, from, to])?;
    let wqes = hosts.posted * u64::from(params.wqe_bytes);
    equal("bytes of WQEs: posted, read", &[wqes, cards[0].reads.bytes[DESCRIPTOR]])?;
    let cqes = hosts.completions * u64::from(params.cqe_bytes);
    equal("bytes of CQEs: seen, written", &[cqes, cards[0].writes.bytes[COMPLETION]])
}

/// Of `n` calls: 3n SENDs to the server, n back; and what that takes of packets, WQEs, CQEs and bytes.
fn check_calls(cards: &[Rnic], fabric: &Fabric, tally: &CallsTally, params: &Params) -> Result<(), String> {
    let (server, clients) = (&cards[0], &cards[1..]);
    let sum = |of: fn(&Rnic) -> u64| clients.iter().map(of).sum::<u64>();
    let (n, sends) = (tally.calls, u64::from(params.sends));
    let up = n * sends;
    let messages = up + n;
    equal("calls: begun, answered by the server, answers seen", &[n, tally.replies, tally.answered])?;
    equal("requests: sent, seen", &[up, tally.requests])?;
    equal("messages: posted, counted", &[messages, tally.messages()])?;
    equal("server's completions of SENDs: wanted, seen", &[n, tally.server_sent])?;
    equal("clients' completions of SENDs: wanted, seen", &[n, tally.client_sent])?;
    let doorbells = sum(|card| card.tally.doorbells);
    equal("clients' doorbells: rung, taken", &[n, tally.client_doorbells, doorbells])?;
    let rung = tally.server_doorbells;
    equal("server's doorbells: rung, taken", &[n, rung, server.tally.doorbells])?;
    equal("server's WQEs: posted, announced, fetched", &[n, server.tally.announced, server.tally.wqes])?;
    let fetched = sum(|card| card.tally.wqes);
    equal("clients' WQEs: posted, announced, fetched", &[up, sum(|card| card.tally.announced), fetched])?;
    equal(
        "bytes of the server's WQEs",
        &[
            n * u64::from(params.wqe_bytes) + up * u64::from(params.recv_wqe_bytes),
            server.reads.bytes[DESCRIPTOR],
        ],
    )?;
    let bytes = sum(|card| card.reads.bytes[DESCRIPTOR]);
    let wqes = up * u64::from(params.wqe_bytes) + n * u64::from(params.recv_wqe_bytes);
    equal("bytes of the clients' WQEs", &[wqes, bytes])?;
    equal(
        "clients' requests: sent, answered",
        &[up, sum(|card| card.tally.sent), sum(|card| card.tally.acked)],
    )?;
    // a message and its answer
    let packets = 2 * messages;
    equal("packets: wanted, sent, received", &[packets, fabric.sent, fabric.received])?;
    let payload = |messages: u64| messages * u64::from(params.bytes);
    let all = payload(messages);
    equal("bytes on the wire: wanted, sent, received", &[all, fabric.sent_bytes, fabric.received_bytes])?;
    let (data_in, data_out) = (sum(|card| card.writes.bytes[DATA]), sum(|card| card.reads.bytes[DATA]));
    equal("bytes up: wanted, read, written", &[payload(up), data_out, server.writes.bytes[DATA]])?;
    equal("bytes down: wanted, read, written", &[payload(n), server.reads.bytes[DATA], data_in])?;
    let cqe_bytes = u64::from(params.cqe_bytes);
    // one a message received, one a doorbell of SENDs
    equal("bytes of the server's CQEs", &[messages * cqe_bytes, server.writes.bytes[COMPLETION]])?;
    let client_cqes = sum(|card| card.writes.bytes[COMPLETION]);
    equal("bytes of the clients' CQEs", &[2 * n * cqe_bytes, client_cqes])
}

fn check_card(card: &Rnic, params: &Params) -> Result<(), String> {
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
        ContextPlacement::Host => [bytes(fetched), bytes(written - tally.clean), 0],
        ContextPlacement::Board => [0, 0, bytes(fetched)],
    };
    let moved = [card.reads.bytes[CACHE], card.writes.bytes[CACHE], card.board.bytes[CACHE]];
    if moved != wanted {
        return Err(format!("bytes of contexts: {wanted:?} wanted, {moved:?} moved"));
    }
    Ok(())
}
