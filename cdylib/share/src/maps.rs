//! What protection the mappings of this process have, as /proc/self/maps says.

use core::ffi::c_int;
use std::fs::File;
use std::io::{BufRead, BufReader};

use crate::ranges::{Span, overlap};
use crate::system::READ_WRITE;

/// The parts of a range that are mapped with another protection than read and write, and which.
pub(crate) fn odd_protections(of: &Span) -> Vec<(Span, c_int)> {
    let Ok(file) = File::open("/proc/self/maps") else { return Vec::new() };
    let lines = BufReader::with_capacity(1 << 14, file).lines().map_while(Result::ok);
    let parts = lines.filter_map(|line| {
        let (span, protection) = parse(&line)?;
        let part = overlap(&span, of);
        (!part.is_empty() && protection != READ_WRITE).then_some((part, protection))
    });
    parts.collect()
}

/// Range and protection of a line of maps.
fn parse(line: &str) -> Option<(Span, c_int)> {
    let mut words = line.split(' ');
    let (start, end) = words.next()?.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    let bits = words.next()?.bytes().zip([b'r', b'w', b'x']);
    let values = [libc::PROT_READ, libc::PROT_WRITE, libc::PROT_EXEC];
    let protection = bits.zip(values).filter(|((has, bit), _)| has == bit).map(|(_, value)| value).sum();
    Some((address(start)?..address(end)?, protection))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read() {
        let line = "7f01a000-7f01b000 r-xp 00001000 08:01 42    /usr/lib/a b.so";
        assert_eq!(parse(line), Some((0x7f01a000..0x7f01b000, libc::PROT_READ | libc::PROT_EXEC)));
        assert_eq!(parse("1000-2000 ---s 00000000 00:01 7"), Some((0x1000..0x2000, libc::PROT_NONE)));
        assert_eq!(parse("nonsense"), None);
    }

    #[test]
    fn own_code_is_odd_and_own_data_is_not() {
        let code = odd_protections as *const () as usize;
        let found = odd_protections(&(code..code + 1));
        assert_eq!(found.first().map(|(_, protection)| protection & libc::PROT_EXEC), Some(libc::PROT_EXEC));
        let value = Box::new(0u8);
        let at = &raw const *value as usize;
        assert!(odd_protections(&(at..at + 1)).is_empty());
    }
}
