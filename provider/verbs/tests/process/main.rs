//! What there is one of in a process, and cards of this process change: its memory budget, standard error.
//! The allocator is another: allocations.rs.

#[path = "../common/mod.rs"]
mod common;

mod budget;
mod log;
mod others;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The process is one test's as long as it has this, also where the tests are threads of one process.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}
