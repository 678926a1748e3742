//! StaR (Wang et al.): of a connection, one end's card keeps all state, the other's none.
//!
//! *SL* is the stateless end, *SF* the stateful one. SL's host library sends each WQE to SF as a packet and finds its completions in
//! memory; its card does what a packet says and forgets it. Everything between, of both ends' queues, is SF's.
//! docs/decisions/0010-star.md says what the paper leaves open and what was chosen here.

pub mod bounds;
pub mod channel;
pub mod control;
pub mod env;
pub mod homing;
pub mod host;
pub mod library;
pub mod message;
pub mod negotiate;
pub mod registry;
pub mod renew;
pub mod ring;
pub mod seal;
pub mod stateful;
pub mod stateless;
pub mod wire;
