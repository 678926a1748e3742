//! InfiniBand connection management (IBTA volume 1 chapter 12), without any operating system in it.
//!
//! [`Cm`] is the connection manager of one process: its listeners, its connections, the messages and timers
//! between them and their peers. [`wire`] has the messages (MADs of class 7 to queue pair 1) and the IP
//! addressing header that Linux' rdma_cm puts into private data (annex A11).
//!
//! As of the card, methods come in four kinds: `handle_*` (a message, a timeout), `poll_*` and
//! `next_deadline` (what to send, which events, when to be woken), control (`connect`, `accept`, ...),
//! getters. Time is an argument; randomness is a seed. After any call, send what [`Cm::poll_send`] gives, and
//! tell what [`Cm::poll_event`] gives.
//!
//! What untrusted peers can make it keep is bounded: requests by the listeners' backlogs, everything by
//! [`MAX_CONNS`].
//!
//! It must not know sockets, clocks, threads, processes, or queue pairs beyond their numbers.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod engine;
mod params;
pub mod wire;

pub use engine::{
    Cause, Cm, CmConfig, CmError, CmPath, ConnEvent, ConnNews, ListenAt, ListenerId, MAX_CONNS, OutboundMad,
    Scope,
};
pub use params::*;
