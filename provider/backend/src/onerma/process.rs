//! A process that uses 1RMA: the card of an address, the executor of its transfers, and its completions.
//!
//! Owns the order in which they have their turns. It must not know packets, nor whose thread it runs in.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use starverbs_core::{Gid, Nanos};
use starverbs_onerma::congestion::{CongestionSettings, Timeouts};
use starverbs_onerma::executor::{Executor, Finished, OwnPortal, SlotAt, SlotCommand, SubmitError, Transfer};
use starverbs_onerma::wire::{OVERHEAD, PORT};
use starverbs_onerma::{
    COMPLETION_LEN, CardConfig, CardCounts, Completion, ControlError, DerivedKey, Initiator, MAX_OP,
    OneRmaCard, OneRmaOp, PortalId, Region, RegionId, RegionKey, Rights, Seal, SealCounters, Status,
    Transmit,
};
use starverbs_settings::Settings;

use super::port::{OneRmaPort, ReceiveBuffer};
use super::world::World;
use super::{GcmSeal, numbers_at, sender_of};
use crate::host::HostAddr;
use crate::{BackendError, sockopt};

/// Packets of a turn, at most: what was asked for goes out between them.
const RECEIVED: usize = 64;
/// The card gets new message numbers when it has fewer than these.
const LOW: u64 = 1 << 20;
/// Most slots of a portal: a page of them.
const PORTAL: u16 = 64;
/// Words of a completion.
const RECORD: usize = COMPLETION_LEN / 8;

/// What a process's card is like.
#[derive(Clone, Copy, Debug)]
pub struct ProcessOptions {
    /// UDP port of an address's first card, here and at all peers; those of the others are the next ones
    pub port: u16,
    /// The process's number: K_d is bound to it
    pub pid: u32,
    /// Commands under way, at most
    pub slots: u16,
    /// How often a chunk that failed for congestion is tried again
    pub retries: u8,
    /// Capacities and waits of the card; its fragment is cut to what the interface takes
    pub card: CardConfig,
    /// Congestion control
    pub congestion: CongestionSettings,
}

impl Default for ProcessOptions {
    /// For cards in software, whose processes may have to wait for a CPU: 10 ms for the window; for answers
    /// 20 ms before one was seen, then four round trips, 2.5 to 640 ms; 256 KB asked for at a time, 1 MB
    /// wanted by others; a round trip of 100 us is assumed before one was seen.
    fn default() -> Self {
        let longest = 640_000_000;
        let waits = CardConfig { timeout: longest, ..CardConfig::of_fabric(5_000_000, 0) };
        let timeouts = Some(Timeouts { longest, least: 2_500_000, unknown: 20_000_000 });
        ProcessOptions {
            port: PORT,
            pid: std::process::id(),
            slots: 64,
            retries: 7,
            card: CardConfig { window: 256 << 10, nack_threshold: 1 << 20, ..waits },
            congestion: CongestionSettings { timeouts, ..CongestionSettings::of_rtt(100_000) },
        }
    }
}

/// Congestion control with the constants that a person has set. Targets follow a round trip that is set,
/// where they are not.
fn as_set(usual: CongestionSettings, settings: &Settings) -> CongestionSettings {
    let Some(set) = settings.onerma_window else { return usual };
    let nanos = |time: Option<Duration>| time.map(|time| time.as_nanos() as Nanos);
    let of_rtt = nanos(set.rtt).map_or(usual, CongestionSettings::of_rtt);
    /* one that is set moves the others that are not */
    let least = set.least.unwrap_or(usual.least.min(set.most.unwrap_or(usual.most)));
    let most = set.most.unwrap_or(usual.most.max(least));
    CongestionSettings {
        increase: set.increase.unwrap_or(usual.increase),
        most_decrease: set.most_decrease.unwrap_or(usual.most_decrease),
        beta: set.beta.unwrap_or(usual.beta),
        failure_decrease: set.failure_decrease.unwrap_or(usual.failure_decrease),
        least,
        most,
        initial: set.initial.unwrap_or(usual.initial).clamp(least, most),
        local_target: nanos(set.local_target).unwrap_or(of_rtt.local_target),
        remote_target: nanos(set.remote_target).unwrap_or(of_rtt.remote_target),
        rtt: of_rtt.rtt,
        ..usual
    }
}

