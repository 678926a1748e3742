//! The CRC of the program's bytes, read once and where they are.
//!
//! CRC is linear: 64 bytes that stand before others may be multiplied by a power of x and added to those
//! instead (V. Gopal et al., Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction, 2009).
//! So all bytes come down to 64 with the same CRC, which the library for slices can have.

use starverbs_core::wire::Crc;

use crate::program::ProgramBytes;

#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(crate) use wide::update;

/// No CPU of this architecture has what it takes.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(crate) fn update(_: &mut Crc, _: ProgramBytes) -> bool {
    false
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod wide {
    use std::arch::x86_64::*;

    use super::*;

    /// The polynomial, reflected: the top bit is x^0.
    const POLYNOMIAL: u32 = 0xedb8_8320;
    const BLOCK: usize = size_of::<__m512i>();
    /// Fewer bytes are not worth it.
    const LEAST: usize = 4 * BLOCK;
    const BLOCK_BITS: u32 = 8 * BLOCK as u32;

    /// Goes on with `crc` over `bytes`, and says so, if they are enough and the CPU has what it takes.
    #[inline]
    pub(crate) fn update(crc: &mut Crc, bytes: ProgramBytes) -> bool {
        let can = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("vpclmulqdq");
        if can && bytes.len() >= LEAST {
            // SAFETY: the CPU has both.
            *crc = unsafe { sum(crc.clone().value(), bytes) };
            return true;
        }
        false
    }

    /// What both halves of 128 bits are multiplied by where others stand `bits` behind them.
    const fn behind(bits: u32) -> [i64; 2] {
        [power(bits + 32) << 1, power(bits - 32) << 1]
    }

    /// x^n modulo the polynomial.
    const fn power(n: u32) -> i64 {
        let (mut product, mut left) = (1u32 << 31, n);
        while left > 0 {
            product = product >> 1 ^ POLYNOMIAL & 0u32.wrapping_sub(product & 1);
            left -= 1;
        }
        product as i64
    }

    /// Adds `block`, multiplied, to the one behind it.
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn add(block: __m512i, by: __m512i, to: __m512i) -> __m512i {
        let (low, high) =
            (_mm512_clmulepi64_epi128(block, by, 0x00), _mm512_clmulepi64_epi128(block, by, 0x11));
        /* xor of all three */
        _mm512_ternarylogic_epi64(low, high, to, 0x96)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn four_times([low, high]: [i64; 2]) -> __m512i {
        _mm512_broadcast_i32x4(_mm_set_epi64x(high, low))
    }

    /// What follows `crc` over at least [`LEAST`] bytes.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn sum(crc: u32, bytes: ProgramBytes) -> Crc {
        let load = |at: usize| {
            // SAFETY: `at` is a block's length before their end or sooner; they can be read, as promised in
            // `Payload::new`, and are read once and by no reference.
            unsafe { _mm512_loadu_si512(bytes.as_ptr().add(at).cast()) }
        };
        let before = _mm512_zextsi128_si512(_mm_cvtsi32_si128(!crc as i32));
        let mut four = [load(0), load(BLOCK), load(2 * BLOCK), load(3 * BLOCK)];
        four[0] = _mm512_xor_si512(four[0], before);
        let mut at = 4 * BLOCK;
        let by = four_times(const { behind(4 * BLOCK_BITS) });
        while bytes.len() - at >= 4 * BLOCK {
            for (n, block) in four.iter_mut().enumerate() {
                *block = add(*block, by, load(at + n * BLOCK));
            }
            at += 4 * BLOCK;
        }
        let by = four_times(const { behind(BLOCK_BITS) });
        let [mut last, b, c, d] = four;
        for block in [b, c, d] {
            last = add(last, by, block);
        }
        while bytes.len() - at >= BLOCK {
            last = add(last, by, load(at));
            at += BLOCK;
        }
        let mut rest = [0; 2 * BLOCK];
        // SAFETY: a block of bytes that are ours.
        unsafe { _mm512_storeu_si512(rest.as_mut_ptr().cast(), last) };
        let end = BLOCK + bytes.len() - at;
        bytes.copy_to(at, &mut rest[BLOCK..end]);
        /* what was before is in the first block */
        let mut crc = Crc::after(!0);
        crc.update(&rest[..end]);
        crc
    }
}

#[cfg(test)]
mod tests {
    use starverbs_core::Seg;

    use super::*;
    use crate::program::Payload;

    #[test]
    fn it_is_that_of_slices() {
        let bytes: Vec<u8> = (0..5000u32).map(|n| (n.pow(2) >> 3) as u8).collect();
        for from in [0, 1, 63] {
            for len in (1..1100).chain([2047, 2048, 4032, 4095, 4096, 4097]) {
                let piece = &bytes[from..from + len];
                let segs = [Seg { addr: piece.as_ptr() as u64, len: len as u32 }];
                // SAFETY: the bytes of `piece`.
                let program = unsafe { Payload::new(&segs) }.iter().next().unwrap();
                let mut right = Crc::after(0x2144_df1c);
                right.update(piece);
                let mut ours = Crc::after(0x2144_df1c);
                if update(&mut ours, program) {
                    assert_eq!(ours.value(), right.value(), "{len} bytes from {from}");
                }
            }
        }
    }
}
