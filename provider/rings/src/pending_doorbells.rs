//! Doorbells that found the card busy, left for the holder of its lock.
//!
//! Nobody waits for the lock on the data path: a thread that does not get it leaves the queue pair's number.
//! So a holder that gives the lock back looks here once more, and so does the leaver, in case the holder
//! looked too early.

use starverbs_core::Qpn;

use crate::spin::SpinLock;
use crate::sync::{AtomicBool, Ordering, fence_behind_change};

/// Queue pairs whose doorbell waits for the card.
pub struct PendingDoorbells {
    waiting: AtomicBool,
    list: SpinLock<Vec<Qpn>>,
}

impl PendingDoorbells {
    /// A card for which no doorbell was left.
    #[allow(clippy::new_without_default, reason = "a card's part, made with it")]
    pub fn new() -> Self {
        PendingDoorbells { waiting: AtomicBool::new(false), list: SpinLock::new(Vec::new()) }
    }

    /// Leaves the doorbell of `qpn`; twice is as good as once. [`PendingDoorbells::serve`] comes next.
    pub fn leave(&self, qpn: Qpn) {
        let mut list = self.list.lock();
        if !list.contains(&qpn) {
            list.push(qpn);
        }
        self.waiting.store(true, Ordering::Relaxed);
    }

    /// Hands the doorbells that were left to `f`, as the card.
    #[inline]
    pub fn take(&self, mut f: impl FnMut(Qpn)) {
        if !self.waiting.load(Ordering::Relaxed) {
            return;
        }
        loop {
            let mut list = self.list.lock();
            let Some(qpn) = list.pop() else {
                self.waiting.store(false, Ordering::Relaxed);
                return;
            };
            drop(list);
            f(qpn);
        }
    }

    /// After giving the card's lock back, or leaving a doorbell: has `turn` take what was left meanwhile,
    /// unless somebody else has the lock, who then comes here too.
    #[inline]
    pub fn serve<G>(&self, try_lock: impl Fn() -> Option<G>, turn: impl FnMut(&mut G)) {
        /* the lock's release (or the doorbell) before the look at the doorbells (or the lock): of a holder
         * and a leaver, one sees the other. A mutex is given back and tried for by one instruction that reads
         * and writes. */
        fence_behind_change();
        if self.waiting.load(Ordering::Relaxed) {
            self.serve_all(try_lock, turn);
        }
    }

    #[cold]
    fn serve_all<G>(&self, try_lock: impl Fn() -> Option<G>, mut turn: impl FnMut(&mut G)) {
        while self.waiting.load(Ordering::Relaxed) {
            let Some(mut guard) = try_lock() else { return };
            turn(&mut guard);
            drop(guard);
            fence_behind_change();
        }
    }

    /// Room for one doorbell of each of `qps` queue pairs: leaving one never allocates. False: no memory.
    pub fn reserve(&self, qps: usize) -> bool {
        let mut list = self.list.lock();
        let more = qps.saturating_sub(list.len());
        list.try_reserve(more).is_ok()
    }
}
