//! What both halves need from their host beside [`Env`]: StaR frames, and on SL events for the host.

use starverbs_core::env::Env;
use starverbs_core::{Av, FrameMeta, Mtu, Psn, Qpn, Seg};

use super::form::Upto;
use super::wire::{Queue, StarHead};

/// The QPs of a role message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpPair {
    /// QPN of its sender
    pub from: Qpn,
    /// QPN of its receiver
    pub to: Qpn,
}

/// Where a StaR packet goes.
#[derive(Clone, Copy, Debug)]
pub struct StarDest<'a> {
    /// Address of the receiving card
    pub av: &'a Av,
    /// UDP port of the half that is to have it
    pub port: u16,
}

/// Where a StaR packet came from.
#[derive(Clone, Copy, Debug)]
pub struct StarSource<'a> {
    /// Addresses of its frame
    pub meta: &'a FrameMeta,
    /// UDP port that it left
    pub port: u16,
}

/// Host of a card with StaR.
pub trait StarEnv: Env {
    /// A role message of `qps.from`, at `meta.src`, to `qps.to`, a QP of this card. False: this host has no
    /// StaR now, so that the card answers.
    fn negotiate(&mut self, meta: &FrameMeta, qps: QpPair, message: &[u8]) -> bool {
        let _ = (meta, qps, message);
        false
    }
    /// Queues one frame from the UDP port of the stateful half to `to`: `head`, `data`, then the memory of
    /// `payload` gathered. The host fills in the header's checksum and adds the CRC
    /// ([`fill_checksum`](super::wire::fill_checksum), [`Crc`](super::wire::Crc)) and the outer headers.
    /// `volatile`: as of [`send_frame`](starverbs_core::Port::send_frame). Memory of `payload` came from
    /// [`dma_read`](starverbs_core::Dma::dma_read).
    fn send_star(&mut self, to: StarDest<'_>, head: &StarHead, data: &[u8], payload: &[Seg], volatile: bool);
    /// A connection has this path MTU: no frame is longer than its longest packets, whatever is put together.
    fn note_star_mtu(&mut self, mtu: Mtu) {
        let _ = mtu;
    }
    /// Whether the StaR ports take more frames before they are flushed.
    fn can_send_star(&self) -> bool;
    /// The eight bytes at `addr`, 8-aligned, of memory that [`dma_store`](starverbs_core::Dma::dma_store)
    /// writes: what was written before them is visible to the caller then. `None`: there is no memory.
    fn star_load(&mut self, addr: u64) -> Option<[u8; 8]>;
    /// Whether memory at `addr` is of the program that has the slot memory at `slots`. A card that programs
    /// share keeps them apart by it: packets name addresses, and no keys.
    #[inline]
    fn is_of_program(&self, slots: u64, addr: u64) -> bool {
        let _ = (slots, addr);
        true
    }
    /// A stateful end of this send queue keeps so many bytes from now on; they grow as its peer sends WQEs.
    /// False: it may not have more.
    #[inline]
    fn may_keep(&self, queue: &Self::Sq, bytes: usize) -> bool {
        let _ = (queue, bytes);
        true
    }
    /// Queues an event for the SL host; all connections of a card share one queue. An event may be lost: its
    /// packet comes again, or memory shows it.
    fn star_event(&mut self, event: SlEvent);
}

/// An event of SL's card for the SL host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlEvent {
    /// SL's QPN
    pub qpn: Qpn,
    /// The connection's epoch
    pub epoch: u32,
    /// Which queue
    pub queue: Queue,
    /// What is new there
    pub what: News,
    /// How far SF has stored the WQEs of both queues, if the packet has that
    pub upto: Option<Upto>,
}

/// What is new in a queue of SL.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum News {
    /// SF has stored the WQE of this sequence
    Stored(Psn),
    /// Completions are in memory
    Completed,
}
