//! A card with room for few QP contexts: what waits for a context that is not there.
//!
//! Set (`NicConfig::contexts`), the software card uses a QP only as hardware does that keeps its contexts
//! with [`Qpc`]: a doorbell asks where the SQ lies (Sq), a QP's turn to send asks for its context (Tx), and
//! so does an arriving request (Rx; answers to requests find what they need in the window, as in the paper's
//! published code). The contexts themselves are the card's QPs and never move; what is kept here is who may
//! use one when.
//!
//! Owns that order and its time: a context comes `miss` after it was asked for, WQEs `fetch` after their
//! doorbell was. It has a clock of its own, which goes from event to event and never past the card's `now`,
//! so that a card that is run late has done by then what it would have done meanwhile. It must not know
//! packets and what a turn does.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::sched::Sched;
use super::timers::TimerId;
use crate::counters::Counters;
use crate::env::ContextMove;
use crate::error::NicError;
use crate::qpc::{
    CacheConfig, CachedContext, ContextPlacement, Policy, Qpc, RequestChannel, RequesterUnit, SendRing,
};
use crate::room::Room;
use crate::types::{FrameMeta, Nanos, QpState, Qpn};

/// Requests in flight of each channel (section 5.3: 16 is enough).
const OOO_CAP: u16 = 16;
/// Longest frame that waits: BTH, XRCETH, RETH, immediate data and 4096 bytes.
const FRAME: usize = 4096 + 64;
/// Whose timer it is that has the card looked at: no QP's, as there is no block 0.
const NOBODY: Qpn = 0;

/// How few contexts a card has room for, and what that costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextCache {
    /// Contexts in the cache, at least one
    pub entries: u32,
    /// How requests for contexts are served
    pub policy: Policy,
    /// Time until a context comes that is not in the cache, ns
    pub miss: Nanos,
    /// Time until the WQEs of a doorbell come, ns: they are in host memory, too
    pub fetch: Nanos,
}

/// A context without contents: the QP that it stands for lies where it always lies.
#[derive(Clone, Debug)]
struct Token;

impl CachedContext for Token {
    fn access(&mut self, _: RequestChannel, _: u16) {}
    fn send_ring(&self) -> SendRing {
        SendRing::default()
    }
}

/// A QP that is to be used, as far as its context's availability depends on it.
#[derive(Clone, Copy)]
pub(super) struct ContextAsker {
    pub(super) qpn: Qpn,
    pub(super) timer: TimerId,
    pub(super) state: QpState,
    /// Whether its SQ holds WQEs that were never sent
    pub(super) unsent: bool,
}

impl ContextAsker {
    /// Whether it executes WQEs. In other states they are flushed, which needs no context.
    fn sends(&self) -> bool {
        matches!(self.state, QpState::Rts | QpState::Sqd)
    }

    /// Whether it takes requests. What comes in other states waits for no context: what is refused now must
    /// not be accepted later.
    fn receives(&self) -> bool {
        !matches!(self.state, QpState::Reset | QpState::Init | QpState::Err)
    }
}

/// Whether a QP's context is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(super) enum ContextAccess {
    /// It is, or this use needs none: the caller goes on at once
    Available,
    /// It was asked for: [`Contexts::poll_due`] or [`Contexts::poll_turn`] gives what waits for it
    Waits,
}

/// Who asked for a context, and when. QPs are known here by the numbers of their timers, which are small.
#[derive(Clone, Copy)]
struct Ask {
    qpn: Qpn,
    place: u32,
    /// The incarnation of that place
    incarnation: u32,
    since: Nanos,
}

/// What handles a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Receiver {
    /// The card: a RoCEv2 frame
    Card,
    /// The QP's engine
    Engine,
}

/// A frame that waits for its QP's context.
struct WaitingFrame {
    ask: Ask,
    to: Receiver,
    meta: FrameMeta,
    bytes: Vec<u8>,
}

/// What the card does next.
pub(super) enum NextStep {
    /// The WQEs of a QP are there
    Doorbell(Qpn),
    /// A request to this QP may be handled; [`Contexts::give_back`] takes its bytes
    Frame(Qpn, Receiver, FrameMeta, Vec<u8>),
}

/// What waits of a QP, each at most once.
#[derive(Clone, Copy, Default)]
struct Waits {
    /// Counts the QPs that ended here or began anew: what they had in flight means nothing to the next
    incarnation: u32,
    /// A doorbell, from its ringing until the SQ's address is known: further ones have no effect
    doorbell: bool,
    /// Its WQEs
    fetch: bool,
    /// A doorbell that rang while WQEs were fetched
    again: bool,
    /// Its turn to send
    turn: bool,
    /// Whose place it is, or was
    qpn: Qpn,
}

