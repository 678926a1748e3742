//! StRoM's kernels that every card has (the paper's 5.2 and 6): each reads its parameters, steps through
//! memory, and answers. docs/strom.md has their parameters; `include/infiniband/stardv.h` has them for C.
//!
//! A kernel knows nothing but its [`Run`](starverbs_core::strom::Run); the crate must not know queue pairs,
//! sockets, clocks or threads.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
extern crate std;

pub mod get;

pub use get::Get;
