//! The paper's figures that are about the card and its congestion control (1RMA, section 7), each run anew.

mod cache;
mod in_order;
mod isolation;
mod load;
mod ramp;
mod rekey;
mod slots;
mod uniform;
mod windows;

use crate::Figure;

/// All of them, in the paper's order.
pub const FIGURES: &[Figure] = &[
    cache::LATENCY,
    cache::REPLICA,
    uniform::SLOWDOWN,
    slots::OFFERED,
    slots::SLOTS,
    isolation::BESIDE,
    uniform::HEAVY,
    rekey::OUTAGE,
    ramp::RAMP,
    ramp::SHARE,
    ramp::FAIR,
    ramp::DELAY,
    windows::GOODPUT,
    windows::SHED,
    windows::NACKS,
    windows::NACK_LATENCY,
];
