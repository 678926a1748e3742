//! HyperLogLog over a stream (the paper's 7.2): how many distinct 32-bit items there were, while the stream
//! goes to memory as a WRITE would.
//!
//! The sketch is as Flajolet et al. define it, with 2^16 registers: an item's hash is the first word of
//! MurmurHash3 x64 128 with seed 0; its top 16 bits name the register, the rank is that of the first 1 behind
//! them. Linear counting up to 2.5 m; no correction at the other end, as the hash has 64 bits.

use starverbs_core::strom::{Code, Input, Kernel, KernelRun, Poll};
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// log2 of the registers.
const BITS: u32 = 16;
const REGISTERS: usize = 1 << BITS;
/// Ranks from 0, of a register that has seen nothing, on.
const RANKS: usize = (64 - BITS + 2) as usize;

/// Answer with an [`Estimate`].
pub const ESTIMATE: u32 = 0;
/// Forget all items, and where the stream goes; answer with the estimate before.
pub const RESET: u32 = 1;
/// Streams go to memory from now on, one behind the other; the rest as [`ESTIMATE`].
pub const TO: u32 = 2;

/// Parameters, 24 bytes.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Params {
    /// [`ESTIMATE`], [`RESET`] or [`TO`]
    pub command: U32,
    /// Key of the region
    pub rkey: U32,
    /// Its first byte for the stream
    pub to: U64,
    /// Room for it, bytes; 0: it goes nowhere
    pub len: U64,
}

/// The answer.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Estimate {
    /// Distinct items, rounded
    pub distinct: U64,
    /// Items that were counted
    pub items: U64,
    /// Bytes that found no room in memory
    pub lost: U64,
}

/// The kernel: one sketch, of all streams.
#[derive(Debug)]
pub struct Hll {
    registers: Box<[u8]>,
    /// Registers of each rank: an estimate looks at these alone
    ranks: [u32; RANKS],
    to: Params,
    items: u64,
    lost: u64,
}

impl Default for Hll {
    fn default() -> Self {
        Hll::over(vec![0; REGISTERS].into_boxed_slice())
    }
}

