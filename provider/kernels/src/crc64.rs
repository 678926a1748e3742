//! CRC-64/Jones: reflected polynomial 0x95AC9329AC4BC9B5, initial value and final XOR 0.

const POLYNOMIAL: u64 = 0x95ac_9329_ac4b_c9b5;
/// Bytes that one turn of the loop takes.
const SLICE: usize = 16;

/// What a byte does to the CRC, with so many zero bytes behind it.
static TABLES: [[u64; 256]; SLICE] = tables();

const fn tables() -> [[u64; 256]; SLICE] {
    let mut tables = [[0; 256]; SLICE];
    let mut byte = 0;
    while byte < 256 {
        let (mut crc, mut bit) = (byte as u64, 0);
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut zeros = 1;
    while zeros < SLICE {
        let mut byte = 0;
        while byte < 256 {
            let crc = tables[zeros - 1][byte];
            tables[zeros][byte] = crc >> 8 ^ tables[0][(crc & 0xff) as usize];
            byte += 1;
        }
        zeros += 1;
    }
    tables
}

/// The CRC of bytes that follow those whose CRC is `crc`; 0 begins.
pub fn crc64(mut crc: u64, data: &[u8]) -> u64 {
    let (slices, rest) = data.as_chunks::<SLICE>();
    for slice in slices {
        let mut mixed = u128::from_le_bytes(*slice) ^ u128::from(crc);
        crc = 0;
        for table in TABLES.iter().rev() {
            crc ^= table[(mixed & 0xff) as usize];
            mixed >>= 8;
        }
    }
    rest.iter().fold(crc, |crc, byte| crc >> 8 ^ TABLES[0][usize::from(crc as u8 ^ byte)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        assert_eq!(crc64(0, b"123456789"), 0xe9c6_d914_c4b8_d9ca);
        assert_eq!(crc64(0, b""), 0);
        let data: Vec<u8> = (0..1000u32).map(|n| (n * 7) as u8).collect();
        let bytewise = data.iter().fold(0, |crc, byte| crc64(crc, &[*byte]));
        for cut in [0, 1, 15, 16, 17, 500] {
            let (a, b) = data.split_at(cut);
            assert_eq!(crc64(crc64(0, a), b), bytewise, "{cut}");
        }
    }
}
