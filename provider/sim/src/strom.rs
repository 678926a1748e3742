//! StRoM's cards on virtual time: what is said and done is the core's (queue pairs, packets, RPCs) and the
//! kernels' of `provider/kernels`, the code that programs run; how long it takes is a data path's, a bus's
//! and a wire's.
//!
//! - [`Params`]: what card, bus and link are like, each number with its source;
//! - [`Pair`]: two cards and a wire between them; programs post, and wait until memory has changed;
//! - [`figures`]: the paper's figures.
//!
//! The core answers at once. What it reads of its host's memory, writes there, and sends is written down, and
//! passes the units in that order: nothing that a kernel sends leaves before what it read was there.

pub mod figures;
mod pair;
mod params;
mod program;
mod setup;
mod units;

pub use pair::{Pair, PairStep};
pub use params::{HUNDRED, Params, TEN, TEN_STORES};
pub use program::ProgramRegion;