/// A portal of the executor's.
struct Portal {
    id: PortalId,
    /// Its completions, which the card writes
    records: Box<[AtomicU64]>,
    /// Completions that were taken
    seen: u32,
}

impl Portal {
    /// One of so many slots, and the region of its completions. `Full`: the card has no more.
    fn open(
        card: &mut OneRmaCard<GcmSeal>,
        pid: u32,
        slots: u16,
    ) -> Result<(Portal, OwnPortal), ControlError> {
        let records: Box<[_]> = (0..usize::from(slots) * RECORD).map(|_| AtomicU64::new(0)).collect();
        let completions = card.open_region(Region {
            addr: records.as_ptr().expose_provenance() as u64,
            len: (records.len() * 8) as u64,
            owner: pid,
            rights: Rights::LOCAL_WRITE,
            key: RegionKey([0; 16]),
        })?;
        let id = card.open_portal(pid, slots)?;
        Ok((Portal { id, records, seen: 0 }, OwnPortal { slots, completions }))
    }

    fn next_completion(&mut self) -> Option<Completion> {
        let records = (self.records.len() / RECORD) as u32;
        let at = (self.seen % records.max(1)) as usize * RECORD;
        let words = self.records.get(at..at + RECORD)?;
        /* the last word is written last: acquire it first */
        let mut bytes = [0; COMPLETION_LEN];
        for (to, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words).rev() {
            *to = word.load(Ordering::Acquire).to_ne_bytes();
        }
        let completion = Completion::decode(&bytes)?;
        let next = self.seen.wrapping_add(1);
        if completion.sequence != next {
            return None;
        }
        self.seen = next;
        Some(completion)
    }
}

/// A process's card and what it runs above it.
pub struct Process {
    card: OneRmaCard<GcmSeal>,
    world: World,
    received: ReceiveBuffer,
    executor: Executor,
    portals: Box<[Portal]>,
    local: Gid,
    pid: u32,
    finished: VecDeque<Finished>,
    /// Message numbers before this one were given to the card
    numbered: u64,
}

impl Process {
    /// Claims the first number of the address that no other card has, as long as the value lives. Of the
    /// settings, the faults, the capture and 1RMA's own count.
    ///
    /// # Errors
    /// The address is not this host's, or all its numbers are taken; the clock was never set; there is no
    /// memory or no socket.
    pub fn open(
        addr: &HostAddr,
        options: &ProcessOptions,
        settings: &Settings,
    ) -> Result<Self, BackendError> {
        /* the numbers after the port: who had it before has ended, and sent what it sent earlier */
        let world = World { port: OneRmaPort::open(addr, options.port, settings)? };
        let number = world.port.card();
        let numbers = numbers_at(SystemTime::now(), number).ok_or(BackendError::ClockUnset)?;
        let numbered = numbers.end;
        let fragment = addr.link_mtu.saturating_sub(48 + OVERHEAD as u32).min(MAX_OP);
        let slots = options.slots.max(1);
        let slots_of_card = options.card.slots.max(slots);
        let config = CardConfig { card: number, fragment, slots: slots_of_card, ..options.card };
        let timeouts = options.congestion.timeouts;
        let timeouts = timeouts.map(|timeouts| Timeouts { longest: config.timeout, ..timeouts });
        let congestion = CongestionSettings { timeouts, ..as_set(options.congestion, settings) };
        let counters = SealCounters::of_range(numbers);
        let mut card = OneRmaCard::new(config, GcmSeal, addr.gid, sender_of(&addr.gid), counters)
            .ok_or(BackendError::NoMemory)?;
        let rooms = (0..slots.div_ceil(PORTAL)).map(|portal| (slots - portal * PORTAL).min(PORTAL));
        let portals = rooms.map(|room| Portal::open(&mut card, options.pid, room));
        let portals: Result<Vec<_>, _> = portals.collect();
        let (portals, own): (Vec<_>, Vec<_>) =
            portals.map_err(|_| BackendError::NoMemory)?.into_iter().unzip();
        Ok(Process {
            card,
            world,
            received: ReceiveBuffer::new()?,
            executor: Executor::new(congestion, options.retries, &own),
            portals: portals.into_boxed_slice(),
            local: addr.gid,
            pid: options.pid,
            finished: VecDeque::new(),
            numbered,
        })
    }

