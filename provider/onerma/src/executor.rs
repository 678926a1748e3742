//! CommandExecutor (1RMA, sections 4.4 and 6): transfers of any length, as commands of at most 4 KB in the
//! slots of one portal or several, paced by [`congestion`](crate::congestion).
//!
//! Transfers to one destination take turns, chunk by chunk, and so do destinations: what is small does not
//! wait for what is large. Chunks complete in any order; a transfer is done when all are. Chunks that failed
//! for congestion are tried again, as often as the settings say; the card never does so. What grows with the
//! number of destinations is here, in the host's memory.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use starverbs_core::room::is_room_for;
use starverbs_core::{Gid, Nanos};
use thiserror::Error;

use crate::command::{Completion, OneRmaCommand};
use crate::congestion::{CongestionSettings, CongestionWindow, Remote};
use crate::list::{List, Neighbours};
use crate::region::RegionId;
use crate::seal::DerivedKey;
use crate::types::{Class, MAX_OP, OneRmaOp, Status};

/// Of a round trip, the part by which the next command may be late and the one after it not.
const LATE: Nanos = 8;
/// Bytes that a new destination may take in the map of all, at most: a node on each of a few levels.
const NODE: usize = 4096;

/// A transfer of any length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transfer {
    /// READ, WRITE or REKEY
    pub op: OneRmaOp,
    /// Its class
    pub class: Class,
    /// Bytes: at least 1; 16 of a REKEY
    pub len: u64,
    /// The target's address
    pub remote: Gid,
    /// The region there
    pub region: RegionId,
    /// Where in it
    pub offset: u64,
    /// The region here
    pub local: RegionId,
    /// Where in it
    pub local_offset: u64,
    /// The key for it
    pub key: DerivedKey,
    /// What its end is reported with
    pub token: u64,
}

/// A transfer that has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Finished {
    /// The transfer's token
    pub token: u64,
    /// OK, or why its first chunk failed that failed for good
    pub status: Status,
    /// The longest that one of its commands waited to enter service, ns
    pub issue_delay: u32,
    /// The longest that one of its commands took, ns
    pub total_delay: u32,
}

/// Why a transfer is not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum SubmitError {
    /// It is empty, too long for its offsets, or a REKEY of another length than 16
    #[error("no transfer has this length")]
    Length,
    /// There is no memory
    #[error("no memory")]
    NoMemory,
}

/// A piece of a transfer.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    at: u64,
    size: u32,
    tries: u8,
}

struct Active {
    transfer: Transfer,
    destination: usize,
    /// It is in its destination's queue
    waits: bool,
    /// Bytes before this have been cut into chunks
    cut: u64,
    /// Chunks that failed, and are tried again
    again: VecDeque<Chunk>,
    in_flight: u32,
    /// Bytes that are there
    done: u64,
    failed: Option<Status>,
    issue_delay: u32,
    total_delay: u32,
}

impl Active {
    fn new(transfer: Transfer, destination: usize) -> Self {
        let again = VecDeque::new();
        let (issue_delay, total_delay) = (0, 0);
        Active {
            transfer,
            destination,
            waits: false,
            cut: 0,
            again,
            in_flight: 0,
            done: 0,
            failed: None,
            issue_delay,
            total_delay,
        }
    }

    fn has_more(&self) -> bool {
        self.failed.is_none() && (!self.again.is_empty() || self.cut < self.transfer.len)
    }

    fn next_chunk(&mut self) -> Option<Chunk> {
        if let Some(chunk) = self.again.pop_front() {
            return Some(chunk);
        }
        let left = self.transfer.len - self.cut;
        let size = left.min(u64::from(MAX_OP)) as u32;
        let chunk = Chunk { at: self.cut, size, tries: 0 };
        self.cut += u64::from(size);
        (size > 0).then_some(chunk)
    }
}

struct Destination {
    remote: Remote,
    in_flight: u32,
    /// When the next command may be issued
    next: Nanos,
    /// It is in the executor's queue
    waits: bool,
    /// Transfers that have chunks to issue, in turn
    turn: List<u32>,
}

/// A portal that the executor has for itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OwnPortal {
    /// Its slots
    pub slots: u16,
    /// Where its completions go
    pub completions: RegionId,
}

/// A slot: which portal's, of those that the executor has, and which one there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotAt {
    /// Counted from 0
    pub portal: u16,
    /// Counted from 0
    pub slot: u16,
}

/// What a slot does.
#[derive(Clone, Copy, Debug)]
struct SlotWork {
    transfer: u32,
    chunk: Chunk,
}

/// A command that a slot is to take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotCommand {
    /// The slot, which has no other command
    pub at: SlotAt,
    /// What to issue there
    pub command: OneRmaCommand,
}

