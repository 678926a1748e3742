//! StaR (Wang et al.): of a connection, one end's card keeps all state, the other's none.
//!
//! *SL* is the stateless end, *SF* the stateful one. SL's host sends each WQE to SF as a packet and
//! finds its completions in memory; its card does what a packet says and forgets it. Everything between, of
//! both ends' queues, is SF's. docs/star.md is the protocol, and marks which rules are not the paper's.
//!
//! The card is [`starverbs_core`]'s, which knows none of this: a stateful end is the engine of a queue pair
//! there (`card`), a stateless one has left it ([`starverbs_core::nic::released`]). The crate must not know
//! sockets, clocks, threads or files.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod ahead;
pub mod answers;
pub mod bounds;
pub mod bundle;
pub mod card;
pub mod carried;
pub mod channel;
pub mod control;
pub mod datagram;
pub mod endpoint;
pub mod env;
pub mod form;
pub mod host;
pub mod message;
pub mod negotiate;
pub mod packed;
pub mod partition;
pub mod registry;
pub mod ring;
pub mod role_message;
pub mod round;
pub mod seal;
pub mod stateful;
pub mod stateless;
pub mod token;
pub mod turn;
pub mod wire;
