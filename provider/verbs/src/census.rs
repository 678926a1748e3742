//! What a program may ask of its card's counters (stardv_query_counters(3)): the page's cells, and the queue
//! pairs of one context.
//!
//! It must not know how the numbers reach a program.

use starverbs_core::Counters;

use crate::context::Context;
use crate::device::board::BoardFacts;
use crate::device::{Command, Device};
use crate::error::Result;

/// Queue pairs of a context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// All of them
    pub qps: u64,
    /// In RTS
    pub rts: u64,
    /// In ERR
    pub err: u64,
}

impl Context {
    /// The counters of the card, which the contexts of the process share. Reading disturbs nobody.
    ///
    /// # Errors
    /// EIO in a forked child.
    pub fn counters(&self) -> Result<&Counters> {
        Ok(self.device()?.stats())
    }

    /// Whether the card is QPC-limited, so that its `qpc_` counters count.
    ///
    /// # Errors
    /// EIO in a forked child.
    pub fn is_qpc_limited(&self) -> Result<bool> {
        Ok(self.device()?.settings().qpc_cache.is_some())
    }

    /// What the board says of itself, if this card is one.
    ///
    /// # Errors
    /// EIO in a forked child, or if the board is gone.
    pub fn board_facts(&self) -> Result<Option<BoardFacts>> {
        match self.device()? {
            Device::Board(board) => board.facts().map(Some),
            _ => Ok(None),
        }
    }

    /// Counts the queue pairs of this context; holds the card for as long as that takes.
    ///
    /// # Errors
    /// EIO in a forked child.
    pub fn census(&self) -> Result<Census> {
        self.device()?.control(Command::Census { events: self.events() })?.census()
    }
}
