//! RPCs and streams from anyone to the kernels of every card (StRoM), on memory that changes while they look
//! at it: none panics, each request ends, and a kernel uses no key but those that it was given.

use starverbs_core::strom::PIECE;
use starverbs_kernels::Builtin;
use starverbs_kernels::fuzzing::{AskedKernel, LEN};

use crate::bytes::Bytes;

/// Most steps of one input.
const STEPS: usize = 48;

/// Checks one input: which kernel, then requests, and what memory holds. Each step is a byte that says what
/// it is, a length of two bytes, and so many bytes.
pub fn check(input: &[u8]) {
    let mut input = Bytes(input);
    let builtin = Builtin::from_code(u32::from(input.byte()) % 5 + 1).expect("there are five");
    let mut kernel = AskedKernel::new(builtin);
    let mut steps = 0;
    while let Some(what) = input.next().filter(|_| steps < STEPS) {
        steps += 1;
        let len = usize::from(input.half()) % (PIECE + 1);
        match what % 8 {
            0 => {
                let at = usize::from(input.half()) % LEN;
                kernel.put(at, input.take(len));
            }
            1 => kernel.change_before_reads(input.take(len).to_vec()),
            2 | 3 => kernel.feed(input.take(len), what & 8 != 0, what & 16 != 0),
            4 => kernel.call(input.take(len), true),
            _ => kernel.call(input.take(len), false),
        }
    }
}
