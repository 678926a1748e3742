//! The program's memory: bytes that its threads may write while the port reads them.
//!
//! A reference would promise that nobody does. So there is none: bytes are copied, and the copy is looked at.
//! Two copies may differ where a program breaks its own rules; what was sent then fails its checksum at the
//! peer, as with a card's DMA.

use starverbs_core::Seg;

/// Some bytes of the program's.
#[derive(Clone, Copy)]
pub(crate) struct ProgramBytes {
    at: *const u8,
    len: usize,
}

impl ProgramBytes {
    /// The bytes of a segment.
    ///
    /// # Safety
    /// They stay readable for as long as this is used: the card, or with StaR its peer's registry and this
    /// card's bounds, checked the segment against a region, whose memory the program must keep until it is
    /// deregistered.
    #[inline]
    pub(crate) unsafe fn of(seg: &Seg) -> Self {
        ProgramBytes { at: seg.addr as *const u8, len: seg.len as usize }
    }

    /// How many.
    #[inline]
    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// Where they are, for the kernel to read.
    #[inline]
    pub(crate) fn as_ptr(self) -> *const u8 {
        self.at
    }

    /// Copies as many as `to` holds, from byte `from` on.
    ///
    /// # Panics
    /// There are fewer.
    #[inline]
    pub(crate) fn copy_to(self, from: usize, to: &mut [u8]) {
        assert!(from <= self.len && to.len() <= self.len - from, "behind the segment");
        // SAFETY: readable, as promised in `of`; `to` is exclusively ours.
        unsafe { to.as_mut_ptr().copy_from_nonoverlapping(self.at.add(from), to.len()) };
    }
}