    /// Opens `len` bytes at `addr` to whoever has a key of it, as `rights` say.
    ///
    /// # Errors
    /// The card's table of regions is full.
    ///
    /// # Safety
    /// The memory can be read and, with rights to write, written by anybody at any time until the region is
    /// closed or the process ended.
    pub unsafe fn open_region(
        &mut self,
        addr: *mut u8,
        len: usize,
        rights: Rights,
        key: RegionKey,
    ) -> Result<RegionId, ControlError> {
        let addr = addr.expose_provenance() as u64;
        self.card.open_region(Region { addr, len: len as u64, owner: self.pid, rights, key })
    }

    /// Closes a region: when this returns nobody reaches it.
    ///
    /// # Errors
    /// There is no such region.
    pub fn close_region(&mut self, region: RegionId) -> Result<(), ControlError> {
        self.card.close_region(region)
    }

    /// Changes a region's key: when this returns, the old one opens nothing.
    ///
    /// # Errors
    /// There is no such region.
    pub fn rekey_region(&mut self, region: RegionId, key: RegionKey) -> Result<(), ControlError> {
        self.card.rekey_region(region, key)
    }

    /// K_d of this process for an operation, from the key of a region: for a [`Transfer`].
    pub fn own_key(&self, region: &RegionKey, op: OneRmaOp) -> DerivedKey {
        GcmSeal.derive(region, &Initiator { addr: self.local, pid: self.pid }, op)
    }

    /// Takes a transfer. It begins with the next turn.
    ///
    /// # Errors
    /// Its length, or there is no memory.
    pub fn submit(&mut self, transfer: Transfer) -> Result<(), SubmitError> {
        self.finished.try_reserve(self.executor.active() + 1).map_err(|_| SubmitError::NoMemory)?;
        self.executor.submit(transfer)
    }

    /// A transfer that has ended, in the order in which they end.
    pub fn poll(&mut self) -> Option<Finished> {
        self.finished.pop_front()
    }

    /// Whether [`Process::poll`] has a transfer to give.
    pub fn has_finished(&self) -> bool {
        !self.finished.is_empty()
    }

    /// Takes what has come, and sends what can be sent. `clock` never goes back; it is read for each packet,
    /// as deadlines may pass within a turn. Gives how many packets came.
    pub fn turn(&mut self, clock: impl Fn() -> Nanos) -> usize {
        let mut came = 0;
        while came < RECEIVED && self.receive(&clock, |_| true) {
            came += 1;
        }
        self.advance(clock());
        if let Some(host) = &self.world.port.host {
            host.settle();
        }
        came
    }

    /// Takes a packet if one is there; `keep` may change it, or have it lost.
    fn receive(&mut self, clock: impl Fn() -> Nanos, keep: impl FnOnce(&mut [u8]) -> bool) -> bool {
        let Some((path, packet)) = self.received.next(&mut self.world.port) else { return false };
        /* after the system call that brought it */
        let now = clock();
        self.world.port.begin_turn(now);
        if keep(packet) {
            self.card.handle_packet(&mut self.world, now, &path, packet);
        }
        true
    }

    /// Everything that needs no packet.
    fn advance(&mut self, now: Nanos) {
        self.world.port.begin_turn(now);
        if self.card.counters_left() < LOW {
            self.renew_numbers();
        }
        if self.card.next_deadline().is_some_and(|deadline| deadline <= now) {
            self.card.handle_timeout(&mut self.world, now);
        }
        while self.reap(now) | self.issue(now) | self.transmit(now) {}
        self.world.port.flush();
    }

    /// The card goes on with the numbers from the clock's on, if it has not had them.
    #[cold]
    fn renew_numbers(&mut self) {
        if let Some(numbers) = numbers_at(SystemTime::now(), self.world.port.card())
            && numbers.start >= self.numbered
        {
            self.numbered = numbers.end;
            self.card.renew_counters(SealCounters::of_range(numbers));
        }
    }

