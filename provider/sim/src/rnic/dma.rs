//! A DMA engine: channels in turn, a latency that transfers share, and a bandwidth that they do not.

use std::collections::VecDeque;

use super::events::Picos;
use super::params::Lane;

struct Transfer<T> {
    ready: Picos,
    bytes: u32,
    what: T,
}

/// One engine: reads or writes.
pub(super) struct DmaEngine<T, const CHANNELS: usize> {
    waiting: [VecDeque<Transfer<T>>; CHANNELS],
    /// Done at, and what: in order
    under_way: VecDeque<(Picos, T)>,
    turn: usize,
    free_at: Picos,
    /// Payload bytes taken on, by channel
    pub(super) bytes: [u64; CHANNELS],
    /// How long it was busy
    pub(super) busy: Picos,
}

/// What one step of the engine did.
pub(super) struct DmaStep {
    /// When the transfer that began is done
    pub(super) done: Option<Picos>,
    /// When to look again
    pub(super) again: Option<Picos>,
}

impl<T, const CHANNELS: usize> DmaEngine<T, CHANNELS> {
    pub(super) fn new() -> Self {
        DmaEngine {
            waiting: std::array::from_fn(|_| VecDeque::new()),
            under_way: VecDeque::new(),
            turn: 0,
            free_at: 0,
            bytes: [0; CHANNELS],
            busy: 0,
        }
    }

    /// Asks for a transfer, which may begin at `ready`.
    pub(super) fn ask(&mut self, channel: usize, ready: Picos, bytes: u32, what: T) {
        self.bytes[channel] += u64::from(bytes);
        self.waiting[channel].push_back(Transfer { ready, bytes, what });
    }

    /// Begins the next transfer, if it may.
    pub(super) fn step(&mut self, now: Picos, lane: &Lane) -> DmaStep {
        if now < self.free_at {
            return DmaStep { done: None, again: self.next() };
        }
        for step in 0..CHANNELS {
            let channel = (self.turn + step) % CHANNELS;
            if self.waiting[channel].front().is_none_or(|transfer| transfer.ready > now) {
                continue;
            }
            let Some(transfer) = self.waiting[channel].pop_front() else { continue };
            self.turn = (channel + 1) % CHANNELS;
            let busy = lane.busy(transfer.bytes);
            self.busy += busy;
            self.free_at = now + busy;
            let done = self.free_at + lane.latency;
            self.under_way.push_back((done, transfer.what));
            return DmaStep { done: Some(done), again: self.next() };
        }
        DmaStep { done: None, again: self.next() }
    }

    fn next(&self) -> Option<Picos> {
        let ready = self.waiting.iter().filter_map(|fifo| fifo.front()).map(|transfer| transfer.ready).min();
        ready.map(|ready| ready.max(self.free_at))
    }

    /// The transfer that is done now.
    pub(super) fn done(&mut self) -> Option<T> {
        self.under_way.pop_front().map(|(_, what)| what)
    }

    pub(super) fn is_idle(&self) -> bool {
        self.under_way.is_empty() && self.waiting.iter().all(VecDeque::is_empty)
    }
}
