//! What the card works in: memory of the board's clients, the UDP port, their queues.
//!
//! Host addresses in the card's tables carry the number of the client's function above their
//! [`ADDRESS_BITS`], or those of a range of [`Tables`], so that whatever the card does with a region is done
//! to the memory of who registered it.

use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};

use starverbs_backend::star::StarPort;
use starverbs_core::congestion::AnyWindow;
use starverbs_core::mr::Plain;
use starverbs_core::{AsyncEvent, Av, ContextMove, Dma, Env, Gid, Host, Nanos, Port, Qpn, Seg};
use starverbs_queues::board::{COUNTER_DMA_MISSES, COUNTER_DMA_READS, COUNTER_DMA_WRITES};
use starverbs_star::stateful::Stateful;

use crate::broken;
use crate::counters::BoardCounters;
use crate::cq::BoardCq;
use crate::dma::{ADDRESS_BITS, Errno, Maps};
use crate::qpc::HostContexts;
use crate::queues::{BoardRq, BoardSq, QueueQuota};
use crate::record::{BusTap, Tap};
use crate::slots::{BoardSlots, SlotPlace, SlotTable};
use crate::stats::Stats;
use crate::tables::{RANGE_BITS, Tables};
use crate::wire::{WireTx, gather};

/// Most payload bytes of a frame: the largest path MTU.
const MAX_PAYLOAD: usize = 4096;

/// Frames between two flushes of a port that is recorded.
const RECORDED: u32 = 64;

/// A client's memory, and what it counts.
pub(crate) struct ClientMemory {
    pub(crate) maps: Maps,
    pub(crate) tables: Tables,
    /// Where QP contexts are that are not on chip; `None`: in the board's own memory
    pub(crate) contexts: Option<HostContexts>,
    pub(crate) counters: Rc<BoardCounters>,
    /// What the board keeps for it at most
    kept: QueueQuota,
}

impl ClientMemory {
    /// No memory. `most`: see [`Maps::new`].
    pub(crate) fn new(
        most: u64,
        counters: &Rc<BoardCounters>,
        kept: &QueueQuota,
        tap: BusTap,
    ) -> ClientMemory {
        let maps = Maps::new(most, Rc::clone(counters), tap);
        let (counters, kept) = (Rc::clone(counters), kept.clone());
        ClientMemory { maps, tables: Tables::default(), contexts: None, counters, kept }
    }

    /// Whether one more queue pair may be made. ENOMEM: its context has no place.
    pub(crate) fn has_room_for_qp(&self) -> Result<(), Errno> {
        let has_room = self.contexts.as_ref().is_none_or(HostContexts::has_room);
        if has_room { Ok(()) } else { Err(libc::ENOMEM) }
    }

    /// A queue pair is made.
    pub(crate) fn join_qp(&self, qpn: Qpn) {
        if let Some(contexts) = &self.contexts {
            contexts.join(qpn, &self.maps, &self.counters);
        }
    }

    /// A queue pair ends.
    pub(crate) fn leave_qp(&self, qpn: Qpn) {
        if let Some(contexts) = &self.contexts {
            contexts.leave(qpn);
        }
    }

    /// Walks over the pieces of memory in which `len` bytes lie: `f(DMA address, which of the bytes)`. Gives
    /// how many there were; `None`: they are not all there, or `f` says so.
    fn walk(
        &self,
        place: HostAddress,
        len: usize,
        mut f: impl FnMut(u64, Range<usize>) -> bool,
    ) -> Option<u64> {
        match place {
            HostAddress::Direct(at) => f(at, 0..len).then_some(1),
            HostAddress::Paged(at) => self.tables.walk(&self.maps, at, len, f),
        }
    }

    /// Counts an access of so many pieces, or a miss.
    fn count(&self, which: u32, pieces: Option<u64>) {
        match pieces {
            Some(pieces) => (0..pieces).for_each(|_| self.counters.inc(which)),
            None => self.counters.inc(if broken::rule(35) { which } else { COUNTER_DMA_MISSES }),
        }
    }
}

