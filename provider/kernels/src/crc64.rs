//! CRC-64/Jones: reflected polynomial 0x95AC9329AC4BC9B5, initial value and final XOR 0. By the CPU's
//! carry-less multiplication, where it has it.

use std::sync::LazyLock;

use crc_fast::{CrcParams, checksum_with_params};

static JONES: LazyLock<CrcParams> = LazyLock::new(|| {
    CrcParams::new("CRC-64/Jones", 64, 0xad93_d235_94c9_35a9, 0, true, 0, 0xe9c6_d914_c4b8_d9ca)
});

/// The CRC of bytes that follow those whose CRC is `crc`; 0 begins.
pub fn crc64(crc: u64, data: &[u8]) -> u64 {
    let mut params = *JONES;
    params.init_algorithm = crc;
    checksum_with_params(params, data)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bit by bit, as the polynomial says it.
    fn plain(data: &[u8]) -> u64 {
        let bit = |crc: u64| if crc & 1 == 1 { crc >> 1 ^ 0x95ac_9329_ac4b_c9b5 } else { crc >> 1 };
        data.iter().fold(0, |crc, byte| (0..8).fold(crc ^ u64::from(*byte), |crc, _| bit(crc)))
    }

    #[test]
    fn known_answers() {
        assert_eq!(crc64(0, b"123456789"), 0xe9c6_d914_c4b8_d9ca);
        assert_eq!(crc64(0, b""), 0);
        let data: Vec<u8> = (0..5000u32).map(|n| ((n * 7) >> 2) as u8).collect();
        for len in (0..300).chain([1000, 4088, 4096, 5000]) {
            assert_eq!(crc64(0, &data[..len]), plain(&data[..len]), "{len} bytes");
        }
        for cut in [0, 1, 15, 16, 17, 500, 4999] {
            let (a, b) = data.split_at(cut);
            assert_eq!(crc64(crc64(0, a), b), plain(&data), "{cut}");
        }
    }
}