/// The module, and what waits for it.
pub(crate) struct Contexts {
    qpc: Qpc<Token>,
    cache: ContextCache,
    /// The time up to which everything has happened
    clock: Nanos,
    timer: Option<TimerId>,
    waits: Vec<Waits>,
    doorbells: RequesterUnit<Ask>,
    turns: RequesterUnit<Ask>,
    frames: RequesterUnit<WaitingFrame>,
    /// Behind those that have a number of a requester
    more_doorbells: VecDeque<Ask>,
    more_turns: VecDeque<Ask>,
    /// Contexts on their way, and WQEs: in the order in which they come, as all take the same time
    fetches: VecDeque<(Nanos, Qpn)>,
    wqes: VecDeque<(Nanos, Ask)>,
    due: VecDeque<NextStep>,
    due_turns: VecDeque<Ask>,
    /// Contexts that began to move
    moves: VecDeque<(Qpn, ContextMove)>,
    /// Room for frames that nothing waits in
    spare: Vec<Vec<u8>>,
    waited: Nanos,
    /// Frames that waited while their QP ended or began anew, not yet counted
    stale: u64,
}

impl Contexts {
    /// Without QPs. A cache has one entry at least.
    pub(super) fn new(cache: ContextCache) -> Option<Self> {
        let config = CacheConfig {
            policy: cache.policy,
            placement: ContextPlacement::Host,
            entries: cache.entries.max(1),
            ooo_cap: OOO_CAP,
            qps: 1,
            ring_wqes: u16::MAX,
        };
        let slots = usize::from(OOO_CAP);
        Some(Contexts {
            qpc: Qpc::new(config).ok()?,
            cache,
            clock: 0,
            timer: None,
            waits: Vec::new(),
            doorbells: RequesterUnit::new(OOO_CAP),
            turns: RequesterUnit::new(OOO_CAP),
            frames: RequesterUnit::new(OOO_CAP),
            more_doorbells: VecDeque::new(),
            more_turns: VecDeque::new(),
            fetches: VecDeque::with_capacity(RequestChannel::COUNT * slots),
            wqes: VecDeque::new(),
            due: VecDeque::new(),
            due_turns: VecDeque::new(),
            moves: VecDeque::new(),
            spare: (0..slots).map(|_| Vec::with_capacity(FRAME)).collect(),
            waited: 0,
            stale: 0,
        })
    }

    /// A QP is made, with this timer. `Exhausted`: no memory.
    pub(super) fn join(&mut self, sched: &mut Sched, timer: TimerId) -> Result<(), NicError> {
        if self.timer.is_none() {
            self.timer = Some(sched.join_timer()?);
        }
        let places = timer.index() as usize + 1;
        if places <= self.waits.len() {
            return Ok(());
        }
        self.qpc.grow(places as u32)?;
        self.more_doorbells.make_room(places)?;
        self.more_turns.make_room(places)?;
        self.wqes.make_room(places)?;
        self.due_turns.make_room(places)?;
        /* of each request that may be served before anybody looks (two doorbells of a QP, each with a fetch
         * ahead, and a turn), and of frames: a fetch, and what makes room for it */
        self.moves.make_room(2 * (5 * places + 4 * usize::from(OOO_CAP)))?;
        /* time may go on past two doorbells of a QP before anybody looks */
        self.due.make_room(2 * places + usize::from(OOO_CAP))?;
        self.waits.make_room(places)?;
        self.waits.resize(places, Waits::default());
        Ok(())
    }

    /// The QP with this timer ends, or begins anew: nothing of it waits any more, and its frames that do are
    /// not handled.
    pub(crate) fn forget(&mut self, timer: TimerId, qpn: Qpn) {
        let place = timer.index();
        if let Some(waits) = self.waits.get_mut(place as usize) {
            let Waits { incarnation, qpn, .. } = *waits;
            *waits = Waits { incarnation: incarnation.wrapping_add(1), qpn, ..Waits::default() };
        }
        self.more_doorbells.retain(|ask| ask.place != place);
        self.more_turns.retain(|ask| ask.place != place);
        self.wqes.retain(|(_, ask)| ask.place != place);
        self.due_turns.retain(|ask| ask.place != place);
        let Contexts { due, spare, stale, .. } = self;
        due.retain_mut(|due| match due {
            NextStep::Doorbell(of) => *of != qpn,
            NextStep::Frame(of, _, _, bytes) => {
                if *of == qpn {
                    *stale += 1;
                    spare.push(core::mem::take(bytes));
                }
                *of != qpn
            }
        });
    }

