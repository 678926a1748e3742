//! The card's host: memory of this process, the UDP port, the objects' queues.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use starverbs_backend::TxStack;
use starverbs_core::{AsyncEvent, Av, Env, Seg};
use starverbs_rings::{CardRq, CardSq};

use crate::cq::CardCq;
use crate::stat::StatPage;

/// What a card works on in a real process.
pub(crate) struct HostEnv {
    pub(crate) tx: TxStack<StatPage>,
    /// Raised in this turn; told to the contexts at its end.
    pub(crate) events: Vec<AsyncEvent>,
}

impl HostEnv {
    pub(crate) fn new(tx: TxStack<StatPage>) -> Self {
        HostEnv { tx, events: Vec::with_capacity(16) }
    }
}

impl Env for HostEnv {
    type Sq = CardSq;
    type Rq = CardRq;
    type Cq = CardCq;
    type Stats = StatPage;

    #[inline]
    fn dma_write(&mut self, addr: u64, data: &[u8]) {
        /* the last bytes last: programs spin on them, as cards write in order */
        let (body, tail) = data.split_at(data.len().saturating_sub(8));
        // SAFETY: the card has checked that [addr, addr + len) lies in a memory region, which the
        // program registered: it promised that the memory is mapped, and lets peers write to it.
        unsafe {
            let to = addr as *mut u8;
            to.copy_from(body.as_ptr(), body.len());
            fence(Ordering::Release);
            match <[u8; 8]>::try_from(tail) {
                Ok(word) => to.add(body.len()).cast::<u64>().write_unaligned(u64::from_ne_bytes(word)),
                Err(_) => to.copy_from(tail.as_ptr(), tail.len()),
            }
        }
    }

    #[inline]
    fn dma_fetch_add(&mut self, addr: u64, add: u64) -> u64 {
        // SAFETY: as for writing; the card has checked the alignment.
        let cell = unsafe { AtomicU64::from_ptr(addr as *mut u64) };
        cell.fetch_add(add, Ordering::SeqCst)
    }

    #[inline]
    fn dma_compare_swap(&mut self, addr: u64, compare: u64, swap: u64) -> u64 {
        // SAFETY: as for writing; the card has checked the alignment.
        let cell = unsafe { AtomicU64::from_ptr(addr as *mut u64) };
        match cell.compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(old) | Err(old) => old,
        }
    }

    #[inline]
    fn send_frame(&mut self, to: &Av, header: &[u8], payload: &[Seg], pad: u8, volatile: bool) {
        self.tx.send_frame(to, header, payload, pad, volatile);
    }

    #[inline]
    fn can_send(&self) -> bool {
        self.tx.can_send()
    }

    fn event(&mut self, event: AsyncEvent) {
        self.events.push(event);
    }
}
