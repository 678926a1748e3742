//! 1RMA (Singhvi et al., SIGCOMM 2020): one-shot, connection-free, encrypted access to remote memory.
//!
//! A [`OneRmaCard`] has tables of fixed size and nothing for a peer: regions that others may reach, command
//! slots for what this host asks, and transfers for what others write here. Every command is an operation of
//! its own, of at most 4 KB, that completes once, with a status and two delays. What needs policy is the
//! host's: [`executor`] cuts long transfers into commands and paces them by [`congestion`]. docs/onerma.md
//! is the protocol, and marks which rules are not the paper's.
//!
//! Order of calls, as of the core's card: after any [`OneRmaCard::issue`], [`OneRmaCard::handle_packet`] or
//! [`OneRmaCard::handle_timeout`], call [`OneRmaCard::poll_transmit`] until nothing is left, then sleep until
//! [`OneRmaCard::next_deadline`] or the next event.
//!
//! The crate must not know sockets, clocks, threads, files or a crypto library: memory and packets come from
//! [`OneRmaEnv`], encryption from [`Seal`].
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod card;
mod command;
pub mod congestion;
pub mod executor;
mod fragments;
mod list;
mod region;
mod seal;
mod types;
mod window;
pub mod wire;

pub use card::{
    CardConfig, CardCounts, CardPath, ControlError, IssueError, OneRmaCard, OneRmaEnv, PortalId, SlotState,
    Transmit, packet_in_buffer,
};
pub use command::{COMMAND_LEN, COMPLETION_LEN, CommandError, Completion, HASTES, OneRmaCommand};
pub use fragments::GRANULE;
pub use region::{CARDS, Region, RegionId, Rights};
pub use seal::{DerivedKey, Initiator, RESERVED_KEY, RegionKey, Seal, SealCounters, TAG_LEN};
pub use types::{Class, Handle, MAX_OP, OneRmaOp, REKEY_LEN, Status};
