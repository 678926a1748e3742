//! Chance.

use std::hash::{BuildHasher, Hasher, RandomState};

/// Numbers that an untrusted peer cannot guess: for keys, QPNs, secrets.
pub fn seed() -> [u64; 2] {
    // What the standard library has for its hash maps, should the system refuse (a filter of system calls).
    let mut seed = [(); 2].map(|()| RandomState::new().build_hasher().finish());
    // SAFETY: the bytes are `seed`'s, and any are valid numbers.
    unsafe { libc::getrandom((&raw mut seed).cast(), size_of_val(&seed), 0) };
    seed
}
