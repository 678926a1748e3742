//! What a board says of itself beyond what verbs ask for.

use std::path::PathBuf;

use starverbs_queues::board::{REG_QPC_ENTRIES, REG_QPC_PLACEMENT, REG_QPC_POLICY, REG_VERSION};

use super::Board;
use crate::error::Result;

/// A board, by its registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoardFacts {
    /// Its socket or character device
    pub path: PathBuf,
    /// `CAP_*`: what it takes, as far as the way there carries it
    pub caps: u64,
    /// What only a function's registers tell; `None`: they are the kernel's
    pub registers: Option<BoardRegisters>,
}

/// Of a board's registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoardRegisters {
    /// `REG_VERSION`: major in the high half
    pub version: u32,
    /// QP contexts on chip; 0: all
    pub qpc_entries: u32,
    /// Policy of the QPC cache: `QPC_POLICY_*`
    pub qpc_policy: u32,
    /// Where QP contexts are kept: `QPC_IN_*`
    pub qpc_placement: u32,
}

impl Board {
    /// What it says of itself.
    pub(crate) fn facts(&self) -> Result<BoardFacts> {
        let at = [REG_VERSION, REG_QPC_ENTRIES, REG_QPC_POLICY, REG_QPC_PLACEMENT];
        let registers = self.link.registers(at)?.map(|[version, qpc_entries, qpc_policy, qpc_placement]| {
            BoardRegisters { version, qpc_entries, qpc_policy, qpc_placement }
        });
        let path = self.link.path.clone();
        Ok(BoardFacts { path, caps: self.link.caps, registers })
    }
}
