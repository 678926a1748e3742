//! What the registers say of the board's QP contexts, of which it has room on chip for some
//! (`STARVERBS_QPC_CACHE`), as a card of csRNA's has; and the memory of the host's in which the others are.
//!
//! The core keeps contexts, and has them all (`starverbs_core::qpc`): what is written to the host's memory is
//! an image, which says whose context it is and how often it was written, and is compared when it is read.

use std::cell::RefCell;
use std::collections::BTreeMap;

use starverbs_core::qpc::Policy;
use starverbs_core::{ContextCache, ContextMove, Qpn};
use starverbs_queues::board::{
    COUNTER_DMA_MISSES, COUNTER_DMA_READS, COUNTER_DMA_WRITES, COUNTER_MALFORMED, COUNTER_QPC_EVICTED,
    COUNTER_QPC_HITS, COUNTER_QPC_MISSES, COUNTER_QPC_PREFETCHED, COUNTER_QPC_WAITED, QPC_BYTES,
    QPC_POLICY_FCFS, QPC_POLICY_LATENCY_HIDING, QPC_POLICY_NON_BLOCKING, REG_QPC_ENTRIES, REG_QPC_POLICY,
};

use crate::broken;
use crate::counters::BoardCounters;
use crate::dma::{Errno, Maps};
use crate::stats::Stats;

/// The cache of all functions, and what it counts.
#[derive(Clone)]
pub(crate) struct QpcRegisters {
    cache: Option<ContextCache>,
    stats: Stats,
}

impl QpcRegisters {
    /// `cache`: `None`: all contexts have room on chip.
    pub(crate) fn new(cache: Option<ContextCache>, stats: Stats) -> QpcRegisters {
        QpcRegisters { cache, stats }
    }

    /// The register at `at`, if it is one of these.
    pub(crate) fn register(&self, at: u32) -> Option<u32> {
        match at {
            REG_QPC_ENTRIES => Some(self.cache.map_or(0, |cache| cache.entries)),
            REG_QPC_POLICY if broken::rule(58) => Some(u32::MAX),
            REG_QPC_POLICY => Some(match self.cache.map(|cache| cache.policy) {
                Some(Policy::Fcfs) | None => QPC_POLICY_FCFS,
                Some(Policy::NonBlocking) => QPC_POLICY_NON_BLOCKING,
                Some(Policy::LatencyHiding) => QPC_POLICY_LATENCY_HIDING,
            }),
            _ => None,
        }
    }

    /// The counter `which`, if it is one of these.
    pub(crate) fn counter(&self, which: u32) -> Option<u64> {
        let counter = match which {
            COUNTER_QPC_HITS => &self.stats.qpc_hits,
            COUNTER_QPC_MISSES => &self.stats.qpc_misses,
            COUNTER_QPC_WAITED => &self.stats.qpc_waited,
            COUNTER_QPC_PREFETCHED => &self.stats.qpc_prefetched,
            COUNTER_QPC_EVICTED => &self.stats.qpc_evicted,
            _ => return None,
        };
        Some(counter.get())
    }
}

/// log2 of the contexts of a memory at most: QPNs have 24 bits.
const MAX_LOG: u32 = 24;
const BYTES: usize = QPC_BYTES as usize;
const _: () = assert!(QPC_BYTES == starverbs_core::qpc::QPC_BYTES);

/// Memory of a function's client for QP contexts.
pub(crate) struct HostContexts {
    base: u64,
    /// Places in it
    count: usize,
    /// The place of each queue pair, and how often its image was written
    places: RefCell<BTreeMap<Qpn, (usize, u32)>>,
    free: RefCell<Vec<usize>>,
}

impl HostContexts {
    /// 2^`log` contexts at `base`. EINVAL: not aligned to 64 bytes, or too many; EFAULT: not all in maps that
    /// are here and may be written.
    pub(crate) fn open(maps: &Maps, base: u64, log: u32) -> Result<HostContexts, Errno> {
        if log > MAX_LOG {
            return Err(libc::EINVAL);
        }
        maps.room(base, BYTES << log, 64)?;
        Ok(HostContexts { base, count: 1 << log, places: RefCell::default(), free: RefCell::default() })
    }

    /// Whether one more queue pair has a place.
    pub(crate) fn has_room(&self) -> bool {
        self.places.borrow().len() < self.count
    }

    /// A queue pair is made: its context is written.
    pub(crate) fn join(&self, qpn: Qpn, maps: &Maps, counters: &BoardCounters) {
        let mut places = self.places.borrow_mut();
        let place = self.free.borrow_mut().pop().unwrap_or(places.len());
        places.insert(qpn, (place, 0));
        drop(places);
        if !broken::rule(60) {
            self.move_context(qpn, ContextMove::Evicted, maps, counters);
        }
    }

    /// It ends.
    pub(crate) fn leave(&self, qpn: Qpn) {
        if let Some((place, _)) = self.places.borrow_mut().remove(&qpn) {
            self.free.borrow_mut().push(place);
        }
    }

    /// A context is read, or written. False: it has no place here.
    pub(crate) fn move_context(
        &self,
        qpn: Qpn,
        to: ContextMove,
        maps: &Maps,
        counters: &BoardCounters,
    ) -> bool {
        let mut places = self.places.borrow_mut();
        let Some((place, times)) = places.get_mut(&qpn) else { return false };
        let at = self.base + (*place * BYTES) as u64;
        let (which, done) = match to {
            ContextMove::Evicted => {
                *times = times.wrapping_add(1);
                (COUNTER_DMA_WRITES, maps.write(at, &image(qpn, *times)))
            }
            ContextMove::Fetched => {
                let mut found = [0; BYTES];
                let there = maps.read(at, &mut found);
                if there && found != image(qpn, *times) {
                    counters.inc(COUNTER_MALFORMED);
                }
                (COUNTER_DMA_READS, there)
            }
        };
        counters.inc(if done { which } else { COUNTER_DMA_MISSES });
        true
    }
}

/// What stands for a context in memory.
fn image(qpn: Qpn, times: u32) -> [u8; BYTES] {
    let mut image = [0; BYTES];
    image[..4].copy_from_slice(&qpn.to_le_bytes());
    image[4..8].copy_from_slice(&times.to_le_bytes());
    image
}
