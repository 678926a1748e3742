//! The card: tables of fixed size, and what happens to them when a command, a packet or a deadline comes.
//!
//! What a peer makes it keep is an inbound request or a transfer, of which there is a fixed number, for one
//! operation. It knows no peers.

mod config;
mod control;
mod initiator;
mod outbox;
mod ready;
mod serve;
mod slot;
mod target;

pub use config::{CardConfig, CardCounts};
pub use control::{ControlError, PortalId};
pub use initiator::IssueError;
pub use outbox::packet_in_buffer;
pub use slot::SlotState;

use alloc::boxed::Box;

use starverbs_core::{Dma, Gid, Nanos, Seg};

use crate::command::{HASTES, OneRmaCommand};
use crate::list::{List, Neighbours, boxed};
use crate::region::Regions;
use crate::seal::{Seal, SealCounters, is_by_target};
use crate::types::{Class, OneRmaOp};
use crate::window::SolicitationWindow;
use crate::wire::{Hop, OneRmaHeader};
use control::Portal;
use outbox::{Inward, Outbox};
use ready::ReadyKeys;
use serve::RequestQueues;
use slot::CommandSlot;
use target::InboundTransfer;

/// Of one class so many go in a row while the other waits.
const TURNS: u8 = 7;

/// What a card works in.
pub trait OneRmaEnv: Dma {
    /// Sends one packet, which is made where it waits to leave: `head`, what this host's memory holds at an
    /// address in so many bytes, up to 4096, and 16 bytes more; `seal` is given all of it before it may be
    /// seen. One that cannot be sent is lost, as on any wire. False: the memory is not there, and nothing is
    /// sent.
    fn send(
        &mut self,
        path: &CardPath,
        class: Class,
        head: &[u8],
        data: Seg,
        seal: impl FnOnce(&mut [u8]),
    ) -> bool;
    /// A portal has a new completion, for whoever sleeps.
    fn completed(&mut self, portal: PortalId);
}

/// Between which cards a packet goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CardPath {
    /// This card's address
    pub local: Gid,
    /// The other's
    pub remote: Gid,
    /// Which card of that address it is, below [`CARDS`](crate::CARDS)
    pub card: u8,
}

impl CardPath {
    /// To the target of a command, from a card at `local`.
    fn of(local: Gid, command: &OneRmaCommand) -> Self {
        CardPath { local, remote: command.remote, card: command.region.card() }
    }
}

/// Whether there is more to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transmit {
    /// Something was sent; call again
    More,
    /// Nothing can be sent now
    Done,
}

/// A card.
pub struct OneRmaCard<S: Seal> {
    config: CardConfig,
    addr: Gid,
    out: Outbox<S>,
    regions: Regions,
    ready: ReadyKeys<S::Key>,
    portals: Box<[Portal]>,
    window: SolicitationWindow,
    slots: Box<[CommandSlot<S::Key>]>,
    slot_links: Neighbours,
    /// Slots that wait for the window, of each class
    queued: [List; 2],
    /// Slots in service, by haste: each list is in the order of deadlines
    service: [List; HASTES as usize],
    transfers: Box<[InboundTransfer<S::Key>]>,
    transfer_links: Neighbours,
    /// Transfers without an operation
    unused: List,
    /// Transfers that wait for the window, of each class
    waiting: [List; 2],
    /// Transfers whose data was asked for, by haste: each list is in the order of deadlines
    asked: [List; HASTES as usize],
    inbound: RequestQueues<S::Key>,
    /// High-class operations that entered service in a row while a low one waited
    row: u8,
    /// Whether a transfer entered service last, and not a command
    transfer_last: bool,
    counts: CardCounts,
}

impl<S: Seal> OneRmaCard<S> {
    /// A card that sends from `addr`, as `sender` in its initialisation vectors: an IPv4 address there.
    /// `None`: there is no memory for its tables.
    pub fn new(config: CardConfig, seal: S, addr: Gid, sender: u32, counters: SealCounters) -> Option<Self> {
        let config = config.bounded();
        let (mut transfer_links, mut unused) = (Neighbours::new(config.transfers)?, List::new());
        (0..config.transfers).for_each(|place| unused.push(&mut transfer_links, place));
        Some(OneRmaCard {
            config,
            addr,
            out: Outbox::new(seal, sender, counters),
            regions: Regions::new(config.card, config.regions)?,
            ready: ReadyKeys::new()?,
            portals: boxed(usize::from(config.portals), Portal::default)?,
            window: SolicitationWindow::new(config.window),
            slots: boxed(usize::from(config.slots), CommandSlot::new)?,
            slot_links: Neighbours::new(config.slots)?,
            queued: [List::new(), List::new()],
            service: [const { List::new() }; HASTES as usize],
            transfers: boxed(usize::from(config.transfers), InboundTransfer::new)?,
            transfer_links,
            unused,
            waiting: [List::new(), List::new()],
            asked: [const { List::new() }; HASTES as usize],
            inbound: RequestQueues::new(config.inbound)?,
            row: 0,
            transfer_last: false,
            counts: CardCounts::default(),
        })
    }

