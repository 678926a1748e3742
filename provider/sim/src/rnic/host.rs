//! The server's processes: they post, wait for completions and post again.

use std::collections::VecDeque;

use super::calls::Wake;
use super::card::CardEvent;
use super::events::{EventQueue, Picos};
use super::load::Measure;
use super::params::{Params, WorkloadKind};
use crate::Rng;

/// What a WQE asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    /// What `workload.op` says
    Send,
    Recv,
}

/// A doorbell: so many WQEs of this QP, the last of them signaled.
#[derive(Clone, Copy, Debug)]
pub(super) struct DoorbellBatch {
    pub(super) qpn: u32,
    pub(super) wqes: u16,
    pub(super) verb: Verb,
    /// What its messages carry, where that is looked at: their number, from this one on
    pub(super) tag: u32,
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
    ringing: VecDeque<DoorbellBatch>,
}

pub(super) struct Hosts {
    processes: Vec<Process>,
    kind: WorkloadKind,
    batch: u16,
    qps: u32,
    pub(super) measure: Measure,
    pub(super) doorbells: u64,
    pub(super) posted: u64,
    pub(super) completions: u64,
    /// How long the processes posted and polled
    busy: Picos,
}

impl Hosts {
    pub(super) fn new(params: &Params) -> Hosts {
        let processes = params.processes.into();
        let mut hosts = Hosts {
            processes: (0..processes).map(|number| Process::new(number, processes, params)).collect(),
            kind: params.kind,
            batch: params.batch,
            qps: params.qps,
            measure: Measure::default(),
            doorbells: 0,
            posted: 0,
            completions: 0,
            busy: 0,
        };
        let round: u64 = (0..params.qps).map(|qpn| u64::from(hosts.batch_of(qpn).wqes)).sum();
        let least = match params.kind {
            WorkloadKind::Rate => params.least_messages,
            _ => params.least_messages / 10,
        };
        hosts.measure = Measure::new(round, least);
        hosts
    }

    fn batch_of(&self, qpn: u32) -> DoorbellBatch {
        let wqes = match (self.kind, self.batch) {
            (WorkloadKind::Rate, 0) => (qpn % 10) as u16 + 1,
            (WorkloadKind::Rate, batch) => batch,
            _ => 1,
        };
        DoorbellBatch { qpn, wqes, verb: Verb::Send, tag: 0 }
    }

    /// All processes begin.
    pub(super) fn start(&mut self, events: &mut EventQueue<CardEvent>, params: &Params) {
        for number in 0..self.processes.len() {
            let first = match self.kind {
                WorkloadKind::Rate => self.processes[number].qpns.len(),
                _ => self.processes[number].qpns.len().min(1),
            };
            for _ in 0..first {
                self.post_next(number, events, params);
            }
        }
    }

    fn post_next(&mut self, number: usize, events: &mut EventQueue<CardEvent>, params: &Params) {
        let process = &mut self.processes[number];
        let qpn = process.qpns[process.next];
        process.next = (process.next + 1) % process.qpns.len();
        self.post(number, qpn, events, params);
    }

    fn post(&mut self, number: usize, qpn: u32, events: &mut EventQueue<CardEvent>, params: &Params) {
        let batch = self.batch_of(qpn);
        let process = &mut self.processes[number];
        process.began = process.free_at.max(events.now());
        process.free_at = process.began + params.post;
        self.busy += params.post;
        process.ringing.push_back(batch);
        events.push(process.free_at + params.doorbell, Wake::Doorbell(number as u16).into());
        self.doorbells += 1;
        self.posted += u64::from(batch.wqes);
    }

    /// Share of so much time in which the processes were busy.
    pub(super) fn cpu(&self, time: Picos) -> f64 {
        self.busy as f64 / (time.max(1) as f64 * self.processes.len() as f64)
    }

    /// The doorbell of process `number` that reaches the card now.
    pub(super) fn rung(&mut self, number: u16) -> Option<DoorbellBatch> {
        self.processes.get_mut(usize::from(number))?.ringing.pop_front()
    }

    /// A completion of `qpn` is in memory.
    pub(super) fn completed(&mut self, qpn: u32, events: &mut EventQueue<CardEvent>, params: &Params) {
        self.completions += 1;
        let number = owner(qpn, self.qps, self.processes.len());
        let process = &mut self.processes[number];
        process.free_at = process.free_at.max(events.now()) + params.poll;
        self.busy += params.poll;
        let (known, latency) = (process.free_at, process.free_at - process.began);
        self.measure.take(self.batch_of(qpn).wqes, known, latency);
        if !self.measure.is_full() {
            match self.kind {
                WorkloadKind::Rate => self.post(number, qpn, events, params),
                _ => self.post_next(number, events, params),
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