/// Runs transfers on the slots of portals.
pub struct Executor {
    settings: CongestionSettings,
    /// How often a chunk that failed for congestion is tried again
    retries: u8,
    local: CongestionWindow,
    portals: Vec<PortalWork>,
    /// Slots without a command
    free: Vec<SlotAt>,
    transfers: Vec<Option<Active>>,
    /// Places of none, and which neighbours transfers have there or in their destination's queue
    unused: List<u32>,
    transfer_links: Neighbours<u32>,
    /// Transfers that have not ended
    active: usize,
    destinations: Vec<Destination>,
    destination_links: Neighbours<u32>,
    known: BTreeMap<([u8; 16], u8, bool), usize>,
    /// Destinations that have something to issue, in turn, and how many
    turn: List<u32>,
    waiting: usize,
}

/// What the slots of a portal do.
struct PortalWork {
    completions: RegionId,
    slots: Vec<Option<SlotWork>>,
}

impl Executor {
    /// With these portals.
    pub fn new(settings: CongestionSettings, retries: u8, portals: &[OwnPortal]) -> Self {
        let work = |own: &OwnPortal| PortalWork {
            completions: own.completions,
            slots: (0..own.slots).map(|_| None).collect(),
        };
        let slots =
            |(portal, own): (u16, &OwnPortal)| (0..own.slots).map(move |slot| SlotAt { portal, slot });
        let mut free: Vec<_> = (0..).zip(portals).flat_map(slots).collect();
        free.reverse();
        Executor {
            settings,
            retries,
            local: CongestionWindow::new(settings.initial),
            portals: portals.iter().map(work).collect(),
            free,
            transfers: Vec::new(),
            unused: List::new(),
            transfer_links: Neighbours::none(),
            active: 0,
            destinations: Vec::new(),
            destination_links: Neighbours::none(),
            known: BTreeMap::new(),
            turn: List::new(),
            waiting: 0,
        }
    }

    /// Takes a transfer.
    pub fn submit(&mut self, transfer: Transfer) -> Result<(), SubmitError> {
        let Transfer { op, len, offset, local_offset, .. } = transfer;
        let ends = offset.checked_add(len).is_some() && local_offset.checked_add(len).is_some();
        if len == 0 || !ends || (op == OneRmaOp::Rekey && !op.takes(len.min(1 << 20) as u32)) {
            return Err(SubmitError::Length);
        }
        let destination = self.destination(transfer.remote, transfer.region.card(), op)?;
        let at = match self.unused.pop(&mut self.transfer_links) {
            Some(at) => at,
            None => self.new_place().ok_or(SubmitError::NoMemory)?,
        };
        self.transfers[at as usize] = Some(Active::new(transfer, destination));
        self.active += 1;
        self.enqueue(at);
        Ok(())
    }

    /// A place for one more transfer. `None`: there is no memory.
    fn new_place(&mut self) -> Option<u32> {
        let at = u32::try_from(self.transfers.len()).ok().filter(|at| *at < u32::MAX)?;
        self.transfers.try_reserve(1).ok()?;
        self.transfer_links.grow().then(|| self.transfers.push(None))?;
        Some(at)
    }

    /// The destination of a transfer: a card of an address, and the direction.
    fn destination(&mut self, remote: Gid, card: u8, op: OneRmaOp) -> Result<usize, SubmitError> {
        let outward = op != OneRmaOp::Read;
        if let Some(at) = self.known.get(&(remote.0, card, outward)) {
            return Ok(*at);
        }
        let room = self.destinations.len() < u32::MAX as usize && is_room_for(NODE);
        if !room || self.destinations.try_reserve(1).is_err() || !self.destination_links.grow() {
            return Err(SubmitError::NoMemory);
        }
        let remote_state = Remote::new(&self.settings, if outward { 2 } else { 1 });
        let (waits, turn) = (false, List::new());
        self.destinations.push(Destination { remote: remote_state, in_flight: 0, next: 0, waits, turn });
        let at = self.destinations.len() - 1;
        self.known.insert((remote.0, card, outward), at);
        Ok(at)
    }

    /// A transfer waits for its turn at its destination, which waits for its own.
    fn enqueue(&mut self, at: u32) {
        let Some(Some(active)) = self.transfers.get_mut(at as usize) else { return };
        let place = active.destination;
        let Some(destination) = self.destinations.get_mut(place) else { return };
        if !active.waits {
            active.waits = true;
            destination.turn.push(&mut self.transfer_links, at);
        }
        if !destination.waits {
            self.enqueue_destination(place);
        }
    }

    fn enqueue_destination(&mut self, place: usize) {
        if let Some(destination) = self.destinations.get_mut(place) {
            destination.waits = true;
            self.waiting += 1;
            self.turn.push(&mut self.destination_links, place as u32);
        }
    }

    /// The next command to issue now, if windows and pacing allow one.
    pub fn poll(&mut self, now: Nanos) -> Option<SlotCommand> {
        if self.free.is_empty() {
            return None;
        }
        for _ in 0..self.waiting {
            let place = self.turn.pop(&mut self.destination_links)? as usize;
            self.waiting -= 1;
            let destination = self.destinations.get_mut(place)?;
            destination.waits = false;
            let due = destination.next <= now;
            let command = if due && self.has_room(place) { self.issue_to(now, place) } else { None };
            if self.destinations.get(place).is_some_and(|one| one.turn.first().is_some()) {
                self.enqueue_destination(place);
            }
            if command.is_some() {
                return command;
            }
        }
        None
    }

