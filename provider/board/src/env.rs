//! What the card works in: memory of the board's clients, the UDP port, their queues.
//!
//! Host addresses in the card's tables carry the number of the client's function above their
//! [`ADDRESS_BITS`], so that whatever the card does with a region is done to the memory of who registered it.

use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};

use starverbs_backend::{Payload, RoceTx};
use starverbs_core::congestion::Aimd;
use starverbs_core::mr::Plain;
use starverbs_core::{AsyncEvent, Av, Counters, Dma, Env, Gid, Host, Port, Seg};
use starverbs_queues::board::{COUNTER_DMA_MISSES, COUNTER_DMA_READS, COUNTER_DMA_WRITES};

use crate::broken;
use crate::counters::BoardCounters;
use crate::cq::BoardCq;
use crate::dma::{ADDRESS_BITS, Maps};
use crate::queues::{BoardRq, BoardSq};

/// Most payload bytes of a frame: the largest path MTU.
const MAX_PAYLOAD: usize = 4096;

/// A client's memory, and what it counts.
pub(crate) struct Memory {
    pub(crate) maps: Maps,
    pub(crate) counters: Rc<BoardCounters>,
}

impl Memory {
    /// No memory. `most`: see [`Maps::new`].
    pub(crate) fn new(most: u64, counters: &Rc<BoardCounters>) -> Memory {
        Memory { maps: Maps::new(most, Rc::clone(counters)), counters: Rc::clone(counters) }
    }
}

/// What the card works in.
pub(crate) struct BoardEnv {
    pub(crate) tx: RoceTx<Rc<Counters>>,
    /// By number of the function
    pub(crate) memories: Vec<Memory>,
    /// Raised in this turn
    pub(crate) events: Vec<AsyncEvent>,
    /// Copies of memory that is not here, for the frame whose payload was begun
    bounce: Box<[u8; MAX_PAYLOAD]>,
    bounced: usize,
}

/// The host address by which the card knows a client's address.
pub(crate) fn host_address(function: usize, address: u64) -> u64 {
    (function as u64 + 1) << ADDRESS_BITS | address
}

/// The host address of null regions: no function has so high a number.
pub(crate) const NULL: u64 = 1 << 63;
/// Bytes of a null region.
pub(crate) const NULL_BYTES: u64 = 1 << 62;

fn is_null(host: u64) -> bool {
    host >= NULL && !broken::rule(52)
}

/// What null regions read as.
static ZEROES: [u8; MAX_PAYLOAD] = [0; MAX_PAYLOAD];

/// The client's address of it.
pub(crate) fn client_address(host: u64) -> u64 {
    host & ((1 << ADDRESS_BITS) - 1)
}

impl BoardEnv {
    pub(crate) fn new(tx: RoceTx<Rc<Counters>>, memories: Vec<Memory>) -> Self {
        let events = Vec::with_capacity(64);
        BoardEnv { tx, memories, events, bounce: Box::new([0; MAX_PAYLOAD]), bounced: 0 }
    }

    /// Does something to a client's memory; counts it, or the miss.
    fn on<T>(&self, host: u64, which: u32, access: impl FnOnce(&Maps, u64) -> Option<T>) -> Option<T> {
        let number = (host >> ADDRESS_BITS).checked_sub(1)?;
        let memory = self.memories.get(usize::try_from(number).ok()?)?;
        let done = access(&memory.maps, client_address(host));
        memory.counters.inc(if done.is_some() || broken::rule(35) { which } else { COUNTER_DMA_MISSES });
        done
    }
}

impl Env for BoardEnv {
    type Sq = BoardSq;
    type Rq = BoardRq;
    type Cq = BoardCq;
    type Stats = Rc<Counters>;
    type Congestion = Aimd;
    type Engine = std::convert::Infallible;
}

impl Dma for BoardEnv {
    type Mrs = Plain;

    /* no bytes need no key, and so have no address that anybody has checked: here and below */
    fn dma_write(&mut self, addr: u64, data: &[u8]) -> bool {
        if data.is_empty() || is_null(addr) {
            return true;
        }
        let wrong;
        let mut data = data;
        if broken::rule(26) {
            wrong = data.iter().map(|byte| !byte).collect::<Vec<_>>();
            data = &wrong;
        }
        self.on(addr, COUNTER_DMA_WRITES, |maps, at| maps.write(at, data).then_some(())).is_some()
    }

    fn dma_fetch_add(&mut self, addr: u64, add: u64) -> Option<u64> {
        self.on(addr, COUNTER_DMA_WRITES, |maps, at| maps.change(at, |old| old.wrapping_add(add)))
    }

    fn dma_compare_swap(&mut self, addr: u64, compare: u64, swap: u64) -> Option<u64> {
        let change = |old| if old == compare { swap } else { old };
        self.on(addr, COUNTER_DMA_WRITES, |maps, at| maps.change(at, change))
    }

    fn dma_store(&mut self, addr: u64, bytes: [u8; 8]) -> bool {
        let change = |_| u64::from_ne_bytes(bytes);
        self.on(addr, COUNTER_DMA_WRITES, |maps, at| maps.change(at, change)).is_some()
    }

    fn dma_copy(&mut self, from: u64, to: &mut [u8]) -> bool {
        if to.is_empty() {
            return true;
        }
        if is_null(from) {
            to.fill(0);
            return true;
        }
        self.on(from, COUNTER_DMA_READS, |maps, at| maps.read(at, to).then_some(())).is_some()
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
        let number = (from.addr >> ADDRESS_BITS).checked_sub(1)?;
        let Memory { maps, counters } = self.memories.get(usize::try_from(number).ok()?)?;
        let at = client_address(from.addr);
        let seg = match maps.pointer(at, len) {
            Some(here) => Some(here),
            None => {
                let room = self.bounce.get_mut(self.bounced..).and_then(|left| left.get_mut(..len))?;
                let there = maps.read(at, room);
                self.bounced += if there { len } else { 0 };
                there.then_some(room.as_ptr())
            }
        };
        counters.inc(if seg.is_some() { COUNTER_DMA_READS } else { COUNTER_DMA_MISSES });
        seg.map(|here| Seg { addr: here as u64, len: from.len })
    }
}

impl Port for BoardEnv {
    fn send_frame(&mut self, to: &Av, header: &[u8], payload: &[Seg], pad: u8, volatile: bool) {
        let volatile = volatile || std::mem::take(&mut self.bounced) != 0;
        // SAFETY: the segments lie in maps, in copies of WQEs or in `bounce`; the port is flushed at the end
        // of each turn, before a message of a client can end any of them.
        let payload = unsafe { Payload::new(payload) };
        if broken::rule(27)
            && let [front @ .., last] = header
        {
            return self.tx.send_frame(to, &[front, &[!last]].concat(), payload, pad, volatile);
        }
        self.tx.send_frame(to, header, payload, pad, volatile);
    }

    fn can_send(&self) -> bool {
        self.tx.can_send()
    }

    fn is_own(&self, source: &Gid) -> bool {
        self.tx.has_address(source)
    }
}

impl Host for BoardEnv {
    fn event(&mut self, event: AsyncEvent) {
        self.events.push(event);
    }
}
