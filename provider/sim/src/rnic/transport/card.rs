//! A card's units as times: each takes one thing after the other.

use std::collections::VecDeque;

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
    /// Of each end whose context is here the number of its last use, and when it is there
    used: Vec<Option<(u64, Picos)>>,
    count: usize,
    /// Uses and whose, the oldest first; those that were not the last of their end's count no more
    by_use: VecDeque<(u64, u32)>,
    uses: u64,
}

impl Contexts {
    fn new(entries: u32) -> Contexts {
        let entries = entries.max(1) as usize;
        Contexts { entries, used: Vec::new(), count: 0, by_use: VecDeque::new(), uses: 0 }
    }

    /// When the context of an end is there, if it is here or on its way.
    fn get(&self, end: u32) -> Option<Picos> {
        self.used.get(end as usize)?.map(|(_, there)| there)
    }

    /// It is used, and there from then on.
    fn note_use(&mut self, end: u32, there: Picos) {
        self.uses += 1;
        let index = end as usize;
        if self.used.len() <= index {
            self.used.resize(index + 1, None);
        }
        self.count += usize::from(self.used[index].replace((self.uses, there)).is_none());
        self.by_use.push_back((self.uses, end));
        if self.by_use.len() > 4 * self.count + 64 {
            let used = &self.used;
            self.by_use.retain(|(number, end)| is_last(used, *number, *end));
        }
    }

    /// There is room for one more; whether one had to go.
    fn make_room(&mut self) -> bool {
        if self.count < self.entries {
            return false;
        }
        while let Some((number, end)) = self.by_use.pop_front() {
            if is_last(&self.used, number, end) {
                self.used[end as usize] = None;
                self.count -= 1;
                return true;
            }
        }
        false
    }
}

/// Whether an end has not been used since.
fn is_last(used: &[Option<(u64, Picos)>], number: u64, end: u32) -> bool {
    used[end as usize].is_some_and(|(last, _)| last == number)
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
        Units {
            reads: Engine::default(),
            writes: Engine::default(),
            contexts: Contexts::new(entries),
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
        let there = if let Some(there) = contexts.get(end) {
            *hits += 1;
            there.max(asked)
        } else {
            *misses += 1;
            if contexts.make_room() {
                writes.take(asked, params.qpc_bytes, &params.bus_write);
            }
            reads.take(asked, params.qpc_bytes, &params.bus_read) + params.cycle
        };
        contexts.note_use(end, there);
        there
    }
}
