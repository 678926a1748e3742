//! How many objects a card holds of each kind. `ibv_query_device` reports the same numbers.

use crate::error::NicError;

/// Most objects of each kind that exist at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Queue pairs
    pub qps: u32,
    /// Protection domains, and XRC domains, which are such to the card
    pub pds: u32,
    /// Address vectors
    pub avs: u32,
    /// Shared receive queues
    pub srqs: u32,
    /// Memory regions
    pub mrs: u32,
    /// Memory windows
    pub windows: u32,
}

impl Default for Limits {
    fn default() -> Self {
        const MANY: u32 = 1 << 20;
        Limits { qps: MANY, pds: MANY, avs: MANY, srqs: MANY, mrs: MANY, windows: MANY }
    }
}

/// `Exhausted` unless there is room for one more.
pub(crate) fn room(held: usize, most: u32) -> Result<(), NicError> {
    if held < most as usize { Ok(()) } else { Err(NicError::Exhausted) }
}
