//! What a hostile peer sends to kernels: each request ends, whatever stands in memory, and none panics.
//! What they touch is for the card to check.

use starverbs_core::rng::Rng;

use crate::Builtin;
use crate::fuzzing::{AskedKernel, BASE, KEY, LEN};

/// Numbers that are likely to mean something: commands, keys, addresses in and around the region.
fn word(rng: &mut Rng) -> u64 {
    let any = rng.word();
    match any % 8 {
        0 => any >> 8 & 7,
        1 => u64::from(KEY),
        2 | 3 => BASE + (any >> 8) % LEN as u64,
        4 => (BASE + LEN as u64).wrapping_sub(any >> 8 & 127),
        5 => u64::MAX - (any >> 8 & 127),
        6 => any >> 8 & 0xffff,
        _ => any,
    }
}

fn bytes(rng: &mut Rng, most: u64) -> Vec<u8> {
    let len = (rng.word() % (most + 1)) as usize;
    let mut bytes = Vec::new();
    while bytes.len() < len {
        let word = word(rng).to_le_bytes();
        /* fields of four bytes, too */
        bytes.extend_from_slice(if rng.word() & 1 == 0 { &word } else { &word[..4] });
    }
    bytes.truncate(len);
    bytes
}

fn attack(kernel: &mut AskedKernel, rng: &mut Rng) {
    for _ in 0..3 {
        let memory = bytes(rng, 4096);
        kernel.put((rng.word() % (LEN - 4096) as u64) as usize, &memory);
    }
    if rng.word().is_multiple_of(4) {
        kernel.change_before_reads(bytes(rng, 1000));
    }
    for _ in 0..8 {
        if rng.word().is_multiple_of(3) {
            let piece = bytes(rng, 4096);
            kernel.feed(&piece, rng.word() & 1 == 0, rng.word() & 1 == 0);
        } else {
            let most = if rng.word().is_multiple_of(4) { 4096 } else { 40 };
            let params = bytes(rng, most);
            kernel.call(&params, rng.word().is_multiple_of(4));
        }
    }
}

#[test]
fn no_parameters_harm_a_kernel() {
    for code in 1..=5 {
        let builtin = Builtin::from_code(code).expect("a kernel");
        let mut rng = Rng::new([code.into(), 7]);
        for _ in 0..400 {
            attack(&mut AskedKernel::new(builtin), &mut rng);
        }
    }
    assert!(Builtin::from_code(0).is_none() && Builtin::from_code(6).is_none());
}
