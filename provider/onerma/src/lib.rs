//! 1RMA (Singhvi et al., SIGCOMM 2020): one-shot, connection-free, encrypted access to remote memory.
//!
//! A [`Card`] has tables of fixed size and nothing for a peer: regions that others may reach, command slots
//! for what this host asks, and transfers for what others write here. Every command is an operation of its
//! own, of at most 4 KB, that completes once, with a status and two delays. What needs policy is the
//! host's: [`executor`] cuts long transfers into commands and paces them by [`congestion`]. docs/onerma.md
//! is the protocol, and marks which rules are not the paper's.
//!
//! Order of calls, as of the core's card: after any [`Card::issue`], [`Card::handle_packet`] or
//! [`Card::handle_timeout`], call [`Card::poll_transmit`] until nothing is left, then sleep until
//! [`Card::next_deadline`] or the next event.
//!
//! The crate must not know sockets, clocks, threads, files or a crypto library: memory and packets come from
//! [`Env`], encryption from [`Seal`].
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
    Card, Config, ControlError, Counts, Env, IssueError, Path, PortalId, SlotState, Transmit,
    packet_in_buffer,
};
pub use command::{COMMAND_LEN, COMPLETION_LEN, Command, CommandError, Completion, HASTES};
pub use fragments::GRANULE;
pub use region::{Region, RegionId, Rights};
pub use seal::{Counters, DerivedKey, Initiator, RESERVED_KEY, RegionKey, Seal, TAG_LEN};
pub use types::{Class, Handle, MAX_OP, Op, REKEY_LEN, Status};
