//! CRC-32 as Ethernet has it, which the ICRC and StaR's packets end with.

use crc32fast::Hasher;

/// The CRC of the bytes so far.
#[derive(Clone, Debug, Default)]
pub struct Crc(Hasher);

impl Crc {
    /// Over no bytes.
    #[inline]
    pub fn new() -> Self {
        Crc(Hasher::new())
    }

    /// Goes on behind bytes whose CRC is `crc`.
    #[inline]
    pub fn after(crc: u32) -> Self {
        Crc(Hasher::new_with_initial(crc))
    }

    /// The four bytes on the wire behind `bytes`.
    #[inline]
    pub fn of(bytes: &[u8]) -> [u8; 4] {
        let mut crc = Crc::new();
        crc.update(bytes);
        crc.finish()
    }

    /// Over more bytes.
    #[inline]
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// As a number, for [`Crc::after`].
    #[inline]
    pub fn value(self) -> u32 {
        self.0.finalize()
    }

    /// The four bytes on the wire.
    #[inline]
    pub fn finish(self) -> [u8; 4] {
        self.value().to_le_bytes()
    }
}
