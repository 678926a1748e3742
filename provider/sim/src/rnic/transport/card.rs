//! A card's units as times: each takes one thing after the other.

use std::collections::{BTreeMap, HashMap, VecDeque};

use starverbs_core::qpc::Policy;

use super::frame::Flight;
use crate::rnic::events::Picos;
use crate::rnic::host::DoorbellBatch;
use crate::rnic::params::{Lane, Params};

/// A DMA engine: transfers in the order in which they are asked for share its latency, not its bandwidth.
#[derive(Clone, Debug, Default)]
pub(super) struct Engine {
    free_at: Picos,
    /// When the last transfer is done
    pub(super) done: Picos,
    /// How long it was busy
    pub(super) busy: Picos,
}

impl Engine {
    /// When a transfer that may begin at `ready` is done.
    pub(super) fn take(&mut self, ready: Picos, bytes: u32, lane: &Lane) -> Picos {
        let busy = lane.busy(bytes);
        self.free_at = self.free_at.max(ready) + busy;
        self.busy += busy;
        self.done = self.free_at + lane.latency;
        self.done
    }
}

/// The contexts that a card has: the least recently used goes.
#[derive(Clone, Debug)]
struct Contexts {
    entries: usize,
    /// When each was used, and when it is there
    used: HashMap<u32, (u64, Picos)>,
    by_use: BTreeMap<u64, u32>,
    uses: u64,
}

/// What waits for a context.
pub(super) enum ContextWaiter {
    Doorbell(DoorbellBatch),
    Packet(Box<Flight>),
}

/// A context that is given.
pub(super) struct GivenContext {
    pub(super) job: ContextWaiter,
    /// When the context is there
    pub(super) there: Picos,
    /// When the next can be asked for
    pub(super) next: Picos,
}

/// Units of a card.
pub(super) struct Units {
    pub(super) reads: Engine,
    pub(super) writes: Engine,
    contexts: Contexts,
    /// What waits for contexts, by channel: doorbells, packets
    asking: [VecDeque<(u32, ContextWaiter)>; 2],
    /// Which channel has its turn
    turn: usize,
    /// The unit that gives contexts is busy
    pub(super) serving: bool,
    /// When the wire has taken the last packet
    pub(super) out_free_at: Picos,
    in_free_at: Picos,
    /// Packets that wait for their contexts
    pub(super) waiting: u32,
    pub(super) hits: u64,
    pub(super) misses: u64,
}

impl Units {
    pub(super) fn new(entries: u32) -> Units {
        let contexts = Contexts {
            entries: entries.max(1) as usize,
            used: HashMap::new(),
            by_use: BTreeMap::new(),
            uses: 0,
        };
        Units {
            reads: Engine::default(),
            writes: Engine::default(),
            contexts,
            asking: Default::default(),
            turn: 0,
            serving: false,
            out_free_at: 0,
            in_free_at: 0,
            waiting: 0,
            hits: 0,
            misses: 0,
        }
    }

    /// The input takes one packet a cycle.
    pub(super) fn input(&mut self, now: Picos, params: &Params) -> Picos {
        self.in_free_at = self.in_free_at.max(now) + params.cycle;
        self.in_free_at
    }

    /// A doorbell or a packet waits for the context of an end.
    pub(super) fn ask(&mut self, end: u32, job: ContextWaiter) {
        let channel = usize::from(matches!(job, ContextWaiter::Packet(_)));
        self.asking[channel].push_back((end, job));
    }

    /// Gives the next context, if the unit is free: each channel in its turn.
    pub(super) fn serve(&mut self, now: Picos, params: &Params) -> Option<GivenContext> {
        if self.serving {
            return None;
        }
        let channel = (0..2).map(|step| (self.turn + step) % 2).find(|at| !self.asking[*at].is_empty())?;
        let (end, job) = self.asking[channel].pop_front()?;
        (self.turn, self.serving) = (channel + 1, true);
        let asked = now + params.cycle;
        let there = self.context(asked, end, params);
        let next = if params.policy == Policy::Fcfs { there } else { asked };
        Some(GivenContext { job, there, next })
    }

    /// When the context of an end, asked for at `asked`, is there.
    fn context(&mut self, asked: Picos, end: u32, params: &Params) -> Picos {
        let Units { contexts, reads, writes, hits, misses, .. } = self;
        contexts.uses += 1;
        let use_number = contexts.uses;
        let there = if let Some((before, there)) = contexts.used.get(&end).copied() {
            *hits += 1;
            contexts.by_use.remove(&before);
            there.max(asked)
        } else {
            *misses += 1;
            if contexts.used.len() == contexts.entries
                && let Some((_, oldest)) = contexts.by_use.pop_first()
            {
                contexts.used.remove(&oldest);
                writes.take(asked, params.qpc_bytes, &params.bus_write);
            }
            reads.take(asked, params.qpc_bytes, &params.bus_read) + params.cycle
        };
        contexts.used.insert(end, (use_number, there));
        contexts.by_use.insert(use_number, end);
        there
    }
}