/// What a host address of the card's stands for.
#[derive(Clone, Copy)]
pub(crate) enum HostAddress {
    /// A DMA address
    Direct(u64),
    /// An address of a range of [`Tables`]
    Paged(u64),
}

/// What the card works in.
pub(crate) struct BoardEnv {
    pub(crate) tx: WireTx,
    /// By number of the function
    pub(crate) memories: Vec<ClientMemory>,
    /// Raised in this turn
    pub(crate) events: Vec<AsyncEvent>,
    /// Copies of memory that is not here, for the frame whose payload was begun
    bounce: Box<[u8; MAX_PAYLOAD]>,
    bounced: usize,
    /// StaR's ports, once they are open
    pub(crate) star: Option<Box<StarPort<Stats>>>,
    /// Queue pairs whose roles were settled in this turn
    pub(crate) settled: Vec<Qpn>,
    /// Slots of its stateless ends
    slots: SlotTable,
    tap: Rc<Tap>,
    /// Frames since the last flush
    unflushed: u32,
    /// When that was
    flushed_at: Nanos,
}

/// Of a host address: it is one of a range. Null regions end there.
const PAGED: u64 = 3 << 62;

/// The host address by which the card knows a function's memory.
pub(crate) fn host_address(function: usize, place: HostAddress) -> u64 {
    let tag = function as u64 + 1;
    match place {
        HostAddress::Direct(address) => tag << ADDRESS_BITS | address,
        HostAddress::Paged(address) => PAGED | tag << RANGE_BITS | address,
    }
}

/// The host address of null regions: no function has so high a number.
pub(crate) const NULL: u64 = 1 << 63;
/// Bytes of a null region.
pub(crate) const NULL_BYTES: u64 = 1 << 62;

pub(crate) fn is_null(host: u64) -> bool {
    (NULL..PAGED).contains(&host) && !broken::rule(52)
}

/// Whether it is an address of the board's own: that of inline bytes, in the copy of a WQE. Memory of clients
/// has the number of a function in it.
fn is_own(host: u64) -> bool {
    host >> ADDRESS_BITS == 0
}

/// What null regions read as.
static ZEROES: [u8; MAX_PAYLOAD] = [0; MAX_PAYLOAD];

/// The function, and its memory, of a host address. `None`: it is nobody's.
pub(crate) fn client_address(host: u64) -> Option<(usize, HostAddress)> {
    let below = |bits: u32| host & ((1 << bits) - 1);
    let (tag, place) = match host & PAGED {
        PAGED => ((host & !PAGED) >> RANGE_BITS, HostAddress::Paged(below(RANGE_BITS))),
        _ => (host >> ADDRESS_BITS, HostAddress::Direct(below(ADDRESS_BITS))),
    };
    Some((usize::try_from(tag.checked_sub(1)?).ok()?, place))
}

impl BoardEnv {
    pub(crate) fn new(tx: WireTx, memories: Vec<ClientMemory>, tap: Rc<Tap>) -> Self {
        let events = Vec::with_capacity(64);
        BoardEnv {
            tx,
            memories,
            events,
            bounce: Box::new([0; MAX_PAYLOAD]),
            bounced: 0,
            star: None,
            settled: Vec::new(),
            slots: SlotTable::default(),
            tap,
            unflushed: 0,
            flushed_at: 0,
        }
    }

    fn memory(&self, host: u64) -> Option<(&ClientMemory, HostAddress)> {
        let (function, place) = client_address(host)?;
        Some((self.memories.get(function)?, place))
    }

    /// Does something to a client's memory, piece by piece; counts it, or the miss.
    fn on(
        &self,
        host: u64,
        len: usize,
        which: u32,
        mut access: impl FnMut(&Maps, u64, Range<usize>) -> bool,
    ) -> bool {
        let Some((memory, place)) = self.memory(host) else { return false };
        let done = memory.walk(place, len, |at, range| access(&memory.maps, at, range));
        memory.count(which, done);
        done.is_some()
    }

