//! Windows moved by delays: algorithm 1 of 1RMA (section 6), with its constants, for packets of queue pairs.
//! What it calls an operation, of 4 KB, is so many bytes here.

use super::{Controller, MIN_WINDOW, WindowLimits};
use crate::types::Nanos;

/// An operation, bytes.
const OPERATION: u32 = 4096;
/// Additive increase, bytes a round trip: a quarter of an operation (AI).
const INCREASE: u32 = OPERATION / 4;
/// Least factor of a decrease by delay (MD), and how much of the excess it takes away (beta).
const MOST_DECREASE: f64 = 0.5;
const BETA: f64 = 0.8;
/// Divisor of a decrease by a failure (TIMEOUT_DECR: 0.1).
const FAILURE: u32 = 10;
/// Where a window starts, as 1RMA's executor has it: 13 operations.
const START: u32 = 13 * OPERATION;

/// The window of one destination.
#[derive(Debug)]
pub struct DelayWindow {
    window: u32,
    max: u32,
    target: Nanos,
    /// The last round trip that was measured
    delay: Nanos,
    /// When it was last decreased
    decreased: Option<Nanos>,
    /// Window before a cut by timeout, until it is known whether that was right
    before_cut: u32,
}

impl DelayWindow {
    /// Whether it has not been decreased within a round trip.
    fn may_decrease(&self, now: Nanos) -> bool {
        self.decreased.is_none_or(|at| now.saturating_sub(at) >= self.delay)
    }

    fn decrease(&mut self, now: Nanos, to: u32) {
        self.window = to.max(MIN_WINDOW);
        self.decreased = Some(now);
    }
}

impl Controller for DelayWindow {
    fn new(limits: &WindowLimits) -> Self {
        let max = limits.max.max(MIN_WINDOW);
        DelayWindow {
            window: START.min(max),
            max,
            target: limits.delay_target.unwrap_or(Nanos::MAX),
            delay: 0,
            decreased: None,
            before_cut: 0,
        }
    }

    #[inline]
    fn window(&self) -> u32 {
        self.window
    }

    #[inline]
    fn on_ack(&mut self, bytes: u32) {
        if self.delay < self.target && self.window < self.max {
            let step = (u64::from(bytes) * u64::from(INCREASE)).div_ceil(u64::from(self.window)) as u32;
            self.window = self.window.saturating_add(step).min(self.max);
        }
    }

    fn on_delay(&mut self, now: Nanos, delay: Nanos) {
        self.delay = delay;
        if delay >= self.target && delay > 0 && self.may_decrease(now) {
            let excess = (delay - self.target) as f64 / delay as f64;
            let factor = (1.0 - BETA * excess).max(MOST_DECREASE);
            self.decrease(now, (f64::from(self.window) * factor) as u32);
        }
    }

    fn on_loss(&mut self, now: Nanos, timeout: bool) -> bool {
        let may = self.may_decrease(now);
        if may {
            self.before_cut = if timeout { self.window } else { 0 };
            self.decrease(now, self.window / FAILURE);
        }
        may
    }

    /// A wire that loses what others got has not become slower for it.
    fn on_share_lost(&mut self, _bytes: u32) {}

    fn undo_timeout(&mut self) {
        self.window = self.window.max(self.before_cut);
        self.before_cut = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT: Nanos = 5_000;

    fn window() -> DelayWindow {
        DelayWindow::new(&WindowLimits { max: 1 << 20, delay_target: Some(1000) })
    }

    #[test]
    fn a_quarter_of_an_operation_a_round_trip() {
        let mut here = window();
        here.on_delay(0, 999);
        (0..13).for_each(|_| here.on_ack(OPERATION));
        assert!(
            (START + INCREASE - 16..=START + INCREASE + 16).contains(&here.window()),
            "{}",
            here.window()
        );
        (0..1_000_000).for_each(|_| here.on_ack(OPERATION));
        assert_eq!(here.window(), 1 << 20);
        here.on_delay(0, 1000);
        let before = here.window();
        here.on_ack(1 << 20);
        assert_eq!(here.window(), before, "none at the target");
    }

    #[test]
    fn a_decrease_follows_the_excess_and_comes_once_a_round_trip() {
        let mut here = window();
        here.on_delay(0, 1250);
        assert_eq!(here.window(), (f64::from(START) * 0.84) as u32, "1 - 0.8 * 250 / 1250");
        here.on_delay(1249, 100_000);
        assert_eq!(here.window(), (f64::from(START) * 0.84) as u32, "not twice");
        let before = here.window();
        here.on_delay(100_000, RTT);
        assert_eq!(here.window(), before / 2, "half at most");
        assert!(here.on_loss(200_000, true));
        assert_eq!(here.window(), MIN_WINDOW, "a tenth, and a batch at least");
        assert!(!here.on_loss(200_001, false));
        here.undo_timeout();
        assert_eq!(here.window(), before / 2);
        here.on_share_lost(1 << 16);
        assert_eq!(here.window(), before / 2);
    }
}
