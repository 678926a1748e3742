//! The QPC management module: channel arbiter, request handling unit and pending handling unit.

use alloc::collections::VecDeque;

use thiserror::Error;

use super::cache::Cache;
use super::pending::{Element, PendingFifo};
use super::record::RecordTable;
use super::requester::RequesterUnit;
use super::sq::{SendRing, SendRings};
use super::{CacheConfig, CachedContext, ConfigError, Index, Policy, RequestChannel};
use crate::error::NicError;
use crate::types::Qpn;

/// What was counted since the module was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpcCounters {
    /// Requests answered from the cache at once
    pub hits: u64,
    /// Requests whose context was not there
    pub misses: u64,
    /// Requests that waited behind others of their QP
    pub waited: u64,
    /// Requests answered from the SQ address table
    pub ring_reads: u64,
    /// Contexts fetched ahead
    pub prefetched: u64,
    /// Contexts not fetched ahead, as too many fetches were under way
    pub prefetch_dropped: u64,
    /// Contexts that left the cache; each is written to memory
    pub evicted: u64,
    /// Contexts that found all lines waited for, and went straight back to memory
    pub bypassed: u64,
    /// Pending requests that were looked at
    pub checked: u64,
    /// Most requests pending at once
    pub pending_peak: u64,
}

/// What a caller did wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum QpcError {
    /// A QPN beyond `Config::qps`
    #[error("there is no QP {0}")]
    UnknownQp(Qpn),
    /// A number beyond `Config::ooo_cap`
    #[error("a request has number {0}, which is not below the out-of-order capacity")]
    BadIndex(Index),
    /// A context that was not the next one asked for
    #[error("the context of QP {0} is not the next one asked for")]
    OutOfOrder(Qpn),
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitResponse<C> {
    /// Who asked
    pub channel: RequestChannel,
    /// Under which number
    pub index: Index,
    /// Of which QP
    pub qpn: Qpn,
    /// Where its SQ lies and what to read next (answers to [`RequestChannel::Sq`])
    pub ring: SendRing,
    /// The context as it was before this access; `None` where the SQ address table answered
    pub context: Option<C>,
}

/// The module. `C` is the context that it keeps.
pub struct Qpc<C> {
    config: CacheConfig,
    cache: Cache<C>,
    rings: SendRings,
    records: RecordTable,
    pending: PendingFifo,
    /// Of each channel, what was asked and not yet taken up
    requests: [VecDeque<Element>; RequestChannel::COUNT],
    /// Whose turn it is among the channels
    turn: usize,
    /// FCFS: the request that all others wait for
    blocked: Option<Element>,
    /// Numbers for prefetches; their records take the addresses of the Sq channel, whose own requests need
    /// none
    ahead: RequesterUnit<()>,
    /// Contexts asked for, in order
    asked: VecDeque<Qpn>,
    /// Contexts that came, and are not yet in the cache
    came: VecDeque<C>,
    fetches: VecDeque<Qpn>,
    write_backs: VecDeque<(Qpn, C)>,
    responses: VecDeque<UnitResponse<C>>,
    counters: QpcCounters,
}

impl<C: CachedContext> Qpc<C> {
    /// An empty module.
    pub fn new(config: CacheConfig) -> Result<Self, ConfigError> {
        config.check()?;
        let slots = config.slots();
        let asking = || VecDeque::with_capacity(config.ooo_cap.into());
        Ok(Qpc {
            cache: Cache::new(config.entries, config.qps),
            rings: SendRings::new(if config.is_split() { config.qps } else { 0 }, config.ring_wqes),
            records: RecordTable::new(slots, config.qps),
            pending: PendingFifo::new(slots),
            requests: [asking(), asking(), asking()],
            turn: 0,
            blocked: None,
            ahead: RequesterUnit::new(config.ooo_cap),
            asked: VecDeque::with_capacity(slots),
            came: VecDeque::with_capacity(slots),
            fetches: VecDeque::with_capacity(slots),
            write_backs: VecDeque::with_capacity(slots),
            responses: VecDeque::with_capacity(slots),
            counters: QpcCounters::default(),
            config,
        })
    }

    /// There are as many as `qps` QPs from now on, if there were fewer. `Exhausted`: no memory, or more than
    /// 2^24.
    pub fn grow(&mut self, qps: u32) -> Result<(), NicError> {
        let config = CacheConfig { qps: qps.max(self.config.qps), ..self.config };
        config.check().map_err(|_| NicError::Exhausted)?;
        self.cache.grow(config.qps)?;
        self.records.grow(config.qps)?;
        self.rings.grow(if config.is_split() { config.qps } else { 0 })?;
        self.config = config;
        Ok(())
    }

