//! The paper's figures that are about the card and its congestion control (1RMA, section 7), each run anew.

mod isolation;
mod ramp;
mod slots;
mod windows;

use crate::Figure;

/// All of them, in the paper's order.
pub const FIGURES: &[Figure] = &[
    slots::OFFERED,
    slots::SLOTS,
    isolation::BESIDE,
    ramp::RAMP,
    ramp::SHARE,
    ramp::FAIR,
    ramp::DELAY,
    windows::GOODPUT,
    windows::SHED,
    windows::NACKS,
    windows::NACK_LATENCY,
];
