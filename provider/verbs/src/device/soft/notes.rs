//! What the card's holder finds failed, kept until the card's lock is given back, and said then.
//!
//! A few words of atomics: to note allocates nothing, waits for nobody, and a child forked meanwhile finds no
//! lock that nobody gives back. Owns the notes; `log` owns whether and how they are said. What happens to
//! connections waits here too, in a queue of its own.

use std::array;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::cm::{Deliveries, Delivery};
use crate::events::kind;
use crate::log::{self, log};
use crate::qp::Qp;
use starverbs_settings::LogLevel;

/// Notes that wait at once. More are counted only.
const MOST: usize = 16;
/// An empty place.
const NONE: u64 = 0;

/// The notes of a card.
pub(crate) struct Notes {
    any: AtomicBool,
    /// Kind of event and 1, then a number
    places: [AtomicU64; MOST],
    lost: AtomicU32,
    /// Of connections
    deliveries: Deliveries,
    /// References to QPs that other processes had
    dropped: Mutex<Vec<Qp>>,
}

impl Notes {
    pub(crate) fn new() -> Self {
        let places = array::from_fn(|_| AtomicU64::new(NONE));
        Notes {
            any: AtomicBool::new(false),
            places,
            lost: AtomicU32::new(0),
            deliveries: Deliveries::default(),
            dropped: Mutex::default(),
        }
    }

    /// Has an event of this `kind` be said, of a queue pair by its number, of a completion queue with how
    /// many it holds.
    #[cold]
    pub(crate) fn add(&self, kind: u32, number: u32) {
        if !log::says(LogLevel::Warn) {
            return;
        }
        let note = (u64::from(kind) + 1) << 32 | u64::from(number);
        let free = |place: &&AtomicU64| {
            place.compare_exchange(NONE, note, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        if self.places.iter().find(free).is_none() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        self.any.store(true, Ordering::Release);
    }

    /// Has an event of a connection be told.
    #[cold]
    pub(crate) fn deliver_later(&self, delivery: Delivery) {
        self.deliveries.push(delivery);
        self.any.store(true, Ordering::Release);
    }

    /// Has these be dropped; they stay where there is no memory for them.
    #[cold]
    pub(crate) fn drop_later(&self, qps: &mut Vec<Qp>) {
        let mut dropped = self.dropped.lock().unwrap_or_else(PoisonError::into_inner);
        if dropped.try_reserve(qps.len()).is_ok() {
            dropped.append(qps);
            self.any.store(true, Ordering::Release);
        }
    }

    /// Says what was noted. The card's lock is not held.
    #[inline]
    pub(crate) fn say(&self) {
        if self.any.load(Ordering::Relaxed) {
            self.say_all();
        }
    }

    #[cold]
    fn say_all(&self) {
        self.any.swap(false, Ordering::Acquire);
        for place in &self.places {
            let note = place.swap(NONE, Ordering::Relaxed);
            let number = note as u32;
            match ((note >> 32) as u32).checked_sub(1) {
                None => {}
                Some(kind::CQ_ERR) => log!(Warn, "a completion queue of {number} overran"),
                Some(kind) => log!(Warn, "queue pair {number:#x} failed: {}", name(kind)),
            }
        }
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            log!(Warn, "{lost} more failed");
        }
        self.deliveries.tell();
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
