//! The drop-in libibverbs and librdmacm, one library: C ABI in, errno out.
//!
//! Every verbs object that a program holds is a handle of this library: the public `ibv_*` struct first, the
//! object of `starverbs-verbs` behind it (a queue pair's the other way round). Owns those structs, the
//! exported symbols and their versions, and the translation between C's words and Rust's. It must not hold
//! logic of its own, and no panic leaves it.
//!
//! Safety, for the whole crate: an exported verb takes pointers on the terms of its man page. A handle
//! pointer comes from the create verb of its type and is used until the destroy verb returns 0; an attribute
//! pointer names a struct of the layout in `starverbs-abi`, readable or writable as the verb needs. The
//! `SAFETY` comments call this "the verb's terms". NULL is checked where it is cheap and answered with
//! EINVAL.

mod ah;
mod buf;
mod compat;
mod context;
mod cq;
mod cq_ex;
mod device;
mod domain;
mod edge;
mod events;
mod exports;
mod handle;
mod kernel;
mod l2;
mod memory;
mod mw;
mod pd_mr;
mod poll;
mod post;
mod private;
mod qp;
mod qp_attr;
mod query;
mod rates;
mod rdmacm;
mod reserve;
mod srq;
mod stardv;
mod strings;
mod system;
mod tags;
mod wr;
mod xrcd;

pub use exports::keep;