    fn transmit(&mut self, now: Nanos) -> bool {
        let mut sent = false;
        while self.card.poll_transmit(&mut self.world, now) == Transmit::More {
            sent = true;
        }
        sent
    }

    /// Issues what the executor's windows and pacing allow.
    fn issue(&mut self, now: Nanos) -> bool {
        let mut issued = false;
        while let Some(SlotCommand { at: SlotAt { portal, slot }, command }) = self.executor.poll(now) {
            issued = true;
            let id = self.portals.get(usize::from(portal)).map(|portal| portal.id);
            if id.is_none_or(|id| self.card.issue(now, id, slot, &command).is_err()) {
                /* the slot is free and the size a command's: it is the local region */
                self.on_completion(now, portal, &refused(slot, command.op));
            }
        }
        issued
    }

    /// Takes the completions that the card has written.
    fn reap(&mut self, now: Nanos) -> bool {
        let mut any = false;
        for at in 0..self.portals.len() {
            while let Some(completion) = self.portals.get_mut(at).and_then(Portal::next_completion) {
                self.on_completion(now, at as u16, &completion);
                any = true;
            }
        }
        any
    }

    fn on_completion(&mut self, now: Nanos, portal: u16, completion: &Completion) {
        /* room was made when the transfer was taken */
        self.finished.extend(self.executor.on_completion(now, portal, completion));
    }

    /// When [`Process::turn`] has something to do if no packet comes before; it may be past.
    pub fn next_time(&self) -> Option<Nanos> {
        if self.received.any() {
            return Some(0);
        }
        let held_back = self.world.port.next_deadline();
        self.card.next_deadline().into_iter().chain(self.executor.next_time()).chain(held_back).min()
    }

    /// Whether who calls [`Process::turn`] does so again soon: cards of this host need not wake it then. Not
    /// so at first.
    pub fn set_polled(&mut self, polled: bool) {
        if let Some(host) = &mut self.world.port.host {
            host.set_polled(polled);
        }
    }

    /// Before a sleep on the descriptor: cards of this host wake it from now on.
    pub fn prepare_to_sleep(&mut self) {
        if let Some(host) = &mut self.world.port.host {
            host.prepare_to_sleep();
        }
    }

    /// A sleep on the descriptor is over, and the next turn is to look at all: others may have had turns
    /// meanwhile.
    pub fn note_woken(&mut self) {
        if let Some(host) = &mut self.world.port.host {
            host.note_woken();
        }
    }

    /// Sleeps until a packet is there, [`Process::next_time`] has come, or `limit` is over. `now` is the
    /// time of the last turn.
    pub fn wait(&mut self, now: Nanos, limit: Duration) {
        self.prepare_to_sleep();
        let next = self.next_time().map_or(limit, |next| Duration::from_nanos(next.saturating_sub(now)));
        sockopt::wait(&[self.as_raw_fd()], libc::POLLIN, next.min(limit));
    }

    /// What the card has counted.
    pub fn counts(&self) -> &CardCounts {
        self.card.counts()
    }

    /// Packets that the socket did not take, and datagrams that came from another UDP port than cards have;
    /// packets to and from cards of this host that went through memory.
    pub fn port_counts(&self) -> [u64; 4] {
        let port = &self.world.port;
        let [sent, received] = port.host.as_ref().map_or([0; 2], |host| [host.sent, host.received]);
        [port.unsent, port.foreign, sent, received]
    }
}

impl AsRawFd for Process {
    /// Readable when a packet comes, after [`Process::prepare_to_sleep`]; those that have come are
    /// [`Process::next_time`]'s.
    fn as_raw_fd(&self) -> RawFd {
        self.world.port.as_raw_fd()
    }
}

/// How a command ends that the card did not take.
fn refused(slot: u16, op: OneRmaOp) -> Completion {
    let status = Status::LocalAccess;
    Completion { slot, status, op, bytes: 0, issue_delay: 0, total_delay: 0, sequence: 0 }
}

#[cfg(test)]
#[path = "process_tests.rs"]
mod tests;
