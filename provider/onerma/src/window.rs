//! The solicitation window (1RMA, sections 4.1 and 4.3): inbound bytes that this card has asked for, and will
//! have room for.

use crate::types::MAX_OP;

/// The window of a card.
#[derive(Debug)]
pub(crate) struct SolicitationWindow {
    size: u32,
    free: u32,
}

impl SolicitationWindow {
    /// Of `size` bytes.
    pub(crate) const fn new(size: u32) -> Self {
        SolicitationWindow { size, free: size }
    }

    /// Takes `bytes`, of at most 4 KB, if 4 KB are free: a small operation does not pass before a large one
    /// that waits.
    pub(crate) fn admit(&mut self, bytes: u32) -> bool {
        let room = self.can_admit() && bytes <= MAX_OP;
        if room {
            self.free -= bytes;
        }
        room
    }

    /// Whether 4 KB are free.
    pub(crate) const fn can_admit(&self) -> bool {
        self.free >= MAX_OP
    }

    /// Gives back what an operation took.
    pub(crate) fn refund(&mut self, bytes: u32) {
        self.free = self.size.min(self.free + bytes);
    }

    /// Bytes that are taken.
    pub(crate) const fn taken(&self) -> u32 {
        self.size - self.free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_kilobytes_must_be_free_and_the_real_size_is_taken() {
        let mut window = SolicitationWindow::new(8192);
        assert!(window.admit(64));
        assert!(window.admit(4033));
        assert_eq!(window.taken(), 4097);
        assert!(!window.admit(1), "4095 are free");
        window.refund(64);
        assert!(window.admit(1));
        window.refund(4034);
        assert_eq!(window.taken(), 0);
    }
}
