//! Failures found under the card's lock: logged when the lock is released.
//!
//! Entries are atomic words: to add one allocates nothing and blocks on nothing, and a forked child finds no
//! lock held. Owns the entries; `log` owns the level and the output. Events of connections and references to
//! drop wait here too, in queues of their own.

use std::array;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::cm::{Deliveries, Delivery};
use crate::events::kind;
use crate::log::{self, log};
use crate::qp::Qp;
use starverbs_settings::LogLevel;

/// Entries kept at once. More are only counted.
const MOST: usize = 16;
/// Beside the kinds of events: the peer of a queue pair does not speak StRoM's dialect.
pub(in crate::device) const NO_DIALECT: u32 = 1 << 16;
/// An empty place.
const NONE: u64 = 0;

/// The deferred log of a card.
pub(crate) struct DeferredLog {
    any: AtomicBool,
    /// Kind of event plus 1, then a number
    entries: [AtomicU64; MOST],
    lost: AtomicU32,
    /// Events of connections
    deliveries: Deliveries,
    /// References to QPs that other processes had
    dropped: Mutex<Vec<Qp>>,
}

impl DeferredLog {
    pub(crate) fn new() -> Self {
        let entries = array::from_fn(|_| AtomicU64::new(NONE));
        DeferredLog {
            any: AtomicBool::new(false),
            entries,
            lost: AtomicU32::new(0),
            deliveries: Deliveries::default(),
            dropped: Mutex::default(),
        }
    }

    /// Adds an event of this `kind`: of the queue pair `number`, or of a completion queue that holds `number`
    /// completions.
    #[cold]
    pub(crate) fn add(&self, kind: u32, number: u32) {
        if !log::is_enabled(LogLevel::Warn) {
            return;
        }
        let entry = (u64::from(kind) + 1) << 32 | u64::from(number);
        let free = |place: &&AtomicU64| {
            place.compare_exchange(NONE, entry, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        if self.entries.iter().find(free).is_none() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        self.any.store(true, Ordering::Release);
    }

    /// Has the sink of a connection notified when the lock is released.
    #[cold]
    pub(crate) fn deliver_later(&self, delivery: Delivery) {
        self.deliveries.push(delivery);
        self.any.store(true, Ordering::Release);
    }

    /// Has these dropped when the lock is released; without memory they stay where they are.
    #[cold]
    pub(crate) fn drop_later(&self, qps: &mut Vec<Qp>) {
        let mut dropped = self.dropped.lock().unwrap_or_else(PoisonError::into_inner);
        if dropped.try_reserve(qps.len()).is_ok() {
            dropped.append(qps);
            self.any.store(true, Ordering::Release);
        }
    }

    /// Logs, notifies and drops what was added. The card's lock is not held.
    #[inline]
    pub(crate) fn flush(&self) {
        if self.any.load(Ordering::Relaxed) {
            self.flush_all();
        }
    }

    #[cold]
    fn flush_all(&self) {
        self.any.swap(false, Ordering::Acquire);
        for place in &self.entries {
            let entry = place.swap(NONE, Ordering::Relaxed);
            let number = entry as u32;
            match ((entry >> 32) as u32).checked_sub(1) {
                None => {}
                Some(kind::CQ_ERR) => log!(Warn, "a completion queue of {number} overran"),
                Some(NO_DIALECT) => {
                    log!(Warn, "queue pair {number:#x}: an RPC fails, as the peer's speaks no StRoM");
                }
                Some(kind) => log!(Warn, "queue pair {number:#x} failed: {}", name(kind)),
            }
        }
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            log!(Warn, "{lost} more failed");
        }
        self.deliveries.notify();
        let dropped = std::mem::take(&mut *self.dropped.lock().unwrap_or_else(PoisonError::into_inner));
        drop(dropped);
    }
}

/// What ibv_get_async_event(3) calls an event of a queue pair that failed.
fn name(kind: u32) -> &'static str {
    match kind {
        kind::QP_FATAL => "IBV_EVENT_QP_FATAL",
        kind::QP_REQ_ERR => "IBV_EVENT_QP_REQ_ERR",
        _ => "IBV_EVENT_QP_ACCESS_ERR",
    }
}
