//! What few connections need, in memory of its own from the first use on: a connection at rest takes eight
//! bytes for it.

use alloc::boxed::Box;
use alloc::collections::VecDeque;

use starverbs_core::env::Host;
use starverbs_core::room::boxed;
use starverbs_core::{Nanos, NicError, Psn, Sge};

use super::places::Lists;
use super::rpc::StreamPiece;
use crate::wire::Opt;

/// Lists of WQEs of one of SL's queues: of one that has several SGEs, or inline bytes.
#[derive(Default)]
pub(super) struct WqeLists {
    pub(super) sges: Lists<Sge>,
    pub(super) inline: Lists<u8>,
}

impl WqeLists {
    fn bytes(&self) -> usize {
        self.sges.bytes() + self.inline.bytes()
    }
}

/// All of it.
#[derive(Default)]
pub(super) struct Rare {
    pub(super) sends: WqeLists,
    pub(super) recvs: WqeLists,
    /// SGEs of our receive WQEs that SL's have taken, where a WQE may have several
    pub(super) held: Lists<Sge>,
    /// EAs that are owed for one WQE each: all of the paper's packets, else those that came before others
    pub(super) acks: VecDeque<(Opt, Psn)>,
    /// When the answer to a message that was done may leave
    pub(super) answer_at: Nanos,
    /// When the kernel at SL's RPC, or at a piece of its RPC WRITE, has its next turn; 0: none is at one
    pub(super) rpc_at: Nanos,
    pub(super) piece: StreamPiece,
    /// The WQE of ours for which SL was last asked which rules there are, and may be so often again
    pub(super) inquired: u32,
    pub(super) rounds: u8,
}

/// [`Rare`], once there is any.
#[derive(Default)]
pub(super) struct RareBox(Option<Box<Rare>>);

impl RareBox {
    /// Bytes of memory that it takes.
    pub(super) fn bytes(&self) -> usize {
        let of = |rare: &Rare| {
            let acks = rare.acks.capacity() * size_of::<(Opt, Psn)>();
            size_of_val(rare) + rare.sends.bytes() + rare.recvs.bytes() + rare.held.bytes() + acks
        };
        self.get().map_or(0, of)
    }

    /// Bytes of memory that lists take which are to grow; `of` gives by how much.
    pub(super) fn growth(&self, of: impl Fn(&Rare) -> usize) -> usize {
        match self.get() {
            Some(rare) => of(rare),
            None => size_of::<Rare>() + of(&Rare::default()),
        }
    }

    #[inline]
    pub(super) fn get(&self) -> Option<&Rare> {
        self.0.as_deref()
    }

    #[inline]
    pub(super) fn get_mut(&mut self) -> Option<&mut Rare> {
        self.0.as_deref_mut()
    }

    /// Lists of SL's inline bytes will be used soon, if there are any.
    #[inline]
    pub(super) fn expect_inline(&self, env: &impl Host) {
        if let Some(rare) = self.get() {
            env.prefetch(&rare.sends.inline);
        }
    }

    /// To be changed; there is some from now on. `Exhausted`: no memory.
    pub(super) fn make(&mut self) -> Result<&mut Rare, NicError> {
        match &mut self.0 {
            Some(rare) => Ok(rare),
            none => Ok(none.insert(boxed(Rare::default())?)),
        }
    }
}
