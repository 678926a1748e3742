//! The paper's figures of its cards (StRoM, sections 6 and 7), each run anew.

mod lookup;
mod micro;
mod objects;
mod streams;

use super::params::{HUNDRED, Params, TEN, TEN_STORES};
use crate::Figure;

/// Picoseconds of a microsecond.
const US: f64 = 1e6;

/// All of them, in the paper's order.
pub const FIGURES: &[Figure] = &[
    micro::LATENCY_TEN,
    micro::THROUGHPUT_TEN,
    micro::RATE_TEN,
    lookup::LIST,
    lookup::HOP,
    lookup::HASH,
    objects::SIZE,
    objects::FAILURES,
    objects::REREAD,
    streams::SHUFFLE,
    streams::SHUFFLE_RATE,
    micro::LATENCY_HUNDRED,
    micro::THROUGHPUT_HUNDRED,
    micro::RATE_HUNDRED,
    streams::SKETCH,
];
