//! What the card's host has of StaR: its two UDP ports, and what came for the library and for who settles the roles.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use starverbs_backend::star::StarTx;
use starverbs_core::nic::negotiation::MAX_NEGOTIATION;
use starverbs_core::star::env::{SlEvent, StarEnv};
use starverbs_core::star::seal::MAX_SEALED;
use starverbs_core::star::wire::{Head, Side};
use starverbs_core::{Av, FrameMeta, Gid, Qpn, Seg};

use super::sealing::Sealing;
use crate::env::HostEnv;
use crate::memory::{self, Marked};
use crate::stat::StatPage;

/// Messages of peers that wait for the end of a turn at most; of more each is lost, and comes again.
const HEARD: usize = 1024;

/// Beside the host's own parts, where StaR is in use.
pub(crate) struct StarPort {
    pub(crate) tx: StarTx<StatPage>,
    pub(crate) sealing: Sealing,
    /// What the stateless half tells the library
    pub(crate) events: Vec<SlEvent>,
    /// By which peers settle roles, the oldest first
    pub(crate) heard: VecDeque<Heard>,
}

/// What a peer says of the roles.
pub(crate) struct Heard {
    /// Addresses of the peer, and of this card
    pub(crate) source: Gid,
    pub(crate) at: Gid,
    pub(crate) from: Qpn,
    pub(crate) to: Qpn,
    bytes: [u8; MAX_NEGOTIATION],
    len: usize,
}

impl Heard {
    pub(crate) fn message(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

impl StarPort {
    pub(crate) fn new(tx: StarTx<StatPage>, sealing: Sealing) -> Self {
        StarPort { tx, sealing, events: Vec::new(), heard: VecDeque::new() }
    }

    /// A control message, or the answer to one, leaves.
    fn send_control(&mut self, (to, port): (&Av, u16), head: &Head, data: &[u8]) {
        let mut room = [0; MAX_SEALED];
        match self.sealing.seal_packet((&to.sgid, &to.dgid), head, data, &mut room) {
            Some((head, len)) => {
                self.tx.send(to, port, &head, room.get(..len).unwrap_or_default(), &[], false);
            }
            None => self.tx.send(to, port, head, data, &[], false),
        }
    }

    /// A message came. One that is too long, or for which there is no room, is lost.
    pub(crate) fn hear(&mut self, meta: &FrameMeta, (from, to): (Qpn, Qpn), message: &[u8]) {
        let mut bytes = [0; MAX_NEGOTIATION];
        if let Some(room) = bytes.get_mut(..message.len())
            && self.heard.len() < HEARD
            && self.heard.try_reserve(1).is_ok()
        {
            room.copy_from_slice(message);
            self.heard.push_back(Heard {
                source: meta.src,
                at: meta.dst,
                from,
                to,
                bytes,
                len: message.len(),
            });
        }
    }
}

impl StarEnv for HostEnv {
    #[inline]
    fn send_star(
        &mut self,
        _: Side,
        (to, port): (&Av, u16),
        head: &Head,
        data: &[u8],
        payload: &[Seg],
        volatile: bool,
    ) {
        let volatile = self.is_volatile(volatile);
        if let Some(star) = &mut self.star {
            if head.is_control() {
                return star.send_control((to, port), head, data);
            }
            star.tx.send(to, port, head, data, payload, volatile);
        }
    }

    #[inline]
    fn can_send_star(&self) -> bool {
        self.star.as_ref().is_some_and(|star| star.tx.can_send())
    }

    #[inline]
    fn star_load(&mut self, addr: u64) -> Option<[u8; 8]> {
        if memory::marked(addr) {
            let mut bytes = [0; 8];
            let there = memory::mark(addr) == Marked::Demand && memory::read(addr, &mut bytes);
            return there.then_some(bytes);
        }
        // SAFETY: as in `dma_store`: SF's registry or this card's bounds let it through, so it is aligned memory that the library or the
        // program keeps.
        let cell = unsafe { AtomicU64::from_ptr(addr as *mut u64) };
        Some(cell.load(Ordering::Acquire).to_ne_bytes())
    }

    #[inline]
    fn star_event(&mut self, event: SlEvent) {
        /* one that there is no memory for is lost */
        if let Some(star) = &mut self.star
            && star.events.try_reserve(1).is_ok()
        {
            star.events.push(event);
        }
    }
}