    /// Whether the payload that was begun has copies; they are in no payload any more.
    pub(crate) fn take_bounced(&mut self) -> bool {
        std::mem::take(&mut self.bounced) != 0
    }

    /// Slot memory for a connection of a function, and its address. `None`: it has no room for more.
    pub(crate) fn make_area(&self, bytes: u64, function: usize) -> Option<(BoardSlots, u64)> {
        let share = self.memories.get(function)?.kept.take(usize::try_from(bytes).ok()?).ok()?;
        self.slots.make(bytes, function, share)
    }

    /// Areas of slot memory that there are.
    #[cfg(test)]
    pub(crate) fn slot_areas(&self) -> usize {
        self.slots.count()
    }

    /// The address and the words of an area of slot memory.
    #[cfg(test)]
    pub(crate) fn slot_area(&self, number: usize) -> Option<(u64, Vec<u64>)> {
        self.slots.words(0, number)
    }

    /// Sends what was added.
    pub(crate) fn flush(&mut self, now: Nanos) {
        self.tx.flush(now);
        (self.unflushed, self.flushed_at) = (0, now);
    }

    /// Changes a word.
    fn change(&self, host: u64, change: impl Fn(u64) -> u64) -> Option<u64> {
        let mut old = None;
        let change_one = |maps: &Maps, at, range: Range<usize>| {
            old = maps.change(at, &change);
            range.len() == size_of::<u64>() && old.is_some()
        };
        self.on(host, size_of::<u64>(), COUNTER_DMA_WRITES, change_one).then_some(())?;
        old
    }

    /// A region has ended whose host address was this: if it had a table, that is gone, too.
    pub(crate) fn forget_table(&mut self, host: Option<u64>) {
        if let Some((function, HostAddress::Paged(at))) = host.and_then(client_address)
            && let Some(memory) = self.memories.get_mut(function)
        {
            memory.tables.remove(at);
        }
    }
}

impl Env for BoardEnv {
    type Sq = BoardSq;
    type Rq = BoardRq;
    type Cq = BoardCq;
    type Stats = Stats;
    type Congestion = AnyWindow;
    type Engine = Box<Stateful<BoardEnv>>;
}

impl Dma for BoardEnv {
    type Mrs = Plain;

    /* no bytes need no key, and so have no address that anybody has checked: here and below */
    fn dma_write(&mut self, addr: u64, data: &[u8]) -> bool {
        if data.is_empty() || is_null(addr) {
            return true;
        }
        if let Some(place) = SlotPlace::of(addr) {
            return self.slots.write(place, data);
        }
        let wrong;
        let mut data = data;
        if broken::rule(26) {
            wrong = data.iter().map(|byte| !byte).collect::<Vec<_>>();
            data = &wrong;
        }
        self.on(addr, data.len(), COUNTER_DMA_WRITES, |maps, at, range| maps.write(at, &data[range]))
    }

    fn dma_fetch_add(&mut self, addr: u64, add: u64) -> Option<u64> {
        self.change(addr, |old| old.wrapping_add(add))
    }

    fn dma_compare_swap(&mut self, addr: u64, compare: u64, swap: u64) -> Option<u64> {
        self.change(addr, |old| if old == compare { swap } else { old })
    }

    fn dma_store(&mut self, addr: u64, bytes: [u8; 8]) -> bool {
        if let Some(place) = SlotPlace::of(addr) {
            return self.slots.write(place, &bytes);
        }
        self.change(addr, |_| u64::from_ne_bytes(bytes)).is_some()
    }

