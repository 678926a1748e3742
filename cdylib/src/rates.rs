//! Conversions between `enum ibv_rate`, multiples of 2.5 Gb/s and Mb/s, ibv_rate_to_mult(3) and
//! ibv_rate_to_mbps(3).
//!
//! Owns one table. It must not know any object.

use core::ffi::c_int;

/// `IBV_RATE_MAX`: no limit, and the answer for a rate that has no code.
const RATE_MAX: c_int = 0;

/// Code of `enum ibv_rate`, multiple of 2.5 Gb/s (-1 where the line rate is not one), data rate in Mb/s.
const RATES: [(c_int, c_int, c_int); 23] = [
    (2, 1, 2_500),
    (5, 2, 5_000),
    (3, 4, 10_000),
    (6, 8, 20_000),
    (4, 12, 30_000),
    (7, 16, 40_000),
    (8, 24, 60_000),
    (9, 32, 80_000),
    (10, 48, 120_000),
    (11, -1, 14_062),
    (12, -1, 56_250),
    (13, -1, 112_500),
    (14, -1, 168_750),
    (15, -1, 25_781),
    (16, -1, 103_125),
    (17, -1, 206_250),
    (18, -1, 309_375),
    (19, 11, 28_125),
    (20, 20, 53_125),
    (21, 160, 425_000),
    (22, 240, 637_500),
    (23, 320, 850_000),
    (24, 480, 1_275_000),
];

/// ibv_rate_to_mult(3): -1 for a rate without a multiple.
pub(crate) extern "C" fn rate_to_mult(rate: c_int) -> c_int {
    RATES.iter().find(|r| r.0 == rate).map_or(-1, |r| r.1)
}

/// mult_to_ibv_rate(3): `IBV_RATE_MAX` for a multiple without a rate.
pub(crate) extern "C" fn mult_to_rate(mult: c_int) -> c_int {
    RATES.iter().find(|r| r.1 > 0 && r.1 == mult).map_or(RATE_MAX, |r| r.0)
}

/// ibv_rate_to_mbps(3): -1 for an unknown rate.
pub(crate) extern "C" fn rate_to_mbps(rate: c_int) -> c_int {
    RATES.iter().find(|r| r.0 == rate).map_or(-1, |r| r.2)
}

/// mbps_to_ibv_rate(3): `IBV_RATE_MAX` for a figure without a rate.
pub(crate) extern "C" fn mbps_to_rate(mbps: c_int) -> c_int {
    RATES.iter().find(|r| r.2 == mbps).map_or(RATE_MAX, |r| r.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_are_inverse_where_both_exist() {
        for (rate, mult, mbps) in RATES {
            assert_eq!(rate_to_mbps(rate), mbps);
            assert_eq!(mbps_to_rate(mbps), rate);
            assert_eq!(rate_to_mult(rate), mult);
            if mult > 0 {
                assert_eq!(mult_to_rate(mult), rate);
            }
        }
        assert_eq!((rate_to_mult(0), rate_to_mbps(99), mult_to_rate(-1), mbps_to_rate(7)), (-1, -1, 0, 0));
    }
}
