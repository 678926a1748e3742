//! Input of an oracle, read as a program: numbers and pieces, zeros where it ends.

/// What is left of the input.
pub(crate) struct Bytes<'a>(pub(crate) &'a [u8]);

impl<'a> Bytes<'a> {
    /// The next byte, if any is left.
    pub(crate) fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// The next byte.
    pub(crate) fn byte(&mut self) -> u8 {
        self.next().unwrap_or(0)
    }

    /// The next two bytes as a number, little-endian as in [`Bytes::word`].
    pub(crate) fn half(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    /// The next four bytes as a number.
    pub(crate) fn word(&mut self) -> u32 {
        u32::from(self.half()) | u32::from(self.half()) << 16
    }

    /// The next `most` bytes, or what is left.
    pub(crate) fn take(&mut self, most: usize) -> &'a [u8] {
        let (now, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        now
    }

    /// One of some things.
    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::from(self.byte()) % from.len()]
    }
}
