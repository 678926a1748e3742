//! Numbers that an untrusted peer cannot guess, not even from those that it was given: keys and QPNs go out
//! to peers.
//!
//! SipHash-2-4 (Aumasson, Bernstein: "SipHash: a fast short-input PRF", 2012) of a counter, under a key of
//! 128 bits that is the card's seed. Control path only.

use alloc::vec::Vec;

/// The generator.
pub struct Rng {
    key: [u64; 2],
    count: u64,
}

impl Rng {
    /// The same seed gives the same numbers.
    pub fn new(seed: [u64; 2]) -> Self {
        Rng { key: seed, count: 0 }
    }

    /// The next number.
    pub fn word(&mut self) -> u64 {
        self.count = self.count.wrapping_add(1);
        sip(self.key, self.count)
    }

    /// A number below `limit`, which is not 0. The remainder favours small ones by less than `limit` / 2^64.
    fn below(&mut self, limit: u64) -> u64 {
        self.word() % limit
    }

    /// Any order of some things (Fisher and Yates).
    pub(crate) fn shuffle<T>(&mut self, things: &mut [T]) {
        /* three short draws from one number: what the remainder favours is still below 1 in 500 */
        const SHORT: u32 = 21;
        let mut word = 0;
        for last in (1..things.len()).rev() {
            let at = if last < 1 << 12 {
                /* the highest bit marks the end */
                word = if word >> SHORT <= 1 { self.word() | 1 << 63 } else { word >> SHORT };
                (word & ((1 << SHORT) - 1)) % (last as u64 + 1)
            } else {
                self.below(last as u64 + 1)
            };
            things.swap(last, at as usize);
        }
    }

    /// Takes any of some things out; all of them one after the other are a shuffle (Fisher and Yates).
    pub(crate) fn draw<T>(&mut self, things: &mut Vec<T>) -> Option<T> {
        if things.is_empty() {
            return None;
        }
        let at = self.below(things.len() as u64) as usize;
        Some(things.swap_remove(at))
    }
}

/// SipHash-2-4 of the eight bytes of `word`, little-endian.
fn sip([k0, k1]: [u64; 2], word: u64) -> u64 {
    let mut v = [
        k0 ^ 0x736f_6d65_7073_6575,
        k1 ^ 0x646f_7261_6e64_6f6d,
        k0 ^ 0x6c79_6765_6e65_7261,
        k1 ^ 0x7465_6462_7974_6573,
    ];
    /* the last block holds the length alone: eight bytes are one whole word */
    for block in [word, 8 << 56] {
        v[3] ^= block;
        (0..2).for_each(|_| round(&mut v));
        v[0] ^= block;
    }
    v[2] ^= 0xff;
    (0..4).for_each(|_| round(&mut v));
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

fn round(v: &mut [u64; 4]) {
    v[0] = v[0].wrapping_add(v[1]);
    v[2] = v[2].wrapping_add(v[3]);
    v[1] = v[1].rotate_left(13) ^ v[0];
    v[3] = v[3].rotate_left(16) ^ v[2];
    v[0] = v[0].rotate_left(32);
    v[2] = v[2].wrapping_add(v[1]);
    v[0] = v[0].wrapping_add(v[3]);
    v[1] = v[1].rotate_left(17) ^ v[2];
    v[3] = v[3].rotate_left(21) ^ v[0];
    v[2] = v[2].rotate_left(32);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The eighth of the paper's vectors: key 00 01 .. 0f, input 00 01 .. 07.
    #[test]
    fn it_is_siphash() {
        let key = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];
        assert_eq!(sip(key, 0x0706_0504_0302_0100), 0x93f5_f579_9a93_2462);
    }

    #[test]
    fn a_shuffle_keeps_everything_and_no_order() {
        let mut things: Vec<u32> = (0..5000).collect();
        Rng::new([1, 2]).shuffle(&mut things);
        let neighbours = things.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count();
        assert!(neighbours < 10, "{neighbours} of 4999 are still behind each other");
        /* where the first thousand have gone: evenly over all */
        let low = things[..2500].iter().filter(|thing| **thing < 1000).count();
        assert!((420..580).contains(&low), "{low} of 1000 in the first half");
        things.sort_unstable();
        assert!(things.iter().enumerate().all(|(i, thing)| i as u32 == *thing));
    }

    #[test]
    fn draws_leave_nothing_out_and_keep_no_order() {
        let (mut rng, mut left) = (Rng::new([1, 2]), (0..1000).collect::<Vec<u32>>());
        let mut things: Vec<u32> = core::iter::from_fn(|| rng.draw(&mut left)).collect();
        let neighbours = things.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count();
        assert!(neighbours < 10, "{neighbours} of 999 are still behind each other");
        things.sort_unstable();
        assert!(things.len() == 1000 && things.iter().enumerate().all(|(i, thing)| i as u32 == *thing));
    }
}