    /// Whether one more frame may be given.
    pub(super) fn takes_frames(&self) -> bool {
        self.frames.has_room() && !self.spare.is_empty()
    }

    /// A request to a QP came, in two pieces. It does not wait if there is no room, or if it is longer than
    /// any.
    pub(super) fn frame(
        &mut self,
        of: &ContextAsker,
        now: Nanos,
        to: Receiver,
        meta: &FrameMeta,
        [head, data]: [&[u8]; 2],
    ) -> ContextAccess {
        if !of.receives() {
            return ContextAccess::Available;
        }
        self.advance(now);
        let place = of.timer.index();
        let Some(waits) = self.waits.get_mut(place as usize) else { return ContextAccess::Available };
        waits.qpn = of.qpn;
        let incarnation = waits.incarnation;
        let ask = Ask { qpn: of.qpn, place, incarnation, since: self.clock };
        if head.len() + data.len() > FRAME || !self.frames.has_room() {
            return ContextAccess::Available;
        }
        let Some(mut bytes) = self.spare.pop() else { return ContextAccess::Available };
        bytes.clear();
        bytes.extend_from_slice(head);
        bytes.extend_from_slice(data);
        if let Ok(index) = self.frames.begin(WaitingFrame { ask, to, meta: *meta, bytes }) {
            /* its number and place are good by construction */
            let _ = self.qpc.handle_request(RequestChannel::Rx, index, ask.place, 0);
        }
        self.settle();
        ContextAccess::Waits
    }

    /// The bytes of a frame that was handled.
    pub(super) fn give_back(&mut self, bytes: Vec<u8>) {
        self.spare.push(bytes);
    }

    /// A doorbell rings: its WQEs are fetched first.
    pub(super) fn doorbell(&mut self, of: &ContextAsker, now: Nanos) -> ContextAccess {
        if !of.sends() {
            return ContextAccess::Available;
        }
        self.advance(now);
        let place = of.timer.index();
        let Some(waits) = self.waits.get_mut(place as usize) else { return ContextAccess::Waits };
        waits.qpn = of.qpn;
        if waits.fetch {
            waits.again = true;
        } else if !core::mem::replace(&mut waits.doorbell, true) {
            let incarnation = waits.incarnation;
            self.more_doorbells.push_in_room(Ask { qpn: of.qpn, place, incarnation, since: self.clock });
            self.settle();
        }
        ContextAccess::Waits
    }

    /// It is the QP's turn to send. Only a WQE needs the context: what it owes otherwise goes with the
    /// context that the request brought.
    pub(super) fn turn(&mut self, of: &ContextAsker, now: Nanos) -> ContextAccess {
        if !(of.sends() && of.unsent) {
            return ContextAccess::Available;
        }
        self.advance(now);
        let place = of.timer.index();
        let Some(waits) = self.waits.get_mut(place as usize) else { return ContextAccess::Waits };
        waits.qpn = of.qpn;
        if !core::mem::replace(&mut waits.turn, true) {
            let incarnation = waits.incarnation;
            self.more_turns.push_in_room(Ask { qpn: of.qpn, place, incarnation, since: self.clock });
            self.settle();
        }
        ContextAccess::Waits
    }

    /// What may be done now, turns aside.
    pub(super) fn poll_due(&mut self) -> Option<NextStep> {
        self.due.pop_front()
    }

    /// The next context that began to move.
    pub(super) fn poll_move(&mut self) -> Option<(Qpn, ContextMove)> {
        self.moves.pop_front()
    }

    /// Whose turn it is now.
    pub(super) fn poll_turn(&mut self) -> Option<Qpn> {
        let ask = self.due_turns.pop_front()?;
        self.waits[ask.place as usize].turn = false;
        Some(ask.qpn)
    }

    /// Time goes on: what came meanwhile, each at its time.
    pub(super) fn advance(&mut self, now: Nanos) {
        while let Some(at) = self.next_event().filter(|at| *at <= now) {
            self.clock = self.clock.max(at);
            if self.fetches.front().is_some_and(|(due, _)| *due == at) {
                let Some((_, place)) = self.fetches.pop_front() else { return };
                /* they are handed in as they were asked for */
                let _ = self.qpc.handle_fetched(place, Token);
            } else if let Some((_, ask)) = self.wqes.pop_front() {
                self.fetched(&ask);
            }
            self.settle();
        }
        self.clock = self.clock.max(now);
    }

    /// Whether a context that something waits for, or a doorbell's WQEs, come before `at`.
    pub(super) fn comes_before(&self, at: Nanos) -> bool {
        self.next_event().is_some_and(|next| next < at)
    }

