//! Cards on a virtual wire and virtual time.
//!
//! [`Net`] is a set of hosts, each with a card, some memory and queues, joined by a wire that loses,
//! repeats, delays and reorders frames as a seed decides. The same seed gives the same run, byte for
//! byte. Programs are the caller's: they post, poll, and let [`Net::step`] move the time on.
//!
//! It must not know real clocks, sockets or threads.
#![forbid(unsafe_code)]

mod figure;
mod host;
mod memory;
mod net;
pub mod onerma;
mod queues;
mod rng;
pub mod rnic;
mod star;
pub mod strom;
pub mod tmh;
mod traffic;
mod watch;

pub use figure::{Figure, figures};
pub use host::{Setup, SimEnv, SimHost};
pub use memory::{Memory, READ, WRITE};
pub use net::{Faults, Forger, Net, QpAt, SharedDomain, Tally, Tap};
pub use queues::{Full, Recv, Send, SimCq, SimRq, SimSq};
pub use rng::Rng;
pub use star::{StarCard, StarFrame, StarPort};
pub use traffic::{RC_OPS, STAR_OPS, any_bytes, any_size, get, put};
