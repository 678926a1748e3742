//! How many bytes may be in flight towards a destination: the rule, as a trait, and the rules that there are.
//!
//! All queue pairs to one host share a [`Controller`]. It gets acknowledgements and losses, and gives how
//! large the window is; what is in flight, and who may add to it, is the path's.

mod aimd;
mod delay;

pub use aimd::Aimd;
pub use delay::DelayWindow;

use crate::types::Nanos;

/// Smallest window, bytes: a GSO batch. In a smaller one a READ may never find room for its answer.
const MIN_WINDOW: u32 = 16 << 10;

/// What a card is told of its windows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowLimits {
    /// Bytes in flight towards one destination, at most
    pub max: u32,
    /// The round trip below which windows grow, ns. `None`: no delay moves them
    pub delay_target: Option<Nanos>,
}

/// A window and how it changes.
pub trait Controller {
    /// For a destination of which nothing is known.
    fn new(limits: &WindowLimits) -> Self;
    /// Bytes that may be in flight at once.
    fn window(&self) -> u32;
    /// `bytes` were acknowledged.
    fn on_ack(&mut self, bytes: u32);
    /// An answer to one packet came after so long.
    fn on_delay(&mut self, now: Nanos, delay: Nanos) {
        let _ = (now, delay);
    }
    /// Packets were lost: the peer reported it, or answered again after a `timeout`. Gives whether the window
    /// shrank.
    fn on_loss(&mut self, now: Nanos, timeout: bool) -> bool;
    /// `bytes` were lost among others that arrived.
    fn on_share_lost(&mut self, bytes: u32);
    /// The last timeout was wrong: what it took for lost has been acknowledged.
    fn undo_timeout(&mut self);
}

/// The rule that the limits ask for: [`DelayWindow`] with a target of the delay, else [`Aimd`].
#[derive(Debug)]
pub enum AnyWindow {
    /// Moved by losses
    Loss(Aimd),
    /// Moved by delays
    Delay(DelayWindow),
}

macro_rules! either {
    ($window:expr, $one:pat => $call:expr) => {
        match $window {
            AnyWindow::Loss($one) => $call,
            AnyWindow::Delay($one) => $call,
        }
    };
}

impl Controller for AnyWindow {
    fn new(limits: &WindowLimits) -> Self {
        match limits.delay_target {
            None => AnyWindow::Loss(Aimd::new(limits)),
            Some(_) => AnyWindow::Delay(DelayWindow::new(limits)),
        }
    }

    #[inline]
    fn window(&self) -> u32 {
        either!(self, one => one.window())
    }

    #[inline]
    fn on_ack(&mut self, bytes: u32) {
        either!(self, one => one.on_ack(bytes));
    }

    #[inline]
    fn on_delay(&mut self, now: Nanos, delay: Nanos) {
        either!(self, one => one.on_delay(now, delay));
    }

    fn on_loss(&mut self, now: Nanos, timeout: bool) -> bool {
        either!(self, one => one.on_loss(now, timeout))
    }

    fn on_share_lost(&mut self, bytes: u32) {
        either!(self, one => one.on_share_lost(bytes));
    }

    fn undo_timeout(&mut self) {
        either!(self, one => one.undo_timeout());
    }
}
