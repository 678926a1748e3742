//! StRoM's kernels that every card has (the paper's 5.2, 6 and 7.2): each reads its parameters, steps through
//! memory, and answers; and how a kernel that is a module of its own talks to the card ([`mailbox`]).
//! docs/strom.md has their parameters; `include/infiniband/stardv.h` has them for C.
//!
//! A kernel knows nothing but its [`KernelRun`](starverbs_core::strom::KernelRun); the crate must not know
//! queue pairs, sockets, clocks or threads.
#![forbid(unsafe_code)]

pub mod consistent;
pub mod crc64;
pub mod engine;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod get;
pub mod hll;
#[cfg(any(test, feature = "fuzzing"))]
mod host;
pub mod mailbox;
pub mod module;
pub mod shuffle;
pub mod traverse;
#[cfg(test)]
mod untrusted;

use starverbs_core::strom::Kernel;

pub use consistent::Consistent;
pub use get::Get;
pub use hll::Hll;
pub use module::{Module, ModuleKernel};
pub use shuffle::Shuffle;
pub use traverse::Traverse;

/// The kernels, as programs name them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Builtin {
    /// The kernel [`Get`]
    Get = 1,
    /// The kernel [`Traverse`]
    Traverse = 2,
    /// The kernel [`Consistent`]
    Consistent = 3,
    /// The kernel [`Shuffle`]
    Shuffle = 4,
    /// The kernel [`Hll`]
    Hll = 5,
}

impl Builtin {
    /// From its number. `None`: there is none such.
    pub const fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            1 => Builtin::Get,
            2 => Builtin::Traverse,
            3 => Builtin::Consistent,
            4 => Builtin::Shuffle,
            5 => Builtin::Hll,
            _ => return None,
        })
    }

    /// One that has seen nothing.
    pub fn make(self) -> Box<dyn Kernel> {
        match self {
            Builtin::Get => Box::new(Get),
            Builtin::Traverse => Box::new(Traverse),
            Builtin::Consistent => Box::new(Consistent),
            Builtin::Shuffle => Box::<Shuffle>::default(),
            Builtin::Hll => Box::<Hll>::default(),
        }
    }
}