    fn has_room(&self, place: usize) -> bool {
        let room = |one: &Destination| {
            let limit = one.remote.limit(&self.local).max(1.0);
            f64::from(one.in_flight) + 1.0 <= limit
        };
        self.destinations.get(place).is_some_and(room)
    }

    /// When [`Executor::poll`] gives something if nothing completes before. `None`: a completion is needed.
    pub fn next_time(&self) -> Option<Nanos> {
        if self.free.is_empty() {
            return None;
        }
        let waiting = self.turn.iter(&self.destination_links).map(|place| place as usize);
        let ready = waiting.filter(|place| self.has_room(*place));
        ready.filter_map(|place| self.destinations.get(place).map(|one| one.next)).min()
    }

    fn issue_to(&mut self, now: Nanos, place: usize) -> Option<SlotCommand> {
        let destination = self.destinations.get_mut(place)?;
        let at = destination.turn.pop(&mut self.transfer_links)?;
        let active = self.transfers.get_mut(at as usize)?.as_mut()?;
        active.waits = false;
        if !active.has_more() {
            return None;
        }
        let (chunk, at_slot) = (active.next_chunk()?, self.free.pop()?);
        active.in_flight += 1;
        if active.has_more() {
            active.waits = true;
            destination.turn.push(&mut self.transfer_links, at);
        }
        destination.in_flight += 1;
        /* who polls late makes up for it, as far as that is no burst */
        let since = destination.next.max(now.saturating_sub(destination.remote.rtt() / LATE));
        destination.next = since.saturating_add(destination.remote.pause(&self.local, chunk.size));
        let portal = self.portals.get_mut(usize::from(at_slot.portal))?;
        *portal.slots.get_mut(usize::from(at_slot.slot))? = Some(SlotWork { transfer: at, chunk });
        let Transfer { op, class, remote, region, offset, local, local_offset, key, .. } = active.transfer;
        let command = OneRmaCommand {
            op,
            class,
            haste: destination.remote.haste(&self.settings, chunk.tries),
            size: chunk.size,
            remote,
            region,
            offset: offset + chunk.at,
            local,
            local_offset: local_offset + chunk.at,
            completions: portal.completions,
            key,
        };
        Some(SlotCommand { at: at_slot, command })
    }

    /// A command of this portal completed; or the card did not take it, and it counts as one that did with a
    /// status.
    pub fn on_completion(&mut self, now: Nanos, portal: u16, completion: &Completion) -> Option<Finished> {
        let slot = completion.slot;
        let flight = self.portals.get_mut(usize::from(portal))?.slots.get_mut(usize::from(slot))?.take()?;
        self.free.push(SlotAt { portal, slot });
        let SlotWork { transfer: at, mut chunk } = flight;
        let active = self.transfers.get_mut(at as usize)?.as_mut()?;
        let destination = self.destinations.get_mut(active.destination)?;
        active.in_flight -= 1;
        active.issue_delay = active.issue_delay.max(completion.issue_delay);
        active.total_delay = active.total_delay.max(completion.total_delay);
        destination.in_flight -= 1;
        destination.remote.on_completion(&self.settings, &mut self.local, now, completion);
        let again = matches!(completion.status, Status::Nack | Status::Timeout | Status::DispatchTimeout);
        if completion.status == Status::Ok {
            active.done += u64::from(chunk.size);
        } else if again
            && chunk.tries < self.retries
            && active.failed.is_none()
            && active.again.try_reserve(1).is_ok()
        {
            chunk.tries += 1;
            active.again.push_back(chunk);
            self.enqueue(at);
        } else {
            active.failed.get_or_insert(completion.status);
        }
        let active = self.transfers.get_mut(at as usize)?.as_mut()?;
        if active.in_flight > 0 || active.has_more() {
            return None;
        }
        let status = active.failed.unwrap_or(Status::Ok);
        let Active { transfer: Transfer { token, .. }, issue_delay, total_delay, .. } = *active;
        if let Some(destination) = self.destinations.get_mut(active.destination).filter(|_| active.waits) {
            destination.turn.remove(&mut self.transfer_links, at);
        }
        self.transfers[at as usize] = None;
        self.unused.push(&mut self.transfer_links, at);
        self.active -= 1;
        Some(Finished { token, status, issue_delay, total_delay })
    }

    /// Commands under way.
    pub fn in_flight(&self) -> usize {
        self.portals.iter().map(|portal| portal.slots.len()).sum::<usize>() - self.free.len()
    }

    /// Transfers that have not ended.
    pub fn active(&self) -> usize {
        self.active
    }

    /// The window of congestion at this host.
    pub const fn local_window(&self) -> &CongestionWindow {
        &self.local
    }

    /// What is known of the first card of an address that READs, or WRITEs and REKEYs, went to.
    pub fn remote(&self, remote: &Gid, op: OneRmaOp) -> Option<&Remote> {
        let at = self.known.get(&(remote.0, 0, op != OneRmaOp::Read))?;
        self.destinations.get(*at).map(|destination| &destination.remote)
    }
}

#[cfg(test)]
#[path = "executor_tests.rs"]
mod tests;
