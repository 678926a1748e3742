//! What a hostile peer sends to kernels: each request ends, whatever stands in memory, and none panics.
//! What they touch is for the card to check.

use starverbs_core::rng::Rng;
use starverbs_core::strom::Kernel;

use crate::Builtin;
use crate::host::TestHost;

const BASE: u64 = 0x4000;
const LEN: usize = 1 << 14;

/// Numbers that are likely to mean something: commands, keys, addresses in and around the region.
fn word(rng: &mut Rng) -> u64 {
    let any = rng.word();
    match any % 8 {
        0 => any >> 8 & 7,
        1 => u64::from(TestHost::KEY),
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

fn attack(kernel: &mut dyn Kernel, host: &mut TestHost, rng: &mut Rng) {
    let memory = bytes(rng, 4096);
    host.put(BASE + rng.word() % (LEN - 4096) as u64, &memory);
    for _ in 0..8 {
        if rng.word().is_multiple_of(3) {
            let piece = bytes(rng, 4096);
            host.feed(kernel, &piece, rng.word() & 1 == 0, rng.word() & 1 == 0);
        } else {
            let most = if rng.word().is_multiple_of(4) { 4096 } else { 40 };
            let params = bytes(rng, most);
            host.call(kernel, &params);
        }
    }
}

#[test]
fn no_parameters_harm_a_kernel() {
    for code in 1..=5 {
        let builtin = Builtin::from_code(code).expect("a kernel");
        let mut host = TestHost::new(BASE, LEN);
        let mut rng = Rng::new([code.into(), 7]);
        for _ in 0..400 {
            attack(&mut *builtin.make(), &mut host, &mut rng);
        }
    }
    assert!(Builtin::from_code(0).is_none() && Builtin::from_code(6).is_none());
}
