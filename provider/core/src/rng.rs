//! Numbers that an untrusted peer cannot guess, not even from those that it was given: keys and QPNs go out
//! to peers.
//!
//! SipHash-2-4 (Aumasson, Bernstein: "SipHash: a fast short-input PRF", 2012) of a counter, under a key of
//! 128 bits that is the card's seed. Control path only.

use alloc::vec::Vec;
use core::hash::Hasher;

use siphasher::sip::SipHasher24;

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
        let mut hash = SipHasher24::new_with_keys(self.key[0], self.key[1]);
        hash.write(&self.count.to_le_bytes());
        hash.finish()
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

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014): small and fast. Who
/// has seen one number can tell all others, so that it is for faults, simulations and tests alone.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// The same seed gives the same numbers.
    pub fn new(seed: u64) -> Self {
        SplitMix64(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        let bits = mix(self.0);
        self.0 = self.0.wrapping_add(GAMMA);
        bits
    }

    /// A number in `0..bound`; 0 for a bound of 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(bound)) >> 64) as u64
    }

    /// True with probability `p`.
    pub fn chance(&mut self, p: f64) -> bool {
        /* 53 bits are what an f64 in 0..1 holds */
        ((self.bits() >> 11) as f64) < p * (1u64 << 53) as f64
    }
}

const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Spreads a number's bits over all of its bits; no two numbers become the same.
pub fn mix(word: u64) -> u64 {
    let z = word.wrapping_add(GAMMA);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The eighth of the paper's vectors: key 00 01 .. 0f, input 00 01 .. 07.
    #[test]
    fn it_is_siphash_of_the_count() {
        let mut rng = Rng::new([0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908]);
        rng.count = 0x0706_0504_0302_0100 - 1;
        assert_eq!(rng.word(), 0x93f5_f579_9a93_2462);
    }

    /// The first numbers of seed 1234567, as the authors' code prints them.
    #[test]
    fn it_is_splitmix() {
        let mut rng = SplitMix64::new(1_234_567);
        assert_eq!(
            [(); 3].map(|()| rng.bits()),
            [6457827717110365317, 3203168211198807973, 9817491932198370423]
        );
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
