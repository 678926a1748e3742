//! What a card does with its host's memory, written down for who gives it a time.

use starverbs_core::Seg;

use crate::memory::Memory;

/// Something that a card did, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Touch {
    /// It read bytes and waited for them, as a kernel does
    Read(Seg),
    /// It wrote bytes
    Write(Seg),
    /// It sent a frame, whose payload is in these places
    Frame(Vec<Seg>),
}

/// A change of memory.
pub(crate) type Change = Box<dyn FnMut(&mut Memory)>;

/// Who writes down.
#[derive(Default)]
pub(crate) struct EventLog {
    pub(crate) touches: Vec<Touch>,
    /// What the host's program does to its memory before each read that the card waits for
    pub(crate) before_read: Option<Change>,
}
