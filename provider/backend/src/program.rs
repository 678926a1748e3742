//! The program's memory: bytes that its threads may write while the port reads them.
//!
//! A reference would promise that nobody does. So there is none: bytes are copied, and the copy is looked at.
//! Two copies may differ where a program breaks its own rules; what was sent then fails its checksum at the
//! peer, as with a card's DMA.

use starverbs_core::Seg;

/// A frame's payload: pieces of the program's memory.
#[derive(Clone, Copy, Default, Debug)]
pub struct Payload<'a>(&'a [Seg]);

impl<'a> Payload<'a> {
    /// No bytes.
    pub const EMPTY: Payload<'static> = Payload(&[]);

    /// The bytes of segments.
    ///
    /// # Safety
    /// They stay readable until the next flush of the port that gets the payload.
    #[inline]
    pub const unsafe fn new(segs: &'a [Seg]) -> Self {
        Payload(segs)
    }

    /// Bytes in all.
    #[inline]
    pub(crate) fn len(self) -> usize {
        match self.0 {
            /* of most packets: no loop */
            [] => 0,
            [one] => one.len as usize,
            all => all.iter().map(|seg| seg.len as usize).sum(),
        }
    }

    /// How many pieces, empty ones included.
    #[inline]
    pub(crate) fn pieces(self) -> usize {
        self.0.len()
    }

    /// Those that have bytes.
    #[inline]
    pub(crate) fn iter(self) -> impl Iterator<Item = ProgramBytes> {
        let there = self.0.iter().filter(|seg| seg.len > 0);
        there.map(|seg| ProgramBytes { at: seg.addr as *const u8, len: seg.len as usize })
    }
}

/// Some bytes of the program's, readable as promised in [`Payload::new`].
#[derive(Clone, Copy)]
pub(crate) struct ProgramBytes {
    at: *const u8,
    len: usize,
}

impl ProgramBytes {
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
        // SAFETY: readable, as promised in `Payload::new`; `to` is exclusively ours.
        unsafe { to.as_mut_ptr().copy_from_nonoverlapping(self.at.add(from), to.len()) };
    }
}