    /// When something comes next.
    pub(super) fn next_event(&self) -> Option<Nanos> {
        let (context, wqes) = (self.fetches.front().map(|e| e.0), self.wqes.front().map(|e| e.0));
        match (context, wqes) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Has the card looked at in time.
    pub(super) fn arm(&self, sched: &mut Sched) {
        if let (Some(timer), Some(at)) = (self.timer, self.next_event()) {
            sched.arm(timer, at, NOBODY);
        }
    }

    /// Adds to the card's counters what was counted since the last call.
    pub(super) fn count(&mut self, stats: &Counters) {
        stats.drop_state.add(core::mem::take(&mut self.stale));
        let c = self.qpc.counters();
        stats.qpc_hits.set(c.hits);
        stats.qpc_misses.set(c.misses);
        stats.qpc_waited.set(c.waited);
        stats.qpc_ring_reads.set(c.ring_reads);
        stats.qpc_prefetched.set(c.prefetched);
        stats.qpc_prefetch_dropped.set(c.prefetch_dropped);
        stats.qpc_evicted.set(c.evicted + c.bypassed);
        stats.qpc_pending_peak.set(c.pending_peak);
        stats.qpc_pending.set(self.qpc.pending() as u64);
        stats.qpc_wait_ns.set(self.waited);
        stats.qpc_on_chip.set(self.qpc.config().on_chip().total());
    }

    /// The WQEs of a doorbell came.
    fn fetched(&mut self, ask: &Ask) {
        let waits = &mut self.waits[ask.place as usize];
        waits.fetch = false;
        self.due.push_in_room(NextStep::Doorbell(ask.qpn));
        if core::mem::take(&mut waits.again) {
            waits.doorbell = true;
            self.more_doorbells.push_in_room(Ask { since: self.clock, ..*ask });
        }
    }

    /// Runs the module until it waits for memory.
    fn settle(&mut self) {
        loop {
            while let Some(ask) = self.more_doorbells.front().copied() {
                let Ok(index) = self.doorbells.begin(ask) else { break };
                self.more_doorbells.pop_front();
                let _ = self.qpc.handle_request(RequestChannel::Sq, index, ask.place, 1);
            }
            while let Some(ask) = self.more_turns.front().copied() {
                let Ok(index) = self.turns.begin(ask) else { break };
                self.more_turns.pop_front();
                let _ = self.qpc.handle_request(RequestChannel::Tx, index, ask.place, 0);
            }
            if self.qpc.is_idle() {
                return;
            }
            self.qpc.cycle();
            self.collect();
        }
    }

    /// Takes what a cycle of the module gave.
    fn collect(&mut self) {
        /* what is fetched has been written before, if it ever was */
        while let Some((place, _)) = self.qpc.poll_write_back() {
            self.moves.push_in_room((self.waits[place as usize].qpn, ContextMove::Evicted));
        }
        while let Some(place) = self.qpc.poll_fetch() {
            self.fetches.push_in_room((self.clock + self.cache.miss, place));
            self.moves.push_in_room((self.waits[place as usize].qpn, ContextMove::Fetched));
        }
        while let Some(response) = self.qpc.poll_response() {
            match response.channel {
                RequestChannel::Sq => {
                    if let Some(ask) = self.doorbells.finish(response.index) {
                        self.rang(ask);
                    }
                }
                RequestChannel::Tx => {
                    if let Some(ask) = self.turns.finish(response.index) {
                        self.waited += self.clock - ask.since;
                        if self.waits[ask.place as usize].incarnation == ask.incarnation {
                            self.due_turns.push_in_room(ask);
                        }
                    }
                }
                RequestChannel::Rx => {
                    if let Some(WaitingFrame { ask, to, meta, bytes }) = self.frames.finish(response.index) {
                        self.waited += self.clock - ask.since;
                        if self.waits[ask.place as usize].incarnation == ask.incarnation {
                            self.due.push_in_room(NextStep::Frame(ask.qpn, to, meta, bytes));
                        } else {
                            self.stale += 1;
                            self.give_back(bytes);
                        }
                    }
                }
            }
        }
    }

    /// The SQ's address is known: its WQEs are fetched.
    fn rang(&mut self, ask: Ask) {
        self.waited += self.clock - ask.since;
        let waits = &mut self.waits[ask.place as usize];
        if waits.incarnation == ask.incarnation {
            (waits.doorbell, waits.fetch) = (false, true);
            self.wqes.push_in_room((self.clock + self.cache.fetch, ask));
        }
    }
}
