//! 1RMA cards on a virtual wire and virtual time: the crate's own card and executor, with links, a switch and
//! processes around them.
//!
//! - [`OneRmaHost`]: a card, its memory, and what a process needs: regions, portals, completions in memory;
//! - [`OneRmaNet`]: hosts at one switch, on a wire that loses, repeats, delays, reorders and changes packets
//!   as a seed decides;
//! - [`client`]: processes, with an executor or without;
//! - [`figures`]: the paper's figures;
//! - [`SimSeal`]: encryption that is quick and not secret, with tags that are checked.

pub mod client;
pub mod figures;
mod host;
mod net;
mod seal;

pub use host::{OneRmaHost, OneRmaHostEnv, Portal, SentPacket, SimRegion};
pub use net::{OneRmaFaults, OneRmaNet, StepReport, Wire};
pub use seal::SimSeal;