    /// A QP is made: its SQ lies there. Its context is in memory from now on.
    pub fn set_send_ring(&mut self, qpn: Qpn, ring: SendRing) -> Result<(), QpcError> {
        self.known(qpn)?;
        self.rings.set(qpn, ring);
        Ok(())
    }

    /// A requester asks for the context of `qpn`, under a number that none of its requests in flight has.
    /// `wqes`: what the doorbell announces ([`RequestChannel::Sq`]).
    pub fn handle_request(
        &mut self,
        channel: RequestChannel,
        index: Index,
        qpn: Qpn,
        wqes: u16,
    ) -> Result<(), QpcError> {
        self.known(qpn)?;
        if u16::from(index) >= self.config.ooo_cap {
            return Err(QpcError::BadIndex(index));
        }
        let element = Element { qpn, channel, index, wqes, fetching: false, prefetch: false };
        self.requests[channel as usize].push_back(element);
        Ok(())
    }

    /// The context of `qpn` came from memory. They come in the order in which [`Qpc::poll_fetch`] asked for
    /// them.
    pub fn handle_fetched(&mut self, qpn: Qpn, context: C) -> Result<(), QpcError> {
        if self.asked.get(self.came.len()) != Some(&qpn) {
            return Err(QpcError::OutOfOrder(qpn));
        }
        self.came.push_back(context);
        Ok(())
    }

    /// One clock cycle: each unit handles at most one request.
    pub fn cycle(&mut self) {
        if self.config.policy == Policy::Fcfs {
            self.cycle_in_order();
            return;
        }
        let stalled = self.handle_pending();
        if !stalled && let Some(element) = self.arbitrate() {
            self.handle_one(element);
        }
    }

    /// Whether cycles change nothing until something is handed in.
    pub fn is_idle(&self) -> bool {
        let asked = self.requests.iter().any(|requests| !requests.is_empty());
        self.came.is_empty() && (self.blocked.is_some() || !asked) && !self.records.any_returned()
    }

    /// The next context to read from memory.
    pub fn poll_fetch(&mut self) -> Option<Qpn> {
        self.fetches.pop_front()
    }

    /// The next context to write to memory.
    pub fn poll_write_back(&mut self) -> Option<(Qpn, C)> {
        self.write_backs.pop_front()
    }

    /// The next answer.
    pub fn poll_response(&mut self) -> Option<UnitResponse<C>> {
        self.responses.pop_front()
    }

    /// What was set.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// What was counted.
    pub fn counters(&self) -> &QpcCounters {
        &self.counters
    }

    /// Requests that are pending now.
    pub fn pending(&self) -> usize {
        self.pending.len() + usize::from(self.blocked.is_some())
    }

    /// Whether requests of `qpn` are pending.
    pub fn is_waited_for(&self, qpn: Qpn) -> bool {
        self.records.contains(qpn)
    }

    fn known(&self, qpn: Qpn) -> Result<(), QpcError> {
        if qpn < self.config.qps { Ok(()) } else { Err(QpcError::UnknownQp(qpn)) }
    }

    /// Formula 1.
    fn address(&self, channel: RequestChannel, index: Index) -> usize {
        channel as usize * usize::from(self.config.ooo_cap) + usize::from(index)
    }

    /// The channels in turn.
    fn arbitrate(&mut self) -> Option<Element> {
        for step in 0..RequestChannel::COUNT {
            let channel = (self.turn + step) % RequestChannel::COUNT;
            if let Some(element) = self.requests[channel].pop_front() {
                self.turn = (channel + 1) % RequestChannel::COUNT;
                return Some(element);
            }
        }
        None
    }

    /// The request handling unit (algorithm 1).
    fn handle_one(&mut self, element: Element) {
        let qpn = element.qpn;
        if element.channel == RequestChannel::Sq && self.config.is_split() {
            self.read_ring(&element);
        } else if self.records.contains(qpn) {
            self.counters.waited += 1;
            let address = self.address(element.channel, element.index);
            self.push_pending(element);
            self.records.join(address, qpn);
        } else if self.cache.contains(qpn) {
            self.counters.hits += 1;
            self.answer_from_cache(&element);
        } else {
            self.counters.misses += 1;
            self.fetch(element);
        }
    }

    /// The SQ address table answers, and the context is fetched ahead (section 4.5).
    fn read_ring(&mut self, element: &Element) {
        self.counters.ring_reads += 1;
        let ring = self.rings.read(element.qpn, element.wqes);
        let Element { channel, index, qpn, .. } = *element;
        self.responses.push_back(UnitResponse { channel, index, qpn, ring, context: None });
        // one that is there will be needed soon: it becomes the newest used
        if self.records.contains(qpn) || self.cache.touch(qpn).is_some() {
            return;
        }
        match self.ahead.begin(()) {
            Ok(index) => {
                self.counters.prefetched += 1;
                self.fetch(Element { index, prefetch: true, ..*element });
            }
            Err(()) => self.counters.prefetch_dropped += 1,
        }
    }

