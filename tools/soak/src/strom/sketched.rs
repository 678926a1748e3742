//! What the HyperLogLog kernel must make of streams, plainly: which registers items have, and where their
//! bytes go.

use std::collections::HashSet;

use starverbs_core::strom::Code;
use starverbs_kernels::hll::{ESTIMATE, Params, RESET, TO};
use zerocopy::FromBytes;

use super::Answer;

/// Registers of a sketch.
const REGISTERS: f64 = 65_536.0;

/// All streams of a host.
#[derive(Debug, Default)]
pub(super) struct Sketched {
    /// Registers that are not 0. So few that the estimate is by linear counting
    touched: HashSet<u64>,
    items: u64,
    lost: u64,
    /// Where the next byte goes, and room from there on; `None`: nowhere
    to: Option<(u64, usize)>,
}

/// MurmurHash3 x64 128 of four bytes with seed 0, its first word, as its author has it: the bytes are the
/// tail.
fn murmur(item: [u8; 4]) -> u64 {
    let fmix = |mut k: u64| {
        k ^= k >> 33;
        k = k.wrapping_mul(0xff51_afd7_ed55_8ccd);
        k ^= k >> 33;
        k = k.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        k ^ (k >> 33)
    };
    let (mut h1, mut h2) = (0u64, 0u64);
    let mut k1 = item.iter().rev().fold(0u64, |k, byte| k << 8 | u64::from(*byte));
    k1 = k1.wrapping_mul(0x87c3_7b91_1142_53d5).rotate_left(31);
    h1 ^= k1.wrapping_mul(0x4cf5_ad43_2745_937f);
    h1 ^= item.len() as u64;
    h2 ^= item.len() as u64;
    h1 = h1.wrapping_add(h2);
    h2 = h2.wrapping_add(h1);
    fmix(h1).wrapping_add(fmix(h2))
}

impl Sketched {
    /// A packet; the bytes of it that are written, and where.
    pub(super) fn take(&mut self, data: &[u8]) -> Option<(u64, Vec<u8>)> {
        for item in data.as_chunks().0 {
            self.touched.insert(murmur(*item) >> 48);
            self.items += 1;
        }
        let (to, room) = self.to.as_mut()?;
        let (fit, rest) = data.split_at(data.len().min(*room));
        self.lost += rest.len() as u64;
        let at = *to;
        (*to, *room) = (at + fit.len() as u64, *room - fit.len());
        (!fit.is_empty()).then(|| (at, fit.to_vec()))
    }

    /// A peer's RPC: how it must end.
    pub(super) fn command(&mut self, params: &[u8]) -> Answer {
        let Ok(params) = Params::read_from_bytes(params) else { return Answer::error(Code::BadParam) };
        let empty = REGISTERS - self.touched.len() as f64;
        let distinct = (REGISTERS * (REGISTERS / empty).ln() + 0.5) as u64;
        let answer = [distinct, self.items, self.lost].iter().flat_map(|word| word.to_le_bytes()).collect();
        match params.command.get() {
            ESTIMATE => {}
            RESET => *self = Sketched::default(),
            TO => self.to = Some((params.to.get(), params.len.get() as usize)),
            _ => return Answer::error(Code::BadParam),
        }
        Answer::ok(answer)
    }
}
