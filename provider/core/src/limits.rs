//! How many objects a card holds of each kind. `ibv_query_device` reports the same numbers.

use crate::error::NicError;

/// Most objects of each kind that exist at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CardLimits {
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

impl Default for CardLimits {
    fn default() -> Self {
        const MANY: u32 = 1 << 20;
        CardLimits { qps: MANY, pds: MANY, avs: MANY, srqs: MANY, mrs: MANY, windows: MANY }
    }
}

impl CardLimits {
    /// What fits into so many bytes, if it is all of one kind: queue pairs and shared receive queues of a
    /// usual depth (128 requests of one SGE), and the small objects, each with all that a host keeps of it.
    pub fn fitting(bytes: u64) -> Self {
        let most = CardLimits::default();
        let fit = |most: u32, each: u64| u32::try_from(bytes / each).map_or(most, |n| n.clamp(1, most));
        CardLimits {
            qps: fit(most.qps, 24 << 10),
            pds: fit(most.pds, 512),
            avs: fit(most.avs, 512),
            srqs: fit(most.srqs, 8 << 10),
            mrs: fit(most.mrs, 768),
            windows: fit(most.windows, 512),
        }
    }
}

/// `Exhausted` unless there is room for one more.
pub(crate) fn room(held: usize, most: u32) -> Result<(), NicError> {
    if held < most as usize { Ok(()) } else { Err(NicError::Exhausted) }
}
