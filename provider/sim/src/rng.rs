//! A seeded source of chance.

use starverbs_core::rng::SplitMix64;

/// The stream of a seed, and what a test asks of it.
#[derive(Clone, Debug)]
pub struct Rng(SplitMix64);

impl Rng {
    /// The stream of `seed`.
    pub fn new(seed: u64) -> Self {
        Rng(SplitMix64::new(seed ^ 0x5851_f42d_4c95_7f2d))
    }
    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0.bits()
    }
    /// A number in 0..n; 0 for n = 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.0.below(n)
    }
    /// A number in a..=b.
    pub fn within(&mut self, a: u64, b: u64) -> u64 {
        a + self.below(b - a + 1)
    }
    /// True with probability `p`.
    pub fn chance(&mut self, p: f64) -> bool {
        self.0.chance(p)
    }
    /// A time until the next arrival, of arrivals that come by chance (Poisson); `mean` is their mean.
    pub fn wait(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.below(1 << 53) as f64 / (1_u64 << 53) as f64).ln()
    }
    /// One of `items`, which are not empty.
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u64) as usize]
    }
    /// Fills `out`.
    pub fn fill(&mut self, out: &mut [u8]) {
        for chunk in out.chunks_mut(8) {
            let word = self.bits().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}
