//! Queue pairs by number: their doorbell cells, and what of them has completed.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use starverbs_core::types::QPN_MASK;
use starverbs_core::{Cqe, QPN_BLOCK, Qpn, WcOpcode};

/// One of a block of QPNs.
#[derive(Default)]
pub(super) struct BoardQpEntry {
    /// Its doorbell cell; 0: none
    pub(super) cell: AtomicU32,
    /// Sends that the board was sent messages of; held from before the index is read until that is done
    rung: Mutex<u32>,
    /// Receives that have completed so far, as its index counts them
    received: AtomicU32,
    /// `wr_id` of the send that completed last, if there was one
    sent: AtomicU64,
    has_sent: AtomicBool,
}

/// All of a board.
pub(super) struct BoardQps {
    blocks: Box<[OnceLock<Box<[BoardQpEntry]>>]>,
}

impl BoardQps {
    pub(super) fn new() -> BoardQps {
        BoardQps { blocks: (0..=QPN_MASK / QPN_BLOCK).map(|_| OnceLock::new()).collect() }
    }

    /// That of a QPN, if one of its block was ever ours.
    #[inline]
    pub(super) fn get(&self, qpn: Qpn) -> Option<&BoardQpEntry> {
        self.blocks.get((qpn / QPN_BLOCK) as usize)?.get()?.get((qpn % QPN_BLOCK) as usize)
    }

    /// That of a QPN of ours.
    pub(super) fn make(&self, qpn: Qpn) -> Option<&BoardQpEntry> {
        let entries = self.blocks.get((qpn / QPN_BLOCK) as usize)?;
        entries.get_or_init(|| (0..QPN_BLOCK).map(|_| BoardQpEntry::default()).collect());
        self.get(qpn)
    }

    /// The board has written this completion. Under the lock of its queue: whoever writes a field of an entry
    /// is alone there.
    #[inline]
    pub(super) fn note(&self, cqe: &Cqe) {
        let Some(entry) = self.get(cqe.qpn) else { return };
        if matches!(cqe.opcode, WcOpcode::Recv | WcOpcode::RecvRdmaWithImm) {
            let received = entry.received.load(Ordering::Relaxed);
            entry.received.store(received.wrapping_add(1), Ordering::Relaxed);
        } else {
            entry.sent.store(cqe.wr_id, Ordering::Relaxed);
            entry.has_sent.store(true, Ordering::Relaxed);
        }
    }
}

impl BoardQpEntry {
    /// Whoever has it alone sends messages of this queue pair.
    pub(super) fn rung(&self) -> MutexGuard<'_, u32> {
        self.rung.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The queues are empty, and begin at this receive.
    pub(super) fn begin(&self, receive: u32) {
        self.received.store(receive, Ordering::Relaxed);
        self.has_sent.store(false, Ordering::Relaxed);
    }

    /// Receives that have completed, of so many that the board has taken: it has one at most whose completion
    /// it has not written, that of a message that has come in part.
    pub(super) fn received_of(&self, taken: u32) -> u32 {
        let before = taken.wrapping_sub(1);
        if self.received.load(Ordering::Relaxed) == before { before } else { taken }
    }

    /// Whether the completion of a signaled send that the board has released is one of those it has written.
    /// Sends in a row of one number are taken for such: nothing tells them apart.
    pub(super) fn has_sent(&self, wr_id: u64) -> bool {
        self.has_sent.load(Ordering::Relaxed) && self.sent.load(Ordering::Relaxed) == wr_id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_completed_is_known() {
        let qps = BoardQps::new();
        let cqe = |opcode, wr_id| Cqe { qpn: 700, opcode, wr_id, ..Cqe::default() };
        qps.note(&cqe(WcOpcode::Recv, 1));
        assert!(qps.get(700).is_none(), "another's");
        let entry = qps.make(700).unwrap();
        entry.begin(u32::MAX);
        assert!(!entry.has_sent(0));
        /* one was taken that has not completed; then it has */
        for (wr_id, opcode) in [WcOpcode::Recv, WcOpcode::RecvRdmaWithImm].into_iter().enumerate() {
            assert_eq!(entry.received_of(wr_id as u32), (wr_id as u32).wrapping_sub(1));
            qps.note(&cqe(opcode, wr_id as u64));
            assert_eq!(entry.received_of(wr_id as u32), wr_id as u32);
        }
        /* what a board cannot have held back */
        assert_eq!(entry.received_of(40), 40);
        qps.note(&cqe(WcOpcode::RdmaRead, 5));
        assert!(entry.has_sent(5) && !entry.has_sent(6));
        entry.begin(9);
        assert!(!entry.has_sent(5));
        assert_eq!((entry.received_of(10), entry.received_of(9)), (9, 9));
    }
}
