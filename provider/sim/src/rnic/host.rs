//! The server's processes: they post, wait for completions and post again.

use std::collections::VecDeque;

use super::card::Event;
use super::events::{EventQueue, Picos};
use super::params::{Kind, Params};
use crate::Rng;

/// A doorbell: so many WQEs of this QP, the last of them signaled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Batch {
    pub(super) qpn: u32,
    pub(super) wqes: u16,
}

struct Process {
    /// Its QPs, in the order in which it uses them
    qpns: Vec<u32>,
    /// The next of them (latency)
    next: usize,
    /// It is busy until then
    free_at: Picos,
    /// When the message under way was begun (latency)
    began: Picos,
    /// Doorbells on their way to the card
    ringing: VecDeque<Batch>,
}

/// What a run measures: from message `warm` to message `warm + wanted`.
pub(super) struct Measure {
    pub(super) warm: u64,
    pub(super) wanted: u64,
    from: Picos,
    until: Picos,
    /// Latencies (ps) of those measured
    pub(super) latencies: Vec<Picos>,
    done: u64,
    counted: u64,
}

impl Measure {
    /// Whether all that was wanted is measured; nothing new is posted then.
    pub(super) fn is_full(&self) -> bool {
        self.done >= self.warm + self.wanted
    }
    /// Messages a second.
    pub(super) fn rate(&self) -> f64 {
        self.counted as f64 / (self.until.saturating_sub(self.from).max(1) as f64 * 1e-12)
    }
    /// How much of the run is done, 0 to 1.
    pub(super) fn share(&self) -> f64 {
        (self.done as f64 / (self.warm + self.wanted).max(1) as f64).min(1.0)
    }

    fn take(&mut self, messages: u16, now: Picos, latency: Picos) {
        let before = self.done;
        self.done += u64::from(messages);
        if before < self.warm {
            self.from = now;
        } else if before < self.warm + self.wanted {
            self.counted += u64::from(messages);
            self.until = now;
            self.latencies.push(latency);
        }
    }
}

pub(super) struct Hosts {
    processes: Vec<Process>,
    kind: Kind,
    batch: u16,
    qps: u32,
    pub(super) measure: Measure,
    pub(super) doorbells: u64,
    pub(super) posted: u64,
    pub(super) completions: u64,
}

impl Hosts {
    pub(super) fn new(params: &Params) -> Hosts {
        let processes = params.processes.into();
        let mut hosts = Hosts {
            processes: (0..processes).map(|number| Process::new(number, processes, params)).collect(),
            kind: params.kind,
            batch: params.batch,
            qps: params.qps,
            measure: Measure {
                warm: 0,
                wanted: 0,
                from: 0,
                until: 0,
                latencies: Vec::new(),
                done: 0,
                counted: 0,
            },
            doorbells: 0,
            posted: 0,
            completions: 0,
        };
        // a first round brings the caches to their state, and two are measured
        let round: u64 = (0..params.qps).map(|qpn| u64::from(hosts.batch_of(qpn).wqes)).sum();
        let least = match params.kind {
            Kind::Rate => params.least_messages,
            Kind::Latency => params.least_messages / 10,
        };
        hosts.measure.warm = round.max(least / 5);
        hosts.measure.wanted = (2 * round).max(least);
        hosts
    }

    fn batch_of(&self, qpn: u32) -> Batch {
        let wqes = match (self.kind, self.batch) {
            (Kind::Latency, _) => 1,
            (Kind::Rate, 0) => (qpn % 10) as u16 + 1,
            (Kind::Rate, batch) => batch,
        };
        Batch { qpn, wqes }
    }

    /// All processes begin.
    pub(super) fn start(&mut self, events: &mut EventQueue<Event>, params: &Params) {
        for number in 0..self.processes.len() {
            let first = match self.kind {
                Kind::Rate => self.processes[number].qpns.len(),
                Kind::Latency => self.processes[number].qpns.len().min(1),
            };
            for _ in 0..first {
                self.post_next(number, events, params);
            }
        }
    }

    fn post_next(&mut self, number: usize, events: &mut EventQueue<Event>, params: &Params) {
        let process = &mut self.processes[number];
        let qpn = process.qpns[process.next];
        process.next = (process.next + 1) % process.qpns.len();
        self.post(number, qpn, events, params);
    }

    fn post(&mut self, number: usize, qpn: u32, events: &mut EventQueue<Event>, params: &Params) {
        let batch = self.batch_of(qpn);
        let process = &mut self.processes[number];
        process.began = process.free_at.max(events.now());
        process.free_at = process.began + params.post;
        process.ringing.push_back(batch);
        events.push(process.free_at + params.doorbell, Event::Doorbell(number as u16));
        self.doorbells += 1;
        self.posted += u64::from(batch.wqes);
    }

    /// The doorbell of process `number` that reaches the card now.
    pub(super) fn rung(&mut self, number: u16) -> Option<Batch> {
        self.processes.get_mut(usize::from(number))?.ringing.pop_front()
    }

    /// A completion of `qpn` is in memory.
    pub(super) fn completed(&mut self, qpn: u32, events: &mut EventQueue<Event>, params: &Params) {
        self.completions += 1;
        let number = owner(qpn, self.qps, self.processes.len());
        let process = &mut self.processes[number];
        process.free_at = process.free_at.max(events.now()) + params.poll;
        let (known, latency) = (process.free_at, process.free_at - process.began);
        self.measure.take(self.batch_of(qpn).wqes, known, latency);
        if !self.measure.is_full() {
            match self.kind {
                Kind::Rate => self.post(number, qpn, events, params),
                Kind::Latency => self.post_next(number, events, params),
            }
        }
    }
}

/// The process that has QP `qpn`: each has a run of them.
fn owner(qpn: u32, qps: u32, processes: usize) -> usize {
    (u64::from(qpn) * processes as u64 / u64::from(qps)) as usize
}

impl Process {
    fn new(number: usize, processes: usize, params: &Params) -> Process {
        let mut qpns: Vec<u32> =
            (0..params.qps).filter(|qpn| owner(*qpn, params.qps, processes) == number).collect();
        let mut rng = Rng::new(params.seed.wrapping_mul(1000) + number as u64);
        for last in (1..qpns.len()).rev() {
            qpns.swap(last, rng.below(last as u64 + 1) as usize);
        }
        Process { qpns, next: 0, free_at: 0, began: 0, ringing: VecDeque::new() }
    }
}
