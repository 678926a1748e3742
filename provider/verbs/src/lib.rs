//! The objects a verbs program holds, and the progress engine.
//!
//! A [`Context`] joins the card of its process; the other objects are made in it and hold on to what
//! they need. All handles are cheap to clone, `Send` and `Sync`; the last clone ends an object that was
//! not destroyed. Errors are [`VerbsError`], whose `errno` is what the man pages promise.
//!
//! Addresses in SGEs and memory regions are the program's word: the card reads and writes there, as
//! hardware would. Behind the objects is a device, with one narrow face (`device`); this room
//! owns it, and what programs wait on (`events`). It must not know packet formats, or C structures.

mod ah;
mod allowance;
mod census;
mod channel;
mod clock;
pub mod cm;
mod context;
mod cq;
mod device;
mod dm;
mod error;
mod events;
mod info;
pub mod log;
mod memory;
mod moderation;
mod modules;
mod mr;
mod mw;
pub mod onerma;
mod pd;
mod post;
mod process;
mod qp;
mod share;
mod srq;
mod star;
pub mod stat;
mod wr;
mod xrcd;

pub use ah::{Ah, AhAttr};
pub use census::Census;
pub use channel::CompChannel;
pub use clock::{raw_clock, wallclock};
pub use context::Context;
pub use cq::{Cq, CqInit};
pub use device::board::{BoardFacts, BoardRegisters};
#[doc(hidden)]
pub use device::soft::BYTES_OF_A_TURN;
pub use dm::{Dm, MAX_DM};
pub use error::{Result, VerbsError};
pub use events::{FdQueue, VerbsEvent, kind};
pub use info::{
    Description, DeviceAttr, GidEntry, MAX_CQE, MAX_INLINE, MAX_MSG, MAX_QP_WR, MAX_RD_ATOM, MAX_SGE,
    OdpCaps, PKEY, PortAttr, describe, device_attr, device_name,
};
pub use moderation::Moderation;
pub use modules::check_module;
pub use mr::{Advice, MemoryRange, Mr, Rereg};
pub use mw::{Mw, MwBind};
pub use pd::{Pd, Td};
pub use post::{RecvPoster, RecvWr, SendPoster, SendWr};
pub use qp::{Qp, QpAttr, QpCaps, QpInit};
pub use srq::{Srq, SrqAttr, SrqCaps, SrqPoster};
pub use star::{Settled, StarInfo};
pub use starverbs_core::nic::{TagChange, TagOp};
pub use starverbs_kernels::Builtin;
pub use starverbs_rings::{AllocResult, Memory, ProgramMemory, Resource, budget};
pub use starverbs_star::control::Preference;
pub use wr::{SendBatch, send_ops_offered};
pub use xrcd::Xrcd;

/// For the oracles of tests/untrusted.
#[cfg(feature = "fuzzing")]
pub mod fuzzing {
    pub use crate::device::soft::shared_qps::inject_message;
    pub use crate::share::read_share_table;
}
