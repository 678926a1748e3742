//! What a 1RMA card works in: the process's memory and the UDP port.
//!
//! It must not know regions: the card has checked bounds and rights of each access.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use starverbs_core::mr::Plain;
use starverbs_core::{Dma, Seg};
use starverbs_onerma::{CardPath, Class, OneRmaEnv, PortalId, TAG_LEN};

use super::port::OneRmaPort;
use crate::copy::{copy_short, write_in_order};

/// Memory and wire. The addresses that it gets are a card's: of regions whose opener said that their memory
/// is there until they are closed ([`super::Process::open_region`]).
pub(super) struct World {
    pub(super) port: OneRmaPort,
}

impl Dma for World {
    type Mrs = Plain;

    fn dma_write(&mut self, addr: u64, data: &[u8]) -> bool {
        // SAFETY: an open region has these bytes and may be written, see World.
        unsafe { write_in_order(addr as *mut u8, data.as_ptr(), data.len()) };
        true
    }

    fn dma_copy(&mut self, from: u64, to: &mut [u8]) -> bool {
        // SAFETY: an open region has these bytes, see World; `to` is the caller's own.
        unsafe { copy_short(to.as_mut_ptr(), from as *const u8, to.len()) };
        true
    }

    fn dma_store(&mut self, addr: u64, bytes: [u8; 8]) -> bool {
        // SAFETY: an open region has these bytes, 8-aligned as the card's contract says, see World.
        unsafe { AtomicU64::from_ptr(addr as *mut u64) }.store(u64::from_ne_bytes(bytes), Ordering::Release);
        true
    }

    /* 1RMA has no atomics */
    fn dma_fetch_add(&mut self, _: u64, _: u64) -> Option<u64> {
        None
    }

    fn dma_compare_swap(&mut self, _: u64, _: u64, _: u64) -> Option<u64> {
        None
    }

    fn dma_fence(&mut self) {
        fence(Ordering::SeqCst);
    }

    fn begin_payload(&mut self) {}

    fn dma_read(&mut self, from: Seg) -> Option<Seg> {
        Some(from)
    }
}

impl OneRmaEnv for World {
    fn send(
        &mut self,
        path: &CardPath,
        _: Class,
        head: &[u8],
        Seg { addr, len }: Seg,
        seal: impl FnOnce(&mut [u8]),
    ) -> bool {
        let packet = self.port.packet(path, head.len() + len as usize + TAG_LEN);
        let (start, rest) = packet.split_at_mut(head.len());
        start.copy_from_slice(head);
        if len > 0 {
            // SAFETY: an open region has these bytes, see World; the packet has room for them, and is the
            // port's.
            unsafe { copy_short(rest.as_mut_ptr(), addr as *const u8, len as usize) };
        }
        seal(packet);
        true
    }

    /* the process looks at its completions in each turn */
    fn completed(&mut self, _: PortalId) {}
}
