//! Every interleaving of two or three threads or processes on small rings, tables and flags, and of a process
//! that is killed at any step. Run with `RUSTFLAGS="--cfg loom" cargo test -p starverbs-rings --test loom`.
#![cfg(loom)]

mod card;
mod channels;
mod tables;
