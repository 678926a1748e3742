//! A model of connections that answer READs in order, on links like those of [`Wire::paper`]: what cards of
//! connected queue pairs cannot do without, and nothing else. Requests take no time on links, and nothing is
//! lost.

use std::collections::VecDeque;

use super::load::Read;
use crate::onerma::Wire;
use crate::rnic::{EventQueue, Picos};

/// Between which READs a card takes turns, packet by packet.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Turns {
    /// Those of different connections: no card can be better
    Connections,
    /// None: one READ is answered after the other
    None,
}

enum Event {
    /// A request is at its responder
    Ask(usize),
    /// A responder's link takes another packet
    Free(usize),
    /// A packet of the READ is at the switch; it is the last one
    Switch(usize, bool),
}

/// Bytes of a packet.
const PACKET: u64 = 4096;
/// Around them on the wire: what RoCEv2 and Ethernet add.
const AROUND: u64 = 82;

/// A READ and the bytes that are still to be sent.
type Left = (usize, u64);

struct Responder {
    /// Queues that take turns, of one requester each
    turn: VecDeque<(usize, VecDeque<Left>)>,
    busy: bool,
}

/// How long each of the READs takes, ns; they are given in the order of their beginnings.
pub(super) fn latencies(reads: &[Read], hosts: usize, turns: Turns) -> Vec<f64> {
    let Wire { gbits, delay, .. } = Wire::paper();
    let time = |bytes: u64| ((bytes + AROUND) as f64 * 8000.0 / gbits) as Picos;
    let mut events = EventQueue::default();
    let mut responders: Vec<Responder> =
        (0..hosts).map(|_| Responder { turn: VecDeque::new(), busy: false }).collect();
    let mut ports = vec![0; hosts];
    let mut out = vec![0.0; reads.len()];
    for (at, read) in reads.iter().enumerate() {
        events.push((read.begun + delay) * 1000, Event::Ask(at));
    }
    while let Some(event) = events.pop() {
        let now = events.now();
        let to = match event {
            Event::Ask(at) => {
                let Responder { turn, .. } = &mut responders[reads[at].target];
                let from = if turns == Turns::Connections { reads[at].client } else { 0 };
                match turn.iter_mut().find(|(one, _)| *one == from) {
                    Some((_, queue)) => queue.push_back((at, reads[at].size)),
                    None => turn.push_back((from, VecDeque::from([(at, reads[at].size)]))),
                }
                reads[at].target
            }
            Event::Free(host) => {
                responders[host].busy = false;
                host
            }
            Event::Switch(at, last) => {
                let (port, bytes) = (&mut ports[reads[at].client], reads[at].size.min(PACKET));
                *port = now.max(*port) + time(bytes);
                if last {
                    out[at] = (*port + delay * 500) as f64 / 1000.0 - reads[at].begun as f64;
                }
                continue;
            }
        };
        let responder = &mut responders[to];
        if responder.busy {
            continue;
        }
        let Some((from, mut queue)) = responder.turn.pop_front() else { continue };
        let Some((at, left)) = queue.pop_front() else { continue };
        let sent = left.min(PACKET);
        responder.busy = true;
        events.push(now + time(sent), Event::Free(to));
        events.push(now + time(sent) + delay * 500, Event::Switch(at, sent == left));
        if sent < left {
            queue.push_front((at, left - sent));
        }
        if !queue.is_empty() {
            responder.turn.push_back((from, queue));
        }
    }
    out
}