    /// What it has counted.
    pub fn counts(&self) -> &CardCounts {
        &self.counts
    }

    /// Bytes of the solicitation window that are taken.
    pub fn solicited(&self) -> u32 {
        self.window.taken()
    }

    /// Bytes that others wait for, and have not been sent or asked for.
    pub fn inbound_bytes(&self) -> u32 {
        self.inbound.bytes
    }

    /// How the card's waits and its threshold are from here on; its tables and window stay as they are.
    pub fn set_waits(&mut self, config: &CardConfig) {
        let CardConfig { dispatch_timeout, timeout, nack_threshold, .. } = *config;
        self.config = CardConfig { dispatch_timeout, timeout, nack_threshold, ..self.config };
    }

    /// Message counters that are left.
    pub fn counters_left(&self) -> u64 {
        self.out.counters.left()
    }

    /// The card goes on with these message counters, of an epoch that it never had.
    pub fn renew_counters(&mut self, counters: SealCounters) {
        self.out.counters = counters;
    }

    /// A packet came; it is decrypted in place. Nobody vouches for any byte of it.
    pub fn handle_packet<E: OneRmaEnv>(
        &mut self,
        env: &mut E,
        now: Nanos,
        path: &CardPath,
        packet: &mut [u8],
    ) {
        self.counts.received += 1;
        let Ok((head, at)) = OneRmaHeader::parse(packet) else {
            self.counts.malformed += 1;
            return;
        };
        let from_target = is_by_target(head.prefix.iv.counter);
        let read = head.prefix.op == OneRmaOp::Read;
        let packet = Inward { head, bytes: packet, at };
        match head.hop {
            Hop::Request { .. } if !from_target => self.on_request(env, now, path, packet),
            Hop::Ask { .. } if from_target => self.on_ask(env, now, path, packet),
            Hop::Data { .. } if from_target && read => self.on_read_data(env, now, path, packet),
            Hop::Data { .. } if !from_target && !read => self.on_write_data(env, now, path, packet),
            Hop::Done { .. } if from_target => self.on_done(env, now, path, packet),
            Hop::Fail { .. } if from_target => self.on_fail(env, now, path, packet),
            Hop::Fail { .. } if !read => self.on_given_up(path, packet),
            _ => self.counts.malformed += 1,
        }
    }

    /// Sends at most one packet: a request or an Ask that the window admits, or data that was asked for.
    pub fn poll_transmit<E: OneRmaEnv>(&mut self, env: &mut E, now: Nanos) -> Transmit {
        if self.dispatch(env, now) || self.serve(env, now) { Transmit::More } else { Transmit::Done }
    }

    /// Whether [`OneRmaCard::poll_transmit`] has something to do.
    pub fn has_work(&self) -> bool {
        let first = |lists: &[List; 2]| lists.iter().any(|list| list.first().is_some());
        !self.inbound.is_empty() || self.window.can_admit() && (first(&self.queued) || first(&self.waiting))
    }

    /// What waited longest in a class enters service, if the window admits it: a command or a transfer.
    fn dispatch<E: OneRmaEnv>(&mut self, env: &mut E, now: Nanos) -> bool {
        if !self.window.can_admit() {
            return false;
        }
        let first = |class: usize| (self.queued[class].first(), self.waiting[class].first());
        let (high, low) = (first(0), first(1));
        let none = (None, None);
        let (slot, transfer) = if high == none || (low != none && self.row >= TURNS) {
            self.row = 0;
            low
        } else {
            self.row = if low == none { 0 } else { self.row + 1 };
            high
        };
        match (slot, transfer) {
            (Some(slot), other) if other.is_none() || self.transfer_last => {
                self.transfer_last = false;
                self.start(env, now, slot);
            }
            (_, Some(transfer)) => {
                self.transfer_last = true;
                self.ask(env, now, transfer);
            }
            _ => return false,
        }
        true
    }

    /// When [`OneRmaCard::handle_timeout`] is due.
    pub fn next_deadline(&self) -> Option<Nanos> {
        let slot = |place: u16| self.slots.get(usize::from(place)).map(|slot| slot.deadline);
        let transfer = |place: u16| self.transfers.get(usize::from(place)).map(|one| one.deadline);
        let slots = self.queued.iter().chain(&self.service).filter_map(|list| list.first().and_then(slot));
        let transfers = self.waiting.iter().chain(&self.asked);
        slots.chain(transfers.filter_map(|list| list.first().and_then(transfer))).min()
    }

    /// Ends what has waited too long.
    pub fn handle_timeout<E: OneRmaEnv>(&mut self, env: &mut E, now: Nanos) {
        self.expire_slots(env, now);
        self.expire_transfers(env, now);
    }
}

/// The list of a haste.
fn at_haste(lists: &mut [List; HASTES as usize], haste: u8) -> &mut List {
    &mut lists[usize::from(haste.min(HASTES - 1))]
}

/// The list of a class.
const fn of(class: Class) -> usize {
    class as usize
}
