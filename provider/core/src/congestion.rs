//! How many bytes may be in flight towards a destination: the rule, as a trait, and the rules that there are.
//!
//! All queue pairs to one host share a [`Controller`]. It gets acknowledgements and losses, and gives how
//! large the window is; what is in flight, and who may add to it, is the path's.

mod aimd;

pub use aimd::Aimd;

use crate::types::Nanos;

/// A window and how it changes.
pub trait Controller {
    /// For a destination towards which at most `max` bytes may be in flight.
    fn new(max: u32) -> Self;
    /// Bytes that may be in flight at once.
    fn window(&self) -> u32;
    /// `bytes` were acknowledged.
    fn on_ack(&mut self, bytes: u32);
    /// Packets were lost: the peer reported it, or answered again after a `timeout`. Gives whether the window
    /// shrank.
    fn on_loss(&mut self, now: Nanos, timeout: bool) -> bool;
    /// `bytes` were lost among others that arrived.
    fn on_share_lost(&mut self, bytes: u32);
    /// The last timeout was wrong: what it took for lost has been acknowledged.
    fn undo_timeout(&mut self);
}
