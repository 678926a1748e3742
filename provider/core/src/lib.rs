//! The card, without any operating system in it.
//!
//! [`Nic`] is one RDMA card: queue pairs, memory regions, address vectors and the RoCEv2 transport
//! between them. It owns protocol state and nothing else. Time is an argument (`now`, nanoseconds),
//! randomness is a seed, memory and frames are reached through the traits of [`mod@env`]; two cards on a
//! virtual wire are a unit test.
//!
//! Methods come in four kinds:
//! - `handle_*`: something happened (doorbell, frame, timeout);
//! - `poll_*` / `next_deadline`: what the card wants to do next (transmit, be woken);
//! - control (`create_*`, `modify_*`, `destroy_*`, `reg_*`): off the data path;
//! - getters.
//!
//! Order of calls: after any `handle_*` or control call, call [`Nic::poll_transmit`] until nothing
//! is left, then sleep until [`Nic::next_deadline`] or the next event.
//!
//! The card must not know sockets, clocks, threads, files, or the verbs C ABI.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod coalesce;
pub mod command;
pub mod congestion;
pub mod counters;
pub mod engine;
pub mod env;
pub mod error;
mod limits;
pub mod mr;
pub mod nic;
pub mod qp;
pub mod qpc;
pub mod relay;
pub mod rng;
pub mod room;
pub mod rtt;
pub mod shared_qp;
pub mod strom;
pub mod tags;
pub mod transport;
pub mod types;
pub mod wire;

pub use counters::Counters;
pub use env::{CompletionQueue, ContextMove, Dma, Env, HeldWqe, Host, Port, RecvQueue, SendQueue, TakenWqe};
pub use error::NicError;
pub use limits::CardLimits;
pub use nic::mads::{MAD_LEN, QPN_GSI, ReceivedMad};
pub use nic::multicast::MAX_GROUP_QPS;
pub use nic::{ContextCache, Nic, NicConfig};
pub use types::*;
