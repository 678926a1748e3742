//! 1RMA between processes: a card on a UDP port of its own, its cipher, and what a process holds of it.
//!
//! ```text
//! process   Process: executor, completions, the memory of regions
//!   card    starverbs_onerma::Card, with GcmSeal
//!     wire  port: one UDP socket; a packet is a datagram
//! ```
//!
//! It must not know what packets say. docs/onerma.md has the protocol.

mod boot;
mod host_cards;
mod port;
mod process;
mod seal;
mod tap;
mod world;

/* what a process's owner hands in and gets: those above know this crate alone */
pub use starverbs_onerma::executor::{Finished, SubmitError, Transfer};
pub use starverbs_onerma::{
    CardCounts, Class, ControlError, DerivedKey, Initiator, OneRmaOp, RegionId, RegionKey, Rights, Seal,
    Status,
};

pub use boot::{numbers_at, sender_of};
pub use process::{Process, ProcessOptions};
pub use seal::GcmSeal;
