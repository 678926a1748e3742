//! Additive increase, multiplicative decrease (RFC 5681's shape): the window doubles until the first loss,
//! then grows by a packet per window and halves on loss.

use super::{Controller, MIN_WINDOW, WindowLimits};
use crate::types::Nanos;

/// Where a window starts.
const START_WINDOW: u32 = 256 << 10;
/// A loss is counted once in this time, ns: all losses of one burst are one sign.
const CUT_INTERVAL: Nanos = 200_000;

/// The window of one destination.
#[derive(Debug)]
pub struct Aimd {
    window: u32,
    /// Window above which growth is slow
    threshold: u32,
    max: u32,
    last_cut: Nanos,
    /// Window before a cut by timeout, until it is known whether that was right
    before_cut: u32,
}

impl Controller for Aimd {
    /// A window of at most so many bytes, but never less than a batch.
    fn new(limits: &WindowLimits) -> Self {
        let max = limits.max.max(MIN_WINDOW);
        Aimd { window: START_WINDOW.min(max), threshold: max, max, last_cut: 0, before_cut: 0 }
    }

    #[inline]
    fn window(&self) -> u32 {
        self.window
    }

    #[inline]
    fn on_ack(&mut self, bytes: u32) {
        if self.window < self.max {
            let step = if self.window < self.threshold {
                bytes
            } else {
                ((u64::from(bytes) * 4096) / u64::from(self.window)) as u32
            };
            self.window = (self.window + step).min(self.max);
        }
    }

    fn on_loss(&mut self, now: Nanos, timeout: bool) -> bool {
        if now.saturating_sub(self.last_cut) < CUT_INTERVAL && self.last_cut != 0 {
            return false;
        }
        self.last_cut = now;
        self.before_cut = if timeout { self.window } else { 0 };
        self.window = (self.window / 2).max(MIN_WINDOW);
        self.threshold = self.window;
        true
    }

    /// `bytes` were lost among others that arrived: the window shrinks by half of that, so that over a window
    /// it shrinks by half of the share that was lost, as DCTCP's does by marks (RFC 8257). A wire that loses
    /// one packet in a hundred whatever is sent keeps its window; a buffer that overflows gets what it can
    /// take.
    fn on_share_lost(&mut self, bytes: u32) {
        self.window = self.window.saturating_sub(bytes / 2).max(MIN_WINDOW);
        self.threshold = self.window;
    }

    /// The last timeout was wrong: what it took for lost has been acknowledged (RFC 4015's idea).
    fn undo_timeout(&mut self) {
        if self.before_cut > self.window {
            (self.window, self.threshold) = (self.before_cut, self.before_cut);
        }
        self.before_cut = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_halves_once_per_burst_and_recovers() {
        let mut c = Aimd::new(&WindowLimits { max: 512 << 10, delay_target: None });
        assert!(c.on_loss(1_000_000, false));
        assert_eq!(c.window(), START_WINDOW / 2);
        assert!(!c.on_loss(1_000_001, false), "same burst");
        for _ in 0..10_000 {
            c.on_ack(4096);
        }
        assert_eq!(c.window(), 512 << 10);
    }

    #[test]
    fn a_wrong_timeout_is_undone() {
        let mut c = Aimd::new(&WindowLimits { max: 512 << 10, delay_target: None });
        c.on_loss(1_000_000, true);
        assert_eq!(c.window(), START_WINDOW / 2);
        c.undo_timeout();
        assert_eq!(c.window(), START_WINDOW);
    }
}