/// The finaliser of MurmurHash3.
fn mix(mut word: u64) -> u64 {
    word = (word ^ word >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    word = (word ^ word >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    word ^ word >> 33
}

/// The first word of MurmurHash3 x64 128, seed 0, of a number of four bytes.
pub fn hash(item: u32) -> u64 {
    let tail = u64::from(item).wrapping_mul(0x87c3_7b91_1142_53d5).rotate_left(31);
    let first = tail.wrapping_mul(0x4cf5_ad43_2745_937f) ^ 4;
    let (first, second) = (first.wrapping_add(4), first.wrapping_add(8));
    mix(first).wrapping_add(mix(second))
}

impl Hll {
    /// That has seen nothing.
    fn over(mut registers: Box<[u8]>) -> Self {
        registers.fill(0);
        let mut ranks = [0; RANKS];
        ranks[0] = REGISTERS as u32;
        Hll { registers, ranks, to: Params::default(), items: 0, lost: 0 }
    }

    fn add(&mut self, item: u32) {
        let hash = hash(item);
        let rank = (hash << BITS | 1 << (BITS - 1)).leading_zeros() as u8 + 1;
        let register = &mut self.registers[(hash >> (64 - BITS)) as usize];
        if rank > *register {
            self.ranks[usize::from(*register)] -= 1;
            self.ranks[usize::from(rank)] += 1;
            *register = rank;
        }
        self.items += 1;
    }

    /// Distinct items so far.
    pub fn estimate(&self) -> f64 {
        let m = REGISTERS as f64;
        let of = |(rank, count): (usize, &u32)| f64::from(*count) / (1u64 << rank) as f64;
        let sum: f64 = self.ranks.iter().enumerate().map(of).sum();
        let raw = 0.7213 / (1.0 + 1.079 / m) * m * m / sum;
        let empty = self.ranks[0];
        if raw <= 2.5 * m && empty > 0 { m * (m / f64::from(empty)).ln() } else { raw }
    }

    /// The packet's bytes to memory, as far as there is room. False: later.
    fn pass_on(&mut self, run: &mut KernelRun) -> bool {
        let room = usize::try_from(self.to.len.get()).unwrap_or(usize::MAX);
        let len = run.bytes().len().min(room);
        if len > 0 && !run.write_bytes(self.to.rkey.get(), self.to.to.get(), 0..len) {
            return false;
        }
        let lost = if self.to.rkey == 0 { 0 } else { run.bytes().len() - len };
        self.lost += lost as u64;
        self.to.to = self.to.to.get().wrapping_add(len as u64).into();
        self.to.len = (self.to.len.get() - len as u64).into();
        true
    }
}

impl Kernel for Hll {
    fn start(&mut self, run: &mut KernelRun, input: Input) -> Result<(), Code> {
        if input != Input::Params {
            return Ok(());
        }
        let params = Params::read_from_bytes(run.bytes()).map_err(|_| Code::BadParam)?;
        let distinct = (self.estimate() + 0.5) as u64;
        let answer = Estimate { distinct: distinct.into(), items: self.items.into(), lost: self.lost.into() };
        match params.command.get() {
            ESTIMATE => {}
            RESET => *self = Hll::over(core::mem::take(&mut self.registers)),
            TO => self.to = params,
            _ => return Err(Code::BadParam),
        }
        run.regs[0] = 1;
        if run.reply(answer.as_bytes()) { Ok(()) } else { Err(Code::Overflow) }
    }

    fn step(&mut self, run: &mut KernelRun) -> Poll {
        if run.regs[0] == 1 {
            return Poll::Ready(Code::Ok);
        }
        if !self.pass_on(run) {
            return Poll::Pending;
        }
        let (items, _) = run.bytes().as_chunks();
        items.iter().for_each(|item| self.add(u32::from_le_bytes(*item)));
        Poll::Ready(Code::Ok)
    }

    fn name(&self) -> &'static str {
        "hll"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::TestHost;

    /// MurmurHash3_x64_128 as its author wrote it down, for any bytes.
    fn murmur(data: &[u8]) -> u64 {
        const C1: u64 = 0x87c3_7b91_1142_53d5;
        const C2: u64 = 0x4cf5_ad43_2745_937f;
        let (mut h1, mut h2) = (0u64, 0u64);
        let (blocks, tail) = data.as_chunks::<16>();
        for block in blocks {
            let word = |at: usize| u64::from_le_bytes(block[at..at + 8].try_into().unwrap());
            h1 ^= word(0).wrapping_mul(C1).rotate_left(31).wrapping_mul(C2);
            h1 = h1.rotate_left(27).wrapping_add(h2).wrapping_mul(5).wrapping_add(0x52dc_e729);
            h2 ^= word(8).wrapping_mul(C2).rotate_left(33).wrapping_mul(C1);
            h2 = h2.rotate_left(31).wrapping_add(h1).wrapping_mul(5).wrapping_add(0x3849_5ab5);
        }
        let (low, high) = tail.split_at(tail.len().min(8));
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte));
        h2 ^= number(high).wrapping_mul(C2).rotate_left(33).wrapping_mul(C1);
        h1 ^= number(low).wrapping_mul(C1).rotate_left(31).wrapping_mul(C2);
        (h1, h2) = (h1 ^ data.len() as u64, h2 ^ data.len() as u64);
        h1 = h1.wrapping_add(h2);
        h2 = h2.wrapping_add(h1);
        mix(h1).wrapping_add(mix(h2))
    }

    #[test]
    fn hashes_are_murmurs() {
        /* a published answer of the reference for a text of more than one block, seed 0 */
        assert_eq!(murmur(b"The quick brown fox jumps over the lazy dog"), 0xe34b_bc7b_bc07_1b6c);
        for item in [0, 1, 0xffff_ffff, 0x1234_5678] {
            assert_eq!(hash(item), murmur(&u32::to_le_bytes(item)), "{item:#x}");
        }
    }

    fn stream(host: &mut TestHost, hll: &mut Hll, items: impl Iterator<Item = u32>) {
        let bytes: Vec<u8> = items.flat_map(u32::to_le_bytes).collect();
        for (at, piece) in bytes.chunks(4096).enumerate() {
            let last = (at + 1) * 4096 >= bytes.len();
            assert_eq!(host.feed(hll, piece, at == 0, last), Code::Ok);
        }
    }

    fn ask(host: &mut TestHost, hll: &mut Hll, params: Params) -> (u64, u64, u64) {
        let (code, data) = host.call(hll, params.as_bytes());
        assert_eq!(code, Code::Ok);
        let Ok(Estimate { distinct, items, lost }) = Estimate::read_from_bytes(&data) else { panic!() };
        (distinct.get(), items.get(), lost.get())
    }

    /// Within four standard errors (1.04 / sqrt(m)) of the truth; just over the seam of linear counting the
    /// raw estimate has a bias beside, of 3% at most (Heule et al. 2013, figure 2).
    #[test]
    fn estimates_are_near_the_truth() {
        let mut host = TestHost::new(0, 64);
        for distinct in [0u32, 1, 1000, 65_536, 170_000, 1_000_000] {
            let mut hll = Hll::default();
            stream(&mut host, &mut hll, (0..distinct).chain(0..distinct.min(500)));
            let (found, items, _) = ask(&mut host, &mut hll, Params::default());
            assert_eq!(items, u64::from(distinct + distinct.min(500)));
            let off = (found as f64 - f64::from(distinct)).abs();
            let seam = (2.5..5.0).contains(&(f64::from(distinct) / REGISTERS as f64));
            let bias = if seam { 0.03 } else { 0.0 };
            assert!(
                off <= ((4.0 * 1.04 / 256.0 + bias) * f64::from(distinct)).max(1.0),
                "{found} for {distinct}"
            );
        }
    }

    #[test]
    fn registers_are_those_of_the_definition() {
        let mut hll = Hll::default();
        let mut model = vec![0u8; REGISTERS];
        for item in (0..200_000u32).map(|n| n.wrapping_mul(2_654_435_761)) {
            hll.add(item);
            let hash = murmur(&item.to_le_bytes());
            let behind = (0..48).find(|bit| hash >> (47 - bit) & 1 == 1).unwrap_or(48);
            let register = &mut model[(hash >> 48) as usize];
            *register = (*register).max(behind as u8 + 1);
        }
        assert!(*hll.registers == *model);
    }

    #[test]
    fn the_stream_goes_to_memory() {
        let (mut host, mut hll) = (TestHost::new(0x1000, 20_000), Hll::default());
        let to =
            Params { command: TO.into(), rkey: TestHost::KEY.into(), to: 0x1000.into(), len: 12_000.into() };
        ask(&mut host, &mut hll, to);
        stream(&mut host, &mut hll, 0..2000);
        stream(&mut host, &mut hll, 2000..4000);
        let bytes: Vec<u8> = (0..3000u32).flat_map(u32::to_le_bytes).collect();
        assert!(*host.get(0x1000, 12_000) == *bytes);
        assert_eq!(host.get(0x1000 + 12_000, 8), [0; 8], "no byte behind its room");
        assert_eq!(ask(&mut host, &mut hll, Params { command: RESET.into(), ..to }).2, 4000);
        assert_eq!(ask(&mut host, &mut hll, Params::default()), (0, 0, 0));
        let bad = Params { command: 3.into(), ..to };
        assert_eq!(host.call(&mut hll, bad.as_bytes()).0, Code::BadParam);
        ask(&mut host, &mut hll, Params { rkey: 1.into(), ..to });
        assert_eq!(host.feed(&mut hll, &[0; 8], true, true), Code::Access);
    }
}