    fn fetch(&mut self, element: Element) {
        let address = self.address(element.channel, element.index);
        self.records.open(address, element.qpn);
        self.ask(element.qpn);
        self.push_pending(Element { fetching: true, ..element });
    }

    fn ask(&mut self, qpn: Qpn) {
        self.asked.push_back(qpn);
        self.fetches.push_back(qpn);
    }

    fn push_pending(&mut self, element: Element) {
        self.pending.push_request(element);
        self.counters.pending_peak = self.counters.pending_peak.max(self.pending.len() as u64);
    }

    /// The pending handling unit (algorithm 2, with `pnd_cnt` counted down only for what is served). True: a
    /// context that others wait for finds each line waited for, and nothing new may begin until one is
    /// free.
    fn handle_pending(&mut self) -> bool {
        let mut stalled = false;
        if !self.came.is_empty() {
            match self.pending.peek_return() {
                Some(element) if element.fetching => {
                    let qpn = element.qpn;
                    let others = self.records.get(qpn).is_some_and(|record| record.count > 1);
                    stalled = others && !self.cache.has_room(|qpn| self.records.contains(qpn));
                    if !stalled {
                        self.take_fetched();
                        return false;
                    }
                }
                // nothing is before it, so that its context came already, and stayed
                Some(_) => {
                    if let Some(element) = self.pending.pop_return() {
                        self.serve_waiter(&element);
                    }
                    return false;
                }
                None => {}
            }
        }
        if self.records.any_returned() {
            self.check_next();
        }
        stalled
    }

    /// The oldest fetch came.
    fn take_fetched(&mut self) {
        let (Some(element), Some(_), Some(mut context)) =
            (self.pending.pop_return(), self.asked.pop_front(), self.came.pop_front())
        else {
            return;
        };
        self.records.serve(element.qpn);
        if element.prefetch {
            self.ahead.finish(element.index);
        } else {
            self.answer(&element, &mut context);
        }
        self.put_in_cache(element.qpn, context);
    }

    fn put_in_cache(&mut self, qpn: Qpn, context: C) {
        if let Some((out, context)) = self.cache.insert(qpn, context, |qpn| self.records.contains(qpn)) {
            *(if out == qpn { &mut self.counters.bypassed } else { &mut self.counters.evicted }) += 1;
            self.write_backs.push_back((out, context));
        }
    }

    /// Looks at one that waits for others of its QP.
    ///
    /// The paper serves it when its context is there. One of its QP that was put back earlier in this pass,
    /// when the context was not yet there, would then be overtaken; so it also asks whether there was
    /// one.
    fn check_next(&mut self) {
        let Some(element) = self.pending.pop_check() else { return };
        self.counters.checked += 1;
        let pass = self.pending.pass();
        let ready = !element.fetching
            && self.records.get(element.qpn).is_some_and(|r| r.returned && r.put_back_in != Some(pass));
        if ready {
            self.serve_waiter(&element);
        } else {
            if let Some(record) = self.records.get_mut(element.qpn) {
                record.put_back_in = Some(pass);
            }
            self.pending.push_checked(element);
        }
    }

    fn serve_waiter(&mut self, element: &Element) {
        self.answer_from_cache(element);
        self.records.serve(element.qpn);
    }

    fn answer_from_cache(&mut self, element: &Element) {
        if let Some(context) = self.cache.touch(element.qpn) {
            self.responses.push_back(respond(element, context));
        }
    }

    fn answer(&mut self, element: &Element, context: &mut C) {
        self.responses.push_back(respond(element, context));
    }

    /// First come, first served (section 3): one request, and nothing else until it is answered.
    fn cycle_in_order(&mut self) {
        if let Some(element) = self.blocked {
            if let Some(mut context) = self.came.pop_front() {
                self.asked.pop_front();
                self.blocked = None;
                self.answer(&element, &mut context);
                self.put_in_cache(element.qpn, context);
            }
        } else if let Some(element) = self.arbitrate() {
            if self.cache.contains(element.qpn) {
                self.counters.hits += 1;
                self.answer_from_cache(&element);
            } else {
                self.counters.misses += 1;
                self.ask(element.qpn);
                self.blocked = Some(element);
            }
        }
    }
}

/// The answer to a request, and what it changes in the context.
fn respond<C: CachedContext>(element: &Element, context: &mut C) -> UnitResponse<C> {
    let Element { channel, index, qpn, wqes, .. } = *element;
    let before = context.clone();
    context.access(channel, wqes);
    UnitResponse { channel, index, qpn, ring: before.send_ring(), context: Some(before) }
}
