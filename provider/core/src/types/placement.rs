//! The words of FLUSH (annex A19).

use bitflags::bitflags;

use super::Access;

bitflags! {
    /// What a FLUSH is for. Values as `enum ibv_placement_type`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Placement: u8 {
        /// What was written is visible to all who look
        const GLOBAL = 1;
        /// What was written survives the loss of power
        const PERSISTENT = 2;
    }
}

impl Placement {
    /// The rights that a FLUSH of this kind needs.
    pub fn needs(self) -> Access {
        let mut need = Access::empty();
        need.set(Access::FLUSH_GLOBAL, self.contains(Placement::GLOBAL));
        need.set(Access::FLUSH_PERSISTENT, self.contains(Placement::PERSISTENT));
        need
    }
}

/// Of which memory a FLUSH speaks. Values as `enum ibv_selectivity_level`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum FlushLevel {
    /// The range in the RETH
    Range = 0,
    /// All that its key opens
    Mr = 1,
}

impl FlushLevel {
    /// From `enum ibv_selectivity_level`.
    pub const fn from_code(code: u32) -> Option<Self> {
        match code {
            0 => Some(FlushLevel::Range),
            1 => Some(FlushLevel::Mr),
            _ => None,
        }
    }
}
