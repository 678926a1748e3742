//! The library for LD_PRELOAD that makes a program's large allocations shared memory.
//!
//! A peer process of this host may map them, so that a WRITE to them is a memcpy. One memory file is mapped
//! once, as the *arena* (`arena`); large requests of malloc(3) and mmap(2) (`calls`) are ranges of it, and
//! which is whose stands in `space`. A forked child gets a private copy of it (`fork`). Who wants to
//! know where an address lies in which file asks `starverbs_shared_at` (`calls::lookup`).
//!
//! Owns no verbs, and must know none: programs without a card may run on it. docs/decisions/0021 says
//! what it costs, and who should not use it.
//!
//! Safety, for the whole crate: an interposed call takes its arguments on the terms of the libc call it
//! stands for. The `SAFETY` comments call this "libc's terms". All system calls are made by number: libc's
//! wrappers of the same names are this library's own.

mod arena;
mod calls;
mod child;
#[path = "../../preload/src/errno.rs"]
mod errno;
mod fork;
mod heap;
#[path = "../../preload/src/interpose.rs"]
mod interpose;
mod lock;
mod maps;
mod next;
mod ranges;
mod say;
mod space;
mod system;

/// Bookkeeping never comes back to this library, nor to an allocator that the program brings along.
#[cfg(not(test))]
#[global_allocator]
static OWN: heap::Glibc = heap::Glibc;

/// Runs when the process starts, before all other libraries' (`-z initfirst`): what is registered first is
/// done last before a fork, and first after it.
#[cfg_attr(not(test), used, unsafe(link_section = ".init_array"))]
#[cfg_attr(test, allow(dead_code))]
static START: extern "C" fn() = {
    extern "C" fn start() {
        fork::register();
    }
    start
};
