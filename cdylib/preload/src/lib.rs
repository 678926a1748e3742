//! The library for LD_PRELOAD: the drop-in libibverbs, and a sysfs view of its device.
//!
//! Kernels show an RDMA device below /sys/class/infiniband and /dev/infiniband. This crate shows ours there
//! to programs that look through libc: it takes libc's calls that name files (`calls`), recognises those
//! folders (`path`), and sends the call to the same place below a private folder (`tree`) that holds the
//! view (`sysfs_view`, made from `facts`). Programs that ask by netlink are answered from the same
//! facts (`nldev`). It keeps descriptors of the program's shared memory for the verbs (`kept`). Owns no
//! verbs: those are `cdylib`'s, which it carries whole. docs/decisions/0006 says why folders on disk, and
//! what that gives.
//!
//! Safety, for the whole crate: an interposed call takes its pointers on the terms of the libc call it stands
//! for, and hands them on unchanged or replaced by a string of its own that lives through the call. The
//! `SAFETY` comments call this "libc's terms". For all other paths a call does nothing but look at the first
//! bytes: no allocation, no lock.

mod calls;
mod counters;
mod errno;
mod facts;
mod interpose;
mod kept;
mod next;
mod nldev;
mod path;
mod present;
mod sysfs_view;
mod tree;

/// Refers to the verbs, so that the linker takes their symbols into this library too.
#[used]
static VERBS: fn() = starverbs::keep;
