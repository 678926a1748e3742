//! What a card's host has of StaR: its two UDP ports, and what came for the stateless endpoints and for who
//! settles the roles.

use std::collections::VecDeque;
use std::ops::Deref;

use starverbs_core::env::Env;
use starverbs_core::{Counters, FrameMeta};
use starverbs_settings::Settings;
use starverbs_star::env::{QpPair, SlEvent, StarDest};
use starverbs_star::host::{EndpointHost, InboundMessage};
use starverbs_star::seal::{ControlSeal, MAX_SEALED};
use starverbs_star::wire::StarHead;

use super::{Sealing, StarRx, StarTx};
use crate::BackendError;
use crate::program::Payload;

/// Messages of peers that wait for the end of a turn at most; of more each is lost, and comes again.
const MAX_INBOUND: usize = 1024;

/// Room for events at first: of one packet, and those that had waited for it, after which the host takes
/// them, there are no more.
const EVENTS: usize = 128 + starverbs_star::answers::MOST_AHEAD;

/// A card's host that may have StaR's ports.
pub trait StarCard: EndpointHost {
    /// Its ports. `None`: they are not open
    fn star(&self) -> Option<&StarPort<Self::Stats>>;
    /// The same, to be changed
    fn star_mut(&mut self) -> Option<&mut StarPort<Self::Stats>>;
    /// Opens the ports, and keeps the sending half; gives the receiving one.
    ///
    /// # Errors
    /// As of [`RoceTx::open_star`](crate::RoceTx::open_star).
    fn open_star(
        &mut self,
        settings: &Settings,
        sealing: Sealing,
    ) -> Result<StarRx<Self::Stats>, BackendError>;
}

/// Beside the host's own parts, where StaR is in use. `S`: where the card counts.
pub struct StarPort<S: Deref<Target = Counters>> {
    /// The sending half of both ports
    pub tx: StarTx<S>,
    /// What seals its messages
    pub sealing: Sealing,
    /// Events of the stateless half, the oldest first
    events: VecDeque<SlEvent>,
    /// By which peers settle roles, the oldest first
    inbound: VecDeque<InboundMessage>,
}

impl<S: Deref<Target = Counters>> StarPort<S> {
    /// Behind ports that were opened.
    pub fn new(tx: StarTx<S>, sealing: Sealing) -> Self {
        let mut events = VecDeque::new();
        /* without memory now there may be some later */
        _ = events.try_reserve(EVENTS);
        StarPort { tx, sealing, events, inbound: VecDeque::new() }
    }

    /// A packet leaves for `to`; see [`starverbs_star::env::StarEnv::send_star`].
    #[inline]
    pub fn send(
        &mut self,
        to: StarDest<'_>,
        head: &StarHead,
        data: &[u8],
        payload: Payload<'_>,
        volatile: bool,
    ) {
        if head.is_control() {
            return self.send_control(to, head, data);
        }
        self.tx.send(to.av, to.port, head, data, payload, volatile);
    }

    /// A control message, or the answer to one, leaves.
    fn send_control(&mut self, to: StarDest<'_>, head: &StarHead, data: &[u8]) {
        let mut room = [0; MAX_SEALED];
        let StarDest { av, port } = to;
        match self.sealing.seal_packet((&av.sgid, &av.dgid), head, data, &mut room) {
            Some((head, len)) => {
                self.tx.send(av, port, &head, room.get(..len).unwrap_or_default(), Payload::EMPTY, false);
            }
            None => self.tx.send(av, port, head, data, Payload::EMPTY, false),
        }
    }

    /// A message came. One that is too long, or for which there is no room, is lost.
    pub fn on_message(&mut self, meta: &FrameMeta, qps: QpPair, message: &[u8]) {
        if let Some(inbound) = InboundMessage::new(meta, qps, message)
            && self.inbound.len() < MAX_INBOUND
            && self.inbound.try_reserve(1).is_ok()
        {
            self.inbound.push_back(inbound);
        }
    }

    /// Keeps an event. One that there is no memory for is lost.
    #[inline]
    pub fn keep_event(&mut self, event: SlEvent) {
        if self.events.try_reserve(1).is_ok() {
            self.events.push_back(event);
        }
    }

    /// The oldest event.
    #[inline]
    pub fn next_event(&mut self) -> Option<SlEvent> {
        self.events.pop_front()
    }

    /// The oldest message.
    pub fn next_message(&mut self) -> Option<InboundMessage> {
        self.inbound.pop_front()
    }

    /// Whether messages wait.
    pub(super) fn has_messages(&self) -> bool {
        !self.inbound.is_empty()
    }

    /// What seals, for who settles roles and for messages that came.
    pub fn seal(&mut self) -> Option<&mut ControlSeal> {
        self.sealing.seal()
    }
}

impl<S: Deref<Target = Counters>> std::fmt::Debug for StarPort<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StarPort").field("inbound", &self.inbound.len()).finish_non_exhaustive()
    }
}

/// A card's counters, as all that counts for it has them.
pub(super) type Stats<E> = <E as Env>::Stats;
