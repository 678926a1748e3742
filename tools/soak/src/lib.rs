//! Cards on a hostile virtual network, checked by an oracle.
//!
//! A seed gives a plan: hosts, links and what they do to frames, connections, sizes of queues, operations,
//! mistakes of programs, and what befalls hosts; and a run of 1RMA's cards (`onerma`), which share nothing
//! with queue pairs. [`run`] plays both; a test that wants a certain kind of trouble writes a [`Plan`] of its
//! own, and its [`World`] runs that. The oracle (`oracle`) knows what programs posted and what a card
//! promises for that; it asks no card whether it was right. docs/faults.md says what it holds cards to.
#![forbid(unsafe_code)]

mod arena;
mod conn;
mod datagram;
mod forger;
mod lifecycle;
mod onerma;
mod oracle;
mod plan;
mod pool;
mod post;
mod stall;
mod star;
mod strom;
mod summary;
mod tags;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

pub use plan::{At, Chaos, ConnPlan, Plan, Transport, Whose, any_conn, any_link};
pub use star::{ROOMY, StarPlan};
pub use strom::StromPlan;
pub use summary::Summary;
pub use world::World;

use starverbs_sim::Rng;

/// A run in which something was not as it must be.
#[derive(Debug)]
pub struct Broken {
    /// The seed that does it again
    pub seed: u64,
    /// What the run was
    pub plan: String,
    /// What was wrong
    pub what: String,
}

/// Plays the run of `seed`; with `trace`, each frame, post, completion and event is printed to standard
/// error.
///
/// # Errors
/// Something was not as it must be. A panic is one such thing; a hook that keeps it quiet is the caller's.
pub fn run(seed: u64, trace: bool) -> Result<Summary, Box<Broken>> {
    let plan = Plan::new(&mut Rng::new(seed));
    let played = catch_unwind(AssertUnwindSafe(|| {
        let mut world = World::new(seed, plan, trace);
        world.run();
        let mut onerma = onerma::World::new(seed, trace);
        onerma.run();
        world.summary.merge(&onerma.summary);
        world.summary
    }));
    played.map_err(|panic| {
        let what = panic.downcast_ref::<String>().cloned();
        let what = what.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        let plan = format!("{:#?}\n1RMA: {}", Plan::new(&mut Rng::new(seed)), onerma::describe(seed));
        Box::new(Broken { seed, plan, what: what.unwrap_or_default() })
    })
}