    fn dma_copy(&mut self, from: u64, to: &mut [u8]) -> bool {
        if to.is_empty() {
            return true;
        }
        if is_null(from) {
            to.fill(0);
            return true;
        }
        if let Some(place) = SlotPlace::of(from) {
            return self.slots.read(place, to);
        }
        if is_own(from) {
            // SAFETY: inline bytes of a WQE's copy, of which StaR's host half has the address from
            // `SendQueue::inline` and asks in the same call: they are there, and nobody writes them
            // meanwhile. No region has such an address, and no packet reaches what is none of a region.
            unsafe { to.as_mut_ptr().copy_from_nonoverlapping(from as *const u8, to.len()) };
            return true;
        }
        self.on(from, to.len(), COUNTER_DMA_READS, |maps, at, range| maps.read(at, &mut to[range]))
    }

    fn dma_fence(&mut self) {
        fence(Ordering::SeqCst);
    }

    fn begin_payload(&mut self) {
        self.bounced = 0;
    }

    fn dma_read(&mut self, from: Seg) -> Option<Seg> {
        let len = from.len as usize;
        if len == 0 {
            return Some(Seg { addr: self.bounce.as_ptr() as u64, len: 0 });
        }
        if is_null(from.addr) {
            return ZEROES.get(..len).map(|zeroes| Seg { addr: zeroes.as_ptr() as u64, len: from.len });
        }
        if is_own(from.addr) {
            /* it can be read where it is: as in `dma_copy` */
            return Some(from);
        }
        let (function, place) = client_address(from.addr)?;
        let memory = self.memories.get(function)?;
        /* where it lies, if that is in one piece */
        let mut here: Option<*const u8> = None;
        let in_one_piece = |at, range: Range<usize>| {
            let next = memory.maps.pointer(at, range.len());
            let first = *here.get_or_insert(next.unwrap_or_default());
            next.is_some_and(|next| next == first.wrapping_add(range.start))
        };
        let mut pieces = memory.walk(place, len, in_one_piece);
        if pieces.is_none() {
            let room = self.bounce.get_mut(self.bounced..).and_then(|left| left.get_mut(..len))?;
            pieces = memory.walk(place, len, |at, range| memory.maps.read(at, &mut room[range]));
            here = Some(room.as_ptr());
            self.bounced += if pieces.is_some() { len } else { 0 };
        }
        memory.count(COUNTER_DMA_READS, pieces);
        pieces.and(here).map(|here| Seg { addr: here as u64, len: from.len })
    }
}

impl Port for BoardEnv {
    fn send_frame(&mut self, to: &Av, header: &[u8], payload: &[Seg], pad: u8, volatile: bool) {
        let volatile = self.take_bounced() || volatile;
        let wrong;
        let mut header = header;
        if broken::rule(27)
            && let [front @ .., last] = header
        {
            wrong = [front, &[!last]].concat();
            header = &wrong;
        }
        if self.tap.is_on() {
            // SAFETY: as below.
            self.tap.frame_out(to, || unsafe { gather(header, payload, pad) });
            self.unflushed += 1;
            if !self.tx.can_send() {
                self.tx.flush(self.flushed_at);
            }
        }
        // SAFETY: the segments lie in maps, in copies of WQEs or in `bounce`; the port is flushed at the end
        // of each turn, before a message of a client can end any of them. Commands that waited for peers are
        // carried out at the begin of a turn, before anything in it is sent.
        unsafe { self.tx.send_frame(to, header, payload, pad, volatile) };
    }

    fn can_send(&self) -> bool {
        /* what is recorded does not depend on how much room the host has */
        if self.tap.is_on() { self.unflushed < RECORDED } else { self.tx.can_send() }
    }

    fn is_own(&self, source: &Gid) -> bool {
        self.tx.has_address(source)
    }
}

impl Host for BoardEnv {
    fn event(&mut self, event: AsyncEvent) {
        self.events.push(event);
    }

    fn move_context(&mut self, qpn: Qpn, to: ContextMove) {
        for ClientMemory { contexts, maps, counters, .. } in &self.memories {
            if contexts.as_ref().is_some_and(|contexts| contexts.move_context(qpn, to, maps, counters)) {
                return;
            }
        }
    }
}
